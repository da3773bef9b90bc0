"""FedVeil in Python: train your own model on your own clients' data."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from fedveil import schemes
from fedveil.config import BEFORE, RunConfig
from fedveil.data import Dataset
from fedveil.data.dataset import Task
from fedveil.data.description import describe_parts
from fedveil.downlink import assemble
from fedveil.engine import ClientPool
from fedveil.errors import ConfigError, DataError, FedVeilError, unknown_name
from fedveil.protocol.parts import Scheme
from fedveil.runs.callbacks import Progress, Row
from fedveil.runs.job import Job, ModelFacts, agreed, assemble_job, device_of, dtype_of, settled
from fedveil.runs.loop import fresh_state, summarise, train_job
from fedveil.runs.preflight import preflight
from fedveil.schemes import SchemeInfo

# Settings about data and model that a command line needs and arguments replace.
_GIVEN_OTHERWISE = (
    *("dataset", "target", "task", "text", "group", "site", "test_fraction", "validation_fraction", "split"),
    *("partition", "alpha", "ratio", "model_options"),
)
_LOG = logging.getLogger(__name__)

Sample = tuple[Any, Any] | Mapping[str, Any]
ClientSamples = Sample | TorchDataset[Any] | DataLoader[Any] | Sequence[Sample]
_INPUTS = ("x", "input", "inputs", "features", "data", "image", "images", "img", "pixel_values", "input_ids")
_TARGETS = ("y", "label", "labels", "target", "targets")


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
    """A finished run: the server's model, one row of metrics per round, the summary, and the ledger."""

    model: nn.Module
    metrics: list[Row]
    summary: dict[str, Any]

    @property
    def ledger(self) -> dict[str, Any]:
        """What the run has proven, against whom, and what it has not: the content of ledger.json."""
        ledger: dict[str, Any] = self.summary["ledger"]
        return ledger


