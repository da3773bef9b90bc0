"""Secret scales: which channels share one, how every tensor of a network scales by them, and what that hides.

Every channel of every edge belongs to a class. Class 0 is pinned to the number 1. A class is
free, or the product of two others (a gate multiplies two edges), or has been united with another.

A parameter W becomes Ŵ = R ∘ W with R = scales[out] ⊗ 1/scales[into]; a gradient with respect to Ŵ
becomes the gradient with respect to W by the same R. R itself is never materialised: the two small
vectors broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedveil.downlink.folds import Fold, fold, unfold
from fedveil.downlink.slots import ClassSet, SlotSet
from fedveil.downlink.symmetry import ISOMETRY, PINNED, Basis, Classes, Symmetry, Transport, some
from fedveil.errors import TraceError, spelled
from fedveil.tensors import flatten


@dataclass(frozen=True)
class ParameterRef:
    """A parameter that enters an operation directly, under its canonical name.

    `transposed`: it is a matrix, and its value is the other way round.
    """

    name: str
    value: Tensor
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class Edge:
    """One activation tensor: its example value and its class ids.

    `fixed` tells that the value is the model's own (a buffer), the same whatever the input.
    """

    value: Tensor
    ids: Tensor
    fixed: bool = False


@dataclass
class Use:
    """How one parameter scales: viewed as `view`, × scales[out] / scales[into]."""

    view: tuple[int, ...]
    out: Tensor
    into: Tensor | None


@dataclass(frozen=True)
class LinearSite:
    """A call of a linear layer's parameters, and the module it happened in: candidates for the head."""

    weight: str
    bias: str | None
    rank: int
    inside: str


@dataclass(frozen=True)
class Pin:
    """An operation that forced edges to scale 1, and why."""

    operation: str
    where: str
    reason: str
    parameter: str = ""
    """The parameter it is about, where that is what stays as it is."""


