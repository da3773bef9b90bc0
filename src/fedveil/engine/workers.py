"""Clients' local work on several cores: copies of this process, each of which computes units of it.

    parent   puts the broadcast into shared memory · gives every copy two units ahead · takes results, in order
    copy     takes the broadcast · computes a unit on one core · puts the contributions into shared memory

Copies have the clients' data as the parent has them, and are told a round's broadcast and whose turn it is. What is a
client's or the server's own, states, keys, what was spent, stays with the parent: local work alone is done elsewhere,
and it remembers nothing. The memory they share has neither a name nor a file.

A unit that a copy does not get done, because somebody's code raises, the numbers are refused or the copy is killed, is
computed by the parent. So an error is raised where it always was, with its type and its traceback.
"""

from __future__ import annotations

import logging
import mmap
import select
import struct
from collections.abc import Iterator, Mapping, Sequence
from socket import socket
from typing import Any

import torch
from torch import Tensor

from fedveil.errors import NumericError
from fedveil.processes import Copy
from fedveil.protocol.codec import decode, encode
from fedveil.work.messages import ClientData, ManyAtOnce, Units, Workspace

_LOG = logging.getLogger(__name__)

_AHEAD = 2
"""Units that a copy has in hand: one that it computes, and one to go on with."""
_WINDOW = 4 * _AHEAD
"""How many units for each copy may be under way or wait to be taken."""
_HEADER = 1 << 12
_LARGEST_NUMBER = 8
_LONGEST = 1 << 16

_ORDER = struct.Struct("<6I")  # call, round, bytes of the broadcast, clients, unit, slot; then the unit's positions
_RESULT = struct.Struct("<5I")  # call, unit, slot, type of the numbers (0: it is not done), length of a contribution
_TYPES = {1: torch.float32, 2: torch.float64}
_CODES = {dtype: code for code, dtype in _TYPES.items()}


class _Memory:
    """What parent and copies share: a broadcast, the clients of a round, and slots for contributions."""

    def __init__(self, *, message: int, clients: int, slots: int, slot: int) -> None:
        self.most_bytes, self.slot = message, slot
        self._mapped = mmap.mmap(-1, message + 4 * clients + slots * slot)
        every = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self.message, numbers, self._slots = torch.split(every, [message, 4 * clients, slots * slot])
        self.numbers = numbers.view(torch.int32)

    def place(self, message: bytes, clients: Sequence[ClientData]) -> None:
        """For copies to read."""
        self._mapped[: len(message)] = message
        self.numbers[: len(clients)] = torch.tensor([data.client for data in clients], dtype=torch.int32)

    def read(self, size: int) -> bytes:
        """What was placed."""
        return self._mapped[:size]

    def rows(self, slot: int, count: int, dtype: torch.dtype, length: int) -> Tensor:
        """The contributions in a slot."""
        start = slot * self.slot
        numbers = self._slots[start : start + count * length * dtype.itemsize].view(dtype)
        return numbers.view(count, length)


class _Worker:
    """One copy, as its parent knows it."""

    def __init__(self, copy: Copy, slots: Sequence[int]) -> None:
        self.copy = copy
        self.free = list(slots)
        self.in_hand: dict[int, tuple[int, int]] = {}
        """By slot: the call and the unit."""


