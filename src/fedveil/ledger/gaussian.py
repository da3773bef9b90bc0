"""What a Gaussian mechanism proves: the exact (ε, δ) curve, and the papers' looser formula.

A mechanism of strength μ (sensitivity over standard deviation; μ² adds over releases) is as private as
telling N(0, 1) from N(μ, 1), which gives exactly (Balle and Wang, 2018)

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ).

With x = ε/μ − μ/2, y = ε/μ + μ/2 and Mills' ratio m(t) = (1 − Φ(t))/φ(t), the identity e^ε·φ(y) = φ(x)
turns this into φ(x)·(m(x) − m(y)), in which nothing overflows and no large terms cancel. Every result
is rounded to the side that claims less privacy.

Bounded noise gives no (ε, δ) worth the name: how large δ is at the least, whatever ε. Given the scales R, the noise
of the faithful `mpdp` scheme is a sum over k clients of variables uniform on (−√2σ, √2σ), per coordinate, before R is
undone. A change of S in the gradient shifts coordinate j by S_j/R_j. What falls outside the support of the unshifted
noise betrays the change with certainty, so its probability is a lower bound on δ for every ε. A small bound is no
promise: the true δ at a given ε is larger.

In units of one variable's width, the distance from the edge of the support is a sum of k variables uniform on
(0, 1), so a shift by s escapes with probability F_k(s/(2√2σ)), F_k the Irwin–Hall distribution

    F_k(t) = (1/k!)·Σ_{j ≤ t} (−1)^j·C(k, j)·(t − j)^k,        t^k/k! for t ≤ 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, gammaln, ndtr, ndtri

from fedveil.errors import ConfigError, missing_extra

_ROOT_HALF_PI = math.sqrt(math.pi / 2)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_SMALLEST = math.nextafter(0.0, 1.0)


def delta_of(mu: float, epsilon: float) -> float:
    """The smallest δ for which a mechanism of strength μ is (ε, δ)-private; ε = 0 gives the total variation."""
    _check_strength(mu)
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"epsilon is {epsilon}: it must be a finite number, at least 0.")
    if mu == 0:
        return 0.0
    if mu == math.inf:
        return 1.0
    low, high = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    if low > 40:  # below exp(−800): smaller than any float, but not zero
        return _SMALLEST
    value = float(ndtr(-low)) - _scaled_tail(high, low) if low < -5 else _middle(low, high, mu)
    # The functions are good to a few ulps; an error of `low` by ulps of `high` enters through exp(−low²/2).
    margin = 1e-12 + 8 * sys.float_info.epsilon * max(1.0, abs(low)) * high
    return min(1.0, max(value * (1 + margin), _SMALLEST))


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest ε ≥ 0 for which a mechanism of strength μ is (ε, δ)-private (infinite for infinite μ)."""
    _check_strength(mu)
    _check_delta(delta)
    if mu == math.inf:
        return math.inf
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    # δ(ε) ≤ Φ(μ/2 − ε/μ), which is δ at this ε.
    high = mu * mu / 2 - mu * float(ndtri(delta))
    while high < math.inf and (high <= 0 or delta_of(mu, high) > delta):
        high = max(2 * high, mu * mu, _SMALLEST)
    if high == math.inf:
        return math.inf
    return _bisect(lambda epsilon: delta_of(mu, epsilon) <= delta, wrong=0.0, right=high)


def mu_of(epsilon: float, delta: float) -> float:
    """The largest strength μ that is (ε, δ)-private."""
    _check_epsilon(epsilon)
    _check_delta(delta)
    wrong = 1.0
    while delta_of(wrong, epsilon) <= delta:
        wrong *= 2
    right = wrong
    while delta_of(right, epsilon) > delta:
        right /= 2
    return _bisect(lambda mu: delta_of(mu, epsilon) <= delta, wrong=wrong, right=right)


def sigma_of(epsilon: float, delta: float) -> float:
    """The smallest standard deviation, in units of the sensitivity, that is (ε, δ)-private."""
    return math.nextafter(1 / mu_of(epsilon, delta), math.inf)


def paper_sigma(epsilon: float, delta: float, rounds: float = 1) -> float:
    """What the papers would add, in units of the sensitivity: √(2·T·ln(1/δ))/ε for T (expected) rounds."""
    _check_epsilon(epsilon)
    _check_delta(delta)
    if not rounds > 0:
        raise ConfigError(f"rounds is {rounds}: it must be a number above 0.")
    return math.sqrt(2 * rounds * -math.log(delta)) / epsilon


