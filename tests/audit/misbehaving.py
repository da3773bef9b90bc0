"""Attacks that go wrong, each in its own way; run in a process of their own."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch


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


def raises(view: Any, settings: Any, progress: Any) -> dict[str, torch.Tensor]:
    raise ValueError("the picture would not come out")


def dies(view: Any, settings: Any, progress: Any) -> dict[str, torch.Tensor]:
    progress(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leaves(view: Any, settings: Any, progress: Any) -> dict[str, torch.Tensor]:
    os.write(2, b"no more of this")
    os._exit(3)


def hangs(view: Any, settings: Any, progress: Any) -> dict[str, torch.Tensor]:
    progress(0.25)
    time.sleep(600)
    return {}
