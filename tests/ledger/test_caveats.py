"""Figures that the ledger names are those that are stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil.downlink import Decomposed, HeadNoise, Rescaling
from fedveil.ledger.caveats import ALIGNMENT, reached

STORED = Path(__file__).parents[2] / "docs" / "results" / "alignment.json"


@pytest.mark.parametrize("veil", ALIGNMENT)
def test_what_aligning_reached_is_what_was_measured(veil: str) -> None:
    """Of all networks the least, its further digits dropped."""
    rows = [row for row in json.loads(STORED.read_text(encoding="utf-8"))["rows"] if row["veil"] == veil]
    cosine, networks = ALIGNMENT[veil]
    assert len(rows) == networks
    assert cosine <= round(min(row["cosine"] for row in rows), 4) < cosine + 0.01
    assert f"{cosine:.2f}" in reached(veil)[0]


def test_a_veil_that_was_not_measured_gets_no_figure() -> None:
    head = HeadNoise()
    measured = {
        "scale": Rescaling(),
        "full": Rescaling(family="full"),
        "full, streams rotated": Rescaling(family="full", streams=True),
    }
    for veil, downlink in measured.items():
        assert reached(veil)[0] in downlink.caveats().unprotected
    unmeasured = (Rescaling(head=head), Decomposed(head=head), Rescaling(family="isometry", streams=True))
    for downlink in unmeasured:
        assert not any(reached(veil)[0] in downlink.caveats().unprotected for veil in ALIGNMENT)
