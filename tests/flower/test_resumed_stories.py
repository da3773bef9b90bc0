"""Clients who were told different sums share nothing after a resume either: real message handlers, a lying server."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fedveil.client_held.messages import Begin, Finish
from fedveil.client_held.server import RelayRole, RelayState
from fedveil.config import RunConfig
from fedveil.engine.local import folded
from fedveil.errors import Code, Refusal
from fedveil.flower.client_memory import Memory
from fedveil.flower.home import Home
from fedveil.flower.message_handler import MessageHandler, build_side
from fedveil.flower.messages import Setup
from fedveil.framing import pack, unpack
from fedveil.protocol.client_state import Held
from fedveil.protocol.codec import decode, encode
from fedveil.protocol.directory import Announce, Directory, Epoch, Hello, Nonce, Nonces, Ready, beacon, from_bytes
from fedveil.protocol.key_agreement import Keyring
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.phases import Ask, Gathered, RoundDone
from fedveil.secrets import OsSecrets
from fedveil.tensors import flatten
from flower.in_process import make_homes
from flower.test_message_handler import FACTS, LINEAGE

CLIENTS, VICTIM = 5, 4
Deliver = Callable[[int, Request, Request | None], Reply | Code]
CONFIG = RunConfig(
    scheme="ckks-fedavg",
    cipher="pads",
    clients=CLIENTS,
    rounds=6,
    seed=3,
    batch_size=32,
    loss="cross-entropy",
    client_lr=0.1,
    secrets="os",
    model_options={"depth": 1, "width": 4},
)


@dataclass
class Nodes:
    """Message handlers, each with a home of its own."""

    homes: list[Path]
    handlers: dict[int, MessageHandler] = field(default_factory=dict)
    sent: Any = field(default_factory=itertools.count)

    def deliver(self, setup: Setup, client: int, request: Request, private: Request | None) -> Reply | Code:
        parts = {"common": encode(request)} | ({} if private is None else {"private": encode(private)})
        handler = self.handlers.setdefault(client, MessageHandler(self.homes[client]))
        parcel = pack({"setup": setup.to_text(), "message": f"m{next(self.sent)}"}, parts)
        header, answer = unpack(handler.handle(parcel))
        return Code(header["code"]) if header["code"] else decode(answer["reply"])  # type: ignore[return-value]

    def held(self, client: int) -> Held:
        known = Memory(self.homes[client] / "state").recall(LINEAGE, device=torch.device("cpu"))
        assert known is not None
        assert known.state.held is not None
        return known.state.held


class Run:
    """An honest server's run, step by step; `via` is how its messages are delivered."""

    def __init__(self, nodes: Nodes, setup: Setup, *, via: Deliver | None = None) -> None:
        common = build_side(Home.read(nodes.homes[0]), setup, start=None)
        assert common.architecture is not None
        self.relay = RelayRole(
            common.common.scheme,
            common.architecture,
            RelayState(0, setup.attempt),
            secrets=OsSecrets(),
            cohort=common.common.cohort,
            rounds=CONFIG.rounds,
            name=setup.name,
        )
        self.via: Deliver = via or (lambda *sent: nodes.deliver(setup, *sent))
        self.done: list[RoundDone] = []
        self._steps = self.relay.run()
        self.ask = self._next(None)

    def _next(self, answer: Gathered | None) -> Ask | None:
        try:
            step = self._steps.send(answer)
            while not isinstance(step, Ask):
                if isinstance(step, RoundDone):
                    self.done.append(step)
                step = self._steps.send(None)
        except StopIteration:
            return None
        return step

    def until(self, kind: type[Request] | None = None, *, round: int = 0) -> Any:
        """The request of a kind and round; to the run's end without one."""
        while (ask := self.ask) is not None:
            if kind is not None and isinstance(ask.common, kind) and getattr(ask.common, "round", round) == round:
                return ask.common
            answers = {client: self.via(client, ask.common, ask.each.get(client)) for client in ask.to}
            refused = {client: Refusal(one, one.value) for client, one in answers.items() if isinstance(one, Code)}
            replies = {client: one for client, one in answers.items() if isinstance(one, Reply)}
            refused |= {client: why for client, one in replies.items() if (why := folded(ask.into, one, client))}
            arrived = tuple(client for client in replies if client not in refused)
            self.ask = self._next(Gathered(arrived, refused, (), 0, 0))
        return None

    def uploads(self) -> list[list[int] | None]:
        """Whose uploads each round's sum is made of; None where it has none."""
        return [None if one.aggregate is None else one.aggregate.contributors.tolist() for one in self.done]


