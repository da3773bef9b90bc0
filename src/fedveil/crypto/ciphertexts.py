"""CKKS ciphertexts of up to N/2 values each: one at a time here, many at a time spread over worker processes.

TenSEAL could cut long vectors up by itself, no faster, and prints a warning to standard output for each.
It trusts the sizes a serialised vector claims, so everything received is checked before it is used.

It computes in one thread and keeps Python's lock while it does, so a long vector is worked on by processes: neither
forks of this one, which may have threads, nor a second import of the user's script, nor do they load torch (which is
why this module does not). They are started when first needed and then kept; this process works too. Keys reach them
through their pipes only:

    here → worker    KEY digest, context · FORGET (all of them) · ENCRYPT digest, slots, values
                     DECRYPT digest, level, sizes, ciphertexts
    worker → here    READY once, then for every ENCRYPT and DECRYPT: DONE results, or REFUSED reason
"""

from __future__ import annotations

import atexit
import os
import selectors
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedveil import framing
from fedveil.errors import ConfigError, ProtocolError
from fedveil.framing import Part
from fedveil.processes import ChildDiedError, ChildProcess, channel, python, usable_cores

if TYPE_CHECKING:
    from fedveil.crypto.ckks import Material

Values = NDArray[np.float64]
Item = TypeVar("Item")


class Refused(Exception):  # noqa: N818 - it never leaves this package
    """TenSEAL, or a check, did not accept a serialised ciphertext or context."""


class CkksCiphertext(Protocol):
    """SEAL's part of a vector."""

    scale: float

    def parms_id(self) -> Sequence[int]:
        """The hash of the ring and of the moduli that are left."""
        ...

    def size(self) -> int:
        """The number of its polynomials."""
        ...

    def is_transparent(self) -> bool:
        """Whether it can be read without a key."""
        ...


class Vector(Protocol):
    """TenSEAL's encrypted vector, as far as it is used here."""

    def serialize(self) -> bytes:
        """Its bytes."""
        ...

    def size(self) -> int:
        """How many values it says it holds."""
        ...

    def ciphertext(self) -> Sequence[CkksCiphertext]:
        """The ciphertexts it consists of."""
        ...

    def decrypt(self) -> list[float]:
        """Its values, if its context has the secret key."""
        ...

    def add_(self, other: Vector) -> object:
        """Add another one, in place."""
        ...

    def sub_(self, other: Vector) -> object:
        """Subtract another one, in place."""
        ...


class Context(Protocol):
    """TenSEAL's context, as far as it is used here."""

    @property
    def data(self) -> object:
        """What lies under it."""
        ...


@dataclass(frozen=True)
class Level:
    """What a ciphertext must look like to be added to others under the same parameters."""

    parms: tuple[int, ...]
    scale: float


def restored(serialized: bytes) -> Context:
    """A context from its bytes, without threads of its own."""
    import tenseal

    try:
        context: Context = tenseal.context_from(serialized, 1)
    except Exception as reason:  # TenSEAL's errors are of many kinds
        raise Refused(str(reason)) from reason
    return context


def encrypt(context: Context, values: Values) -> Vector:
    """One ciphertext of at most N/2 values."""
    from tenseal import _ts_cpp

    # Past TenSEAL's wrapper, which copies the values into a tensor and out of it again.
    vector: Vector = _ts_cpp.CKKSVector(context.data, values.tolist())
    return vector


def level(vector: Vector) -> Level:
    """What ciphertexts made under this one's context look like."""
    (ciphertext,) = vector.ciphertext()
    return Level(tuple(ciphertext.parms_id()), ciphertext.scale)


def load(context: Context, chunk: bytes, *, size: int, level: Level) -> Vector:
    """A ciphertext of exactly `size` values, checked."""
    from tenseal import _ts_cpp

    if not _holds_one(chunk, size=size, scale=level.scale):
        raise Refused(f"it is not one ciphertext of {size} values")
    try:
        vector: Vector = _ts_cpp.CKKSVector(context.data, chunk)
        ciphertexts = vector.ciphertext()
    except Exception as reason:
        raise Refused(str(reason)) from reason
    if len(ciphertexts) != 1 or vector.size() != size:
        raise Refused(f"it holds {vector.size()} values in {len(ciphertexts)} ciphertexts, not {size} in one")
    if (
        ciphertexts[0].size() != 2
        or tuple(ciphertexts[0].parms_id()) != level.parms
        or ciphertexts[0].scale != level.scale
    ):
        raise Refused("it was made with other parameters")
    if ciphertexts[0].is_transparent():
        raise Refused("it is not encrypted: anybody could read it")
    return vector


def _holds_one(chunk: bytes, *, size: int, scale: float) -> bool:
    """Whether these are the bytes TenSEAL writes for one ciphertext: sizes = 1, ciphertexts = 2, scale = 3.

    TenSEAL reads as many values as the sizes say, past the end of what it has decrypted.
    """
    sizes = _varint(size)
    start = b"\x0a" + _varint(len(sizes)) + sizes + b"\x12"
    end = b"\x19" + struct.pack("<d", scale)
    room = len(chunk) - len(start) - len(end)
    # The ciphertext fills what its own length, of one to five bytes, leaves.
    lengths = (_varint(room - used) for used in range(1, 6) if room > used)
    return chunk.endswith(end) and any(
        chunk.startswith(start + length) for used, length in enumerate(lengths, 1) if len(length) == used
    )


