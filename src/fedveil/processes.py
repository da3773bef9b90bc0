"""Child processes: started, spoken to, watched and ended in one way.

A child of ours runs in a session of its own, so that Ctrl-C is for whoever started it; its standard input is a pipe
that only its parent holds, and it ends when that pipe does, however its parent came to its end. What it writes beside
its answers is kept for the error that tells of its death.

    parent   ChildProcess(python("fedveil.audit.running:serve")) · send · receive · end
    child    channel(): the pipes, taken off standard input and output · framing.receive · framing.send

Work on what lies in this process's memory is shared with copies of it:

    parent   Copy(serve, name=…) · channel · end
    child    serve(channel), in a fork of this process, which ends with `serve` or with its parent

A command that is not ours knows nothing of such a pipe. `python -m fedveil.processes COMMAND …` runs it so that nothing
of it outlives its parent. Flower's processes start others in sessions of their own, which a kill of the first one
leaves behind. So that process adopts whatever the command leaves orphaned (Linux), and ends all of it when the command
exits, when it is told to (SIGTERM: gently; SIGUSR1: as a power cut would), or when its standard input closes. With
`--spare WORD` it leaves alone what has WORD in its command line, and what that started.

What a process has freed goes back to the system at once, or stays for the next step of a training
(`keep_freed_memory`).

One process is nobody's child on purpose: a client's worker on Flower serves one message after the other, and outlives
whoever happened to start it (fedveil.flower.worker_client).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

from fedveil import framing
from fedveil.errors import FedVeilError

_TAIL_LINES, _TAIL_BYTES = 15, 8000
_SETTLE = 5.0


class ChildDiedError(FedVeilError):
    """A child process ended before it had answered; the message says how, and what it said last."""


def python(entry: str) -> list[str]:
    """The command that runs the function `module:function` of ours in a process of its own.

    Isolated: nothing in the environment or the working folder, which may be a stranger's, decides what is imported.
    """
    module, _, function = entry.partition(":")
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from {module} import {function}; {function}()"
    return [sys.executable, "-I", "-c", code, json.dumps(_code_paths())]


def _code_paths() -> list[str]:
    here, own = Path.cwd(), str(Path(__file__).parents[1])
    paths = [own, *(path for path in sys.path if path and Path(path).is_absolute() and Path(path) != here)]
    return list(dict.fromkeys(paths))


class ChildProcess:
    """One child process. It is ended with `end`, or by itself once its input closes."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        log: IO[bytes] | None = None,
        answers: bool = True,
        pipe_bytes: int = -1,
        held: Sequence[int] = (),
    ) -> None:
        """Start it.

        Args:
            command: What to run.
            name: What errors call it.
            env: Its environment; None: this process's.
            cwd: Where it starts.
            log: A file, open for reading and appending, for what it writes; None: one that goes with the process.
            answers: Whether its standard output is a pipe for answers; else it goes into the log as well.
            pipe_bytes: How much its pipes hold.
            held: Further descriptors of this process that it keeps open.
        """
        self.name = name
        self._log = _kept(log)
        self._last_words = ""
        self.mark()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if answers else self._log,
                stderr=self._log,
                bufsize=0,
                pipesize=pipe_bytes,
                env=None if env is None else dict(env),
                cwd=cwd,
                start_new_session=True,
                pass_fds=held,
            )
        except BaseException:
            self._log.close()
            raise
        _living.add(self)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def input(self) -> IO[bytes]:
        """Its standard input; the process ends when this closes."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def output(self) -> IO[bytes]:
        """Its standard output, where that is a pipe."""
        assert self._process.stdout is not None
        return self._process.stdout

    def send(self, kind: IntEnum, *parts: framing.Part, deadline: float | None = None) -> None:
        """Send it a frame; a ChildDiedError if it has ended, a TimeoutError after the deadline."""
        try:
            framing.send(self.input, kind, *parts, deadline=deadline)
        except (framing.BrokenOffError, ValueError) as reason:  # ValueError: its pipe was closed
            raise self.died() from reason

    def receive(self, kinds: type[framing.Kind], *, deadline: float | None = None) -> tuple[framing.Kind, list[bytes]]:
        """Its next frame; a ChildDiedError if it has ended, a TimeoutError after the deadline."""
        try:
            return framing.receive(self.output, kinds, deadline=deadline)
        except (framing.BrokenOffError, ValueError) as reason:
            raise self.died() from reason

    def died(self) -> ChildDiedError:
        """The error that tells of its end."""
        said = self.tail()
        return ChildDiedError(f"{self.name} {self.ending()}.{f' It said: {said}' if said else ''}")

    def ending(self) -> str:
        """How it ended; one that has closed its pipes gets a moment to do so."""
        return _ending(self.wait(_SETTLE))

    def mark(self) -> None:
        """What it says counts from here on."""
        self._from = os.fstat(self._log.fileno()).st_size

    def said(self) -> str:
        """What it has written into its log since it was started, or since the last mark."""
        if self._log.closed:
            return self._last_words
        # Not by seek: the process shares the position in this file, and may write still.
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size - self._from, self._from).decode(errors="replace")

    def tail(self) -> str:
        """The last lines of that."""
        return "\n".join(self.said()[-_TAIL_BYTES:].strip().splitlines()[-_TAIL_LINES:])

    def signal(self, number: signal.Signals) -> None:
        """Signal it, if it lives."""
        if self.alive:
            self._process.send_signal(number)

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code, negative where a signal ended it; None if it lives on after so many seconds."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End it at once, and everything that it started, also in sessions of their own (Linux)."""
        if self.alive:  # its number is its own as long as nobody has asked for its exit code
            _kill_below(self.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def end(self, *, patience: float = 0.0) -> int:
        """Close its input, kill it unless it has ended after so many seconds, and clear up; its exit code."""
        with contextlib.suppress(BrokenPipeError):
            self.input.close()
        if not patience or self.wait(patience) is None:
            self.kill()
        self._close()
        return self._process.returncode

    def disown(self) -> None:
        """Forget it in a copy of the process that started it."""
        self._process.returncode = 0
        self.input.close()
        self._close()

    def _close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._last_words = self.said()[-_TAIL_BYTES:]
        self._log.close()
        _living.discard(self)


def _kept(log: IO[bytes] | None) -> IO[bytes]:
    return tempfile.TemporaryFile() if log is None else os.fdopen(os.dup(log.fileno()), "rb")


def _ending(code: int | None) -> str:
    if code is None:
        return "does not answer any more"
    if code < 0:
        return f"was killed by signal {-code}, perhaps for want of memory"
    return f"ended without a result (exit code {code})"


class Copy:
    """A copy of this process (a fork) that does one thing; it is ended with `end`, or by itself with its parent.

    It holds all that this process held in memory, secrets too, and nothing of that passes through a file. Threads are
    not copied: libraries that have some running must not be asked for them (torch: with one thread it asks for none).
    """

    def __init__(self, serve: Callable[[socket.socket], None], *, name: str) -> None:
        """Start it.

        Args:
            serve: What it does, with its end of a channel that keeps messages apart.
            name: What errors call it.
        """
        self.name = name
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # What interrupts this process must not go on as an exception in the copy.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: see above
                self.pid = os.fork()
            if not self.pid:
                _serve(serve, theirs, self.channel, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._code: int | None = None
        _living.add(self)

    def wait(self, seconds: float = 0.0) -> int | None:
        """Its exit code, negative where a signal ended it; None if it lives on after so many seconds."""
        deadline = time.monotonic() + seconds
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.01)
        return self._code

    def ending(self) -> str:
        """How it ended; one that has closed its channel gets a moment to do so."""
        return _ending(self.wait(_SETTLE))

    def end(self) -> None:
        """End it at once, and everything that it started."""
        self.channel.close()
        if self.wait() is None:  # its number is its own as long as nobody has asked for its exit code
            _kill_below(self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(_SETTLE)
        _living.discard(self)

    def disown(self) -> None:
        """Forget it in a copy of the process that started it."""
        self.channel.close()
        self._code = 0
        _living.discard(self)


_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Have Ctrl-C, and what means the same, wait until what is inside is done; a second one waits for nothing.

    Python hears of signals in its main thread alone: elsewhere this changes nothing.
    """
    before = {int(number): handler for number in _INTERRUPTS if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread() or not before:
        yield
        return
    heard: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if len(heard) > 1:
            before[number](number, frame)

    try:
        for number in before:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if heard:
            before[heard[0]](heard[0], None)


def _serve(
    serve: Callable[[socket.socket], None],
    channel: socket.socket,
    parents: socket.socket,
    mask: set[int | signal.Signals],
) -> None:
    """What a copy does, to its end: nothing of what its parent had in mind comes after it."""
    code = 1
    try:
        parents.close()
        os.setsid()  # Ctrl-C is for whoever started it
        for number in _INTERRUPTS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Files of its own: a thread of its parent's may have held the locks of these.
        sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
        end_with(channel.fileno())
        serve(channel)
        code = 0
    except ConnectionError:
        pass  # its parent is gone
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Disowned(Protocol):
    def disown(self) -> None: ...


_living: weakref.WeakSet[_Disowned] = weakref.WeakSet()


def _forked() -> None:
    # A copy of this process that held the pipes would keep children alive that have lost their parent.
    for process in list(_living):
        process.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def channel() -> tuple[IO[bytes], IO[bytes]]:
    """For a child: the pipes from and to its parent, taken off standard input and output.

    What libraries print goes where errors go. From now on this process ends when its parent does, whatever it is at,
    and takes along what it started.
    """
    incoming, outgoing = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    end_with(incoming.fileno())
    return incoming, outgoing


def end_with(pipe: int) -> None:
    """From now on this process, and what it starts, ends when the other end of a pipe closes, whatever it is at."""
    _prctl(_SET_CHILD_SUBREAPER, 1)  # or what it started would be out of sight once orphaned

    def watch() -> None:
        hung_up = select.poll()
        hung_up.register(pipe, 0)  # nothing but that the other end is closed
        hung_up.poll()
        _kill_below(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_GRACE = 8.0
_SWEEPS, _BETWEEN_SWEEPS = 100, 0.1
_PROC = Path("/proc")


def supervised(command: Sequence[str], *, spare: str = "") -> list[str]:
    """The command that runs another so that nothing of it outlives this process, but what `spare` names."""
    return [sys.executable, "-P", "-m", "fedveil.processes", *(["--spare", spare] if spare else []), *command]


def main(arguments: list[str]) -> int:
    """Run the command to its end or ours; returns its exit status, as a shell would say it."""
    spare, command = (arguments[1], arguments[2:]) if arguments[0] == "--spare" else ("", arguments)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL),
    )
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while child.poll() is None:
            for key, _ in selector.select():
                if key.fd == 0 and not os.read(0, 4096):
                    selector.unregister(0)
                    _end(child, gently=True)
                elif key.fd == woken:
                    told = os.read(woken, 4096)
                    if signal.SIGUSR1 in told:
                        _end(child, gently=False)
                    elif signal.SIGTERM in told or signal.SIGINT in told:
                        _end(child, gently=True)
            _reap_adopted(but=child.pid)
    _sweep(spare.encode())
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def descendants(root: int) -> list[int]:
    """Every living process below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    pids, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(0), [])
        pids += below
        waiting += below
    return pids


def processor_seconds() -> float:
    """What this process and those below it have taken of processors so far; of the living ones, on Linux only."""
    times, ticks = os.times(), 0
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError, ValueError):
            after = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks += sum(map(int, after[11:15]))  # its own, in user mode and the kernel's, and its children's
    # Its own by a clock that is finer than ticks, of which a short run takes none.
    return time.process_time() + sum(times[2:4]) + ticks / os.sysconf("SC_CLK_TCK")


