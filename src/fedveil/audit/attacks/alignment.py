"""What a veil is worth against a client that aligns: units matched from one round to another, or with known weights.

A veil draws its secrets anew every round, and the network they hide is nearly the same as a round ago. So a client that
matches the two models, within the symmetries that the network has for everybody to trace, is left with the server's
update, in a basis that stays what it is from then on. Nothing but one secret for the whole run is hidden from it. With
the first model known (a published one, a guessed one) it has that secret too.

Where the last layer comes with noise, γ_s·a_i on every number of an output's row, the hidden layers are matched without
it, and what of the difference lies along the known directions a is taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fedveil.audit.attack import AttackContext, attack, seen_by
from fedveil.audit.matching import aligning_basis, balancing_basis
from fedveil.audit.views import ClientView, Sent, View
from fedveil.downlink import Architecture, Broadcast, ScaleTable
from fedveil.downlink.decomposed import transitional
from fedveil.downlink.rescaling import scale_table
from fedveil.errors import DataError, NotApplicableError
from fedveil.tensors import flatten

FIRST = "first model"
"""Under which name an auditor gives the parameters that training began with."""


@attack(
    "alignment",
    sees="model",
    asset="the server's updates",
    needs=("veil",),
    reference=None,
    adaptive=True,
    how="hidden units of two rounds matched within the network's own symmetries (ours)",
)
def alignment_attack(
    view: View, context: AttackContext, *, family: str = "scale", streams: bool = False, shifted: bool = False
) -> dict[str, Tensor]:
    """The server's update between two received models, and the earlier of them in the basis that it is written in.

    Where the auditor says what the model began with, also the last model, matched with that at once (`direct`) and
    through all received ones, one after the other (`followed`). `family`, `streams` and `shifted` are what the run's
    settings tell everybody; where gains are folded into the layers that read them, all of it is about the folded
    network, and where logits are shifted, about the network whose logits have the mean 0.
    """
    seen = seen_by(view, ClientView)
    if not seen.facts.traced:
        raise NotApplicableError("no veil: the client is sent the server's model")
    architecture = seen.facts.architecture(family, streams=streams)
    table = scale_table(architecture).sent
    models = {each.round: received(architecture, each.broadcast, shifted=shifted) for each in seen.broadcasts}
    before, after = (models[each.round] for each in pair_of(seen.broadcasts))
    fresh = flatten([value.detach() for value in seen.facts.module(seed=context.seed).parameters()])
    frame = before.rebased(table, fresh)
    update = aligned(table, after, frame.flat, noise=frame.noise) - frame.flat
    found = {"frame": frame.flat, "update": update}
    context.progress(0.2)
    if FIRST in seen.known:
        first = as_sent(architecture, seen.known[FIRST].double(), shifted=shifted)
        found["direct"] = aligned(table, models[max(models)], first)
        found["followed"] = first
        for place, round in enumerate(sorted(models)):
            found["followed"] = aligned(table, models[round], found["followed"])
            context.progress(0.2 + 0.8 * (place + 1) / len(models))
    context.progress(1.0)
    return found


def pair_of(sent: Sequence[Sent]) -> tuple[Sent, Sent]:
    """The last two models of successive rounds, or the last two, where no rounds are."""
    latest = {each.round: each for each in sent}  # of several attempts the last; their model is the same
    rounds = sorted(latest)
    if len(rounds) < 2:
        raise NotApplicableError(
            f"{len(rounds)} received model{'s' * (len(rounds) != 1)}: there are no two rounds to match (record_rounds)"
        )
    pairs = list(pairwise(rounds))
    first, second = next((pair for pair in reversed(pairs) if pair[1] == pair[0] + 1), pairs[-1])
    return latest[first], latest[second]


@dataclass(frozen=True, eq=False)
class Received:
    """A veiled model, flat, and the directions along which noise lies on its last layer, one in each row."""

    flat: Tensor
    noise: Tensor
    covered: tuple[str, ...] = ()
    """The parameters under that noise."""

    def rebased(self, table: ScaleTable, fresh: Tensor) -> Received:
        """The same as balanced as a freshly drawn model is."""
        basis = balancing_basis(table, self.flat, fresh, ignored=self.covered)
        noise = [table.hide(direction, basis) for direction in self.noise]
        return Received(table.hide(self.flat, basis), _stacked(noise, self.flat), self.covered)


def as_sent(architecture: Architecture, flat: Tensor, *, shifted: bool) -> Tensor:
    """A model in the form in which it is sent, but for secrets: gains folded, and logits without what shifts hide."""
    flat = scale_table(architecture).folded(flat)
    return _centred(architecture, flat.clone()) if shifted else flat


def _centred(architecture: Architecture, flat: Tensor) -> Tensor:
    """Logits whose mean is 0 for every sample, in place: probabilities are the same."""
    head = scale_table(architecture).head
    for name in () if head is None else (head.weight, head.bias):
        if name is not None:
            part = architecture.parameters.part(flat, name)
            part -= part.mean(0)
    return flat


def received(architecture: Architecture, broadcast: Broadcast, *, shifted: bool = False) -> Received:
    """A model as a client can write it: transitional layers multiplied into the weights behind them, shifts taken off.

    Raises:
        DataError: What was sent is no model of this architecture.
    """
    size = architecture.size
    if broadcast.parameters.shape != (size,) or not broadcast.parameters.is_floating_point():
        raise DataError(
            f"A received model holds {tuple(broadcast.parameters.shape)} numbers, and the network has {size}: the "
            "record is not of this network."
        )
    flat, directions = broadcast.parameters.double(), []
    if shifted:
        flat = _centred(architecture, flat.clone())
    covered: tuple[str, ...] = ()
    table, head = scale_table(architecture), broadcast.head
    if head is not None and table.head is not None:
        covered = tuple(name for name in (table.head.weight, table.head.bias) if name is not None)
        if head.vector.shape != head.groups.shape or head.vector.shape != (table.head.outputs,):
            raise DataError(f"A received model has noise on {len(head.vector)} of {table.head.outputs} outputs.")
        for group in range(head.count):
            row = torch.where(head.groups == group, head.vector.double(), 0.0)
            directions.append(torch.zeros_like(flat))
            for name in covered:
                part = architecture.parameters.part(directions[-1], name)
                part += row.reshape([-1] + [1] * (part.dim() - 1))
    if broadcast.multipliers.numel():
        layers = transitional(table)
        if broadcast.multipliers.shape != layers.after.shape:
            raise DataError("A received model has transitional layers of another network.")
        scales = torch.ones(layers.table.classes.count, dtype=torch.float64)
        scales[layers.after] = broadcast.multipliers.double().reciprocal()
        flat = layers.table.rescale(flat, scales)
        directions = [layers.table.rescale(direction, scales) for direction in directions]
    return Received(flat, _stacked(directions, flat), covered)


def _stacked(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack(list(rows)) if rows else like.new_empty(0, len(like))


def aligned(table: ScaleTable, moving: Received, target: Tensor, *, noise: Tensor | None = None) -> Tensor:
    """A received model in the basis of `target`, less what lies along its own noise and that of the target."""
    basis = aligning_basis(table, moving.flat, target, ignored=moving.covered)
    change = table.hide(moving.flat, basis) - target
    directions = _stacked([table.hide(direction, basis) for direction in moving.noise], target)
    if noise is not None:
        directions = torch.cat([directions, noise])
    if len(directions):
        shares = torch.linalg.lstsq(directions.T, change[:, None], driver="gelsd").solution[:, 0]
        change = change - shares @ directions
    return target + change
