"""Where each side's data come from: the user's own loader, or a named data set dealt by the run's seed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedveil.config import RunConfig
from fedveil.data import Dataset
from fedveil.data.sources import EMBEDDED
from fedveil.errors import ConfigError, DataError
from fedveil.models.custom import load_file
from fedveil.runs.job import ModelFacts, dealt, dtype_of, loaded
from fedveil.work.messages import ClientData


@dataclass(frozen=True, eq=False)
class Described:
    """What a server knows of data it does not have, and what it has to judge the model by."""

    facts: ModelFacts
    test: Dataset | None


def described(config: RunConfig, module: str) -> Described:
    """The server's side: the app's own module (FACTS, test()), or the data set that the settings name."""
    if not module:
        split = loaded(config)
        return Described(ModelFacts.of(config, split.train), split.test)
    try:
        code = importlib.import_module(module)
    except Exception as reason:
        raise ConfigError(
            f"The app's module {module!r} cannot be imported: {type(reason).__name__}: {reason}"
        ) from reason
    facts = _given_facts(config, code, module)
    return Described(facts, _given_test(code, facts, module))


def own_data(config: RunConfig, facts: ModelFacts, *, client: int, loader: Path | None) -> ClientData:
    """A client's side: its own loader's `client(number)`, or its share of the data set that the settings name.

    What a run says of the data is compared with what the owner says (FACTS), and the data with that alone: whether a
    client refuses a run then tells nothing about its samples.
    """
    if loader is None:
        if config.dataset not in EMBEDDED:
            raise DataError(
                f"the run names the data set {config.dataset!r}, which is not embedded, and client.toml names no loader"
            )
        train = loaded(config).train.to(dtype=dtype_of(config), device=torch.device(config.device))
        rows = dealt(config, train)[client].to(train.x.device)
        found = ClientData(client, train.x[rows], train.y[rows])
        own = ModelFacts.of(config, train)
    else:
        try:
            code = load_file(loader, what="a client's data")
        except ConfigError as reason:
            raise DataError(str(reason)) from reason
        own = _given_facts(config, code, str(loader))
        found = _loaded(config, code, client=client, task=own.task, where=loader)
    for name in ("input_shape", "outputs", "task", "vocabulary"):
        said, ours = getattr(facts, name), getattr(own, name)
        if said != ours:
            raise DataError(f"the run is for data with {name} = {said}, and this client's have {ours}")
    _check(found, own)
    return found


def _check(data: ClientData, facts: ModelFacts) -> None:
    x, y = data.x, data.y
    if tuple(x.shape[1:]) != facts.input_shape:
        raise DataError(f"a sample has shape {tuple(x.shape[1:])}, FACTS says {facts.input_shape}")
    if facts.task == "classification":
        if y.is_floating_point() or y.dim() != 1 or int(y.min()) < 0 or int(y.max()) >= facts.outputs:
            raise DataError(f"the targets are not class numbers from 0 to {facts.outputs - 1}")
    elif not y.is_floating_point() or tuple(y.shape[1:]) != (facts.outputs,):
        raise DataError(f"the targets are not {facts.outputs} numbers per sample")
    if facts.vocabulary is not None and (
        x.dtype != torch.int64 or int(x.min()) < 0 or int(x.max()) >= facts.vocabulary
    ):
        raise DataError("the samples are not token numbers of the vocabulary that FACTS names")


def _given_facts(config: RunConfig, code: ModuleType, where: str) -> ModelFacts:
    given = getattr(code, "FACTS", None)
    known = {"input_shape", "outputs", "task", "vocabulary", "labels"}
    if not isinstance(given, dict) or not {"input_shape", "outputs", "task"} <= given.keys() <= known:
        raise ConfigError(
            f"{where} must say FACTS = dict(input_shape=(…), outputs=…, task='classification' or 'regression'), and "
            "may add vocabulary and labels."
        )
    shape, outputs, task = given["input_shape"], given["outputs"], given["task"]
    if not all(type(one) is int and one > 0 for one in (*shape, outputs)):
        raise ConfigError(f"{where}: input_shape and outputs must be positive whole numbers.")
    if task not in ("classification", "regression"):
        raise ConfigError(f"{where}: task must be classification or regression (got {task!r}).")
    labels = tuple(given.get("labels", ()))
    return ModelFacts(config.model, config.model_options, tuple(shape), outputs, task, given.get("vocabulary"), labels)


def _given_test(code: ModuleType, facts: ModelFacts, where: str) -> Dataset | None:
    load = getattr(code, "test", None)
    pair = None if load is None else load()
    if pair is None:
        return None
    x, y = _pair(pair, facts.task, where=f"{where}.test()")
    if tuple(x.shape[1:]) != facts.input_shape:
        raise DataError(f"{where}.test() gives samples of shape {tuple(x.shape[1:])}, FACTS says {facts.input_shape}.")
    return Dataset("test", facts.task, x, y, outputs=facts.outputs, vocabulary=facts.vocabulary)  # type: ignore[arg-type]


def _loaded(config: RunConfig, code: ModuleType, *, client: int, task: str, where: Path) -> ClientData:
    load = getattr(code, "client", None)
    if load is None:
        raise DataError(f"{where} has no function client(number) that gives this client's samples")
    try:
        found = load(client)
    except Exception as reason:
        raise DataError(f"{where}: client({client}) raised {type(reason).__name__}: {reason}") from reason
    x, y = _pair(found, task, where=f"{where}: client({client})")
    device, dtype = torch.device(config.device), dtype_of(config)
    x = x.to(device, dtype) if x.is_floating_point() else x.to(device)
    return ClientData(client, x, y.to(device, dtype) if y.is_floating_point() else y.to(device))


def _pair(pair: Any, task: str, *, where: str) -> tuple[Tensor, Tensor]:
    try:
        x, y = (torch.as_tensor(part) for part in pair)
    except (TypeError, ValueError) as reason:
        raise DataError(f"{where} must give (inputs, targets), two tensors or arrays.") from reason
    if x.dim() < 2 or y.dim() < 1 or len(x) != len(y) or not len(x):
        raise DataError(f"{where} gives inputs of shape {tuple(x.shape)} and targets of shape {tuple(y.shape)}.")
    for what, one in (("inputs", x), ("targets", y)):
        if one.is_floating_point() and not torch.isfinite(one).all():
            raise DataError(f"{where}: the {what} hold NaN or infinity.")
    if y.is_floating_point() or task == "regression":
        y = y.to(torch.get_default_dtype()) if not y.is_floating_point() else y
        return x, y[:, None] if y.dim() == 1 else y.flatten(1)
    return x if x.is_floating_point() else x.to(torch.int64), y.to(torch.int64)
