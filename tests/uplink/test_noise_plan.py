"""How much noise a plan asks for: never too little, never more than the target needs, and what papers would add."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.correlated import NoiseLayout, by_peer, central, charges
from fedveil.ledger.gaussian import epsilon_of, mu_of
from fedveil.uplink.noise_plan import COMPLETE_STRENGTH, SPARSE_STRENGTH, NoisePlan, Target

SEED = b"a round's graph"
few = settings(deadline=None, max_examples=40)


def target(epsilon: float = 1.0, *, rounds: int = 200, rate: float = 1.0) -> Target:
    return Target(epsilon, 1e-5, rounds, round(rate * rounds), rate)


def noise_layout(
    plan: NoisePlan, sizes: list[int], reach: list[float] | None = None, *, seed: bytes = SEED
) -> NoiseLayout:
    """Clients 10, 13, 16, …; clipped full batches (C = 1) unless a reach is given."""
    members = tuple(range(10, 10 + 3 * len(sizes), 3))
    return plan.noise_layout(members, sizes, [2.0] * len(sizes) if reach is None else reach, seed=seed)


def noise_in_the_sum(found: NoiseLayout) -> float:
    return math.sqrt(float(found.residual.sum()))


def theta(found: NoiseLayout, colluding: tuple[int, ...] = ()) -> float:
    """The worst charge in units of what noise of the sum's size, added once, would give."""
    worst = float(charges(found, colluding=[found.members[i] for i in colluding]).max())
    return worst * float(found.residual.sum()) / float(found.sensitivity.max()) ** 2


def worst_mu2(found: NoiseLayout, colluders: int = 0) -> float:
    """μ² by brute force over every set of colluders and every curious client."""
    sets = list(combinations(found.members, colluders))
    by_server = max(float(charges(found, colluding=one).max()) for one in sets)
    by_another = 0.0
    for knows in found.members if len(found.members) > 1 else ():
        by_another = max(by_another, float(central(found, known=(knows,)).max()))
    return max(by_server, by_another)


sizes_of = st.lists(st.integers(20, 2000), min_size=1, max_size=7)


@few
@given(
    sizes=sizes_of,
    epsilon=st.floats(0.1, 8),
    rounds=st.integers(1, 400),
    strength=st.sampled_from([None, 0.0, 1.0, 3.0, 10.0]),
    batch=st.sampled_from([0, 16]),
)
def test_exact_noise_meets_the_target_and_not_a_millionth_more(
    sizes: list[int], epsilon: float, rounds: int, strength: float | None, batch: int
) -> None:
    """The unit of privacy is one record, which moves n_k × the mean over b records by 2·C·n_k/b."""
    aim = target(epsilon, rounds=rounds)
    reach = [2.0 * size / (min(batch, size) or size) for size in sizes]
    plan = NoisePlan(aim, "pairs", strength=strength)
    mu = math.sqrt(rounds * worst_mu2(noise_layout(plan, sizes, reach), plan.colluders(len(sizes))))
    assert mu <= aim.mu
    assert mu == pytest.approx(aim.mu, rel=1e-6)
    assert epsilon_of(mu, 1e-5) <= epsilon


@few
@given(sizes=sizes_of, layout=st.sampled_from(["local", "sum"]), trusted=st.booleans())
def test_local_and_summed_noise_meet_the_target_too(sizes: list[int], layout: Any, trusted: bool) -> None:
    aim = target(2.0, rounds=7)
    trusted = trusted and layout == "sum"
    found = noise_layout(NoisePlan(aim, layout, trusted=trusted), sizes)
    mu2 = float(charges(found).max()) if trusted or layout == "local" else worst_mu2(found, min(1, len(sizes) - 1))
    assert math.sqrt(7 * mu2) <= aim.mu
    assert math.sqrt(7 * mu2) == pytest.approx(aim.mu, rel=1e-6)


