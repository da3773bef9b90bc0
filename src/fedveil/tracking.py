"""Runs in TensorBoard, MLflow and Weights & Biases: rounds' figures, settings, the ledger in words, a run's files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError, FedVeilError, missing_extra
from fedveil.plain import figure, read_named
from fedveil.runs.callbacks import Callback, Say
from fedveil.runs.folder import RunFolder, ledger_from, write_atomically
from fedveil.version import __version__

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient
    from torch.utils.tensorboard import SummaryWriter


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one round, under the names of metrics.jsonl; a round that failed has failed = 1."""
    numbers = {name: float(value) for name, value in row.items() if name != "round" and figure(value)}
    if "failed" in row:
        numbers["failed"] = 1.0
    if "refused" in row:
        numbers["refused"] = float(len(row["refused"]))
    return numbers


def settings_of(config: RunConfig) -> dict[str, str]:
    """The settings of a run that are set; a model's own options as model.NAME."""
    plain = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    options = plain.pop("model_options")
    return {name: str(value) for name, value in {**plain, **{f"model.{k}": v for k, v in options.items()}}.items()}


def epsilons_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """ε against each adversary for whom the ledger has one, as epsilon_ADVERSARY."""
    lines = summary["ledger"]["lines"]
    return {f"epsilon_{slug(line['adversary'])}": line["epsilon"] for line in lines if line["epsilon"] is not None}


def closing_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures that only a finished run has: ε by adversary, the final scores, and what a client sees.

    Of a judged model each figure NAME stands there as final_NAME, with final_NAME_low, …_high and …_baseline.
    """
    final = {
        f"final_{name}": float(value)
        for name, value in summary.items()
        if name.startswith(("test_", "validation_", "client_view_", "client_test_"))
        or name in ("coverage", "train_loss")
        if figure(value)
    }
    judged = summary.get("judged", {}).get("figures", {})
    for name, measured in judged.items():
        ends = {"": measured["value"], **{f"_{end}": measured.get(end) for end in ("low", "high", "baseline")}}
        final |= {f"final_{name}{end}": float(value) for end, value in ends.items() if figure(value)}
    return {**epsilons_of(summary), **final}


def ledger_in_words(summary: Mapping[str, Any]) -> str:
    """The ledger as Markdown: against whom what is proven, what that assumes, and what is not protected."""
    ledger = ledger_from(summary["ledger"])
    said = [
        f"# Ledger of {ledger.scheme} after {ledger.rounds} rounds",
        "",
        "| against | result | protected | why |",
        "| --- | --- | --- | --- |",
        *(
            f"| {line.adversary} | {line.result} | {line.unit or '–'} | {line.why} |".replace("\n", " ")
            for line in ledger.lines
        ),
    ]
    assumed = list(dict.fromkeys(text for line in ledger.lines for text in line.assumptions))
    for heading, texts in (("Assumed", assumed), ("Not protected", ledger.unprotected), ("Note", ledger.notes)):
        if texts:
            said += ["", f"## {heading}", "", *(f"- {text}" for text in texts)]
    if ledger.simulation:
        said += ["", "SIMULATION: the first model, secrets and noise follow from the seed."]
    return "\n".join(said) + "\n"


def slug(name: str) -> str:
    """A name of lower-case words joined by underscores, as every tracker takes it."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


_ALWAYS_THERE = "seconds"


