"""A model that clients can use: rescaled once more, without head noise, with exact predictions.

Batch norms are folded into a per-channel multiply and add, so that neither running statistics nor ε
travel. The last bias moves in front of the last layer, y = W(h + d) with W·d = b: it is the model's
answer to zero features and anybody with a usable model can compute it, but no number in the file is
the server's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedveil.downlink.architecture import (
    Architecture,
    VectorBatchNorm,
    VectorNorm,
    Weights,
    assemble,
    load_epsilon,
    load_parameters,
    load_statistics,
    with_vector_norms,
)
from fedveil.downlink.capture import own_randomness, seeded
from fedveil.downlink.decomposed import Decomposed, load_multipliers
from fedveil.downlink.limits import DROPOUTS
from fedveil.downlink.messages import Mean
from fedveil.downlink.rescaling import Rescaling, ScaledVeil, scaled_veil
from fedveil.downlink.scales import HeadSite, Pin
from fedveil.downlink.symmetry import chosen_bases
from fedveil.errors import ConfigError, TraceError, spelled
from fedveil.secrets import SecretStream, SeededSecrets
from fedveil.tensors import flatten


class ChannelAffine(nn.Module):
    """y = a·x + b per channel: a batch norm in evaluation mode, folded."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply and add per channel."""
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return x * self.scale.reshape(shape) + self.shift.reshape(shape)


