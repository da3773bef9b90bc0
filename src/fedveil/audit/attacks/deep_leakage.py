"""Searches for inputs whose gradient is the observed one.

dlg         Deep Leakage from Gradients (Zhu et al. 2019): L-BFGS on inputs and soft labels
idlg        the same after the labels were read (Zhao et al. 2020)
inverting   Inverting Gradients (Geiping et al. 2020): cosine distance, total variation, signed Adam
polarised   idlg against a private loss on what the last layer reads (Fan et al. 2020): whatever its head V and codes T
            are, all it adds to the gradient comes through its derivative by the features h of each sample,
            −(a₂/B)·Σ_b T[y, b]·V_b over the bits within the margin. So one free vector d for each sample stands for
            every V and T, and ∇(loss + ⟨d, h⟩) is matched over inputs and d; labels are read off the last layer,
            whose gradient the private loss does not touch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedveil.audit.attack import SINGLE, AttackContext, OnProgress, ReferenceRun, applicable, attack, silent
from fedveil.audit.attacks.closed_form import labels_of, read_closed_form, with_label
from fedveil.audit.attacks.gradients import (
    MOST_READ,
    MOST_SAMPLES,
    Observed,
    Problem,
    Reconstruction,
    as_result,
    best,
    boxed,
    cosine_distance,
    first_guess,
    gradient_at,
    normalised,
    observed_in,
    private_copy,
    problem_from,
    squared_distance,
)
from fedveil.audit.views import View
from fedveil.work.polarised import head_of, reading

LEAST_PROGRESS = 1e-3


@attack(
    "dlg",
    sees="upload",
    asset="data",
    reference="lenet",
    slow=True,
    how="gradient matching by L-BFGS, labels too (Zhu et al. 2019)",
)
def dlg_attack(view: View, context: AttackContext) -> dict[str, Tensor]:
    """Deep leakage from gradients: inputs and soft labels by L-BFGS."""
    return read_by("dlg", observed_in(view, context), context)


@attack(
    "idlg",
    sees=("upload", "masked upload", "sum", "coalition", "wire"),
    asset="data",
    reference="lenet",
    slow=True,
    how="the same after reading the labels (Zhao et al. 2020)",
)
def idlg_attack(view: View, context: AttackContext) -> dict[str, Tensor]:
    """The same with labels inferred first."""
    return read_by("idlg", observed_in(view, context), context)


@attack(
    "inverting",
    sees="upload",
    asset="data",
    reference="lenet",
    slow=True,
    how="cosine distance, total variation, Adam (Geiping et al. 2020)",
)
def inverting_attack(view: View, context: AttackContext) -> dict[str, Tensor]:
    """Inverting Gradients: cosine distance and total variation."""
    return read_by("inverting", observed_in(view, context), context)


@attack(
    "polarised",
    sees="upload",
    asset="data",
    needs=("private head",),
    reference=ReferenceRun(
        "a secret polarization network whose private loss counts nothing, a sigmoid LeNet, one digit a client",
        {**SINGLE, "scheme": "spn", "private_weight": 0.0, "model": "lenet-sigmoid", "loss": "cross-entropy"},
        1,
    ),
    adaptive=True,
    slow=True,
    how="idlg that fits what a private loss adds, for any head and codes (ours)",
)
def polarised_attack(view: View, context: AttackContext) -> dict[str, Tensor]:
    """Inputs, and for each a free direction of its features."""
    return read_by("polarised", observed_in(view, context), context)


def read_by(name: str, seen: Observed, context: AttackContext) -> dict[str, Tensor]:
    """Run the attack `name` of `READERS` on what was observed."""
    problem = problem_from(seen, context, most=MOST_READ if name == "closed-form" else MOST_SAMPLES)
    return as_result(READERS[name](problem, context))


def _searching(search: Callable[..., Reconstruction]) -> Callable[[Problem, AttackContext], Reconstruction]:
    def read(problem: Problem, context: AttackContext) -> Reconstruction:
        with applicable():
            if search is not dlg or problem.clipped:  # dlg searches for labels itself
                problem = with_label(problem, context.generator())
            return search(problem, generator=context.generator(), quick=context.quick, progress=context.progress)

    return read


@dataclass(frozen=True)
class Search:
    """How L-BFGS is run. An attempt ends early at `good_enough`, or after `patience` steps without progress."""

    steps: int = 60
    inner: int = 20
    restarts: int = 4
    good_enough: float = 1e-8
    patience: int = 3
    private: bool = False
    """Whether something private was added to the loss, by what the last layer reads."""


QUICK_SEARCH = Search(steps=25, restarts=2)


def dlg(
    problem: Problem,
    *,
    generator: torch.Generator,
    quick: bool = False,
    search: Search | None = None,
    progress: OnProgress = silent,
) -> Reconstruction:
    """min over x and soft labels p of ‖∇L(x, p) − ĝ‖²/‖ĝ‖²; known labels are not searched for.

    Of a clipped gradient the angle is matched instead, 1 − cos.
    """
    search = search or (QUICK_SEARCH if quick else Search())
    # L-BFGS divides small differences of gradients by one another: single precision stalls it early.
    module = private_copy(problem, dtype=torch.float64)
    return best(
        lambda part: _search(problem, module, search=search, generator=generator, progress=part),
        times=search.restarts,
        good_enough=search.good_enough,
        progress=progress,
    )


def idlg(
    problem: Problem,
    *,
    generator: torch.Generator,
    quick: bool = False,
    search: Search | None = None,
    progress: OnProgress = silent,
) -> Reconstruction:
    """As `dlg`, with the labels inferred from the last layer's gradient first, unless they are known."""
    read = replace(problem, labels=labels_of(problem, generator=generator))
    return dlg(read, generator=generator, quick=quick, search=search, progress=progress)


