"""Operations without a rule pin their edges, are named, and never make anything wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from downlink.exactness import assert_exact, free_sides, pinned_by
from downlink.networks import IMAGE, SERIES, VECTOR, Net
from fedveil import models
from fedveil.downlink import trace
from fedveil.downlink.scales import Pin, coverage, pinned, require_coverage
from fedveil.errors import TraceError

UNKNOWN: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "nn.Sigmoid": ("Sigmoid", nn.Sigmoid()),
    "nn.Tanh": ("Tanh", nn.Tanh()),
    "nn.GELU": ("GELU", nn.GELU()),
    "nn.Softmax": ("Softmax", nn.Softmax(-1)),
    "nn.ReLU6": ("ReLU6", nn.ReLU6()),
    "nn.Hardtanh": ("Hardtanh", nn.Hardtanh()),
    "torch.sigmoid": ("sigmoid", torch.sigmoid),
    "tanh()": ("tanh", lambda x: x.tanh()),
    "sigmoid_()": ("sigmoid", lambda x: x.sigmoid_()),
    "F.gelu": ("gelu", F.gelu),
    "F.softmax": ("softmax", lambda x: F.softmax(x, dim=-1)),
    "torch.sin": ("sin", torch.sin),
    "square": ("pow", lambda x: x**2),
    "plus one": ("add", lambda x: x + 1.0),
    "one minus": ("sub", lambda x: 1.0 - x),
    "plus one in place": ("add", lambda x: x.add_(1.0)),
    "plus a constant tensor": ("add", lambda x: x + torch.ones(4, dtype=x.dtype if isinstance(x, Tensor) else None)),
    "clamp(0, 6)": ("clamp", lambda x: x.clamp(0, 6)),
    "clamp(-1)": ("clamp", lambda x: torch.clamp(x, -1)),
    "F.relu6": ("relu6", F.relu6),
    "F.threshold": ("_threshold", lambda x: F.threshold(x, 0.1, 0.0)),
    "F.normalize": ("normalize", F.normalize),
    "by its norm": ("truediv", lambda x: x / x.abs().sum(1, keepdim=True).detach()),
    "matmul": ("matmul", lambda x: x @ torch.eye(4).to(x)),
    "cumsum": ("cumsum", lambda x: x.cumsum(1)),
    "sort": ("sort", lambda x: x.sort(1).values),
    "max over features": ("max", lambda x: torch.cat([x, x.max(1, keepdim=True)[0]], 1)[:, 1:]),
    "where": ("gt", lambda x: torch.where(x > 0, x, 0.1)),
    "masked_fill": ("lt", lambda x: x.masked_fill(x < 0, 0.5)),
    "pad with ones": ("pad", lambda x: F.pad(x, (0, 1), value=1.0)[:, 1:]),
    "a number read off": ("item", lambda x: x * x.detach().sum().item()),
    "as integers and back": ("to", lambda x: x + x.detach().to(torch.int64).to(x.dtype)),
    "alpha dropout": ("AlphaDropout", nn.AlphaDropout(0.2)),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_operation_without_a_rule_pins_and_is_named(case: str) -> None:
    name, operation = UNKNOWN[case]
    layers = {"a": nn.Linear(6, 4), "b": nn.Linear(4, 5), "head": nn.Linear(5, 3)}
    if isinstance(operation, nn.Module):
        layers["operation"] = operation
    model = Net(
        lambda n, x: n.head(F.relu(n.b((n.operation if hasattr(n, "operation") else operation)(n.a(x))))), **layers
    )
    table = assert_exact(model, VECTOR)
    assert name in pinned_by(table)
    sides = free_sides(table)
    assert (sides["a.weight"], sides["b.weight"], sides["head.weight"]) == ("", "out", "in")


def test_every_pin_says_where_it_stands_and_why() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3))
    (pin,) = assert_exact(model, VECTOR).pins
    assert (pin.operation, pin.where, pin.reason) == ("Sigmoid", "1", "there is no rule for it")


def test_a_pin_that_takes_nothing_away_is_not_listed() -> None:
    model = Net(lambda n, x: n.head(F.relu(n.a(torch.sigmoid(x)))), a=nn.Linear(6, 4), head=nn.Linear(4, 3))
    assert assert_exact(model, VECTOR).pins == ()


def between(operation: Callable[[Tensor], Tensor]) -> nn.Module:
    """A network that does something to the positive numbers between two of its layers."""
    layers = {"a": nn.Linear(6, 4), "b": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    return Net(lambda n, x: n.head(F.relu(n.b(operation(F.relu(n.a(x)))))), **layers)


BY_NUMBER: dict[str, Callable[[Tensor], Tensor]] = {
    "a product of two channels": lambda x: torch.cat([x[:, :1] * x[:, 1:2], x[:, 1:]], 1),
    "one added to all": lambda x: x + x[:, 2:3],
    "a list of channels": lambda x: x[:, [3, 1, 0, 2]] - x,
    "rolled": lambda x: x + x.roll(1, 1),
    "every second": lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1) + x,
    "halves": lambda x: torch.cat([x.chunk(2, 1)[1], x.chunk(2, 1)[0]], 1) * x,
}


@pytest.mark.parametrize("case", BY_NUMBER)
def test_channels_that_are_read_by_number_are_followed_exactly(case: str) -> None:
    assert_exact(between(BY_NUMBER[case]), VECTOR)


BY_VALUE: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "the largest channel": ("argmax", lambda x: x + x.gather(1, x.argmax(1, keepdim=True))),
    "the largest two": ("topk", lambda x: x + x.topk(2, 1).values.sum(1, keepdim=True)),
    "above a constant": ("gt", lambda x: x * (x > 0.3)),
    "where above a constant": ("gt", lambda x: torch.where(x > 0.3, x, torch.zeros_like(x))),
    "a channel overwritten": ("index_copy", lambda x: x.index_copy(1, torch.tensor([0]), x[:, 1:2])),
    "rounded": ("round", lambda x: x + x.detach().round()),
    "past autograd": ("getattr", lambda x: x * x.data),
    "a function of one's own": ("Cube", lambda x: Cube.apply(x)),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("case", BY_VALUE)
def test_what_depends_on_values_is_pinned_by_its_name_and_line(case: str) -> None:
    name, operation = BY_VALUE[case]
    pins = [pin for pin in assert_exact(between(operation), VECTOR).pins if pin.operation == name]
    assert pins
    assert f"(test_pins.py:{operation.__code__.co_firstlineno})" in pins[0].where


BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "a comparison": lambda x: 2 * x if x.mean() > 0.1 else x,
    "any above a constant": lambda x: 2 * x if bool((x > 0.1).any()) else x,
    "a number read off": lambda x: x * float(x.detach().max()),
    "by numpy": lambda x: x * torch.from_numpy(x.detach().numpy()),
}


@pytest.mark.parametrize("case", BRANCHES)
def test_code_that_branches_on_values_is_refused_with_its_line(case: str) -> None:
    branch = BRANCHES[case]
    with pytest.raises(TraceError, match=rf"at test_pins\.py:{branch.__code__.co_firstlineno}: "):
        trace(between(branch).double(), VECTOR.double())


class ByExport(nn.Module):
    """Only torch.export can follow it, which looks at operations one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.a(x)).clone()
        hidden[:, 0] = hidden[:, 1]
        hidden = F.relu(self.b(torch.tanh(hidden)))
        return self.head(hidden)  # type: ignore[no-any-return]


