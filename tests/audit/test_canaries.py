"""Games with canaries: honest noise stays below its claim, noise that is too small does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedveil.audit import canaries
from fedveil.audit.canaries import Game, audit_one_run
from fedveil.audit.running import Tick
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError, StopTraining
from fedveil.ledger.statement import Ledger, Line, MeasuredEpsilon
from fedveil.runs import session
from fedveil.runs.folder import read_ledger
from fedveil.work.clipping import BoundedUpdate, ClippedSamples


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


SERIAL = {"scheme": "serial", "cipher": "pads"}


@pytest.mark.parametrize(
    ("scheme", "count", "epsilon", "noise"),
    [
        (SERIAL, 160, 3.0, 1 / 3),
        ({"scheme": "paraaegis", "share": 0.0, "cipher": "pads"}, 160, 3.0, 1 / 3),
        *(pytest.param(SERIAL, 600, *each, marks=pytest.mark.slow) for each in ((3.0, 1.0), (8.0, 1.0), (8.0, 1 / 3))),
    ],
)
def test_what_lies_with_clients_is_read_under_its_noise_and_a_third_of_it_is_caught(
    scheme: dict[str, Any], count: int, epsilon: float, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is against one who reads or opens every upload: to sums of eight clients this noise looks honest."""
    honest = BoundedUpdate.sensitivity
    monkeypatch.setattr(BoundedUpdate, "sensitivity", lambda work, samples: honest(work, samples) * noise)
    figures = measured(count, clients=8, rounds=1, epsilon=epsilon, **scheme)
    assert figures.adversary == ("server and colluding clients" if scheme is SERIAL else "server")
    assert figures.proven == pytest.approx(epsilon)
    assert figures.contradicts == (noise < 1)


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


SHORT = {"dataset": "digits", "model": "mlp", "model_options": {"depth": 1, "width": 2}, "scheme": "ldp", "clients": 2}
STOPPED = RunConfig.from_mapping({**SHORT, "epsilon": 8.0, "rounds": 12, "seed": 1}, where="test")


def after_two_rounds(row: dict[str, Any]) -> None:
    if row["round"] == 2:
        raise StopTraining("two are enough")


def test_a_game_plays_the_rounds_that_its_run_was_charged_for(tmp_path: Path) -> None:
    """A run of 12 planned rounds ends after 2: what 12 would have shown must not stand beside what 2 have spent."""
    run = tmp_path / "run"
    session.run(STOPPED, run, quiet=True, follow=[after_two_rounds])
    figures = audit_one_run(run, canaries=100)
    line = read_ledger(run).line("server")
    assert (figures.rounds, figures.own_rounds) == (2, 2)
    assert figures.proven == pytest.approx(line.epsilon)
    assert figures.proven < 4 < STOPPED.epsilon
    assert figures.of_the_run
    assert read_ledger(run).measured == figures

    session.resume(run, quiet=True)
    later = read_ledger(run).measured
    assert later is not None
    assert (later.rounds, later.own_rounds) == (2, 12)
    assert not later.of_the_run
    assert "(proven)" not in later.result
    assert any("not this run's" in text and "ε = 8 after 12 rounds" in text for text in later.told)


def test_a_run_that_has_not_begun_has_a_figure_of_its_mechanism_alone(tmp_path: Path) -> None:
    figures = audit_one_run(stored(tmp_path / "run"), canaries=100)
    assert (figures.rounds, figures.own) == (2, None)
    assert "in a game of 2 rounds" in figures.result
    assert any("no such figure of its own" in text for text in figures.told)


@pytest.mark.parametrize(("own", "rounds", "contradicts"), [(3.0, 5, False), (3.0, 4, False), (2.999, 5, True)])
def test_contradiction_is_judged_against_the_claim_that_stands_beside(
    own: float, rounds: int, contradicts: bool
) -> None:
    figures = MeasuredEpsilon("server", "record", 2.9995, 2.0, 1e-5, 0.95, 100, 90, 80, 3.0, 2.5, 5, 0)
    line = Line("server", "differential privacy", "", own, delta=1e-5, unit="one record of one client")
    beside = figures.beside(Ledger("ldp", rounds, (line,), (), None, False, ()))
    assert beside.of_the_run == (rounds == 5)
    assert beside.contradicts == contradicts
    assert (f"beside ε ≤ {own:.4g} (proven)" in beside.result) == (rounds == 5)


