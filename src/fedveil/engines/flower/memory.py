"""What a client remembers of its runs, on disk: sealed, replaced as a whole, written before anything leaves.

Per run: the state of the protocol, and the last message with the reply it got, so that a message that is handed over
again gets the same reply and is not answered anew.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fedveil.crypto.sealing import seal, unseal
from fedveil.engines.flower.parcel import pack, unpack
from fedveil.errors import ProtocolError
from fedveil.protocol import ClientState, Held
from fedveil.protocol.held import Pending
from fedveil.protocol.stored import as_bytes, from_stored
from fedveil.runs.files import write_atomically

_KEY_BYTES = 32
_EPOCH_BYTES = 8
_RUN, _START, _SPENT = "run on Flower", "model a run begins with", "privacy spent in all runs"


class DamagedError(ProtocolError):
    """Stored state that cannot be read."""


@dataclass(frozen=True, eq=False)
class Remembered:
    """A client in one run. `setup` is the digest of what the attempt was told, `base` the version of the model that the
    attempt began with; `message` and `reply` are the last of each."""

    state: ClientState = field(repr=False)
    attempt: int
    setup: str
    base: int = 0
    message: str = ""
    reply: bytes = field(default=b"", repr=False)

    def replied(self, state: ClientState, message: str, reply: bytes) -> Remembered:
        """After one more message."""
        return replace(self, state=state, message=message, reply=reply)


class Memory:
    """A client's sealed files in one folder, under a key of their own that lies beside them.

    Each carries a number that grows with every write and stands, too, in a folder beside this one: files that were
    restored from a backup are older than it says, and refused. Going back would use masks and noise a second time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._epochs = folder.parent / "epochs"
        for one in (folder, self._epochs):
            one.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._key = _key(folder / "state.key")

    def recall(self, lineage: str, *, device: torch.device) -> Remembered | None:
        """What is remembered of a run, with its tensors on `device`; None where nothing is."""
        content = self._read(f"{lineage}.run", _RUN)
        if content is None:
            return None
        try:
            facts, parts = unpack(content)
            state = _placed(ClientState.unseal(parts["state"], self._key), device)
            named = {name: facts[name] for name in ("attempt", "setup", "base", "message")}
            return Remembered(state, reply=parts["reply"], **named)
        except (ProtocolError, KeyError) as reason:
            raise DamagedError(f"what is stored of run {lineage} is damaged") from reason

    def keep(self, lineage: str, one: Remembered) -> None:
        """Replace what is remembered of a run; it is on disk when this returns."""
        facts = {"attempt": one.attempt, "setup": one.setup, "base": one.base, "message": one.message}
        self._write(f"{lineage}.run", _RUN, pack(facts, {"state": one.state.seal(self._key), "reply": one.reply}))

    def start(self, lineage: str, *, device: torch.device) -> Held | None:
        """The model that the present attempt began with; None: that of the seed."""
        content = self._read(f"{lineage}.start", _START)
        if content is None:
            return None
        facts, tensors = from_stored(content)
        return Held.restored(facts, {name: one.to(device) for name, one in tensors.items()})

    def keep_start(self, lineage: str, held: Held | None) -> None:
        """Remember the model that an attempt begins with; None: that it follows from something else."""
        if held is None:
            (self._folder / f"{lineage}.start.sealed").unlink(missing_ok=True)
        else:
            self._write(f"{lineage}.start", _START, as_bytes(held.facts(), held.tensors()))

    def spent(self) -> float:
        """μ² spent in all runs together."""
        content = self._read("spent", _SPENT)
        return 0.0 if content is None else float(unpack(content)[0]["spent"])

    def spend(self, more: float) -> None:
        """Add to what was spent in all runs together."""
        if more > 0:
            self._write("spent", _SPENT, pack({"spent": self.spent() + more}, {}))

    def _read(self, name: str, purpose: str) -> bytes | None:
        try:
            sealed = (self._folder / f"{name}.sealed").read_bytes()
        except FileNotFoundError:
            return None
        try:
            content = unseal(sealed, key=self._key, purpose=f"{purpose} {name}")
        except ProtocolError as reason:
            raise DamagedError(f"{name}.sealed is damaged, or sealed under another key") from reason
        if int.from_bytes(content[:_EPOCH_BYTES], "little") < self._epoch(name):
            raise DamagedError(
                f"{name}.sealed is older than what was written last: it was restored from a backup. Going on from it "
                "would use masks and noise a second time. Delete it to take part in new runs."
            )
        return content[_EPOCH_BYTES:]

    def _write(self, name: str, purpose: str, content: bytes) -> None:
        epoch = self._epoch(name) + 1
        numbered = epoch.to_bytes(_EPOCH_BYTES, "little") + content
        write_atomically(self._folder / f"{name}.sealed", seal(numbered, key=self._key, purpose=f"{purpose} {name}"))
        # Second: a kill in between leaves a file that is newer than the number, which is fine.
        write_atomically(self._epochs / name, f"{epoch}\n")

    def _epoch(self, name: str) -> int:
        try:
            return int((self._epochs / name).read_text())
        except FileNotFoundError:
            return 0
        except ValueError as reason:
            raise DamagedError(f"epochs/{name} is damaged") from reason


def _placed(state: ClientState, device: torch.device) -> ClientState:
    if device.type == "cpu":
        return state
    held, pending = state.held, state.pending
    if held is not None:
        held = Held.restored(held.facts(), {name: one.to(device) for name, one in held.tensors().items()})
    if pending is not None:
        moved = {name: one.to(device) for name, one in pending.tensors().items()}
        pending = Pending.restored(pending.facts(), moved)
    return replace(state, held=held, pending=pending)


def _key(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        key = path.read_bytes()
        if len(key) != _KEY_BYTES:
            raise DamagedError(f"{path} holds no key: sealed state cannot be read without it") from None
        return key
    with os.fdopen(handle, "wb") as file:
        key = os.urandom(_KEY_BYTES)
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    return key