class ShiftedLinear(nn.Module):
    """y = W(x + d): a linear layer whose bias is carried by its input."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, features))
        self.shift = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        """W(x + d)."""
        return F.linear(x + self.shift, self.weight)


@dataclass(frozen=True)
class ExportShape:
    """What changes in the architecture: folded norms (path → channels) and a shifted head (path → sizes)."""

    folded: dict[str, int]
    shifted: dict[str, tuple[int, int]]


def export(
    architecture: Architecture, weights: Weights, *, stream: SecretStream, spread: float = 4.0
) -> tuple[nn.Module, ExportShape]:
    """A client-usable model in evaluation mode, and how its architecture differs."""
    if architecture.table is None:
        raise TraceError("An export needs a traced model.")
    exact = weights.to(dtype=torch.float64)
    veil = Rescaling(spread=spread).veil(architecture, exact, stream=stream, head_level=None)
    sent = veil.broadcast()
    statistics = veil.veiled_statistics() if exact.statistics.numel() else exact.statistics
    module = assemble(architecture, Weights(sent.parameters, sent.epsilon, statistics, weights.buffers))
    head = architecture.table.head
    shape = ExportShape(
        folded={
            path: len(norm.epsilon)
            for path, norm in module.named_modules()
            if isinstance(norm, VectorBatchNorm) and norm.track
        },
        shifted={} if head is None or head.bias is None else {head.path: (head.outputs, head.features)},
    )
    _fold(module, shape)
    if shape.shifted:
        assert head is not None
        if not _shift(module, head, stream):
            shape = ExportShape(shape.folded, {})
    return module.to(weights.parameters.dtype).eval(), shape


def _replace(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    parent, _, attribute = path.rpartition(".")
    old = module.get_submodule(path)
    setattr(module.get_submodule(parent), attribute, new.to(next(module.parameters())))
    return old


def _fold(module: nn.Module, shape: ExportShape) -> None:
    with torch.no_grad():
        for path, channels in shape.folded.items():
            folded = ChannelAffine(channels)
            norm = _replace(module, path, folded)
            assert isinstance(norm, VectorBatchNorm)
            factor = torch.rsqrt(norm.running_var + norm.epsilon)
            if norm.weight is not None:
                factor = factor * norm.weight
            folded.scale.copy_(factor)
            folded.shift.copy_(-norm.running_mean * factor + (0.0 if norm.bias is None else norm.bias))


def _shift(module: nn.Module, head: HeadSite, stream: SecretStream) -> bool:
    layer = module.get_submodule(head.path)
    assert isinstance(layer, nn.Linear)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    # Any d with W·d = b serves: the smallest one plus a random part that W does not see.
    pseudo_inverse = torch.linalg.pinv(weight)
    wander = (2.0 * stream.uniform(head.features) - 1.0).to(weight)
    shift = pseudo_inverse @ (bias - weight @ wander) + wander
    if not torch.allclose(weight @ shift, bias, rtol=1e-9, atol=1e-12):
        return False
    new = ShiftedLinear(head.features, head.outputs)
    _replace(module, head.path, new)
    with torch.no_grad():
        new.weight.copy_(weight)
        new.shift.copy_(shift)
    return True


def exported_architecture(model: nn.Module, shape: ExportShape) -> nn.Module:
    """The empty architecture of an export, from the original model and what changed."""
    module = with_vector_norms(copy.deepcopy(model))
    parts = dict(module.named_modules())
    sizes = {path: len(layer.epsilon) for path, layer in parts.items() if isinstance(layer, VectorBatchNorm)}
    heads = {
        path: (layer.out_features, layer.in_features) for path, layer in parts.items() if isinstance(layer, nn.Linear)
    }
    if not (shape.folded.items() <= sizes.items() and shape.shifted.items() <= heads.items()):
        raise ConfigError("The export names layers that its model does not have.")
    for path, channels in shape.folded.items():
        _replace(module, path, ChannelAffine(channels))
    for path, (outputs, features) in shape.shifted.items():
        _replace(module, path, ShiftedLinear(features, outputs))
    return module.eval()


def stock(model: nn.Module, trained: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy of `model`, with torch's own layers, that computes what `trained` does in evaluation mode.

    A stock layer has one ε, its owner's. Where training drew others, a batch normalisation takes the difference into
    its running variance, which stands beside ε under the same root; the other layers have nothing to take it.

    Args:
        model: The network as its owner built it.
        trained: The same with vector ε (`with_vector_norms`) and trained values.

    Returns:
        The copy, and the paths of those batch normalisations.

    Raises:
        ConfigError: Some other layer has an ε that is not its class's.
    """
    module = copy.deepcopy(model).eval()
    values = {**dict(trained.named_parameters()), **dict(trained.named_buffers())}
    folded, lost = [], []
    with torch.no_grad():
        for name, target in (*module.named_parameters(), *module.named_buffers()):
            if name in values:  # all but the batches that stock layers count, and nobody reads
                target.copy_(values[name])
        for path, norm in trained.named_modules():
            if not isinstance(norm, VectorNorm):
                continue
            own = module.get_submodule(path)
            if bool((norm.epsilon == torch.full_like(norm.epsilon, float(own.eps))).all()):  # type: ignore[arg-type]
                continue
            if isinstance(norm, VectorBatchNorm) and norm.track:
                own.running_var.add_(norm.epsilon - float(own.eps))  # type: ignore[operator, arg-type]
                folded.append(path)
            else:
                lost.append(path)
    if lost:
        raise ConfigError(
            f"The ε of {', '.join(lost[:4])} was drawn in secret for each group, which a veil of scales needs, "
            "and torch's own GroupNorm, LayerNorm and InstanceNorm have a single one: no state_dict of the network's "
            f"own class gives the same outputs. Train with {spelled('family', 'full')} or "
            f"{spelled('bn_eps', 'public')}, or write ONNX (`fedveil export --format onnx`)."
        )
    return module, tuple(folded)


_SAMPLES = 3
_LARGER, _LARGEST = 7, 512
_SMALL = 1e-3
_CONVERSIONS = frozenset({"to", "float", "type", "type_as"})
_TOLERANCE = 1e-8
_DEFAULT = Rescaling(spread=4.0)


def verified(
    architecture: Architecture,
    weights: Weights,
    example: Tensor,
    *,
    downlink: Rescaling = _DEFAULT,
    sizes: Sequence[int] = (),
) -> Architecture:
    """The architecture with symmetries that hold: where some do not, those of their edges are left out, and told.

    `sizes`: as for `verify`.

    Raises:
        TraceError: The network is not traced rightly, whatever is left out.
    """
    table = architecture.table
    try:
        verify(architecture, weights, example, downlink=downlink, sizes=sizes)
        return architecture
    except TraceError:
        if table is None or table.symmetry is None:
            raise
    left, pins = table.symmetry, list(table.pins)
    for classes in table.symmetry.components():
        alone = dataclasses.replace(table, symmetry=table.symmetry.only(classes))
        try:
            verify(dataclasses.replace(architecture, table=alone), weights, example, downlink=downlink, sizes=sizes)
        except TraceError:
            left = left.without(classes)
            where = table.symmetry.origin[int(classes[0])]
            pins.append(Pin("verification", where, "outputs or gradients differ under its secrets: it has none"))
    kept = dataclasses.replace(architecture, table=dataclasses.replace(table, symmetry=left, pins=tuple(pins)))
    verify(kept, weights, example, downlink=downlink, sizes=sizes)
    return kept


