"""An audit as it runs: references first, what fails is noted, what is found is kept, Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from audit.in_process import without_processes
from audit.small_runs import QUICK, subject_of
from fedveil.audit import running
from fedveil.audit.attack import Attack, attacks
from fedveil.audit.findings import AuditStore, Finding, Found, Score, Trial
from fedveil.audit.running import Tick, audit, identity_of
from fedveil.audit.subject import Effort, scene_of
from fedveil.audit.views import View
from fedveil.downlink.architecture import draw
from fedveil.errors import AttackError, ConfigError, NotApplicableError

SINGLE = {"samples": 1, "scheme": "nadp"}


@pytest.fixture(autouse=True)
def _by_pixels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training a judge of pictures takes longer than everything else here."""
    monkeypatch.setattr(running, "scene_of", lambda *given, **more: replace(scene_of(*given, **more), judged=False))


def store(folder: Path) -> AuditStore:
    subject = subject_of(**SINGLE)
    return AuditStore(folder, identity=identity_of(subject.record, QUICK), about={})


def audited(folder: Path, *attacks: str, workers: int = 1, effort: Effort = QUICK, **more: Any) -> dict[str, Finding]:
    found = audit(subject_of(**SINGLE), store(folder), attacks=attacks, effort=effort, workers=workers, **more)
    return {one.name: one for one in found}


