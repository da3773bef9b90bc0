"""How a run begins: clients introduce themselves, and everybody learns who takes part."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from fedveil.errors import ProtocolError
from fedveil.protocol.asking import Ask, Gathered, Inbox
from fedveil.protocol.directory import Announce, Directory, Hello, Ready, from_bytes, to_bytes
from fedveil.protocol.keyring import Keyring
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.state import ClientState
from fedveil.secrets import SecretSource

if TYPE_CHECKING:
    from fedveil.crypto.roster import Roster

Introduction = Literal["none", "sizes", "keys"]

KEY_SIZES: dict[Introduction, dict[str, int]] = {
    "none": {},
    # Sizes alone are signed too: a roster is to vouch for them as it does for keys.
    "sizes": {"identity": 32, "key": 0, "signature": 64},
    "keys": {"identity": 32, "key": 32, "signature": 64},
}
"""The bytes of keys and signatures in an introduction."""


def introduce(
    state: ClientState,
    request: Hello | Directory,
    *,
    samples: int,
    how: Introduction,
    secrets: SecretSource,
    roster: Roster | None,
    identity: bytes | None,
) -> tuple[ClientState, Reply]:
    """Client side: announce, or take the directory."""
    if isinstance(request, Hello):
        ring = state.keys
        if ring is None or ring.run != request.run:
            identity = identity or secrets.stream("identity", state.client).bytes(32)
            key = secrets.stream("run key", state.client, request.run).bytes(32) if how == "keys" else b""
            ring = Keyring(state.client, request.run, identity=identity, key=key)
        return replace(state, keys=ring), ring.announce(samples)
    state.ring().accept(request, samples=samples, roster=roster)
    return state, Ready(state.client, from_bytes(request.digest))


class _Announcements(Inbox[Announce]):
    """Collects announcements, one per client, which keeps to what it said `earlier` in the same run."""

    def __init__(self, how: Introduction, run: str, earlier: Mapping[int, int]) -> None:
        self._lengths = KEY_SIZES[how]
        self._run = run
        self._earlier = earlier
        self.heard: dict[int, Announce] = {}

    def ask(self, clients: Sequence[int]) -> None:
        """Wait for these."""
        self.expect(Announce, clients, sizes=self._lengths)

    def _fold(self, reply: Announce) -> None:
        if reply.samples < 1:
            raise ProtocolError("an announcement of a client without samples")
        before = self._earlier.get(reply.client, reply.samples)
        if reply.samples != before:
            raise ProtocolError(
                f"a client announces {reply.samples:,} samples that announced {before:,} earlier in this run: it is "
                "held to those"
            )
        if any(self._lengths.values()):
            from fedveil.crypto.keys import check_key_signature

            # One that the others would refuse must not get into the directory: they would refuse all of it.
            identity, key, signature = (to_bytes(one) for one in (reply.identity, reply.key, reply.signature))
            said = {"run": self._run, "client": reply.client, "public": key, "samples": reply.samples}
            try:
                check_key_signature(identity, signature, **said)  # type: ignore[arg-type]
            except ProtocolError as reason:
                raise ProtocolError("an announcement is not signed by the key it names") from reason
        self.heard[reply.client] = reply


class _Agreements(Inbox[Ready]):
    """Collects consents to one directory."""

    def __init__(self, digest: bytes, clients: Sequence[int]) -> None:
        self._digest = digest
        self.expect(Ready, clients)

    def _fold(self, reply: Ready) -> None:
        if to_bytes(reply.digest) != self._digest:
            raise ProtocolError("a client has not taken the directory it was sent")


class Introductions:
    """Server side: who is known, and who knows them.

    Nobody takes part who claims more than `max_size_ratio` times the median number of samples, or another number than
    `earlier` in the same run.
    """

    def __init__(
        self,
        how: Introduction,
        run: str,
        *,
        max_size_ratio: float = math.inf,
        earlier: Mapping[int, int] | None = None,
    ) -> None:
        self.how = how
        self._announced = _Announcements(how, run, {} if earlier is None else earlier)
        self._max_size_ratio = max_size_ratio
        self._informed: dict[int, bytes] = {}
        self._told: dict[int, bytes] = {}
        self._run = run
        self.directory: Directory | None = None
        self.refused: dict[int, str] = {}

    def steps(self, clients: Sequence[int], *, again: bool = True) -> Generator[Ask, Gathered | None, None]:
        """Hear from clients that are still unknown, then send everybody of `clients` what is new.

        Unless `again`, only what has not been said before: strangers stay strangers, and who has not taken
        the present directory is not asked twice.
        """
        heard = self._announced.heard
        strangers = tuple(client for client in clients if client not in heard) if again else ()
        if strangers:
            self._announced.ask(strangers)
            answer = yield self._ask(strangers, Hello(self._run), self._announced)
            self.refused.update({} if answer is None else answer.refused)
            if not heard:
                return
            self.directory = Directory.of(self._run, heard.values())
        if self.directory is None:
            return
        digest = self.directory.digest
        reached = self._informed if again else self._told
        unaware = tuple(one for one in clients if one in heard and reached.get(one) != digest)
        if unaware:
            self._told.update(dict.fromkeys(unaware, digest))
            answer = yield self._ask(unaware, self.directory, _Agreements(digest, unaware))
            assert answer is not None
            self.refused.update(answer.refused)
            self._informed.update(dict.fromkeys(answer.arrived, digest))

    def known(self, clients: Sequence[int]) -> tuple[int, ...]:
        """Those of `clients` that have taken the present directory, and whose size is not out of proportion."""
        if self.directory is None:
            return ()
        odd, digest = self.left_out, self.directory.digest
        return tuple(one for one in clients if self._informed.get(one) == digest and one not in odd)

    @property
    def left_out(self) -> dict[int, str]:
        """Who takes no part because of the size it claims, and why."""
        return {} if self.directory is None else self.directory.outsized(self._max_size_ratio)

    @staticmethod
    def _ask(to: tuple[int, ...], request: Request, into: _Announcements | _Agreements) -> Ask:
        return Ask(to, request, into)
