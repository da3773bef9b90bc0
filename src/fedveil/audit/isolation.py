"""An attack in a process of its own, which gets the serialised view and its settings, and nothing else.

The process starts in an empty folder, with next to no environment, and is told no path but those of code.
What it is given comes through its standard input; progress and result leave through its standard output:

    kind (1 byte: p progress, r result, e error) · length (8 bytes, little endian) · content

This keeps an attack honest, whoever wrote it by mistake. It is no prison: a process of the same user can
open any file whose path it guesses.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from fedveil.audit.registry import ATTACKS, attack_at, target_of
from fedveil.audit.views import from_bytes
from fedveil.errors import ConfigError, FedVeilError
from fedveil.protocol.stored import as_bytes, from_stored

TIME_LIMIT = 600.0
_HEADER = struct.Struct("<cQ")
_LENGTH = struct.Struct("<Q")
_MOST_WORDS = 2000
# What numerical libraries need to find their code and to share a machine's cores.
_PASSED_ON = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
    *("CUBLAS_WORKSPACE_CONFIG", "SYSTEMROOT"),
)
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from fedveil.audit.isolation import serve; serve()"
)


class AttackError(FedVeilError):
    """An attack's process failed, was killed, or took too long."""


def attacked(
    name: str,
    view: bytes,
    *,
    settings: Mapping[str, Any] | None = None,
    on_progress: Callable[[float], None] = lambda fraction: None,
    time_limit: float = TIME_LIMIT,
    attacks: Mapping[str, str] = ATTACKS,
) -> bytes:
    """Run the attack `name` on a serialised view in a process of its own; returns its result's bytes.

    `settings` are plain data. `on_progress` is called with fractions from 0 to 1. A process that fails, dies
    or is not done after `time_limit` seconds raises an AttackError that says so.
    """
    try:
        told = json.dumps({"attack": target_of(name, attacks), "settings": dict(settings or {})}).encode()
    except (TypeError, ValueError) as reason:
        raise ConfigError(f"The settings of the attack {name!r} must be plain data: {reason}.") from reason
    with tempfile.TemporaryDirectory(prefix="fedveil-attack-") as empty, tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, json.dumps(_code_paths())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            cwd=empty,
            env={"LC_ALL": "C.UTF-8", **{one: os.environ[one] for one in _PASSED_ON if one in os.environ}},
        )
        late = threading.Event()

        def expire() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(time_limit, expire)
        timer.start()
        try:
            result = _conversation(process, [_LENGTH.pack(len(told)), told, view], name, on_progress)
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        if result is not None:
            return result
        if late.is_set():
            raise AttackError(
                f"The attack {name!r} was not done after {time_limit:g} seconds and was stopped: give it more time, or "
                "less to do."
            )
        raise AttackError(f"The attack {name!r} {_ending(process.returncode)}.{_last_words(complaints)}")


def attacked_tensors(result: bytes) -> dict[str, Tensor]:
    """The tensors of an attack's result."""
    return from_stored(result)[1]


def _conversation(
    process: subprocess.Popen[bytes], told: list[bytes], name: str, on_progress: Callable[[float], None]
) -> bytes | None:
    """The result, or None where the process ended without one."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as out:  # if it died before it listened, its end tells
        out.writelines(told)
    with process.stdout as incoming:
        for kind, content in _frames(incoming):
            if kind == b"p":
                on_progress(float(struct.unpack("<d", content)[0]))
            elif kind == b"r":
                process.wait()
                return content
            else:
                raise AttackError(f"The attack {name!r} failed: {content.decode(errors='replace')}")
    process.wait()
    return None


def _frames(incoming: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    while len(header := incoming.read(_HEADER.size)) == _HEADER.size:
        kind, length = _HEADER.unpack(header)
        content = incoming.read(length)
        if len(content) < length or kind not in (b"p", b"r", b"e"):
            return
        yield kind, content


def _code_paths() -> list[str]:
    """Where code is imported from; not the working folder, which may be a run's or hold data."""
    here = Path.cwd()
    own = str(Path(__file__).parents[2])
    paths = [own, *(one for one in sys.path if one and Path(one).is_absolute() and Path(one) != here)]
    return list(dict.fromkeys(paths))


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by signal {-code}, perhaps for want of memory"
    return f"ended without a result (exit code {code})"


def _last_words(complaints: IO[bytes]) -> str:
    complaints.seek(0)
    said = complaints.read().decode(errors="replace").strip()
    return f" It said: {said[-_MOST_WORDS:]}" if said else ""


def serve() -> None:
    """The other side: read view and settings, run the attack, send progress and result."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever an attack prints must not run into its result
    (length,) = _LENGTH.unpack(sys.stdin.buffer.read(_LENGTH.size))
    told = json.loads(sys.stdin.buffer.read(length))
    view = sys.stdin.buffer.read()

    def send(kind: bytes, content: bytes) -> None:
        out.write(_HEADER.pack(kind, len(content)) + content)
        out.flush()

    def progress(fraction: float) -> None:
        send(b"p", struct.pack("<d", min(max(fraction, 0.0), 1.0)))

    try:
        attack = attack_at(told["attack"])
        result = as_bytes({}, attack(from_bytes(view), told["settings"], progress))
    except FedVeilError as reason:
        send(b"e", str(reason).encode())
    except Exception as reason:
        import traceback

        traceback.print_exc()
        send(b"e", f"{type(reason).__name__}: {reason}".encode())
    else:
        send(b"r", result)
