"""The identities of docs/mathematics.md, in numbers: the section they stand in is in each test's name."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.stats import norm
from torch import nn

from docs.pages import DOCS
from downlink.exactness import scramble, trial
from fedveil.crypto.keys import add_mask
from fedveil.ledger.correlated import NoiseLayout, by_peer, charges
from fedveil.ledger.gaussian import delta_of, epsilon_of, mu_of, paper_sigma, sigma_of
from fedveil.uplink.grid import FixedPoint, add_noise
from fedveil.uplink.noise_plan import allocate
from fedveil.uplink.vote import choice, indices_of, tags, vote_label
from fedveil.work import Batches, LocalSteps, Schedule, SquareLoss
from fedveil.work.clipping import ClippedUpdate

PAGE = (DOCS / "mathematics.md").read_text(encoding="utf-8")
EXACT = 1e-9


def network() -> nn.Sequential:
    torch.manual_seed(3)
    layers = (nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.LeakyReLU(), nn.Linear(6, 4))
    return nn.Sequential(*layers).double()


def rescaled(model: nn.Sequential) -> tuple[nn.Sequential, list[torch.Tensor]]:
    """Ŵ_l = D_l W_l D_{l−1}⁻¹ with D drawn here, and R of every parameter."""
    veiled, factors = network(), []
    before = torch.ones(5, dtype=torch.float64)
    for at in (0, 2, 4):
        true, sent = model[at], veiled[at]
        assert isinstance(true, nn.Linear)
        assert isinstance(sent, nn.Linear)
        after = torch.ones(4, dtype=torch.float64) if at == 4 else 0.25 + 4 * torch.rand(true.out_features).double()
        factors += [after[:, None] / before[None, :], after]
        sent.weight.data, sent.bias.data = factors[-2] * true.weight.data, after * true.bias.data
        before = after
    return veiled, factors


def test_1_rescaling_leaves_outputs_alone() -> None:
    model = network()
    veiled, _ = rescaled(model)
    x = torch.randn(9, 5, dtype=torch.float64)
    assert torch.allclose(veiled(x), model(x), rtol=0, atol=1e-12)
    assert not torch.allclose(veiled[0].weight, model[0].weight)


def test_1_a_function_that_is_not_homogeneous_does_not() -> None:
    model = network()
    veiled, _ = rescaled(model)
    model[1], veiled[1] = nn.Sigmoid(), nn.Sigmoid()
    x = torch.randn(9, 5, dtype=torch.float64)
    assert not torch.allclose(veiled(x), model(x), atol=1e-3)


def test_2_the_gradient_is_r_times_the_gradient_at_the_veiled_model() -> None:
    model = network()
    veiled, factors = rescaled(model)
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.randint(0, 4, (9,))
    of = [
        torch.autograd.grad(nn.functional.cross_entropy(one(x), y), list(one.parameters())) for one in (model, veiled)
    ]
    for true, seen, factor in zip(*of, factors, strict=True):
        assert torch.allclose(factor * seen, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups", [0, 1, 3, 4], ids=lambda m: f"m={m}")
def test_1_2_3_hold_for_the_library(groups: int) -> None:
    model = network()
    scramble(model)
    seen = trial(model, torch.randn(2, 5, dtype=torch.float64), groups=groups)
    assert max(seen.output, seen.gradient, seen.loss) < EXACT
    assert seen.hidden > 0.1


def test_3_the_square_loss_is_phi_combined_and_so_is_its_gradient() -> None:
    model = network()
    x, goal = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    a, group = torch.tensor([0.7, -1.2, 0.9, 1.4]).double(), torch.tensor([0, 1, 1, 0])
    gamma = torch.tensor([0.8, -0.5]).double()
    r = gamma[group] * a
    last = model[4]
    assert isinstance(last, nn.Linear)
    true = 0.5 * (model(x) - goal).pow(2).sum()
    wanted = torch.autograd.grad(true, list(model.parameters()))
    with torch.no_grad():
        last.weight += r[:, None]
        last.bias += r
    h = model[:4](x)
    alpha, e = h.sum(1) + 1, last(h) - goal
    phi = [0.5 * e.pow(2).sum()]
    phi += [(alpha * (a * e)[:, group == s].sum(1)).sum() for s in (0, 1)]
    phi += [0.5 * alpha.pow(2).sum()]
    weights = [1.0, -float(gamma[0]), -float(gamma[1]), float((r**2).sum())]
    combined = sum(w * one.item() for w, one in zip(weights, phi, strict=True))
    assert combined == pytest.approx(true.item(), rel=1e-12)
    unused = {"allow_unused": True, "materialize_grads": True}  # φ_β does not depend on the last layer
    parts = [torch.autograd.grad(one, list(model.parameters()), retain_graph=True, **unused) for one in phi]
    for at, gradient in enumerate(wanted):
        found = sum(w * part[at] for w, part in zip(weights, parts, strict=True))
        assert torch.allclose(torch.as_tensor(found), gradient, rtol=0, atol=1e-10)


def test_3_a_client_with_labels_solves_for_gamma() -> None:
    torch.manual_seed(1)
    a, group, gamma = torch.tensor([0.7, -1.2, 0.9]), torch.tensor([0, 1, 0]), torch.tensor([0.8, -0.5])
    alpha, y = torch.rand(200) + 0.5, torch.randn(200, 3) * 0.1
    e = alpha[:, None] * (gamma[group] * a) + y
    for s in (0, 1):
        chosen = group == s
        top = (alpha[:, None] * a * e)[:, chosen].sum()
        found = top / ((alpha[:, None] * a) ** 2)[:, chosen].sum()
        assert float(found) == pytest.approx(float(gamma[s]), abs=0.02)


PAIRS = [(0, 1, 2.0), (0, 2, 0.5), (1, 3, 3.0), (2, 3, 1.5)]
RESIDUAL = np.array([0.4, 1.1, 0.7, 2.0])


def noise_layout(residual: NDArray[np.float64], pairs: list[tuple[int, int, float]], reach: float = 1.0) -> NoiseLayout:
    first, second, weight = (np.array(column) for column in zip(*pairs, strict=True))
    members = tuple(range(len(residual)))
    return NoiseLayout(members, np.full(len(residual), reach), residual, first, second, weight.astype(float))


def covariance(residual: NDArray[np.float64], pairs: list[tuple[int, int, float]]) -> NDArray[np.float64]:
    """K from the definition: each client's noise as a combination of independent ones."""
    mixing = np.zeros((len(residual), len(residual) + len(pairs)))
    for at, variance in enumerate(residual):
        mixing[at, at] = math.sqrt(variance)
    for at, (one, other, variance) in enumerate(pairs, len(residual)):
        mixing[one, at], mixing[other, at] = math.sqrt(variance), -math.sqrt(variance)
    return mixing @ mixing.T


