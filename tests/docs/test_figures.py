"""Figures that a page takes from the results stand in the results, and schemes it names exist."""

from __future__ import annotations

import re

import pytest

from docs.pages import DOCS
from fedveil.schemes import schemes

PAGE = (DOCS / "choose-a-scheme.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| .*?\(results/([\w-]+\.md)", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("what", "figures", "page"), ROWS, ids=[row[0][:40].replace("`", "") for row in ROWS])
def test_a_figure_stands_in_the_page_it_is_from(what: str, figures: str, page: str) -> None:
    source = (DOCS / "results" / page).read_text(encoding="utf-8")
    for figure in re.findall(r"\d+\.\d+", figures):
        assert figure in source, f"{what}: {figure}"


def test_there_are_figures_to_check() -> None:
    assert sum(len(re.findall(r"\d+\.\d+", figures)) for _, figures, _ in ROWS) >= 12


def test_every_scheme_is_placed_and_every_placed_one_exists() -> None:
    table = PAGE.partition("## Three plain questions")[0]
    named = set(re.findall(r"`([a-z][a-z-]*)", table))
    known = {one.name for one in schemes()}
    assert known <= named
