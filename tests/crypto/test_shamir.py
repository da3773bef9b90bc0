from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from numpy.typing import NDArray
from sympy import isprime

from fedveil.crypto import shamir
from fedveil.crypto.shamir import PRIME, SHARE_BYTES, corrected, join, split
from fedveil.errors import ProtocolError
from fedveil.secrets import OsSecrets, SeededSecrets

SECRET = bytes(range(32))


def test_the_field_is_the_smallest_prime_that_holds_32_bytes() -> None:
    assert isprime(PRIME)
    assert not any(isprime(2**256 + k) for k in range(297))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(some.data())
def test_any_threshold_many_shares_give_the_secret(data: some.DataObject) -> None:
    holders = data.draw(some.lists(some.integers(0, 10_000), min_size=1, max_size=12, unique=True))
    threshold = data.draw(some.integers(1, len(holders)))
    secret = data.draw(some.binary(min_size=32, max_size=32))
    shares = split(secret, holders=holders, threshold=threshold, stream=OsSecrets().stream())
    chosen = data.draw(some.permutations(holders))[: data.draw(some.integers(threshold, len(holders)))]
    assert join({one: shares[one] for one in chosen}, threshold=threshold) == secret


def test_one_share_too_few_is_refused_and_says_nothing() -> None:
    shares = split(SECRET, holders=range(5), threshold=3, stream=SeededSecrets(1).stream("a"))
    with pytest.raises(ProtocolError, match="too few"):
        join({0: shares[0], 1: shares[1]}, threshold=3)
    # Two shares fit every secret: some third share completes them to any other one.
    other = bytes(32)
    for guess in (SECRET, other):
        points = {
            0: int.from_bytes(guess, "big"),
            1: int.from_bytes(shares[0], "big"),
            2: int.from_bytes(shares[1], "big"),
        }
        third = (points[0] - 3 * points[1] + 3 * points[2]) % PRIME  # value at 3 of the parabola through 0, 1, 2
        made = {0: shares[0], 1: shares[1], 2: third.to_bytes(SHARE_BYTES, "big")}
        assert join(made, threshold=3) == guess


