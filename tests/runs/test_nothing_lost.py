"""Nothing computed is ever lost: a resume writes beside what is there, and takes its place once it is as far."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError
from fedveil.runs import session
from fedveil.runs.folder import RunFolder, read_ledger

Small = Callable[..., RunConfig]
RESULTS = ("metrics.jsonl", "model.safetensors", "summary.json")


class Killed(BaseException):
    """Stands in for kill -9."""


@contextmanager
def killed_after(round: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    original = RunFolder.append_metrics

    def fatal(self: RunFolder, row: dict[str, Any]) -> None:
        original(self, row)
        if row["round"] == round:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "append_metrics", fatal)
        with pytest.raises(Killed):
            yield


def results(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RESULTS}


def rounds_of(folder: Path) -> list[int]:
    return [row["round"] for row in RunFolder(folder).metrics()]


def damage_newest(folder: Path) -> None:
    newest = max((folder / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])


def test_a_finished_run_without_checkpoints_is_left_as_it_is(tmp_path: Path, small: Small) -> None:
    first = session.run(small(checkpoint_every=0), tmp_path / "run", quiet=True)
    before, said = results(tmp_path / "run"), list[str]()
    again = session.resume(tmp_path / "run", quiet=True, say=said.append)
    assert again == json.loads(json.dumps(first))
    assert results(tmp_path / "run") == before
    assert said == ["The run is finished, with 10 rounds: nothing is left to do. More rounds: --rounds."]


def test_a_finished_run_is_whole_while_it_is_trained_again(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run(small(checkpoint_every=0), tmp_path / "run", quiet=True)
    before = results(tmp_path / "run")
    for last in (1, 9):
        with killed_after(last, monkeypatch):
            session.resume(tmp_path / "run", changes={"rounds": 12}, quiet=True)
        assert results(tmp_path / "run") == before
    session.resume(tmp_path / "run", changes={"rounds": 12}, quiet=True)
    assert rounds_of(tmp_path / "run") == list(range(1, 13))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 12
    assert {one.name for one in (tmp_path / "run").iterdir()} == {
        *RESULTS,
        *("attempts.json", "config.toml", "data.json", "events.jsonl", "ledger.json"),
    }


def test_rows_of_the_attempt_that_has_caught_up_replace_the_earlier_ones(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run(small(), tmp_path / "run", quiet=True)
    before = results(tmp_path / "run")
    damage_newest(tmp_path / "run")
    with killed_after(11, monkeypatch):
        session.resume(tmp_path / "run", changes={"rounds": 12}, quiet=True)
    assert rounds_of(tmp_path / "run") == list(range(1, 12))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before["model.safetensors"]


def test_a_resume_that_ends_earlier_keeps_the_model_it_found(tmp_path: Path, small: Small) -> None:
    """A damaged newest checkpoint, and a budget that is spent: the resumed run ends at the checkpoint before."""
    config = small(
        scheme="ldp", epsilon=3.0, model_options={"depth": 2, "width": 12}, rounds=10, checkpoint_every=3, loss=None
    )
    session.run(config, tmp_path / "run", quiet=True)
    before = results(tmp_path / "run")
    spent = read_ledger(tmp_path / "run")
    damage_newest(tmp_path / "run")
    said: list[str] = []
    summary = session.resume(tmp_path / "run", changes={"rounds": 15}, quiet=True, say=said.append)
    now = results(tmp_path / "run")
    assert now["model.safetensors"] == before["model.safetensors"]
    assert now["metrics.jsonl"] == before["metrics.jsonl"]
    assert summary["rounds"] == 10
    assert "the model of round 10 stays" in said[-1]
    # What was asked of clients once more is paid for all the same.
    assert (read_ledger(tmp_path / "run").lines[0].epsilon or 0) >= (spent.lines[0].epsilon or 0)


def test_an_unfinished_run_without_a_checkpoint_keeps_its_rows_until_it_has_caught_up(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_after(7, monkeypatch):
        session.run(small(checkpoint_every=0), tmp_path / "run", quiet=True)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with killed_after(3, monkeypatch):
        session.resume(tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_is_never_shortened(tmp_path: Path, small: Small) -> None:
    session.run(small(checkpoint_every=0), tmp_path / "run", quiet=True)
    before = results(tmp_path / "run")
    with pytest.raises(ConfigError, match="has done 10 rounds already"):
        session.resume(tmp_path / "run", changes={"rounds": 4}, quiet=True)
    assert results(tmp_path / "run") == before


def test_good_checkpoints_outlive_damaged_newer_ones(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two newest by name may be the damaged ones."""
    session.run(small(rounds=9), tmp_path / "run", quiet=True)
    kept = tmp_path / "run" / "checkpoints"
    later = [kept / "round-00000020.safetensors", kept / "round-00000021.safetensors"]
    for one in later:
        one.write_bytes(b"damaged")
    with killed_after(11, monkeypatch):
        session.resume(tmp_path / "run", changes={"rounds": 12, "checkpoint_every": 1}, quiet=True)
    assert {one.name for one in kept.iterdir()} == {
        *("round-00000009.safetensors", "round-00000010.safetensors"),
        *(one.name for one in later),
    }
    said: list[str] = []
    session.resume(tmp_path / "run", quiet=True, say=said.append)
    assert len(said) == 2
    assert rounds_of(tmp_path / "run") == list(range(1, 13))


def test_a_damaged_row_in_the_middle_stops_a_resume_and_loses_no_later_row(tmp_path: Path, small: Small) -> None:
    session.run(small(), tmp_path / "run", quiet=True)
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lines[2] = lines[2][:-9]
    file.write_text("\n".join(lines) + "\n")
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 3"):
        session.resume(tmp_path / "run", changes={"rounds": 12}, quiet=True)
    assert file.read_bytes() == before


def test_training_from_python_finds_a_finished_run_finished(tmp_path: Path) -> None:
    import torch

    import fedveil

    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    data = [(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
    given: dict[str, Any] = {"rounds": 3, "seed": 1, "checkpoint_every": 0, "progress": False, "out": tmp_path / "run"}
    first = fedveil.train(net, data, **given)
    before = results(tmp_path / "run")
    again = fedveil.train(net, data, **given, resume=True)
    assert results(tmp_path / "run") == before
    assert (again.summary, again.metrics) == (json.loads(json.dumps(first.summary)), first.metrics)
    for ours, theirs in zip(again.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
