"""What one round's correlated noise proves about each member: μ_i² = S_i²·(Σ⁻¹)_ii.

Uploads are covered by residual noise of the member's own and by pair noise that cancels between two members.
Per coordinate their covariance is Σ = diag(d) + L, with d the residual variances and L the Laplacian of the pair
variances. Changing one unit of member i's data moves upload i alone, by at most S_i, so the round is a Gaussian
mechanism of strength μ_i towards whoever sees the uploads. Every number here is exact to the last digits or an upper
bound.

For many clients on a sparse pair graph the diagonal is bracketed without a dense matrix. For any vector x and its
residual r = e_i − Σx the identity

    (Σ⁻¹)_ii = x_i + rᵀx + rᵀΣ⁻¹r      with      0 ≤ rᵀΣ⁻¹r ≤ Σ_j r_j²/d_j      (since L ⪰ 0)

brackets the entry, whatever x is: conjugate gradients only have to make r small, and their own rounding
does not matter. The residual is then evaluated afresh and the rounding of that evaluation (at most γ·|Σ||x|
per entry, γ = a row's number of terms in units of the last place) is added on the unfavourable side.

Strong pair noise makes Σ badly conditioned in one direction only, the constant vector (Σ·1 = d). Starting from
that vector's best multiple takes the direction out of r and leaves the conditioning of the graph itself: some
eight steps for random graphs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg.lapack import dpotrf, dpotri
from scipy.sparse.csgraph import connected_components

from fedveil.errors import ConfigError
from fedveil.ledger.sparse import OWN_ALONE, Circle, bound, core_bounds

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]
Ends = tuple[Positions, Positions]

BLOCK = 64
_ULP = sys.float_info.epsilon


@dataclass(frozen=True, eq=False)
class NoiseGraph:
    """Residual variances of the members, and the pair variances between positions `first` and `second`."""

    residual: Floats
    first: Positions
    second: Positions
    pairs: Floats

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.residual)

    @cached_property
    def degree(self) -> Floats:
        """Each member's pair variance in all."""
        ends = np.concatenate([self.first, self.second])
        both = np.concatenate([self.pairs, self.pairs])
        return np.bincount(ends, weights=both, minlength=self.size).astype(np.float64, copy=False)

    @cached_property
    def adjacency(self) -> sparse.csr_array:
        """The pair variances as a symmetric matrix."""
        half = sparse.coo_array((self.pairs, (self.first, self.second)), shape=(self.size, self.size))
        return sparse.csr_array(half + half.T)

    @cached_property
    def covariance(self) -> sparse.csr_array:
        """Σ = diag(residual) + Laplacian."""
        return sparse.csr_array(sparse.diags_array(self.residual + self.degree) - self.adjacency)


@dataclass(frozen=True)
class Worst:
    """The member at `position` is charged at least `lower`; nobody looked at is charged more than `upper`."""

    position: int
    lower: float
    upper: float


def diagonal_bounds(
    graph: NoiseGraph,
    columns: Positions,
    *,
    slack: float = 1e-3,
    enough: Floats | None = None,
    steps: int = 1000,
) -> tuple[Floats, Floats]:
    """Lower and upper bounds of (Σ⁻¹)_ii for the given members of a connected graph.

    Work on a member stops when its bounds are within `slack` of each other (relative), when its upper
    bound is below `enough`, when rounding allows no closer ones, or after `steps` steps: the bounds hold in
    every case. A member without residual noise makes the upper bounds infinite.
    """
    lower, upper = np.zeros(len(columns)), np.full(len(columns), np.inf)
    if not graph.residual.min() > 0:
        return lower, upper
    wanted = np.zeros(len(columns)) if enough is None else enough
    for start in range(0, len(columns), BLOCK):
        part = slice(start, start + BLOCK)
        lower[part], upper[part] = _bracket(graph, columns[part], slack=slack, enough=wanted[part], steps=steps)
    return lower, upper


def worst_candidate(graph: NoiseGraph, sensitivity: Floats, *, count: int = 64, slack: float = 1e-6) -> Worst:
    """The largest charge S_i²·(Σ⁻¹)_ii among the `count` members with the least noise of their own around them."""
    likely = _most_exposed_first(graph, sensitivity)[:count]
    lower, upper = diagonal_bounds(graph, likely, slack=slack)
    squares = sensitivity[likely] ** 2
    best = int(np.argmax(squares * lower))
    return Worst(int(likely[best]), float(squares[best] * lower[best]), float(np.max(squares * upper)))


