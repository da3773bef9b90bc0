"""Shamir's secret sharing of 32-byte seeds: any t of n shares give the secret, t − 1 give nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, zip_longest
from math import comb

import numpy as np
from numpy.typing import NDArray

from fedveil.crypto.keys import SEED_BYTES
from fedveil.errors import ProtocolError
from fedveil.secrets import SecretStream

PRIME = 2**256 + 297
"""The smallest prime above 2²⁵⁶, so that every 32-byte secret is a field element."""

SHARE_BYTES = 33


def split(secret: bytes, *, holders: Sequence[int], threshold: int, stream: SecretStream) -> dict[int, bytes]:
    """One share per holder (by number): points of a random polynomial of degree t − 1 through the secret."""
    return split_many([secret], holders=[holders], threshold=threshold, stream=stream)[0]


def split_many(
    secrets: Sequence[bytes], *, holders: Sequence[Sequence[int]], threshold: int, stream: SecretStream
) -> list[dict[int, bytes]]:
    """The shares of each secret for its own holders, of which all have as many: one polynomial each."""
    for secret, around in zip(secrets, holders, strict=True):
        if len(secret) != SEED_BYTES:
            raise ValueError(f"a shared secret has {SEED_BYTES} bytes, not {len(secret)}")
        if len(set(around)) != len(around) or any(not 0 <= holder < _MOST for holder in around):
            raise ProtocolError("a secret is shared among distinct, non-negative numbers")
        if not 1 <= threshold <= len(around):
            raise ProtocolError(f"a threshold of {threshold} does not fit {len(around)} holders")
    # Every polynomial has 48 random bytes for each power: reduced modulo a 257-bit prime they are uniform to 2⁻¹²⁷.
    random = _COEFFICIENT_BYTES * (threshold - 1)
    drawn = [secret.rjust(_COEFFICIENT_BYTES, b"\0") + (stream.bytes(random) if random else b"") for secret in secrets]
    coefficients = np.frombuffer(b"".join(drawn), dtype=np.uint8).reshape(len(drawn), threshold, _COEFFICIENT_BYTES)
    values = _evaluated(coefficients, np.array(holders, dtype=np.int64) + 1)
    return [dict(zip(around, shares, strict=True)) for around, shares in zip(holders, values, strict=True)]


_MOST = 1 << 30
_COEFFICIENT_BYTES = 48
_LIMB, _LIMBS = 26, 10
_MASK = (1 << _LIMB) - 1
_FOLDED = 16 * 297
"""2²⁶⁰ is −16·297 modulo the prime."""


def _evaluated(coefficients: NDArray[np.uint8], points: NDArray[np.int64]) -> list[list[bytes]]:
    """Each polynomial's values at its row of points below 2³⁰, as shares: Horner's rule for all of them at once.

    Coefficients are bytes, by rising powers. Numbers are ten limbs of 26 bits, carried often enough that none passes
    2⁶²; what passes 2²⁶⁰ comes back at the bottom.
    """
    words = np.ascontiguousarray(coefficients[..., ::-1]).view("<u4").astype(np.int64)
    limbs = np.stack([_bits(words, _LIMB * at) for at in range(_LIMBS)])
    for at in range(_LIMBS, 8 * _COEFFICIENT_BYTES // _LIMB + 1):
        limbs[at - _LIMBS] -= _FOLDED * _bits(words, _LIMB * at)
    _carry(limbs)
    steps = max(1, (60 - _LIMB) // int(points.max()).bit_length())
    value = np.zeros((_LIMBS, *points.shape), dtype=np.int64)
    degree = limbs.shape[2]
    for number in range(degree):
        value *= points
        value += limbs[:, :, degree - 1 - number, None]
        if number % steps == steps - 1:
            _carry(value)
    rows, columns = points.shape
    packed = _packed(value).tobytes()
    whole = [packed[at : at + SHARE_BYTES] for at in range(0, len(packed), SHARE_BYTES)]
    return [whole[row * columns : (row + 1) * columns] for row in range(rows)]


def _bits(words: NDArray[np.int64], start: int) -> NDArray[np.int64]:
    """26 bits from `start` on of numbers in words of 32."""
    at, shift = divmod(start, 32)
    above = words[..., at + 1] << 32 - shift if at + 1 < words.shape[-1] else 0
    return (words[..., at] >> shift | above) & _MASK


def _carry(value: NDArray[np.int64]) -> None:
    _spread(value)
    over = value[-1] >> _LIMB
    value[-1] &= _MASK
    value[0] -= _FOLDED * over
    value[1] += value[0] >> _LIMB  # what came back may be long, too
    value[0] &= _MASK


def _spread(value: NDArray[np.int64]) -> None:
    for at in range(_LIMBS - 1):
        value[at + 1] += value[at] >> _LIMB
        value[at] &= _MASK


_TOP = 256 - _LIMB * (_LIMBS - 1)
"""Bits of the last limb that lie below 2²⁵⁶."""


def _packed(value: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Numbers in limbs, reduced below the prime, each as the bytes of a share."""
    _carry(value)
    _spread(value)
    value[0] -= 297 * (value[-1] >> _TOP)  # 2²⁵⁶ is −297
    value[-1] &= (1 << _TOP) - 1
    _spread(value)
    below = value[-1] < 0
    value[0] += 297 * below
    value[-1] += below.astype(np.int64) << _TOP
    _spread(value)
    packed = np.empty((*value.shape[1:], SHARE_BYTES), dtype=np.uint8)
    for at in range(SHARE_BYTES):
        limb, shift = divmod(8 * at, _LIMB)
        above = value[limb + 1] << _LIMB - shift if limb + 1 < _LIMBS else 0
        packed[..., -1 - at] = (value[limb] >> shift | above) & 0xFF
    return packed


