"""What a client remembers of its runs, on disk: sealed, replaced as a whole, written before anything leaves.

Per run: the state of the protocol, and the last message with the reply it got, so that a message that is handed over
again gets the same reply and is not answered anew.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from fedveil.crypto.keys import seal, unseal
from fedveil.errors import Code, ProtocolError
from fedveil.framing import pack, unpack
from fedveil.protocol.client_state import KEY_BYTES, ClientState, Held, Pending
from fedveil.protocol.codec import as_bytes, from_stored
from fedveil.runs.folder import write_atomically

_EPOCH_BYTES = 8
_RUN, _START, _SPENT = "run on Flower", "model a run begins with", "privacy spent in all runs"
_PROMISE = "promise of a run"
_OF_A_RUN = re.compile(r"([0-9a-f]{32}(?:\.(?:train|evaluate))?)\.(?:run|promise|start)\.sealed")
"""Of a protected app training and evaluations are runs of the protocol by themselves."""
_DAY = 86_400.0
_REMEDIES = {
    _RUN: "Going on from it would use masks and noise a second time: this client stays out of that run, as it does "
    "where the run's last message is longer ago than keep_days, and can take part in new ones.",
    _SPENT: "What this client has spent is not known without it, and counting from nothing would spend it again. Put "
    "the newest copy back; or, to decide that the account begins anew, delete spent.sealed and epochs/spent.",
}


class DamagedError(ProtocolError):
    """Stored state that cannot be read."""

    code = Code.STATE


class _Stored(NamedTuple):
    """An opened file: how often it, or what it is counted with, had been written, and what it holds."""

    epoch: int
    content: bytes


@dataclass(frozen=True, eq=False)
class Promise:
    """A round that a client has promised to answer, and paid for, and has not answered yet: `state` is what it will be
    after that, without the model and what its work keeps, and `tries` how often work on `message` has begun."""

    state: ClientState = field(repr=False)
    message: str
    tries: int


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
    promise: Promise | None = None

    @property
    def promised(self) -> ClientState:
        """The state in which every promise counts as kept: what was begun is never answered any more."""
        if self.promise is None:
            return self.state
        return replace(self.promise.state, held=self.state.held, pending=self.state.pending, kept=self.state.kept)

    def replied(self, state: ClientState, message: str, reply: bytes) -> Remembered:
        """After one more message."""
        return replace(self, state=state, message=message, reply=reply, promise=None)


class Memory:
    """A client's sealed files in one folder, under a key of their own that lies beside them.

    Each carries a number that grows with every write and stands, too, in a folder beside this one: files that were
    restored from a backup are older than it says, and files that were deleted are missed. Both are refused: going back
    would use masks and noise a second time, and spend privacy again. Nothing here notices when both folders go back, or
    are deleted, together.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._epochs = folder.parent / "epochs"
        for place in (folder, self._epochs):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._key = _key(folder / "state.key")

    def recall(self, lineage: str, *, device: torch.device) -> Remembered | None:
        """What is remembered of a run, with its tensors on `device`; None where nothing is."""
        try:
            begun, follows = self._promised(lineage)
            stored = self._read(f"{lineage}.run", _RUN, least=follows)
            if stored is None:
                return None
            facts, parts = unpack(stored.content)
            state = _placed(ClientState.unseal(parts["state"], self._key), device)
            named = {name: facts[name] for name in ("attempt", "setup", "base", "message")}
            return Remembered(state, reply=parts["reply"], promise=begun, **named)
        except DamagedError:
            raise
        except (ProtocolError, KeyError) as reason:
            raise DamagedError(f"what is stored of run {lineage} is damaged") from reason

    def _promised(self, lineage: str) -> tuple[Promise | None, int | None]:
        """A promise that has not been answered yet, with the number of what it follows; (None, None) without one."""
        stored = self._opened(f"{lineage}.promise", _PROMISE)
        if stored is None or stored.epoch < self._epoch(f"{lineage}.run"):
            return None, None
        said, parts = unpack(stored.content)
        run = self._opened(f"{lineage}.run", _RUN)
        if run is not None and run.epoch > stored.epoch:
            return None, None
        return Promise(ClientState.unseal(parts["state"], self._key), said["message"], said["tries"]), said["follows"]

    def keep(self, lineage: str, remembered: Remembered) -> None:
        """Replace what is remembered of a run; it is on disk when this returns."""
        facts = {
            "attempt": remembered.attempt,
            "setup": remembered.setup,
            "base": remembered.base,
            "message": remembered.message,
        }
        self._write(
            f"{lineage}.run", _RUN, pack(facts, {"state": remembered.state.seal(self._key), "reply": remembered.reply})
        )

    def promise(self, lineage: str, promised: Promise) -> None:
        """Remember what is about to be worked on; it is on disk when this returns."""
        light = replace(promised.state, held=None, pending=None, kept=None)
        run = self._opened(f"{lineage}.run", _RUN)
        facts = {"message": promised.message, "tries": promised.tries, "follows": 0 if run is None else run.epoch}
        content = pack(facts, {"state": light.seal(self._key)})
        # Counted with its run: without it, what is stored there is older than it should be.
        self._write(f"{lineage}.promise", _PROMISE, content, counted=f"{lineage}.run")

    def start(self, lineage: str, *, device: torch.device) -> Held | None:
        """The model that the present attempt began with; None: that of the seed."""
        stored = self._read(f"{lineage}.start", _START)
        if stored is None:
            return None
        facts, tensors = from_stored(stored.content)
        return Held.restored(facts, {name: tensor.to(device) for name, tensor in tensors.items()})

    def keep_start(self, lineage: str, held: Held | None) -> None:
        """Remember the model that an attempt begins with; None: that it follows from something else."""
        if held is None:
            (self._epochs / f"{lineage}.start").unlink(missing_ok=True)
            (self._folder / f"{lineage}.start.sealed").unlink(missing_ok=True)
        else:
            self._write(f"{lineage}.start", _START, as_bytes(held.facts(), held.tensors()))

    def spent(self) -> float:
        """μ² spent in all runs together; refused where what was written of it last is gone."""
        stored = self._read("spent", _SPENT)
        return 0.0 if stored is None else float(unpack(stored.content)[0]["spent"])

    def smallest_delta(self) -> float:
        """The smallest δ of the runs in which it was spent; 1 where none has named any."""
        stored = self._read("spent", _SPENT)
        return 1.0 if stored is None else float(unpack(stored.content)[0].get("delta", 1.0))

    def spend(self, more: float, *, delta: float = 1.0) -> None:
        """Add to what was spent in all runs together, in one whose target has this δ."""
        if more > 0:
            facts = {"spent": self.spent() + more, "delta": min(self.smallest_delta(), delta)}
            self._write("spent", _SPENT, pack(facts, {}))

    def runs(self) -> dict[str, float]:
        """When something was last written of each run that is remembered, by the file system's clock."""
        written: dict[str, float] = {}
        for file in self._folder.iterdir():
            if name := _OF_A_RUN.fullmatch(file.name):
                written[name[1]] = max(written.get(name[1], 0.0), file.stat().st_mtime)
        return written

    def prune(self, *, days: float, spare: str = "") -> list[str]:
        """Delete what is remembered of runs, but not of `spare` (its evaluations included), that nothing was written of
        for `days`; returns which.

        Their numbers in epochs/ stay, so that such a run is missed and never taken up again as a new one. What was
        spent in all runs together belongs to none of them.
        """
        latest = time.time() - _DAY * days
        old = [lineage for lineage, written in self.runs().items() if written < latest]
        over = [lineage for lineage in old if lineage.partition(".")[0] != spare]
        for lineage in over:
            self.keep_start(lineage, None)
            for part in ("promise", "run"):
                (self._folder / f"{lineage}.{part}.sealed").unlink(missing_ok=True)
        return over

    def _read(self, name: str, purpose: str, *, least: int | None = None) -> _Stored | None:
        """What was written last, if anything was; `least` is how old it may be, where that is older than the last."""
        stored, written = self._opened(name, purpose), self._epoch(name)
        if stored is None and written:
            raise DamagedError(
                f"{name}.sealed is missing, although epochs/{name} says that it was written {written} times. "
                f"{_REMEDIES.get(purpose, '')}"
            )
        if stored is not None and stored.epoch < (written if least is None else least):
            raise DamagedError(
                f"{name}.sealed is older than what was written last: it was restored from a backup. "
                f"{_REMEDIES.get(purpose, '')}"
            )
        return stored

    def _opened(self, name: str, purpose: str) -> _Stored | None:
        try:
            sealed = (self._folder / f"{name}.sealed").read_bytes()
        except FileNotFoundError:
            return None
        try:
            content = unseal(sealed, key=self._key, purpose=f"{purpose} {name}")
        except ProtocolError as reason:
            raise DamagedError(f"{name}.sealed is damaged, or sealed under another key") from reason
        return _Stored(int.from_bytes(content[:_EPOCH_BYTES], "little"), content[_EPOCH_BYTES:])

    def _write(self, name: str, purpose: str, content: bytes, *, counted: str | None = None) -> None:
        epoch = self._epoch(counted or name) + 1
        numbered = epoch.to_bytes(_EPOCH_BYTES, "little") + content
        sealed = seal(numbered, key=self._key, purpose=f"{purpose} {name}")
        write_atomically(self._folder / f"{name}.sealed", sealed, mode=0o600)
        # Second: a kill in between leaves a file that is newer than the number, which is fine.
        write_atomically(self._epochs / (counted or name), f"{epoch}\n", mode=0o600)

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
        held = Held.restored(held.facts(), {name: tensor.to(device) for name, tensor in held.tensors().items()})
    if pending is not None:
        moved = {name: tensor.to(device) for name, tensor in pending.tensors().items()}
        pending = Pending.restored(pending.facts(), moved)
    return replace(state, held=held, pending=pending)


def _key(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        key = path.read_bytes()
        if len(key) != KEY_BYTES:
            raise DamagedError(f"{path} holds no key: sealed state cannot be read without it") from None
        return key
    with os.fdopen(handle, "wb") as file:
        key = os.urandom(KEY_BYTES)
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    return key
