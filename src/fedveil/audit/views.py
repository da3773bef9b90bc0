"""What everybody in a run knows: architecture, loss, batch size, and how contributions travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import fedveil.client_held.ciphers
import fedveil.client_held.group
import fedveil.client_held.messages
import fedveil.uplink.lwe
import fedveil.uplink.masked
import fedveil.uplink.noised
import fedveil.uplink.threshold  # noqa: F401
from fedveil import models
from fedveil.downlink.architecture import Architecture, Weights, assemble, draw
from fedveil.downlink.messages import Broadcast
from fedveil.errors import CheckpointError, ConfigError, ProtocolError
from fedveil.models.catalogue import MOST_PARAMETERS
from fedveil.own_code import OwnCode
from fedveil.plain import made
from fedveil.protocol.codec import as_bytes, decode, from_stored
from fedveil.protocol.messages import Reply, Request, Train, Upload
from fedveil.tensors import Layout
from fedveil.work.losses import Loss, make_loss

Sections = tuple[tuple[str, tuple[int, ...]], ...]

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run's public facts, as plain data.

    `parameters` are the model's tensors in the order in which flat vectors hold them, `contribution` the
    sections of one client's upload before it is protected. `readable` says whether the server sees uploads
    one by one, `returns` whether they are a gradient or an update. `batch_size` 0 means all samples.
    """

    scheme: str
    uplink: str
    readable: bool
    model: str | None
    options: dict[str, int | float | str | bool]
    input_shape: tuple[int, ...]
    input_dtype: str
    outputs: int
    task: str
    vocabulary: int | None
    parameters: Sections
    contribution: Sections
    traced: bool
    returns: str
    loss: str
    target_scale: float
    true_weight: float
    batch_size: int
    local_steps: int | None
    local_epochs: int | None
    lr: float
    dtype: str
    class_weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0

    def batch_of(self, samples: int) -> int:
        """The batch size of a client with `samples` samples."""
        return samples if self.batch_size == 0 else min(self.batch_size, samples)

    def whole(self, upload: Upload) -> Tensor:
        """An upload as one vector, with zeros for what was not sent of it."""
        return upload.dense(Layout(self.contribution).length)

    def contributed(self, vector: Tensor) -> dict[str, Tensor]:
        """The named sections of an upload: n_k × (gradients, values, statistics), and n_k as weight."""
        return Layout(self.contribution).split(vector)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat vector of parameters or gradients, as named tensors."""
        return Layout(self.parameters).split(flat)

    def module(self, *, seed: int = 0) -> nn.Module:
        """The architecture with parameters that say nothing about the run's."""
        if self.model is None:
            raise ConfigError(
                "This run's model came as a Python object, which a record does not hold: audit a run whose model has a "
                "name (your own package.module:factory will do)."
            )
        return models.build(
            self.model,
            input_shape=self.input_shape,
            outputs=self.outputs,
            seed=seed,
            vocabulary=self.vocabulary,
            **self.options,
        )

    def architecture(self, family: str = "scale", *, streams: bool = False) -> Architecture:
        """The architecture as both roles of the run had it; `family` is what a veil's symmetries are traced for, with
        `streams` those of rotated streams too."""
        return self._architecture if family == "scale" else self._traced(family, streams=streams)

    @cached_property
    def _architecture(self) -> Architecture:
        # An audit asks for it with every view, and tracing a model takes longer than most of what it is asked for.
        return self._traced("scale")

    def _traced(self, family: str, *, streams: bool = False) -> Architecture:
        example = torch.zeros((2, *self.input_shape), dtype=_DTYPES[self.input_dtype])
        model = self.module().to(_DTYPES[self.dtype]).train()
        architecture, _ = draw(model, example, traced=self.traced, family=family, streams=streams)
        if architecture.parameters.sections != self.parameters:
            raise ConfigError(f"The model {self.model!r} is not the one this run had: its parameters differ.")
        return architecture

    def objective(self) -> Loss:
        """The training loss."""
        return make_loss(
            self.loss,
            target_scale=self.target_scale,
            true_weight=self.true_weight,
            class_weights=self.class_weights,
            smoothing=self.label_smoothing,
        )

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @staticmethod
    def from_data(data: dict[str, Any]) -> Facts:
        """The facts back; anything else is refused."""
        facts = made(Facts, data, where="The facts of a record")
        known = facts.input_dtype in _DTYPES and facts.dtype in _DTYPES and facts.returns in ("gradient", "update")
        sizes = (size for _, shape in (*facts.parameters, *facts.contribution) for size in shape)
        if not known or not all(0 <= size <= MOST_PARAMETERS for size in sizes):
            raise CheckpointError("The facts of a record are damaged: a type or a size cannot be.")
        return facts