def test_4_the_covariance_is_residual_plus_laplacian_and_pairs_leave_the_sum() -> None:
    found = covariance(RESIDUAL, PAIRS)
    expected = np.diag(RESIDUAL)
    for one, other, weight in PAIRS:
        expected[[one, other], [one, other]] += weight
        expected[[one, other], [other, one]] -= weight
    assert np.allclose(found, expected)
    assert found.sum() == pytest.approx(RESIDUAL.sum())


def test_4_a_clients_charge_is_its_entry_of_the_inverse() -> None:
    reach = 1.7
    wanted = reach**2 * np.diag(np.linalg.inv(covariance(RESIDUAL, PAIRS)))
    found = charges(noise_layout(RESIDUAL, PAIRS, reach))
    assert found == pytest.approx(wanted, rel=1e-9)
    assert np.all(found <= reach**2 / RESIDUAL)
    assert np.all(found >= reach**2 / RESIDUAL.sum())


def test_4_equal_clients_in_closed_form_and_central_privacy_in_the_limit() -> None:
    k, x, limit = 6, 0.3, []
    for w in (0.1, 10.0, 1e6):
        pairs = [(i, j, w) for i, j in itertools.combinations(range(k), 2)]
        limit = charges(noise_layout(np.full(k, x), pairs)).tolist()
        assert limit == pytest.approx([(x + w) / (x * (x + k * w))] * k, rel=1e-9)
    assert limit == pytest.approx([1 / (k * x)] * k, rel=1e-5)


def test_4_who_is_out_of_the_covariance() -> None:
    whole = noise_layout(RESIDUAL, PAIRS)
    without_0 = [(i, j, w) for i, j, w in PAIRS if 0 not in (i, j)]
    colluding = np.linalg.inv(covariance(RESIDUAL, without_0))
    assert charges(whole, colluding=[0])[1:] == pytest.approx(np.diag(colluding)[1:], rel=1e-9)
    revealed = np.linalg.inv(covariance(RESIDUAL, PAIRS[1:]))
    assert charges(whole, revealed=[(0, 1)]) == pytest.approx(np.diag(revealed), rel=1e-9)
    kept = [1, 2, 3]
    absent = np.linalg.inv(covariance(RESIDUAL, PAIRS)[np.ix_(kept, kept)])
    assert charges(whole, arrived=kept)[1:] == pytest.approx(np.diag(absent), rel=1e-9)


