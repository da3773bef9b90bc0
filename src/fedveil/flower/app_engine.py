"""The rounds of a protected app, on the server's side: who is asked, what goes with it, and what comes of it.

A `Course` is one run of the protocol beside Flower's: that of an app's training, or of its evaluations. It is moved one
round at a time, as the strategy asks for them: `fedveil.roles.server.ServerRole` yields its steps, `AppEngine` carries
them over Flower's Grid, and a round's `Train` takes the app's own records along.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log
from numpy.typing import NDArray
from torch import Tensor

from fedveil.client_held.messages import Begin, Finish
from fedveil.downlink.messages import Recovered
from fedveil.engine import ClientPool
from fedveil.errors import Code, ConfigError, ProtocolError
from fedveil.flower.app_held import AppRelay
from fedveil.flower.app_setup import (
    MOST_EXAMPLES,
    AgreedApp,
    AppModel,
    AppSetup,
    agreed_app,
    metric_record,
    metrics_of,
    no_model,
    only_arrays,
)
from fedveil.flower.client_app import HEADER
from fedveil.flower.commands import Events
from fedveil.flower.engine import FlowerEngine, Standing
from fedveil.flower.messages import Told
from fedveil.flower.mod import METRICS, MOST_NAME, NAMES, VERSION
from fedveil.protocol.messages import Train
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.phases import Ask, Gathered, RoundBegins, RoundDone, RunStopped, asked
from fedveil.roles.server import Optimiser, ServerRole, ServerState
from fedveil.runs.job import Job, ModelFacts, Surroundings
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.schemes.on_updates import SLOTS
from fedveil.secrets import OsSecrets
from fedveil.work.batches import Schedule
from fedveil.work.losses import make_loss

_WORK = (Train.__name__, Begin.__name__)
_CARRIES = (*_WORK, Finish.__name__)
"""With which requests an app's records go: those it works on, and that with which a client may write its model."""
_QUICK = 300.0
"""Seconds that a phase without training waits at most: a node that is still busy answers nothing else."""


class AppEngine(FlowerEngine):
    """Clients behind nodes that the server has numbered, and an app's records on their way with the protocol's.

    `outgoing` is what the app of each client is sent with this round's `Train`, as messages of type `kind`; `figures`
    is what came with the answers, read already, and `names` what the figures under the masks are called. `version` is
    which model clients are to evaluate, where they hold it; `between` counts the bytes, down and up, of sums that they
    are sent between two rounds.
    """

    _raised = Code.BARE

    def __init__(self, grid: Grid, setup: AppSetup, *, nodes: Sequence[int], deadline: float, events: Events) -> None:
        super().__init__(grid, setup, clients=len(nodes), deadline=deadline, events=events)
        self._longest, self._carried = deadline, 0
        self._node_of = dict(enumerate(nodes))
        self._client_of = {node: client for client, node in enumerate(nodes)}
        self.outgoing: Mapping[int, RecordDict] = {}
        self.figures: dict[int, dict[str, float]] = {}
        self.names: dict[int, tuple[str, ...]] = {}
        self.version: int | None = None
        self.between = (0, 0)

    def speak(self, kind: str) -> None:
        """Send messages of this type: the app has a function for it."""
        self._kind = kind

    def gather(self, ask: Ask, setup: Told | None = None) -> Gathered:
        """One phase; those in which nobody trains need not be waited for as long."""
        working = isinstance(ask.common, (Train, Begin))
        self._deadline = self._longest if working else min(self._longest, _QUICK)
        self._carried = 0
        gathered = super().gather(ask, setup)
        gathered = replace(gathered, bytes_down=gathered.bytes_down + self._carried)
        if isinstance(ask.common, Finish):
            self.between = (self.between[0] + gathered.bytes_down, self.between[1] + gathered.bytes_up)
        return gathered

    @property
    def nodes(self) -> Mapping[int, int]:
        """Which node is which client."""
        return self._node_of

    def _call_roll(self, here: set[int]) -> bool:
        return False  # numbers are the server's to give, and were given once

    def _content(self, client: int, what: str, records: Mapping[str, ArrayRecord | ConfigRecord]) -> RecordDict:
        header = records[HEADER]
        assert isinstance(header, ConfigRecord)
        own = dict(self.outgoing[client].items()) if what in _CARRIES else {}
        self._carried += sum(
            len(array.data) for record in own.values() if isinstance(record, ArrayRecord) for array in record.values()
        )
        named = {} if self.version is None else {VERSION: self.version}
        return RecordDict({**own, **records, HEADER: ConfigRecord({**header, "client": client, **named})})

    def _heard(self, client: int, what: str, content: RecordDict) -> None:
        if what not in _WORK:
            return
        said = content.config_records[HEADER].get(NAMES, [])
        named = [str(name) for name in said] if isinstance(said, list) else []
        if len(named) <= SLOTS and all(len(name) <= MOST_NAME for name in named):
            self.names[client] = tuple(named)
        record = content.metric_records.get(METRICS)
        self.figures[client] = metrics_of(record if isinstance(record, MetricRecord) else None)