def _varint(number: int) -> bytes:
    """Protocol buffers' integers: seven bits a byte, the lowest first."""
    content = bytearray()
    while number > 0x7F:
        content.append(number & 0x7F | 0x80)
        number >>= 7
    content.append(number)
    return bytes(content)


def decrypt(context: Context, chunk: bytes, *, size: int, level: Level) -> Values:
    """The `size` values of a ciphertext, with their noise."""
    vector = load(context, chunk, size=size, level=level)
    try:
        values = np.array(vector.decrypt(), dtype=np.float64)
    except Exception as reason:
        raise Refused(str(reason)) from reason
    if len(values) != size:
        raise Refused(f"it holds {len(values)} values, not {size}")
    return values


VARIABLE = "FEDVEIL_WORKERS"
MOST_BY_DEFAULT = 8
FEWEST_CHUNKS = 16
"""Below this (about 20 ms of encryption) a task stays in this process."""

_LARGEST_JOB = 64
_KEYS_KEPT = 8
_LOSSES_BORNE = 3
_PIPE_BYTES = 1 << 20
_LEVEL = struct.Struct("<d4Q")
_SLOTS = struct.Struct("<I")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_chosen: int | None = None


class _Order(IntEnum):
    KEY = 1
    FORGET = 2
    ENCRYPT = 3
    DECRYPT = 4


class _Answer(IntEnum):
    READY = 1
    DONE = 2
    REFUSED = 3


@dataclass(frozen=True)
class _Task(Generic[Item]):
    """`count` independent ciphertexts: how to make one here, how to ask for some and how to read the answer."""

    count: int
    material: Material
    here: Callable[[int], Item]
    order: _Order
    request: Callable[[range], list[Part]]
    answer: Callable[[list[bytes]], Sequence[Item]]


def set_workers(count: int | None) -> None:
    """How many processes work, this one included; None: what FEDVEIL_WORKERS says, or one per core up to 8."""
    global _chosen
    if count is not None and count < 1:
        raise ConfigError(f"At least one process must work, not {count}.")
    _chosen = count
    _dismiss(keep=workers() - 1)


def workers() -> int:
    """How many processes work on long vectors, this one included."""
    if os.name != "posix" or not sys.executable:
        return 1
    if _chosen is not None:
        return _chosen
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        if not named.isdecimal() or int(named) < 1:
            raise ConfigError(f"{VARIABLE} must be a whole number of processes from 1 on, not {named!r}.")
        return int(named)
    return min(usable_cores(), MOST_BY_DEFAULT)


def _spread(task: _Task[Item]) -> list[Item]:
    """All of the task's items in order, made by this process and, if there are many, its workers."""
    if task.count < FEWEST_CHUNKS or workers() == 1:
        return [task.here(index) for index in range(task.count)]
    return _Team(task, workers() - 1).run()


