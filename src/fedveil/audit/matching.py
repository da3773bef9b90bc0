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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import solve_sylvester
from scipy.optimize import linear_sum_assignment
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from fedveil.downlink.scales import Scaled, ScaleTable
from fedveil.downlink.symmetry import ISOMETRY, PINNED, POSITIVE, UNIT, AxisPlan, Basis, Symmetry, moved, turn
from fedveil.errors import DataError

_SWEEPS = 40
_STILL = 1e-10
_NEWTON = 12
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
class _Order:
    """Frames of slots that change places; `inner` has the columns among which slots of a frame do so as well."""

    frames: Tensor
    inner: tuple[Tensor, ...]
    plain: Tensor
    """The columns of slots that only move with their frame and are not mixed."""


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
        own = self.source if side.diagonal else still
        index = self.rest[side.number] + _offsets(other.plan, self.source) + _offsets(side.plan, own)
        value = value.reshape(-1)[index.expand(value.shape).reshape(-1)].view(value.shape)
        factors = self._all_numbers()[other.ids].reshape(other.plan.shape)
        value = value / factors if other.reads else value * factors
        turn(value, other.plan, self._members(), dual=other.reads, back=False)
        return side.rows(value)

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
        whole = [order for order in self.symmetry.orders if order.shape[1] > 1]
        single = [order for order in self.symmetry.orders if order.shape[1] == 1]
        mixed = torch.zeros(self.symmetry.slots, dtype=torch.bool)
        mixed[self.symmetry.slot[self.symmetry.mixed]] = True
        orders, inside = [], torch.zeros(self.symmetry.slots, dtype=torch.bool)
        for frames in whole:
            inside[frames.reshape(-1)] = True
            columns = [torch.nonzero(torch.isin(frames[0], order)).reshape(-1) for order in single]
            inner = tuple(column for column in columns if len(column))
            taken = torch.cat([*inner, torch.empty(0, dtype=torch.int64)])
            plain = torch.tensor(
                [c for c in range(frames.shape[1]) if c not in taken and not mixed[frames[0, c]]], dtype=torch.int64
            )
            orders.append(_Order(frames, inner, plain))
        alone = torch.zeros(1, dtype=torch.int64)
        orders += [_Order(order, (), alone) for order in single if not bool(inside[order].any())]
        return orders

    def _place(self, order: _Order) -> bool:
        """Settle an order, if something tells it."""
        every = order.frames.reshape(-1)
        pieces = [piece for piece in self._pieces(slots=every) if not piece[0].diagonal]
        if not any(rows.shape[1] >= _THIN for _, rows, _ in pieces):
            return False
        score = torch.zeros(len(order.frames), len(order.frames), dtype=torch.float64)
        for column in order.plain.tolist():
            score += self._likeness(order.frames[:, column], pieces)
        within: list[tuple[Tensor, Tensor]] = []
        for columns in order.inner:
            slots = order.frames[:, columns]
            each = self._likeness(slots.reshape(-1), pieces)
            each = each.reshape(*slots.shape, *slots.shape).transpose(1, 2)
            chosen = torch.stack([torch.stack([_assigned(pair) for pair in row]) for row in each])
            score += each.gather(3, chosen[..., None]).sum((2, 3))
            within.append((columns, chosen))
        score += self._block_likeness(order, pieces)
        best = _assigned(score)
        self.source[every] = order.frames[best].reshape(-1)
        for columns, chosen in within:
            for frame, other in enumerate(best.tolist()):
                self.source[order.frames[frame, columns]] = order.frames[other, columns][chosen[frame, other]]
        self.placed[every] = True
        return True

    def _likeness(self, slots: Tensor, pieces: list[_Piece]) -> Tensor:
        """−½‖y_i − a·x_j‖² with the best number a that limits allow, target slot i × moving slot j."""
        score = torch.zeros(len(slots), len(slots), dtype=torch.float64)
        signed: dict[int, Tensor] = {}
        for side, rows, goal in pieces:
            places = side.places(slots)
            if places is None:
                continue
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
        return score

    def _block_likeness(self, order: _Order, pieces: list[_Piece]) -> Tensor:
        """The same for the blocks that move with their frames: by nuclear norms, or by the spaces that rows span."""
        count = len(order.frames)
        score = torch.zeros(count, count, dtype=torch.float64)
        frame_of = torch.full((self.symmetry.slots,), -1)
        frame_of[order.frames] = torch.arange(count)[:, None]
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
                        if blocks.isometry:
                            cross = torch.einsum("iac,jbc->ijab", y, x)
                            crossed[place] = crossed.get(place, 0.0) + cross
                            score -= 0.5 * (y.square().sum((1, 2))[:, None] + x.square().sum((1, 2))[None, :])
                        elif x.shape[2] > x.shape[1]:
                            base = torch.linalg.qr(x.transpose(1, 2))[0]
                            spanned = torch.einsum("iac,jcb->ijab", y, base).square().sum((2, 3))
                            score -= 0.5 * (y.square().sum((1, 2))[:, None] - spanned)
            for cross in crossed.values():
                score += torch.linalg.svdvals(cross).sum(-1)
        return score

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
        self.numbers[mine] = _numbers(sums[..., mine], self.limits[mine])
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

    def _turn(self, stack: int) -> bool:
        """Fit the matrices of one stack whose heads are in their places."""
        blocks = self.symmetry.blocks[stack]
        width = blocks.members.shape[1]
        # Of A and of A⁻ᵀ: Σ x·xᵀ, Σ y·xᵀ.
        sums = torch.zeros(2, 2, blocks.count, width, width, dtype=torch.float64)
        told = torch.zeros(blocks.count, dtype=torch.bool)
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
            if rows.shape[1] >= (_THIN if blocks.isometry else width):
                told[blocks.matrix[member]] = True
        for number in torch.nonzero(told).reshape(-1).tolist():
            own = sums[:, :, number]
            self.matrices[stack][number] = _rotation(own) if blocks.isometry else _invertible(own)
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
                    self._turn(stack)
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
            if stays and max(furthest, self._turns(matrices)) < _STILL:
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
            if max(furthest, self._turns(matrices)) < _STILL:
                return

    def _turns(self, before: Sequence[Tensor]) -> float:
        """How far the matrices went."""
        return max(
            (float((now - then).abs().max()) for now, then in zip(self.matrices, before, strict=True)), default=0.0
        )


