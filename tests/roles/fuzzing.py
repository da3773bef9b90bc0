"""Messages that somebody has changed, and runs in which everybody is sent such messages.

Real runs are the corpus: a client's replies are changed on their way to the server, and what the server sends on its
way to a client, in the very step in which they are due. Beside bytes that are damaged anyhow there are those that
somebody changes who knows the format: shapes, types, numbers, names, checksums, parts of other messages.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import random
import re
import resource
import signal
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driving import drive
from federation import job, relay_of, server_of
from fedveil.client_held.messages import Begin
from fedveil.engine import LocalEngine
from fedveil.errors import FedVeilError, ProtocolError
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import decode, encode, registered
from fedveil.protocol.messages import Reply, Request, Train
from fedveil.protocol.phases import Ask, Gathered, RoundDone
from fedveil.runs.job import Job
from fedveil.runs.loop import authority_role, client_role
from fedveil.schemes import find
from fedveil.shapes import Number, Shape, declared

LONGEST = 5.0
"""Seconds that any one message may take."""

ROOM = 256 << 20
"""Bytes of memory that a run may take, beyond what it has, while messages of a few kilobytes each are tried."""

NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 7, 2**16, 2**31, 2**32 - 1, 2**52, 2**53 - 1, 2**63, 2**64, 10**30, 10**400),
    *(True, None, 1.5, 1e300, "1", "", [], [[]], {}, {"m": "Hello"}, {"t": "f4", "s": []}),
)
SHAPES: tuple[list[Any], ...] = (
    *([10**12, 0], [0, 10**12], [0], [], [1], [2**31], [2**62, 2**62], [0, 2**62], [1] * 9, [-1], [2, -2]),
    *([True], ["1"], [1.0], [None], [0] * 8, [10**40]),
)
TEXTS = ("", "x" * 300, "\ud800", "\0", "ünï", "../..", "a" * 10_000)


class SlowError(BaseException):
    """One message took too long; nothing may take this for an error of its own."""


class Mutator:
    """Changes messages, and remembers honest ones to take parts from."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._seen: list[Any] = []

    def saw(self, message: Any) -> None:
        """Remember a message."""
        self._seen.append(message)
        del self._seen[:-64]

    def changed(self, message: Any) -> bytes:
        """The bytes of a message after one to three changes."""
        chance, data = self._random, b""
        try:
            if chance.random() < 0.5:
                message = self._rearranged(message)
            data = encode(message)
        except (ProtocolError, TypeError, ValueError, RuntimeError, OverflowError):
            data = encode(chance.choice(self._seen)) if self._seen else b""
        for _ in range(chance.choice((0, 1, 1, 2))):
            data = chance.choice((self._flipped, self._cut, self._edited, self._edited, self._edited))(data)
        return data

    def damaged(self, data: bytes) -> bytes:
        """Bytes of any format after some damage."""
        for _ in range(self._random.choice((1, 1, 2, 3))):
            data = self._random.choice((self._flipped, self._flipped, self._cut))(data)
        return data

    def edited_json(self, value: Any) -> Any:
        """Plain data with something else in one place."""
        chance = self._random
        if isinstance(value, dict) and value and chance.random() < 0.9:
            name = chance.choice(list(value))
            if chance.random() < 0.15:
                return {one: kept for one, kept in value.items() if one != name}
            return {**value, name: self.edited_json(value[name])}
        if isinstance(value, list) and value and chance.random() < 0.7:
            place = chance.randrange(len(value))
            return [*value[:place], self.edited_json(value[place]), *value[place + 1 :]]
        return chance.choice((*NUMBERS, *TEXTS, *SHAPES))

    def _rearranged(self, message: Any) -> Any:
        """A message with a field of another, a tensor of another kind, or another message altogether."""
        chance = self._random
        other = chance.choice(self._seen) if self._seen else message
        if chance.random() < 0.1:
            return other
        name = chance.choice([one.name for one in dataclasses.fields(message)])
        value = getattr(message, name)
        if chance.random() < 0.3:
            donors = [getattr(other, one.name) for one in dataclasses.fields(other)]
            return replace(message, **{name: chance.choice(donors)})
        if dataclasses.is_dataclass(value):
            return replace(message, **{name: self._rearranged(value)})
        if isinstance(value, Tensor):
            return replace(message, **{name: self._retensored(value)})
        return replace(message, **{name: chance.choice(NUMBERS[:14])})

    def _retensored(self, value: Tensor) -> Tensor:
        chance = self._random
        kind = chance.choice((torch.float32, torch.float64, torch.int64, torch.uint8))
        extremes = [float("nan"), float("inf"), -float("inf"), 1e308, -1.0, 0.0, 1e-300]
        wholes = [-1, 0, 1, 2**31, 2**62, 2**63 - 1, -(2**63)]
        raw = value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else value.to(torch.uint8).reshape(-1)
        turn = chance.randrange(10)
        if turn == 0:
            return value.to(kind)
        if turn == 1:
            return torch.cat([value, value])
        if turn == 2:
            return value[: len(value) // 2] if value.dim() else value
        if turn == 3:
            return value[None]
        if turn == 4:
            return value.reshape(-1)
        if turn == 5:
            return raw
        if turn == 6:
            return torch.empty(0, dtype=kind)
        if turn == 7 and value.is_floating_point():
            return torch.full_like(value, chance.choice(extremes))
        if turn == 7 and value.dtype is torch.int64:
            return torch.full_like(value, chance.choice(wholes))
        if turn == 8 and value.numel() and value.dtype is torch.int64:
            one = value.clone()
            one.view(-1)[chance.randrange(one.numel())] = chance.choice(wholes)
            return one
        return _checked_again(self._flipped(raw.numpy().tobytes()), value)

    def _flipped(self, data: bytes) -> bytes:
        if not data:
            return data
        changed = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 8))):
            # Beginnings hold what a format says about itself.
            most = len(changed) if self._random.random() < 0.5 else min(len(changed), 64)
            changed[self._random.randrange(most)] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _cut(self, data: bytes) -> bytes:
        chance, place = self._random, self._random.randrange(len(data) + 1)
        added = chance.randbytes(chance.choice((1, 8, 40)))
        return chance.choice((data[:place], data[place:], data + added, data[:place] + added + data[place:]))

    def _edited(self, data: bytes) -> bytes:
        """A header with something else in one place, under the length it has then."""
        chance = self._random
        try:
            (length,) = struct.unpack("<I", data[4:8])
            header = json.loads(data[8 : 8 + length])
        except (struct.error, ValueError, RecursionError):
            return data
        text = json.dumps(self._edited_header(header))
        if chance.random() < 0.05:
            depth = chance.choice((50, 2_000, 100_000))
            text = re.sub(r'("[a-z]+": )\d+', lambda found: found[1] + "[" * depth + "]" * depth, text, count=1)
        raw = text.encode("utf-8", "surrogatepass")
        told = len(raw) if chance.random() < 0.95 else chance.choice((0, 2**31, 2**32 - 1, len(raw) + 1))
        return data[:4] + struct.pack("<I", told) + raw + data[8 + length :]

    def _edited_header(self, header: Any) -> Any:
        chance = self._random
        places = list(_places(header))
        if not places or chance.random() < 0.1:
            return self.edited_json(header)
        holder = chance.choice(places)
        if "t" in holder:
            what = chance.choice(("s", "s", "t"))
            holder[what] = chance.choice(SHAPES) if what == "s" else chance.choice(("f4", "f8", "i8", "u1", "b1", 4))
        elif "m" in holder and chance.random() < 0.2:
            holder["m"] = chance.choice([kind.__name__ for kind in registered()])
        else:
            fields = holder.get("f")
            if isinstance(fields, dict) and fields:
                name = chance.choice(list(fields))
                if chance.random() < 0.15:
                    fields[name + "x"] = fields.pop(name)
                else:
                    fields[name] = chance.choice((*NUMBERS, *TEXTS))
        return header