def worst(graph: NoiseGraph, sensitivity: Floats, *, count: int = 64, slack: float = 1e-3) -> Worst:
    """The worst candidate, and a bound on the charge of every member.

    Members that are not candidates are worked on only until they are certainly no worse than the candidate.
    """
    candidate = worst_candidate(graph, sensitivity, count=count, slack=min(slack, 1e-6))
    rest = _most_exposed_first(graph, sensitivity)[count:]
    rest = rest[sensitivity[rest] > 0]
    squares = sensitivity[rest] ** 2
    lower, upper = diagonal_bounds(graph, rest, slack=slack, enough=candidate.lower / squares)
    if not len(rest):
        return candidate
    position, least = candidate.position, candidate.lower
    best = int(np.argmax(squares * lower))
    if squares[best] * lower[best] > least:
        position, least = int(rest[best]), float(squares[best] * lower[best])
    return Worst(position, least, max(candidate.upper, float(np.max(squares * upper))))


def _most_exposed_first(graph: NoiseGraph, sensitivity: Floats) -> Positions:
    """Members by an estimate of their charge: the noise of the sum, and the noise directly around them."""
    with np.errstate(divide="ignore"):
        estimate = sensitivity**2 * (1 / graph.residual.sum() + 1 / (graph.residual + graph.degree))
    return np.argsort(-estimate, kind="stable").astype(np.int64)


def _bracket(
    graph: NoiseGraph, columns: Positions, *, slack: float, enough: Floats, steps: int
) -> tuple[Floats, Floats]:
    """Conjugate gradients, scaled by the diagonal, on several columns at once."""
    covariance, d = graph.covariance, graph.residual
    scale, total = (1 / (d + graph.degree))[:, None], d.sum()
    lanes = np.arange(len(columns))
    x = np.full((graph.size, len(columns)), 1 / total)
    r = np.repeat(-d[:, None] / total, len(columns), axis=1)
    r[columns, lanes] += 1
    p, product = np.zeros_like(r), np.ones(len(columns))
    widest = np.inf
    for _ in range(steps):
        if bool(np.all(_stops(x[columns, lanes], (1 / d) @ (r * r), slack, enough))):
            lower, upper = _certify(graph, x, columns)
            before_that, widest = widest, float((upper - lower).max())
            # Where rounding alone keeps the bounds apart, further steps bring nothing.
            if bool(np.all(_stops(lower, upper - lower, slack, enough))) or widest > before_that / 2:
                return lower, upper
        z = scale * r
        before, product = product, _dots(r, z)
        p *= _ratio(product, before)
        p += z
        y = covariance @ p
        length = _ratio(product, _dots(p, y))
        p_step = p * length
        x += p_step
        y *= length
        r -= y
    return _certify(graph, x, columns)


def _stops(value: Floats, gap: Floats, slack: float, enough: Floats) -> NDArray[np.bool_]:
    return (gap <= slack * value) | (value + gap <= enough)


def _certify(graph: NoiseGraph, x: Floats, columns: Positions) -> tuple[Floats, Floats]:
    """The bracket the identity gives for x, with the rounding of its evaluation on the unfavourable side."""
    d, lanes = graph.residual, np.arange(len(columns))
    r = -(graph.covariance @ x)
    r[columns, lanes] += 1
    terms = int(np.diff(graph.covariance.indptr).max()) + 8
    size = np.abs(x)
    error = (terms * _ULP) * (d + 2 * graph.degree)[:, None] * size.max(axis=0)
    error[columns, lanes] += _ULP
    largest = np.abs(r) + error
    middle = x[columns, lanes] + _dots(r, x)
    summing = (graph.size + 8) * _ULP
    rounding = _dots(error, size) + summing * _dots(largest, size) + 4 * _ULP * np.abs(x[columns, lanes])
    rest = (1 / d) @ (largest * largest) * (1 + 2 * summing)
    return middle - rounding * (1 + summing), middle + (rounding + rest) * (1 + summing)


