"""Samples that a client holds back to judge the model by, and sums over them that travel with its contribution.

    what it trains on      as without it, on fewer samples
    what it holds back     the model that came with the round answers them; how many they are, their loss and what
                           answers are counted by are sums, and stand in the same vector, under the same masks

So the server reads what all clients of a round say together, and nothing of one. After the last round it asks once
more: then nobody trains, and the figures are those of the model that the run ends with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import Architecture, batch_norms
from fedveil.downlink.messages import Broadcast
from fedveil.errors import ConfigError, NumericError, spelled
from fedveil.tensors import LARGEST, Layout
from fedveil.work.batches import mixed_seed
from fedveil.work.gradients import objectives
from fedveil.work.losses import Loss
from fedveil.work.messages import ClientData, LocalWork, ManyAtOnce, Units, Workspace, keeps_for_itself, prepare
from fedveil.work.own_loss import own_code

FIGURES = "figures"
"""The section of a contribution that holds the sums."""
_PURPOSE = 0x4E1D
_CHUNK = 256


class AnswerCounts(Protocol):
    """What answers are counted by: `width` sums over samples."""

    @property
    def width(self) -> int:
        """How many there are."""
        ...

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sums over these samples."""
        ...


def holding_back(data: ClientData, share: float, *, seed: int, groups: Tensor | None = None) -> ClientData:
    """A client that trains on the others and holds back about `share` of its samples, at least one.

    `groups` says which of its samples belong together, and stay together. Of a single sample, or group, nothing is
    held back: the client trains on it, and has nothing to say of the model.
    """
    count = len(data)
    owners = torch.arange(count) if groups is None else torch.unique(groups.cpu(), return_inverse=True)[1]
    sizes = torch.bincount(owners)
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(mixed_seed(seed, _PURPOSE, data.client)))
    wanted = max(1, round(share * count))
    reached = torch.cumsum(sizes[order], 0)
    # The last one in the order is trained on whatever happens.
    taken = order[:-1][: int((reached < wanted).sum()) + 1]
    out = torch.isin(owners, taken)
    rows = torch.arange(count) if data.rows is None else data.rows
    out = out.to(rows.device)
    kept = replace(data, rows=rows[~out])
    return replace(kept, held_back=replace(data, rows=rows[out])) if len(taken) else data