# Whatever may have been recorded has to be known to `decode`.


@dataclass(frozen=True, eq=False)
class Message:
    """One message as it was on the wire. Rounds count from 1; round 0 is what belongs to none."""

    round: int
    attempt: int
    phase: str
    kind: str
    client: int | None
    raw: bytes

    def opened(self) -> Request | Reply:
        """What it says."""
        message: Request | Reply = decode(self.raw)
        return message


Messages = tuple[Message, ...]


@dataclass(frozen=True, eq=False)
class Sent:
    """The model of one round as it was sent to clients."""

    round: int
    attempt: int
    broadcast: Broadcast


def broadcasts_in(messages: Messages) -> tuple[Sent, ...]:
    """Every model among the messages, in order."""
    opened = (
        (message, message.opened()) for message in messages if message.phase == "train" and message.kind == "request"
    )
    return tuple(
        Sent(message.round, message.attempt, said.broadcast) for message, said in opened if isinstance(said, Train)
    )


@dataclass(frozen=True, eq=False)
class ClientView:
    """What a client saw: everything that was sent to it, and its own samples, where they are given."""

    facts: Facts
    client: int
    messages: Messages
    x: Tensor | None = None
    y: Tensor | None = None
    known: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def broadcasts(self) -> tuple[Sent, ...]:
        """Every model it was sent."""
        return broadcasts_in(self.messages)


@dataclass(frozen=True, eq=False)
class OutsiderView:
    """What somebody on the wire saw: messages both ways, and no secret."""

    facts: Facts
    messages: Messages
    known: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def broadcasts(self) -> tuple[Sent, ...]:
        """Every model that passed."""
        return broadcasts_in(self.messages)

    def uploads_of(self, client: int) -> tuple[Upload, ...]:
        """Every upload of one client that passed."""
        opened = (message.opened() for message in self.messages if message.kind == "reply" and message.client == client)
        return tuple(said for said in opened if isinstance(said, Upload))


@dataclass(frozen=True, eq=False)
class Opened:
    """What the server made of uploads: the true gradient (a mean over samples), loss and batch statistics."""

    gradient: Tensor
    loss: float | None
    statistics: Tensor


@dataclass(frozen=True, eq=False)
class ServerView:
    """What the server saw of one client in one round, and what it knew.

    `messages` are the round's: what was sent, and what the victim answered. `weights` are the server's own
    before the round. `recovered` is what it computes from the victim's upload alone (None where it cannot read
    one), `summed` from the sum of all. With `colluders`, `uncovered` is the upload less what they share with
    the victim, and `recovered` is computed from that. `samples` is what the victim announced or sent,
    `labels` are known only if the auditor says so.
    """

    facts: Facts
    round: int
    attempt: int
    victim: int
    messages: Messages
    weights: Weights | None
    recovered: Opened | None
    summed: Opened | None
    samples: int | None
    labels: Tensor | None = None
    colluders: tuple[int, ...] = ()
    uncovered: Tensor | None = None
    known: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def upload(self) -> Tensor | None:
        """The victim's upload as it was received: numbers, or words under masks; None if none came."""
        for message in self.messages:
            said = message.opened() if message.kind == "reply" and message.phase == "train" else None
            if isinstance(said, Upload):
                return self.facts.whole(said)
        return None

    @property
    def broadcast(self) -> Broadcast | None:
        """The model the server sent."""
        sent = broadcasts_in(self.messages)
        return sent[0].broadcast if sent else None

    def model(self) -> nn.Module:
        """The server's own model before the round, as it works, in training mode."""
        if self.weights is None:
            raise ConfigError(f"The server of {self.facts.scheme} holds no model: it only relays.")
        return assemble(self.facts.architecture(), self.weights).train()

    @property
    def batch_size(self) -> int | None:
        """How many samples the victim's gradient is of."""
        return None if self.samples is None else self.facts.batch_of(self.samples)


@dataclass(frozen=True, eq=False)
class ServerHistory:
    """What the server saw of one client over several rounds."""

    rounds: tuple[ServerView, ...]


View = ClientView | OutsiderView | ServerView | ServerHistory


