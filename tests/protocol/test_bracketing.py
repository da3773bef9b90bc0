"""A server that sets the range of what it cannot read, and watches who refuses, brackets a client's largest number."""

from __future__ import annotations

from typing import Any

import pytest

from federation import held_run, job, trained

ATTEMPTS = 25
VICTIM = 3
HIDING: dict[str, dict[str, Any]] = {
    "veil-secagg": {"scheme": "veil-secagg", "head_groups": 1},
    "pads": {"scheme": "ckks-fedavg", "cipher": "pads", "loss": None, "local_steps": 1, "lr": 1e3},
    "ckks": {"scheme": "ckks-fedavg", "cipher": "ckks", "loss": None, "local_steps": 1, "lr": 1e3},
}


def refuses(name: str, value_range: float) -> bool:
    """What the server sees of one client in a round of its own making."""
    one = job(clients=5, rounds=1, value_range=value_range, **HIDING[name])
    data = one.pool.clients[VICTIM]
    assert data.rows is not None
    data.x[data.rows] *= 10.0
    rounds = trained(one)[1] if one.scheme.holder == "server" else held_run(one).rounds
    return VICTIM in rounds[0].gathered.refused


@pytest.mark.parametrize("name", HIDING)
def test_25_attempts_bracket_a_clients_largest_number(name: str) -> None:
    low, high = 2.0, 2.0 ** (24 if name == "veil-secagg" else 16)
    for _ in range(ATTEMPTS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if refuses(name, middle) else (low, middle)
    assert 4.0 < low < high < 2.0**23
    assert high / low - 1 < 1e-6
