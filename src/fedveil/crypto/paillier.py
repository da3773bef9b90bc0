"""Threshold Paillier (Damgård and Jurik 2001, with s = 1): whoever has the public key encrypts, products of ciphertexts
are ciphertexts of sums, and t of n holders of shares decrypt together.

    N = p·q, p = 2p′ + 1 and q = 2q′ + 1 primes, M = p′·q′;  d ≡ 0 mod M and d ≡ 1 mod N;  Δ = n!
    shares     s_i = f(i) mod N·M for a random polynomial f of degree t − 1 with f(0) = d
    encrypt    c = (1 + N·v)·ρᴺ mod N²      for 0 ≤ v < N and a random unit ρ
    partial    c_i = c^(2Δ·s_i) mod N²
    open       v = L(Π c_i^(2λ_i))·(4Δ²)⁻¹ mod N, L(u) = (u − 1)/N, λ_i = Δ·Π_{j≠i} −j/(i − j) over those who answered

Nobody proves that it has encrypted or decrypted as it should: a wrong ciphertext or partial decryption spoils the sum.
With gmpy2 (extra paillier) powers are several times as fast as with Python's own integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from fedveil.errors import ConfigError, ProtocolError
from fedveil.secrets import Guarded, SecretStream

KEY_BITS = 2048
FEWEST_BITS, MOST_BITS = 256, 8192
MOST_HOLDERS = 1024
_SIEVED = 1 << 16
_WINDOW = 1 << 15
_WITNESSES = 40


@lru_cache(maxsize=1)
def _power() -> Callable[[int, int, int], int]:
    try:
        from gmpy2 import powmod
    except ImportError:
        return pow
    return lambda base, exponent, modulus: int(powmod(base, exponent, modulus))


def accelerated() -> bool:
    """Whether powers are taken by gmpy2."""
    return _power() is not pow


def check_key_bits(bits: int) -> None:
    """Refuse lengths that hold nothing, or that no machine works with."""
    if not FEWEST_BITS <= bits <= MOST_BITS or bits % 16:
        raise ConfigError(f"key_bits must be a multiple of 16 from {FEWEST_BITS} to {MOST_BITS} (got {bits}).")


@lru_cache(maxsize=1)
def _small_primes() -> list[int]:
    sieve = np.ones(_SIEVED, dtype=np.bool_)
    sieve[:2] = False
    for number in range(2, math.isqrt(_SIEVED) + 1):
        if sieve[number]:
            sieve[number * number :: number] = False
    return [int(number) for number in np.flatnonzero(sieve)[1:]]  # 2 is no use: candidates are odd


def _candidates(start: int) -> Iterator[int]:
    """The odd numbers h from `start` on of which neither h nor 2h + 1 has a small factor."""
    while True:
        kept = np.ones(_WINDOW, dtype=np.bool_)
        for prime in _small_primes():
            half = (prime + 1) // 2  # of 2
            at = -start * half % prime  # start + 2k ≡ 0
            kept[at::prime] = False
            kept[(at - half * half) % prime :: prime] = False  # 2·(start + 2k) + 1 ≡ 0
        yield from (start + 2 * int(k) for k in np.flatnonzero(kept))
        start += 2 * _WINDOW


def _probably_prime(number: int, stream: SecretStream) -> bool:
    """Miller and Rabin's test; a composite passes with a chance of at most 4⁻⁴⁰."""
    power = _power()
    twos = ((number - 1) & -(number - 1)).bit_length() - 1
    odd = (number - 1) >> twos
    for _ in range(_WITNESSES):
        value = power(2 + below(number - 3, stream), odd, number)
        if value in (1, number - 1):
            continue
        for _ in range(twos - 1):
            value = value * value % number
            if value == number - 1:
                break
        else:
            return False
    return True


