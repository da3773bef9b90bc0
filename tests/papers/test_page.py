"""The page of all entries says what the stored figures say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil.errors import DataError
from papers import Check, Entry, Report, entries, find, page, stored_results
from papers.cells import Results, Store
from papers.runner import Stored
from shell import fedveil

DOCS = Path(__file__).parents[2] / "docs"
STORED = stored_results(DOCS / "results")


def label(one: Stored) -> str:
    return one.path.stem


def test_the_page_in_the_documentation_is_what_the_command_makes_of_the_stored_results(tmp_path: Path) -> None:
    done = fedveil("reproduce", "--page", tmp_path / "made.md", "--from", DOCS / "results")
    assert done.code == 0, done.error
    assert (tmp_path / "made.md").read_text() == (DOCS / "reproduction.md").read_text(), (
        "run: fedveil reproduce --page docs/reproduction.md --from docs/results"
    )


@pytest.mark.parametrize("one", STORED, ids=label)
def test_a_stored_file_carries_the_verdict_its_figures_give(one: Stored) -> None:
    content = json.loads(one.path.read_text())
    assert content["verdict"] == json.loads(json.dumps(one.report.as_data()))
    assert content["noted"] == one.noted != ""
    assert one.path.with_suffix(".md").read_text() == one.report.markdown()


@pytest.mark.parametrize("one", STORED, ids=label)
def test_a_stored_entry_shows_figures_of_ours(one: Stored) -> None:
    assert any(figure.ours.strip("– /") for figure in one.report.figures)
    made = page(DOCS / "results")
    assert f"(results/{one.path.stem}.md)" in made
    assert all(figure.ours.replace("<", "&lt;") in made for figure in one.report.figures)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_figures_that_stand_for_an_entry_are_places_of_its_table(entry: Entry, quick: bool) -> None:
    assert len(entry.report({}, quick and entry.has_quick).figures) >= 2


def test_every_entry_is_on_the_page_with_or_without_figures() -> None:
    made = page(DOCS / "results")
    assert all(f"[{entry.name}](" in made or f"`{entry.name}`" in made for entry in entries())


def test_a_premise_that_holds_earns_no_verdict_and_one_that_fails_is_named() -> None:
    def verdict(*checks: Check) -> Report:
        return Report("title", ("a",), (("1",),), checks)

    premise, broken = Check("it works", True, premise=True), Check("it works", False, premise=True)
    assert verdict(premise).word == "not run"
    assert verdict(premise, Check("claim", None)).word == "not run"
    assert verdict(premise, Check("claim", False)).word == "not reproduced"
    assert verdict(premise, Check("claim", True)).word == "reproduced"
    assert verdict(broken, Check("claim", True)).verdict == "partly reproduced: did not hold: it works"


def test_a_table_that_lost_precision_is_not_reproduced() -> None:
    bank = find("bank")
    results = Store(DOCS / "results" / "bank.json", entry="bank").results()
    assert bank.report(results, False).word == "reproduced"
    worse: Results = {
        name: {1: {"mse": float(str(one[1]["mse"])) + 6e-4 * (name == "n1/l3/pbpfl")}} for name, one in results.items()
    }
    assert bank.report(worse, False).word == "not reproduced"


def test_curves_that_end_apart_are_not_reproduced() -> None:
    curves = find("curves")
    results = Store(DOCS / "results" / "curves.json", entry="curves").results()
    assert curves.report(results, False).word == "reproduced"
    lower = {
        name: {seed: {"curve": [value / 2 for value in one["curve"]]} for seed, one in seeds.items()}  # type: ignore[union-attr, operator]
        if name.endswith("lossless")
        else seeds
        for name, seeds in results.items()
    }
    assert curves.report(lower, False).word == "not reproduced"
    alone = {name: {1: seeds[1]} for name, seeds in results.items()}
    assert curves.report(alone, False).word == "not run", "one seed has no standard error"


def test_a_folder_without_results_makes_no_page(tmp_path: Path) -> None:
    done = fedveil("reproduce", "--page", tmp_path / "page.md", "--from", tmp_path)
    assert done.code == DataError.exit_code
    assert "holds no stored results" in done.error
    assert not (tmp_path / "page.md").exists()


def test_the_list_says_how_long_each_form_takes_and_what_is_stored() -> None:
    listed = json.loads(fedveil("reproduce", "--list", "--json", "--from", DOCS / "results").output)
    rows = {row["name"]: row for row in listed}
    assert rows["nadp-table1"]["takes_quick"] == "three minutes"
    assert rows["nadp-table1"]["stored"] == "full"
    assert rows["lossless-table4"]["stored"] == "quick"
    assert all(row["takes"] and (row["takes_quick"] or not find(row["name"]).has_quick) for row in listed)
