"""What a client rebuilds of another's picture from the models that both are sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from papers import Cell, Options, curious, find, lossless, reproduce
from papers.attacks import interval
from papers.cells import Figures

ENTRY, TABLE = find("lossless-fig5"), lossless._F5
SCHEMES = ("fedavg", "lossless", "lossless-bare")


def psnr(figures: Figures, way: str) -> list[float]:
    value = figures[f"{way} psnr"]
    assert isinstance(value, list)
    return value


def test_rows_that_the_own_picture_leaves_at_rest_are_the_others_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3)).double()
    own, other = torch.rand(2, 1, 3, 4, generator=generator, dtype=torch.float64)[:, None].unbind()
    model = torch.cat([value.detach().flatten() for value in net.parameters()])
    loss = sum(nn.functional.cross_entropy(net(x), torch.tensor([label])) for x, label in ((own, 0), (other, 2)))
    gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(net.parameters()))])
    assert torch.allclose(curious.read_other(net, model, -0.1 * gradient, own=own), other, atol=1e-9)
    # Of all rows the first direction is a mixture of both.
    everything = curious.read_other(net, model, -0.1 * gradient, own=torch.full_like(own, -1e9))
    assert not torch.allclose(everything, other, atol=1e-2)


@pytest.mark.slow  # two attacks by gradient descent
def test_a_client_that_aligns_rebuilds_what_a_veil_hides_from_one_that_does_not(tmp_path: Path) -> None:
    """Fixed seeds: three pairs of digits; nothing is random but what they seed."""
    only = [curious.cell_name("digits", label) for label in SCHEMES]
    report = reproduce("lossless-fig5", Options(out=tmp_path, quick=True, only=only))
    from papers.runner import open_store

    results = open_store(ENTRY, tmp_path, quick=True).results()
    plain, veiled, bare = (results[name][1] for name in only)
    assert min(psnr(plain, curious.RECEIVED)) > 100
    assert "aligned psnr" not in plain
    for one in (veiled, bare):
        assert max(psnr(one, curious.RECEIVED)) < min(psnr(one, "mean picture"))
        assert min(psnr(one, curious.ALIGNED)) > 35
    judged = {check.claim: check.held for check in report.checks if "of two clients" in check.claim}
    as_sent, aligned = ([one for how, one in judged.items() if words in how] for words in ("taken as", "aligned"))
    assert as_sent[::2] == [True, True]
    assert aligned == [False, False]
    assert (tmp_path / "lossless-fig5-quick.png").exists()


@pytest.mark.parametrize(
    ("plain", "aligned", "held"),
    [(100.0, 40.0, (True, False)), (100.0, 11.0, (True, True)), (11.0, 11.0, (False, None))],
)
def test_nothing_is_claimed_where_plain_averaging_gives_nothing_away(
    plain: float, aligned: float, held: tuple[bool | None, ...]
) -> None:
    def figures(received: float, more: dict[str, float]) -> dict[int, Figures]:
        named = {"as received": received, "mean picture": 10.0, **more}
        return {1: {f"{name} psnr": [one, one + 0.1] for name, one in named.items()}}

    results = {
        curious.cell_name("digits", "fedavg"): figures(plain, {}),
        curious.cell_name("digits", "lossless"): figures(4.0, {"aligned": aligned}),
    }
    noise = interval([3.0, 3.1])
    premise, as_sent, claim, level, *missing = curious.checks(TABLE, results, True, beside=noise)
    assert (premise.held, claim.held) == held
    assert premise.premise
    assert as_sent.held is (True if held[0] else None)
    assert level.held is True
    assert {one.held for one in missing} == {None}
    *_, high = list(curious.checks(TABLE, results, True, beside=interval([0.5, 0.6])))[:4]
    assert high.held is False
    assert [one.adaptive for one in (as_sent, claim, level)] == [False, True, False]
    assert [one.ours for one in (as_sent, claim, level, *missing)] == [False] * 3 + [True] * 3  # not the paper's scheme
    *_, unknown = list(curious.checks(TABLE, results, True, beside=None))[:4]
    assert unknown.held is None


def test_cells_take_two_clients_with_a_picture_each() -> None:
    found = [cell for cell in ENTRY.cells(False) if f"/{curious.CURIOUS}/" in cell.name]
    assert [cell.name.rsplit("/", 1)[1] for cell in found] == list(SCHEMES)
    assert {(cell.settings["clients"], cell.settings["rounds"], cell.samples) for cell in found} == {(2, 2, 10)}
    assert all(isinstance(cell, Cell) and cell.usual for cell in found)