@pytest.mark.parametrize("layout", ["local", "pairs", "sum"])
def test_decaying_noise_falls_by_its_factor_and_all_rounds_together_meet_the_target(layout: Any) -> None:
    aim = replace(target(2.0, rounds=20), decay=0.9)
    rounds = [
        NoisePlan(aim, layout).noise_layout((0, 1, 2), [5, 5, 5], [2.0] * 3, seed=SEED, round=t) for t in range(20)
    ]
    noises = np.asarray([noise_in_the_sum(found) for found in rounds])
    np.testing.assert_allclose(noises[1:] / noises[:-1], 0.9, rtol=1e-9)
    mu = math.sqrt(sum(worst_mu2(found, 0 if layout == "local" else 1) for found in rounds))
    assert mu <= aim.mu
    assert mu == pytest.approx(aim.mu, rel=1e-6)
    even = noise_in_the_sum(noise_layout(NoisePlan(target(2.0, rounds=20), layout), [5] * 3))
    assert noises[-1] < even < noises[0]


def test_whoever_takes_part_in_the_dearest_rounds_alone_meets_the_target_as_well() -> None:
    aim = Target(2.0, 1e-5, rounds=20, participations=6, rate=0.3, decay=0.8)
    prices = [aim.per_round(round) for round in range(20)]
    assert sum(sorted(prices)[-6:]) == pytest.approx(aim.mu**2, rel=1e-12)
    assert replace(aim, decay=1.0).per_round(7) == aim.mu**2 / 6


@pytest.mark.parametrize(("decay", "rounds"), [(0.0, 5), (1.01, 5), (-0.5, 5), (0.5, 30), (math.nan, 5)])
def test_noise_that_grows_or_falls_too_far_is_refused(decay: float, rounds: int) -> None:
    with pytest.raises(ConfigError, match="--noise-decay"):
        replace(target(rounds=rounds), decay=decay)


def test_a_sum_over_thousands_of_rounds_does_not_end_above_the_target() -> None:
    aim = target(1.0, rounds=5000)
    spent = 0.0
    price = float(charges(noise_layout(NoisePlan(aim, "local"), [600, 700])).max())
    for _ in range(5000):
        spent += price
    assert math.sqrt(spent) <= aim.mu


@few
@given(
    sizes=st.lists(st.integers(20, 2000), min_size=4, max_size=7),
    collusion=st.sampled_from([0.1, 0.3, 0.5, 0.7]),
    neighbours=st.sampled_from([None, 2]),
)
def test_exact_noise_holds_the_target_against_every_set_of_colluders(
    sizes: list[int], collusion: float, neighbours: int | None
) -> None:
    aim = target(1.0, rounds=50)
    plan = NoisePlan(aim, "pairs", collusion=collusion, neighbours=neighbours)
    try:
        found = noise_layout(plan, sizes)
    except ConfigError:
        assert neighbours is not None  # the graph was not connected
        return
    mu = math.sqrt(50 * worst_mu2(found, plan.colluders(len(sizes))))
    assert mu <= aim.mu
    assert mu == pytest.approx(aim.mu, rel=1e-6)


def test_the_largest_client_is_covered_against_the_second_largest_too() -> None:
    """Fixed batches reach further in large clients; of the noise in the sum, the other knows its part."""
    aim = target(1.0, rounds=10)
    found = noise_layout(NoisePlan(aim, "pairs"), [600, 300], [2 * 600 / 64, 2 * 300 / 64])
    against_the_smaller = found.sensitivity[0] ** 2 / found.residual[0]
    assert by_peer(found)[0] == pytest.approx(against_the_smaller, rel=1e-9)
    assert 10 * against_the_smaller <= aim.mu**2


@pytest.mark.parametrize(("strength", "least", "most"), [(1.0, 0.22, 0.23), (10.0, 0.44, 0.455), (None, 0.44, 0.455)])
def test_less_noise_than_the_papers_formula(strength: float | None, least: float, most: float) -> None:
    """ε = 1, δ = 10⁻⁵, T = 200, k = 100 equal clients: 22.3 % less at λ = 1, 44.5 % at λ = 10."""
    plan = NoisePlan(target(), "pairs", strength=strength)
    saving = 1 - noise_in_the_sum(noise_layout(plan, [600] * 100)) / plan.paper_scale(2.0)
    assert least < saving < most


