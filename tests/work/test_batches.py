"""Batches: without replacement within an epoch, and a function of seed, client and step alone; and schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import ConfigError
from fedveil.work import Batches, Schedule
from fedveil.work.batches import mixed_seed

PROFILE = settings(deadline=None, derandomize=True, max_examples=100)


@PROFILE
@given(size=st.integers(1, 12), samples=st.integers(1, 40), client=st.integers(0, 50), epoch=st.integers(0, 5))
def test_an_epoch_takes_every_sample_at_most_once(size: int, samples: int, client: int, epoch: int) -> None:
    batches = Batches(size, 3)
    per_epoch = max(1, samples // batches.batch_size(samples))
    steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
    taken = torch.cat([batches.indices(client=client, samples=samples, step=step) for step in steps])
    assert len(taken) == per_epoch * batches.batch_size(samples)
    assert len(taken.unique()) == len(taken)
    assert int(taken.min()) >= 0
    assert int(taken.max()) < samples


@PROFILE
@given(seed=st.integers(0, 2**40), client=st.integers(0, 10**6), step=st.integers(0, 10**6))
def test_a_batch_depends_on_seed_client_and_step_alone(seed: int, client: int, step: int) -> None:
    state = torch.get_rng_state()
    first = Batches(7, seed).indices(client=client, samples=30, step=step)
    torch.rand(3)
    second = Batches(7, seed).indices(client=client, samples=30, step=step)
    assert torch.equal(first, second)
    torch.set_rng_state(state)


def test_drawing_a_batch_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    Batches(4, 0).indices(client=0, samples=10, step=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_seeds_clients_and_epochs_give_other_orders() -> None:
    def order(seed: int, client: int, step: int) -> tuple[int, ...]:
        return tuple(Batches(20, seed).indices(client=client, samples=40, step=step).tolist())

    assert len({order(s, c, e) for s in range(3) for c in range(3) for e in (0, 2, 4)}) == 27


def test_zero_means_all_samples_and_small_clients_use_what_they_have() -> None:
    assert Batches(0, 0).indices(client=1, samples=5, step=3).tolist() == [0, 1, 2, 3, 4]
    assert Batches(8, 0).indices(client=1, samples=5, step=3).tolist() == [0, 1, 2, 3, 4]


def test_batches_are_about_uniform() -> None:
    # 2000 batches of 5 out of 20: each sample is expected 500 times with σ = √(2000·¼·¾) ≈ 19.4.
    counts = torch.zeros(20)
    for step in range(2000):
        counts[Batches(5, 1).indices(client=0, samples=20, step=step)] += 1
    assert float((counts - 500).abs().max()) < 1.0  # four batches are an epoch, so every count is exact


def test_seeds_are_mixed_well() -> None:
    seeds = [mixed_seed(a, b, c) for a in range(20) for b in range(20) for c in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mixed_seed(1, 2) != mixed_seed(2, 1)
    assert mixed_seed(-1) != mixed_seed(1)


SHAPES: dict[str, tuple[Schedule, dict[int, float]]] = {
    "constant": (Schedule(0.2, rounds=10), {0: 0.2, 9: 0.2}),
    "decay": (Schedule(0.1, decay=0.5), {0: 0.1, 3: 0.0125}),
    "cosine": (Schedule(0.2, shape="cosine", rounds=10), {0: 0.2, 5: 0.1, 10: 0.0}),
    "step": (Schedule(1.0, shape="step", rounds=8), {0: 1.0, 3: 1.0, 4: 0.1, 5: 0.1, 6: 0.01, 7: 0.01}),
    "other steps": (Schedule(1.0, shape="step", rounds=9, steps=(0.3,), drop=0.5), {2: 1.0, 3: 0.5, 8: 0.5}),
    "polynomial": (Schedule(2.0, shape="polynomial", rounds=4), {0: 2.0, 1: 1.5, 3: 0.5, 4: 0.0}),
    "square": (Schedule(2.0, shape="polynomial", rounds=4, power=2.0), {0: 2.0, 2: 0.5}),
    "warm-up": (Schedule(1.0, rounds=80, warm_up=0.05), {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 79: 1.0}),
    "warm-up of one round": (Schedule(1.0, rounds=20, warm_up=0.05), {0: 0.5, 1: 1.0}),
    "warm-up into a cosine": (Schedule(1.0, shape="cosine", rounds=8, warm_up=0.25), {0: 1 / 3, 4: 0.5}),
    "one's own": (Schedule(0.5, shape=lambda round, rounds: round / rounds, rounds=4), {0: 0.0, 3: 0.375}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_schedule_goes_as_it_says(case: str) -> None:
    schedule, expected = SHAPES[case]
    assert {round: schedule.at(round) for round in expected} == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("shape", ["cosin", True])
def test_a_shape_that_there_is_not_is_refused(shape: Any) -> None:
    with pytest.raises(ConfigError, match=f"Unknown lr_schedule '{shape}'"):
        Schedule(0.1, 1.0, shape, 10)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, "fast"])
def test_a_schedule_of_ones_own_that_gives_no_rate_is_named_with_its_round(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"lr_schedule .* round 3 of 5"):
        Schedule(0.1, shape=lambda round, rounds: wrong, rounds=5).at(2)