_MOST_SUBSETS = 256
"""So many sets of shares are tried where more of them are wrong than the others correct."""


_APART = "the shares do not lie on one polynomial: at least one holder sent a wrong one"


def join(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """The secret from at least `threshold` shares; too few, or too many wrong ones, are refused."""
    return corrected(shares, threshold=threshold)[0]


def corrected(
    shares: Mapping[int, bytes],
    *,
    threshold: int,
    fits: Callable[[bytes], bool] | None = None,
    doubted: Collection[int] = (),
) -> tuple[bytes, frozenset[int]]:
    """The secret, and whose shares are not of it.

    Of m shares (m − t) / 2 may be wrong, whoever has chosen them. Where something else tells the secret from others
    (`fits`), m − t of a few may, also where those who chose them have made others' look wrong. Whose shares of other
    secrets were wrong is `doubted`: it takes less time then.
    """
    if len(shares) < threshold:
        raise ProtocolError(f"{len(shares)} shares are too few: {threshold} are needed")
    points = {}
    for holder in sorted(shares, key=lambda holder: (holder in doubted, holder)):
        value = int.from_bytes(shares[holder], "big")
        if len(shares[holder]) == SHARE_BYTES and value < PRIME:
            points[holder + 1] = value
    malformed = frozenset(holder for holder in shares if holder + 1 not in points)
    if len(points) < threshold:
        raise ProtocolError(f"the share held by {min(malformed)} is malformed")
    chosen = {point: points[point] for point in list(points)[:threshold]}
    wrong = {point for point in list(points)[threshold:] if _at(point, chosen) != points[point]}
    agreed = _at(0, chosen)
    if 2 * len(wrong) > len(points) - threshold:
        polynomial = _polynomial(points, threshold)
        if polynomial is not None:
            wrong = {point for point, value in points.items() if _value(polynomial, point) != value}
            agreed = _value(polynomial, 0)
        elif fits is None or comb(len(points), threshold) > _MOST_SUBSETS:
            raise ProtocolError(_APART)
    if fits is None or _fitting(agreed, fits) or comb(len(points), threshold) > _MOST_SUBSETS:
        return _secret(agreed), malformed.union(point - 1 for point in wrong)
    for some in combinations(points, threshold):
        secret = _at(0, {point: points[point] for point in some})
        if _fitting(secret, fits):
            return _secret(secret), malformed  # two that agreed on wrong ones could make others' look so
    raise ProtocolError(_APART)


def _fitting(value: int, fits: Callable[[bytes], bool]) -> bool:
    return not value >> (8 * SEED_BYTES) and fits(_secret(value))


def _secret(value: int) -> bytes:
    if value >> (8 * SEED_BYTES):
        raise ProtocolError("the shares do not give a secret of the right size: at least one is wrong")
    return value.to_bytes(SEED_BYTES, "big")


def _polynomial(points: Mapping[int, int], threshold: int) -> list[int] | None:
    """The one polynomial on which at least (m + t) / 2 of m points lie, by rising powers; None if there is none.

    Gao's decoder: Euclid's algorithm on Π (x − x_i) and the polynomial through all points, stopped half way.
    """
    everywhere = [1]
    for point in points:
        everywhere = _sum([0, *everywhere], everywhere, factor=-point)
    through: list[int] = []
    for (point, value), inverse in zip(points.items(), _inverses(tuple(points)), strict=True):
        others, _ = _divided(everywhere, [-point % PRIME, 1])
        through = _sum(through, others, factor=value * inverse)
    before, now = everywhere, through
    locator_before: list[int] = []
    locator = [1]
    while 2 * (len(now) - 1) >= len(points) + threshold:
        quotient, left = _divided(before, now)
        before, now = now, left
        after = locator_before
        for power, number in enumerate(quotient):
            after = _sum(after, [0] * power + locator, factor=-number)
        locator_before, locator = locator, after
    found, left = _divided(now, locator)
    return None if left or len(found) > threshold else found


def _value(polynomial: Sequence[int], place: int) -> int:
    value = 0
    for number in reversed(polynomial):
        value = (value * place + number) % PRIME
    return value


def _sum(polynomial: list[int], other: list[int], *, factor: int) -> list[int]:
    """polynomial + factor · other, by rising powers, without zeros at the end."""
    pairs = zip_longest(polynomial, other, fillvalue=0)
    total = [(one + factor * another) % PRIME for one, another in pairs]
    while total and not total[-1]:
        total.pop()
    return total


def _divided(polynomial: list[int], by: list[int]) -> tuple[list[int], list[int]]:
    """(quotient, remainder)."""
    left, leading = polynomial, pow(by[-1], -1, PRIME)
    quotient = [0] * max(len(polynomial) - len(by) + 1, 0)
    while len(left) >= len(by):
        place = len(left) - len(by)
        quotient[place] = left[-1] * leading % PRIME
        left = _sum(left, [0] * place + by, factor=-quotient[place])
    return quotient, left


def _at(place: int, points: Mapping[int, int]) -> int:
    """The interpolating polynomial's value at `place` (Lagrange): Σ y_i · Π_{j≠i} (place − x_j) / (x_i − x_j)."""
    places = tuple(points)
    inverses = _inverses(places)
    below = [1]
    for point in places:
        below.append(below[-1] * (place - point) % PRIME)
    total, above = 0, 1
    for number in reversed(range(len(places))):
        point = places[number]
        total += points[point] * inverses[number] % PRIME * below[number] % PRIME * above
        above = above * (place - point) % PRIME
    return total % PRIME


@lru_cache(maxsize=1 << 10)
def _inverses(places: tuple[int, ...]) -> tuple[int, ...]:
    """1 / Π_{j≠i} (x_i − x_j) for each i; remembered, because one neighbourhood holds many secrets."""
    inverses = []
    for point in places:
        bottom = 1
        for other in places:
            if other != point:
                bottom = bottom * (point - other) % PRIME
        inverses.append(pow(bottom, -1, PRIME))
    return tuple(inverses)
