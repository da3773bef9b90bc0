"""The thin side of a client's machine: hands parcels to its worker, and starts the worker where none listens.

Flower starts a process for every message; this is all of FedVeil that such a process needs. It loads neither torch nor
the client's data, and what goes wrong on this machine leaves it as one of four words.

`python -m fedveil.flower.worker_client HOME …` ends the workers of these homes once everything that could start one is
gone: its standard input is a pipe that a cluster and its processes hold open.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import re
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from fedveil.errors import Code, ConfigError, FedVeilError, ProtocolError
from fedveil.framing import BrokenOffError, receive, send

SETTINGS = "client.toml"
LOCK = "worker.lock"
LOG = "worker.log"
WORKER = "fedveil.flower.worker"
GRACE = 10.0
"""Seconds a worker that is asked to stop may spend on the parcel in work."""

_LONGEST_ADDRESS = 107
_OTHERS_START = 30.0
_MOST_BREAKS = 3
_TASK_TOKEN = re.compile(r"[0-9a-f]{256}")


class FrameKind(IntEnum):
    """What passes between a worker and whoever speaks to it."""

    PARCEL = 1
    REPLY = 2
    FAILED = 3
    PING = 4
    PONG = 5
    STOP = 6


class WorkerError(FedVeilError):
    """A parcel got no reply. The code is all its text, for this error may travel to the server."""

    exit_code = 6

    def __init__(self, code: Code) -> None:
        super().__init__(code.value, code=code)


class Peer(NamedTuple):
    """Who is at the other end of a unix socket, by the kernel's word."""

    pid: int
    uid: int


def hand_over(home: Path, parcel: bytes, *, timeout: float, options: Sequence[str] = ()) -> bytes:
    """The worker's reply to `parcel`; `options` go to the command line of a worker that has to be started.

    WorkerError says "lost" (the worker died twice over it), "silent" (no answer within `timeout` seconds),
    "unstartable" (no worker can be had; HOME/worker.log or HOME/client.toml says why) or "failed" (the worker's log
    says why).
    """
    deadline = time.monotonic() + timeout
    broken: list[int] = []
    try:
        while True:
            with _reached(home, deadline, options) as sock:
                try:
                    return _answer(sock, parcel, deadline)
                except BrokenOffError:
                    broken.append(peer_of(sock).pid)
            # A dying worker may still accept a connection: only another one's death is a second death.
            if len(set(broken)) > 1 or len(broken) > _MOST_BREAKS:
                raise WorkerError(Code.LOST)
            time.sleep(0.1)
    except TimeoutError:
        raise WorkerError(Code.SILENT) from None
    except (ConfigError, OSError):
        raise WorkerError(Code.UNSTARTABLE) from None
    except ProtocolError:
        raise WorkerError(Code.FAILED) from None


def ping(home: Path, *, timeout: float = 5.0) -> dict[str, Any] | None:
    """What the worker says of itself (pid, since, handled, busy), or None where none listens."""
    deadline = time.monotonic() + timeout
    try:
        sock = _connected(home, deadline)
        if sock is None:
            return None
        with sock:
            send(sock, FrameKind.PING, deadline=deadline)
            kind, parts = receive(sock, FrameKind, deadline=deadline)
    except BrokenOffError:
        return None
    except TimeoutError:
        raise WorkerError(Code.SILENT) from None
    if kind is not FrameKind.PONG:
        raise WorkerError(Code.FAILED)
    said: dict[str, Any] = json.loads(parts[0])
    return said


def stop(home: Path, *, patience: float = GRACE + 2.0) -> bool:
    """End the worker: asked, then told, then killed; True if one was running."""
    if _lock_is_free(home):
        return False
    asked = _asked_to_stop(home)
    if asked and _lock_came_free(home, patience):
        return True
    for number, seconds in ((signal.SIGTERM, 2.0 if asked else patience), (signal.SIGKILL, 5.0)):
        _signal_worker(home, number)
        if _lock_came_free(home, seconds):
            return True
    raise WorkerError(Code.SILENT)


