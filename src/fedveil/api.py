"""FedVeil in Python: train your own model on your own clients' data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from torch import nn

from fedveil.config import RunConfig
from fedveil.data.intake import ClientSamples
from fedveil.data.preparation import Preparation
from fedveil.downlink import Weights, assemble
from fedveil.errors import ConfigError, settings_as_arguments
from fedveil.protocol.parts import Scheme
from fedveil.roles.server import ServerState
from fedveil.runs.best import Watch
from fedveil.runs.callbacks import WARNING, Callback, Follower, Progress, Row
from fedveil.runs.from_python import job_of_objects
from fedveil.runs.job import Job
from fedveil.runs.judgement import Judgement, judgement_from
from fedveil.runs.loop import fresh_state, summarise, train_job
from fedveil.runs.metrics import Metric
from fedveil.runs.preflight import preflight, with_found_rate
from fedveil.settings import Settings

if TYPE_CHECKING:
    from fedveil.runs.predicting import Model

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run: the server's model, one row of metrics per round, the summary, and the ledger.

    `best` is the model of the best round, where `monitor` or a validation part tells it.
    """

    model: nn.Module
    metrics: list[Row]
    summary: dict[str, Any]
    best: nn.Module | None = None

    @property
    def ledger(self) -> dict[str, Any]:
        """What the run has proven, against whom, and what it has not: the content of ledger.json."""
        ledger: dict[str, Any] = self.summary["ledger"]
        return ledger

    @property
    def judged(self) -> Judgement | None:
        """How good the model is on the test samples, beside a constant answer; None without such samples."""
        return judgement_from(self.summary["judged"], where="summary") if "judged" in self.summary else None


@overload
def train(
    model: nn.Module,
    clients: Sequence[ClientSamples],
    *,
    scheme: str = "lossless",
    test: ClientSamples | None = None,
    metrics: Mapping[str, Metric] | None = None,
    validation: ClientSamples | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    preparation: Preparation | None = None,
    callbacks: Sequence[Follower] = (),
    tensorboard: str | Path | None = None,
    mlflow: str | None = None,
    wandb: str | Path | None = None,
    **settings: Unpack[Settings],
) -> Trained: ...


@overload
def train(
    model: nn.Module,
    clients: Sequence[ClientSamples],
    *,
    scheme: Scheme | Callable[..., Scheme],
    **settings: Any,
) -> Trained: ...


