"""Membership tables: a small run attacked for real, and their verdicts on figures that are made up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from torch import Tensor

from fedveil.audit.attack import attacks as declared
from fedveil.audit.findings import Score
from fedveil.audit.running import AttackProcess
from fedveil.audit.views import from_bytes
from fedveil.errors import AttackError, NumericError
from papers import Cell, Options, attacks, find, membership, mpdp, reproduce
from papers import lossless as paper
from papers.cells import Figures, Store
from papers.entries import built
from papers.membership import (
    ADAPTIVE,
    BARE,
    LIKELIHOOD,
    NAMES,
    NETWORK,
    RECEIVED,
    WAYS,
    members_told,
    shown_as,
)
from papers.report import Check, Report
from papers.stage import Stage

ROWS = tuple(NAMES)
LOSSLESS_ENTRY, MPDP_ENTRY = find("lossless-table3"), find("mpdp-table4")
LOSSLESS, MPDP = paper.benches(False), mpdp._T4.form(False)["benches"]
EFFORT = {"shadows": 8, "epochs": 40}
PROVEN = {f"{row} reference": 75.0 for row in ROWS}


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference runs are tested where audits are."""
    monkeypatch.setattr(membership, "_proofs", lambda stage: dict.fromkeys(ROWS, 75.0))


class Here(AttackProcess):
    """The attack in this process: what keeps it apart is tested where isolation is."""

    def __enter__(self) -> Self:
        return self

    def run(self, view: bytes, *, settings: Mapping[str, Any] | None = None, **_: object) -> dict[str, Tensor]:
        try:
            return declared()[self.name](from_bytes(view), dict(settings or {}), lambda done: None)
        except NumericError as reason:
            raise AttackError(str(reason)) from reason


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacks, "AttackProcess", Here)


def made_up(accuracy: float = 50.0, *, ways: Iterable[str] = (RECEIVED,), **values: float) -> Figures:
    """Every attack gets what its way is given, 3 points up and down."""
    figures: Figures = {"accuracy": accuracy, "train accuracy": 100.0, **PROVEN}
    for row in ROWS:
        for way in ways:
            value = values[way]
            figures |= {f"{row} {way}": value, f"{row} {way} low": value - 3, f"{row} {way} high": value + 3}
    return figures


def veiled(accuracy: float = 50.0, **values: float) -> Figures:
    return made_up(accuracy, ways=WAYS, **values)


def lossless(plain: Figures, ours: Figures) -> Report:
    """Three seeds of which figures vary by nothing, so that they tell."""
    both = {"cifar10/fedavg": plain, "cifar10/lossless": ours}
    return LOSSLESS_ENTRY.report({name: dict.fromkeys((1, 2, 3), one) for name, one in both.items()}, False)


def signs(report: Report, *words: str) -> set[str]:
    found = {one.sign for one in report.checks if all(word in one.claim for word in words)}
    assert found, words
    return found


def test_a_veil_that_calibration_undoes_holds_only_against_who_ignores_it() -> None:
    report = lossless(made_up(received=77), veiled(received=50, adaptive=76, bare=77))
    assert signs(report, "as received") == {"yes"}
    assert signs(report, "noise taken off") == {"no"}
    assert signs(report, "on unprotected FedAvg") == {"yes"}
    assert report.standing == "so far refuted in part"  # the other defences were not run
    assert {row[-1] for row in report.rows if row[1] in ("last layer", "last three")} == {"as if unprotected"}


def test_a_veil_that_holds_reproduces_the_table_at_its_accuracy_alone() -> None:
    report = lossless(made_up(93.0, received=77), veiled(93.0, received=50, adaptive=51, bare=77))
    assert report.standing == "so far reproduced"
    elsewhere = lossless(made_up(received=77), veiled(received=50, adaptive=51, bare=77))
    assert elsewhere.verdict.startswith("so far holds at other numbers: accuracy, FedAvg, %: 50.0, printed 93.18")
    assert {row[-1] for row in report.rows if row[1] == "last layer"} == {"nothing"}


def test_a_loss_of_accuracy_is_seen() -> None:
    report = lossless(made_up(60.0, received=77), veiled(57.0, received=50, adaptive=51, bare=77))
    assert signs(report, "accuracy within") == {"no"}