class AppServer(ServerRole):
    """A server that holds no model: what a round has brought is handed on."""

    def __init__(self, agreed: AgreedApp, state: ServerState, **run: Any) -> None:
        architecture, _ = no_model()
        super().__init__(agreed.scheme, architecture, state, optimiser=Optimiser(Schedule(1.0)), **run)
        self._weighs = agreed.work.clip is None
        self.weight = 0.0
        self.mean: Tensor | None = None

    def _weight(self, summed: Tensor, context: RoundContext, arrived: Sequence[int]) -> Tensor:
        """What the uploads say, under masks; under noise every client weighs the same."""
        total = summed if self._weighs else super()._weight(summed, context, arrived)
        self.weight = float(total)
        return total

    def _take(self, recovered: Recovered, *, round: int) -> None:
        self.mean = recovered.gradient


@dataclass(eq=False)
class AppRound:
    """What came of a round: how far the model is to move and what the updates weighed, or why there is nothing.

    `cut` is the share of that weight whose numbers were beyond the range, and are cut off. `figures` are those of
    clients who name theirs as most do, and `odd` the others.
    """

    done: RoundDone
    seconds: float
    update: NDArray[np.float64] | None = None
    weight: float = 0.0
    cut: float = 0.0
    averages: dict[str, float] = field(default_factory=dict)
    figures: dict[int, dict[str, float]] = field(default_factory=dict)
    odd: tuple[int, ...] = ()