@settings_as_arguments()
def train(
    model: nn.Module,
    clients: Sequence[ClientSamples],
    *,
    scheme: str | Scheme | Callable[..., Scheme] = "lossless",
    test: ClientSamples | None = None,
    metrics: Mapping[str, Metric] | None = None,
    validation: ClientSamples | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    preparation: Preparation | None = None,
    callbacks: Sequence[Follower] = (),
    tensorboard: str | Path | None = None,
    mlflow: str | None = None,
    wandb: str | Path | None = None,
    **settings: Any,
) -> Trained:
    """Train `model` federatedly on each client's samples.

    Args:
        model: Any module that takes a batch and gives one vector per sample, or an object with `logits`; it is left as
            it was.
        clients: Each client's samples: (inputs, targets), a torch Dataset or DataLoader, a Hugging Face dataset, or
            rows, each a pair or a dict with an input and a label; or a partitioner of flwr-datasets. Of a dict the
            model gets all that its `forward` takes by name (input_ids, attention_mask). What has numbered samples is
            read a batch at a time. Integer targets are classes, floating-point targets a regression.
        scheme: A name, your own function (setting, *, options) that builds a scheme, or a Scheme.
        test: Samples to judge the model by.
        metrics: Metrics of your own by name: functions (outputs, targets), or objects with update, compute and reset,
            as torchmetrics has them. Their figures stand in the rows and the summary under these names.
        validation: Samples to judge it by while choices are still made: rows get validation_loss and the like.
        out: A folder for metrics, checkpoints and the model, as they come.
        resume: Continue the run in `out` from its newest checkpoint.
        progress: Whether to show a bar.
        preparation: How the samples were made of raw ones, where `fedveil.data.load` made them (its Split has it); the
            model's file then holds it, and `fedveil.load` takes raw samples. (None: numbers as they are.)
        callbacks: Who is told of rounds, evaluations and checkpoints, and may stop the run (`fedveil.StopTraining`):
            objects of `fedveil.Callback`, or functions that take a round's row.
        tensorboard: Also write TensorBoard's event files into this folder ("": OUT/tensorboard).
        mlflow: Also log to MLflow at this address ("": MLFLOW_TRACKING_URI, or ./mlflow.db).
        wandb: Also log to Weights & Biases, offline unless WANDB_MODE says otherwise, in this folder ("": WANDB_DIR, or
            the present one), never the run's own. These three take a run that has a folder (`out`).
        settings: Those of the command line (`rounds`, `lr`, `seed`, …), and the options of your own scheme.

    Returns:
        The trained model with its metrics and ledger.

    Raises:
        ConfigError: A setting is unknown, or does not go with another or with the model.
        DataError: Samples are missing, or of a kind or shape that cannot be used.

    Examples:
        >>> import torch, fedveil
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> data = [(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
        >>> result = fedveil.train(net, data, scheme="lossless", rounds=2, seed=1, progress=False)
        >>> len(result.metrics)
        2
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"The model is {type(model).__name__}: give a torch.nn.Module.")
    if out is not None and resume and settings.get("seed") is None:
        settings |= _stored_seed(out)
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks is {type(callbacks).__name__}: give a list of them, also of one.")
    if resume and out is None:
        raise ConfigError("resume goes on with the run in a folder: say which (out).")
    if out is not None and not isinstance(out, str | Path):
        raise ConfigError(f"out is {type(out).__name__}: give the path of a folder.")
    callbacks = (*_tracked(tensorboard, mlflow, wandb, out), *callbacks)
    job, info = job_of_objects(
        model,
        clients,
        scheme=scheme,
        test=test,
        validation=validation,
        metrics=metrics or {},
        preparation=preparation,
        settings=settings,
        quiet=not progress,
    )
    if job.description is not None:
        for line in (*job.description.lines(), *(f"warning: {text}" for text in job.description.warnings)):
            _LOG.info("%s", line)
    goes_on = resume and out is not None and (Path(out) / "config.toml").exists()
    for text in preflight(job, begins=not goes_on):
        _warn(text)
    if job.config.lr == "auto":
        job, told = with_found_rate(job, own=info)
        _warn(told)
    if out is not None:
        # The folder needs packages that in-memory training does not.
        from fedveil.runs.folder import RunFolder
        from fedveil.runs.model_file import load_weights
        from fedveil.runs.session import continue_in, train_into

        folder = RunFolder(out)
        if resume and folder.config_file.exists():
            summary, state = continue_in(job, folder, quiet=not progress, say=_warn, follow=callbacks)
        else:
            folder.start(job.config)
            folder.write_data(job.description)
            state = fresh_state(job)
            summary = train_into(job, folder, state, quiet=not progress, say=_warn, follow=callbacks)
        best = load_weights(folder.best_file, job.architecture, job.weights) if "best" in summary else None
        kept = None if best is None else _module(job, best)
        return Trained(_module(job, state.weights), folder.metrics(), summary, kept)
    return _in_memory(job, callbacks, progress=progress)


def _tracked(
    tensorboard: str | Path | None, mlflow: str | None, wandb: str | Path | None, out: str | Path | None
) -> list[Callback]:
    given = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
    named = {name: str(place) for name, place in given.items() if place is not None}
    if not named:
        return []
    if out is None:
        raise ConfigError(f"{next(iter(named))} tracks a run by its folder: give one (out).")
    from fedveil.tracking import Tracked, trackers  # whose runs have folders, as in-memory training has not

    return list(trackers(Tracked(**named), out, say=_warn))


def _module(job: Job, weights: Weights) -> nn.Module:
    return assemble(job.architecture, weights).eval()


def _in_memory(job: Job, callbacks: Sequence[Follower], *, progress: bool) -> Trained:
    watch, state = Watch(job, callbacks), fresh_state(job)
    with Progress(job.scheme.name, total=job.config.rounds, quiet=not progress) as bar:

        def boundary(row: Row, now: ServerState) -> None:
            bar.update(row)
            watch.round(row, now)

        watch.callbacks.begin(None, job.config, ())
        try:
            told, begun = (boundary, watch.round_begins) if progress or watch.listens else (None, None)
            outcome = train_job(job, state=state, on_round=told, on_begin=begun, on_answer=bar.listener, say=_warn)
            summary, best = summarise(job, outcome), watch.best
            if best is not None and best.weights is not None:
                summary["best"] = best.as_data()
        except BaseException as reason:
            watch.callbacks.stopped(reason)
            raise
    watch.callbacks.finish(summary, _warn)
    kept = None if best is None or best.weights is None else _module(job, best.weights)
    return Trained(_module(job, state.weights), outcome.rows, summary, kept)


@settings_as_arguments()
def load(run_or_file: str | Path, *, model: nn.Module | Callable[..., nn.Module] | str | None = None) -> Model:
    """A trained model that predicts for raw samples.

    Args:
        run_or_file: A run's folder, its model.safetensors, or an export.
        model: Your own network or the function that builds it, where the run trained such a one; or the name of code
            (`OwnCode`). What a file names is never imported.

    Returns:
        A module whose `predict` takes raw rows, pictures, texts or arrays, and gives classes and probabilities.

    Raises:
        ConfigError: There is no model, it is damaged, or `model` does not fit it.
    """
    # The file needs packages that in-memory training does not.
    from fedveil.runs.model_file import load_model
    from fedveil.runs.predicting import Model

    return Model(load_model(Path(run_or_file), model=model))


def _warn(text: str) -> None:
    if text.startswith(WARNING):
        _LOG.warning("%s", text.removeprefix(WARNING))
    else:
        _LOG.info("%s", text)


def _stored_seed(out: str | Path) -> dict[str, Any]:
    """The seed (and where secrets come from) of the run to resume, which may have drawn its own."""
    file = Path(out) / "config.toml"
    stored = RunConfig.read(file) if file.exists() else {}
    return {name: stored[name] for name in ("seed", "secrets") if name in stored}
