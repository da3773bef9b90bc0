"""The page of all entries says what the stored figures say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil.errors import DataError
from papers import Check, Entry, Report, entries, find, page, stored_results
from papers.cells import Results, Store
from papers.report import Figure
from papers.runner import Stored
from shell import Done, fedveil

CHECKOUT = Path(__file__).parents[2]
DOCS = CHECKOUT / "docs"
STORED = stored_results(DOCS / "results")


def reproduce(*arguments: str | Path) -> Done:
    """The command with this checkout's tables, wherever FedVeil is installed."""
    return fedveil("reproduce", "--papers", CHECKOUT / "papers", *arguments)


def label(one: Stored) -> str:
    return one.path.stem


def test_the_page_in_the_documentation_is_what_the_command_makes_of_the_stored_results(tmp_path: Path) -> None:
    done = reproduce("--page", tmp_path / "made.md", "--from", DOCS / "results")
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
    assert verdict(premise).word == "not decidable"
    assert verdict(premise, Check("claim", None)).word == "not decidable"
    assert verdict(premise, Check("claim", False)).word == "refuted"
    assert verdict(premise, Check("claim", True)).word == "holds"
    nothing = "not decidable: what it stands on did not hold: it works; 1 of 1 claims are open"
    assert verdict(broken, Check("claim", True)).verdict == nothing
    assert verdict(broken, Check("claim", True), Check("other", False)).standing == "so far refuted"


@pytest.mark.parametrize(
    ("figures", "word"),
    [
        ([Figure("accuracy, %", "92.17", "91.97 ± 0.3")], "reproduced"),
        ([Figure("accuracy, %", "93.18", "61.76")], "holds at other numbers"),
        ([Figure("accuracy, %", "93.18", "93.0"), Figure("accuracy, %", "93.20", "61.66")], "holds at other numbers"),
        (
            [Figure("members told, %", "50.3", "48.4 [39.7, 57.3]"), Figure("taken off, %", "–", "95")],
            "reproduced",
        ),
        ([Figure("MSE", "0.059", "0.069")], "holds at other numbers"),
        ([Figure("MSE of two", "0.1, 0.2", "0.105, 0.21 (mean 0.4, 0.5)")], "reproduced"),
        ([Figure("MSE of two", "0.1, 0.2", "0.105, 0.3")], "holds at other numbers"),
        ([Figure("margin, points", "a curve without numbers", "+6.3")], "holds"),
    ],
)
def test_reproduced_takes_the_printed_numbers_too(figures: list[Figure], word: str) -> None:
    held = Report("title", ("a",), (("1",),), (Check("both end alike", True),), figures=tuple(figures))
    assert held.word == word
    assert all(f"printed {one.paper}" in held.verdict for one in held.missed)


def test_two_curves_that_agree_at_another_accuracy_are_not_called_reproduced() -> None:
    assert curves_that_end(61.0, 61.0).word == "holds at other numbers"
    assert curves_that_end(92.1, 92.1).word == "reproduced"
    for one in STORED:
        assert one.report.word != "reproduced" or not one.report.missed, one.path


def curves_that_end(plain: float, ours: float, *, apart: float = 0.1, seeds: int = 3) -> Report:
    """Training curves of every setting that end there, seeds apart by so many points."""
    results: Results = {
        cell.name: {
            seed: {"curve": [(plain if cell.name.endswith("fedavg") else ours) + apart * seed] * 6}
            for seed in range(seeds)
        }
        for cell in find("curves").cells(False)
    }
    return find("curves").report(results, False)


def test_every_paper_has_its_claim_its_verdict_and_its_command_on_the_page() -> None:
    sections = page(DOCS / "results").split("\n## ")[1:]
    assert len(sections) == 6
    assert all(section.count("**The claim.**") == section.count("**Here.**") == 1 for section in sections)
    for one in STORED:
        (section,) = (section for section in sections if f"(results/{one.path.stem}.md)" in section)
        assert f"`{one.command}`" in section
        assert f"**{one.report.standing}**" in section


def test_a_table_that_lost_precision_is_not_reproduced() -> None:
    bank = find("bank")
    results = Store(DOCS / "results" / "bank.json", entry="bank").results()
    assert bank.report(results, False).word == "holds at other numbers"
    worse: Results = {
        name: {1: {"mse": float(str(one[1]["mse"])) + 6e-4 * (name == "n1/l3/pbpfl")}} for name, one in results.items()
    }
    assert bank.report(worse, False).checks[0].held is False


def test_curves_that_end_apart_are_not_reproduced() -> None:
    assert curves_that_end(61.0, 31.0).word == "refuted"
    assert curves_that_end(61.0, 61.0, seeds=1).word == "not decidable", "one seed has no standard error"
    ends, alike = curves_that_end(61.0, 61.5, apart=2.0).checks[:2]
    assert (ends.held, alike.held) == (None, True), "seeds so far apart tell by their pairs alone"
    results = Store(DOCS / "results" / "curves.json", entry="curves").results()
    assert "too large to tell" in find("curves").report(results, False).checks[0].seen


def test_a_folder_without_results_makes_no_page(tmp_path: Path) -> None:
    done = reproduce("--page", tmp_path / "page.md", "--from", tmp_path)
    assert done.code == DataError.exit_code
    assert "holds no stored results" in done.error
    assert not (tmp_path / "page.md").exists()


def test_the_list_says_how_long_each_form_takes_and_what_is_stored() -> None:
    listed = json.loads(reproduce("--list", "--json", "--from", DOCS / "results").output)
    rows = {row["name"]: row for row in listed}
    assert rows["nadp-table1"]["takes_quick"] == "five minutes"
    assert rows["nadp-table1"]["stored"] == "full, quick"
    assert rows["lossless-table4"]["stored"] == "quick"
    assert all(row["takes"] and (row["takes_quick"] or not find(row["name"]).has_quick) for row in listed)
