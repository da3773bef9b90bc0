"""A server with some clients takes off what those share with the victim; the rest is what the ledger says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from audit.attacks.listening import Heard, listen
from federation import job
from fedveil.errors import ConfigError
from fedveil.ledger.correlated import charges
from fedveil.uplink.noised import add_shared, pair_purpose, pair_seed
from papers.leftover_noise import (
    remaining_variance,
    sharpest_estimate,
    sharpest_variance,
)

CLIENTS = 6
VICTIM = 2
SIGMAS = 5.0  # less than one false alarm in a million


def pair_noise(seed: bytes, *, colluder: int, victim: int, variance: float, step: float, length: int) -> Tensor:
    """The noise that a colluder put into its own upload for the victim's sake, in steps, from this round's pair seed.

    The smaller number adds, the larger subtracts; the last entry (the weight) carries none.
    """
    words = np.zeros(length, dtype=np.uint64)
    add_shared(words[:-1], seed, client=colluder, peer=victim, variance=variance, step=step)
    return torch.from_numpy(words.view(np.int64))


def without_shared(upload: Tensor, shared: Iterable[Tensor]) -> Tensor:
    """The victim's upload plus what each colluder put into its own for the victim's sake: the pair's part cancels.

    Noise and masks are int64 words, which cancel modulo 2⁶⁴; noise in floating point is float64.
    """
    words = not upload.is_floating_point()
    left = upload.clone() if words else upload.double()
    for part in shared:
        left = left + part.to(left)
    return left


@cache
def run(neighbours: int | None = None) -> Heard:
    given: dict[str, Any] = {"loss": None, "how": "size", "collusion": 0.3, "neighbours": neighbours}
    return listen(job(scheme="nadp", rounds=1, clients=CLIENTS, **given))


def shared(heard: Heard, colluder: int, victim: int) -> Tensor | None:
    """What a colluder can compute: from its own key ring and the round's public facts."""
    noise_layout, context = heard.noise_layout(0), heard.context(0)
    variance = dict(noise_layout.partners(colluder)).get(victim)
    if variance is None:
        return None
    seed, length = pair_seed(heard.states[colluder], victim, context), len(heard.uploads[0][victim])
    return pair_noise(seed, colluder=colluder, victim=victim, variance=variance, step=heard.step(0), length=length)


def stripped(heard: Heard, victim: int, colluders: tuple[int, ...]) -> Tensor:
    parts = [shared(heard, one, victim) for one in colluders]
    words = without_shared(heard.uploads[0][victim], [one for one in parts if one is not None])
    return words.double() * heard.step(0)


def variance_left(heard: Heard, found: Tensor) -> tuple[float, float]:
    """(variance of what is left on the gradient, five relative standard deviations of that figure)."""
    noise = (found - heard.bare(0, VICTIM))[:-1]
    return float(noise.square().mean()), SIGMAS * math.sqrt(2.0 / len(noise))


@pytest.mark.parametrize("neighbours", [None, 2])
@pytest.mark.parametrize("colluders", [(), (0,), (0, 5), (0, 1, 3, 5), (0, 1, 3, 4, 5)])
def test_what_remains_has_the_variance_of_the_ledger(colluders: tuple[int, ...], neighbours: int | None) -> None:
    heard = run(neighbours)
    measured, allowed = variance_left(heard, stripped(heard, VICTIM, colluders))
    assert abs(measured / remaining_variance(heard.noise_layout(0), VICTIM, colluders=colluders) - 1.0) < allowed


def test_with_everybody_else_colluding_only_the_residual_noise_is_left() -> None:
    noise_layout = run().noise_layout(0)
    others = tuple(one for one in range(CLIENTS) if one != VICTIM)
    left = remaining_variance(noise_layout, VICTIM, colluders=others)
    assert left == pytest.approx(noise_layout.residual[noise_layout.members.index(VICTIM)])
    assert left < 0.1 * remaining_variance(noise_layout, VICTIM)


@pytest.mark.parametrize("neighbours", [None, 2])
def test_the_sharpest_variance_is_what_the_ledger_charges_for(neighbours: int | None) -> None:
    noise_layout = run(neighbours).noise_layout(0)
    place = noise_layout.members.index(VICTIM)
    others = [one for one in range(CLIENTS) if one != VICTIM]
    for size in range(len(others) + 1):
        for colluders in itertools.combinations(others, size):
            mu2 = charges(noise_layout, colluding=colluders)[place]
            ours = sharpest_variance(noise_layout, VICTIM, colluders=colluders)
            assert noise_layout.sensitivity[place] ** 2 / ours == pytest.approx(mu2, rel=1e-9)


@pytest.mark.parametrize("colluders", [(), (0,), (0, 5)])
def test_who_knows_the_others_gradients_gets_as_near_as_the_ledger_says_and_no_nearer(
    colluders: tuple[int, ...],
) -> None:
    heard = run()
    noise_layout = heard.noise_layout(0)
    honest = [one for one in range(CLIENTS) if one not in colluders]
    uploads = {one: stripped(heard, one, colluders) for one in honest}
    known = {one: heard.bare(0, one) for one in honest if one != VICTIM}
    found = sharpest_estimate(uploads, known, noise_layout, VICTIM, colluders=colluders)
    measured, allowed = variance_left(heard, found)
    expected = sharpest_variance(noise_layout, VICTIM, colluders=colluders)
    assert abs(measured / expected - 1.0) < allowed
    assert expected < 0.2 * remaining_variance(noise_layout, VICTIM, colluders=colluders)


def test_seeds_of_another_round_take_nothing_off() -> None:
    """Control: subtracting noise that is not in the upload adds it."""
    heard = run()
    noise_layout, length = heard.noise_layout(0), len(heard.uploads[0][VICTIM])
    variance = dict(noise_layout.partners(0))[VICTIM]
    purpose = pair_purpose(heard.context(0).graph_seed().hex())
    seed = heard.states[0].ring().pair(VICTIM).seed(round=1, attempt=0, purpose=purpose)
    part = pair_noise(seed, colluder=0, victim=VICTIM, variance=variance, step=heard.step(0), length=length)
    found = without_shared(heard.uploads[0][VICTIM], [part]).double() * heard.step(0)
    measured, allowed = variance_left(heard, found)
    before = remaining_variance(noise_layout, VICTIM)
    assert abs(measured / (before + variance) - 1.0) < allowed


def test_pair_masks_cancel_modulo_two_to_the_sixty_fourth() -> None:
    values = torch.tensor([5, -7])
    mask = torch.from_numpy(np.array([2**64 - 3, 2**63 + 11], dtype=np.uint64).view(np.int64))
    assert without_shared(values + mask, [-mask]).tolist() == [5, -7]


def test_pairs_cancel_between_the_two_ends() -> None:
    heard = run()
    one, other = shared(heard, 0, VICTIM), shared(heard, VICTIM, 0)
    assert one is not None
    assert other is not None
    assert torch.equal(one, -other)


def test_bad_requests_are_refused() -> None:
    noise_layout = run().noise_layout(0)
    with pytest.raises(ConfigError, match="at once"):
        remaining_variance(noise_layout, VICTIM, colluders=(VICTIM,))
    with pytest.raises(ConfigError, match="not of this round"):
        sharpest_variance(noise_layout, 99)
