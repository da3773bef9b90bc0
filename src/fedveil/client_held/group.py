"""What all clients of a run share and the server does not: a group key, and a key pair for its ciphertexts.

One client founds the group and seals its secrets for each of the others under the secret it shares with
that one; the server relays what it cannot open. Any member can let a latecomer in.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import torch
from torch import Tensor

from fedveil.errors import Code, ProtocolError, Refusal
from fedveil.ledger.releases import Released
from fedveil.protocol.client_state import FINGERPRINT_BYTES, KEY_BYTES, ClientState, Group
from fedveil.protocol.codec import message
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.phases import Ask, Confirmations, Gathered, Inbox
from fedveil.secrets import SecretSource
from fedveil.shapes import Sizes, clients, counts, octets
from fedveil.uplink.unmasking import packed, unpacked

_FOUNDERS_TRIED = 3
_LARGEST_GROUP = 1 << 24
"""Bytes that one group's keys, of which those of CKKS are the largest, stay below."""


@message
@dataclass(frozen=True, eq=False)
class Found(Request):
    """Server → one client: let `newcomers` into your group; found one for rounds of `clients` if there is none."""

    newcomers: Annotated[Tensor, clients("newcomers"), Released("who is to be let into the group")]
    clients: Annotated[int, Released("how many clients a round has")]


@message
@dataclass(frozen=True, eq=False)
class Founded(Reply):
    """Client → server: the group's public key, and its secrets sealed for each newcomer."""

    public: Annotated[Tensor, octets("public"), Released("the public key of the group's cipher")]
    fingerprint: Annotated[Tensor, octets(FINGERPRINT_BYTES), Released("which group it is")]
    receivers: Annotated[Tensor, clients("receivers"), Released("who is invited")]
    lengths: Annotated[Tensor, counts("receivers"), Released("how long the invitations are")]
    bundles: Annotated[
        Tensor,
        octets("bundles"),
        Released("the group's secrets", ("server", "clients"), hiding="sealed for each newcomer"),
    ]


@message
@dataclass(frozen=True, eq=False)
class Join(Request):
    """Server → client: who has let it into the group."""

    founder: Annotated[int, Released("who invites")]


@message
@dataclass(frozen=True, eq=False)
class Invitation(Request):
    """Server → one client: the group's secrets, sealed for it."""

    sealed: Annotated[Tensor, octets("sealed"), Released("the group's secrets", hiding="sealed for the newcomer")]


@message
@dataclass(frozen=True, eq=False)
class Joined(Reply):
    """Client → server: it has the group's secrets; the fingerprint tells which group's."""

    fingerprint: Annotated[Tensor, octets(FINGERPRINT_BYTES), Released("which group it has joined")]


class OpeningKeys(Protocol):
    """Makes the keys under which a group's ciphertexts lie; here there are none."""

    def fresh_opening(self, clients: int) -> bytes:
        """A new secret key for sums of up to `clients` ciphertexts; empty where none is needed."""
        return b""

    def public_of(self, opening: bytes) -> bytes:
        """The public key that belongs to it."""
        return b""

    def check_public(self, public: bytes) -> None:
        """Refuse what is no public key of this kind (ProtocolError)."""
        if public:
            raise ProtocolError("a founder sent a public key where nothing is encrypted")


def _purpose(founder: int, newcomer: int) -> str:
    return f"group {founder} > {newcomer}"


def _sealing_key(state: ClientState, *, founder: int, newcomer: int) -> bytes:
    other = newcomer if state.client == founder else founder
    return state.ring().pair(other).seed(round=0, attempt=0, purpose=_purpose(founder, newcomer))


def found(
    state: ClientState, request: Found, *, keys: OpeningKeys, secrets: SecretSource
) -> tuple[ClientState, Founded]:
    """Client side: found the group, or let others into it."""
    from fedveil.crypto.keys import seal

    ring, group = state.ring(), state.group
    if group is None or group.run != ring.run:
        key = secrets.stream("group", state.client, ring.run).bytes(KEY_BYTES)
        group = Group(ring.run, key, keys.fresh_opening(request.clients))
    content = json.dumps(group.stored()).encode()
    invited = {}
    for newcomer in request.newcomers.tolist():
        if newcomer != state.client:
            key = _sealing_key(state, founder=state.client, newcomer=newcomer)
            invited[newcomer] = seal(content, key=key, purpose=_purpose(state.client, newcomer))
    public = from_bytes(keys.public_of(group.opening))
    return replace(state, group=group), Founded(state.client, public, from_bytes(group.fingerprint()), *packed(invited))


