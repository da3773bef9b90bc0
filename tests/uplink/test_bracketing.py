"""A server that sets the range of what it cannot read, and watches who refuses, brackets a client's largest number."""

from __future__ import annotations

from typing import Any

import pytest

from federation import held_run, job, trained
from fedveil.errors import ConfigError
from fedveil.uplink.grid import RANGES

VICTIM = 3
HIDING: dict[str, dict[str, Any]] = {
    "veil-secagg": {"scheme": "veil-secagg", "head_groups": 1},
    "pads": {"scheme": "ckks-fedavg", "cipher": "pads", "loss": None, "local_steps": 1, "lr": 1e3},
    "ckks": {"scheme": "ckks-fedavg", "cipher": "ckks", "loss": None, "local_steps": 1, "lr": 1e3},
}


def seen(name: str, value_range: float, factor: float = 10.0) -> tuple[set[int], set[int]]:
    """What the server sees in a round of its own making: who answered, and who refused."""
    one = job(clients=5, rounds=1, value_range=value_range, **HIDING[name])
    data = one.pool.clients[VICTIM]
    assert data.rows is not None
    data.x[data.rows] *= factor
    rounds = trained(one)[1] if one.scheme.holder == "server" else held_run(one).rounds
    assert not rounds[0].failed
    return set(rounds[0].gathered.arrived), set(rounds[0].gathered.refused)


@pytest.mark.parametrize("name", HIDING)
def test_no_range_makes_a_client_refuse(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bisection had the largest number to six digits in 25 attempts; now every attempt shows the same."""
    caplog.set_level("INFO", logger="fedveil")
    low = 64.0 if name == "veil-secagg" else RANGES[0]
    high = 2.0 ** (24 if name == "veil-secagg" else 12)
    for attempt in range(6):
        value_range = low * (high / low) ** (attempt / 5)
        assert seen(name, value_range) == (set(range(5)), set())
    assert any("cut off" in one.message for one in caplog.records)  # its owner can know


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("factor", [1e12, float("nan")])
def test_numbers_that_run_away_are_not_refused_either(name: str, factor: float) -> None:
    assert seen(name, 4096.0, factor) == (set(range(5)), set())


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("value_range", [1e-3, 0.5, 2.0**41, 1e30])
def test_a_range_beyond_what_a_server_may_set_is_refused_by_everybody(name: str, value_range: float) -> None:
    with pytest.raises(ConfigError, match="value_range must lie between 1 and 2\\^40"):
        job(clients=5, rounds=1, value_range=value_range, **HIDING[name])


def test_a_range_that_would_cut_off_how_many_samples_there_are_is_refused_by_public_facts() -> None:
    one = job(clients=5, rounds=1, value_range=32.0, **HIDING["veil-secagg"])  # 60 samples each
    with pytest.raises(ConfigError, match=r"60 samples .* more than value_range = 32"):
        trained(one)
