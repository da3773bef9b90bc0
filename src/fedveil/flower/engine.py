"""The protocol's phases over Flower's Grid: replies are fetched so that none can hold up another.

Where clients hold the model, the sums of the last round are on their way to them only with the next one. They are kept
(`Standing`), and given to clients first when the run is resumed.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedveil.client_held.messages import Finish
from fedveil.client_held.server import farewells
from fedveil.crypto.keys import Roster
from fedveil.engine.local import Listen, folded
from fedveil.errors import CheckpointError, Code, ProtocolError, Refusal
from fedveil.flower.client_app import HEADER, ONE_PIECE, PARTS, in_array, parts_of
from fedveil.flower.commands import Events
from fedveil.flower.messages import Present, RollCall, Told, check_present, refusal_of
from fedveil.framing import unpack
from fedveil.protocol.codec import decode, encode
from fedveil.protocol.directory import to_bytes
from fedveil.protocol.messages import Reply
from fedveil.protocol.phases import Ask, Gathered, Heard

_Setup = TypeVar("_Setup", bound=Told)
_Read = TypeVar("_Read")
_FAREWELL = "farewell"


@dataclass(frozen=True, eq=False)
class Standing(Generic[_Setup]):
    """What an attempt has left where clients hold the model: `farewell` brings them to its last version, under the keys
    of `setup`'s attempt."""

    setup: _Setup
    farewell: Finish

    @property
    def reached(self) -> int:
        """The model's version, counted through all attempts."""
        return self.setup.start + self.farewell.version

    def put_into(self, facts: dict[str, Any], parts: dict[str, bytes]) -> None:
        """Have it among what is written of a run."""
        facts["setup"], parts[_FAREWELL] = self.setup.to_text(), encode(self.farewell)

    @staticmethod
    def found_in(
        facts: Mapping[str, Any], parts: Mapping[str, bytes], parse: Callable[[str], _Setup]
    ) -> Standing[_Setup]:
        """What was put there."""
        farewell = decode(parts[_FAREWELL])
        if not isinstance(farewell, Finish):
            raise ValueError(_FAREWELL)
        return Standing(parse(facts["setup"]), farewell)


def read_progress(
    path: Path, read: Callable[[dict[str, Any], dict[str, bytes]], _Read], *, damaged: str
) -> _Read | None:
    """What was written of how far a run has come; None where no round has ended yet."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return read(*unpack(content))
    except (ProtocolError, KeyError, ValueError, TypeError, AttributeError) as reason:
        raise CheckpointError(f"{path} is damaged: {damaged}") from reason


_LOOK = 0.05
_STUCK = 2.0


class Fetcher:
    """Fetches the replies to messages one by one, in threads.

    Flower waits for a reply that was announced and not uploaded, three minutes after its last sign of life and hours if
    a node goes on giving them; whatever is asked for together with that one waits as well. Here one thread waits, and
    another asks for the rest.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._lock = threading.Lock()
        self._asking: set[str] = set()
        self._answered: set[str] = set()
        self._fetched: queue.SimpleQueue[tuple[str, list[Message] | Exception]] = queue.SimpleQueue()
        self._sweep: threading.Thread | None = None
        self._moved = 0.0

    def fetch(self, wanted: Iterable[str], *, until: float) -> list[Message]:
        """What has come, also of what was asked for earlier; nothing is waited for beyond `until`."""
        sweep = threading.Thread(target=self._ask, args=(list(wanted),), daemon=True)
        self._sweep, self._moved = sweep, time.monotonic()
        sweep.start()
        while sweep.is_alive() and (now := time.monotonic()) < until and now - self._moved < _STUCK:
            sweep.join(_LOOK)
        replies: list[Message] = []
        while not self._fetched.empty():
            identifier, fetched = self._fetched.get()
            with self._lock:
                if fetched and not isinstance(fetched, Exception):
                    self._answered.add(identifier)
                self._asking.discard(identifier)
            if isinstance(fetched, Exception):
                raise fetched
            replies += fetched
        return replies

    def _ask(self, wanted: list[str]) -> None:
        for identifier in wanted:
            with self._lock:
                if self._sweep is not threading.current_thread():
                    return  # it was stuck, and another has taken over
                # Flower gives a reply out once: to ask a second time, meanwhile, would be told that there is none. A
                # thread that was slow may still have on its list what another one has been given.
                if identifier in self._asking or identifier in self._answered:
                    continue
                self._asking.add(identifier)
                self._moved = time.monotonic()
            fetched: list[Message] | Exception
            try:
                fetched = list(self._grid.pull_messages([identifier]))
            except httpx.TransportError:  # the SuperLink restarts: it is asked again
                fetched = []
            except Exception as reason:
                fetched = reason
            self._fetched.put((identifier, fetched))


