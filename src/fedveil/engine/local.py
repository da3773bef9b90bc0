"""The local engine: every client in this process, many at a time, and their work on several cores."""

from __future__ import annotations

import logging
import mmap
import select
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from socket import socket
from typing import Any

import torch
from torch import Tensor

from fedveil.client_held.client import HolderRole
from fedveil.errors import Code, ConfigError, DataError, FedVeilError, NumericError, Refusal
from fedveil.processes import Copy, give_back_memory, keep_freed_memory
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import decode, encode, size
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.parts import Authority
from fedveil.protocol.phases import Accumulator, Ask, Gathered, Heard
from fedveil.roles.client import Answer, ClientRole
from fedveil.work.held_back import holding_back
from fedveil.work.messages import Augmentation, ClientData, KeptTensors, LocalWork, ManyAtOnce, Source, Units, Workspace

_AT_ONCE = 512
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ClientPool:
    """Every client's data: rows of shared tensors, or tensors of their own; or, on other machines, only how many
    clients there are (`elsewhere`)."""

    clients: tuple[ClientData, ...]
    elsewhere: int = 0

    def __post_init__(self) -> None:
        if not self.clients and self.elsewhere < 1:
            raise ConfigError("There are no clients: give at least one.")
        for data in self.clients:
            if len(data) == 0:
                raise DataError(
                    f"Client {data.client} has no samples. Give it data, leave it out, or use fewer clients."
                )

    @staticmethod
    def shared(x: Tensor, y: Tensor, parts: Sequence[Tensor]) -> ClientPool:
        """Clients that share one data set, each with its own rows."""
        return ClientPool(tuple(ClientData(k, x, y, rows.to(x.device)) for k, rows in enumerate(parts)))

    @staticmethod
    def separate(parties: Sequence[tuple[Tensor, Tensor] | Source]) -> ClientPool:
        """Clients with samples of their own; of tensors, refuses NaN and infinity, naming client and sample."""
        for number, party in enumerate(parties):
            if not isinstance(party, tuple):
                continue
            x, y = party
            if len(x) != len(y):
                raise DataError(f"Client {number} has {len(x)} inputs but {len(y)} targets.")
            for what, tensor in (("input", x), ("target", y)):
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    bad = int(
                        (~torch.isfinite(tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]))
                        .any(1)
                        .nonzero()[0]
                    )
                    raise DataError(
                        f"Client {number}, sample {bad}: the {what} holds NaN or infinity. Clean it before training."
                    )
        if len(parties) > 1 and all(isinstance(party, tuple) and party[0].is_cuda for party in parties):
            return ClientPool._joined([party for party in parties if isinstance(party, tuple)])
        return ClientPool(
            tuple(
                ClientData(k, *party) if isinstance(party, tuple) else ClientData.reading(k, party)
                for k, party in enumerate(parties)
            )
        )

    @staticmethod
    def _joined(parties: Sequence[tuple[Tensor, Tensor]]) -> ClientPool:
        """On a GPU all samples in one tensor, from which the batches of many clients are looked up at once."""
        x, y = (torch.cat([party[part] for party in parties]) for part in (0, 1))
        parts = torch.split(torch.arange(len(y), device=y.device), [len(party[1]) for party in parties])
        return ClientPool.shared(x, y, parts)

    def augmented(self, augment: Augmentation | None) -> ClientPool:
        """The same clients, whose samples are augmented when they are trained on."""
        return replace(self, clients=tuple(replace(data, augment=augment) for data in self.clients))

    def holding_back(self, share: float | None, *, seed: int, groups: Tensor | None = None) -> ClientPool:
        """The same clients, which hold back a share of their samples; none where it is None.

        `groups` says of the rows that clients share which belong together.
        """
        if share is None:
            return self
        own = (None if groups is None or data.rows is None else groups[data.rows.cpu()] for data in self.clients)
        parts = zip(self.clients, own, strict=True)
        return replace(self, clients=tuple(holding_back(data, share, seed=seed, groups=those) for data, those in parts))

    def __len__(self) -> int:
        return len(self.clients) or self.elsewhere