@dataclass
class Tracing:
    """Everything the rules read and write while a network is walked once."""

    names: Mapping[int, str]
    norms: Mapping[str, str]
    classes: ClassSet = field(default_factory=ClassSet)
    uses: dict[str, Use] = field(default_factory=dict)
    use_counts: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)
    """For every weight that reads an activation, the modules in which it does so, call by call."""
    norm_uses: dict[str, Tensor] = field(default_factory=dict)
    """The classes that every normalisation layer reads, one per normalisation group."""
    pinned_parameters: set[str] = field(default_factory=set)
    pins: list[Pin] = field(default_factory=list)
    linear_sites: dict[str, LinearSite] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)
    slots: SlotSet | None = None
    """The classes again, where they have slots and limits: more than scales is asked for."""
    where: str = ""
    inside: str = ""
    operation: str = ""
    line: str = ""
    """The line of the network's own code that is being followed, nets.py:12, where that is known."""
    produced: str | None = None
    foldable: Mapping[str, Fold] = field(default_factory=dict)
    """Gains that their readers could carry, where streams are to be rotated."""
    folds: list[Fold] = field(default_factory=list)
    crossed: dict[int, Tensor] = field(default_factory=dict)
    """For the value of an edge (by its id) the classes along tokens, beside those of channels (see `tokens`)."""
    sized: bool = False
    """Whether code that asks for the number of samples was followed for one number only."""

    @property
    def spot(self) -> str:
        """Where in the network the walk is, in words."""
        place = self.inside or self.where
        return f"{place} ({self.line})" if self.line else place

    def pin(self, edges: Iterable[Edge], operation: str, reason: str) -> None:
        """Pin edges, and remember the operation if that took any freedom away."""
        lost = False
        for edge in edges:
            lost |= bool((self.classes.find(edge.ids) != PINNED).any())
            self.classes.pin(edge.ids)
        if lost:
            self.pins.append(Pin(operation, self.spot, reason))

    def pin_parameter(self, ref: ParameterRef, operation: str, reason: str) -> None:
        """Leave a parameter as it is: every class of its other uses becomes 1."""
        self.use_counts[ref.name] = self.use_counts.get(ref.name, 0) + 1
        if ref.name not in self.pinned_parameters:
            self.pinned_parameters.add(ref.name)
            self.pins.append(Pin(operation, self.spot, reason, ref.name))
        if use := self.uses.get(ref.name):
            self.classes.pin(use.out)
            if use.into is not None:
                self.classes.pin(use.into)

    def use(self, ref: ParameterRef, *, view: tuple[int, ...], out: Tensor, into: Tensor | None = None) -> None:
        """Declare that `ref`, viewed as `view`, scales by out ⊗ 1/into; uses of one tensor are united."""
        self.use_counts[ref.name] = self.use_counts.get(ref.name, 0) + 1
        if into is not None:
            self.readers.setdefault(ref.name, []).append(self.inside)
        known = self.uses.get(ref.name)
        if self.slots is not None and known is not None and self._tied_to_table(known, out, into):
            return
        fits = known is None or (known.view == view and (known.into is None) == (into is None))
        if ref.name in self.pinned_parameters or not fits:
            for ids in (out, into, *((known.out, known.into) if known else ())):
                if ids is not None:
                    self.classes.pin(ids)
            if not fits:
                self.pin_parameter(ref, "shared parameter", "it is used in two ways that do not scale alike")
            return
        if known is None:
            self.uses[ref.name] = Use(view, out, into)
            return
        self.classes.unite(known.out, out)
        if into is not None and known.into is not None:
            self.classes.unite(known.into, into)

    def _tied_to_table(self, known: Use, out: Tensor, into: Tensor | None) -> bool:
        """Whether one use is a table of rows and the other a head that reads the same rows: A = A⁻ᵀ, an isometry."""
        assert self.slots is not None
        if (known.into is None) == (into is None):
            return False
        table, head = (known.out, (out, into)) if known.into is None else (out, (known.out, known.into))
        rows, columns = head
        if columns is None or rows.dim() != 2 or table.shape != columns.shape or table.dim() != 2:
            return False
        self.slots.unite(table, columns)
        self.slots.limit(table, ISOMETRY)
        lost = self.slots.lost
        self.slots.pin(rows)
        self.slots.lost = lost  # rows are words: nobody could move them
        known.out, known.into = table, None
        return True

    def pin_everything(self, operation: str, reason: str) -> None:
        """Give up every freedom there is."""
        self.classes.pin(self.classes.all())
        self.pins.append(Pin(operation, "model", reason))

    def constant(self, value: Tensor, *, fixed: bool = False) -> Edge:
        """An edge nobody scales: inputs, buffers, literals."""
        return Edge(value, torch.full((1,) * value.dim(), PINNED), fixed)


def along(tracing: Tracing, edge: Edge, dim: int) -> Tensor:
    """Ids along one dimension (full length), after uniting them across all the others."""
    ids = edge.ids.movedim(dim, 0)
    length = edge.value.shape[dim]
    flat = ids.reshape(ids.shape[0], -1)
    if flat.shape[1] > 1:
        tracing.classes.unite(flat[:, :1], flat)
    return flat[:, 0].expand(length).clone() if flat.shape[0] != length else flat[:, 0].clone()


def level(tracing: Tracing, ids: Tensor, dims: Iterable[int]) -> Tensor:
    """Ids after uniting them along `dims`, which then have size 1."""
    for dim in dims:
        first = ids.narrow(dim, 0, 1)
        if ids.shape[dim] > 1:
            tracing.classes.unite(first, ids)
        ids = first
    return ids


def place(ids: Tensor, dim: int, rank: int) -> Tensor:
    """A one-dimensional id array put at dimension `dim` of an edge of the given rank."""
    shape = [1] * rank
    shape[dim] = len(ids)
    return ids.reshape(shape)


