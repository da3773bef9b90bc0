"""Shamir's secret sharing of 32-byte seeds: any t of n shares give the secret, t − 1 give nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from fedveil.crypto.keys import SEED_BYTES
from fedveil.errors import ProtocolError
from fedveil.secrets import SecretStream

PRIME = 2**256 + 297
"""The smallest prime above 2²⁵⁶, so that every 32-byte secret is a field element."""

SHARE_BYTES = 33


def split(secret: bytes, *, holders: Sequence[int], threshold: int, stream: SecretStream) -> dict[int, bytes]:
    """One share per holder (by number): points of a random polynomial of degree t − 1 through the secret."""
    if len(secret) != SEED_BYTES:
        raise ValueError(f"a shared secret has {SEED_BYTES} bytes, not {len(secret)}")
    if len(set(holders)) != len(holders) or any(holder < 0 for holder in holders):
        raise ProtocolError("a secret is shared among distinct, non-negative numbers")
    if not 1 <= threshold <= len(holders):
        raise ProtocolError(f"a threshold of {threshold} does not fit {len(holders)} holders")
    # 48 random bytes reduced modulo a 257-bit prime are uniform to 2⁻¹²⁷.
    drawn = [int.from_bytes(stream.bytes(48), "big") % PRIME for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(secret, "big"), *drawn]
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * (holder + 1) + coefficient) % PRIME
        shares[holder] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def join(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """The secret from at least `threshold` shares; too few or inconsistent ones are refused."""
    if len(shares) < threshold:
        raise ProtocolError(f"{len(shares)} shares are too few: {threshold} are needed")
    points = {}
    for holder, share in shares.items():
        value = int.from_bytes(share, "big")
        if len(share) != SHARE_BYTES or value >= PRIME:
            raise ProtocolError(f"the share held by {holder} is malformed")
        points[holder + 1] = value
    chosen = sorted(points)[:threshold]
    for extra in sorted(points)[threshold:]:
        if _at(extra, {x: points[x] for x in chosen}) != points[extra]:
            raise ProtocolError("the shares do not lie on one polynomial: at least one holder sent a wrong one")
    secret = _at(0, {x: points[x] for x in chosen})
    if secret >> (8 * SEED_BYTES):
        raise ProtocolError("the shares do not give a secret of the right size: at least one is wrong")
    return secret.to_bytes(SEED_BYTES, "big")


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
