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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from fedveil.audit.facts import Facts
from fedveil.errors import CheckpointError
from fedveil.models.custom import refuse_code
from fedveil.plain import made, parsed, read_named, read_raw

MESSAGES = ("request", "private", "reply")
SECRETS = ("weights", "recovered", "opened", "shared")
_INDEX, _FACTS = "index.jsonl", "facts.json"


@dataclass(frozen=True)
class Entry:
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
        entry = Entry(round, attempt, phase, kind, client, peer, to, 0, len(content), digest)
        file = self._files[entry.file]
        offset = file.tell()
        file.write(content)
        file.flush()
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
            raise CheckpointError(f"{self.folder} holds no record: run with --record to keep what passes.")
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
    ) -> tuple[Entry, ...]:
        """The entries for which everything given holds, in the order in which they passed."""
        wanted = {"round": round, "attempt": attempt, "phase": phase, "kind": kind, "client": client}
        asked = {name: value for name, value in wanted.items() if value is not None}
        return tuple(one for one in self.entries if all(getattr(one, name) == asked[name] for name in asked))

    @property
    def rounds(self) -> tuple[tuple[int, int], ...]:
        """(round, attempt) of every round that was recorded."""
        return tuple(dict.fromkeys((one.round, one.attempt) for one in self.entries if one.round))

    @property
    def clients(self) -> tuple[int, ...]:
        """Whose replies were recorded."""
        return tuple(sorted({one.client for one in self.entries if one.kind == "reply" and one.client is not None}))

    def read(self, entry: Entry) -> bytes:
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


def _entries(index: Path) -> Iterator[Entry]:
    lines = read_raw(index).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline: nothing, or a torn line
        try:
            entry = made(Entry, parsed(line, where="it"), where="it")
        except CheckpointError as reason:
            raise CheckpointError(f"{index}, line {number} is damaged: the record cannot be trusted.") from reason
        fits = entry.kind in (*MESSAGES, *SECRETS) and entry.offset >= 0 and entry.length >= 0
        if not fits:
            raise CheckpointError(f"{index}, line {number} names what no record holds: the record cannot be trusted.")
        yield entry
