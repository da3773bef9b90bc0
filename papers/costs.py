"""What protection costs: rounds of the real protocol, in seconds of one core, while local training takes no time.

`timed_rounds` tells a client's seconds from the server's (ParaAegis's Table 1, NADP-FL's Table 2); `columns_of` has
them by what is done (MP-DP's Table 5).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.client_held.client import HolderRole
from fedveil.client_held.server import Votes
from fedveil.config import RunConfig
from fedveil.downlink.messages import Broadcast
from fedveil.engine import ClientPool, LocalEngine
from fedveil.errors import ConfigError, NumericError
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.phases import Accumulator, Ask, Gathered, RoundDone, Steps, asked
from fedveil.roles.client import Answer, ClientRole
from fedveil.runs.job import Job, ModelFacts, assemble_job
from fedveil.runs.loop import client_role, fresh_state, server_role
from fedveil.work.messages import ClientData, RunMany, Workspace
from papers.cells import Figures

_SEED = 1
_WORKERS = "FEDVEIL_WORKERS"
_SHORT_KEY = 256
Absent = Callable[[Request, int], bool]


@dataclass
class Spent:
    """Seconds of a round: one client's, the server's, and of those the counting of votes; bytes the server holds."""

    client: float = 0.0
    server: float = 0.0
    counting: float = 0.0
    held: int = 0

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
    weighing: bool = False
    """Whether to add up, too, what the server holds of a round."""

    def serve(self, seconds: float) -> None:
        """The server has worked."""
        self.now.server += seconds
        if self.voting:
            self.now.counting += seconds

    def boundary(self) -> None:
        """A round is over."""
        self.rounds.append(self.now)
        self.now = Spent()


@dataclass(frozen=True)
class _TimedRole:
    """A client role whose first client is timed in every phase; `alone`: it answers by itself, before all others."""

    role: ClientRole | HolderRole
    clocks: Clocks
    alone: bool = False

    def handle_many(
        self,
        states: Sequence[ClientState],
        request: Request,
        clients: Sequence[ClientData],
        private: Mapping[int, Request] | None = None,
    ) -> Iterator[tuple[ClientState, Answer]]:
        """The role's answers."""
        first = 1 if self.alone else len(states)
        for start, end in ((0, first), (first, len(states))):
            answers = self.role.handle_many(states[start:end], request, clients[start:end], private)
            started = time.process_time()
            for number, answer in enumerate(answers):
                if start == number == 0:
                    self.clocks.now.client += time.process_time() - started
                yield answer


@dataclass(frozen=True)
class _TimedSum:
    """An accumulator that is timed."""

    into: Accumulator
    clocks: Clocks

    def add(self, reply: Reply) -> None:
        """Fold a reply in."""
        started = time.process_time()
        self.into.add(reply)
        self.clocks.serve(time.process_time() - started)


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
        into = step.into if isinstance(step, Ask) else None
        if isinstance(step, Ask):
            clocks.voting = isinstance(step.into, Votes)
            step = replace(step, into=_TimedSum(step.into, clocks))
        answer = yield step
        if into is not None and clocks.weighing:
            clocks.now.held = max(clocks.now.held, held_bytes(into))


