"""An attack in a process of its own, which gets serialised views and settings, one after the other, and nothing else.

The process starts in an empty folder, with next to no environment, and is told no path but those of code.
What it is given comes through its pipes alone, in frames (`fedveil.framing`), as progress and results leave it:

    in    VIEW settings (JSON), view; until the input ends
    out   PROGRESS fraction, any number of times; then RESULT, ERROR or NOT_APPLICABLE with its content

A view is sent only after the result of the one before has left: nothing found on one can be changed by another.
This keeps an attack honest, whoever wrote it by mistake. It is no prison: a process of the same user can
open any file whose path it guesses.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from enum import IntEnum
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from fedveil import framing
from fedveil.audit.attack import Attack, OnProgress, attack_at, silent
from fedveil.audit.attack import attacks as the_packages
from fedveil.audit.views import from_bytes
from fedveil.errors import AttackError, ConfigError, FedVeilError, NotApplicableError, ProtocolError, unknown_name
from fedveil.processes import ChildDiedError, ChildProcess, channel, python
from fedveil.protocol.codec import as_bytes, from_stored

TIME_LIMIT = 600.0
_SHARE = struct.Struct("<d")
# What numerical libraries need to find their code and to share a machine's cores.
_PASSED_ON = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
    *("CUBLAS_WORKSPACE_CONFIG", "SYSTEMROOT"),
)


class AttackProcess:
    """One attack, ready to be given views.

        with AttackProcess("idlg") as process:
            found = process.run(to_bytes(view), settings={"quick": True})

    The process starts on entering, or with the first view, and again with the next view where it has died. It takes
    `threads` cores, unless OMP_NUM_THREADS says otherwise.
    """

    def __init__(self, name: str, *, attacks: Mapping[str, Attack] | None = None, threads: int | None = None) -> None:
        known = the_packages() if attacks is None else attacks
        if name not in known:
            raise unknown_name("attack", name, known)
        self.name = name
        self._threads = threads
        self._target = known[name].target
        self._child: _Child | None = None
        self._busy = threading.Lock()

    def __enter__(self) -> Self:
        self._started()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, reason: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        view: bytes,
        *,
        settings: Mapping[str, Any] | None = None,
        on_progress: OnProgress = silent,
        time_limit: float = TIME_LIMIT,
    ) -> dict[str, Tensor]:
        """The attack's result on a serialised view.

        `settings` are plain data. `on_progress` is called with fractions from 0 to 1. An attack that cannot be
        tried on the view raises a NotApplicableError; one that fails, dies or is not done after `time_limit`
        seconds an AttackError that says so. What dies or is late is ended; after the rest, views can follow.
        """
        try:
            told = json.dumps({"attack": self._target, "settings": dict(settings or {})}).encode()
        except (TypeError, ValueError) as reason:
            raise ConfigError(f"The settings of the attack {self.name!r} must be plain data: {reason}.") from reason
        if not self._busy.acquire(blocking=False):
            raise ConfigError(f"The attack {self.name!r} is at work: give it a further view when its result is here.")
        try:
            return self._answer(self._started(), told, view, on_progress, time_limit)
        finally:
            self._busy.release()

    def close(self) -> None:
        """End the process; nothing of it is left."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _started(self) -> _Child:
        if self._child is None:
            self._child = _Child(self.name, self._threads)
        return self._child

    def _answer(
        self, child: _Child, told: bytes, view: bytes, on_progress: OnProgress, time_limit: float
    ) -> dict[str, Tensor]:
        try:
            kind, content = child.conversation(told, view, on_progress, deadline=time.monotonic() + time_limit)
            said = "" if kind is _Frame.RESULT else content.decode(errors="replace")
            result = from_stored(content)[1] if kind is _Frame.RESULT else {}
        except BaseException as reason:
            self.close()  # whatever it would still say belongs to nothing
            if isinstance(reason, TimeoutError):
                raise AttackError(
                    f"The attack {self.name!r} was not done after {time_limit:g} seconds and was stopped: give it more "
                    "time, or less to do."
                ) from None
            if isinstance(reason, ChildDiedError):
                raise AttackError(str(reason)) from reason
            if isinstance(reason, (ProtocolError, IndexError, struct.error)):
                raise AttackError(f"The attack {self.name!r} sent what is no result.") from reason
            raise
        if kind is _Frame.NOT_APPLICABLE:
            raise NotApplicableError(said)
        if kind is not _Frame.RESULT:
            raise AttackError(f"The attack {self.name!r} failed: {said}")
        return result


class _Frame(IntEnum):
    VIEW = 1
    PROGRESS = 2
    RESULT = 3
    ERROR = 4
    NOT_APPLICABLE = 5


class _Child(ChildProcess):
    """The process itself, in an empty folder."""

    def __init__(self, name: str, threads: int | None) -> None:
        fewer = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        passed_on = {variable: os.environ[variable] for variable in _PASSED_ON if variable in os.environ}
        self._empty = tempfile.TemporaryDirectory(prefix="fedveil-attack-")
        try:
            super().__init__(
                python(f"{__name__}:serve"),
                name=f"The attack {name!r}",
                cwd=self._empty.name,
                env={"LC_ALL": "C.UTF-8", **fewer, **passed_on},
            )
        except BaseException:
            self._empty.cleanup()
            raise

    def conversation(
        self, told: bytes, view: bytes, on_progress: OnProgress, *, deadline: float
    ) -> tuple[_Frame, bytes]:
        """The last frame of the answer."""
        self.mark()
        self.send(_Frame.VIEW, told, view, deadline=deadline)
        while True:
            kind, parts = self.receive(_Frame, deadline=deadline)
            if kind is not _Frame.PROGRESS:
                return kind, parts[0]
            on_progress(float(_SHARE.unpack(parts[0])[0]))

    def close(self) -> None:
        """Kill it if it lives, and clear up."""
        self.end()
        self._empty.cleanup()


def serve() -> None:
    """The other side: view after view, run the attack, send progress and result."""
    incoming, outgoing = channel()

    def progress(fraction: float) -> None:
        framing.send(outgoing, _Frame.PROGRESS, _SHARE.pack(_share(fraction)))

    with contextlib.suppress(framing.BrokenOffError):
        while True:
            _, (told, view) = framing.receive(incoming, _Frame)
            framing.send(outgoing, *_tried(json.loads(told), view, progress))


def _share(fraction: float) -> float:
    return min(max(fraction, 0.0), 1.0)


def _tried(told: Mapping[str, Any], view: bytes, progress: OnProgress) -> tuple[_Frame, bytes]:
    """The kind and content of an attack's answer, whatever becomes of it."""
    try:
        result = attack_at(told["attack"])(from_bytes(view), told["settings"], progress)
        return _Frame.RESULT, as_bytes({}, result)
    except NotApplicableError as reason:
        return _Frame.NOT_APPLICABLE, str(reason).encode()
    except FedVeilError as reason:
        return _Frame.ERROR, f"{reason}{_place(reason, told['attack'])}".encode()
    except Exception as reason:
        traceback.print_exc()
        return _Frame.ERROR, f"{type(reason).__name__}: {reason}{_place(reason, told['attack'])}".encode()


def _place(reason: Exception, target: str) -> str:
    """The last line of the attack's own file on the way to an error, for whoever wrote it; elsewhere nothing."""
    file = target.rpartition(":")[0]
    lines = [frame.lineno for frame in traceback.extract_tb(reason.__traceback__) if frame.filename == file]
    return f" ({os.path.basename(file)}, line {lines[-1]})" if lines and file.endswith(".py") else ""
