"""Orders, signs, scales and matrices on heads: exact on modern networks, and no rule demands less than it must."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from downlink.exactness import assert_within, pinned_by, scramble, trial
from downlink.modern import NETWORKS, SEQUENCE, TOKENS, Decoder, Multihead, SelfAttention, Vit, mlp
from downlink.networks import IMAGE, VECTOR, Net
from fedveil.downlink import Rescaling, draw
from fedveil.downlink.architecture import load_epsilon, load_parameters, load_statistics
from fedveil.downlink.export import verified, verify
from fedveil.downlink.limits import LIMITED
from fedveil.downlink.scales import ScaleTable, coverage
from fedveil.downlink.symmetry import (
    ISOMETRY,
    POSITIVE,
    UNIT,
    Blocks,
    Symmetry,
    draw_basis,
    permutation,
    rotations,
)
from fedveil.errors import ConfigError, TraceError
from fedveil.models import build
from fedveil.secrets import SeededSecrets

FAMILIES = ("signed", "isometry", "full")
EXACT = 1e-10


def made(make: Callable[[], nn.Module], example: Tensor) -> tuple[nn.Module, Tensor]:
    """A network in float64 whose every value is off its special start."""
    torch.manual_seed(0)
    model = make().double()
    scramble(model)
    return model, example.double() if example.is_floating_point() else example


def exact(make: Callable[[], nn.Module], example: Tensor, family: str = "full", **how: object) -> ScaleTable:
    """One veiled round, its output, gradients, loss and statistics within 1e-10 of plain torch."""
    found = trial(*made(make, example), family=family, samples=4, **how)  # type: ignore[arg-type]
    assert_within(found, EXACT)
    return found.table


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_modern_network_is_exact_and_covered(name: str, family: str) -> None:
    make, example, least = NETWORKS[name]
    table = exact(make, example, family)
    assert table.symmetry is not None
    covered = coverage(table, head_noise=False)
    last = table.parameters[-1]
    visible = last.shape[0] if len(last.shape) == 1 else 0  # the last bias, which outputs determine
    total = sum(parameter.size for parameter in covered.parameters)
    assert covered.fraction >= least - visible / total
    assert sum(covered.levels.values()) == pytest.approx(covered.fraction)
    if family != "full":
        assert covered.levels["scaled"] == 0.0
    if family == "signed":
        assert covered.levels["mixed"] == covered.reals == 0.0


@pytest.mark.parametrize("loss", ["square", "cross-entropy"])
def test_head_noise_stands_beside_a_family(loss: str) -> None:
    found = trial(*made(lambda: mlp(nn.GELU), VECTOR), family="full", groups=2 if loss == "square" else 0, samples=4)
    assert_within(found, EXACT)


def test_an_index_that_is_too_long_to_keep_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back is the way there, whether its index was kept or not: T*(T(θ)) = θ under orders and signs."""
    architecture, weights = draw(*made(lambda: mlp(nn.Tanh), VECTOR), traced=True, family="signed")
    table = architecture.table
    assert table is not None
    assert table.symmetry is not None
    for kept in (1 << 22, 0):
        monkeypatch.setattr("fedveil.downlink.symmetry._KEPT", kept)
        basis = draw_basis(table.symmetry, table.classes, spread=4.0, stream=SeededSecrets(1).stream("veil"))
        hidden = table.hide(weights.parameters, basis)
        assert (basis.index is not None) is bool(kept)
        assert not torch.equal(hidden, weights.parameters)
        assert torch.equal(table.pull(hidden, basis, at=weights.parameters), weights.parameters.double())