def held_bytes(thing: object, seen: set[int] | None = None) -> int:
    """Bytes of every array, tensor and string of bytes that can be reached from a thing of FedVeil's, each once."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return int(thing.nbytes)
    if isinstance(thing, np.ndarray):
        return int(thing.nbytes)
    if isinstance(thing, bytes):
        return len(thing)
    if isinstance(thing, Mapping):
        return sum(held_bytes(one, seen) for one in thing.values())
    if isinstance(thing, list | tuple | set | frozenset):
        return sum(held_bytes(one, seen) for one in thing)
    ours = type(thing).__module__.startswith("fedveil.")
    return sum(held_bytes(one, seen) for one in vars(thing).values()) if ours and hasattr(thing, "__dict__") else 0


@contextmanager
def one_thread() -> Iterator[None]:
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


def timed_rounds(
    job: Job, *, absent: Absent | None = None, still: bool = False
) -> tuple[list[Spent], Gathered, LocalEngine]:
    """Every round but the first, in which nothing is decrypted yet, the last one's traffic, and the engine.

    `still`: local work is done once, and its result sent again in every round; clients answer one by one, and what the
    server holds is weighed.
    """
    clocks, state = Clocks(weighing=still), fresh_state(job)
    role = client_role(job, state)
    if still:
        role.work_by(_once(job.scheme.work.run_many))
    engine = LocalEngine(_TimedRole(role, clocks, alone=still), job.pool, absent=absent)  # type: ignore[arg-type]
    steps = asked(_timed(server_role(job, state).run(), clocks), engine)
    done = [step for step in steps if isinstance(step, RoundDone)]
    for one in done:
        if one.failed:
            raise ConfigError(f"A round that was to be timed failed: {one.failed}.")
    return clocks.rounds[1:], done[-1].gathered, engine


def _once(run_many: RunMany) -> RunMany:
    """The first client's work of the first round, given back for everybody ever after."""
    kept: list[Tensor | NumericError] = []

    def run(
        workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        if not kept:
            kept.append(next(iter(run_many(workspace, broadcast, clients[:1], round=round)))[1])
        return iter([(place, kept[0]) for place in range(len(clients))])

    return run


def job_of(
    settings: Mapping[str, Any], *, shape: Sequence[int], samples: int, outputs: int = 10, where: str = "costs"
) -> Job:
    """A run on random numbers of some shape, so many samples a client: what is timed does not ask what they are."""
    config = RunConfig.from_mapping({**settings, "seed": _SEED}, where=where)
    x = torch.randn((samples * config.clients, *shape), generator=torch.Generator().manual_seed(_SEED))
    parts = list(torch.split(torch.arange(len(x)), samples))
    facts = ModelFacts(config.model, config.model_options, tuple(shape), outputs, "classification")
    pool = ClientPool.shared(x, torch.arange(len(x)) % outputs, parts)
    return assemble_job(config, facts.build(seed=_SEED), pool, None, facts)


def round_costs(job: Job, *, absent: Absent | None = None) -> Figures:
    """What NADP-FL's Table 2 compares, of one round without its local training: a client's and the server's."""
    with one_thread():
        rounds, traffic, engine = timed_rounds(job, absent=absent, still=True)
    fastest, clients = min(rounds, key=lambda one: one.all), len(job.pool)
    model = 4 * job.architecture.size
    return {
        "parameters": job.architecture.size,
        "client seconds": fastest.client,
        "client bytes": (traffic.bytes_up + traffic.bytes_down) / clients,
        "client state": model + len(engine.state_of(0).seal(bytes(32))),
        "server seconds": fastest.server,
        "server bytes": float(traffic.bytes_up + traffic.bytes_down),
        "server state": model + fastest.held,
    }


def exponent(costs: Mapping[float, float | None]) -> float | None:
    """The slope of log(cost) against log(size): a cost that grows as size^x has x."""
    there = {size: cost for size, cost in costs.items() if cost}
    if len(there) < 2 or len(there) < len(costs):
        return None
    x, y = (np.log(list(map(float, one))) for one in (there, there.values()))
    return float(np.polyfit(x, y, 1)[0])


SERVER_COLUMNS = ("perturbing", "recovering", "adding", "decrypting (server)")
CLIENT_COLUMNS = ("making keys", "training", "encrypting", "noise", "decrypting (client)")
COLUMNS = (*SERVER_COLUMNS, *CLIENT_COLUMNS)


def columns_of(
    settings: Mapping[str, Any], *, shape: Sequence[int], samples: int, outputs: int = 10, key_bits: int = 2048
) -> Figures:
    """Seconds of one core of one round, by what is done, one client's and the server's; bytes of one client.

    Of several rounds, each part's least after the first. Keys are made of stored primes: finding them is no part of it.
    """
    # Beside this package, and only for who takes costs: it loads every uplink there is.
    from benchmarks.aggregation import timed_round

    job = job_of(settings, shape=shape, samples=samples, outputs=outputs)
    with one_thread():
        if job.config.rounds == 1:  # what is slow but once, before what is timed
            short = {**settings, "key_bits": _SHORT_KEY} if "key_bits" in settings else settings
            timed_round(job_of(short, shape=shape, samples=samples, outputs=outputs), key_bits=_SHORT_KEY)
        seconds, done = timed_round(job, key_bits=key_bits)
    sent = {"bytes down": done.gathered.bytes_down, "bytes up": done.gathered.bytes_up}
    each = {name: value / len(job.pool) for name, value in sent.items()}
    return {
        "parameters": job.architecture.size,
        **{one: seconds[one] for one in COLUMNS},
        **each,
    }


def forward_seconds(model: str, options: Mapping[str, Any], *, shape: Sequence[int], samples: int) -> float:
    """Seconds of one core that a forward pass takes, as training takes it; the faster of two."""
    network = ModelFacts(model, dict(options), tuple(shape), 10, "classification").build(seed=_SEED).train()
    x, spent = torch.randn((samples, *shape), generator=torch.Generator().manual_seed(_SEED)), []
    with one_thread():
        for _ in range(2):
            started = time.process_time()
            network(x)
            spent.append(time.process_time() - started)
    return min(spent)
