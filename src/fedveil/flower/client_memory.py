"""What a client remembers of its runs, on disk: sealed, replaced as a whole, written before anything leaves.

Per run: the state of the protocol, and the last message with the reply it got, so that a message that is handed over
again gets the same reply and is not answered anew.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from flwr.app import Context
from torch import Tensor

from fedveil.client_held.messages import Finish
from fedveil.crypto.keys import seal, unseal
from fedveil.errors import Code, FedVeilError, ProtocolError
from fedveil.flower.app_held import begun
from fedveil.flower.app_setup import AppSetup
from fedveil.framing import pack, unpack
from fedveil.protocol.client_state import ClientState, Held, Pending
from fedveil.protocol.codec import as_bytes, from_stored
from fedveil.runs.folder import write_atomically

_KEY_BYTES = 32
_EPOCH_BYTES = 8
_RUN, _START, _SPENT = "run on Flower", "model a run begins with", "privacy spent in all runs"
_PROMISE = "promise of a run"
_OF_A_RUN = re.compile(r"([0-9a-f]{32})\.(?:run|promise|start)\.sealed")
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

    def spend(self, more: float) -> None:
        """Add to what was spent in all runs together."""
        if more > 0:
            self._write("spent", _SPENT, pack({"spent": self.spent() + more}, {}))

    def runs(self) -> dict[str, float]:
        """When something was last written of each run that is remembered, by the file system's clock."""
        written: dict[str, float] = {}
        for file in self._folder.iterdir():
            if name := _OF_A_RUN.fullmatch(file.name):
                written[name[1]] = max(written.get(name[1], 0.0), file.stat().st_mtime)
        return written

    def prune(self, *, days: float, spare: str = "") -> list[str]:
        """Delete what is remembered of runs, but not of `spare`, that nothing was written of for `days`; returns which.

        Their numbers in epochs/ stay, so that such a run is missed and never taken up again as a new one. What was
        spent in all runs together belongs to none of them.
        """
        latest = time.time() - _DAY * days
        over = [lineage for lineage, written in self.runs().items() if written < latest and lineage != spare]
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
        if len(key) != _KEY_BYTES:
            raise DamagedError(f"{path} holds no key: sealed state cannot be read without it") from None
        return key
    with os.fdopen(handle, "wb") as file:
        key = os.urandom(_KEY_BYTES)
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    return key


# --- what a protected app's client remembers, in a folder of its node, and never in `context.state`
#
# A SuperNode sends a reply before it keeps the context, an app may put another state into it, and nodes that share data
# may work side by side. So what safety rests on (what was answered and opened, keys, what was spent) lies in a folder:
# taken under a lock for the whole of a message, and on disk before anything is computed, and again before a reply
# leaves.
#
#     $FOLDER/lock           held while a message is answered; the next one waits
#     $FOLDER/state/         sealed: a file for each run and phase, and what was spent in all of them (`client_memory`)
#     $FOLDER/epochs/        how often each was written: files that were put back from a backup are refused

STATE = "fedveil-state"
"""In a SuperNode's configuration: the folder, by the machine's owner."""
_OWN = Path("fedveil") / "flower-apps"
_CPU = torch.device("cpu")


class HomelessError(FedVeilError):
    """There is no folder in which a client could remember anything."""

    code = Code.UNWRITABLE


def folder_of(context: Context, home: Path | None) -> Path:
    """Where this node's client remembers things: what the machine's owner says, or a folder for each node in `home`."""
    if owners := context.node_config.get(STATE):
        return Path(str(owners))
    return (home or default_home()) / node_name(context)


def node_name(context: Context) -> str:
    """What this node's folder and files are called."""
    return f"node-{context.node_id & (1 << 64) - 1:016x}"