def collapse(ids: Tensor) -> Tensor:
    """Give size 1 to every dimension along which the ids do not vary."""
    for dim in range(ids.dim()):
        first = ids.narrow(dim, 0, 1)
        if ids.shape[dim] > 1 and bool((ids == first).all()):
            ids = first
    return ids.clone()


@dataclass(frozen=True, eq=False)
class Scaled:
    """How one parameter scales: viewed as `view`, × scales[out] / scales[into]."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    out: Tensor | None
    into: Tensor | None


@dataclass(frozen=True, eq=False)
class NormScale:
    """The classes k that one normalisation layer reads: ε·k², running mean·k, running variance·k²."""

    path: str
    read: Tensor


@dataclass(frozen=True)
class Reader:
    """The modules whose call lets one weight read a scaled input, or why they cannot be told."""

    weight: str
    paths: tuple[str, ...]
    refusal: str = ""


@dataclass(frozen=True)
class HeadSite:
    """The last linear layer, if the model's output is its output."""

    path: str
    weight: str
    bias: str | None
    features: int
    outputs: int


@dataclass(frozen=True, eq=False)
class ScaleTable:
    """One architecture's scales, found by tracing it once."""

    classes: Classes
    parameters: tuple[Scaled, ...]
    norms: tuple[NormScale, ...]
    pins: tuple[Pin, ...]
    head: HeadSite | None
    head_refusal: str = ""
    readers: tuple[Reader, ...] = ()
    symmetry: Symmetry | None = None
    """More than scales, where the family has it."""
    sized: bool = False
    """Whether the network's code may ask for the number of samples: torch.fx could not follow it."""
    folds: tuple[Fold, ...] = ()
    """Gains that are sent inside their readers."""
    streams: bool = False
    """Whether rotations of residual streams were asked for."""

    def to(self, device: torch.device) -> ScaleTable:
        """The same table with its index arrays on another device."""

        def move(ids: Tensor | None) -> Tensor | None:
            return None if ids is None else ids.to(device)

        parameters = tuple(
            replace(parameter, out=move(parameter.out), into=move(parameter.into)) for parameter in self.parameters
        )
        norms = tuple(replace(norm, read=norm.read.to(device)) for norm in self.norms)
        return replace(self, parameters=parameters, norms=norms)

    def rescale(self, flat: Tensor, scales: Tensor) -> Tensor:
        """R ∘ flat in float64, for all parameters in one flat vector (or their gradients).

        The same R takes parameters down (Ŵ = R ∘ W) and gradients up (∇_W L = R ∘ ∇_Ŵ L).
        """
        return self._rescaled(flat.to(torch.float64, copy=True), scales)

    def _rescaled(self, flat: Tensor, scales: Tensor) -> Tensor:
        """The same of numbers in float64, in their place."""
        if flat.is_cuda:  # where launches are the cost: two look-ups and two products for all parameters
            out, into = self._classes_of_each
            return flat.mul_(scales[out]).mul_(scales.reciprocal()[into])
        views = torch.split(flat, [math.prod(entry.shape) for entry in self.parameters])
        for side, factors in ((self._out, scales), (self._into, scales.reciprocal())):
            _multiply(views, side, factors)
        return flat

    def hide(self, flat: Tensor, basis: Basis) -> Tensor:
        """T(θ) in float64: what clients get of all parameters in one flat vector."""
        if self.symmetry is None:
            return self.rescale(flat, basis.scales)
        moved = self._rescaled(self._transport.moved(self.folded(flat), basis), basis.scales)
        self._transport.turn(moved, basis, back=False)
        return moved

    def pull(self, flat: Tensor, basis: Basis, *, at: Tensor) -> Tensor:
        """T*(∇) in float64: the gradient of the true parameters, which are `at`, from that of the hidden ones."""
        if self.symmetry is None:
            return self.rescale(flat, basis.scales)
        given = flat.to(torch.float64)
        turned = self._transport.loosened(given)
        self._transport.turn(turned, basis, back=True)
        result = self._transport.back(self._rescaled(turned, basis.scales), given, basis)
        if self.folds:
            unfold(self._named(result), self._named(at.to(torch.float64)), self.folds)
        return result

    def folded(self, flat: Tensor) -> Tensor:
        """The parameters of the network that clients get, before it is hidden: gains inside their readers."""
        if not self.folds:
            return flat
        flat = flat.to(torch.float64, copy=True)
        fold(self._named(flat), self.folds)
        return flat

    @property
    def sent(self) -> ScaleTable:
        """The table of that network itself, under which everything is linear."""
        return replace(self, folds=()) if self.folds else self

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        """Every parameter's part of one flat vector, in its shape."""
        parts = torch.split(flat, [math.prod(entry.shape) for entry in self.parameters])
        return {entry.name: part.view(entry.shape) for entry, part in zip(self.parameters, parts, strict=True)}

    @cached_property
    def _transport(self) -> Transport:
        assert self.symmetry is not None
        device = next((ids.device for entry in self.parameters if (ids := entry.out) is not None), torch.device("cpu"))
        numbered = {*self._out.which, *self._into.which}
        still = [number for number in range(len(self.parameters)) if number not in numbered]
        return Transport(self.parameters, self.symmetry, device, still=still)

    @cached_property
    def _classes_of_each(self) -> tuple[Tensor, Tensor]:
        """The out and in class of every single number, of all parameters in a row."""
        device = next((ids.device for entry in self.parameters if (ids := entry.out) is not None), None)
        pinned = torch.tensor(PINNED, dtype=torch.int32, device=device)

        def each(ids: Tensor | None, entry: Scaled) -> Tensor:
            return (pinned if ids is None else ids.to(torch.int32)).expand(entry.view).reshape(-1)

        return (
            torch.cat([each(entry.out, entry) for entry in self.parameters]),
            torch.cat([each(entry.into, entry) for entry in self.parameters]),
        )

    @cached_property
    def _out(self) -> _Side:
        return _side([(entry.view, self._numbered(entry.out)) for entry in self.parameters])

    @cached_property
    def _into(self) -> _Side:
        return _side([(entry.view, self._numbered(entry.into)) for entry in self.parameters])

    def _numbered(self, ids: Tensor | None) -> Tensor | None:
        """A side that signs or scales change; one that only an order or matrices change needs no product."""
        if self.symmetry is None or ids is None:
            return ids
        changed = self.symmetry.signs | self.symmetry.scales
        for made, left, right in self.classes.products:
            changed[made] = changed[left] | changed[right]
        return ids if bool(changed[ids.cpu()].any()) else None

    def free(self) -> int:
        """How many secret numbers one draw takes."""
        return self.classes.count - 1 - len(self.classes.products)


