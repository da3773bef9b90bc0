"""The symmetries of a traced network: what is drawn every round, and how parameters and gradients follow.

Every hidden edge carries a secret A: an order P, numbers s (signs and scales) and, for attention heads, matrices
M: x' = M·(s ∘ P·x). A parameter changes by A where it produces an edge and by A⁻ᵀ where it reads one, and gradients
come back by the transposed maps: T is linear, L'(T(θ)) = L(θ), so ∇_θ L = T*(∇_θ' L'). Index arrays, factors and a few
small matrices are all there is; A is never written out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedveil.secrets import Guarded, SecretStream

if TYPE_CHECKING:
    from fedveil.downlink.scales import Scaled

PINNED = 0
SPARSE, POSITIVE, ISOMETRY = 1, 3, 4
"""One number per row and column; besides, none of them negative; A⁻¹ = Aᵀ."""
UNIT = POSITIVE | ISOMETRY
"""Nothing but an order."""
LIMITS = {"full": 0, "isometry": ISOMETRY, "signed": SPARSE | ISOMETRY}
FAMILIES = ("scale", "signed", "isometry", "full")
STEP_BY_STEP = {"sgd": ("isometry", "signed"), "adam": ("signed",)}
"""By the clients' optimiser: under which families they may take many steps, the one that hides most first.