@_errors_in_python()
def train(
    model: nn.Module,
    clients: Sequence[ClientSamples],
    *,
    scheme: str | Scheme | Callable[..., Scheme] = "lossless",
    test: ClientSamples | None = None,
    validation: ClientSamples | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Trained:
    """Train `model` federatedly on each client's samples.

    Args:
        model: Any module that takes a batch and gives one vector per sample; it is left as it was.
        clients: Each client's samples: (inputs, targets), a torch Dataset or DataLoader, or rows, each a pair or a
            dict with an input and a label. Integer targets are classes, floating-point targets a regression.
        scheme: A name, your own function (setting, *, options) that builds a scheme, or a Scheme.
        test: Samples to judge the model by.
        validation: Samples to judge it by while choices are still made: rows get validation_loss and the like.
        out: A folder for metrics, checkpoints and the model, as they come.
        resume: Continue the run in `out` from its newest checkpoint.
        progress: Whether to show a bar.
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
    clients = _listed(clients)
    info = schemes.find(scheme) if isinstance(scheme, str) else schemes.info_of(scheme, where="scheme")
    settings = _settings(settings, info)
    # A scheme that is given as an object is code: no file may stand for it later.
    named = scheme if isinstance(scheme, str) else f"python:{info.name}"
    config = settled(
        RunConfig.from_mapping({**settings, "scheme": named, "clients": max(len(clients), 1)}, where="train()")
    )
    # Whoever calls from Python has split the data already.
    named_here = {"model": f"{type(model).__module__}.{type(model).__qualname__}", "dataset": "python"}
    config = config.with_changes(**named_here, split=BEFORE["split"])
    device, dtype = device_of(config), dtype_of(config)
    pairs = [_pair(samples, dtype=dtype, device=device, who=f"Client {k}") for k, samples in enumerate(clients)]
    pool = ClientPool.separate(pairs)
    task = _task(pairs)
    outputs = _outputs(pairs, task, model)
    facts = ModelFacts(None, {}, tuple(pairs[0][0].shape[1:]), outputs, task)

    def held_out(samples: ClientSamples | None, name: str) -> Dataset | None:
        if samples is None:
            return None
        x, y = _pair(samples, dtype=dtype, device=device, who=f"The {name} set")
        if tuple(x.shape[1:]) != facts.input_shape:
            raise DataError(
                f"The {name} set's inputs have shape {tuple(x.shape[1:])}, the clients' {facts.input_shape}."
            )
        return Dataset(name, task, x, y, outputs=outputs)

    judged, validated = held_out(test, "test"), held_out(validation, "validation")
    common = agreed(config, clients=len(pool), task=task, own=info)
    job = assemble_job(config, copy.deepcopy(model), pool, judged, facts, common=common, validation=validated)
    owned = [Dataset("python", task, x, y, outputs=outputs) for x, y in pairs]
    job = replace(job, description=describe_parts(owned, test=judged, validation=validated))
    _log_data(job)
    preflight(job)
    if out is not None:
        # The folder needs packages that in-memory training does not.
        from fedveil.runs.folder import RunFolder
        from fedveil.runs.session import continue_in, train_into

        folder = RunFolder(out)
        if resume and folder.config_file.exists():
            summary, state = continue_in(job, folder, quiet=not progress)
        else:
            folder.start(config)
            folder.write_data(job.description)
            state = fresh_state(job)
            summary = train_into(job, folder, state, quiet=not progress)
        return Trained(assemble(job.architecture, state.weights).eval(), folder.metrics(), summary)
    with Progress(job.scheme.name, total=config.rounds, quiet=not progress) as bar:
        told = (lambda row, state: bar.update(row)) if progress else None
        outcome = train_job(job, state=fresh_state(job), on_round=told)
    return Trained(assemble(job.architecture, outcome.state.weights).eval(), outcome.rows, summarise(job, outcome))


def _log_data(job: Job) -> None:
    assert job.description is not None
    for line in (*job.description.lines(), *(f"warning: {text}" for text in job.description.warnings)):
        _LOG.info("%s", line)


def _stored_seed(out: str | Path) -> dict[str, Any]:
    """The seed (and where secrets come from) of the run to resume, which may have drawn its own."""
    file = Path(out) / "config.toml"
    stored = RunConfig.read(file) if file.exists() else {}
    return {name: stored[name] for name in ("seed", "secrets") if name in stored}


def _listed(clients: Any) -> list[Any]:
    single = isinstance(clients, Tensor | TorchDataset | DataLoader | Mapping) or not isinstance(clients, Iterable)
    if single or (isinstance(clients, tuple) and any(isinstance(part, Tensor) for part in clients)):
        raise DataError(
            f"clients is {type(clients).__name__}: give a list with one entry per client, [(x, y), (x, y)]."
        )
    return list(clients)


def _settings(given: Mapping[str, Any], info: SchemeInfo) -> dict[str, Any]:
    """Settings as a configuration has them: what only the scheme knows is an option of its own."""
    known = {field.name: field for field in fields(RunConfig)}
    settings, options = {}, dict(given.get("options") or {})
    for name, value in given.items():
        if name in _GIVEN_OTHERWISE:
            raise ConfigError(f"{name!r} is not a setting of train(): model and data are given as arguments.")
        if name in known:
            settings[name] = _plain(name, value)
        elif name in info.declared:
            options[name] = value
        else:
            raise unknown_name("setting in train():", name, {*known, *info.declared} - {*_GIVEN_OTHERWISE})
    return settings | ({"options": options} if options else {})


def _plain(name: str, value: Any) -> Any:
    """A setting's value as text where PyTorch has an object for it."""
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if name != "loss" or not (isinstance(value, nn.Module) or callable(value)):
        return value
    if isinstance(value, nn.CrossEntropyLoss) and value.weight is None and _as_usual(value):
        return "cross-entropy"
    half = " FedVeil's square loss is ½·Σ(output − target)²: loss='square'." if isinstance(value, nn.MSELoss) else ""
    raise ConfigError(
        f"The loss {value!r} cannot be used: a scheme undoes, clips and accounts for losses that it knows. Give "
        f"loss='cross-entropy' or loss='square'.{half}"
    )


def _as_usual(loss: nn.CrossEntropyLoss) -> bool:
    return (loss.ignore_index, loss.label_smoothing, loss.reduction) == (-100, 0.0, "mean")


def _pair(samples: Any, *, dtype: torch.dtype, device: torch.device, who: str) -> tuple[Tensor, Tensor]:
    try:
        x, y = _tensors(samples, who)
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError) as reason:
        raise DataError(
            f"{who}: the samples cannot be read ({type(reason).__name__}: {' '.join(str(reason).split())[:200]}). Give "
            "(inputs, targets) as tensors with one row per sample, or a Dataset of (input, target) pairs of tensors."
        ) from reason
    if x.dim() < 2 or y.dim() < 1:
        raise DataError(
            f"{who}: inputs of shape {tuple(x.shape)} and targets of shape {tuple(y.shape)}; "
            "both need one row per sample."
        )
    x = x.to(device, dtype) if x.is_floating_point() else x.to(device, torch.int64)
    if not y.is_floating_point():
        if y.dim() != 1:
            raise DataError(f"{who}: class numbers must have shape (samples,), not {tuple(y.shape)}.")
        return x, y.to(device, torch.int64)
    return x, y.to(device, dtype).flatten(1) if y.dim() > 1 else y.to(device, dtype)[:, None]