@pytest.mark.parametrize("clients", [2, 3, 10, 100])
def test_the_papers_pair_noise_gives_almost_the_two_it_allows(clients: int) -> None:
    found = noise_layout(NoisePlan(target(), "pairs", "paper"), [600] * clients)
    assert theta(found) == pytest.approx(2 * clients / (clients + 1), rel=1e-9)


def test_strong_pair_noise_gives_almost_central_privacy() -> None:
    assert theta(noise_layout(NoisePlan(target(), "pairs"), [600] * 100)) == pytest.approx(1.01, abs=0.001)


@pytest.mark.parametrize(("collusion", "given_away"), [(0.1, 2.09), (0.3, 2.40), (0.5, 2.96)])
def test_the_papers_strength_against_colluders_leaves_more_than_it_allows(collusion: float, given_away: float) -> None:
    """It scales pair noise up, but the honest residual noise shrinks and is not made up for."""
    plan = NoisePlan(target(), "pairs", "paper", collusion=collusion)
    found = noise_layout(plan, [600] * 100)
    assert theta(found, tuple(range(plan.colluders(100)))) == pytest.approx(given_away, abs=0.005)
    assert given_away > 2


def test_the_papers_deviations_in_units_of_the_mean_gradient() -> None:
    """σ_down = 4C√(T·ln(1/δ))/(ε|D|), σ_i = 2C√(2qT·ln(1/δ))/(ε|D_i|), σ = 2C√(2T·ln(1/δ))/(ε|D|)."""
    clip, epsilon, delta, rounds, rate = 10.0, 0.5, 1e-5, 200, 0.8
    sizes = [400, 600, 800]
    aim = Target(epsilon, delta, rounds, 160, rate)
    log = math.log(1 / delta)
    reach = [2 * clip] * 3
    pairs = noise_layout(NoisePlan(aim, "pairs", "paper"), sizes, reach)
    assert noise_in_the_sum(pairs) / 1800 == pytest.approx(4 * clip * math.sqrt(rounds * log) / (epsilon * 1800))
    local = noise_layout(NoisePlan(aim, "local", "paper"), sizes, reach)
    for size, variance in zip(sizes, local.residual, strict=True):
        theirs = 2 * clip * math.sqrt(2 * rate * rounds * log) / (epsilon * size)
        assert math.sqrt(variance) / size == pytest.approx(theirs)
    once = noise_layout(NoisePlan(aim, "sum", "paper", trusted=True), sizes, reach)
    assert noise_in_the_sum(once) / 1800 == pytest.approx(2 * clip * math.sqrt(2 * rounds * log) / (epsilon * 1800))


def test_the_papers_upload_noise_is_its_formula_for_the_smallest_client() -> None:
    """Σ_ii = σ_up²·|D_i|² for all but the second largest, who gets more: σ_up = 4C√(T·ln(1/δ))/(ε|D_min|)."""
    sizes = [400, 500, 600, 800]
    plan = NoisePlan(target(), "pairs", "paper")
    found = noise_layout(plan, sizes)
    diagonal = found.residual.copy()
    np.add.at(diagonal, found.first, found.pairs)
    np.add.at(diagonal, found.second, found.pairs)
    wanted = (plan.paper_scale(2.0) * np.array(sizes) / 400) ** 2
    assert diagonal[[0, 1, 3]] == pytest.approx(wanted[[0, 1, 3]])
    assert diagonal[2] > wanted[2]