def join(state: ClientState, request: Join, private: Request | None) -> tuple[ClientState, Joined]:
    """Client side: open the invitation; a member of one group, once it has answered a round, does not change over to
    another within the run."""
    from fedveil.crypto.keys import unseal

    if not isinstance(private, Invitation):
        raise ProtocolError(f"client {state.client} was told to join a group and was sent no invitation")
    key = _sealing_key(state, founder=request.founder, newcomer=state.client)
    content = unseal(to_bytes(private.sealed), key=key, purpose=_purpose(request.founder, state.client))
    try:
        group = Group.restored(json.loads(content))
    except (ValueError, RecursionError) as reason:
        raise ProtocolError("a group's secrets are malformed") from reason
    own = state.group
    # Before that nothing lies under the group's key, and the first founder may have dealt everybody another one.
    used = own is not None and own.run == group.run == state.ran
    if own is not None and used and own.fingerprint() != group.fingerprint():
        raise ProtocolError(
            f"client {state.client} is a member of this run's group and was invited to another: somebody on the way "
            "plays two groups against each other"
        )
    if group.run != state.ring().run:
        raise ProtocolError(f"client {state.client} was invited to the group of another run")
    return replace(state, group=group), Joined(state.client, from_bytes(group.fingerprint()))


class _Founding(Inbox[Founded]):
    """Takes one founder's reply."""

    def __init__(self, founder: int, newcomers: Sequence[int], keys: OpeningKeys) -> None:
        self._keys = keys
        self._newcomers = [client for client in newcomers if client != founder]
        self.invited: dict[int, bytes] = {}
        self.reply: Founded | None = None
        most = len(self._newcomers) * _LARGEST_GROUP
        sizes: Sizes = {"receivers": len(self._newcomers), "public": range(_LARGEST_GROUP), "bundles": range(most + 1)}
        self.expect(Founded, (founder,), sizes=sizes)

    def _fold(self, reply: Founded) -> None:
        invited = unpacked(reply.receivers, reply.lengths, reply.bundles)
        if list(invited) != self._newcomers:
            raise ProtocolError("a founder invites others than it was told to")
        self._keys.check_public(to_bytes(reply.public))
        self.invited, self.reply = invited, reply


class Gathering:
    """Server side: who is of the group, and the public key under which its members encrypt."""

    def __init__(self, *, clients: int, keys: OpeningKeys) -> None:
        self._clients = clients
        self._keys = keys
        self.members: list[int] = []
        self.public = b""
        self._fingerprint = b""
        self.refused: dict[int, Refusal] = {}

    def steps(self, clients: Sequence[int]) -> Generator[Ask, Gathered | None, None]:
        """Have everybody of `clients` who is not yet a member let in, by whoever answers first; those who could not
        follow that invitation, by another."""
        tried: set[int] = set()
        while len(tried) < _FOUNDERS_TRIED:
            newcomers = tuple(client for client in clients if client not in self.members)
            members = [client for client in self.members if client in clients] or [*self.members]
            candidates = [client for client in members or newcomers if client not in tried]
            if not (newcomers and candidates):
                return
            founder = candidates[0]
            tried.add(founder)
            founding = _Founding(founder, newcomers, self._keys)
            answer = yield Ask((founder,), Found(torch.tensor(newcomers, dtype=torch.int64), self._clients), founding)
            self.refused.update({} if answer is None else answer.refused)
            if founding.reply is not None and (yield from self._invited(founding.reply, founding.invited)):
                return

    def _invited(self, reply: Founded, invited: Mapping[int, bytes]) -> Generator[Ask, Gathered | None, bool]:
        """Whether everybody joined whom the founder invited, but for who is away; a founder whom nobody follows founds
        nothing."""
        founder, fingerprint = reply.client, to_bytes(reply.fingerprint)
        if self.members and fingerprint != self._fingerprint:
            self.refused[founder] = Refusal(Code.PROTOCOL, "a member answered for another group than this run's")
            return False
        each = {client: Invitation(from_bytes(sealed)) for client, sealed in invited.items()}
        joined: tuple[int, ...] = ()
        declined = False
        if invited:
            other = "a client has not joined the group it was invited to"
            joining = Confirmations(Joined, invited, "fingerprint", fingerprint, otherwise=other)
            answer = yield Ask(tuple(invited), Join(founder), joining, each=each)
            assert answer is not None
            self.refused.update(answer.refused)
            joined, declined = answer.arrived, bool(answer.refused)
            if not joined:
                return False
        if founder not in self.members:
            self.members.append(founder)
            self.public, self._fingerprint = to_bytes(reply.public), fingerprint
        self.members += joined
        return not declined
