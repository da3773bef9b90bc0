"""What clients have spent: against whom, with whose noise known, and rounded against us."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.ledger.accountant import CLIENTS, COLLUSION, SERVER, Accountant
from fedveil.ledger.correlated import NoiseLayout, by_peer, central, charges, only, worst_collusion
from fedveil.ledger.gaussian import epsilon_of, mu_of

few = settings(deadline=None, max_examples=50)


def noise_layout(
    residual: list[float], *, pair: float = 0.0, reach: list[float] | None = None, summed: bool = False
) -> NoiseLayout:
    """Clients 0, 1, 2, …, every two of which share noise of variance `pair`."""
    size = len(residual)
    first, second = np.triu_indices(size, k=1)
    if pair == 0:
        first = second = np.empty(0, dtype=np.int64)
    sensitivity = np.ones(size) if reach is None else np.array(reach)
    pairs = np.full(len(first), pair)
    return NoiseLayout(tuple(range(size)), sensitivity, np.array(residual), first, second, pairs, summed)


EVEN = noise_layout([1.0] * 5, pair=4.0)


def noise_left(found: NoiseLayout, arrived: set[int], knows: int, revealed: frozenset[frozenset[int]]) -> float:
    """The variance in the sum of what arrived that member `knows` does not know, term by term."""
    noise = sum(found.residual[k] for k in arrived if k != knows)
    for i, j, pair in zip(found.first.tolist(), found.second.tolist(), found.pairs, strict=True):
        stays = (i in arrived) != (j in arrived)
        if stays and knows not in (i, j) and frozenset((i, j)) not in revealed:
            noise += pair
    return float(noise)


@few
@given(
    residual=st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
    pair=st.sampled_from([0.0, 0.5, 20.0]),
    data=st.data(),
)
def test_another_client_takes_what_it_knows_out_of_the_sum(
    residual: list[float], pair: float, data: st.DataObject
) -> None:
    found = noise_layout(residual, pair=pair, reach=[1.0 + k for k in range(len(residual))])
    members = list(range(len(residual)))
    arrived = set(data.draw(st.lists(st.sampled_from(members), unique=True, min_size=1)))
    gone = [k for k in members if k not in arrived]
    some = data.draw(st.lists(st.sampled_from(gone), unique=True)) if gone else []
    revealed = [(one, other) for one in arrived for other in some]
    hidden = frozenset(frozenset(one) for one in revealed)
    prices = by_peer(found, arrived=arrived, revealed=revealed)
    for client in members:
        if client not in arrived:
            assert prices[client] == 0
            continue
        least = min((noise_left(found, arrived, knows, hidden) for knows in members if knows != client), default=None)
        if least is None:
            least = sum(found.residual)
        expected = found.sensitivity[client] ** 2 / least if least > 1e-12 else math.inf
        assert prices[client] == pytest.approx(expected, rel=1e-9)
        assert prices[client] >= expected * (1 - 1e-15)


def test_the_server_sees_every_upload_also_one_that_did_not_arrive() -> None:
    accountant = Accountant(5)
    accountant.charge(EVEN, arrived=(0, 1, 2))
    assert accountant.spent[SERVER] == pytest.approx(charges(EVEN))


def test_a_server_that_is_honest_about_arrivals_has_not_seen_the_missing() -> None:
    accountant = Accountant(5, honest_arrivals=True)
    accountant.charge(EVEN, arrived=(0, 1, 2))
    assert accountant.spent[SERVER] == pytest.approx(charges(EVEN, arrived=(0, 1, 2)))
    assert accountant.spent[SERVER][3:].tolist() == [0, 0]


@pytest.mark.parametrize("arrived", [(0, 1, 2), (0, 1, 2, 3)])
def test_an_upload_that_stays_away_makes_no_failed_round_dearer_than_a_whole_one(arrived: tuple[int, ...]) -> None:
    """What is seen of it is a part of what would have been: so a round that was affordable is so when it fails."""
    accountant = Accountant(5, limit=10.0, least=1, honest_arrivals=True)
    whole = accountant.prices(EVEN)
    part = accountant.prices(EVEN, arrived=arrived, published=False)
    for adversary in (SERVER, COLLUSION):
        assert (part[adversary] <= whole[adversary] * (1 + 1e-12)).all()
        assert (part[adversary][list(arrived)] > 0).all()
        assert part[adversary][4] == 0


def test_an_upload_that_was_refused_is_seen() -> None:
    revealed = [(k, 4) for k in range(4)]
    accountant = Accountant(5, least=1, honest_arrivals=True)
    for seen, price in ((None, 0.0), ((0, 1, 2, 3, 4), 1.0)):
        prices = accountant.prices(EVEN, arrived=(0, 1, 2, 3), revealed=revealed, seen=seen)
        assert [prices[name][4] for name in (SERVER, COLLUSION)] == pytest.approx([price, price])
        assert prices[CLIENTS][4] == 0


def test_revealed_pairs_leave_the_missing_their_residual_noise_alone() -> None:
    revealed = [(k, 4) for k in range(4)]
    accountant = Accountant(5)
    accountant.charge(EVEN, arrived=(0, 1, 2, 3), revealed=revealed)
    assert accountant.spent[SERVER][4] == pytest.approx(1.0)
    assert accountant.spent[SERVER][0] == pytest.approx(charges(noise_layout([1.0] * 4, pair=4.0))[0])


@pytest.mark.parametrize("honest", [False, True])
def test_under_masks_the_sum_lacks_the_noise_of_whoever_is_missing(honest: bool) -> None:
    """Nothing but the sum is ever seen, so the missing pay nothing and the others more."""
    masked = noise_layout([1.0] * 6, summed=True)
    accountant = Accountant(6, collusion=0.3, honest_arrivals=honest)
    accountant.charge(masked, arrived=(0, 1, 2, 3))
    assert accountant.spent[SERVER] == pytest.approx([1 / 4] * 4 + [0, 0])
    assert accountant.spent[COLLUSION] == pytest.approx([1 / 2] * 4 + [0, 0])
    assert accountant.spent[CLIENTS] == pytest.approx([1 / 2] * 4 + [0, 0])


@few
@given(
    residual=st.lists(st.floats(0.1, 10), min_size=3, max_size=6),
    collusion=st.sampled_from([0.1, 0.34, 0.5]),
    honest=st.booleans(),
    data=st.data(),
)
def test_colluders_are_charged_for_at_least_as_much_as_any_of_their_sets_sees(
    residual: list[float], collusion: float, honest: bool, data: st.DataObject
) -> None:
    found = noise_layout(residual, pair=3.0)
    arrived = data.draw(st.lists(st.sampled_from(found.members), unique=True, min_size=2))
    accountant = Accountant(len(residual), collusion=collusion, honest_arrivals=honest)
    price = accountant.prices(found, arrived=arrived)[COLLUSION]
    count = math.ceil(collusion * len(residual) - 1e-9)
    for colluding in combinations(found.members, min(count, len(residual) - 1)):
        seen = charges(found, arrived=arrived if honest else None, colluding=colluding)
        assert (price >= seen * (1 - 1e-12)).all()


def test_only_those_who_arrived_keep_their_pairs() -> None:
    found = only(EVEN, (0, 2, 3))
    assert found.members == (0, 2, 3)
    ends = zip(found.first.tolist(), found.second.tolist(), strict=True)
    assert [(found.members[i], found.members[j]) for i, j in ends] == [(0, 2), (0, 3), (2, 3)]
    assert only(EVEN, range(5)) is EVEN


def test_a_trusted_server_adds_all_of_the_noise_whoever_stays_away() -> None:
    accountant = Accountant(4, trusted=True)
    assert accountant.adversaries == (CLIENTS,)
    accountant.charge(noise_layout([1.0] * 4, summed=True), arrived=(0, 2))
    assert accountant.spent[CLIENTS].tolist() == pytest.approx([0.25, 0, 0.25, 0])


def test_clients_do_not_see_a_sum_that_was_not_published() -> None:
    accountant = Accountant(5)
    accountant.charge(EVEN, published=False)
    assert accountant.spent[CLIENTS].max() == 0
    assert accountant.spent[SERVER].min() > 0
    trusted = Accountant(5, trusted=True)
    trusted.charge(noise_layout([1.0] * 5, summed=True), published=False)
    assert trusted.spent[CLIENTS].max() == 0


def test_every_round_and_every_repetition_is_charged() -> None:
    accountant = Accountant(5)
    for _ in range(3):
        accountant.charge(EVEN)
    assert accountant.rounds == 3
    assert accountant.spent[SERVER] == pytest.approx(3 * charges(EVEN))
    client, mu = accountant.worst(SERVER)
    assert mu == pytest.approx(math.sqrt(3 * charges(EVEN)[client]))
    assert accountant.epsilon(SERVER, 1e-5) == epsilon_of(mu, 1e-5)


def test_only_members_of_the_round_pay() -> None:
    part = NoiseLayout((1, 3), np.ones(2), np.ones(2), np.array([0]), np.array([1]), np.ones(1))
    accountant = Accountant(5)
    accountant.charge(part)
    assert (accountant.spent[SERVER] > 0).tolist() == [False, True, False, True, False]


def test_a_client_that_would_exceed_the_limit_is_named_and_nobody_is_charged_for_asking() -> None:
    price = float(charges(EVEN)[0])
    accountant = Accountant(5, limit=2.5 * price)
    accountant.spent[SERVER][3] = 2 * price
    assert accountant.exceeded_by(EVEN) == {3}
    assert accountant.spent[SERVER][0] == 0
    assert Accountant(5).exceeded_by(EVEN) == set()


def test_the_limit_holds_against_every_adversary() -> None:
    """Strong pairs hide uploads from the server, but another client knows a fifth of the sum's noise."""
    strong = noise_layout([1.0] * 5, pair=1e6)
    by_server, by_another = float(charges(strong)[0]), float(by_peer(strong)[0])
    assert by_server < by_another
    accountant = Accountant(5, limit=(by_server + by_another) / 2)
    assert accountant.exceeded_by(strong) == set(range(5))