def test_what_export_follows_is_named_with_its_line_too() -> None:
    first = ByExport.forward.__code__.co_firstlineno
    pins = {pin.operation: pin.where for pin in assert_exact(ByExport(), VECTOR).pins}
    assert f"(test_pins.py:{first + 2})" in pins["copy"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 4)
        self.gru = nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, last = self.gru(self.a(x))
        return self.head(states[:, -1] + last[0])  # type: ignore[no-any-return]


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.b = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.head(F.relu(self.b(mixed)).mean(1))  # type: ignore[no-any-return]


def test_a_gru_is_pinned_with_all_its_parameters() -> None:
    table = assert_exact(Recurrent(), SERIES)
    assert pinned_by(table) == {"GRU"}
    assert all(not sides for name, sides in free_sides(table).items() if name.startswith("gru."))


def test_multihead_attention_is_pinned_and_the_rest_stays_hidden() -> None:
    table = assert_exact(Attentive(), SERIES)
    assert pinned_by(table) == {"MultiheadAttention"}
    assert free_sides(table)["b.weight"] == "out"


def test_a_transformer_layer_is_pinned_with_the_norms_it_owns() -> None:
    model = Net(
        lambda n, x: n.head(F.relu(n.b(n.layer(n.a(x)))).mean(1)),
        a=nn.Linear(12, 4),
        layer=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        b=nn.Linear(4, 5),
        head=nn.Linear(5, 3),
    )
    for training in (True, False):
        table = assert_exact(model.train(training), SERIES)
        assert pinned_by(table) == {"TransformerEncoderLayer"}
        assert table.norms == ()


