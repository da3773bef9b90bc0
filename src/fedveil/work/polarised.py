"""A private task beside the shared one (secret polarization network, Fan et al. 2020).

A client keeps a private head V, B numbers for each sample from the features h that the last layer reads, and secret
codes T of ± 1, a row of B for each class; for regression two rows, for targets above the median of the client's own
and for the others. Neither travels. It trains on

    a₁·loss(W·h, y) + a₂·(1/B)·Σ_b max(0, μ − u_b·T[y, b])        u = V·h

and sends the gradient or update of the shared parameters alone; V is stepped at home, by the rate of the shared ones.
The loss that is reported is the shared one. W's own gradient does not contain the private loss: W does not feed it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import Architecture
from fedveil.downlink.messages import Broadcast
from fedveil.errors import ConfigError, NumericError, TraceError, spelled
from fedveil.secrets import SecretSource
from fedveil.tensors import Layout, flatten
from fedveil.work.batches import Batches, LocalOptimiser, Schedule, seeded_dropout
from fedveil.work.gradients import collect_statistics, contribution_layout, weighted
from fedveil.work.local_sgd import LocalSteps
from fedveil.work.losses import Loss
from fedveil.work.messages import ClientData, KeptTensors, ManyAtOnce, Units, Workspace, check_finite, prepare

_ENDS_IN_LINEAR = (
    "A private head reads what the last layer reads, and this model does not end in an nn.Linear on one row of "
    "features a sample. Let it end so, or take another scheme."
)


@dataclass(frozen=True)
class Polarised(ManyAtOnce):
    """One gradient of both losses a round, or `training` on them.

    Clients are computed one after the other in this process: what they keep for themselves stays in it.
    """

    loss: Loss
    batches: Batches
    schedule: Schedule
    training: LocalSteps | None = None
    bits: int = 64
    margin: float = 1.0
    shared: float = 1.0
    private: float = 1.0

    clip = None
    reports = True
    keeps = True

    def __post_init__(self) -> None:
        if self.bits < 1:
            raise ConfigError(f"{spelled('private_bits')} must be at least 1 (got {self.bits}).")
        for name, value, least in (
            ("private_margin", self.margin, 0.0),
            ("private_weight", self.private, 0.0),
            ("shared_weight", self.shared, math.ulp(0.0)),
        ):
            if not (math.isfinite(value) and value >= least):
                above = "a number from 0 on" if least == 0 else "a positive number"
                raise ConfigError(f"{spelled(name)} must be {above} (got {value}).")

    @property
    def returns(self) -> str:
        """A gradient, unless clients train by themselves."""
        return "gradient" if self.training is None else "update"

    @property
    def local_training(self) -> tuple[int | None, int | None]:
        """As given."""
        return (None, None) if self.training is None else self.training.local_training

    def layout(self, architecture: Architecture, *, tensors: int) -> Layout:
        """gradients, values, statistics, weight: as without a private head."""
        head_of(architecture.skeleton)
        return contribution_layout(architecture, tensors=tensors)

    def run_units(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], units: Units, *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """One client after the other."""
        for unit in units:
            for position in unit:
                yield position, self._one(workspace, broadcast, clients[position], round)

    def _one(self, workspace: Workspace, broadcast: Broadcast, data: ClientData, round: int) -> Tensor | NumericError:
        module, moving, samples = workspace.module, workspace.moving, len(data)
        prepare(workspace.architecture, module, broadcast)
        head = head_of(module)
        mine = self._kept(data, head, workspace.secrets)
        secret, codes = (mine[name].to(broadcast.parameters, copy=True) for name in ("head", "codes"))
        secret.requires_grad_(True)
        training = self.training
        count = 1 if training is None else training.count(samples)
        rate = (self.schedule if training is None else training.schedule).at(round)
        optimiser = LocalOptimiser() if training is None else training.optimiser
        values = [parameter.detach() for parameter in (*moving, secret)]
        memory = optimiser.start(values)
        losses: list[Tensor] = []
        steps = self.batches.steps(client=data.client, samples=samples, first=round * count, count=count)
        with torch.enable_grad(), seeded_dropout(module, self.batches.seed, data.client, round), reading(head) as read:
            for step, chosen in steps:
                x, y = data.take(chosen, step=step)
                output = module(x)
                public = self.loss.mean(output, y)
                hinge = (self.margin - (read.features(output) @ secret.T) * codes[_rows(data, y)]).relu().mean()
                total = self.shared * public + self.private * hinge
                grads = torch.autograd.grad(total, [*moving, secret], allow_unused=True, materialize_grads=True)
                losses.append(public.detach())
                with torch.no_grad():
                    own = -1 if training is None else 0  # of one gradient, the private head alone is stepped here
                    optimiser.step(values[own:], grads[own:], memory, rate)
                if not math.isfinite(losses[-1]):
                    break
        value = torch.stack(losses).mean().reshape(1)
        if training is None:
            sent = dict(zip(map(id, moving), grads, strict=False))
            parts = [sent.get(id(parameter), torch.zeros_like(parameter)) for parameter in module.parameters()]
            moved = flatten(parts)
        else:
            moved = broadcast.parameters - flatten([parameter.detach() for parameter in module.parameters()])
        vector = weighted(torch.cat([moved, value, collect_statistics(module, value)]), samples)
        try:
            check_finite(vector, value, client=data.client, round=round, chosen=chosen)
        except NumericError as reason:
            return reason
        if data.kept is not None:
            data.kept.tensors = {"head": secret.detach(), "codes": codes}
        return vector

    def _kept(self, data: ClientData, head: nn.Linear, secrets: SecretSource) -> dict[str, Tensor]:
        """V and T as the client has them, or as it draws them in its first round: V as a linear layer begins."""
        found = dict((data.kept or KeptTensors()).tensors)
        rows = 2 if data.y.is_floating_point() else head.out_features
        shapes = {"head": (self.bits, head.in_features), "codes": (rows, self.bits)}
        if {name: tuple(value.shape) for name, value in found.items()} == shapes:
            return found
        stream = secrets.stream("polarised", data.client)
        bound = 1.0 / math.sqrt(head.in_features)
        drawn = (2.0 * stream.uniform(math.prod(shapes["head"])) - 1.0) * bound
        return {
            "head": drawn.reshape(shapes["head"]),
            "codes": stream.signs(math.prod(shapes["codes"])).reshape(shapes["codes"]),
        }


def head_of(module: nn.Module) -> nn.Linear:
    """The last linear layer; refused where there is none."""
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise TraceError(_ENDS_IN_LINEAR)
    return linear[-1]


class Read:
    """What a layer has read and given last."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None

    def keep(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """As a hook on the layer."""
        self._last = (args[0], output)

    def features(self, output: Tensor) -> Tensor:
        """(samples, features) that the layer read to give the model's `output`; refused if it did not give that."""
        if self._last is None or self._last[1].data_ptr() != output.data_ptr() or self._last[0].dim() != 2:
            raise TraceError(_ENDS_IN_LINEAR)
        return self._last[0]


@contextmanager
def reading(layer: nn.Linear) -> Iterator[Read]:
    """What a layer reads while this is open."""
    read = Read()
    hook = layer.register_forward_hook(read.keep)
    try:
        yield read
    finally:
        hook.remove()


def _rows(data: ClientData, y: Tensor) -> Tensor:
    """Which code a target has: its class's, or whether it is above the median of the client's own targets."""
    if not y.is_floating_point():
        return y
    own = data.y if data.rows is None else data.y[data.rows]
    middle = own.reshape(len(own), -1).mean(1).median()
    return (y.reshape(len(y), -1).mean(1) > middle.to(y)).long()