def test_a_limit_reached_exactly_is_not_exceeded() -> None:
    accountant = Accountant(5, limit=4 * max(float(by_peer(EVEN).max()), float(charges(EVEN).max())))
    for _ in range(4):
        assert accountant.exceeded_by(EVEN) == set()
        accountant.charge(EVEN)
    assert accountant.exceeded_by(EVEN) == set(range(5))


def test_an_estimate_is_not_called_a_proof() -> None:
    size = 40
    ring = np.arange(size)
    sparse = NoiseLayout(tuple(range(size)), np.ones(size), np.ones(size), ring, (ring + 1) % size, np.full(size, 9.0))
    accountant = Accountant(size, collusion=0.2)
    accountant.charge(sparse)
    assert not accountant.certified
    assert "colluders may do better" in accountant.how
    sure = Accountant(5, collusion=0.2)
    sure.charge(EVEN)
    assert sure.certified
    assert sure.spent[COLLUSION] == pytest.approx(worst_collusion(EVEN, 1).mu2)


def test_what_nothing_covers_costs_infinitely_much() -> None:
    bare = noise_layout([0.0, 1.0])
    accountant = Accountant(2, limit=mu_of(3.0, 1e-5) ** 2)
    assert accountant.exceeded_by(bare) >= {0}
    accountant.charge(bare)
    assert accountant.worst(SERVER) == (0, math.inf)
    assert accountant.epsilon(SERVER, 1e-5) == math.inf
    assert central(bare)[0] == pytest.approx(1.0)