def _dots(left: Floats, right: Floats) -> Floats:
    """Column by column, the inner products."""
    return np.asarray(np.einsum("ij,ij->j", left, right), dtype=np.float64)


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """The quotient, or 0 where a column has converged to the last bit."""
    usable = (denominator > 0) & (numerator > 0)
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=usable)


DENSE_UP_TO = 1500
DENSE_UP_TO_IF_FULL = 4000
EVERY_SET_UP_TO = 500
_SETS_OF = 32


@dataclass(frozen=True, eq=False)
class NoiseLayout:
    """The noise of one round.

    Member i's upload has residual variance residual[i] per coordinate; pair noise of variance pairs[e] is added
    by member first[e] and subtracted by member second[e] (positions into `members`, which holds client numbers).
    `sensitivity[i]` is the largest L2 change that one unit of member i's data causes in its upload. `summed` says
    that masks hide the single uploads, so that only their sum is ever seen; whoever runs the masks can open sums
    that lack up to `removable` members. On a `circle` all pairs are alike and the members, or those they are of, are
    everybody around it: what it proves is then taken in place of what would have to be computed.
    """

    members: tuple[int, ...]
    sensitivity: Floats
    residual: Floats
    first: Positions
    second: Positions
    pairs: Floats
    summed: bool = False
    removable: int = 0
    circle: Circle | None = None

    @cached_property
    def _places(self) -> dict[int, int]:
        return {member: place for place, member in enumerate(self.members)}

    @cached_property
    def _rows(self) -> tuple[Positions, Positions]:
        """Compressed rows: the pairs of the member at place i are edges[starts[i] : starts[i + 1]], ascending."""
        ends = np.concatenate([self.first, self.second])
        order = np.argsort(ends, kind="stable")
        starts = np.zeros(len(self.members) + 1, dtype=np.int64)
        np.cumsum(np.bincount(ends, minlength=len(self.members)), out=starts[1:])
        return starts, order % max(len(self.pairs), 1)

    def place(self, member: int) -> int:
        """Where a member stands; ConfigError for one that is not of the round."""
        try:
            return self._places[member]
        except KeyError:
            raise ConfigError(f"client {member} is not among the {len(self.members)} members of the round.") from None

    def partners(self, member: int) -> list[tuple[int, float]]:
        """(client, variance) of everybody who shares noise with a member."""
        place, (starts, edges) = self.place(member), self._rows
        here = np.sort(edges[starts[place] : starts[place + 1]])
        others = self.first[here] + self.second[here] - place
        shared = zip(others.tolist(), self.pairs[here].tolist(), strict=True)
        return [(self.members[other], variance) for other, variance in shared if variance > 0]

    def __post_init__(self) -> None:
        size, edges = (len(self.members),), self.pairs.shape
        if len(set(self.members)) != len(self.members):
            raise ConfigError("a noise layout names the same member twice: every client takes part once in a round.")
        if self.sensitivity.shape != size or self.residual.shape != size:
            raise ConfigError(
                f"a noise layout of {len(self.members)} members has {self.sensitivity.shape} sensitivities and "
                f"{self.residual.shape} residual variances: one of each per member is needed."
            )
        if len(edges) != 1 or self.first.shape != edges or self.second.shape != edges:
            raise ConfigError(
                f"a noise layout's pairs do not match: {self.first.shape} first ends, {self.second.shape} second ends, "
                f"{edges} variances."
            )
        ends = np.concatenate([self.first, self.second])
        if ends.size and not (ends.min() >= 0 and ends.max() < len(self.members)):
            raise ConfigError(f"a pair's end lies outside the {len(self.members)} members of its noise layout.")
        if bool(np.any(self.first == self.second)):
            raise ConfigError("a member is paired with itself: its noise would cancel within its own upload.")
        for name, values in (("residual variance", self.residual), ("pair variance", self.pairs)):
            if not bool(np.all(np.isfinite(values) & (values >= 0))):
                raise ConfigError(f"a noise layout's {name} is negative or not finite.")
        if not bool(np.all(self.sensitivity >= 0)):
            raise ConfigError("a noise layout's sensitivity is negative or not a number.")


@dataclass(frozen=True, eq=False)
class Collusion:
    """μ_i² of every member against the worst colluders found; `certified` when no set of colluders is worse."""

    mu2: Floats
    certified: bool
    how: str
    own: Floats | None = None

    @property
    def proven(self) -> Floats:
        """What limits are held to: no set is worse, be it by each member's `own` noise where mu2 is an estimate."""
        return self.mu2 if self.own is None else self.own


