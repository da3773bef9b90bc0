"""The identification game: does one upload tell which of two records was there, whatever its noise promises?

The adversary knows both candidates, every other record and the model, and sees what it would see in a run at ε = 0.1.
For each candidate it takes off what that candidate contributes and looks whether the rest could have been drawn:
noise made by Box and Muller's formula from 64-bit words has angles that are multiples of 2π/2²⁴.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedveil.engines import ClientPool, LocalEngine
from fedveil.protocol import ServerRole
from fedveil.runs.training import client_role, fresh_state
from fedveil.secrets import SeededSecrets
from integration.test_distinguishing import Table, job_of, shared_noise, worlds

GAMES = 40


def off_the_grid(noise: Tensor) -> float:
    """How far the angles of the two halves' pairs are from multiples of 2π/2²⁴: 1/4 on average, or hardly at all."""
    half = (len(noise) + 1) // 2
    angle = torch.atan2(noise[half:], noise[: len(noise) - half]) / (2 * torch.pi) * 2.0**24
    return float((angle - angle.round()).abs().mean())


def guess(noise: Tensor, shift: Tensor) -> bool:
    """Whether the other record was there: `noise` is what is left without the first one's contribution."""
    return off_the_grid(noise - shift) < off_the_grid(noise)


def uploads(scheme: str, *, repaired: bool = False, **settings: Any) -> int:
    """How many games a server wins that sees uploads; `repaired`, others have given away what client 0 shared."""
    table = Table(job_of(scheme, 1, epsilon=0.1, **settings))
    if scheme == "dp-fedavg":  # targets on which local training does not run away
        table.honest[0].y[0], table.canary.y[0] = 3.0, -3.0
    right = 0
    for number in range(GAMES):
        seen = table.play(changed=bool(number % 2))
        noise = seen.residue[0]
        if repaired:
            noise = noise - sum(shared_noise(seen, 0, k, by=k) for k in seen.residue if k)
        right += guess(noise, seen.shift) == bool(number % 2)
    return right


def models() -> int:
    """How many games a client wins that sees what a trusted server makes of everybody's sum."""
    right = 0
    for number in range(GAMES):
        one = replace(job_of("cdp", 1, epsilon=0.1, lr=1.0), secrets=SeededSecrets(number))
        honest, canary = worlds(len(one.pool))
        moved = {}
        for changed in (False, True):
            data = (canary if changed else honest[0], *honest[1:])
            for central in (one.scheme.central, None):
                server = ServerRole(
                    replace(one.scheme, central=central),
                    one.blueprint,
                    fresh_state(one),
                    secrets=one.secrets,
                    cohort=one.cohort,
                    optimiser=one.optimiser,
                    rounds=1,
                )
                LocalEngine(client_role(one), ClientPool(data)).drive(server.run(), on_round=lambda done: None)
                moved[changed, central is not None] = one.weights.parameters - server.state.weights.parameters
        truth = bool(number % 2)
        noise = moved[truth, True] - moved[False, False]
        right += guess(noise, moved[True, False] - moved[False, False]) == truth
    return right


SEEN = {
    "ldp": lambda: uploads("ldp"),
    "dp-fedavg": lambda: uploads("dp-fedavg", local_steps=2),
    "nadp": lambda: uploads("nadp", repaired=True),
    "veil-dp": lambda: uploads("veil-dp", repaired=True, cover="noise"),
    "cdp": models,
}


@pytest.mark.parametrize("scheme", SEEN)
def test_a_record_is_identified_from_what_one_round_shows(scheme: str) -> None:
    assert SEEN[scheme]() == GAMES