def verify(
    architecture: Architecture,
    weights: Weights,
    example: Tensor,
    *,
    downlink: Rescaling | Decomposed = _DEFAULT,
    sizes: Sequence[int] = (),
) -> None:
    """Refuse an architecture whose veiled outputs or recovered gradients are off by more than 1e-8 relative.

    `downlink` is the one that will be used; its head noise is left out. The secrets are chosen, so that the same
    network always gets the same answer.

    Runs in float64 on the CPU, in evaluation mode and as clients train, without dropout; at values near the weights
    (`_stirred`), because behind zeros that training begins with nothing would differ; and on batches of other sizes,
    because a network may ask how many samples it is given: 1, 7 and, where its code could ask, those of the run
    (`sizes`, up to 512). Where the true network itself refuses a size, as batch normalisation does a single sample,
    training would stop there as well, and nothing is compared.
    """
    cpu = architecture.to(device=torch.device("cpu"))
    exact = weights.to(device=torch.device("cpu"), dtype=torch.float64)
    x = _probe(example)
    stirred = _stirred(exact)
    true = assemble(cpu, stirred)
    if not bool(_run(true, x, training=False)[0].isfinite().all()):  # it is no network there
        stirred, true = exact, assemble(cpu, exact)
    veils = [(veil, _veiled(cpu, stirred, veil)) for veil in _chosen_veils(cpu, stirred, downlink)]
    for training in (False, True):
        expected = _run(true, x, training=training)
        for veil, veiled in veils:
            output, gradient = _run(veiled, x, training=training)
            _compare(expected, (output, _recovered(veil, gradient)), "training" if training else "evaluation")
    sized = cpu.table is not None and cpu.table.sized
    asked = [min(size, _LARGEST) for size in sizes] if sized else []
    others = (veils[1:3] or veils)[: None if sized else 1]
    for size, training in dict.fromkeys([(1, False), *((size, True) for size in (1, _LARGER, *asked))]):
        x = _probe(example, size)
        try:
            expected = _run(true, x, training=training)
        except Exception:  # whatever the network's own code raises
            continue
        for veil, veiled in others:
            output, gradient = _run(veiled, x, training=training)
            mode = "training" if training else "evaluation"
            _compare(expected, (output, _recovered(veil, gradient)), mode, f" and for a batch of {size}")


def _stirred(weights: Weights) -> Weights:
    """Values that are nobody's beginning: a tenth off, and what is close to zero away from it; signs stay."""
    generator = torch.Generator().manual_seed(3)

    def away(values: Tensor, sign: Tensor) -> Tensor:
        size = torch.rand(values.shape, generator=generator, dtype=torch.float64)
        small = torch.where(values.abs() < _SMALL, 0.1 * (0.5 + size), 0.0)
        return values * (0.9 + 0.2 * size) + torch.where(values == 0, sign, values.sign()) * small

    coin = torch.randint(0, 2, weights.parameters.shape, generator=generator) * 2.0 - 1.0
    return dataclasses.replace(
        weights,
        parameters=away(weights.parameters, coin),
        statistics=away(weights.statistics, torch.ones_like(weights.statistics)),  # variances are among them
    )


def _chosen_veils(architecture: Architecture, weights: Weights, downlink: Rescaling | Decomposed) -> list[ScaledVeil]:
    table, stream = architecture.table, SeededSecrets(0).stream("verify")
    if table is None or table.symmetry is None:
        return [dataclasses.replace(downlink, head=None).veil(architecture, weights, stream=stream, head_level=None)]
    spread = downlink.spread if isinstance(downlink, Rescaling) else _DEFAULT.spread
    bases = chosen_bases(table.symmetry, table.classes, spread=spread, stream=stream)
    return [scaled_veil(architecture, weights, basis, head=None, stream=stream, head_level=None) for basis in bases]


