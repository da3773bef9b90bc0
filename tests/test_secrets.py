"""Secrets: reproducible where seeded, uniform, and kept by the objects that hold them."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from fedveil.downlink import HeadNoise, Rescaling, draw
from fedveil.downlink.rescaling import HeadSecret, ScaledVeil
from fedveil.secrets import Guarded, OsSecrets, SecretStream, SeededSecrets

LABELS = st.lists(st.one_of(st.text(max_size=8), st.integers(-(10**9), 10**9)), max_size=4).map(tuple)
PROFILE = settings(deadline=None, derandomize=True, max_examples=150)


class Keeper(Guarded):
    """Something guarded, with a recognisable secret."""

    __slots__ = ("secret",)

    def __init__(self) -> None:
        self.secret = 4711.125


def veil() -> ScaledVeil:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    architecture, weights = draw(model, torch.randn(2, 4), traced=True)
    stream = SeededSecrets(1).stream("veil", 0)
    return Rescaling(head=HeadNoise(2)).veil(architecture, weights, stream=stream, head_level=1.0)


def guarded() -> list[Guarded]:
    made = veil()
    head = made._head
    assert isinstance(head, HeadSecret)
    return [Keeper(), made, head]


@pytest.mark.parametrize("which", range(3))
def test_printing_shows_only_the_kind(which: int, caplog: pytest.LogCaptureFixture) -> None:
    one = guarded()[which]
    expected = f"<{type(one).__name__}: hidden>"
    with caplog.at_level(logging.INFO):
        logging.getLogger("test").info("%s %r", one, one)
    assert repr(one) == str(one) == f"{one}" == f"{one!r}" == f"{one:>40}" == format(one) == expected
    assert f"{[one]}" == f"[{expected}]"
    assert caplog.messages == [f"{expected} {expected}"]
    assert not hasattr(one, "__dict__")


@pytest.mark.parametrize("which", range(3))
def test_secrets_are_not_pickled_or_copied(which: int) -> None:
    one = guarded()[which]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="holds secrets"):
            pickle.dumps(one, protocol)
        with pytest.raises(TypeError, match="holds secrets"):
            pickle.dumps({"inside": [one]}, protocol)
    for duplicate in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="holds secrets"):
            duplicate(one)
    with pytest.raises(TypeError, match="holds secrets"):
        copy.deepcopy({"inside": [one]})


def test_a_stream_does_not_print_its_key() -> None:
    stream = SecretStream(b"k" * 32)
    assert repr(stream) == str(stream) == f"{stream}" == "<SecretStream: hidden>"


@PROFILE
@given(LABELS, st.integers(0, 2**64))
def test_equal_labels_give_equal_streams(label: tuple[str | int, ...], seed: int) -> None:
    one, other = (SeededSecrets(seed).stream(*label) for _ in range(2))
    for _ in range(3):
        assert torch.equal(one.uniform(5), other.uniform(5))
        assert one.bytes(7) == other.bytes(7)


@PROFILE
@given(LABELS, LABELS, st.integers(0, 100), st.integers(0, 100))
def test_different_labels_or_seeds_give_different_streams(
    left: tuple[str | int, ...], right: tuple[str | int, ...], one: int, other: int
) -> None:
    same = one == other and left == right and [type(x) for x in left] == [type(x) for x in right]
    streams = SeededSecrets(one).stream(*left), SeededSecrets(other).stream(*right)
    assert (streams[0].bytes(32) == streams[1].bytes(32)) == same


def test_a_number_and_its_text_are_different_labels() -> None:
    secrets = SeededSecrets(0)
    assert secrets.stream("veil", 1).bytes(16) != secrets.stream("veil", "1").bytes(16)
    assert secrets.stream("a", "b").bytes(16) != secrets.stream("ab").bytes(16)


def test_reading_on_gives_new_numbers() -> None:
    stream = SeededSecrets(0).stream("x")
    assert len({stream.bytes(16) for _ in range(50)}) == 50


def test_the_operating_systems_streams_never_repeat() -> None:
    assert OsSecrets().stream("x").bytes(16) != OsSecrets().stream("x").bytes(16)
    assert not OsSecrets().simulation
    assert SeededSecrets(0).simulation


def test_uniform_numbers_are_uniform() -> None:
    # Kolmogorov–Smirnov at 1e-6: a right generator would fail for one seed in a million; the seed is fixed.
    numbers = SeededSecrets(7).stream("uniform").uniform(100_000)
    assert numbers.dtype is torch.float64
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-6
    # The low bits too: the fractions of 2²⁶·u.
    assert stats.kstest((numbers * 2.0**26).frac().numpy(), "uniform").pvalue > 1e-6


def test_all_53_bits_are_used() -> None:
    numbers = SeededSecrets(7).stream("bits").uniform(4096)
    mantissa = (numbers * 2.0**53).to(torch.int64)
    assert torch.equal(mantissa.to(torch.float64) * 2.0**-53, numbers)
    ones = torch.stack([(mantissa >> bit) & 1 for bit in range(53)]).sum(1).double()
    # Binomial(4096, ½): σ = 32; six σ at 53 bits: a false alarm in 10⁷.
    assert float((ones - 2048).abs().max()) < 6 * 32


def test_signs_are_fair() -> None:
    signs = SeededSecrets(7).stream("signs").signs(10_000)
    assert signs.unique().tolist() == [-1.0, 1.0]
    # σ of the sum is 100; five σ: a false alarm in 1.7 million.
    assert abs(float(signs.sum())) < 500


def test_nothing_asked_nothing_given() -> None:
    for source in (OsSecrets(), SeededSecrets(0)):
        assert source.stream("x").uniform(0).shape == (0,)
        assert source.stream("x").signs(0).shape == (0,)
        assert source.stream("x").bytes(0) == b""
