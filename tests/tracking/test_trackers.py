"""Flags that stand alone or before a place; and a tracker that fails costs no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.config import RunConfig
from fedveil.runs import session
from fedveil.tracking import EventFiles, Tracked, trackers
from shell import fedveil

pytest.importorskip("tensorboard", reason="needs the extra tensorboard")

SMALL = RunConfig(scheme="fedavg", rounds=3, clients=3, seed=1, model_options={"depth": 2, "width": 8})
FLAGS = ("--rounds", 1, "--clients", 3, "--seed", 1, "-o", "depth=2", "-o", "width=8")


def test_nothing_is_tracked_unless_asked_for(tmp_path: Path) -> None:
    assert trackers(Tracked(), tmp_path / "run") == []


@pytest.mark.parametrize("part", ["nadp/seed-1"])
def test_runs_of_a_comparison_have_folders_of_their_own(part: str) -> None:
    assert Tracked("events", "uri").within(part) == Tracked(f"events/{part}", "uri")
    assert Tracked("", None).within(part) == Tracked("", None)  # each in its own run folder


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (("--tensorboard", "--quiet"), "run/tensorboard"),
        (("--quiet", "--tensorboard"), "run/tensorboard"),
        (("--tensorboard", "events", "--quiet"), "events"),
        (("--tensorboard=events", "--quiet"), "events"),
    ],
    ids=["alone", "last", "before a place", "with a place"],
)
def test_the_flag_stands_alone_or_before_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fedveil("run", *FLAGS, "--out", "run", *given)
    assert (done.code, done.error) == (0, "")
    assert list((tmp_path / place).glob("events.out.tfevents.*"))


def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: EventFiles, row: dict[str, object]) -> None:
        raise OSError("no space left")

    said: list[str] = []
    monkeypatch.setattr(EventFiles, "round", full)
    follow = trackers(Tracked(""), tmp_path / "run", say=said.append)
    summary = session.run(SMALL, tmp_path / "run", quiet=True, follow=follow)
    assert summary["rounds"] == 3
    (text,) = said
    assert text.startswith("TensorBoard takes no more (OSError: no space left)")
