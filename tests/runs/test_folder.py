"""The run folder: taken once, files whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError
from fedveil.runs import folder as run_folder
from fedveil.runs import session
from fedveil.runs.folder import RunFolder, write_atomically
from shell import fedveil

Small = Callable[..., RunConfig]


def test_a_folder_that_holds_another_run_is_refused_and_left_alone(tmp_path: Path, small: Small) -> None:
    session.run(small(rounds=2), tmp_path / "run", quiet=True)
    before = {one.name: one.read_bytes() for one in (tmp_path / "run").iterdir() if one.is_file()}
    with pytest.raises(CheckpointError, match=r"holds another run. Continue it with --resume, or give another --out"):
        session.run(small(rounds=3), tmp_path / "run", quiet=True)
    assert {one.name: one.read_bytes() for one in (tmp_path / "run").iterdir() if one.is_file()} == before


def test_a_folder_with_other_files_is_refused_without_mention_of_a_run(tmp_path: Path, small: Small) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="holds other files") as caught:
        RunFolder(tmp_path).start(small())
    assert "--resume" not in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_where_a_folder_belongs_is_refused(tmp_path: Path, small: Small) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        RunFolder(tmp_path / "file").start(small())


def test_an_empty_or_new_folder_is_taken(tmp_path: Path, small: Small) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "a" / "b" / "new"):
        RunFolder(place).start(small())
        assert RunConfig.from_mapping(RunFolder(place).stored_settings()) == small()


def test_a_bad_run_leaves_no_folder_behind(tmp_path: Path, small: Small) -> None:
    with pytest.raises(Exception, match="Unknown scheme"):
        session.run(small(scheme="nosuch"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_metrics_keep_their_order_and_stand_until_a_resume_has_caught_up(tmp_path: Path, small: Small) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start(small())
    assert folder.metrics() == []
    for number in range(1, 6):
        folder.append_metrics({"round": number, "loss": 1 / number})
    assert [row["round"] for row in folder.metrics()] == [1, 2, 3, 4, 5]
    assert [row["round"] for row in folder.go_on(3)] == [1, 2, 3]
    folder.append_metrics({"round": 4, "loss": 7})
    assert folder.metrics()[-1] == {"round": 5, "loss": 1 / 5}
    folder.append_metrics({"round": 5, "loss": 8})
    assert [row["loss"] for row in folder.metrics()] == [1, 1 / 2, 1 / 3, 7, 8]


def test_attempts_are_counted(tmp_path: Path, small: Small) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start(small())
    assert [folder.resume(small()) for _ in range(3)] == [1, 2, 3]
    (tmp_path / "run" / "attempts.json").write_text("{")
    assert folder.resume(small()) == 1


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomically(target, "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, "new and longer")
    assert target.read_text() == "old"
    monkeypatch.undo()
    write_atomically(target, b"bytes")
    assert target.read_bytes() == b"bytes"


def test_the_folder_holds_what_the_documentation_says(straight: Path) -> None:
    names = {one.name for one in straight.iterdir()}
    expected = {"config.toml", "metrics.jsonl", "model.safetensors", "summary.json", "checkpoints", "attempts.json"}
    assert names == expected | {"ledger.json", "data.json", "events.jsonl"}
    assert all(json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.safetensors", "privacy.jsonl"])
def test_a_full_disk_is_told_with_the_file_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """/dev/full takes no byte: whatever is written to this file fails as on a full disk."""
    original = Path.open

    def opened(self: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        ours = mode[0] in "awx" and (self.name == name or self.name.startswith(f".{name}."))
        return original(Path("/dev/full") if ours else self, mode.replace("x", "w"), *rest, **named)

    def opened_new(path: Path, mode: str, **named: Any) -> Any:
        return opened(path, mode)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(run_folder, "open", opened_new, raising=False)
    done = fedveil("run", "--scheme", "ldp", "--rounds", 1, "--clients", 3, "-o", "width=4", "--out", tmp_path / "run")
    assert done.code == 1
    said = done.error.splitlines()[-1]
    assert said.startswith(f"error: {tmp_path / 'run' / name}: No space left")
    assert "go on with --resume, or give another --out" in said


def test_what_is_refused_leaves_no_folder_and_what_is_stopped_can_be_resumed(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "some" / "run"
    with pytest.raises(ConfigError):
        session.run(small(model="mlp", model_options={"wdith": 3}), out, quiet=True)
    assert not (tmp_path / "some").exists()

    def stopped(config: RunConfig, **given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(session, "job_from_config", stopped)
        with pytest.raises(KeyboardInterrupt):
            session.run(small(rounds=2), out, quiet=True)
    assert session.resume(out, quiet=True)["rounds"] == 2
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["note", "resumed", "ended"]
    assert all(event["time"] and event["text"] for event in events)


def test_what_a_kill_left_of_the_very_first_file_is_no_other_run(tmp_path: Path, small: Small) -> None:
    (tmp_path / ".config.toml.123.tmp").write_text("half")
    session.run(small(rounds=1), tmp_path, quiet=True)
    assert not list(tmp_path.glob(".*"))
