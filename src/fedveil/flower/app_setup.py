"""What both sides of a protected Flower app agree on: settings, the scheme they name, and records as numbers."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from flwr.app import DEFAULT_TTL, Array, ArrayRecord, Context, Message, Metadata, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil.config import RunConfig
from fedveil.downlink import Architecture, Weights, draw
from fedveil.errors import Code, ConfigError, ProtocolError, spelled, unknown_option
from fedveil.flower.messages import Told, is_count
from fedveil.protocol.directory import Cohort
from fedveil.protocol.parts import Scheme
from fedveil.runs.job import attended
from fedveil.schemes.on_updates import HELD, PADS, SLOTS, AppUpdate, fewest, fitted, scheme_info
from fedveil.schemes.registry import Setting
from fedveil.work.batches import Batches, Schedule
from fedveil.work.losses import make_loss

Metrics = Literal["average", "pass", "drop"]
METRICS: tuple[Metrics, ...] = get_args(Metrics)
Phase = Literal["train", "evaluate"]
_MOST_NUMBERS = 1 << 34
_MOST_TEXT = 1 << 14
_MOST_CLIENTS = 10_000
_MOST_ROUNDS = 100_000
_MOST_DRAWN = 20_000_000


def checked_number(name: str, value: object, *, positive: bool = False) -> float:
    """An argument that is a number; anything else is refused by its name."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a number (got {value!r}).")
    if positive and not value > 0:
        raise ConfigError(f"{name} must be positive (got {value:g}).")
    return float(value)


def checked_path(name: str, value: str | Path | None) -> Path | None:
    """An argument that is a path, or nothing."""
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} must be a path (got {value!r}).")
    return None if value is None else Path(value)


def settings_for(scheme: str, options: Mapping[str, Any], *, clients: int, cohort: int, rounds: int) -> RunConfig:
    """An app's run as settings; what the scheme has no option for is refused."""
    declared = scheme_info(scheme).declared
    for name in options:
        if name not in declared:
            raise unknown_option(f"Scheme {scheme!r}", name, declared)
    run = {"scheme": scheme, "clients": clients, "rounds": rounds, "secrets": "os", "dataset": "app", "model": "app"}
    given = {**run, **options, **({} if cohort == clients else {"cohort": cohort})}
    return RunConfig.from_mapping(given, where="Protected(…)")


_STEPS: Mapping[str, tuple[str, ...]] = {
    "FedAvgM": ("server_learning_rate", "server_momentum"),
    "FedAdagrad": ("eta", "tau", "beta_1"),
    "FedAdam": ("eta", "tau", "beta_1", "beta_2"),
    "FedYogi": ("eta", "tau", "beta_1", "beta_2"),
}
"""Flower's strategies whose step clients can take, and the attributes that it depends on."""


@dataclass(frozen=True)
class Step:
    """How a round's mean moves the model where each client takes the step of Flower's `strategy` on its own copy; that
    of FedAvg (empty) is the mean itself.

    In float64, which rounds less than Flower's arithmetic does, and by operations that every machine rounds alike:
    NumPy's, of which none is fused with another (PyTorch's are), and no power. Copies must agree to the last bit, since
    a run that is resumed binds masks to their digest.
    """

    strategy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names, given = _STEPS.get(self.strategy, ()), self.numbers
        if (self.strategy and not names) or set(given) != set(names):
            raise ConfigError(f"A step of {self.strategy!r} is none that clients take.")
        for name, value in given.items():
            if type(value) is not float or not math.isfinite(value):
                raise ConfigError(f"{name} of {self.strategy} must be a number (got {value!r}).")
            if name.startswith("beta") and not 0 <= value < 1:
                raise ConfigError(f"{name} of {self.strategy} must lie in [0, 1) (got {value:g}).")
            if name == "tau" and not value > 0:
                raise ConfigError(f"tau of {self.strategy} must be positive: steps are divided by it (got {value:g}).")

    @staticmethod
    def of(strategy: object) -> Step:
        """The step of one of those strategies, by its attributes."""
        name, numbers = type(strategy).__name__, {}
        for number in _STEPS[type(strategy).__name__]:
            numbers[number] = checked_number(f"{number} of {name}", getattr(strategy, number))
        return Step(name, numbers)

    @property
    def remembers(self) -> int:
        """How many numbers it remembers for each of the model's."""
        return {"": 0, "FedAvgM": 1}.get(self.strategy, 2)

    def take(self, row: Tensor, memory: Tensor, mean: Tensor, *, round: int) -> None:
        """Move `row` and its momenta, those of the first kind before the second's, in place; rounds count from 0."""
        moved, moment, by, own = row.numpy(), memory.numpy(), mean.numpy(), self.numbers
        if not self.strategy:
            moved += by
            return
        if self.strategy == "FedAvgM":
            moment *= max(own["server_momentum"], 0.0)
            moment += by
            moved += own["server_learning_rate"] * moment
            return
        first, second = np.split(moment, 2)
        first *= own["beta_1"]
        first += (1 - own["beta_1"]) * by
        square, rate = by * by, own["eta"]
        if self.strategy == "FedAdagrad":
            second += square
        elif self.strategy == "FedYogi":
            second -= (1 - own["beta_2"]) * square * np.sign(second - square)
        else:
            second *= own["beta_2"]
            second += (1 - own["beta_2"]) * square
            # As Flower corrects the bias: its rounds count from 1, and it takes one more.
            left = [1 - math.prod(repeat(own[name], round + 2)) for name in ("beta_1", "beta_2")]
            rate *= math.sqrt(left[1]) / left[0]
        moved += rate * first / (np.sqrt(second) + own["tau"])


