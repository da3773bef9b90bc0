"""Attacks without processes, for what goes on around them; they still get bytes and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import pytest
from torch import Tensor

from fedveil.audit import running
from fedveil.audit.attack import Attack
from fedveil.audit.views import ServerHistory, View, from_bytes

Substitute = Callable[[View, Mapping[str, Any]], Mapping[str, Tensor]]


class Calls(list[tuple[str, str]]):
    """Which attack was made, on a view of which scheme."""

    def __init__(self) -> None:
        super().__init__()
        self.instead: dict[str, Substitute] = {}


def without_processes(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()

    class InProcess:
        def __init__(self, name: str, *, attacks: Mapping[str, Attack], **more: object) -> None:
            self.name = name
            self._attack = attacks[name]

        def __enter__(self) -> Self:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, reason: BaseException | None, trace: TracebackType | None
        ) -> None:
            self.close()

        def close(self) -> None:
            pass

        def run(
            self, view: bytes, *, settings: Mapping[str, Any], on_progress: Callable[[float], None], time_limit: float
        ) -> Mapping[str, Tensor]:
            opened = from_bytes(view)
            first = opened.rounds[0] if isinstance(opened, ServerHistory) else opened
            calls.append((self.name, first.facts.scheme))
            on_progress(0.5)
            if self.name in calls.instead:
                return calls.instead[self.name](opened, settings)
            return self._attack(opened, settings, on_progress)

    monkeypatch.setattr(running, "AttackProcess", InProcess)
    return calls
