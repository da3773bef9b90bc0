"""What protection costs a round: real rounds in which everything happens but local training, and clocks around them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from fedveil import models
from fedveil.config import RunConfig
from fedveil.downlink.messages import Broadcast
from fedveil.engines import ClientPool, LocalEngine
from fedveil.errors import ConfigError
from fedveil.protocol import ClientRole, ClientState, HolderRole, RoundDone, Steps
from fedveil.protocol.asking import Accumulator, Ask, Gathered
from fedveil.protocol.client import Answer
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.relayed import Votes
from fedveil.runs.job import Job, ModelFacts, assemble_job
from fedveil.runs.roles import client_role, server_role
from fedveil.runs.training import fresh_state
from fedveil.work.clipped import ClippedUpdate
from fedveil.work.divided import DividedUpdate
from fedveil.work.messages import Bench as Workbench
from fedveil.work.messages import ClientData, LocalWork
from fedveil.work.step import weighted
from fedveil.work.updates import LocalSteps
from papers.cells import Figures
from papers.paraaegis_rows import Bench, Row

SLICE = 1 << 21
"""Larger models are timed on one of about this many parameters, and the time is scaled."""

_ROUNDS = 3
_SAMPLES = 4
_SLICE_SIDE = 64
_PER_UNIT = _SLICE_SIDE**2 + 1 + 10
_SEED = 1
_WORKERS = "FEDVEIL_WORKERS"


@dataclass
class Spent:
    """Seconds of a round: one client's, the server's, and of those the counting of votes."""

    client: float = 0.0
    server: float = 0.0
    counting: float = 0.0

    @property
    def all(self) -> float:
        """What a round takes longer."""
        return self.client + self.server


@dataclass
class Clocks:
    """The round under way, and those before it.

    Of the clients, the first to answer each phase is timed: it pays for what simulated clients share,
    such as the decrypted sum, and it pads.
    """

    now: Spent = field(default_factory=Spent)
    rounds: list[Spent] = field(default_factory=list)
    voting: bool = False

    def serve(self, seconds: float) -> None:
        """The server has worked."""
        self.now.server += seconds
        if self.voting:
            self.now.counting += seconds

    def boundary(self) -> None:
        """A round is over."""
        self.rounds.append(self.now)
        self.now = Spent()


class _TimedRole:
    """A client role whose first client is timed in every phase."""

    def __init__(self, role: ClientRole | HolderRole, clocks: Clocks) -> None:
        self._role = role
        self._clocks = clocks

    def handle_many(
        self,
        states: Sequence[ClientState],
        request: Request,
        clients: Sequence[ClientData],
        private: Mapping[int, Request] | None = None,
    ) -> Iterator[tuple[ClientState, Answer]]:
        """The role's answers."""
        answers = self._role.handle_many(states, request, clients, private)
        started = time.process_time()
        for number, answer in enumerate(answers):
            if number == 0:
                self._clocks.now.client += time.process_time() - started
            yield answer


class _TimedSum:
    """An accumulator that is timed."""

    def __init__(self, into: Accumulator, clocks: Clocks) -> None:
        self._into = into
        self._clocks = clocks

    def add(self, reply: Reply) -> None:
        """Fold a reply in."""
        started = time.process_time()
        self._into.add(reply)
        self._clocks.serve(time.process_time() - started)


def _timed(steps: Steps, clocks: Clocks) -> Steps:
    """The server's run, timed."""
    answer: Gathered | None = None
    while True:
        started = time.process_time()
        try:
            step = steps.send(answer)
        except StopIteration:
            return
        clocks.serve(time.process_time() - started)
        if isinstance(step, RoundDone):
            clocks.boundary()
        if isinstance(step, Ask):
            clocks.voting = isinstance(step.into, Votes)
            step = replace(step, into=_TimedSum(step.into, clocks))
        answer = yield step


