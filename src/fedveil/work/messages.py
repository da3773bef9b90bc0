"""What local work takes and gives."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import (
    Architecture,
    batch_norms,
    load_epsilon,
    load_parameters,
    load_statistics,
)
from fedveil.downlink.decomposed import load_multipliers
from fedveil.downlink.messages import Broadcast
from fedveil.errors import NumericError
from fedveil.secrets import Guarded, OsSecrets, SecretSource
from fedveil.tensors import LARGEST, Layout, all_in_range
from fedveil.work.batches import samples_at_once
from fedveil.work.losses import Loss
from fedveil.work.own_loss import own_code
from fedveil.work.pooling import pool_swiftly


class Source(Protocol):
    """Samples that are read when they are asked for, and perhaps drawn anew every time."""

    @property
    def inputs(self) -> Tensor:
        """All inputs, which reads all samples."""

    @property
    def targets(self) -> Tensor:
        """All targets."""

    @property
    def repeats(self) -> bool:
        """Whether a sample that is read again in the same step is the same."""
        ...

    def read(self, chosen: Tensor, *, step: int = 0) -> tuple[Tensor, Tensor]:
        """The chosen samples as they are in a step."""
        ...


class Augmentation(Protocol):
    """What is done anew to inputs each time they are trained on, to each by itself."""

    def __call__(self, x: Tensor, numbers: Tensor, *, client: int, step: int) -> Tensor:
        """The inputs `x` of a client's samples with these numbers, as they are in a step; their shape stays."""
        ...


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's samples; `client` is its public number.

    `rows` selects them from a larger tensor (None: all), so that simulated clients share one copy. Where there is a
    `source`, they are read from it. `augment` changes those that are taken to be trained on. `held_back` are samples
    that it does not train on, and judges the model by.
    """

    client: int
    x: Tensor
    y: Tensor
    rows: Tensor | None = None
    source: Source | None = None
    augment: Augmentation | None = None
    held_back: ClientData | None = None
    kept: KeptTensors | None = None
    """What its work has kept of earlier rounds, and leaves for later ones, where it does (`keeps_for_itself`)."""

    @staticmethod
    def reading(client: int, source: Source) -> ClientData:
        """A client whose samples are read when they are asked for."""
        return ClientData(client, source.inputs, source.targets, source=source)

    def __len__(self) -> int:
        return len(self.y) if self.rows is None else len(self.rows)

    def take(self, chosen: Tensor, *, step: int | None = None) -> tuple[Tensor, Tensor]:
        """The chosen samples as they are in a local step, or, without one, as they are outside of training.

        Copies, because a model may change its input in place.
        """
        x, y = self.read(chosen, step=step or 0)
        if self.augment is not None and step is not None:
            x = self.augment(x, chosen, client=self.client, step=step)
        return x, y

    def read(self, chosen: Tensor, *, step: int) -> tuple[Tensor, Tensor]:
        """The chosen samples, not augmented."""
        if self.source is not None:
            own = chosen if self.rows is None else self.rows[chosen.to(self.rows.device)]
            return self.source.read(own, step=step)
        whole = chosen.shape[0] == (self.y if self.rows is None else self.rows).shape[0]
        if self.rows is not None:
            chosen = self.rows if whole else self.rows[chosen.to(self.rows.device)]
        elif whole:
            return self.x.clone(), self.y
        if self.x.device != chosen.device:
            chosen = chosen.to(self.x.device)
        return self.x[chosen], self.y[chosen]


class KeptTensors(Guarded):
    """What local work keeps for itself from one round to the next; it never leaves the client but sealed."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.tensors: Mapping[str, Tensor] = {} if tensors is None else tensors


