"""Neighbourhoods: who masks with whom, derived by every client for itself.

Nobody hands a graph out: its seed is a hash of the epoch's beacon, the round and the members, and the same
members give the same graph whatever order they are listed in. The beacon is made of numbers that all clients
commit to before any is shown (`protocol/directory.py`), so that nobody can search for a graph that suits it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.sparse import Circle

Positions = NDArray[np.int64]

COMPLETE_UP_TO = 32
"""The largest number of clients of which each masks with every other by default."""

_PICKING_ROWS = 1024
_SETS_KEPT = 1024


@dataclass(frozen=True, eq=False)
class Graph:
    """Clients and the pairs among them; edge e joins `members[first[e]]` and `members[second[e]]`.

    Members ascend; first < second; edges are sorted and occur once.
    """

    members: tuple[int, ...]
    first: Positions
    second: Positions

    @cached_property
    def _position(self) -> dict[int, int]:
        return {client: place for place, client in enumerate(self.members)}

    @cached_property
    def _rows(self) -> tuple[Positions, NDArray[np.int64]]:
        """Compressed rows: row i's neighbours are numbers[starts[i] : starts[i + 1]], ascending."""
        source = np.concatenate([self.first, self.second])
        target = np.concatenate([self.second, self.first])
        order = np.lexsort((target, source))
        starts = np.zeros(len(self.members) + 1, dtype=np.int64)
        np.cumsum(np.bincount(source, minlength=len(self.members)), out=starts[1:])
        return starts, np.asarray(self.members, dtype=np.int64)[target[order]]

    def _place(self, client: int) -> int:
        try:
            return self._position[client]
        except KeyError:
            raise ProtocolError(f"client {client} is not among the {len(self.members)} clients of this round") from None

    def __contains__(self, client: int) -> bool:
        return client in self._position

    def neighbours(self, client: int) -> tuple[int, ...]:
        """The clients joined to `client`, ascending."""
        starts, numbers = self._rows
        place = self._place(client)
        return tuple(numbers[starts[place] : starts[place + 1]].tolist())

    @cached_property
    def _around(self) -> dict[int, frozenset[int]]:
        return {}

    def around(self, client: int) -> frozenset[int]:
        """The same as a set, remembered for the few that are asked about again and again."""
        if client not in self._around:
            while len(self._around) >= _SETS_KEPT:
                self._around.pop(next(iter(self._around)))
            self._around[client] = frozenset(self.neighbours(client))
        return self._around[client]

    def degree(self, client: int) -> int:
        """How many clients are joined to `client`."""
        starts, _ = self._rows
        place = self._place(client)
        return int(starts[place + 1] - starts[place])

    def connected(self, among: Collection[int] | None = None) -> bool:
        """Whether paths through `among` (all members if None) join all of `among`; nobody is not connected.

        Two survivors without such a path lie in groups whose masks cancel separately, so that the sum
        of each group could be read.
        """
        # Loading these takes longer than most checks, and not every scheme makes one.
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        alive = np.zeros(len(self.members), dtype=bool)
        alive[[self._place(client) for client in (self.members if among is None else among)]] = True
        renumbered = np.cumsum(alive) - 1
        kept = alive[self.first] & alive[self.second]
        ends = (renumbered[self.first[kept]], renumbered[self.second[kept]])
        count = int(alive.sum())
        if count == 0:
            return False
        matrix = coo_array((np.ones(len(ends[0]), dtype=np.int8), ends), shape=(count, count))
        return int(connected_components(matrix, directed=False, return_labels=False)) == 1


def default_degree(clients: int) -> int:
    """What dropouts call for: everybody up to 32 clients, else the smallest even number ≥ 4·log₂(clients)."""
    _at_least_two(clients)
    if clients <= COMPLETE_UP_TO:
        return clients - 1
    return 2 * math.ceil(2 * math.log2(clients))


def threshold(holders: int, *, wanted: int | None = None) -> int:
    """How many of a secret's holders must answer: `wanted`, or ⌊2n/3⌋ + 1 of n."""
    needed = 2 * holders // 3 + 1 if wanted is None else wanted
    if not 1 <= needed <= holders:
        raise ConfigError(
            f"A threshold of {needed} does not fit {holders} holders of a share: "
            f"it must lie between 1 and {holders}. Lower the threshold or let more clients take part."
        )
    return needed


