"""The symmetries of a traced network: what is drawn every round, and how parameters and gradients follow.

Every hidden edge carries a secret A: an order P, numbers s (signs and scales) and, for attention heads, matrices
M: x' = M·(s ∘ P·x). A parameter changes by A where it produces an edge and by A⁻ᵀ where it reads one, and gradients
come back by the transposed maps: T is linear, L'(T(θ)) = L(θ), so ∇_θ L = T*(∇_θ' L'). Index arrays, factors and a few
small matrices are all there is; A is never written out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
STEP_BY_STEP = ("signed", "isometry")
"""T·T* = 1: θ' − η∇L'(θ') = T(θ − η∇L(θ)), also with momentum and weight decay, so that clients may take many steps."""
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

    @property
    def count(self) -> int:
        """How many matrices are drawn."""
        return int(self.matrix.max()) + 1


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

    def freedom(self, classes: Classes) -> tuple[float, int]:
        """What is secret in a round: bits (orders and signs) and real numbers (scales, entries of blocks)."""
        drawn = torch.ones(len(self.limits), dtype=torch.bool)
        drawn[[made for made, _, _ in classes.products]] = False
        bits = sum(math.lgamma(len(order) + 1) / math.log(2) for order in self.orders)
        bits += int((self.signs & drawn).sum())
        reals = int((self.scales & drawn).sum())
        for blocks in self.blocks:
            width = blocks.members.shape[1]
            reals += blocks.count * (width * (width - 1) // 2 if blocks.isometry else width**2)
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
                blocks.append(Blocks(block.members[~lost], matrix, block.dual[~lost], block.isometry))
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


class Basis(Guarded):
    """One round's secrets: numbers by class, the order, and the heads' matrices; fresh every round."""

    __slots__ = ("index", "matrices", "scales", "source")

    def __init__(self, scales: Tensor, source: Tensor, matrices: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.scales = scales
        self.source = source
        """For every slot the one whose content it gets."""
        self.matrices = tuple(matrices)
        """For every stack of blocks A and A⁻ᵀ of each member."""
        self.index: Tensor | None = None
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
        width = blocks.members.shape[1]
        forth = rotations(blocks.count, width, stream)
        back = forth
        if not blocks.isometry:
            singular = ((2.0 * stream.uniform(blocks.count * width) - 1.0) * math.log(CONDITION) / 2).exp()
            singular = singular.reshape(blocks.count, 1, width)
            other = rotations(blocks.count, width, stream)
            forth, back = (forth * singular) @ other, (forth / singular) @ other
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
    dims = [dim for dim, size in enumerate(side.shape) if size > 1]
    if not dims or not any(len(member) for member, _ in side.heads):
        return
    front = value.movedim(dims, list(range(len(dims))))
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


class Transport:
    """The maps T and T* of all parameters in one flat vector, for one table."""

    def __init__(self, entries: Sequence[Scaled], symmetry: Symmetry, device: torch.device) -> None:
        plans = [moved(entry, symmetry) for entry in entries]
        self._sizes = [math.prod(plan.view) for plan in plans]
        starts = [0, *accumulate(self._sizes)]
        self._sources = Sources([side for plan in plans for side in plan.sides], symmetry, device)
        self._parts = [
            (plan.view, [side.shape for side in plan.sides], (plan.rest + start).to(device))
            for plan, start in zip(plans, starts, strict=False)
        ]
        self._turned = [
            (number, _heads_on(side, device), dual)
            for number, plan in enumerate(plans)
            for side, dual in ((plan.out, False), (plan.into, True))
            if side is not None and any(len(member) for member, _ in side.heads)
        ]

    def index(self, basis: Basis) -> Tensor:
        """Where every number of the flat vector comes from."""
        if basis.index is not None:
            return basis.index
        index = torch.empty(sum(self._sizes), dtype=torch.int64, device=basis.source.device)
        pieces = iter(torch.split(self._sources.of(basis), self._sources.sizes))
        for (view, shapes, rest), part in zip(self._parts, torch.split(index, self._sizes), strict=True):
            total, sides = rest, [next(pieces).view(shape) for shape in shapes]
            for side in sides[1:]:
                total = total + side
            torch.add(total, sides[0] if sides else 0, out=part.view(view))
        if len(index) <= _KEPT:
            basis.index = index
        return index

    def turn(self, flat: Tensor, basis: Basis, *, back: bool) -> None:
        """Multiply all heads, in place."""
        if not self._turned:
            return
        parts = torch.split(flat, self._sizes)
        for number, side, dual in self._turned:
            turn(parts[number].view(self._parts[number][0]), side, basis.matrices, dual=dual, back=back)


def following(reads: Sequence[Tensor], symmetry: Symmetry, device: torch.device) -> Sources:
    """Where every number of rows of per-channel values comes from: statistics, ε; class 0 stays."""
    sides = [_side(read.cpu(), (len(read),), symmetry, set()) for read in reads]
    return Sources(sides, symmetry, device, [0, *accumulate(len(read) for read in reads)][: len(reads)])


def _heads_on(side: AxisPlan, device: torch.device) -> AxisPlan:
    return replace(side, heads=tuple((member.to(device), places.to(device)) for member, places in side.heads))