@dataclass(frozen=True)
class AppSetup(Told):
    """One attempt at a run of an app, or at the evaluations that go with it: what every client is told, and holds the
    run's name to (`name`).

    Where clients hold the model: the digest of its `form`, whose `first` version it is, the version that this attempt
    begins with (`start`), and what moves it (`strategy` and `numbers` of a `Step`).
    """

    phase: Phase
    settings: Mapping[str, Any]
    size: int
    metrics: Metrics
    weighted_by: str
    form: str = ""
    first: str = ""
    start: int = 0
    strategy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> AppSetup:
        """A setup from what arrived; anything malformed is refused."""
        if len(text) > _MOST_TEXT:
            raise ProtocolError("a run's setup is too long")
        try:
            setup = AppSetup(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as reason:
            raise ProtocolError("a run's setup is malformed") from reason
        well = (
            setup.well_named
            and setup.phase in ("train", "evaluate")
            and isinstance(setup.settings, dict)
            and type(setup.size) is int
            and 0 <= setup.size < _MOST_NUMBERS
            and (setup.phase == "train" or setup.size == 0)
            and setup.metrics in METRICS
            and isinstance(setup.weighted_by, str)
            and isinstance(setup.form, str)
            and setup.first in ("", "server", "client")
            and is_count(setup.start)
            and isinstance(setup.strategy, str)
            and isinstance(setup.numbers, dict)
        )
        if not well:
            raise ProtocolError("a run's setup is malformed")
        return setup

    @property
    def name(self) -> str:
        """How the run's name begins: keys, masks and signatures are bound to it, so that clients who were told
        different things share nothing."""
        return f"{self.digest()}."

    @property
    def slots(self) -> int:
        """How many figures an upload holds."""
        return SLOTS if self.metrics == "average" else 0


@dataclass(frozen=True, eq=False)
class AgreedApp:
    """What follows from a setup: the same for everybody."""

    config: RunConfig
    scheme: Scheme
    cohort: Cohort
    step: Step

    @property
    def work(self) -> AppUpdate:
        """The app's training."""
        assert isinstance(self.scheme.work, AppUpdate)
        return self.scheme.work

    def training(self, trained: Callable[[Tensor], Tensor]) -> Scheme:
        """The scheme where the app trains."""
        return replace(self.scheme, work=replace(self.work, trained=trained))


def agreed_app(setup: AppSetup) -> AgreedApp:
    """The scheme and the cohorts of a setup; settings that contradict each other are refused."""
    config = RunConfig.from_mapping(setup.settings, where="the run's settings")
    if config.simulated_secrets:
        raise ConfigError("An app's run is no simulation: its secrets are the operating system's.")
    # Before anything is worked out: a plan for millions keeps a client busy for minutes.
    for name, most in (("clients", _MOST_CLIENTS), ("rounds", _MOST_ROUNDS)):
        if getattr(config, name) > most:
            raise ConfigError(f"{name} = {getattr(config, name):,} is more than a protected app's run has: {most:,}.")
    if config.sampling_rate is not None:
        raise ConfigError(
            f"{spelled('sampling_rate')} is none of a protected app's settings: its strategy says how many clients "
            "a round has."
        )
    if config.cohort is not None and config.clients * config.rounds > _MOST_DRAWN:
        raise ConfigError(
            f"clients × rounds = {config.clients * config.rounds:,} is more than cohorts are drawn for in a protected "
            f"app's run: {_MOST_DRAWN:,}."
        )
    # Evaluations have nothing but figures, whose averages the server reads.
    held = config.scheme in HELD and setup.phase == "train"
    if held and not (setup.form and setup.first):
        raise ProtocolError("a run's setup says nothing of the model that clients are to hold")
    info = scheme_info("secagg" if config.scheme in HELD and not held else config.scheme)
    nothing = Setting(make_loss("square"), Batches(0, 0), Schedule(1.0), rounds=config.rounds)
    cohort = Cohort.of(config.clients, cohort=config.cohort, seed=0)
    options = {name: value for name, value in config.scheme_options.items() if value is not None}
    if config.scheme not in (info.name, PADS):
        # Of a scheme whose updates travel otherwise: how masks are made, and not the range of numbers without weight.
        options = {name: value for name, value in options.items() if name in info.declared and name != "value_range"}
    scheme, cohort = attended(info, nothing, options, cohort=cohort, simulation=False)
    if setup.metrics == "average" and scheme.plan is not None:
        raise ProtocolError("a run's setup averages metrics under a scheme that has noise")
    scheme.uplink.fits(cohort.size)
    public = held and setup.first == "server"
    scheme = fitted(scheme, size=setup.size, slots=setup.slots, public=public)
    return AgreedApp(config, scheme, cohort, Step(setup.strategy, setup.numbers))


def told_of(config: RunConfig) -> dict[str, Any]:
    """What clients are told of a run's settings: what is not a default."""
    names = ("scheme", "clients", "cohort", "rounds", "secrets")
    given = {**{name: getattr(config, name) for name in names}, **config.scheme_options}
    return {name: value for name, value in given.items() if value is not None}


def covered_by(scheme: str, options: Mapping[str, Any], clients: int | None) -> Metrics:
    """What becomes of figures where nobody says; a mistake in the options is named at once."""
    least = max(clients or 0, fewest(scheme), 3)
    config = settings_for(scheme, options, clients=least, cohort=least, rounds=1)
    tried = AppSetup("0" * 32, 0, "train", told_of(config), 1, "drop", "", form="-", first="server")
    agreed = agreed_app(tried)
    agreed.scheme.uplink.prepare()
    return "average" if agreed.scheme.plan is None else "drop"


@lru_cache(maxsize=1)
def no_model() -> tuple[Architecture, Weights]:
    """The architecture and weights of nothing: the app's model is the app's own."""
    return draw(nn.Identity(), torch.zeros(1, 1), traced=False)


# --- a Flower app's records as numbers in a row, and back. What arrives is data: held to its form before it is used

Reals = NDArray[np.float64]
_NUMBERS = "fiub"
_MOST_NAMES = 64
MOST_EXAMPLES = 2.0**28
_SUPERLINK = 1
"""The number of the node from which messages come, in Flower."""


class FormError(ProtocolError):
    """An app's records have another form than they should."""

    code = Code.FORM


@dataclass(frozen=True, eq=False)
class AppModel:
    """The arrays of a model in one row, in float64; `record` is what they were read from."""

    record: ArrayRecord
    row: Reals

    @staticmethod
    def read(record: ArrayRecord) -> AppModel:
        """An ArrayRecord's numbers; arrays of anything else are refused, by name."""
        parts = []
        for name, array in record.items():
            try:
                numbers = array.numpy()
            except Exception as reason:
                raise FormError(f"the array {name!r} cannot be read") from reason
            if numbers.dtype.kind not in _NUMBERS:
                raise FormError(f"the array {name!r} holds {numbers.dtype}, and numbers are averaged")
            parts.append(numbers.astype(np.float64).reshape(-1))
        return AppModel(record, np.concatenate(parts) if parts else np.zeros(0))

    @property
    def form(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in order."""
        return [(name, tuple(array.shape)) for name, array in self.record.items()]

    def moved(self, by: Reals) -> ArrayRecord:
        """The arrays after an update; floating ones keep their type, others become float64, as in Flower's own mean."""
        arrays, place, row = {}, 0, self.row + by
        for name, old in self.record.items():
            count = math.prod(old.shape)
            numbers = row[place : place + count].reshape(tuple(old.shape))
            kept = np.dtype(old.dtype)
            arrays[name] = Array(np.asarray(numbers.astype(kept) if kept.kind == "f" else numbers))
            place += count
        return ArrayRecord(arrays)


def told_with(message: Message, context: Context, *more: bytes) -> bytes:
    """The digest of all that an app is told: the message's type and records, in their order and of their types, arrays
    with their numbers included, and the run's numbers and configuration, which are the SuperLink's word.

    Masks are bound to it. A server that told all but one to learn nothing, or gave that one another model, would read
    it off the sum. What a message has besides never reaches the app (`for_app`).
    """
    of_run = (context.run_id, context.series_id, sorted(context.run_config.items()))
    digest = hashlib.sha256(b"fedveil app told 2" + repr((message.metadata.message_type, of_run)).encode())
    for name, record in message.content.items():
        arrays = record if isinstance(record, ArrayRecord) else {}
        held = list(arrays) if isinstance(record, ArrayRecord) else list(record.items())
        digest.update(repr((name, type(record).__name__, held)).encode())
        for array in arrays.values():
            digest.update(repr((array.dtype, tuple(array.shape), array.stype, len(array.data))).encode())
            digest.update(array.data)
    for part in more:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def for_app(message: Message, context: Context, *, round: int) -> Message:
    """What an app is given of a message: its type and records in an envelope of this client's own, in which nothing is
    the server's word but what masks are bound to; rounds count from 0 here, and from 1 in Flower."""
    # Flower keeps no order of these, so that masks cannot be bound to one: every app sees the same.
    context.run_config = dict(sorted(context.run_config.items()))
    envelope = Metadata(
        run_id=context.run_id,
        message_id="",
        src_node_id=_SUPERLINK,
        dst_node_id=context.node_id,
        reply_to_message_id="",
        group_id=str(round + 1),
        created_at=time.time(),
        ttl=DEFAULT_TTL,
        message_type=message.metadata.message_type,
    )
    given: Message = Message(message.content, metadata=envelope)  # type: ignore[call-overload]
    return given


def only_arrays(content: RecordDict) -> ArrayRecord:
    """The one ArrayRecord of a message."""
    if len(content.array_records) != 1:
        raise FormError(f"a message of the app holds {len(content.array_records)} ArrayRecords, and one is averaged")
    return next(iter(content.array_records.values()))


def update_between(received: AppModel, reply: RecordDict) -> Tensor:
    """trained − received, in a row; an app that replies in another form is refused."""
    trained = AppModel.read(only_arrays(reply))
    if trained.form != received.form:
        raise FormError("the app replies with other arrays, by name, shape or order, than it was sent")
    return torch.from_numpy(trained.row - received.row)


def only_metrics(content: RecordDict) -> dict[str, float]:
    """The figures of an app's reply: single numbers, since a list may hold a whole update."""
    if len(content.metric_records) != 1:
        raise FormError(f"the app replies with {len(content.metric_records)} MetricRecords, and one is expected")
    figures: dict[str, float] = {}
    for name, value in next(iter(content.metric_records.values())).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FormError(f"the metric {name!r} is no single number: a list may hold a whole update")
        figures[name] = value
    if len(figures) > _MOST_NAMES:
        raise FormError(f"the app reports {len(figures)} metrics, and at most {_MOST_NAMES} leave")
    return figures


def figures_alone(message: Message, reply: Message) -> Message:
    """An app's reply to a message that is not about training: its figures, and nothing that could hold an update."""
    if reply.content.array_records or reply.content.config_records:
        kind = message.metadata.message_type.partition(".")[0]
        raise FormError(f"the app's reply to a {kind} message holds more than metrics, which alone leave")
    figures = only_metrics(reply.content)
    (name,) = reply.content.metric_records
    return Message(RecordDict({name: metric_record(figures)}), reply_to=message)


def weight_in(figures: dict[str, float], key: str, *, most: float) -> float:
    """How many examples an app trained on: what its update weighs."""
    if key not in figures:
        raise FormError(f"the app's metrics name no {key!r}, by which its update is weighted")
    weight = float(figures[key])
    if not 0 < weight <= most:
        raise FormError(f"{key!r} must be positive and at most {most:g}, not {weight:g}")
    return weight


def metric_record(figures: Mapping[str, float]) -> MetricRecord:
    """Figures as Flower carries them."""
    return MetricRecord({name: value for name, value in figures.items()})  # noqa: C416 (of Flower's own type)


def metrics_of(record: MetricRecord | None) -> dict[str, float]:
    """What came of an app's figures with an answer; anything but single numbers is left out."""
    if record is None:
        return {}
    return {
        name: value
        for name, value in list(record.items())[:_MOST_NAMES]
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
