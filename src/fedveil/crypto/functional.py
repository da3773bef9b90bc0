"""Functional encryption of sums (Abdalla et al. 2018, on the scheme of Agrawal, Libert and Stehlé 2016 from DDH).

Whoever has a key for y learns Σ y_i·x_i of what clients have encrypted, and nothing else; an authority makes the keys.

    group      secp256k1: points of prime order p, written as powers of a generator g
    secrets    a; for client i: w_i, w_i′ and, for each of its numbers j, a pad u_ij
    client i   has g^a, h_i = g^(w_i + w_i′·a) and what its pads are drawn from
    encrypt    (g^r, g^(a·r), g^(x + u_ij)·h_i^r), with an r of its own for each number x
    key for y  y_i·w_i and y_i·w_i′ for each client, z_j = Σ_i y_i·u_ij for each number
    open       Π_i c_i^(y_i) / ((g^r)^(y_i·w_i)·(g^(a·r))^(y_i·w_i′)) / g^(z_j) = g^(Σ_i y_i·x_ij), and its logarithm

Why every number has a pad of its own: a key for y hands over w_i and w_i′, and with one pad u_i for all numbers of a
client what is left of any two of them, g^(x + u_i) and g^(x′ + u_i), shows their difference. The construction is safe
for one ciphertext a client and key, so each number is an instance of its own; and all secrets are for one round.

Needs coincurve (extra functional), bindings of libsecp256k1. Powers of g by a secret take the same time whatever it is;
those of other points do not (`secp256k1_ec_pubkey_tweak_mul`): a client raises g^a and h_i to r, which is used once,
and the server raises points to the parts of a key that it may know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fedveil.errors import ProtocolError, missing_extra
from fedveil.secrets import Guarded, SecretStream

if TYPE_CHECKING:
    from coincurve import PublicKey

ORDER = 0xFFFFFFFF_FFFFFFFF_FFFFFFFF_FFFFFFFE_BAAEDCE6_AF48A03B_BFD25E8C_D0364141
SCALAR_BYTES, POINT_BYTES, SEED_BYTES = 32, 33, 32
CIPHERTEXT_BYTES = 3 * POINT_BYTES
HALVES_BYTES = 2 * SCALAR_BYTES
KEY_BYTES = 2 * POINT_BYTES + SEED_BYTES
PAD_BLOCK = 1 << 12
"""So many pads are drawn at once: who adds up those of many clients holds no more of them."""
_TAG = slice(1, 13)
"""So much of a point's first coordinate that no two of a table's are alike but with a chance of 2⁻⁶⁰."""
_FEWEST_STEPS, _MOST_STEPS = 1 << 10, 1 << 18


@lru_cache(maxsize=1)
def points() -> type[PublicKey]:
    """Points of the curve; refuses to begin where the package is missing."""
    try:
        from coincurve import PublicKey
    except ImportError as reason:
        raise missing_extra("coincurve", "functional", "Functional encryption") from reason
    return PublicKey


def _bytes(scalar: int) -> bytes:
    return (scalar % ORDER).to_bytes(SCALAR_BYTES, "big")


def _point(content: bytes) -> PublicKey:
    try:
        return points()(content)
    except ValueError as reason:
        raise ProtocolError("a ciphertext or a key holds what is no point of the curve") from reason


def _product(factors: list[PublicKey]) -> PublicKey | None:
    """The product of points; None for the neutral one, which has no bytes."""
    if not factors:  # of nothing, the library would end the process
        return None
    try:
        return points().combine_keys(factors)
    except ValueError:
        return None


def _numbers(content: bytes | bytearray) -> list[int]:
    return [int.from_bytes(content[at : at + SCALAR_BYTES], "big") for at in range(0, len(content), SCALAR_BYTES)]


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    """Every block of so many numbers' pads: which it is, and how many are in it."""
    for block, start in enumerate(range(0, count, PAD_BLOCK)):
        yield block, min(PAD_BLOCK, count - start)


def _pad_block(seed: bytes, block: int, size: int) -> list[int]:
    drawn = hashlib.shake_256(b"fedveil pads 2" + seed + block.to_bytes(8, "big"))
    return _numbers(drawn.digest(SCALAR_BYTES * size))


def pads_of(seed: bytes, count: int) -> list[int]:
    """The pads of a client's numbers: uniform below p up to 2⁻¹²⁷, since p is so near to 2²⁵⁶."""
    return [pad for block in _blocks(count) for pad in _pad_block(seed, *block)]