def _veiled(architecture: Architecture, weights: Weights, veil: ScaledVeil) -> nn.Module:
    sent, module = veil.broadcast(), assemble(architecture, weights)
    load_parameters(module, sent.parameters)
    load_epsilon(architecture, module, sent.epsilon)
    load_multipliers(architecture, module, sent.multipliers)
    if weights.statistics.numel():
        load_statistics(module, veil.veiled_statistics())
    return module


def _recovered(veil: ScaledVeil, gradient: Tensor) -> Tensor:
    nothing = torch.empty(0, dtype=torch.float64)
    return veil.recover(Mean(gradient[None], nothing, nothing)).gradient


def _compare(true: tuple[Tensor, Tensor], veiled: tuple[Tensor, Tensor], mode: str, size: str = "") -> None:
    names = ("output", "recovered gradient")
    errors = [(name, _off(a, b)) for name, a, b in zip(names, true, veiled, strict=True)]
    what, error = max(errors, key=lambda pair: _rank(pair[1]))
    if not error < _TOLERANCE:
        raise TraceError(
            f"The veiled network's {what} differs from the true one by {error:.1e} relative (in {mode} "
            f"mode{size}), so some operation is not traced rightly and training under a veil would be wrong. "
            f"Nothing was trained. Use {spelled('scheme', 'fedavg')}, and please report the model."
        )


def _probe(example: Tensor, samples: int = _SAMPLES) -> Tensor:
    chosen = torch.arange(samples) % len(example)
    x = example.detach().cpu()[chosen]
    if not x.is_floating_point():
        return x
    generator = torch.Generator().manual_seed(1)
    return x.double() + torch.randn(x.shape, generator=generator, dtype=torch.float64)


def _off(true: Tensor, found: Tensor) -> float:
    if true.shape != found.shape:
        return float("inf")
    return float((true - found).abs().max() / true.abs().max().clamp_min(1e-30)) if true.numel() else 0.0


def _rank(error: float) -> float:
    return error if error == error else float("inf")


def _rounds(to: object, given: object) -> bool:
    """Whether a type has fewer digits than a tensor."""
    if not isinstance(to, torch.dtype) or not isinstance(given, Tensor) or not given.is_floating_point():
        return False
    return to.is_floating_point and torch.finfo(to).eps > torch.finfo(given.dtype).eps


class _Exactly(TorchFunctionMode):
    """Without dropout and without rounding.

    Dropout by place would drop other units of a network whose units stand elsewhere. Code that asks for single
    precision by name, as many normalisations do, would round what is compared here in double precision; a conversion
    that rounds what clients compute has no rule, and pins.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        name = str(getattr(func, "__name__", "")).rstrip("_")
        if name in DROPOUTS:
            return args[0] if args else named["input"]
        if name == "scaled_dot_product_attention":
            args, named = (*args[:4], *((0.0, *args[5:]) if len(args) > 4 else ())), {**named}
            named.update({} if len(args) > 4 else {"dropout_p": 0.0})
        if args and _rounds(named.get("dtype"), args[0]):
            named["dtype"] = args[0].dtype
        made = func(*args, **named)
        if name in _CONVERSIONS and isinstance(made, Tensor) and _rounds(made.dtype, args[0]):
            return args[0]
        return made


def _run(module: nn.Module, x: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of a fixed sum of it, as clients train or in evaluation mode."""
    modes = {part: part.training for part in module.modules()}
    if not training:
        module.eval()
    for part in module.modules():
        if isinstance(part, (nn.RNNBase, nn.MultiheadAttention)):  # theirs is inside one operation
            part.dropout = 0.0
    device = torch.device("cpu")
    with own_randomness(device), _Exactly():
        output = seeded(lambda: module(x.clone()), device)
    for part, mode in modes.items():
        part.training = mode
    assert isinstance(output, Tensor)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parameters = list(module.parameters())
    if not output.requires_grad:
        return output, flatten([torch.zeros_like(part) for part in parameters])
    gradients = torch.autograd.grad((output * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
    return output.detach(), flatten([part.detach() for part in gradients])