def to_bytes(view: View) -> bytes:
    """Fields as JSON, then tensors and wire bytes; nothing executable.

    Views pass from the auditor's process to an attack's and lie nowhere. So they say whether the auditor vouches for
    code that builds the model, which files cannot.
    """
    if isinstance(view, ServerHistory):
        parts = {f"view.{place}": _as_tensor(to_bytes(round)) for place, round in enumerate(view.rounds)}
        return as_bytes({"view": "history", "count": len(view.rounds)}, parts)
    fields: dict[str, Any] = {
        "facts": view.facts.as_data(),
        "vouched": isinstance(view.facts.model, OwnCode),
        "messages": [_envelope(message) for message in view.messages],
    }
    tensors = {f"message.{place}": _as_tensor(message.raw) for place, message in enumerate(view.messages)}
    tensors |= {f"known.{name}": tensor for name, tensor in view.known.items()}
    if isinstance(view, ClientView):
        fields |= {"view": "client", "client": view.client}
        tensors |= _given({"x": view.x, "y": view.y})
    elif isinstance(view, OutsiderView):
        fields |= {"view": "outsider"}
    else:
        fields |= {
            "view": "server",
            "round": view.round,
            "attempt": view.attempt,
            "victim": view.victim,
            "samples": view.samples,
            "colluders": view.colluders,
        }
        tensors |= _given({"labels": view.labels, "uncovered": view.uncovered})
        if view.weights is not None:
            tensors |= view.weights.named("weights.")
        for name, opened in (("recovered", view.recovered), ("summed", view.summed)):
            if opened is not None:
                fields[name] = opened.loss
                tensors |= {f"{name}.gradient": opened.gradient, f"{name}.statistics": opened.statistics}
    return as_bytes(fields, tensors)


def from_bytes(data: bytes) -> View:
    """The view back; anything else is refused."""
    fields, tensors = from_stored(data)
    kind = str(fields.get("view"))
    if kind not in _READERS:
        raise ProtocolError("these bytes are no view of a run")
    try:
        return _READERS[kind](fields, tensors)
    except (KeyError, TypeError, ValueError) as reason:
        raise ProtocolError(f"a view is damaged: {reason}") from reason


def _envelope(message: Message) -> list[Any]:
    return [message.round, message.attempt, message.phase, message.kind, message.client]


def _messages(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Messages:
    raw = (tensors[f"message.{place}"].numpy().tobytes() for place in range(len(fields["messages"])))
    return tuple(
        Message(round, attempt, phase, kind, client, content)
        for (round, attempt, phase, kind, client), content in zip(fields["messages"], raw, strict=True)
    )


def _facts(fields: Mapping[str, Any]) -> Facts:
    facts = Facts.from_data(fields["facts"])
    return replace(facts, model=OwnCode(facts.model)) if fields["vouched"] and facts.model is not None else facts


def _client(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> View:
    return ClientView(
        _facts(fields),
        fields["client"],
        _messages(fields, tensors),
        tensors.get("x"),
        tensors.get("y"),
        _under("known", tensors),
    )


def _outsider(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> View:
    return OutsiderView(_facts(fields), _messages(fields, tensors), _under("known", tensors))


def _server(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> View:
    return ServerView(
        _facts(fields),
        fields["round"],
        fields["attempt"],
        fields["victim"],
        _messages(fields, tensors),
        weights_from(_under("weights", tensors)),
        _opened("recovered", fields, tensors),
        _opened("summed", fields, tensors),
        fields["samples"],
        tensors.get("labels"),
        tuple(fields["colluders"]),
        tensors.get("uncovered"),
        _under("known", tensors),
    )


def _history(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> View:
    views = [from_bytes(tensors[f"view.{place}"].numpy().tobytes()) for place in range(fields["count"])]
    return ServerHistory(tuple(view for view in views if isinstance(view, ServerView)))


_READERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Tensor]], View]] = {
    "client": _client,
    "outsider": _outsider,
    "server": _server,
    "history": _history,
}


def _opened(name: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Opened | None:
    if f"{name}.gradient" not in tensors:
        return None
    return Opened(tensors[f"{name}.gradient"], fields[name], tensors[f"{name}.statistics"])


def weights_from(tensors: Mapping[str, Tensor]) -> Weights | None:
    """A model's values from named tensors; None where there are none."""
    if "parameters" not in tensors:
        return None
    return Weights.from_named(tensors)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}


def _given(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _as_tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