def charges(
    noise_layout: NoiseLayout,
    *,
    arrived: Collection[int] | None = None,
    revealed: Collection[tuple[int, int]] = (),
    colluding: Collection[int] = (),
) -> Floats:
    """μ_i² of every member, in the order of `members`, against one who sees all uploads that arrived (or their sum).

    Colluders (client numbers; outsiders to the round change nothing) know their own noise and their pairs', and
    a revealed pair's noise is known too: both drop out. An upload that did not arrive is not seen, so the pair
    noise it would have cancelled stays with the others. Without `arrived` every upload counts as seen, also a
    late one. Absent members and colluders are charged 0; a member that nothing covers is charged infinity.
    """
    if noise_layout.summed and noise_layout.removable:
        return _smallest_sum(noise_layout, colluding)
    if noise_layout.summed:
        return central(noise_layout, arrived=arrived, known=colluding)
    kept, graph, inside = _seen(noise_layout, arrived, revealed, colluding)
    result: Floats = np.zeros(len(noise_layout.members))
    result[kept] = _times(noise_layout.sensitivity[kept] ** 2, _diagonal(graph, _second(noise_layout), inside))
    return result


def _second(noise_layout: NoiseLayout) -> float:
    """w·θ of the circle that the pairs are on; infinite where they are on none."""
    circle = noise_layout.circle
    return math.inf if circle is None else circle.second * float(noise_layout.pairs.max(initial=0.0))


def central(
    noise_layout: NoiseLayout, *, arrived: Collection[int] | None = None, known: Collection[int] = ()
) -> Floats:
    """S_i²/Σ residual: μ_i² against one who sees only the sum and the residual noise of the `known` members.

    Pair noise that absent members leave in the sum is not counted on. Absent and known members are charged 0.
    """
    here = _present(noise_layout, arrived) & ~_marked(noise_layout, known)
    noise = math.fsum(noise_layout.residual[here])
    share = np.full(int(here.sum()), math.nextafter(1 / noise, math.inf) if noise else math.inf)
    result = np.zeros(len(noise_layout.members))
    result[here] = _times(noise_layout.sensitivity[here] ** 2, share)
    return result


def _smallest_sum(noise_layout: NoiseLayout, known: Collection[int]) -> Floats:
    """S_i²/(the least noise in any sum that can be opened and holds i), whoever is said to have arrived."""
    honest = ~_marked(noise_layout, known)
    least = int(honest.sum()) - noise_layout.removable
    result = np.zeros(len(noise_layout.members))
    share = np.full(int(honest.sum()), math.inf)
    if least >= 1:
        share = _complete_bound(noise_layout.residual[honest], math.inf, least)
    result[honest] = _times(noise_layout.sensitivity[honest] ** 2, share)
    return result


def by_peer(
    noise_layout: NoiseLayout,
    *,
    arrived: Collection[int] | None = None,
    revealed: Collection[tuple[int, int]] = (),
    colluders: int = 1,
) -> Floats:
    """μ_i² against `colluders` other members, who see the sum of what arrived and take out of it the noise they know.

    That is their own residual noise, or the lack of it, if their uploads are in the sum, and what their pairs have
    left there: pair noise stays in the sum where one end arrived and the other did not. So μ_i² = S_i²/(all noise −
    the most that so many other members know of it); what two of them both know is taken out twice, which errs upwards.
    """
    here = _present(noise_layout, arrived)
    left = (here[noise_layout.first] != here[noise_layout.second]) & ~_are_revealed(noise_layout, revealed)
    first, second, pairs = noise_layout.first[left], noise_layout.second[left], noise_layout.pairs[left]
    known = np.where(here, noise_layout.residual, 0.0)
    np.add.at(known, first, pairs)
    np.add.at(known, second, pairs)
    total = math.fsum(noise_layout.residual[here]) + math.fsum(pairs)
    # Whoever is among those who know most is not its own adversary: the next one takes its place.
    order = np.argsort(-known, kind="stable")
    others = min(colluders, len(known) - 1)
    most = np.full(len(known), math.fsum(known[order[:others]]))
    for place in order[:others]:
        most[place] = math.fsum(known[order[: others + 1]]) - known[place]
    rest = total - most - 8 * sys.float_info.epsilon * total
    with np.errstate(divide="ignore"):
        share = np.where(rest > 0, 1 / rest, math.inf)
    result = np.zeros(len(known))
    result[here] = _times(noise_layout.sensitivity[here] ** 2, share[here])
    return result