def _assigned(score: Tensor) -> Tensor:
    """For every row the column that it gets."""
    return torch.from_numpy(linear_sum_assignment(score.numpy(), maximize=True)[1])


def _numbers(sums: Tensor, limits: Tensor) -> Tensor:
    """The a with the least Σ(y − a·x)² + Σ(v − u/a)², from Σx², Σxy, Σu², Σuv; signs and scales as limits allow."""
    (xx, xy), (uu, uv) = sums
    sign = torch.where((xy + uv < 0) & (limits & POSITIVE != POSITIVE), -1.0, 1.0).double()
    xy, uv = sign * xy, sign * uv
    # Newton in log a from the side that has more to say; both minima are positive ones.
    start = torch.where(xx >= uu, xy / xx.clamp_min(_TINY), uu / uv.clamp_min(_TINY))
    log = start.clamp(1e-6, 1e6).log()
    for _ in range(_NEWTON):
        a = log.exp()
        slope = a * a * xx - a * xy - uu / (a * a) + uv / a
        bend = (2 * a * a * xx - a * xy + 2 * uu / (a * a) - uv / a).abs()
        log = log - (slope / bend.clamp_min(_TINY)).clamp(-0.5, 0.5)
    return torch.where(limits & ISOMETRY != 0, sign, sign * log.exp())


def _rotation(sums: Tensor) -> Tensor:
    """Procrustes; an isometry is its own dual."""
    u, _, v = torch.linalg.svd(sums[0, 1] + sums[1, 1])
    rotation: Tensor = u @ v
    return rotation


def _invertible(sums: Tensor) -> Tensor:
    """The M with the least ‖Y − M·X‖² + ‖V − M⁻ᵀ·U‖²: M ← (1 + E)·M, E by least squares over both."""
    (xx, yx), (uu, vu) = sums
    if not bool(yx.any() | vu.any()):  # without a target it is the shortest: MᵀM is the geometric mean of X⁻¹ and U
        root, back = _powers(xx)
        shortest: Tensor = _powers(back @ _powers(root @ uu @ root)[0] @ back)[0]
        return shortest
    if float(xx.trace()) >= float(uu.trace()):
        m = yx @ torch.linalg.pinv(xx, hermitian=True)
    else:
        m = torch.linalg.pinv(vu @ torch.linalg.pinv(uu, hermitian=True)).T
    start = m
    for _ in range(_NEWTON):
        if not bool(m.isfinite().all()) or float(torch.linalg.cond(m)) > 1e8:
            return start if bool(start.isfinite().all()) else torch.eye(len(m), dtype=m.dtype)
        back = torch.linalg.inv(m)
        a, b = m @ xx @ m.T, back.T @ uu @ back
        right = yx @ m.T - a - (vu @ back).T + b
        step = torch.from_numpy(solve_sylvester(b.numpy(), a.numpy(), right.numpy()))
        size = float(step.norm())
        m = m + (step if size <= 0.5 else step * (0.5 / size)) @ m
        if size < _STILL:
            break
    solved: Tensor = m
    return solved


def _powers(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """S^½ and S^−½ of a symmetric matrix with positive eigenvalues, or with none that are much smaller than others."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    values = values.clamp_min(1e-10 * float(values.max().clamp_min(1e-10))).sqrt()
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T
