"""Every row of the table of rules, in modules, functions and methods: veiled networks stay exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from downlink.exactness import assert_exact, free_sides, pinned_by
from downlink.networks import IMAGE, SERIES, VECTOR, VOLUME, Net
from fedveil.downlink import ScaleTable, trace


def hidden_everywhere(table: ScaleTable, *, but: tuple[str, ...] = ("head.bias",)) -> None:
    visible = {name for name, sides in free_sides(table).items() if not sides}
    assert visible == set(but)
    assert table.pins == ()


# -- linear maps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_are_hidden_on_both_sides_between_the_ends(bias: bool) -> None:
    model = Net(
        lambda n, x: n.head(torch.relu(n.b(torch.relu(n.a(x))))),
        a=nn.Linear(6, 5, bias=bias),
        b=nn.Linear(5, 4, bias=bias),
        head=nn.Linear(4, 3, bias=bias),
    )
    sides = free_sides(assert_exact(model, VECTOR))
    assert (sides["a.weight"], sides["b.weight"], sides["head.weight"]) == ("out", "out in", "in")


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(6, 8, 3, padding=1),
    "without bias": lambda: nn.Conv2d(6, 8, 3, bias=False),
    "grouped": lambda: nn.Conv2d(6, 8, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(6, 6, 3, groups=6),
    "depthwise with multiplier": lambda: nn.Conv2d(6, 12, 3, groups=6),
    "strided": lambda: nn.Conv2d(6, 8, 3, stride=2),
    "dilated": lambda: nn.Conv2d(6, 8, 3, dilation=2),
    "same padding": lambda: nn.Conv2d(6, 8, 3, padding="same"),
    "circular padding": lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular"),
    "transposed": lambda: nn.ConvTranspose2d(6, 8, 3),
    "transposed, square": lambda: nn.ConvTranspose2d(6, 6, 3),
    "transposed, square, grouped": lambda: nn.ConvTranspose2d(6, 6, 3, groups=2),
    "transposed, strided": lambda: nn.ConvTranspose2d(6, 8, 3, stride=2, output_padding=1),
    "transposed, grouped": lambda: nn.ConvTranspose2d(6, 8, 3, groups=2),
    "transposed, depthwise": lambda: nn.ConvTranspose2d(6, 6, 2, groups=6),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_scale_group_by_group(kind: str) -> None:
    middle = CONVOLUTIONS[kind]()
    model = nn.Sequential()
    model.add_module("first", nn.Conv2d(3, 6, 3))
    model.add_module("relu", nn.ReLU())
    model.add_module("middle", middle)
    model.add_module("relu2", nn.ReLU())
    model.add_module("pool", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(middle.out_channels, 3))  # type: ignore[arg-type]
    table = assert_exact(model, IMAGE)
    assert free_sides(table)["middle.weight"] == "out in"
    hidden_everywhere(table)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 3])
def test_convolutions_of_one_and_three_dimensions(dims: int, transposed: bool) -> None:
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    example = SERIES if dims == 1 else VOLUME
    model = nn.Sequential(kind(example.shape[1], 4, 3, groups=1), nn.ReLU(), kind(4, 6, 2, groups=2), nn.Flatten())
    with torch.no_grad():
        features = model(example).shape[1]
    model.add_module("head", nn.Linear(features, 3))
    hidden_everywhere(assert_exact(model, example))


def test_functional_convolutions_and_linear_maps_follow_the_same_rule() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, n.a.weight, n.a.bias, stride=2, groups=1))
        x = F.relu(F.conv_transpose2d(x, n.b.weight, n.b.bias, 1, 0, 0, 2))
        x = F.conv2d(x, n.c.weight, groups=2, bias=n.c.bias).mean(dim=(2, 3))
        return F.linear(x, weight=n.head.weight, bias=n.head.bias)

    model = Net(
        run,
        a=nn.Conv2d(3, 4, 3),
        b=nn.ConvTranspose2d(4, 6, 2, groups=2),
        c=nn.Conv2d(6, 4, 2, groups=2),
        head=nn.Linear(4, 3),
    )
    hidden_everywhere(assert_exact(model, IMAGE))


def test_a_linear_layer_over_sequences_scales_its_features() -> None:
    model = Net(
        lambda n, x: n.head(F.relu(n.b(F.relu(n.a(x)))).mean(1)),
        a=nn.Linear(12, 5),
        b=nn.Linear(5, 4),
        head=nn.Linear(4, 3),
    )
    hidden_everywhere(assert_exact(model, SERIES))


def test_embeddings_scale_their_features() -> None:
    tokens = torch.tensor([[0, 1, 2, 9], [3, 4, 0, 0]])
    model = Net(
        lambda n, x: n.head(F.relu(n.mix(n.table(x))).sum(1)),
        table=nn.Embedding(10, 5, padding_idx=0),
        mix=nn.Linear(5, 4),
        head=nn.Linear(4, 3),
    )
    hidden_everywhere(assert_exact(model, tokens))


def test_functional_embeddings_scale_unless_they_renormalise() -> None:
    tokens = torch.tensor([[0, 1, 2, 9], [3, 4, 0, 0]])
    for renormalise in (False, True):
        model = Net(
            lambda n, x, r=renormalise: n.head(F.embedding(x, n.table.weight, 0, 1.0 if r else None).mean(1)),  # type: ignore[misc]
            table=nn.Embedding(10, 5),
            head=nn.Linear(5, 3),
        )
        if not renormalise:
            hidden_everywhere(assert_exact(model, tokens))
        else:
            assert "embedding" in pinned_by(trace(model, tokens))


# -- functions that commute with positive scales ------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "nn.ReLU": nn.ReLU(),
    "nn.ReLU in place": nn.ReLU(inplace=True),
    "nn.LeakyReLU": nn.LeakyReLU(0.2),
    "nn.Identity": nn.Identity(),
    "nn.Dropout": nn.Dropout(0.4),
    "nn.Dropout2d": nn.Dropout2d(0.4),
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "F.relu_": F.relu_,
    "torch.relu": torch.relu,
    "relu()": lambda x: x.relu(),
    "relu_()": lambda x: x.relu_(),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "F.dropout": lambda x: F.dropout(x, 0.3, training=True),
    "clamp(min=0)": lambda x: x.clamp(min=0),
    "clamp_min": lambda x: torch.clamp_min(x, 0.0),
    "abs": torch.abs,
    "minus": lambda x: -x,
    "times a number": lambda x: 2.5 * x,
    "times a number in place": lambda x: x.mul_(-1.5),
    "by a number": lambda x: x / 3,
    "times a size": lambda x: x * x.shape[1],
    "maximum of two": lambda x: torch.maximum(x, 0.5 * x),
    "clone, contiguous, detach-free": lambda x: x.clone().contiguous(),
    "to its own type": lambda x: x.to(x.dtype),
    "minus its batch mean": lambda x: x - x.mean(0),
    "plus zero": lambda x: x + 0,
    "times ones like it": lambda x: x * torch.ones_like(x),
    "python sum": lambda x: sum([x, x]),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_homogeneous_functions_pass_scales_through(name: str) -> None:
    activation = ACTIVATIONS[name]
    layers = {"a": nn.Conv2d(3, 5, 3), "b": nn.Conv2d(5, 4, 3), "head": nn.Linear(4, 3)}
    if isinstance(activation, nn.Module):
        layers["activation"] = activation
    model = Net(
        lambda n, x: n.head(n.b((n.activation if hasattr(n, "activation") else activation)(n.a(x))).mean((2, 3))),
        **layers,
    )
    hidden_everywhere(assert_exact(model, IMAGE))


@pytest.mark.parametrize("slopes", [1, 5])
def test_prelu_passes_scales_and_shows_only_its_slopes(slopes: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.PReLU(slopes), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    table = assert_exact(model, IMAGE)
    assert {name for name, sides in free_sides(table).items() if not sides} == {"1.weight", "4.bias"}


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "nn.MaxPool2d": nn.MaxPool2d(2, padding=1),
    "nn.AvgPool2d": nn.AvgPool2d(2, count_include_pad=False),
    "nn.AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d(2),
    "nn.AdaptiveMaxPool2d": nn.AdaptiveMaxPool2d(2),
    "nn.Upsample": nn.Upsample(scale_factor=2, mode="bilinear"),
    "nn.UpsamplingNearest2d": nn.UpsamplingNearest2d(scale_factor=2),
    "F.max_pool2d": lambda x: F.max_pool2d(x, 2),
    "F.avg_pool2d": lambda x: F.avg_pool2d(x, kernel_size=2),
    "F.adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "F.adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 1),
    "F.interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "F.interpolate bicubic": lambda x: F.interpolate(x, size=(5, 5), mode="bicubic"),
    "mean over space": lambda x: x.mean((2, 3), keepdim=True),
    "mean with axis": lambda x: x.mean(axis=(-1, -2)),  # type: ignore[call-overload]
    "torch.mean": lambda x: torch.mean(x, dim=[2, 3]),
    "sum": lambda x: x.sum(-1).sum(-1),
    "amax": lambda x: x.amax((2, 3)),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling_and_resampling_pass_scales_through(name: str) -> None:
    pool = POOLS[name]
    with torch.no_grad():
        features = pool(torch.zeros(2, 4, 6, 6)).flatten(1).shape[1]
    layers = {"a": nn.Conv2d(3, 4, 3), "head": nn.Linear(features, 3)}
    if isinstance(pool, nn.Module):
        layers["pool"] = pool
    model = Net(lambda n, x: n.head((n.pool if hasattr(n, "pool") else pool)(n.a(x)).flatten(1)), **layers)
    hidden_everywhere(assert_exact(model, IMAGE))


@pytest.mark.parametrize(
    "pool", [nn.MaxPool1d(2), nn.AvgPool1d(3), nn.AdaptiveAvgPool1d(4), nn.Upsample(scale_factor=2)]
)
def test_pooling_a_series(pool: nn.Module) -> None:
    with torch.no_grad():
        features = pool(torch.zeros(2, 4, 10)).flatten(1).shape[1]
    model = nn.Sequential(nn.Conv1d(3, 4, 3), pool, nn.Flatten(), nn.Linear(features, 3))
    hidden_everywhere(assert_exact(model, SERIES), but=("3.bias",))


@pytest.mark.parametrize("pool", [nn.MaxPool3d(2), nn.AvgPool3d(2), nn.AdaptiveMaxPool3d(1)])
def test_pooling_a_volume(pool: nn.Module) -> None:
    with torch.no_grad():
        features = pool(torch.zeros(2, 4, 3, 3, 3)).flatten(1).shape[1]
    model = nn.Sequential(nn.Conv3d(2, 4, 2), pool, nn.Flatten(), nn.Linear(features, 3))
    hidden_everywhere(assert_exact(model, VOLUME), but=("3.bias",))


def test_pooling_across_features_unites_them() -> None:
    # nn.MaxPool1d takes (batch, features) for (channels, length) and pools neighbouring features.
    model = nn.Sequential(nn.Linear(6, 8), nn.MaxPool1d(2), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    table = assert_exact(model, VECTOR)
    assert len(next(one for one in table.parameters if one.name == "0.weight").out.unique()) == 1  # type: ignore[union-attr]


def test_a_mean_over_channels_unites_them() -> None:
    model = Net(lambda n, x: n.head(n.a(x).mean(1).flatten(1)), a=nn.Conv2d(3, 4, 3), head=nn.Linear(36, 3))
    table = assert_exact(model, IMAGE)
    assert table.free() == 1


# -- rearrangements -----------------------------------------------------------------------------------------


def shuffle(x: Tensor) -> Tensor:
    batch, channels, height, width = x.size()
    return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous().view(batch, -1, height, width)


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=1)
    return torch.cat([second, F.relu(first)], 1)


def uneven(x: Tensor) -> Tensor:
    parts = torch.split(x, [2, 3, 3], dim=1)
    return torch.cat((parts[2], parts[0], parts[1]), dim=1)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "channel shuffle by views": shuffle,
    "nn.ChannelShuffle": nn.ChannelShuffle(4),
    "F.channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "nn.PixelShuffle": nn.PixelShuffle(2),
    "nn.PixelUnshuffle": nn.PixelUnshuffle(2),
    "F.pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "chunk and cat": halves,
    "split and cat": uneven,
    "slices": lambda x: torch.cat([x[:, 4:], x[:, :4]], 1),
    "every second channel": lambda x: x[:, ::2],
    "every second pixel": lambda x: x[:, :, ::2, ::2],
    "flip": lambda x: x.flip(1),
    "roll": lambda x: torch.roll(x, 3, 1),
    "unbind and stack": lambda x: torch.stack(list(x.unbind(1))[::-1], 1),
    "permute twice": lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2),
    "list index": lambda x: x[:, [2, 0, 1, 5, 5]],
    "expand": lambda x: x[:, :1].expand(-1, 6, -1, -1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "squeeze and unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "channels into the batch and back": lambda x: F.max_pool2d(x.reshape(-1, 1, 6, 6), 2).reshape(x.shape[0], 8, 3, 3),
    "nn.Unflatten": nn.Unflatten(1, (2, 4)),
}


@pytest.mark.parametrize("name", MOVES)
def test_rearrangements_move_the_classes_with_the_channels(name: str) -> None:
    move = MOVES[name]
    with torch.no_grad():
        features = move(torch.zeros(2, 8, 6, 6)).flatten(1).shape[1]
    layers = {"a": nn.Conv2d(3, 8, 3), "head": nn.Linear(features, 3)}
    if isinstance(move, nn.Module):
        layers["move"] = move
    model = Net(lambda n, x: n.head(F.relu((n.move if hasattr(n, "move") else move)(n.a(x))).flatten(1)), **layers)
    hidden_everywhere(assert_exact(model, IMAGE))


FLATTENINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "nn.Flatten": nn.Flatten(),
    "torch.flatten": lambda x: torch.flatten(x, 1),
    "flatten()": lambda x: x.flatten(start_dim=1),
    "view(x.size(0), -1)": lambda x: x.view(x.size(0), -1),
    "view(x.shape[0], -1)": lambda x: x.view(x.shape[0], -1),
    "view(-1, 144)": lambda x: x.view(-1, 144),
    "reshape": lambda x: torch.reshape(x, (-1, 144)),
    "transposed first": lambda x: x.transpose(1, 3).reshape(x.size(0), -1),
}


@pytest.mark.parametrize("name", FLATTENINGS)
def test_flattening_repeats_a_channels_class_over_its_pixels(name: str) -> None:
    flatten = FLATTENINGS[name]
    layers = {"a": nn.Conv2d(3, 4, 3), "head": nn.Linear(144, 3)}
    if isinstance(flatten, nn.Module):
        layers["flatten"] = flatten
    model = Net(lambda n, x: n.head((n.flatten if hasattr(n, "flatten") else flatten)(n.a(x))), **layers)
    table = assert_exact(model, IMAGE)
    hidden_everywhere(table)
    assert table.free() == 4


class Permuted(nn.Module):
    """Channels picked through an index tensor: a buffer, or computed from the input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.how == "buffer":
            h = h[:, self.order]
        elif self.how == "index_select":
            h = torch.index_select(h, 1, self.order)  # type: ignore[arg-type]
        elif self.how == "from the input":
            h = h[:, x.mean(0)[:4].argsort()]
        else:
            h = h.index_select(1, x.mean(0)[:4].argsort())
        return self.head(F.relu(h))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["buffer", "index_select"])