def test_4_another_client_knows_its_own_share() -> None:
    k, x = 5, 0.7
    pairs = [(i, j, 2.0) for i, j in itertools.combinations(range(k), 2)]
    assert by_peer(noise_layout(np.full(k, x), pairs)) == pytest.approx([1 / ((k - 1) * x)] * k, rel=1e-9)


@pytest.mark.parametrize(("mu", "epsilon"), [(0.5, 1.0), (1.3, 2.0), (2.0, 0.3)])
def test_4_delta_is_the_largest_excess_of_one_gaussian_over_the_other(mu: float, epsilon: float) -> None:
    def excess(t: float) -> float:
        return max(0.0, norm.pdf(t, mu) - math.exp(epsilon) * norm.pdf(t))

    start = epsilon / mu + mu / 2  # from here on the likelihood ratio is above e^ε
    wanted, _ = quad(excess, start, start + 12, epsabs=1e-13)
    assert delta_of(mu, epsilon) == pytest.approx(wanted, rel=1e-6)
    assert epsilon_of(mu, delta_of(mu, epsilon)) == pytest.approx(epsilon, rel=1e-6)


def test_4_the_papers_sigma_beside_the_exact_one() -> None:
    assert f"{paper_sigma(1, 1e-5):.3f}·S where {sigma_of(1, 1e-5):.3f}·S is enough" in PAGE


@pytest.mark.parametrize("sizes", [[3, 5, 8, 13], [10, 10, 10], [1, 40, 41, 500, 501]], ids=str)
def test_4_the_allocation_has_the_rows_it_should(sizes: list[int]) -> None:
    shared = allocate(sizes)
    beta = [size**2 / min(sizes) ** 2 - size / sum(sizes) for size in sizes]
    beta[np.argsort(sizes, kind="stable")[-2]] = max(beta)
    assert shared.pairs.min() >= 0
    assert shared.pairs.sum(axis=1) == pytest.approx(beta, rel=1e-9)
    assert shared.residual.sum() == pytest.approx(1)


def test_4_pair_noise_from_one_seed_cancels_to_the_last_bit() -> None:
    one, other, seed = np.zeros(101, np.uint64), np.zeros(101, np.uint64), bytes(range(32))
    add_noise(one, variance=9.0, step=2.0**-20, seed=seed)
    add_noise(other, variance=9.0, step=2.0**-20, seed=seed, subtract=True)
    assert np.abs(one.view(np.int64)).max() > 3 * 2**20
    assert not (one + other).any()


def test_4_a_whole_number_is_a_real_gaussian_rounded_at_random() -> None:
    """Σ_z exp(−(z − y)²/8) is 2√(2π) for every y, as far as float64 can tell; 2.01·exp(−8π²) is below 2⁻¹¹²."""
    for y in np.linspace(0, 1, 17):
        weights = np.exp(-((np.arange(-60, 61) - y) ** 2) / 8)
        assert weights.sum() == pytest.approx(2 * math.sqrt(2 * math.pi), rel=1e-15)
    assert 2.01 * math.exp(-8 * math.pi**2) < 2.0**-112


def test_5_masks_cancel_exactly() -> None:
    random = np.random.default_rng(1)
    values = random.integers(0, 1 << 40, (4, 33)).astype(np.uint64)
    sent = values.copy()
    for i, j in itertools.combinations(range(4), 2):
        seed = random.bytes(32)
        add_mask(sent[i], seed)
        add_mask(sent[j], seed, subtract=True)
    assert not (sent == values).any()
    assert (sent.sum(axis=0, dtype=np.uint64) == values.sum(axis=0, dtype=np.uint64)).all()


def test_5_given_the_sum_masked_vectors_do_not_tell_how_it_is_divided() -> None:
    """Modulo 5, every word tried: two divisions of the same sum give the very same distribution, on a path."""

    def seen(values: tuple[int, ...], edges: list[tuple[int, int]]) -> Counter[tuple[int, ...]]:
        found: Counter[tuple[int, ...]] = Counter()
        for words in itertools.product(range(5), repeat=len(edges)):
            sent = list(values)
            for (i, j), word in zip(edges, words, strict=True):
                sent[i], sent[j] = (sent[i] + word) % 5, (sent[j] - word) % 5
            found[tuple(sent)] += 1
        return found

    path = [(0, 1), (1, 2)]
    assert seen((4, 1, 0), path) == seen((0, 2, 3), path)
    assert seen((4, 1, 0), path[:1]) != seen((0, 2, 3), path[:1])  # not connected: client 2 is bare