def only(noise_layout: NoiseLayout, arrived: Collection[int]) -> NoiseLayout:
    """The noise among those whose upload arrived; what they shared with others is not counted on."""
    _check_known(noise_layout, arrived, "uploads arrived")
    here = _marked(noise_layout, arrived)
    if bool(here.all()):
        return noise_layout
    place = np.cumsum(here) - 1
    kept = here[noise_layout.first] & here[noise_layout.second]
    return replace(
        noise_layout,
        members=tuple(member for member, present in zip(noise_layout.members, here, strict=True) if present),
        sensitivity=noise_layout.sensitivity[here],
        residual=noise_layout.residual[here],
        first=place[noise_layout.first[kept]],
        second=place[noise_layout.second[kept]],
        pairs=noise_layout.pairs[kept],
    )


def without(noise_layout: NoiseLayout, revealed: Collection[tuple[int, int]]) -> NoiseLayout:
    """The same noise as seen by one who knows the revealed pairs' part of it."""
    kept = ~_are_revealed(noise_layout, revealed)
    if bool(kept.all()):
        return noise_layout
    rest = replace(
        noise_layout, first=noise_layout.first[kept], second=noise_layout.second[kept], pairs=noise_layout.pairs[kept]
    )
    # What a circle proves holds of clients with all the pairs among them.
    label, gone = _parts(rest), ~kept
    torn = bool(np.any(label[noise_layout.first[gone]] == label[noise_layout.second[gone]]))
    return replace(rest, circle=None) if torn else rest


@lru_cache(maxsize=8)  # plan, account and every simulated client's policy ask for the same noise layout
def worst_collusion(noise_layout: NoiseLayout, colluders: int, *, draws: int = 16, seed: int = 0) -> Collusion:
    """μ_i² of every member when `colluders` others side with the one who sees all uploads.

    Whoever adds no noise is no better than one who tells what it added, so that both count the same. Few enough sets
    are all tried, a single colluder everywhere, and complete pair graphs have a bound over every set; all of these are
    certified. Otherwise nothing is proven but by each member's own noise, and besides, on a graph that is no circle,
    colluders are drawn at random: an estimate, for who may choose their place can surround a member with at most that
    many pairs and leave it its residual noise alone.
    """
    size = len(noise_layout.members)
    if not 0 <= colluders < size:
        raise ConfigError(f"{colluders} colluders among {size} members: there must be at least one honest member.")
    if noise_layout.circle is not None and colluders:
        around = _around_circle(noise_layout, noise_layout.circle, colluders)
        if around is not None:
            return around
    weakest = math.inf if noise_layout.summed else _weakest_pair(noise_layout)
    if colluders == 1 and weakest == 0 and size <= DENSE_UP_TO:
        alone = _each_alone(noise_layout)
        if alone is not None:
            return Collusion(alone, True, "every single colluder was tried")
    # Where all pairs are alike, the bound is what the worst set really sees.
    alike = (
        weakest > 0 and size > _SETS_OF and (noise_layout.summed or weakest * (1 + 1e-9) >= noise_layout.pairs.max())
    )
    if math.comb(size, colluders) <= EVERY_SET_UP_TO and not alike:
        every = combinations(noise_layout.members, colluders)
        return Collusion(_largest(noise_layout, every), True, f"every set of {colluders} colluders was tried")
    if weakest > 0:
        honest = size - colluders - noise_layout.removable
        if honest < 1:
            return Collusion(np.full(size, math.inf), True, "a sum of one client could be opened")
        mu2 = _times(noise_layout.sensitivity**2, _complete_bound(noise_layout.residual, weakest, honest))
        return Collusion(mu2, True, f"bound over every set of {colluders} colluders")
    own = _own(noise_layout)
    if noise_layout.circle is not None:
        return Collusion(own, True, OWN_ALONE)
    random = np.random.default_rng(seed)
    sets = (tuple(random.permutation(np.array(noise_layout.members))[:colluders].tolist()) for _ in range(draws))
    mu2 = _largest(noise_layout, sets)
    mu2[mu2 == 0] = mu2.max()  # drawn as a colluder every time
    mu2[noise_layout.sensitivity == 0] = 0
    how = f"largest of {draws} random draws of {colluders} colluders; colluders may do better"
    return Collusion(mu2, False, how, own)