def test_an_index_kept_by_the_model_permutes_the_classes(how: str) -> None:
    table = assert_exact(Permuted(how), VECTOR)
    hidden_everywhere(table)
    assert table.free() == 4


@pytest.mark.parametrize("how", ["from the input", "selected from the input"])
def test_an_index_that_may_differ_next_time_unites_the_channels(how: str) -> None:
    table = assert_exact(Permuted(how), VECTOR)
    hidden_everywhere(table)
    assert table.free() == 1


# -- sums, concatenations, padding -----------------------------------------------------------------------------


def plus_assign(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": lambda x, y: x + y,
    "+=": plus_assign,
    "-": lambda x, y: x - y,
    "torch.add": torch.add,
    "add with alpha": lambda x, y: torch.add(x, y, alpha=0.5),
    "add()": lambda x, y: x.add(y),
    "add_": lambda x, y: x.add_(y),
    "sub_": lambda x, y: x.sub_(y, alpha=2),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "stack and sum": lambda x, y: torch.stack([x, y]).sum(0),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_unites_its_two_edges(name: str) -> None:
    add = SUMS[name]
    model = Net(
        lambda n, x: n.head(F.relu(add(n.a(x), n.b(x)))), a=nn.Linear(6, 4), b=nn.Linear(6, 4), head=nn.Linear(4, 3)
    )
    table = assert_exact(model, VECTOR)
    hidden_everywhere(table)
    out = {one.name: one.out for one in table.parameters}
    assert torch.equal(out["a.weight"], out["b.weight"])  # type: ignore[arg-type]
    assert table.free() == 4


def test_a_residual_block_shares_scales_along_its_skip() -> None:
    model = Net(
        lambda n, x: n.head(F.relu(n.c(F.relu(n.b(n.a(x)))) + n.a(x))),
        a=nn.Linear(6, 4),
        b=nn.Linear(4, 5),
        c=nn.Linear(5, 4),
        head=nn.Linear(4, 3),
    )
    table = assert_exact(model, VECTOR)
    hidden_everywhere(table)
    assert table.free() == 4 + 5


def test_a_sum_with_the_input_pins_and_says_so() -> None:
    model = Net(lambda n, x: n.head(F.relu(n.a(x) + x)), a=nn.Linear(6, 6), head=nn.Linear(6, 3))
    table = assert_exact(model, VECTOR)
    assert pinned_by(table) == {"add"}
    assert free_sides(table)["a.weight"] == ""


def test_concatenation_lines_up_the_classes() -> None:
    model = Net(
        lambda n, x: n.head(torch.cat([F.relu(n.a(x)), x, n.b(x)], dim=-1)),
        a=nn.Linear(6, 4),
        b=nn.Linear(6, 5),
        head=nn.Linear(15, 3),
    )
    table = assert_exact(model, VECTOR)
    assert table.free() == 9
    assert table.pins == ()


def test_zero_padding_of_channels_gives_fresh_classes_to_the_new_ones() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        x = n.a(x)
        return n.head((n.b(F.relu(x)) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2))).mean((2, 3)))

    model = Net(run, a=nn.Conv2d(3, 4, 3, padding=1), b=nn.Conv2d(4, 7, 3, stride=2, padding=1), head=nn.Linear(7, 3))
    table = assert_exact(model, IMAGE)
    hidden_everywhere(table)
    assert table.free() == 7


