"""Attacks that go wrong, each in its own way; run in a process of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import torch

from fedveil.errors import NotApplicableError


def counts(view: Any, settings: Any, progress: Any) -> dict[str, torch.Tensor]:
    print("chatter that must not run into the result")
    for step in range(4):
        progress(step / 4)
    progress(7.0)
    parameters = torch.cat([one.detach().reshape(-1) for one in view.model().parameters()])
    return {
        "messages": torch.tensor([len(view.messages)]),
        "given": torch.tensor([settings["number"]]),
        "parameters": parameters,
    }


def dies(view: Any, settings: Any, progress: Any) -> dict[str, torch.Tensor]:
    progress(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leaves(view: Any, settings: Any, progress: Any) -> dict[str, torch.Tensor]:
    os.write(2, b"no more of this")
    os._exit(3)


def hangs(view: Any, settings: Any, progress: Any) -> dict[str, torch.Tensor]:
    progress(0.25)
    while True:
        time.sleep(600)


def declines(view: Any, settings: Any, progress: Any) -> dict[str, torch.Tensor]:
    raise NotApplicableError("no head noise")


def moody(view: Any, settings: Any, progress: Any) -> dict[str, torch.Tensor]:
    """Goes well, or wrong in the way that the settings say."""
    if settings["mood"] == "leave":
        leaves(view, settings, progress)
    if settings["mood"] == "raise":
        raise ValueError("not today")
    if settings["mood"] == "decline":
        declines(view, settings, progress)
    length = len(view.known.get("more", ()))
    found = {"victim": view.victim, "length": length, "process": os.getpid()}
    return {name: torch.tensor(value) for name, value in found.items()}


def babbles(view: Any, settings: Any, progress: Any) -> dict[str, torch.Tensor]:
    """Writes to the descriptor on which results leave, which nobody told it."""
    for one in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(one, b"?" * 64)
    os._exit(0)
