"""Per-sample gradients in the cheapest form each layer has, with their norms, what is cut to a bound by them, and sums.

A linear layer's gradient for one sample is an outer product δ·aᵀ, an embedding's touches only the rows
of the words seen: neither has to be written out to know its norm or to be summed. No form computes a
norm from a Gram matrix, whose cancellation could make a gradient look shorter than it is, and each
sums the very numbers whose norm it gives.

A guarantee rests on these norms. One is never below the true one by more than a few roundings, whatever the
magnitudes: what squares lose by underflow is added back as the most that it can be, and where they overflow, norms are
taken again of scaled numbers. Each is a function of its own sample: one that overflows changes nobody else's.
What rounding may add on the way from the norm to the sum is taken off the bound beforehand (`safe_bound`), so that a
sum, as it is computed, moves no further than the bound says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.downlink.architecture import Architecture, TappedLinear
from fedveil.tensors import plain_attention, vectorising
from fedveil.work import vmapped
from fedveil.work.batches import has_random_layers
from fedveil.work.losses import Loss
from fedveil.work.pooling import pool_swiftly

SAMPLES_ADDED = 128
"""So many samples are added by one product of matrices; their sums, pairwise."""

_SPAN = 1024
_NORM_ROUNDINGS = 2048
_COMFORTABLE = 2.0**128


def working(dtype: torch.dtype) -> torch.dtype:
    """The precision to multiply and add in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def safe_bound(clip: float, dtype: torch.dtype, samples: int) -> float:
    """The bound to clip each of `samples` gradients to, so that their sum keeps `clip` in spite of rounding.

    In units of the rounding error u of `dtype` (2⁻²⁴ in single precision): a norm of up to 2³⁰ numbers, its weight and
    the product are off by at most 2048. A sum of B ≤ 128 gradients is off by at most (B + 2)·B times the bound, sums of
    those that are added pairwise by 2·`samples`, and rounding the whole by `samples`. That counts twice, since a sum
    with a record and one without it may be off in opposite directions. For a batch of 64 in single precision it takes
    6·10⁻⁴ off the bound, for one of 600 2.3·10⁻³; in double precision less than 10⁻¹¹.
    """
    block = min(samples, SAMPLES_ADDED)
    roundings = _NORM_ROUNDINGS + 2 * ((block + 2) * block + 3 * samples)
    return clip / (1.0 + roundings * torch.finfo(working(dtype)).eps / 2)


def squares(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """‖row‖² of matrices with B rows each, (parts, B) in float64, and the rows (B,) of which no norm is above 2⁶⁴."""
    lost = 2.0 * max(part.shape[1] for part in parts) * torch.finfo(working(parts[0].dtype)).tiny
    squared = torch.stack([_norm(part) for part in parts]).double().square_().add_(lost)
    return squared, (squared < _COMFORTABLE).all(0)


def _norm(rows: Tensor) -> Tensor:
    """‖row‖ by spans: no square is negative, so that adding few of them, in any order, is off by few roundings."""
    rows = rows.to(working(rows.dtype))
    while rows.shape[1] > _SPAN:
        whole = rows.shape[1] - rows.shape[1] % _SPAN
        spans = torch.linalg.vector_norm(rows[:, :whole].reshape(len(rows), -1, _SPAN), dim=2)
        if whole < rows.shape[1]:
            spans = torch.cat([spans, torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)], 1)
        rows = spans
    return torch.linalg.vector_norm(rows, dim=1)  # type: ignore[no-any-return]


def scaled_norms(rows: Tensor) -> Tensor:
    """‖row‖ in float64, of numbers scaled by the largest; not finite where a row is not, or its norm no such number."""
    wide = rows.double()
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    scale = torch.where(largest == 0, 1.0, largest)
    return scale * (wide / scale[:, None]).square().sum(1).sqrt()


def clip_weights(norms: Tensor, bound: float, dtype: torch.dtype) -> Tensor:
    """min(1, bound/‖g‖) in `dtype`; 0 where a norm is not finite, for that is over every bound.

    Zero, too, where a weight has no full precision in `dtype`: rounded up it could double.
    """
    weights = (bound / norms).clamp_(max=1.0).nan_to_num_(0.0).to(dtype)
    return torch.nn.functional.threshold(weights, torch.finfo(dtype).tiny, 0.0)