@dataclass(frozen=True)
class Judged(ManyAtOnce):
    """The work `inner`, with figures of what clients hold back behind what it gives.

    Under head noise the outputs that a client sees are not the model's: there the loss alone is told, by the φ that
    combine into it, and nothing is counted. After `rounds` rounds nobody trains any more.
    """

    inner: LocalWork
    loss: Loss
    counts: AnswerCounts | None
    rounds: int

    @property
    def returns(self) -> str:
        """As the work inside has it."""
        return self.inner.returns

    @property
    def local_training(self) -> tuple[int | None, int | None]:
        """As the work inside has it."""
        return self.inner.local_training

    @property
    def clip(self) -> float | None:
        """As the work inside has it."""
        return self.inner.clip

    @property
    def reports(self) -> bool:
        """As the work inside has it."""
        return self.inner.reports

    @property
    def keeps(self) -> bool:
        """As the work inside has it."""
        return keeps_for_itself(self.inner)

    def layout(self, architecture: Architecture, *, tensors: int) -> Layout:
        """That of the work inside, with the figures before the weight.

        Raises:
            ConfigError: The model has batch norms whose running statistics clients are not sent.
        """
        if any(norm.training for _, norm in batch_norms(architecture.skeleton)):
            raise ConfigError(
                f"{spelled('client_test_fraction')} has clients judge the model that they are sent, and running "
                "statistics of BatchNorm are not sent: on a batch's own its answers would be others. Use GroupNorm or "
                "LayerNorm, or freeze the batch norms (eval())."
            )
        *sections, weight = self.inner.layout(architecture, tensors=tensors).sections
        width = 1 + tensors + (0 if self.counts is None else self.counts.width)
        return Layout((*sections, (FIGURES, (width,)), weight))

    def units(self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData]) -> Units:
        """As the work inside has it."""
        if isinstance(self.inner, ManyAtOnce):
            return self.inner.units(self._inside(workspace), broadcast, clients)
        return super().units(workspace, broadcast, clients)

    def run_units(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], units: Units, *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """What the work inside gives, and the figures."""
        module = self._judged(workspace, broadcast)
        for position, vector in self._trained(workspace, broadcast, clients, units, round):
            if isinstance(vector, NumericError):
                yield position, vector
                continue
            figures = self._figures(workspace.architecture, module, broadcast, clients[position]).to(vector)
            yield position, torch.cat([vector[:-1], figures, vector[-1:]])

    def _trained(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], units: Units, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        inside = self._inside(workspace)
        positions = [position for unit in units for position in unit]
        if round >= self.rounds:
            for position in positions:
                still = broadcast.parameters.new_zeros(inside.layout.length)
                still[-1] = len(clients[position])
                yield position, still
        elif isinstance(self.inner, ManyAtOnce):
            yield from self.inner.run_units(inside, broadcast, clients, units, round=round)
        else:
            part = [clients[position] for position in positions]
            for place, vector in self.inner.run_many(inside, broadcast, part, round=round):
                yield positions[place], vector

    def _inside(self, workspace: Workspace) -> Workspace:
        """The same workbench, for contributions without figures."""
        if Judged not in workspace.captured:
            inside = copy.copy(workspace)
            inside.layout = Layout(tuple(part for part in workspace.layout.sections if part[0] != FIGURES))
            workspace.captured[Judged] = inside
        return cast(Workspace, workspace.captured[Judged])

    @staticmethod
    def _judged(workspace: Workspace, broadcast: Broadcast) -> nn.Module:
        """The model as it was sent, in evaluation mode."""
        if FIGURES not in workspace.captured:
            workspace.captured[FIGURES] = workspace.architecture.new_skeleton().eval()
        module = cast(nn.Module, workspace.captured[FIGURES])
        prepare(workspace.architecture, module, broadcast)
        return module

    def _figures(self, architecture: Architecture, module: nn.Module, broadcast: Broadcast, data: ClientData) -> Tensor:
        """How many samples, their losses, and what answers are counted by; zeros where nothing is held back."""
        tensors = 1 if broadcast.head is None else broadcast.head.tensors
        sums = torch.zeros(1 + tensors + (0 if self.counts is None else self.counts.width), dtype=torch.float64)
        held = data.held_back
        if held is None:
            return sums
        for chosen in torch.split(torch.arange(len(held)), _CHUNK):
            x, y = held.take(chosen)
            sums[0] += len(chosen)
            try:
                with torch.no_grad():
                    output = module(x)
                    losses = objectives(architecture, module, self.loss, output, y, broadcast.head) * len(chosen)
            except Exception:
                if not own_code(module, self.loss):
                    raise
                sums[1 : 1 + tensors] += LARGEST  # to be silent would tell about its samples
                continue
            # As in a training loss that is sent hidden: 0 would look like success.
            sums[1 : 1 + tensors] += losses.double().cpu().nan_to_num(nan=LARGEST, posinf=LARGEST)
            if self.counts is not None:
                sums[1 + tensors :] += self.counts(output, y)
        return sums


def judging(work: LocalWork, loss: Loss, counts: AnswerCounts | None, *, rounds: int) -> LocalWork:
    """The same work for clients that hold back samples: their losses go with it, and what answers are counted by."""
    return Judged(work, loss, counts, rounds)


def counts_of(work: LocalWork) -> AnswerCounts | None:
    """What answers are counted by, where clients report that."""
    counts: AnswerCounts | None = getattr(work, "counts", None)
    return counts