_T = TypeVar("_T")
_Records = dict[str, ArrayRecord | ConfigRecord]
_POLL = (0.05, 0.25)
_TOO_EARLY = 0.75
"""The part of the shortest wait for a first reply so far in which nobody looks for one: every look is a request to
the SuperLink for each client, on the machine that may be needed for the reply."""
_RESPITE, _LONGEST_RESPITE = 4.0, 1.0
"""How long nobody looks after a look, in lengths of that look and in seconds: for many clients it is many requests."""
_LOST, _LEAST_LOST = 3.0, 30.0
"""After how many times as long as the last of at least half of all answers took, and after how many seconds at the
least, a message that has no answer is taken for lost."""
_TRY_AGAIN = 1.0
_ASK_AGAIN = 60.0
_ASSEMBLY = 60.0
_NEWCOMERS = 60.0
_GRACE = 2.0
_GONE = {3, 4, 5, 8}
"""Flower's codes for: the message expired, so did its reply, the node is gone, its app process died."""


@dataclass(eq=False)
class _Sent:
    """One message on its way."""

    client: int
    node: int
    what: str
    round: int | None
    content: RecordDict


@dataclass(eq=False)
class _Phase:
    """What came of sending one request to several nodes."""

    replies: dict[int, Reply] = field(default_factory=dict)
    refused: dict[int, Refusal] = field(default_factory=dict)
    up: int = 0


