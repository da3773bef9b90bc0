"""What a client's copy of the model is worth: as it was sent, after calibration, under a head of its own.

Calibration takes the head noise off. A client sees ŷ = y + α·r with r_i = γ_{s(i)}·a_i; α, a and the groups s are known
to it, γ is not. Whatever tells it something about y tells it γ, by least squares over samples k and the outputs i of
each group:

    γ̂_s = Σ_k Σ_{i∈s} α_k·a_i·(ŷ_ki − expected_ki) / Σ_k Σ_{i∈s} (α_k·a_i)²

`expected` is the target of a labelled sample, or the classes' share in unlabelled ones. Two ways need less still:
the sum of the outputs (one γ), and the weights alone (no data at all).

A probe is a head of one's own. A veil multiplies every feature by a secret positive number and covers the head. The
features themselves stay in the open up to those numbers, and a regression on standardised features does not see them:
ĥ_j = h_j/r_j has the same standardised value as h_j. So whatever the head hides can be learned again from a few labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.audit.attack import CPU, AttackContext, attack, require_classes, seen_by
from fedveil.audit.views import ClientView, View, weights_from
from fedveil.downlink import Architecture, Broadcast, PublicHead, assemble
from fedveil.downlink.architecture import VectorBatchNorm, batch_norms, load_statistics
from fedveil.errors import ConfigError, DataError, NotApplicableError
from fedveil.tensors import flatten
from fedveil.work.gradients import collect_statistics
from fedveil.work.messages import prepare

COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
_WEIGHTS = "weights."
_MOST_FOR_STATISTICS = 1024
_AT_ONCE = 1024


@attack("received", sees="model", asset="the model's function", reference=None, how="used as it is")
def received_attack(view: View, context: AttackContext) -> dict[str, Tensor]:
    """The outputs of the model as the client holds it."""
    seen = seen_by(view, ClientView)
    _, module, _ = held_model(seen, device=context.device)
    with torch.no_grad():
        parts = torch.split(fitting(module, asked_of(seen)), _AT_ONCE)
        outputs = torch.cat([module(part).to(CPU, torch.float64) for part in parts])
    context.progress(1.0)
    return {"received": outputs}


@attack(
    "calibration",
    sees="model",
    asset="the model's function",
    needs=("head noise",),
    granted=("labelled",),
    reference=None,
    adaptive=True,
    how="head noise estimated from few samples and taken off (ours)",
)
def calibration_attack(view: View, context: AttackContext, *, counts: Sequence[int] | None = None) -> dict[str, Tensor]:
    """The outputs after the head noise was taken off, by the weights alone and by n samples.

    labelled.N used N labelled samples, unlabelled.N as many inputs and the balance of classes, total.N as many inputs
    and the sum of the outputs, where there is one secret number; `counts` says which N.
    """
    seen = seen_by(view, ClientView)
    architecture, module, broadcast = held_model(seen, device=context.device)
    if broadcast is None or broadcast.head is None:
        raise NotApplicableError("no head noise: the client sees the model's own outputs, and nothing is left to do")
    x, y = labelled(seen)
    if y is None:
        require_classes(seen.facts)
    calibrated = head_calibration(
        architecture,
        broadcast,
        inputs=fitting(module, x),
        labels=y,
        queries=fitting(module, asked_of(seen)),
        counts=_counts(counts, len(x)),
        target_scale=seen.facts.target_scale,
        module=module,
    )
    context.progress(1.0)
    series = {"labelled": calibrated.labelled, "unlabelled": calibrated.unlabelled, "total": calibrated.total}
    by_count = {f"{name}.{count}": outputs for name, results in series.items() for count, outputs in results.items()}
    return {"weights": calibrated.weights, **by_count}


@attack(
    "probe",
    sees="model",
    asset="the model's function",
    needs=("classes", "numbers"),
    reference=None,
    adaptive=True,
    learns=True,
    how="a last layer of one's own on the model's features (ours)",
)
def probe_attack(view: View, context: AttackContext, *, counts: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Class scores of a head that the client fits on the features it received, from N of its labelled samples."""
    seen = seen_by(view, ClientView)
    require_classes(seen.facts)
    x, y = labelled(seen)
    if y is None:
        raise NotApplicableError("no labels: a head cannot be fitted without them")
    queries = asked_of(seen)
    architecture, module, _ = held_model(seen, device=context.device)
    own, asked = (read_head(architecture, module, fitting(module, inputs)).to(CPU) for inputs in (x, queries))
    wanted, results = _counts(counts, len(x)), {}
    for done, count in enumerate(wanted):
        head = fit_probe(own.features[:count], y[:count], outputs=seen.facts.outputs)
        results[f"probe.{count}"] = head(asked.features)
        context.progress((done + 1) / len(wanted))
    return results