T·T* = 1: θ' − η∇L'(θ') = T(θ − η∇L(θ)), also with momentum and weight decay. Adam steps every number by itself, and by
−x where its gradients are negated: that commutes with T where T moves numbers and changes signs, and not where it mixes
or scales them."""
ROTATING = ("isometry", "full")
"""Families with matrices that mix channels."""
CONDITION = 4.0
"""Largest over smallest singular value of an invertible block."""


@dataclass(frozen=True)
class Classes:
    """How many classes there are, and which are products (class, factor, factor), in order."""

    count: int
    products: tuple[tuple[int, int, int], ...] = ()

    def scales(self, logs: Tensor) -> Tensor:
        """Positive scales from one logarithm per class; class 0 is 1, products multiply."""
        values = logs.clone()
        values[PINNED] = 0.0
        for made, left, right in self.products:
            values[made] = values[left] + values[right]
        return values.exp()


@dataclass(frozen=True, eq=False)
class Blocks:
    """Heads of one width: which classes (members, width), which matrix each sees, and whether its dual M⁻ᵀ."""

    members: Tensor
    matrix: Tensor
    dual: Tensor
    isometry: bool
    turn: bool = False
    """Pairs that rotary positions turn: M turns and scales a pair, which commutes with every place's turn."""
    ones: bool = False
    """M·1 = 1: what a normalisation that takes the mean away commutes with."""
    stream: bool = False
    """The channels of residual streams, not of heads."""

    @property
    def count(self) -> int:
        """How many matrices are drawn."""
        return int(self.matrix.max()) + 1

    @property
    def reals(self) -> int:
        """How many secret numbers they have."""
        width = self.members.shape[1]
        if self.turn:
            return self.count * (1 if self.isometry else 2)
        width -= self.ones
        return self.count * (width * (width - 1) // 2 if self.isometry else width**2)

    @property
    def told(self) -> str:
        """What they are, in words."""
        width = self.members.shape[1]
        if self.stream:
            return f"{some(self.count, 'rotated stream')} of {width} channels{', their mean kept' * self.ones}"
        if self.turn:
            return f"{some(self.count, 'pair')} of rotary channels, turned{' and scaled' * (not self.isometry)}"
        kind = "rotation" if self.isometry else "invertible matrix"
        return f"{some(self.count, kind)} on {width} channels of a head"

    def drawn(self, stream: SecretStream) -> tuple[Tensor, Tensor]:
        """M and M⁻ᵀ of every matrix, M = U·diag(s)·V with log s uniform and the largest s at most CONDITION times the
        smallest."""
        width = self.members.shape[1]
        if self.turn:
            angle = 2.0 * math.pi * stream.uniform(self.count)
            cosine, sine = angle.cos(), angle.sin()
            turns = torch.stack([cosine, -sine, sine, cosine], 1).reshape(self.count, 2, 2)
            if self.isometry:
                return turns, turns
            scale = ((2.0 * stream.uniform(self.count) - 1.0) * math.log(CONDITION) / 2).exp()[:, None, None]
            return turns * scale, turns / scale
        if self.ones:
            forth = rotations_of_differences(self.count, width, stream)
            return forth, forth
        forth = rotations(self.count, width, stream)
        if self.isometry:
            return forth, forth
        singular = ((2.0 * stream.uniform(self.count * width) - 1.0) * math.log(CONDITION) / 2).exp()
        singular = singular.reshape(self.count, 1, width)
        other = rotations(self.count, width, stream)
        return (forth * singular) @ other, (forth / singular) @ other


@dataclass(frozen=True, eq=False)
class Symmetry:
    """The groups of one network under one family: limits and slot of every class, orders of frames, blocks."""

    family: str
    limits: Tensor
    slot: Tensor
    slots: int
    orders: tuple[Tensor, ...]
    """(frames, size) slots that change places as wholes; drawn one after the other, the later ones on top."""
    blocks: tuple[Blocks, ...]
    origin: tuple[str, ...] = ()
    """For every class the operation that made it."""

    @cached_property
    def moving(self) -> Tensor:
        """Which slots may be elsewhere."""
        moving = torch.zeros(self.slots, dtype=torch.bool)
        for order in self.orders:
            moving[order.reshape(-1)] = True
        return moving

    @cached_property
    def mixed(self) -> Tensor:
        """Which classes are mixed with others."""
        mixed = torch.zeros(len(self.limits), dtype=torch.bool)
        for blocks in self.blocks:
            mixed[blocks.members.reshape(-1)] = True
        return mixed

    @cached_property
    def signs(self) -> Tensor:
        """Which classes have a secret sign."""
        return (self.limits & POSITIVE != POSITIVE).index_fill(0, torch.tensor([0]), False)

    @cached_property
    def scales(self) -> Tensor:
        """Which classes have a secret scale."""
        return (self.limits & ISOMETRY == 0).index_fill(0, torch.tensor([0]), False)

    def _drawn(self, classes: Classes) -> Tensor:
        """Which classes have numbers of their own; a product's follow."""
        drawn = torch.ones(len(self.limits), dtype=torch.bool)
        drawn[[made for made, _, _ in classes.products]] = False
        return drawn

    def groups(self, classes: Classes) -> tuple[str, ...]:
        """What is drawn every round, in words."""
        told, drawn = [], self._drawn(classes)
        for wide, what in ((False, "channels"), (True, "whole heads or groups")):
            sizes = [len(order) for order in self.orders if (order.shape[1] > 1) is wide]
            if sizes:
                span = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
                told.append(f"{some(len(sizes), 'order')} of {span} {what}")
        for mark, what in ((self.signs, "sign"), (self.scales, "scale")):
            if bool((mark & drawn).any()):
                told.append(some(int((mark & drawn).sum()), what))
        return (*told, *(blocks.told for blocks in self.blocks))

    def freedom(self, classes: Classes) -> tuple[float, int]:
        """What is secret in a round: bits (orders and signs) and real numbers (scales, entries of blocks)."""
        drawn = self._drawn(classes)
        bits = sum(math.lgamma(len(order) + 1) / math.log(2) for order in self.orders)
        bits += int((self.signs & drawn).sum())
        reals = int((self.scales & drawn).sum()) + sum(blocks.reals for blocks in self.blocks)
        return bits, reals

    def without(self, classes: Tensor) -> Symmetry:
        """The same with these classes public: number 1, slots that stay, heads that are not mixed."""
        limits, held = self.limits.clone(), torch.zeros(self.slots, dtype=torch.bool)
        limits[classes] = UNIT
        held[self.slot[classes]] = True
        orders = tuple(kept for order in self.orders if len(kept := order[~held[order].any(1)]) > 1)
        blocks = []
        for block in self.blocks:
            hit = torch.isin(block.members, classes).any(1)
            lost = torch.isin(block.matrix, block.matrix[hit])
            if bool((~lost).any()):
                _, matrix = torch.unique(block.matrix[~lost], return_inverse=True)
                blocks.append(replace(block, members=block.members[~lost], matrix=matrix, dual=block.dual[~lost]))
        return replace(self, limits=limits, orders=orders, blocks=tuple(blocks))

    def only(self, classes: Tensor) -> Symmetry:
        """The same with everything public but these classes."""
        return self.without(torch.nonzero(~torch.isin(torch.arange(len(self.limits)), classes)).reshape(-1))

    def components(self) -> list[Tensor]:
        """The classes in parts that are drawn apart from each other: by shared slots, orders and blocks."""
        part = torch.arange(len(self.limits))

        def join(classes: Tensor) -> None:
            part[torch.isin(part, part[classes])] = int(part[classes].min())

        members = [torch.nonzero(self.slot == slot).reshape(-1) for slot in range(1, self.slots)]
        for classes in members:
            join(classes)
        for order in self.orders:
            join(torch.cat([members[slot - 1] for slot in order.reshape(-1).tolist()]))
        for blocks in self.blocks:
            for matrix in range(blocks.count):
                join(blocks.members[blocks.matrix == matrix].reshape(-1))
        return [torch.nonzero(part == first).reshape(-1) for first in torch.unique(part).tolist() if first]


def some(count: int, noun: str) -> str:
    """1 matrix, 2 matrices, 3 orders."""
    plural = noun[:-1] + "ces" if noun.endswith("x") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def permutation(count: int, stream: SecretStream) -> Tensor:
    """A uniform order: Fisher–Yates, every draw by rejection."""
    order = list(range(count))
    words: Iterator[int] = iter(())
    for last in range(count - 1, 0, -1):
        reach = (1 << 64) - (1 << 64) % (last + 1)
        while True:
            word = next(words, None)
            if word is None:
                words = iter(np.frombuffer(stream.bytes(8 * (last + 8)), ">u8").tolist())
                continue
            if word < reach:
                break
        other = word % (last + 1)
        order[last], order[other] = order[other], order[last]
    return torch.tensor(order, dtype=torch.int64)


def rotations(count: int, size: int, stream: SecretStream) -> Tensor:
    """`count` uniform orthogonal matrices: QR of a Gaussian matrix, with the signs of R's diagonal."""
    uniform = stream.uniform(2 * count * size * size).reshape(2, -1)
    gaussian = torch.sqrt(-2.0 * torch.log1p(-uniform[0])) * torch.cos(2.0 * math.pi * uniform[1])
    q, r = torch.linalg.qr(gaussian.reshape(count, size, size))
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]  # type: ignore[no-any-return]


def rotations_of_differences(count: int, size: int, stream: SecretStream) -> Tensor:
    """`count` uniform orthogonal matrices with A·1 = 1: a reflection takes 1/√n to an axis, the others are rotated."""
    axis = torch.full((size,), size**-0.5, dtype=torch.float64)
    axis[0] -= 1.0
    mirror = torch.eye(size, dtype=torch.float64) - 2.0 * torch.outer(axis, axis) / (axis @ axis)
    inner = torch.eye(size, dtype=torch.float64).repeat(count, 1, 1)
    inner[:, 1:, 1:] = rotations(count, size - 1, stream)
    return mirror @ inner @ mirror


class Basis(Guarded):
    """One round's secrets: numbers by class, the order, and the heads' matrices; fresh every round."""

    __slots__ = ("index", "matrices", "scales", "source")

    def __init__(self, scales: Tensor, source: Tensor, matrices: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.scales = scales
        self.source = source
        """For every slot the one whose content it gets."""
        self.matrices = tuple(matrices)
        """For every stack of blocks A and A⁻ᵀ of each member."""
        self.index: tuple[Tensor, list[Tensor]] | None = None
        """Where every number of all parameters comes from, once that was worked out (`Transport.index`)."""

    def to(self, device: torch.device) -> Basis:
        """The same secrets on another device."""
        moved = [(forth.to(device), dual.to(device)) for forth, dual in self.matrices]
        return Basis(self.scales.to(device), self.source.to(device), moved)


def unmoved(scales: Tensor) -> Basis:
    """Scales and nothing else."""
    return Basis(scales, torch.empty(0, dtype=torch.int64), ())


def draw_basis(symmetry: Symmetry, classes: Classes, *, spread: float, stream: SecretStream) -> Basis:
    """Fresh secrets: orders, signs, scales with log r uniform on ±log spread, and blocks."""
    count = len(symmetry.limits)
    uniform, signs = stream.uniform(count), stream.signs(count)
    orders = [permutation(len(order), stream) for order in symmetry.orders]
    return _basis(symmetry, classes, spread=spread, uniform=uniform, signs=signs, orders=orders, stream=stream)


def chosen_bases(symmetry: Symmetry, classes: Classes, *, spread: float, stream: SecretStream) -> list[Basis]:
    """Secrets for a check, none of them the identity.

    A swap of two and a cycle of all generate every order, and every sign is -1 once. The last two are drawn, so that
    orders and signs which only look right together are told from those which are.
    """
    count, sizes = len(symmetry.limits), [len(order) for order in symmetry.orders]
    swaps = [torch.tensor([1, 0, *range(2, size)]) for size in sizes]
    cycles = [torch.arange(size).roll(1) for size in sizes]
    chosen = [(-torch.ones(count, dtype=torch.float64), swaps), (stream.signs(count), cycles)]
    chosen += [(stream.signs(count), [permutation(size, stream) for size in sizes]) for _ in range(2)]
    return [
        _basis(
            symmetry, classes, spread=spread, uniform=stream.uniform(count), signs=signs, orders=orders, stream=stream
        )
        for signs, orders in chosen
    ]


def _basis(
    symmetry: Symmetry,
    classes: Classes,
    *,
    spread: float,
    uniform: Tensor,
    signs: Tensor,
    orders: Sequence[Tensor],
    stream: SecretStream,
) -> Basis:
    """The secrets of given numbers and orders, with blocks from the stream."""
    logs = torch.where(symmetry.scales, (2.0 * uniform - 1.0) * math.log(spread), 0.0)
    values = torch.where(symmetry.signs, signs, 1.0) * logs.exp()
    for made, left, right in classes.products:
        values[made] = values[left] * values[right]
    source = torch.arange(symmetry.slots)
    for order, chosen in zip(symmetry.orders, orders, strict=True):
        moved = torch.arange(symmetry.slots)
        moved[order.reshape(-1)] = order[chosen].reshape(-1)
        source = source[moved]
    matrices = []
    for blocks in symmetry.blocks:
        forth, back = blocks.drawn(stream)
        dual = blocks.dual[:, None, None]
        forth, back = forth[blocks.matrix], back[blocks.matrix]
        matrices.append((torch.where(dual, back, forth), torch.where(dual, forth, back)))
    return Basis(values, source, matrices)


@dataclass(frozen=True, eq=False)
class AxisPlan:
    """One side of a parameter, its positions flattened: slots and occurrences, where each lies, and whose head it is.

    `heads` has, for every stack of blocks, (which member, its positions).
    """

    shape: tuple[int, ...]
    slot: Tensor
    occurrence: Tensor
    sorted_slot: Tensor
    by_slot: Tensor
    offset: Tensor
    heads: tuple[tuple[Tensor, Tensor], ...]

    @property
    def dims(self) -> list[int]:
        """The dimensions along which it has more than one position."""
        return [dim for dim, size in enumerate(self.shape) if size > 1]


class Sources:
    """Many sides in a row: where the content of every position of each comes from, found for all of them at once.

    That is an offset in the side's parameter, or beyond the side's own number in `starts`.
    """

    def __init__(
        self, sides: Sequence[AxisPlan], symmetry: Symmetry, device: torch.device, starts: Sequence[int] = ()
    ) -> None:
        def row(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(device)

        beyond = starts or [0] * len(sides)
        self.sizes = [len(side.slot) for side in sides]
        self._slot = row([side.slot for side in sides])
        self._occurrence = row([side.occurrence for side in sides])
        # A side's slots are looked for among its own: every side has numbers of its own for them.
        self._shift = row([torch.full((size,), number * symmetry.slots) for number, size in enumerate(self.sizes)])
        self._sorted = row([side.sorted_slot for side in sides]) + self._shift
        self._place = row([side.offset[side.by_slot] + start for side, start in zip(sides, beyond, strict=True)])

    def of(self, basis: Basis) -> Tensor:
        """The offsets of all positions under a round's order."""
        first = torch.searchsorted(self._sorted, basis.source[self._slot] + self._shift)
        return self._place[first + self._occurrence]


def occurrences(slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For every position how many of its slot came before it; the slots in order; and their positions."""
    ordered, positions = torch.sort(slots, stable=True)
    counted = torch.arange(len(slots)) - torch.searchsorted(ordered, ordered)
    occurrence = torch.empty_like(counted)
    occurrence[positions] = counted
    return occurrence, ordered, positions


def _side(ids: Tensor, view: tuple[int, ...], symmetry: Symmetry, skip: set[int]) -> AxisPlan:
    """`skip`: dimensions that the other side accounts for."""
    shape, flat = tuple(ids.shape), ids.reshape(-1)
    slot = symmetry.slot[flat]
    strides = [math.prod(view[dim + 1 :]) for dim in range(len(view))]
    offset = torch.zeros(shape, dtype=torch.int64)
    for dim, size in enumerate(shape):
        if size > 1 and dim not in skip:
            offset = offset + (torch.arange(size) * strides[dim]).reshape(
                [-1 if d == dim else 1 for d in range(len(shape))]
            )
    heads = []
    for blocks in symmetry.blocks:
        width = blocks.members.shape[1]
        owner = torch.full((len(symmetry.limits),), -1)
        column = torch.zeros_like(owner)
        owner[blocks.members] = torch.arange(len(blocks.members))[:, None]
        column[blocks.members] = torch.arange(width)
        inside = torch.nonzero(owner[flat] >= 0).reshape(-1)
        occurrence = occurrences(flat[inside])[0]
        key = (owner[flat[inside]] * (int(occurrence.max()) + 1 if len(occurrence) else 1) + occurrence) * width
        inside = inside[torch.argsort(key + column[flat[inside]])].reshape(-1, width)
        heads.append((owner[flat[inside[:, 0]]], inside))
    return AxisPlan(shape, slot, *occurrences(slot), offset.reshape(-1), tuple(heads))


@dataclass(frozen=True, eq=False)
class Moved:
    """How one parameter follows: its view, its two sides, and the offsets along dimensions that neither has."""

    view: tuple[int, ...]
    out: AxisPlan | None
    into: AxisPlan | None
    rest: Tensor

    @property
    def sides(self) -> list[AxisPlan]:
        """Those that there are."""
        return [side for side in (self.out, self.into) if side is not None]


def moved(entry: Scaled, symmetry: Symmetry) -> Moved:
    """The plan for one parameter."""
    taken: set[int] = set()

    def side(ids: Tensor | None) -> AxisPlan | None:
        made = None if ids is None else _side(ids.cpu(), entry.view, symmetry, taken)
        taken.update(() if ids is None else (dim for dim, size in enumerate(ids.shape) if size > 1))
        return made

    out, into = side(entry.out), side(entry.into)
    rest = torch.zeros((1,) * len(entry.view), dtype=torch.int64)
    for dim, size in enumerate(entry.view):
        if dim not in taken:
            steps = torch.arange(size) * math.prod(entry.view[dim + 1 :])
            rest = rest + steps.reshape([-1 if d == dim else 1 for d in range(len(entry.view))])
    return Moved(entry.view, out, into, rest)


def turn(value: Tensor, side: AxisPlan, matrices: Sequence[tuple[Tensor, Tensor]], *, dual: bool, back: bool) -> None:
    """Multiply the heads on one side of a parameter, in place, by A (A⁻ᵀ if `dual`), transposed on the way `back`."""
    if not side.dims or not any(len(member) for member, _ in side.heads):
        return
    front = value.movedim(side.dims, list(range(len(side.dims))))
    rows = front.reshape(len(side.slot), -1)
    for (member, places), both in zip(side.heads, matrices, strict=True):
        if len(member):
            matrix, flat = both[1 if dual else 0][member], places.reshape(-1)
            heads = rows.index_select(0, flat).view(*places.shape, -1)
            rows.index_copy_(0, flat, ((matrix.transpose(1, 2) if back else matrix) @ heads).flatten(0, 1))
    if rows.data_ptr() != value.data_ptr():  # a copy, where the side is not the first
        front.copy_(rows.reshape(front.shape))


_KEPT = 1 << 22
"""An index is kept for the way back up to this many numbers; beyond them memory is dearer than finding it again."""
_TABLE = 1 << 14
"""From this many numbers on, rows that only move along themselves do so without an index for every number."""


@dataclass(frozen=True, eq=False)
class _Stack:
    """Heads of several parameters that one product changes: (heads, width, columns) places in the flat vector."""

    number: int
    dual: bool
    member: Tensor
    places: Tensor


class Transport:
    """The maps T and T* of all parameters in one flat vector, for one table.

    `still` are the parameters without signs and scales. Of these, tables of rows whose columns change places (words,
    positions) are most of a language model's numbers: they are moved row by row, and never copied to be changed.
    """

    def __init__(
        self, entries: Sequence[Scaled], symmetry: Symmetry, device: torch.device, *, still: Collection[int] = ()
    ) -> None:
        plans = [moved(entry, symmetry) for entry in entries]
        self._views = [plan.view for plan in plans]
        self._sizes = [math.prod(view) for view in self._views]
        starts = [0, *accumulate(self._sizes)]
        self._turned = [
            (number, _heads_on(side, device), dual)
            for number, plan in enumerate(plans)
            for side, dual in ((plan.out, False), (plan.into, True))
            if side is not None and any(len(member) for member, _ in side.heads)
        ]
        self._stacks = self._stacked(starts, device)
        kept = set(still) - {number for number, _, _ in self._turned}
        tables = [n for n in sorted(kept) if device.type == "cpu" and self._sizes[n] >= _TABLE and _of_rows(plans[n])]
        others = [number for number in range(len(plans)) if number not in tables]
        # A parameter's start is in the first of its sides, so that those of one dimension need no sum.
        begins = [starts[number] * (not place) for number in others for place in range(len(plans[number].sides))]
        sides = [side for number in (*others, *tables) for side in plans[number].sides]
        self._sources = Sources(sides, symmetry, device, begins + [0] * len(tables))
        self._parts = [
            (plan.view, [side.shape for side in plan.sides], (plan.rest + start * (not plan.sides)).to(device))
            for plan, start in ((plans[number], starts[number]) for number in others)
        ]
        self._tables = [(slice(starts[number], starts[number + 1]), self._views[number][-1]) for number in tables]
        ends = [starts[0], *(edge for number in tables for edge in starts[number : number + 2]), starts[-1]]
        self._runs = [slice(*run) for run in zip(ends[::2], ends[1::2], strict=True)]

    def _stacked(self, starts: Sequence[int], device: torch.device) -> list[_Stack]:
        """Heads that take one product: those of equally many columns, of whatever parameters."""
        if sum(self._sizes[number] for number, _, _ in self._turned) > _KEPT:
            return []
        alike: dict[tuple[int, bool, int], list[tuple[Tensor, Tensor]]] = {}
        for number, side, dual in self._turned:
            places = torch.arange(starts[number], starts[number + 1], device=device).view(self._views[number])
            rows = places.movedim(side.dims, list(range(len(side.dims)))).reshape(len(side.slot), -1)
            for stack, (member, inside) in enumerate(side.heads):
                if len(member):
                    alike.setdefault((stack, dual, rows.shape[1]), []).append((member, rows[inside]))
        return [
            _Stack(stack, dual, torch.cat([member for member, _ in parts]), torch.cat([place for _, place in parts]))
            for (stack, dual, _), parts in alike.items()
        ]

    def index(self, basis: Basis) -> tuple[Tensor, list[Tensor]]:
        """Where every number of the flat vector comes from that is in no table, and where the columns of tables do."""
        if basis.index is not None:
            return basis.index
        pieces = iter(torch.split(self._sources.of(basis), self._sources.sizes))
        parts = [torch.empty(0, dtype=torch.int64, device=basis.source.device)]
        for view, shapes, rest in self._parts:
            if shapes == [view]:
                parts.append(next(pieces))
                continue
            total = rest
            for shape in shapes:
                total = total + next(pieces).view(shape)
            parts.append(total.expand(view).reshape(-1))
        both = torch.cat(parts), list(pieces)
        if len(both[0]) <= _KEPT:
            basis.index = both
        return both

    def moved(self, flat: Tensor, basis: Basis) -> Tensor:
        """All numbers in their new places, in float64 and in a vector of their own."""
        index, columns = self.index(basis)
        picked = flat.index_select(0, index)
        if not self._tables:
            return picked.to(torch.float64)
        result = torch.empty_like(flat, dtype=torch.float64)
        for run, part in zip(self._runs, torch.split(picked, self._lengths), strict=True):
            result[run] = part
        for (table, width), order in zip(self._tables, columns, strict=True):
            result[table] = flat[table].view(-1, width).index_select(1, order).view(-1)
        return result

    def loosened(self, flat: Tensor) -> Tensor:
        """A vector of its own with those numbers that signs, scales and matrices change; tables are left out."""
        if not self._tables:
            return flat.clone()
        result = torch.empty_like(flat)
        for run in self._runs:
            result[run] = flat[run]
        return result

    def back(self, turned: Tensor, flat: Tensor, basis: Basis) -> Tensor:
        """All numbers where they came from: those of tables from `flat`, the others from `turned`."""
        index, columns = self.index(basis)
        if not self._tables:
            return torch.empty_like(turned).scatter_(0, index, turned)
        result = torch.empty_like(turned).scatter_(0, index, torch.cat([turned[run] for run in self._runs]))
        for (table, width), order in zip(self._tables, columns, strict=True):
            given, place = (vector[table].view(-1, width) for vector in (flat, result))
            torch.gather(given, 1, torch.argsort(order).expand_as(given), out=place)
        return result

    @property
    def _lengths(self) -> list[int]:
        return [run.stop - run.start for run in self._runs]

    def turn(self, flat: Tensor, basis: Basis, *, back: bool) -> None:
        """Multiply all heads, in place."""
        for stack in self._stacks:
            matrix = basis.matrices[stack.number][1 if stack.dual else 0][stack.member]
            places = stack.places.view(-1)
            heads = flat.index_select(0, places).view(stack.places.shape)
            flat.scatter_(0, places, ((matrix.transpose(1, 2) if back else matrix) @ heads).view(-1))
        if self._stacks or not self._turned:
            return
        parts = torch.split(flat, self._sizes)
        for number, side, dual in self._turned:
            turn(parts[number].view(self._views[number]), side, basis.matrices, dual=dual, back=back)


def _of_rows(plan: Moved) -> bool:
    """Whether a parameter is rows that all move alike, each along itself."""
    return len(plan.sides) == 1 and len(plan.sides[0].slot) == plan.view[-1] == plan.sides[0].shape[-1]


def following(reads: Sequence[Tensor], symmetry: Symmetry, device: torch.device) -> Sources:
    """Where every number of rows of per-channel values comes from: statistics, ε; class 0 stays."""
    sides = [_side(read.cpu(), (len(read),), symmetry, set()) for read in reads]
    return Sources(sides, symmetry, device, [0, *accumulate(len(read) for read in reads)][: len(reads)])


def _heads_on(side: AxisPlan, device: torch.device) -> AxisPlan:
    return replace(side, heads=tuple((member.to(device), places.to(device)) for member, places in side.heads))
