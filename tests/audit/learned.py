"""A prior and a judge of digits, each learned once, from pictures that the other and the audited models never see."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil import data, models
from fedveil.audit.attacks.generative import Prior, train_prior
from fedveil.audit.measures import Judge, train_judge
from fedveil.audit.metrics import psnr

DIGITS = data.load("digits", seed=0)
PUBLIC, PRIVATE, JUDGES = slice(0, 450), slice(450, 900), slice(900, None)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def digits_prior() -> Prior:
    return train_prior(DIGITS.train.x[PUBLIC], generator=generator(), box=(0.0, 1.0), quick=True)


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


def blind_level(prior: Prior, original: Tensor, *, generator: torch.Generator, draws: int = 64) -> float:
    """The mean PSNR, in units of the box, of the prior's random pictures: what an attack that saw nothing comes to."""
    low, high = prior.box
    with torch.no_grad():
        guesses = prior.decode(prior.sample(draws, generator=generator)).to(original)
    pairs = [(guesses, one.expand_as(guesses)) for one in original]
    return float(torch.stack([psnr(a, b, peak=high - low).mean() for a, b in pairs]).mean())