@pytest.mark.parametrize(
    "pad",
    [nn.ZeroPad2d(1), nn.ReflectionPad2d(1), nn.ReplicationPad2d(2), nn.CircularPad2d(1)],
)
def test_padding_of_space_keeps_each_channels_class(pad: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), pad, nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    with torch.no_grad():
        model(IMAGE)
    hidden_everywhere(assert_exact(model, IMAGE), but=("5.bias",))


# -- gates ------------------------------------------------------------------------------------------------------


def test_a_product_of_two_hidden_edges_multiplies_their_scales() -> None:
    model = Net(
        lambda n, x: n.head(n.c(n.a(x) * F.relu(n.b(x)))),
        a=nn.Linear(6, 4),
        b=nn.Linear(6, 4),
        c=nn.Linear(4, 5),
        head=nn.Linear(5, 3),
    )
    table = assert_exact(model, VECTOR)
    hidden_everywhere(table)
    assert len(table.classes.products) == 4


def test_products_of_products_and_squares_stay_exact() -> None:
    model = Net(
        lambda n, x: n.head((n.a(x) * n.b(x)) * torch.mul(n.a(x), n.a(x))),
        a=nn.Linear(6, 4),
        b=nn.Linear(6, 4),
        head=nn.Linear(4, 3),
    )
    hidden_everywhere(assert_exact(model, VECTOR))


