"""`fedveil audit --one-run`: what was measured beside what is proven, wherever the run's privacy is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil.audit import canaries
from fedveil.errors import ConfigError, ContradictionError
from fedveil.ledger.gaussian import GuessPlan
from fedveil.runs.folder import MEASURED
from shell import fedveil

NETWORK = ("-o", "depth=2", "-o", "width=8")
SMALL = (
    "--scheme",
    "nadp",
    "--epsilon",
    8.0,
    "--rounds",
    2,
    "--clients",
    3,
    "--seed",
    1,
    "-o",
    "depth=2",
    "-o",
    "width=8",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-run") / "run"
    assert fedveil("run", *SMALL, "--out", folder).code == 0
    return folder


def test_both_figures_are_shown_and_stay_with_the_run(run: Path) -> None:
    done = fedveil("audit", run, "--one-run", "--canaries", 600)
    assert done.code == 0, done.error
    stored = json.loads(run.joinpath(*MEASURED).read_text())
    told = done.output.splitlines()[0]
    assert told.endswith(f"(95%) beside ε ≤ {stored['own']:.4g} (proven)")
    assert 0 < stored["epsilon"] < stored["own"] == pytest.approx(stored["proven"])
    shown = fedveil("ledger", run)
    assert "Measured beside proven" in shown.output
    assert told in " ".join(shown.output.split())
    assert json.loads(fedveil("ledger", run, "--json").output)["measured"] == stored
    again = fedveil("audit", run, "--one-run", "--canaries", 600, "--json")
    assert json.loads(again.output) == stored


def test_a_report_shows_it_too(run: Path) -> None:
    pytest.importorskip("plotly", reason="needs the extra report")
    assert fedveil("audit", run, "--one-run", "--canaries", 600).code == 0
    assert fedveil("report", run).code == 0
    page = (run / "report.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert "Measured beside proven" in page
    assert "(95%) beside ε ≤" in page


def test_a_figure_above_the_claim_has_an_exit_code_of_its_own(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer that sees through all noise: no claim survives it."""
    honest = canaries.Game.play

    def seen_through(game: canaries.Game, *args: object) -> canaries.GamePart:
        part = honest(game, *args)  # type: ignore[arg-type]
        return canaries.GamePart(part.coins, part.coins, part.line, part.rounds)

    monkeypatch.setattr(canaries.Game, "play", seen_through)
    monkeypatch.setattr(canaries, "plan_guesses", lambda count, **claim: GuessPlan(count, 1.0))
    done = fedveil("audit", run, "--one-run", "--canaries", 20_000, "--out", run / "elsewhere")
    assert done.code == ContradictionError.exit_code
    assert "More was measured than is proven" in done.error
    assert "CONTRADICTS" in " ".join(done.output.split())


def test_canaries_without_a_game_are_refused(run: Path) -> None:
    done = fedveil("audit", run, "--canaries", 100)
    assert done.code == ConfigError.exit_code
    assert "--one-run" in done.error
