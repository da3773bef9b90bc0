"""Rotations of residual streams: exact with folded gains, and only where nothing but linear layers reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedveil
from downlink.exactness import assert_within, trial
from downlink.modern import TOKENS, Decoder, Vit
from downlink.networks import IMAGE, VECTOR
from downlink.test_symmetries import EXACT, error_under, made
from fedveil.downlink import Rescaling, draw
from fedveil.downlink.export import verify
from fedveil.downlink.scales import ScaleTable, coverage, require_coverage
from fedveil.downlink.symmetry import Blocks, Symmetry, draw_basis, rotations_of_differences
from fedveil.errors import ConfigError, TraceError
from fedveil.secrets import SeededSecrets

Make = Callable[[], nn.Module]


class Stream(nn.Module):
    """Tokens, two residual layers of whatever normalisation, and a head."""

    def __init__(
        self,
        norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(8),
        *,
        bias: bool = True,
        dropout: float = 0.0,
        loud: bool = False,
    ) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.norms = nn.ModuleList(norm() for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(8, 10, bias=bias) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(10, 8) for _ in range(2))
        self.dropout, self.loud = nn.Dropout(dropout), loud

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=False):
            z = norm(y)
            y = self.dropout(y + narrow(torch.tanh(wide(z))))
            if self.loud:
                y = y + 0.1 * z
        return self.head(self.norms[2](y)[:, 0])  # type: ignore[no-any-return]


NETWORKS: dict[str, tuple[Make, Tensor, int]] = {
    "encoder": (lambda: Vit(whole=True), IMAGE, 5),
    "decoder": (lambda: Decoder(tied=False), TOKENS, 5),
    "layer norm": (Stream, TOKENS, 3),
    "layer norm without a shift": (lambda: Stream(lambda: nn.LayerNorm(8, bias=False), bias=False), TOKENS, 3),
    "rms norm": (lambda: Stream(lambda: nn.RMSNorm(8)), TOKENS, 3),
    "no gains": (lambda: Stream(lambda: nn.LayerNorm(8, elementwise_affine=False)), TOKENS, 0),
}


def rotated(table: ScaleTable) -> list[Blocks]:
    """The streams that are rotated."""
    assert table.symmetry is not None
    return [one for one in table.symmetry.blocks if one.stream]


@pytest.mark.parametrize("family", ["full", "isometry"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_stream_is_rotated_and_exact(name: str, family: str) -> None:
    make, example, folds = NETWORKS[name]
    found = trial(*made(make, example), family=family, streams=True, samples=4)
    assert_within(found, EXACT)
    assert len(found.table.folds) == folds
    covered = coverage(found.table, head_noise=False)
    hidden = sum(cover.size for cover in covered.parameters if cover.shape in ((10,), (20,), (3,)))  # biases
    assert covered.levels["mixed"] == pytest.approx(1.0 - hidden / sum(cover.size for cover in covered.parameters))
    (stream,) = rotated(found.table)
    assert stream.told in covered.groups
    assert not covered.unrotated
    ones = name not in ("decoder", "rms norm")
    free = stream.members.shape[1] - ones
    assert (stream.reals, stream.ones) == (free * (free - 1) // 2, ones)


def test_gains_that_are_not_folded_keep_their_stream_in_order() -> None:
    architecture, _ = draw(*made(Stream, TOKENS), traced=True, family="full")
    assert architecture.table is not None
    assert not architecture.table.folds
    assert not rotated(architecture.table)


@pytest.mark.parametrize(
    ("make", "folds"),
    [
        (lambda: Decoder(tied=True), 4),  # the head is the embedding
        (lambda: Stream(bias=False), 1),  # a shift has nowhere to go
        (lambda: Stream(loud=True), 1),  # the normalised tensor is read by an add
        (lambda: Stream(dropout=0.5), 3),  # units are dropped one by one
    ],
)
def test_where_something_else_reads_a_stream_it_is_not_rotated(make: Make, folds: int) -> None:
    model, x = made(make, TOKENS)
    architecture, weights = draw(model, x, traced=True, family="full", streams=True)
    assert architecture.table is not None
    assert len(architecture.table.folds) == folds
    assert not rotated(architecture.table)
    verify(architecture, weights, x, downlink=Rescaling(family="full", streams=True))
    with pytest.raises(TraceError):
        require_coverage(coverage(architecture.table, head_noise=False), minimum=0.0)


def test_a_gain_before_a_mean_over_channels_is_not_folded() -> None:
    """The second of two dimensions is that of channels."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)).mean(1)[:, None])  # type: ignore[no-any-return]

    found = trial(*made(Averaged, VECTOR), family="full", streams=True, samples=4)
    assert_within(found, EXACT)
    assert not found.table.folds


