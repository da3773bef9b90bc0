"""Run folders that are not what they seem: links out of them, devices in them, somebody else at work in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedveil.cli import main
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError
from fedveil.report import write_report
from fedveil.runs import session
from fedveil.runs.folder import RunFolder, write_atomically


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "run"
    config = RunConfig(scheme="ldp", clients=3, rounds=2, seed=1, checkpoint_every=1)
    session.run(config, out, quiet=True)
    return out


@pytest.fixture
def received(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "received"))


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedveil", *map(str, words)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.parametrize("name", ["privacy.jsonl", "checkpoints", "metrics.jsonl"])
def test_a_resume_writes_through_no_link_out_of_its_folder(name: str, received: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    inside = received / name
    if inside.is_dir():
        shutil.move(inside, outside)
    else:
        inside.unlink()
    inside.symlink_to(outside)
    before = sorted(outside.iterdir()) if outside.is_dir() else outside.exists()
    with pytest.raises(CheckpointError, match="link out of its folder"):
        session.resume(received, changes={"rounds": 4}, quiet=True)
    assert before == (sorted(outside.iterdir()) if outside.is_dir() else outside.exists())


def test_a_report_reads_through_no_link_out_of_its_folder(received: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    (tmp_path / "mine.toml").write_text('dataset = "a secret of mine"\n')
    (received / "config.toml").unlink()
    (received / "config.toml").symlink_to(tmp_path / "mine.toml")
    with pytest.raises(CheckpointError, match="link out of its folder"):
        write_report([received], tmp_path / "page.html")


def test_a_link_in_the_place_of_a_scratch_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / f".config.toml.{os.getpid()}.tmp").symlink_to(tmp_path / "mine")
    write_atomically(tmp_path / "config.toml", "theirs")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "config.toml").read_text() == "theirs"


_HOLD = """
import sys
from fedveil.runs.folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.take()
print("has it", flush=True)
input()
"""


def test_one_process_at_a_time_trains_in_a_folder(received: Path) -> None:
    files = {one: one.read_bytes() for one in received.rglob("*") if one.is_file()}
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(received)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(CheckpointError, match="Another process"):
            session.resume(received, changes={"rounds": 4}, quiet=True)
        assert files == {one: one.read_bytes() for one in received.rglob("*") if one.is_file()}
        other.kill()  # a killed process holds nothing
    session.resume(received, changes={"rounds": 4}, quiet=True)
    assert json.loads((received / "attempts.json").read_text())["attempts"] == 2
    assert [row["round"] for row in RunFolder(received).metrics()] == [1, 2]  # ε is spent: nobody answers further


def _nested(place: Path) -> None:
    (place / "attempts.json").write_text("[" * 100_000)


def _endless(*names: str) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        for name in names:
            (place / name).unlink(missing_ok=True)
            os.mkfifo(place / name)  # opening it would wait forever

    return change


def _summary(**changes: Any) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        found = json.loads((place / "summary.json").read_text())
        found = {name: value for name, value in {**found, **changes}.items() if value != "gone"}
        (place / "summary.json").write_text(json.dumps(found))

    return change


def _metrics(place: Path) -> None:
    (place / "metrics.jsonl").write_text(f'{{"round": 1, "loss": 1{"0" * 400}}}\n')


CHANGES: dict[str, Callable[[Path], None]] = {
    "nested attempts": _nested,
    "endless attempts": _endless("attempts.json"),
    "endless config": _endless("config.toml"),
    "endless checkpoint": _endless("checkpoints/round-00000009.safetensors"),
    "endless journal": _endless("privacy.jsonl"),
    "markup": _summary(scheme="[/nope]", stopped="[red"),
    "no scheme": _summary(scheme="gone"),
    "no bytes": _summary(bytes_down=None),
    "no seconds": _summary(seconds="gone"),
    "huge": _summary(bytes_down=10**400),
    "text for a figure": _summary(client_view_accuracy="x", coverage="y"),
    "list for a text": _summary(holder=3, loss=[1]),
    "huge loss": _metrics,
}


@pytest.mark.parametrize("name", CHANGES)
def test_strange_files_are_read_or_refused_with_an_exit_code(
    name: str, received: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly")
    CHANGES[name](received)
    page = tmp_path / "page.html"
    for words in (["run", "--resume", "--out", received], ["ledger", received], ["report", received, "--out", page]):
        assert command(monkeypatch, *words) in (0, 2, 7)


def test_what_a_terminal_would_obey_is_spelt_out(
    received: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]0;owned\x07 \x9b2J \u202egnirts [/red]"
    ledger = json.loads((received / "ledger.json").read_text())
    ledger |= {"notes": [hostile], "scheme": hostile}
    (received / "ledger.json").write_text(json.dumps(ledger))
    _summary(scheme=hostile, warning=hostile, ledger=ledger)(received)
    for words in (["ledger", received], ["run", "--resume", "--out", received], ["predict", received / hostile]):
        command(monkeypatch, *words)
    said = capfd.readouterr()
    for one in (said.out, said.err):
        assert not set(one) & set("\x1b\x07\x9b\u202e")
        assert "\\x1b]0;owned\\x07" in one
