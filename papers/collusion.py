"""What a server and clients on its side have of a recorded round, and the noise that the ledger says is left on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedveil.audit.attacks.averaging import averaged
from fedveil.audit.attacks.gradients import client_gradient
from fedveil.audit.record import server_history, server_view
from fedveil.audit.subject import Subject, enacted, model_of
from fedveil.audit.views import Opened, ServerHistory, ServerView
from fedveil.errors import ConfigError
from fedveil.ledger.correlated import NoiseLayout, charges
from fedveil.ledger.gaussian import epsilon_of
from fedveil.protocol.parts import bounded
from fedveil.runs.job import Job
from fedveil.work.clipping import ClippedSamples
from papers.leftover_noise import remaining_variance, sharpest_estimate, sharpest_variance

_ORDER = 0x7AB1E4


@dataclass(frozen=True)
class Left:
    """By the ledger: the standard deviation left on each number of an upload, seen alone and by one who knows what the
    honest others computed, and ε of the whole run against that coalition."""

    alone: float
    sharpest: float
    epsilon: float


@dataclass(frozen=True, eq=False)
class Seen:
    """A recorded run; `order` are the clients of its first round, victims first."""

    subject: Subject
    order: tuple[int, ...]
    victims: tuple[int, ...]

    @property
    def box(self) -> tuple[float, float]:
        """Between which values pictures lie."""
        return self.subject.box or (0.0, 1.0)

    def coalition(self, victim: int, colluders: int) -> tuple[int, ...]:
        """That many clients on the server's side, against one."""
        others = tuple(one for one in self.order if one != victim)
        if not 0 <= colluders <= len(others):
            raise ConfigError(f"{colluders} of {len(self.order)} clients cannot collude: the victim does not.")
        return others[len(others) - colluders :]

    def pictures(self) -> tuple[Tensor, Tensor]:
        """The victims' samples and labels."""
        parts = [self.subject.batch(one, round=1) for one in self.victims]
        return torch.cat([x for x, _ in parts]).cpu(), torch.cat([y for _, y in parts]).cpu()

    def view(self, victim: int, *, colluders: int) -> ServerView:
        """What the server and its clients have of a victim in the first round."""
        return server_view(self.subject.record, victim, round=1, colluders=self.coalition(victim, colluders))

    def sharpest_view(self, victim: int, *, colluders: int) -> ServerView:
        """The same for one who also knows what every honest other computed: the most the noise can be narrowed down."""
        noise_layout = covering_of(self.subject.job)
        assert noise_layout is not None
        members = self.coalition(victim, colluders)
        honest = [one for one in self.order if one not in members]
        uploads = {one: _upload(server_view(self.subject.record, one, round=1, colluders=members)) for one in honest}
        known = {one: self.contribution(one) for one in honest if one != victim}
        estimate = sharpest_estimate(uploads, known, noise_layout, victim, colluders=members)
        view = self.view(victim, colluders=colluders)
        opened = Opened(estimate / (view.samples or 1), None, torch.empty(0, dtype=estimate.dtype))
        return replace(view, recovered=opened)

    def contribution(self, client: int) -> Tensor:
        """What a client's upload would be without noise: n_k × its (clipped) gradient."""
        job = self.subject.job
        x, y = self.subject.batch(client, round=1)
        gradient = client_gradient(model_of(job, job.weights).train(), job.loss, x, y).double().cpu()
        if isinstance(job.scheme.work, ClippedSamples):
            gradient = gradient * min(1.0, job.scheme.work.clip / float(gradient.norm()))
        return gradient * len(job.pool.clients[client])

    def noise(self, view: ServerView) -> float:
        """√(mean of (what is seen − what is true)²): the noise that is on the upload, measured."""
        return float((_upload(view) - self.contribution(view.victim)).square().mean().sqrt())

    def left(self, victim: int, *, colluders: int) -> Left | None:
        """What the ledger says of it; None where there is no noise."""
        job = self.subject.job
        noise_layout, plan = covering_of(job), job.scheme.plan
        if noise_layout is None or plan is None:
            return None
        known = self.coalition(victim, colluders)
        spent = float(charges(noise_layout, colluding=known)[noise_layout.members.index(victim)])
        return Left(
            math.sqrt(remaining_variance(noise_layout, victim, colluders=known)),
            math.sqrt(sharpest_variance(noise_layout, victim, colluders=known)),
            epsilon_of(math.sqrt(spent * plan.target.participations), plan.target.delta),
        )

    def history(self, victim: int, *, honest: int) -> tuple[ServerHistory, list[float]]:
        """A victim's recorded rounds, all but the first `honest` colluding, and the variance left in each."""
        colluders = tuple(one for one in self.subject.record.clients if one not in self.order[:honest])
        found = server_history(self.subject.record, victim, colluders=colluders)
        left = []
        for one in found.rounds:
            noise_layout = covering_of(self.subject.job, round=one.round)
            assert noise_layout is not None
            left.append(remaining_variance(noise_layout, victim, colluders=colluders))
        return found, left

    def averaged_noise(self, history: ServerHistory, variances: Sequence[float]) -> float:
        """The noise on the best mean of a victim's uploads, measured."""
        estimate = averaged([_upload(one) for one in history.rounds], variances=variances).estimate
        return float((estimate - self.contribution(history.rounds[0].victim)).square().mean().sqrt())


def _upload(view: ServerView) -> Tensor:
    """What is seen of a contribution: n_k × the gradient that the server recovers."""
    assert view.recovered is not None
    return view.recovered.gradient.double().cpu() * (view.samples or 1)


def covering_of(job: Job, *, round: int = 1) -> NoiseLayout | None:
    """A round's noise, as every client plans it."""
    plan = job.scheme.plan
    if plan is None:
        return None
    cohort = job.cohort.draw(round - 1)
    samples = [len(job.pool.clients[one]) for one in cohort]
    reach = [bounded(job.scheme.work).sensitivity(count) for count in samples]
    return plan.noise_layout(cohort, samples, reach, seed=b"")


def seen_round(job: Job, folder: Path, *, victims: int, honest: int, least: float, rounds: int = 1) -> Seen:
    """Train and record the first `rounds` rounds.

    Victims are the first clients, in an order drawn by the seed, whose first gradient is at least `least` long: one
    that the model already classifies has next to no gradient, and drowns in any noise. `honest` is how many clients
    the largest coalition that is attacked leaves: what colluders know is kept for those.
    """
    order = list(job.cohort.draw(0))
    seed = job.config.seed
    assert seed is not None
    mixed = torch.randperm(len(order), generator=torch.Generator().manual_seed(_ORDER + seed)).tolist()
    order = [order[place] for place in mixed]
    model = model_of(job, job.weights).train()

    def length(client: int) -> float:
        data = job.pool.clients[client]
        x, y = data.take(torch.arange(len(data)))
        return float(client_gradient(model, job.loss, x, y).norm())

    loud = [one for one in order if length(one) >= least][:victims]
    if not loud:
        raise ConfigError(f"No client of the first round has a gradient of length {least:g}: nobody can be a victim.")
    order = [*loud, *(one for one in order if one not in loud)]
    subject = enacted(job, folder, rounds=rounds, victims=order[: max(honest, len(loud))])
    return Seen(subject, tuple(order), tuple(loud))