def settings_of(home: Path) -> dict[str, Any]:
    """HOME/client.toml as it stands, or a ConfigError."""
    path = home / SETTINGS
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as reason:
        why = f"{path} cannot be read: {reason.strerror}. Make it with `fedveil flower client`."
        raise ConfigError(why) from reason
    except ValueError as reason:
        raise ConfigError(f"{path} is not valid TOML: {reason}.") from reason


def socket_address(home: Path) -> Path:
    """Where the worker of `home` listens.

    `socket` of client.toml, else HOME/worker.sock; where that is longer than a socket's address may be, a name made
    from it in a folder of this user's own.
    """
    settings = settings_of(home)
    home = home.resolve()
    if "socket" in settings:
        named = home / str(settings["socket"])
        if not _fits(named):
            raise ConfigError(f"The socket {named} has a longer path than the {_LONGEST_ADDRESS} bytes of an address.")
        return named
    plain = home / "worker.sock"
    if _fits(plain):
        return plain
    if "courier_user" in settings or "worker_user" in settings:
        raise ConfigError(
            f"{plain} is too long for a socket that two users share: give another `socket` in {SETTINGS}."
        )
    name = hashlib.sha256(os.fsencode(home)).hexdigest()[:32] + ".sock"
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        folder = Path(base) / f"fedveil-{os.geteuid()}"
        if base and os.access(base, os.W_OK | os.X_OK) and _fits(folder / name):
            return private_folder(folder) / name
    raise ConfigError(f"No folder is short enough for the worker's socket: give `socket` in {home / SETTINGS}.")


def private_folder(folder: Path) -> Path:
    """The folder, made if need be; refused unless it is this user's and closed to all others."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{folder} is not a folder of this user's alone (mode 700): remove it, or set `socket`.")
    return folder


def peer_of(sock: socket.socket) -> Peer:
    """Process and user at the other end: of whoever listens, where this side connected."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return Peer(pid, uid)


def accepts(uid: int, named: str | int | None = None) -> bool:
    """Whether a process of user `uid` may be spoken to: this user, root, or the one that client.toml names."""
    return uid in (os.geteuid(), 0) or (named is not None and uid == user_id(named))


def user_id(named: str | int) -> int:
    """The number of a user given by name or by number."""
    if isinstance(named, int):
        return named
    try:
        return pwd.getpwnam(named).pw_uid
    except KeyError:
        raise ConfigError(f"{SETTINGS} names the user {named!r}, whom this machine does not know.") from None


def _fits(address: Path) -> bool:
    return len(os.fsencode(address)) <= _LONGEST_ADDRESS


def _answer(sock: socket.socket, parcel: bytes, deadline: float) -> bytes:
    # A worker that refuses a parcel may say so before it has taken all of it.
    with contextlib.suppress(BrokenOffError):
        send(sock, FrameKind.PARCEL, parcel, deadline=deadline)
    kind, parts = receive(sock, FrameKind, deadline=deadline)
    if kind is not FrameKind.REPLY or not parts:
        raise ProtocolError("The worker did not reply.")
    return parts[0]


def _reached(home: Path, deadline: float, options: Sequence[str]) -> socket.socket:
    """A connection to the worker, which is started unless it is another user's to start."""
    theirs = settings_of(home).get("worker_user")
    ours = theirs is None or user_id(theirs) == os.geteuid()
    patience = deadline if ours else min(deadline, time.monotonic() + _OTHERS_START)
    started: subprocess.Popen[bytes] | None = None
    pause = 0.02
    while (sock := _connected(home, deadline)) is None:
        if time.monotonic() > patience:
            raise TimeoutError if ours else ConfigError(f"No worker of the user {theirs!r} listens: start it.")
        if ours and started is not None and started.returncode:
            raise ConfigError(f"The worker ended with status {started.returncode}; see {home / LOG}.")
        # Status 0: another one has the lock, and is about to listen or about to end.
        if ours and (started is None or started.returncode == 0):
            started = _start(home.resolve(), options)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)
    return sock