def clipped(vector: Tensor, bound: float) -> Tensor:
    """vector·min(1, bound/‖vector‖), no longer than `bound` as rounded; zero for what is not finite."""
    norm, dtype = scaled_norms(vector[None]), working(vector.dtype)
    if not bool(norm.isfinite()):
        return torch.zeros_like(vector, dtype=dtype)
    weight = clip_weights(norm, safe_bound(bound, dtype, 1), torch.float64)
    return (vector.double() * weight).to(dtype)


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of matrices without the short cuts (TF32, bfloat16) that PyTorch can be set to take."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Factor(Protocol):
    """One parameter's gradients for B samples."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Matrices with B rows: a gradient's norm is the product of the norms of its rows."""

    def total(self, weights: Tensor) -> Tensor:
        """Σ_b w_kb·g_kb for weights (K, b) of K clients with b samples each, B = K·b: (K, size)."""

    def careful(self) -> tuple[Factor, Tensor]:
        """The same gradients in a form that sums them whatever their magnitudes, and their norms."""

    def without(self, odd: Tensor) -> Factor:
        """The same with zeros for the samples that a mask (B,) names."""


@dataclass(frozen=True, eq=False)
class Dense:
    """Gradients written out: (B, size)."""

    rows: Tensor

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The gradients themselves."""
        return (self.rows,)

    def total(self, weights: Tensor) -> Tensor:
        """One matrix–vector product per client."""
        clients, each = weights.shape
        rows = self.rows.to(weights.dtype).reshape(clients, each, -1)
        return _by_blocks(lambda left, right: torch.bmm(left[:, None], right)[:, 0], weights, rows)

    def careful(self) -> tuple[Dense, Tensor]:
        """Nothing is multiplied but by a weight."""
        return self, scaled_norms(self.rows)

    def without(self, odd: Tensor) -> Dense:
        """Rows of zeros."""
        return Dense(_zeroed(self.rows, odd))


@dataclass(frozen=True, eq=False)
class Outer:
    """Outer products δ·aᵀ of (B, outputs) and (B, inputs), times `scales` (B,) in float64 where there are any."""

    deltas: Tensor
    inputs: Tensor
    scales: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """‖δ·aᵀ‖ = ‖δ‖·‖a‖."""
        return self.deltas, self.inputs

    def total(self, weights: Tensor) -> Tensor:
        """(w·δ)ᵀ·a: the product an ordinary backward pass makes."""
        clients, each = weights.shape
        flat = weights.reshape(-1)
        if self.scales is not None:
            flat = (flat * self.scales).to(weights.dtype)
        left = (flat[:, None] * self.deltas).reshape(clients, each, -1)
        right = self.inputs.to(weights.dtype).reshape(clients, each, -1)
        return _by_blocks(lambda block, other: torch.bmm(block.transpose(1, 2), other).flatten(1), left, right)

    def careful(self) -> tuple[Outer, Tensor]:
        """Both factors near 1: a δ that rounds to nothing when weighted may meet an a that makes it large."""
        (left, left_scale), (right, right_scale) = _near_one(self.deltas), _near_one(self.inputs)
        return Outer(left, right, left_scale * right_scale), scaled_norms(self.deltas) * scaled_norms(self.inputs)

    def without(self, odd: Tensor) -> Outer:
        """Zeros times zeros."""
        scales = None if self.scales is None else _zeroed(self.scales, odd)
        return Outer(_zeroed(self.deltas, odd), _zeroed(self.inputs, odd), scales)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a table with `size` rows: word (B, R) of each sample gets values (B, R, width).

    A word that a sample has several times has zeros in all places but one.
    """

    words: Tensor
    values: Tensor
    size: int

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """No two places of a sample add up on the same row."""
        return (self.values.flatten(1),)

    def total(self, weights: Tensor) -> Tensor:
        """One table per client, filled in one go (not `index_add_`, whose order varies on a GPU)."""
        clients, each = weights.shape
        scaled = weights[:, :, None, None] * self.values.reshape(clients, each, *self.values.shape[1:])

        def tables(words: Tensor, values: Tensor) -> Tensor:
            places = words + torch.arange(len(words), device=words.device)[:, None, None] * self.size
            given = (values.flatten(0, 2), places.flatten(), len(words) * self.size, -1, False)
            return torch.ops.aten.embedding_dense_backward(*given).reshape(len(words), -1)  # type: ignore[no-any-return]

        return _by_blocks(tables, self.words.reshape(clients, each, -1), scaled)

    def careful(self) -> tuple[Rows, Tensor]:
        """Nothing is multiplied but by a weight."""
        return self, scaled_norms(self.values.flatten(1))

    def without(self, odd: Tensor) -> Rows:
        """Words with zeros."""
        return replace(self, values=_zeroed(self.values, odd))


