"""What CKKS costs here against TenSEAL used directly, on one core and on two, and the bytes it sends.

`OMP_NUM_THREADS=1 python -m benchmarks.encryption` shows these rows alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np

from benchmarks.rows import Row
from benchmarks.timing import Ratio, Timed, interleaved, ratio
from fedveil.crypto import ciphertexts, ckks
from fedveil.processes import usable_cores

VALUES = 1_000_000
ADDENDS = 10


@dataclass(frozen=True)
class Sealed:
    """A key, a vector and its ciphertext, and the things that are done with them."""

    key: ckks.SecretKey
    values: np.ndarray
    content: bytes

    @staticmethod
    def of(length: int, *, addends: int = ADDENDS) -> Sealed:
        key = ckks.generate(ckks.choose(addends=addends, largest=1.0))
        values = np.random.default_rng(0).uniform(-1.0, 1.0, length)
        return Sealed(key, values, ckks.encrypt(values, key.public))

    def encrypt(self) -> bytes:
        return ckks.encrypt(self.values, self.key.public)

    def add(self) -> ckks.Adder:
        """One addition to a sum that is there already."""
        adder = ckks.Adder(self.key.public, length=len(self.values))
        adder.add(self.content)
        return adder

    def decrypt(self) -> np.ndarray:
        return ckks.decrypt(self.content, self.key)

    def directly(self) -> bytes:
        """TenSEAL's own vector of all values."""
        import tenseal

        with _silent():
            return tenseal.ckks_vector(self.key.public.material.context, self.values).serialize()


def encryption(*, repeats: int) -> list[Row]:
    """One core against TenSEAL, two processes against one, bytes."""
    sealed = Sealed.of(VALUES)
    cores = usable_cores()
    candidates: dict[str, Callable[[], object]] = {
        "directly": sealed.directly,
        "encrypt": _with(1, sealed.encrypt),
        "encrypt, 2": _with(2, sealed.encrypt),
        "decrypt": _with(1, sealed.decrypt),
        "decrypt, 2": _with(2, sealed.decrypt),
        "add": sealed.add,
    }
    timed = interleaved(candidates, repeats=repeats)
    what = f"{VALUES:,} values"
    two = 1.7 if cores >= 2 else None
    return [
        Row(
            f"CKKS: encrypting {what}, 1 core",
            "TenSEAL's own vector",
            best(timed["encrypt"], timed["directly"]),
            1.1,
            note=f"{1e9 * min(timed['encrypt'].seconds) / VALUES:.0f} ns a value",
        ),
        Row(
            "the same, speed of 2 processes",
            "1 process",
            best(timed["encrypt"], timed["encrypt, 2"]),
            two,
            at_least=True,
            note=f"{cores} cores",
        ),
        Row("decrypting, speed of 2 processes", "1 process", best(timed["decrypt"], timed["decrypt, 2"])),
        Row("decrypting, 1 core", "encrypting", best(timed["decrypt"], timed["encrypt"])),
        Row("adding one to a sum, 1 core", "encrypting", best(timed["add"], timed["encrypt"])),
        *bytes_per_value(sealed),
    ]


def bytes_per_value(sealed: Sealed) -> list[Row]:
    """Against the 8 bytes of a word of fixed point."""
    each = len(sealed.content) / len(sealed.values)
    return [Row("bytes of one encrypted value", "8", Ratio(each / 8, each / 8, each / 8), note=f"{each:.1f} bytes")]


def best(top: Timed, bottom: Timed) -> Ratio:
    """The ratio of the fastest repetitions, which other work on the machine disturbs least, and the range of all."""
    every = ratio(top, bottom)
    return Ratio(min(top.seconds) / min(bottom.seconds), every.low, every.high)


def _with(count: int, work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        # Not set_workers: it would end the worker that the next candidate needs warm.
        with patch.object(ciphertexts, "workers", lambda: count):
            return work()

    return run


@contextmanager
def _silent() -> Iterator[None]:
    """TenSEAL's warning about long vectors comes from C++ and goes to the file descriptor."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def main() -> int:
    from benchmarks.__main__ import alone

    return alone(lambda device, repeats: encryption(repeats=repeats), __doc__, devices=("cpu",), repeats=9)


if __name__ == "__main__":
    sys.exit(main())