def test_tables_and_heads_are_changed_alike_however_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by themselves or number by number, heads of all parameters in one product or one after the other."""
    model = build("transformer", outputs=3, seed=1, input_shape=(5,), vocabulary=9, width=8, depth=2, heads=2).double()
    architecture, weights = draw(model, torch.zeros(2, 5, dtype=torch.int64), traced=True, family="full")
    given, found = architecture.table, []
    assert given is not None
    for table_of, kept, tables in ((1, 1 << 22, 9), (1 << 40, 1 << 22, 0), (1, 0, 9), (1 << 40, 0, 0)):
        monkeypatch.setattr("fedveil.downlink.symmetry._TABLE", table_of)
        monkeypatch.setattr("fedveil.downlink.symmetry._KEPT", kept)
        table = dataclasses.replace(given)
        assert table.symmetry is not None
        assert (len(table._transport._tables), bool(table._transport._stacks)) == (tables, bool(kept))
        basis = draw_basis(table.symmetry, table.classes, spread=4.0, stream=SeededSecrets(1).stream("veil"))
        hidden = table.hide(weights.parameters, basis)
        found.append((hidden, table.pull(hidden.sin(), basis, at=weights.parameters)))
    assert not torch.allclose(found[0][0], weights.parameters)
    for hidden, pulled in found[1:]:
        torch.testing.assert_close(hidden, found[0][0], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(pulled, found[0][1], rtol=1e-14, atol=1e-14)


# -- one limit fewer must fail -----------------------------------------------------------------------------------


def error_under(
    model: nn.Module,
    example: Tensor,
    change: Callable[[Symmetry], Symmetry],
    seed: int = 3,
    *,
    streams: bool = False,
) -> float:
    """How far the veiled output is off when the groups are not those of the trace."""
    architecture, weights = draw(model, example, traced=True, family="full", streams=streams)
    table = architecture.table
    assert table is not None
    assert table.symmetry is not None
    wider = dataclasses.replace(architecture, table=dataclasses.replace(table, symmetry=change(table.symmetry)))
    stream = SeededSecrets(seed).stream("veil")
    veil = Rescaling(family="full").veil(wider, weights, stream=stream, head_level=None)
    sent, twin = veil.broadcast(), wider.new_skeleton()
    load_parameters(twin, sent.parameters)
    load_epsilon(wider, twin, sent.epsilon)
    if weights.statistics.numel():
        load_statistics(twin, veil.veiled_statistics())
    with torch.no_grad():
        true = model.eval()(example)
        return float((twin.eval()(example) - true).abs().max() / true.abs().max())


def unlimited(bit: int) -> Callable[[Symmetry], Symmetry]:
    """Take one limit off every class that has it (class 0 stays)."""

    def change(symmetry: Symmetry) -> Symmetry:
        return dataclasses.replace(
            symmetry, limits=torch.where(torch.arange(len(symmetry.limits)) > 0, symmetry.limits & ~bit, UNIT)
        )

    return change


_SIGN, _SCALE = POSITIVE & ~1, ISOMETRY
_LIMITS: dict[str, tuple[Callable[[], nn.Module], Tensor, tuple[int, ...]]] = {
    **{
        name: (lambda kind=kind: mlp(kind), VECTOR, needs)  # type: ignore[misc]
        for name, kind, needs in (
            ("relu", nn.ReLU, (_SIGN,)),
            ("leaky relu", nn.LeakyReLU, (_SIGN,)),
            ("tanh", nn.Tanh, (_SCALE,)),
            ("softsign", nn.Softsign, (_SCALE,)),
            ("hardtanh", nn.Hardtanh, (_SCALE,)),
            ("sigmoid", nn.Sigmoid, (_SIGN, _SCALE)),
            ("gelu", nn.GELU, (_SIGN, _SCALE)),
            ("silu", nn.SiLU, (_SIGN, _SCALE)),
            ("elu", nn.ELU, (_SIGN, _SCALE)),
            ("softplus", nn.Softplus, (_SIGN, _SCALE)),
            ("mish", nn.Mish, (_SIGN, _SCALE)),
            ("relu6", nn.ReLU6, (_SIGN,)),
            ("softmax", lambda: nn.Softmax(-1), (_SIGN, _SCALE)),
            ("prelu", lambda: nn.PReLU(), (_SIGN,)),
        )
    },
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), VECTOR, (_SIGN, _SCALE)),
    "rms norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 3)), VECTOR, (_SCALE,)),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, eps=0.1), nn.Linear(8, 3)),
        VECTOR,
        (_SCALE,),
    ),
    "max pooling": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 3)),
        IMAGE,
        (_SIGN,),
    ),
    "lstm": (NETWORKS["lstm"][0], TOKENS, (_SIGN, _SCALE)),
    "gru": (NETWORKS["gru, both ways"][0], TOKENS, (_SIGN, _SCALE)),
    "rnn": (NETWORKS["rnn"][0], TOKENS, (_SCALE,)),
    "tied head": (lambda: Decoder(tied=True), TOKENS, (_SCALE,)),
    "rotary": (lambda: Decoder(tied=False), TOKENS, (_SCALE,)),
}


@pytest.mark.parametrize("name", _LIMITS)
def test_one_limit_fewer_is_wrong(name: str) -> None:
    make, example, needs = _LIMITS[name]
    model, x = made(make, example)
    assert error_under(model, x, lambda symmetry: symmetry) < EXACT
    for bit in needs:
        assert error_under(model, x, unlimited(bit)) > 1e-6


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(256, 2)),
            IMAGE,
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(256, 2)),
            IMAGE,
        ),
    ],
)
def test_groups_keep_their_channels(make: Callable[[], nn.Module], example: Tensor) -> None:
    """Channels may not leave their group, nor one layer's channels go to another's."""
    model, x = made(make, example)
    table = exact(make, example)
    assert table.symmetry is not None
    assert max(len(order) for order in table.symmetry.orders) == 2

    def across(symmetry: Symmetry) -> Symmetry:
        pairs = [order for order in symmetry.orders if order.shape == (2, 1)]
        return dataclasses.replace(symmetry, orders=(torch.cat(pairs[:2]),))

    # Groups that change places as wholes would be right, and some draws do nothing else.
    assert max(error_under(model, x, across, seed) for seed in range(3)) > 1e-6


def test_heads_of_queries_and_keys_need_each_others_inverse() -> None:
    model, x = made(Multihead, TOKENS)

    def alike(symmetry: Symmetry) -> Symmetry:
        blocks = tuple(
            Blocks(stack.members, stack.matrix, torch.zeros_like(stack.dual), stack.isometry)
            for stack in symmetry.blocks
        )
        return dataclasses.replace(symmetry, blocks=blocks)

    assert error_under(model, x, lambda symmetry: symmetry) < EXACT
    assert error_under(model, x, alike) > 1e-6


# -- what the trace makes of particular operations ------------------------------------------------------------------


def test_heads_are_mixed_and_change_places() -> None:
    table = exact(Vit, IMAGE)
    assert table.symmetry is not None
    assert [stack.members.shape[1] for stack in table.symmetry.blocks] == [4]
    assert table.symmetry.blocks[0].count == 2 * 2 * 3  # layers, M and N, heads
    assert sorted(order.shape for order in table.symmetry.orders if order.shape[1] > 1) == [(3, 8), (3, 8)]
    assert not table.pins


def test_rotary_positions_leave_a_sign_for_each_pair_and_the_heads_order() -> None:
    table = exact(lambda: Decoder(tied=False), TOKENS, "signed")
    assert table.symmetry is not None
    key = next(entry for entry in table.parameters if entry.name == "blocks.0.attention.key.weight")
    assert key.out is not None
    classes = key.out.reshape(2, 4)
    assert torch.equal(classes[:, :2], classes[:, 2:])
    assert len(torch.unique(classes)) == 4
    assert [order.shape for order in table.symmetry.orders if order.shape[1] > 1] == [(2, 8), (2, 8)]


def test_a_mask_for_every_head_keeps_their_order() -> None:
    slopes = torch.randn(3, 6, 6, dtype=torch.float64)

    def attended(net: Net, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(-1, 6, 3, 4).transpose(1, 2) for part in (net.q, net.k, net.v))  # type: ignore[operator]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=slopes)
        return net.head(y.transpose(1, 2).flatten(2).mean(1))  # type: ignore[operator,no-any-return]

    layers = {name: nn.Linear(5, 12) for name in "qkv"}
    table = exact(lambda: Net(attended, **layers, head=nn.Linear(12, 3)), SEQUENCE)
    assert table.symmetry is not None
    assert not table.symmetry.orders
    assert len(table.symmetry.blocks) == 1


class Tokens(nn.Module):
    """Two layers over tokens. Where all before the second is pinned, its own six places are a sum that has an order."""

    def __init__(self, between: Callable[[Tensor], Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.embed, self.head, self.between = nn.Linear(5, 8), nn.Linear(8, 3), between
        self.over, self.back = nn.Linear(6, 10, bias=bias), nn.Linear(10, 6, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.over(self.embed(x).transpose(1, 2))
        return self.head(self.back(self.between(y)).transpose(1, 2).mean(1))  # type: ignore[no-any-return]


_STEPS = torch.arange(1.0, 11.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("between", "bias", "orders"),
    [
        (F.gelu, True, [8, 10]),
        (torch.tanh, False, [8, 10]),
        (lambda y: y.clamp(max=_STEPS), True, [6]),
        (lambda y: y * _STEPS, True, [8]),
        (lambda y: y.softmax(-1), True, [8]),
        (lambda y: y.flip(-1), True, [8]),
        (lambda y: torch.cumsum(y, -1), True, [6]),
        (lambda y: F.gelu(y) + y.roll(1, -1), True, [8]),
    ],
)
def test_a_layer_over_tokens_has_an_order_of_its_own(
    between: Callable[[Tensor], Tensor], bias: bool, orders: list[int]
) -> None:
    table = exact(lambda: Tokens(between, bias=bias), SEQUENCE)
    assert table.symmetry is not None
    assert sorted(len(order) for order in table.symmetry.orders) == orders


def test_channels_before_a_layer_over_tokens_with_a_bias_only_move() -> None:
    model, x = made(lambda: Tokens(lambda y: y), SEQUENCE)
    assert error_under(model, x, lambda symmetry: symmetry) < EXACT
    for bit in (_SIGN, _SCALE):
        assert error_under(model, x, unlimited(bit)) > 1e-6


def test_a_tied_head_is_an_isometry() -> None:
    table = exact(lambda: Decoder(tied=True), TOKENS)
    assert table.symmetry is not None
    embedding = next(entry for entry in table.parameters if entry.name == "embedding.weight")
    assert embedding.out is not None
    assert bool((table.symmetry.limits[embedding.out] & ISOMETRY).all())


def test_a_learned_table_on_a_public_edge_stays_as_it_is() -> None:
    """A cross layer: what multiplies its input by a vector pins, and the bias that is added then is one-dimensional."""

    def crossed(net: Net, x: Tensor) -> Tensor:
        y = net.first(x)
        return net.last(torch.relu(net.inner(y * (y @ net.vector.gain)[:, None] + net.vector.bias)))  # type: ignore[no-any-return]

    def vector() -> nn.Module:
        made = nn.Module()
        made.gain, made.bias = (nn.Parameter(torch.randn(8)) for _ in range(2))
        return made

    layers = {"first": nn.Linear(6, 8), "inner": nn.Linear(8, 7), "last": nn.Linear(7, 3)}
    table = exact(lambda: Net(crossed, **layers, vector=vector()), VECTOR, "full")
    hidden = {cover.name: cover.fraction for cover in coverage(table, head_noise=False).parameters}
    assert hidden["vector.bias"] == 0.0
    assert hidden["inner.weight"] == 1.0


def test_a_constant_that_varies_along_channels_keeps_their_order() -> None:
    steps = torch.arange(1.0, 9.0, dtype=torch.float64)
    table = exact(
        lambda: Net(
            lambda net, x: net.last(net.first(x) * steps),  # type: ignore[operator]
            first=nn.Linear(6, 8),
            last=nn.Linear(8, 3),
        ),
        VECTOR,
    )
    assert table.symmetry is not None
    assert not table.symmetry.orders
    assert int(table.symmetry.signs.sum()) == 8


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: net.last(torch.cumsum(net.first(x), -1)),
        lambda net, x: net.last(torch.sort(net.first(x), -1)[0]),
        lambda net, x: net.last(net.first(x) @ torch.ones(8, 8, dtype=torch.float64)),
    ],
)
def test_what_is_unknown_still_pins(forward: Callable[[Net, Tensor], Tensor]) -> None:
    table = exact(lambda: Net(forward, first=nn.Linear(6, 8), last=nn.Linear(8, 3)), VECTOR)
    assert coverage(table, head_noise=False).fraction == 0.0
    assert pinned_by(table)


def test_the_export_capture_sees_the_same() -> None:
    """A network that fx cannot follow is captured by torch.export, and attention keeps its rule."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.attention, self.head = nn.Embedding(11, 16), SelfAttention(16, 4), nn.Linear(16, 3)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.embedding(x)
            if y.abs().sum() < 0 if not torch.compiler.is_exporting() else False:  # fx cannot decide
                y = y + 1.0
            return self.head(F.gelu(self.norm(y + self.attention(y))).mean(1))  # type: ignore[no-any-return]

    table = exact(Branching, TOKENS)
    assert table.symmetry is not None
    assert table.symmetry.blocks
    assert coverage(table, head_noise=False).fraction > 0.99