def measured(factors: Mapping[str, Factor]) -> tuple[dict[str, Factor], Tensor]:
    """Every sample's norm over all parameters, in float64, and factors to sum with.

    Norms are not finite for samples whose gradient is not, and in the factors those are zero: zero times what is not
    finite would not be zero.
    """
    parts = [factor.parts for factor in factors.values()]
    products = [part for part in parts if len(part) == 2]
    single = [part[0] for part in parts if len(part) == 1]
    squared, usual = squares([*single, *(pair[0] for pair in products), *(pair[1] for pair in products)])
    alone, left, right = torch.split(squared, [len(single), len(products), len(products)])
    norms = (alone.sum(0) + (left * right).sum(0)).sqrt()
    if bool(usual.all()):
        return dict(factors), norms
    made = {name: factor.careful() for name, factor in factors.items()}
    # Only of those that need it: were all norms taken anew, and rounded otherwise, one record would move every weight.
    norms = torch.where(usual, norms, scaled_norms(torch.stack([norm for _, norm in made.values()], 1)))
    odd = ~norms.isfinite()
    return {name: factor.without(odd) for name, (factor, _) in made.items()}, norms


def _by_blocks(product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    """A product that adds the samples (dimension 1) of its factors, a bounded number of them at a time, all at once.

    Those sums are added pairwise: a rounding for every doubling.
    """
    clients, samples = left.shape[:2]
    if samples <= SAMPLES_ADDED:
        return product(left, right)
    whole = samples - samples % SAMPLES_ADDED
    blocks = (part[:, :whole].reshape(-1, SAMPLES_ADDED, *part.shape[2:]) for part in (left, right))
    sums = product(*blocks).reshape(clients, whole // SAMPLES_ADDED, -1)
    if whole < samples:
        sums = torch.cat([sums, product(left[:, whole:], right[:, whole:])[:, None]], 1)
    while (count := sums.shape[1]) > 1:
        paired = sums[:, 0 : count - count % 2 : 2] + sums[:, 1::2]
        sums = torch.cat([paired, sums[:, -1:]], 1) if count % 2 else paired
    return sums[:, 0]


def _zeroed(values: Tensor, odd: Tensor) -> Tensor:
    return values.masked_fill(odd.reshape(-1, *[1] * (values.dim() - 1)), 0)


def _near_one(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows divided by powers of two that bring their largest numbers near 1, and those powers in float64."""
    rows = rows.to(working(rows.dtype))
    limit = -int(math.log2(torch.finfo(rows.dtype).tiny))  # 2^±limit are both normal numbers, so nothing is rounded
    _, exponents = torch.frexp(rows.abs().amax(1))
    powers = torch.exp2(exponents.clamp(-limit, limit).double())
    return rows * (1.0 / powers).to(rows.dtype)[:, None], powers


def linear_weight(inputs: Tensor, deltas: Tensor) -> Factor:
    """The weight's gradient from (B, R, inputs) and (B, R, outputs): Σ_r δ_r·a_rᵀ."""
    if inputs.shape[1] == 1:
        return Outer(deltas[:, 0], inputs[:, 0])
    return Dense(torch.bmm(deltas.transpose(1, 2), inputs).flatten(1))


def embedding_weight(words: Tensor, deltas: Tensor, *, size: int, padding: int | None) -> Factor:
    """The table's gradient from (B, R) word numbers and (B, R, width); padding gets none.

    Values of equal words are added first, once for norm and sum: added again in another order, values that all but
    cancel would leave another remainder.
    """
    if padding is not None:
        deltas = deltas * (words != padding)[:, :, None]
    equal = words[:, :, None] == words[:, None, :]
    positions = torch.arange(words.shape[1], device=words.device)
    first = torch.where(equal, positions, len(positions)).amin(2)
    gather = (first[:, None, :] == positions[:, None]).to(deltas.dtype)
    return Rows(words, torch.bmm(gather, deltas), size)


@dataclass(eq=False)
class LayerRecorder:
    """One forward pass: `taps` to add in order of the calls (None: probing, make them), and what came in."""

    taps: Sequence[Tensor] | None = None
    expected: Sequence[nn.Module] = ()
    inputs: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    layers: list[nn.Module] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)

    def note(self, layer: nn.Module, input: Tensor, output: Tensor) -> Tensor:
        """Record a call and return its output with the tap added."""
        number = len(self.inputs)
        self.inputs.append(input)
        self.layers.append(layer)
        if self.taps is None:
            self.versions.append(input._version)
            self.made.append(torch.zeros_like(output).requires_grad_())
            return output + self.made[-1]
        if number >= len(self.taps) or self.expected[number] is not layer or self.taps[number].shape != output.shape:
            raise RuntimeError("The model calls its layers in another order than when it was probed.")
        return output + self.taps[number]


class _Slot:
    """Where a network's recorded layers find the recorder of the pass that is running."""

    def __init__(self) -> None:
        self.recorder = LayerRecorder()


class RecordedLinear(nn.Linear):
    """Wx + b."""

    original: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, TappedLinear)
    slot: _Slot

    def forward(self, input: Tensor) -> Tensor:
        """Compute and record."""
        bias = None if self.bias is None else self.bias.detach()
        return self.slot.recorder.note(self, input, F.linear(input, self.weight.detach(), bias))

    def factors(self, inputs: Sequence[Tensor], deltas: Sequence[Tensor]) -> dict[str, Factor]:
        """Gradients of weight and bias from all calls' inputs and δ, samples first."""
        given = torch.cat([tensor.flatten(1, -2) for tensor in inputs], 1)
        back = torch.cat([tensor.flatten(1, -2) for tensor in deltas], 1)
        return {"weight": linear_weight(given, back), "bias": Dense(back.sum(1))}

    def numbers(self, inputs: Sequence[Tensor]) -> int:
        """How many numbers a sample's factors take."""
        rows = sum(tensor.numel() // self.in_features for tensor in inputs)
        return self.in_features + self.out_features if rows == 1 else self.weight.numel()


class RecordedEmbedding(nn.Embedding):
    """A table of words."""

    original: ClassVar[tuple[type[nn.Module], ...]] = (nn.Embedding,)
    slot: _Slot

    def forward(self, input: Tensor) -> Tensor:
        """Look up and record."""
        return self.slot.recorder.note(self, input, F.embedding(input, self.weight.detach()))

    def factors(self, inputs: Sequence[Tensor], deltas: Sequence[Tensor]) -> dict[str, Factor]:
        """The table's gradient from all calls' words and δ, samples first."""
        words = torch.cat([tensor.flatten(1) for tensor in inputs], 1)
        back = torch.cat([tensor.flatten(1, -2) for tensor in deltas], 1)
        return {"weight": embedding_weight(words, back, size=self.num_embeddings, padding=self.padding_idx)}

    def numbers(self, inputs: Sequence[Tensor]) -> int:
        """How many numbers a sample's factors take."""
        words = sum(tensor.numel() for tensor in inputs)
        return words * (self.embedding_dim + words)


class RecordedConvolution(nn.Conv2d):
    """A convolution of pictures whose weight's gradients are products of matrices of patches.

    Under vmap they are a convolution with a group for every sample, for which a GPU has no good kernel.
    """

    original: ClassVar[tuple[type[nn.Module], ...]] = (nn.Conv2d,)
    slot: _Slot

    def forward(self, input: Tensor) -> Tensor:
        """Compute and record."""
        if input.dim() == 3:  # a picture that is no batch
            return self(input[None])[0]  # type: ignore[no-any-return]
        bias = None if self.bias is None else self.bias.detach()
        made = F.conv2d(input, self.weight.detach(), bias, self.stride, self.padding)
        return self.slot.recorder.note(self, input, made)

    def factors(self, inputs: Sequence[Tensor], deltas: Sequence[Tensor]) -> dict[str, Factor]:
        """Gradients of weight and bias from all calls' inputs and δ, samples first."""
        given = torch.cat([self._patches(tensor) for tensor in inputs], 2)
        back = torch.cat([tensor.transpose(1, 2).flatten(2) for tensor in deltas], 2)
        return {"weight": Dense(torch.bmm(back, given.transpose(1, 2)).flatten(1)), "bias": Dense(back.sum(2))}

    def _patches(self, input: Tensor) -> Tensor:
        """What the kernel meets at every place it stands, (samples, channels · kernel, places)."""
        (height, width), (down, right) = self.kernel_size, self.stride
        rows, columns = (int(size) for size in self.padding)
        padded = F.pad(input.transpose(1, 2), (columns, columns, rows, rows))
        windows = padded.unfold(3, height, down).unfold(4, width, right)
        return windows.permute(0, 1, 5, 6, 2, 3, 4).flatten(4).flatten(1, 3)

    def numbers(self, inputs: Sequence[Tensor]) -> int:
        """How many numbers a sample's factors take."""
        height, width = self.kernel_size
        return self.weight.numel() + height * width * sum(tensor.numel() for tensor in inputs)


Recorded = RecordedLinear | RecordedEmbedding | RecordedConvolution
_KINDS: tuple[type[Recorded], ...] = (RecordedLinear, RecordedEmbedding, RecordedConvolution)


def install(module: nn.Module, *, patches: bool) -> _Slot:
    """Turn every layer that can be recorded into its recorded twin, in place; convolutions only with `patches`."""
    slot = _Slot()
    owners: dict[int, int] = {}
    for layer in module.modules():
        for parameter in layer._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for layer in module.modules():
        kind = next((kind for kind in _KINDS if type(layer) in kind.original), None)
        if (
            kind is not None
            and (patches or kind is not RecordedConvolution)
            and _plain(layer)
            and all(owners[id(p)] == 1 for p in layer._parameters.values() if p is not None)
        ):
            layer._before = type(layer)  # type: ignore[assignment]
            layer.slot = slot  # type: ignore[assignment]
            layer.__class__ = kind
    return slot


@contextmanager
def unrecorded(module: nn.Module) -> Iterator[None]:
    """The layers as they were before, inside: gradients of their parameters are then in no factors."""
    layers = [(layer, type(layer)) for layer in module.modules() if isinstance(layer, Recorded)]
    for layer, _ in layers:
        layer.__class__ = layer._before  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, kind in layers:
            layer.__class__ = kind


def _plain(layer: nn.Module) -> bool:
    """Whether the layer does what its class says and nothing beside it."""
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return False
    if not isinstance(layer._parameters.get("weight"), nn.Parameter) or "forward" in vars(layer):
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    if isinstance(layer, nn.Conv2d):
        known = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        return known and isinstance(layer.padding, tuple)
    return True


CPU_BYTES = 160 << 20
CPU_TENSOR_BYTES = 16 << 20
"""More for one tensor is slower on a CPU: beyond 32 MB, malloc asks the system for new pages every time."""
GPU_SHARE = 1 / 6
"""Of a GPU's memory, whatever else lies there: how sums round is to depend on the card alone."""


def _budget(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * GPU_SHARE)
    return CPU_BYTES


@dataclass(frozen=True, eq=False)
class Sums:
    """Clipped sums (clients, parameters), and every sample's gradient norm and loss (clients, samples)."""

    sums: Tensor
    norms: Tensor
    losses: Tensor


def joined(parts: Sequence[Sums]) -> Sums:
    """Several groups of clients with equally many samples, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Sums(*(torch.cat([getattr(part, field) for part in parts]) for field in ("sums", "norms", "losses")))


def _summed(parts: Iterator[Sums]) -> Sums:
    """Several parts of the same clients' samples, in order; the sums of one part are held at a time."""
    first = next(parts)
    sums, norms, losses = first.sums, [first.norms], [first.losses]
    for part in parts:
        sums = sums.double().add_(part.sums)  # so that many parts round no more than one does
        norms.append(part.norms)
        losses.append(part.losses)
    return Sums(sums, torch.cat(norms, 1), torch.cat(losses, 1))


def trained_names(architecture: Architecture) -> list[str]:
    """The parameters the model's author did not freeze."""
    return [name for name in architecture.parameters.names if name not in architecture.frozen]


def placed(named: dict[str, nn.Parameter], sums: dict[str, Tensor], clients: int) -> Tensor:
    """All parameters' sums side by side, zero where nothing is trained."""
    parts = [
        sums[name] if name in sums else parameter.new_zeros(clients, parameter.numel())
        for name, parameter in named.items()
    ]
    return torch.cat(parts, 1)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The recorded calls of one pass over one sample, the numbers that such a pass keeps, and those of one tensor."""

    layers: list[Recorded]
    taps: list[Tensor]
    numbers: int
    largest: int


class PerSample:
    """A network whose per-sample gradients are taken under vmap, in factors where a layer allows it.

    Convolutions are taken by `patches` on a GPU, where they are not given; on a CPU that is the slower way.
    """

    def __init__(self, architecture: Architecture, loss: Loss, *, patches: bool | None = None) -> None:
        self.module = architecture.new_skeleton(fused=False).requires_grad_(False)
        self._loss = loss
        self._trained = set(trained_names(architecture))
        if patches is None:
            patches = any(parameter.device.type == "cuda" for parameter in self.module.parameters())
        self._slot = install(self.module, patches=patches)
        vmapped.install(self.module)
        pool_swiftly(self.module)
        self._random = "different" if has_random_layers(self.module) else "error"
        self._plans: dict[tuple[object, ...], _Plan] = {}

    def __call__(self, x: Tensor, y: Tensor, *, clients: int, clip: float, budget: int | None = None) -> Sums:
        """The clipped sums of `clients` clients with equally many samples, those of a client in a row."""
        plan = self._plan(x[:1], y[:1])
        each = len(y) // clients
        budget = budget or _budget(x.device)
        element = next((parameter.element_size() for parameter in self.module.parameters()), 4)
        at_once = max(1, budget // (plan.numbers * element))
        if x.device.type == "cpu":
            at_once = max(1, min(at_once, CPU_TENSOR_BYTES // (plan.largest * element)))
        whole = max(1, at_once // each)
        parts = []
        for start in range(0, clients, whole):
            count = min(whole, clients - start)
            first, end, size = start * each, (start + count) * each, at_once if whole == 1 else count * each
            spans = (slice(start, min(start + size, end)) for start in range(first, end, size))
            parts.append(_summed(self._chunk(plan, x[span], y[span], count, clip) for span in spans))
        return joined(parts)

    def _chunk(self, plan: _Plan, x: Tensor, y: Tensor, clients: int, clip: float) -> Sums:
        factors, losses = self._factors(plan, x, y)
        if factors:
            factors, norms = measured(factors)
        else:
            norms = torch.zeros_like(losses, dtype=torch.float64)
        weights = clip_weights(norms, clip, working(losses.dtype)).reshape(clients, -1)
        with full_precision():
            sums = {name: factor.total(weights) for name, factor in factors.items()}
        side_by_side = placed(dict(self.module.named_parameters()), sums, clients)
        return Sums(side_by_side, norms.reshape(clients, -1), losses.reshape(clients, -1))

    def _factors(self, plan: _Plan, x: Tensor, y: Tensor) -> tuple[dict[str, Factor], Tensor]:
        """Every trained parameter's gradients of every sample, and the losses."""
        recorded = self._recorded(plan)
        named: dict[str, Tensor] = dict(self.module.named_parameters())
        rest = {name: parameter for name, parameter in named.items() if name in self._trained and name not in recorded}

        def one_sample(
            taps: list[Tensor], values: dict[str, Tensor], sample: Tensor, target: Tensor
        ) -> tuple[Tensor, list[Tensor]]:
            recorder = self._slot.recorder = LayerRecorder(taps, plan.layers)
            output = torch.func.functional_call(self.module, values, (sample[None],))
            if len(recorder.inputs) != len(taps):
                raise RuntimeError("The model calls fewer layers than when it was probed.")
            return self._loss.mean(output, target[None]), recorder.inputs

        derived = torch.func.grad_and_value(one_sample, argnums=(0, 1), has_aux=True)
        mapped = torch.vmap(derived, in_dims=(None, None, 0, 0), randomness=self._random)
        try:
            with vectorising():
                (deltas, dense), (losses, inputs) = mapped(plan.taps, rest, x, y)
        finally:
            self._slot.recorder = LayerRecorder()
        factors: dict[str, Factor] = {name: Dense(grads.flatten(1)) for name, grads in dense.items()}
        for layer in dict.fromkeys(plan.layers):
            calls = [number for number, called in enumerate(plan.layers) if called is layer]
            made = layer.factors([inputs[number] for number in calls], [deltas[number] for number in calls])
            names = {id(parameter): name for name, parameter in recorded.items()}
            for name, factor in made.items():
                parameter = layer._parameters[name]
                if parameter is not None and names[id(parameter)] in self._trained:
                    factors[names[id(parameter)]] = factor
        return factors, losses

    def _recorded(self, plan: _Plan) -> dict[str, nn.Parameter]:
        owned = {id(p) for layer in plan.layers for p in layer._parameters.values()}
        return {name: p for name, p in self.module.named_parameters() if id(p) in owned}

    def _plan(self, x: Tensor, y: Tensor) -> _Plan:
        key = (tuple(x.shape), x.dtype, tuple(y.shape), y.dtype)
        if key not in self._plans:
            with torch.random.fork_rng([x.device] if x.device.type == "cuda" else []):
                while (plan := self._probe(x, y)) is None:
                    pass
            self._plans[key] = plan
        return self._plans[key]

    def _probe(self, x: Tensor, y: Tensor) -> _Plan | None:
        """Run one sample and see which layers are called; None if some had to be given up.

        A recorded layer whose parameters are read elsewhere too, or whose input is changed later, has
        gradients that its own calls do not tell.
        """
        recorder = self._slot.recorder = LayerRecorder()
        values = {
            name: parameter.detach().clone().requires_grad_() for name, parameter in self.module.named_parameters()
        }
        shared, numbers, largest = {tensor.untyped_storage().data_ptr() for tensor in values.values()}, 0, 1

        def keep(tensor: Tensor) -> Tensor:
            """Count what the pass keeps for its way back, the parameters (shared by all samples) aside."""
            nonlocal numbers, largest
            if tensor.untyped_storage().data_ptr() not in shared:
                numbers += tensor.numel()
                largest = max(largest, tensor.numel())
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved)
        with torch.enable_grad(), plain_attention(), hooks:
            loss = self._loss.mean(torch.func.functional_call(self.module, values, (x.clone(),)), y)
            names = list(values)
            grads = torch.autograd.grad(loss, [values[name] for name in names], allow_unused=True)
        used = {name for name, grad in zip(names, grads, strict=True) if grad is not None}
        named = {id(parameter): name for name, parameter in self.module.named_parameters()}
        changed = {
            id(layer)
            for layer, given, version in zip(recorder.layers, recorder.inputs, recorder.versions, strict=True)
            if given._version != version
        }
        layers = [layer for layer in recorder.layers if isinstance(layer, Recorded)]
        doubtful = [
            layer
            for layer in dict.fromkeys(layers)
            if id(layer) in changed or used & {named[id(parameter)] for parameter in layer.parameters(recurse=False)}
        ]
        for layer in doubtful:
            layer.__class__ = layer._before  # type: ignore[assignment]
        if doubtful:
            return None
        numbers += sum(tensor.numel() for tensor in (*recorder.inputs, *recorder.made))
        for layer in dict.fromkeys(layers):
            numbers += layer.numbers([i for i, called in zip(recorder.inputs, layers, strict=True) if called is layer])
        recorded = {named[id(parameter)] for layer in layers for parameter in layer.parameters(recurse=False)}
        numbers += sum(tensor.numel() for n, tensor in values.items() if n in self._trained and n not in recorded)
        return _Plan(layers, [torch.zeros_like(tensor) for tensor in recorder.made], max(1, numbers), largest)
