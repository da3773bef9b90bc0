"""A server that searches for a masking graph in which its allies surround a client, and then tells two stories.

With round numbers and cohorts of its choosing, 10 allies among 100 clients and 28 neighbours each, a few thousand
rounds were enough to find such a graph, and the client's upload was read to the last bit. Now graphs follow from
nonces that clients commit to before any is shown.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from federation import job
from fedveil.crypto.keys import add_mask
from fedveil.crypto.shamir import join
from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.caveats import RunFacts
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import (
    SPARE,
    WINDOW,
    Announce,
    Cohort,
    Directory,
    Epoch,
    Hello,
    Nonce,
    Nonces,
    beacon,
    committed,
    draws_of,
    from_bytes,
    to_bytes,
)
from fedveil.protocol.messages import Train
from fedveil.protocol.parts import RoundContext
from fedveil.roles.client import ClientRole
from fedveil.runs.job import Job
from fedveil.secrets import OsSecrets, SecretSource, SeededSecrets
from fedveil.uplink.graph import LEAST_BITS, Graph, masking_degree, ring, surrounded_bits
from fedveil.uplink.masked import Masked, pair_seed
from fedveil.uplink.unmasking import (
    LOCK,
    Evidence,
    Item,
    Label,
    MaskedUpload,
    Quorum,
    Relayed,
    Revealed,
    Unmask,
    open_bundle,
    packed,
    unlock_shares,
    unpacked,
)
from uplink.masking import nonces_of

CLIENTS = 100
ALLIES = tuple(range(90, 100))
NEIGHBOURS = 28
"""What the default was: few enough that ten allies can surround a client, once in 14,000 graphs."""
FEWER = 22
"""With these, eight allies do: one graph in 180 surrounds somebody, and a search is short."""
RUN = "ground"


class Grinder:
    """Drives real clients; `ALLIES` hand it everything they know."""

    def __init__(self, **changes: Any) -> None:
        small = {"clients": CLIENTS, "rounds": 3, "options": {"depth": 2, "width": 4}, "batch_size": 4, **changes}
        self.job: Job = job(scheme="veil-secagg", **small)
        self.role = ClientRole(self.job.scheme, self.job.architecture, secrets=SeededSecrets(11))
        uplink = self.job.scheme.uplink
        assert isinstance(uplink, Masked)
        self.uplink = uplink
        self.data = {data.client: data for data in self.job.pool.clients}
        self.states = {client: ClientState(client) for client in self.data}

    def told(self, client: int, request: Any, private: Any = None) -> Any:
        self.states[client], reply = self.role.handle(self.states[client], request, self.data[client], private)
        return reply

    def epoch(self, number: int = 0, first: int = 0) -> Epoch:
        return Epoch(number, first, self.job.config.rounds, CLIENTS, CLIENTS, 1)

    def enter(self, epoch: Epoch) -> None:
        """What an honest server does."""
        self.commit(epoch)
        shown: list[Nonce] = [self.told(client, self.directory) for client in self.data]
        self.nonces = nonces_of(self.directory, shown)
        self.beacon = beacon(self.directory, self.nonces)
        for client in self.data:
            self.told(client, self.nonces)

    def commit(self, epoch: Epoch) -> None:
        self.announced: list[Announce] = [self.told(client, Hello(RUN, epoch)) for client in self.data]
        self.directory = Directory.of(RUN, self.announced, epoch)

    def context(self, round: int, cohort: tuple[int, ...] | None = None, attempt: int = 0) -> RoundContext:
        return RoundContext(round, attempt, cohort or tuple(self.data), self.directory, self.beacon)

    def train(self, context: RoundContext) -> Train:
        veil = self.job.scheme.downlink.veil(
            self.job.architecture, self.job.weights, stream=self.job.secrets.stream("veil", 0), head_level=None
        )
        return Train(context.round, context.attempt, veil.broadcast(), torch.tensor(context.cohort))

    def sent(self, client: int, context: RoundContext) -> NDArray[np.uint64]:
        """A client's contribution, as it is before anything covers it."""
        work = self.job.scheme.work
        vector = work.run(self.role._workspace, self.train(context).broadcast, self.data[client], round=context.round)
        return self.uplink.codec(context, self.role._terms).encode(vector)