@pytest.mark.parametrize("name", ["glu", "multihead", "lstm", "gru, both ways", "rnn"])
def test_layers_of_torch_keep_their_rules_when_exported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, example, _ = NETWORKS[name]
    by_fx = exact(make, example)

    def refused(model: nn.Module) -> None:
        raise RuntimeError("fx shall not follow it")

    monkeypatch.setattr(sys.modules["fedveil.downlink.trace"], "captured_by_fx", refused)
    exported = exact(make, example)
    assert exported.symmetry is not None
    assert by_fx.symmetry is not None
    assert exported.symmetry.freedom(exported.classes) == by_fx.symmetry.freedom(by_fx.classes)


# -- verification ---------------------------------------------------------------------------------------------------


def test_an_edge_whose_rule_is_wrong_falls_back_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITED, "sigmoid", LIMITED["relu"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))
    architecture, weights = draw(net, VECTOR, traced=True, family="full")
    with pytest.raises(TraceError):
        verify(architecture, weights, VECTOR, downlink=Rescaling(family="full"))
    kept = verified(architecture, weights, VECTOR, downlink=Rescaling(family="full"))
    assert kept.table is not None
    assert [(pin.operation, pin.where) for pin in kept.table.pins] == [("verification", "0")]
    hidden = {cover.name: cover.fraction for cover in coverage(kept.table, head_noise=False).parameters}
    assert hidden["0.weight"] == 0.0
    assert hidden["2.weight"] == hidden["4.weight"] == 1.0