@pytest.mark.parametrize(("name", "fewer"), [("layer norm", {"ones": False}), ("rms norm", {"isometry": False})])
def test_one_limit_fewer_is_wrong(name: str, fewer: dict[str, Any]) -> None:
    model, x = made(*NETWORKS[name][:2])

    def change(symmetry: Symmetry) -> Symmetry:
        blocks = [dataclasses.replace(one, **fewer) for one in symmetry.blocks]
        return dataclasses.replace(symmetry, blocks=tuple(blocks))

    assert error_under(model, x, lambda symmetry: symmetry, streams=True) < EXACT
    assert error_under(model, x, change, streams=True) > 1e-6


def test_a_rotation_without_its_folds_is_refused() -> None:
    model, x = made(Stream, TOKENS)
    architecture, weights = draw(model, x, traced=True, family="full", streams=True)
    assert architecture.table is not None
    for folds in ((), architecture.table.folds[1:]):
        spoilt = dataclasses.replace(architecture, table=dataclasses.replace(architecture.table, folds=folds))
        with pytest.raises(TraceError):
            verify(spoilt, weights, x, downlink=Rescaling(family="full", streams=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_recovery_is_the_transposed_derivative_of_hiding(name: str) -> None:
    """⟨g, dT·v⟩ = ⟨T*·g, v⟩; T is of degree two, so that a central difference is its derivative but for rounding."""
    architecture, weights = draw(*made(*NETWORKS[name][:2]), traced=True, family="full", streams=True)
    table, at = architecture.table, weights.parameters
    assert table is not None
    assert table.symmetry is not None
    basis = draw_basis(table.symmetry, table.classes, spread=2.0, stream=SeededSecrets(1).stream("veil"))
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        g, v = torch.randn(2, len(at), generator=generator, dtype=torch.float64)
        step = (table.hide(at + v, basis) - table.hide(at - v, basis)) / 2.0
        assert float(g @ step) == pytest.approx(float(table.pull(g, basis, at=at) @ v), rel=1e-10, abs=1e-9)


def test_rotations_of_differences_leave_one_where_it_is() -> None:
    """Orthogonal, A·1 = 1, and nothing else in common: the mean of 4000 is that onto 1 within 5 deviations."""
    drawn = rotations_of_differences(4000, 4, SeededSecrets(2).stream("turns"))
    assert float((drawn @ drawn.transpose(1, 2) - torch.eye(4, dtype=torch.float64)).abs().max()) < 1e-12
    assert float((drawn.sum(2) - 1.0).abs().max()) < 1e-12
    assert float((drawn.mean(0) - 0.25).abs().max()) < 5.0 / (3.0 * 4000.0) ** 0.5


def test_a_run_with_stream_rotations_trains_the_same_model() -> None:
    generator = torch.Generator().manual_seed(4)
    clients = [
        (torch.randint(0, 11, (6, 6), generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(2)
    ]
    given: dict[str, Any] = {"rounds": 2, "seed": 3, "progress": False, "head_noise": False, "dtype": "float64"}

    def trained(**how: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return dict(fedveil.train(Stream(), clients, scheme="lossless", **given, **how).model.state_dict())

    plain, veiled = trained(family="full"), trained(family="full", stream_rotations=True)
    for name, value in plain.items():
        torch.testing.assert_close(veiled[name], value, rtol=1e-9, atol=1e-11)
    for refused in ({"family": "isometry", "local_epochs": 2}, {"family": "signed"}, {"family": "scale"}):
        with pytest.raises(ConfigError, match="rotations"):
            trained(stream_rotations=True, **refused)


def test_head_noise_stands_beside_folded_gains() -> None:
    found = trial(*made(Stream, TOKENS), family="full", streams=True, samples=4, groups=2)
    assert_within(found, EXACT)
    assert rotated(found.table)