@dataclass(frozen=True)
class _Standing(LocalSteps):
    """Local training that takes no time: updates that clients half agree on, as a vote would find them."""

    def run(self, bench: Workbench, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """The same update in every round."""
        length = self.layout(bench.blueprint, tensors=1).length - 1
        return weighted(_update(length, data.client), len(data))


@lru_cache(maxsize=64)
def _update(length: int, client: int) -> Tensor:
    common = torch.randn(length, generator=torch.Generator().manual_seed(0))
    own = torch.randn(length, generator=torch.Generator().manual_seed(1 + client))
    return (common + own) * 1e-3


def measure(bench: Bench, row: Row) -> Figures:
    """Seconds that protection adds to a round of a row: one client's and the server's, on one thread.

    Processor time, so that what else runs on the machine does not count. A share that shrinks is timed at
    its mean over the run.
    """
    whole = _parameters(bench)
    job = _standing_job(bench, row, large=whole > SLICE)
    timed = job.blueprint.size
    with _one_thread():
        rounds, traffic = _rounds(job)
    fastest, scale = min(rounds, key=lambda one: one.all), whole / timed
    return {
        "protection": fastest.all * scale,
        "client_seconds": fastest.client * scale,
        "server_seconds": fastest.server * scale,
        "counting_seconds": fastest.counting * scale,
        "bytes_up": traffic.bytes_up / bench.clients * scale,
        "bytes_down": traffic.bytes_down / bench.clients * scale,
        "encrypted_share": row.mean_share(bench.rounds),
        "parameters": whole,
        "timed_on": timed,
    }


def _rounds(job: Job) -> tuple[list[Spent], Gathered]:
    """Every round but the first, in which nothing is decrypted yet, and the last one's traffic."""
    clocks, state = Clocks(), fresh_state(job)
    done: list[RoundDone] = []
    engine = LocalEngine(_TimedRole(client_role(job, state), clocks), job.pool)  # type: ignore[arg-type]
    engine.drive(_timed(server_role(job, state).run(), clocks), on_round=done.append)
    for one in done:
        if one.failed:
            raise ConfigError(f"A round that was to be timed failed: {one.failed}.")
    return clocks.rounds[1:], done[-1].gathered


def _standing_job(bench: Bench, row: Row, *, large: bool) -> Job:
    """A row's scheme on a few random samples and with local training that stands still."""
    slice_of = {"model": "mlp", "model_options": {"depth": 2, "width": SLICE // _PER_UNIT}}
    changes: dict[str, object] = {**(slice_of if large else {}), "rounds": _ROUNDS}
    if row.votes:
        changes |= {"share": row.mean_share(bench.rounds), "share_decay": 1.0}
    settings = bench.settings(row, "iid", cipher=row.cipher, **changes)
    config = RunConfig.from_mapping({**settings, "seed": _SEED}, where=f"the costs of {row.label}")
    shape = (1, _SLICE_SIDE, _SLICE_SIDE) if large else bench.shape
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn((_SAMPLES * bench.clients, *shape), generator=generator)
    y = torch.arange(len(x)) % bench.outputs
    pool = ClientPool.shared(x, y, list(torch.split(torch.arange(len(x)), _SAMPLES)))
    model = models.build(
        config.model, input_shape=shape, outputs=bench.outputs, seed=_SEED, vocabulary=None, **config.model_options
    )
    facts = ModelFacts(config.model, config.model_options, shape, bench.outputs, "classification")
    job = assemble_job(config, model, pool, None, facts)
    return replace(job, scheme=replace(job.scheme, work=_still(job.scheme.work)))


def _still(work: LocalWork) -> LocalWork:
    """The same local work without the training."""
    if isinstance(work, ClippedUpdate | DividedUpdate):
        return replace(work, local=_standing(work.local))
    assert isinstance(work, LocalSteps)
    return _standing(work)


def _standing(local: LocalSteps) -> _Standing:
    return _Standing(local.loss, local.batches, local.schedule, local.steps, local.epochs)


def _parameters(bench: Bench) -> int:
    options = bench.network["model_options"]
    assert isinstance(options, dict)
    model = models.build(
        str(bench.network["model"]),
        input_shape=bench.shape,
        outputs=bench.outputs,
        seed=_SEED,
        vocabulary=None,
        **options,
    )
    return sum(one.numel() for one in model.parameters())


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread and, under CKKS, one process."""
    threads, workers = torch.get_num_threads(), os.environ.get(_WORKERS)
    torch.set_num_threads(1)
    os.environ[_WORKERS] = "1"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if workers is None:
            del os.environ[_WORKERS]
        else:
            os.environ[_WORKERS] = workers