def test_a_wrong_share_is_noticed_when_there_is_one_to_spare() -> None:
    shares = split(SECRET, holders=range(4), threshold=3, stream=SeededSecrets(2).stream("a"))
    shares[3] = bytes(SHARE_BYTES)
    with pytest.raises(ProtocolError, match="one polynomial"):
        join(shares, threshold=3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(some.data())
def test_as_many_wrong_shares_as_half_of_those_to_spare_are_corrected_and_named(data: some.DataObject) -> None:
    holders = data.draw(some.lists(some.integers(0, 10_000), min_size=3, max_size=14, unique=True))
    threshold = data.draw(some.integers(1, len(holders)))
    shares = split(SECRET, holders=holders, threshold=threshold, stream=OsSecrets().stream())
    most = (len(holders) - threshold) // 2
    wrong = frozenset(data.draw(some.permutations(holders))[: data.draw(some.integers(0, most))])
    for holder in wrong:
        off = data.draw(some.sampled_from([1, PRIME - 1, random.Random(holder).randrange(1, PRIME)]))
        shares[holder] = ((int.from_bytes(shares[holder], "big") + off) % PRIME).to_bytes(SHARE_BYTES, "big")
    doubted = data.draw(some.sets(some.sampled_from(holders)))
    assert corrected(shares, threshold=threshold, doubted=doubted) == (SECRET, wrong)
    assert join(shares, threshold=threshold) == SECRET


@pytest.mark.parametrize(("holders", "threshold", "most"), [(4, 3, 1), (5, 4, 1), (9, 7, 2), (12, 9, 3)])
def test_what_tells_the_secret_from_others_corrects_every_share_to_spare_and_accuses_nobody(
    holders: int, threshold: int, most: int
) -> None:
    """Wrong shares that two holders have agreed on can give the secret, and make a right share look wrong."""
    shares = split(SECRET, holders=range(holders), threshold=threshold, stream=SeededSecrets(4).stream("a"))
    for holder in range(most):
        shares[holder] = shares[holder][:-1] + bytes([shares[holder][-1] ^ 1])
    with pytest.raises(ProtocolError, match="one polynomial"):
        corrected(shares, threshold=threshold)
    with pytest.raises(ProtocolError, match="one polynomial"):
        corrected(shares, threshold=threshold, fits=lambda secret: False)
    assert corrected(shares, threshold=threshold, fits=SECRET.__eq__) == (SECRET, frozenset())
    shares[most] = bytes(SHARE_BYTES)
    with pytest.raises(ProtocolError, match="one polynomial"):
        corrected(shares, threshold=threshold, fits=SECRET.__eq__)


@pytest.mark.parametrize("liars", [(0, 1), (2, 6)])
def test_wrong_shares_that_two_have_agreed_on_do_not_pass_where_the_secret_is_told_from_others(
    liars: tuple[int, int],
) -> None:
    """Shares shifted along a polynomial that vanishes at other holders leave one honest share that looks wrong."""
    holders, threshold = 7, 5
    shares = split(SECRET, holders=range(holders), threshold=threshold, stream=SeededSecrets(6).stream("a"))
    vanishing = [holder for holder in shares if holder not in liars][: threshold - 1]
    for holder in liars:
        shift = 12345 * math.prod(holder - other for other in vanishing)
        shares[holder] = ((int.from_bytes(shares[holder], "big") + shift) % PRIME).to_bytes(SHARE_BYTES, "big")
    wrong, accused = corrected(shares, threshold=threshold)
    assert wrong != SECRET
    assert accused.isdisjoint(liars)
    assert corrected(shares, threshold=threshold, fits=SECRET.__eq__) == (SECRET, frozenset())


def test_so_many_sets_of_shares_that_they_would_take_long_are_not_tried() -> None:
    shares = split(SECRET, holders=range(30), threshold=21, stream=SeededSecrets(5).stream("a"))
    for holder in range(6):
        shares[holder] = bytes(SHARE_BYTES)
    tried: list[bytes] = []
    with pytest.raises(ProtocolError, match="one polynomial"):
        corrected(shares, threshold=21, fits=lambda secret: bool(tried.append(secret)))
    assert not tried


def test_a_malformed_share_among_enough_others_is_named_and_costs_nothing() -> None:
    shares = split(SECRET, holders=range(4), threshold=3, stream=SeededSecrets(6).stream("a"))
    shares[1] = b"\xff" * SHARE_BYTES
    assert corrected(shares, threshold=3) == (SECRET, frozenset({1}))


@pytest.mark.parametrize("share", [b"", bytes(32), b"\xff" * SHARE_BYTES])
def test_a_malformed_share_is_refused_with_its_holder(share: bytes) -> None:
    shares = split(SECRET, holders=range(3), threshold=2, stream=SeededSecrets(3).stream("a"))
    with pytest.raises(ProtocolError, match="held by 1"):
        join({0: shares[0], 1: share}, threshold=2)


@pytest.mark.parametrize(("holders", "threshold"), [([0, 1], 3), ([0, 1], 0), ([0, 0], 1), ([-1, 0], 1)])
def test_impossible_sharings_are_refused(holders: list[int], threshold: int) -> None:
    with pytest.raises(ProtocolError):
        split(SECRET, holders=holders, threshold=threshold, stream=OsSecrets().stream())


def coefficients(polynomials: Sequence[Sequence[int]]) -> NDArray[np.uint8]:
    """As bytes, by rising powers."""
    whole = b"".join(number.to_bytes(48, "big") for row in polynomials for number in row)
    return np.frombuffer(whole, dtype=np.uint8).reshape(len(polynomials), -1, 48)


@pytest.mark.parametrize(("threshold", "most"), [(1, 4), (3, 60), (27, 1 << 14), (30, 1 << 29)])
def test_many_secrets_are_shared_by_the_polynomials_that_whole_numbers_give(threshold: int, most: int) -> None:
    drawn = random.Random(threshold)
    extremes = (0, 1, 2**256, PRIME - 1, 2**384 - 1)
    polynomials = [[drawn.choice([drawn.randrange(PRIME), *extremes]) for _ in range(threshold)] for _ in range(6)]
    points = [drawn.sample(range(1, most + 1), 4) for _ in polynomials]
    wanted = [
        [sum(c * pow(x, power, PRIME) for power, c in enumerate(row)) % PRIME for x in places]
        for row, places in zip(polynomials, points, strict=True)
    ]
    values = shamir._evaluated(coefficients(polynomials), np.array(points))
    assert [[int.from_bytes(share, "big") for share in row] for row in values] == wanted


@pytest.mark.parametrize("constant", [0, 1, 296, 297, 16 * 297, 2**256, PRIME - 1])
def test_shares_are_reduced_where_a_value_lies_just_around_the_prime(constant: int) -> None:
    """Sums of limbs that are just above a power of two come out below zero before they are brought back."""
    rows = [(constant, slope, place) for slope in (2**255, 2**256, PRIME - 1) for place in (1, 2, 16, 160, 1 << 29)]
    places = np.array([[place] for _, _, place in rows])
    values = shamir._evaluated(coefficients([row[:2] for row in rows]), places)
    wanted = [(first + slope * place) % PRIME for first, slope, place in rows]
    assert [int.from_bytes(share, "big") for [share] in values] == wanted
