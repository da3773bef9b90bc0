"""Writing files so that a killed process leaves the old one or the new one, never half of one."""

from __future__ import annotations

import os
from pathlib import Path

from fedveil.errors import CheckpointError


def refuse_links(folder: Path) -> None:
    """Refuse a folder from which a link leads out: what is written there lands elsewhere, or is read from there."""
    own = folder.resolve()
    for one in folder.rglob("*"):
        if one.is_symlink() and not one.resolve().is_relative_to(own):
            raise CheckpointError(f"{one} is a link out of its folder: put the file itself there, or remove it.")


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write beside the target, flush to disk, then rename over it."""
    raw = content.encode() if isinstance(content, str) else content
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.unlink(missing_ok=True)
    try:
        with scratch.open("xb") as file:  # a new file, never one that somebody's link leads to
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)  # a full disk is not filled further
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