def encrypt_all(values: Values, *, slots: int, material: Material) -> list[bytes]:
    """Serialised ciphertexts of `slots` values each, the last one of fewer."""

    def here(index: int) -> bytes:
        return encrypt(material.context, values[index * slots : (index + 1) * slots]).serialize()

    def request(job: range) -> list[Part]:
        return [_SLOTS.pack(slots), values[job.start * slots : job.stop * slots].tobytes()]

    return _spread(_Task(-(-len(values) // slots), material, here, _Order.ENCRYPT, request, lambda parts: parts))


def decrypt_all(parts: Sequence[memoryview], sizes: Sequence[int], *, level: Level, material: Material) -> list[Values]:
    """The values of each ciphertext, with their noise."""
    head = _LEVEL.pack(level.scale, *level.parms)

    def here(index: int) -> Values:
        return decrypt(material.context, bytes(parts[index]), size=sizes[index], level=level)

    def request(job: range) -> list[Part]:
        chosen = slice(job.start, job.stop)
        return [head, struct.pack(f"<{len(job)}I", *sizes[chosen]), *parts[chosen]]

    def answer(decrypted: list[bytes]) -> list[Values]:
        return [np.frombuffer(values) for values in decrypted]

    return _spread(_Task(len(parts), material, here, _Order.DECRYPT, request, answer))


_GONE = (ChildDiedError, ProtocolError, OSError)


class _Worker:
    """One child process; it has at most one request to answer."""

    def __init__(self) -> None:
        self.process = ChildProcess(
            python(f"{__name__}:serve"),
            name="A process that encrypts",
            env={**os.environ, **_ONE_THREAD},
            pipe_bytes=_PIPE_BYTES,
        )
        self._known: set[bytes] = set()
        self.ready = False
        self.job = range(0)

    @property
    def pid(self) -> int:
        return self.process.pid

    def give(self, job: range, material: Material, order: _Order, *parts: Part) -> None:
        """Ask for `job`; the worker has the key afterwards."""
        self.job = job
        if material.digest not in self._known:
            if len(self._known) >= _KEYS_KEPT:
                self.process.send(_Order.FORGET)
                self._known.clear()
            self.process.send(_Order.KEY, material.digest, material.serialized)
            self._known.add(material.digest)
        self.process.send(order, material.digest, *parts)


_idle: deque[_Worker] = deque()
"""Taking from and adding to it needs no lock: threads that spread tasks at once have workers of their own."""


class _Team(Generic[Item]):
    """This process and some workers, at one task."""

    def __init__(self, task: _Task[Item], helpers: int) -> None:
        self._task = task
        self._size = helpers + 1
        self._helpers = helpers
        self._results: dict[int, Item] = {}
        self._next = 0
        self._lost: list[range] = []
        self._losses = 0
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[Item]:
        try:
            for _ in range(self._helpers):
                self._enlist()
            while len(self._results) < self._task.count:
                mine = self._job(largest=1)
                for index in mine:
                    self._results[index] = self._task.here(index)
                for ready, _ in self._selector.select(0 if mine else None):
                    self._hear(ready.data)
        finally:
            self._part()
        return [self._results[index] for index in range(self._task.count)]

    def _job(self, *, largest: int) -> range:
        """The next ciphertexts to work on, fewer towards the end so that all finish together."""
        if self._lost:
            lost = self._lost.pop()
            if len(lost) > largest:
                self._lost.append(lost[largest:])
            return lost[:largest]
        left = self._task.count - self._next
        start = self._next
        self._next += min(left, largest, max(2, left // (2 * self._size)))
        return range(start, self._next)

    def _enlist(self) -> None:
        try:
            helper = _idle.pop() if _idle else _Worker()
        except OSError:  # no more processes, or no memory for one: fewer do the same work
            return
        self._selector.register(helper.process.output, selectors.EVENT_READ, helper)
        if helper.ready:
            self._employ(helper)

    def _employ(self, helper: _Worker) -> None:
        job = self._job(largest=_LARGEST_JOB)
        if job:
            try:
                helper.give(job, self._task.material, self._task.order, *self._task.request(job))
            except _GONE:
                self._replace(helper)

    def _hear(self, helper: _Worker) -> None:
        try:
            kind, parts = helper.process.receive(_Answer)
        except _GONE:
            self._replace(helper)
            return
        if kind is _Answer.REFUSED:
            helper.job = range(0)
            raise Refused(parts[0].decode())
        helper.ready = True
        self._results.update(zip(helper.job, self._task.answer(parts) if helper.job else (), strict=True))
        helper.job = range(0)
        self._employ(helper)

    def _replace(self, helper: _Worker) -> None:
        """Its job is done again; one that could not even start, or a few losses in one task, bring no new worker."""
        self._selector.unregister(helper.process.output)
        if helper.job:
            self._lost.append(helper.job)
        helper.process.end()
        self._losses += 1
        if helper.ready and self._losses <= _LOSSES_BORNE:
            self._enlist()

    def _part(self) -> None:
        for registered in list(self._selector.get_map().values()):
            helper: _Worker = registered.data
            if helper.job:  # an error left it with an answer that nobody will read
                helper.process.end()
            else:
                _idle.append(helper)
        self._selector.close()
        _dismiss(keep=workers() - 1)


def _dismiss(*, keep: int = 0) -> None:
    while len(_idle) > keep:
        _idle.popleft().process.end(patience=1.0)


atexit.register(_dismiss)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a copy of this process has no children


def serve() -> None:
    """In a worker: answer requests until there are no more."""
    incoming, outgoing = channel()
    import tenseal  # noqa: F401 - so that nothing is slow any more once this process is ready

    framing.send(outgoing, _Answer.READY)
    contexts: dict[bytes, Context] = {}
    with suppress(framing.BrokenOffError):
        while True:
            order, parts = framing.receive(incoming, _Order)
            if order is _Order.FORGET:
                contexts.clear()
            elif order is _Order.KEY:
                contexts[parts[0]] = restored(parts[1])
            else:
                work = _encrypted if order is _Order.ENCRYPT else _decrypted
                try:
                    framing.send(outgoing, _Answer.DONE, *work(contexts[parts[0]], *parts[1:]))
                except Refused as reason:
                    framing.send(outgoing, _Answer.REFUSED, str(reason).encode())


def _encrypted(context: Context, slots: bytes, content: bytes) -> list[bytes]:
    (step,) = _SLOTS.unpack(slots)
    values = np.frombuffer(content, dtype=np.float64)
    return [encrypt(context, values[start : start + step]).serialize() for start in range(0, len(values), step)]


def _decrypted(context: Context, head: bytes, packed: bytes, *chunks: bytes) -> list[bytes]:
    scale, *parms = _LEVEL.unpack(head)
    level = Level(tuple(parms), scale)
    sizes = struct.unpack(f"<{len(chunks)}I", packed)
    pairs = zip(chunks, sizes, strict=True)
    return [decrypt(context, chunk, size=size, level=level).tobytes() for chunk, size in pairs]
