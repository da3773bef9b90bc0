"""Judging a model on held-out data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.data import Dataset
from fedveil.downlink import Blueprint, Broadcast, Weights, assemble
from fedveil.downlink.blueprint import load_epsilon, load_parameters, load_statistics
from fedveil.downlink.norms import VectorBatchNorm
from fedveil.work import Loss

_CHUNK = 1024


@dataclass(frozen=True)
class Scores:
    """Test loss, and accuracy (classes) or mean squared error (regression)."""

    loss: float
    accuracy: float | None
    mse: float | None

    def as_data(self) -> dict[str, float]:
        """test_loss and test_accuracy or test_mse."""
        named = {"test_loss": self.loss, "test_accuracy": self.accuracy, "test_mse": self.mse}
        return {name: value for name, value in named.items() if value is not None}


def predict(module: nn.Module, x: Tensor) -> Tensor:
    """Outputs for all samples, a chunk at a time."""
    with torch.no_grad():
        return torch.cat([module(part) for part in torch.split(x, _CHUNK)])


def score(module: nn.Module, test: Dataset, loss: Loss) -> Scores:
    """Scores of a module in the mode it is in."""
    output = predict(module, test.x)
    value = float(loss.mean(output, test.y))
    if test.task == "classification":
        return Scores(value, float((output.argmax(1) == test.y).double().mean()), None)
    return Scores(value, None, float((output - test.y).double().square().mean()))


def score_weights(blueprint: Blueprint, weights: Weights, test: Dataset, loss: Loss) -> Scores:
    """Scores of the server's model."""
    return score(assemble(blueprint, weights).eval(), test, loss)


def score_client_view(blueprint: Blueprint, weights: Weights, sent: Broadcast, test: Dataset, loss: Loss) -> Scores:
    """Scores of the model as a client receives it, batch norms on batch statistics as a client would run it."""
    module = assemble(blueprint, weights)
    load_parameters(module, sent.parameters)
    load_epsilon(blueprint, module, sent.epsilon)
    if sent.statistics.numel():
        load_statistics(module, sent.statistics)
    module.eval()
    for one in module.modules():
        if isinstance(one, VectorBatchNorm) and not sent.statistics.numel():
            one.train()
    return score(module, test, loss)
