"""How an epoch begins: clients introduce themselves, everybody learns who takes part, and graphs are drawn.

Why there are nonces and commitments at all is told in `protocol/directory.py`. The states, side by side:

    server (`Introductions`)                           client (`introduce`, `Keyring`)

    stale                                              no keys of this run
      │  Hello(run, epoch)  ─────────────────────────►   │  makes its run key, once; draws a nonce for the epoch
      │  ◄──────────  Announce(samples, keys, commitment)  │  and commits to it
    announced                                          entered
      │  Directory(everybody's)  ────────────────────►   │  checks its own entry, the roster, and that nothing it
      │  ◄────────────────────────────────  Nonce(mine)  │  was told before in this run has changed; shows its nonce
    shown                                              taken
      │  Nonces(everybody's)  ───────────────────────►   │  holds each to its commitment; the beacon follows
      │  ◄───────────────────────────────────────  Ready   │
    ready, for up to 64 rounds                         ready: it answers rounds of this epoch

Where clients need each other's sizes and no keys, the directory alone is confirmed with a Ready, its digest is the
beacon, and there are no nonces.

What ends an epoch: its rounds are over; somebody answers whom its schedule asks and who is not of it (while epochs are
to spare); a client has no privacy left to spend (`leave_out`); the uplink owes a client what cannot be had (`renew`).

What makes an epoch void: a nonce that stays away. It begins anew without whoever kept it back, since leaving out one
nonce would be a choice between two graphs; and who has voided three is asked no more.

What the server keeps: everybody's announcement of the run, to which each is held (sizes, keys); the number of the next
epoch; the present directory, its nonces and beacon; who has confirmed it. What a client keeps, in its `Keyring`: its
signing and agreement keys, the directory it has taken last, the epoch it has entered, its nonce, the beacon.

What a client refuses: an epoch that is not later than its last, or on another schedule; one too many in a run; a second
directory of one epoch, once it has shown its nonce; a directory that contradicts an earlier one, or shows it a key, a
size or a commitment that is not its own; a nonce that nobody committed to; cohorts by a seed the server has picked.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from fedveil.errors import ProtocolError, Refusal
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import decode, encode
from fedveil.protocol.directory import (
    NONCE_BYTES,
    Announce,
    Cohort,
    Directory,
    Epoch,
    Hello,
    Nonce,
    Nonces,
    Ready,
    beacon,
    check_nonce,
    committed,
    from_bytes,
    outsized,
    to_bytes,
)
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.phases import Ask, Confirmations, Gathered, Inbox
from fedveil.secrets import Guarded, SecretSource, StoredSecret

if TYPE_CHECKING:
    from fedveil.crypto.keys import PairSecret, Roster, RunKey


Introduction = Literal["none", "sizes", "keys"]
Phases = Generator[Ask, "Gathered | None", None]

INTRODUCTIONS: dict[Introduction, tuple[type[Request | Reply], ...]] = {
    "none": (),
    "sizes": (Hello, Announce, Directory, Ready),
    "keys": (Hello, Announce, Directory, Nonce, Nonces, Ready),
}
"""What clients and server send each other before the first round."""

KEY_SIZES: dict[Introduction, dict[str, int]] = {
    "none": {},
    # Sizes alone are signed too: a roster is to vouch for them as it does for keys.
    "sizes": {"identity": 32, "key": 0, "signature": 64, "commitment": 0},
    "keys": {"identity": 32, "key": 32, "signature": 64, "commitment": NONCE_BYTES},
}
"""The bytes of keys, signatures and commitments in an introduction."""

_FEW_CLIENTS = 512
"""Among so many, secrets agreed on with others are kept from round to round."""

_MOST_VOIDED = 3
"""So many epochs may a client void, by keeping back its nonce, before it is asked no more."""
_NOT_TAKEN = "a client has not taken the directory it was sent"


def introduce(
    state: ClientState,
    request: Hello | Directory | Nonces,
    *,
    samples: int,
    how: Introduction,
    secrets: SecretSource,
    roster: Roster | None,
    identity: bytes | None,
) -> tuple[ClientState, Reply]:
    """Client side: announce and commit; take the directory and show the nonce; take everybody's nonces."""
    if isinstance(request, Hello):
        ring = state.keys
        if ring is None or ring.run != request.run:
            identity = identity or secrets.stream("identity", state.client).bytes(32)
            key = secrets.stream("run key", state.client, request.run).bytes(32) if how == "keys" else b""
            ring = Keyring(state.client, request.run, identity=identity, key=key)
        number = request.epoch.number
        if how == "keys" and not secrets.simulation:  # simulated nonces would hide nothing from who picks the seed
            request.epoch.check_shuffled()
        ring.enter(
            request.epoch,
            lambda: secrets.stream("graph nonce", state.client, request.run, number).bytes(NONCE_BYTES),
        )
        return replace(state, keys=ring), ring.announce(samples)
    if isinstance(request, Nonces):
        return state, Ready(state.client, from_bytes(state.ring().draw(request)))
    nonce = state.ring().accept(request, samples=samples, roster=roster)
    if not nonce:
        return state, Ready(state.client, from_bytes(request.digest))
    return state, Nonce(state.client, from_bytes(request.digest), from_bytes(nonce))