@dataclass(frozen=True, eq=False)
class _Side:
    """The out or the in sides of all parameters that have one: which, how viewed, and all ids in a row."""

    which: tuple[int, ...]
    views: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    ids: Tensor


def _side(entries: Sequence[tuple[tuple[int, ...], Tensor | None]]) -> _Side:
    known = [(number, view, ids) for number, (view, ids) in enumerate(entries) if ids is not None]
    return _Side(
        tuple(number for number, _, _ in known),
        tuple(view for _, view, _ in known),
        tuple(tuple(ids.shape) for _, _, ids in known),
        flatten([ids for _, _, ids in known], like=torch.empty(0, dtype=torch.int64)),
    )


def _multiply(parts: Sequence[Tensor], side: _Side, factors: Tensor) -> None:
    if not side.which:
        return
    pieces = torch.split(factors[side.ids], [math.prod(shape) for shape in side.shapes])
    torch._foreach_mul_(
        [parts[number].view(view) for number, view in zip(side.which, side.views, strict=True)],
        [piece.view(shape) for piece, shape in zip(pieces, side.shapes, strict=True)],
    )


_PROBES = 2


LEVELS = ("moved", "signed", "scaled", "mixed")
"""What a client sees of a hidden number: its value in another place; up to its sign; up to a scale; only mixtures."""
_GUESSED = 20
"""Fewer secret bits than these are tried one after the other in no time."""