def _around_circle(noise_layout: NoiseLayout, circle: Circle, colluders: int) -> Collusion | None:
    """What the circle proves against so many colluders; None where that is nothing."""
    graph = NoiseGraph(noise_layout.residual, noise_layout.first, noise_layout.second, noise_layout.pairs)
    near, each = circle.near(colluders), float(noise_layout.pairs.max(initial=0.0))
    share = core_bounds(graph.adjacency, _parts(noise_layout), graph.residual, circle, each=each, colluders=colluders)
    if not bool(np.isfinite(share).any()):
        return None
    how = f"bound over every set of {colluders} colluders"
    if not circle.whoever(colluders):
        how = f"bound for {colluders} colluders of which {near} at most are neighbours of one client"
    return Collusion(np.minimum(_times(noise_layout.sensitivity**2, share), _own(noise_layout)), True, how)


def _own(noise_layout: NoiseLayout) -> Floats:
    """μ_i² by one's own noise alone, which nobody else knows: whatever others tell, it is no more."""
    with np.errstate(divide="ignore"):
        return _times(noise_layout.sensitivity**2, (1 + _ULP) / noise_layout.residual)


def _parts(noise_layout: NoiseLayout) -> Positions:
    """Which of the groups that share no noise with others each member is of."""
    graph = NoiseGraph(noise_layout.residual, noise_layout.first, noise_layout.second, noise_layout.pairs)
    return np.asarray(connected_components(graph.adjacency, directed=False)[1], dtype=np.int64)


def _each_alone(noise_layout: NoiseLayout) -> Floats | None:
    """μ_i² of every member against the worst single colluder; None where rounding is in the way.

    As in `_dense`, with M = Σ + c·11ᵀ and A = M⁻¹. Taking colluder j out leaves B⁻¹ on the others, where B = A −
    a_j·a_jᵀ/A_jj. Its pairs' noise is known too and comes off the diagonal at its neighbours N, G = (B⁻¹ − U·W·Uᵀ)⁻¹ =
    B + B_N·(W⁻¹ − B_NN)⁻¹·B_Nᵀ, and what c·11ᵀ added comes off by u = c·G·1.
    """
    if not noise_layout.pairs.any():
        return charges(noise_layout)
    if not bool(np.all(noise_layout.residual > 0)):
        return None
    graph = NoiseGraph(noise_layout.residual, noise_layout.first, noise_layout.second, noise_layout.pairs)
    size, shift = graph.size, float(graph.degree.mean()) / graph.size
    sigma = graph.covariance.toarray()
    inverse = np.linalg.inv(sigma + shift)
    inverse = (inverse + inverse.T) / 2
    condition = float(np.abs(sigma + shift).sum(axis=0).max() * np.abs(inverse).sum(axis=0).max())
    margin = 16 * size * sys.float_info.epsilon * condition
    if margin > 1e-6:
        return None
    total, worst = inverse.sum(axis=1), np.zeros(size)
    for j in range(size):
        near = np.flatnonzero(sigma[j])
        near = near[near != j]
        column = inverse[:, j] / math.sqrt(inverse[j, j])
        diagonal, ones = np.diag(inverse) - column**2, total - column * column.sum()
        if len(near):
            rows = inverse[near] - np.outer(column[near], column)
            solved = np.linalg.solve(np.diag(-1 / sigma[j, near]) - rows[:, near], rows)
            diagonal, ones = diagonal + np.einsum("ij,ij->j", rows, solved), ones + solved.T @ ones[near]
        u = shift * ones
        u[j] = diagonal[j] = 0.0
        np.maximum(worst, diagonal + (size - 1) * u * u / float(u @ graph.residual), out=worst)
    return _times(noise_layout.sensitivity**2, worst * (1 + margin))


