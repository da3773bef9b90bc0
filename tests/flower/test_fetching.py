"""A reply that was announced and never uploaded: Flower waits for it, the run and the other clients do not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from fedveil.flower import engine
from fedveil.flower.server_app import serve
from flower.in_process import InProcessGrid, context_of, make_homes

SETTINGS = {"dataset": "digits", "model": "mlp", "clients": 3, "rounds": 4, "seed": 1, "batch_size": 16}


class HalfUploaded(InProcessGrid):
    """Whoever asks for client 0's reply of round 2 waits, as with Flower, until round 4 begins."""

    def __init__(self, homes: Iterable[Path]) -> None:
        super().__init__(homes)
        self.over = threading.Event()

    def push_messages(self, messages: Any) -> list[str]:
        found = super().push_messages(messages)
        if self.sent[-1].metadata.group_id == "4":
            self.over.set()
        return found

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        asked = [one.metadata for one in self.sent if one.metadata.message_id in wanted]
        if any((one.dst_node_id, one.group_id) == (100, "2") for one in asked):
            assert self.over.wait(60)
        return super().pull_messages(wanted)


def test_a_reply_that_is_never_uploaded_holds_up_neither_the_run_nor_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_STUCK", 0.3)
    grid = HalfUploaded(make_homes(tmp_path / "homes", 3))
    serve(grid, context_of(out=str(tmp_path / "run"), scheme="lossless", deadline=1.5, **SETTINGS))
    rows, events = (
        [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    assert [row["clients"] for row in rows] == [3, 2, 3, 3]
    noted = [(one["event"], one["client"], one["round"]) for one in events if "client" in one]
    assert noted[0] == ("missing", 0, 2)
    assert set(noted[1:]) <= {("late", 0, 2)}