@dataclass(frozen=True)
class ParameterCover:
    """How well one parameter is hidden."""

    name: str
    shape: tuple[int, ...]
    size: int
    hidden: int
    sides: str
    levels: tuple[int, int, int, int] = (0, 0, 0, 0)
    """How many of its numbers are moved, signed, scaled and mixed, each counted once by the strongest (`LEVELS`)."""

    @property
    def fraction(self) -> float:
        """The fraction of its numbers that are hidden on at least one side."""
        return self.hidden / self.size if self.size else 1.0


@dataclass(frozen=True)
class Coverage:
    """A network's cover: every parameter, and which operations pin."""

    parameters: tuple[ParameterCover, ...]
    pins: tuple[Pin, ...]
    head_noise: bool
    head_refusal: str
    secrets: int
    family: str = "scale"
    bits: float = 0.0
    """Secret bits of a round (orders and signs)."""
    reals: int = 0
    """Secret real numbers of a round (scales, entries of blocks)."""
    known: bool = False
    """Whether others know the numbers beforehand, so that nothing of them is hidden whatever is done to them."""
    groups: tuple[str, ...] = ()
    """What is drawn every round, in words, where that is more than scales."""
    unrotated: bool = False
    """Whether rotations of residual streams were asked for, and none can be."""

    @property
    def levels(self) -> dict[str, float]:
        """The fractions of all numbers that are moved, signed, scaled and mixed, each counted once by the strongest."""
        total = max(sum(parameter.size for parameter in self.parameters), 1)
        return {
            name: sum(parameter.levels[place] for parameter in self.parameters) / total
            for place, name in enumerate(LEVELS)
        }

    @property
    def fraction(self) -> float:
        """The fraction of all numbers that are hidden on at least one side."""
        total = sum(parameter.size for parameter in self.parameters)
        return sum(parameter.hidden for parameter in self.parameters) / total if total else 0.0

    @property
    def told(self) -> str:
        """What is done to the numbers, and how much of it is secret, in a sentence."""
        strengths = (
            ", ".join(f"{share:.1%} {name}" for name, share in self.levels.items() if share) or "none is changed"
        )
        size = sum(parameter.size for parameter in self.parameters)
        if self.known:
            return f"of {size:,} numbers none is hidden: others know beforehand those that the model begins with"
        return (
            f"family {self.family}: of {size:,} numbers, by the strongest of what is done to each: {strengths}; "
            f"unknown to a client are {self.bits:,.0f} bits and {self.reals:,} real numbers a round"
        )

    @property
    def guessed(self) -> str:
        """A warning where a round has so few secrets that a client tries them all; empty where it has not."""
        if self.reals or not 0 < self.bits < _GUESSED:
            return ""
        forms = f"{2**self.bits:,.0f}"
        but = ", all but the noise on the last layer" if self.head_noise else ""
        return (
            f"the veil of this model takes one of only {forms} forms, and no secret real number is in it: a client "
            f"guesses it{but}, and about one round in {forms} sends the model as it is. Widen its hidden layers."
        )

    @property
    def visible(self) -> tuple[ParameterCover, ...]:
        """Parameters that are not hidden, or not entirely."""
        return tuple(parameter for parameter in self.parameters if parameter.hidden < parameter.size)

    def as_data(self) -> dict[str, object]:
        """The same as plain data, for JSON."""
        return {
            "coverage": self.fraction,
            "head_noise": self.head_noise,
            "head_noise_refused": self.head_refusal or None,
            "secret_scales": self.secrets,
            "family": self.family,
            "levels": self.levels,
            "secret_bits": self.bits,
            "secret_reals": self.reals,
            "guessed": bool(self.guessed),
            "groups": list(self.groups),
            "parameters": [asdict(parameter) for parameter in self.parameters],
            "visible": [parameter.name for parameter in self.visible],
            "pins": [asdict(pin) for pin in self.pins],
        }


