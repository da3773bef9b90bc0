"""Judging a model on held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.data import Dataset
from fedveil.data.lazy import spans
from fedveil.downlink import Architecture, Broadcast, Weights, assemble
from fedveil.downlink.architecture import VectorBatchNorm
from fedveil.runs.judgement import quick_figures
from fedveil.runs.own_metrics import OwnFigure, OwnMetrics
from fedveil.work import Loss
from fedveil.work.gradients import head_alpha
from fedveil.work.messages import prepare

CHUNK = 1024


def _parts(x: Tensor) -> Iterator[Tensor]:
    return (x[span] for span in spans(x, most=CHUNK))


@dataclass(frozen=True)
class Scores:
    """Test loss, accuracy (classes; of several labels, the share that is right) or mean squared error, and what else
    costs next to nothing."""

    loss: float
    accuracy: float | None
    mse: float | None
    more: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, OwnFigure] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why metrics of the user's own have no figure."""

    def as_data(self) -> dict[str, float]:
        """test_loss, test_accuracy or test_mse, and others by name; what is no number is left out."""
        named = {"loss": self.loss, "accuracy": self.accuracy, "mse": self.mse, **self.more}
        return {f"test_{name}": value for name, value in named.items() if value is not None and math.isfinite(value)}

    def own_data(self) -> dict[str, Any]:
        """The user's own figures by name, and under failed_metrics why some are not there."""
        return {**self.own, **({"failed_metrics": dict(self.failed)} if self.failed else {})}


def predict(module: nn.Module, x: Tensor) -> Tensor:
    """Outputs for all samples, a chunk at a time."""
    with torch.no_grad():
        return torch.cat([module(part) for part in _parts(x)])


def score(module: nn.Module, test: Dataset, loss: Loss) -> Scores:
    """Scores of a module in the mode it is in."""
    return score_outputs(predict(module, test.x), test, loss)


def score_outputs(output: Tensor, test: Dataset, loss: Loss, own: OwnMetrics | None = None) -> Scores:
    """Scores of a model's outputs, and what metrics of the user's `own` say of them."""
    value, more = float(loss.mean(output, test.y)), quick_figures(output, test, loss.name)
    named, failed = ({}, {}) if own is None else own.figures(output, test.y)
    if test.task == "classification":
        return Scores(value, float((output.argmax(1) == test.y).double().mean()), None, more, named, failed)
    if test.task == "multilabel":
        held = output >= (0.5 if loss.name == "square" else 0.0)  # the square loss has learned 0 and 1 themselves
        return Scores(value, float((held == (test.y > 0.5)).double().mean()), None, more, named, failed)
    return Scores(value, None, float((output - test.y).double().square().mean()), more, named, failed)


def score_weights(architecture: Architecture, weights: Weights, test: Dataset, loss: Loss) -> Scores:
    """Scores of the server's model."""
    return score(assemble(architecture, weights).eval(), test, loss)


@dataclass(frozen=True)
class ClientScores:
    """What a client can do with what it receives: as it is, and after taking off the head noise."""

    received: Scores
    uncovered: Scores | None

    def as_data(self) -> dict[str, float]:
        """client_view_… and client_view_uncovered_…."""
        named = {f"client_view_{k.removeprefix('test_')}": v for k, v in self.received.as_data().items()}
        if self.uncovered is not None:
            rest = self.uncovered.as_data().items()
            named |= {f"client_view_uncovered_{k.removeprefix('test_')}": v for k, v in rest}
        return named


def score_client_view(
    architecture: Architecture, weights: Weights, sent: Broadcast, test: Dataset, loss: Loss
) -> ClientScores:
    """Scores of the model as a client receives it, batch norms on batch statistics as a client would run it."""
    module = assemble(architecture, weights)
    prepare(architecture, module, sent)
    module.eval()
    for layer in module.modules():
        if isinstance(layer, VectorBatchNorm) and not sent.statistics.numel():
            layer.train()
    received = score(module, test, loss)
    if sent.head is None:
        return ClientScores(received, None)
    return ClientScores(received, score_outputs(_without_head_noise(architecture, module, test.x), test, loss))


def _without_head_noise(architecture: Architecture, module: nn.Module, x: Tensor) -> Tensor:
    """ŷ − α·r̂ with r̂ = Σ α·ŷ / Σ α²: the noise α·r regressed away, from inputs alone, without a label."""
    outputs, alphas = [], []
    with torch.no_grad():
        for part in _parts(x):
            outputs.append(module(part))
            alphas.append(head_alpha(architecture, module))
    output, alpha = torch.cat(outputs).double(), torch.cat(alphas).double()
    estimate = (alpha[:, None] * output).sum(0) / alpha.square().sum()
    return (output - alpha[:, None] * estimate).to(x.dtype if x.is_floating_point() else torch.float32)