def test_the_method_is_judged_beside_the_other_defences() -> None:
    made = {
        "fedavg": made_up(received=77),
        "lossless": veiled(received=50, adaptive=51, bare=77),
        "ppdl": made_up(45.0, received=60),
        "dbcl": made_up(49.5, received=52),
        "spn": made_up(55.0, received=40),
    }
    figures = {f"cifar10/{name}": dict.fromkeys((1, 2, 3), one) for name, one in made.items()}
    report = LOSSLESS_ENTRY.report(figures, False)
    fewer = [
        signs(report, f"fewer members are told under lossless than under {one}") for one in ("ppdl", "dbcl", "spn")
    ]
    assert fewer == [{"yes"}, {"open"}, {"no"}]
    ahead = [signs(report, f"lossless is more accurate than {one}") for one in ("ppdl", "dbcl", "spn")]
    assert ahead == [{"yes"}, {"yes"}, {"no"}]
    told = [signs(report, f", {one}: members are told better") for one in ("ppdl", "dbcl", "spn")]
    assert told == [{"yes"}, {"no"}, {"no"}]


def test_a_defence_whose_model_has_not_trained_is_no_rival() -> None:
    made = {
        "fedavg": made_up(received=77),
        "lossless": veiled(received=80, adaptive=80, bare=80),
        "dbcl": {**made_up(11.0, received=50), "commonest": 10.0, "train accuracy": 12.0},
    }
    report = LOSSLESS_ENTRY.report(
        {f"cifar10/{name}": dict.fromkeys((1, 2, 3), one) for name, one in made.items()}, False
    )
    for words in ("more accurate than dbcl", "fewer members are told under lossless than under dbcl"):
        assert signs(report, "cifar10: ", words) == {"open"}
        assert "has not trained" in next(one.seen for one in report.checks if words in one.claim)
    assert signs(report, "cifar10, dbcl: members are told better") == {"open"}


def test_attackers_whom_the_paper_did_not_run_are_told_apart() -> None:
    report = lossless(made_up(received=77), veiled(received=50, adaptive=76, bare=77))
    ours = {one.claim for one in report.checks if one.adaptive}
    assert all("noise taken off" in one or "likelihood ratio" in one for one in ours)
    assert len([one for one in ours if one.startswith("cifar10,")]) == len(ROWS) + 1
    assert (
        "own attacks and comparisons 5 of 5 held, by attackers of ours, who know the scheme, 1 of 6" in report.verdict
    )


def test_an_attack_that_fails_without_protection_settles_nothing() -> None:
    report = lossless(made_up(received=55), veiled(received=50, adaptive=50, bare=55))
    assert signs(report, "blind guess") == {"open"}
    assert signs(report, "on unprotected FedAvg") == {"no"}
    assert {row[-1] for row in report.rows if row[1] == "last layer"} == {"attack not effective here"}


def test_the_unprotected_run_beside_it_is_what_proves_an_attack() -> None:
    weak: Figures = {**made_up(received=77), "second reference": 58.0}
    report = lossless(weak, veiled(received=50, adaptive=76, bare=77))
    assert signs(report, "second to last", "noise taken off") == {"no"}


def test_nothing_run_leaves_every_claim_open() -> None:
    for entry in (LOSSLESS_ENTRY, MPDP_ENTRY):
        report = entry.report({}, False)
        assert {one.sign for one in report.checks} == {"open"}
        assert {len(row) for row in report.rows} == {len(report.columns)}
        assert "not decidable" in report.verdict


def test_a_model_that_was_never_trained_says_nothing_about_its_veil() -> None:
    results = {
        "cifar10/fedavg": {1: made_up(received=77)},
        "cifar10/mpdp": {1: veiled(10.0, received=50, adaptive=50, bare=50)},
        "cifar10/mpdp-quiet": {1: veiled(received=50, adaptive=74, bare=75)},
    }
    report = MPDP_ENTRY.report(results, False)
    assert signs(report, "ε = 3,", "blind guess") == {"open"}
    assert all("no members to tell" in one.seen for one in blind_guesses(report, "ε = 3,"))
    assert signs(report, "ε = 10000,", "noise taken off") == {"no"}
    assert signs(report, "accuracy within") == {"no"}
    shown = {(row[1], row[5]): row for row in report.rows}
    assert shown["MP-DP", "last layer"][7] == "50.3"
    assert shown["MP-DP", "last layer"][-1] == "no members to tell, veiled or not"
    missing = [] if built("hybridalpha") else ["HybridAlpha"]
    assert [row[1] for row in report.rows if row[3] == "not built"] == missing


def blind_guesses(report: Report, words: str) -> list[Check]:
    return [one for one in report.checks if words in one.claim and "blind guess" in one.claim]


def test_the_papers_own_losses_of_accuracy_are_within_the_bound() -> None:
    losses = [by_method["FedAvg"][0] - by_method["MP-DP"][0] for by_method in mpdp._T4["printed"].values()]
    assert [round(one, 2) for one in losses] == [1.45, 2.94]
    assert max(losses) <= mpdp._T4["points"]


def test_a_run_that_diverged_is_named_as_such() -> None:
    results = {"cifar10/fedavg": {1: made_up(received=77)}, "cifar10/mpdp": {1: {"stopped": "the training diverged"}}}
    report = MPDP_ENTRY.report(results, False)
    assert {one.seen for one in blind_guesses(report, "ε = 3,")} == {"the training diverged"}