def test_a_product_that_enters_a_sum_pins_its_factors_and_says_so() -> None:
    model = Net(
        lambda n, x: n.head(n.a(x) * n.b(x) + n.c(x)),
        a=nn.Linear(6, 4),
        b=nn.Linear(6, 4),
        c=nn.Linear(6, 4),
        head=nn.Linear(4, 3),
    )
    table = assert_exact(model, VECTOR)
    assert table.free() == 0
    assert pinned_by(table) == {"add"}


def test_a_product_with_one_visible_factor_is_as_free_as_the_other() -> None:
    model = Net(
        lambda n, x: n.head(n.a(x) * x[:, :1] + n.b(x)), a=nn.Linear(6, 4), b=nn.Linear(6, 4), head=nn.Linear(4, 3)
    )
    table = assert_exact(model, VECTOR)
    hidden_everywhere(table)
    assert table.free() == 4


def test_a_gate_in_place_pins() -> None:
    model = Net(lambda n, x: n.head(n.a(x).mul_(n.b(x))), a=nn.Linear(6, 4), b=nn.Linear(6, 4), head=nn.Linear(4, 3))
    table = assert_exact(model, VECTOR)
    assert pinned_by(table) == {"mul"}


def test_an_alias_that_an_assignment_changes_is_followed() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        h = n.a(x)
        alias = h
        h *= n.b(x)  # fx records a new tensor, torch changes `alias` too
        return n.head(F.relu(n.c(alias)))  # type: ignore[no-any-return]

    model = Net(run, a=nn.Linear(6, 4), b=nn.Linear(6, 4), c=nn.Linear(4, 5), head=nn.Linear(5, 3))
    assert_exact(model, VECTOR)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.b(F.relu(self.a(x))))
        gate = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        return self.head((x * gate[:, :, None, None]).mean((2, 3)))  # type: ignore[no-any-return]


