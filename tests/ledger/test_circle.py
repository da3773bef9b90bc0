"""What a circle of clients proves, against matrices that are inverted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fedveil.ledger import caveats, correlated, sparse
from fedveil.ledger.accountant import COLLUSION, Accountant
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.correlated import NoiseLayout, charges, only, without, worst_collusion
from fedveil.ledger.policy import Policy
from fedveil.ledger.sparse import Circle, least_circle
from fedveil.uplink.graph import circulant
from fedveil.uplink.noise_plan import COMPLETE_UP_TO, NoisePlan, Target
from fedveil.uplink.noised import Noised

SEED = bytes(range(32))


def plan(**options: object) -> NoisePlan:
    return NoisePlan(Target(3.0, 1e-5, 3, 3), "pairs", draws=200, **options)  # type: ignore[arg-type]


def layout(count: int, **options: object) -> NoiseLayout:
    return plan(**options).noise_layout(range(count), [4] * count, [1.0] * count, seed=SEED)


def adjacency(circle: Circle) -> np.ndarray:
    graph = circulant(range(circle.count), circle, seed=SEED)
    matrix = np.zeros((circle.count, circle.count))
    matrix[graph.first, graph.second] = matrix[graph.second, graph.first] = 1
    return matrix


@pytest.mark.parametrize(("count", "picks"), [(40, 3), (41, 5), (150, 6)])
def test_the_second_eigenvalue_is_that_of_the_graph_as_drawn(count: int, picks: int) -> None:
    circle = Circle(count, picks, 1)
    matrix = adjacency(circle)
    assert np.all(matrix.sum(axis=0) == circle.degree)
    second = np.sort(np.linalg.eigvalsh(matrix))[-2]
    assert second <= circle.second <= second + 1e-6


@pytest.mark.parametrize("gone", [(), (3,), (0, 7, 70, 90)], ids=len)
def test_no_client_is_charged_less_than_an_inverse_says_whoever_colludes(gone: tuple[int, ...]) -> None:
    noise = layout(150)
    exact = charges(replace(noise, circle=None), colluding=gone)
    bounded = charges(noise, colluding=gone)
    assert np.all(bounded >= exact * (1 - 1e-9))
    assert bounded.max() <= 1.02 * exact.max()


def test_a_single_colluder_is_bounded_by_what_trying_every_one_gives() -> None:
    noise = layout(140)
    tried, proven = worst_collusion(replace(noise, circle=None), 1), worst_collusion(noise, 1)
    assert "tried" in tried.how
    assert proven.certified
    assert np.all(proven.mu2 >= tried.mu2 * (1 - 1e-9))
    assert proven.mu2.max() <= 1.02 * tried.mu2.max()


def test_colluders_that_choose_their_place_do_no_better_than_the_bound() -> None:
    noise, colluders = layout(300, collusion=0.02), 6
    assert noise.circle is not None
    assert noise.circle.whoever(colluders)
    around = [client for client, _ in noise.partners(0)][:colluders]
    exact = charges(replace(noise, circle=None), colluding=around)
    assert np.all(worst_collusion(noise, colluders).mu2 >= exact * (1 - 1e-9))


def test_the_chance_of_more_colluders_around_a_client_is_a_hypergeometric_tail() -> None:
    circle, colluders = Circle(1_000, 32, 200), 100
    near = circle.near(colluders)
    assert not circle.whoever(colluders)

    def chance(more_than: int) -> float:
        every = math.comb(999, 64)
        ways = sum(math.comb(100, c) * math.comb(899, 64 - c) for c in range(more_than + 1, 65))
        return ways / every * 900 * 200

    assert chance(near) <= 2.0**-30 < chance(near - 1)


@pytest.mark.parametrize(("count", "degree"), [(1_000, 44), (4_000, 52), (10_000, 58)])
def test_the_default_degree_grows_with_the_logarithm(count: int, degree: int) -> None:
    circle = plan().circle(count)
    assert circle is not None
    assert circle.degree == degree
    assert circle.withstands(1)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_by_default_a_quarter_of_the_clients_may_be_missing_at_random(share: float) -> None:
    """A chance of 2⁻¹⁰ a draw, and the draw is a fixed one."""
    noise = layout(600, collusion=share)
    missing = set(np.random.default_rng(1).permutation(600)[:150].tolist())
    arrived = [client for client in noise.members if client not in missing]
    cut = [(client, other) for other in missing for client, _ in noise.partners(other) if client not in missing]
    account = Accountant(600, collusion=share, least=1, asked=600, honest_arrivals=True)
    whole = account.prices(noise)[COLLUSION].max()
    left = account.prices(noise, arrived=arrived, revealed=cut)[COLLUSION].max()
    assert account.certified
    assert left <= 1.7 * whole  # a third less noise is in the sum; one's own alone would be hundreds of times as much


@pytest.mark.parametrize("dense", [1_500, 0], ids=["may be inverted", "too many to invert"])
@pytest.mark.parametrize("away", [0.06, 0.1])
def test_who_has_too_few_neighbours_left_is_charged_for_the_way_to_those_that_have_enough(
    away: float, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = layout(600, neighbours=7)
    missing = set(np.random.default_rng(5).permutation(600)[: int(away * 600)].tolist())
    rest = only(noise, [client for client in noise.members if client not in missing])
    assert noise.circle is not None
    near = np.bincount(np.concatenate([rest.first, rest.second]), minlength=len(rest.members))
    assert near.min() - 1 <= noise.circle.second, "nobody would have to be peeled"
    exact = worst_collusion(replace(rest, circle=None), 1)
    assert "tried" in exact.how
    monkeypatch.setattr(correlated, "DENSE_UP_TO", dense)
    worst_collusion.cache_clear()
    proven = worst_collusion(rest, 1)
    assert proven.certified
    assert np.all(proven.mu2 >= exact.mu2 * (1 - 1e-9))
    assert proven.mu2.max() <= 1.25 * exact.mu2.max()


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_a_clients_own_share_of_colluders_is_never_met_by_an_estimate(share: float) -> None:
    """Beyond what the circle of a run proves, a client counts on its own noise alone."""
    noise, colluders = layout(300), math.ceil(share * 300)
    assert noise.circle is not None
    price = Policy(collusion=share).charged(noise, client=0, spent=0.0, colluders=1, asked=300)
    around = [client for client, _ in noise.partners(0)]
    others = [client for client in noise.members[1:] if client not in around]
    taken = (around[: noise.circle.near(colluders)] + others)[:colluders]
    assert price >= charges(replace(noise, circle=None), colluding=taken)[0] * (1 - 1e-9)
    if noise.circle.gap(colluders) <= 0:
        assert price == pytest.approx(noise.sensitivity[0] ** 2 / noise.residual[0])


def test_nothing_is_spent_against_a_limit_by_an_estimate() -> None:
    """Each picks three of 60: twelve colluders can surround somebody."""
    noise = layout(60, neighbours=3, collusion=0.2)
    lonely = min(noise.members, key=lambda client: len(noise.partners(client)))
    around = [client for client, _ in noise.partners(lonely)][:12]
    limit = plan().target.per_round()
    assert charges(noise, colluding=around)[lonely] <= limit * (1 + 1e-9)
    weak = replace(noise, residual=noise.residual / 9)
    account = Accountant(60, limit=limit, collusion=0.2, least=1, asked=60)
    assert account.exceeded_by(noise) == set()
    assert account.exceeded_by(weak) == set(range(60))
    assert account.certified


@pytest.mark.parametrize(("count", "share", "proves"), [(2_000, 0.5, True), (1_000, 0.8, False), (10_000, 0.3, True)])
def test_what_many_colluders_take_is_looked_for_in_a_few_steps(count: int, share: float, proves: bool) -> None:
    least_circle.cache_clear()
    before = sparse._steps.cache_info().misses
    circle = least_circle(count, colluders=math.ceil(share * count), draws=201)
    assert (circle is not None) == proves
    assert sparse._steps.cache_info().misses - before <= 40


def test_few_clients_share_noise_with_everybody_and_a_paper_has_its_own_way() -> None:
    assert plan().circle(COMPLETE_UP_TO) is None
    assert len(layout(COMPLETE_UP_TO).pairs) == COMPLETE_UP_TO * (COMPLETE_UP_TO - 1) // 2
    assert plan(accounting="paper").circle(1_000) is None
    assert plan(neighbours=2).circle(1_000) is None  # proves nothing: each picks as before


def test_noise_of_a_sum_is_as_much_on_a_circle_as_among_everybody() -> None:
    sparse, dense = layout(COMPLETE_UP_TO + 1), layout(COMPLETE_UP_TO)
    assert math.sqrt(sparse.residual.sum()) == pytest.approx(math.sqrt(dense.residual.sum()), rel=0.01)


def test_missing_clients_leave_a_bound_and_revealed_pairs_within_a_group_do_not() -> None:
    noise = layout(150)
    missing = {5, 50}
    arrived = [client for client in noise.members if client not in missing]
    cut = [(client, other) for other in missing for client, _ in noise.partners(other) if client not in missing]
    account = Accountant(150, least=1, honest_arrivals=True)
    account.charge(noise, arrived=arrived, revealed=cut)
    exact = charges(replace(noise, circle=None), arrived=arrived, revealed=cut)
    assert account.certified
    assert "bound" in account.how
    assert np.all(account.spent["server"] >= exact * (1 - 1e-9))
    assert without(noise, cut).circle is not None
    assert without(noise, [(0, noise.partners(0)[0][0])]).circle is None
    torn = charges(noise, revealed=[(0, noise.partners(0)[0][0])])
    assert np.all(torn >= charges(replace(noise, circle=None), revealed=[(0, noise.partners(0)[0][0])]) * (1 - 1e-9))


def test_the_sentence_of_the_ledger_can_be_computed_again() -> None:
    circle = least_circle(10_000, colluders=1, draws=200)
    assert circle is not None
    said = caveats.noise_circle(circle, 1)
    assert f"each of a round's 10000 clients shares noise with {circle.degree} others" in said
    assert f"second eigenvalue {circle.second:.2f}" in said
    assert "any one of them may collude" in said
    many = least_circle(2_000, colluders=200, draws=200)
    assert many is not None
    assert f"more than {many.near(200)} are among the {many.degree} around an honest client" in caveats.noise_circle(
        many, 200
    )


@pytest.mark.parametrize("collusion", [0.0, 0.01, 0.1])
def test_the_sentences_of_the_ledger_agree_on_who_may_collude(collusion: float) -> None:
    said = Noised(plan(collusion=collusion)).caveats(RunFacts(3, 1_000, 1_000, veiled=False, central=False)).assumptions
    whoever = any("whoever that is" in text for text in said)
    assert whoever == (not any("if not by who is whose neighbour" in text for text in said))
    assert whoever == (collusion < 0.1)
    assert any("a quarter of a round's clients may be at random" in text for text in said)
