"""Secret randomness, from one place, and objects that keep what was drawn to themselves.

A run takes every secret from one `SecretSource`: the operating system, or, for reproducible
simulations, a stream derived from a seed. The second is predictable by anyone who knows the seed
and says so through `simulation`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

import torch
from torch import Tensor

_UNIFORM_BITS = 53
_WORDS, _WORDS_AT, _STATE_BYTES = 624, 24, 5056
"""Where PyTorch's CPU generator (MT19937) keeps its words, 64 bits for each, in the bytes of its state."""


class Guarded:
    """Base of objects that hold secrets: not printable, not copyable, not picklable."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: hidden>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def _refuse(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds secrets: it is neither copied, pickled nor logged")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse()

    def __copy__(self) -> NoReturn:
        self._refuse()

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse()


class SecretStream(Guarded):
    """A one-way stream of secret numbers for one purpose; reading it twice gives different numbers."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._calls = 0

    @property
    def simulation(self) -> bool:
        """Whether the numbers follow from a seed."""
        return self._key is not None

    def bytes(self, count: int) -> bytes:
        """The next `count` secret bytes."""
        if self._key is None:
            return os.urandom(count)
        self._calls += 1
        return hashlib.shake_256(self._key + self._calls.to_bytes(8, "big")).digest(count)

    def uniform(self, count: int) -> Tensor:
        """`count` float64 numbers, uniform on [0, 1) with 53 random bits each."""
        words = torch.frombuffer(bytearray(self.bytes(8 * count)), dtype=torch.int64) if count else None
        if words is None:
            return torch.empty(0, dtype=torch.float64)
        mantissa = (words >> (64 - _UNIFORM_BITS)) & ((1 << _UNIFORM_BITS) - 1)
        return mantissa.to(torch.float64) * 2.0**-_UNIFORM_BITS

    def signs(self, count: int) -> Tensor:
        """`count` float64 numbers, +1 or −1 with equal probability."""
        return torch.where(self.uniform(count) < 0.5, -1.0, 1.0).to(torch.float64)


class StoredSecret(SecretStream):
    """A stream of bytes that were drawn earlier: a key that was kept."""

    def __init__(self, content: bytes) -> None:
        super().__init__(None)
        self._content = content

    def bytes(self, count: int) -> bytes:
        """All of them."""
        if count != len(self._content):
            raise ValueError("a stored key has another length")
        return self._content


class SecretSource(Protocol):
    """Where a role's secrets come from."""

    @property
    def simulation(self) -> bool:
        """Whether somebody who knows the seed can predict every secret."""
        ...

    def stream(self, *label: str | int) -> SecretStream:
        """An independent stream for the purpose that `label` names."""
        ...


class OsSecrets(Guarded):
    """Secrets from the operating system's generator."""

    simulation = False

    def stream(self, *label: str | int) -> SecretStream:
        """A fresh stream; the label only matters for seeded sources."""
        return SecretStream(None)


class SeededSecrets(Guarded):
    """Secrets derived from a seed: reproducible, and therefore a simulation."""

    simulation = True

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def branch(self, *label: str | int) -> SeededSecrets:
        """A source of its own that does not lead back to this one."""
        return SeededSecrets(int.from_bytes(self.stream("branch", *label).bytes(32), "big"))

    def stream(self, *label: str | int) -> SecretStream:
        """The stream of SHAKE-256(seed, label); equal labels give equal streams."""
        # JSON quotes, so that no two labels read alike.
        text = json.dumps(["fedveil secrets", self._seed, *label])
        return SecretStream(hashlib.sha256(text.encode()).digest())


@contextmanager
def drawn_from(stream: SecretStream) -> Iterator[None]:
    """PyTorch's generator on the CPU with its whole state taken from `stream`; afterwards it is as it was.

    What is drawn inside has the entropy of the stream. `torch.manual_seed` would leave 32 bits of it, whatever the
    seed: few enough to try them all against one veiled broadcast.
    """
    state = torch.Generator().manual_seed(0).get_state()  # all of it used up: the next number is made from new words
    if len(state) != _STATE_BYTES:
        raise RuntimeError(f"PyTorch {torch.__version__} keeps the state of its generator in {len(state)} bytes")
    words = torch.frombuffer(bytearray(stream.bytes(4 * _WORDS)), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
    state[_WORDS_AT : _WORDS_AT + 8 * _WORDS] = words.view(torch.uint8)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(state)
        yield