def mpdp_sigma(epsilon: float, delta: float, strength: float = math.inf) -> float:
    """MP-DP's Eq. (23) for one round, in units of the sensitivity: the deviation of K clients' noise in their sum.

    (ε − ϑ/2)² = 2·ln(2/(δ·√(2π)))·ϑ with ϑ = (1 + 1/`strength`²)/σ² on the complete graph, `strength` = σ_Δ/σ_η.
    """
    _check_epsilon(epsilon)
    _check_delta(delta)
    half = epsilon + 2 * math.log(2 / (delta * math.sqrt(2 * math.pi)))
    theta = 2 * epsilon**2 / (half + math.sqrt(half**2 - epsilon**2))
    return math.sqrt((1 + 1 / strength**2) / theta)


def mpdp_epsilon(sigma: float, delta: float, strength: float = math.inf) -> float:
    """The ε of one round by the same equation, for noise of deviation `sigma` over the sensitivity in the sum."""
    _check_delta(delta)
    theta = (1 + 1 / strength**2) / sigma**2
    return theta / 2 + math.sqrt(2 * math.log(2 / (delta * math.sqrt(2 * math.pi))) * theta)


def _middle(low: float, high: float, mu: float) -> float:
    """φ(low)·(m(low) − m(high)) where neither factor overflows."""
    if mu > 0.1:
        return _scaled_tail(low, low) - _scaled_tail(high, low)
    # The two ratios agree in most digits when μ is small: integrate −m'(t) = 1 − t·m(t) between them instead.
    points = (low + high) / 2 + mu / 2 * _NODES
    slope = 1 - points * _ROOT_HALF_PI * erfcx(points / math.sqrt(2))
    return math.exp(-low * low / 2) / math.sqrt(2 * math.pi) * mu / 2 * float(_WEIGHTS @ slope)


def _scaled_tail(point: float, at: float) -> float:
    """φ(at)·m(point)."""
    return math.exp(-at * at / 2) / 2 * float(erfcx(point / math.sqrt(2)))


def _bisect(holds: Callable[[float], bool], *, wrong: float, right: float) -> float:
    """The number nearest to `wrong` for which `holds` was seen to be true, down to neighbouring floats."""
    while True:
        middle = wrong + (right - wrong) / 2
        if middle in (wrong, right):
            return right
        if holds(middle):
            right = middle
        else:
            wrong = middle


def _check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"epsilon is {epsilon}: a privacy target needs a finite number above 0, such as 1.")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}: it must lie strictly between 0 and 1, such as 1e-5.")


def _check_strength(mu: float) -> None:
    if not mu >= 0:
        raise ConfigError(f"mu is {mu}: the strength of a mechanism is a number of at least 0.")


_INTERVAL = 1e-4
_COARSE = 1e-3


@lru_cache(maxsize=256)
def sampled_epsilon(
    *, noise_multiplier: float, sampling_rate: float, rounds: int, delta: float, interval: float = _INTERVAL
) -> float:
    """ε of `rounds` releases of a sum over Poisson-sampled records, each clipped to norm C, with noise of σ.

    `noise_multiplier` is σ/C. A record may become another one (replace-one), which moves the sum by up to 2·C.
    Privacy losses are rounded up to multiples of `interval`: a larger one is faster and says somewhat more.
    """
    if not 0 <= noise_multiplier < math.inf:
        raise ConfigError(f"noise_multiplier is {noise_multiplier}: it must be a finite number of at least 0.")
    if not 0 < sampling_rate <= 1:
        raise ConfigError(f"sampling_rate is {sampling_rate}: it must be above 0 and at most 1.")
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}: at least one round is needed.")
    _check_delta(delta)
    try:
        from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise missing_extra("dp-accounting", "accounting", "Accounting for secretly sampled records") from error
    if noise_multiplier == 0:
        return math.inf
    accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE, interval)
    accountant.compose(PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise_multiplier)), rounds)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=64)
