"""The one question of these tests: is a veiled network exactly the true one, as plain torch computes it?

`trial` veils a network, lets a client compute on it, recovers, and compares with torch.autograd on the
original module (stock normalisation layers and all). `assert_exact` insists on 1e-9 in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.downlink import (
    Architecture,
    Broadcast,
    Decomposed,
    Downlink,
    HeadNoise,
    Mean,
    Rescaling,
    ScaleTable,
    draw,
)
from fedveil.downlink.architecture import load_epsilon, load_parameters, load_statistics
from fedveil.downlink.decomposed import load_multipliers
from fedveil.secrets import SeededSecrets
from fedveil.work import Batches, ClientData, CrossEntropy, Gradients, Loss, SquareLoss, Workspace
from fedveil.work.batches import seeded_dropout

TOLERANCE = 1e-9
SEED = 11


@dataclass(frozen=True)
class Trial:
    """How far a veiled round is from the true one, relative to the largest true number."""

    table: ScaleTable
    output: float
    gradient: float
    loss: float
    statistics: float
    hidden: float
    """How far the broadcast parameters are from the true ones: 0 would mean that nothing is hidden."""


def scramble(model: nn.Module, seed: int = 0) -> None:
    """Move every parameter and running statistic off its special initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise.to(parameter.dtype))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(generator=generator)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0, generator=generator)


def relative(found: Tensor, true: Tensor) -> float:
    """max|found − true| / max|true|; 0 for empty tensors."""
    if true.numel() == 0:
        assert found.numel() == 0
        return 0.0
    return float((found - true).abs().max() / true.abs().max().clamp_min(1e-12))


def true_loss(loss: Loss, output: Tensor, target: Tensor) -> Tensor:
    """The loss, written down once more without FedVeil."""
    if isinstance(loss, CrossEntropy):
        return nn.functional.cross_entropy(output, target)
    assert isinstance(loss, SquareLoss)
    if target.is_floating_point():
        return 0.5 * (output - target).pow(2).sum(-1).mean()
    total = torch.zeros((), dtype=output.dtype)
    for row, label in zip(output, target.tolist(), strict=True):
        for place, number in enumerate(row):
            true_class = place == label
            goal, weight = (loss.target_scale, loss.true_weight) if true_class else (0.0, 1.0)
            total = total + 0.5 * weight * (number - goal) ** 2
    return total / len(output)


def true_statistics(model: nn.Module, run: Callable[[], object]) -> Tensor:
    """Mean and unbiased variance of what every tracking batch norm reads, averaged over its calls.

    A layer in evaluation mode reports its running statistics, one that is not called (0, 1).
    """
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            seen[path] = []

            def note(_: nn.Module, args: tuple[Tensor, ...], into: list[tuple[Tensor, Tensor]] = seen[path]) -> None:
                rows = args[0].detach().transpose(0, 1).flatten(1)
                into.append((rows.mean(1), rows.var(1)))

            handles.append(module.register_forward_pre_hook(note))
    run()
    for handle in handles:
        handle.remove()
    parts = []
    for path, calls in seen.items():
        norm = model.get_submodule(path)
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
        if not norm.training:
            calls = [(norm.running_mean, norm.running_var)]  # type: ignore[list-item]
        elif not calls:
            calls = [(torch.zeros_like(norm.running_mean), torch.ones_like(norm.running_var))]  # type: ignore[arg-type]
        parts += [torch.stack(part).mean(0) for part in zip(*calls, strict=True)]
    return torch.cat(parts or [torch.empty(0)])


def batch(example: Tensor, samples: int, seed: int = 5) -> Tensor:
    """Other inputs like the example, in another number."""
    generator = torch.Generator().manual_seed(seed)
    if example.is_floating_point():
        return torch.randn((samples, *example.shape[1:]), generator=generator, dtype=example.dtype)
    return torch.randint(0, int(example.max()) + 1, (samples, *example.shape[1:]), generator=generator)


