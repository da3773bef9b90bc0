"""An attack in a process of its own, which gets serialised views and settings, one after the other, and nothing else.

The process starts in an empty folder, with next to no environment, and is told no path but those of code.
What it is given comes through its standard input; progress and results leave through its standard output:

    in    length (8 bytes, little endian) · settings (JSON) · length · view, until the input ends
    out   kind (1 byte: p progress, r result, e error, n not applicable) · length (8 bytes) · content

A view is sent only after the result of the one before has left: nothing found on one can be changed by another.
This keeps an attack honest, whoever wrote it by mistake. It is no prison: a process of the same user can
open any file whose path it guesses.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from torch import Tensor

from fedveil.audit.attack import Attack, Progress, attack_at, silent
from fedveil.audit.attack import attacks as the_packages
from fedveil.audit.views import from_bytes
from fedveil.errors import AttackError, ConfigError, FedVeilError, NotApplicableError, ProtocolError, unknown_name
from fedveil.protocol.codec import as_bytes, from_stored

TIME_LIMIT = 600.0
_HEADER = struct.Struct("<cQ")
_LENGTH = struct.Struct("<Q")
_SHARE = struct.Struct("<d")
_PIECE = 1 << 20
_MOST_WORDS = 2000
_PROGRESS, _RESULT, _ERROR, _NOT_APPLICABLE = b"p", b"r", b"e", b"n"
# What numerical libraries need to find their code and to share a machine's cores.
_PASSED_ON = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
    *("CUBLAS_WORKSPACE_CONFIG", "SYSTEMROOT"),
)
_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from fedveil.audit.sandbox import serve; serve()"


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
        on_progress: Progress = silent,
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
            self._child.end()
            self._child = None

    def _started(self) -> _Child:
        if self._child is None:
            self._child = _Child(self._threads)
        return self._child

    def _answer(
        self, child: _Child, told: bytes, view: bytes, on_progress: Progress, time_limit: float
    ) -> dict[str, Tensor]:
        answered = False
        try:
            with _limited(child, time_limit) as late:
                final = child.conversation(told, view, on_progress)
            answered = final is not None
            if final is None:
                raise self._without_answer(child, late, time_limit)
        finally:
            if not answered:  # whatever it would still say belongs to nothing
                self.close()
        kind, content = final
        if kind == _RESULT:
            try:
                return from_stored(content)[1]
            except ProtocolError as reason:
                raise AttackError(f"The attack {self.name!r} sent what is no result.") from reason
        said = content.decode(errors="replace")
        raise (
            NotApplicableError(said)
            if kind == _NOT_APPLICABLE
            else AttackError(f"The attack {self.name!r} failed: {said}")
        )

    def _without_answer(self, child: _Child, late: threading.Event, time_limit: float) -> AttackError:
        if late.is_set():
            return AttackError(
                f"The attack {self.name!r} was not done after {time_limit:g} seconds and was stopped: give it more "
                "time, or less to do."
            )
        return AttackError(f"The attack {self.name!r} {child.ending()}.{child.last_words()}")


class _Child:
    """The process itself, its empty folder, and a file for what it says beside its results."""

    def __init__(self, threads: int | None) -> None:
        fewer = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        with contextlib.ExitStack() as held:
            empty = held.enter_context(tempfile.TemporaryDirectory(prefix="fedveil-attack-"))
            self._complaints = held.enter_context(tempfile.TemporaryFile())
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, json.dumps(_code_paths())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                cwd=empty,
                env={"LC_ALL": "C.UTF-8", **fewer, **{one: os.environ[one] for one in _PASSED_ON if one in os.environ}},
            )
            self._held = held.pop_all()
        self._said = 0

    def conversation(self, told: bytes, view: bytes, on_progress: Progress) -> tuple[bytes, bytes] | None:
        """The last frame of the answer, or None where the process ended without one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._said = os.fstat(self._complaints.fileno()).st_size
        with contextlib.suppress(BrokenPipeError):  # if it died before it listened, its end tells
            self.process.stdin.writelines([_LENGTH.pack(len(told)), told, _LENGTH.pack(len(view)), view])
            self.process.stdin.flush()
        for kind, content in _frames(self.process.stdout):
            if kind != _PROGRESS:
                return kind, content
            on_progress(float(_SHARE.unpack(content)[0]))
        return None

    def end(self) -> None:
        """Kill it if it lives, and clear up."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._held.close()

    def ending(self) -> str:
        """How it ended; one that closed its output and lives on is ended."""
        try:
            code = self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "sent what is no result"
        if code < 0:
            return f"was killed by signal {-code}, perhaps for want of memory"
        return f"ended without a result (exit code {code})"

    def last_words(self) -> str:
        """What it said beside its results since it was given the last view."""
        # Not by seek: the process shares the position in this file, and may write still.
        size = os.fstat(self._complaints.fileno()).st_size
        start = max(self._said, size - 4 * _MOST_WORDS)
        said = os.pread(self._complaints.fileno(), size - start, start).decode(errors="replace").strip()
        return f" It said: {said[-_MOST_WORDS:]}" if said else ""


@contextlib.contextmanager
def _limited(child: _Child, time_limit: float) -> Iterator[threading.Event]:
    """Kill the process when its time is over; the event tells."""
    late = threading.Event()

    def expire() -> None:
        late.set()
        child.process.kill()

    timer = threading.Timer(time_limit, expire)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        timer.join()  # one that has begun must not end what comes next


def _frames(incoming: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    while len(header := incoming.read(_HEADER.size)) == _HEADER.size:
        kind, length = _HEADER.unpack(header)
        if kind not in (_PROGRESS, _RESULT, _ERROR, _NOT_APPLICABLE) or (kind == _PROGRESS and length != _SHARE.size):
            return
        # Memory grows with what comes, not with the length somebody claims.
        content = io.BytesIO()
        while content.tell() < length and (piece := incoming.read(min(length - content.tell(), _PIECE))):
            content.write(piece)
        if content.tell() < length:
            return
        yield kind, content.getvalue()


def _code_paths() -> list[str]:
    """Where code is imported from; not the working folder, which may be a run's or hold data."""
    here = Path.cwd()
    own = str(Path(__file__).parents[2])
    paths = [own, *(one for one in sys.path if one and Path(one).is_absolute() and Path(one) != here)]
    return list(dict.fromkeys(paths))


