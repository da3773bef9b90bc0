"""Noise under masks is sized for the smallest sum that the masks can be made to open."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from federation import job
from fedveil.errors import ConfigError
from fedveil.ledger.correlated import NoiseLayout, central, charges, worst_collusion
from fedveil.runs.loop import fresh_state, train_job
from fedveil.uplink.unmasking import Quorum

NOBODY = np.empty(0, dtype=np.int64)


def summed(residual: list[float], removable: int) -> NoiseLayout:
    count = len(residual)
    return NoiseLayout(
        tuple(range(count)), np.ones(count), np.array(residual), NOBODY, NOBODY, np.empty(0), True, removable
    )


@pytest.mark.parametrize("removable", [1, 2, 4])
def test_a_client_is_charged_for_the_least_noise_any_sum_with_it_holds(removable: int) -> None:
    residual = [0.5, 3.0, 1.0, 2.0, 0.7, 0.2]
    found = charges(summed(residual, removable))
    for client in range(6):
        others = [one for one in range(6) if one != client]
        least = min(
            residual[client] + sum(residual[one] for one in kept) for kept in combinations(others, 5 - removable)
        )
        assert found[client] == pytest.approx(1 / least, rel=1e-12)
        assert found[client] >= 1 / least


def test_colluders_take_their_noise_away_on_top() -> None:
    noise_layout = summed([1.0] * 30, 10)
    assert worst_collusion(noise_layout, 5).mu2 == pytest.approx(np.full(30, 1 / 15))
    assert np.isinf(worst_collusion(noise_layout, 20).mu2).all()
    assert charges(noise_layout, colluding=range(5))[10] == pytest.approx(1 / 15)


def test_whoever_is_said_to_be_missing_is_charged_all_the_same() -> None:
    noise_layout = summed([1.0] * 6, 2)
    assert charges(noise_layout, arrived=[0, 1, 2, 3]) == pytest.approx(np.full(6, 1 / 4))
    assert central(noise_layout, arrived=[0, 1, 2, 3])[5] == 0


@pytest.mark.parametrize("clients", [5, 12, 40])
def test_a_run_under_masks_meets_its_target_for_that_sum(clients: int) -> None:
    one = job(scheme="veil-dp", cover="masks", clients=clients, rounds=3, loss=None, epsilon=2.0)
    plan = one.scheme.plan
    assert plan is not None
    holders = clients - 1 if clients <= 32 else 22
    assert clients - plan.removable(clients) == Quorum().of(holders) + 1
    privacy_journal = train_job(one, state=fresh_state(one)).privacy_journal
    line = privacy_journal.ledger().line("server and colluding clients")
    assert line.epsilon == pytest.approx(2.0, rel=1e-6)
    assert line.epsilon <= 2.0
    assert "smallest sum" in privacy_journal.ledger().line("server").why
    assert privacy_journal.first is not None
    whole = float(central(privacy_journal.first)[0])
    assert charges(privacy_journal.first)[0] > 1.2 * whole


def test_more_colluders_than_a_sum_has_clients_are_refused() -> None:
    one = job(scheme="veil-dp", cover="masks", clients=12, rounds=1, loss=None, collusion=0.8)
    with pytest.raises(ConfigError, match="Lower collusion"):
        train_job(one, state=fresh_state(one))