def test_a_squeeze_and_excite_block_pins_only_before_its_sigmoid() -> None:
    table = assert_exact(SqueezeExcite(), IMAGE)
    assert pinned_by(table) == {"sigmoid"}
    sides = free_sides(table)
    assert sides["up.weight"] == "in"
    assert sides["b.weight"] == "out in"
    assert sides["head.weight"] == "in"


def test_a_learned_factor_stays_visible_and_the_edge_passes() -> None:
    class LayerScale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
            self.factor = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.factor * F.relu(self.a(x)))  # type: ignore[no-any-return]

    sides = free_sides(assert_exact(LayerScale(), VECTOR))
    assert sides == {"factor": "", "a.weight": "out", "a.bias": "out", "head.weight": "in", "head.bias": ""}


# -- parameters used more than once ---------------------------------------------------------------------------------


def test_a_linear_layer_called_twice_unites_what_its_calls_read_and_write() -> None:
    model = Net(
        lambda n, x: n.head(F.relu(n.twice(F.relu(n.twice(F.relu(n.a(x))))))),
        a=nn.Linear(6, 4),
        twice=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )
    table = assert_exact(model, VECTOR)
    hidden_everywhere(table)
    assert table.free() == 4


def test_a_linear_layer_fed_with_the_input_and_with_itself_pins_and_says_so() -> None:
    model = Net(lambda n, x: n.head(F.relu(n.twice(F.relu(n.twice(x))))), twice=nn.Linear(6, 6), head=nn.Linear(6, 3))
    table = assert_exact(model, VECTOR)
    assert table.free() == 0
    assert pinned_by(table) == {"Linear"}


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_called_twice_unites_what_its_calls_read(training: bool) -> None:
    model = Net(
        lambda n, x: n.head(F.relu(n.norm(n.b(F.relu(n.norm(n.a(x))))))),
        a=nn.Linear(6, 4),
        b=nn.Linear(4, 4),
        norm=nn.BatchNorm1d(4),
        head=nn.Linear(4, 3),
    ).train(training)
    table = assert_exact(model, VECTOR)
    hidden_everywhere(table)
    assert table.free() == 8