def told_differently(nodes: Nodes, setup: Setup) -> None:
    """One client is told the first sums and no more; the others that their round has failed, and the next one's."""
    run = Run(nodes, setup)
    run.until(Begin, round=1)

    def apart(client: int, request: Request, private: Request | None) -> Reply | Code:
        if isinstance(request, Begin) and client == VICTIM:
            nodes.deliver(setup, client, request, private)
            return Code.PROTOCOL  # as the server has it
        if isinstance(request, Begin):
            request = replace(request, version=0, latest=None)
        return nodes.deliver(setup, client, request, private)

    run.via = apart
    run.until(Begin, round=2)
    second = run.relay.standing[1]
    assert second is not None
    for client in range(CLIENTS):
        latest = None if client == VICTIM else replace(second, version=1)
        ended: Any = nodes.deliver(setup, client, Finish(1, latest), None)
        assert ended.version == 1


def test_after_a_resume_nobody_uploads_together_with_who_was_told_other_sums(tmp_path: Path) -> None:
    nodes = Nodes(make_homes(tmp_path, CLIENTS))
    setup = Setup.of(CONFIG, FACTS, lineage=LINEAGE, attempt=0)
    told_differently(nodes, setup)
    held = [nodes.held(client) for client in range(CLIENTS)]
    assert not torch.equal(held[VICTIM].weights.parameters, held[0].weights.parameters)
    again = Run(nodes, replace(setup, attempt=1, start=1))
    again.until()
    assert len(again.done) == CONFIG.rounds
    together = [one for one in again.uploads() if one is not None]
    assert together  # the others go on
    assert all(VICTIM not in one for one in together)


def test_after_a_resume_clients_who_were_told_the_same_upload_together(tmp_path: Path) -> None:
    """The control, which would fail if a story that is carried along kept anybody from anything."""
    nodes = Nodes(make_homes(tmp_path, CLIENTS))
    setup = Setup.of(CONFIG, FACTS, lineage=LINEAGE, attempt=0)
    run = Run(nodes, setup)
    latest = run.until(Begin, round=1).latest
    for client in range(CLIENTS):
        nodes.deliver(setup, client, Finish(1, latest), None)
    again = Run(nodes, replace(setup, attempt=1, start=1))
    again.until()
    assert again.uploads() == [list(range(CLIENTS))] * CONFIG.rounds


def finished(nodes: Nodes, setup: Setup, *, rounds: int) -> list[Held]:
    """What clients hold after so many honest rounds."""
    latest = Run(nodes, setup).until(Begin, round=rounds).latest
    for client in range(CLIENTS):
        ended: Any = nodes.deliver(setup, client, Finish(rounds, latest), None)
        assert ended.version == rounds
    return [nodes.held(client) for client in range(CLIENTS)]


def test_nobody_takes_a_model_that_the_server_can_make_for_one_that_clients_have_come_to(tmp_path: Path) -> None:
    """Of attempts that begin with versions which nobody has, one counted back from the other (7, then 6)."""
    nodes = Nodes(make_homes(tmp_path, CLIENTS))
    setup = Setup.of(CONFIG, FACTS, lineage=LINEAGE, attempt=0)
    honest = finished(nodes, setup, rounds=2)
    for client in range(CLIENTS):
        told = replace(CONFIG, seed=999 if client == VICTIM else 1000)
        entered = replace(Setup.of(told, FACTS, lineage=LINEAGE, attempt=1), start=7)
        hello = Hello(entered.name, Epoch(0, 0, CONFIG.rounds, CLIENTS, CLIENTS, 0))
        assert isinstance(nodes.deliver(entered, client, hello, None), Reply)
    again = Run(nodes, replace(setup, attempt=2, start=6))
    again.until()
    assert not any(again.uploads())
    for client in range(CLIENTS):  # what they had come to is not lost
        (kept,) = (nodes.homes[client] / "models").glob(f"{LINEAGE}.version-2.safetensors")
        stored = load_file(kept)
        assert torch.equal(flatten(list(stored.values())).sort().values, honest[0].weights.parameters.sort().values)