class EventFiles(Callback):
    """Writes scalars by round, settings and ledger as texts; a resumed run goes on in the same folder.

    Rounds that a resume repeats are written again. The new file says from which round on it replaces the old ones,
    which is how TensorBoard itself marks a restart.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, *, run: Path) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as reason:
            raise missing_extra("tensorboard", "tensorboard", "Logging for TensorBoard") from reason
        self.folder = folder
        self._writer: SummaryWriter | None = None
        if not RunFolder(run).config_file.exists() and any(folder.glob("events.out.tfevents.*")):
            raise CheckpointError(
                f"{folder} holds another run's events: give another folder after --tensorboard, or remove it."
            )

    def begin(self, folder: RunFolder | None, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        """Open a new event file that goes on after `rows`; those that older files lack are written first."""
        from torch.utils.tensorboard import SummaryWriter

        standing = rows[-1]["round"] if rows else 0
        seen = rounds_in(self.folder)
        behind = {row["round"] for row in rows} - seen
        replaced = min(behind, default=standing + 1)
        self._writer = SummaryWriter(str(self.folder), purge_step=replaced if seen else None)
        listed = [f"| {name} | {value} |" for name, value in settings_of(config).items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *listed]), replaced - 1)
        for row in rows:
            if row["round"] >= replaced:
                self.round(row)

    def round(self, row: dict[str, Any]) -> None:
        """Write a round's figures, at once: a killed run has then lost none."""
        assert self._writer is not None
        for name, value in figures_of(row).items():
            self._writer.add_scalar(name, value, row["round"])
        if "failed" in row:
            self._writer.add_text("failed", str(row["failed"]), row["round"])
        self._writer.flush()

    def kept(self) -> None:
        """Nothing: rounds that are repeated replace what was written."""

    def end(self, summary: dict[str, Any]) -> None:
        """Write ε, the final scores and the ledger."""
        assert self._writer is not None
        for name, value in closing_figures(summary).items():
            self._writer.add_scalar(name, value, summary["rounds"])
        self._writer.add_text("ledger", ledger_in_words(summary), summary["rounds"])
        self._writer.close()

    def stopped(self, reason: BaseException) -> None:
        """Close the file; a resumed run opens the next."""
        if self._writer is not None:
            self._writer.close()


def rounds_in(folder: Path) -> set[int]:
    """The rounds whose figures a folder's event files hold."""
    if not any(folder.glob("events.out.tfevents.*")):
        return set()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 keeps every event; by default long runs are thinned out.
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    if _ALWAYS_THERE not in read.Tags()["scalars"]:
        return set()
    return {event.step for event in read.Scalars(_ALWAYS_THERE)}


LINEAGE = "fedveil.lineage"
_EXPERIMENT = "fedveil"
_ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}
_HERE = "sqlite:///mlflow.db"
_MOST_METRICS = 1000  # that MLflow takes at once
_MOST_PARAMS = 100
_LONGEST = 6000  # characters of a parameter


