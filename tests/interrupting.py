"""A run that is interrupted after a certain round, as Ctrl-C would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedveil.config import RunConfig
from fedveil.runs import session
from fedveil.runs.callbacks import Callback
from fedveil.runs.folder import RunFolder

UNSEEDED = RunConfig(
    scheme="nadp",
    rounds=5,
    clients=3,
    seed=1,
    secrets="os",
    checkpoint_every=2,
    model_options={"depth": 2, "width": 8},
)
"""Secrets of the operating system: a round that is repeated then has other figures."""


def same_tensors(ours: Path, theirs: Path) -> bool:
    """Whether two files hold the same tensors, bit for bit; the order of what they say of themselves is chance."""
    first, second = load_file(ours), load_file(theirs)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class _Interrupter:
    def __init__(self, at: int) -> None:
        self._at = at

    def begin(self, folder: RunFolder, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        assert config.rounds > self._at, "the run would be over before it is interrupted"

    def round(self, row: dict[str, Any]) -> None:
        if row["round"] == self._at:
            raise KeyboardInterrupt

    def kept(self) -> None: ...

    def end(self, summary: dict[str, Any]) -> None: ...

    def stopped(self, reason: BaseException) -> None: ...


def interrupted_run(
    config: RunConfig, out: Path, *, at: int, follow: Sequence[Callback] = (), caught: bool = True
) -> None:
    """Run until round `at` is written and everybody in `follow` was told of it."""
    everybody = [*follow, _Interrupter(at)]
    if not caught:
        session.run(config, out, quiet=True, follow=everybody)
    with pytest.raises(KeyboardInterrupt):
        session.run(config, out, quiet=True, follow=everybody)
    assert not RunFolder(out).summary_file.exists()