class Workers:
    """Copies of this process that compute a kind of work for some clients."""

    def __init__(
        self,
        work: ManyAtOnce,
        workspace: Workspace,
        clients: Mapping[int, ClientData],
        *,
        count: int,
        message: int,
        unit: int,
    ) -> None:
        """Start them.

        Args:
            work: What they compute.
            workspace: Where.
            clients: For whom, by number.
            count: How many there are.
            message: Bytes of a broadcast.
            unit: How many clients are computed together, at most.
        """
        self._work, self._workspace, self._clients = work, workspace, clients
        slot = _aligned(unit * workspace.layout.length * _LARGEST_NUMBER)
        self._memory = _Memory(
            message=_aligned(message + _HEADER), clients=_aligned(len(clients)), slots=count * _AHEAD, slot=slot
        )
        self._call = 0
        self._workers: dict[int, _Worker] = {}
        self._heard = select.poll()
        for number in range(count):
            copy = Copy(self._serve, name=f"Worker {number + 1} of {count}")
            self._workers[copy.channel.fileno()] = _Worker(copy, range(number * _AHEAD, (number + 1) * _AHEAD))
            self._heard.register(copy.channel, select.POLLIN)

    def __len__(self) -> int:
        return len(self._workers)

    def run(
        self, broadcast: Any, clients: Sequence[ClientData], units: Units, *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """What `work.run_units` gives, in the order of the units."""
        message = encode(broadcast)
        self._call += 1
        head = (self._call, round, len(message), len(clients))
        done: dict[int, list[Tensor]] = {}
        given = len(units)
        if len(message) <= self._memory.most_bytes:
            self._memory.place(message, clients)
            given = 0
        for number, unit in enumerate(units):
            given = self._give(units, given, number + _WINDOW * len(self._workers), head)
            while number not in done and self._has(number):
                self._hear(done, units)
                given = self._give(units, given, number + _WINDOW * len(self._workers), head)
            if number in done:
                yield from zip(unit, done.pop(number), strict=True)
            else:
                yield from self._work.run_units(self._workspace, broadcast, clients, [unit], round=round)

    def end(self) -> None:
        """End all of them."""
        while self._workers:
            self._workers.popitem()[1].copy.end()

    def _give(self, units: Units, given: int, most: int, head: tuple[int, ...]) -> int:
        """Hand out units up to the number `most`, whoever has the fewest in hand first; how far that went."""
        while given < min(len(units), most):
            unit = units[given]
            ready = [worker for worker in self._workers.values() if worker.free]
            if not ready:
                break
            if len(unit) * self._workspace.layout.length * _LARGEST_NUMBER <= self._memory.slot:
                worker = max(ready, key=lambda ready: len(ready.free))
                slot = worker.free.pop()
                worker.in_hand[slot] = (self._call, given)
                order = _ORDER.pack(*head, given, slot) + struct.pack(f"<{len(unit)}I", *unit)
                try:
                    worker.copy.channel.send(order)
                except OSError:
                    self._lose(worker)
            given += 1
        return given

    def _has(self, unit: int) -> bool:
        """Whether somebody is at a unit of this call."""
        return any((self._call, unit) in worker.in_hand.values() for worker in self._workers.values())

    def _hear(self, done: dict[int, list[Tensor]], units: Units) -> None:
        """Wait for results, and take them out of shared memory; those of a call that was given up are dropped."""
        for descriptor, _ in self._heard.poll():
            worker = self._workers[descriptor]
            try:
                result = worker.copy.channel.recv(_LONGEST)
            except OSError:
                result = b""
            if not result:
                self._lose(worker)
                continue
            call, unit, slot, kind, length = _RESULT.unpack(result)
            del worker.in_hand[slot]
            worker.free.append(slot)
            if call == self._call and kind:
                # Each in memory of its own: how it lies there may decide about last bits of what follows.
                rows = self._memory.rows(slot, len(units[unit]), _TYPES[kind], length)
                done[unit] = [row.clone() for row in rows]

    def _lose(self, worker: _Worker) -> None:
        descriptor = worker.copy.channel.fileno()
        self._heard.unregister(descriptor)
        del self._workers[descriptor]
        ended = worker.copy.ending()
        worker.copy.end()
        _LOG.warning(
            "%s %s. What it was at is computed again, and %s; the model is the same.",
            worker.copy.name,
            ended,
            "the others go on" if self._workers else "the rest in this process",
        )

    def _serve(self, channel: socket) -> None:
        """What a copy does."""
        torch.set_num_threads(1)  # threads of its parent's are not there, and to ask for them would wait forever
        last, clients = 0, list[ClientData]()
        broadcast: Any = None
        while order := channel.recv(_LONGEST):
            call, round, size, count, unit, slot = _ORDER.unpack_from(order)
            positions = struct.unpack_from(f"<{(len(order) - _ORDER.size) // 4}I", order, _ORDER.size)
            kind = length = 0
            try:
                if call != last:
                    broadcast = decode(self._memory.read(size))
                    clients = [self._clients[number] for number in self._memory.numbers[:count].tolist()]
                    last = call
                pairs = self._work.run_units(self._workspace, broadcast, clients, [positions], round=round)
                kind, length = self._put(slot, positions, dict(pairs))
            except Exception as reason:  # its parent meets it too, and tells it
                _LOG.debug("a worker could not do a unit: %s", type(reason).__name__)
            channel.send(_RESULT.pack(call, unit, slot, kind, length))

    def _put(self, slot: int, positions: Sequence[int], made: dict[int, Tensor | NumericError]) -> tuple[int, int]:
        """Put contributions into a slot; the type and length of each, or zeros where some are refused."""
        vectors = [vector for vector in (made[position] for position in positions) if isinstance(vector, Tensor)]
        kinds = {(vector.dtype, tuple(vector.shape)) for vector in vectors}
        if len(vectors) != len(positions) or len(kinds) != 1:
            return 0, 0
        dtype, shape = kinds.pop()
        if dtype not in _CODES or len(shape) != 1 or shape[0] > self._workspace.layout.length:
            return 0, 0
        torch.stack(vectors, out=self._memory.rows(slot, len(vectors), dtype, shape[0]))
        return _CODES[dtype], shape[0]


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
