"""FedVeil in Python: train your own model on your own clients' data."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

from fedveil.config import RunConfig
from fedveil.data import Dataset
from fedveil.data.dataset import Task
from fedveil.downlink import assemble
from fedveil.engine import ClientPool
from fedveil.errors import ConfigError, DataError
from fedveil.runs.callbacks import Progress
from fedveil.runs.job import ModelFacts, assemble_job, device_of, dtype_of, settled
from fedveil.runs.loop import Row, fresh_state, summarise, train_job
from fedveil.runs.preflight import rehearse

# Settings about data and model that a command line needs and arguments replace.
_GIVEN_OTHERWISE = tuple("dataset target task text group test_fraction partition alpha ratio model_options".split())

ClientSamples = tuple[Tensor, Tensor] | TorchDataset[Any]


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run: the server's model, one row of metrics per round, the summary, and the ledger."""

    model: nn.Module
    metrics: list[Row]
    summary: dict[str, Any]

    @property
    def ledger(self) -> dict[str, Any]:
        """What the run has proven, against whom, and what it has not: the content of ledger.json."""
        found: dict[str, Any] = self.summary["ledger"]
        return found


def train(
    model: nn.Module,
    clients: Sequence[ClientSamples],
    *,
    test: ClientSamples | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Trained:
    """Train `model` federatedly on each client's samples.

    `clients` holds one (inputs, targets) pair of tensors, or one torch Dataset, per client. Integer
    targets are classes, floating-point targets a regression. `settings` are those of the command line
    (`scheme`, `rounds`, `lr`, `seed`, …). With `out`, metrics, checkpoints and the model are written
    there as they come, and `resume=True` continues from the newest checkpoint. `model` itself is left
    as it was.

    Examples:
        >>> import torch, fedveil
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> data = [(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
        >>> result = fedveil.train(net, data, scheme="lossless", rounds=2, seed=1, progress=False)
        >>> len(result.metrics)
        2
    """
    for name in _GIVEN_OTHERWISE:
        if name in settings:
            raise ConfigError(f"{name!r} is not a setting of train(): model and data are given as arguments.")
    if out is not None and resume and settings.get("seed") is None:
        settings |= _stored_seed(out)
    settings["clients"] = max(len(clients), 1)
    config = settled(RunConfig.from_mapping(settings, where="train()"))
    config = config.with_changes(model=f"{type(model).__module__}.{type(model).__qualname__}", dataset="python")
    device, dtype = device_of(config), dtype_of(config)
    pairs = [_pair(one, dtype=dtype, device=device, who=f"Client {k}") for k, one in enumerate(clients)]
    pool = ClientPool.separate(pairs)
    task = _task(pairs)
    held_out = None if test is None else _pair(test, dtype=dtype, device=device, who="The test set")
    outputs = _outputs(pairs, task, model)
    facts = ModelFacts(None, {}, tuple(pairs[0][0].shape[1:]), outputs, task)
    if held_out is not None and tuple(held_out[0].shape[1:]) != facts.input_shape:
        raise DataError(
            f"The test set's inputs have shape {tuple(held_out[0].shape[1:])}, the clients' {facts.input_shape}."
        )
    judged = None if held_out is None else Dataset("test", task, *held_out, outputs=outputs)
    job = assemble_job(config, copy.deepcopy(model), pool, judged, facts)
    rehearse(job)
    if out is not None:
        # The folder needs packages that in-memory training does not.
        from fedveil.runs.folder import RunFolder
        from fedveil.runs.session import continue_in, train_into

        folder = RunFolder(out)
        if resume and folder.config_file.exists():
            summary, state = continue_in(job, folder, quiet=not progress)
        else:
            folder.start(config)
            state = fresh_state(job)
            summary = train_into(job, folder, state, quiet=not progress)
        return Trained(assemble(job.blueprint, state.weights).eval(), folder.metrics(), summary)
    with Progress(config.scheme, total=config.rounds, quiet=not progress) as bar:
        outcome = train_job(job, state=fresh_state(job), on_round=lambda row, state: bar.update(row))
    return Trained(assemble(job.blueprint, outcome.state.weights).eval(), outcome.rows, summarise(job, outcome))


def _stored_seed(out: str | Path) -> dict[str, Any]:
    """The seed (and where secrets come from) of the run to resume, which may have drawn its own."""
    file = Path(out) / "config.toml"
    stored = RunConfig.read(file) if file.exists() else {}
    return {name: stored[name] for name in ("seed", "secrets") if name in stored}


def _pair(samples: ClientSamples, *, dtype: torch.dtype, device: torch.device, who: str) -> tuple[Tensor, Tensor]:
    if isinstance(samples, TorchDataset):
        loaded = [samples[i] for i in range(len(samples))]  # type: ignore[arg-type]
        if not loaded:
            raise DataError(f"{who} has no samples. Give it data or leave it out.")
        x = torch.stack([torch.as_tensor(one[0]) for one in loaded])
        y = torch.stack([torch.as_tensor(one[1]) for one in loaded])
    else:
        x, y = (torch.as_tensor(part) for part in samples)
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
    found = int(output.shape[1])
    if task == "regression":
        widths = {int(targets.shape[1]) for _, targets in pairs}
        if widths != {found}:
            raise DataError(f"The model gives {found} outputs, the targets have {sorted(widths)} columns.")
        return found
    for client, (_, labels) in enumerate(pairs):
        outside = labels[(labels < 0) | (labels >= found)]
        if len(outside):
            raise DataError(
                f"Client {client} has class {int(outside[0])}, but the model has {found} outputs "
                f"(classes 0 to {found - 1})."
            )
    return found
