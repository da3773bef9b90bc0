"""Judging a model on held-out data: the server's, and what clients hold back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.config import RunConfig
from fedveil.data import Dataset
from fedveil.data.lazy import spans
from fedveil.downlink import Architecture, Broadcast, Weights, assemble
from fedveil.downlink.architecture import VectorBatchNorm
from fedveil.errors import ConfigError, spelled
from fedveil.protocol.parts import Scheme
from fedveil.protocol.phases import HeldBack
from fedveil.runs.judgement import probabilities, quick_figures
from fedveil.runs.metrics import (
    BINS,
    OwnFigure,
    OwnMetrics,
    class_columns,
    class_figures,
    error_figures,
    label_columns,
    label_figures,
    total,
)
from fedveil.work.gradients import head_alpha
from fedveil.work.held_back import counts_of, judging
from fedveil.work.losses import Loss
from fedveil.work.messages import prepare

CHUNK = 256
"""Samples that a CPU answers at a time: with more, networks for pictures leave its caches."""
_GPU_CHUNK = 1024


def _parts(x: Tensor) -> Iterator[Tensor]:
    return (x[span] for span in spans(x, most=_GPU_CHUNK if x.is_cuda else CHUNK))


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


# --- what clients' held-back samples say of a model: sums that they report under masks, and the figures these make
#
# Figures that are formulas over sums (`fedveil.runs.metrics`) can be had from a total alone; rankings (AUROC, average
# precision) and R², whose mean nobody knows beforehand, cannot.

PREFIX = "client_test_"


@dataclass(frozen=True)
class ClientFigures:
    """Sums by which the answers of a model are counted, for a task with so many outputs."""

    task: str
    outputs: int
    loss: str
    target_scale: float = 1.0
    true_weight: float = 1.0

    @property
    def width(self) -> int:
        """How many sums there are."""
        if self.task == "regression":
            return 1 + self.outputs
        return 3 * self.outputs + BINS + (2 if self.task == "multilabel" else 0)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sums over these samples; an output that is no number counts as 0."""
        outputs = outputs.detach().double().cpu().nan_to_num()
        truth = targets.detach().cpu().numpy()
        if self.task == "regression":
            errors = outputs - torch.from_numpy(truth).double()
            return torch.cat([errors.abs().mean(1, keepdim=True), errors.square()], 1).sum(0)
        scaled = {"target_scale": self.target_scale, "true_weight": self.true_weight}
        chances = probabilities(outputs, task=self.task, loss=self.loss, **scaled)[0].numpy()
        if self.task == "multilabel":
            answer = chances >= 0.5
            columns = label_columns(truth > 0.5, answer, np.where(answer, chances, 1 - chances))
        else:
            chosen = outputs.argmax(1).numpy()
            confidence = chances[np.arange(len(chosen)), chosen]
            columns = class_columns(truth, chosen, confidence, classes=self.outputs)
        return torch.from_numpy(total(columns)[0])

    def named(self, sums: Tensor, samples: float) -> dict[str, float]:
        """Figures by name; what is not defined is left out."""
        row = sums.double().cpu().numpy()[None]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if self.task == "regression":
                unknown = np.zeros((1, 2 * self.outputs))  # the targets' sums, of which R² is made
                figures = error_figures(np.hstack([[[samples]], row, unknown]))
                wanted: tuple[str, ...] = ("mse", "rmse", "mae")
            elif self.task == "multilabel":
                figures, wanted = label_figures(row), ("accuracy", "balanced_accuracy", "f1", "ece")
            else:
                figures = class_figures(row)
                right = row[:, 2 * self.outputs : 3 * self.outputs].sum(1)
                figures["accuracy"] = right / samples
                wanted = ("accuracy", "balanced_accuracy", "f1", "kappa", "ece")
        return {name: float(figures[name][0]) for name in wanted if math.isfinite(float(figures[name][0]))}


def named_figures(scheme: Scheme, told: HeldBack | None) -> dict[str, float]:
    """client_test_samples, client_test_loss and the others; nothing where nobody has held back samples."""
    samples = 0 if told is None else round(told.samples)
    if told is None or samples < 1:
        return {}
    counts = counts_of(scheme.work)
    figures = {} if not isinstance(counts, ClientFigures) else counts.named(told.counts, samples)
    named = {"samples": samples, "loss": told.loss, **figures}
    return {f"{PREFIX}{name}": value for name, value in named.items() if math.isfinite(value)}


def judged_by_clients(scheme: Scheme, config: RunConfig, loss: Loss, *, task: str, outputs: int) -> Scheme:
    """A scheme whose clients report figures of the samples they hold back, where settings say so.

    Raises:
        ConfigError: The server could read one client's figures, or noise keeps a promise that they would break.
    """
    if config.client_test_fraction is None:
        return scheme
    setting, name = spelled("client_test_fraction"), spelled("scheme", scheme.name)
    masked = f"Use {spelled('scheme', 'veil-secagg')}, or a scheme of your own under masks"
    if scheme.noisy:
        raise ConfigError(
            f"{setting} does not go with {name}: figures of clients' samples would leave without noise, and no ε would "
            f"count them. Judge the model by a test part that the server holds ({spelled('test_fraction')}). {masked} "
            "where (ε, δ) is not asked for."
        )
    if scheme.holder == "clients":
        raise ConfigError(
            f"{setting} does not go with {name}: its model lives with the clients, and its server reads no sums. "
            f"{masked}."
        )
    if scheme.readable:
        raise ConfigError(
            f"{setting} does not go with {name}: its server reads every upload, and so would read each client's own "
            f"figures. {masked}: there it reads their sum."
        )
    if config.record:
        raise ConfigError(
            f"{spelled('record', True)} keeps a round for audits, and those know no figures beside its sum: leave it "
            f"or {setting} out."
        )
    counts = None
    if not scheme.downlink.head_noise:
        square = {"target_scale": config.target_scale, "true_weight": config.true_weight}
        counts = ClientFigures(task, outputs, loss.name, **square)
    return replace(scheme, work=judging(scheme.work, loss, counts, rounds=config.rounds))
