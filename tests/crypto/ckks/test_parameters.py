"""The choice of parameters: safe, roomy, precise, and no larger than needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.crypto.ckks import MODULUS_BITS, PRECISION, ROUNDED, Parameters, choose
from fedveil.errors import ConfigError

GOOD = {"degree": 4096, "moduli": (54, 55), "scale_bits": 40, "addends": 10, "largest": 1.0}


def test_few_small_addends_get_the_smallest_ring() -> None:
    found = choose(addends=10, largest=8.0)
    assert (found.degree, found.moduli, found.scale_bits) == (4096, (54, 55), 45)


def test_larger_sums_get_larger_moduli_and_only_then_a_larger_ring() -> None:
    assert choose(addends=100, largest=1000.0).moduli == (60, 49)
    assert choose(addends=100, largest=1e5).degree == 8192


@settings(max_examples=200, deadline=None)
@given(addends=st.integers(1, 10_000), largest=st.floats(1e-9, 1e12))
def test_what_is_chosen_is_safe_roomy_and_precise_and_a_bit_more_of_scale_would_not_fit(
    addends: int, largest: float
) -> None:
    try:
        found = choose(addends=addends, largest=largest)
    except ConfigError:
        # float64 itself has no 10⁻⁶ left there, with the few bits that arithmetic costs.
        assert addends * largest * 2.0**-48 > PRECISION / 2 - 2e-7
        return
    assert sum(found.moduli) <= MODULUS_BITS[found.degree]
    room = 2.0 ** sum(found.moduli[:-1]) / 4.0
    assert addends * largest * found.scale <= room
    assert found.error <= PRECISION
    assert found.scale_bits in (60, sum(found.moduli[:-1]) - 2) or 2.0 * addends * largest * found.scale > room
    if found.grain is not None:
        assert found.grain > 2.0 * found.noise
        assert (ROUNDED / found.grain).is_integer()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moduli": (55, 55)}, "below 128-bit security: its moduli have 110 bits together, and at most 109 are safe"),
        ({"degree": 8192, "moduli": (60, 60, 60, 60)}, "below 128-bit security"),
        ({"degree": 2048}, "must be one of 4096, 8192, 16384"),
        ({"moduli": (54,)}, "two or more moduli"),
        ({"moduli": (61, 40)}, "two or more moduli of 20 to 60 bits"),
        ({"scale_bits": 30}, "Raise scale_bits"),
        ({"scale_bits": 50}, "no room for sums of 10 values"),
        ({"scale_bits": 0}, "scale_bits must leave"),
        ({"scale_bits": 60}, "scale_bits must leave"),
        ({"largest": 1e6}, "no room"),
        ({"addends": 0}, "at least one addend"),
        ({"largest": 0.0}, "positive number"),
        ({"largest": float("nan")}, "positive number"),
    ],
)
def test_given_parameters_that_are_unsafe_narrow_or_coarse_are_refused(change: dict[str, object], words: str) -> None:
    Parameters(**GOOD)
    with pytest.raises(ConfigError, match=words):
        Parameters(**{**GOOD, **change})


@pytest.mark.parametrize("degree", MODULUS_BITS)
def test_a_ring_that_is_asked_for_is_taken_and_safe(degree: int) -> None:
    found = choose(addends=10, largest=8.0, degree=degree, scale_bits=42)
    assert (found.degree, found.scale_bits) == (degree, 42)
    assert sum(found.moduli) <= MODULUS_BITS[degree]
    assert choose(addends=10, largest=8.0, degree=degree).scale_bits >= 45


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"degree": 2048}, "must be one of 4096, 8192, 16384"),
        ({"degree": 1 << 15}, "must be one of"),
        ({"degree": 4096, "scale_bits": 58}, "no room|scale_bits must leave"),
        ({"scale_bits": 20}, "Raise scale_bits"),
        ({"degree": 8192, "scale_bits": 61}, "at most 60"),
    ],
)
def test_a_ring_or_scale_that_would_fail_is_refused(asked: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose(addends=10, largest=8.0, **asked)


@pytest.mark.parametrize("wrong", [{"addends": 0, "largest": 1.0}, {"addends": 1, "largest": float("inf")}])
def test_a_sum_that_makes_no_sense_is_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"at least one addend|positive number"):
        choose(**wrong)


def test_sums_beyond_what_float64_resolves_are_refused_with_what_to_lower() -> None:
    with pytest.raises(ConfigError, match="Lower the largest value, or the number of addends"):
        choose(addends=10, largest=1e9)


@pytest.mark.parametrize(("addends", "largest"), [(1, 1.0), (10, 1.0), (10, 1e5), (10, 1e7)])
def test_the_noise_is_what_the_formula_says(addends: int, largest: float) -> None:
    """Raw noise of 6 sums: σ within 10 % (8 standard errors, as the key's transform varies), none beyond the bound."""
    pytest.importorskip("tenseal")
    from fedveil.crypto import ciphertexts
    from fedveil.crypto.ckks import generate

    parameters = choose(addends=addends, largest=largest)
    key = generate(parameters)
    drawn = np.random.default_rng(0)
    errors = []
    for _ in range(6):
        values = drawn.uniform(-largest, largest, (addends, parameters.slots))
        total = ciphertexts.encrypt(key.public.material.context, values[0])
        for more in values[1:]:
            total.add_(ciphertexts.encrypt(key.public.material.context, more))
        sealed = total.serialize()
        read = ciphertexts.decrypt(key.material.context, sealed, size=parameters.slots, level=key.public.level)
        errors.append(read - values.astype(np.longdouble).sum(0).astype(np.float64))
    arithmetic = addends * largest * 2.0**-48
    assert np.abs(errors).max() <= parameters.noise + arithmetic
    if arithmetic < parameters.deviation:
        assert np.std(errors) == pytest.approx(parameters.deviation, rel=0.1)
