"""A worker process: reads requests from its standard input, answers on its standard output, ends when the input does.

Run as a file, in isolated mode and without the rest of FedVeil; it is told where to import from. A message is a
list of parts: their number, their lengths, then the parts themselves.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

Part = bytes | bytearray | memoryview

READY, DONE, REFUSED = b"ready", b"done", b"refused"
KEY, FORGET, ENCRYPT, DECRYPT = b"key", b"forget", b"encrypt", b"decrypt"
LEVEL = struct.Struct("<d4Q")

_COUNT = struct.Struct("<I")


class Reader(Protocol):
    """One end of a pipe, without a buffer."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read what is there, at most the buffer's length; 0 at the end."""
        ...


class Writer(Protocol):
    """The other end."""

    def write(self, part: Part, /) -> int | None:
        """Write some of it; how much."""
        ...


def send(pipe: Writer, parts: Sequence[Part]) -> None:
    """Write a whole message."""
    lengths = struct.pack(f"<{len(parts)}Q", *(len(part) for part in parts))
    for part in (_COUNT.pack(len(parts)) + lengths, *parts):
        rest = memoryview(part)
        while len(rest):
            rest = rest[pipe.write(rest) or 0 :]


def receive(pipe: Reader) -> list[memoryview] | None:
    """Read a whole message; None if the other side has gone."""
    head = _exactly(pipe, _COUNT.size)
    if head is None:
        return None
    (count,) = _COUNT.unpack(head)
    lengths = _exactly(pipe, 8 * count)
    if lengths is None:
        return None
    sizes = struct.unpack(f"<{count}Q", lengths)
    content = _exactly(pipe, sum(sizes))
    if content is None:
        return None
    parts, start = [], 0
    for size in sizes:
        parts.append(content[start : start + size])
        start += size
    return parts


def _exactly(pipe: Reader, length: int) -> memoryview | None:
    content = memoryview(bytearray(length))
    rest = content
    while len(rest):
        got = pipe.readinto(rest)
        if not got:
            return None
        rest = rest[got:]
    return content


def serve() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    requests, replies = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # TenSEAL prints to standard output, which must not reach the pipe
        os.dup2(nowhere, standard)
    paths = receive(requests)
    if paths is None:
        return
    sys.path[:] = [bytes(path).decode() for path in paths]
    work = _chunk_work()
    send(replies, [READY])
    contexts: dict[bytes, object] = {}
    while (request := receive(requests)) is not None:
        kind = bytes(request[0])
        if kind == FORGET:
            contexts.clear()
        elif kind == KEY:
            contexts[bytes(request[1])] = work.restored(bytes(request[2]))
        else:
            context = contexts[bytes(request[1])]
            try:
                answer = _encrypted(work, context, *request[2:]) if kind == ENCRYPT else _read(work, context, request)
            except work.Refused as reason:
                answer = [REFUSED, str(reason).encode()]
            send(replies, answer)


def _chunk_work() -> ModuleType:
    import tenseal  # noqa: F401 - so that nothing is slow any more once this process is ready

    name = "fedveil_chunks"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("chunks.py"))
    if spec is None or spec.loader is None:
        raise ImportError("chunks.py is not beside worker.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _encrypted(work: ModuleType, context: object, slots: memoryview, content: memoryview) -> list[bytes]:
    import numpy as np

    (step,) = _COUNT.unpack(slots)
    values = np.frombuffer(content, dtype=np.float64)
    pieces = (values[start : start + step] for start in range(0, len(values), step))
    return [DONE, *(work.encrypt(context, piece).serialize() for piece in pieces)]


def _read(work: ModuleType, context: object, request: list[memoryview]) -> list[bytes]:
    _, _, head, packed, *chunks = request
    scale, *parms = LEVEL.unpack(head)
    level = work.Level(tuple(parms), scale)
    sizes = struct.unpack(f"<{len(chunks)}I", packed)
    pairs = zip(chunks, sizes, strict=True)
    return [DONE, *(work.decrypt(context, bytes(chunk), size=size, level=level).tobytes() for chunk, size in pairs)]


if __name__ == "__main__":
    serve()