def test_a_shared_module_under_two_names_is_one_module() -> None:
    shared = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = Net(
        lambda n, x: n.head(F.relu(n.second(F.relu(n.first(F.relu(n.a(x))))))),
        a=nn.Linear(6, 4),
        first=shared,
        second=shared,
        head=nn.Linear(4, 3),
    )
    hidden_everywhere(assert_exact(model, VECTOR))


@pytest.mark.parametrize("groups", [0, 2])
def test_two_layers_with_one_weight_are_united(groups: int) -> None:
    model = Net(
        lambda n, x: n.head(F.relu(n.c(F.relu(n.b(F.relu(n.a(x))))))),
        a=nn.Linear(6, 4),
        b=nn.Linear(4, 4),
        c=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )
    model.c.weight = model.b.weight  # type: ignore[union-attr,assignment]
    table = assert_exact(model, VECTOR, groups=groups)
    hidden_everywhere(table)
    assert [one.name for one in table.parameters].count("b.weight") == 1


def test_a_transposed_tied_weight_is_pinned() -> None:
    model = Net(
        lambda n, x: n.head(F.linear(F.relu(n.b(F.relu(n.a(x)))), n.b.weight.t())),
        a=nn.Linear(6, 4),
        b=nn.Linear(4, 5),
        head=nn.Linear(4, 3),
    )
    table = assert_exact(model, VECTOR)
    assert "t" in pinned_by(table)
    assert free_sides(table)["b.weight"] == ""