def trial(
    model: nn.Module,
    example: Tensor,
    *,
    groups: int = 0,
    partition: tuple[int, ...] | None = None,
    loss: Loss | None = None,
    samples: int = 5,
    regression: bool = False,
    strength: float = 1.0,
    spread: float = 4.0,
    seed: int = 0,
    vectorise: bool | None = None,
    decomposed: bool = False,
    family: str = "scale",
    streams: bool = False,
) -> Trial:
    """One veiled round of one client beside plain torch; `groups` = 0 means no head noise."""
    objective = loss or SquareLoss()
    x = batch(example, samples)
    # The truth, from the original module alone.
    original = copy.deepcopy(model)
    with seeded_dropout(original, SEED, 0, 0):
        output = original(x.clone())
    generator = torch.Generator().manual_seed(seed + 1)
    if regression:
        y = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    else:
        y = torch.randint(0, output.shape[-1], (samples,), generator=generator)
    goal = true_loss(objective, output, y)
    value = float(goal.detach())
    named = dict(original.named_parameters())
    gradients = torch.autograd.grad(goal, list(named.values()), allow_unused=True, materialize_grads=True)
    true_gradient = torch.cat([one.reshape(-1) for one in gradients])

    def again() -> None:
        with seeded_dropout(original, SEED, 0, 0):
            original(x.clone())

    statistics = true_statistics(original, again)
    # The veiled round.
    architecture, weights = draw(model, example, traced=True, family=family, streams=streams)
    assert architecture.table is not None
    weighted = isinstance(objective, SquareLoss) and objective.true_weight != 1.0
    head = HeadNoise(groups, strength, weighted, partition) if groups or partition else None
    downlink: Downlink = Decomposed(head=head) if decomposed else Rescaling(spread=spread, head=head)
    work = Gradients(objective, Batches(0, SEED), vectorise)
    layout = work.layout(architecture, tensors=downlink.head_tensors(architecture))
    veil = downlink.veil(architecture, weights, stream=SeededSecrets(seed).stream("veil", 0), head_level=None)
    sent = veil.broadcast()
    vector = work.run(Workspace(architecture, layout), sent, ClientData(0, x, y), round=0).to(torch.float64)
    parts = layout.split(vector / samples)
    assert float(parts["weight"]) == 1.0
    found = veil.recover(Mean(parts["gradients"], parts["values"], parts["statistics"]))
    tracked = parts["statistics"].numel() > 0
    return Trial(
        table=architecture.table,
        output=0.0 if head else relative(client_output(architecture, sent, x), output.detach()),
        gradient=relative(found.gradient, true_gradient.to(torch.float64)),
        loss=abs(found.loss - value) / max(abs(value), 1e-30),
        statistics=relative(found.statistics, statistics.to(torch.float64)) if tracked else 0.0,
        hidden=relative(sent.parameters, weights.parameters),
    )


def client_output(architecture: Architecture, sent: Broadcast, x: Tensor) -> Tensor:
    """What a client computes from a broadcast."""
    module = architecture.new_skeleton()
    load_parameters(module, sent.parameters)
    load_epsilon(architecture, module, sent.epsilon)
    load_multipliers(architecture, module, sent.multipliers)
    if sent.statistics.numel():
        load_statistics(module, sent.statistics)
    with seeded_dropout(module, SEED, 0, 0), torch.no_grad():
        return module(x.clone())  # type: ignore[no-any-return]


def assert_within(found: Trial, tolerance: float) -> None:
    """Every deviation is below the tolerance."""
    for what in ("output", "gradient", "loss", "statistics"):
        error = getattr(found, what)
        assert error < tolerance, f"the {what} is off by {error:.1e}, {tolerance:.0e} is allowed"


def assert_exact(model: nn.Module, example: Tensor, **options: object) -> ScaleTable:
    """The veiled network's output, recovered gradients, loss and statistics are the true ones (float64)."""
    model = model.double()
    scramble(model)
    if example.is_floating_point():
        example = example.double()
    found = trial(model, example, **options)  # type: ignore[arg-type]
    assert_within(found, TOLERANCE)
    return found.table


def free_sides(table: ScaleTable) -> dict[str, str]:
    """For every parameter the sides on which no channel is pinned: "out", "in", "out in" or ""."""
    sides = {}
    for entry in table.parameters:
        free = []
        for name, ids in (("out", entry.out), ("in", entry.into)):
            if ids is not None and bool((ids != 0).all()):
                free.append(name)
        sides[entry.name] = " ".join(free)
    return sides


def pinned_by(table: ScaleTable) -> set[str]:
    """The names of the operations that pin."""
    return {pin.operation for pin in table.pins}
