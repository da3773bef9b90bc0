"""Running a job to its end: rounds, metrics, and a hook at every round boundary."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedveil.engines import LocalEngine
from fedveil.errors import NumericError
from fedveil.protocol import ClientRole, RoundDone, ServerRole, ServerState
from fedveil.runs.evaluate import ClientView, Scores, score_client_view, score_weights
from fedveil.runs.job import Job

Row = dict[str, Any]


@dataclass(eq=False)
class Outcome:
    """What a finished run leaves."""

    state: ServerState
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    scores: Scores | None = None
    client_view: ClientView | None = None

    @property
    def bytes_down(self) -> float:
        """Mean bytes a client receives in a round."""
        return float(sum(row["bytes_down"] for row in self.rows) / max(len(self.rows), 1))

    @property
    def bytes_up(self) -> float:
        """Mean bytes a client sends in a round."""
        return float(sum(row["bytes_up"] for row in self.rows) / max(len(self.rows), 1))


def fresh_state(job: Job) -> ServerState:
    """The state before the first round."""
    return ServerState.fresh(job.weights.clone())


def train_job(
    job: Job, *, state: ServerState, on_round: Callable[[Row, ServerState], None] = lambda row, state: None
) -> Outcome:
    """Train from `state` to the last round; `on_round` sees every boundary's metrics and state."""
    server = ServerRole(
        job.scheme,
        job.blueprint,
        state,
        secrets=job.secrets,
        cohort=job.cohort,
        optimiser=job.optimiser,
        rounds=job.config.rounds,
    )
    engine = LocalEngine(ClientRole(job.scheme, job.blueprint), job.pool)
    outcome = Outcome(state)
    started = time.perf_counter()
    last = [started]

    def boundary(done: RoundDone) -> None:
        if done.failed:
            raise NumericError(_why_failed(done))
        now = time.perf_counter()
        row = _row(job, done, state, seconds=now - last[0])
        last[0] = time.perf_counter()
        outcome.rows.append(row)
        on_round(row, state)

    engine.drive(server.run(), on_round=boundary)
    outcome.seconds = time.perf_counter() - started
    if job.test is not None:
        outcome.scores = score_weights(job.blueprint, state.weights, job.test, job.loss)
        outcome.client_view = _client_view(job, state)
    return outcome


def _why_failed(done: RoundDone) -> str:
    client, reason = next(iter(done.gathered.refused.items()), (None, ""))
    said = f" Client {client}: {reason}." if client is not None else ""
    return (
        f"Round {done.round + 1} failed: {done.failed}.{said} Training has probably diverged: lower the learning "
        "rate. The model of the last checkpoint is untouched."
    )


def _row(job: Job, done: RoundDone, state: ServerState, *, seconds: float) -> Row:
    gathered = done.gathered
    row: Row = {
        "round": done.round + 1,
        "loss": done.loss,
        "clients": len(gathered.arrived),
        "seconds": round(seconds, 6),
        "bytes_down": gathered.bytes_down / max(len(done.cohort), 1),
        "bytes_up": gathered.bytes_up / max(len(done.cohort), 1),
    }
    if gathered.refused:
        row["refused"] = {str(client): reason for client, reason in gathered.refused.items()}
    every = job.config.evaluate_every
    if job.test is not None and every and (done.round + 1) % every == 0:
        row |= score_weights(job.blueprint, state.weights, job.test, job.loss).as_data()
    return row


def _client_view(job: Job, state: ServerState) -> ClientView:
    assert job.test is not None
    veil = job.scheme.downlink.veil(
        job.blueprint,
        state.weights,
        stream=job.secrets.stream("client view", state.round),
        head_level=state.head_level,
    )
    return score_client_view(job.blueprint, state.weights, veil.broadcast(), job.test, job.loss)
