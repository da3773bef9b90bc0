"""The ledger on a terminal: after a run, from a run's folder, and for a run that is only asked about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shell import fedveil

SMALL = ("--rounds", 3, "--clients", 4, "-o", "depth=2", "-o", "width=8", "--lr", 0.02)


def planned(*arguments: object) -> dict[str, Any]:
    done = fedveil("ledger", *arguments, "--json")  # type: ignore[arg-type]
    assert (done.code, done.error) == (0, "")
    found: dict[str, Any] = json.loads(done.output)
    return found


def line_of(ledger: dict[str, Any], adversary: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in ledger["lines"] if one["adversary"] == adversary)
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("ledger") / "run"
    done = fedveil("run", "--scheme", "nadp", "--epsilon", 2, "--seed", 1, *SMALL, "--out", folder)
    assert (done.code, done.error) == (0, "")
    return folder, done.output


def test_a_run_ends_with_its_ledger(ran: tuple[Path, str]) -> None:
    folder, output = ran
    assert "Ledger of nadp after 3 rounds" in output
    data = json.loads((folder / "ledger.json").read_text())
    for line in data["lines"]:
        assert f"(ε = {line['epsilon']:.4g}, δ = 1e-05)" in output
        assert set(line["why"].split()) <= set(output.replace(";", " ; ").split()) | set(output.split())
    for part in ("one record of one client", "Assumed", "Not protected", "The paper's own figure", "SIMULATION"):
        assert part in output
    assert data["unprotected"][0] in output
    assert f"{data['paper']['saving']:.1%} less" in output


def test_a_runs_folder_shows_the_same_ledger_again(ran: tuple[Path, str]) -> None:
    folder, output = ran
    for given in (folder, folder / "ledger.json"):
        again = fedveil("ledger", given)
        assert (again.code, again.error) == (0, "")
        assert again.output.strip()
        assert again.output in output
    assert planned(folder) == json.loads((folder / "ledger.json").read_text())


def test_a_run_with_secrets_of_its_own_is_no_simulation(tmp_path: Path) -> None:
    done = fedveil("run", "--scheme", "veil-secagg", *SMALL, "--out", tmp_path / "run")
    assert done.code == 0, done.error
    assert "aggregate only" in done.output
    assert "SIMULATION" not in done.output


def test_rounds_that_failed_are_said(tmp_path: Path) -> None:
    failing = ("--scheme", "veil-secagg", "--simulate-dropout", 0.4, "--rounds", 4, "--clients", 5, "--seed", 2)
    small = ("-o", "depth=2", "-o", "width=4", "--head-groups", 1)
    done = fedveil("run", *failing, *small, "--out", tmp_path / "run")
    assert done.code == 0, done.error
    failed = json.loads((tmp_path / "run" / "summary.json").read_text())["failed_rounds"]
    assert failed > 0
    assert f"{failed}: they moved nothing" in done.output


def test_a_run_that_would_pass_its_target_ends_early_and_says_so(tmp_path: Path) -> None:
    assert fedveil("run", "--scheme", "nadp", *SMALL, "--seed", 1, "-q", "--out", tmp_path / "run").code == 0
    done = fedveil("run", "--resume", "--rounds", 9, "--out", tmp_path / "run")
    assert done.code == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert summary["stopped"] in " ".join(done.output.split())
    assert "ended early" in done.output
    assert "The run ends after 3 rounds" in done.error
    assert max(one["epsilon"] for one in summary["ledger"]["lines"]) <= 3.0 + 1e-9


def test_faithful_mpdp_says_none_and_what_its_noise_would_be_worth(tmp_path: Path) -> None:
    done = fedveil("run", "--scheme", "mpdp", "--seed", 1, *SMALL, "--out", tmp_path / "run")
    assert done.code == 0, done.error
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert {one["verdict"] for one in ledger["lines"]} == {"none"}
    shown = " ".join(done.output.split())
    for part in ("assumed to have norm at most S", "not enforced", "if Ψ and Φ were hidden", "one draw of R"):
        assert part in shown


@pytest.mark.parametrize(("strength", "least", "most"), [(1, 0.22, 0.23), (10, 0.44, 0.46)])
def test_the_saving_over_the_papers_formula_with_everybody_in_every_round(
    strength: float, least: float, most: float
) -> None:
    asked = ("--clients", 100, "--rounds", 200, "--epsilon", 1, "--delta", 1e-5, "--pair-strength", strength)
    found = planned("--scheme", "nadp", *asked)
    assert least < found["saving"] < most
    assert found["exact"]["in_sum"] == pytest.approx((1 - found["saving"]) * found["paper"]["in_sum"])
    assert found["exact"]["on_mean"] == pytest.approx(found["exact"]["in_sum"] / 60_000)
    assert max(one["epsilon"] for one in found["ledger"]["lines"]) == pytest.approx(1, abs=1e-6)


def test_what_is_planned_is_what_a_run_ends_with(ran: tuple[Path, str]) -> None:
    run = json.loads((ran[0] / "ledger.json").read_text())
    config = ("--scheme", "nadp", "--epsilon", 2, "--clients", 4, "--rounds", 3, "--sizes", "360,360,359,359")
    found = planned(*config)["ledger"]
    for adversary in ("server", "clients"):
        assert line_of(found, adversary)["epsilon"] == pytest.approx(line_of(run, adversary)["epsilon"], rel=1e-9)
    assert found["paper"] == pytest.approx(run["paper"])


def test_every_scheme_can_be_asked_about_and_claims_against_the_server_what_it_promises() -> None:
    from fedveil.schemes import schemes

    for info in schemes():
        found = planned("--scheme", info.name, "--clients", 6, "--rounds", 4)["ledger"]
        denied = "from the server: not at all" in info.protects or info.protects.startswith("nothing")
        denied = denied or "client data from the server: not at all" in info.protects
        assert (line_of(found, "server")["verdict"] == "none") is denied, info.name
        proven = {one["epsilon"] for one in found["lines"] if one["verdict"] == "differential privacy"}
        assert bool(proven) is ("(ε, δ)" in info.protects and "given what is hidden" not in info.protects), info.name
        assert not found["simulation"]


def test_a_question_is_answered_in_words_too() -> None:
    asked = ("--clients", 20, "--rounds", 10, "--epsilon", 1, "--cohort", 0.5, "--size-ratio", 2, "--collusion", 0.1)
    done = fedveil("ledger", "--scheme", "nadp", *asked)
    assert (done.code, done.error) == (0, "")
    for part in ("20 clients, 10 in a round", "σ left in the sum", "σ on the mean gradient", "by the paper's formula"):
        assert part in done.output
    assert "every set of 1 colluders was tried" in " ".join(done.output.split())
    assert "Nothing was trained" in done.output


def test_mpdp_asked_about_with_a_network_gives_numbers_and_without_one_the_reason() -> None:
    asked = ("ledger", "--scheme", "mpdp", "--clients", 5, "--rounds", 100, "--epsilon", 1)
    without = " ".join(fedveil(*asked).output.split())
    assert "name one with --model" in without
    assert "ε = 0.749 in one round and ε = 10.4 in 100" in without
    with_one = " ".join(fedveil(*asked, "--model", "mlp", "-o", "depth=2").output.split())
    assert "leaves δ of at least" in with_one
    assert "name one with --model" not in with_one