def below(limit: int, stream: SecretStream) -> int:
    """A secret whole number from 0 on, below `limit`, uniform up to 2⁻¹²⁸."""
    return int.from_bytes(stream.bytes((limit.bit_length() + 135) // 8), "big") % limit


def safe_prime(bits: int, stream: SecretStream) -> int:
    """A prime p of so many bits, the upper two of them set, of which (p − 1)/2 is prime too.

    Of 1,024 bits it takes a second or less with gmpy2, else some.
    """
    power, least = _power(), 3 << (bits - 3)
    while True:
        start = least + below(1 << (bits - 3), stream) | 1
        for half in _candidates(start):
            whole = 2 * half + 1
            if whole.bit_length() > bits:
                break
            if power(2, half - 1, half) != 1 or power(2, whole - 1, whole) != 1:
                continue
            if _probably_prime(half, stream) and _probably_prime(whole, stream):
                return whole


@dataclass(frozen=True)
class Modulus:
    """The modulus N, of which everybody knows that `quorum` of `holders` decrypt."""

    modulus: int
    holders: int
    quorum: int

    @staticmethod
    def from_bytes(content: bytes, *, bits: int, holders: int, quorum: int) -> Modulus:
        """A key as it travels; refuses what is no modulus of so many bits."""
        modulus = int.from_bytes(content, "big")
        if len(content) != bits // 8 or modulus.bit_length() != bits or not modulus % 2:
            raise ProtocolError(f"a public key is no odd number of {bits} bits")
        return Modulus(modulus, holders, quorum)

    def to_bytes(self) -> bytes:
        """Big-endian, as many bytes as it has."""
        return self.modulus.to_bytes(self.modulus.bit_length() // 8, "big")

    @cached_property
    def square(self) -> int:
        """N², below which ciphertexts lie."""
        return self.modulus**2

    @property
    def width(self) -> int:
        """The bytes of a ciphertext."""
        return self.modulus.bit_length() // 4

    @cached_property
    def factor(self) -> int:
        """Δ."""
        return math.factorial(self.holders)

    def encrypt(self, values: Iterable[int], stream: SecretStream) -> list[int]:
        """A ciphertext of each value below N."""
        power, modulus, square = _power(), self.modulus, self.square
        return [
            (1 + modulus * value) * power(1 + below(modulus - 1, stream), modulus, square) % square for value in values
        ]

    def read(self, content: bytes) -> list[int]:
        """Ciphertexts or partial decryptions as they travel; refuses numbers that are none."""
        numbers = [int.from_bytes(content[at : at + self.width], "big") for at in range(0, len(content), self.width)]
        for number in numbers:
            if not 0 < number < self.square or math.gcd(number, self.modulus) != 1:
                raise ProtocolError("a ciphertext is no unit modulo N²")
        return numbers

    def written(self, numbers: Iterable[int]) -> bytes:
        """The same, as bytes."""
        return b"".join(number.to_bytes(self.width, "big") for number in numbers)

    def product(self, left: Sequence[int], right: Sequence[int]) -> list[int]:
        """Ciphertexts of the sums."""
        return [one * other % self.square for one, other in zip(left, right, strict=True)]

    def opened(self, partials: Mapping[int, Sequence[int]]) -> list[int]:
        """The plaintexts, by partial decryptions of at least a quorum; `partials` go by holder, counted from 0.

        Partial decryptions that do not belong together are refused, if they do not happen to give some plaintext.
        """
        power, modulus, square = _power(), self.modulus, self.square
        chosen = sorted(partials)[: self.quorum]
        if len(chosen) < self.quorum:
            raise ProtocolError(f"{len(chosen)} of {self.quorum} needed partial decryptions are there")
        weights = {holder: 2 * self._weight(holder, chosen) for holder in chosen}
        undo = pow(4 * self.factor**2, -1, modulus)
        plain = []
        for each in zip(*(partials[holder] for holder in chosen), strict=True):
            joint = 1
            for weight, partial in zip(weights.values(), each, strict=True):
                joint = joint * power(partial, weight, square) % square
            if joint % modulus != 1:
                raise ProtocolError("partial decryptions do not belong together")
            plain.append((joint - 1) // modulus * undo % modulus)
        return plain

    def _weight(self, holder: int, among: Sequence[int]) -> int:
        """λ of a holder: whole, since the differences divide Δ."""
        above, under = self.factor, 1
        for other in among:
            if other != holder:
                above *= -(other + 1)
                under *= holder - other
        return above // under


class KeyShare(Guarded):
    """One holder's part of the key that decrypts; the dealer's own also has the primes, to deal further ones by.

    `run` is whose it is, and `sent` how many ciphertexts its holder has sent last.
    """

    def __init__(self, run: str, public: Modulus, value: int, primes: tuple[int, ...] = (), *, sent: int = 0) -> None:
        self.run = run
        self.public = public
        self.sent = sent
        self._value = value
        self._primes = primes

    def having_sent(self, count: int) -> KeyShare:
        """The same after so many ciphertexts were sent."""
        return KeyShare(self.run, self.public, self._value, self._primes, sent=count)

    def partial(self, ciphertexts: Iterable[int]) -> list[int]:
        """This holder's partial decryptions."""
        exponent, power = 2 * self.public.factor * self._value, _power()
        return [power(one, exponent, self.public.square) for one in ciphertexts]

    def dealt(self, holder: int, stream: SecretStream) -> bytes:
        """The dealer's side: a holder's share; `stream` must be the same for all."""
        if not self._primes:
            raise ProtocolError("a client that has not dealt the keys was asked to deal them")
        return _share_of(holder, self.public, self._primes, stream).to_bytes(self.public.width, "big")

    def stored(self) -> dict[str, Any]:
        """Everything needed to hold it again; only ever written sealed."""
        public = self.public
        return {
            "run": self.run,
            "key": [f"{public.modulus:x}", public.holders, public.quorum],
            "value": f"{self._value:x}",
            "primes": [f"{prime:x}" for prime in self._primes],
            "sent": self.sent,
        }

    @staticmethod
    def restored(fields: Mapping[str, Any]) -> KeyShare:
        """The share that `stored` described."""
        try:
            modulus, holders, quorum = fields["key"]
            primes = tuple(int(prime, 16) for prime in fields["primes"])
            public = Modulus(int(modulus, 16), int(holders), int(quorum))
            return KeyShare(str(fields["run"]), public, int(fields["value"], 16), primes, sent=int(fields["sent"]))
        except (KeyError, ValueError, TypeError) as reason:
            raise ProtocolError("a share of a key is malformed") from reason


def _share_of(holder: int, public: Modulus, primes: Sequence[int], stream: SecretStream) -> int:
    """f(holder + 1), with the polynomial's coefficients from the stream."""
    modulus = public.modulus
    order = math.prod((prime - 1) // 2 for prime in primes)
    secret = order * pow(order, -1, modulus)  # 0 modulo M, 1 modulo N
    coefficients = [secret, *(below(modulus * order, stream) for _ in range(public.quorum - 1))]
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * (holder + 1) + coefficient) % (modulus * order)
    return value


def key_of(primes: Sequence[int], *, holders: int, quorum: int) -> Modulus:
    """The public key of two safe primes."""
    if not 1 <= quorum <= holders <= MOST_HOLDERS:
        raise ConfigError(f"{quorum} of {holders} clients cannot hold a key: at most {MOST_HOLDERS:,} do.")
    return Modulus(math.prod(primes), holders, quorum)


def fresh_primes(bits: int, stream: SecretStream) -> tuple[int, int]:
    """Two different safe primes whose product has so many bits."""
    first = safe_prime(bits // 2, stream)
    while (second := safe_prime(bits // 2, stream)) == first:
        pass
    return first, second


@dataclass(frozen=True)
class Packing:
    """Whole numbers from −`bound` to `bound` in slots of a plaintext, with room for sums of `addends` of them.

    Slots of w = ⌈log₂(2·bound·addends)⌉ + 1 bits hold x + bound; so many fit that a plaintext stays below N.
    """

    bound: int
    addends: int
    key_bits: int

    @property
    def width(self) -> int:
        """The bits of a slot."""
        return (2 * self.bound * self.addends - 1).bit_length() + 1

    @property
    def slots(self) -> int:
        """How many numbers one ciphertext holds."""
        count = (self.key_bits - 2) // self.width
        if not count:
            raise ConfigError(f"Numbers of {self.width} bits do not fit a key of {self.key_bits}: raise key_bits.")
        return count

    def count(self, length: int) -> int:
        """How many ciphertexts so many numbers take."""
        return -(-length // self.slots)

    def packed(self, numbers: Sequence[int]) -> list[int]:
        """Plaintexts; numbers beyond the bound are cut off there."""
        width, bound, plain = self.width, self.bound, []
        for at in range(0, len(numbers), self.slots):
            value = 0
            for number in reversed(numbers[at : at + self.slots]):
                value = value << width | min(max(number, -bound), bound) + bound
            plain.append(value)
        return plain

    def unpacked(self, plain: Sequence[int], length: int, *, addends: int) -> list[int]:
        """The sums of so many addends; refuses plaintexts that are no such sums."""
        width, mask, most = self.width, (1 << self.width) - 1, 2 * self.bound * addends
        numbers: list[int] = []
        for value in plain:
            for _ in range(min(self.slots, length - len(numbers))):
                if value & mask > most:
                    raise ProtocolError("an opened sum is beyond what clients may send")
                numbers.append((value & mask) - self.bound * addends)
                value >>= width
            if value:
                raise ProtocolError("an opened sum is beyond what clients may send")
        return numbers
