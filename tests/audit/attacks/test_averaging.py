"""Averaging many rounds of one client lowers noise as 1/√T and no more, and shows whether noise is as stated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.attacks.listening import Heard, listen
from federation import job
from fedveil.audit.attacks.averaging import averaged
from fedveil.errors import DataError
from papers.leftover_noise import remaining_variance

ROUNDS = 16
VICTIM = 1
# Every bound below is five standard deviations of what it bounds: less than one false alarm in a million.
SIGMAS = 5.0


def excess(rows: Tensor, *, variances: Sequence[float]) -> float:
    """(observed scatter of the uploads about their weighted mean) / (what the ledger states); needs no truth.

    Σ_t ‖u_t − û‖²/v_t over (T − 1)·d: about 1 where noise is fresh every round and as large as stated, near 0
    where it repeats, above 1 where the model moves. Its standard deviation is √(2/((T − 1)·d)).
    """
    found = averaged(rows, variances=variances)
    stated = torch.tensor(list(variances), dtype=torch.float64, device=rows.device)
    scatter = ((rows - found.estimate).square().sum(1) / stated).sum()
    return float(scatter) / ((len(rows) - 1) * rows.shape[1])


@cache
def run(scheme: str, lr: float = 1e-9) -> Heard:
    given: dict[str, Any] = {"loss": None, "how": "size", "dtype": "float64"}
    return listen(job(scheme=scheme, rounds=ROUNDS, clients=4, lr=lr, **given))


def uploads(heard: Heard, count: int = ROUNDS) -> tuple[Tensor, list[float]]:
    rows = torch.stack([heard.gradients(round, VICTIM) for round in range(count)])
    return rows, [remaining_variance(heard.noise_layout(round), VICTIM) for round in range(count)]


def error_ratio(heard: Heard, count: int) -> tuple[float, float]:
    """(mean squared error over the variance that was foretold, five standard deviations of that ratio)."""
    rows, variances = uploads(heard, count)
    found = averaged(rows, variances=variances)
    error = (found.estimate - heard.bare_gradients(0, VICTIM)).square().mean()
    return float(error) / found.variance, SIGMAS * math.sqrt(2.0 / rows.shape[1])


@pytest.mark.parametrize("scheme", ["ldp", "nadp"])
@pytest.mark.parametrize("count", [1, 4, ROUNDS])
def test_noise_falls_as_the_ledger_says_and_no_faster(scheme: str, count: int) -> None:
    ratio, allowed = error_ratio(run(scheme), count)
    assert abs(ratio - 1.0) < allowed


@pytest.mark.parametrize("scheme", ["ldp", "nadp"])
def test_sixteen_rounds_leave_a_quarter_of_the_deviation(scheme: str) -> None:
    rows, variances = uploads(run(scheme))
    one, all_of_them = averaged(rows[:1], variances=variances[:1]), averaged(rows, variances=variances)
    assert all_of_them.deviation == pytest.approx(one.deviation / 4)


@pytest.mark.parametrize("scheme", ["ldp", "nadp"])
def test_uploads_scatter_as_the_ledger_says(scheme: str) -> None:
    rows, variances = uploads(run(scheme))
    assert abs(excess(rows, variances=variances) - 1.0) < SIGMAS * math.sqrt(2.0 / ((ROUNDS - 1) * rows.shape[1]))


def test_noise_that_repeats_is_not_averaged_away_and_shows() -> None:
    """Control: the same noise every round."""
    heard = run("ldp")
    rows, variances = uploads(heard)
    repeated = rows[:1].expand(ROUNDS, -1)
    found = averaged(repeated, variances=variances)
    error = float((found.estimate - heard.bare_gradients(0, VICTIM)).square().mean())
    assert error > 10 * found.variance
    assert excess(repeated, variances=variances) < 1e-9


def test_noise_smaller_than_stated_shows() -> None:
    """Control: with a tenth of the variance, scatter and error are a tenth of what was foretold."""
    heard = run("ldp")
    rows, variances = uploads(heard)
    truth = heard.bare_gradients(0, VICTIM)
    weaker = truth + (rows - truth) * math.sqrt(0.1)
    assert excess(weaker, variances=variances) == pytest.approx(0.1, rel=0.1)


def test_a_model_that_moves_spoils_the_average() -> None:
    """Control: the contribution changes from round to round, so the mean is of something else than the first."""
    heard = run("ldp")
    rows, variances = uploads(heard)
    drift = torch.linspace(0, 1, ROUNDS, dtype=torch.float64)[:, None] * 3.0 * math.sqrt(variances[0])
    moved = averaged(rows + drift, variances=variances)
    assert float((moved.estimate - heard.bare_gradients(0, VICTIM)).square().mean()) > 10 * moved.variance
    assert excess(rows + drift, variances=variances) > 1.5


def test_better_rounds_weigh_more() -> None:
    found = averaged(torch.tensor([[1.0], [4.0]]), variances=[1.0, 2.0])
    assert found.weights.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert found.estimate.tolist() == pytest.approx([2.0])
    assert found.variance == pytest.approx(2 / 3)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(DataError, match="one variance for each round"):
        averaged(torch.zeros(2, 3), variances=[1.0])
    with pytest.raises(DataError, match="positive"):
        averaged(torch.zeros(1, 3), variances=[0.0])
