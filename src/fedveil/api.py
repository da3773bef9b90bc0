"""FedVeil in Python: train your own model on your own clients' data."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torch import nn

from fedveil import schemes
from fedveil.config import BEFORE, OBJECT, RunConfig, unknown_setting
from fedveil.data import Dataset
from fedveil.data.description import describe_parts
from fedveil.data.intake import ClientSamples, Intake, clients_of, columns, outputs_of, task_of
from fedveil.data.lazy import LazySamples, whole
from fedveil.data.preparation import Preparation, numbers_like
from fedveil.downlink import Weights, assemble
from fedveil.engine import ClientPool
from fedveil.errors import ConfigError, DataError, FedVeilError
from fedveil.protocol.parts import Scheme
from fedveil.roles.server import ServerState
from fedveil.runs.callbacks import WARNING, Follower, Progress, Row, working
from fedveil.runs.job import Job, ModelFacts, agreed, assemble_job, device_of, dtype_of, settled
from fedveil.runs.judgement import Judgement, judgement_from
from fedveil.runs.loop import evaluated, fresh_state, summarise, train_job
from fedveil.runs.objective import BALANCED, class_counts, listed_weights, loss_settings, own_objective
from fedveil.runs.own_metrics import Metric, OwnMetrics
from fedveil.runs.preflight import preflight
from fedveil.runs.rates import with_found_rate
from fedveil.runs.watching import Watch
from fedveil.schemes import SchemeInfo
from fedveil.settings import Settings
from fedveil.work.batches import mixed_seed

if TYPE_CHECKING:
    from fedveil.runs.predicting import Model

_LOG = logging.getLogger(__name__)

# Settings about data and model that a command line needs and arguments replace.
GIVEN_OTHERWISE = tuple(
    "dataset target text group site picture_size test_fraction validation_fraction split partition alpha ratio "
    "model_options weights".split()
)


# A command in backticks stays one.
_FLAG = re.compile(r"`[^`]*`|--(?P<no>no-)?(?P<name>[a-z]+(?:-[a-z]+)*)(?: (?P<value>[\w.:/-]*\w))?")
_NO_VALUES = ("and", "if", "or", "too")
_TAKEN = {setting.name: str(setting.type) for setting in fields(RunConfig)} | {"out": "str", "resume": "bool"}


@contextmanager
def _errors_in_python() -> Iterator[None]:
    """Errors name settings as whoever called from Python writes them: loss='square' instead of --loss square."""
    try:
        yield
    except FedVeilError as reason:
        reason.args = (_FLAG.sub(_as_argument, str(reason)), *reason.args[1:])
        raise


def _as_argument(flag: re.Match[str]) -> str:
    name, value = (flag["name"] or "").replace("-", "_"), flag["value"]
    kind = _TAKEN.get(name)
    if kind is None:  # a whole command, or a flag of some other one
        return flag[0]
    after = "" if value is None else f" {value}"
    if kind.startswith("bool"):
        return f"{name}={not flag['no']}{after}"
    if value is None or value in _NO_VALUES:
        return name + after
    if kind.startswith("str"):
        return f"{name}={value!r}"
    return f"{name}={value}" if value[0].isdigit() else name + after


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


@_errors_in_python()
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
    **settings: Any,
) -> Trained:
    """Train `model` federatedly on each client's samples.

    Args:
        model: Any module that takes a batch and gives one vector per sample; it is left as it was.
        clients: Each client's samples: (inputs, targets), a torch Dataset or DataLoader, a Hugging Face dataset, or
            rows, each a pair or a dict with an input and a label; or a partitioner of flwr-datasets. What has numbered
            samples is read a batch at a time. Integer targets are classes, floating-point targets a regression.
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
    clients = clients_of(clients)
    info = schemes.find(scheme) if isinstance(scheme, str) else schemes.info_of(scheme, where="scheme")
    given_loss = settings.get("loss")
    shape, augment = (given if callable(given := settings.get(name)) else None for name in ("lr_schedule", "augment"))
    settings = _settings(settings, info)
    # A scheme that is given as an object is code: no file may stand for it later.
    named = scheme if isinstance(scheme, str) else f"{OBJECT}{info.name}"
    config = settled(
        RunConfig.from_mapping({**settings, "scheme": named, "clients": max(len(clients), 1)}, where="train()")
    )
    # Whoever calls from Python has split the data already.
    named_here = {"model": f"{type(model).__module__}.{type(model).__qualname__}", "dataset": "python"}
    config = config.with_changes(**named_here, split=BEFORE["split"])
    device, dtype = device_of(config), dtype_of(config)
    several = config.task == "multilabel" or config.loss == "binary-cross-entropy"
    assert config.seed is not None
    intake = Intake(dtype=dtype, device=device, seed=partial(mixed_seed, config.seed), several=several)
    parties = [intake.take(samples, who=f"Client {k}", number=k) for k, samples in enumerate(clients)]
    pool = ClientPool.separate(parties)
    task = task_of(parties, asked="multilabel" if several else config.task)
    outputs = outputs_of(parties, task, model)
    input_shape = tuple(pool.clients[0].x.shape[1:])
    preparation = preparation or Preparation(numbers_like(*(client.x for client in pool.clients)))
    facts = ModelFacts(None, {}, input_shape, outputs, task, None, preparation.classes, preparation)
    if preparation.inputs.shape != facts.input_shape:
        raise ConfigError(
            f"The preparation makes samples of shape {preparation.inputs.shape}, the clients' have {facts.input_shape}."
        )

    def held_out(samples: ClientSamples | None, name: str, number: int) -> Dataset | None:
        if samples is None:
            return None
        with working(f"Reading the {name} set", quiet=not progress):
            x, y = columns(intake.take(samples, who=f"The {name} set", number=number))
            if tuple(x.shape[1:]) != facts.input_shape:
                raise DataError(
                    f"The {name} set's inputs have shape {tuple(x.shape[1:])}, the clients' {facts.input_shape}."
                )
            return Dataset(name, task, x, whole(y), outputs=outputs)

    judged = held_out(test, "test", len(clients))
    validated = held_out(validation, "validation", len(clients) + 1)
    own = None
    if (config.loss or "").startswith(OBJECT):
        own = own_objective(given_loss, config, model, pool.clients[0], dtype=dtype, device=device)
    counts = None
    if config.class_weights == BALANCED:
        counts = class_counts(torch.cat([whole(client.y) for client in pool.clients]), outputs)
    common = agreed(config, clients=len(pool), task=task, own=info, loss=own, counts=counts, shape=shape)
    if common.scheme.plan is not None:
        for party in parties:
            if isinstance(party, LazySamples):
                party.keep_apart()
    job = assemble_job(
        config, copy.deepcopy(model), pool, judged, facts, common=common, validation=validated, augment=augment
    )
    job = replace(job, shape=shape)
    if metrics:
        job = _with_metrics(job, metrics)
    if not any(isinstance(party, LazySamples) for party in parties):  # of others, that would read every sample
        owned = [Dataset("python", task, *columns(party), outputs=outputs) for party in parties]
        job = replace(job, description=describe_parts(owned, test=judged, validation=validated))
        _log_data(job)
    for text in preflight(job):
        _warn(text)
    if config.lr == "auto":
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
            outcome = train_job(job, state=state, on_round=told, on_begin=begun, say=_warn)
            summary, best = summarise(job, outcome), watch.best
            if best is not None and best.weights is not None:
                summary["best"] = best.as_data()
        except BaseException as reason:
            watch.callbacks.stopped(reason)
            raise
    watch.callbacks.end(summary)
    kept = None if best is None or best.weights is None else _module(job, best.weights)
    return Trained(_module(job, state.weights), outcome.rows, summary, kept)