def test_one_kernel_with_different_groups_is_pinned() -> None:
    model = Net(
        lambda n, x: n.head((F.conv2d(n.a(x), n.b.weight) + F.conv2d(n.c(x), n.b.weight, groups=2)).mean((2, 3))),
        a=nn.Conv2d(3, 4, 1),
        b=nn.Conv2d(4, 6, 1, bias=False),
        c=nn.Conv2d(3, 8, 1),
        head=nn.Linear(6, 3),
    )
    table = assert_exact(model, IMAGE)
    assert "shared parameter" in pinned_by(table)


def test_an_embedding_tied_to_the_head_is_pinned() -> None:
    model = Net(
        lambda n, x: n.head(F.relu(n.a(n.table(x).mean(1)))),
        table=nn.Embedding(7, 5),
        a=nn.Linear(5, 5),
        head=nn.Linear(5, 7, bias=False),
    )
    model.head.weight = model.table.weight  # type: ignore[union-attr,assignment]
    table = assert_exact(model, torch.tensor([[0, 1, 2], [6, 4, 5]]))
    assert "shared parameter" in pinned_by(table)


# -- normalisation --------------------------------------------------------------------------------------------------

NORMS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), True),
    "BatchNorm2d without affine": (lambda: nn.BatchNorm2d(6, affine=False), False),
    "BatchNorm2d without running statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False), True),
    "BatchNorm2d, large ε": (lambda: nn.BatchNorm2d(6, eps=0.3), True),
    "GroupNorm": (lambda: nn.GroupNorm(3, 6, eps=0.1), True),
    "GroupNorm without affine": (lambda: nn.GroupNorm(2, 6, affine=False), False),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(6, eps=0.1), False),
    "InstanceNorm2d affine": (lambda: nn.InstanceNorm2d(6, affine=True), True),
    "LayerNorm": (lambda: nn.LayerNorm((6, 6, 6), eps=0.1), True),
    "LayerNorm over rows": (lambda: nn.LayerNorm(6, bias=False), True),
    "LayerNorm without affine": (lambda: nn.LayerNorm((6, 6, 6), elementwise_affine=False), False),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_normalisations_forget_the_scale_they_read(name: str, training: bool) -> None:
    make, affine = NORMS[name]
    model = Net(
        lambda n, x: n.head(F.relu(n.norm(n.a(x))).mean((2, 3))),
        a=nn.Conv2d(3, 6, 3),
        norm=make(),
        head=nn.Linear(6, 3),
    ).train(training)
    table = assert_exact(model, IMAGE)
    sides = free_sides(table)
    assert sides["a.weight"] == "out"
    assert (sides["head.weight"] == "in") == affine
    assert table.pins == ()


