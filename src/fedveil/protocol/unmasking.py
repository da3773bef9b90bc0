"""Opening a masked sum: what clients are asked and answer, and how the masks come off."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.messages import Reply, Request, Upload
from fedveil.protocol.shares import LOCK, SHARE_BYTES, Item, Quorum, unlock_shares
from fedveil.protocol.wire import message
from fedveil.uplink.fixed_point import FixedPoint
from fedveil.uplink.graph import Graph

SIGNATURE_BYTES = 64
MORE_NEIGHBOURS = "where clients often drop out, raise neighbours or lower threshold"
"""What helps against neighbourhoods that fall short."""

Bundles = dict[int, bytes]


@message
@dataclass(frozen=True, eq=False)
class MaskedUpload(Upload):
    """Client → server: a masked vector, and sealed shares of this round's secrets for their holders."""

    holders: Tensor
    lengths: Tensor
    bundles: Tensor


@message
@dataclass(frozen=True, eq=False)
class Unmask(Request):
    """Server → client: whose uploads arrived."""

    round: int
    attempt: int
    survivors: Tensor


@message
@dataclass(frozen=True, eq=False)
class Relayed(Request):
    """Server → one client: the sealed shares that others dealt to it."""

    senders: Tensor
    lengths: Tensor
    bundles: Tensor


@message
@dataclass(frozen=True, eq=False)
class Revealed(Reply):
    """Client → server: the survivor list signed; shares of the keys of `peers`, and the rest under its own key.

    `keys[i]` is the client's share of the key that locks what `peers[i]` reveals. `locked` holds one kind
    of share per neighbour, and can be read once enough neighbours have revealed shares of this client's key.
    """

    round: int
    attempt: int
    signature: Tensor
    peers: Tensor
    keys: Tensor
    locked: Tensor


@message
@dataclass(frozen=True, eq=False)
class Evidence(Request):
    """Server → one client: its neighbours' signatures on the survivor list of the round it revealed shares in last.

    It is owed whether or not the round could be opened: a quorum of a client's neighbours on one list leaves too few
    of them, with fewer than a third colluding, for another. Fewer than a quorum show nothing, since the others may
    have signed another list.
    """

    signers: Tensor
    signatures: Tensor