def complete(members: Sequence[int]) -> Graph:
    """Everybody joined to everybody."""
    ordered = _checked(members)
    first, second = np.triu_indices(len(ordered), k=1)
    return _frozen(ordered, first.astype(np.int64, copy=False), second.astype(np.int64, copy=False))


def ring(members: Sequence[int], *, degree: int, seed: bytes) -> Graph:
    """A Harary graph on a shuffled ring: each member joined to the degree/2 nearest on both sides.

    The shuffle sorts by 128-bit numbers expanded from the seed (Bell et al. 2020 use this graph).
    """
    ordered = _checked(members)
    count = len(ordered)
    if degree >= count - 1:
        return complete(ordered)
    if degree < 2 or degree % 2:
        raise ConfigError(f"A ring needs an even number of neighbours, at least 2, not {degree}.")
    return _around(ordered, range(1, degree // 2 + 1), seed)


def circulant(members: Sequence[int], circle: Circle, *, seed: bytes) -> Graph:
    """Each member joined to those a circle's steps away, on a shuffled ring."""
    return _around(_checked(members), circle.steps, seed)


def _around(ordered: tuple[int, ...], steps: Sequence[int], seed: bytes) -> Graph:
    count = len(ordered)
    keys = _words(seed, "ring", 0, 2 * count)
    order = np.lexsort((keys[:count], keys[count:]))
    near = np.concatenate([np.roll(order, -step) for step in steps])
    return _joined(ordered, np.tile(order, len(steps)), near)


def split(members: Sequence[int], *, groups: int, seed: bytes) -> tuple[tuple[int, ...], ...]:
    """The members in so many groups of equal size, or one more, by a shuffle that the seed gives."""
    ordered = _checked(members)
    count = len(ordered)
    keys = _words(seed, "groups", 0, 2 * count)
    order = np.lexsort((keys[:count], keys[count:]))
    return tuple(tuple(ordered[place] for place in sorted(order[first::groups].tolist())) for first in range(groups))


def n_out(members: Sequence[int], *, neighbours: int, seed: bytes) -> Graph:
    """Each member picks `neighbours` others at random; an edge exists if either picked the other.

    Picks are uniform among all sets of that size, to k²/2⁶⁴ (a 64-bit number modulo the choices left).
    """
    ordered = _checked(members)
    count = len(ordered)
    if not 1 <= neighbours < count:
        raise ConfigError(
            f"Each of {count} clients can pick between 1 and {count - 1} neighbours, not {neighbours}. "
            "Lower the number of neighbours or let more clients take part."
        )
    pickers, picked = [], []
    for start in range(0, count, _PICKING_ROWS):
        rows = min(_PICKING_ROWS, count - start)
        words = _words(seed, "n-out", start, rows * neighbours).reshape(neighbours, rows)
        own = np.arange(start, start + rows)
        picks = _distinct(words, choices=count - 1)
        pickers.append(np.tile(own, neighbours))
        picked.append((picks + (picks >= own)).reshape(-1))  # the choices of a row leave its own place out
    return _joined(ordered, np.concatenate(pickers), np.concatenate(picked))


def covering_graph(members: Sequence[int], *, neighbours: int, seed: bytes, because: str = "") -> Graph:
    """An n-out graph on which noise covers everybody; one that falls apart is refused, `because` of what it does.

    A cohort may shrink below the number of neighbours asked for; then everybody is one.
    """
    graph = n_out(members, neighbours=min(neighbours, len(members) - 1), seed=seed)
    if not graph.connected():
        raise ConfigError(
            f"The graph of {len(members)} clients with {neighbours} neighbours each is not connected{because}. Raise "
            "neighbours."
        )
    return graph


def _distinct(words: NDArray[np.uint64], *, choices: int) -> Positions:
    """Per column of `words`, as many distinct numbers below `choices` as it has rows (Floyd's sampling)."""
    wanted, columns = words.shape
    taken = np.zeros((columns, choices), dtype=bool)
    every = np.arange(columns)
    picks = np.empty((wanted, columns), dtype=np.int64)
    for step, last in enumerate(range(choices - wanted, choices)):
        drawn = (words[step] % np.uint64(last + 1)).astype(np.int64)
        drawn[taken[every, drawn]] = last
        taken[every, drawn] = True
        picks[step] = drawn
    return picks


def _words(seed: bytes, purpose: str, place: int, count: int) -> NDArray[np.uint64]:
    """SHAKE-256 of the seed, for one purpose and place, as 64-bit words."""
    head = struct.pack("<QQ", len(seed), place)
    return np.frombuffer(hashlib.shake_256(head + seed + purpose.encode()).digest(8 * count), dtype="<u8")


def _joined(ordered: tuple[int, ...], first: Positions, other: Positions) -> Graph:
    """The graph of edges given in any order and direction, possibly twice."""
    count = len(ordered)
    codes = np.sort(np.minimum(first, other) * count + np.maximum(first, other))
    codes = codes[np.append(True, codes[1:] != codes[:-1])]
    return _frozen(ordered, codes // count, codes % count)


def _frozen(ordered: tuple[int, ...], first: Positions, second: Positions) -> Graph:
    first.flags.writeable = second.flags.writeable = False
    return Graph(members=ordered, first=first, second=second)


def _checked(members: Sequence[int]) -> tuple[int, ...]:
    ordered = tuple(sorted(int(member) for member in members))
    if len(set(ordered)) < len(ordered):
        raise ProtocolError("a client is listed twice among the members of one round")
    _at_least_two(len(ordered))
    return ordered


def _at_least_two(clients: int) -> None:
    if clients < 2:
        raise ConfigError(f"Hiding contributions from each other needs at least two clients, not {clients}.")


LEAST_BITS = 30
"""A run's chance of a surrounded client is to be at most 2 to the power of minus this."""

COLLUSION = 0.1
"""The share of clients that masks withstand by default."""

Needed = Callable[[int], int]
"""How many of n holders open a secret."""


class GraphFacts(TypedDict):
    """What a run's chance depends on beside its clients and their graph."""

    share: float
    needed: Needed
    draws: int


def colluding(clients: int, share: float) -> int:
    """How many of so many clients that share is."""
    return math.floor(share * clients + 1e-9)


@lru_cache(maxsize=1024)
def surrounded_bits(
    size: int, *, of: int, degree: int, share: float, needed: Needed, draws: int, asked: int | None = None
) -> float:
    """−log₂ of a bound on the chance that in one of `draws` graphs some honest client is surrounded.

    A graph is of `size` clients, drawn from the `of` that are there. The share that colludes is of all that might have
    been `asked` (of those there if None), and all of it is there. Infinite where it cannot happen. Exact for one client
    (a hypergeometric tail), then a union bound over clients and graphs; the tail is summed in whole numbers.
    """
    others, near, allied = of - 1, min(degree, size - 1), colluding(asked or of, share)
    from_here = max(2 * needed(near) - near, 0)
    if from_here > min(allied, near):
        return math.inf
    if allied > others - 1:  # at most one honest client is left, and everybody around it colludes
        return -math.inf
    least = max(from_here, near - (others - allied))
    ways = sum(math.comb(allied, c) * math.comb(others - allied, near - c) for c in range(least, min(allied, near) + 1))
    if not ways:
        return math.inf
    return math.log2(math.comb(others, near)) - math.log2(ways) - math.log2((of - allied) * size / of * draws)


@lru_cache(maxsize=256)
def masking_degree(
    size: int,
    *,
    of: int,
    share: float,
    needed: Needed,
    draws: int,
    asked: int | None = None,
    given: int | None = None,
) -> int:
    """The smallest even degree, from what dropouts call for upwards, that keeps the chance at 2⁻³⁰ a run.

    With a degree `given` it is that one, and more only where some of the `asked` clients are away: then the chance is
    not to be larger for it. Where no degree does, everybody is a neighbour of everybody.
    """
    facts: GraphFacts = {"share": share, "needed": needed, "draws": draws}
    wanted = float(LEAST_BITS)
    if given is not None:
        if asked is None or asked == of or given >= size - 1:
            return min(given, size - 1)
        wanted = min(wanted, surrounded_bits(max(size, size * asked // of), of=asked, degree=given, **facts))
    least = default_degree(size) if given is None else given
    for degree in range(least, size - 1, 2):
        if surrounded_bits(size, of=of, degree=degree, asked=asked, **facts) >= wanted:
            return degree
    return size - 1


def withstood(clients: int, *, share: float, needed: Needed, asked: int | None = None) -> bool:
    """Whether colluding clients surround nobody where everybody is a neighbour of everybody."""
    facts: GraphFacts = {"share": share, "needed": needed, "draws": 1}
    return surrounded_bits(clients, of=clients, degree=clients - 1, asked=asked, **facts) == math.inf