class Course:
    """One run of the protocol, moved round by round; `standing` is what an earlier attempt has left, where clients hold
    the model."""

    def __init__(
        self,
        grid: Grid,
        setup: AppSetup,
        *,
        nodes: Sequence[int],
        deadline: float,
        events: Events,
        state: ServerState | None = None,
        journal: Callable[[Job, ServerState], PrivacyJournal] = lambda job, state: PrivacyJournal(job),
        standing: Standing[AppSetup] | None = None,
    ) -> None:
        self.agreed = agreed_app(setup)
        self.state = ServerState.fresh(no_model()[1].clone()) if state is None else state
        self.job = job_of(self.agreed)
        self.journal = journal(self.job, self.state)
        self.engine = AppEngine(grid, setup, nodes=nodes, deadline=deadline, events=events)
        self.stopped = ""
        self._setup = setup
        run: dict[str, Any] = {
            "secrets": self.job.secrets,
            "cohort": self.agreed.cohort,
            "rounds": self.agreed.config.rounds,
            "accountant": self.journal.accountant,
            "name": setup.name,
            "announced": self.journal.announced,
        }
        self._role: AppServer | AppRelay
        if self.agreed.work.held:
            born = setup.first == "server" or setup.start > 0
            self._role = AppRelay(self.agreed, self.state, born=born, **run)
        else:
            self._role = AppServer(self.agreed, self.state, **run)
        self._steps = asked(self._role.run(), self.engine)
        self._standing = standing

    @property
    def version(self) -> int:
        """The version of the model that clients hold, through all attempts."""
        assert isinstance(self._role, AppRelay)
        return self._setup.start + self._role.version

    @property
    def public_start(self) -> bool:
        """Whether the server knows what the model begins with."""
        return self._setup.first == "server"

    @property
    def standing(self) -> Standing[AppSetup] | None:
        """What a resumed run must not lose, where clients hold the model."""
        return Standing(self._setup, Finish(*self._role.standing)) if isinstance(self._role, AppRelay) else None

    def _carrying(self, form: ArrayRecord) -> AppRelay:
        assert isinstance(self._role, AppRelay)
        self.engine.outgoing = dict.fromkeys(self.engine.nodes, RecordDict({"arrays": form}))
        return self._role

    def take_up(self, form: ArrayRecord) -> None:
        """Have clients end the earlier attempt, under its own keys; whoever is not known to have is lent the model."""
        if self._standing is None:
            return
        role = self._carrying(form)
        role.miss(self.engine.bring_up_to_date(self._standing))

    def bring_up_to_date(self, form: ArrayRecord) -> None:
        """Have clients move by the latest sums."""
        for _ in asked(self._carrying(form).bring_up_to_date(), self.engine):
            pass

    def finish(self, form: ArrayRecord) -> None:
        """After the last round: the last sums."""
        self._carrying(form).end()
        for _ in self._steps:
            pass

    def round(self, outgoing: Mapping[int, RecordDict], *, kind: str) -> AppRound | None:
        """The next round; None once the run has stopped, and `stopped` says why."""
        engine, role, begun = self.engine, self._role, time.perf_counter()
        engine.outgoing, engine.figures, engine.names = outgoing, {}, {}
        engine.speak(kind)
        if isinstance(role, AppServer):
            role.mean = None
        for step in self._steps:
            if isinstance(step, RoundBegins):
                self.journal.begin(step)
            elif isinstance(step, RunStopped):
                self.stopped = step.reason
            elif isinstance(step, RoundDone):
                self.journal.end(step)
                # As where sums travel with the next round's request, whose bytes they are.
                (down, up), engine.between = engine.between, (0, 0)
                traffic = step.gathered
                traffic = replace(traffic, bytes_down=traffic.bytes_down + down, bytes_up=traffic.bytes_up + up)
                return self._brought(replace(step, gathered=traffic), time.perf_counter() - begun)
        self.stopped = self.stopped or "its rounds are over"
        return None

    def _brought(self, done: RoundDone, seconds: float) -> AppRound:
        engine, arrived, mean = self.engine, done.gathered.arrived, self._mean(done)
        if mean is None:
            return AppRound(done, seconds)
        row, weight = mean
        work = self.agreed.work
        moved, values, cut = torch.split(row, [0 if work.held else work.size, work.slots, work.flags])
        numbers, figured = cut.tolist() or (0.0, 0.0)
        if figured > 0:  # as Flower's own mean has it
            values = torch.full_like(values, math.nan)
        common, alike = _most_alike({client: self._named(client) for client in arrived})
        averages: dict[str, float] = {}
        if 2 * len(alike) > len(arrived):
            averages = dict(zip(common, values.tolist(), strict=False))
        figures = {client: engine.figures.get(client, {}) for client in arrived if client in alike}
        odd = tuple(client for client in arrived if client not in alike)
        return AppRound(done, seconds, moved.numpy(), weight, numbers, averages, figures, odd)

    def _named(self, client: int) -> Collection[str]:
        """What a client calls its figures, under the masks or as they are."""
        if self._setup.metrics == "pass":
            return self.engine.figures.get(client, {}).keys() - {self._setup.weighted_by}
        return self.engine.names.get(client, ()) if self._setup.metrics == "average" else ()

    def _mean(self, done: RoundDone) -> tuple[Tensor, float] | None:
        """What the server reads of a round, divided by what it weighs, which is beside it."""
        role = self._role
        if isinstance(role, AppServer):
            return None if done.failed or role.mean is None else (role.mean, role.weight)
        if done.failed or done.aggregate is None:
            return None
        if not self.agreed.work.behind:  # every client weighs the same, and nothing is there to read
            return torch.empty(0, dtype=torch.float64), float(len(done.aggregate.contributors))
        sums = role.read(done.aggregate)
        weight = float(sums[-1])
        return (sums[:-1] / weight, weight) if weight > 0 else None


_NAMED_OTHERWISE = "FedVeil: figures have other names than those of most: %s; %s"
_ODD: Mapping[str, str] = {
    "average": "averages have the names that more than half have, and these clients' numbers in them",
    "pass": "they are left out",
}


