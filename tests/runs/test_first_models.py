"""Secret first models: drawn from the operating system's randomness, and not from the 32 bits of a seed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil import models
from fedveil.config import RunConfig
from fedveil.downlink import draw
from fedveil.downlink.rescaling import Rescaling
from fedveil.own_code import OwnCode
from fedveil.runs.job import first_seed, job_from_config, settled
from fedveil.secrets import OsSecrets, SecretStream, SeededSecrets, drawn_from

SHAPE = (8, 8)
SEARCHED = 1 << 16
"""So many of the 2³² seeds are tried here: at a microsecond each, all of them take one core about an hour."""


def factory(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A model as users write it: PyTorch's own initialisation, from the global generator."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, outputs))


def built(seed: int | SecretStream) -> nn.Module:
    return models.build(OwnCode(f"{Path(__file__)}:factory"), input_shape=SHAPE, outputs=10, seed=seed)


def veiled(model: nn.Module) -> Tensor:
    """The first layer as a veiled broadcast shows it: every row times a secret scale."""
    architecture, weights = draw(model, torch.zeros(2, *SHAPE), traced=True)
    stream = SeededSecrets(9).stream("veil")
    sent = Rescaling().veil(architecture, weights, stream=stream, head_level=None).broadcast().parameters
    return sent[: 48 * 64].reshape(48, 64).double()


def outputs_of(state: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    """The first `count` numbers that follow from the words (624, …) of an MT19937 state, written out by hand."""
    found = []
    for k in range(count):
        y = (state[k] & np.uint32(0x80000000)) | (state[k + 1] & np.uint32(0x7FFFFFFF))
        v = state[k + 397] ^ (y >> np.uint32(1)) ^ np.where(y & np.uint32(1), np.uint32(0x9908B0DF), np.uint32(0))
        v = v ^ (v >> np.uint32(11))
        v = v ^ ((v << np.uint32(7)) & np.uint32(0x9D2C5680))
        v = v ^ ((v << np.uint32(15)) & np.uint32(0xEFC60000))
        found.append(v ^ (v >> np.uint32(18)))
    return np.stack(found, -1)


def seeded_words(seeds: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    """The first words of the states that seeds lead to."""
    state = np.empty((count, len(seeds)), np.uint32)
    state[0] = seeds
    with np.errstate(over="ignore"):
        for i in range(1, count):
            before = state[i - 1]
            state[i] = np.uint32(1812433253) * (before ^ (before >> np.uint32(30))) + np.uint32(i)
    return state


def searched(seen: Tensor) -> list[int]:
    """The low halves of seeds, of the first 2¹⁶, that explain a veiled first layer: rows are known up to a scale."""
    row = seen[0, :4].numpy()
    numbers = outputs_of(seeded_words(np.arange(SEARCHED, dtype=np.uint32), 420), 4)
    uniform = (numbers & np.uint32((1 << 24) - 1)).astype(np.float64) * 2.0**-23 - 1.0
    uniform /= np.abs(uniform).max(1, keepdims=True)
    return np.flatnonzero(np.abs(uniform - row / np.abs(row).max()).max(1) < 1e-5).tolist()


class Recorded(SecretStream):
    """A stream whose bytes a test knows."""

    def __init__(self, content: bytes) -> None:
        super().__init__(None)
        self.content = content

    def bytes(self, count: int) -> bytes:
        assert count == len(self.content)
        return self.content


WORDS = hashlib.shake_256(b"words").digest(4 * 624)


def test_a_seed_is_found_from_one_veiled_broadcast_whatever_its_upper_bits() -> None:
    """The attack itself: it must find what is there to be found."""
    seed = (0x1234567 << 32) | 41234
    (found,) = searched(veiled(built(seed)))
    assert found == 41234
    ours, theirs = built(seed), built(found)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_model_of_a_real_run_follows_from_no_seed_that_can_be_searched() -> None:
    config = settled(RunConfig(scheme="lossless", dataset="digits"))
    assert config.seed is not None
    low = config.with_changes(seed=config.seed % SEARCHED)
    assert searched(veiled(built(first_seed(low)))) == []
    simulated = RunConfig(scheme="lossless", dataset="digits", seed=low.seed)
    assert searched(veiled(built(first_seed(simulated)))) == [low.seed]


def test_the_whole_state_of_the_generator_is_the_streams() -> None:
    """Numbers that follow from the stream's 624 words by MT19937, and from the state of no seed."""
    words = np.frombuffer(WORDS, np.uint32)
    before = torch.get_rng_state()
    with drawn_from(Recorded(WORDS)):
        kept = torch.get_rng_state()[24 : 24 + 8 * 624].numpy().view(np.uint64)
        numbers = torch.rand(200).numpy()
    assert np.array_equal(kept, words)
    assert np.array_equal(numbers * 2.0**24, outputs_of(words, 200) & np.uint32((1 << 24) - 1))
    assert torch.equal(torch.get_rng_state(), before)
    # A state that a seed leads to is the recurrence from its first word; this one is not.
    assert not np.array_equal(seeded_words(words[:1], 624)[:, 0], words)


def test_every_word_of_the_stream_decides() -> None:
    made = built(Recorded(WORDS))
    for word in (1, 300, 623):
        changed = bytearray(WORDS)
        changed[4 * word] ^= 1
        other = built(Recorded(bytes(changed)))
        assert any(not torch.equal(a, b) for a, b in zip(made.parameters(), other.parameters(), strict=True))


def test_the_state_of_the_generator_is_restored_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), drawn_from(OsSecrets().stream("x")):
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


SMALL = {"dataset": "digits", "clients": 3, "rounds": 1, "model_options": {"depth": 2, "width": 16}}


@pytest.mark.parametrize("scheme", ["lossless", "fedavg", "paraaegis", "serial", "dp-fedavg"])
def test_real_runs_differ_and_simulations_do_not(scheme: str) -> None:
    real = settled(RunConfig(scheme=scheme, **SMALL))  # type: ignore[arg-type]
    first, second = (job_from_config(real).weights.parameters for _ in range(2))
    assert not torch.equal(first, second)
    simulated = RunConfig(scheme=scheme, seed=real.seed, **SMALL)  # type: ignore[arg-type]
    ours, theirs = (job_from_config(simulated).weights.parameters for _ in range(2))
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, first)
    net = models.build("mlp", input_shape=SHAPE, outputs=10, seed=real.seed, depth=2, width=16)
    assert torch.equal(torch.cat([one.detach().reshape(-1) for one in net.parameters()]), ours)
