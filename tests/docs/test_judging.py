"""The page on judging names what there is, and its block runs."""

from __future__ import annotations

import re

import pytest

from docs.pages import DOCS, blocks
from fedveil.runs.judgement import TITLES

TEXT = (DOCS / "judging.md").read_text(encoding="utf-8")


def test_every_figure_has_a_row() -> None:
    table = TEXT.partition("## The figures")[2].partition("\n\nBy class")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE) for name in re.findall(r"\w+", row)
    }
    assert named == set(TITLES) - {"recall", "precision"}


def test_metrics_of_ones_own_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (text for language, text in blocks("judging.md") if language == "python")
    exec(compile(block, "judging.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert "Measured(value=" in first
    assert second.startswith("The model ")
