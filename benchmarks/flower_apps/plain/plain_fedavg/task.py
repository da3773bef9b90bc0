"""What is trained, on what: the same network, loss and samples as FedVeil's run."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import Context
from torch import Tensor, nn

from fedveil.models import build

VARIABLE = "PLAIN_FEDAVG"


def settings_of(context: Context) -> dict[str, Any]:
    """The app's configuration; a simulation started from Python has none, and finds it in the environment."""
    return {**json.loads(os.environ.get(VARIABLE, "{}")), **context.run_config}


def network(seed: int = 0) -> nn.Module:
    return build("mlp", input_shape=(64,), outputs=10, seed=seed)


@cache
def samples(folder: str, client: int) -> tuple[Tensor, Tensor]:
    """One client's samples; kept for as long as the process lives."""
    with np.load(Path(folder) / f"client-{client}.npz") as stored:
        return torch.from_numpy(stored["x"]), torch.from_numpy(stored["y"])


def square_loss(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - F.one_hot(target, output.shape[1])).square().sum(1).mean()
