"""Secret ε: a public one would give the veil's scale away, since ε·k²/ε = k²."""

from __future__ import annotations

import math

import torch

from fedveil.downlink.blueprint import Weights
from fedveil.secrets import SecretStream

LOWEST, HIGHEST = 1e-6, 1e-4


def draw_secret_epsilon(weights: Weights, stream: SecretStream) -> None:
    """Give every normalisation group its own ε, log-uniform on [1e-6, 1e-4]; once per model."""
    logs = math.log(LOWEST) + stream.uniform(weights.epsilon.numel()) * math.log(HIGHEST / LOWEST)
    weights.epsilon.copy_(torch.exp(logs))