def coverage(table: ScaleTable, *, head_noise: bool, secret_epsilon: bool = True, shifted: bool = False) -> Coverage:
    """Judge a table. With a public ε, whatever a normalisation reads is seen and hides nothing.

    `shifted`: a secret number is added to all logits.
    """
    noised = table.head if head_noise else None
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(_PROBES):
        logs = torch.rand(table.classes.count, generator=generator, dtype=torch.float64) + 0.5
        if not secret_epsilon:
            for norm in table.norms:
                logs[norm.read] = 0.0
        draws.append(table.classes.scales(logs))
    # The noise adds one number per output to the weight's whole row and to the bias: differences inside a
    # row stay, so it hides one number per output and no more.
    under = {} if noised is None else {noised.bias or noised.weight: noised.outputs}
    if (
        shifted and table.head is not None
    ):  # likewise one number for every input of the last layer, and one for its bias
        under |= {table.head.weight: table.head.features, **({table.head.bias: 1} if table.head.bias else {})}
    covers = tuple(
        (_cover(entry, draws, noise=noise) if table.symmetry is None else _levels(entry, table, noise=noise))
        for entry in table.parameters
        for noise in (under.get(entry.name, 0),)
    )
    more = (noised is not None, table.head_refusal)
    if table.symmetry is None:
        return Coverage(covers, table.pins, *more, table.free(), reals=table.free())
    (bits, reals), groups = table.symmetry.freedom(table.classes), table.symmetry.groups(table.classes)
    if shifted and table.head is not None:
        reals += table.head.features + (table.head.bias is not None)
        groups = (*groups, "a number on all logits")
    if table.folds:
        groups = (*groups, f"{some(len(table.folds), 'gain')} folded into their readers")
    scales = int(table.symmetry.scales.sum()) - len(table.classes.products)
    return Coverage(
        *(covers, table.pins, *more, max(scales, 0), table.symmetry.family, bits, reals),
        groups=groups,
        unrotated=table.streams and not any(blocks.stream for blocks in table.symmetry.blocks),
    )


def _cover(entry: Scaled, draws: list[Tensor], *, noise: int) -> ParameterCover:
    size, hidden, both = math.prod(entry.shape), noise, False
    if entry.out is not None:
        out = torch.stack([draw[entry.out] for draw in draws])
        into = torch.ones_like(out) if entry.into is None else torch.stack([draw[entry.into] for draw in draws])
        # An element is visible if its factor is 1 under every draw: both sides pinned, or equal classes.
        scaled = ((out / into - 1.0).abs() > 1e-9).any(0).expand(entry.view)
        hidden = max(int(scaled.sum()), noise)
        both = bool((out != 1.0).all()) and bool((into != 1.0).all())
    return ParameterCover(entry.name, entry.shape, size, hidden, _sides(hidden, size, both=both), (0, 0, hidden, 0))


def _sides(hidden: int, size: int, *, both: bool) -> str:
    return "visible" if hidden == 0 else "partly" if hidden < size else "both" if both else "one"