def usable_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory(file: Path = _PROC / "meminfo") -> int | None:
    """The bytes that can be had, by Linux's own estimate; None where the system does not say."""
    try:
        rows = file.read_text(encoding="ascii").splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_KEPT_BLOCK, _KEPT_FREE = 32 << 20, 256 << 20


def keep_freed_memory() -> None:
    """Keep what is freed for whoever asks next, up to 256 MB, where the C library is GNU's: training frees in every
    step what it asks for in the next, and pages that went back to the system come again as page faults."""
    if (library := _gnu_library()) is not None:
        library.mallopt(_MMAP_THRESHOLD, _KEPT_BLOCK)  # first: the other one alone would map and unmap every block
        library.mallopt(_TRIM_THRESHOLD, _KEPT_FREE)


def give_back_memory() -> None:
    """Give the system what is kept and not in use."""
    if (library := _gnu_library()) is not None:
        library.malloc_trim(0)


def _gnu_library() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def _kill_below(root: int) -> None:
    """Kill whatever is below a process; more than once, as it may start another meanwhile."""
    for _ in range(_SWEEPS):
        below = descendants(root)
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not below:
            return


def _parents() -> Iterator[tuple[int, int]]:
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdecimal():
            try:
                # The name, in brackets, may hold anything; what follows the last bracket is state and parent.
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state != "Z":
                yield int(entry.name), int(parent)


def _end(child: subprocess.Popen[bytes], *, gently: bool) -> None:
    if gently:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE)
    if child.poll() is None:
        child.kill()
        child.wait()


def _sweep(spare: bytes) -> None:
    """End whatever the command left; more than once, as a process may start another while it is being ended."""
    for attempt in range(_SWEEPS):
        spared = _spared(spare) if spare else set()
        left = [pid for pid in descendants(os.getpid()) if pid not in spared]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL if attempt else signal.SIGTERM)
        time.sleep(_BETWEEN_SWEEPS)
        _reap_adopted()


def _spared(word: bytes) -> set[int]:
    """The processes below this one with this word in their command lines, and what they started."""
    pids: set[int] = set()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if word in (_PROC / str(pid) / "cmdline").read_bytes():
                pids |= {pid, *descendants(pid)}
    return pids


def _reap_adopted(but: int = 0) -> None:
    # An adopted process that ended stays a zombie until it is asked for; the command itself is asked for elsewhere.
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != but:
            os.waitpid(ended.si_pid, os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
