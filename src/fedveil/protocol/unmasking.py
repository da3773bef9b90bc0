"""Opening a masked sum: what clients are asked and answer, and how the masks come off."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.protocol.asking import Inbox
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.messages import Reply, Request, Upload
from fedveil.protocol.shares import ITEM_BYTES, LOCK, SEAL_BYTES, SHARE_BYTES, Item, Quorum, unlock_shares
from fedveil.protocol.wire import message
from fedveil.shapes import Sizes, clients, counts, octets, words
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

    payload: Annotated[Tensor, words("contribution")]
    holders: Annotated[Tensor, clients("holders")]
    lengths: Annotated[Tensor, counts("holders")]
    bundles: Annotated[Tensor, octets("bundles")]


@message
@dataclass(frozen=True, eq=False)
class Unmask(Request):
    """Server → client: whose uploads arrived."""

    round: int
    attempt: int
    survivors: Annotated[Tensor, clients("survivors")]


@message
@dataclass(frozen=True, eq=False)
class Relayed(Request):
    """Server → one client: the sealed shares that others dealt to it."""

    senders: Annotated[Tensor, clients("senders")]
    lengths: Annotated[Tensor, counts("senders")]
    bundles: Annotated[Tensor, octets("bundles")]


@message
@dataclass(frozen=True, eq=False)
class Revealed(Reply):
    """Client → server: the survivor list signed; shares of the keys of `peers`, and the rest under its own key.

    `keys[i]` is the client's share of the key that locks what `peers[i]` reveals. `locked` holds one kind
    of share per neighbour, and can be read once enough neighbours have revealed shares of this client's key.
    """

    round: int
    attempt: int
    signature: Annotated[Tensor, octets(SIGNATURE_BYTES)]
    peers: Annotated[Tensor, clients("peers")]
    keys: Annotated[Tensor, octets("peers", SHARE_BYTES)]
    locked: Annotated[Tensor, octets("locked")]


@message
@dataclass(frozen=True, eq=False)
class Evidence(Request):
    """Server → one client: its neighbours' signatures on the survivor list of the round it revealed shares in last.

    It is owed whether or not the round could be opened: a quorum of a client's neighbours on one list leaves too few
    of them, with fewer than a third colluding, for another. Fewer than a quorum show nothing, since the others may
    have signed another list.
    """

    signers: Annotated[Tensor, clients("signers")]
    signatures: Annotated[Tensor, octets("signers", SIGNATURE_BYTES)]


def packed(bundles: Mapping[int, bytes]) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, lengths, bytes) of bundles by client."""
    numbers = sorted(bundles)
    return (
        torch.tensor(numbers, dtype=torch.int64),
        torch.tensor([len(bundles[one]) for one in numbers], dtype=torch.int64),
        from_bytes(b"".join(bundles[one] for one in numbers)),
    )


def unpacked(numbers: Tensor, lengths: Tensor, content: Tensor) -> Bundles:
    """Bundles by client; refuses lengths that do not fit."""
    ends = list(itertools.accumulate(lengths.tolist(), initial=0))
    if ends[-1] != content.numel():
        raise ProtocolError("bundles of shares are malformed: their lengths do not add up to what was sent")
    data = to_bytes(content)
    return {one: data[start:end] for one, (start, end) in zip(numbers.tolist(), itertools.pairwise(ends), strict=True)}


def listed(numbers: Tensor) -> list[int]:
    """Client numbers from a message."""
    return [int(one) for one in numbers.tolist()]


def list_digest(survivors: Sequence[int], *, graph: bytes) -> bytes:
    """What a client signs before it reveals: everybody whose upload arrived, in the round of this graph seed."""
    numbers = np.asarray(sorted(survivors), dtype="<u8").tobytes()
    return hashlib.sha256(b"fedveil survivors 1" + graph + numbers).digest()


class MaskedSum(Inbox[Any]):
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
        self.survivors: tuple[int, ...] = ()
        self.relay: dict[int, Bundles] = defaultdict(dict)
        self.signatures: dict[int, bytes] = {}
        self._locked: Bundles = {}
        self._shares: dict[Item, dict[int, bytes]] = defaultdict(dict)
        self._unread: dict[int, str] = {}
        self.opened = False
        self._largest = max(map(graph.degree, graph.members)) + 2  # pairs, and what is the dealer's own
        bundle = self._largest * SHARE_BYTES + SEAL_BYTES
        among = range(len(graph.members) + 1)
        sizes: Sizes = {"contribution": length, "holders": among, "bundles": range(len(graph.members) * bundle + 1)}
        self.expect(MaskedUpload, graph.members, which=(round, attempt), sizes=sizes)

    def _fold(self, reply: MaskedUpload | Revealed) -> None:
        if isinstance(reply, Revealed):
            self._fold_revealed(reply)
            return
        bundles = unpacked(reply.holders, reply.lengths, reply.bundles)
        if not set(bundles) <= set(self.graph.members):
            raise ProtocolError("an upload deals shares to clients outside the round")
        self._sum += reply.payload.cpu().numpy().view(np.uint64)
        for holder, bundle in bundles.items():
            self.relay[holder][reply.client] = bundle

    def close(self, arrived: Sequence[int]) -> None:
        """No more uploads: from here on only revelations count."""
        self.survivors = tuple(sorted(arrived))
        among = len(self.graph.members)
        sizes = {"peers": range(among + 1), "locked": range(among * self._largest * ITEM_BYTES + SEAL_BYTES + 1)}
        self.expect(Revealed, self.survivors, which=(self.round, self.attempt), sizes=sizes)

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

    def _fold_revealed(self, reply: Revealed) -> None:
        peers = reply.peers.tolist()
        if not set(peers) <= set(self.graph.neighbours(reply.client)):
            raise ProtocolError("a revelation of shares that are held by others")
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
