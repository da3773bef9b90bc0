"""The citation file is what CFF 1.2 asks for, names this version, and the five papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil import __version__

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra docs")

FILE = Path(__file__).parents[2] / "CITATION.cff"
OF_A_PERSON = {"family-names", "given-names"}
OF_SOFTWARE = {
    "cff-version",
    "message",
    "title",
    "abstract",
    "type",
    "version",
    "license",
    "keywords",
    "authors",
    "references",
}
OF_A_REFERENCE = {"type", "title", "year", "notes", "authors"}


@pytest.fixture
def citation() -> dict[str, Any]:
    found = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_it_has_what_the_format_requires_and_nothing_it_does_not_know(citation: dict[str, Any]) -> None:
    assert {"cff-version", "message", "title", "authors"} <= set(citation) <= OF_SOFTWARE
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["license"] == "Apache-2.0"


def test_it_names_this_version(citation: dict[str, Any]) -> None:
    assert str(citation["version"]) == __version__


def test_the_five_papers_are_references_with_title_and_authors(citation: dict[str, Any]) -> None:
    papers = citation["references"]
    assert len({one["title"] for one in papers}) == 5
    for one in papers:
        assert {"type", "title", "authors"} <= set(one) <= OF_A_REFERENCE
        assert one["type"] in ("article", "unpublished", "conference-paper")


def test_every_author_is_a_person_or_an_entity(citation: dict[str, Any]) -> None:
    lists = [citation["authors"], *(one["authors"] for one in citation["references"])]
    assert all(set(author) in (OF_A_PERSON, {"name"}) for authors in lists for author in authors)
