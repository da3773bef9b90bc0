"""Attacks that go wrong, each in its own way; run in a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedveil.audit.attack import AttackContext, attack
from fedveil.errors import NotApplicableError

wrong = partial(attack, sees="upload", asset="data", reference="mlp", how="goes wrong in its own way")


@wrong("counts")
def counts(view: Any, context: AttackContext, *, number: int) -> dict[str, torch.Tensor]:
    print("chatter that must not run into the result")
    for step in range(4):
        context.progress(step / 4)
    context.progress(7.0)
    parameters = torch.cat([one.detach().reshape(-1) for one in view.model().parameters()])
    return {
        "messages": torch.tensor([len(view.messages)]),
        "given": torch.tensor([number]),
        "parameters": parameters,
    }


@wrong("raises")
def raises(view: Any, context: AttackContext) -> dict[str, torch.Tensor]:
    raise ValueError("the picture would not come out")


@wrong("dies")
def dies(view: Any, context: AttackContext) -> dict[str, torch.Tensor]:
    context.progress(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


@wrong("leaves")
def leaves(view: Any, context: AttackContext) -> dict[str, torch.Tensor]:
    os.write(2, b"no more of this")
    os._exit(3)


@wrong("hangs")
def hangs(view: Any, context: AttackContext) -> dict[str, torch.Tensor]:
    context.progress(0.25)
    time.sleep(600)
    return {}


@wrong("declines")
def declines(view: Any, context: AttackContext) -> dict[str, torch.Tensor]:
    raise NotApplicableError("no head noise")


@wrong("moody")
def moody(view: Any, context: AttackContext, *, mood: str) -> dict[str, torch.Tensor]:
    """Goes well, or wrong in the way that the settings say."""
    if mood == "hang":
        time.sleep(600)
    if mood == "leave":
        leaves.function(view, context)
    if mood == "die":
        dies.function(view, context)
    if mood == "raise":
        raise ValueError("not today")
    if mood == "decline":
        declines.function(view, context)
    length = len(view.known.get("more", ()))
    found = {"victim": view.victim, "length": length, "process": os.getpid()}
    return {name: torch.tensor(value) for name, value in found.items()}


@wrong("babbles")
def babbles(view: Any, context: AttackContext) -> dict[str, torch.Tensor]:
    """Writes to the descriptor on which results leave, which nobody told it."""
    for one in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(one, b"?" * 64)
    os._exit(0)


@wrong("surroundings")
def surroundings(view: Any, context: AttackContext) -> dict[str, torch.Tensor]:
    """Working folder and what lies in it, environment, arguments, open files and import paths, as JSON."""
    here = Path.cwd()
    seen = {
        "folder": str(here),
        "lies here": sorted(one.name for one in here.iterdir()),
        "environment": dict(os.environ),
        "arguments": [*sys.argv, *sys.orig_argv],
        "open files": _open_files(),
        "import paths": sys.path,
    }
    context.progress(1.0)
    return {"seen": torch.frombuffer(bytearray(json.dumps(seen).encode()), dtype=torch.uint8)}


def _open_files() -> list[str]:
    folder = Path("/proc/self/fd")
    found = []
    for one in folder.iterdir() if folder.is_dir() else ():
        try:
            found.append(str(one.readlink()))
        except OSError:  # the descriptor with which the folder itself was read
            continue
    return sorted(found)