def test_a_group_norm_shares_one_scale_within_each_group() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))
    table = assert_exact(model, IMAGE)
    out = next(one.out for one in table.parameters if one.name == "0.weight")
    assert out is not None
    assert len(out.unique()) == 3
    assert out.reshape(3, 2)[:, 0].tolist() == out.reshape(3, 2)[:, 1].tolist()


@pytest.mark.parametrize("dims", [1, 3])
def test_batch_norms_of_one_and_three_dimensions(dims: int) -> None:
    example = SERIES if dims == 1 else VOLUME
    conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
    model = nn.Sequential(conv(example.shape[1], 4, 2), norm(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    with torch.no_grad():
        model.eval()(example)
    hidden_everywhere(assert_exact(model.train(), example), but=("4.bias",))


def test_some_batch_norms_frozen_and_some_training() -> None:
    model = nn.Sequential(
        nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    )
    model[1].eval()
    hidden_everywhere(assert_exact(model, VECTOR), but=("5.bias",))


def test_functional_normalisations_keep_their_fixed_epsilon() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        x = F.batch_norm(n.a(x), None, None, n.bn.weight, n.bn.bias, training=True, eps=0.2)
        x = F.group_norm(n.b(F.relu(x)), 2, n.gn.weight, n.gn.bias, eps=0.1)
        x = F.layer_norm(n.c(F.relu(x)), (6, 6), weight=n.ln.weight, bias=n.ln.bias, eps=0.1)
        x = F.instance_norm(n.d(F.relu(x)), weight=n.inn.weight, bias=n.inn.bias, eps=0.1)
        return n.head(F.relu(x).mean((2, 3)))  # type: ignore[no-any-return]

    model = Net(
        run,
        a=nn.Conv2d(3, 4, 3),
        bn=nn.BatchNorm2d(4, track_running_stats=False),
        b=nn.Conv2d(4, 4, 1),
        gn=nn.GroupNorm(2, 4),
        c=nn.Conv2d(4, 4, 1),
        ln=nn.LayerNorm((6, 6)),
        d=nn.Conv2d(4, 4, 1),
        inn=nn.InstanceNorm2d(4, affine=True),
        head=nn.Linear(4, 3),
    )
    table = assert_exact(model, IMAGE)
    assert pinned_by(table) == {"batch_norm", "group_norm", "layer_norm", "instance_norm"}
    assert free_sides(table)["head.weight"] == "in"


def test_an_instance_norm_with_running_statistics_is_pinned() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    assert pinned_by(assert_exact(model, IMAGE)) == {"InstanceNorm2d"}


def test_a_subclass_of_a_norm_is_not_taken_for_the_norm() -> None:
    class Odd(nn.GroupNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + input

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Odd(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    assert_exact(model, IMAGE)


def test_a_batch_norm_that_is_never_called_does_no_harm() -> None:
    model = Net(lambda n, x: n.head(F.relu(n.a(x))), a=nn.Linear(6, 4), spare=nn.BatchNorm1d(4), head=nn.Linear(4, 3))
    hidden_everywhere(assert_exact(model, VECTOR), but=("spare.weight", "spare.bias", "head.bias"))