def test_a_conversion_to_fewer_digits_is_named() -> None:
    model = Net(lambda n, x: n.head(F.relu(n.a(x)).float().double()), a=nn.Linear(6, 4), head=nn.Linear(4, 3))
    assert pinned_by(trace(model.double(), VECTOR.double())) == {"float"}


class Cube(torch.autograd.Function):
    """x³ with its own derivative."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 3 * x**2 * grad


class TimidRelu(torch.autograd.Function):
    """ReLU forward, but a backward pass that cuts gradients at a fixed size: it is not homogeneous."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad.clamp(-0.01, 0.01) * (x > 0)


@pytest.mark.parametrize("function", [Cube, TimidRelu])
def test_a_custom_autograd_function_is_opaque_and_pinned(function: type[torch.autograd.Function]) -> None:
    model = Net(
        lambda n, x: n.head(F.relu(n.b(function.apply(n.a(x))))),
        a=nn.Linear(6, 4),
        b=nn.Linear(4, 5),
        head=nn.Linear(5, 3),
    )
    table = assert_exact(model, VECTOR)
    assert pinned_by(table) == {function.__name__}
    assert free_sides(table)["b.weight"] == "out"


def test_a_custom_autograd_function_refuses_head_noise() -> None:
    # Its backward pass need not be linear, and the recovery is a linear combination of gradients.
    model = Net(lambda n, x: n.head(TimidRelu.apply(n.a(x))), a=nn.Linear(6, 4), head=nn.Linear(4, 3))
    table = assert_exact(model, VECTOR)
    assert table.head is None
    assert "TimidRelu" in table.head_refusal


def test_a_layer_with_a_forward_hook_is_pinned() -> None:
    layer = nn.Linear(6, 4)
    layer.register_forward_hook(lambda module, args, output: output + 1.0)
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    table = assert_exact(model, VECTOR)
    assert pinned_by(table) == {"Linear"}
    assert free_sides(table)["2.weight"] == "out"


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_backward_hooks_pin_everything_and_refuse_head_noise() -> None:
    class Clipping(nn.Sequential):
        pass

    model = Clipping(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].register_full_backward_hook(
        lambda module, into, out: tuple(g if g is None else g.clamp(-1, 1) for g in into)
    )
    table = assert_exact(model, VECTOR)
    assert table.free() == 0
    assert pinned_by(table) == {"Linear"}
    assert table.head is None


def test_parametrised_layers_are_pinned() -> None:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)
    )
    table = assert_exact(model, VECTOR)
    assert pinned_by(table) == {"ParametrizedLinear"}


def test_a_learned_bias_added_by_hand_pins_its_edge() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
            self.shift = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.a(x) + self.shift))  # type: ignore[no-any-return]

    assert pinned_by(assert_exact(Shifted(), VECTOR)) == {"add"}


def test_pinning_one_branch_leaves_the_other_hidden() -> None:
    model = Net(
        lambda n, x: n.head(torch.cat([n.a(x).flatten(1), torch.tanh(n.b(x)).flatten(1)], 1)),
        a=nn.Conv2d(3, 2, 3),
        b=nn.Conv2d(3, 2, 3),
        head=nn.Linear(144, 3),
    )
    sides = free_sides(assert_exact(model, IMAGE))
    assert (sides["a.weight"], sides["b.weight"]) == ("out", "")


def test_the_gru_of_the_catalogue_stays_exact() -> None:
    model = models.build("gru", input_shape=(6,), outputs=3, vocabulary=9, embedding=4, hidden=5)
    table = assert_exact(model, torch.tensor([[1, 2, 3, 8, 0, 0], [4, 5, 6, 7, 8, 0]]))
    assert {"sigmoid", "tanh"} <= pinned_by(table)
    assert free_sides(table)["embedding.weight"] == "out"


def test_one_reason_for_many_parameters_is_said_once() -> None:
    pins = [Pin("Encoder", "e", "there is no rule for it", name) for name in ("a", "b", "c")]
    assert pinned([*pins, Pin("Tanh", "f", "there is no rule for it")]) == [
        ("Encoder", "e", "there is no rule for it; 3 parameters: a, b, …"),
        ("Tanh", "f", "there is no rule for it"),
    ]


def test_the_refusal_of_a_transformer_names_its_layer_once() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(16, 2))
    covered = coverage(trace(model, torch.randn(2, 2, 8)), head_noise=False, secret_epsilon=True)
    with pytest.raises(TraceError) as refused:
        require_coverage(covered, minimum=0.9)
    assert str(refused.value).count("TransformerEncoderLayer") == 1
