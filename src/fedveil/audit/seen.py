"""From a record to views: exactly what each role saw."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from torch import Tensor

from fedveil.audit.record import Entry, Record
from fedveil.audit.views import (
    ClientView,
    Message,
    Messages,
    Opened,
    OutsiderView,
    ServerHistory,
    ServerView,
    weights_from,
)
from fedveil.downlink.blueprint import Weights
from fedveil.errors import ConfigError
from fedveil.protocol.directory import Announce
from fedveil.protocol.messages import Upload
from fedveil.protocol.stored import from_stored
from fedveil.protocol.wire import decode


def client_view(record: Record, client: int, *, data: tuple[Tensor, Tensor] | None = None) -> ClientView:
    """Everything that was sent to `client` in the recorded rounds; `data` are its own samples."""
    _check_client(record, client)
    sent = (one for one in record.entries if one.kind in ("request", "private") and client in one.to)
    x, y = (None, None) if data is None else data
    return ClientView(record.facts, client, _read(record, sent), x, y)


def outsider_view(record: Record) -> OutsiderView:
    """Every recorded message, both ways."""
    return OutsiderView(
        record.facts, _read(record, (one for one in record.entries if one.kind in ("request", "private", "reply")))
    )


def server_view(
    record: Record,
    victim: int,
    *,
    round: int,
    attempt: int | None = None,
    colluders: Collection[int] = (),
    labels: Tensor | None = None,
) -> ServerView:
    """What the server saw of `victim` in a round, with what `colluders` tell it.

    `attempt` is the last recorded one by default. Colluders have to be recorded clients.
    """
    _check_client(record, victim)
    attempt = _last_attempt(record, round) if attempt is None else attempt
    here = record.find(round=round, attempt=attempt)
    # What went to others alone is the server's too, but says nothing about the victim.
    seen = (one for one in here if one.kind == "request" or (one.kind in ("private", "reply") and one.client == victim))
    view = ServerView(
        record.facts,
        round,
        attempt,
        victim,
        _read(record, seen),
        _weights(record, here),
        _opened(record, here, "recovered", victim),
        _opened(record, here, "opened", None),
        _samples(record, here, victim),
        labels,
    )
    return _with_colluders(record, view, here, colluders) if colluders else view


def server_history(
    record: Record, victim: int, *, colluders: Collection[int] = (), labels: Tensor | None = None
) -> ServerHistory:
    """Every recorded round from which an upload of `victim` came, in order, whatever the attempt."""
    uploads = record.find(kind="reply", phase="train", client=victim)
    return ServerHistory(
        tuple(
            server_view(record, victim, round=one.round, attempt=one.attempt, colluders=colluders, labels=labels)
            for one in uploads
        )
    )


def _with_colluders(record: Record, view: ServerView, here: Iterable[Entry], colluders: Collection[int]) -> ServerView:
    """The upload less what each colluder shares with the victim; masks are words modulo 2⁶⁴ and wrap around.

    Recovery is linear in the upload, so the gradient loses what became of the shared part, over n_k.
    """
    if view.victim in colluders:
        raise ConfigError(f"Client {view.victim} cannot be both the victim and a colluder.")
    for one in colluders:
        _check_client(record, one)
    upload, recovered = view.upload, view.recovered
    if upload is None:
        return replace(view, colluders=tuple(sorted(colluders)))
    uncovered = upload.clone()
    for entry in here:
        ends = (entry.client, entry.peer)
        if entry.kind != "shared" or view.victim not in ends or not set(ends) <= {view.victim, *colluders}:
            continue
        _, tensors = from_stored(record.read(entry))
        sign = 1 if entry.client == view.victim else -1
        uncovered -= sign * tensors["upload"].to(uncovered.dtype)
        if recovered is not None and view.samples:
            gradient = recovered.gradient - sign * tensors["gradient"] / view.samples
            recovered = Opened(gradient, recovered.loss, recovered.statistics)
    return replace(view, colluders=tuple(sorted(colluders)), uncovered=uncovered, recovered=recovered)


def _read(record: Record, entries: Iterable[Entry]) -> Messages:
    return tuple(Message(one.round, one.attempt, one.phase, one.kind, one.client, record.read(one)) for one in entries)


def _weights(record: Record, here: Iterable[Entry]) -> Weights | None:
    for one in here:
        if one.kind == "weights":
            return weights_from(from_stored(record.read(one))[1])
    return None


def _opened(record: Record, here: Iterable[Entry], kind: str, client: int | None) -> Opened | None:
    for one in here:
        if one.kind == kind and one.client == client:
            fields, tensors = from_stored(record.read(one))
            return Opened(tensors["gradient"], fields["loss"], tensors["statistics"])
    return None


def _samples(record: Record, here: Iterable[Entry], victim: int) -> int | None:
    """n_k, as the server learnt it: announced before the first round, or beside the upload's gradients."""
    for one in record.find(kind="reply", client=victim, round=0):
        said = decode(record.read(one))
        if isinstance(said, Announce):
            return said.samples
    if not record.facts.readable:
        return None
    for one in here:
        if one.kind == "reply" and one.phase == "train" and one.client == victim:
            said = decode(record.read(one))
            if isinstance(said, Upload):
                return round(float(record.facts.contributed(said.payload)["weight"]))
    return None


def _last_attempt(record: Record, round: int) -> int:
    attempts = [attempt for one, attempt in record.rounds if one == round]
    if not attempts:
        known = ", ".join(str(one) for one in sorted({one for one, _ in record.rounds}))
        raise ConfigError(f"Round {round} was not recorded; recorded are the rounds {known or 'none'}.")
    return max(attempts)


def _check_client(record: Record, client: int) -> None:
    if client not in record.clients:
        known = ", ".join(map(str, record.clients))
        raise ConfigError(f"Client {client} was not recorded; recorded are the clients {known or 'none'}.")