def surrounded(graph: Graph, uplink: Masked) -> int | None:
    """An honest client of which two stories would open everything."""
    near: dict[int, int] = defaultdict(int)
    for ally in ALLIES:
        for one in graph.neighbours(ally) if ally in graph.members else ():
            near[one] += 1
    for one, count in near.items():
        holders = graph.degree(one)
        if one not in ALLIES and 2 * uplink.quorum.of(holders) <= holders + count:
            return one
    return None


def two_stories(
    server: Grinder, context: RoundContext, graph: Graph, victim: int, uploads: dict[int, MaskedUpload]
) -> NDArray[np.uint64] | None:
    """The victim's upload with all masks off: half of its honest neighbours hear that it is missing.

    None where shares are too few.
    """
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
            keys = server.states[client].ring()
            for sender, sealed in unpacked(private.senders, private.lengths, private.bundles).items():
                found = open_bundle(graph, keys, sealed, sender=sender, self_mask=True, label=label)
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
    try:
        add_mask(opened, secret(victim, victim), subtract=True)
        for peer in graph.neighbours(victim):
            allied_seed = peer in ALLIES and pair_seed(server.states[peer], victim, round=context.round, attempt=0)
            add_mask(opened, allied_seed or secret(peer, victim), subtract=victim < peer)
    except ProtocolError:
        return None
    return opened


def unmask(context: RoundContext, survivors: Iterable[int]) -> Unmask:
    return Unmask(context.round, context.attempt, torch.tensor(sorted(survivors), dtype=torch.int64))


def relayed(uploads: dict[int, MaskedUpload], client: int) -> Relayed:
    dealt = {sender: unpacked(one.holders, one.lengths, one.bundles).get(client) for sender, one in uploads.items()}
    return Relayed(*packed({sender: sealed for sender, sealed in dealt.items() if sealed is not None}))


@pytest.fixture(scope="module")
def few() -> Grinder:
    """A run on as few neighbours as clients had by default, in its first epoch."""
    found = Grinder(neighbours=NEIGHBOURS)
    found.enter(found.epoch())
    return found


def refused(server: Grinder, client: int, context: RoundContext) -> str:
    with pytest.raises(ProtocolError) as caught:
        server.told(client, server.train(context))
    return str(caught.value)


@pytest.fixture(scope="module")
def fewer() -> Grinder:
    found = Grinder(neighbours=FEWER)
    found.enter(found.epoch())
    return found


@pytest.fixture(scope="module")
def ground(fewer: Grinder) -> RoundContext:
    """What a search of round numbers finds for a server that knows all nonces."""
    rounds = (fewer.context(number) for number in range(200_000))
    return next(one for one in rounds if surrounded(fewer.uplink.graph(one), fewer.uplink) is not None)


def test_a_grinding_server_finds_its_graph_only_in_rounds_that_no_client_takes_part_in(
    fewer: Grinder, ground: RoundContext
) -> None:
    """The search succeeds, as it did; what it finds is worth nothing."""
    assert ground.round not in fewer.directory.epoch
    for client in (0, 50, surrounded(fewer.uplink.graph(ground), fewer.uplink) or 0):
        assert "is not of the epoch that begins with round 1" in refused(fewer, client, ground)


def test_a_grinding_server_finds_no_graph_in_cohorts_of_its_own_which_no_client_takes_part_in(few: Grinder) -> None:
    """The fewer are there the more neighbours they have; and who is there is not picked round by round."""
    absent = itertools.islice(itertools.combinations(range(80), 4), 400)
    chosen = [tuple(one for one in range(CLIENTS) if one not in gone) for gone in absent]
    assert all(surrounded(few.uplink.graph(few.context(0, one)), few.uplink) is None for one in chosen)
    for client in (chosen[0][-20], 85):
        assert "names other clients than the epoch's schedule" in refused(few, client, few.context(0, chosen[0]))


def test_a_further_attempt_draws_nothing_anew(few: Grinder) -> None:
    assert few.context(1, attempt=0).graph_seed() == few.context(1, attempt=9).graph_seed()