def polarised(
    problem: Problem,
    *,
    generator: torch.Generator,
    quick: bool = False,
    search: Search | None = None,
    progress: OnProgress = silent,
) -> Reconstruction:
    """As `idlg`, with a free vector d on the features of each sample: a private loss adds ⟨d, h⟩ to the first order."""
    search = replace(search or (QUICK_SEARCH if quick else Search()), private=True)
    return idlg(problem, generator=generator, search=search, progress=progress)


def _search(
    problem: Problem,
    module: nn.Module,
    *,
    search: Search,
    generator: torch.Generator,
    progress: OnProgress,
) -> Reconstruction:
    observed, labels = problem.gradient.double(), problem.labels
    distance = cosine_distance if problem.clipped else squared_distance
    x = first_guess(problem, generator=generator, dtype=torch.float64).requires_grad_(True)
    logits = torch.zeros(problem.batch, problem.outputs, dtype=torch.float64, device=x.device)
    if labels is None:
        noise = torch.randn(logits.shape, generator=generator, dtype=torch.float64, device=generator.device)
        logits = noise.to(x.device).requires_grad_(True)
    head = head_of(module) if search.private else None
    width = 0 if head is None else head.in_features
    added = torch.zeros(problem.batch, width, dtype=torch.float64, device=x.device).requires_grad_(head is not None)
    fitted = [variable for variable in (x, logits, added) if variable.requires_grad]
    optimiser = torch.optim.LBFGS(fitted, max_iter=search.inner, line_search_fn="strong_wolfe")

    def value() -> Tensor:
        with nullcontext() if head is None else reading(head) as read:
            output = module(x)
        loss = problem.loss.mean(output, labels) if labels is not None else _soft(problem, output, logits)
        if read is not None:
            loss = loss + (read.features(output) * added).sum() / problem.batch
        return distance(gradient_at(module, loss), observed)

    def closure() -> Tensor:
        mismatch = value()
        for variable, slope in zip(fitted, torch.autograd.grad(mismatch, fitted), strict=True):
            variable.grad = slope
        return mismatch.detach()

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
    classes = scores.argmax(1) if labels is None else labels
    return Reconstruction(inputs=boxed(problem, inputs).to(problem.gradient.dtype), labels=classes, loss=lowest)


