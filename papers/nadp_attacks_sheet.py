"""The pictures of NADP-FL's Table 4: originals, and what iDLG made of the uploads of each scheme."""

from __future__ import annotations

import torch
from torch import Tensor

from papers.attacking import from_text
from papers.cells import Results
from papers.nadp_attacks_table import (
    ALL,
    FEDAVG,
    LDP,
    SHARPEST,
    cell_of_row,
    form_of,
    nadp_row,
    name_of,
)


def sheet_rows(results: Results, quick: bool) -> list[tuple[str, Tensor]]:
    """Pictures for a contact sheet: the originals, then what iDLG made of them, a row for each scheme."""
    form = form_of(quick)
    found = []
    for row in ("originals", FEDAVG, LDP, ALL, SHARPEST, *(nadp_row(tau) for tau in form.taus)):
        parts = [_pictures(results, data, form.fitted, row) for data in form.data]
        there = [one for one in parts if one is not None]
        if len(there) == len(parts):
            found.append((name_of(row), torch.cat(there)))
    return found


def _pictures(results: Results, data: str, size: int, row: str) -> Tensor | None:
    cell = cell_of_row(data, size, FEDAVG if row == "originals" else row)
    name = row if row == "originals" else f"{row} idlg pictures"
    found = (from_text(figures, name) for figures in results.get(cell, {}).values())
    return next((one for one in found if one is not None), None)