class MlflowRun(Callback):
    """Writes one run of an experiment; a resumed run is found by its lineage and goes on.

    MLflow forgets nothing it was told, so it is told of rounds that stand: those of a checkpoint, or of a finished
    run. A round that a resume repeats is never there twice.
    """

    name = "MLflow"

    def __init__(self, uri: str | None, *, title: str) -> None:
        # Read when MLflow is loaded: by default it reports its use over the network, and tells of every table it makes.
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as reason:
            raise missing_extra("mlflow-skinny", "mlflow", "Logging to MLflow") from reason
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or _HERE
        self._title = title
        self._run = ""
        self._waiting: list[dict[str, Any]] = []
        self._there: set[int] = set()
        try:
            self._client: MlflowClient = MlflowClient(tracking_uri=self.uri)
            self._experiment = self._found_experiment()
        except Exception as reason:
            raise FedVeilError(f"MLflow at {self.uri} does not answer as it should: {reason}") from reason

    def begin(self, folder: RunFolder | None, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        """Open the run, or the one that is there already; it then holds all of `rows`."""
        assert folder is not None
        self._folder = folder
        tag = folder.lineage
        runs = self._client.search_runs([self._experiment], f"tags.`{LINEAGE}` = '{tag}'", max_results=1)
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            history = self._client.get_metric_history(self._run, _ALWAYS_THERE)
            self._there = {point.step for point in history}
        else:
            tags = {LINEAGE: tag, "fedveil.version": __version__, "fedveil.folder": str(folder.path.resolve())}
            self._run = self._client.create_run(self._experiment, run_name=self._title, tags=tags).info.run_id
        self._tell_settings(config)
        self._waiting = list(rows)
        self.kept()

    def round(self, row: dict[str, Any]) -> None:
        """Keep a round's figures until they stand."""
        self._waiting.append(row)

    def kept(self) -> None:
        """Write the rounds that now stand."""
        now = int(time.time() * 1000)
        metrics = [
            metric
            for row in self._waiting
            if row["round"] not in self._there
            for metric in self._metrics(figures_of(row), step=row["round"], now=now)
        ]
        self._there |= {row["round"] for row in self._waiting}
        self._waiting = []
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MOST_METRICS])

    def end(self, summary: dict[str, Any]) -> None:
        """Write what is left, ε, the final scores, the ledger and the files; the run is then finished."""
        self.kept()
        now = int(time.time() * 1000)
        closing = list(self._metrics(closing_figures(summary), step=summary["rounds"], now=now))
        self._client.log_batch(self._run, metrics=closing)
        for verdict in summary["ledger"]["lines"]:
            self._client.set_tag(self._run, f"against {verdict['adversary']}", verdict["verdict"])
        self._client.log_text(self._run, ledger_in_words(summary), "ledger.md")
        files = self._folder
        for file in (files.config_file, files.metrics_file, files.model_file, files.ledger_file, files.summary_file):
            if file.exists():
                self._client.log_artifact(self._run, str(file))
        self._client.set_terminated(self._run, "FINISHED")

    def stopped(self, reason: BaseException) -> None:
        """Say that the run was stopped, or has failed."""
        if self._run:
            stopped = isinstance(reason, KeyboardInterrupt | SystemExit)
            self._client.set_terminated(self._run, "KILLED" if stopped else "FAILED")

    def _found_experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                # Another process may have made it in between.
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _tell_settings(self, config: RunConfig) -> None:
        from mlflow.entities import Param

        told = self._client.get_run(self._run).data.params
        # A parameter cannot be changed, and a run that goes on for longer changes one.
        fresh = {name: value for name, value in settings_of(config).items() if name not in told}
        if int(told.get("rounds", config.rounds)) != config.rounds:
            self._client.set_tag(self._run, "fedveil.rounds", str(config.rounds))
        params = [Param(name, value[:_LONGEST]) for name, value in fresh.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + _MOST_PARAMS])

    def _metrics(self, figures: dict[str, float], *, step: int, now: int) -> Iterator[Metric]:
        from mlflow.entities import Metric

        return (Metric(name, value, now, step) for name, value in figures.items())


class WandbRun(Callback):
    """Writes one run of Weights & Biases, offline unless WANDB_MODE says otherwise; `wandb sync` uploads it later.

    As MLflow it is told of rounds that stand. An offline run cannot be asked what it holds: a file beside it says up to
    which round it was told. A resumed run is another folder of the same run, and syncing joins them.
    """

    name = "Weights & Biases"

    def __init__(self, folder: Path, *, run: Path, title: str) -> None:
        try:
            import wandb  # noqa: F401
        except ImportError as reason:
            raise missing_extra("wandb", "wandb", "Logging to Weights & Biases") from reason
        if folder.resolve().is_relative_to(run.resolve()):
            raise ConfigError(
                f"{folder} lies within the run's own folder, which may hold no links, and Weights & Biases makes some: "
                "give another folder after --wandb."
            )
        self.folder, self._title = folder, title
        self._run: Any = None
        self._waiting: list[dict[str, Any]] = []

    def begin(self, folder: RunFolder | None, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        """Open the run, or go on with it; it then holds all of `rows`."""
        import wandb

        assert folder is not None
        self._folder = folder
        self._notes = self.folder / "wandb" / f"fedveil-{folder.lineage}.json"
        self._notes.parent.mkdir(parents=True, exist_ok=True)
        self._told = int(read_named(self._notes).get("round", 0)) if self._notes.exists() else 0
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True)
        chosen = os.environ.get("WANDB_MODE")  # which it reads, and checks, itself
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _EXPERIMENT),
            id=folder.lineage,
            name=self._title,
            dir=str(self.folder),
            mode=None if chosen else "offline",
            resume="allow" if chosen and chosen != "offline" else None,
            config=settings_of(config),
            settings=quiet,
        )
        self._waiting = list(rows)
        self.kept()

    def round(self, row: dict[str, Any]) -> None:
        """Keep a round's figures until they stand."""
        self._waiting.append(row)

    def kept(self) -> None:
        """Write the rounds that now stand."""
        for row in self._waiting:
            if row["round"] > self._told:
                self._run.log(figures_of(row), step=row["round"])
                self._told = row["round"]
        self._waiting = []
        write_atomically(self._notes, json.dumps({"round": self._told}))

    def end(self, summary: dict[str, Any]) -> None:
        """Write what is left, ε, the final scores, the ledger and the files; the run is then finished."""
        self.kept()
        self._run.summary.update(closing_figures(summary))
        self._run.summary["ledger"] = ledger_in_words(summary)
        files = self._folder
        for file in (files.config_file, files.metrics_file, files.model_file, files.ledger_file, files.summary_file):
            if file.exists():
                shutil.copy(file, self._run.dir)  # what lies there is part of the run
        self._run.finish(exit_code=0)

    def stopped(self, reason: BaseException) -> None:
        """Say that the run was stopped, or has failed."""
        if self._run is not None:
            self._run.finish(exit_code=1)


