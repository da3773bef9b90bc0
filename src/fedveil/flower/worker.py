"""The long-lived process of a client's machine: holds data, secrets and torch, and answers parcels one by one.

`python -m fedveil.flower.worker HOME`; a client app starts it where none listens (`worker_client`).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fcntl
import importlib
import json
import logging
import os
import pwd
import selectors
import signal
import socket
import stat
import threading
import time
import traceback
from concurrent.futures import CancelledError, ThreadPoolExecutor
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Protocol

from fedveil.errors import ConfigError, FedVeilError, ProtocolError
from fedveil.flower.worker_client import (
    GRACE,
    LOCK,
    LOG,
    FrameKind,
    accepts,
    peer_of,
    settings_of,
    socket_address,
    user_id,
)
from fedveil.framing import BrokenOffError, receive, send

_FRAME_PATIENCE = 120.0
_WATCH = 5.0
_LOG_BYTES, _LOG_FILES = 1_000_000, 3
_LONGEST_TRACEBACK = 8000
_HANDLER = "fedveil.flower.message_handler:MessageHandler"

log = logging.getLogger("fedveil.worker")


class Handler(Protocol):
    """What answers parcels. It remembers its replies: the same parcel handed in again gets the same one."""

    def handle(self, parcel: bytes) -> bytes:
        """The reply to one parcel."""


class Worker:
    """Takes parcels from couriers, has one after the other answered, and says how it is at any time."""

    def __init__(
        self, home: Path, listener: socket.socket, settings: dict[str, Any], *, idle: float, handler: str = _HANDLER
    ) -> None:
        """`idle` is after how many seconds without a parcel it ends."""
        self._home = home
        self._listener = listener
        self._address = Path(listener.getsockname())
        self._identity = self._address.lstat()
        self._courier_user = settings.get("courier_user")
        self._idle = idle
        self._handler_name = handler
        self._handler: Handler | None = None
        self._line = ThreadPoolExecutor(max_workers=1, thread_name_prefix="handler")
        self._changed = threading.Condition()
        self._attended = 0
        self._owed = 0
        self._handled = 0
        self._busy = False
        self._since = time.time()
        self._last = time.monotonic()
        self._stopping = False
        self._waking, self._wake = socket.socketpair()
        self._wake.setblocking(False)

    def stop(self, *_: object) -> None:
        """Take no more parcels and end; fit for a signal's handler."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake.send(b".")

    def run(self) -> bool:
        """Serve until told to stop or idle for too long; False if a parcel in work had to be given up."""
        self._line.submit(self._warm_up)
        why = self._accept_all()
        log.info("ending: %s", why)
        self._listener.close()
        if self._still_reachable():
            self._address.unlink()
        self._line.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            finished = self._changed.wait_for(lambda: self._owed == 0, GRACE)
        if not finished:
            log.warning("the parcel in work took longer than %.0f s more and is given up", GRACE)
        return finished

    def _accept_all(self) -> str:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            waiting.register(self._waking, selectors.EVENT_READ)
            while True:
                left = self._idle - (time.monotonic() - self._last)
                ready = waiting.select(_WATCH if self._attended else min(_WATCH, max(left, 0.0)))
                if self._stopping:
                    return "asked to stop"
                if ready:
                    self._accept()
                elif not self._still_reachable():
                    # Nobody could hand anything over any more, nor start another worker while this one has the lock.
                    return "the socket's file is gone"
                elif not self._attended and time.monotonic() - self._last >= self._idle:
                    return "nothing came for long"

    def _accept(self) -> None:
        try:
            courier, _ = self._listener.accept()
        except OSError as reason:
            log.warning("a connection could not be taken: %s", reason)
            time.sleep(0.1)
            return
        with self._changed:
            self._attended += 1
        threading.Thread(target=self._attend, args=(courier,), daemon=True).start()

    def _still_reachable(self) -> bool:
        try:
            return os.path.samestat(self._address.lstat(), self._identity)
        except OSError:
            return False

    def _attend(self, courier: socket.socket) -> None:
        try:
            with courier:
                self._receive(courier)
        except (BrokenOffError, TimeoutError):
            log.info("a courier went away, or stalled")
        except (FedVeilError, OSError) as reason:
            log.warning("refused: %s", reason)
        finally:
            with self._changed:
                self._attended -= 1

    def _receive(self, courier: socket.socket) -> None:
        try:
            kind, parcel = self._request(courier)
        except BrokenOffError:
            raise
        except ProtocolError:
            with contextlib.suppress(BrokenOffError, TimeoutError):
                send(courier, FrameKind.FAILED, deadline=_soon())
            raise
        if kind is FrameKind.PING:
            send(courier, FrameKind.PONG, self._state(), deadline=_soon())
        elif kind is FrameKind.STOP:
            self.stop()
        else:
            self._answer(courier, parcel)

    def _request(self, courier: socket.socket) -> tuple[FrameKind, list[bytes]]:
        uid = peer_of(courier).uid
        if not accepts(uid, self._courier_user):
            raise ProtocolError(f"User {uid} may not hand parcels over.")
        kind, parts = receive(courier, FrameKind, deadline=_soon())
        if kind is FrameKind.STOP and not accepts(uid):
            raise ProtocolError(f"User {uid} may hand parcels over, but not stop the worker.")
        if kind not in (FrameKind.PARCEL, FrameKind.PING, FrameKind.STOP) or len(parts) != (kind is FrameKind.PARCEL):
            raise ProtocolError(f"A client app does not send a {kind.name} of {len(parts)} parts.")
        return kind, parts

    def _state(self) -> bytes:
        state = {"pid": os.getpid(), "since": self._since, "handled": self._handled, "busy": self._busy}
        return json.dumps(state).encode()

    def _answer(self, courier: socket.socket, parcel: list[bytes]) -> None:
        try:
            answer = self._line.submit(self._handle, courier, parcel).result()
        except (CancelledError, RuntimeError):
            # The worker ends. The courier sees the connection close, and hands the parcel to the next one.
            return
        if answer is None:
            return
        try:
            kind, reply = answer
            send(courier, kind, reply, deadline=_soon())
        finally:
            with self._changed:
                self._owed -= 1
                self._changed.notify_all()

    def _handle(self, courier: socket.socket, parcel: list[bytes]) -> tuple[FrameKind, bytes] | None:
        """The answer to the one parcel in `parcel`, taken out of it so that the handler may let go of it early."""
        if _gone(courier):
            log.info("a parcel was left undone: its courier went away while it waited in line")
            return None
        with self._changed:
            self._owed += 1
        self._busy, began = True, time.monotonic()
        log.info("a parcel of %d bytes is in work", len(parcel[0]))
        try:
            reply = self._built_handler().handle(parcel.pop())
        except BaseException:
            log.error("a parcel failed:\n%s", traceback.format_exc()[-_LONGEST_TRACEBACK:])
            return FrameKind.FAILED, b""
        finally:
            self._busy, self._last = False, time.monotonic()
            self._handled += 1
        log.info("answered with %d bytes after %.1f s", len(reply), time.monotonic() - began)
        return FrameKind.REPLY, reply

    def _warm_up(self) -> None:
        """Load what the first parcel would have to wait for; what fails here is said again when that has come."""
        try:
            self._built_handler()
        except Exception as reason:
            log.warning("the message handler cannot be made yet: %s", reason)

    def _built_handler(self) -> Handler:
        if self._handler is None:
            module, _, name = self._handler_name.partition(":")
            self._handler = getattr(importlib.import_module(module), name)(self._home)
            log.info("the message handler is ready")
        return self._handler