@pytest.mark.parametrize(("largest", "addends"), [(256.0, 10), (0.3, 3), (2.0**24, 1000), (1000.0, 1)])
def test_6_fixed_point_sums_neither_wrap_nor_err_by_more_than_half_a_step_each(largest: float, addends: int) -> None:
    code = FixedPoint(largest, addends)
    bits = math.ceil(math.log2(largest)) + math.ceil(math.log2(addends))
    assert code.fraction_bits == 62 - bits
    assert addends * int(code.encode(np.array([largest]))[0]) <= 1 << 62
    values = np.random.default_rng(1).uniform(-largest, largest, (addends, 50))
    total = sum((code.encode(row) for row in values), np.zeros(50, dtype=np.uint64))
    rounding = addends * largest * 2.0**-50  # of the float64 sum it is compared with, and of decoding
    assert np.abs(code.decode(total) - values.sum(axis=0)).max() <= addends * code.step / 2 + rounding


def test_7_the_largest_entries_leave_the_smallest_rest() -> None:
    update = torch.tensor([0.3, -2.0, 0.9, 1.1, -0.2, 0.0])
    hidden = set(choice(update, 2, "max").tolist())

    def rest(chosen: tuple[int, ...]) -> float:
        return float(sum(update[i] ** 2 for i in range(6) if i not in chosen))

    assert rest(tuple(hidden)) == pytest.approx(min(rest(one) for one in itertools.combinations(range(6), 2)))


def test_7_a_clipped_update_moves_by_twice_the_bound_and_opposite_ones_do() -> None:
    theta = 0.5
    work = ClippedUpdate(LocalSteps(SquareLoss(), Batches(0, 1), Schedule(0.1), 1, None), theta)
    assert work.sensitivity(1) == pytest.approx(2 * theta)
    update = torch.randn(20, dtype=torch.float64)
    clipped = [u * min(1.0, theta / float(u.norm())) for u in (update, -update)]
    assert float((clipped[0] - clipped[1]).norm()) == pytest.approx(2 * theta)


def test_7_what_the_papers_noise_is_worth() -> None:
    paper = 2 / 947 * paper_sigma(1, 1e-5, 50)
    worth = epsilon_of(2 / paper * math.sqrt(50), 1e-5)
    needed = 2 * math.sqrt(50) * sigma_of(1, 1e-5)
    assert f'its σ for "ε = 1" is {paper:.4f} and gives ε = {worth:,.0f}; ε = 1 takes σ = {needed:.1f}' in PAGE


def test_7_tags_are_a_permutation_that_only_the_key_undoes() -> None:
    key, label = bytes(16), vote_label(3, 0)
    mine, yours = torch.tensor([2, 5, 7]), torch.tensor([5, 7, 9])
    one, other = ({bytes(row.tolist()) for row in tags(vote, key=key, label=label)} for vote in (mine, yours))
    assert len(one & other) == 2
    assert indices_of(tags(mine, key=key, label=label), key=key, label=label, size=10, winners=3).tolist() == [2, 5, 7]


@pytest.mark.parametrize("mu", [0.4, 1.1])
def test_8_right_guesses_keep_the_inequality_of_gaussian_noise(mu: float) -> None:
    canaries, guessed = 12, 8
    rng = np.random.default_rng(3)
    coins = rng.choice((-1.0, 1.0), size=(20_000, canaries))
    scores = rng.standard_normal(coins.shape) + coins * mu / 2
    chosen = np.argsort(-np.abs(scores), axis=1)[:, :guessed]
    right = (np.take_along_axis(scores * coins, chosen, axis=1) > 0).sum(axis=1)
    for v in range(1, guessed + 1):
        left = np.mean(right * (right >= v)) / canaries
        most = norm.cdf(norm.ppf(np.mean((guessed - right) * (right >= v - 1)) / canaries) + mu)
        assert left <= most + 0.01  # five deviations of a mean of 20,000


def test_8_the_same_noise_under_both_relations() -> None:
    assert f"ε = {epsilon_of(mu_of(3.0, 1e-5) / 2, 1e-5):.2f} there" in PAGE
