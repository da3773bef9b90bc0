"""Small federations for tests: a few hundred digits, a small model, and ways to run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from driving import drive
from fedveil import data, models
from fedveil.client_held.client import HolderRole
from fedveil.client_held.server import RelayRole, RelayState
from fedveil.config import RunConfig
from fedveil.data import Dataset
from fedveil.engine import ClientPool, LocalEngine
from fedveil.engine.local import Absent, Listen
from fedveil.errors import FedVeilError
from fedveil.protocol.phases import Ask, Gathered, RoundDone, Steps
from fedveil.roles.server import ServerRole, ServerState
from fedveil.runs.job import Job, ModelFacts, assemble_job, settled
from fedveil.runs.loop import authority_role, client_role, fresh_state, taken_from_a_client

HEADED = {"lossless", "veil-secagg", "mpdp", "mpdp-naive", "mp-cdp"}
FEW_GROUPS = 2
"""Groups of the head's noise: a gradient is computed for each, and by default each of the ten classes has one."""
Reorder = Callable[[list[Any]], list[Any]]


@cache
def digits() -> tuple[Dataset, Dataset]:
    split = data.load("digits", seed=7)
    return split.train.subset(torch.arange(300)), split.test


def job(
    *,
    model: str = "mlp",
    options: dict[str, Any] | None = None,
    clients: int = 5,
    how: str = "iid",
    ratio: float = 2.0,
    reshape: tuple[int, ...] | None = None,
    samples: int = 300,
    **settings: Any,
) -> Job:
    """A run on some digits; float64, square loss, seed 1 and FEW_GROUPS unless the settings say otherwise."""
    given = {"scheme": "lossless", "dtype": "float64", "loss": "square", "seed": 1, "rounds": 5, **settings}
    if given["scheme"] in HEADED and given.get("head_noise", True):
        given = {"head_groups": FEW_GROUPS, **given}
    config = settled(RunConfig.from_mapping({**given, "clients": clients}, where="test"))
    train, test = digits()
    train = train if samples == len(train) else train.subset(torch.arange(samples))
    if reshape is not None:
        train, test = (
            Dataset(one.name, one.task, one.x.reshape(-1, *reshape), one.y, one.outputs) for one in (train, test)
        )
    if options is None:
        options = {"depth": 2, "width": 16} if model == "mlp" else {}
    assert config.seed is not None
    net = models.build(model, input_shape=train.input_shape, outputs=10, seed=config.seed, **options)
    parts = data.partition(train, clients=clients, how=how, seed=config.seed, ratio=ratio)
    placed = train.to(dtype=getattr(torch, config.dtype))
    facts = ModelFacts(model, options, train.input_shape, 10, "classification")
    return assemble_job(config, net, ClientPool.shared(placed.x, placed.y, parts), test, facts)


def server_of(one: Job, state: ServerState | None = None) -> ServerRole:
    return ServerRole(
        one.scheme,
        one.architecture,
        fresh_state(one) if state is None else state,
        secrets=one.secrets,
        cohort=one.cohort,
        optimiser=one.optimiser,
        rounds=one.config.rounds,
    )


def reordered(engine: LocalEngine, reorder: Reorder | None) -> LocalEngine:
    """The same engine, to which the replies of every phase come as `reorder` returns them."""
    replies = engine._replies

    def changed(ask: Any, part: Any) -> Any:
        listed = list(replies(ask, part))
        states = {state.client: state for state, _ in listed}
        failed = [(state, answer) for state, answer in listed if isinstance(answer, FedVeilError)]
        shuffled = reorder([answer for _, answer in listed if not isinstance(answer, FedVeilError)])
        return iter([*failed, *((states[answer.client], answer) for answer in shuffled)])

    if reorder is not None:
        engine._replies = changed  # type: ignore[method-assign]
    return engine


def trained(
    one: Job,
    *,
    reorder: Reorder | None = None,
    role: object | None = None,
    absent: Absent | None = None,
    listen: Listen | None = None,
) -> tuple[ServerState, list[RoundDone]]:
    """Run a job to its end with the local engine; `role` stands in for the clients, and `listen` hears everything."""
    server = server_of(one)
    chosen: Any = client_role(one) if role is None else role
    boundaries: list[RoundDone] = []
    authority = authority_role(one)
    engine = reordered(LocalEngine(chosen, one.pool, absent=absent, listen=listen, authority=authority), reorder)
    drive(engine, server.run(), on_round=boundaries.append)
    return server.state, boundaries


def relay_of(one: Job, *, round: int = 0, attempt: int = 0) -> RelayRole:
    """The server of a run whose model lives with the clients."""
    return RelayRole(
        one.scheme,
        one.architecture,
        RelayState(round, attempt),
        secrets=one.secrets,
        cohort=one.cohort,
        rounds=one.config.rounds,
    )


@dataclass(eq=False)
class HeldRun:
    """A run whose model lived with the clients: both roles, and the model that clients had after each round."""

    job: Job
    relay: RelayRole
    role: HolderRole
    engine: LocalEngine
    state: ServerState
    rounds: list[RoundDone] = field(default_factory=list)
    models: list[Tensor] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)

    @property
    def model(self) -> Tensor:
        """The parameters at the end."""
        return self.state.weights.parameters


def held_run(
    one: Job,
    *,
    reorder: Reorder | None = None,
    absent: Absent | None = None,
    through: Callable[[HolderRole], Any] = lambda role: role,
    engine: type[LocalEngine] = LocalEngine,
) -> HeldRun:
    """Run a job to its end; the clients' role is asked by way of what `through` makes of it."""
    role = client_role(one)
    assert isinstance(role, HolderRole)
    driver = reordered(engine(through(role), one.pool, absent=absent), reorder)
    run = HeldRun(one, relay_of(one), role, driver, fresh_state(one))

    def boundary(done: RoundDone) -> None:
        if done.aggregate is not None:
            done = taken_from_a_client(role, driver, run.state, done)
        run.rounds.append(done)
        run.models.append(run.state.weights.parameters.clone())

    drive(driver, run.relay.run(), on_round=boundary, on_stop=run.stops.append)
    return run


def next_ask(steps: Steps, answer: Gathered | None = None) -> Ask:
    """Drive a server's run by hand until it asks clients for something."""
    step = steps.send(answer)
    while not isinstance(step, Ask):
        step = steps.send(None)
    return step


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference relative to the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def accuracy(one: Job, state: ServerState) -> float:
    from fedveil.runs.evaluation import score_weights

    assert one.test is not None
    found = score_weights(one.architecture, state.weights, one.test, one.loss).accuracy
    assert found is not None
    return found


def sizes(parts: Sequence[Any]) -> list[int]:
    return [len(one) for one in parts]