class LocalWork(Protocol):
    """What a client computes in a round, before the uplink protects it."""

    @property
    def returns(self) -> str:
        """ "gradient" at the broadcast point, or "update" after local steps."""

    @property
    def local_training(self) -> tuple[int | None, int | None]:
        """(steps, epochs) as they were given; neither: one gradient a round, or one epoch of training."""
        ...

    @property
    def clip(self) -> float | None:
        """The L2 norm to which it is clipped; None: one unit of data can change it without bound."""
        ...

    @property
    def reports(self) -> bool:
        """Whether the training loss and batch statistics leave with it."""
        ...

    def layout(self, architecture: Architecture, *, tensors: int) -> Layout:
        """The sections of one contribution."""

    def run(self, workspace: Workspace, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """One client's contribution: n_k × everything, and n_k, in one flat vector."""

    def run_many(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """The same for many clients at once: (position, contribution or why there is none), in any order."""


def keeps_for_itself(work: LocalWork) -> bool:
    """Whether a client has to remember for its work what the server is not told."""
    return bool(getattr(work, "keeps", False))


@dataclass(eq=False)
class Workspace:
    """A client machine's workbench: skeletons to fill, kept between rounds to save time.

    It holds nothing but the architecture, the client's own source of secrets and, during a round, the
    broadcast values.
    """

    architecture: Architecture
    layout: Layout
    secrets: SecretSource = field(default_factory=OsSecrets)

    def __post_init__(self) -> None:
        self.module = self.architecture.new_skeleton()
        pool_swiftly(self.module)
        named = self.module.named_parameters()
        self.moving: list[Tensor] = [value for name, value in named if name not in self.architecture.frozen]
        self.vectorisable = True
        self.captured: dict[object, object] = {}

    @cached_property
    def at_once(self) -> int | None:
        """How many samples of a batch a CPU takes at a time; None where all of them have to be taken together."""
        return samples_at_once(self.architecture.skeleton, self.architecture.input_shape)

    @cached_property
    def functional(self) -> nn.Module:
        """A skeleton that torch.func can run."""
        module = self.architecture.new_skeleton(fused=False)
        pool_swiftly(module)
        return module


def prepare(architecture: Architecture, module: nn.Module, broadcast: Broadcast) -> None:
    """Fill a skeleton with a broadcast."""
    load_parameters(module, broadcast.parameters)
    if broadcast.epsilon.numel():
        load_epsilon(architecture, module, broadcast.epsilon)
    if architecture.table is not None:  # only traced networks can have transitional layers
        load_multipliers(architecture, module, broadcast.multipliers)
    if broadcast.statistics.numel():
        load_statistics(module, broadcast.statistics)
    if architecture.statistics_sizes:
        for _, norm in batch_norms(module):
            norm.statistics.clear()  # a step that was interrupted may have left some


class RunMany(Protocol):
    """How the work of many clients is done: `LocalWork.run_many`, or what gives the same."""

    def __call__(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """(position, contribution or why there is none) of every client, in any order."""
        ...


Units = Sequence[Sequence[int]]
"""Positions of clients that are computed together: what comes of a unit depends on nobody outside of it."""


class ManyAtOnce(ABC):
    """Work of many clients at a time: that of one is that of a list of one.

    It falls into units, which can be computed anywhere: many of them here one after the other, or each on another core.
    """

    def run(self, workspace: Workspace, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """One client's contribution."""
        _, contribution = next(self.run_many(workspace, broadcast, [data], round=round))
        if isinstance(contribution, NumericError):
            raise contribution
        return contribution

    def run_many(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """(position, contribution or why there is none) of every client, in any order."""
        units = self.units(workspace, broadcast, clients)
        return self.run_units(workspace, broadcast, clients, units, round=round)

    def units(self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData]) -> Units:
        """Who is computed together; unless a kind of work says more, each alone."""
        return [(position,) for position in range(len(clients))]

    @abstractmethod
    def run_units(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], units: Units, *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """The same for those of `clients` that are in these of their units."""


class SideBySide(ManyAtOnce):
    """Work that a GPU does in captured groups, and a CPU unit by unit: clients of one unit at once where vmap can.

    Where the uplink hides what is sent, a client does not refuse to send what is no number (`refuses` = False), or what
    could not be computed since a network or a loss of the caller's own raised: that would tell about its data.
    """

    loss: Loss
    refuses: bool

    def run_units(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], units: Units, *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """(position, contribution or why there is none) of every client of these units, in any order."""
        if broadcast.parameters.is_cuda and self._captured(workspace):
            positions = [position for unit in units for position in unit]
            part = [clients[position] for position in positions]
            for place, contribution in self._in_groups(workspace, broadcast, part, round):
                yield positions[place], contribution
            return
        for unit in units:
            part = [clients[position] for position in unit]
            yield from zip(unit, self._unit(workspace, broadcast, part, round), strict=True)

    def _unit(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], round: int
    ) -> list[Tensor | NumericError]:
        if len(clients) > 1 and workspace.vectorisable:
            try:
                return self._together(workspace, broadcast, clients, round)
            except Exception as reason:
                if not (isinstance(reason, RuntimeError) or own_code(workspace.module, self.loss)):
                    raise
                workspace.vectorisable = False  # vmap knows no rule for some operation, or memory is short
        return [self._tried(workspace, broadcast, data, round) for data in clients]

    def _tried(self, workspace: Workspace, broadcast: Broadcast, data: ClientData, round: int) -> Tensor | NumericError:
        try:
            return self._one(workspace, broadcast, data, round)
        except Exception as reason:
            if not own_code(workspace.module, self.loss):
                raise
            if not self.refuses:
                vector = broadcast.parameters.new_full((workspace.layout.length,), math.nan)
                vector[-1] = len(data)
                return reported(vector, workspace.layout.part(vector, "values"))
            failed = NumericError(
                f"Client {data.client}, round {round + 1}: the network or the loss raised {type(reason).__name__}: "
                f"{reason}"
            )
            failed.__cause__ = reason
            return failed

    @abstractmethod
    def _captured(self, workspace: Workspace) -> bool:
        """Whether a GPU takes the same kernels for every batch of a shape."""

    @abstractmethod
    def _in_groups(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """(position, contribution or why there is none) of every client, on a GPU."""

    @abstractmethod
    def _together(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], round: int
    ) -> list[Tensor | NumericError]:
        """What every client of a unit contributes, computed at once."""

    @abstractmethod
    def _one(self, workspace: Workspace, broadcast: Broadcast, data: ClientData, round: int) -> Tensor | NumericError:
        """What one client contributes."""


def check_finite(vector: Tensor, values: Tensor, *, client: int, round: int, chosen: Tensor) -> None:
    """Refuse NaN, infinity and runaway numbers in a contribution, naming the client and the batch."""
    if all_in_range(vector):
        return
    sort = "gradient" if torch.isfinite(values).all() else "loss"
    what = "has grown beyond 2^36" if torch.isfinite(vector).all() else "is not finite"
    first = ", ".join(str(int(index)) for index in chosen[:5])
    more = ", …" if len(chosen) > 5 else ""
    raise NumericError(
        f"The {sort} of client {client} {what} in round {round + 1} "
        f"(batch of {len(chosen)} samples: local numbers {first}{more})"
    )


def reported(vector: Tensor, values: Tensor) -> Tensor:
    """A contribution that is sent hidden, whatever it holds: a refusal would tell about it, and the uplink cuts it off.

    `values` is the part of it that reports losses: one that is no number is a large one, for 0 would look like success.
    """
    values.nan_to_num_(nan=LARGEST, posinf=LARGEST)
    return vector