def test_figures_are_averaged_over_seeds() -> None:
    results = {"a": {1: made_up(received=60), 2: made_up(received=70)}}
    assert members_told(results, "a", "last", RECEIVED) == Score(65, 62, 68)
    assert members_told(results, "a", "last", ADAPTIVE) is None


def test_schemes_differ_in_nothing_but_the_scheme() -> None:
    own = {"scheme", "epsilon", "delta", "head_groups", "skip_cancelling", *MPDP[0]["noisy"]}
    own |= {"clip", "accounting", "collusion", "masked", "model_options"}  # of what clips single records, under masks
    for entry, benches in ((LOSSLESS_ENTRY, LOSSLESS), (MPDP_ENTRY, MPDP)):
        for bench in benches:
            cells = [one for one in entry.cells(False) if one.name.startswith(f"{shown_as(bench)}/")]
            shared = [{key: value for key, value in one.identity().items() if key not in own} for one in cells]
            assert len(cells) > 1
            assert all(one == shared[0] for one in shared)


def test_small_steps_without_noise_stand_beside_noise() -> None:
    for quick in (False, True):
        cells = {one.name.split("/")[1]: one.settings for one in MPDP_ENTRY.cells(quick)}
        slow = [
            (one["lr"], one["momentum"]) for name, one in cells.items() if name in ("fedavg-slow", "mp-cdp", "mpdp")
        ]
        assert len(slow) == 3
        assert len(set(slow)) == 1
        assert (cells["fedavg"]["lr"], cells["fedavg"]["momentum"]) != slow[0]
        assert cells["mpdp-quiet"]["momentum"] == cells["fedavg"]["momentum"]


def test_figures_of_another_effort_are_refused(tmp_path: Path) -> None:
    cell = Cell("a", {"rounds": 1}, more=EFFORT)
    store = Store(tmp_path / "kept.json", entry="e")
    store.keep(cell, 1, {})
    assert store.has(cell, 1)
    with pytest.raises(Exception, match="shadows"):
        store.has(replace(cell, more={**EFFORT, "shadows": 9}), 1)


@pytest.mark.slow
def test_a_small_veiled_run_is_attacked_three_ways(
    proven: None, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (quick,) = paper.benches(True)
    bench = {**quick, "samples": 100, "shadows": 2, "epochs": 3, "settings": {**quick["settings"], "rounds": 60}}
    monkeypatch.setitem(paper._T3["quick"], "benches", [bench])
    monkeypatch.setattr(membership, "ATTACKS", ((NETWORK, ("last", "second")), (LIKELIHOOD, (LIKELIHOOD,))))
    report = reproduce("lossless-table3", Options(quick=True, out=tmp_path, only=["digits/lossless"]))
    kept = Store(tmp_path / "lossless-table3-quick.json", entry="lossless-table3-quick").results()
    figures = kept["digits/lossless"][1]
    assert float(str(figures["train accuracy"])) > float(str(figures["accuracy"])) > 50.0
    for row in ("last", "second", LIKELIHOOD):
        for way in WAYS:
            found = members_told(kept, "digits/lossless", row, way)
            assert found is not None, figures
            assert found.surely < found.value
    # Scales on hidden layers change nothing for who standardises; rounding may turn a candidate or two of fifty.
    for way in (RECEIVED, ADAPTIVE):
        ours, bare = (members_told(kept, "digits/lossless", "second", one) for one in (way, BARE))
        assert ours is not None
        assert bare is not None
        assert abs(ours.value - bare.value) <= 5.0
    assert signs(report, "on unprotected FedAvg") == {"open"}


DIVERGING = {"dataset": "digits", "clients": 2, "scheme": "fedavg", "loss": "square", "rounds": 60}


def test_a_run_without_a_single_round_is_kept_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NumericError("too large")

    monkeypatch.setattr(membership, "enacted", fail)
    cell = Cell("a", {**DIVERGING, "lr": 1.0}, 40, more=EFFORT)
    figures = membership.work(Stage(), cell, 1, lambda done, rounds: None)
    assert figures["stopped"] == "diverged, and there is no model to attack: too large"
    assert not [key for key in figures if key.startswith(ROWS)]


def test_of_a_run_that_diverges_the_last_model_that_did_not_is_attacked(proven: None, here: None) -> None:
    cell = Cell("a", {**DIVERGING, "lr": 3.0}, 40, more={"shadows": 2, "epochs": 1})
    figures = membership.work(Stage(quick=True), cell, 1, lambda done, rounds: None)
    assert "whose model is attacked" in str(figures["stopped"])
    assert "accuracy" in figures
    assert [key for key in figures if key.startswith("second received")]