def test_noise_meant_for_full_batches_covers_a_small_batch_poorly() -> None:
    """Batches of 64 of 600 reach 9.4 times as far: ε = 1 becomes 13.3, and the papers' looser ε = 1 becomes 9.7."""
    full, small = [2.0] * 100, [2.0 * 600 / 64] * 100
    aim = target()
    for accounting, before, after in (("exact", 1.0, 13.29), ("paper", 0.755, 9.65)):
        plan = NoisePlan(aim, "pairs", accounting)  # type: ignore[arg-type]
        meant = noise_layout(plan, [600] * 100, full)
        told = meant.members[:1] if accounting == "exact" else ()
        spent = 200 * float(charges(meant, colluding=told).max())
        assert epsilon_of(math.sqrt(spent), 1e-5) == pytest.approx(before, abs=0.002)
        used = NoiseLayout(
            meant.members, np.array(small), meant.residual, meant.first, meant.second, meant.pairs, meant.summed
        )
        spent = 200 * float(charges(used, colluding=told).max())
        assert epsilon_of(math.sqrt(spent), 1e-5) == pytest.approx(after, abs=0.02)
        enough = noise_layout(plan, [600] * 100, small)
        assert noise_in_the_sum(enough) == pytest.approx(noise_in_the_sum(meant) * 600 / 64)
    assert epsilon_of(mu_of(1.0, 1e-5) * 600 / 64, 1e-5) == pytest.approx(13.29, abs=0.01)


def test_one_client_alone_is_plain_local_privacy() -> None:
    alone = noise_layout(NoisePlan(target(), "pairs"), [600])
    local = noise_layout(NoisePlan(target(), "local"), [600])
    assert len(alone.pairs) == 0
    assert alone.residual == pytest.approx(local.residual, rel=1e-12)
    paper = noise_layout(NoisePlan(target(), "pairs", "paper"), [600])
    assert len(paper.pairs) == 0
    assert noise_in_the_sum(paper) == pytest.approx(NoisePlan(target(), "pairs").paper_scale(2.0))


def test_two_clients_share_one_pair() -> None:
    found = noise_layout(NoisePlan(target(), "pairs"), [600, 800])
    assert (found.first.tolist(), found.second.tolist()) == ([0], [1])
    assert found.pairs[0] > 0


def test_the_papers_residual_noise_is_shared_by_size_and_pair_noise_scales_with_the_square_of_its_strength() -> None:
    one, ten = (
        noise_layout(NoisePlan(target(), "pairs", "paper", strength), [400, 500, 900]) for strength in (1.0, 10.0)
    )
    assert one.residual / one.residual.sum() == pytest.approx([400 / 1800, 500 / 1800, 0.5])
    assert ten.residual == pytest.approx(one.residual)
    assert ten.pairs == pytest.approx(100 * one.pairs)


@pytest.mark.parametrize("tolerant", [False, True])
def test_exact_noise_is_shared_equally_whatever_sizes_are_claimed(tolerant: bool) -> None:
    plan = NoisePlan(target(), "pairs", tolerant=tolerant, collusion=0.3)
    modest, bold = (noise_layout(plan, [400, 500, 900, size]) for size in (700, 10**6))
    for found in (modest, bold):
        assert found.residual == pytest.approx(found.residual[0])
        assert found.pairs == pytest.approx(found.pairs[0])
    assert bold.residual == pytest.approx(modest.residual)
    assert bold.pairs == pytest.approx(modest.pairs)


def test_the_default_strength_is_strong_unless_dropouts_leave_it_behind() -> None:
    sizes = [600] * 20
    assert NoisePlan(target(), "pairs").pair_strength(sizes) == COMPLETE_STRENGTH
    assert NoisePlan(target(), "pairs", neighbours=5).pair_strength(sizes) == SPARSE_STRENGTH
    assert NoisePlan(target(), "pairs", tolerant=True).pair_strength(sizes) == 1.0
    assert NoisePlan(target(), "pairs", "paper").pair_strength(sizes) == 1.0
    colluding = NoisePlan(target(), "pairs", "paper", collusion=0.5)
    assert colluding.pair_strength(sizes) == pytest.approx(math.sqrt(19 / 9))
    assert NoisePlan(target(), "pairs", "paper", 3.0, collusion=0.5).pair_strength(sizes) == 3.0


