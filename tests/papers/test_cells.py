"""Which cells run, and what a file of figures remembers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil.errors import CheckpointError, ConfigError
from papers.cells import Cell, Store, chosen, numbers

CELLS = (
    Cell("a/n10/plain", {"lr": 0.1}),
    Cell("a/n10/noisy", {"lr": 0.2}, samples=50),
    Cell("a/n100/plain", {"lr": 0.1}, usual=False),
    Cell("b/n10/plain", {"lr": 0.1}, usual=False),
)


def names(*only: str, full: bool = False) -> list[str]:
    return [cell.name for cell in chosen(CELLS, only, full=full)]


def test_the_usual_cells_run_unless_more_is_asked_for() -> None:
    assert names() == ["a/n10/plain", "a/n10/noisy"]
    assert names(full=True) == [cell.name for cell in CELLS]


def test_cells_are_named_whole_by_a_leading_part_or_by_a_pattern() -> None:
    assert names("a/n100/plain") == ["a/n100/plain"]
    assert names("a/n10") == ["a/n10/plain", "a/n10/noisy"]
    assert names("a") == ["a/n10/plain", "a/n10/noisy", "a/n100/plain"]
    assert names("*/plain") == ["a/n10/plain", "a/n100/plain", "b/n10/plain"]
    assert names("b", "a/n10/noisy") == ["a/n10/noisy", "b/n10/plain"]


def test_a_name_that_fits_no_cell_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"No cell is called 'a/n1'.*a/n10/plain"):
        names("a/n10", "a/n1")


def test_a_figure_is_on_disk_as_soon_as_it_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "x.json", entry="x")
    assert not store.has(CELLS[1], 1)
    store.keep(CELLS[1], 1, {"accuracy": 80.5})
    store.keep(CELLS[1], 2, {"accuracy": 81.5})
    again = Store(tmp_path / "deep" / "x.json", entry="x")
    assert again.has(CELLS[1], 1)
    assert not again.has(CELLS[1], 3)
    assert not again.has(CELLS[0], 1)
    assert numbers(again.results(), "a/n10/noisy") == {1: 80.5, 2: 81.5}
    assert numbers(again.results(), "a/n10/plain") == {}
    written = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert written["cells"]["a/n10/noisy"]["1"]["settings"] == {"lr": 0.2, "samples": 50}


def test_a_figure_taken_under_other_settings_is_neither_used_nor_overwritten(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.json", entry="x")
    store.keep(CELLS[1], 1, {"accuracy": 80.5})
    with pytest.raises(ConfigError, match=r"a/n10/noisy was run with other settings \(lr, samples differ\)"):
        store.has(Cell("a/n10/noisy", {"lr": 0.3}), 1)
    with pytest.raises(ConfigError, match="tiers differ"):
        store.has(Cell("a/n10/noisy", {"lr": 0.2}, samples=50, tiers=2), 1)


def test_a_file_of_another_entry_or_of_none_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "x.json", entry="x").keep(CELLS[0], 1, {"accuracy": 1.0})
    with pytest.raises(ConfigError, match="holds the figures of 'x', not of 'y'"):
        Store(tmp_path / "x.json", entry="y")
    (tmp_path / "z.json").write_text('{"entry": "z", "cel')
    with pytest.raises(CheckpointError, match="holds no figures that can be read"):
        Store(tmp_path / "z.json", entry="z")
