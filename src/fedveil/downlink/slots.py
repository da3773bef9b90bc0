"""Classes, slots and limits: which secret changes of basis every edge of a network allows.

Every channel of every edge belongs to a class, which has one secret number. Class 0 is pinned to the number 1. A class
is free, or the product of two others (a gate multiplies two edges), or has been united with another. Where scales are
all there is, that is all.

Else clients work with x' = A·x. Beside its class (which secret number) a channel has a *slot* (which secret place), and
an operation does not say "I pin" but which limits it sets on A. Limits only add up. Two classes may share a slot: a
gate, a normalisation's two sides, a depthwise convolution keep the order of channels and not their numbers. Classes
that are one share their slot as well.

Slots may change places where nothing tells them apart: those that were in the same tensors, equally often, and whose
places there were rearranged alike (`moved`): the first place of a slot takes the content of the first place of another,
and so on. A rule that reads channels by number therefore only has to say which channels it reads together
(`distinguish`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from itertools import product as combinations

import numpy as np
import torch
from torch import Tensor

from fedveil.downlink.symmetry import ISOMETRY, LIMITS, PINNED, SPARSE, UNIT, Blocks, Classes, Symmetry, occurrences

MIXED_WIDTH = 2
"""Heads of fewer channels have nothing to mix."""


def broadcast(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both arrays expanded to their common shape."""
    shape = np.broadcast_shapes(left.shape, right.shape)  # torch's own loads a second's worth of symbolic algebra
    return left.expand(shape), right.expand(shape)


def _representative(parent: list[int], number: int) -> int:
    """Union-find's root, the path to it halved."""
    while parent[number] != number:
        parent[number] = parent[parent[number]]
        number = parent[number]
    return number


def _each(ids: Tensor, of: Callable[[int], int]) -> Tensor:
    """A number for every id, asked once for each that differs; same shape."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    return torch.tensor([of(number) for number in unique.tolist()], dtype=torch.int64)[inverse].reshape(ids.shape)


def _paired(left: Tensor, right: Tensor) -> tuple[list[list[int]], Tensor]:
    """The different pairs of two arrays that broadcast, and for every element which one it is."""
    first, second = broadcast(left, right)
    pairs, inverse = torch.unique(
        torch.stack([first.reshape(-1), second.reshape(-1)], dim=1), dim=0, return_inverse=True
    )
    return pairs.tolist(), inverse.reshape(first.shape)


class ClassSet:
    """Union-find over class ids, with product classes."""

    def __init__(self) -> None:
        self._parent: list[int] = [PINNED]
        self._products: dict[int, tuple[int, int]] = {}
        self.lost = 0
        """How many classes have been pinned so far: a rule that raises it took freedom away."""

    def fresh(self, count: int) -> Tensor:
        """`count` new, free classes."""
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        return torch.arange(start, start + count)

    def all(self) -> Tensor:
        """Every id made so far."""
        return torch.arange(len(self._parent))

    def _root(self, scale: int) -> int:
        scale = _representative(self._parent, scale)
        if scale in self._products:
            left, right = (self._root(factor) for factor in self._products[scale])
            if PINNED in (left, right):
                del self._products[scale]
                self._parent[scale] = right if left == PINNED else left
                return self._parent[scale]
        return scale

    def find(self, ids: Tensor) -> Tensor:
        """The representative of every id, same shape."""
        return _each(ids, self._root)

    def unite(self, left: Tensor, right: Tensor) -> None:
        """Force equal scales element by element (arrays broadcast against each other)."""
        for scale, other in _paired(left, right)[0]:
            self._unite(scale, other)

    def _unite(self, scale: int, other: int) -> None:
        scale, other = self._root(scale), self._root(other)
        if scale == other:
            return
        # A product equals another class only if nothing about either is free: pin its factors.
        for root in (scale, other):
            if root in self._products:
                for factor in self._products.pop(root):
                    self._unite(factor, PINNED)
                self._parent[root] = PINNED
                self.lost += 1
        scale, other = self._root(scale), self._root(other)
        low, high = min(scale, other), max(scale, other)
        if low == PINNED != high:
            self.lost += 1
        self._parent[high] = low

    def pin(self, ids: Tensor) -> None:
        """Force the scale 1."""
        self.unite(ids, torch.tensor(PINNED))

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Classes whose scale is the product of the two operands' scales."""
        pairs, inverse = _paired(self.find(left), self.find(right))
        made = []
        for scale, other in pairs:
            if PINNED in (scale, other):
                made.append(max(scale, other))
            else:
                new = int(self.fresh(1)[0])
                self._products[new] = (scale, other)
                made.append(new)
        return torch.tensor(made, dtype=torch.int64)[inverse]

    def compile(self) -> tuple[Classes, Tensor]:
        """The compact classes, and for every id ever made its compact index."""
        roots = self.find(torch.arange(len(self._parent)))
        unique, compact = torch.unique(roots, return_inverse=True)
        index = {int(root): place for place, root in enumerate(unique)}
        products = tuple(
            (index[root], index[self._root(left)], index[self._root(right)])
            for root, (left, right) in sorted(self._products.items())
            if root in index
        )
        return Classes(count=len(unique), products=products), compact