class _Announcements(Inbox[Announce]):
    """Collects announcements, one per client, which keeps to what it said `earlier` in the same run."""

    def __init__(self, how: Introduction, run: str, earlier: Mapping[int, int]) -> None:
        self._lengths = KEY_SIZES[how]
        self._run = run
        self._earlier = earlier
        self.heard: dict[int, Announce] = {}

    def ask(self, clients: Sequence[int]) -> None:
        """From these, one announcement each for a new epoch."""
        self.expect(Announce, clients, sizes=self._lengths)

    def _fold(self, reply: Announce) -> None:
        if reply.samples < 1:
            raise ProtocolError("an announcement of a client without samples")
        known = self.heard.get(reply.client)
        before = self._earlier.get(reply.client, reply.samples if known is None else known.samples)
        if reply.samples != before:
            raise ProtocolError(
                f"a client announces {reply.samples:,} samples that announced {before:,} earlier in this run: it is "
                "held to those"
            )
        if known is not None and _lasting(known) != _lasting(reply):
            raise ProtocolError("a client announces other keys than before in this run")
        if any(self._lengths.values()):
            from fedveil.crypto.keys import check_key_signature

            # One that the others would refuse must not get into the directory: they would refuse all of it.
            identity, key, signature = _lasting(reply)
            said = {"run": self._run, "client": reply.client, "public": key, "samples": reply.samples}
            try:
                check_key_signature(identity, signature, **said)  # type: ignore[arg-type]
            except ProtocolError as reason:
                raise ProtocolError("an announcement is not signed by the key it names") from reason
        self.heard[reply.client] = reply


def _lasting(said: Announce) -> tuple[bytes, bytes, bytes]:
    """What stays the same from epoch to epoch, besides the sample count that it is signed with."""
    return to_bytes(said.identity), to_bytes(said.key), to_bytes(said.signature)


def _agreements(digest: bytes, clients: Collection[int]) -> Confirmations[Ready]:
    """Collects consents to one directory or beacon."""
    return Confirmations(Ready, clients, "digest", digest, otherwise=_NOT_TAKEN)


class _Shown(Inbox[Nonce]):
    """Collects the nonces that belong to a directory's commitments."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.nonces: dict[int, bytes] = {}
        self.expect(Nonce, directory.present.tolist())

    def _fold(self, reply: Nonce) -> None:
        if to_bytes(reply.digest) != self._directory.digest:
            raise ProtocolError(_NOT_TAKEN)
        nonce = to_bytes(reply.nonce)
        check_nonce(self._directory, reply.client, nonce)
        self.nonces[reply.client] = nonce

    def told(self) -> Nonces:
        """Everybody's, in the order of the directory."""
        content = b"".join(self.nonces[client] for client in self._directory.present.tolist())
        return Nonces(from_bytes(self._directory.digest), from_bytes(content).reshape(-1, NONCE_BYTES))