def test_sums_under_which_nothing_was_masked_are_part_of_the_story_too(tmp_path: Path) -> None:
    """A run that begins with nothing hidden goes on under pads: each client was told other sums, and their models
    differ."""
    nodes = Nodes(make_homes(tmp_path, CLIENTS))
    bare = replace(CONFIG, scheme="paraaegis", cipher=None, share=0.0, epsilon=8.0)
    setup = Setup.of(bare, FACTS, lineage=LINEAGE, attempt=0)
    latest = Run(nodes, setup).until(Begin, round=1).latest
    assert latest.hidden is None
    for client in range(CLIENTS):
        forged = latest if client == VICTIM else replace(latest, rest=latest.rest + 1000)
        ended: Any = nodes.deliver(setup, client, Finish(1, forged), None)
        assert ended.version == 1
    again = Run(nodes, Setup.of(CONFIG, FACTS, lineage=LINEAGE, attempt=1, start=1))
    again.until()
    assert any(again.uploads())
    assert all(VICTIM not in one for one in again.uploads() if one is not None)


class Invented:
    """One client is shown a directory of its own: the founder's entry and its own are true, the other clients' keys and
    sizes are the server's making."""

    def __init__(self, deliver: Deliver, *, samples: int) -> None:
        self._deliver, self._samples = deliver, samples
        self._true: Directory | None = None
        self._told: Directory | None = None
        self._nonces: dict[int, bytes] = {}

    def __call__(self, client: int, request: Request, private: Request | None) -> Reply | Code:
        if client != VICTIM or not isinstance(request, Directory | Nonces):
            return self._deliver(client, request, private)
        if isinstance(request, Directory):
            self._true, self._told = request, self._instead_of(request)
            shown = self._deliver(client, self._told, private)
            assert isinstance(shown, Nonce)
            return replace(shown, digest=from_bytes(request.digest))
        assert self._true is not None
        assert self._told is not None
        known = [
            from_bytes(self._nonces[one]) if one in self._nonces else request.nonces[one] for one in range(CLIENTS)
        ]
        assert isinstance(
            self._deliver(client, Nonces(from_bytes(self._told.digest), torch.stack(known)), private), Ready
        )
        return Ready(client, from_bytes(beacon(self._true, request)))

    def _instead_of(self, true: Directory) -> Directory:
        said = []
        for one in range(CLIENTS):
            if one in (0, VICTIM):
                columns = (true.identities, true.keys, true.signatures, true.commitments)
                said.append(Announce(one, int(true.samples[one]), *(column[one] for column in columns)))
                continue
            ring = Keyring(one, true.run, identity=os.urandom(32), key=os.urandom(32))
            self._nonces[one] = os.urandom(32)
            ring.enter(true.epoch, lambda one=one: self._nonces[one])
            said.append(ring.announce(self._samples))
        return Directory.of(true.run, said, true.epoch)


def test_what_sums_are_divided_by_is_part_of_the_story_too(tmp_path: Path) -> None:
    """The same sums move a model elsewhere under other sizes; where nothing is masked no directory is bound to them."""
    nodes = Nodes(make_homes(tmp_path, CLIENTS))
    bare = replace(CONFIG, scheme="paraaegis", cipher=None, share=0.0, epsilon=8.0)
    setup = Setup.of(bare, FACTS, lineage=LINEAGE, attempt=0)
    first = Run(nodes, setup)
    first.via = Invented(first.via, samples=2000)
    latest = first.until(Begin, round=1).latest
    for client in range(CLIENTS):
        ended: Any = nodes.deliver(setup, client, Finish(1, latest), None)
        assert ended.version == 1
    held = [nodes.held(client) for client in range(CLIENTS)]
    assert torch.equal(held[1].weights.parameters, held[0].weights.parameters)
    assert not torch.equal(held[VICTIM].weights.parameters, held[0].weights.parameters)
    again = Run(nodes, Setup.of(CONFIG, FACTS, lineage=LINEAGE, attempt=1, start=1))
    again.until()
    assert any(again.uploads())
    assert all(VICTIM not in one for one in again.uploads() if one is not None)


def test_who_has_missed_an_attempt_without_a_sum_goes_on_with_the_others(tmp_path: Path) -> None:
    nodes = Nodes(make_homes(tmp_path, CLIENTS))
    setup = Setup.of(CONFIG, FACTS, lineage=LINEAGE, attempt=0)
    finished(nodes, setup, rounds=1)
    broken_off = Run(nodes, replace(setup, attempt=1, start=1))

    def without_one(client: int, request: Request, private: Request | None) -> Reply | Code:
        if client == VICTIM:
            return Code.PROTOCOL
        return nodes.deliver(replace(setup, attempt=1, start=1), client, request, private)

    broken_off.via = without_one
    broken_off.until(Begin, round=0)
    again = Run(nodes, replace(setup, attempt=2, start=1))
    again.until()
    assert again.uploads() == [list(range(CLIENTS))] * CONFIG.rounds
