"""Where the clients of an app hold its model (`scheme="pads"` or `"paraaegis"`): what that takes on both sides.

The roles are those of `client_held`. A model is its arrays in one row, in float64; what the server sends an app in
their place is their *form*, names, shapes and types, without a number. The row that a run begins with is version 0:

    first = "server"    public: the arrays that `start` was given, sent with the first round
    first = "client"    secret: a client makes it (`protect(first=…)`) and lends it to the others, sealed

Under `pads` a round's sum stays under pads, so that each client moves its own row: weighted sum / weight. The sum of
what stands behind the update (figures, what was cut off, the weight) has no pad, and is all that the server reads.
Under `paraaegis` nothing stands behind it, and each client puts the mean together from what is hidden and the rest.

A mean moves the row by the step of the run's strategy (`app_setup.Step`): as it is, or as FedAdam and the like would
have. What such a step remembers is kept beside the row, lent with it, and in the digest that masks are bound to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from safetensors.numpy import save
from torch import Tensor

from fedveil.client_held.client import HolderRole, Keeper
from fedveil.client_held.messages import Borrowed
from fedveil.client_held.server import RelayRole
from fedveil.downlink.architecture import Architecture, Weights
from fedveil.downlink.messages import Recovered
from fedveil.errors import Code, ConfigError, ProtocolError
from fedveil.flower.app_setup import AgreedApp, AppModel, AppSetup, FormError, Step, no_model
from fedveil.protocol.client_state import ClientState, Held, Pending
from fedveil.protocol.messages import Aggregate, Request
from fedveil.roles.server import Mover, Optimiser
from fedveil.runs.folder import write_atomically
from fedveil.tensors import raw
from fedveil.work.batches import Schedule

First = Literal["server", "client"]
FIRST: tuple[First, ...] = get_args(First)
_TYPE = "numpy.ndarray"
_BEHIND = -1


class NoModelError(ConfigError):
    """Something that needs the model, asked of a server that holds none."""

    def __init__(self, what: str, instead: str) -> None:
        held = "where clients hold the model the server never holds the model's numbers"
        super().__init__(f"{what}, and {held}: {instead}.")


# --- the form of a model


def form_of(record: ArrayRecord) -> ArrayRecord:
    """Names, shapes and types of arrays, without their numbers."""
    empty = {
        name: Array(dtype=array.dtype, shape=tuple(array.shape), stype=_TYPE, data=b"")
        for name, array in record.items()
    }
    return ArrayRecord(empty)


def form_digest(record: ArrayRecord) -> str:
    """What everybody's model has in common with this one, in a run's settings."""
    listed = [[name, array.dtype, list(array.shape)] for name, array in record.items()]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def check_form(record: ArrayRecord, setup: AppSetup) -> None:
    """Refuse arrays of another form than the run's."""
    if form_digest(record) != setup.form:
        raise FormError("arrays have other names, shapes or types than those of the run's model")


def filled(form: ArrayRecord, row: Tensor, *, moved: bool) -> ArrayRecord:
    """A row in its form; once it has `moved`, what is not floating is float64, as in Flower's own mean."""
    arrays, place, numbers = {}, 0, row.numpy()
    for name, old in form.items():
        count = int(np.prod(old.shape, dtype=np.int64))
        part, kind = numbers[place : place + count].reshape(tuple(old.shape)), np.dtype(old.dtype)
        arrays[name] = Array(part.astype(np.float64 if moved and kind.kind != "f" else kind))
        place += count
    if place != len(numbers):
        raise FormError(f"a form of {place} numbers came in a run of a model of {len(numbers)}")
    return ArrayRecord(arrays)


