"""How a run begins: clients introduce themselves, and everybody learns who takes part."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from fedveil.errors import ProtocolError
from fedveil.protocol.asking import Ask, Gathered
from fedveil.protocol.directory import Announce, Directory, Hello, Ready, from_bytes, to_bytes
from fedveil.protocol.keyring import Keyring
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.state import ClientState
from fedveil.secrets import SecretSource

if TYPE_CHECKING:
    from fedveil.crypto.roster import Roster

Introduction = Literal["none", "sizes", "keys"]

_MOST_SAMPLES = 1 << 53
# Sizes alone are signed too: noise is dealt by them, and a roster is to vouch for them as it does for keys.
_KEY_LENGTHS = {"sizes": (32, 0, 64), "keys": (32, 32, 64)}


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


class _Announcements:
    """Collects announcements, one per client."""

    def __init__(self, how: Introduction, run: str) -> None:
        self._lengths = _KEY_LENGTHS[how]
        self._run = run
        self.asked: frozenset[int] = frozenset()
        self.heard: dict[int, Announce] = {}

    def add(self, reply: Reply) -> None:
        if not isinstance(reply, Announce):
            raise ProtocolError(f"a {type(reply).__name__} arrived where an announcement belongs")
        parts = (reply.identity, reply.key, reply.signature)
        plain = all(one.dim() == 1 and one.dtype == torch.uint8 for one in parts)
        lengths = tuple(one.numel() for one in parts)
        if not plain or lengths != self._lengths or not 1 <= reply.samples < _MOST_SAMPLES:
            raise ProtocolError("an announcement is malformed")
        if reply.client not in self.asked or reply.client in self.heard:
            raise ProtocolError("an announcement from a client that was not asked, or the second of its client")
        if any(lengths):
            from fedveil.crypto.keys import check_key_signature

            # One that the others would refuse must not get into the directory: they would refuse all of it.
            identity, key, signature = (to_bytes(one) for one in parts)
            said = {"run": self._run, "client": reply.client, "public": key, "samples": reply.samples}
            try:
                check_key_signature(identity, signature, **said)  # type: ignore[arg-type]
            except ProtocolError as reason:
                raise ProtocolError("an announcement is not signed by the key it names") from reason
        self.heard[reply.client] = reply


class _Agreements:
    """Collects consents to one directory."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def add(self, reply: Reply) -> None:
        if not isinstance(reply, Ready) or to_bytes(reply.digest) != self._digest:
            raise ProtocolError("a client has not taken the directory it was sent")


class Introductions:
    """Server side: who is known, and who knows them."""

    def __init__(self, how: Introduction, run: str) -> None:
        self.how = how
        self._announced = _Announcements(how, run)
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
            self._announced.asked = frozenset(strangers)
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
            answer = yield self._ask(unaware, self.directory, _Agreements(digest))
            assert answer is not None
            self.refused.update(answer.refused)
            self._informed.update(dict.fromkeys(answer.arrived, digest))

    def known(self, clients: Sequence[int]) -> tuple[int, ...]:
        """Those of `clients` that have taken the present directory."""
        if self.directory is None:
            return ()
        return tuple(one for one in clients if self._informed.get(one) == self.directory.digest)

    @staticmethod
    def _ask(to: tuple[int, ...], request: Request, into: _Announcements | _Agreements) -> Ask:
        return Ask(to, request, into)
