"""The ledger's lines: one uncovered field settles the matter, and assumptions stand beside every claim."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fedveil.ledger.accountant import CLIENTS, COLLUSION, SERVER, Accountant
from fedveil.ledger.correlated import NoiseLayout
from fedveil.ledger.gaussian import epsilon_of
from fedveil.ledger.releases import Caveats, Release
from fedveil.ledger.statement import OUTSIDER, Ledger, PaperFigure, state

NOISED = Release("upload.gradients", "client", ("server",), "gradients", about="data", protection="noised")
MASKED = replace(NOISED, protection="masked")
WEIGHT = Release("upload.weight", "client", ("server",), "samples", about="data", protection="masked")
OPEN = replace(NOISED, field="upload.values", protection="open")
MODEL = Release("train.parameters", "server", ("clients",), "the model")
REMARKS = Caveats(assumptions=("keys are right",), unprotected=("the model",), paper="σ = 1", notes=("a note",))


def accountant(*, mu2: float = 1.0, **settings: object) -> Accountant:
    size = 4
    found = Accountant(size, **settings)  # type: ignore[arg-type]
    first, second = np.triu_indices(size, k=1)
    pairs = np.full(len(first), 1e9)
    found.charge(NoiseLayout(tuple(range(size)), np.ones(size), np.full(size, 1 / mu2 / size), first, second, pairs))
    return found


def stated(
    *releases: Release, privacy_journal: Accountant | None = None, unit: str = "record", simulation: bool = False
) -> Ledger:
    return state(
        scheme="a scheme",
        releases=releases,
        caveats=REMARKS,
        accountant=privacy_journal,
        delta=1e-5,
        unit=unit,
        paper=PaperFigure("σ = 1", 1.0, 2.0, 1.5),
        simulation=simulation,
        notes=("a note",),
    )


def test_noise_on_everything_that_carries_data_gives_epsilon_and_delta() -> None:
    ledger = stated(NOISED, WEIGHT, MODEL, privacy_journal=accountant())
    line = ledger.line(SERVER)
    assert line.verdict == "differential privacy"
    assert line.mu == pytest.approx(1.0, rel=1e-6)
    assert line.epsilon == epsilon_of(line.mu, 1e-5)
    assert line.delta == 1e-5
    assert line.unit == "one record of one client"
    assert line.relation == "replace one record; numbers of samples are public"
    assert line.assumptions == ("keys are right",)
    assert line.result.startswith("(ε = 4.3")
    assert ledger.rounds == 1


def test_one_uncovered_field_settles_the_matter_for_server_colluders_and_outsiders() -> None:
    ledger = stated(NOISED, OPEN, WEIGHT, privacy_journal=accountant(collusion=0.25))
    for name in (SERVER, COLLUSION, OUTSIDER):
        assert ledger.line(name).verdict == "none"
        assert "upload.values" in ledger.line(name).why
        assert ledger.line(name).epsilon is None
    assert ledger.line(CLIENTS).verdict == "differential privacy"


def test_a_bare_field_that_does_not_reach_the_server_does_not_matter_to_it() -> None:
    elsewhere = replace(OPEN, to=("clients",))
    assert stated(NOISED, elsewhere, privacy_journal=accountant()).line(SERVER).verdict == "differential privacy"


def test_masks_alone_leave_the_aggregate() -> None:
    ledger = stated(MASKED, WEIGHT, MODEL)
    assert ledger.line(SERVER).verdict == "aggregate only"
    assert ledger.line(SERVER).epsilon is None
    assert ledger.line("server and colluding clients").verdict == "aggregate only"
    assert ledger.line(OUTSIDER).verdict == "aggregate only"
    assert ledger.line(CLIENTS).verdict == "none"
    assert "the models" in ledger.line(CLIENTS).why
    veiled = stated(MASKED, WEIGHT, replace(MODEL, hiding="secret scales"))
    assert "veiled models" in veiled.line(CLIENTS).why


def test_noise_on_one_field_and_masks_on_another_claim_the_aggregate_only() -> None:
    values = replace(MASKED, field="upload.values")
    assert stated(NOISED, values, WEIGHT, privacy_journal=accountant()).line(SERVER).verdict == "aggregate only"


def test_colluders_have_a_line_of_their_own_that_says_how_sure_it_is() -> None:
    privacy_journal = accountant(collusion=0.25)
    line = stated(NOISED, WEIGHT, privacy_journal=privacy_journal).line(COLLUSION)
    assert line.verdict == "differential privacy"
    assert line.mu is not None
    server = stated(NOISED, WEIGHT, privacy_journal=privacy_journal).line(SERVER).mu
    assert server is not None
    assert line.mu > server
    assert "25% of a round's clients" in line.why
    assert "every set of 1 colluders was tried" in line.why
    assert "not a proof" not in line.why
    privacy_journal.certified = False
    assert "an estimate, not a proof" in stated(NOISED, WEIGHT, privacy_journal=privacy_journal).line(COLLUSION).why


def test_a_trusted_server_is_no_adversary_of_the_account() -> None:
    ledger = stated(replace(NOISED, protection="open"), privacy_journal=accountant(trusted=True, collusion=0.25))
    assert [line.adversary for line in ledger.lines] == [SERVER, CLIENTS, OUTSIDER]
    assert [line.verdict for line in ledger.lines] == ["none", "differential privacy", "none"]
    assert "their part" not in ledger.line(CLIENTS).why


def test_other_clients_know_their_own_part_of_the_noise() -> None:
    ledger = stated(NOISED, WEIGHT, privacy_journal=accountant())
    assert "any one of them may know their part" in ledger.line(CLIENTS).why
    ours, theirs = ledger.line(CLIENTS).mu, ledger.line(SERVER).mu
    assert ours is not None
    assert theirs is not None
    assert ours == pytest.approx(theirs * (4 / 3) ** 0.5, rel=1e-6)


def test_honest_arrivals_are_an_assumption_of_whoever_sees_uploads() -> None:
    ledger = stated(NOISED, WEIGHT, privacy_journal=accountant(honest_arrivals=True, collusion=0.25))
    for name, assumed in ((SERVER, True), (COLLUSION, True), (OUTSIDER, True), (CLIENTS, False)):
        assert any("honest about whose upload" in text for text in ledger.line(name).assumptions) == assumed


def test_what_nothing_covers_is_none_and_not_an_infinite_epsilon() -> None:
    privacy_journal = accountant()
    privacy_journal.spent[SERVER][2] = np.inf
    line = stated(NOISED, WEIGHT, privacy_journal=privacy_journal).line(SERVER)
    assert (line.verdict, line.epsilon) == ("none", None)
    assert "nothing covers client 2" in line.why


def test_a_clients_whole_data_are_another_unit() -> None:
    line = stated(NOISED, WEIGHT, privacy_journal=accountant(), unit="client").line(SERVER)
    assert line.unit == "all data of one client"
    assert line.relation.startswith("replace one client's data")


def test_the_papers_figure_stands_beside_what_was_used() -> None:
    assert PaperFigure("σ", 1.0, 2.0, 1.5).saving == pytest.approx(0.25)
    assert PaperFigure("σ").saving is None
    assert PaperFigure("σ", 1.0, 0.0, 1.5).saving is None


def test_the_ledger_as_data_is_json_with_everything_in_it() -> None:
    ledger = stated(NOISED, WEIGHT, privacy_journal=accountant(collusion=0.25), simulation=True)
    data = json.loads(json.dumps(ledger.as_data(), allow_nan=False))
    assert data["simulation"] is True
    assert data["unprotected"] == ["the model"]
    assert data["notes"] == ["a note"]
    assert data["paper"] == {
        "formula": "σ = 1",
        "claimed_epsilon": 1.0,
        "noise_by_paper": 2.0,
        "noise_used": 1.5,
        "saving": pytest.approx(0.25),
    }
    assert [line["adversary"] for line in data["lines"]] == [SERVER, COLLUSION, CLIENTS, OUTSIDER]
    assert data["lines"][0]["epsilon"] == pytest.approx(ledger.line(SERVER).epsilon)
    assert [release["field"] for release in data["releases"]] == ["upload.gradients", "upload.weight"]