@attack(
    "parameters",
    sees="model",
    asset="the model's parameters",
    reference=None,
    adaptive=True,
    how="numbers known up to scales that leave the function as it is (ours)",
)
def parameters_attack(view: View, context: AttackContext) -> dict[str, Tensor]:
    """The parameters as the client makes them out: as received, or with the head noise taken off where there is any."""
    seen = seen_by(view, ClientView)
    _, module, broadcast = held_model(seen, device=context.device)
    if broadcast is not None and broadcast.head is not None:
        module = calibrated(seen, device=context.device)
    context.progress(1.0)
    return {"parameters": flatten([parameter.detach() for parameter in module.parameters()]).to(CPU, torch.float64)}


def asked_of(view: ClientView) -> Tensor:
    """The inputs whose outputs are wanted."""
    queries = view.known.get("queries")
    if queries is None or not len(queries):
        raise ConfigError("The view holds no queries: put the inputs whose outputs are wanted into known['queries'].")
    return queries


def _counts(given: Sequence[int] | None, available: int) -> Sequence[int]:
    """How many samples to use, one after the other, as far as there are samples; the last is all of them."""
    given = given or COUNTS
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in given):
        raise ConfigError(f"counts must be whole numbers of at least 1 (got {given!r}).")
    within = sorted({count for count in given if count <= available})
    return within if within and max(given) <= available else [*within, available]


def held_model(view: ClientView, *, device: torch.device = CPU) -> tuple[Architecture, nn.Module, Broadcast | None]:
    """The last model that a client was sent, ready to evaluate, and how it was sent.

    A client that keeps the model itself has it in `known` as weights.*, and there is no broadcast. Where batch
    norms came without running statistics, the client makes its own from all inputs it has, labelled or not: a
    sample's outputs then do not depend on which others it is judged with.
    """
    architecture = view.facts.architecture()
    own = {name[len(_WEIGHTS) :]: tensor for name, tensor in view.known.items() if name.startswith(_WEIGHTS)}
    weights = weights_from(own)
    if weights is not None:
        return architecture, assemble(architecture, weights).eval().to(device), None
    sent = view.broadcasts
    if not sent:
        raise NotApplicableError(f"no model: client {view.client} was sent none in the recorded rounds")
    broadcast = sent[-1].broadcast
    return architecture, ready(view, architecture, broadcast, device=device), broadcast


def ready(view: ClientView, architecture: Architecture, broadcast: Broadcast, *, device: torch.device) -> nn.Module:
    """A received model as a client can evaluate it, or what it has made of one."""
    module = received(architecture, broadcast).to(device)
    if not broadcast.statistics.numel():
        _settle_statistics(module, inputs_at_hand(view))
    return module


def calibrated(view: ClientView, *, device: torch.device = CPU) -> nn.Module:
    """The model after the best calibration that a client can make: class scores, differentiable in inputs and weights.

    r̂ is found from its labelled samples, or from its unlabelled ones where it has no label, and taken off the
    last layer: ŷ − α·r̂ is what the layer gives with r̂ subtracted from every column of its weight and its bias.
    """
    architecture, module, broadcast = held_model(view, device=device)
    head = None if broadcast is None else broadcast.head
    if head is None:
        raise NotApplicableError("no head noise: the client sees the model's own outputs, and nothing is left to do")
    x, y = labelled(view)
    readings = read_head(architecture, module, fitting(module, x)).to(CPU)
    scale = view.facts.target_scale
    if y is None:
        require_classes(view.facts)
        noise = from_balance(readings, head, scale=scale)
    else:
        noise = from_expected(readings, targets_of(y, outputs=view.facts.outputs, target_scale=scale), head)
    return without_noise(architecture, module, noise)


def labelled(view: ClientView) -> tuple[Tensor, Tensor | None]:
    """A client's own samples, and those an auditor grants it besides as labelled.x and labelled.y."""
    x, y = view.x, view.y
    more_x, more_y = view.known.get("labelled.x"), view.known.get("labelled.y")
    if x is None:
        x, y = more_x, more_y
    elif more_x is not None:
        x = torch.cat([x, more_x.to(x)])
        y = None if y is None or more_y is None else torch.cat([y, more_y.to(y)])
    if x is None or not len(x):
        raise NotApplicableError("no samples: the client's own data are not in its view")
    if y is not None and len(x) != len(y):
        raise DataError(f"A client's samples need a label each: there are {len(x)} samples and {len(y)} labels.")
    return x, y


