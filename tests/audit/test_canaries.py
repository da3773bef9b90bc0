"""Games with canaries: honest noise stays below its claim, noise that is too small does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedveil.audit import canaries
from fedveil.audit.canaries import Game, audit_one_run
from fedveil.audit.running import Tick
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError
from fedveil.ledger.statement import Ledger, MeasuredEpsilon
from fedveil.runs.folder import read_ledger
from fedveil.work.clipping import ClippedSamples


def measured(count: int, seed: int = 0, **settings: Any) -> MeasuredEpsilon:
    game = Game(RunConfig.from_mapping({"clients": 3, "rounds": 2, **settings}, where="test"), count, seed)
    return game.measured([game.play(part) for part in range(len(game.parts))])


@pytest.fixture
def noise_a_third_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accountant that believes a record to move a sum by two thirds of what it does, wherever noise is counted."""
    honest = ClippedSamples.sensitivity
    monkeypatch.setattr(ClippedSamples, "sensitivity", lambda work, samples: honest(work, samples) * 2 / 3)


LARGE = {"scheme": "ldp", "epsilon": 3.0, "rounds": 1, "clients": 2}
"""50,000 records, ε = 3: of five other seeds each, the honest noise was below its claim (the chance that it is not is
at most 5 %, and far smaller as it leaves a gap), and the smaller noise above it."""


@pytest.mark.parametrize("seed", [1])
def test_honest_noise_is_below_its_claim_by_as_much_as_was_expected(seed: int) -> None:
    figures = measured(50_000, seed, **LARGE)
    assert figures.proven == pytest.approx(3.0)
    assert not figures.contradicts
    assert figures.expected is not None
    assert figures.epsilon == pytest.approx(figures.expected, rel=0.2)
    assert 0 < figures.any_noise < figures.epsilon


@pytest.mark.usefixtures("noise_a_third_too_small")
@pytest.mark.parametrize("seed", [1])
def test_an_accountant_that_believes_in_more_noise_than_there_is_is_caught(seed: int) -> None:
    figures = measured(50_000, seed, **LARGE)
    assert figures.proven == pytest.approx(3.0)  # so says its ledger
    assert figures.contradicts
    assert any("CONTRADICTS" in line for line in figures.told)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nadp", "veil-dp", "cdp"])
def test_other_schemes_spend_what_they_say(scheme: str) -> None:
    figures = measured(20_000, scheme=scheme, clients=4, rounds=5, epsilon=3.0)
    assert not figures.contradicts
    assert figures.epsilon == pytest.approx(figures.expected, rel=0.25)


@pytest.mark.parametrize(
    ("settings", "adversary", "unit"),
    [
        ({"scheme": "nadp", "epsilon": 8.0}, "server", "record"),
        ({"scheme": "veil-dp", "epsilon": 8.0, "cover": "masks"}, "server", "record"),
        ({"scheme": "cdp", "epsilon": 8.0, "cohort": 2}, "clients", "record"),
        ({"scheme": "dp-fedavg", "epsilon": 20.0, "rounds": 1}, "server", "client"),
    ],
)
def test_each_claim_is_measured_against_its_adversary_and_by_its_unit(
    settings: dict[str, Any], adversary: str, unit: str
) -> None:
    figures = measured(60, **settings)
    assert (figures.adversary, figures.unit) == (adversary, unit)
    # Guesses at chance would be right this often once in 10⁴ games.
    assert figures.correct / figures.guessed > 0.5 + 2 / figures.guessed**0.5
    assert figures.proven is not None
    assert 0 < figures.epsilon < figures.proven


@pytest.mark.parametrize("scheme", ["fedavg", "lossless", "veil-secagg", "mpdp"])
def test_where_nothing_is_proven_every_coin_is_seen(scheme: str) -> None:
    figures = measured(60, scheme=scheme)
    assert figures.proven is None
    assert figures.correct == figures.guessed == 60
    assert figures.epsilon == pytest.approx(2.97, abs=0.1)  # log(p/(1 − p)) with p^60 = 5 %
    assert "nothing proven" in figures.result


def test_figures_under_a_condition_are_refused() -> None:
    with pytest.raises(ConfigError, match="given what is hidden"):
        measured(30, scheme="paraaegis", cipher="pads", rounds=1)


@pytest.mark.parametrize("count", [5, canaries.MOST + 1])
def test_games_that_say_nothing_or_never_end_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="canaries must lie between"):
        measured(count, scheme="ldp")


def stored(folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    config = RunConfig.from_mapping({"scheme": "ldp", "clients": 2, "rounds": 2, "seed": 1, **settings}, where="test")
    (folder / "config.toml").write_text(config.to_toml())
    return folder


def test_a_game_that_was_stopped_goes_on_and_ends_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canaries, "_PART", 50)
    monkeypatch.setattr(canaries, "_SELDOM", 0.0)
    run, ticks = stored(tmp_path / "run"), []

    def stop(now: Tick) -> None:
        if now.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit_one_run(run, canaries=150, tick=stop)
    said: list[str] = []
    continued = audit_one_run(run, canaries=150, say=said.append, tick=ticks.append)
    assert said
    assert said[0].startswith("1 of 3 parts")
    assert [now.done for now in ticks] == [3, 4, 5, 6]
    assert continued == audit_one_run(run, canaries=150, out=tmp_path / "elsewhere")
    assert continued != audit_one_run(run, canaries=150, seed=9, out=tmp_path / "elsewhere")
    assert [path.name for path in (run / "audit").iterdir()] == ["one-run.json"]


def test_a_folder_without_a_run_and_a_damaged_measurement_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no run"):
        audit_one_run(tmp_path)
    ledger = Ledger("ldp", 1, (), (), None, False, ())
    (tmp_path / "ledger.json").write_text(json.dumps(ledger.as_data()))
    assert read_ledger(tmp_path).measured is None
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "one-run.json").write_text('{"epsilon": "large"}')
    with pytest.raises(CheckpointError, match="no measurement"):
        read_ledger(tmp_path)
