"""The server's line of a protected app: `Protected(FedAvg(…), scheme="secagg")`.

A strategy around another. It asks the inner one what to send, runs the protocol's phases over the Grid in its place
(`app_engine.Course`), and hands it what it would have computed from everybody's replies: replies that hold the mean.
So FedAvg, FedProx, FedAvgM, FedAdam and the like do as without protection, to the accuracy of fixed point; strategies
that compare single updates (medians, Krum, …) cannot, and are refused.

    Strategy.start            Protected                                            clients
    configure_train      ──►  inner.configure_train: the app's own records
                              keys, once for up to 64 rounds               ◄──►   the mod
                              Train, with the app's records                ◄──►   the mod, and in it the app
                              Unmask                                       ◄──►   the mod
    aggregate_train      ──►  inner.aggregate_train: the mean of the round
    configure_evaluate   ──►  the same with the app's evaluation, whose figures alone are averaged

Who takes part in a round follows from the epoch's beacon, which no server picks: of `fraction_train` the size is taken.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Result,
    Strategy,
)
from flwr.supercore import log

from fedveil.errors import (
    CheckpointError,
    ConfigError,
    settings_as_arguments,
    spelled,
    unknown_name,
)
from fedveil.flower.app_engine import AppRound, AppRounds, Course, empty_state, named_alike
from fedveil.flower.app_held import FIRST, First, NoModelError, form_digest, form_of
from fedveil.flower.app_report import ANY, PROGRESS, AppProgress, app_ledger, going_on, written
from fedveil.flower.app_setup import (
    METRICS,
    AppModel,
    AppSetup,
    Metrics,
    Phase,
    Step,
    checked_number,
    checked_path,
    covered_by,
    settings_for,
    told_of,
)
from fedveil.flower.commands import Events
from fedveil.flower.server_app import prune_beside
from fedveil.ledger.statement import Ledger
from fedveil.plain import whole
from fedveil.roles.server import ServerState
from fedveil.runs.folder import RunFolder
from fedveil.runs.job import Job
from fedveil.runs.loop import Outcome, privacy_journal_of, summarise
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.schemes.on_updates import HELD, fewest

# Which strategies are taken: those that use replies for their weighted mean alone, and where clients hold the model
# those whose step clients can take.

_COMPARES = (
    *(FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan, QFedAvg, FedXgbBagging, FedXgbCyclic),
    *(DifferentialPrivacyClientSideAdaptiveClipping, DifferentialPrivacyClientSideFixedClipping),
    *(DifferentialPrivacyServerSideAdaptiveClipping, DifferentialPrivacyServerSideFixedClipping),
)
_STEPPING = (FedAvgM, FedAdam, FedAdagrad, FedYogi)
_KNOWN = (FedAvg, FedProx, *_STEPPING)
_REPLACED = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
_AVERAGING = FedAvg().train_metrics_aggr_fn


def step_of(strategy: Strategy, evaluation: Metrics | None) -> Step:
    """The step that clients take in the strategy's place; what the server cannot do without the model's numbers is
    refused."""
    kind = type(strategy)
    averages = getattr(kind, "aggregate_train", None) in (FedAvg.aggregate_train, FedProx.aggregate_train)
    if kind not in _STEPPING and not averages:
        raise NoModelError(
            f"{kind.__name__} computes on the mean that a round has brought, in a way of its own",
            "use FedAvg, FedProx, FedAvgM, FedAdam, FedAdagrad or FedYogi as they are, or scheme='secagg'",
        )
    if evaluation == "pass":
        raise NoModelError(
            "Evaluations that pass as they are come with the server's arrays", "use evaluation='average', or 'drop'"
        )
    return Step.of(strategy) if kind in _STEPPING else Step()


def check_averages(strategy: Strategy, *, stated: bool, passed: Collection[str]) -> None:
    """Refuse a strategy that needs single updates, or may."""
    kind = type(strategy)
    if isinstance(strategy, _COMPARES):
        raise ConfigError(
            f"{kind.__name__} works on single updates, which nobody sees under protection: use FedAvg, FedProx, "
            "FedAvgM, FedAdam, FedAdagrad or FedYogi."
        )
    if stated:
        return
    say = f"if it does, say so with {spelled('averages', True)}"
    if not isinstance(strategy, FedAvg):
        raise ConfigError(f"{kind.__name__} is not known to use replies for their weighted mean alone: {say}.")
    for name in _REPLACED:
        if not any(getattr(kind, name) is getattr(known, name) for known in _KNOWN):
            raise ConfigError(
                f"{kind.__name__} has a {name} of its own, which is not known to use replies for their weighted mean "
                f"alone, and to ask everybody for the same: {say}."
            )
    for phase in ("train", "evaluate"):
        # Where figures pass, it is handed everybody's own.
        name = f"{phase}_metrics_aggr_fn"
        if phase not in passed and getattr(strategy, name) is not _AVERAGING:
            raise ConfigError(
                f"{name} is a function of your own, and would be handed one reply with the averages: leave it out, let "
                f"figures pass uncovered, or state with {spelled('averages', True)} that averages are what it needs."
            )


ENGINE = "flower-app"
_BETWEEN_LOOKS = 1.0


class _Notes(Events):
    """What happens, in Flower's log and in the run's folder, if there is one."""

    def __init__(self, folder: RunFolder | None) -> None:
        self._own = folder

    def note(self, event: str, text: str, **facts: Any) -> None:
        """One thing that happened."""
        log(INFO, "FedVeil: %s", text)
        if self._own is not None:
            self._own.note(event, text, **facts)


class Protected(Strategy):
    """A strategy whose clients' updates reach the server under protection alone.

    Args:
        strategy: The app's own: FedAvg, or one that works on the mean as FedAvg does.
        scheme: How updates are covered: secagg, pads, paraaegis, dp-secagg, dp-fedavg or nadp. Under pads and paraaegis
            the clients hold the model and take the strategy's step; under pads the server sees nothing of it.
        clients: How many nodes take part (default: those that are there once enough of them are).
        metrics: What becomes of the figures that the app reports from training: "average" (under the masks, so that
            the server sees weighted means; the default of secagg), "drop" (the default under noise), or "pass"
            (everybody's own, uncovered: the ledger names them).
        evaluation: The same for evaluations.
        out: A folder for the run: ledger.json, report.md, metrics, the privacy journal, and how far it has come.
        resume: Go on with the run in `out`.
        deadline: Seconds after which a client that does not answer a phase is missed (default: `start`'s timeout).
        first: Under pads and paraaegis, whose the model is that the run begins with: "server", the arrays that `start`
            is given, which are public (the default), or "client": one client makes it with `protect(first=…)` and the
            others are lent it, sealed. Then of `start`'s arrays names, shapes and types are told, and no number.
        keep_days: Days after which finished runs beside `out` lose what only going on with them needs: the last sums,
            where clients hold the model. Looked at when a run begins; all else is kept.
        averages: State of a strategy that FedVeil does not know, or whose aggregation you have written yourself, that
            it uses replies for their weighted mean alone, and leaves to the protocol who is asked.
        options: Options of the scheme: epsilon, delta, clip, threshold, collusion, dropouts, …

    Raises:
        ConfigError: An unknown scheme or option, or a strategy that needs single updates.
    """

    def __init__(
        self,
        strategy: Strategy,
        scheme: str = "secagg",
        *,
        clients: int | None = None,
        metrics: Metrics | None = None,
        evaluation: Metrics | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        deadline: float | None = None,
        first: First | None = None,
        averages: bool = False,
        keep_days: float = 365.0,
        **options: Any,
    ) -> None:
        if not isinstance(scheme, str):
            raise ConfigError(f"scheme must be a name, like 'secagg' (got {scheme!r}).")
        if clients is not None and (not whole(clients) or clients < 1):
            raise ConfigError(f"clients must be a positive whole number (got {clients!r}).")
        for name, value, known in (
            ("metrics", metrics, METRICS),
            ("evaluation", evaluation, METRICS),
            ("first", first, FIRST),
        ):
            if value is not None and (not isinstance(value, str) or value not in known):
                raise unknown_name(name, str(value), known)
        self._held = scheme in HELD
        with settings_as_arguments():
            covered = covered_by(scheme, options, clients)
            passed = {phase for phase, how in (("train", metrics), ("evaluate", evaluation)) if how == "pass"}
            if isinstance(strategy, Protected):
                raise ConfigError("The strategy is protected already.")
            check_averages(strategy, stated=averages, passed=passed)
            step = step_of(strategy, evaluation) if self._held else Step()
        if first is not None and not self._held:
            raise ConfigError(f"first says whose first model clients hold, and under {scheme} the server holds it.")
        # Evaluations of a model that clients hold have masks of their own, and the ledger names what is averaged.
        if "average" in (metrics, None if self._held else evaluation) and covered != "average":
            raise ConfigError(
                f"Figures are averaged under masks without noise, and {scheme} has a claim to keep: use 'drop', or "
                "'pass', which sends everybody's uncovered."
            )
        if resume and out is None:
            raise ConfigError("resume goes on with the run in a folder: give it, out=….")
        self.strategy = strategy
        self._scheme, self._options, self._clients = scheme, options, clients
        self._metrics: Metrics = metrics or covered
        self._evaluation: Metrics = evaluation or covered
        given = checked_path("out", out)
        self._folder = None if given is None else RunFolder(given.resolve(), engine=ENGINE)
        self._deadline = None if deadline is None else checked_number("deadline, in seconds,", deadline, positive=True)
        self._resume, self._keep_days = resume, checked_number("keep_days, in days,", keep_days, positive=True)
        self._first = (first or "server") if self._held else ""
        self._step = step
        self._notes = _Notes(self._folder)
        self._run: _Run | None = None

    @property
    def ledger(self) -> Ledger:
        """What the run has proven so far, against whom."""
        return self._running.ledger()

    @settings_as_arguments()
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train, as `Strategy.start` does. A run that is resumed begins with the arrays of its last round."""
        if self._run is not None:
            raise ConfigError("This strategy has been started: a second run needs a Protected of its own.")
        if self._held and evaluate_fn is not None:
            raise NoModelError(
                "evaluate_fn is given the model", "leave it out, and have clients evaluate (fraction_evaluate)"
            )
        if not isinstance(initial_arrays, ArrayRecord):
            raise ConfigError(f"initial_arrays must be an ArrayRecord (got {type(initial_arrays).__name__}).")
        deadline = self._deadline or checked_number("timeout, in seconds,", timeout, positive=True)
        run = self._run = self._begun(grid, initial_arrays, num_rounds, deadline)
        before, arrays = run.before, run.arrays
        if before >= num_rounds:
            self._notes.note("finished", f"the run has done {before} rounds: nothing is left to do")
            run.release()
            return Result() if self._held else Result(arrays=arrays)
        if self._folder is not None:  # what an earlier attempt has left says nothing of this one
            self._folder.ledger_file.unlink(missing_ok=True)
        judged = None
        if evaluate_fn is not None:

            def judged(number: int, now: ArrayRecord) -> MetricRecord | None:
                return evaluate_fn(number + before, now)

        try:
            result = super().start(
                grid, arrays, num_rounds - before, timeout, train_config, evaluate_config, evaluate_fn=judged
            )
            run.farewell()
        except BaseException:
            run.end()
            raise
        if not result.arrays and not self._held:
            result.arrays = arrays
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(result, name, {number + before: figures for number, figures in getattr(result, name).items()})
        run.end(done=True)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Run the whole round; nothing is left for Flower to send."""
        run = self._running
        number = server_round + run.before
        messages = list(self._inner("configure_train")(number, run.sent(arrays), config, grid))
        run.latest = run.train.round(messages) if messages else None
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the strategy work on the round's mean; of a round that failed nothing comes."""
        run = self._running
        brought, run.latest = run.latest, None
        arrays, metrics = None, None
        if brought is not None and brought.update is not None:
            # Where clients hold the model there is nothing that the strategy could read.
            mean = ArrayRecord() if self._held else run.train.model.moved(brought.update)
            answers = run.train.replies(brought, arrays=mean)
            arrays, metrics = self._inner("aggregate_train")(server_round + run.before, answers)
            arrays = None if self._held else arrays
        if brought is not None:
            run.keep(brought, arrays, metrics)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Run the whole evaluation; where figures pass as they are, Flower sends the strategy's own messages."""
        run = self._running
        run.judged = None
        if self._evaluation == "drop":
            return []
        messages = list(self.strategy.configure_evaluate(server_round + run.before, arrays, config, grid))
        if self._evaluation == "pass" and messages:
            run.leaves(f"evaluate.{ANY}")
        if self._evaluation == "pass" or not messages:
            return messages
        judge = run.evaluation()
        if self._held:
            judge.course.engine.version = run.brought_up_to_date()
        run.judged = judge.round(messages)
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the strategy work on the averaged figures, or on everybody's own where they pass."""
        run = self._running
        number = server_round + run.before
        if self._evaluation == "pass":
            answers, names = named_alike(list(replies), self._weighted_by)
            run.leaves(*(f"evaluate.{name}" for name in names))
            return self.strategy.aggregate_evaluate(number, answers)
        if run.judged is None or run.judged.update is None or run.judge is None:
            return None
        return self.strategy.aggregate_evaluate(number, run.judge.replies(run.judged, arrays=None))

    def summary(self) -> None:
        """Log what protects the run, and the strategy's own summary."""
        log(INFO, "\t├──> FedVeil: %s %s", self._scheme, self._options or "")
        log(INFO, "\t│\t└── Metrics: train (%s) | evaluate (%s)", self._metrics, self._evaluation)
        self.strategy.summary()

    def _inner(self, name: str) -> Callable[..., Any]:
        """What the strategy does; where clients take its step, all that is left of it here is FedAvg's."""
        method: Callable[..., Any] = getattr(self.strategy, name)
        return partial(getattr(FedAvg, name), self.strategy) if self._step.strategy else method

    @property
    def _running(self) -> _Run:
        if self._run is None:
            raise ConfigError("The run has not begun: call start() of the protected strategy.")
        return self._run

    def _begun(self, grid: Grid, initial: ArrayRecord, rounds: int, deadline: float) -> _Run:
        os.umask(0o077)  # the folder holds the model
        least = max(self._clients or 0, fewest(self._scheme), int(getattr(self.strategy, "min_available_nodes", 1)))
        while len(here := sorted(grid.get_node_ids())) < least:
            log(INFO, "Waiting for nodes to connect: %d connected (minimum required: %d).", len(here), least)
            time.sleep(_BETWEEN_LOOKS)
        nodes = here if self._clients is None else here[: self._clients]
        nodes = self._numbered(nodes)
        cohort = self._sized("train", len(nodes))
        config = settings_for(self._scheme, self._options, clients=len(nodes), cohort=cohort, rounds=rounds)
        folder, progress, attempt, lineage = self._folder, None, 0, secrets.token_hex(16)
        if folder is not None:
            if self._resume:
                stored = folder.config()
                if stored.fingerprint() != config.fingerprint():
                    raise CheckpointError(
                        f"The run in {folder.path} has other settings (scheme, options or clients): resume it with "
                        "those it was started with."
                    )
                progress = self._progress()
                self._check_kept({} if progress is None else progress.kept)
                if progress is None and (reached := folder.reached()):
                    raise CheckpointError(
                        f"{folder.path / PROGRESS} is gone, which says how far the run came in {reached} rounds: it "
                        "cannot go on. Begin a new run."
                    )
                attempt = folder.resume(config)
            else:
                try:
                    folder.start(config)
                except OSError as reason:
                    raise ConfigError(f"out={str(folder.path)!r} cannot be used: {reason.strerror}.") from reason
            lineage = folder.lineage
            prune_beside(folder, days=self._keep_days, engine=ENGINE, going_on=going_on)
        arrays, standing = initial, None if progress is None else progress.standing
        size = len(AppModel.read(initial).row)
        if self._held:
            arrays = form_of(initial)
            if standing is not None and standing.setup.form != form_digest(initial):
                raise CheckpointError("The run that is resumed trained a model of other names, shapes or types.")
            if standing is not None and Step(standing.setup.strategy, standing.setup.numbers) != self._step:
                raise CheckpointError("The run that is resumed has another strategy, or other numbers in its step.")
        elif progress is not None:
            if AppModel.read(progress.arrays).form != AppModel.read(initial).form:
                raise CheckpointError("The run that is resumed trained a model of other names or shapes.")
            progress.give_back(self.strategy)
            arrays = progress.arrays
        setup = AppSetup(
            lineage=lineage,
            attempt=attempt,
            phase="train",
            settings=told_of(config),
            size=size,
            metrics=self._metrics,
            weighted_by=self._weighted_by,
            form=form_digest(initial) if self._held else "",
            first=self._first,
            start=0 if standing is None else standing.reached,
            strategy=self._step.strategy,
            numbers=self._step.numbers,
        )
        return _Run(
            self.strategy,
            grid,
            setup,
            nodes=nodes,
            deadline=deadline,
            notes=self._notes,
            folder=folder,
            progress=progress,
            arrays=arrays,
            public=initial if self._first == "server" else None,
            evaluation=self._evaluation,
            sized=self._sized,
        )

    @property
    def _weighted_by(self) -> str:
        return str(getattr(self.strategy, "weighted_by_key", "num-examples"))

    def _check_kept(self, kept: Mapping[str, str]) -> None:
        """Refuse to go on with other settings than a run's ledger has spoken of."""
        for name, now in (("first", self._first), ("weighted_by_key", self._weighted_by)):
            if kept.get(name, now) != now:
                raise CheckpointError(
                    f"The run that is resumed was started with {name} = {kept[name]!r} and has {now!r} now: resume it "
                    "with what it was started with."
                )

    def _progress(self) -> AppProgress | None:
        return None if self._folder is None or not self._resume else AppProgress.read(self._folder.path / PROGRESS)

    def _numbered(self, nodes: list[int]) -> list[int]:
        """Nodes by their clients' numbers: whoever is there again has the number it had."""
        progress = self._progress()
        before = () if progress is None else progress.nodes
        new = iter(sorted(set(nodes) - set(before)))
        kept = [node if node in set(nodes) else next(new, None) for node in before]
        return [node for node in (*kept, *new) if node is not None]

    def _sized(self, phase: Phase, clients: int) -> int:
        """How many of the clients a round asks."""
        share = getattr(self.strategy, f"fraction_{phase}", 1.0)
        least = getattr(self.strategy, f"min_{phase}_nodes", 1)
        return min(max(int(clients * share), least, fewest(self._scheme)), clients)


class _Run:
    """One start of a protected strategy."""

    def __init__(
        self,
        strategy: Strategy,
        grid: Grid,
        setup: AppSetup,
        *,
        nodes: list[int],
        deadline: float,
        notes: _Notes,
        folder: RunFolder | None,
        progress: AppProgress | None,
        arrays: ArrayRecord,
        public: ArrayRecord | None,
        evaluation: Metrics,
        sized: Callable[[Phase, int], int],
    ) -> None:
        self._strategy, self._grid, self._setup, self._nodes = strategy, grid, setup, nodes
        self._deadline, self._notes, self._folder = deadline, notes, folder
        self._evaluation, self._sized = evaluation, sized
        before = 0 if progress is None else progress.round
        self.before, self.arrays = before, arrays
        state = empty_state(round=before, attempt=setup.attempt)
        if folder is not None and setup.attempt:
            folder.go_on(before)
        course = Course(
            grid,
            setup,
            nodes=nodes,
            deadline=deadline,
            events=notes,
            state=state,
            journal=self._journal,
            standing=None if progress is None else progress.standing,
        )
        self._held, self._public = course.agreed.work.held, public
        self.train = AppRounds(course, setup)
        if self._held:
            course.take_up(arrays)
        self.judge: AppRounds | None = None
        self.latest: AppRound | None = None
        self.judged: AppRound | None = None
        # Written before anybody is asked, and without a standing: where clients hold the model, it begins anew.
        said = progress or AppProgress.of(strategy, ArrayRecord() if self._held else arrays, round=0, nodes=nodes)
        passing = [f"metrics.{ANY}"] if setup.metrics == "pass" else []
        self._progress = dataclasses.replace(
            said,
            uncovered=tuple(sorted({*said.uncovered, *passing})),
            averaged=said.averaged or setup.metrics == "average",
            kept={"first": setup.first, "weighted_by_key": setup.weighted_by},
        )
        self._store()
        self._outcome = Outcome(state, course.journal)
        account = course.journal.accountant
        if account is not None and setup.attempt and (progress is None or list(progress.nodes) != nodes):
            # Who was which client in earlier attempts is not known: everybody is charged for the one that spent most.
            for spent in account.spent.values():
                spent[:] = spent.max()

    def _journal(self, job: Job, state: ServerState) -> PrivacyJournal:
        return privacy_journal_of(job, None if self._folder is None else self._folder.privacy_journal, state)

    def sent(self, arrays: ArrayRecord) -> ArrayRecord:
        """What the strategy is to send: where clients hold the model, its form, or the public one it begins with."""
        if not self._held:
            return arrays
        return self._public if self._public is not None and self.train.course.version == 0 else self.arrays

    def brought_up_to_date(self) -> int:
        """Have clients hold the last round's model, and say which version that is."""
        course = self.train.course
        before = course.version
        course.bring_up_to_date(self.arrays)
        if course.version < before:
            text = f"the sums of round {course.state.round} cannot be read by clients: they are taken back"
            self._notes.note("taken back", text, round=course.state.round)
            self.write()
        return course.version

    def farewell(self) -> None:
        """After the last round: clients that hold the model are told its last sums."""
        if self._held:
            self.train.course.finish(self.arrays)

    def evaluation(self) -> AppRounds:
        """The course of the evaluations, whose clients agree on keys of their own."""
        if self.judge is None:
            self._progress = dataclasses.replace(self._progress, averaged=True, judged=True)
            self._store()
            clients = len(self._nodes)
            settings, size = dict(self._setup.settings), self._sized("evaluate", clients)
            settings.pop("cohort", None)
            if size != clients:
                settings["cohort"] = size
            setup = dataclasses.replace(
                self._setup, phase="evaluate", settings=settings, size=0, metrics=self._evaluation
            )
            state = empty_state(round=self.before, attempt=setup.attempt)
            course = Course(
                self._grid, setup, nodes=self._nodes, deadline=self._deadline, events=self._notes, state=state
            )
            self.judge = AppRounds(course, setup)
        return self.judge

    def keep(self, brought: AppRound, arrays: ArrayRecord | None, metrics: MetricRecord | None) -> None:
        """Write a round down, and what the run would go on with."""
        done, gathered = brought.done, brought.done.gathered
        row: dict[str, Any] = {
            "round": done.round + 1,
            "loss": None,
            "clients": len(gathered.arrived),
            "seconds": round(brought.seconds, 6),
            "bytes_down": gathered.bytes_down / max(len(done.cohort), 1),
            "bytes_up": gathered.bytes_up / max(len(done.cohort), 1),
        }
        if metrics is not None:
            row["metrics"] = dict(metrics)
        if brought.cut:
            row["cut_off"] = brought.cut
        if done.failed:
            row["failed"] = done.failed
        if gathered.refused:
            row["refused"] = {str(client): refusal.text for client, refusal in gathered.refused.items()}
        self._outcome.rows.append(row)
        self.arrays = arrays or self.arrays
        if self._folder is not None:
            self._folder.append_metrics(row)
        self.write()
        if self._setup.metrics == "pass":
            self.leaves(*(f"metrics.{name}" for own in brought.figures.values() for name in own))

    def write(self) -> None:
        """Write down what the run would go on with."""
        now = AppProgress.of(
            self._strategy,
            ArrayRecord() if self._held else self.arrays,
            round=self.train.course.state.round,
            nodes=self._nodes,
            standing=self.train.course.standing,
        )
        said = {name: getattr(self._progress, name) for name in ("uncovered", "averaged", "judged", "kept")}
        self._progress = dataclasses.replace(now, **said)
        self._store()

    def leaves(self, *releases: str) -> None:
        """Have it on disk that figures leave as they are, by the names of their releases, before they do."""
        if not {*releases} <= {*self._progress.uncovered}:
            left = tuple(sorted({*self._progress.uncovered, *releases}))
            self._progress = dataclasses.replace(self._progress, uncovered=left)
            self._store()

    def _store(self) -> None:
        if self._folder is not None:
            self._progress.write(self._folder.path / PROGRESS)

    def ledger(self) -> Ledger:
        """What is proven of the rounds so far."""
        return app_ledger(
            self.train.course,
            self._progress.uncovered,
            weighted_by=self._setup.weighted_by,
            averaged=self._progress.averaged,
            judged=self._progress.judged,
        )

    def end(self, *, done: bool = False) -> None:
        """Write down what the run leaves; one that has not ended leaves its ledger, with the round it was in."""
        self.train.course.journal.interrupted()
        if self._folder is None:
            return
        course, ledger = self.train.course, self.ledger()
        self._outcome.stopped = course.stopped
        self._folder.write_ledger(ledger.as_data())
        written(self._folder.path / "report.md", ledger, self._outcome.rows)
        if done:
            self._folder.settle()
            own = {"loss": "the app's own", "parameters": self._setup.size, "ledger": ledger.as_data()}
            self._folder.write_summary({**summarise(course.job, self._outcome), **own})
        self.release()

    def release(self) -> None:
        """Let go of the folder."""
        if self._folder is not None:
            self._folder.release()