def test_a_sparse_graph_meets_the_target_with_its_own_pairs() -> None:
    aim = target(1.0, rounds=20)
    plan = NoisePlan(aim, "pairs", neighbours=3)
    found = noise_layout(plan, [600] * 30)
    degrees = np.bincount(np.concatenate([found.first, found.second]), minlength=30)
    assert degrees.min() >= 3
    assert len(found.pairs) < 30 * 29 / 2
    assert found.pairs / found.residual[0] == pytest.approx(1000.0)
    mu = math.sqrt(20 * worst_mu2(found, 1))
    assert mu <= aim.mu
    assert mu == pytest.approx(aim.mu, rel=1e-6)
    other = noise_layout(plan, [600] * 30, seed=b"another round's graph")
    assert (other.first.tolist(), other.second.tolist()) != (found.first.tolist(), found.second.tolist())


def test_a_graph_that_falls_apart_is_refused() -> None:
    plan = NoisePlan(target(), "pairs", neighbours=1)
    with pytest.raises(ConfigError, match=r"40 clients with 1 neighbours each is not connected.*Raise neighbours"):
        noise_layout(plan, [600] * 40)


def test_fewer_clients_than_neighbours_are_all_neighbours() -> None:
    assert len(noise_layout(NoisePlan(target(), "pairs", neighbours=5), [600] * 4).pairs) == 6


@pytest.mark.parametrize("members", [(3, 1, 2), (1, 1, 2)])
def test_a_round_lists_each_client_once_in_ascending_order(members: tuple[int, ...]) -> None:
    """Clients compute shares by position: another order would deal the pairs other variances."""
    with pytest.raises(ProtocolError, match="once, in ascending order"):
        NoisePlan(target(), "pairs").noise_layout(members, [100, 200, 900], [2.0] * 3, seed=SEED)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_epsilon_is_refused(epsilon: float) -> None:
    with pytest.raises(ConfigError, match="epsilon must be a positive number"):
        Target(epsilon, 1e-5, 10, 10)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_an_impossible_delta_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="delta must lie strictly between 0 and 1"):
        Target(1.0, delta, 10, 10)


@pytest.mark.parametrize("participations", [0, -1, 11])
def test_a_client_takes_part_in_at_least_one_round_and_at_most_all(participations: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and all 10 rounds"):
        Target(1.0, 1e-5, 10, participations)


@pytest.mark.parametrize(
    ("settings_", "why"),
    [
        ({"collusion": 1.0}, r"collusion must lie in \[0, 1\)"),
        ({"collusion": -0.1}, r"collusion must lie in \[0, 1\)"),
        ({"collusion": math.nan}, r"collusion must lie in \[0, 1\)"),
        ({"strength": -1.0}, "pair_strength must not be negative"),
        ({"strength": math.inf}, "pair_strength must not be negative"),
        ({"strength": math.nan}, "pair_strength must not be negative"),
        ({"accounting": "hopeful"}, "hopeful"),
    ],
)
def test_impossible_settings_are_refused(settings_: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        NoisePlan(target(), "pairs", **settings_)


def test_colluders_who_leave_no_honest_client_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one honest member"):
        noise_layout(NoisePlan(target(), "pairs", collusion=0.9), [600] * 4)


def test_where_no_noise_is_enough_the_plan_says_so() -> None:
    """Local work without a bound, for one."""
    with pytest.raises(ConfigError, match="No amount of this noise meets the target"):
        NoisePlan(target(), "pairs").noise_layout((0, 1), [600, 600], [math.inf, 2.0], seed=SEED)


@pytest.mark.parametrize(("epsilon", "delta"), [(1e-300, 1e-5), (1.0, 1e-300), (1e-10, 1e-101)])
def test_a_target_beyond_all_reason_is_refused_and_the_smallest_has_its_noise(epsilon: float, delta: float) -> None:
    with pytest.raises(ConfigError, match="more noise than can be counted"):
        Target(epsilon, delta, 1, 1)
    for accounting in ("exact", "paper"):
        plan = NoisePlan(Target(1e-9, 1e-100, 1, 1), "pairs", accounting)  # type: ignore[arg-type]
        assert np.isfinite(plan.noise_layout((0, 1, 2), (10, 10, 10), (2.0, 2.0, 2.0), seed=bytes(32)).residual).all()