def default_home() -> Path:
    """The user's own folder for such things."""
    named = os.environ.get("XDG_STATE_HOME", "")
    try:
        return (Path(named) if Path(named).is_absolute() else Path.home() / ".local" / "state") / _OWN
    except RuntimeError as reason:
        raise HomelessError("this user has no home directory: give a folder, protect(home=…)") from reason


@contextmanager
def held(folder: Path) -> Iterator[Memory]:
    """A node's memory, for as long as one message takes; whoever comes meanwhile waits."""
    with written(folder):
        _made(folder)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with written(folder):
            stored = Memory(folder / "state")
        yield stored
    finally:
        # Not by closing alone: processes that the app has left behind have the same file open.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _made(folder: Path) -> None:
    if folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    above = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(above)
    finally:
        os.close(above)


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """A folder that cannot be written is a refusal."""
    try:
        yield
    except OSError as reason:
        raise HomelessError(
            f"{folder}, where this client remembers what it has answered and spent, cannot be used: {reason.strerror}. "
            "Give one that can be written, protect(home=…), or --node-config 'fedveil-state=\"…\"'"
        ) from reason


class AppMemory:
    """What a client remembers of one phase of a run; `spent` is by all runs of its node together."""

    def __init__(self, stored: Memory, folder: Path, setup: AppSetup) -> None:
        self._stored, self._folder, self._setup = stored, folder, setup
        self._name = f"{setup.lineage}.{setup.phase}"
        self._here = 0.0
        self.spent = stored.spent()

    def entered(self, client: int) -> ClientState:
        """The state that a message of this setup meets; a setup that contradicts what was told before is refused."""
        setup, known = self._setup, self._stored.recall(self._name, device=_CPU)
        if known is None:
            return ClientState(client)
        if known.attempt > setup.attempt:
            raise ProtocolError(f"attempt {setup.attempt} of a run is over: attempt {known.attempt} has begun")
        state = known.state
        if known.attempt < setup.attempt:
            # Keys and numbers belong to one attempt; what was answered and spent is never forgotten.
            state = replace(
                state,
                client=client,
                keys=None,
                group=None,
                held=self._carried(known),
                pending=None,
                cohort=(),
                survivor_digest="",
                graph="",
                transcript="",
            )
        elif state.client != client:
            raise ProtocolError(f"client {state.client} of a run was called client {client}")
        elif known.setup != setup.digest():
            raise ProtocolError("a run's settings have changed in the middle of an attempt")
        self._here = state.spent
        return state

    def _carried(self, known: Remembered) -> Held | None:
        """The model that a new attempt begins with, if it is here; version 0 is nobody's work, and is had anew."""
        held = known.state.held
        if held is None or not self._setup.start or known.base + held.version != self._setup.start:
            return None
        return begun(held.weights.parameters, held.velocity)

    def long_finished(self, farewell: Finish) -> bool:
        """Whether a later attempt has begun with just what an earlier one's last sums lead to: the server that asks
        again was itself interrupted since."""
        known = self._stored.recall(self._name, device=_CPU)
        if known is None or known.attempt <= self._setup.attempt or known.state.held is None:
            return False
        return known.base == self._setup.start + farewell.version

    def model(self) -> tuple[Tensor, int]:
        """The model that this attempt's training has left here, and its version through all attempts."""
        known = self._stored.recall(f"{self._setup.lineage}.train", device=_CPU)
        if known is None or known.state.held is None or known.attempt != self._setup.attempt:
            raise ProtocolError("an evaluation was asked for of a model that is not here")
        held = known.state.held
        return held.weights.parameters, known.base + held.version

    def keep(self, state: ClientState) -> None:
        """Have a state on disk, and book what it has spent; `state.spent` is of this run alone."""
        more = state.spent - self._here
        with written(self._folder):
            self._stored.spend(more)  # first: a kill in between costs, and is never for free
            self._stored.keep(
                self._name, Remembered(state, self._setup.attempt, self._setup.digest(), self._setup.start)
            )
        self._here = state.spent
        self.spent += max(more, 0.0)
