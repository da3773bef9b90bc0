"""A desk whose parcels say what is to happen, for real workers in processes of their own, and a home for them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DESK = ("--handler", "desks:Desk")


class Desk:
    """Answers `word` or `word:argument`, and notes the beginning and the end of every parcel."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def handle(self, parcel: bytes) -> bytes:
        word, _, argument = parcel.partition(b":")
        name = argument[:40].decode()
        self.note(f"begin {word.decode()} {name}")
        reply: bytes = getattr(self, word.decode())(argument)
        self.note(f"end {word.decode()} {name}")
        return reply

    def note(self, line: str) -> None:
        with (self.home / "notes").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def pid(self, _: bytes) -> bytes:
        return str(os.getpid()).encode()

    def echo(self, argument: bytes) -> bytes:
        return argument

    def digest(self, argument: bytes) -> bytes:
        return hashlib.sha256(argument).digest() + argument

    def wait(self, argument: bytes) -> bytes:
        until((self.home / f"go-{argument.decode()}").exists)
        return b"waited for " + argument

    def die(self, _: bytes) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("dead processes say nothing")

    def fail(self, argument: bytes) -> bytes:
        raise RuntimeError("the desk fell over")

    def quit(self, _: bytes) -> bytes:
        raise SystemExit(3)

    def fork(self, _: bytes) -> bytes:
        """Leave a child behind that outlives the worker."""
        child = os.fork()
        if not child:
            until((self.home / "go-child").exists)
            os._exit(0)
        return str(child).encode()

    def surroundings(self, _: bytes) -> bytes:
        umask = os.umask(0o077)
        return json.dumps(
            {
                "environment": dict(os.environ),
                "folder": os.getcwd(),
                "session": os.getsid(0) == os.getpid(),
                "umask": umask,
                "input": os.readlink("/proc/self/fd/0"),
                "output": os.readlink("/proc/self/fd/1"),
            }
        ).encode()


def until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait for a condition that must come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def notes(home: Path) -> list[str]:
    path = home / "notes"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def new_home(folder: Path, settings: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "client.toml").write_text(f"client = 0\n{settings}", encoding="utf-8")
    return folder


def a_home(folder: Path, settings: str = "") -> Iterator[Path]:
    """A home whose worker is ended afterwards, in whatever state it is then."""
    from fedveil.flower.worker_client import stop

    home = new_home(folder, settings)
    try:
        yield home
    finally:
        stop(home, patience=0.2)
