"""Metrics of the user's own: functions of outputs and targets, or objects with update, compute and reset."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedveil.errors import ConfigError

OwnFigure = float | list[float | None] | None

# What rows and summaries have names for already.
RESERVED = frozenset(
    "round loss clients seconds bytes_down bytes_up failed refused engine scheme holder dataset model rounds seed "
    "simulation train_loss parameters device dtype fedveil torch python warning coverage visible stopped "
    "failed_rounds ledger judged data client_names class_weights best loss_because diverged recovered "
    "failed_metrics code suspects bad_rounds clip family levels secret_bits secret_reals".split()
)
_PREFIXES = ("test_", "validation_", "client_view_", "client_test_")


@runtime_checkable
class Updated(Protocol):
    """A metric that keeps count, as those of torchmetrics do."""

    def update(self, outputs: Tensor, targets: Tensor) -> object:
        """Take samples in."""

    def compute(self) -> object:
        """The figure of all samples since the last reset."""

    def reset(self) -> object:
        """Forget them."""


Metric = Updated | Callable[[Tensor, Tensor], object]


class OwnMetrics:
    """Metrics by name; each gets the model's outputs (logits, unless the loss is the square loss) and the targets.

    Raises:
        ConfigError: A name is taken, or something is no metric.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        for name, metric in metrics.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(f"metrics: {name!r} is no name; use letters, digits and underscores.")
            if name in RESERVED or name.startswith(_PREFIXES):
                raise ConfigError(f"metrics: rows have a figure called {name!r} already; give yours another name.")
            if isinstance(metric, type) or not (isinstance(metric, Updated) or callable(metric)):
                raise ConfigError(
                    f"metrics: {name!r} is {metric!r}; give a function (outputs, targets) that returns a number, or an "
                    "object with update(outputs, targets), compute() and reset()."
                )
        self._metrics = dict(metrics)

    @property
    def names(self) -> frozenset[str]:
        """What the metrics are called."""
        return frozenset(self._metrics)

    def behind(self, figure: str) -> str | None:
        """The metric that a figure of a row is of: its own name, or the beginning of name_figure."""
        known = [name for name in self._metrics if figure == name or figure.startswith(f"{name}_")]
        return max(known, key=len, default=None)

    def higher_is_better(self, name: str) -> bool | None:
        """Whether more of a metric is better, by its attribute of that name; None where it does not say."""
        direction = getattr(self._metrics[name], "higher_is_better", None)
        return direction if isinstance(direction, bool) else None

    def figures(self, outputs: Tensor, targets: Tensor) -> tuple[dict[str, OwnFigure], dict[str, str]]:
        """Every metric of these samples, on the CPU, and why metrics that have failed did.

        A metric that gives several figures by name gives name_figure; one that fails has the figure None.
        """
        # Copies: what a metric does to its arguments is its own affair.
        outputs, targets = outputs.detach().cpu().clone(), targets.detach().cpu().clone()
        made: dict[str, OwnFigure] = {}
        failed: dict[str, str] = {}
        for name, metric in self._metrics.items():
            try:
                made |= _plain(name, _value(metric, outputs, targets))
            except Exception as reason:
                made[name] = None
                failed[name] = (
                    f"on outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}: "
                    f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"
                )
        return made, failed


def _value(metric: Metric, outputs: Tensor, targets: Tensor) -> object:
    if not isinstance(metric, Updated):
        with torch.no_grad():
            return metric(outputs, targets)
    metric.reset()
    metric.update(outputs, targets)
    value = metric.compute()
    metric.reset()
    return value


def _plain(name: str, value: Any) -> dict[str, OwnFigure]:
    if isinstance(value, Mapping):
        return {key: part for own, each in value.items() for key, part in _plain(f"{name}_{own}", each).items()}
    tensor = torch.as_tensor(value).detach().double().cpu()
    if tensor.dim() > 1:
        raise ValueError(f"it gives {tuple(tensor.shape)} numbers; a number, a vector or numbers by name are stored")
    return {name: [_known(part) for part in tensor.tolist()] if tensor.dim() else _known(float(tensor))}


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