def take_lock(home: Path) -> int | None:
    """The lock that says which process serves `home`, held as long as that lives; None if another one has it."""
    handle = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    inherited = [handle]

    def let_go() -> None:
        # A forked child that outlives the worker would hold the lock for it. Its own children find the list empty.
        if inherited:
            os.close(inherited.pop())

    os.register_at_fork(after_in_child=let_go)
    return handle


def listen(address: Path, courier_user: str | int | None = None) -> socket.socket:
    """A socket listening at `address` in place of a dead worker's, for this user and `courier_user` only."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(address.lstat().st_mode):
            raise ConfigError(f"{address} is to be the worker's socket, but is a file of another kind: move it away.")
        address.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(address))
    finally:
        os.umask(before)
    if courier_user is not None:
        try:
            os.chown(address, -1, pwd.getpwuid(user_id(courier_user)).pw_gid)
        except (PermissionError, KeyError):
            log.warning("the socket stays with group %d: the courier's user must belong to it", address.stat().st_gid)
        address.chmod(0o660)
    listener.listen(64)
    listener.setblocking(False)
    os.register_at_fork(after_in_child=listener.close)
    return listener


def main(arguments: list[str] | None = None) -> None:
    """Serve the folder that the command line names, unless another worker does."""
    parser = argparse.ArgumentParser(prog="python -m fedveil.flower.worker", description=__doc__)
    parser.add_argument("home", type=Path, help="the folder with client.toml")
    parser.add_argument("--handler", default=_HANDLER, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    os.umask(0o077)
    home = given.home.resolve()
    try:
        settings = settings_of(home)
        if take_lock(home) is None:
            return
        _log_to(home / LOG)
        address = socket_address(home)
        idle = 3600.0 * float(settings.get("idle_hours", 24))  # before anybody can connect and be let down
        listener = listen(address, settings.get("courier_user"))
        worker = Worker(home, listener, settings, idle=idle, handler=given.handler)
    except (FedVeilError, OSError, ValueError, TypeError) as reason:
        raise SystemExit(f"The worker cannot start: {reason}") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.stop)
    log.info("process %d listens", os.getpid())
    finished = worker.run()
    log.info("ended")
    logging.shutdown()
    if not finished:
        # The handler's thread is still at work, and Python would wait for it.
        os._exit(0)


class _Log(RotatingFileHandler):
    """A rotating log that takes the process's own output along, where that goes into the same file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES - 1, encoding="utf-8")
        here = path.stat()
        self._followers = [descriptor for descriptor in (1, 2) if os.path.samestat(os.fstat(descriptor), here)]

    def doRollover(self) -> None:  # noqa: N802 - logging's own name
        """Start the next file."""
        super().doRollover()
        if self.stream is not None:
            for descriptor in self._followers:
                os.dup2(self.stream.fileno(), descriptor)


def _log_to(path: Path) -> None:
    handler = _Log(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("fedveil").setLevel(logging.INFO)
    faulthandler.enable()


def _gone(courier: socket.socket) -> bool:
    courier.setblocking(False)
    try:
        return courier.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _soon() -> float:
    return time.monotonic() + _FRAME_PATIENCE


if __name__ == "__main__":
    main()