@_errors_in_python()
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


def _with_metrics(job: Job, metrics: Mapping[str, Metric]) -> Job:
    """A job with metrics that were tried once on the untrained model: none of them fails after hours of training."""
    if job.test is None:
        raise ConfigError("metrics are computed on test samples: give them too (test).")
    job = replace(job, metrics=OwnMetrics(metrics))
    evaluated(job, fresh_state(job))
    return job


def _log_data(job: Job) -> None:
    assert job.description is not None
    for line in (*job.description.lines(), *(f"warning: {text}" for text in job.description.warnings)):
        _LOG.info("%s", line)


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


def _settings(given: Mapping[str, Any], info: SchemeInfo) -> dict[str, Any]:
    """Settings as a configuration has them: what only the scheme knows is an option of its own."""
    known = {field.name: field for field in fields(RunConfig)}
    settings: dict[str, Any] = {}
    options = dict(given.get("options") or {})
    for name, value in given.items():
        if name in GIVEN_OTHERWISE:
            raise ConfigError(f"{name!r} is not a setting of train(): model and data are given as arguments.")
        if name in known:
            settings |= _plain(name, value)
        elif name in info.declared:
            options[name] = value
        else:
            raise unknown_setting(name, where="train()", further=info.declared, without=GIVEN_OTHERWISE)
    return settings | ({"options": options} if options else {})


def _plain(name: str, value: Any) -> dict[str, Any]:
    """A setting as text where PyTorch has an object for it; some objects say several settings."""
    if isinstance(value, torch.device):
        return {name: str(value)}
    if isinstance(value, torch.dtype):
        return {name: str(value).removeprefix("torch.")}
    if name == "class_weights" and value is not None and not isinstance(value, str):
        return {name: listed_weights(value)}
    if name == "loss" and (isinstance(value, nn.Module) or callable(value)):
        return loss_settings(value)
    if name in ("lr_schedule", "augment") and callable(value):
        return {name: f"{OBJECT}{getattr(value, '__name__', type(value).__name__)}"}
    return {name: value}