def folded(into: Accumulator, reply: Reply, sender: int) -> Refusal | None:
    """Fold a client's reply in, or say why it is refused. Whatever a client sends costs that reply, no more."""
    if reply.client != sender:
        return Refusal(Code.PROTOCOL, "its answer names another client", came=True)
    try:
        into.add(reply)
    except FedVeilError as reason:
        return Refusal.of(reason, came=True)
    except Exception as reason:
        _LOG.exception("a %s could not be folded in", type(reply).__name__)
        return Refusal(Code.PROTOCOL, f"its answer is malformed ({type(reason).__name__})", came=True)
    return None


_CAN_COPY = sys.platform == "linux"  # elsewhere, system libraries do not bear it
_WORTH_COPIES = 0.5
_WORTH_ORDERS = 3e-4
"""Seconds that clients' work takes in all, and each unit of it, where copies of this process pay."""


class SharedWork:
    """Local work on several cores: in this process, and once that pays in copies of it.

    How many threads share a product of matrices decides about its last bits. So a unit of the work is computed by one
    thread, wherever that is, and the model is the same however many copies there are. Where units are fewer than cores,
    this process computes them with all its threads, unless it was told how many `workers` there shall be.
    """

    def __init__(self, work: LocalWork, clients: Sequence[ClientData], *, workers: int | None) -> None:
        self._work, self._workers = work, workers
        self._clients = {data.client: data for data in clients}
        self._copies: Workers | None = None
        self._may_copy = self._bears_copies()
        self._seconds, self._units = 0.0, 0
        keep_freed_memory()

    def _bears_copies(self) -> bool:
        if self._workers is None and any(data.source is not None for data in self._clients.values()):
            _LOG.info("Samples are read by code of your own: it stays in one process, unless `workers` says how many.")
            return False
        if self._workers is not None and self._workers > 1 and not _CAN_COPY:
            _LOG.warning("Workers are copies of a process, which %s does not bear: one process computes.", sys.platform)
        return _CAN_COPY

    def __call__(
        self, workspace: Workspace, broadcast: Any, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """As `run_many` of the work."""
        work, threads = self._work, torch.get_num_threads()
        cores = threads if self._workers is None else self._workers
        known = all(self._clients.get(data.client) is data for data in clients)
        if not known or broadcast.parameters.is_cuda or not isinstance(work, ManyAtOnce):
            yield from work.run_many(workspace, broadcast, clients, round=round)
            return
        units = work.units(workspace, broadcast, clients)
        if self._workers is None and len(units) < cores:
            yield from work.run_units(workspace, broadcast, clients, units, round=round)
            return
        torch.set_num_threads(1)
        try:
            if self._copies is None and self._pays(cores, len(units)):
                count, most = min(cores, len(self._clients)), max(map(len, units))
                self._copies = Workers(work, workspace, self._clients, count=count, message=size(broadcast), unit=most)
            if self._copies is not None and len(units) > 1:
                yield from self._copies.run(broadcast, clients, units, round=round)
                return
            begun = time.perf_counter()
            for made in work.run_units(workspace, broadcast, clients, units, round=round):
                self._seconds += time.perf_counter() - begun
                yield made
                begun = time.perf_counter()
            self._units += len(units)
        finally:
            torch.set_num_threads(threads)

    def _pays(self, cores: int, units: int) -> bool:
        if cores < 2 or units < 2 or not self._may_copy:
            return False
        return self._workers is not None or self._seconds > max(_WORTH_COPIES, _WORTH_ORDERS * self._units)

    def end(self) -> None:
        """End the copies, and give back what memory was kept for the next step."""
        if self._copies is not None:
            self._copies.end()
        give_back_memory()


Absent = Callable[[Request, int], bool]
Listen = Callable[[Heard], None]
OnAnswer = Callable[[int, int], None]
"""Told how many of how many clients have answered a phase."""


class LocalEngine:
    """Clients in this process, as an engine; and the key `authority`, where the scheme has one.

    `absent(request, client)` simulates faults: a client for which it holds does not answer that request.
    `spent` is what clients remember of their earlier spending (μ²), `grouped` of whom they were summed with, `kept`
    what their work has kept for itself. `listen` hears every message as it passes, and `on_answer` how far a phase has
    come.
    """

    def __init__(
        self,
        role: ClientRole | HolderRole,
        pool: ClientPool,
        *,
        absent: Absent | None = None,
        spent: Mapping[int, float] | None = None,
        grouped: Sequence[tuple[int, ...]] = (),
        kept: Mapping[int, KeptTensors] | None = None,
        listen: Listen | None = None,
        on_answer: OnAnswer | None = None,
        authority: Authority | None = None,
    ) -> None:
        self._role = role
        self._authority = authority
        self._pool = pool
        before, peers = spent or {}, {client: group for group in grouped for client in group}
        self._states = {
            data.client: ClientState(
                data.client,
                spent=before.get(data.client, 0.0),
                grouped=peers.get(data.client, ()),
                kept=(kept or {}).get(data.client),
            )
            for data in pool.clients
        }
        if authority is not None:
            self._states[authority.seat] = ClientState(authority.seat)
        self._absent = absent
        self._listen = listen
        self._on_answer = on_answer

    def state_of(self, client: int) -> ClientState:
        """What a client remembers now."""
        return self._states[client]

    def kept(self) -> dict[int, KeptTensors]:
        """What clients' work keeps for itself now, by client."""
        return {client: state.kept for client, state in self._states.items() if state.kept is not None}

    def gather(self, ask: Ask) -> Gathered:
        """One phase with the clients that are present."""
        arrived: list[int] = []
        refused: dict[int, Refusal] = {}
        up = 0
        down = size(ask.common) * len(ask.to) + sum(size(request) for request in ask.each.values())
        if self._listen is not None:
            self._listen(Heard("request", ask.common, ask.common, to=ask.to))
            for client, private in ask.each.items():
                self._listen(Heard("private", ask.common, private, to=(client,), client=client))
        present = [client for client in ask.to if self._absent is None or not self._absent(ask.common, client)]
        for start in range(0, len(present), _AT_ONCE):
            for state, reply in self._replies(ask, present[start : start + _AT_ONCE]):
                self._states[state.client] = state
                if self._on_answer is not None:
                    self._on_answer(len(arrived) + len(refused) + 1, len(ask.to))
                if isinstance(reply, FedVeilError):
                    refused[state.client] = Refusal.of(reply)
                    continue
                up += size(reply)
                if self._listen is not None:
                    self._listen(Heard("reply", ask.common, reply, client=reply.client, state=state))
                if why := folded(ask.into, reply, state.client):
                    refused[state.client] = why
                else:
                    arrived.append(state.client)
        answered = {*arrived, *refused}
        missing = tuple(client for client in ask.to if client not in answered)
        return Gathered(tuple(arrived), refused, missing, down, up)

    def _replies(self, ask: Ask, part: Sequence[int]) -> Iterator[tuple[ClientState, Answer]]:
        states = [self._states[client] for client in part]
        if self._authority is not None and list(part) == [self._authority.seat]:
            return self._authority.handle_many(states, ask.common)
        return self._role.handle_many(states, ask.common, [self._pool.clients[client] for client in part], ask.each)


# --- clients' local work on several cores: copies of this process, each of which computes units of it
#
#     parent   puts the broadcast into shared memory · gives every copy two units ahead · takes results, in order
#     copy     takes the broadcast · computes a unit on one core · puts the contributions into shared memory
#
# Copies have the clients' data as the parent has them, and are told a round's broadcast and whose turn it is. What is a
# client's or the server's own, states, keys, what was spent, stays with the parent: local work alone is done elsewhere,
# and it remembers nothing. The memory they share has neither a name nor a file.
#
# A unit that a copy does not get done, because somebody's code raises, the numbers are refused or the copy is killed,
# is computed by the parent. So an error is raised where it always was, with its type and its traceback.

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