def check_ciphertexts(content: bytes) -> None:
    """Refuse ciphertexts of which any part is no point of the curve."""
    for at in range(0, len(content), POINT_BYTES):
        _point(content[at : at + POINT_BYTES])


class EncryptionKey(Guarded):
    """What one client encrypts with in one round: g^a, h_i, and the seed of its pads; empty once they are used.

    `authority` is whose it is in this `run`: its signing key, and the one that it agrees on secrets by.
    """

    def __init__(self, run: str, authority: bytes, content: bytes = b"") -> None:
        if len(content) not in (0, KEY_BYTES):
            raise ProtocolError("a key to encrypt with has another length than it should")
        if content:
            check_ciphertexts(content[:-SEED_BYTES])
        self.run = run
        self.authority = authority
        self._content = content

    def used(self) -> EncryptionKey:
        """Whose it was, and nothing to encrypt with: a second time would show what two uploads differ by."""
        return EncryptionKey(self.run, self.authority)

    def encrypt(self, numbers: Sequence[int], stream: SecretStream) -> bytes:
        """Ciphertexts, one after the other."""
        if not self._content:
            raise ProtocolError("there is no key to encrypt with, or it has been used")
        make, seed = points(), self._content[-SEED_BYTES:]
        base, own = (_point(self._content[at : at + POINT_BYTES]) for at in (0, POINT_BYTES))
        drawn = _numbers(stream.bytes(SCALAR_BYTES * len(numbers)))
        sent = bytearray()
        for number, pad, random in zip(numbers, pads_of(seed, len(numbers)), drawn, strict=True):
            r = _bytes(random)
            hidden = make.combine_keys([make.from_valid_secret(_bytes(number + pad)), own.multiply(r)])
            sent += make.from_valid_secret(r).format() + base.multiply(r).format() + hidden.format()
        return bytes(sent)

    def stored(self) -> dict[str, Any]:
        """Everything needed to go on with it; only ever written sealed."""
        return {"run": self.run, "authority": self.authority.hex(), "content": self._content.hex()}

    @staticmethod
    def restored(fields: Mapping[str, Any]) -> EncryptionKey:
        """The key that `stored` described."""
        try:
            return EncryptionKey(
                str(fields["run"]), bytes.fromhex(fields["authority"]), bytes.fromhex(fields["content"])
            )
        except (KeyError, ValueError, TypeError) as reason:
            raise ProtocolError("a key to encrypt with is malformed") from reason


@dataclass(frozen=True, eq=False)
class FunctionKey:
    """A key for the weights y: what each client's ciphertexts are opened by, and what the pads add up to, as bytes."""

    weights: Mapping[int, int]
    halves: Mapping[int, tuple[int, int]]
    pads: bytes | bytearray

    def to_bytes(self) -> tuple[bytes, bytes | bytearray]:
        """The halves by client, in the order of the weights, and the pads."""
        return b"".join(_bytes(half) for client in self.weights for half in self.halves[client]), self.pads

    @staticmethod
    def from_bytes(weights: Mapping[int, int], halves: bytes, pads: bytes | bytearray) -> FunctionKey:
        """The key that `to_bytes` wrote; refuses one that cannot be."""
        numbers = _numbers(halves)
        if not all(0 < number < ORDER for number in numbers):
            raise ProtocolError("a key holds what is no power of a point")
        pairs = dict(zip(weights, zip(numbers[::2], numbers[1::2], strict=True), strict=True))
        return FunctionKey(weights, pairs, pads)


