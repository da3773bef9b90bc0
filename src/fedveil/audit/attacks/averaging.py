"""Averaging: many rounds' uploads of one client, while the model barely moves.

Every round covers the same contribution c with fresh noise: u_t = c + n_t, variance v_t by the ledger. The mean
weighted by 1/v_t is the best linear estimate of c, with variance

    1 / Σ_t 1/v_t        (v/T where all are alike)

so noise falls as 1/√T and no faster: what composition charges for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedveil.audit.attack import AttackContext, attack, seen_by
from fedveil.audit.attacks.closed_form import has_closed_form
from fedveil.audit.attacks.deep_leakage import READERS
from fedveil.audit.attacks.gradients import as_result, observed_in, problem_from
from fedveil.audit.views import ServerHistory, ServerView, View
from fedveil.errors import ConfigError, DataError, NotApplicableError, unknown_name


@attack(
    "averaging",
    sees="rounds",
    asset="data",
    reference="mlp",
    adaptive=True,
    how="noise averaged away over rounds (ours)",
)
def averaging_attack(
    view: View, context: AttackContext, *, variances: Sequence[float] | None = None, with_: str | None = None
) -> dict[str, Tensor]:
    """Σ_t g_t/v_t / Σ_t 1/v_t over the recorded rounds, read by the attack that `with` names.

    All v_t count alike unless `variances` gives one for each round. That the model barely moved in between is an
    assumption: the mean is read as a gradient of the last round's model. Without `with`, the closed form is taken
    where the model allows it, otherwise inverting.
    """
    rounds = [seen_round for seen_round in seen_by(view, ServerHistory).rounds if _has_gradient(seen_round, context)]
    if len(rounds) < 2:
        raise NotApplicableError(
            f"a gradient that the server can read in {len(rounds)} of the recorded rounds: a mean takes at least two"
        )
    last = rounds[-1]
    if last.samples is not None and last.facts.batch_of(last.samples) < last.samples and context.batch is None:
        raise NotApplicableError("the client draws other samples in every round: there is no one gradient to average")
    if variances is not None and len(variances) != len(rounds):
        raise ConfigError(f"{len(variances)} variances for {len(rounds)} rounds: pass one for each with a gradient.")
    if with_ is not None and with_ not in READERS:
        raise unknown_name("reading attack", str(with_), READERS)
    seen = [observed_in(seen_round, context) for seen_round in rounds]
    weighted = [1.0] * len(rounds) if variances is None else [float(variance) for variance in variances]
    mean = averaged([observation.gradient for observation in seen], variances=weighted).estimate.to(
        seen[-1].gradient.dtype
    )
    problem = problem_from(replace(seen[-1], gradient=mean), context)
    reader = with_ or ("closed-form" if has_closed_form(problem) else "inverting")
    return as_result(READERS[reader](problem, context))


def _has_gradient(seen_round: ServerView, context: AttackContext) -> bool:
    return (seen_round.summed if context.target == "sum" else seen_round.recovered) is not None


@dataclass(frozen=True, eq=False)
class Averaged:
    """An estimate of one client's contribution, the variance per coordinate that it should have by the ledger, and
    the share of each round in it."""

    estimate: Tensor
    variance: float
    weights: Tensor

    @property
    def deviation(self) -> float:
        """The standard deviation that remains on every coordinate."""
        return math.sqrt(self.variance)


def averaged(uploads: Sequence[Tensor] | Tensor, *, variances: Sequence[float]) -> Averaged:
    """Σ_t u_t/v_t / Σ_t 1/v_t over the rounds in which one client took part.

    `uploads` are the same section of one client's payloads, a flat vector for each round; `variances` are the noise
    that the ledger states for each (`collusion.remaining_variance`).
    """
    rows = _rows(uploads)
    if rows.dim() != 2 or len(rows) != len(variances) or not len(rows):
        raise DataError(
            f"Averaging takes one flat upload and one variance for each round: got uploads of shape "
            f"{tuple(rows.shape)} and {len(variances)} variances."
        )
    if not all(math.isfinite(variance) and variance > 0 for variance in variances):
        raise DataError("Averaging needs variances that are positive numbers; an upload without noise needs no mean.")
    precision = torch.tensor([1.0 / variance for variance in variances], dtype=torch.float64, device=rows.device)
    weights = precision / precision.sum()
    return Averaged(weights @ rows, 1.0 / math.fsum(1.0 / variance for variance in variances), weights)


def _rows(uploads: Sequence[Tensor] | Tensor) -> Tensor:
    return uploads.double() if isinstance(uploads, Tensor) else torch.stack(list(uploads)).double()