def _places(header: Any) -> Iterator[dict[str, Any]]:
    """Every message and tensor that a header describes."""
    if isinstance(header, dict):
        yield header
        for one in header.values():
            yield from _places(one)


def _checked_again(data: bytes, before: Tensor) -> Tensor:
    """Changed bytes in their old shape; where a checksum lies in them, it is right again."""
    content = bytearray(data)
    if bytes(content[:5]) == b"FVCV\x01":
        content[5:9] = struct.pack("<I", zlib.crc32(bytes(content[9:])))
    if bytes(content[:5]) == b"FVCP\x01":
        content[5:21] = hashlib.sha256(bytes(content[:5] + content[21:])).digest()[:16]
    made = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return made.view(before.dtype).reshape(before.shape) if len(content) == before.nbytes else made


@dataclass(eq=False)
class Tried:
    """What came of trying changed messages."""

    unread: int = 0
    refused: int = 0
    taken: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All of them."""
        return self.unread + self.refused + self.taken


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """End what takes more of the processor; what others take of it does not count."""

    def late(*_: object) -> None:
        raise SlowError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def little_memory(room: int = ROOM) -> Iterator[None]:
    """Let this process have `room` bytes more than it has now; whoever wants more gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Fuzzed(LocalEngine):
    """An engine that, before each honest message of one client is delivered, tries `times` changed ones.

    Where nothing has been refused by then, it goes on for a while: a few tries may happen on no such change.
    """

    def __init__(self, one: Job, mutator: Mutator, *, victim: int, times: int, **named: Any) -> None:
        role = client_role(one)
        super().__init__(role, one.pool, authority=authority_role(one), **named)
        self._clients = client_role(one)  # what simulated clients share must not be shared with attacked ones
        self._mutator, self._victim, self._times = mutator, victim, times
        self._key = bytes(32)
        self.server, self.client = Tried(), Tried()

    def gather(self, ask: Ask) -> Gathered:
        """One phase, in which both sides are sent rubbish first."""
        if self._victim in ask.to:
            self._attack_client(ask)
        return super().gather(replace(ask, into=_Attacked(ask, self)))

    def _attack_client(self, ask: Ask) -> None:
        private = ask.each.get(self._victim)
        data = self._pool.clients[self._victim]
        for turn in self._turns(self.client):
            common, told = ask.common, private
            attacked = private if private is not None and turn % 2 else common
            sent = self._mutator.changed(attacked)
            found = self.opened(sent, Request, self.client)
            if found is None:
                continue
            if attacked is private:
                told = found
            else:
                common = found
            state = ClientState.unseal(self._states[self._victim].seal(self._key), self._key)
            extra = {} if told is None else {self._victim: told}
            with within(LONGEST):
                _, reply = next(iter(self._clients.handle_many([state], common, [data], extra)))
            if isinstance(reply, FedVeilError):
                assert "cannot deal with" not in str(reply), (reply, reply.__cause__, sent[:2000])
            self._count(self.client, reply)
        self._mutator.saw(ask.common)
        if private is not None:
            self._mutator.saw(private)

    def _turns(self, tried: Tried) -> Iterator[int]:
        yield from range(self._times)
        yield from itertools.takewhile(lambda _: not tried.refused, range(self._times, 30 * self._times))

    def opened(self, sent: bytes, kind: type, tried: Tried) -> Any:
        """What the bytes say, if they can be read; only our own errors are borne."""
        try:
            with within(LONGEST):
                found = decode(sent)
        except FedVeilError:
            tried.unread += 1
            return None
        if not isinstance(found, kind):  # where messages arrive, engines refuse it
            tried.unread += 1
            return None
        return found

    def attack_server(self, ask: Ask, reply: Reply) -> None:
        """Try changed replies on copies of where the honest one belongs."""
        for _ in self._turns(self.server):
            sent = self._mutator.changed(reply)
            found = self.opened(sent, Reply, self.server)
            if found is None:
                continue
            into = _copied(ask.into)
            try:
                with within(LONGEST):
                    into.add(found)
                self._count(self.server, found)
            except FedVeilError as reason:
                self._count(self.server, reason)
        self._mutator.saw(reply)

    @staticmethod
    def _count(tried: Tried, answer: Any) -> None:
        if isinstance(answer, FedVeilError):
            tried.refused += 1
            tried.kinds[type(answer).__name__] += 1
        else:
            tried.taken += 1

    @property
    def victim(self) -> int:
        """Whose messages are changed."""
        return self._victim