def _largest(noise_layout: NoiseLayout, sets: Iterator[tuple[int, ...]]) -> Floats:
    result = np.zeros(len(noise_layout.members))
    for colluding in sets:
        np.maximum(result, charges(noise_layout, colluding=colluding), out=result)
    return result


def _complete_bound(residual: Floats, weakest: float, honest: int) -> Floats:
    """(Σ⁻¹)_ii at most, over every set H of `honest` members that contains i, all pairs at least `weakest`.

    With w the weakest pair, Σ_H ⪰ diag(x_j) + w·(h·I − 11ᵀ) = diag(d_j) − w·11ᵀ, d_j = x_j + w·h. By Sherman and
    Morrison, and since 1 − w·Σ_H 1/d_j = Σ_H x_j/(h·d_j),

        (Σ_H⁻¹)_ii ≤ 1/d_i + (w/d_i²)·h / Σ_{j∈H} x_j/d_j.

    Only the last sum depends on H, and x/(x + w·h) grows with x: the worst H holds i and the h − 1 others with the
    least residual noise (the colluders take the most away). Infinitely strong pairs leave 1/Σ_H x_j: only the sum
    is seen.
    """
    # All terms in units of w·h, which may be infinite: d = w·h·(1 + relative).
    relative = residual / (weakest * honest)
    share = residual / (1 + relative)
    rank = np.empty(len(residual), dtype=np.int64)
    order = np.argsort(residual, kind="stable")
    rank[order] = np.arange(len(residual))
    least = np.sort(share)[:honest]
    total = np.where(rank < honest, least.sum(), least[:-1].sum() + share)
    with np.errstate(divide="ignore"):
        bound = 1 / (residual + weakest * honest) + 1 / ((1 + relative) ** 2 * total)
    return np.asarray(bound * (1 + (honest + 16) * sys.float_info.epsilon), dtype=np.float64)


def _weakest_pair(noise_layout: NoiseLayout) -> float:
    """The smallest pair variance if every two members are paired, else 0."""
    size = len(noise_layout.members)
    keys = np.minimum(noise_layout.first, noise_layout.second) * size + np.maximum(
        noise_layout.first, noise_layout.second
    )
    distinct, which = np.unique(keys, return_inverse=True)
    if not len(distinct) == size * (size - 1) // 2 > 0:
        return 0.0
    return float(np.bincount(which, weights=noise_layout.pairs).min())


def _seen(
    noise_layout: NoiseLayout,
    arrived: Collection[int] | None,
    revealed: Collection[tuple[int, int]],
    colluding: Collection[int],
) -> tuple[Positions, NoiseGraph, Ends]:
    """The positions of the honest members whose upload is seen, the noise on those uploads, and which pairs of them
    have none that counts."""
    honest = ~_marked(noise_layout, colluding)
    visible = honest & _present(noise_layout, arrived)
    first, second, pairs = noise_layout.first, noise_layout.second, noise_layout.pairs
    place = np.cumsum(visible) - 1
    secret = honest[first] & honest[second] & ~_are_revealed(noise_layout, revealed) & (pairs > 0)
    bare = visible[first] & visible[second] & ~secret
    without_noise = (place[first[bare]], place[second[bare]])
    first, second, pairs = first[secret], second[secret], pairs[secret]
    residual = noise_layout.residual.copy()
    np.add.at(residual, first, np.where(visible[second], 0.0, pairs))
    np.add.at(residual, second, np.where(visible[first], 0.0, pairs))
    inside = visible[first] & visible[second]
    graph = NoiseGraph(residual[visible], place[first[inside]], place[second[inside]], pairs[inside])
    return np.flatnonzero(visible), graph, without_noise


def _diagonal(graph: NoiseGraph, second: float, bare: Ends) -> Floats:
    """(Σ⁻¹)_ii, component by component; infinite where a component has no residual noise at all.

    `second` is w·θ of the circle they are on, which counts for components in which no pair is `bare`.
    """
    with np.errstate(divide="ignore"):
        result = 1 / graph.residual
    count, label = connected_components(graph.adjacency, directed=False)
    by_label = np.argsort(label, kind="stable")
    edges_by_label = np.argsort(label[graph.first], kind="stable")
    ends = np.searchsorted(label[by_label], np.arange(count + 1))
    edge_ends = np.searchsorted(label[graph.first][edges_by_label], np.arange(count + 1))
    place = np.empty(graph.size, dtype=np.int64)
    torn = set(label[bare[0]][label[bare[0]] == label[bare[1]]].tolist())
    for part in np.flatnonzero(np.diff(ends) > 1):
        inside = by_label[ends[part] : ends[part + 1]]
        edges = edges_by_label[edge_ends[part] : edge_ends[part + 1]]
        place[inside] = np.arange(len(inside))
        piece = NoiseGraph(
            graph.residual[inside], place[graph.first[edges]], place[graph.second[edges]], graph.pairs[edges]
        )
        result[inside] = np.minimum(result[inside], _connected(piece, math.inf if part in torn else second))
    return result


