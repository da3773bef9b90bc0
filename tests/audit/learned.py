"""A prior and a judge of digits, each learned once, from pictures that the other and the audited models never see."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil import data, models
from fedveil.audit.attacks.matching import Budget
from fedveil.audit.attacks.prior import Prior, train_prior
from fedveil.audit.judge import Judge, train_judge

DIGITS = data.load("digits", seed=0)
PUBLIC, PRIVATE, JUDGES = slice(0, 450), slice(450, 900), slice(900, None)
QUICK = Budget(quick=True)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def digits_prior() -> Prior:
    return train_prior(DIGITS.train.x[PUBLIC], generator=generator(), box=(0.0, 1.0), budget=QUICK)


@cache
def digits_judge() -> Judge:
    return train_judge(DIGITS.train.x[JUDGES], DIGITS.train.y[JUDGES], outputs=10, generator=generator(), quick=True)


@cache
def digits_model(name: str = "cnn", *, steps: int = 400) -> nn.Module:
    """A model trained on the private part with cross-entropy; with 0 steps, an untrained one."""
    x, y = DIGITS.train.x[PRIVATE], DIGITS.train.y[PRIVATE]
    model = models.build(name, input_shape=(1, 8, 8), outputs=10, seed=1)
    adam, own = torch.optim.Adam(model.parameters(), lr=2e-3), generator(5)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,), generator=own)
        adam.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x[rows]), y[rows]))
        adam.step()
    return model.eval()


def accuracy(scores: Tensor, y: Tensor) -> float:
    return float((scores.argmax(1) == y).double().mean())