class FlowerEngine:
    """Clients behind Flower nodes, as an engine.

    A client that has not answered a phase within `deadline` seconds counts as missing; an answer that comes later is
    noted and dropped. `roster`, where the server has one, is what nodes' claims to be a client are checked against.
    `listen` hears what the server sends, and the answers that it takes. Clients behind `workers` read parts of messages
    that are short enough as values, and give the same answer to the same request: it is sent again where it seems lost.
    """

    _kind = "train"
    _raised = Code.FAILED
    """What is said of a node whose app raised an exception."""

    def __init__(
        self,
        grid: Grid,
        setup: Told,
        *,
        clients: int,
        deadline: float,
        events: Events,
        roster: Roster | None = None,
        listen: Listen | None = None,
        workers: bool = False,
    ) -> None:
        self._grid = grid
        self._setup = setup
        self._clients = clients
        self._deadline = deadline
        self._events = events
        self._roster = roster
        self._listen = listen
        self._workers = workers
        self._assembly = min(_ASSEMBLY, deadline)
        self._node_of: dict[int, int] = {}
        self._client_of: dict[int, int] = {}
        self._turned_away: dict[int, float] = {}
        self._last_word = ""
        self._rosters: dict[int, bytes] = {}
        self._overdue: dict[str, _Sent] = {}
        self._spare: set[str] = set()
        self._fetcher = Fetcher(grid)
        self._soonest = math.inf

    @property
    def pinned(self) -> bool:
        """Whether every client of the run says that it has the same roster of everybody's keys."""
        said = set(self._rosters.values())
        return len(self._rosters) == self._clients and len(said) == 1 and b"" not in said

    def assemble(self) -> None:
        """Wait for the run's clients: for all of them a while, for one of them up to the deadline."""
        begun = time.monotonic()
        while True:
            here = self._live()
            self._call_roll(here)
            waited = time.monotonic() - begun
            everybody = len(here) >= self._clients
            if len(self._node_of) == self._clients or (self._node_of and (everybody or waited > self._assembly)):
                break
            if waited > self._deadline or (everybody and here <= self._turned_away.keys()):
                why = f" What they said: {self._last_word}." if self._last_word else ""
                raise ProtocolError(
                    f"no client of the run is there after {waited:.0f} seconds, with {len(here)} nodes online: start "
                    f"SuperNodes, each with --node-config 'fedveil-home=\"…\"'.{why}"
                )
            time.sleep(_TRY_AGAIN)
        absent = [client for client in range(self._clients) if client not in self._node_of]
        if absent:
            who = ", ".join(map(str, absent))
            self._events.note("absent", f"the run begins without clients {who}", clients=absent)

    def has(self, client: int) -> bool:
        """Whether a node has said that it is this client."""
        return client in self._node_of

    def gather(self, ask: Ask, setup: Told | None = None) -> Gathered:
        """One phase: ask everybody who can be reached, fold the replies, and say what came of it."""
        reach = self._reached(ask.to)
        what, number = type(ask.common).__name__, getattr(ask.common, "round", None)
        common = encode(ask.common)
        each = {client: encode(request) for client, request in ask.each.items() if client in reach}
        phase = self._phase(reach, common, each, what=what, number=number, setup=setup)
        self._hear(Heard("request", ask.common, ask.common, to=ask.to))
        for client, private in ask.each.items():
            self._hear(Heard("private", ask.common, private, to=(client,), client=client))
        arrived: list[int] = []
        # In the order of asking, not of arrival: sums of floating-point numbers depend on it.
        for client, reply in ((client, phase.replies[client]) for client in ask.to if client in phase.replies):
            if why := folded(ask.into, reply, client):
                phase.refused[client] = why
                self._note("refused", client, f"the answer of client {client} was refused: {why}", number)
            else:
                self._hear(Heard("reply", ask.common, reply, client=client))
                arrived.append(client)
        missing = tuple(client for client in ask.to if client not in phase.refused and client not in phase.replies)
        for client in missing:
            self._note("missing", client, f"client {client} is missing ({what})", number)
        down = len(common) * len(reach) + sum(map(len, each.values()))
        return Gathered(tuple(arrived), phase.refused, missing, down, phase.up)

    def bring_up_to_date(self, standing: Standing[Any]) -> tuple[int, ...]:
        """Give everybody the last sums of an earlier attempt, under its own keys; returns who is not known to have
        them, and has to be lent the model."""
        everybody = tuple(range(self._clients))
        ask = Ask(everybody, standing.farewell, farewells(standing.farewell.version, everybody))
        done = self.gather(ask, standing.setup)
        return tuple(client for client in everybody if client not in done.arrived)

    def _hear(self, heard: Heard) -> None:
        if self._listen is not None:
            self._listen(heard)

    def _reached(self, wanted: Iterable[int]) -> dict[int, int]:
        """The nodes of those clients that are there; whoever is new is asked who it is first."""
        asked = list(wanted)
        until = time.monotonic() + self._deadline
        while True:
            live = self._live()
            reach = {client: self._node_of[client] for client in asked if self._node_of.get(client) in live}
            if len(reach) < len(asked) and self._call_roll(live):
                continue
            if reach or time.monotonic() > until:
                return reach
            time.sleep(_TRY_AGAIN)  # nobody at all: they may be on their way back

    def _call_roll(self, here: set[int]) -> bool:
        """Ask those of the nodes `here` that are new who they are; returns whether a client was found."""
        now = time.monotonic()
        new = [
            node
            for node in sorted(here)
            if node not in self._client_of and now - self._turned_away.get(node, -_ASK_AGAIN) >= _ASK_AGAIN
        ]
        if not new:
            return False
        call = RollCall(secrets.token_hex(16))
        # Not known by number yet: for this one phase a node goes by its id.
        patience = min(self._deadline, _NEWCOMERS) if self._client_of else self._deadline
        nodes = {node: node for node in new}
        phase = self._phase(nodes, encode(call), {}, what="RollCall", number=None, patience=patience)
        claims: dict[int, list[tuple[int, Present]]] = {}
        for node in new:
            try:
                if node not in phase.replies:
                    raise ProtocolError(str(phase.refused.get(node, "it did not answer")))
                answer = check_present(
                    phase.replies[node],
                    call,
                    lineage=self._setup.lineage,
                    clients=self._clients,
                    roster=self._roster,
                )
            except ProtocolError as reason:
                self._turn_away(node, str(reason))
                continue
            claims.setdefault(answer.client, []).append((node, answer))
        settled = [self._settled(client, several, here) for client, several in claims.items()]
        return any(settled)

    def _settled(self, client: int, claims: list[tuple[int, Present]], here: set[int]) -> bool:
        """Take a node for a client; returns whether it was. Nobody takes the number of one who is there."""
        before = self._node_of.get(client)
        if len(claims) > 1 or before in here:
            whose = f"node {before} is" if before in here else "another node says that it is"
            for node, _ in claims:
                self._turn_away(node, f"it says that it is client {client}, and {whose}")
            return False
        ((node, answer),) = claims
        if before is not None:
            self._client_of.pop(before, None)
            self._note("moved", client, f"client {client} is now behind node {node}, no longer {before}", None)
        self._node_of[client], self._client_of[node] = node, client
        self._rosters[client] = to_bytes(answer.roster)
        return True

    def _turn_away(self, node: int, reason: str) -> None:
        self._turned_away[node], self._last_word = time.monotonic(), reason
        self._events.note("turned away", f"node {node} is not taken for a client: {reason}", node=node)

    def _live(self) -> set[int]:
        return set(self._patiently(self._grid.get_node_ids))

    def _phase(
        self,
        reach: Mapping[int, int],
        common: bytes,
        each: Mapping[int, bytes],
        *,
        what: str,
        number: int | None,
        setup: Told | None = None,
        patience: float | None = None,
    ) -> _Phase:
        """Send, then take replies until all have come or the deadline has passed."""
        told, patience = (setup or self._setup).to_text(), patience or self._deadline
        shared, own = self._records(told, patience, common, each)
        order = [
            _Sent(client, node, what, number, self._content(client, what, {**shared, **own.get(client, {})}))
            for client, node in reach.items()
        ]
        phase = _Phase()
        if not order:
            return phase
        # Flower takes no answer after this, so that "missing" means: never received.
        sent = self._pushed(order, patience)
        begun = time.monotonic()
        until, pause = begun + patience + _GRACE, _POLL[0]
        again = math.inf
        if math.isfinite(self._soonest):
            time.sleep(min(_TOO_EARLY * self._soonest, patience))
        while sent and (looked := time.monotonic()) < until:
            replies = self._fetcher.fetch([*sent, *self._overdue], until=until)
            if any(reply.metadata.reply_to_message_id in sent for reply in replies):
                self._soonest = min(self._soonest, time.monotonic() - begun)
            for reply in replies:
                self._take(reply, sent, phase)
            waited = time.monotonic() - begun
            if replies:
                again = max(_LOST * waited, _LEAST_LOST)
            elif self._workers and waited > again and 2 * len(phase.replies) >= len(order) and waited < patience:
                sent |= self._sent_again(sent, patience - waited)
                again = 2 * waited
            pause = min(pause * 1.5, _POLL[1])
            if sent:
                time.sleep(max(pause, min(_RESPITE * (time.monotonic() - looked), _LONGEST_RESPITE)))
        for message in sent.values():
            message.content = RecordDict()
        self._overdue.update(sent)
        return phase

    def _pushed(self, order: Sequence[_Sent], patience: float) -> dict[str, _Sent]:
        """Send messages, which Flower keeps for so many seconds; by the identifiers that it gives them."""
        messages = []
        for one in order:
            group = "" if one.round is None else str(one.round + 1)
            messages.append(Message(one.content, one.node, self._kind, ttl=patience, group_id=group))
        identifiers = self._patiently(lambda: self._grid.push_messages(messages))
        return {identifier: one for identifier, one in zip(identifiers, order, strict=True) if identifier}

    def _sent_again(self, sent: Mapping[str, _Sent], patience: float) -> dict[str, _Sent]:
        """Send what nobody has answered to nodes that are there once more: a busy SuperLink answers some requests with
        an error, and the node then lets go of the message, or of its reply."""
        live = self._live()
        order = [one for one in dict.fromkeys(sent.values()) if one.node in live]
        for one in order:
            self._note_of(
                one, "again", f"client {one.client} is asked again for a {one.what}: others answered long ago"
            )
        return self._pushed(order, patience) if order else {}

    def _records(
        self, told: str, patience: float, common: bytes, each: Mapping[int, bytes]
    ) -> tuple[_Records, dict[int, _Records]]:
        """A request as records: what everybody is sent, which Flower takes once, and what goes to one client alone."""
        facts: dict[str, Any] = {"setup": told, "patience": patience}
        if self._workers:
            facts["request"] = secrets.token_hex(16)
        if self._workers and len(common) <= ONE_PIECE and all(len(private) <= ONE_PIECE for private in each.values()):
            alone: dict[int, _Records] = {
                client: {PARTS: ConfigRecord({"private": private})} for client, private in each.items()
            }
            return {HEADER: ConfigRecord({**facts, "common": common})}, alone
        array = in_array(common)
        both = {client: ArrayRecord({"common": array, "private": in_array(one)}) for client, one in each.items()}
        everybodys: _Records = {HEADER: ConfigRecord(facts), PARTS: ArrayRecord({"common": array})}
        return everybodys, {client: {PARTS: record} for client, record in both.items()}

    def _content(self, client: int, what: str, records: Mapping[str, ArrayRecord | ConfigRecord]) -> RecordDict:
        """What a client is sent with a request of the kind `what`."""
        return RecordDict(dict(records))

    def _heard(self, client: int, what: str, content: RecordDict) -> None:
        """What came with a client's answer, besides it; nothing of it has been looked at."""

    def _take(self, reply: Message, sent: dict[str, _Sent], phase: _Phase) -> None:
        """Sort one reply in: an answer, a refusal, an error of Flower's, or something nobody waits for."""
        identifier = reply.metadata.reply_to_message_id
        late = self._overdue.pop(identifier, None)
        if late is not None:
            if not reply.has_error():
                text = f"client {late.client} answered a {late.what} too late: not counted"
                self._note("late", late.client, text, late.round)
            return
        message = sent.pop(identifier, None)
        twins = [other for other, one in sent.items() if one is message]
        if identifier in self._spare or (twins and reply.has_error()):
            return  # sent more than once: one answer is enough, and an error is not one
        for twin in twins:
            del sent[twin]
            self._spare.add(twin)
        if message is None:
            self._events.note("unasked", "an answer that nobody waits for, or the second to one message: not counted")
            return
        if reply.has_error():
            if reply.error.code not in _GONE:
                phase.refused[message.client] = refusal_of(self._raised)
            self._note_of(message, "error", f"Flower reports error {reply.error.code} for client {message.client}")
            return
        try:
            answer, size = _opened(reply.content)
        except _RefusedError as refusal:
            phase.refused[message.client] = refusal.why
            self._note_of(message, "refused", f"client {message.client} refused a {message.what}: {refusal}")
            return
        phase.up += size
        phase.replies[message.client] = answer
        self._heard(message.client, message.what, reply.content)

    def _note_of(self, message: _Sent, event: str, text: str) -> None:
        if message.what != "RollCall":  # there it is the node that is turned away, and that is noted once
            self._note(event, message.client, text, message.round)

    def _note(self, event: str, client: int, text: str, number: int | None) -> None:
        facts = {} if number is None else {"round": number + 1}
        self._events.note(event, text, client=client, **facts)

    def _patiently(self, call: Callable[[], _T]) -> _T:
        """Do what the SuperLink may be too busy restarting for, until the deadline."""
        until = time.monotonic() + self._deadline
        while True:
            try:
                return call()
            except httpx.TransportError as reason:
                if time.monotonic() > until:
                    raise ProtocolError("the SuperLink cannot be reached any more") from reason
                time.sleep(_TRY_AGAIN)


class _RefusedError(Exception):
    """A client's refusal, or an answer that cannot be read; the text is ours."""

    def __init__(self, why: Refusal) -> None:
        super().__init__(why.text)
        self.why = why


def _opened(content: RecordDict) -> tuple[Reply, int]:
    try:
        code = content.config_records[HEADER]["code"]
        if code:
            raise _RefusedError(refusal_of(str(code)))
        data = parts_of(content)["reply"]
        answer = decode(data)
    except _RefusedError:
        raise
    except ProtocolError as reason:
        raise _RefusedError(Refusal(reason.code, f"its answer cannot be read: {reason}", came=True)) from reason
    except Exception as reason:  # Flower's records are the client's too, and read when they are first used
        raise _RefusedError(Refusal(Code.PROTOCOL, "its answer is not a FedVeil message", came=True)) from reason
    if not isinstance(answer, Reply):
        raise _RefusedError(Refusal(Code.PROTOCOL, "its answer is not a reply", came=True))
    return answer, len(data)