class AuthoritySecrets(Guarded):
    """What an authority draws for one round, all of it from one seed."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    def _drawn(self, *label: str | int) -> bytes:
        return hashlib.shake_256(b"fedveil functional 1" + self._seed + repr(label).encode()).digest(48)

    def _scalar(self, *label: str | int) -> int:
        return 1 + int.from_bytes(self._drawn(*label), "big") % (ORDER - 1)

    def _halves(self, client: int) -> tuple[int, int]:
        return self._scalar("w", client), self._scalar("w'", client)

    def _pad_seed(self, client: int) -> bytes:
        return self._drawn("pads", client)[:SEED_BYTES]

    def key_of(self, client: int) -> bytes:
        """What a client encrypts with; for it alone."""
        make, a, (first, second) = points(), self._scalar("a"), self._halves(client)
        base, own = (make.from_valid_secret(_bytes(power)).format() for power in (a, first + second * a))
        return base + own + self._pad_seed(client)

    def key_for(self, weights: Mapping[int, int], count: int) -> FunctionKey:
        """The key that opens Σ y_i·x_i of `count` numbers; weights of 0 leave a client out."""
        weights = {client: weight for client, weight in weights.items() if weight}
        halves = {
            client: tuple(weight * half % ORDER for half in self._halves(client)) for client, weight in weights.items()
        }
        seeds = {client: self._pad_seed(client) for client in weights}
        pads, at = bytearray(SCALAR_BYTES * count), 0
        for block, size in _blocks(count):
            sums = [0] * size
            for client, weight in weights.items():
                drawn = _pad_block(seeds[client], block, size)
                sums = [total + weight * pad for total, pad in zip(sums, drawn, strict=True)]
            pads[at : at + SCALAR_BYTES * size] = b"".join(map(_bytes, sums))
            at += SCALAR_BYTES * size
        return FunctionKey(weights, halves, pads)  # type: ignore[arg-type]


class Logarithms:
    """Whole numbers s by g^s: `size` powers of g in a table, and giant steps from 0 on outwards.

    g^(−k) has the first coordinate of g^k, so that a table reaches as far to both sides.
    """

    def __init__(self, size: int) -> None:
        self._size, self._width = size, 2 * size + 1
        self._table: dict[bytes, int] = {}
        self._giants: dict[int, PublicKey] = {}
        generator = point = points().from_valid_secret(_bytes(1))
        for power in range(1, size + 1):
            content = point.format()
            self._table[content[_TAG]] = power if content[0] == 2 else -power
            point = points().combine_keys([point, generator])

    def of(self, point: PublicKey | None, bound: int) -> int | None:
        """s, if it is at most `bound` in size."""
        for turn in _outwards(-(-max(bound - self._size, 0) // self._width)):
            start = turn * self._width
            near = point if not turn else self._moved(point, turn)
            if near is None:
                found = start
            else:
                content = near.format()
                power = self._table.get(content[_TAG])
                if power is None:
                    continue
                found = start + (power if content[0] == 2 else -power)
            return found if abs(found) <= bound else None
        return None

    def _moved(self, point: PublicKey | None, turn: int) -> PublicKey | None:
        if turn not in self._giants:
            self._giants[turn] = points().from_valid_secret(_bytes(-turn * self._width))
        return self._giants[turn] if point is None else _product([point, self._giants[turn]])


def _outwards(most: int) -> Iterator[int]:
    yield 0
    for turn in range(1, most + 1):
        yield turn
        yield -turn


@lru_cache(maxsize=2)
def _logarithms(size: int) -> Logarithms:
    return Logarithms(size)


def logarithms(count: int, usual: int) -> Logarithms:
    """A table for `count` numbers that are mostly within ± `usual`: as long to make as it then saves."""
    wanted = min(max(int((count * usual) ** 0.5), _FEWEST_STEPS), _MOST_STEPS)
    return _logarithms(1 << (wanted - 1).bit_length())


def opened(uploads: Mapping[int, bytes], key: FunctionKey, *, bound: int, usual: int) -> list[int]:
    """Σ y_i·x_ij for every number j of the clients that the key is for; refuses sums beyond ± `bound`."""
    make, table = points(), logarithms(len(key.pads) // SCALAR_BYTES, usual)
    powers = {client: (_bytes(-first), _bytes(-second)) for client, (first, second) in key.halves.items()}
    sums = []
    for place, pad in enumerate(_numbers(key.pads)):
        factors = [make.from_valid_secret(_bytes(-pad))] if pad % ORDER else []
        for client, weight in key.weights.items():
            (first, second), at = powers[client], place * CIPHERTEXT_BYTES
            one, other, hidden = (
                _point(uploads[client][start : start + POINT_BYTES])
                for start in range(at, at + CIPHERTEXT_BYTES, POINT_BYTES)
            )
            factors += [
                one.multiply(first),
                other.multiply(second),
                hidden if weight == 1 else hidden.multiply(_bytes(weight)),
            ]
        found = table.of(_product(factors), bound)
        if found is None:
            raise ProtocolError("an opened sum is beyond what clients may send")
        sums.append(found)
    return sums