def sampled_noise(*, epsilon: float, sampling_rate: float, rounds: int, delta: float) -> float:
    """The smallest σ/C (to 0.1 %, never below) with which secretly sampled records meet (ε, δ), replace-one."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigError(f"epsilon is {epsilon}: it must be a positive number.")

    def meets(noise: float, interval: float = _INTERVAL) -> bool:
        reached = sampled_epsilon(
            noise_multiplier=noise, sampling_rate=sampling_rate, rounds=rounds, delta=delta, interval=interval
        )
        return reached <= epsilon

    # Ten times coarser losses lead to the same neighbours, nearly always; whether they did is asked of the fine ones.
    # What is enough by still coarser ones, which say more, is enough by them.
    low, high = _neighbours(lambda noise: meets(noise, 10 * _COARSE) or meets(noise, _COARSE))
    if meets(low) or not meets(high):
        _, high = _neighbours(meets)
    return high


def _neighbours(meets: Callable[[float], bool]) -> tuple[float, float]:
    """Two noises 0.1 % apart, of which the larger was seen to be enough and the smaller was not, unless it is 1/2."""
    high = 1.0
    while not meets(high):
        high *= 2.0
    low = high / 2.0
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if meets(middle) else (middle, high)
    return low, high


GRID = 128
_STEPS = 2**32


def delta_floor(*, scale: float, clients: int, shift: float) -> float:
    """The least δ, at any ε, when one coordinate moves by `shift`: F_k(|shift|/(2√2·scale)), rounded down.

    `scale` is the σ of one client's noise. The sharpest shift puts all of S on the smallest scale: S/min R.
    """
    _check_noise(scale, clients, abs(shift))
    return float(_escapes(np.array([abs(shift) / (2 * math.sqrt(2) * scale)]), clients)[0])


def delta_floor_even(*, scale: float, clients: int, sensitivity: float, factors: NDArray[np.float64]) -> float:
    """The least δ, at any ε, when all d coordinates share the change evenly, S/(√d·R_j) on coordinate j.

    Each coordinate escapes on its own: 1 − Π_j (1 − F_k(S/(√d·|R_j|·2√2·scale))), rounded down. `factors` holds R.
    """
    _check_noise(scale, clients, sensitivity)
    sizes = np.abs(np.asarray(factors, dtype=np.float64)).ravel()
    if not sizes.size or not bool(np.all(sizes > 0)):
        raise ConfigError("factors must hold the scale of every coordinate, none of them zero or missing.")
    widths = sensitivity / (math.sqrt(sizes.size) * sizes * 2 * math.sqrt(2) * scale)
    with np.errstate(divide="ignore"):
        return float(-np.expm1(np.log1p(-_escapes(widths, clients)).sum()))


def _escapes(widths: NDArray[np.float64], clients: int) -> NDArray[np.float64]:
    """A lower bound on F_k, exact up to rounding except where more than GRID widths exceed 1."""
    result = np.zeros_like(widths)
    small = (widths > 0) & (widths < 1)
    result[small] = np.exp(clients * np.log(widths[small]) - gammaln(clients + 1)) * (1 - 1e-9)
    large = np.flatnonzero(widths >= 1)
    if large.size:
        # F grows with its argument, so the nearest grid point below gives a lower bound.
        distinct = np.unique(widths[large])
        grid = distinct[np.unique(np.linspace(0, len(distinct) - 1, min(GRID, len(distinct))).astype(np.int64))]
        values = np.array([_irwin_hall(float(point), clients) for point in grid])
        result[large] = values[np.searchsorted(grid, widths[large], side="right") - 1]
    return result


def _irwin_hall(point: float, clients: int) -> float:
    """F_k(point) with the point rounded down to 32 binary places; rational, since the sum's terms cancel."""
    if point >= clients:
        return 1.0
    exact = Fraction(math.floor(point * _STEPS), _STEPS)
    return float(_lower(exact, clients) if 2 * exact <= clients else 1 - _lower(clients - exact, clients)) * (1 - 1e-12)