def inputs_at_hand(view: ClientView) -> Tensor:
    """Every input that a client has, in mixed order, whatever it knows about them; none may be there."""
    names = ("labelled.x", "public.x", "queries", "candidates.x")
    given = [tensor for tensor in (view.x, *map(view.known.get, names)) if tensor is not None]
    if not given:
        return torch.empty(0)
    every = torch.cat([tensor.to(given[0]) for tensor in given])
    return every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]


def fitting(module: nn.Module, x: Tensor) -> Tensor:
    """Inputs where the model is, in its precision; tokens keep their type."""
    return inputs_like(next(module.parameters()), x)


def inputs_like(like: Tensor, x: Tensor) -> Tensor:
    """Inputs where `like` is, in its precision; tokens keep their type."""
    return x.to(like.device, like.dtype if x.is_floating_point() else None)


def _settle_statistics(module: nn.Module, inputs: Tensor) -> None:
    """Running statistics from one batch; without at least two inputs, norms go on using the batch they are given."""
    norms = batch_norms(module)
    if not norms or len(inputs) < 2:
        return
    with torch.no_grad():
        module(fitting(module, inputs[:_MOST_FOR_STATISTICS]))
        load_statistics(module, collect_statistics(module, next(module.parameters())))
    module.eval()


@dataclass(frozen=True, eq=False)
class Readings:
    """What the last linear layer of a received model reads (ĥ, samples × features) and gives (ŷ), in float64."""

    features: Tensor
    outputs: Tensor
    bias: bool

    @property
    def alpha(self) -> Tensor:
        """α = Σ_j ĥ_j, + 1 if the last layer has a bias: the size of the head noise on each sample."""
        return self.features.sum(1) + (1.0 if self.bias else 0.0)

    def rows(self, count: int) -> Readings:
        """The first `count` samples."""
        return Readings(self.features[:count], self.outputs[:count], self.bias)

    def to(self, device: torch.device) -> Readings:
        """The same on another device."""
        return Readings(self.features.to(device), self.outputs.to(device), self.bias)


def as_sent(architecture: Architecture, broadcast: Broadcast) -> nn.Module:
    """The model on which a client computes, veiled or not."""
    module = architecture.new_skeleton().to(broadcast.parameters.device, broadcast.parameters.dtype)
    prepare(architecture, module, broadcast)
    return module


def received(architecture: Architecture, broadcast: Broadcast) -> nn.Module:
    """The model as a client holds it; batch norms use the batch where no running statistics were sent."""
    module = as_sent(architecture, broadcast).eval()
    for layer in module.modules():
        if isinstance(layer, VectorBatchNorm) and not broadcast.statistics.numel():
            layer.train()
    return module