def _levels(entry: Scaled, table: ScaleTable, *, noise: int) -> ParameterCover:
    """Judge one parameter under more than scales: every number by the strongest of what is done to it."""
    assert table.symmetry is not None
    symmetry, size = table.symmetry, math.prod(entry.shape)
    if any(entry.name in fold.carried for fold in table.folds):  # not sent at all
        return ParameterCover(entry.name, entry.shape, size, size, "both", (0, 0, 0, size))
    if entry.out is None:
        return ParameterCover(entry.name, entry.shape, size, noise, _sides(noise, size, both=False), (0, 0, noise, 0))
    generator = torch.Generator().manual_seed(0)
    # A sign is drawn as a set of bits, so that a product's is the exclusive or; a scale as its logarithm.
    signs = torch.randint(1, 1 << 62, (len(symmetry.limits),), generator=generator) * symmetry.signs
    logs = (torch.rand(len(symmetry.limits), generator=generator, dtype=torch.float64) + 0.5) * symmetry.scales
    for made, left, right in table.classes.products:
        signs[made], logs[made] = signs[left] ^ signs[right], logs[left] + logs[right]
    pinned = torch.zeros((1,) * len(entry.view), dtype=torch.int64)
    sides = [pinned if ids is None else ids.cpu() for ids in (entry.out, entry.into)]
    out, into = ([values[ids] for values in (signs, logs)] for ids in sides)
    seen = torch.zeros(entry.view, dtype=torch.int64)
    moved, mixed = ([mark[ids] for ids in sides] for mark in (symmetry.moving[symmetry.slot], symmetry.mixed))
    marks = (moved[0] | moved[1], out[0] != into[0], (out[1] - into[1]).abs() > 1e-9, mixed[0] | mixed[1])
    for strength, mark in enumerate(marks, start=1):
        seen = torch.where(mark, strength, seen)
    counts = torch.bincount(seen.reshape(-1), minlength=len(LEVELS) + 1).tolist()
    if noise > counts[3]:
        counts[0], counts[3] = max(counts[0] - noise, 0), counts[3] + min(noise, counts[0])
    hidden = size - counts[0]
    both = all(
        bool((symmetry.moving[symmetry.slot[ids]] | (logs[ids] != 0) | symmetry.mixed[ids]).all()) for ids in sides
    )
    return ParameterCover(
        entry.name,
        entry.shape,
        size,
        hidden,
        _sides(hidden, size, both=both),
        (counts[1], counts[2], counts[3], counts[4]),
    )


def pinned(pins: Sequence[Pin]) -> list[tuple[str, str, str]]:
    """Operations that pin: each with its place and its reason once, however many parameters that is about."""
    parameters: dict[tuple[str, str, str], list[str]] = {}
    for pin in pins:
        parameters.setdefault((pin.operation, pin.where, pin.reason), []).extend(
            [pin.parameter] if pin.parameter else []
        )
    return [(operation, where, reason + _counted(names)) for (operation, where, reason), names in parameters.items()]


def _counted(names: Sequence[str], most: int = 2) -> str:
    if not names:
        return ""
    more = ", …" if len(names) > most else ""
    return f"; {len(names)} parameter{'s' * (len(names) != 1)}: {', '.join(names[:most])}{more}"


UNROTATED = (
    "no residual stream of this model can be rotated: besides linear layers behind LayerNorm or RMSNorm (torch's own) "
    "something else reads it, or there is none"
)


def require_coverage(coverage: Coverage, *, minimum: float) -> None:
    """Stop a run whose model would be too visible, naming what pins, or would not be hidden as was asked for."""
    if coverage.unrotated:
        raise TraceError(
            f"Stream rotations were asked for, and {UNROTATED}. Leave them out ({spelled('stream_rotations', False)})."
        )
    if coverage.fraction >= minimum:
        return
    told = [f"{operation} at {where} ({why})" for operation, where, why in pinned(coverage.pins)]
    pins = "; ".join(told[:6]) or "nothing but the ends"
    names = ", ".join(parameter.name for parameter in coverage.visible[:6])
    instead = "Replace them by operations that treat all channels alike"
    if coverage.family == "scale":
        instead = f"Replace them by ReLU-like operations, hide more than scales ({spelled('family', 'full')})"
    raise TraceError(
        f"A veil would hide only {coverage.fraction:.1%} of this model's parameters (min_coverage is {minimum:.0%}). "
        f"Visible: {names}. Operations that pin: {pins}. {instead} or lower {spelled('min_coverage')}."
    )
