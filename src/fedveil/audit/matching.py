"""Matching a veiled model with another one: the change of basis that brings it as near as it can come.

Which axes of which parameters share an order, signs, scales or a block is public: whoever has the network can trace it.
So a client that has a model to compare with, one it was sent a round ago or one that was published, looks for T within
the veil's own group such that T(moving) ≈ target. A parameter has two sides, what it produces and what it reads. Where
one is known the other follows from its rows: an order by linear assignment, a sign by a sum, a scale by least squares,
an isometric block by Procrustes, an invertible one by least squares over both of its sides. Inputs, words and classes
are public, so it begins there and goes on from edge to edge. Then every edge is fitted again with all its neighbours
known, until nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linear_sum_assignment
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from fedveil.audit.fits import STILL, invertible, numbers, rotation, rotation_of_differences, scaled_turn, turning
from fedveil.downlink.scales import Scaled, ScaleTable
from fedveil.downlink.symmetry import ISOMETRY, PINNED, POSITIVE, UNIT, AxisPlan, Basis, Blocks, Symmetry, moved, turn
from fedveil.errors import DataError

_SWEEPS = 40
_CONJUGATE = 200
_PUBLIC = torch.tensor([PINNED])
_TINY = 1e-300
_THIN = 2
"""Of fewer columns a piece tells no order: values of biases meet by chance."""


def aligning_basis(table: ScaleTable, moving: Tensor, target: Tensor, *, ignored: Collection[str] = ()) -> Basis:
    """The basis in which `table.hide(moving, basis)` comes nearest to `target`, both flat parameters.

    Args:
        table: What may change: the network's symmetries.
        moving: The model that is moved.
        target: The model that stays where it is.
        ignored: Parameters that nothing is concluded from, because something else covers them.

    Raises:
        DataError: The models are not of this network, or hold numbers that are none.
    """
    size = sum(math.prod(entry.shape) for entry in table.parameters)
    for flat in (moving, target):
        if flat.shape != (size,):
            raise DataError(f"A model of {tuple(flat.shape)} numbers cannot be matched: the network has {size}.")
        if not bool(flat.isfinite().all()):
            raise DataError("A model with numbers that are infinite or none at all cannot be matched.")
    match = _Match(table, moving.double(), target.double(), ignored)
    match.discover()
    match.refine()
    return match.basis()


def balancing_basis(table: ScaleTable, flat: Tensor, fresh: Tensor, *, ignored: Collection[str] = ()) -> Basis:
    """The basis in which a model's edges get as much more than they give as those of a freshly drawn one do.

    Secret scales stretch some numbers and shrink others, and least squares would listen to the stretched ones. Training
    by gradients leaves Σ‖w_out‖² − Σ‖w_in‖² of every edge about where it began, and by which law a model is drawn is
    public: so this is as near to the lengths that numbers really have as one comes without the secret.
    """
    match = _Match(table, flat.double(), torch.zeros_like(flat, dtype=torch.float64), ignored)
    match.balance(fresh.double())
    return match.basis()


def _offsets(plan: AxisPlan, source: Tensor) -> Tensor:
    """Where the content of every position of a side comes from under an order, as an offset in the parameter."""
    first = torch.searchsorted(plan.sorted_slot, source[plan.slot])
    return plan.offset[plan.by_slot[first + plan.occurrence]].reshape(plan.shape)


@dataclass(eq=False)
class _Side:
    """What a parameter produces or reads: where its positions are in two models, and which classes they have."""

    entry: Scaled
    number: int
    reads: bool
    plan: AxisPlan
    ids: Tensor
    other: _Side | None = None

    @cached_property
    def dims(self) -> list[int]:
        return [dim for dim, size in enumerate(self.plan.shape) if size > 1]

    @cached_property
    def grouped(self) -> bool:
        """Whether both sides share a dimension: groups move with both."""
        return self.other is not None and bool(set(self.dims) & set(self.other.dims))

    @cached_property
    def diagonal(self) -> bool:
        """Whether both sides are the same positions: a gain moves with its edge, and only its factor is of two."""
        return self.other is not None and self.dims == self.other.dims and bool(self.dims)

    def rows(self, value: Tensor) -> Tensor:
        """(positions, columns) of a parameter as its view has it."""
        return value.movedim(self.dims, list(range(len(self.dims)))).reshape(len(self.ids), -1)

    def sources(self, source: Tensor) -> Tensor:
        """For every position the one whose content it gets."""
        plan = self.plan
        return plan.by_slot[torch.searchsorted(plan.sorted_slot, source[plan.slot]) + plan.occurrence]

    def places(self, slots: Tensor) -> Tensor | None:
        """(slots, occurrences) positions; None where not all are there, or some more often than others."""
        slots = slots.contiguous()
        first = torch.searchsorted(self.plan.sorted_slot, slots)
        counts = torch.searchsorted(self.plan.sorted_slot, slots, right=True) - first
        if int(counts.min()) < 1 or int(counts.min()) != int(counts.max()):
            return None
        return self.plan.by_slot[first[:, None] + torch.arange(int(counts[0]))]


_Piece = tuple[_Side, Tensor, Tensor]


def _scales_alone(count: int) -> Symmetry:
    """Positive numbers and nothing else, in the words of the other families."""
    return Symmetry("scale", torch.full((count,), POSITIVE), torch.zeros(count, dtype=torch.int64), 1, (), ())


@dataclass(frozen=True, eq=False)
class _Pattern:
    """What is free inside a frame: orders of (items, width) columns, each with what is free inside its own items."""

    inner: tuple[tuple[Tensor, _Pattern], ...]
    plain: Tensor
    """The columns that only move with their frame and are not mixed."""
    mixed: Tensor
    """Those that are."""


@dataclass(frozen=True, eq=False)
class _Order:
    """Frames of slots that change places as wholes."""

    frames: Tensor
    pattern: _Pattern


@dataclass(frozen=True, eq=False)
class _Compared:
    """Frames compared: how alike target frame i and moving frame j are, the slots of j in the order that suits i best,
    and of which columns something tells the place."""

    score: Tensor
    pick: Callable[[int, int], Tensor]
    told: Tensor


class _Match:
    def __init__(self, table: ScaleTable, moving: Tensor, target: Tensor, ignored: Collection[str]) -> None:
        self.table, self.products = table, table.classes.products
        self.whole, self.goals = moving, target
        self.symmetry = table.symmetry or _scales_alone(table.classes.count)
        self.limits = self.symmetry.limits.index_fill(0, torch.tensor([PINNED]), UNIT)
        self.source = torch.arange(self.symmetry.slots)
        self.numbers = torch.ones(len(self.limits), dtype=torch.float64)
        self.matrices = [
            torch.eye(blocks.members.shape[1], dtype=torch.float64).repeat(blocks.count, 1, 1)
            for blocks in self.symmetry.blocks
        ]
        self.placed = ~self.symmetry.moving
        self.fixed = (self.limits & UNIT) == UNIT
        self.turned = [torch.zeros(blocks.count, dtype=torch.bool) for blocks in self.symmetry.blocks]
        sizes = [math.prod(entry.shape) for entry in table.parameters]
        self.moving = [part.view(e.view) for part, e in zip(torch.split(moving, sizes), table.parameters, strict=True)]
        self.target = [part.view(e.view) for part, e in zip(torch.split(target, sizes), table.parameters, strict=True)]
        self.rest: list[Tensor] = []
        self.sides: list[_Side] = []
        self.heeded: list[int] = []
        for number, entry in enumerate(table.parameters):
            plan = moved(entry, self.symmetry)
            self.rest.append(plan.rest)
            made = [
                _Side(entry, number, reads, side, ids.cpu().reshape(-1))
                for reads, side, ids in ((False, plan.out, entry.out), (True, plan.into, entry.into))
                if side is not None and ids is not None
            ]
            if len(made) > 1:
                made[0].other, made[1].other = made[1], made[0]
            if entry.name not in ignored:
                self.sides += made
                self.heeded.append(number)
        self.goal = [side.rows(self.target[side.number]) for side in self.sides]
        self.orders = self._orders()

    def basis(self) -> Basis:
        """What was found."""
        return Basis(self._all_numbers(), self.source, self._members())

    def _all_numbers(self) -> Tensor:
        for made, left, right in self.products:
            self.numbers[made] = self.numbers[left] * self.numbers[right]
        return self.numbers

    def _members(self) -> list[tuple[Tensor, Tensor]]:
        """A and A⁻ᵀ of every member of every stack."""
        pairs = []
        for blocks, matrix in zip(self.symmetry.blocks, self.matrices, strict=True):
            dual, forth = blocks.dual[:, None, None], matrix[blocks.matrix]
            back = torch.linalg.inv(matrix).transpose(1, 2)[blocks.matrix]
            pairs.append((torch.where(dual, back, forth), torch.where(dual, forth, back)))
        return pairs

    # -- pieces --------------------------------------------------------------------------------------------------

    def _known(self, side: _Side) -> bool:
        if not bool(self.placed[side.plan.slot].all() & self.fixed[side.ids].all()):
            return False
        return all(
            bool(turned[blocks.matrix[member]].all())
            for (member, _), blocks, turned in zip(side.plan.heads, self.symmetry.blocks, self.turned, strict=True)
        )

    def _piece(self, side: _Side) -> Tensor | None:
        """The moving model's rows of one side with the other side changed as it is now known; None if it is not."""
        value, other = self.moving[side.number], side.other
        if other is None:
            return side.rows(value)
        if not self._known(other):
            return None
        still = torch.arange(len(self.source))
        own = self.source if side.grouped else still
        index = self.rest[side.number] + _offsets(other.plan, self.source) + _offsets(side.plan, own)
        value = value.reshape(-1)[index.expand(value.shape).reshape(-1)].view(value.shape)
        factors = self._all_numbers()[other.ids].reshape(other.plan.shape)
        value = value / factors if other.reads else value * factors
        turn(value, other.plan, self._members(), dual=other.reads, back=False)
        rows = side.rows(value)
        if side.grouped and not side.diagonal:  # back to where they were, with columns that suit where they go
            rows = torch.empty_like(rows).index_copy_(0, side.sources(self.source), rows)
        return rows

    def _pieces(self, *, classes: Tensor | None = None, slots: Tensor | None = None) -> Iterator[_Piece]:
        """(side, moving rows, target rows) of all sides that have one of these, as far as they are known."""
        for side, goal in zip(self.sides, self.goal, strict=True):
            if classes is not None and not bool(torch.isin(side.ids, classes).any()):
                continue
            if slots is not None and not bool(torch.isin(side.plan.slot, slots).any()):
                continue
            rows = self._piece(side)
            if rows is not None:
                yield side, rows, goal

    # -- orders --------------------------------------------------------------------------------------------------

    def _orders(self) -> list[_Order]:
        """Orders with those that lie inside their frames; what lies inside none stands for itself."""
        orders, inside = [], torch.zeros(self.symmetry.slots, dtype=torch.bool)
        for frames in self._widest:
            if not bool(inside[frames].any()):
                inside[frames.reshape(-1)] = True
                orders.append(_Order(frames, self._pattern(frames[0])))
        return orders

    @cached_property
    def _widest(self) -> list[Tensor]:
        return sorted(self.symmetry.orders, key=lambda order: -order.shape[1])

    def _pattern(self, frame: Tensor) -> _Pattern:
        """What is free inside one frame, by columns: it is the same inside all that change places."""
        column = torch.full((self.symmetry.slots,), -1)
        column[frame] = torch.arange(len(frame))
        inner, taken = [], torch.zeros(len(frame), dtype=torch.bool)
        for order in self._widest:
            columns = column[order]
            if order.shape[1] < len(frame) and bool((columns >= 0).all()) and not bool(taken[columns].any()):
                taken[columns.reshape(-1)] = True
                inner.append((columns, self._pattern(order[0])))
        mixed = torch.isin(frame, self.symmetry.slot[self.symmetry.mixed])
        plain, rest = (torch.nonzero(~taken & kind).reshape(-1) for kind in (~mixed, mixed))
        return _Pattern(tuple(inner), plain, rest)

    def _place(self, order: _Order) -> bool:
        """Settle an order as far as something tells it; what is free inside its frames may have to wait."""
        every = order.frames.reshape(-1)
        pieces = [piece for piece in self._pieces(slots=every) if not piece[0].diagonal]
        compared = self._compared(order.frames, order.pattern, pieces)
        if not bool(compared.told.any()):
            return False
        for frame, other in enumerate(_assigned(compared.score).tolist()):
            self.source[order.frames[frame]] = compared.pick(frame, other)
        now = order.frames[:, compared.told]
        more = not bool(self.placed[now].all())
        self.placed[now.reshape(-1)] = True
        return more

    def _compared(self, frames: Tensor, pattern: _Pattern, pieces: list[_Piece]) -> _Compared:
        """Every frame with every other, each pair in the inner orders that suit it best."""
        count = len(frames)
        score, known = self._block_likeness(frames[:, pattern.mixed], pieces)
        told = torch.zeros(frames.shape[1], dtype=torch.bool)
        for column in pattern.plain.tolist():
            alike, heard = self._likeness(frames[:, column], pieces)
            score, known = score + alike, known or heard
        within: list[tuple[Tensor, Tensor, _Compared]] = []
        for columns, inner in pattern.inner:
            each = self._compared(frames[:, columns].flatten(0, 1), inner, pieces)
            alike = each.score.reshape(count, len(columns), count, len(columns)).transpose(1, 2)
            chosen = torch.stack([torch.stack([_assigned(pair) for pair in row]) for row in alike])
            score = score + alike.gather(3, chosen[..., None]).sum((2, 3))
            told[columns[:, each.told].reshape(-1)] = True
            within.append((columns, chosen, each))
        if known or bool(told.any()):  # what only moves with its frame goes where it goes
            told[pattern.plain] = told[pattern.mixed] = True

        def pick(frame: int, other: int) -> Tensor:
            slots = frames[other].clone()
            for columns, chosen, each in within:
                size = len(columns)
                for item, mate in enumerate(chosen[frame, other].tolist()):
                    slots[columns[item]] = each.pick(frame * size + item, other * size + mate)
            return slots

        return _Compared(score, pick, told)

    def _likeness(self, slots: Tensor, pieces: list[_Piece]) -> tuple[Tensor, bool]:
        """−½‖y_i − a·x_j‖² with the best number a that limits allow, target slot i × moving slot j; if that tells."""
        score, heard = torch.zeros(len(slots), len(slots), dtype=torch.float64), False
        signed: dict[int, Tensor] = {}
        for side, rows, goal in pieces:
            places = side.places(slots)
            if places is None:
                continue
            heard |= rows.shape[1] >= _THIN
            classes = side.ids[places]
            for kind in torch.unique(classes[0]).tolist():
                chosen = places[:, classes[0] == kind]
                x, y = (part[chosen].reshape(len(slots), -1) for part in (rows, goal))
                limits = int(self.limits[kind])
                inner, xx, yy = y @ x.T, x.square().sum(1), y.square().sum(1)
                if limits & ISOMETRY:
                    score -= 0.5 * (xx[None, :] + yy[:, None])
                    signed[kind] = signed.get(kind, 0.0) + inner
                elif x.shape[1] >= _THIN:
                    cosine = inner / (xx[None, :] * yy[:, None]).sqrt().clamp_min(_TINY)
                    cosine = cosine.clamp_min(0.0) if limits & POSITIVE == POSITIVE else cosine.abs()
                    score -= 0.5 * yy.mean() * (1.0 - cosine.square())
        for kind, inner in signed.items():
            score += inner if int(self.limits[kind]) & POSITIVE == POSITIVE else inner.abs()
        return score, heard

    def _block_likeness(self, frames: Tensor, pieces: list[_Piece]) -> tuple[Tensor, bool]:
        """The same for the blocks that move with their frames: by nuclear norms, or by the spaces that rows span."""
        count = len(frames)
        score, heard = torch.zeros(count, count, dtype=torch.float64), False
        frame_of = torch.full((self.symmetry.slots,), -1)
        frame_of[frames] = torch.arange(count)[:, None]
        for stack, blocks in enumerate(self.symmetry.blocks):
            frame = frame_of[self.symmetry.slot[blocks.members[:, 0]]]
            inside = frame >= 0
            if not bool(inside.any()):
                continue
            # Matrices of one role (keys, values) are numbered alike in every frame.
            role = torch.zeros_like(blocks.matrix)
            for number in range(count):
                own = torch.unique(blocks.matrix[frame == number])
                for place, matrix in enumerate(own.tolist()):
                    role[blocks.matrix == matrix] = place
            crossed: dict[int, Tensor] = {}
            for side, rows, goal in pieces:
                member, places = side.plan.heads[stack]
                kept = inside[member]
                member, places = member[kept], places[kept]
                for place in torch.unique(role[member]).tolist():
                    own = role[member] == place
                    ordered = torch.argsort(frame[member[own]], stable=True)
                    chosen = places[own][ordered].reshape(count, -1, places.shape[1])
                    for part in range(chosen.shape[1]):
                        x, y = rows[chosen[:, part]], goal[chosen[:, part]]
                        heard |= x.shape[2] > (1 if blocks.isometry or blocks.turn else x.shape[1])
                        if blocks.isometry or blocks.turn:
                            cross = torch.einsum("iac,jbc->ijab", y, x)
                            xx, yy = x.square().sum((1, 2))[None, :], y.square().sum((1, 2))[:, None]
                            if blocks.isometry:
                                crossed[place] = crossed.get(place, 0.0) + cross
                                score -= 0.5 * (yy + xx)
                            else:
                                score -= 0.5 * (yy - turning(cross).abs().square() / xx.clamp_min(_TINY))
                        elif x.shape[2] > x.shape[1]:
                            base = torch.linalg.qr(x.transpose(1, 2))[0]
                            spanned = torch.einsum("iac,jcb->ijab", y, base).square().sum((2, 3))
                            score -= 0.5 * (y.square().sum((1, 2))[:, None] - spanned)
            for cross in crossed.values():
                score += turning(cross).abs() if blocks.turn else torch.linalg.svdvals(cross).sum(-1)
        return score, heard

    # -- numbers -------------------------------------------------------------------------------------------------

    @cached_property
    def _groups(self) -> list[Tensor]:
        """Classes that are fitted at once: those of one side of one parameter, which never meet each other."""
        free = ~((self.limits & UNIT) == UNIT)
        free[[made for made, _, _ in self.products]] = False
        groups = []
        for side in self.sides:
            classes = torch.unique(side.ids)
            classes = classes[free[classes]]
            if len(classes):
                groups.append(classes)
                free[classes] = False
        return groups

    def _number(self, classes: Tensor) -> bool:
        """Fit the numbers of classes whose places are known, if something tells them."""
        count = len(self.limits)
        # Of what is produced and of what is read: Σx², Σxy.
        sums = torch.zeros(2, 2, count, dtype=torch.float64)
        told = torch.zeros(count, dtype=torch.bool)
        for side, rows, goal in self._pieces(classes=classes):
            here = self.placed[side.plan.slot]
            x = rows if side.diagonal else rows[side.sources(self.source)]
            for place, values in enumerate((x.square().sum(1), (x * goal).sum(1))):
                sums[int(side.reads), place].index_add_(0, side.ids[here], values[here])
            if side.other is not None or rows.shape[1] >= _THIN:
                told[side.ids[here]] = True
        mine = classes[told[classes] & (sums[:, 0].sum(0)[classes] > 0)]
        self.fixed[mine] = True
        self.numbers[mine] = numbers(sums[..., mine], self.limits[mine])
        self._settle_products()
        return bool(len(mine))

    def _settle_products(self) -> None:
        for made, left, right in self.products:
            self.fixed[made] = self.fixed[left] & self.fixed[right]

    def _stretch(self, surplus: Tensor | None = None) -> float:
        """All scales at once, by a Newton step in their logarithms; how far the furthest went.

        Scales of neighbours share weights, and long chains of them settle slowly when taken one after the other. What
        is least afterwards is ½‖target − z‖², z being the moving model; with a `surplus` ½‖z‖² − Σ surplus·log s, which
        is where every edge gets that much more than it gives.
        """
        free = torch.nonzero(self._scaled).reshape(-1)
        if not len(free):
            return 0.0
        now = self.table.hide(self.whole, self.basis())
        ends, weight = self._by_edge(now, now)
        (out, into), slope = ends, -self._by_edge(now, now - self.goals)[1]

        def spread(logs: npt.NDArray[np.float64]) -> Tensor:
            every = torch.zeros(len(self.limits), dtype=torch.float64)
            every[free] = torch.from_numpy(logs)
            for made, left, right in self.products:
                every[made] = every[left] + every[right]
            return every

        def bent(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            each = spread(logs)
            bend: npt.NDArray[np.float64] = self._gathered(ends, weight * (each[out] - each[into]))[free].numpy()
            return bend + ridge * logs

        size = self._gathered(ends, weight, back=1.0)[free].clamp_min(_TINY).numpy()
        ridge = 1e-9 * float(size.mean())
        pull = self._gathered(ends, slope)
        if surplus is not None:  # a square bends twice as much as Gauss and Newton take it to
            pull = 0.5 * (pull + surplus)
        shape = (len(free), len(free))
        newton, _ = cg(
            LinearOperator(shape, matvec=bent, dtype=np.float64),
            pull[free].numpy(),
            M=LinearOperator(shape, matvec=lambda logs: logs / (size + ridge), dtype=np.float64),
            rtol=1e-8,
            maxiter=_CONJUGATE,
        )
        logs = torch.from_numpy(newton).clamp(-1.0, 1.0)
        self.numbers[free] *= logs.exp()
        return float(logs.abs().max())

    def _by_edge(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs of classes between which there are numbers, and Σ left·right over those of each pair."""
        ends, sums = [], []
        sizes = [value.numel() for value in self.moving]
        for number, product in enumerate(torch.split(left * right, sizes)):
            if number in self.heeded:
                entry = self.table.parameters[number]
                sides = [_PUBLIC if ids is None else ids.cpu() for ids in (entry.out, entry.into)]
                out, into = (ids.reshape((1,) * (len(entry.view) - ids.dim()) + tuple(ids.shape)) for ids in sides)
                shape = np.broadcast_shapes(out.shape, into.shape)
                ends.append(torch.stack([out.expand(shape).reshape(-1), into.expand(shape).reshape(-1)]))
                sums.append(product.view(entry.view).sum_to_size(shape).reshape(-1))
        return torch.cat(ends, 1), torch.cat(sums)

    def _gathered(self, ends: Tensor, values: Tensor, *, back: float = -1.0) -> Tensor:
        """For every class Σ of what produces it + back·Σ of what reads it; a product's counts for its factors."""
        every = torch.zeros(len(self.limits), dtype=torch.float64)
        every.index_add_(0, ends[0], values).index_add_(0, ends[1], back * values)
        for made, left, right in reversed(self.products):
            every[left] += every[made]
            every[right] += every[made]
        return every

    @cached_property
    def _scaled(self) -> Tensor:
        """The classes whose size is to be found."""
        scaled = self.limits & ISOMETRY == 0
        scaled[[made for made, _, _ in self.products]] = False
        return scaled

    # -- blocks --------------------------------------------------------------------------------------------------

    def _turn(self, stack: int, *, loosely: bool = True) -> bool:
        """Fit the matrices of one stack whose heads are in their places; else those alone that are told in full."""
        blocks = self.symmetry.blocks[stack]
        width = blocks.members.shape[1]
        # Of A and of A⁻ᵀ: Σ x·xᵀ, Σ y·xᵀ.
        sums = torch.zeros(2, 2, blocks.count, width, width, dtype=torch.float64)
        told = torch.zeros(blocks.count, dtype=torch.bool)
        seen = torch.zeros(blocks.count, dtype=torch.int64)
        for side, rows, goal in self._pieces(classes=blocks.members.reshape(-1)):
            member, places = side.plan.heads[stack]
            here = self.placed[side.plan.slot[places[:, 0]]]
            member, places = member[here], places[here]
            x, y = rows[side.sources(self.source)][places], goal[places]
            dual = blocks.dual[member] ^ side.reads
            for which in (False, True):
                own = dual == which
                matrix = blocks.matrix[member[own]]
                sums[int(which), 0].index_add_(0, matrix, x[own] @ x[own].transpose(1, 2))
                sums[int(which), 1].index_add_(0, matrix, y[own] @ x[own].transpose(1, 2))
            if rows.shape[1] >= (_THIN if blocks.isometry or blocks.turn else width):
                told[blocks.matrix[member]] = True
            seen[torch.unique(blocks.matrix[member])] += rows.shape[1]
        told &= loosely | (seen >= width - 1)
        for number in torch.nonzero(told).reshape(-1).tolist():
            own = sums[:, :, number]
            self.matrices[stack][number] = _fitted(own, blocks)
        self.turned[stack] |= told
        return bool(told.any())

    # -- the whole -----------------------------------------------------------------------------------------------

    def discover(self) -> None:
        """From the public sides on, edge by edge; what nothing tells is taken to be as it is."""
        went_on = True
        while went_on:
            went_on = False
            for order in self.orders:
                if not bool(self.placed[order.frames].all()):
                    went_on |= self._place(order)
            for classes in self._groups:
                if not bool(self.fixed[classes].all()) and bool(self.placed[self.symmetry.slot[classes]].all()):
                    before = int(self.fixed.sum())
                    self._number(classes[~self.fixed[classes]])
                    went_on |= int(self.fixed.sum()) > before
            for stack, turned in enumerate(self.turned):
                if not bool(turned.all()):
                    before = int(turned.sum())
                    self._turn(stack, loosely=not went_on)
                    went_on |= int(turned.sum()) > before
        self.placed[:] = True
        self.fixed[:] = True
        for turned in self.turned:
            turned[:] = True

    def refine(self) -> None:
        """Every edge again, with all its neighbours known."""
        for sweep in range(_SWEEPS):
            source, matrices = self.source.clone(), [matrix.clone() for matrix in self.matrices]
            for order in self.orders:
                self._place(order)
            stays = torch.equal(self.source, source)
            for classes in self._groups:
                if not (stays and sweep and bool(self._scaled[classes].all())):
                    self._number(classes)
            furthest = self._stretch()
            for stack in range(len(self.turned)):
                self._turn(stack)
            if stays and max(furthest, self._turns(matrices)) < STILL:
                return

    def balance(self, fresh: Tensor) -> None:
        """Scales and blocks with which edges get and give as in a fresh model; all else stays."""
        self.placed[:] = True
        self.fixed[:] = True
        for turned in self.turned:
            turned[:] = True
        surplus = self._gathered(*self._by_edge(fresh, fresh))
        for classes in self._groups:  # one draw of many alike
            surplus[classes] = surplus[classes].mean()
        for _ in range(_SWEEPS):
            matrices = [matrix.clone() for matrix in self.matrices]
            furthest = self._stretch(surplus)
            for stack, blocks in enumerate(self.symmetry.blocks):
                if not blocks.isometry:
                    self._turn(stack)
            if max(furthest, self._turns(matrices)) < STILL:
                return

    def _turns(self, before: Sequence[Tensor]) -> float:
        """How far the matrices went."""
        return max(
            (float((now - then).abs().max()) for now, then in zip(self.matrices, before, strict=True)), default=0.0
        )


def _assigned(score: Tensor) -> Tensor:
    """For every row the column that it gets."""
    return torch.from_numpy(linear_sum_assignment(score.numpy(), maximize=True)[1])


def _fitted(sums: Tensor, blocks: Blocks) -> Tensor:
    """The matrix of one block from the sums of what it changes."""
    if blocks.turn:
        return scaled_turn(sums, isometry=blocks.isometry)
    if blocks.ones:
        return rotation_of_differences(sums)
    return rotation(sums) if blocks.isometry else invertible(sums)