def _connected(home: Path, deadline: float) -> socket.socket | None:
    address = socket_address(home)
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect(str(address))
            if not accepts(peer_of(sock).uid, settings_of(home).get("worker_user")):
                raise ConfigError(f"Another user listens at {address}: nothing is handed over.")
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return None
        except BlockingIOError:
            # So many are waiting that the kernel takes no more.
            sock.close()
            if time.monotonic() > deadline:
                raise TimeoutError("The worker takes no connections.") from None
            time.sleep(0.1)
        except BaseException:
            sock.close()
            raise
        else:
            return sock


def start(home: Path, *, within: Sequence[str] = (), env: Mapping[str, str] | None = None, nice: int = 0) -> None:
    """Start the worker of `home`, unless one runs, without waiting for it; `within` goes before its command, `env`
    takes the place of this process's environment, and `nice` is by how much others go first."""
    if _lock_is_free(home):
        give_way(_start(home.resolve(), (), within, env).pid, nice)


def give_way(pid: int, nice: int) -> None:
    """Let others go before this process, and before what it starts from now on."""
    with contextlib.suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + nice)


def _start(
    home: Path, options: Sequence[str], within: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    log = os.open(home / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        # -P: a file of HOME that is called like a module of Python's must not take its place.
        process = subprocess.Popen(
            [*within, sys.executable, "-P", "-m", WORKER, str(home), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home,
            env=_without_flower(os.environ if env is None else env),
            start_new_session=True,
            umask=0o077,
        )
    finally:
        os.close(log)
    # Collects the exit status, however much later the worker ends.
    threading.Thread(target=process.wait, daemon=True).start()
    return process


def _without_flower(env: Mapping[str, str]) -> dict[str, str]:
    """These variables, less what belongs to Flower and what names or is a token."""
    return {
        name: value
        for name, value in env.items()
        if not name.upper().startswith(("FLWR_", "FLOWER_"))
        and "TOKEN" not in name.upper()
        and not _TASK_TOKEN.fullmatch(value)
    }


def _asked_to_stop(home: Path) -> bool:
    deadline = time.monotonic() + 1.0
    try:
        sock = _connected(home, deadline)
        if sock is None:
            return False
        with sock:
            send(sock, FrameKind.STOP, deadline=deadline)
    except (TimeoutError, BrokenOffError, ConfigError):
        return False
    return True


@contextlib.contextmanager
def _lock_file(home: Path) -> Iterator[int]:
    handle = os.open(home / LOCK, os.O_RDWR)
    try:
        yield handle
    finally:
        os.close(handle)


def _lock_is_free(home: Path) -> bool:
    try:
        with _lock_file(home) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def _lock_came_free(home: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (free := _lock_is_free(home)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return free


def _signal_worker(home: Path, number: signal.Signals) -> None:
    """Signal the process that the lock file names, once it is sure to be the worker that holds the lock."""
    pid = (home / LOCK).read_text(encoding="ascii").strip()
    try:
        process = os.pidfd_open(int(pid))
    except (ValueError, ProcessLookupError):
        return
    try:
        # The handle names one process for good: whatever is found now is true of the one that gets the signal.
        if not _is_worker(home, int(pid)):
            # One that is just ending has let go of its lock already, and nobody else is signalled in its place.
            if select.select([process], [], [], 0)[0] or _lock_is_free(home):
                return
            raise ConfigError(f"Process {pid}, named in {home / LOCK}, is not this folder's worker: end it yourself.")
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)
    finally:
        os.close(process)


def _is_worker(home: Path, pid: int) -> bool:
    process = Path(f"/proc/{pid}")
    lock = (home / LOCK).stat()
    with contextlib.suppress(OSError):
        if WORKER.encode() in (process / "cmdline").read_bytes().split(b"\0"):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(descriptor.stat(), lock):
                        return True
    return False


def main(homes: list[str]) -> int:
    """Wait until standard input closes, then end the workers of these homes; 1 if one would not end."""
    sys.stdin.buffer.read()
    left = 0
    for home in homes:
        try:
            stop(Path(home))
        except (FedVeilError, OSError):
            left += 1
            sys.stderr.write(f"the worker of {home} would not end\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
