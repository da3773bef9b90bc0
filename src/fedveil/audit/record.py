"""A record on disk: what passed, byte by byte, under an index that only grows.

index.jsonl     one line per piece: round, attempt, phase, kind, client, and where its bytes lie
messages.bin    the wire bytes, one message after the other
secrets.bin     what the server and clients knew beside them: for audits, and for nobody else
facts.json      what everybody knew
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch import Tensor

from fedveil.audit.views import (
    ClientView,
    Facts,
    Message,
    Messages,
    Opened,
    OutsiderView,
    ServerHistory,
    ServerView,
    weights_from,
)
from fedveil.client_held.messages import Begin, Divide
from fedveil.downlink.architecture import Architecture, Weights
from fedveil.downlink.messages import Broadcast, Downlink, Mean, Recovered, Veil
from fedveil.errors import CheckpointError, ConfigError, naming, spelled
from fedveil.own_code import refuse_code
from fedveil.plain import made, numbers_of, parsed, read_named, read_raw
from fedveil.protocol.codec import as_bytes, decode, encode, from_stored
from fedveil.protocol.directory import Announce
from fedveil.protocol.messages import Train, Upload
from fedveil.protocol.parts import RoundContext, Scheme, Terms
from fedveil.protocol.phases import Heard
from fedveil.secrets import Guarded, SecretStream

MESSAGES = ("request", "private", "reply")
SECRETS = ("weights", "recovered", "opened", "shared")
_INDEX, _FACTS = "index.jsonl", "facts.json"


@dataclass(frozen=True)
class RecordEntry:
    """One piece of a record. Rounds count from 1; round 0 is what belongs to none (introductions).

    Kinds of messages: request (to all of `to`), private (part of a request for one client), reply. Kinds of
    secrets: weights (the server's, before the round), recovered (what the server makes of one upload), opened
    (what it makes of the sum), shared (what of `client`'s upload `peer` knows).
    """

    round: int
    attempt: int
    phase: str
    kind: str
    client: int | None
    peer: int | None
    to: tuple[int, ...]
    offset: int
    length: int
    digest: str

    @property
    def file(self) -> str:
        """Which file holds its bytes."""
        return "messages.bin" if self.kind in MESSAGES else "secrets.bin"


class RecordWriter:
    """Appends to a record. Bytes are written before the line that names them: a kill leaves whole pieces."""

    def __init__(self, folder: Path, facts: Facts) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        index = folder / _INDEX
        if index.exists():
            _drop_torn_line(index)
        fresh = folder / f".{_FACTS}.{os.getpid()}.tmp"
        fresh.write_text(json.dumps(facts.as_data(), indent=2) + "\n", encoding="utf-8")
        fresh.replace(folder / _FACTS)
        self._index = _appended(index)
        self._files = {name: _appended(folder / name) for name in ("messages.bin", "secrets.bin")}

    def add(
        self,
        content: bytes,
        *,
        round: int,
        attempt: int,
        phase: str,
        kind: str,
        client: int | None = None,
        peer: int | None = None,
        to: tuple[int, ...] = (),
    ) -> None:
        """Append one piece."""
        digest = hashlib.sha256(content).hexdigest()
        entry = RecordEntry(round, attempt, phase, kind, client, peer, to, 0, len(content), digest)
        file = self._files[entry.file]
        offset = file.tell()
        with naming(file.name):
            file.write(content)
            file.flush()
        with naming(self._index.name):
            self._index.write(json.dumps({**asdict(entry), "offset": offset}).encode() + b"\n")
            self._index.flush()

    def close(self) -> None:
        """Bring everything to the disk."""
        for file in (*self._files.values(), self._index):
            file.flush()
            os.fsync(file.fileno())
            file.close()


class Record:
    """A record as it was found; every piece is checked against its digest when it is read.

    `model` is built instead of what the record names, which is refused where it is code.
    """

    def __init__(self, folder: str | Path, *, model: str | None = None) -> None:
        self.folder = Path(folder)
        index = self.folder / _INDEX
        if not index.exists():
            raise CheckpointError(
                f"{self.folder} holds no record: run with {spelled('record', True)} to keep what passes."
            )
        facts = Facts.from_data(read_named(self.folder / _FACTS))
        if model is None:
            refuse_code(facts.model, where=str(self.folder / _FACTS))
        self.facts = facts if model is None else replace(facts, model=model)
        self.entries = tuple(_entries(index))

    def find(
        self,
        *,
        round: int | None = None,
        attempt: int | None = None,
        phase: str | None = None,
        kind: str | None = None,
        client: int | None = None,
    ) -> tuple[RecordEntry, ...]:
        """The entries for which everything given holds, in the order in which they passed."""
        wanted = {"round": round, "attempt": attempt, "phase": phase, "kind": kind, "client": client}
        asked = {name: value for name, value in wanted.items() if value is not None}
        return tuple(entry for entry in self.entries if all(getattr(entry, name) == asked[name] for name in asked))

    @property
    def rounds(self) -> tuple[tuple[int, int], ...]:
        """(round, attempt) of every round that was recorded."""
        return tuple(dict.fromkeys((entry.round, entry.attempt) for entry in self.entries if entry.round))

    @property
    def clients(self) -> tuple[int, ...]:
        """Whose replies were recorded."""
        return tuple(
            sorted({entry.client for entry in self.entries if entry.kind == "reply" and entry.client is not None})
        )

    def read(self, entry: RecordEntry) -> bytes:
        """The bytes of one piece; damaged ones are refused."""
        path = self.folder / entry.file
        what = f"{path}: the {entry.kind} of round {entry.round}"
        try:
            with path.open("rb") as file:
                whole = path.is_file() and entry.offset + entry.length <= path.stat().st_size
                file.seek(entry.offset if whole else 0)
                content = file.read(entry.length) if whole else b""
        except OSError as reason:
            raise CheckpointError(f"{what} cannot be read: {reason.strerror}.") from reason
        if len(content) < entry.length:
            raise CheckpointError(f"{what} is cut short: the file has lost its end. Record the run again.")
        if hashlib.sha256(content).hexdigest() != entry.digest:
            raise CheckpointError(f"{what} is damaged: its checksum does not match. Record the run again.")
        return content


def _appended(path: Path) -> BinaryIO:
    # Nobody else's to read: secrets lie beside messages that only their two ends saw.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    file = os.fdopen(descriptor, "ab")
    file.seek(0, os.SEEK_END)
    return file


def _drop_torn_line(index: Path) -> None:
    raw = index.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        os.truncate(index, whole)


def _entries(index: Path) -> Iterator[RecordEntry]:
    lines = read_raw(index).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline: nothing, or a torn line
        try:
            entry = made(RecordEntry, parsed(line, where="it"), where="it")
        except CheckpointError as reason:
            raise CheckpointError(f"{index}, line {number} is damaged: the record cannot be trusted.") from reason
        fits = entry.kind in (*MESSAGES, *SECRETS) and entry.offset >= 0 and entry.length >= 0
        if not fits:
            raise CheckpointError(f"{index}, line {number} names what no record holds: the record cannot be trusted.")
        yield entry


def client_view(record: Record, client: int, *, data: tuple[Tensor, Tensor] | None = None) -> ClientView:
    """Everything that was sent to `client` in the recorded rounds; `data` are its own samples."""
    _check_client(record, client)
    sent = (entry for entry in record.entries if entry.kind in ("request", "private") and client in entry.to)
    x, y = (None, None) if data is None else data
    return ClientView(record.facts, client, _read(record, sent), x, y)


def outsider_view(record: Record) -> OutsiderView:
    """Every recorded message, both ways."""
    return OutsiderView(
        record.facts,
        _read(record, (entry for entry in record.entries if entry.kind in ("request", "private", "reply"))),
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
    seen = (
        entry
        for entry in here
        if entry.kind == "request" or (entry.kind in ("private", "reply") and entry.client == victim)
    )
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
            server_view(record, victim, round=upload.round, attempt=upload.attempt, colluders=colluders, labels=labels)
            for upload in uploads
        )
    )


def _with_colluders(
    record: Record, view: ServerView, here: Iterable[RecordEntry], colluders: Collection[int]
) -> ServerView:
    """The upload less what each colluder shares with the victim; masks are words modulo 2⁶⁴ and wrap around.

    Recovery is linear in the upload, so the gradient loses what became of the shared part, over n_k.
    """
    if view.victim in colluders:
        raise ConfigError(f"Client {view.victim} cannot be both the victim and a colluder.")
    for colluder in colluders:
        _check_client(record, colluder)
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


def _read(record: Record, entries: Iterable[RecordEntry]) -> Messages:
    return tuple(
        Message(entry.round, entry.attempt, entry.phase, entry.kind, entry.client, record.read(entry))
        for entry in entries
    )


def _weights(record: Record, here: Iterable[RecordEntry]) -> Weights | None:
    for entry in here:
        if entry.kind == "weights":
            return weights_from(from_stored(record.read(entry))[1])
    return None


def _opened(record: Record, here: Iterable[RecordEntry], kind: str, client: int | None) -> Opened | None:
    for entry in here:
        if entry.kind == kind and entry.client == client:
            fields, tensors = from_stored(record.read(entry))
            return Opened(tensors["gradient"], fields["loss"], tensors["statistics"])
    return None


def _samples(record: Record, here: Iterable[RecordEntry], victim: int) -> int | None:
    """n_k, as the server learnt it: announced before the first round, or beside the upload's gradients."""
    for entry in record.find(kind="reply", client=victim, round=0):
        said = decode(record.read(entry))
        if isinstance(said, Announce):
            return said.samples
    if not record.facts.readable:
        return None
    for entry in here:
        if entry.kind == "reply" and entry.phase == "train" and entry.client == victim:
            said = decode(record.read(entry))
            if isinstance(said, Upload):
                return round(float(record.facts.contributed(record.facts.whole(said))["weight"]))
    return None


def _last_attempt(record: Record, round: int) -> int:
    attempts = [attempt for number, attempt in record.rounds if number == round]
    if not attempts:
        known = ", ".join(str(number) for number in sorted({number for number, _ in record.rounds}))
        raise ConfigError(f"Round {round} was not recorded; recorded are the rounds {known or 'none'}.")
    return max(attempts)


def _check_client(record: Record, client: int) -> None:
    if client not in record.clients:
        known = ", ".join(map(str, record.clients))
        raise ConfigError(f"Client {client} was not recorded; recorded are the clients {known or 'none'}.")


FIRST_ROUNDS = 3
FIRST_CLIENTS = 2


@dataclass(frozen=True)
class Choice:
    """Which rounds (counted from 1) and which clients are recorded.

    What two clients share is kept only for pairs that hold one of `victims` (None: every recorded client is one),
    since a hundred clients have thousands of pairs, and each is as large as an upload.
    """

    rounds: frozenset[int]
    clients: frozenset[int]
    victims: frozenset[int] | None = None

    def __post_init__(self) -> None:
        strangers = sorted((self.victims or frozenset()) - self.clients)
        if strangers:
            raise ConfigError(f"Victims are recorded clients, and {strangers[0]} is none: add it to the clients.")

    def shares(self, client: int, other: int) -> bool:
        """Whether what two recorded clients share is kept."""
        return self.victims is None or client in self.victims or other in self.victims

    @staticmethod
    def of(*, rounds: str | None, clients: str | None, last: int, count: int) -> Choice:
        """From what was typed, for a run of `last` rounds and `count` clients; refuses numbers outside it."""
        first = (*range(1, min(FIRST_ROUNDS, last) + 1), last)
        chosen = frozenset(first if rounds is None else numbers_of(rounds, "record_rounds"))
        some = range(min(FIRST_CLIENTS, count)) if clients is None else numbers_of(clients, "record_clients")
        if not all(1 <= number <= last for number in chosen):
            raise ConfigError(f"record_rounds must lie between 1 and {last}, the last round (got {rounds}).")
        if not all(0 <= client < count for client in some):
            raise ConfigError(f"record_clients must lie between 0 and {count - 1} (got {clients}).")
        return Choice(chosen, frozenset(some))


class Recorder(Guarded):
    """Writes down what passes in chosen rounds, and beside it what the server knew.

    `scheme` is what the server has to be given in place of its own: the same, with a downlink that lets
    the recorder see which veil was drawn. It changes no number of the run.
    """

    def __init__(
        self,
        folder: Path,
        choice: Choice,
        *,
        facts: Facts,
        scheme: Scheme,
        architecture: Architecture,
        attempt: int = 0,
    ) -> None:
        self._writer = RecordWriter(folder, facts)
        self._choice = choice
        self._readable = facts.readable
        self._uplink = scheme.uplink
        self._terms: Terms = scheme.terms(architecture)
        self._now = (0, attempt)
        self._drawn: WitnessedVeil | None = None
        self._pairs: set[tuple[int, int]] = set()
        held = scheme.holder == "server"
        witnessed = cast(Downlink, Witnessed(scheme.downlink, self))
        self.scheme = replace(scheme, downlink=witnessed) if held else scheme

    def hear(self, heard: Heard) -> None:
        """Keep one message, if its round and client are among the chosen."""
        request = heard.request
        if isinstance(request, (Train, Begin, Divide)) and heard.kind == "request":
            # Later phases count rounds in their own way (two stages a round): they belong to the one begun last.
            self._begin(request.round + 1, request.attempt)
        round, attempt = self._now if hasattr(request, "round") else (0, self._now[1])
        if round and round not in self._choice.rounds:
            return
        if heard.client is not None and heard.client not in self._choice.clients:
            return
        if heard.kind == "request" and not self._choice.clients.intersection(heard.to):
            return
        phase = type(request).__name__.lower()
        self._writer.add(
            encode(heard.message),
            round=round,
            attempt=attempt,
            phase=phase,
            kind=heard.kind,
            client=heard.client,
            to=heard.to,
        )
        if isinstance(request, Train):
            self._beside(heard, request)

    def opened(self, mean: Mean, recovered: Recovered) -> None:
        """Keep what the server makes of a round's sum."""
        if self._now[0] in self._choice.rounds:
            means = {"mean.gradients": mean.gradients, "mean.values": mean.values, "mean.statistics": mean.statistics}
            self._secret("opened", recovered, means)

    def drawn(self, veil: WitnessedVeil) -> None:
        """The veil of the round that is about to begin."""
        self._drawn = veil

    def close(self) -> None:
        """Bring the record to the disk."""
        self._drawn = None
        self._writer.close()

    def _begin(self, round: int, attempt: int) -> None:
        self._now = (round, attempt)
        self._pairs = set()

    def _beside(self, heard: Heard, request: Train) -> None:
        veil = self._drawn
        if veil is None:
            return
        if heard.kind == "request":
            self._write("weights", {}, veil.weights.named())
        elif heard.kind == "reply" and isinstance(heard.message, Upload):
            self._recover(heard.message, veil)
            self._share(heard, request, veil)

    def _recover(self, upload: Upload, veil: WitnessedVeil) -> None:
        """What the server's own code makes of this upload alone."""
        layout = self._terms.layout
        payload = upload.dense(layout.length)
        if not self._readable or payload.shape != (layout.length,):
            return
        payload = payload if payload.is_floating_point() else payload.double()
        # Whole numbers have one step, the weight's too: over the weight it cancels.
        sums = layout.split(payload.to(veil.weights.parameters.device))
        if float(sums["weight"]) > 0:
            recovered = veil.inner.recover(_mean(sums, weight=sums["weight"]))
            self._secret("recovered", recovered, {}, client=upload.client)

    def _share(self, heard: Heard, request: Train, veil: WitnessedVeil) -> None:
        """What this client shares with other chosen ones, and what becomes of it in the recovered gradient."""
        state = heard.state
        if state is None or self._uplink.introduction != "keys":
            return
        ring = state.ring()
        context = RoundContext(request.round, request.attempt, state.cohort, ring.known(), ring.beacon)
        for peer in sorted(self._choice.clients & set(state.cohort) - {state.client}):
            pair = (min(state.client, peer), max(state.client, peer))
            if pair in self._pairs or not self._choice.shares(*pair):
                continue
            part = self._uplink.shared_part(state, peer, context, self._terms)
            if part is None:
                continue
            self._pairs.add(pair)
            tensors = {"upload": part}
            if self._readable:
                unit = self._uplink.unit(context, self._terms)
                sums = self._terms.layout.split((part.double() * unit).to(veil.weights.parameters.device))
                tensors["gradient"] = veil.inner.recover(_mean(sums)).gradient
            self._write("shared", {}, tensors, client=state.client, peer=peer)

    def _secret(
        self, kind: str, recovered: Recovered, more: Mapping[str, Tensor], *, client: int | None = None
    ) -> None:
        tensors = {"gradient": recovered.gradient, "statistics": recovered.statistics, **more}
        self._write(kind, {"loss": recovered.loss}, tensors, client=client)

    def _write(
        self,
        kind: str,
        fields: Mapping[str, float | None],
        tensors: Mapping[str, Tensor],
        *,
        client: int | None = None,
        peer: int | None = None,
    ) -> None:
        round, attempt = self._now
        content = as_bytes(fields, tensors)
        self._writer.add(content, round=round, attempt=attempt, phase="train", kind=kind, client=client, peer=peer)


class Witnessed:
    """A downlink like another one, whose veils are shown to a recorder."""

    def __init__(self, inner: Downlink, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        """All else is as the other has it: a record is no release to anybody who takes part."""
        return getattr(self._inner, name)

    def veil(
        self, architecture: Architecture, weights: Weights, *, stream: SecretStream, head_level: float | None
    ) -> Veil:
        """The other's veil."""
        inner = self._inner.veil(architecture, weights, stream=stream, head_level=head_level)
        veil = WitnessedVeil(inner, weights, self._recorder)
        self._recorder.drawn(veil)
        return veil


class WitnessedVeil(Guarded):
    """A veil that tells a recorder what the server recovers with it."""

    __slots__ = ("_recorder", "inner", "weights")

    def __init__(self, inner: Veil, weights: Weights, recorder: Recorder) -> None:
        self.inner = inner
        self.weights = weights
        self._recorder = recorder

    def broadcast(self) -> Broadcast:
        """What clients receive."""
        return self.inner.broadcast()

    def recover(self, mean: Mean) -> Recovered:
        """As the veil itself does."""
        recovered = self.inner.recover(mean)
        self._recorder.opened(mean, recovered)
        return recovered


def _mean(sums: Mapping[str, Tensor], *, weight: Tensor | float = 1.0) -> Mean:
    return Mean(sums["gradients"] / weight, sums["values"] / weight, sums["statistics"] / weight)
