"""MLflow: a run's figures, settings, ledger and files in a tracking store."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fedveil.config import RunConfig
from fedveil.errors import FedVeilError, missing_extra
from fedveil.runs.folder import RunFolder
from fedveil.tracking.figures import closing_figures, figures_of, ledger_in_words, settings_of
from fedveil.version import __version__

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

LINEAGE = "fedveil.lineage"
_EXPERIMENT = "fedveil"
_ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}
_HERE = "sqlite:///mlflow.db"
_ALWAYS_THERE = "seconds"
_MOST_METRICS = 1000  # that MLflow takes at once
_MOST_PARAMS = 100
_LONGEST = 6000  # characters of a parameter


class MlflowRun:
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

    def begin(self, folder: RunFolder, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        """Open the run, or the one that is there already; it then holds all of `rows`."""
        self._folder = folder
        tag = folder.lineage
        found = self._client.search_runs([self._experiment], f"tags.`{LINEAGE}` = '{tag}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            history = self._client.get_metric_history(self._run, _ALWAYS_THERE)
            self._there = {one.step for one in history}
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
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                # Another process may have made it in between.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

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