def blank(view: View, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Grey pictures."""
    return {"inputs": torch.full((1, 1, 8, 8), 0.5), "labels": torch.zeros(1).long(), "loss": torch.tensor(0.0)}


def test_an_attack_proves_itself_on_its_reference_first_and_then_tells_schemes_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = without_processes(monkeypatch)
    found = audited(tmp_path, "closed-form")
    assert calls[0] == ("closed-form", "fedavg")
    assert {one for _, one in calls[1:]} == {"nadp"}
    alone = found["server/closed-form"]
    assert alone.reference is not None
    assert alone.reference > 20.0 == alone.threshold
    assert alone.verdict == "nothing"
    assert alone.unprotected == 100.0
    assert alone.value is not None
    assert alone.value < 20.0
    assert alone.attempts == 4
    assert (tmp_path / "pictures" / alone.pictures).exists()
    every = [f"server+{count}/closed-form" for count in (1, 3)]
    assert set(found) == {"server/closed-form", "server/sum/closed-form", *every, "wire/closed-form"}


def test_an_attack_that_would_take_too_long_is_stopped_early_and_says_on_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = without_processes(monkeypatch)
    found = audited(tmp_path, "closed-form", effort=replace(QUICK, minutes=1e-9))["server/closed-form"]
    assert calls == [("closed-form", "fedavg")]
    assert found.verdict == "failed"
    assert "On inputs of 1×8×8 under mlp the attack 'closed-form' would take about" in found.reason
    assert "\n" not in found.reason
    assert audited(tmp_path, "closed-form")["server/closed-form"].verdict == "nothing", "it is tried again"


def test_where_nothing_hides_the_gradient_the_twin_is_not_attacked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = without_processes(monkeypatch)
    subject = subject_of(samples=1, scheme="cdp", clip=1e6, dtype="float64")
    kept = AuditStore(tmp_path, identity={}, about={})
    found = {one.name: one for one in audit(subject, kept, attacks=["closed-form"], effort=QUICK, workers=1)}
    assert found["server/closed-form"].verdict == "as if unprotected"
    assert found["server/closed-form"].value == found["server/closed-form"].unprotected
    assert calls.count(("closed-form", "cdp")) == 4 + 4 + 4  # four alone, and four on the wire with their twins


def test_an_attack_that_fails_on_its_reference_says_nothing_and_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = without_processes(monkeypatch)
    calls.instead["closed-form"] = blank
    found = audited(tmp_path, "closed-form")
    assert calls == [("closed-form", "fedavg")]
    for one in found.values():
        assert one.verdict == "not effective"
        assert "on its own reference" in one.reason
        assert (one.value, one.shown) == (None, {})
        assert one.threshold == 20.0
        assert one.reference is not None
        assert one.reference < 20.0
    assert audited(tmp_path, "closed-form") == found, "that is a finding: it is kept"


def test_an_attack_that_gets_nothing_even_without_protection_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = without_processes(monkeypatch)

    def only_plain(view: View, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
        if calls[-1][1] == "fedavg":
            return attacks()["closed-form"](view, settings)
        return blank(view, settings)

    calls.instead["closed-form"] = only_plain
    found = audited(tmp_path, "closed-form")["server/closed-form"]
    assert found.verdict == "not effective"
    assert "even without protection" in found.reason
    assert found.value == found.unprotected


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"inputs": torch.zeros(3, 1, 8, 8)}, "cannot be judged"),
        ({"pictures": torch.zeros(1, 1, 8, 8)}, "cannot be judged"),
    ],
)
def test_a_result_that_is_none_is_a_failure_of_that_attack_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Tensor], reason: str
) -> None:
    calls = without_processes(monkeypatch)
    calls.instead["received"] = lambda view, settings: result
    found = audited(tmp_path, "received", "closed-form")
    assert found["client/received"].verdict == "failed"
    assert reason in found["client/received"].reason
    assert found["server/closed-form"].verdict == "nothing"


def test_findings_are_kept_and_failures_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = without_processes(monkeypatch)

    def dead(view: View, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
        raise AttackError("The attack 'probe' was killed.")

    calls.instead["probe"] = dead
    said: list[str] = []
    first = audited(tmp_path, "closed-form", "received", "probe", say=said.append)
    assert first["client/probe"].verdict == "failed"
    assert said == []
    calls.clear()
    del calls.instead["probe"]
    second = audited(tmp_path, "closed-form", "received", "probe", say=said.append)
    assert {name for name, _ in calls} == {"probe"}
    assert second["client/probe"].verdict != "failed"
    assert said == [f"{len(first) - 1} of {len(first)} trials are in {tmp_path / 'audit.json'} already."]
    calls.clear()
    assert audited(tmp_path, "closed-form", "received", "probe") == second
    assert calls == []


def test_an_attack_that_dies_on_its_reference_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(view: View, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
        raise AttackError("The attack 'labels' was killed.")

    without_processes(monkeypatch).instead["labels"] = dead
    found = audited(tmp_path, "labels")["server/labels"]
    assert found.verdict == "failed"
    assert found.reason.startswith("on its reference")
    assert not store(tmp_path).has("server/labels")


def test_another_attack_later_adds_to_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_processes(monkeypatch)
    audited(tmp_path, "received")
    assert set(audited(tmp_path, "parameters")) == {"client/parameters"}
    assert set(store(tmp_path).findings) == {"client/received", "client/parameters"}


def test_what_cannot_be_tried_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = without_processes(monkeypatch)

    def declines(view: View, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
        raise NotApplicableError("batch of 900 samples")

    calls.instead["received"] = declines
    found = audited(tmp_path, "received")["client/received"]
    assert (found.verdict, found.reason) == ("not applicable", "batch of 900 samples")
    assert store(tmp_path).has("client/received")


@pytest.mark.parametrize(
    ("attacks", "more", "complaint"),
    [
        (["clsed-form"], {}, "Did you mean 'closed-form'"),
        (["surroundings"], {}, "Unknown attack"),
        (["phi"], {}, "None of these attacks fits a run of nadp: phi"),
        (["received"], {"workers": 0}, "workers must be at least 1"),
        (["received"], {"effort": Effort(device="gpu9")}, "Unknown device 'gpu9'"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_at_once(
    tmp_path: Path, attacks: list[str], more: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        audit(subject_of(**SINGLE), store(tmp_path), attacks=attacks, **{"effort": QUICK, **more})
    assert list(tmp_path.iterdir()) == []


def test_ticks_count_trials_up_to_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_processes(monkeypatch)
    ticks: list[Tick] = []
    found = audited(tmp_path, "closed-form", "received", tick=ticks.append)
    done = [one.done for one in ticks]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, len(found))
    assert {one.total for one in ticks} == {len(found)}
    assert {name for one in ticks for name in one.running} == {"closed-form", "received"}
    assert ticks[-1].running == {}


def test_what_this_process_computes_for_one_attack_is_not_disturbed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = without_processes(monkeypatch)
    calls.instead = {"closed-form": blank, "labels": blank}
    model, example = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.ones(2, 4)
    score = Trial.score

    def traced(trial: Trial, found: Sequence[Found]) -> Score:
        # While torch.fx traces in one thread, every network that another thread runs is taken for a part of that one.
        for _ in range(40):
            draw(model, example, traced=True)
        return score(trial, found)

    monkeypatch.setattr(Trial, "score", traced)
    found = audited(tmp_path, "closed-form", "labels", workers=2)
    assert {one.attack for one in found.values()} == {"closed-form", "labels"}
    assert {one.verdict for one in found.values()} == {"not effective"}


def misbehaving(**instead: str) -> Mapping[str, Attack]:
    """Attacks of which some go wrong in their processes."""
    wrong = {name: replace(attacks()[name], target=f"audit.misbehaving:{how}") for name, how in instead.items()}
    return {**attacks(), **wrong}


@pytest.mark.slow
def test_a_process_that_dies_or_declines_is_noted_and_the_audit_goes_on(tmp_path: Path) -> None:
    known = misbehaving(received="dies", probe="declines")
    found = audited(tmp_path, "received", "probe", known=known)
    assert found["client/received"].verdict == "failed"
    assert "killed by signal 9" in found["client/received"].reason
    assert (found["client/probe"].verdict, found["client/probe"].reason) == ("not applicable", "no head noise")


def test_ctrl_c_ends_what_runs_at_once_and_keeps_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = misbehaving(probe="hangs")
    children = running_children()
    main = threading.main_thread().ident
    assert main is not None
    begun: list[bool] = []

    def tick(now: Tick) -> None:
        # "received" goes first, then "probe" hangs for ever after a quarter of its work.
        if now.running.get("probe") == 0.25 and not begun:
            begun.append(True)
            signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        audited(tmp_path, "received", "probe", "parameters", known=known, tick=tick)
    assert begun
    assert running_children() == children
    kept = store(tmp_path)
    assert kept.has("client/received")
    assert "client/probe" not in kept.findings, "stopped is not failed"
    calls = without_processes(monkeypatch)
    found = audited(tmp_path, "received", "probe", "parameters")
    assert {name for name, _ in calls} == {"probe", "parameters"}
    assert all(one.verdict != "failed" for one in found.values())


def running_children() -> set[str]:
    place = Path("/proc/self/task")
    if not place.exists():
        return set()
    lists = [one / "children" for one in place.iterdir()]
    return {child for one in lists if one.exists() for child in one.read_text().split()}