def last_linear(module: nn.Module) -> str | None:
    """The path of the last linear layer; None where there is none."""
    linear = [path for path, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return linear[-1] if linear else None


def head_path(architecture: Architecture) -> str:
    """Where the last linear layer is: as traced, or the last one of the architecture."""
    if architecture.table is not None and architecture.table.head is not None:
        return architecture.table.head.path
    last = last_linear(architecture.skeleton)
    if last is None:
        raise NotApplicableError("no nn.Linear layer in the model: there is no head to probe or to calibrate")
    return last


def read_head(architecture: Architecture, module: nn.Module, x: Tensor) -> Readings:
    """Run inputs through a received model and keep what its last linear layer reads and gives."""
    layer = module.get_submodule(head_path(architecture))
    assert isinstance(layer, nn.Linear)
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((args[0].double(), output.double()))

    # A hook on the call itself sees the input past transitional multipliers, as the layer does.
    handle = layer.register_forward_hook(keep)
    try:
        with torch.no_grad():
            for part in torch.split(x, _AT_ONCE):
                module(part)
    finally:
        handle.remove()
    features = torch.cat([features.flatten(1) for features, _ in seen])
    return Readings(features, torch.cat([outputs for _, outputs in seen]), layer.bias is not None)


def targets_of(labels: Tensor, *, outputs: int, target_scale: float = 1.0) -> Tensor:
    """What a perfectly trained model would say: M at the true class, 0 elsewhere; regression targets as they are."""
    if labels.is_floating_point():
        return labels.double()
    return target_scale * F.one_hot(labels, outputs).double()


def uncovered(readings: Readings, noise: Tensor) -> Tensor:
    """ŷ − α·r̂."""
    return readings.outputs - readings.alpha[:, None] * noise


def from_expected(readings: Readings, expected: Tensor, head: PublicHead) -> Tensor:
    """r̂ by least squares from what the outputs are expected to be (it broadcasts to samples × outputs)."""
    if not len(readings.outputs):
        raise DataError("Calibration needs at least one sample; it was given none.")
    vector = head.vector.double()
    factor = readings.alpha[:, None] * vector
    error = readings.outputs - expected
    zeros = vector.new_zeros(head.count)
    above = zeros.index_add(0, head.groups, (factor * error).sum(0))
    below = zeros.index_add(0, head.groups, factor.square().sum(0))
    gamma = above / below.clamp_min(1e-300)
    return gamma[head.groups] * vector


def from_balance(readings: Readings, head: PublicHead, *, shares: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Without a label: on average an output is its class's share of the data (all alike, unless told)."""
    outputs = readings.outputs.shape[1]
    share = torch.full((outputs,), 1.0 / outputs).to(readings.outputs) if shares is None else shares.double()
    return from_expected(readings, scale * share, head)


def from_total(readings: Readings, head: PublicHead, *, total: float = 1.0) -> Tensor:
    """Without a label, one γ: the outputs of a model trained on one-hot targets sum to M, so Σŷ = M + α·γ·Σa.

    One input is enough. With more than one γ this is one equation for several unknowns, and refused.
    """
    if head.count != 1:
        raise ConfigError(
            f"The sum of the outputs gives one secret number away, and this head noise has {head.count}: use "
            "from_balance or from_expected."
        )
    vector = head.vector.double()
    factor = readings.alpha * vector.sum()
    left = readings.outputs.sum(1) - total
    return (factor @ left) / factor.square().sum().clamp_min(1e-300) * vector


def from_weights(weight: Tensor, bias: Tensor | None, head: PublicHead) -> Tensor:
    """Without any data: r is added to a whole row of weights whose own values scatter about zero.

    Ŵ_ij = W_ij/r_j + r_i, so the median of a row is about r_i; rows of one group are weighted by a.
    """
    rows = weight.double() if bias is None else torch.cat([weight, bias[:, None]], 1).double()
    middle = rows.median(1).values
    vector = head.vector.double()
    zeros = vector.new_zeros(head.count)
    above = zeros.index_add(0, head.groups, vector * middle)
    below = zeros.index_add(0, head.groups, vector.square())
    return (above / below)[head.groups] * vector


def without_noise(architecture: Architecture, module: nn.Module, noise: Tensor) -> nn.Module:
    """A copy of a received model with r̂ off its last layer: (Ŵ − r̂·1ᵀ)·ĥ + b̂ − r̂ = ŷ − α·r̂, as a model."""
    twin = copy.deepcopy(module)
    layer = twin.get_submodule(head_path(architecture))
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.sub_(noise.to(layer.weight)[:, None])
        if layer.bias is not None:
            layer.bias.sub_(noise.to(layer.bias))
    return twin


@dataclass(frozen=True, eq=False)
class Calibrated:
    """What a client makes of a model under head noise: outputs for its queries, by how it came to them.

    `labelled[n]` used n labelled samples, `unlabelled[n]` the same n inputs without their labels by the balance of
    classes, `total[n]` by the sum of the outputs (one γ only); `weights` used no data. `received` are the outputs
    as they are.
    """

    received: Tensor
    weights: Tensor
    labelled: Mapping[int, Tensor]
    unlabelled: Mapping[int, Tensor]
    total: Mapping[int, Tensor]


def head_calibration(
    architecture: Architecture,
    broadcast: Broadcast,
    *,
    inputs: Tensor,
    labels: Tensor | None,
    queries: Tensor,
    counts: Sequence[int] = COUNTS,
    target_scale: float = 1.0,
    module: nn.Module | None = None,
) -> Calibrated:
    """Outputs for `queries` after calibration on the first n of a client's own samples, for every n there is.

    `target_scale` is the square loss's M, which every client is told; `labels` may be missing. `module` is the
    received model where the client has prepared it already.
    """
    head = broadcast.head
    if head is None:
        raise ConfigError("This broadcast has no head noise: its outputs are the true ones, and nothing is left to do.")
    module = received(architecture, broadcast) if module is None else module
    readings = (read_head(architecture, module, batch) for batch in (inputs, queries))
    own, asked = (reading.to(head.vector.device) for reading in readings)
    layer = module.get_submodule(head_path(architecture))
    assert isinstance(layer, nn.Linear)
    rows = [None if tensor is None else tensor.detach().to(head.vector.device) for tensor in (layer.weight, layer.bias)]
    assert rows[0] is not None
    ways = _ways(head, labels, outputs=own.outputs.shape[1], target_scale=target_scale)
    outputs: dict[str, dict[int, Tensor]] = {"labelled": {}, "unlabelled": {}, "total": {}}
    for count in sorted({min(count, len(inputs)) for count in counts}):
        for name, noise in ways.items():
            outputs[name][count] = uncovered(asked, noise(own.rows(count)))
    return Calibrated(asked.outputs, uncovered(asked, from_weights(rows[0], rows[1], head)), **outputs)


def _ways(
    head: PublicHead, labels: Tensor | None, *, outputs: int, target_scale: float
) -> dict[str, Callable[[Readings], Tensor]]:
    """How r̂ can be found from the first samples, by name."""
    ways: dict[str, Callable[[Readings], Tensor]] = {}
    if labels is not None:
        targets = targets_of(labels, outputs=outputs, target_scale=target_scale).to(head.vector.device)
        ways["labelled"] = lambda part: from_expected(part, targets[: len(part.outputs)], head)
    if labels is None or not labels.is_floating_point():
        ways["unlabelled"] = lambda part: from_balance(part, head, scale=target_scale)
        if head.count == 1:
            ways["total"] = lambda part: from_total(part, head, total=target_scale)
    return ways


@dataclass(frozen=True, eq=False)
class Probe:
    """A linear head on standardised features: scores = ((ĥ − mean)/scale)·weight + offset."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    offset: Tensor
    penalty: float

    def __call__(self, features: Tensor) -> Tensor:
        """Class scores of features, samples × outputs."""
        return _standard(features, self.mean, self.scale) @ self.weight + self.offset


def fit_probe(features: Tensor, labels: Tensor, *, outputs: int) -> Probe:
    """A probe from labelled features; the ridge penalty is chosen by the leave-one-out error.

    min ‖Z·w + b − onehot‖² + λ‖w‖² over Z, the standardised features. Of ZᵀZ and ZZᵀ the smaller is taken: many samples
    of few features cost no more than their features.
    """
    if len(features) != len(labels) or not len(labels):
        raise DataError(f"A probe needs as many labels as samples, and at least one: {len(features)}, {len(labels)}.")
    features = features.double()
    mean = features.mean(0)
    spread = features.std(0, unbiased=False)
    # A feature that is constant on the labelled samples says nothing; one would divide by nothing.
    scale = torch.where(spread > 1e-9 * spread.max().clamp_min(1e-300), spread, torch.inf)
    inputs = _standard(features, mean, scale)
    targets = F.one_hot(labels, outputs).double()
    penalty = _best_penalty(inputs, targets)
    weight, offset = _ridge(inputs, targets, penalty)
    return Probe(mean, scale, weight, offset, penalty)


def _standard(features: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return (features.double() - mean) / scale


def _ridge(inputs: Tensor, targets: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    offset = targets.mean(0)
    samples, features = inputs.shape
    wide = features > samples
    gram = inputs @ inputs.T if wide else inputs.T @ inputs
    gram.diagonal().add_(penalty * samples)
    centred = targets - offset
    if wide:
        return inputs.T @ torch.linalg.solve(gram, centred), offset
    return torch.linalg.solve(gram, inputs.T @ centred), offset


def _principal(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues of ZZᵀ that are not 0, and their vectors."""
    wide = inputs.shape[1] > inputs.shape[0]
    values, vectors = torch.linalg.eigh(inputs @ inputs.T if wide else inputs.T @ inputs)
    there = values > 1e-12 * values[-1].clamp_min(1e-300)
    values, vectors = values[there], vectors[:, there]
    return values, vectors if wide else inputs @ vectors / values.sqrt()


def _best_penalty(inputs: Tensor, targets: Tensor) -> float:
    """The λ of the least leave-one-out error, e_i/(1 − H_ii) with H the hat matrix."""
    values, vectors = _principal(inputs)
    centred = targets - targets.mean(0)
    turned = vectors.T @ centred
    errors = []
    for penalty in PENALTIES:
        shrunk = values / (values + penalty * len(inputs))
        left = 1.0 - (vectors.square() @ shrunk) - 1.0 / len(inputs)
        residual = centred - vectors @ (shrunk[:, None] * turned)
        errors.append(float((residual / left.clamp_min(1e-6)[:, None]).square().sum()))
    return PENALTIES[min(range(len(PENALTIES)), key=lambda k: errors[k])]