_Tracker = EventFiles | MlflowRun | WandbRun


@dataclass(frozen=True)
class Tracked:
    """Where runs are tracked: None is nowhere, an empty text the usual place.

    That is the folder tensorboard in the run's own, for MLflow what MLFLOW_TRACKING_URI names or ./mlflow.db, and for
    Weights & Biases the folder wandb in the one that WANDB_DIR names or in this one.
    """

    tensorboard: str | None = None
    mlflow: str | None = None
    wandb: str | None = None

    def within(self, part: str) -> Tracked:
        """The same for one of several runs: each has a TensorBoard folder of its own."""
        events = str(Path(self.tensorboard) / part) if self.tensorboard else self.tensorboard
        return dataclasses.replace(self, tensorboard=events)


def trackers(
    tracked: Tracked, run: str | Path, *, title: str | None = None, say: Say = lambda text: None
) -> list[Callback]:
    """Followers for the run in the folder `run`; a missing package or a store that does not answer is told now.

    What goes wrong later is said once and ends the tracking, not the run.
    """
    folder = Path(run)
    chosen: list[_Tracker] = []
    name = title or folder.resolve().name
    if tracked.tensorboard is not None:
        chosen.append(EventFiles(Path(tracked.tensorboard or folder / "tensorboard"), run=folder))
    if tracked.mlflow is not None:
        chosen.append(MlflowRun(tracked.mlflow or None, title=name))
    if tracked.wandb is not None:
        chosen.append(WandbRun(Path(tracked.wandb or os.environ.get("WANDB_DIR", ".")), run=folder, title=name))
    return [_Guarded(tracker, say) for tracker in chosen]


class _Guarded(Callback):
    """A tracker whose failure costs its figures and nothing else."""

    def __init__(self, tracker: _Tracker, say: Say) -> None:
        self._tracker: _Tracker | None = tracker
        self._say = say

    def begin(self, folder: RunFolder | None, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        """Pass it on."""
        self._try(lambda tracker: tracker.begin(folder, config, rows))

    def round(self, row: dict[str, Any]) -> None:
        """Pass it on."""
        self._try(lambda tracker: tracker.round(row))

    def kept(self) -> None:
        """Pass it on."""
        self._try(lambda tracker: tracker.kept())

    def end(self, summary: dict[str, Any]) -> None:
        """Pass it on."""
        self._try(lambda tracker: tracker.end(summary))

    def stopped(self, reason: BaseException) -> None:
        """Pass it on."""
        self._try(lambda tracker: tracker.stopped(reason))

    def _try(self, tell: Callable[[_Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            tell(self._tracker)
        except Exception as reason:
            name, self._tracker = self._tracker.name, None
            self._say(
                f"{name} takes no more ({type(reason).__name__}: {reason}); the run goes on without it. Resuming "
                "or repeating the run with the same flag fills in what is missing."
            )