def test_a_wrong_gradient_is_seen() -> None:
    """The output alone would not tell: the veil is right on the way down and wrong on the way up."""
    architecture, weights = draw(mlp(nn.Tanh), VECTOR, traced=True, family="full")
    table = architecture.table
    assert table is not None

    class Half(ScaleTable):
        def pull(self, flat: Tensor, basis: object, *, at: Tensor) -> Tensor:
            return 0.5 * super().pull(flat, basis, at=at)  # type: ignore[arg-type]

    spoilt = Half(**{part.name: getattr(table, part.name) for part in dataclasses.fields(table)})
    with pytest.raises(TraceError, match="recovered gradient"):
        verify(dataclasses.replace(architecture, table=spoilt), weights, VECTOR, downlink=Rescaling(family="full"))


# -- drawing ----------------------------------------------------------------------------------------------------


def test_orders_are_uniform() -> None:
    """χ² over the 24 orders of four: 23 degrees of freedom, false alarms once in 10⁶ seeds (here a fixed one)."""
    stream, counts = SeededSecrets(1).stream("orders"), dict[tuple[int, ...], int]()
    for _ in range(2400):
        order = tuple(permutation(4, stream).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 70.0


def test_rotations_are_orthogonal_and_lean_nowhere() -> None:
    """The mean of 4000 uniform rotations of three is 0 within 5 deviations (1/√(3·4000)); a fixed seed."""
    drawn = rotations(4000, 3, SeededSecrets(2).stream("turns"))
    unit = torch.eye(3, dtype=torch.float64)
    assert float((drawn @ drawn.transpose(1, 2) - unit).abs().max()) < 1e-12
    assert float(drawn.mean(0).abs().max()) < 5.0 / (3.0 * 4000.0) ** 0.5


def test_blocks_are_as_well_conditioned_as_told() -> None:
    table = exact(Multihead, TOKENS)
    assert table.symmetry is not None
    basis = draw_basis(table.symmetry, table.classes, spread=4.0, stream=SeededSecrets(4).stream("veil"))
    for forth, dual in basis.matrices:
        values = torch.linalg.svdvals(forth)
        assert float((values[:, 0] / values[:, -1]).max()) <= 4.0
        unit = torch.eye(forth.shape[-1], dtype=torch.float64).expand_as(forth)
        assert torch.allclose(forth.transpose(1, 2) @ dual, unit, atol=1e-12)


def test_secrets_are_not_told() -> None:
    table = exact(Multihead, TOKENS)
    assert table.symmetry is not None
    basis = draw_basis(table.symmetry, table.classes, spread=4.0, stream=SeededSecrets(4).stream("veil"))
    assert repr(basis) == "<Basis: hidden>"


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="Unknown family"):
        Rescaling(family="rotated")