@dataclass(frozen=True, eq=False)
class Heads:
    """The classes of one attention: queries (heads, width), keys and values (shared heads, width)."""

    query: Tensor
    key: Tensor
    value: Tensor
    ordered: bool
    """Whether something tells the heads apart by number."""
    marks: Tensor | None = None
    """Where scores are a tensor of their own: the class of every head's."""
    out: Tensor | None = None
    """What every query head gives, where several share a value head and may change places: N·x as the value's."""

    @property
    def each(self) -> int:
        """How many query heads share a key head."""
        return len(self.query) // len(self.key)

    @property
    def served(self) -> Tensor:
        """For every query head the key head that it reads."""
        return torch.arange(len(self.query)) // self.each


@dataclass(frozen=True, eq=False)
class _Matrix:
    """Channels that may see one secret matrix M: the first part M, the others M as well or, if `dual`, M⁻ᵀ."""

    parts: tuple[Tensor, ...]
    dual: bool
    turn: bool = False
    ones: bool = False
    stream: bool = False

    @property
    def kind(self) -> tuple[int, bool, bool, bool]:
        """What is drawn in one go."""
        return len(self.parts[0]), self.turn, self.ones, self.stream

    @property
    def key(self) -> tuple[object, ...]:
        """What it is, to compare."""
        return self.dual, self.kind, *(tuple(part.tolist()) for part in self.parts)


@dataclass(frozen=True, eq=False)
class _Stream:
    """Channels that are normalised together: rotations pass, those with A·1 = 1 if `ones`; else what `instead` says."""

    ids: Tensor
    ones: bool
    instead: int


