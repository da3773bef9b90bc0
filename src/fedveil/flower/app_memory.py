"""What a protected app's client remembers, in a folder of its node, and never in `context.state`.

A SuperNode sends a reply before it keeps the context, an app may put another state into it, and nodes that share data
may work side by side. So what safety rests on (what was answered and opened, keys, what was spent) lies in a folder:
taken under a lock for the whole of a message, and on disk before anything is computed, and again before a reply leaves.

    $FOLDER/lock           held while a message is answered; the next one waits
    $FOLDER/state/         sealed: a file for each run and phase, and what was spent in all of them (`client_memory`)
    $FOLDER/epochs/        how often each was written: files that were put back from a backup are refused

What is remembered of a run is deleted once nothing has come of it for `protect(keep_days=…)`; what was spent is not,
nor the number that says that the run was there.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import Context

from fedveil.client_held.messages import Finish
from fedveil.errors import Code, FedVeilError, ProtocolError
from fedveil.flower.app_held import begun
from fedveil.flower.app_setup import AppSetup
from fedveil.flower.client_memory import Memory, Remembered
from fedveil.protocol.client_state import ClientState, Held

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
    """What a client remembers of one phase of a run; `spent` is by all runs of its node together, and `delta` the
    smallest δ among them."""

    def __init__(self, stored: Memory, folder: Path, setup: AppSetup) -> None:
        self._stored, self._folder, self._setup = stored, folder, setup
        self._name = f"{setup.lineage}.{setup.phase}"
        self._here = 0.0
        self.spent, self.delta = stored.spent(), stored.smallest_delta()

    def entered(self, client: int) -> ClientState:
        """The state that a message of this setup meets; a setup that contradicts what was told before is refused."""
        setup, known = self._setup, self._stored.recall(self._name, device=_CPU)
        if known is None:
            return ClientState(client)
        if known.attempt > setup.attempt:
            raise ProtocolError(f"attempt {setup.attempt} of a run is over: attempt {known.attempt} has begun")
        state = known.state
        if known.attempt < setup.attempt:
            state = state.anew(client, held=self._carried(known))
        elif state.client != client:
            raise ProtocolError(f"client {state.client} of a run was called client {client}")
        elif known.setup != setup.digest():
            raise ProtocolError("a run's settings have changed in the middle of an attempt")
        self._here = state.spent
        return state

    def _carried(self, known: Remembered) -> Held | None:
        """The model that a new attempt begins with, if it is here; version 0 is nobody's work, and is had anew."""
        held = known.state.held
        if held is None or not self._setup.start or held.version < 0:
            return None
        if known.base + held.version != self._setup.start:
            return None
        return replace(begun(held.weights.parameters, held.velocity), borrowed=held.borrowed)

    def long_finished(self, farewell: Finish) -> bool:
        """Whether a later attempt has begun with just what an earlier one's last sums lead to: the server that asks
        again was itself interrupted since."""
        known = self._stored.recall(self._name, device=_CPU)
        if known is None or known.attempt <= self._setup.attempt or known.state.held is None:
            return False
        return known.base == self._setup.start + farewell.version

    def model(self) -> tuple[Held, int]:
        """The model that this attempt's training has left here, and its version through all attempts."""
        known = self._stored.recall(f"{self._setup.lineage}.train", device=_CPU)
        if known is None or known.state.held is None or known.attempt != self._setup.attempt:
            raise ProtocolError("an evaluation was asked for of a model that is not here")
        return known.state.held, known.base + known.state.held.version

    def keep(self, state: ClientState, *, delta: float) -> None:
        """Have a state on disk, and book what it has spent, at the run's δ; `state.spent` is of this run alone."""
        more = state.spent - self._here
        with written(self._folder):
            self._stored.spend(more, delta=delta)  # first: a kill in between costs, and is never for free
            self._stored.keep(
                self._name, Remembered(state, self._setup.attempt, self._setup.digest(), self._setup.start)
            )
        self._here = state.spent
        self.spent += max(more, 0.0)
