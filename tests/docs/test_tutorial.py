"""What the tutorial shows works when it is typed, and says what the tutorial says it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.pages import DOCS, blocks, typed

TEXT = (DOCS / "tutorial.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_command_and_block_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = typed("tutorial.md", tmp_path)
    assert len(said) == 14

    def of(piece: str) -> str:
        (found,) = (text for command, text in said.items() if piece in command)
        return found

    # Figures that arithmetic decides, not chance or a processor.
    shown = "\n".join(text for language, text in blocks("tutorial.md") if language == "text")
    guarantees = re.findall(r"\(ε = [^)]*\)", shown)
    assert len(guarantees) == 3
    for figure in guarantees:
        assert figure in of("--out runs/private")
        assert figure in of("ledger --scheme veil-dp")
    for size in re.findall(r"[\d.]+ kB down, [\d.]+ kB up", shown):
        assert any(size in text for text in said.values())
    for sentence in ("sees the sum over a round's clients and nothing else", "aggregate only"):
        assert sentence in of("fedveil ledger runs/masked")
    # The three verdicts of the table of attacks.
    for run, words in (
        ("plain", "The server rebuilds what a client trained on"),
        ("masked", "The server rebuilds what a client trained on"),
        ("private", "The server cannot rebuild what a client trained on by these attacks"),
    ):
        assert words in of(f"fedveil audit runs/{run}")
        (row,) = (line for line in TEXT.splitlines() if line.startswith(f"| `runs/{run}`"))
        assert words.removeprefix("The server ") in row
    # Training is not the same to the last bit on every processor: within three of 114 test records.
    shown_accuracy = [float(one) for one in re.findall(r"test accuracy +│ ([\d.]+)%", shown)]
    for wanted, run in zip(shown_accuracy, ("plain", "masked", "private"), strict=True):
        found = re.search(r"test accuracy │ ([\d.]+)%", of(f"--out runs/{run}"))
        assert found is not None
        assert float(found[1]) == pytest.approx(wanted, abs=3)
    assert "SIMULATION" in of("--out runs/private")
    assert "SIMULATION" not in of("--out runs/own")
    assert (tmp_path / "predictions.csv").exists()
    assert of("import torch").startswith("server differential privacy 2.388")