def serve() -> None:
    """The other side: view after view, run the attack, send progress and result."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever an attack prints must not run into its result

    def send(kind: bytes, content: bytes) -> None:
        out.write(_HEADER.pack(kind, len(content)) + content)
        out.flush()

    while (told := _given(sys.stdin.buffer)) is not None and (view := _given(sys.stdin.buffer)) is not None:
        send(*_tried(json.loads(told), view, lambda fraction: send(_PROGRESS, _SHARE.pack(_share(fraction)))))


def _given(incoming: IO[bytes]) -> bytes | None:
    """One piece of what is given; None where there is no more."""
    length = incoming.read(_LENGTH.size)
    return incoming.read(_LENGTH.unpack(length)[0]) if len(length) == _LENGTH.size else None


def _share(fraction: float) -> float:
    return min(max(fraction, 0.0), 1.0)


def _tried(told: Mapping[str, Any], view: bytes, progress: Progress) -> tuple[bytes, bytes]:
    """The kind and content of an attack's answer, whatever becomes of it."""
    try:
        found = attack_at(told["attack"])(from_bytes(view), told["settings"], progress)
        return _RESULT, as_bytes({}, found)
    except NotApplicableError as reason:
        return _NOT_APPLICABLE, str(reason).encode()
    except FedVeilError as reason:
        return _ERROR, str(reason).encode()
    except Exception as reason:
        import traceback

        traceback.print_exc()
        return _ERROR, f"{type(reason).__name__}: {reason}".encode()