def _tensors(samples: Any, who: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of whatever a client's samples are given as."""
    if isinstance(samples, Mapping):
        x, y = _of_row(samples, who)
        return torch.as_tensor(x), torch.as_tensor(y)
    if isinstance(samples, tuple | list) and len(samples) == 2 and not isinstance(samples[0], tuple | Mapping):
        x, y = samples
        return torch.as_tensor(x), torch.as_tensor(y)
    if isinstance(samples, DataLoader):
        # One row at a time through its own collate function: its order and batches are not those of the training.
        rows = samples.dataset
        whole = isinstance(rows, IterableDataset)
        batches = list(samples) if whole else [samples.collate_fn([row]) for row in _rows(rows)]
        return _joined([_of_row(batch, who) for batch in batches], who, torch.cat)
    return _joined([_of_row(row, who) for row in _rows(samples)], who, torch.stack)


def _rows(samples: Any) -> list[Any]:
    return list(samples) if isinstance(samples, IterableDataset) else [samples[i] for i in range(len(samples))]


def _joined(pairs: list[tuple[Any, Any]], who: str, join: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    if not pairs:
        raise DataError(f"{who} has no samples. Give it data or leave it out.")

    def tensor(value: Any) -> Tensor:
        # What a loader makes of lists: one tensor per place in them.
        listed = isinstance(value, list) and bool(value) and isinstance(value[0], Tensor)
        return torch.stack(value, dim=1) if listed else torch.as_tensor(value)

    x, y = (join([tensor(value) for value in column]) for column in zip(*pairs, strict=True))
    return x, y


def _of_row(row: Any, who: str) -> tuple[Any, Any]:
    """A sample's input and target; in a dict they go by the names that are usual."""
    if not isinstance(row, Mapping):
        x, y, *_ = row
        return x, y
    targets = [name for name in _TARGETS if name in row]
    rest = [name for name in row if name not in targets]
    inputs = [name for name in _INPUTS if name in row] or (rest if len(rest) == 1 else [])
    if len(targets) != 1 or len(inputs) != 1:
        raise DataError(
            f"{who}: of a sample with {', '.join(map(repr, row))} it is not clear what the input and what the target "
            "is. Name them x and y, or give (input, target) pairs."
        )
    return row[inputs[0]], row[targets[0]]


def _task(pairs: Sequence[tuple[Tensor, Tensor]]) -> Task:
    kinds = {y.is_floating_point() for _, y in pairs}
    if len(kinds) > 1:
        raise DataError("Some clients have integer targets (classes) and some floating-point ones (regression).")
    return "regression" if kinds == {True} else "classification"


def _outputs(pairs: Sequence[tuple[Tensor, Tensor]], task: Task, model: nn.Module) -> int:
    shapes = {tuple(x.shape[1:]) for x, _ in pairs}
    if len(shapes) > 1:
        raise DataError(f"Clients' inputs have different shapes: {', '.join(map(str, sorted(shapes)))}.")
    x = pairs[0][0]
    with torch.no_grad():
        twin = copy.deepcopy(model).eval().to(x.device, x.dtype if x.is_floating_point() else torch.float32)
        try:
            output = twin(torch.cat([x[:1], x[:1]]))
        except Exception as reason:
            raise ConfigError(
                f"The model does not take the clients' inputs of shape {tuple(x.shape[1:])}: "
                f"{type(reason).__name__}: {reason}"
            ) from reason
    if not isinstance(output, Tensor) or output.dim() != 2:
        given = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(f"The model gives {given} per sample; it must give one vector, as a last nn.Linear does.")
    outputs = int(output.shape[1])
    if task == "regression":
        widths = {int(targets.shape[1]) for _, targets in pairs}
        if widths != {outputs}:
            raise DataError(f"The model gives {outputs} outputs, the targets have {sorted(widths)} columns.")
        return outputs
    for client, (_, labels) in enumerate(pairs):
        outside = labels[(labels < 0) | (labels >= outputs)]
        if len(outside):
            raise DataError(
                f"Client {client} has class {int(outside[0])}, but the model has {outputs} outputs "
                f"(classes 0 to {outputs - 1})."
            )
    return outputs
