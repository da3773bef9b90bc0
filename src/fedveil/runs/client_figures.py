"""What clients' held-back samples say of a model: sums that they report under masks, and the figures these make.

Figures that are formulas over sums (`fedveil.runs.metrics`) can be had from a total alone; rankings (AUROC, average
precision) and R², whose mean nobody knows beforehand, cannot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedveil.config import RunConfig
from fedveil.errors import ConfigError, spelled
from fedveil.protocol.parts import Scheme
from fedveil.protocol.phases import HeldBack
from fedveil.runs.judgement import probabilities
from fedveil.runs.metrics import BINS, class_columns, class_figures, error_figures, label_columns, label_figures, total
from fedveil.work.held_back import counts_of, judging
from fedveil.work.losses import Loss

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
