"""No waiting for what is on its way between machines: in one process a reply is there or never comes."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _without_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pytest.importorskip("fedveil.flower.engine", reason="needs the extra flower")
    monkeypatch.setattr(engine, "_GRACE", 0.05)
    monkeypatch.setattr(engine, "_POLL", (0.005, 0.05))
    monkeypatch.setattr(engine, "_TRY_AGAIN", 0.05)
