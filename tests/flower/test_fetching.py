"""A reply that was announced and never uploaded: Flower waits for it, the run and the other clients do not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Message, RecordDict

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


def test_what_was_answered_is_not_asked_for_again(tmp_path: Path) -> None:
    """A thread that a busy machine has held up may come to it after another one has fetched it."""
    grid = InProcessGrid(make_homes(tmp_path / "homes", 1))
    asked: list[str] = []

    def pulled(identifiers: Iterable[str]) -> list[Message]:
        asked.extend(identifiers)
        return [Message(RecordDict(), 100, "train")]

    grid.pull_messages = pulled  # type: ignore[method-assign]
    fetcher = engine.Fetcher(grid)
    found = [len(fetcher.fetch(wanted, until=float("inf"))) for wanted in (["a"], ["a", "b"])]
    assert (found, asked) == ([1, 1], ["a", "b"])


class Unhurried(InProcessGrid):
    """Every reply is there five seconds after its message, by a clock that stands still while nobody sleeps."""

    def __init__(self, homes: Iterable[Path]) -> None:
        super().__init__(homes)
        self.now = self.pushed = 0.0
        self.looks: list[list[float]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def push_messages(self, messages: Any) -> list[str]:
        self.pushed = self.now
        self.looks.append([])
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        waited = self.now - self.pushed
        self.looks[-1].append(waited)
        return super().pull_messages(message_ids) if waited >= 5 else []


def test_nobody_looks_for_replies_that_cannot_be_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look is a request to the SuperLink for each client: what is learnt from one phase holds for the next ones."""
    grid = Unhurried(make_homes(tmp_path / "homes", 3))
    monkeypatch.setattr(engine, "time", grid)
    monkeypatch.setattr(engine, "_POLL", (0.05, 0.25))
    settings = {**SETTINGS, "rounds": 3, "scheme": "fedavg", "deadline": 60.0}
    serve(grid, context_of(out=str(tmp_path / "run"), **settings))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [3, 3, 3]
    first, *later = grid.looks
    assert len(later) == 3
    assert first[0] == 0.0
    for looks in later:
        assert looks[0] >= 0.7 * 5
        assert looks[-1] < 5 + 0.5
        assert len(looks) < len(first) / 2


class Slow(Unhurried):
    """A grid on which every request takes a tenth of a second, as it does on a busy machine."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.now += 0.1
        return super().pull_messages(message_ids)


def test_looking_for_replies_leaves_the_machine_most_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at ten clients takes a second here; before, another one began a quarter of a second after it."""
    grid = Slow(make_homes(tmp_path / "homes", 10))
    monkeypatch.setattr(engine, "time", grid)
    monkeypatch.setattr(engine, "_POLL", (0.05, 0.25))
    settings = {**SETTINGS, "clients": 10, "rounds": 1, "scheme": "fedavg", "deadline": 60.0}
    serve(grid, context_of(out=str(tmp_path / "run"), **settings))
    (row,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["clients"] == 10
    before_the_first = [waited for waited in grid.looks[0] if waited < 5]
    assert len(before_the_first) * 0.1 <= 0.6 * 5


class Losing(Unhurried):
    """Client 0 loses its message of round 2 on the way, and client 1 its reply of round 3, as with a busy SuperLink."""

    def __init__(self, homes: Iterable[Path]) -> None:
        super().__init__(homes)
        self.lost: list[str] = []

    def answered(self, message: Message, node: int) -> list[Message]:
        where = (node, message.metadata.group_id)
        if where == (100, "2") and "message" not in self.lost:
            self.lost.append("message")
            return []
        replies = super().answered(message, node)
        if where == (101, "3") and "reply" not in self.lost:
            self.lost.append("reply")
            return []
        return replies


def test_a_message_or_a_reply_that_flower_loses_costs_neither_the_client_nor_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is sent again, and a client that has answered it gives the same answer: nobody pays twice."""
    spent = []
    for name, kind in (("calm", Unhurried), ("run", Losing)):
        grid = kind(make_homes(tmp_path / f"homes-{name}", 3))
        monkeypatch.setattr(engine, "time", grid)
        serve(grid, context_of(out=str(tmp_path / name), scheme="nadp", deadline=600.0, **SETTINGS))
        spent.append([desk._memory.spent() for desk in grid.desks.values()])
    assert isinstance(grid, Losing)
    rows, events = (
        [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    assert grid.lost == ["message", "reply"]
    assert [row["clients"] for row in rows] == [3, 3, 3, 3]
    noted = [(one["event"], one["client"], one["round"]) for one in events if "client" in one]
    assert noted == [("again", 0, 2), ("again", 1, 3)]
    assert grid.now < 300
    assert spent[0] == spent[1]
    assert min(spent[0]) > 0