def _soft(problem: Problem, output: Tensor, logits: Tensor) -> Tensor:
    """Σ_c p_c·loss(output, c), p = softmax(logits): soft labels for any loss, exact where p is one class."""
    batch, classes = logits.shape
    every = torch.arange(classes, device=output.device)

    def loss_of(sample: Tensor, label: Tensor) -> Tensor:
        return problem.loss.mean(sample[None], label[None])

    table = torch.func.vmap(torch.func.vmap(loss_of, in_dims=(None, 0)), in_dims=(0, None))(output, every)
    return (logits.softmax(1) * table).sum() / batch


@dataclass(frozen=True)
class Descent:
    """How signed Adam is run: the learning rate falls tenfold after 3/8, 5/8 and 7/8 of the steps."""

    steps: int = 600
    restarts: int = 3
    rate: float = 0.3
    variation: float = 1e-4
    good_enough: float = 1e-5


SMALL = Descent()
SMALL_QUICK = Descent(steps=400, restarts=2)
# Larger pictures need more and smaller steps; with these few, 28×28 pixels stay below 20 dB on the reference model.
LARGE = Descent(steps=3000, restarts=2, rate=0.05, variation=1e-6)
LARGE_QUICK = Descent(steps=3000, restarts=1, rate=0.05, variation=1e-6)
SMALL_PICTURE = 256


def inverting(
    problem: Problem,
    *,
    generator: torch.Generator,
    quick: bool = False,
    descent: Descent | None = None,
    progress: OnProgress = silent,
) -> Reconstruction:
    """min over x in the box of 1 − cos(∇L(x, y), ĝ) + λ·TV(x); y is inferred where it is not known.

    The reported loss is the cosine distance alone.
    """
    descent = descent or _descent(problem, quick=quick)
    labels = labels_of(problem, generator=generator)
    module = private_copy(problem, dtype=torch.float32)
    observed = normalised(problem.gradient).float()
    return best(
        lambda part: _descended(problem, module, observed, labels, descent=descent, generator=generator, progress=part),
        times=descent.restarts,
        good_enough=descent.good_enough,
        progress=progress,
    )


def total_variation(x: Tensor) -> Tensor:
    """The mean absolute difference of neighbours along the last two dimensions; 0 for what is not a picture."""
    if x.dim() < 3:
        return x.new_zeros(())
    rows = (x[..., 1:, :] - x[..., :-1, :]).abs()
    columns = (x[..., :, 1:] - x[..., :, :-1]).abs()
    return sum((part.mean() for part in (rows, columns) if part.numel()), x.new_zeros(()))


def _descent(problem: Problem, *, quick: bool) -> Descent:
    if math.prod(problem.input_shape) <= SMALL_PICTURE:
        return SMALL_QUICK if quick else SMALL
    return LARGE_QUICK if quick else LARGE


def _descended(
    problem: Problem,
    module: nn.Module,
    observed: Tensor,
    labels: Tensor,
    *,
    descent: Descent,
    generator: torch.Generator,
    progress: OnProgress,
) -> Reconstruction:
    x = first_guess(problem, generator=generator, dtype=torch.float32).requires_grad_(True)
    width = 1.0 if problem.box is None else problem.box[1] - problem.box[0]
    optimiser = torch.optim.Adam([x], lr=descent.rate * width)
    falls = [descent.steps * eighths // 8 for eighths in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones=falls, gamma=0.1)

    def distance() -> Tensor:
        return cosine_distance(gradient_at(module, problem.loss.mean(module(x), labels)), observed)

    for step in range(descent.steps):
        objective = distance() + descent.variation / width * total_variation(x)
        (slope,) = torch.autograd.grad(objective, x)
        x.grad = slope.sign()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            x.copy_(boxed(problem, x))
        progress((step + 1) / descent.steps)
    return Reconstruction(inputs=x.detach().to(problem.gradient.dtype), labels=labels, loss=float(distance().detach()))


READERS: Mapping[str, Callable[[Problem, AttackContext], Reconstruction]] = {
    "closed-form": read_closed_form,
    "dlg": _searching(dlg),
    "idlg": _searching(idlg),
    "inverting": _searching(inverting),
    "polarised": _searching(polarised),
}
"""How a gradient is read, by name."""