def write_model(path: Path, arrays: ArrayRecord) -> None:
    """A client's own copy of the model: a safetensors file of its arrays by name."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = save({name: np.asarray(array.numpy(), order="C") for name, array in arrays.items()})
    write_atomically(path, content, mode=0o600)


# --- a client


def begun(row: Tensor, remembered: Tensor) -> Held:
    """Version 0, and what the step remembers. Masks are bound to the digest of both: clients who were given different
    ones have no sum."""
    nothing = torch.empty(0, dtype=torch.float64)
    digest = hashlib.sha256(b"fedveil app model 1")
    digest.update(raw(row).data)
    digest.update(raw(remembered).data)
    return Held(Weights(row, nothing, nothing, {}), remembered, transcript=digest.digest())


def first_model(record: ArrayRecord, step: Step) -> Held:
    """The version 0 that arrays are."""
    row = torch.from_numpy(AppModel.read(record).row)
    return begun(row, torch.zeros(len(row) * step.remembers, dtype=torch.float64))


def behind(size: int, step: Step) -> Held:
    """What a client has that holds no model yet: it refuses to train on this, and is lent one.

    It has the shape of one and takes no memory: `size` is the server's word.
    """
    nothing, zero = torch.empty(0, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    weights = Weights(zero.expand(size), nothing, nothing, {})
    return Held(weights, zero.expand(size * step.remembers), version=_BEHIND)


class _Stepping(Mover):
    """Moves a row by a round's mean, as a strategy's step has it."""

    def __init__(self, architecture: Architecture, optimiser: Optimiser, step: Step) -> None:
        super().__init__(architecture, optimiser)
        self._step = step

    def move(self, weights: Weights, velocity: Tensor, recovered: Recovered, *, round: int) -> None:
        self._step.take(weights.parameters, velocity, recovered.gradient, round=round)


class _AppKeeper(Keeper):
    """A client's way with an app's model."""

    def __init__(self, *parts: Any, step: Step, **how: Any) -> None:
        super().__init__(*parts, **how)
        self._mover = _Stepping(self._terms.architecture, how["optimiser"], step)

    def brought_up(
        self, state: ClientState, version: int, latest: Aggregate | None, private: Request | None
    ) -> ClientState:
        unmoved = state.held is None or state.held.version <= 0
        if version == 0 and unmoved and isinstance(private, Borrowed):
            # Whoever has made a first model, and was not heard, gives way to the one that was; in a resumed run, who
            # was lent a false one before it ended. There another's word takes the place of a client's own work.
            return replace(state, held=self._borrowed(state, private, version), pending=None)
        return super().brought_up(state, version, latest, private)

    def _borrowed(self, state: ClientState, lent: Borrowed, version: int) -> Held:
        held = super()._borrowed(state, lent, version)
        if version == 0 and held.transcript != begun(held.weights.parameters, held.velocity).transcript:
            raise ProtocolError("a first model was lent under another's digest")
        return held

    def _recovered(self, state: ClientState, latest: Aggregate, pending: Pending) -> Recovered:
        recovered = super()._recovered(state, latest, pending)
        if self._terms.divisible:  # under noise every client weighs the same
            return recovered
        sums, size = recovered.gradient, len(self._start.weights.parameters)
        weight = float(sums[-1])
        if weight < 0:
            raise ProtocolError("weights add up to less than nothing")
        # Where nobody's update was finite, nothing has moved.
        mean = sums[:size] / weight if weight else torch.zeros(size, dtype=torch.float64)
        return replace(recovered, gradient=mean)


class AppHolder(HolderRole):
    """A client of an app that holds the model; `start` is version 0, or what stands for none."""

    def __init__(self, agreed: AgreedApp, start: Held, *, trained: Callable[[Tensor], Tensor], **own: Any) -> None:
        self._step = agreed.step
        scheme, optimiser = agreed.training(trained), Optimiser(Schedule(1.0))
        super().__init__(scheme, no_model()[0], start=start, optimiser=optimiser, **own)

    @property
    def _keeps(self) -> Callable[..., Keeper]:
        return partial(_AppKeeper, step=self._step)


# --- the server


class AppRelay(RelayRole):
    """The server: it relays sums, and reads of each what has no pad."""

    def __init__(self, agreed: AgreedApp, state: Any, *, born: bool, **run: Any) -> None:
        """`born`: whether there is a model to begin with; if not, the first client that is asked makes it."""
        super().__init__(agreed.scheme, no_model()[0], state, **run)
        self._work, self._born = agreed.work, born
        self._largest_loan = 8 * self._work.size * (1 + agreed.step.remembers) + (1 << 20)
        if not born:
            self._holding = dict.fromkeys(range(agreed.config.clients), _BEHIND)

    @property
    def version(self) -> int:
        """How many sums have brought the model here."""
        return self._version

    def miss(self, clients: Sequence[int]) -> None:
        """Lend the model to clients that are not known to hold it."""
        self._holding.update(dict.fromkeys(clients, _BEHIND))

    def _lenders(self) -> list[int]:
        lenders = super()._lenders()
        unborn = not self._born and self._version == 0
        return lenders or (list(self._group.members) if unborn else [])

    def read(self, aggregate: Aggregate) -> Tensor:
        """The sum of what stands behind the updates."""
        return self._uplink.bare(aggregate, samples=len(aggregate.asked))  # everybody has announced one

    def _check_sums(self, sums: Aggregate) -> None:
        if self._work.behind and float(self.read(sums)[-1]) < 0:
            raise ProtocolError("the uploads' weights add up to less than nothing", code=Code.IMPLAUSIBLE)