def _lower(point: Fraction, clients: int) -> Fraction:
    """The sum itself, over whole numbers: (t − j)^k = (n − j·2^32)^k / 2^(32k)."""
    numerator = int(point * _STEPS)
    total = sum(
        (-1) ** j * math.comb(clients, j) * (numerator - j * _STEPS) ** clients for j in range(numerator // _STEPS + 1)
    )
    return Fraction(total, _STEPS**clients * math.factorial(clients))


def _check_noise(scale: float, clients: int, change: float) -> None:
    if not 0 < scale < math.inf:
        raise ConfigError(f"scale is {scale}: the noise needs a finite standard scale above 0.")
    if clients < 1:
        raise ConfigError(f"clients is {clients}: at least one client adds noise.")
    if not 0 <= change < math.inf:
        raise ConfigError(f"the change is {change}: it must be a finite number of at least 0.")


# --- what a guessing game says about a claim: lower bounds on ε from the canaries of one run
#
# m canaries each take one of two places by a fair coin S_i = ±1. An observer of the run guesses `guesses` of the coins,
# as many as were fixed before it looked, and is right about W of them. Canaries share a run, so W is no binomial
# variable; what holds of it follows from what is claimed of each coin given all others.
#
# **Any (ε, δ)** (Steinke, Nasr and Jagielski 2023, Theorem 5.2). With f(v) = P[Binomial(r, e^ε/(1 + e^ε)) ≥ v],
#
#     P[W ≥ v] ≤ f(v) + 2·m·δ·max_{1 ≤ i ≤ m} (f(v − i) − f(v))/i.
#
# **A Gaussian mechanism of strength μ**, of which more is claimed than one (ε, δ): no event B has M(+) ∈ B with a
# probability above g(P[M(−) ∈ B]), g(x) = Φ(Φ⁻¹(x) + μ). Fix a coin i, the others, and let B_b be the outcomes on which
# the guess at i is b and v − 1 or more of the others are right. Where S_i = b these are right about i and W ≥ v; where
# S_i = −b they are wrong about i and W ≥ v − 1. As g is concave, the mean over b, the other coins and i keeps the
# inequality:
#
#     E[W·1(W ≥ v)]/m ≤ g(E[(r − W)·1(W ≥ v − 1)]/m).
#
# In tails t_v = P[W ≥ v] this is a lower bound of t_{v−1} that grows with every t_i, i ≥ v:
#
#     t_{v−1} ≥ (m·g⁻¹((v·t_v + Σ_{i>v} t_i)/m) + Σ_{i≥v} t_i)/(r − v + 1).
#
# So t_c ≥ τ forces tails down to t_0, and where that exceeds 1 the premise was wrong: P[W ≥ c] < τ. (Mahloujifar, Melis
# and Chaudhuri 2024 bound W for any trade-off function in this way.)

CONFIDENCE = 0.95
MOST = 1_000_000
"""So many canaries a game has at the most."""
_HIGHEST = 50.0
_EXACT = 1e-4
_SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
_LEAST_GUESSES = 20
_TOO_LITTLE = 2.0


@dataclass(frozen=True)
class Guesses:
    """How a game went: of `canaries` coins so many were guessed, so many of them rightly."""

    canaries: int
    guessed: int
    correct: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.guessed <= self.canaries or self.canaries < 1:
            raise ConfigError(
                f"{self.correct} right of {self.guessed} guesses at {self.canaries} canaries is no outcome of a game."
            )


def tail_bound(game: Guesses, *, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at the most, where each coin has (ε, δ): Theorem 5.2."""
    from scipy.stats import binom  # slow to import, and a run that trains has no use for it

    counts = np.arange(game.correct + 1)
    tails = binom.sf(counts - 1, game.guessed, 1.0 / (1.0 + math.exp(-epsilon)))
    least = float(tails[game.correct])
    if not game.correct or not delta:
        return least
    steps = counts[1:]
    slope = float(np.max((tails[game.correct - steps] - least) / steps))
    # Beyond v steps f stays at 1, and the quotient falls.
    return min(1.0, least + 2.0 * game.canaries * delta * slope)


def gaussian_excludes(game: Guesses, *, mu: float, tau: float) -> bool:
    """Whether a Gaussian mechanism of strength μ gives so many right guesses with a probability below τ."""
    canaries, guessed, right = game.canaries, game.guessed, game.correct
    tail, above, summed = tau, 0.0, tau  # t_v, Σ_{i>v} t_i, Σ_{i≥v} t_i
    for v in range(right, 0, -1):
        forced = canaries * float(ndtr(ndtri(min((v * tail + above) / canaries, 1.0)) - mu)) + summed
        above, tail = summed, max(tail, forced / (guessed - v + 1))
        if tail > 1.0:
            return True
        summed += tail
    return False


def epsilon_at_least(game: Guesses, *, delta: float, confidence: float = CONFIDENCE) -> float:
    """The largest ε that the game rules out at this confidence, whatever the mechanism; 0 where it rules out none."""
    return _largest(lambda epsilon: tail_bound(game, epsilon=epsilon, delta=delta) <= 1.0 - confidence)


def mu_at_least(game: Guesses, *, confidence: float = CONFIDENCE) -> float:
    """The largest μ that the game rules out at this confidence for a Gaussian mechanism; 0 where it rules out none."""
    return _largest(lambda mu: gaussian_excludes(game, mu=mu, tau=1.0 - confidence))


def _largest(excluded: Callable[[float], bool]) -> float:
    """The end of an interval [0, x) of excluded values, from below."""
    if not excluded(0.0):
        return 0.0
    low, high = 0.0, _HIGHEST
    while high - low > _EXACT:
        middle = (low + high) / 2.0
        low, high = (middle, high) if excluded(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class GuessPlan:
    """How many coins are guessed, and what bound on ε a mechanism that spends all of its claim shows on average."""

    guesses: int
    expected: float


def plan_guesses(canaries: int, *, mu: float, delta: float, gaussian: bool) -> GuessPlan:
    """How many guesses a game should make, from the claim alone: to choose after looking would void the bound.

    Where a claim is spent to the full, scores are N(±μ/2, 1). The observer guesses at the largest of either sign, and
    among those beyond t a share of Φ(μ/2 − t)/(Φ(μ/2 − t) + Φ(−μ/2 − t)) is right. Few guesses show most of honest
    noise, but even if all are right they rule out little: noise of half the size has to contradict its claim, where
    any number of guesses lets it.
    """
    if not math.isfinite(mu) or mu <= 0:
        return GuessPlan(canaries, math.inf)
    plans = []
    for guesses in sorted({min(canaries, max(_LEAST_GUESSES, round(share * canaries))) for share in _SHARES}):
        honest, halved = (_expected(canaries, guesses, mu=mu * factor) for factor in (1.0, _TOO_LITTLE))
        shown = epsilon_of(mu_at_least(honest), delta) if gaussian else epsilon_at_least(honest, delta=delta)
        caught = excludes(halved, epsilon=epsilon_of(mu, delta), delta=delta, gaussian=gaussian)
        plans.append((caught, shown, guesses))
    _, expected, guesses = max(plans)
    return GuessPlan(guesses, expected)


def excludes(game: Guesses, *, epsilon: float, delta: float, gaussian: bool, confidence: float = CONFIDENCE) -> bool:
    """Whether a game rules an (ε, δ) out at this confidence; of `gaussian` noise, all that it would claim with it."""
    tau = 1.0 - confidence
    if gaussian:
        return gaussian_excludes(game, mu=mu_of(epsilon, delta), tau=tau)
    return tail_bound(game, epsilon=epsilon, delta=delta) <= tau


def follows(shown: float, game: Guesses, *, delta: float, gaussian: bool, confidence: float) -> bool:
    """Whether a bound on ε is the one that a game gives, without the search that found it."""
    if not 0 <= shown < math.inf:
        return False
    # What was searched for is exact in μ, or in ε.
    step = epsilon_of(mu_of(shown, delta) + 2 * _EXACT, delta) if gaussian else shown + 2 * _EXACT
    ruled_out = partial(excludes, game, delta=delta, gaussian=gaussian, confidence=confidence)
    below = max(0.0, shown - 1e-6 * (1 + shown))
    return (not shown or ruled_out(epsilon=below)) and not ruled_out(epsilon=step)


def _expected(canaries: int, guesses: int, *, mu: float) -> Guesses:
    right = _expected_right(guesses / canaries, mu) * canaries
    return Guesses(canaries, guesses, min(guesses, round(right)))


def _expected_right(share: float, mu: float) -> float:
    """Of all coins, how many are guessed rightly where those with the largest scores, so large a share, are guessed."""
    low, high = 0.0, mu + 40.0
    for _ in range(60):
        middle = (low + high) / 2.0
        beyond = float(ndtr(mu / 2 - middle) + ndtr(-mu / 2 - middle))
        low, high = (middle, high) if beyond > share else (low, middle)
    return float(ndtr(mu / 2 - low))
