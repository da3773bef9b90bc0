"""Contact sheets: originals above what was made of them, in the same order and on the same scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from fedveil.audit.findings import Attempt, Measure, Trial
from fedveil.audit.measures import Labels, Likeness
from fedveil.audit.pictures import MOST_PICTURES, contact_sheet, sheet_of
from fedveil.audit.views import OutsiderView

Image = pytest.importorskip("PIL.Image")
GAP, SIDE = 4, 64
GENERATOR = torch.Generator().manual_seed(8)
ORIGINALS = (torch.rand((3, 1, 8, 8), generator=GENERATOR) * 255).round() / 255


def pixels(path: Path) -> npt.NDArray[np.uint8]:
    with Image.open(path) as opened:
        return np.asarray(opened)


def tile(sheet: npt.NDArray[np.uint8], row: int, column: int, *, step: int = 8, size: int = 8) -> npt.NDArray[np.uint8]:
    """A picture of a sheet at its own size."""
    top, left = (GAP + place * (SIDE + GAP) for place in (row, column))
    part: npt.NDArray[np.uint8] = sheet[top : top + size * step : step, left : left + size * step : step]
    return part


def as_bytes(picture: Tensor) -> npt.NDArray[np.uint8]:
    return (picture[0] * 255).round().to(torch.uint8).numpy()


def test_pictures_stand_in_rows_on_white(tmp_path: Path) -> None:
    contact_sheet([("a", ORIGINALS), ("b", ORIGINALS[:1])], tmp_path / "a.png", box=(0.0, 1.0))
    sheet = pixels(tmp_path / "a.png")
    assert sheet.shape == (2 * (SIDE + GAP) + GAP, 3 * (SIDE + GAP) + GAP)
    for column in range(3):
        assert np.array_equal(tile(sheet, 0, column), as_bytes(ORIGINALS[column]))
    assert np.array_equal(tile(sheet, 1, 0), as_bytes(ORIGINALS[0]))
    assert (tile(sheet, 1, 1) == 255).all()
    assert (sheet[:GAP] == 255).all()


def test_the_range_of_values_goes_from_black_to_white_and_what_is_outside_stays_there(tmp_path: Path) -> None:
    picture = torch.zeros(1, 1, 8, 8)
    picture[0, 0, 0, :5] = torch.tensor([-1.0, 1.0, 0.0, -7.0, float("inf")])
    contact_sheet([("a", picture)], tmp_path / "a.png", box=(-1.0, 1.0))
    assert tile(pixels(tmp_path / "a.png"), 0, 0)[0, :5].tolist() == [0, 255, 128, 0, 255]


@pytest.mark.parametrize("shape", [(1, 6, 12), (3, 12, 6), (2, 8, 8), (3, 80, 50)])
def test_wide_high_coloured_and_large_pictures_fit(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    contact_sheet([("a", torch.rand((3, *shape), generator=GENERATOR))] * 2, tmp_path / "a.png", box=None)
    sheet = pixels(tmp_path / "a.png")
    assert sheet.ndim == (3 if shape[0] == 3 else 2)
    assert min(sheet.shape[:2]) > 2 * max(shape[1:])


def test_a_long_row_is_cut(tmp_path: Path) -> None:
    contact_sheet([("a", torch.zeros(40, 1, 8, 8))], tmp_path / "a.png", box=None)
    assert pixels(tmp_path / "a.png").shape[1] == MOST_PICTURES * (SIDE + GAP) + GAP


def trial_of(measure: Measure, originals: Tensor, asset: str = "data", **more: Any) -> Trial:
    nothing: Any = OutsiderView
    attempt = Attempt(nothing, nothing, {"x": originals, "y": torch.zeros(len(originals))}, **more)
    return Trial("server/rounds/a", "x", asset, "a", "", measure, (attempt,), settings={"box": [0.0, 1.0]})


LIKENESS = Likeness(peak=1.0, chance=0.0, random=0.0)


def test_reconstructions_stand_under_their_originals_whatever_their_order(tmp_path: Path) -> None:
    order, other = torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0])
    found, bare = {"inputs": ORIGINALS[order]}, {"inputs": ORIGINALS[other]}
    name = sheet_of(trial_of(LIKENESS, ORIGINALS), [found], [bare], folder=tmp_path)
    assert name == "server-rounds-a.records.png"
    sheet = pixels(tmp_path / name)
    for row in range(3):
        for column in range(3):
            assert np.array_equal(tile(sheet, row, column), as_bytes(ORIGINALS[column]))


def test_twins_of_other_samples_stand_in_the_order_of_theirs(tmp_path: Path) -> None:
    trial = trial_of(LIKENESS, ORIGINALS, twin_truth={"x": ORIGINALS[:2], "y": torch.zeros(2)})
    name = sheet_of(trial, [{"inputs": ORIGINALS}], [{"inputs": ORIGINALS[:2].flip(0)}], folder=tmp_path)
    assert np.array_equal(tile(pixels(tmp_path / name), 2, 1), as_bytes(ORIGINALS[1]))


def test_a_reconstruction_that_is_no_number_is_still_a_picture(tmp_path: Path) -> None:
    found = {"inputs": torch.full_like(ORIGINALS, float("inf"))}
    assert sheet_of(trial_of(LIKENESS, ORIGINALS), [found], [], folder=tmp_path)


def test_what_makes_no_pictures_has_no_sheet(tmp_path: Path) -> None:
    labels = trial_of(Labels(torch.full((10,), 0.1), 1), ORIGINALS, "labels")
    assert sheet_of(labels, [{"labels": torch.zeros(3)}], [], folder=tmp_path) == ""
    rows = ORIGINALS.flatten(1)
    assert sheet_of(trial_of(LIKENESS, rows), [{"inputs": rows}], [], folder=tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