@pytest.mark.parametrize("change", [{"epsilon": 0.5}, {"delta": 1e-3}, {"scheme": "fedavg"}, {"clients": 1}])
def test_settings_that_the_rounds_were_not_charged_with_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    run = tmp_path / "run"
    session.run(STOPPED.with_changes(rounds=2), run, quiet=True)
    (run / "config.toml").write_text(STOPPED.with_changes(rounds=2).with_changes(**change).to_toml())
    with pytest.raises(CheckpointError, match="other settings"):
        audit_one_run(run, canaries=100)


def test_rounds_that_were_asked_for_and_never_begun_change_nothing(tmp_path: Path) -> None:
    """Nothing of the target is left, so that a resumed run with more rounds ends where it stands."""
    run = tmp_path / "run"
    session.run(STOPPED.with_changes(rounds=2), run, quiet=True)
    session.resume(run, changes={"rounds": 4}, quiet=True)
    figures = audit_one_run(run, canaries=100)
    assert (figures.rounds, figures.own_rounds) == (2, 2)
    assert figures.of_the_run


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("audited") / "run"
    session.run(STOPPED.with_changes(rounds=2), run, quiet=True)
    audit_one_run(run, canaries=100)
    return run


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 0.0},
        {"epsilon": 7.999},
        {"epsilon": -1.0},
        {"epsilon": float("inf")},
        {"epsilon": float("nan")},
        {"any_noise": 3.0},
        {"correct": 99_999, "guessed": 5},
        {"correct": 1},
        {"canaries": 10**9},
        {"canaries": 10**15, "guessed": 10**15, "correct": 10**15},
        {"confidence": 7.0},
        {"confidence": 0.5},
        {"rounds": 0},
        {"delta": 0.1},
        {"proven": None},
        {"proven": float("inf")},
        {"adversary": "nobody"},
        {"unit": "client"},
    ],
)
def test_figures_that_do_not_follow_from_the_guesses_are_refused(audited: Path, change: dict[str, Any]) -> None:
    file = audited / "audit" / "one-run.json"
    honest = file.read_text()
    assert read_ledger(audited).measured is not None
    try:
        file.write_text(json.dumps({**json.loads(honest), **change}))
        with pytest.raises(CheckpointError, match="not what a game gives"):
            read_ledger(audited)
    finally:
        file.write_text(honest)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: {"scores": [10 * coin for coin in part["coins"]]},
        lambda part: {"coins": [-coin for coin in part["coins"]]},
        lambda part: {"scores": part["scores"][:3], "coins": part["coins"][:3]},
        lambda part: {"scores": [float("nan"), *part["scores"][1:]]},
        lambda part: {"line": {**part["line"], "epsilon": 0.01, "mu": 0.001}},
        lambda part: {"rounds": 1},
    ],
)
def test_parts_that_the_game_does_not_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    monkeypatch.setattr(canaries, "_PART", 50)
    monkeypatch.setattr(canaries, "_SELDOM", 0.0)
    run, file = stored(tmp_path / "run"), tmp_path / "run" / "audit" / "one-run.parts.json"

    def stop(now: Tick) -> None:
        if now.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit_one_run(run, canaries=100, tick=stop)
    kept = json.loads(file.read_text())
    kept["parts"][0] |= change(kept["parts"][0])
    file.write_text(json.dumps(kept))
    with pytest.raises(CheckpointError, match="not what this game gives"):
        audit_one_run(run, canaries=100)


@pytest.mark.parametrize("epsilon", [2.8251, 2.82649, 0.09999999, 9.9999999, 1e-7, 123.456])
def test_a_lower_bound_is_never_shown_as_more_than_it_is(epsilon: float) -> None:
    figures = MeasuredEpsilon("server", "client", epsilon, epsilon, 1e-5, 0.95, 10, 10, 5, None, None, 1, 0)
    shown = float(figures.result.split()[2])
    assert 0.998 * epsilon < shown <= epsilon * (1 + 1e-12)
    assert f"whatever the noise is: ε ≥ {figures.result.split()[2]}" in figures.told[1]
    assert "replace one client," in figures.told[0]


@pytest.mark.parametrize(("claim", "could"), [(3.0, True), (30.0, False)])
def test_a_game_that_could_not_contradict_its_claim_says_so(claim: float, could: bool) -> None:
    figures = MeasuredEpsilon("server", "record", 1.0, 0.5, 1e-5, 0.95, 600, 300, 200, claim, 1.0, 1, 0)
    assert figures.could_contradict == could
    assert any("too few canaries" in line for line in figures.told) != could


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