def _connected(graph: NoiseGraph, second: float) -> Floats:
    if not graph.residual.any():
        return np.full(graph.size, np.inf)
    least, left = float(graph.residual.min()), float(graph.degree.min()) * (1 - graph.size * _ULP) - second
    if left > 0 and least > 0:
        return np.full(graph.size, bound(residual=least, pairs=left, size=graph.size))
    full = graph.size <= DENSE_UP_TO_IF_FULL and 16 * len(graph.pairs) >= graph.size**2
    if graph.size <= DENSE_UP_TO or full:
        value, margin = _dense(graph)
        if margin <= 1e-6:
            return value * (1 + margin)
    return diagonal_bounds(graph, np.arange(graph.size))[1]


def _dense(graph: NoiseGraph) -> tuple[Floats, float]:
    """The diagonal of Σ⁻¹ and its relative error.

    Σ is nearly singular along 1 when pair noise is strong, so A = Σ + c·11ᵀ is inverted, as well conditioned as
    the graph. As Σ1 = x, Sherman and Morrison give (Σ⁻¹)_ii = (A⁻¹)_ii + k·u_i²/(uᵀx) with u = c·A⁻¹1.
    """
    size, shift = graph.size, float(graph.degree.mean()) / graph.size
    shifted = graph.covariance.toarray() + shift
    factor, failed = dpotrf(shifted, lower=1)
    if failed:
        return np.full(size, np.inf), math.inf
    half, _ = dpotri(factor, lower=1)
    inverse = np.tril(half) + np.tril(half, -1).T
    u = shift * inverse.sum(axis=1)
    condition = float(np.abs(shifted).sum(axis=0).max() * np.abs(inverse).sum(axis=0).max())
    margin = 4 * size * sys.float_info.epsilon * condition
    return np.diag(inverse) + size * u * u / float(u @ graph.residual), margin


def _times(squares: Floats, diagonal: Floats) -> Floats:
    """The product, where no sensitivity means no charge even without noise."""
    return np.multiply(squares, diagonal, out=np.zeros_like(diagonal), where=squares > 0)


def _present(noise_layout: NoiseLayout, arrived: Collection[int] | None) -> NDArray[np.bool_]:
    if arrived is None:
        return np.ones(len(noise_layout.members), dtype=np.bool_)
    _check_known(noise_layout, arrived, "uploads arrived")
    return _marked(noise_layout, arrived)


def _marked(noise_layout: NoiseLayout, clients: Collection[int]) -> NDArray[np.bool_]:
    wanted = frozenset(clients)
    return np.array([member in wanted for member in noise_layout.members], dtype=np.bool_)


def _are_revealed(noise_layout: NoiseLayout, revealed: Collection[tuple[int, int]]) -> NDArray[np.bool_]:
    if not revealed:
        return np.zeros(len(noise_layout.pairs), dtype=np.bool_)
    _check_known(noise_layout, {client for pair in revealed for client in pair}, "pair seeds were revealed")
    size, position = len(noise_layout.members), {member: at for at, member in enumerate(noise_layout.members)}
    ends = np.array([sorted((position[client], position[other])) for client, other in revealed], dtype=np.int64)
    low, high = np.minimum(noise_layout.first, noise_layout.second), np.maximum(noise_layout.first, noise_layout.second)
    return np.isin(low * size + high, ends[:, 0] * size + ends[:, 1])


def _check_known(noise_layout: NoiseLayout, clients: Collection[int], what: str) -> None:
    strangers = sorted(set(clients) - set(noise_layout.members))
    if strangers:
        raise ConfigError(f"{what} of clients that are not members of the round: {strangers[:8]}.")