def test_with_the_degree_that_follows_from_ten_allies_of_a_hundred_two_stories_open_nothing_and_are_noticed() -> None:
    server = Grinder()
    server.enter(server.epoch())
    context = server.context(0)
    graph = server.uplink.graph(context)
    assert all(surrounded(server.uplink.graph(server.context(n)), server.uplink) is None for n in range(300))
    victim = max(range(90), key=lambda one: len(set(graph.neighbours(one)) & set(ALLIES)))
    train = server.train(context)
    uploads = {client: server.told(client, train) for client in server.data}
    assert two_stories(server, context, graph, victim, uploads) is None
    # Whatever it says came of the round, it has no quorum of signatures to show, and a client is not asked twice.
    after = server.train(server.context(1))
    near = [one for one in graph.neighbours(victim) if one not in ALLIES]
    nobody = Evidence(torch.empty(0, dtype=torch.int64), torch.empty((0, 64), dtype=torch.uint8))
    for client in near[:3]:
        with pytest.raises(ProtocolError, match="was not shown what its neighbours signed there"):
            server.told(client, after)
        with pytest.raises(ProtocolError, match="needed neighbours of client"):
            server.told(client, after, nobody)
    assert "which it has answered or left behind" in refused(server, victim, server.context(0, attempt=1))