def names(kind: type) -> set[str]:
    """The named sizes of a message's own fields."""
    rules = [one.rule for one in declared(kind).values()]
    sizes = {size for rule in rules if isinstance(rule, Shape) for size in rule.sizes if isinstance(size, str)}
    return sizes | {rule.name for rule in rules if isinstance(rule, Number)}


class _Attacked:
    def __init__(self, ask: Ask, engine: Fuzzed) -> None:
        self._ask, self._engine = ask, engine

    def add(self, reply: Reply) -> None:
        # Every size that a reply names is one that its phase bounds.
        assert names(type(reply)) <= set(self._ask.into._sizes), type(reply)  # type: ignore[attr-defined]
        if reply.client == self._engine.victim:
            self._engine.attack_server(self._ask, reply)
        self._ask.into.add(reply)


def _copied(into: Any) -> Any:
    """An accumulator to spoil; ciphertexts cannot be copied, but a sum of them can be begun anew."""
    known: dict[int, Any] = {}
    hidden = getattr(into, "_hidden", None)
    adder = getattr(hidden, "_adder", None)
    if adder is not None:
        known[id(adder)] = type(adder)(adder._key, length=adder._length)
    return copy.deepcopy(into, known)


def small(name: str, **settings: Any) -> Job:
    """A run of a scheme with few numbers and five clients; batch norms where it takes them, for their statistics."""
    norm = {"norm": "batch"} if name in ("fedavg", "lossless", "pbpfl", "veil-secagg", "mpdp") else {}
    width = 2 if find(name).twin else 8  # ciphertexts take a thousand times as long as masks
    return job(
        scheme=name,
        options={"depth": 2, "width": width, **norm},
        loss=None if find(name).default_loss != "square" else "square",
        **{"rounds": 3, "clients": 5, **settings},
    )