class Introductions:
    """Server side: who is known, who is of the epoch, and who knows its beacon.

    Nobody takes part who claims more than `max_size_ratio` times the median number of samples, or another number than
    `earlier` in the same run.
    """

    def __init__(
        self,
        how: Introduction,
        run: str,
        *,
        cohort: Cohort,
        rounds: int,
        max_size_ratio: float = math.inf,
        earlier: Mapping[int, int] | None = None,
    ) -> None:
        self.how = how
        self._announced = _Announcements(how, run, {} if earlier is None else earlier)
        self._max_size_ratio = max_size_ratio
        self._run = run
        self._cohort = cohort
        self._rounds = rounds
        self._next = 0
        self._stale = True
        self._left: set[int] = set()
        self._voided: Counter[int] = Counter()
        self._nonces: Nonces | None = None
        self._ready: set[int] = set()
        self.directory: Directory | None = None
        self.beacon = b""
        self.refused: dict[int, Refusal] = {}

    def steps(self, round: int, *, again: bool = True) -> Phases:
        """Have an epoch that this round belongs to.

        A new one begins where the last has run out or was given up, and, with `again`, where somebody answers that
        the schedule asks and that is not of it. `again`, too, whoever has not confirmed the beacon is told once more.
        """
        if self._stale or self.directory is None or round not in self.directory.epoch:
            yield from self._begin(self._candidates(), round)
            return
        if not again:
            return
        present = set(self.directory.present.tolist())
        apart = present.union(self.left_out)
        asked = set(self.directory.epoch.drawn(round, self.beacon))
        strangers = [client for client in self._candidates() if client in asked and client not in apart]
        if strangers and self._spare(round):
            arrived = yield from self._hello(strangers, self._epoch(round))
            if arrived:
                yield from self._begin(sorted(present - self._left), round, already=arrived)
                return
        yield from self._tell([client for client in self.cohort(round) if client not in self._ready])

    def leave_out(self, clients: Collection[int]) -> None:
        """Begin the next epoch without these."""
        self._left |= set(clients)
        self._stale = True

    def renew(self) -> None:
        """Begin a new epoch before the next round."""
        self._stale = True

    def cohort(self, round: int) -> tuple[int, ...]:
        """The clients of a round; nobody where no epoch could be begun."""
        if self._stale or self.directory is None or round not in self.directory.epoch:
            return ()
        return self.directory.cohort(round, self.beacon)

    def known(self, clients: Sequence[int]) -> tuple[int, ...]:
        """Those of `clients` that have confirmed the epoch's beacon."""
        return tuple(client for client in clients if client in self._ready)

    @property
    def present(self) -> tuple[int, ...]:
        """Who is of the present epoch; nobody where there is none."""
        return () if self._stale or self.directory is None else tuple(self.directory.present.tolist())

    @property
    def left_out(self) -> dict[int, str]:
        """Who is of no epoch because of the size it claims, and why."""
        return outsized({client: said.samples for client, said in self._announced.heard.items()}, self._max_size_ratio)

    def _candidates(self) -> list[int]:
        gone = {client for client, times in self._voided.items() if times >= _MOST_VOIDED}
        return [client for client in range(self._cohort.clients) if client not in self._left and client not in gone]

    def _epoch(self, round: int) -> Epoch:
        drawn = self._cohort
        schedule = (drawn.clients, drawn.size, drawn.seed, drawn.shuffled, drawn.rate, drawn.least)
        return Epoch(self._next, round, self._rounds, *schedule)

    def _spare(self, round: int) -> bool:
        """Whether a further epoch leaves enough of them for the rounds to come."""
        epoch = self._epoch(round)
        return epoch.number + -(-(epoch.rounds - round) // epoch.window) < epoch.most

    def _hello(self, clients: Sequence[int], epoch: Epoch) -> Generator[Ask, Gathered | None, tuple[int, ...]]:
        self._announced.ask(clients)
        answer = yield Ask(tuple(clients), Hello(self._run, epoch), self._announced)
        assert answer is not None
        self.refused.update(answer.refused)
        return answer.arrived

    def _begin(self, clients: Sequence[int], round: int, *, already: tuple[int, ...] = ()) -> Phases:
        """Draw a new epoch; where a nonce stays away, again without the client that kept it back."""
        while True:
            epoch = self._epoch(round)
            if epoch.number >= epoch.most or not (clients or already):
                return
            announced = (yield from self._hello(clients, epoch)) if clients else ()
            self._next += 1
            # Before anybody shows a nonce: a round with a size out of proportion in it would be refused by all.
            present = {*announced, *already} - set(self.left_out)
            if not present:
                return
            directory = Directory.of(self._run, self._announced.heard.values(), epoch, present)
            shown = _Shown(directory)
            into = _agreements(directory.digest, present) if self.how == "sizes" else shown
            answer = yield Ask(tuple(sorted(present)), directory, into)
            assert answer is not None
            self.refused.update(answer.refused)
            if set(answer.arrived) == present:
                break
            # Not with the nonces of some: who is left out would be a choice made after the graphs are known.
            self._voided.update(present - set(answer.arrived))
            clients, already = sorted(answer.arrived), ()
        self.directory, self._stale, self._ready = directory, False, set()
        if self.how == "sizes":
            self.beacon, self._ready = directory.digest, present
            return
        self._nonces = shown.told()
        self.beacon = beacon(directory, self._nonces)
        yield from self._tell(sorted(present))

    def _tell(self, clients: Sequence[int]) -> Phases:
        if not clients or self._nonces is None:
            return
        answer = yield Ask(tuple(clients), self._nonces, _agreements(self.beacon, clients))
        assert answer is not None
        self.refused.update(answer.refused)
        self._ready |= set(answer.arrived)


class Keyring(Guarded):
    """Identity, agreement key and the run's directory; pair secrets are agreed on when first used.

    `epoch` is the one it has announced itself for, with a nonce of its own; `beacon` belongs to the directory, and is
    empty until all nonces have been shown. A ring without an agreement key serves uplinks that tie clients together by
    their sizes alone: no graph is drawn, and the beacon is the directory's digest.
    """

    def __init__(
        self, client: int, run: str, *, identity: bytes, key: bytes, directory: Directory | None = None
    ) -> None:
        self.client = client
        self.run = run
        self.directory = directory
        self.epoch: Epoch | None = None
        self.beacon = b""
        self._nonce = b""
        self._stored = (identity, key)
        self._pairs: dict[int, PairSecret] = {}
        self._round = -1
        from fedveil.crypto.keys import Identity, RunKey

        self._identity = Identity(StoredSecret(identity))
        self._key: RunKey | None = RunKey(StoredSecret(key)) if key else None

    def enter(self, epoch: Epoch, draw: Callable[[], bytes]) -> None:
        """Commit to a nonce for an epoch: once, for epochs in ascending order, on the schedule of the run."""
        epoch.check()
        mine = self.epoch
        if mine is not None:
            if epoch == mine:
                return
            if epoch.schedule != mine.schedule:
                raise ProtocolError(f"client {self.client} was told another schedule of rounds than before in this run")
            if epoch.number <= mine.number or epoch.first < mine.first:
                raise ProtocolError(
                    f"client {self.client} was asked to enter epoch {epoch.number + 1} at round {epoch.first + 1} "
                    f"after epoch {mine.number + 1} at round {mine.first + 1}: epochs follow each other, and each is "
                    "drawn once"
                )
        self.epoch, self._nonce = epoch, draw() if self._key is not None else b""

    def announce(self, samples: int) -> Announce:
        """What the others need to know, signed."""
        public = b"" if self._key is None else self._key.public
        signature = self._identity.sign_key(run=self.run, client=self.client, public=public, samples=samples)
        return Announce(
            self.client,
            samples,
            from_bytes(self._identity.public),
            from_bytes(public),
            from_bytes(signature),
            from_bytes(self._commitment()),
        )

    def _commitment(self) -> bytes:
        number = 0 if self.epoch is None else self.epoch.number
        return committed(self._nonce, run=self.run, epoch=number, client=self.client)

    def accept(self, directory: Directory, *, samples: int, roster: Roster | None) -> bytes:
        """Take the run's directory, or refuse it and say whose entry is wrong; gives the nonce it may now show."""
        directory.check()
        if directory.run != self.run:
            raise ProtocolError(f"client {self.client} was sent the directory of another run")
        if directory.epoch != self.epoch:
            raise ProtocolError(f"client {self.client} was sent the directory of an epoch it has not entered")
        own = self.announce(samples)
        identity, key, _, counted = directory.entry(self.client)
        if (from_bytes(identity).tolist(), from_bytes(key).tolist(), counted) != (
            own.identity.tolist(),
            own.key.tolist(),
            samples,
        ):
            raise ProtocolError(
                f"the directory shows client {self.client} another key or sample count than its own: "
                "somebody on the way has replaced it"
            )
        if directory.commitment(self.client) != self._commitment():
            raise ProtocolError(
                f"the directory shows client {self.client} another commitment than its own: somebody on the way has "
                "replaced it"
            )
        known = self.directory
        if known is not None and not directory.agrees_with(known):
            raise ProtocolError(
                f"the directory sent to client {self.client} contradicts the one of this run it already has"
            )
        if known is not None and known.epoch == directory.epoch:
            if known.digest != directory.digest:
                raise ProtocolError(
                    f"client {self.client} was sent a second directory of one epoch, after it has shown its nonce: a "
                    "server could pick the graph that suits it"
                )
            return self._nonce
        self.take(directory, roster=roster)
        self.beacon = b"" if self._key is not None else directory.digest
        return self._nonce

    def take(self, directory: Directory, *, roster: Roster | None) -> None:
        """Go by a directory from now on, unless it contradicts the roster."""
        for peer in () if roster is None else directory.clients.tolist():
            assert roster is not None
            identity, key, signature, counted = directory.entry(peer)
            roster.check(client=peer, run=self.run, public=key, signature=signature, samples=counted)
            if roster.keys.get(peer, identity) != identity:
                raise ProtocolError(f"the directory shows client {peer} with another signing key than the roster")
        self.directory = directory

    def draw(self, told: Nonces) -> bytes:
        """The beacon of the epoch, once everybody's nonce has been shown; any that was not committed to is refused."""
        self.beacon = beacon(self.known(), told)
        return self.beacon

    def known(self) -> Directory:
        """The run's directory."""
        if self.directory is None:
            raise ProtocolError(f"client {self.client} was asked to work before it knew who takes part")
        return self.directory

    def vouched(self, peer: int) -> tuple[bytes, bytes, int]:
        """(identity, key, samples) of a peer, whose signature has been checked."""
        return self.known().vouched(peer)

    def vouch_for(self, peers: tuple[int, ...]) -> None:
        """Check the signatures of all `peers`, once each."""
        self.known().vouch_for(peers)

    def pair(self, peer: int) -> PairSecret:
        """The secret shared with a peer."""
        if self._key is None:
            raise ProtocolError(f"client {self.client} has no keys in this run")
        if peer not in self._pairs:
            _, key, _ = self.vouched(peer)
            self._pairs[peer] = self._key.agree(key, run=self.run, own=self.client, peer=peer)
        return self._pairs[peer]

    def meet(self, other: int, key: bytes) -> PairSecret:
        """The secret shared with somebody who is in no directory: whose key this is, the caller has checked."""
        if self._key is None:
            raise ProtocolError(f"client {self.client} has no keys in this run")
        return self._key.agree(key, run=self.run, own=self.client, peer=other)

    def turn_to(self, round: int) -> None:
        """Forget secrets of earlier rounds where clients are so many that one seldom meets the same again."""
        if round != self._round and len(self.known().clients) > _FEW_CLIENTS:
            self._pairs.clear()
        self._round = round

    def own(self, *, round: int, attempt: int, purpose: str) -> bytes:
        """32 bytes that only this client can make again, for one round, attempt and purpose."""
        from fedveil.crypto.keys import PairSecret, extract

        _, key = self._stored
        if not key:
            raise ProtocolError(f"client {self.client} has no keys in this run")
        alone = PairSecret(extract(key, salt=b"fedveil own secrets 1"), run=self.run, pair=(self.client, self.client))
        return alone.seed(round=round, attempt=attempt, purpose=purpose)

    def sign(self, content: bytes, *, purpose: str) -> bytes:
        """Vouch for something in this run."""
        return self._identity.sign(content, purpose=f"{purpose} of {self.run}")

    def stored(self) -> dict[str, str]:
        """Everything needed to open this ring again; only ever written sealed."""
        identity, key = self._stored
        known = "" if self.directory is None else base64.b64encode(encode(self.directory)).decode()
        return {
            "run": self.run,
            "identity": identity.hex(),
            "key": key.hex(),
            "directory": known,
            "epoch": "" if self.epoch is None else base64.b64encode(encode(self.epoch)).decode(),
            "nonce": self._nonce.hex(),
            "beacon": self.beacon.hex(),
        }

    @staticmethod
    def restored(client: int, fields: dict[str, str]) -> Keyring:
        """The ring that `stored` described."""
        directory, epoch = (
            decode(base64.b64decode(fields[name])) if fields[name] else None for name in ("directory", "epoch")
        )
        ring = Keyring(
            client,
            fields["run"],
            identity=bytes.fromhex(fields["identity"]),
            key=bytes.fromhex(fields["key"]),
            directory=directory,
        )
        ring.epoch, ring._nonce, ring.beacon = epoch, bytes.fromhex(fields["nonce"]), bytes.fromhex(fields["beacon"])
        return ring
