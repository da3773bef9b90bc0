"""The job of a run whose model, samples, scheme or loss are objects of Python."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fedveil import schemes
from fedveil.config import BEFORE, OBJECT, RunConfig, unknown_setting
from fedveil.data import Dataset
from fedveil.data.dataset import Task
from fedveil.data.description import describe_parts
from fedveil.data.intake import ClientSamples, Intake, Party, clients_of, columns, outputs_of, task_of, tried
from fedveil.data.lazy import LazySamples, whole
from fedveil.data.preparation import Preparation, numbers_like
from fedveil.engine import ClientPool
from fedveil.errors import ConfigError, DataError
from fedveil.models.building import Adapted, inputs_of, plain, refuse_hooks, refuse_shared_memory
from fedveil.plain import IN_PYTHON
from fedveil.protocol.parts import Scheme
from fedveil.runs.callbacks import working
from fedveil.runs.job import Job, ModelFacts, agreed, assemble_job, device_of, dtype_of, settled
from fedveil.runs.loop import evaluated, fresh_state
from fedveil.runs.metrics import Metric, OwnMetrics
from fedveil.runs.objective import BALANCED, class_counts, listed_weights, loss_settings, own_objective
from fedveil.schemes import SchemeInfo
from fedveil.work.batches import mixed_seed

# Settings about data and model that a command line needs and arguments replace.
GIVEN_OTHERWISE = tuple(
    "dataset target text group site picture_size test_fraction validation_fraction split partition alpha ratio "
    "model_options weights".split()
)


def job_of_objects(
    model: nn.Module,
    clients: Sequence[ClientSamples],
    *,
    scheme: str | Scheme | Callable[..., Scheme],
    test: ClientSamples | None,
    validation: ClientSamples | None,
    metrics: Mapping[str, Metric],
    preparation: Preparation | None,
    settings: Mapping[str, Any],
    quiet: bool,
) -> tuple[Job, SchemeInfo]:
    """The job that `fedveil.train` was given, and its scheme.

    Raises:
        ConfigError: A setting is unknown, or does not go with another or with the model.
        DataError: Samples are missing, or of a kind or shape that cannot be used.
    """
    refuse_shared_memory(model)  # of the model itself: copies of it may have parted what lies together
    refuse_hooks(model)  # copies have lost some
    clients = clients_of(clients)
    info = schemes.find(scheme) if isinstance(scheme, str) else schemes.info_of(scheme, where="scheme")
    # A scheme that is given as an object is code: no file may stand for it later.
    named = scheme if isinstance(scheme, str) else f"{OBJECT}{info.name}"
    config = _configured(model, {**_settings(settings, info), "scheme": named, "clients": max(len(clients), 1)})
    device, dtype = device_of(config), dtype_of(config)
    several = config.task == "multilabel" or config.loss == "binary-cross-entropy"
    assert config.seed is not None
    seed, takes = partial(mixed_seed, config.seed), inputs_of(model)
    intake = Intake(dtype=dtype, device=device, seed=seed, several=several, takes=takes)
    parties = [intake.take(samples, who=f"Client {k}", number=k) for k, samples in enumerate(clients)]
    pool = ClientPool.separate(parties)
    task = task_of(parties, asked="multilabel" if several else config.task)
    model = Adapted(model, intake.fields) if intake.fields else plain(model, tried(parties, model))
    facts = _facts(pool, preparation, task=task, outputs=outputs_of(parties, task, tried(parties, model)))
    facts = replace(facts, fields=intake.fields)
    held_out = [
        None if samples is None else _held_out(intake, samples, name, facts, task, number=number, quiet=quiet)
        for number, (name, samples) in enumerate((("test", test), ("validation", validation)), start=len(clients))
    ]
    own = None
    if (config.loss or "").startswith(OBJECT):
        own = own_objective(settings.get("loss"), config, model, pool.clients[0], dtype=dtype, device=device)
    counts = None
    if config.class_weights == BALANCED:
        counts = class_counts(torch.cat([whole(client.y) for client in pool.clients]), facts.outputs)
    shape, augment = (given if callable(given := settings.get(name)) else None for name in ("lr_schedule", "augment"))
    outputs = facts.outputs
    common = agreed(
        config, clients=len(pool), task=task, outputs=outputs, own=info, loss=own, counts=counts, shape=shape
    )
    if common.scheme.plan is not None:
        for party in parties:
            if isinstance(party, LazySamples):
                party.keep_apart()
    network, (judged, validated) = copy.deepcopy(model), held_out
    job = assemble_job(config, network, pool, judged, facts, common=common, validation=validated, augment=augment)
    job = replace(job, shape=shape)
    if metrics:
        job = _with_metrics(job, metrics)
    return _described(job, parties, judged, validated, task=task), info


def _configured(model: nn.Module, settings: Mapping[str, Any]) -> RunConfig:
    config = settled(RunConfig.from_mapping(settings, where="train()"))
    # Whoever calls from Python has split the data already.
    named_here = {"model": f"{type(model).__module__}.{type(model).__qualname__}", "dataset": IN_PYTHON}
    return config.with_changes(**named_here, split=BEFORE["split"])


def _facts(pool: ClientPool, preparation: Preparation | None, *, task: Task, outputs: int) -> ModelFacts:
    shape = tuple(pool.clients[0].x.shape[1:])
    preparation = preparation or Preparation(numbers_like(*(client.x for client in pool.clients)))
    if preparation.inputs.shape != shape:
        raise ConfigError(
            f"The preparation makes samples of shape {preparation.inputs.shape}, the clients' have {shape}."
        )
    return ModelFacts(None, {}, shape, outputs, task, None, preparation.classes, preparation)


def _held_out(
    intake: Intake, samples: ClientSamples, name: str, facts: ModelFacts, task: Task, *, number: int, quiet: bool
) -> Dataset:
    with working(f"Reading the {name} set", quiet=quiet):
        x, y = columns(intake.take(samples, who=f"The {name} set", number=number))
        if tuple(x.shape[1:]) != facts.input_shape:
            raise DataError(
                f"The {name} set's inputs have shape {tuple(x.shape[1:])}, the clients' {facts.input_shape}."
            )
        return Dataset(name, task, x, whole(y), outputs=facts.outputs)


def _described(
    job: Job, parties: Sequence[Party], test: Dataset | None, validation: Dataset | None, *, task: Task
) -> Job:
    """The job with what was understood of its samples; of lazy ones that would read every sample."""
    if any(isinstance(party, LazySamples) for party in parties):
        return job
    owned = [Dataset(IN_PYTHON, task, *columns(party), outputs=job.facts.outputs) for party in parties]
    return replace(job, description=describe_parts(owned, test=test, validation=validation))


def _with_metrics(job: Job, metrics: Mapping[str, Metric]) -> Job:
    """A job with metrics that were tried once on the untrained model: none of them fails after hours of training."""
    if job.test is None:
        raise ConfigError("metrics are computed on test samples: give them too (test).")
    job = replace(job, metrics=OwnMetrics(metrics))
    _, scores = evaluated(job, fresh_state(job))
    for name, why in scores.failed.items():
        raise ConfigError(f"The metric {name!r} fails {why}")
    return job


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
