"""A server that searches for a masking graph in which its allies surround a client, and then tells two stories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from federation import job
from fedveil.crypto.shamir import join
from fedveil.crypto.stream import add_mask
from fedveil.protocol import ClientRole, ClientState
from fedveil.protocol.directory import Announce, Directory, Hello, to_bytes
from fedveil.protocol.masked import Masked, pair_seed
from fedveil.protocol.messages import Train
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.shares import LOCK, Item, Label, open_bundle, unlock_shares
from fedveil.protocol.unmasking import Evidence, MaskedUpload, Relayed, Revealed, Unmask, packed, unpacked
from fedveil.runs.job import Job
from fedveil.uplink.graph import Graph

CLIENTS = 100
ALLIES = tuple(range(90, 100))


class Grinder:
    """Drives real clients; `ALLIES` hand it everything they know."""

    def __init__(self, **changes: Any) -> None:
        small = {"clients": CLIENTS, "rounds": 3, "options": {"depth": 2, "width": 4}, "batch_size": 4, **changes}
        self.job: Job = job(scheme="veil-secagg", **small)
        self.role = ClientRole(self.job.scheme, self.job.blueprint)
        uplink = self.job.scheme.uplink
        assert isinstance(uplink, Masked)
        self.uplink = uplink
        self.data = {data.client: data for data in self.job.pool.clients}
        self.states = {client: ClientState(client) for client in self.data}
        announced = [self.told(client, Hello("ground")) for client in self.data]
        self.directory = Directory.of("ground", announced)
        for client in self.data:
            self.told(client, self.directory)

    def told(self, client: int, request: Any, private: Any = None) -> Any:
        self.states[client], reply = self.role.handle(self.states[client], request, self.data[client], private)
        return reply

    def search(self, tries: int) -> tuple[RoundContext, Graph, int]:
        """A round in which so many allies are around one client that two stories open its upload."""
        for number in range(tries):
            context = RoundContext(number, 0, tuple(self.data), self.directory)
            graph = self.uplink.graph(context)
            victim = surrounded(graph, self.uplink)
            if victim is not None:
                return context, graph, victim
        raise AssertionError(f"no graph of {tries} suits")

    def train(self, context: RoundContext) -> Train:
        veil = self.job.scheme.downlink.veil(
            self.job.blueprint, self.job.weights, stream=self.job.secrets.stream("veil", 0), head_level=None
        )
        return Train(context.round, context.attempt, veil.broadcast(), torch.tensor(context.cohort))


def surrounded(graph: Graph, uplink: Masked) -> int | None:
    near: dict[int, int] = defaultdict(int)
    for ally in ALLIES:
        for one in graph.neighbours(ally):
            near[one] += 1
    for one, count in near.items():
        holders = graph.degree(one)
        if one not in ALLIES and 2 * uplink.quorum.of(holders) <= holders + count:
            return one
    return None


def two_stories(
    server: Grinder, context: RoundContext, graph: Graph, victim: int, uploads: dict[int, MaskedUpload]
) -> NDArray[np.uint64]:
    """The victim's upload with all masks off: half of its honest neighbours hear that it is missing."""
    everybody = set(graph.members)
    honest = [one for one in graph.neighbours(victim) if one not in ALLIES]
    allied = [one for one in graph.neighbours(victim) if one in ALLIES]
    needed = server.uplink.quorum.of(graph.degree(victim))
    missing = set(honest[: needed - len(allied)])
    shares: dict[Item, dict[int, bytes]] = defaultdict(dict)
    locked: dict[int, bytes] = {}
    label = Label(context.round, context.attempt, context.graph_seed())
    for client in graph.members:
        private = relayed(uploads, client)
        if client in ALLIES:
            ring = server.states[client].ring()
            for sender, sealed in unpacked(private.senders, private.lengths, private.bundles).items():
                found = open_bundle(graph, ring, sealed, sender=sender, self_mask=True, label=label)
                for item, share in found.items():
                    shares[item][client] = share
            continue
        if client == victim:
            continue
        story = everybody - {victim} if client in missing else everybody
        reply: Revealed = server.told(client, unmask(context, story), private)
        for peer, share in zip(reply.peers.tolist(), reply.keys, strict=True):
            shares[(peer, LOCK)][client] = to_bytes(share)
        locked[client] = to_bytes(reply.locked)

    def secret(dealer: int, about: int) -> bytes:
        holders = graph.degree(dealer if about == LOCK else about)
        return join(shares[(dealer, about)], threshold=server.uplink.quorum.of(holders))

    for client in honest:
        for item, share in unlock_shares(locked[client], client=client, key=secret(client, LOCK)).items():
            shares[item][client] = share
    opened = uploads[victim].payload.numpy().view(np.uint64).copy()
    add_mask(opened, secret(victim, victim), subtract=True)
    for peer in graph.neighbours(victim):
        seed = (
            pair_seed(server.states[peer], victim, round=context.round, attempt=context.attempt)
            if peer in ALLIES
            else secret(peer, victim)
        )
        add_mask(opened, seed, subtract=victim < peer)
    return opened


def unmask(context: RoundContext, survivors: Iterable[int]) -> Unmask:
    return Unmask(context.round, context.attempt, torch.tensor(sorted(survivors), dtype=torch.int64))


def relayed(uploads: dict[int, MaskedUpload], client: int) -> Relayed:
    dealt = {sender: unpacked(one.holders, one.lengths, one.bundles).get(client) for sender, one in uploads.items()}
    return Relayed(*packed({sender: sealed for sender, sealed in dealt.items() if sealed is not None}))


def test_a_grinding_server_reads_an_upload() -> None:
    server = Grinder()
    context, graph, victim = server.search(200_000)
    train = server.train(context)
    uploads = {client: server.told(client, train) for client in server.data}
    read = two_stories(server, context, graph, victim, uploads)
    terms = server.job.scheme.terms(server.job.blueprint)
    sent = server.uplink.codec(context, terms.work).encode(
        server.job.scheme.work.run(server.role._bench, train.broadcast, server.data[victim], round=context.round)
    )
    print(context.round, victim)
    assert np.array_equal(read, sent)
    nobody = Evidence(False, torch.empty(0, dtype=torch.int64), torch.empty((0, 64), dtype=torch.uint8))
    later = server.train(RoundContext(context.round + 1, 0, context.cohort, server.directory))
    for client in server.data:
        server.told(client, later, nobody)
