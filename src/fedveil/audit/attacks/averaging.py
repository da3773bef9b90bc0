"""Averaging: many rounds' uploads of one client, while the model barely moves.

Every round covers the same contribution c with fresh noise: u_t = c + n_t, variance v_t by the ledger. The mean
weighted by 1/v_t is the best linear estimate of c, with variance

    1 / Σ_t 1/v_t        (v/T where all are alike)

so noise falls as 1/√T and no faster: what composition charges for.

The same from the other side: sketched models W·P_t of many rounds, of which E[P_t] = c·1 with a known c, so that their
mean over c tends to W. Since P_t² = q·P_t, the best estimate by least squares is (Σ_t W·P_t)(Σ_t P_t)⁺: all of W as
soon as the rounds' sketches together read every direction, if the model stood still meanwhile.
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
from fedveil.audit.attacks.extraction import asked_of, fitting, ready
from fedveil.audit.attacks.gradients import as_result, observed_in, problem_from
from fedveil.audit.views import ClientView, ServerHistory, ServerView, View
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


@attack(
    "sketches",
    sees="model",
    asset="the model's function",
    needs=("sketch",),
    reference=None,
    adaptive=True,
    how="sketched models of many rounds averaged, and put together by least squares (ours)",
)
def sketches_attack(view: View, context: AttackContext) -> dict[str, Tensor]:
    """Class scores of the model that a client makes of the last N received ones: mean.N, and fitted.N.

    Sketches are read off the models: columns of one bucket are equal up to their signs.
    """
    seen = seen_by(view, ClientView)
    latest = {each.round: each.broadcast for each in seen.broadcasts}
    sent = [latest[round] for round in sorted(latest)]
    if len(sent) < 2:
        raise NotApplicableError(f"{len(sent)} received models: several rounds are put together (record_rounds)")
    architecture, queries = seen.facts.architecture(), asked_of(seen)
    counts = [count for count in _TOGETHER if count < len(sent)]
    results: dict[str, Tensor] = {}
    for done, count in enumerate([*counts, len(sent)]):
        models = [architecture.parameters.split(each.parameters.double()) for each in sent[-count:]]
        for name, estimate in (("mean", mean_of_sketches), ("fitted", fitted_to_sketches)):
            parts = {part: estimate([model[part] for model in models]) for part in models[0]}
            parameters = architecture.parameters.join(parts).to(sent[-1].parameters)
            module = ready(seen, architecture, replace(sent[-1], parameters=parameters), device=context.device)
            with torch.no_grad():
                results[f"{name}.{count}"] = module(fitting(module, queries)).double().cpu()
        context.progress((done + 1) / (len(counts) + 1))
    return results


_TOGETHER = (4, 8, 16, 32, 64)
_MOST_SOLVED = 2048
"""Beyond so many inputs a layer's system of equations is not solved, and the mean is taken."""


def sketch_in(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """(bucket, sign) of every input of a received weight, outputs × inputs: those that were left out are in bucket −1.

    None where no two columns are equal up to their sign: the weight was not sketched.
    """
    columns = rows.T.contiguous()
    there = (columns != 0).any(1)
    first = (columns != 0).to(torch.uint8).argmax(1, keepdim=True)
    signs = columns.gather(1, first)[:, 0].sign()
    _, bucket, counts = torch.unique(columns * signs[:, None], dim=0, return_inverse=True, return_counts=True)
    if not bool(there.any()) or int(counts[bucket[there]].max()) < 2:
        return None
    return torch.where(there, bucket, -1), signs


def mean_of_sketches(received: Sequence[Tensor]) -> Tensor:
    """The mean over E[P]'s one number, the share of inputs that a sketch keeps."""
    mean = torch.stack(list(received)).mean(0)
    if mean.dim() < 2 or (found := sketch_in(received[-1].flatten(1))) is None:
        return received[-1] if mean.dim() < 2 else mean
    return mean / float((found[0] >= 0).double().mean())


def fitted_to_sketches(received: Sequence[Tensor]) -> Tensor:
    """(Σ_t W·P_t)(Σ_t P_t)⁺; what is no sketch is as it came last."""
    rows = [each.flatten(1) for each in received] if received[-1].dim() > 1 else []
    sketches = [sketch_in(each) for each in rows]
    if not rows or any(found is None for found in sketches):
        return received[-1]
    if rows[0].shape[1] > _MOST_SOLVED:
        return mean_of_sketches(received)
    projections = torch.zeros(rows[0].shape[1], rows[0].shape[1], dtype=torch.float64)
    for found in sketches:
        assert found is not None
        bucket, signs = found
        alike = (bucket[:, None] == bucket) & (bucket >= 0)
        projections += torch.where(alike, signs[:, None] * signs, 0.0)
    inverse = torch.linalg.pinv(projections, rtol=1e-9, hermitian=True)
    fitted: Tensor = torch.stack(rows).sum(0) @ inverse
    return fitted.view_as(received[-1])


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