def test_the_attack_still_reads_an_upload_where_clients_let_the_graph_be_chosen(
    fewer: Grinder, ground: RoundContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the tests above can fail: without the check of rounds everything else of the attack works."""
    server = Grinder(neighbours=FEWER)
    server.states = {client: replace(state) for client, state in fewer.states.items()}
    server.directory, server.beacon = fewer.directory, fewer.beacon
    context, graph = ground, server.uplink.graph(ground)
    victim = surrounded(graph, server.uplink)
    assert victim is not None
    monkeypatch.setattr(RoundContext, "check_scheduled", lambda context: None)
    train = server.train(context)
    uploads = {client: server.told(client, train) for client in server.data}
    read = two_stories(server, context, graph, victim, uploads)
    assert read is not None
    assert np.array_equal(read, server.sent(victim, context))


# ---- commit, then show


def small(**changes: Any) -> Grinder:
    return Grinder(neighbours=4, **changes)


def test_a_nonce_is_shown_only_for_a_directory_that_has_everybodys_commitment_and_then_for_no_other() -> None:
    server = small()
    server.commit(server.epoch())
    shown: Nonce = server.told(0, server.directory)
    said = committed(to_bytes(shown.nonce), run=RUN, epoch=0, client=0)
    assert said == to_bytes(server.announced[0].commitment)
    assert torch.equal(server.told(0, server.directory).nonce, shown.nonce)  # asked again, the same
    other = replace(server.directory, commitments=server.directory.commitments.clone())
    other.commitments[95] ^= 1
    with pytest.raises(ProtocolError, match="a second directory of one epoch, after it has shown its nonce"):
        server.told(0, other)
    fewer = Directory.of(RUN, server.announced, server.epoch(), present=range(99))
    with pytest.raises(ProtocolError, match="a second directory of one epoch"):
        server.told(0, fewer)
    swapped = replace(server.directory, commitments=server.directory.commitments.roll(1, 0))
    with pytest.raises(ProtocolError, match="shows client 1 another commitment than its own"):
        server.told(1, swapped)
    with pytest.raises(ProtocolError, match="client 99 is not of the epoch"):
        server.told(99, fewer)


def test_whoever_changes_a_nonce_after_it_was_committed_to_is_refused_by_everybody() -> None:
    server = small()
    server.commit(server.epoch())
    shown: list[Nonce] = [server.told(client, server.directory) for client in server.data]
    honest = nonces_of(server.directory, shown)
    for spoil in (
        lambda nonces: nonces.index_fill(0, torch.tensor([95]), 7),
        lambda nonces: nonces.roll(1, 0),
        lambda nonces: nonces[:-1],
        lambda nonces: nonces.long(),
    ):
        with pytest.raises(
            ProtocolError, match=r"is not the one it committed to|belong to another directory|where uint8"
        ):
            server.told(0, Nonces(honest.digest, spoil(honest.nonces)))
    with pytest.raises(ProtocolError, match="before its epoch's nonces were shown"):
        server.told(0, server.train(RoundContext(0, 0, tuple(server.data), server.directory)))
    server.told(0, honest)


def test_clients_that_were_shown_different_directories_share_no_graph() -> None:
    """An ally may commit to two nonces: then it has two groups of clients whose masks do not cancel."""
    server = small()
    server.commit(server.epoch())
    twice = replace(server.announced[95], commitment=from_bytes(committed(bytes(32), run=RUN, epoch=0, client=95)))
    second = Directory.of(RUN, [*server.announced[:95], twice, *server.announced[96:]], server.epoch())
    shown: list[Nonce] = [server.told(k, second if k % 2 else server.directory) for k in server.data if k != 95]
    own = Nonce(95, second.present, from_bytes(server.states[95].ring()._nonce))
    first = nonces_of(server.directory, [*shown, own])
    other = nonces_of(second, [*shown, Nonce(95, second.present, from_bytes(bytes(32)))])
    beacons = {to_bytes(server.told(k, other if k % 2 else first).digest) for k in server.data if k != 95}
    assert len(beacons) == 2


def test_epochs_follow_each_other_and_each_has_a_nonce_of_its_own_and_there_are_only_so_many() -> None:
    server = small()
    server.enter(server.epoch(0))
    before, nonces = server.directory, server.nonces
    server.enter(server.epoch(2, first=1))
    assert not torch.equal(server.nonces.nonces[0], nonces.nonces[0])
    with pytest.raises(ProtocolError, match="an epoch it has not entered"):
        server.told(0, before)
    with pytest.raises(ProtocolError, match="epochs follow each other, and each is drawn once"):
        server.told(0, Hello(RUN, server.epoch(1, first=1)))
    with pytest.raises(ProtocolError, match="epochs follow each other"):
        server.told(0, Hello(RUN, server.epoch(3, first=0)))
    with pytest.raises(ProtocolError, match="another schedule of rounds"):
        server.told(0, Hello(RUN, replace(server.epoch(3, first=1), seed=2)))
    most = server.epoch().most
    assert most == 1 + SPARE
    with pytest.raises(ProtocolError, match=f"which has {most} at most"):
        server.told(0, Hello(RUN, server.epoch(most, first=1)))
    with pytest.raises(ProtocolError, match="numbers that cannot be"):
        server.told(0, Hello("another", replace(server.epoch(), clients=1 << 40)))


def test_an_epoch_lets_clients_skip_rounds_but_not_go_back() -> None:
    server = small(rounds=200)
    server.enter(server.epoch(0, first=5))
    server.told(0, server.train(server.context(9)))  # it was away in rounds 6 to 9
    assert "answered or left behind" in refused(server, 0, server.context(7))
    assert "is not of the epoch that begins with round 6" in refused(server, 1, server.context(4))
    assert "is not of the epoch" in refused(server, 1, server.context(5 + WINDOW))
    server.told(1, server.train(server.context(4 + WINDOW)))


def test_a_sealed_client_shows_the_nonce_it_committed_to_before_it_slept() -> None:
    server, key = small(), bytes(32)
    server.commit(server.epoch())
    server.states = {k: ClientState.unseal(state.seal(key), key) for k, state in server.states.items()}
    shown: list[Nonce] = [server.told(client, server.directory) for client in server.data]
    server.states = {k: ClientState.unseal(state.seal(key), key) for k, state in server.states.items()}
    with pytest.raises(ProtocolError, match="a second directory of one epoch"):
        server.told(0, Directory.of(RUN, server.announced, server.epoch(), present=range(99)))
    server.told(0, nonces_of(server.directory, shown))
    back = ClientState.unseal(server.states[0].seal(key), key)
    assert back.ring().beacon == server.states[0].ring().beacon != b""


# ---- how likely a surrounded client is


@pytest.mark.parametrize(
    ("clients", "degree", "share"), [(100, 28, 0.1), (60, 22, 0.2), (1000, 40, 0.1), (40, 12, 0.3)]
)
def test_the_chance_of_a_surrounded_client_is_the_hypergeometric_tail(clients: int, degree: int, share: float) -> None:
    quorum, allied = Quorum(), math.floor(share * clients)
    least = 2 * quorum.of(degree) - degree
    tail = stats.hypergeom.sf(least - 1, clients - 1, allied, degree)
    bits = surrounded_bits(clients, of=clients, degree=degree, share=share, needed=quorum.of, draws=7)
    assert 2.0**-bits == pytest.approx(tail * (clients - allied) * 7, rel=1e-9)


def test_random_rings_surround_clients_as_often_as_computed() -> None:
    """Fixed seeds. Surrounded clients of 4000 rings: off by more than 5 standard errors once in 10⁶ seeds at most."""
    quorum, rings = Quorum(), 4000
    found = 0
    for number in range(rings):
        graph = ring(range(30), degree=6, seed=number.to_bytes(8, "big"))
        for client in range(6, 30):
            found += len([one for one in graph.neighbours(client) if one < 6]) >= 2 * quorum.of(6) - 6
    expected = 2.0 ** -surrounded_bits(30, of=30, degree=6, share=0.2, needed=quorum.of, draws=1) * rings
    assert abs(found - expected) < 5 * math.sqrt(24 * expected)


@pytest.mark.parametrize("clients", [3, 10, 32, 33, 50, 100, 300, 1000])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.2])
def test_the_degree_is_the_least_that_keeps_a_run_below_one_in_2_to_the_30(clients: int, share: float) -> None:
    needed, draws = Quorum().of, draws_of(100)
    degree = masking_degree(clients, of=clients, share=share, needed=needed, draws=draws)
    bits = surrounded_bits(clients, of=clients, degree=degree, share=share, needed=needed, draws=draws)
    assert bits >= LEAST_BITS or degree == clients - 1
    if clients == 100 and share == 0.1:
        assert (degree, bits) == (30, math.inf)  # ten allies are too few to surround anybody
    if clients == 1000 and share == 0.1:
        assert degree == 126


def test_a_share_of_colluders_that_cannot_be_is_refused() -> None:
    for share in (-0.1, 1.0, math.nan):
        with pytest.raises(ConfigError, match="collusion must lie in"):
            Masked(collusion=share)


def test_the_ledger_prints_the_chance_that_a_neighbourhood_is_not_enough() -> None:
    def said(clients: int, **how: Any) -> str:
        return Masked(**how).collusion_assumptions(RunFacts(100, clients, clients, False, False))[1]

    assert "at most 10 of a round's 100 clients collude (collusion 0.1)" in said(100)
    assert "that many surround nobody who has 30 neighbours" in said(100)
    assert "MORE than 2^-30: give 30 neighbours" in said(100, degree=28)
    bits = surrounded_bits(1000, of=1000, degree=126, share=0.1, needed=Quorum().of, draws=draws_of(100))
    assert f"of 126 neighbours anywhere in the run is at most 2^-{bits:.1f}" in said(1000)
    assert bits >= LEAST_BITS
    assert "TOO MANY" in said(20, collusion=0.5)
    assert "nobody who has 19 neighbours" in said(20)


def test_of_a_drawn_cohort_a_client_takes_the_schedules_and_no_other(few: Grinder) -> None:
    sampled = replace(few.directory, epoch=replace(few.epoch(), size=20))
    for number in range(3):
        drawn = Cohort(CLIENTS, 20, 1).draw(number)
        RoundContext(number, 0, drawn, sampled, few.beacon).check_scheduled()
        for other in (drawn[1:], Cohort(CLIENTS, 20, 1).draw(number + 1), Cohort(CLIENTS, 20, 2).draw(number)):
            with pytest.raises(ProtocolError, match="other clients than the epoch's schedule"):
                RoundContext(number, 0, other, sampled, few.beacon).check_scheduled()
    gone = replace(sampled, present=sampled.present[1:], commitments=sampled.commitments[1:])
    with_first = next(number for number in range(20) if 0 in Cohort(CLIENTS, 20, 1).draw(number))
    assert gone.cohort(with_first, few.beacon) == Cohort(CLIENTS, 20, 1).draw(with_first)[1:]


# ---- small cohorts of many clients

SEATS = 4


def isolating(victim: int, *, rounds: int) -> tuple[int, int]:
    """(seed, round) of a schedule in which nobody but allies is asked along with `victim`: found by trying seeds."""
    for seed in range(20_000):
        schedule = Cohort(CLIENTS, SEATS, seed)
        for number in range(rounds):
            drawn = schedule.draw(number)
            if victim in drawn and set(drawn) - {victim} <= set(ALLIES):
                return seed, number
    raise AssertionError("no seed isolates the victim")


class Seed(Grinder):
    """Picks the schedule's seed, after trying as many as it takes, such that a round asks `victim` and allies."""

    victim = 7

    def __init__(self, secrets: SecretSource) -> None:
        super().__init__(rounds=60, cohort=SEATS)
        self.role = ClientRole(self.job.scheme, self.job.architecture, secrets=secrets)
        self.seed, self.number = isolating(self.victim, rounds=60)

    def sampled(self, *, shuffled: bool, number: int = 0) -> Epoch:
        return Epoch(number, 0, 60, CLIENTS, SEATS, self.seed, shuffled)

    def drawn(self) -> tuple[int, ...]:
        return self.directory.cohort(self.number, self.beacon)


def test_clients_with_secrets_of_their_own_take_no_part_in_cohorts_that_follow_from_a_servers_seed() -> None:
    server = Seed(OsSecrets())
    with pytest.raises(ProtocolError, match="by a seed that the server has picked"):
        server.enter(server.sampled(shuffled=False))


def test_a_ground_seed_is_worth_nothing_where_the_beacon_decides_who_is_asked() -> None:
    """Real randomness: by chance that round isolates this client in one of 32,000 epochs, and 4 are drawn."""
    server = Seed(OsSecrets())
    found = set()
    for number in range(4):
        server.enter(server.sampled(shuffled=True, number=number))
        found.add(server.drawn())
        assert not (server.victim in server.drawn() and set(server.drawn()) - {server.victim} <= set(ALLIES))
    assert len(found) > 1
    wanted = server.context(server.number, Cohort(CLIENTS, SEATS, server.seed).draw(server.number))
    assert "names other clients than the epoch's schedule" in refused(server, server.victim, wanted)
    context = server.context(server.number, server.drawn())
    assert isinstance(server.told(context.cohort[0], server.train(context)), MaskedUpload)
    with pytest.raises(ProtocolError, match="another schedule of rounds"):
        server.told(0, Hello(RUN, replace(server.sampled(shuffled=True, number=5), seed=server.seed + 1)))


def test_the_ground_seed_still_isolates_a_client_of_a_simulation() -> None:
    """So that the tests above can fail: where secrets follow from a seed, and are called a simulation, it works."""
    server = Seed(SeededSecrets(11))
    server.enter(server.sampled(shuffled=False))
    context = server.context(server.number, server.drawn())
    train = server.train(context)
    uploads = {client: server.told(client, train) for client in context.cohort}
    read = two_stories(server, context, server.uplink.graph(context), server.victim, uploads)
    assert read is not None
    assert np.array_equal(read, server.sent(server.victim, context))


def test_shuffled_cohorts_surround_clients_as_often_as_computed() -> None:
    """Fixed beacons. Surrounded clients of 4000 epochs: off by 5 standard errors once in 10⁶ choices at most."""
    quorum, epochs, size, degree, allied = Quorum(), 4000, 12, 6, 12
    cohort, found = Cohort(60, size, 0, shuffled=True), 0
    for number in range(epochs):
        beacon = number.to_bytes(32, "big")
        graph = ring(cohort.draw(3, beacon), degree=degree, seed=beacon)
        for client in graph.members:
            near = [one for one in graph.neighbours(client) if one < allied]
            found += client >= allied and len(near) >= 2 * quorum.of(degree) - degree
    bits = surrounded_bits(size, of=60, degree=degree, share=allied / 60, needed=quorum.of, draws=1)
    expected = 2.0**-bits * epochs
    assert abs(found - expected) < 5 * math.sqrt(size * expected)


def test_the_ledger_says_of_sampled_cohorts_how_many_of_all_clients_may_collude_and_what_the_chance_is() -> None:
    def said(clients: int, cohort: int, **how: Any) -> str:
        return Masked(**how).collusion_assumptions(RunFacts(100, cohort, clients, False, False))[1]

    few = said(1000, 10)
    assert "at most 100 of all 1000 clients collude (collusion 0.1), and not by who is asked with whom or" in few
    assert "not bounded, MORE than 2^-30: cohorts of 10 are too small for such a share, give a larger cohort" in few
    degree = masking_degree(300, of=1000, share=0.1, needed=Quorum().of, draws=draws_of(100))
    assert f"of {degree} neighbours anywhere in the run is at most 2^-3" in said(1000, 300)
    assert f"give {degree} neighbours or leave the choice to FedVeil" in said(1000, 300, degree=40)
    assert "of a round's 1000 clients" in said(1000, 1000)


def test_the_degree_of_sampled_cohorts_reckons_with_chance_in_who_is_asked() -> None:
    needed, draws = Quorum().of, draws_of(100)
    alone = masking_degree(100, of=100, share=0.1, needed=needed, draws=draws)
    assert masking_degree(100, of=1000, share=0.1, needed=needed, draws=draws) > alone == 30
