"""A server that tells every client what it likes, and makes the most of the answers.

Whoever is on its side hands over everything: the seeds of its pairs and every share dealt to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedveil.crypto.keys import add_mask
from fedveil.crypto.shamir import join
from fedveil.errors import ProtocolError
from fedveil.protocol.directory import to_bytes
from fedveil.protocol.parts import RoundContext
from fedveil.uplink.unmasking import (
    LOCK,
    Item,
    Label,
    MaskedUpload,
    Relayed,
    Revealed,
    open_bundle,
    packed,
    unlock_shares,
    unpacked,
)
from uplink.masking import Federation, mask_purpose, words


def relayed(uploads: Mapping[int, MaskedUpload], client: int) -> Relayed:
    """Every bundle that was dealt to a client, its own included."""
    dealt = {sender: unpacked(one.holders, one.lengths, one.bundles).get(client) for sender, one in uploads.items()}
    return Relayed(*packed({sender: sealed for sender, sealed in dealt.items() if sealed is not None}))


def revealed_kinds(federation: Federation, reply: Revealed) -> dict[int, set[str]]:
    """What a client gave away about each peer, with the lock on it opened: "arrived" or "missing"."""
    ring = federation.states[reply.client].ring()
    key = ring.own(round=reply.round, attempt=reply.attempt, purpose="revelation")
    kinds: dict[int, set[str]] = defaultdict(set)
    for peer in reply.peers.tolist():
        kinds[peer].add("arrived")
    for dealer, peer in unlock_shares(to_bytes(reply.locked), client=reply.client, key=key):
        kinds[peer].add("arrived" if dealer == peer else "missing")
    return kinds


@dataclass
class Adversary:
    """Collects what honest clients reveal; `allies` are clients on the server's side."""

    federation: Federation
    context: RoundContext
    uploads: Mapping[int, MaskedUpload]
    allies: Collection[int] = ()
    shares: dict[Item, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    locked: dict[int, bytes] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.federation.graph(self.context)
        label = Label(self.context.round, self.context.attempt, self.context.graph_seed())
        for ally in self.allies:
            ring, private = self.federation.states[ally].ring(), relayed(self.uploads, ally)
            for sender, sealed in unpacked(private.senders, private.lengths, private.bundles).items():
                found = open_bundle(self.graph, ring, sealed, sender=sender, self_mask=True, label=label)
                for item, share in found.items():
                    self.shares[item][ally] = share

    def tell(self, client: int, survivors: Iterable[int]) -> None:
        """Show a client this list of survivors, and keep its answer."""
        request = self.federation.unmask(self.context, survivors)
        try:
            reply = self.federation.answer(client, request, relayed(self.uploads, client))
        except ProtocolError as reason:
            self.refusals[client] = str(reason)
            return
        for peer, share in zip(reply.peers.tolist(), reply.keys, strict=True):
            self.shares[(peer, LOCK)][client] = to_bytes(share)
        self.locked[client] = to_bytes(reply.locked)

    def pick_locks(self) -> None:
        """Read every revelation as if there were no locks."""
        for client in self.locked:
            ring = self.federation.states[client].ring()
            self._read(client, ring.own(round=self.context.round, attempt=self.context.attempt, purpose="revelation"))

    def read(self) -> None:
        """Read whatever can be read honestly."""
        for client in self.locked:
            key = self.secret(client, LOCK)
            if key is not None:
                self._read(client, key)

    def _read(self, client: int, key: bytes) -> None:
        for item, share in unlock_shares(self.locked[client], client=client, key=key).items():
            self.shares[item][client] = share

    def secret(self, dealer: int, about: int) -> bytes | None:
        """A secret, if there are enough shares."""
        needed = self.federation.uplink.quorum.of(self.graph.degree(dealer if about == LOCK else about))
        found = self.shares.get((dealer, about), {})
        return join(found, threshold=needed) if len(found) >= needed else None

    def pair_seed(self, one: int, other: int) -> bytes | None:
        """The seed of a pair, from shares dealt by either end, or from an end that is an ally."""
        for own, peer in ((one, other), (other, one)):
            if own in self.allies:
                pair = self.federation.states[own].ring().pair(peer)
                return pair.seed(
                    round=self.context.round, attempt=self.context.attempt, purpose=mask_purpose(self.context)
                )
        return self.secret(one, other) or self.secret(other, one)

    def readable(self) -> list[frozenset[int]]:
        """The groups of honest clients whose sums are in the clear.

        Honest clients with a closed pair between them belong to one group, and a group's sum is readable
        if the masks that its members have to themselves are all open.
        """
        honest = [one for one in self.graph.members if one not in self.allies]
        group = {one: {one} for one in honest}
        for one in honest:
            for other in self.graph.neighbours(one):
                apart = other > one and other in group and group[one] is not group[other]
                if apart and self.pair_seed(one, other) is None:
                    joined = group[one] | group[other]
                    for member in joined:
                        group[member] = joined
        groups = {frozenset(members) for members in group.values()}
        return [one for one in groups if all(self.secret(member, member) is not None for member in one)]

    def unmasked(self, client: int) -> NDArray[np.uint64]:
        """One client's upload with every mask taken off whose seed is known."""
        opened = words(self.uploads[client]).copy()
        own = self.secret(client, client)
        if own is not None:
            add_mask(opened, own, subtract=True)
        for peer in self.graph.neighbours(client):
            seed = self.pair_seed(client, peer)
            if seed is not None:
                add_mask(opened, seed, subtract=client < peer)
        return opened
