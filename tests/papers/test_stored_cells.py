"""Cells keep their names and settings, so that figures stored by any version are found and used again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from papers import Cell, entries, find
from papers.cells import Store
from papers.entries import built

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "docs" / "results"
KNOWN: dict[str, dict[str, dict[str, list[object]]]] = json.loads((HERE / "data" / "cells.json").read_text("utf-8"))
"""By entry, form and cell: a digest of the settings that decide its figures, and whether it is run by default."""

LATER = ("hybridalpha",)
"""Schemes whose cells are there once they are built."""

FORMS = [(name, form) for name, forms in KNOWN.items() for form in forms]


def key(cell: Cell) -> list[object]:
    identity = json.dumps(cell.identity(), sort_keys=True, ensure_ascii=False)
    return [hashlib.sha256(identity.encode()).hexdigest()[:16], cell.usual]


@pytest.mark.parametrize(("name", "form"), FORMS, ids=[f"{name}-{form}" for name, form in FORMS])
def test_every_cell_that_was_ever_stored_is_still_the_same_cell(name: str, form: str) -> None:
    now = {cell.name: key(cell) for cell in find(name).cells(form == "quick")}
    waiting = {one for one in KNOWN[name][form] for scheme in LATER if one.endswith(f"/{scheme}") and not built(scheme)}
    assert now == {one: kept for one, kept in KNOWN[name][form].items() if one not in waiting}


def test_every_entry_has_its_cells_on_record() -> None:
    assert {(one.name, form) for one in entries() for form in (("full", "quick") if one.has_quick else ("full",))} == (
        set(FORMS)
    )


def test_stored_results_are_taken_by_the_cells_of_today() -> None:
    for entry in entries():
        for quick in (False, True) if entry.has_quick else (False,):
            label = f"{entry.name}-quick" if quick else entry.name
            if not (RESULTS / f"{label}.json").exists():
                continue
            store, cells = Store(RESULTS / f"{label}.json", entry=label), {one.name: one for one in entry.cells(quick)}
            # What was looked at before an entry's cells were chosen may lie beside them.
            kept = {name: seeds for name, seeds in store.results().items() if name in cells}
            assert kept
            assert all(store.has(cells[name], seed) for name, seeds in kept.items() for seed in seeds)