class AppRounds:
    """A course of the protocol behind one kind of the strategy's messages."""

    def __init__(self, course: Course, setup: AppSetup) -> None:
        self.course, self._setup = course, setup
        self._begun = False
        self.model: AppModel
        self._sent: Message

    def round(self, messages: list[Message]) -> AppRound | None:
        """Carry the strategy's messages to this round's clients."""
        self._sent = messages[0]
        same = only_arrays(self._sent.content)
        if not self._setup.form:
            self.model = AppModel.read(same)
        for message in messages[1:]:
            other = only_arrays(message.content)
            numbers = other is not same and not self._setup.form
            if numbers and AppModel.read(other).row.tobytes() != self.model.row.tobytes():
                raise ConfigError("The strategy sends clients different models: their updates have no common mean.")
            if message.content.config_records != self._sent.content.config_records:
                raise ConfigError(
                    "The strategy sends nodes configurations of their own: who is asked follows from everybody's "
                    "random numbers, so that every client must be sent the same."
                )
        outgoing = dict.fromkeys(self.course.engine.nodes, self._sent.content)
        done = self.course.round(outgoing, kind=self._sent.metadata.message_type)
        if done is None:
            text = f"no further {self._setup.phase} rounds: {self.course.stopped}"
            if not self._begun:
                again = " again" if self._setup.attempt else ""
                raise ProtocolError(f"The run cannot start{again}: {self.course.stopped}.")
            log(WARNING, "FedVeil: %s", text)
            return done
        self._begun = True
        for client, refusal in done.done.gathered.refused.items():
            if refusal.code is Code.SPOILT:
                log(WARNING, "FedVeil: client %d (node %d): %s", client, self.course.engine.nodes[client], refusal)
        if done.done.failed:
            log(WARNING, "FedVeil: %s round %d failed: %s", self._setup.phase, done.done.round + 1, done.done.failed)
        if done.odd:
            odd = ", ".join(f"client {client} (node {self.course.engine.nodes[client]})" for client in done.odd)
            log(WARNING, _NAMED_OTHERWISE, odd, _ODD[self._setup.metrics])
        if done.cut:
            log(
                WARNING,
                "FedVeil: %s round %d: numbers beyond value_range were cut off, of clients with %.3g of its weight",
                *(self._setup.phase, done.done.round + 1, done.cut),
            )
        return done

    def replies(self, brought: AppRound, *, arrays: ArrayRecord | None) -> list[Message]:
        """What the strategy is handed: replies that all hold the mean, one for everybody's own figures or one alone."""
        key = self._setup.weighted_by
        weight: float = int(brought.weight) if brought.weight.is_integer() else brought.weight
        figures = [{key: weight, **brought.averages}]
        if self._setup.metrics == "pass":
            figures = [_weighing(own, key) for own in brought.figures.values()]
        models = {} if arrays is None else {"arrays": arrays}
        return [Message(RecordDict({**models, "metrics": metric_record(own)}), reply_to=self._sent) for own in figures]


def named_alike(answers: list[Message], key: str) -> tuple[list[Message], tuple[str, ...]]:
    """The answers to an evaluation that name their figures as most do, with those without any, and the names."""
    figures: dict[int, dict[str, float]] = {}
    for place, reply in enumerate(answers):
        if reply.has_content():
            figures[place] = metrics_of(next(iter(reply.content.metric_records.values()), None))
    common, alike = _most_alike({place: own.keys() - {key} for place, own in figures.items()})
    for place in alike:
        answers[place].content = RecordDict({"metrics": metric_record(_weighing(figures[place], key))})
    if odd := [answers[place].metadata.src_node_id for place in figures.keys() - alike]:
        log(WARNING, _NAMED_OTHERWISE, ", ".join(f"node {node}" for node in sorted(odd)), _ODD["pass"])
    return [reply for place, reply in enumerate(answers) if place in alike or place not in figures], (*common, key)


def _weighing(figures: Mapping[str, float], key: str) -> dict[str, float]:
    """A client's figures with a weight that can be one: strategies divide by the sum of all."""
    return {**figures, key: figures[key] if 0 < figures.get(key, 0) <= MOST_EXAMPLES else 1}


def _most_alike(names: Mapping[int, Collection[str]]) -> tuple[tuple[str, ...], set[int]]:
    """What most clients call their figures, and who does: one client's word decides nothing for the others."""
    ordered = {client: tuple(sorted(named)) for client, named in names.items()}
    common = Counter(ordered.values()).most_common(1)[0][0] if ordered else ()
    return common, {client for client, named in ordered.items() if named == common}


def job_of(agreed: AgreedApp) -> Job:
    """The run as the books and the ledger know it: clients are elsewhere, and the model is the app's own."""
    architecture, weights = no_model()
    optimiser = Optimiser(Schedule(1.0))
    return Job(
        config=agreed.config,
        scheme=agreed.scheme,
        loss=make_loss("square"),
        loss_because="the app trains, by a loss of its own",
        architecture=architecture,
        weights=weights,
        pool=ClientPool((), elsewhere=agreed.config.clients),
        test=None,
        facts=ModelFacts("app", {}, (1,), 1, "regression"),
        coverage=None,
        secrets=OsSecrets(),
        cohort=agreed.cohort,
        optimiser=optimiser,
        around=Surroundings("flower-app"),
    )


def empty_state(*, round: int, attempt: int) -> ServerState:
    """Where a run goes on, of whose model the protocol knows nothing."""
    state = ServerState.fresh(no_model()[1].clone())
    state.round, state.attempt = round, attempt
    return state
