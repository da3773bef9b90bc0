"""Deep leakage from gradients (Zhu et al. 2019) and iDLG (Zhao et al. 2020): L-BFGS on the matching loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedveil.audit.attacks.closed_form import labels_of
from fedveil.audit.attacks.matching import (
    FULL_BUDGET,
    Budget,
    Problem,
    Progress,
    Reconstruction,
    best,
    boxed,
    cosine_distance,
    first_guess,
    gradient_at,
    private_copy,
    proven,
    restarted,
    silent,
    squared_distance,
)

REFERENCE_MODEL = "lenet-sigmoid"
LEAST_PROGRESS = 1e-3


@dataclass(frozen=True)
class Search:
    """How L-BFGS is run. An attempt ends early at `good_enough`, or after `patience` steps without progress."""

    steps: int = 60
    inner: int = 20
    restarts: int = 4
    good_enough: float = 1e-8
    patience: int = 3


FULL = Search()
QUICK = Search(steps=25, restarts=2)


def dlg(
    problem: Problem,
    *,
    generator: torch.Generator,
    budget: Budget = FULL_BUDGET,
    search: Search | None = None,
    progress: Progress = silent,
) -> Reconstruction:
    """min over x and soft labels p of ‖∇L(x, p) − ĝ‖²/‖ĝ‖²; known labels are not searched for.

    Of a clipped gradient the angle is matched instead, 1 − cos.
    """
    search = search or _search(budget)
    if problem.labels is not None:
        return idlg(problem, generator=generator, budget=budget, search=search, progress=progress)
    return best(
        _attempts(problem, None, search=search, generator=generator, progress=progress), good_enough=search.good_enough
    )


def idlg(
    problem: Problem,
    *,
    generator: torch.Generator,
    budget: Budget = FULL_BUDGET,
    search: Search | None = None,
    progress: Progress = silent,
) -> Reconstruction:
    """As `dlg`, with the labels inferred from the last layer's gradient first, unless they are known."""
    search = search or _search(budget)
    labels = labels_of(problem, generator=generator)
    return best(
        _attempts(problem, labels, search=search, generator=generator, progress=progress),
        good_enough=search.good_enough,
    )


dlg_reference = partial(proven, dlg, model=REFERENCE_MODEL)
"""`dlg` on the sigmoid LeNet."""

idlg_reference = partial(proven, idlg, model=REFERENCE_MODEL)
"""`idlg` on the sigmoid LeNet."""


def _search(budget: Budget) -> Search:
    return QUICK if budget.quick else FULL


def _attempts(
    problem: Problem, labels: Tensor | None, *, search: Search, generator: torch.Generator, progress: Progress
) -> Iterator[Reconstruction]:
    # L-BFGS divides small differences of gradients by one another: single precision stalls it early.
    module = private_copy(problem, dtype=torch.float64)
    return restarted(
        lambda part: _attempt(problem, module, labels, search=search, generator=generator, progress=part),
        times=search.restarts,
        progress=progress,
    )


def _attempt(
    problem: Problem,
    module: nn.Module,
    labels: Tensor | None,
    *,
    search: Search,
    generator: torch.Generator,
    progress: Progress,
) -> Reconstruction:
    observed = problem.gradient.double()
    distance = cosine_distance if problem.clipped else squared_distance
    x = first_guess(problem, generator=generator, dtype=torch.float64).requires_grad_(True)
    logits = torch.zeros(problem.batch, problem.outputs, dtype=torch.float64, device=x.device)
    if labels is None:
        noise = torch.randn(logits.shape, generator=generator, dtype=torch.float64, device=generator.device)
        logits = noise.to(x.device).requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        [x] if labels is not None else [x, logits], max_iter=search.inner, line_search_fn="strong_wolfe"
    )

    def value() -> Tensor:
        output = module(x)
        loss = problem.loss.mean(output, labels) if labels is not None else _soft(problem, output, logits)
        return distance(gradient_at(module, loss), observed)

    def closure() -> Tensor:
        found = value()
        for variable in (x, logits):
            if variable.requires_grad:
                (variable.grad,) = torch.autograd.grad(found, variable, retain_graph=True)
        return found.detach()

    lowest, since, kept = float("inf"), 0, (x.detach().clone(), logits.detach().clone())
    for step in range(search.steps):
        optimiser.step(closure)  # type: ignore[no-untyped-call]
        reached = float(value().detach())
        since = 0 if reached < lowest * (1 - LEAST_PROGRESS) else since + 1
        if reached < lowest:
            lowest, kept = reached, (x.detach().clone(), logits.detach().clone())
        progress((step + 1) / search.steps)
        if lowest <= search.good_enough or since >= search.patience:
            break
    inputs, scores = kept
    found = scores.argmax(1) if labels is None else labels
    return Reconstruction(inputs=boxed(problem, inputs).to(problem.gradient.dtype), labels=found, loss=lowest)


def _soft(problem: Problem, output: Tensor, logits: Tensor) -> Tensor:
    """Σ_c p_c·loss(output, c), p = softmax(logits): soft labels for any loss, exact where p is one class."""
    batch, classes = logits.shape
    every = torch.arange(classes, device=output.device)

    def one(sample: Tensor, label: Tensor) -> Tensor:
        return problem.loss.mean(sample[None], label[None])

    table = torch.func.vmap(torch.func.vmap(one, in_dims=(None, 0)), in_dims=(0, None))(output, every)
    return (logits.softmax(1) * table).sum() / batch
