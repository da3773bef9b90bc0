"""What everybody in a run knows: architecture, loss, batch size, and how contributions travel."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedveil import models
from fedveil.downlink.blueprint import Blueprint, draw
from fedveil.errors import CheckpointError, ConfigError
from fedveil.flat import Layout
from fedveil.models.checks import MOST_PARAMETERS
from fedveil.plain import made
from fedveil.work.losses import Loss, make_loss

Sections = tuple[tuple[str, tuple[int, ...]], ...]

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run's public facts, as plain data.

    `parameters` are the model's tensors in the order in which flat vectors hold them, `contribution` the
    sections of one client's upload before it is protected. `readable` says whether the server sees uploads
    one by one, `returns` whether they are a gradient or an update. `batch_size` 0 means all samples.
    """

    scheme: str
    uplink: str
    readable: bool
    model: str | None
    options: dict[str, int | float | str | bool]
    input_shape: tuple[int, ...]
    input_dtype: str
    outputs: int
    task: str
    vocabulary: int | None
    parameters: Sections
    contribution: Sections
    traced: bool
    returns: str
    loss: str
    target_scale: float
    true_weight: float
    batch_size: int
    local_steps: int | None
    local_epochs: int | None
    lr: float
    dtype: str

    def batch_of(self, samples: int) -> int:
        """The batch size of a client with `samples` samples."""
        return samples if self.batch_size == 0 else min(self.batch_size, samples)

    def contributed(self, vector: Tensor) -> dict[str, Tensor]:
        """The named sections of an upload: n_k × (gradients, values, statistics), and n_k as weight."""
        return Layout(self.contribution).split(vector)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat vector of parameters or gradients, as named tensors."""
        return Layout(self.parameters).split(flat)

    def module(self, *, seed: int = 0) -> nn.Module:
        """The architecture with parameters that say nothing about the run's."""
        if self.model is None:
            raise ConfigError(
                "This run's model came as a Python object, which a record does not hold: audit a run whose model has a "
                "name (your own package.module:factory will do)."
            )
        return models.build(
            self.model,
            input_shape=self.input_shape,
            outputs=self.outputs,
            seed=seed,
            vocabulary=self.vocabulary,
            **self.options,
        )

    def blueprint(self) -> Blueprint:
        """The architecture as both roles of the run had it."""
        example = torch.zeros((2, *self.input_shape), dtype=_DTYPES[self.input_dtype])
        model = self.module().to(_DTYPES[self.dtype]).train()
        found, _ = draw(model, example, traced=self.traced)
        if found.parameters.sections != self.parameters:
            raise ConfigError(f"The model {self.model!r} is not the one this run had: its parameters differ.")
        return found

    def objective(self) -> Loss:
        """The training loss."""
        return make_loss(self.loss, target_scale=self.target_scale, true_weight=self.true_weight)

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @staticmethod
    def from_data(data: dict[str, Any]) -> Facts:
        """The facts back; anything else is refused."""
        facts = made(Facts, data, where="The facts of a record")
        known = facts.input_dtype in _DTYPES and facts.dtype in _DTYPES and facts.returns in ("gradient", "update")
        sizes = (size for _, shape in (*facts.parameters, *facts.contribution) for size in shape)
        if not known or not all(0 <= size <= MOST_PARAMETERS for size in sizes):
            raise CheckpointError("The facts of a record are damaged: a type or a size cannot be.")
        return facts