def packed(bundles: Mapping[int, bytes]) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, lengths, bytes) of bundles by client."""
    numbers = sorted(bundles)
    return (
        torch.tensor(numbers, dtype=torch.int64),
        torch.tensor([len(bundles[one]) for one in numbers], dtype=torch.int64),
        from_bytes(b"".join(bundles[one] for one in numbers)),
    )


def unpacked(numbers: Tensor, lengths: Tensor, content: Tensor) -> Bundles:
    """Bundles by client; refuses lengths that do not fit, and two bundles for one client."""
    shapes = [(one.dim(), one.dtype) for one in (numbers, lengths, content)]
    if shapes != [(1, torch.int64), (1, torch.int64), (1, torch.uint8)]:
        raise ProtocolError("bundles of shares are malformed")
    sizes = lengths.tolist()
    if len(numbers) != len(sizes) or any(one < 0 for one in sizes) or sum(sizes) != content.numel():
        raise ProtocolError("bundles of shares are malformed")
    data, start, found = to_bytes(content), 0, {}
    for number, length in zip(numbers.tolist(), sizes, strict=True):
        found[int(number)] = data[start : start + length]
        start += length
    if len(found) < len(sizes):
        raise ProtocolError("two bundles of shares for one client")
    return found


def listed(numbers: Tensor) -> list[int]:
    """Client numbers from a message; anything but a flat list of them is refused."""
    if numbers.dim() != 1 or numbers.dtype != torch.int64:
        raise ProtocolError("a list of clients is malformed")
    return [int(one) for one in numbers.tolist()]


def list_digest(survivors: Sequence[int], *, graph: bytes) -> bytes:
    """What a client signs before it reveals: everybody whose upload arrived, in the round of this graph seed."""
    numbers = np.asarray(sorted(survivors), dtype="<u8").tobytes()
    return hashlib.sha256(b"fedveil survivors 1" + graph + numbers).digest()


class MaskedSum:
    """Σ of masked vectors modulo 2⁶⁴, and what is needed to take the masks off."""

    def __init__(
        self,
        codec: FixedPoint | None,
        length: int,
        graph: Graph,
        *,
        round: int,
        attempt: int,
        quorum: Quorum,
        self_mask: bool,
        signed: Callable[[int, bytes, Sequence[int]], bool] | None = None,
    ) -> None:
        self._codec = codec
        self._sum = np.zeros(length, dtype=np.uint64)
        self.graph = graph
        self.round = round
        self.attempt = attempt
        self._quorum = quorum
        self._self_mask = self_mask
        self._signed = signed
        self.asked = False
        self._waiting = set(graph.members)
        self.survivors: tuple[int, ...] = ()
        self.relay: dict[int, Bundles] = defaultdict(dict)
        self.signatures: dict[int, bytes] = {}
        self._locked: Bundles = {}
        self._shares: dict[Item, dict[int, bytes]] = defaultdict(dict)
        self._unread: dict[int, str] = {}
        self.opened = False

    def add(self, reply: Reply) -> None:
        """Fold an upload or a revelation in."""
        if isinstance(reply, Revealed):
            self._add_revealed(reply)
        elif isinstance(reply, MaskedUpload):
            self._add_upload(reply)
        else:
            raise ProtocolError(f"a {type(reply).__name__} arrived where a masked upload belongs")

    def _add_upload(self, reply: MaskedUpload) -> None:
        if self.survivors:
            raise ProtocolError("an upload arrived after the round was closed: it is refused and not looked at")
        if (reply.round, reply.attempt) != (self.round, self.attempt):
            raise ProtocolError(
                f"an upload for round {reply.round + 1}, attempt {reply.attempt} arrived in round "
                f"{self.round + 1}, attempt {self.attempt}"
            )
        if reply.client not in self._waiting:
            raise ProtocolError("an upload from a client that was not asked, or a second one")
        if reply.payload.dtype != torch.int64 or tuple(reply.payload.shape) != (len(self._sum),):
            raise ProtocolError(
                f"a masked upload has shape {tuple(reply.payload.shape)} and type {reply.payload.dtype} where "
                f"({len(self._sum)},) and torch.int64 belong; do server and client use the same model and scheme?"
            )
        bundles = unpacked(reply.holders, reply.lengths, reply.bundles)
        if not set(bundles) <= set(self.graph.members):
            raise ProtocolError("an upload deals shares to clients outside the round")
        self._sum += reply.payload.cpu().numpy().view(np.uint64)
        for holder, bundle in bundles.items():
            self.relay[holder][reply.client] = bundle
        self._waiting.discard(reply.client)

    def close(self, arrived: Sequence[int]) -> None:
        """No more uploads: from here on only revelations count."""
        self.survivors = tuple(sorted(arrived))

    def check_reach(self) -> None:
        """Refuse to ask for shares where too few holders are left to open some client's secrets."""
        alive = set(self.survivors)
        gone = set(self.graph.members) - alive
        # A client with everybody around it says nothing new: only what the missing have left open can fall short.
        for around in gone | {near for one in gone for near in self.graph.neighbours(one)}:
            if around in alive and not self._self_mask:
                continue
            holders = self.graph.neighbours(around)
            left, needed = len(alive.intersection(holders)), self._quorum.of(len(holders))
            if left < needed:
                raise ProtocolError(
                    f"{left} of {needed} needed neighbours of client {around} are left, of {len(holders)}: the sum "
                    f"could not be opened; {MORE_NEIGHBOURS}"
                )

    def private(self, client: int) -> Relayed:
        """The sealed shares that survivors dealt to a client."""
        alive = set(self.survivors)
        return Relayed(*packed({k: v for k, v in self.relay.get(client, {}).items() if k in alive}))

    def _add_revealed(self, reply: Revealed) -> None:
        if (reply.round, reply.attempt) != (self.round, self.attempt) or reply.client not in self.survivors:
            raise ProtocolError("a revelation for another round, or from a client whose upload did not arrive")
        if reply.client in self.signatures:
            raise ProtocolError("a second revelation from one client")
        peers = listed(reply.peers)
        if (
            tuple(reply.keys.shape) != (len(peers), SHARE_BYTES)
            or reply.signature.numel() != SIGNATURE_BYTES
            or not all(one.dtype == torch.uint8 for one in (reply.keys, reply.signature, reply.locked))
            or not set(peers) <= set(self.graph.neighbours(reply.client))
        ):
            raise ProtocolError("a revelation is malformed")
        signature = to_bytes(reply.signature)
        if self._signed is not None and not self._signed(reply.client, signature, self.survivors):
            raise ProtocolError("a revelation does not sign the survivor list")
        self.signatures[reply.client] = signature
        self._locked[reply.client] = to_bytes(reply.locked)
        for peer, share in zip(peers, reply.keys, strict=True):
            self._shares[(peer, LOCK)][reply.client] = to_bytes(share)

    def total(self) -> Tensor:
        """The sum of what arrived, masks taken off; too few or contradicting shares are refused."""
        if self._codec is None:
            raise ProtocolError("this sum is covered by more than masks: only clients can read it")
        return torch.from_numpy(self._codec.decode(self.words()))

    def words(self) -> NDArray[np.uint64]:
        """The same modulo 2⁶⁴."""
        from fedveil.crypto.stream import add_mask

        if not self.opened:
            self._read_revelations()
            alive = set(self.survivors)
            opened = self._sum.copy()
            if self._self_mask:
                for client in self.survivors:
                    add_mask(opened, self._secret(client, client), subtract=True)
            for gone in self.graph.members:
                if gone in alive:
                    continue
                for client in self.graph.neighbours(gone):
                    if client in alive:
                        # The survivor added this mask if its number is the smaller one.
                        add_mask(opened, self._secret(client, gone), subtract=client < gone)
            if self._codec is not None:
                self._refuse_rubbish(opened, self._codec)
            self._sum, self.opened = opened, True
        return self._sum

    def _refuse_rubbish(self, opened: NDArray[np.uint64], codec: FixedPoint) -> None:
        """A mask left in the sum makes its numbers uniform, and half of those are no sum of contributions."""
        if not codec.plausible(opened, addends=len(self.survivors)):
            raise ProtocolError(
                "the opened sum is beyond what clients may send: a client masked its upload with other seeds than it "
                "dealt shares of, or a holder revealed wrong shares"
            )

    def _read_revelations(self) -> None:
        """Unlock what can be unlocked; one client's unreadable revelation must not cost the others their round."""
        for client, locked in self._locked.items():
            try:
                key = self._secret(client, LOCK)
                found = unlock_shares(locked, client=client, key=key)
            except ProtocolError as reason:
                self._unread[client] = str(reason)
                continue
            near = set(self.graph.neighbours(client))
            for (dealer, peer), share in found.items():
                if peer in near:
                    self._shares[(dealer, peer)][client] = share
        self._locked = {}

    def _secret(self, dealer: int, about: int) -> bytes:
        from fedveil.crypto.shamir import join

        around = dealer if about == LOCK else about
        needed = self._quorum.of(self.graph.degree(around))
        found = self._shares.get((dealer, about), {})
        if len(found) < needed:
            raise ProtocolError(self._too_few(dealer, about, len(found), needed))
        try:
            return join(found, threshold=needed)
        except ProtocolError as reason:
            raise ProtocolError(f"shares about client {around}: {reason}") from reason

    def _too_few(self, dealer: int, about: int, found: int, needed: int) -> str:
        if about == LOCK:
            return f"{found} of {needed} needed shares of its key were revealed"
        what = f"client {dealer}'s own mask" if dealer == about else f"the masks of clients {dealer} and {about}"
        holders = set(self.graph.neighbours(about))
        unread = next(((one, why) for one, why in sorted(self._unread.items()) if one in holders), None)
        said = "" if unread is None else f" (what client {unread[0]} revealed cannot be read: {unread[1]})"
        return f"{what} cannot be taken off: {found} of {needed} needed shares were revealed{said}; {MORE_NEIGHBOURS}"