class SlotSet(ClassSet):
    """Classes with limits, and the slots they stand in."""

    def __init__(self) -> None:
        super().__init__()
        self._slot: list[int] = [PINNED]
        self._limits: dict[int, int] = {}
        self._arrays: list[tuple[Tensor, Tensor]] = []
        self._moves: list[tuple[Tensor, Tensor, Tensor]] = []
        self._turned: list[tuple[Tensor, Tensor]] = []
        self._streams: list[_Stream] = []
        self._groups: list[Tensor] = []
        self._wholes: list[tuple[int, ...]] = []
        self._heads: list[Heads] = []
        self._scores: list[Heads] = []
        self.origin: list[str] = [""]
        """For every id the operation that made it."""
        self.where = ""

    # -- classes -----------------------------------------------------------------------------------

    def fresh(self, count: int) -> Tensor:
        """`count` new classes in slots of their own."""
        made = super().fresh(count)
        self._slot.extend(made.tolist())
        self.origin.extend([self.where] * count)
        return made

    def beside(self, ids: Tensor, limits: int = 0) -> Tensor:
        """New classes in the slots of others: one for each."""
        unique, inverse = torch.unique(self.find(ids), return_inverse=True)
        made = self.fresh(len(unique))
        self.tie(made, unique)
        self.limit(made, limits)
        return made[inverse].reshape(ids.shape)

    def limit(self, ids: Tensor, limits: int) -> None:
        """An operation demands these of the edge."""
        if limits:
            for scale in torch.unique(ids).tolist():
                self._limit(scale, limits)

    def _limit(self, scale: int, limits: int) -> None:
        root = self._root(scale)
        if root == PINNED:
            return
        if root not in self._products:
            self._limits[root] = self._limits.get(root, 0) | limits
            return
        left, right = (self._root(factor) for factor in self._products[root])
        # A square is positive whatever the sign.
        needed = (limits & ISOMETRY) | SPARSE if left == right else limits
        for factor in {left, right}:
            self._limit(factor, needed)

    def limits(self, scale: int) -> int:
        """What is demanded of one class so far."""
        return self._limits.get(self._root(scale), 0)

    def _unite(self, scale: int, other: int) -> None:
        for root in (self._root(scale), self._root(other)):
            if root in self._products and self._root(scale) != self._root(other):
                self._limit(root, UNIT)  # a product is told to be another class: it is 1, in its place
                del self._products[root]
                self._limits[root] = UNIT
        scale, other = self._root(scale), self._root(other)
        if scale == other:
            return
        low, high = min(scale, other), max(scale, other)
        if low == PINNED:
            self.lost += 1
        self._parent[high] = low
        self._limits[low] = self._limits.get(low, 0) | self._limits.pop(high, 0)
        self._tie(low, high)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Classes whose number is the product of the operands', in one slot with both."""
        self.limit(left, SPARSE)
        self.limit(right, SPARSE)
        for ids in (left, right):
            if ids.numel() == 1:  # one channel for all: it goes nowhere
                self.fix(ids)
        first, second = broadcast(self.find(left), self.find(right))
        factors = [broadcast(self._counted(ids), first)[0] for ids in (left, right)]
        # Where neither is a factor, the result is 1 as well, in its place and not pinned to it.
        alone = torch.where((factors[0] == PINNED) & (factors[1] == PINNED), torch.maximum(first, second), factors[0])
        made = super().product(alone, factors[1])
        for ids, given in ((first, left), (second, right)):
            if given.numel() > 1:
                self.tie(made, ids)
        return made

    def _counted(self, ids: Tensor) -> Tensor:
        """The ids without those whose number is 1 whatever happens: they are no factor."""
        roots = self.find(ids)
        ones = [one for one in torch.unique(roots).tolist() if self._limits.get(one, 0) == UNIT]
        return torch.where(torch.isin(roots, torch.tensor(ones, dtype=torch.int64)), PINNED, roots)

    # -- slots -------------------------------------------------------------------------------------

    def slot(self, number: int) -> int:
        """The representative of an id's slot."""
        return _representative(self._slot, number)

    def slots(self, ids: Tensor) -> Tensor:
        """The representatives of all ids' slots, same shape."""
        return _each(ids, self.slot)

    def tie(self, left: Tensor, right: Tensor) -> None:
        """Force equal slots element by element."""
        for number, other in _paired(left, right)[0]:
            self._tie(number, other)

    def _tie(self, number: int, other: int) -> None:
        low, high = sorted((self.slot(number), self.slot(other)))
        self._slot[high] = low

    def fix(self, ids: Tensor) -> None:
        """These channels stay in their place."""
        self.tie(ids, torch.tensor(PINNED))

    def seen(self, ids: Tensor) -> None:
        """A tensor with these ids exists: what is in it differs from what is not."""
        unique, counts = torch.unique(ids, return_counts=True)
        if len(unique) > 1 or int(unique[0]) != PINNED:
            self._arrays.append((unique, counts))

    def moved(self, before: Tensor, after: Tensor, source: Tensor) -> None:
        """A tensor was rearranged: the ids of its places before and after, and where each came from."""
        self._moves.append((before, after, source))

    def distinguish(self, ids: Tensor, dims: Iterable[int]) -> None:
        """Something differs along `dims`: channels do not move along them."""
        varying = [dim for dim in dims if ids.shape[dim] > 1]
        for place in combinations(*(range(ids.shape[dim]) for dim in varying)) if varying else ():
            part = ids
            for dim, index in zip(varying, place, strict=True):
                part = part.narrow(dim, index, 1)
            self.seen(part)

    def turned(self, first: Tensor, second: Tensor) -> None:
        """Pairs of channels are turned by what everybody knows: their secrets are turns and scales of the same pairs.

        The last dimension is that of pairs, which differ from each other.
        """
        for left, right in zip(first.unbind(-1), second.unbind(-1), strict=True):
            self.seen(torch.cat([left.reshape(-1), right.reshape(-1)]))
        self._turned.append((first.reshape(-1), second.reshape(-1)))

    def stream(self, ids: Tensor, *, ones: bool, instead: int) -> None:
        """All these channels are divided by their length (`ones`: without their mean), and nothing more."""
        self.limit(ids, ISOMETRY)
        self._streams.append(_Stream(ids, ones, instead))

    def group(self, groups: Tensor) -> None:
        """The channels of a group (groups, size) are read together, and every group alike: groups move as wholes."""
        if len(groups) > 1:
            self._groups.append(groups)

    def attend(self, heads: Heads) -> Tensor:
        """Queries meet keys: any M on a key head and M⁻ᵀ on its queries, any N on a value head.

        Returns the ids (query heads, width) of what comes out.
        """
        heads = self._shared(heads)
        if heads.each == 1 or heads.ordered:
            self.tie(heads.query, heads.key[heads.served])
            self._heads.append(heads)
            return heads.value[heads.served]
        width = heads.value.shape[1]
        out = self.fresh(len(heads.query) * width).reshape(-1, width)
        self._heads.append(replace(heads, out=out))
        return out

    def _shared(self, heads: Heads) -> Heads:
        """The same where keys and values were repeated for their queries: as the one head that they are."""
        key, value = self.find(heads.key), self.find(heads.value)
        same = (key[1:] == key[:-1]).all(1) & (value[1:] == value[:-1]).all(1)
        count = 1 + int((~same).sum())
        each = len(key) // count
        if heads.ordered or each == 1 or not torch.equal(key[::each].repeat_interleave(each, 0), key):
            return heads
        return replace(heads, key=heads.key[::each], value=heads.value[::each])

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        """Queries times keys as a tensor of scores: a class for every head, until values are weighed by it."""
        marks = self.fresh(len(query))
        self.limit(marks, UNIT)
        self._scores.append(Heads(query, key, key, ordered=False, marks=marks))
        return marks

    def weigh(self, marks: Tensor, value: Tensor) -> Tensor | None:
        """Values weighed by what became of scores, the ids of the result; None where these are not anybody's scores."""
        for scored in self._scores:
            assert scored.marks is not None
            if torch.equal(self.find(scored.marks), self.find(marks)) and bool(self.find(marks).all()):
                self._scores.remove(scored)
                return self.attend(Heads(scored.query, scored.key, value, ordered=False, marks=scored.marks))
        return None

    # -- what it comes to ----------------------------------------------------------------------------

    def symmetry(self, family: str) -> Symmetry:
        """The groups that are left, in compact numbers as `compile` gives them; nothing may be added afterwards."""
        every = self.all()
        for scored in self._scores:  # nobody knows what became of them
            for ids in (scored.query, scored.key, scored.marks):
                assert ids is not None
                self.pin(ids)
        added = LIMITS[family]
        self.limit(every, added)
        self._settle_groups()
        mixed = self._mixed()
        colours = self._colours()
        classes, compact = self.compile()
        roots = self.find(every)
        limits = torch.zeros(classes.count, dtype=torch.int64)
        limits[compact] = torch.tensor([self._limits.get(int(root), 0) for root in roots], dtype=torch.int64)
        slots, place = torch.unique(self.slots(every), return_inverse=True)
        number = {int(slot): position for position, slot in enumerate(slots)}
        slot_of = torch.zeros(classes.count, dtype=torch.int64)
        slot_of[compact] = place
        orders = self._orders(colours, {self.slot(int(one)) for block in mixed for one in block.members.reshape(-1)})
        frames = [torch.tensor([[number[slot] for slot in frame] for frame in order]) for order in orders]
        blocks = []
        for block in mixed:
            members = compact[block.members]
            isometry = bool(int(limits[members].reshape(-1).max()) & ISOMETRY)
            blocks.append(replace(block, members=members, isometry=isometry))
            limits[members] = UNIT
        origin = [""] * classes.count
        for one, name in zip(compact.tolist(), self.origin, strict=True):
            origin[one] = origin[one] or name
        return Symmetry(family, limits, slot_of, len(slots), tuple(frames), tuple(blocks), tuple(origin))

    def _colours(self) -> dict[int, int]:
        """What tells slots apart: the tensors in which they are, how often, and how their places there move."""
        colours: dict[int, int] = {}
        for number, (ids, counts) in enumerate(self._arrays):
            total: dict[int, int] = {}
            for slot, count in zip(self.slots(ids).tolist(), counts.tolist(), strict=True):
                total[slot] = total.get(slot, 0) + count
            for slot, count in total.items():
                colours[slot] = hash((colours.get(slot, 0), number, count))
        for number, (before, after, source) in enumerate(self._moves):
            place = occurrences(self.slots(before))[0]
            _, ordered, positions = occurrences(self.slots(after))
            if not bool(place.any()):  # every slot is there once
                continue
            met, counts = torch.unique_consecutive(ordered, return_counts=True)
            patterns = torch.split(place[source[positions]], counts.tolist())
            for slot, pattern in zip(met.tolist(), patterns, strict=True):
                if slot in colours:
                    colours[slot] = hash((colours[slot], number, tuple(pattern.tolist())))
        return colours

    def _settle_groups(self) -> None:
        """Groups whose channels are heads', or another layer's in other groups, stay where they are."""
        owner: dict[int, object] = dict.fromkeys([PINNED], None)
        theirs = [ids for heads in self._heads for ids in (heads.query, heads.key, heads.value, heads.marks, heads.out)]
        for ids in (*theirs, *chain(*self._turned)):
            if ids is not None:
                owner.update(dict.fromkeys(self.slots(ids).reshape(-1).tolist()))
        kept: dict[tuple[int, ...], None] = {}
        for groups in self._groups:
            rows = [tuple(row) for row in self.slots(groups).tolist()]
            every = [slot for row in rows for slot in row]
            if len(set(every)) < len(every) or any(owner.get(slot, row) != row for row in rows for slot in row):
                self.distinguish(groups, [0])
            else:
                owner.update({slot: row for row in rows for slot in row})
                kept.update(dict.fromkeys(rows))
        self._wholes = list(kept)

    def _mixed(self) -> list[Blocks]:
        """The heads that may be mixed. Others keep a sign."""
        while True:
            colours, before, streams = self._colours(), list(self._parent), len(self._streams)
            partner = self._partners()
            planned = [self._matrices(heads, partner) for heads in self._heads]
            rotated = self._rotated()
            every = list({matrix.key: matrix for one in (*planned, rotated) for matrix in one}.values())
            owners: dict[int, int] = {}
            for matrix in every:
                for one in torch.cat(matrix.parts).tolist():
                    owners[one] = owners.get(one, 0) + 1
            free = {matrix.key for matrix in every if self._free(matrix.parts, owners, colours)}
            for place, (heads, matrices) in enumerate(zip(self._heads, planned, strict=True)):
                stuck = [matrix for matrix in matrices if matrix.key not in free]
                if stuck and heads.out is not None:  # then queries stay in their group's order
                    self.unite(heads.out, heads.value[heads.served])
                    self.tie(heads.query, heads.key[heads.served])
                    self._heads[place] = replace(heads, out=None)
                for key, *queries in (matrix.parts for matrix in stuck if matrix.dual):
                    for query in queries:
                        self.unite(query, key)
                    self.limit(key, SPARSE | ISOMETRY)
            mixing = [part for matrix in every if matrix.turn and matrix.key in free for part in matrix.parts]
            turning = torch.cat([torch.empty(0, dtype=torch.int64), *mixing])
            for first, second in self._turned:
                alone = ~torch.isin(self.find(first), turning)
                self.unite(first[alone], second[alone])
                self.limit(first[alone], SPARSE)
            kept = [one for one, matrix in zip(self._streams, rotated, strict=True) if matrix.key in free]
            for one in self._streams:
                if one not in kept:
                    self.limit(one.ids, one.instead)
            self._streams = kept
            if before == self._parent and streams == len(kept):
                return self._stacked([matrix for matrix in every if matrix.key in free])

    def _rotated(self) -> list[_Matrix]:
        """What would be drawn for every stream: one matrix where several layers normalise the same channels."""
        sets = [frozenset(self.find(one.ids).tolist()) for one in self._streams]
        first = {
            channels: self.find(one.ids) for channels, one in reversed(list(zip(sets, self._streams, strict=True)))
        }
        ones = {channels for channels, one in zip(sets, self._streams, strict=True) if one.ones}
        return [_Matrix((first[channels],), dual=False, ones=channels in ones, stream=True) for channels in sets]

    def _partners(self) -> dict[int, tuple[int, bool]]:
        """For every class of a turned pair the other one, and whether it is the first; (0, …) for one of two pairs."""
        partner: dict[int, tuple[int, bool]] = {}
        for first, second in self._turned:
            for left, right in zip(self.find(first).tolist(), self.find(second).tolist(), strict=True):
                for one, told in ((left, (right, True)), (right, (left, False))):
                    partner[one] = told if partner.get(one, told) == told else (PINNED, True)
        return partner

    def _matrices(self, heads: Heads, partner: dict[int, tuple[int, bool]]) -> list[_Matrix]:
        """What would be drawn for one attention, if nothing else limits it."""
        query, key, value = (self.find(ids) for ids in (heads.query, heads.key, heads.value))
        made: list[_Matrix] = []
        for number in range(len(key)):
            mine = heads.served == number
            made += _split((key[number], *torch.unique(query[mine], dim=0)), partner, dual=True)
            shared = () if heads.out is None else tuple(self.find(heads.out[mine]))
            made += _split((value[number], *shared), partner, dual=False)
        return made

    def _free(self, pair: Sequence[Tensor], owners: dict[int, int], colours: dict[int, int]) -> bool:
        every = torch.cat(list(pair)).tolist()
        if len(pair[0]) < MIXED_WIDTH or PINNED in every or len(set(every)) < len(every):
            return False
        if any(one in self._products or owners[one] > 1 or self._limits.get(one, 0) & SPARSE for one in every):
            return False
        slots = [[self.slot(int(one)) for one in part] for part in pair]
        return all(
            PINNED not in part and len(set(part)) == len(part) and len({colours.get(one) for one in part}) == 1
            for part in slots
        )

    @staticmethod
    def _stacked(matrices: Sequence[_Matrix]) -> list[Blocks]:
        stacks = []
        for kind in sorted({matrix.kind for matrix in matrices}):
            chosen = [matrix for matrix in matrices if matrix.kind == kind]
            members = torch.stack([part for one in chosen for part in one.parts])
            number = torch.tensor([number for number, one in enumerate(chosen) for _ in one.parts])
            dual = torch.tensor([one.dual and place > 0 for one in chosen for place in range(len(one.parts))])
            stacks.append(Blocks(members, number, dual, isometry=False, turn=kind[1], ones=kind[2], stream=kind[3]))
        return stacks

    def _orders(self, colours: dict[int, int], mixed: set[int]) -> list[list[tuple[int, ...]]]:
        """Lists of frames (slots that move together) which may change places; those inside others come first."""
        frames: dict[tuple[int, ...], tuple[int, ...]] = {}  # a frame and what tells it apart
        inside: dict[int, tuple[int, int]] = {}
        owner: dict[int, tuple[int, ...]] = {}
        still: set[int] = {PINNED}
        groups: list[list[tuple[int, ...]]] = []  # the queries of one key

        def enter(parts: Sequence[Sequence[int]], told: tuple[int, ...]) -> bool:
            frame = tuple(chain(*parts))
            if frame in frames:
                return False
            frames[frame] = (len(parts[0]), *told, *(colours.get(slot, 0) for slot in frame))
            for part, slots in enumerate(parts):
                for slot in slots:
                    # Heads that share channels without being the same are left where they are.
                    if owner.setdefault(slot, frame) != frame:
                        still.update(frame, owner[slot])
                    inside[slot] = (len(frames), part)
            return True

        for number, heads in enumerate(self._heads):
            key, value = self.slots(heads.key).tolist(), self.slots(heads.value).tolist()
            marks = [[]] * len(heads.query) if heads.marks is None else self.slots(heads.marks)[:, None].tolist()
            nested: list[list[int]] = [[]] * len(heads.query)
            if heads.out is not None:
                both = zip(self.slots(heads.query).tolist(), self.slots(heads.out).tolist(), strict=True)
                nested = [query + out for query, out in both]
            for head in range(len(key)):
                mine = range(head * heads.each, (head + 1) * heads.each)
                told = (number, head) if heads.ordered else ()
                queries = [tuple(marks[query] + nested[query]) for query in mine]
                if enter((key[head], value[head], *queries), told) and heads.out is not None:
                    groups.append(queries)
        for whole in self._wholes:
            enter((whole,), ())
        singles: dict[tuple[int, object], list[tuple[int, ...]]] = {}
        for slot, mark in colours.items():
            if slot not in still and slot not in mixed:
                singles.setdefault((mark, inside.get(slot)), []).append((slot,))
        moving: dict[object, list[tuple[int, ...]]] = {}
        for place, queries in enumerate(groups):
            for query in queries:
                if not still & set(query):
                    moving.setdefault((place, *(colours.get(slot, 0) for slot in query)), []).append(query)
        for frame, colour in frames.items():
            if not still & set(frame):
                moving.setdefault((None, *colour), []).append(frame)
        return [order for order in (*singles.values(), *moving.values()) if len(order) > 1]


def _split(parts: tuple[Tensor, ...], partner: dict[int, tuple[int, bool]], *, dual: bool) -> list[_Matrix]:
    """A head's channels: those that only turn in pairs, and the others; one matrix where pairs are not to be told."""
    pairs: list[tuple[int, int]] = []
    for part in parts:
        place = {one: number for number, one in enumerate(part.tolist())}
        met = {one: partner[one] for one in place if one in partner}
        if any(other not in place for other, _ in met.values()):
            return [_Matrix(parts, dual)]
        own = sorted((place[one], place[other]) for one, (other, first) in met.items() if first)
        if pairs and own and own != pairs:
            return [_Matrix(parts, dual)]
        pairs = pairs or own
    rest = [number for number in range(len(parts[0])) if not any(number in pair for pair in pairs)]
    made = [_Matrix(tuple(part[list(pair)] for part in parts), dual, turn=True) for pair in pairs]
    return [*made, *([_Matrix(tuple(part[rest] for part in parts), dual)] if rest else [])]
