"""Many rounds' gradients of one client, averaged, then read like one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from fedveil.audit.attacks.averaging import averaged
from fedveil.audit.attacks.matching import Problem
from fedveil.audit.attempts.common import seen_by
from fedveil.audit.attempts.gradients import observed_in
from fedveil.audit.attempts.reconstruction import READERS, has_closed_form, problem_from, read_by
from fedveil.audit.registry import Progress, Settings
from fedveil.audit.views import ServerHistory, ServerView, View
from fedveil.errors import ConfigError, NotApplicableError, unknown_name


def averaging(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """Σ_t g_t/v_t / Σ_t 1/v_t over the recorded rounds, read by the attack that `with` names.

    All v_t count alike unless `variances` gives one for each round. That the model barely moved in between is an
    assumption: the mean is read as a gradient of the last round's model. Without `with`, the closed form is taken
    where the model allows it, otherwise inverting.
    """
    rounds = [one for one in seen_by(view, ServerHistory).rounds if _has_gradient(one, settings)]
    if len(rounds) < 2:
        raise NotApplicableError(
            f"a gradient that the server can read in {len(rounds)} of the recorded rounds: a mean takes at least two"
        )
    _require_one_batch(rounds[-1], settings)
    seen = [observed_in(one, settings) for one in rounds]
    variances = _variances(settings, len(rounds))
    mean = averaged([one.gradient for one in seen], variances=variances).estimate.to(seen[-1].gradient.dtype)
    last = dataclasses.replace(seen[-1], gradient=mean)
    problem = problem_from(last, settings)
    return read_by(_reader(problem, settings), last, settings, progress, problem=problem)


def _require_one_batch(one: ServerView, settings: Settings) -> None:
    """Refuse clients that draw batches, unless the settings say how many samples the mean is of."""
    drawn = one.samples is not None and one.facts.batch_of(one.samples) < one.samples
    if drawn and settings.get("batch") is None:
        raise NotApplicableError("the client draws other samples in every round: there is no one gradient to average")


def _has_gradient(one: ServerView, settings: Settings) -> bool:
    return (one.summed if settings.get("target") == "sum" else one.recovered) is not None


def _variances(settings: Settings, count: int) -> Sequence[float]:
    given = settings.get("variances")
    if given is None:
        return [1.0] * count
    if len(given) != count:
        raise ConfigError(f"{len(given)} variances for {count} rounds: pass one for each round with a gradient.")
    return [float(one) for one in given]


def _reader(problem: Problem, settings: Settings) -> str:
    name = settings.get("with")
    if name is not None:
        if name not in READERS:
            raise unknown_name("reading attack", str(name), READERS)
        return str(name)
    return "closed-form" if has_closed_form(problem) else "inverting"