def missing_once(request: Any, client: int) -> bool:
    """Client 4 does not upload in the second round: what repairs and opens a round is sent, too."""
    return isinstance(request, (Train, Begin)) and request.round == 1 and client == 4


def driven(one: Job, engine: LocalEngine) -> tuple[list[RoundDone], list[str], list[Tensor]]:
    """The rounds of a run, why it stopped, and what it has brought."""
    server: Any = server_of(one) if one.scheme.holder == "server" else relay_of(one)
    rounds: list[RoundDone] = []
    stops: list[str] = []
    drive(engine, server.run(), on_round=rounds.append, on_stop=stops.append)
    if one.scheme.holder == "server":
        return rounds, stops, [server.state.weights.parameters]
    held = [engine.state_of(client).held for client in range(5)]
    return rounds, stops, [one.weights.parameters for one in held if one is not None]


class Lying(LocalEngine):
    """An engine in which one client sends changed replies, those that are taken for replies before others."""

    def __init__(self, one: Job, mutator: Mutator, *, liar: int, **named: Any) -> None:
        super().__init__(client_role(one), one.pool, authority=authority_role(one), **named)
        self._mutator, self._liar = mutator, liar
        self.sent = 0

    def _replies(self, ask: Ask, part: Any) -> Any:
        for state, reply in super()._replies(ask, part):
            if state.client != self._liar or isinstance(reply, FedVeilError):
                yield state, reply
                continue
            yield state, self._lie(ask, reply)
            self._mutator.saw(reply)

    def _lie(self, ask: Ask, reply: Reply) -> Any:
        answer: Any = ProtocolError("nothing that can be read")
        for _ in range(30):
            try:
                found = decode(self._mutator.changed(reply))
                if not isinstance(found, Reply) or found.client != self._liar:
                    continue
                answer = found
                _copied(ask.into).add(found)
            except FedVeilError:
                continue
            self.sent += 1
            break
        return answer
