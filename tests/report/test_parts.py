"""Sources, groups, the front, pictures as plotly data, the ledger in words."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fedveil.config import RunConfig
from fedveil.ledger.statement import Ledger, Line, PaperFigure
from fedveil.report.figures import curves, front, trade_offs
from fedveil.report.sources import ReportSources, Run, SourceGroup, gather, grouped
from fedveil.report.view import command_for, view_of
from fedveil.report.words import claim, entry, judged_table, judged_views, reliability, whole
from report.material import ROUNDS, SCHEMES, SEEDS


def run_of(
    scheme: str = "nadp",
    *,
    seed: int = 1,
    accuracy: float = 0.9,
    seconds: float = 10.0,
    size: float = 100.0,
    line: Line | None = None,
    **settings: Any,
) -> Run:
    rows = tuple(
        {"round": one, "loss": 1 / one, "test_accuracy": accuracy * one / 3, "bytes_up": size, "bytes_down": size}
        for one in (1, 2, 3)
    )
    ledger = None if line is None else Ledger(scheme, 3, (line,), (), None, False, ())
    summary = {"test_accuracy": accuracy, "seconds": seconds, "loss": "square"}
    return Run(Path(scheme), {"scheme": scheme, "seed": seed, **settings}, "", rows, summary, ledger, None)


PROVEN = Line("server", "differential privacy", "sees noise", epsilon=3.0, delta=1e-5, unit="one record of one client")


def test_a_source_named_twice_or_by_its_audit_is_read_once(audited: Path, compared: Path) -> None:
    found = gather([audited, audited / "audit", audited / "audit" / "audit.json", compared])
    assert len(found.runs) == 1 + len(SCHEMES) * len(SEEDS)
    assert found.audits == ()
    assert [one.reason for one in found.failures] == ["no luck"]


def test_runs_that_differ_only_in_the_seed_are_a_group_and_others_are_told_apart() -> None:
    runs = [run_of(seed=1, epsilon=1.0), run_of(seed=2, epsilon=1.0), run_of(epsilon=3.0), run_of("fedavg")]
    groups = grouped(runs)
    assert [(one.label, len(one.runs)) for one in groups] == [
        ("nadp, epsilon 1.0", 2),
        ("nadp, epsilon 3.0", 1),
        ("fedavg", 1),
    ]
    assert [one.slot for one in groups] == [0, 1, 2]


def test_a_curve_is_the_mean_between_the_lowest_and_the_highest_and_gaps_stay_gaps() -> None:
    first, second = run_of(accuracy=0.3), run_of(accuracy=0.9, seed=2)
    rows = [{**row} for row in second.rows]
    del rows[1]["test_accuracy"]
    rows[2]["test_accuracy"] = float("nan")
    curve = SourceGroup("x", 0, (first, replace(second, rows=tuple(rows)))).curve("test_accuracy")
    assert curve.rounds == (1, 2, 3)
    assert curve.mean == pytest.approx((0.2, 0.2, 0.3))
    assert curve.low == pytest.approx((0.1, 0.2, 0.3))
    assert curve.high == pytest.approx((0.3, 0.2, 0.3))
    assert SourceGroup("x", 0, (replace(first, rows=tuple(rows[1:2])),)).curve("test_accuracy").mean == (None,)


def test_the_weakest_line_of_several_seeds_is_the_group_s() -> None:
    weak = replace(PROVEN, epsilon=4.0)
    assert SourceGroup("x", 0, (run_of(line=weak), run_of(line=PROVEN))).line("server") == weak
    none = Line("server", "none", "sees all")
    assert SourceGroup("x", 0, (run_of(line=none), run_of(line=weak))).line("server") == none
    assert SourceGroup("x", 0, (run_of(), run_of(line=weak))).line("server") is None


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ([(1, 0.5), (2, 0.9), (3, 0.8)], [0, 1]),
        ([(3, 0.9), (1, 0.9)], [1]),
        ([(1, 0.5), (1, 0.7)], [1]),
        ([(1, 0.5), (1, 0.5)], [0, 1]),
        ([], []),
    ],
    ids=["dominated", "dearer", "worse", "equal", "empty"],
)
def test_the_front_is_what_nothing_beats(points: list[tuple[float, float]], kept: list[int]) -> None:
    assert front(points) == kept


def test_pictures_are_what_plotly_accepts(compared: Path) -> None:
    graphs = pytest.importorskip("plotly.graph_objects", reason="needs the extra report")
    groups = grouped(gather([compared]).runs)
    made = [*curves(groups), *trade_offs(groups)]
    assert [one.name for one in made] == [
        *("curve-test-accuracy", "curve-loss", "against-epsilon-server", "against-epsilon-clients"),
        *("against-bytes", "against-time"),
    ]
    for one in made:
        graphs.Figure(one.drawing)  # refuses what plotly does not know
        assert one.reading.endswith(".")
    lines = [one for one in made[0].drawing["data"] if one["meta"]["role"] == "line"]
    assert [len(one["y"]) for one in lines] == [ROUNDS] * len(SCHEMES)
    assert any(one["meta"]["role"] == "band" for one in made[0].drawing["data"])


def test_only_proofs_are_on_the_front_and_what_promises_no_epsilon_stands_apart() -> None:
    conditional = replace(PROVEN, verdict="conditional", epsilon=1.0)
    runs = [
        run_of("proven", line=PROVEN, accuracy=0.6),
        run_of("conditional", line=conditional, accuracy=0.7),
        run_of("open", line=Line("server", "none", "sees all"), accuracy=0.9),
    ]
    figure = next(one for one in trade_offs(grouped(runs)) if one.name == "against-epsilon-server")
    by_role: dict[str, list[dict[str, Any]]] = {}
    for trace in figure.drawing["data"]:
        by_role.setdefault(trace["meta"]["role"], []).append(trace)
    assert by_role["front"][0]["x"] == [3.0]
    symbols = {trace["name"]: trace["marker"]["symbol"] for trace in by_role["point"]}
    assert symbols["conditional"].endswith("-open")
    assert not symbols["proven"].endswith("-open")
    assert [trace["name"] for trace in by_role["point"] if trace.get("xaxis") == "x2"] == ["open"]
    assert "Hollow points" in figure.reading


def test_one_point_is_no_trade_off_and_an_error_is_better_low() -> None:
    assert trade_offs(grouped([run_of()])) == []
    cheap = run_of("cheap", size=1.0)
    poor = run_of("poor", size=50.0)
    runs = [replace(cheap, summary={"test_mse": 0.5}), replace(poor, summary={"test_mse": 0.9})]
    (figure,) = trade_offs(grouped(runs))
    assert figure.name == "against-bytes"
    assert figure.drawing["data"][0]["y"] == [0.5]
    assert "lower is better" in figure.reading


@pytest.mark.parametrize(
    ("line", "verdict", "tone", "figure"),
    [
        (PROVEN, "Proven", "good", "(ε = 3, δ = 1e-05)"),
        (replace(PROVEN, verdict="estimate"), "Estimated, not proven", "fair", "about (ε = 3, δ = 1e-05), not proven"),
        (
            replace(PROVEN, verdict="conditional", outright=11.7),
            "Proven under a condition",
            "fair",
            "(ε = 3, δ = 1e-05) given what is hidden; in any case ε = 11.7",
        ),
        (Line("clients", "aggregate only", "sees sums"), "Only sums are seen", "fair", "no (ε, δ)"),
        (Line("server", "none", "sees all"), "Nothing is proven", "bad", "no (ε, δ)"),
    ],
    ids=["proven", "estimate", "conditional", "sums", "none"],
)
def test_verdicts_are_told_as_they_are(line: Line, verdict: str, tone: str, figure: str) -> None:
    told = entry(line)
    assert (told.verdict, told.tone, told.figure) == (verdict, tone, figure)


def test_epsilon_is_a_factor_between_chances_and_a_huge_one_is_called_no_limit() -> None:
    assert "more than 20.09 times as likely" in entry(PROVEN).meaning
    assert "no limit at all" in entry(replace(PROVEN, epsilon=20_315.0)).meaning
    assert entry(Line("server", "none", "sees all")).meaning == ""


def test_the_paper_s_claim_stands_beside_what_holds() -> None:
    paper = PaperFigure("σ = 1", claimed_epsilon=1.0, noise_by_paper=2.0, noise_used=1.0)
    line = replace(PROVEN, epsilon=20_315.0)
    told = claim(Ledger("x", 3, (line,), (), paper, False, ()))
    assert told is not None
    assert told.claimed == "ε = 1"
    assert told.holds == "(ε = 20,315, δ = 1e-05), against the server"
    assert told.noise == "σ = 2 by the paper, σ = 1 used here (50.0 % less)"
    assert claim(Ledger("x", 3, (line,), (), None, False, ())) is None
    bare = claim(Ledger("x", 3, (Line("server", "none", "sees all"),), (), PaperFigure("f"), False, ()))
    assert bare is not None
    assert bare.holds == "nothing is proven, against the server"


def test_every_setting_has_a_flag_and_the_command_gives_the_same_settings() -> None:
    from typer.main import get_command

    from fedveil.cli.app import app
    from fedveil.plain import parse_model_options

    changed = RunConfig(
        scheme="nadp",
        dataset="/data/my files/x.csv",
        target="y; rm -rf /",
        cohort=0.5,
        honest_arrivals=True,
        head_noise=False,
        record=True,
        record_rounds="1-3",
        epsilon=1.5,
        seed=7,
        model_options={"depth": 2, "norm": "group", "name": "3", "bias": False},
        options={"keep": 0.2, "way": "far"},
    )
    settings = {name: value for name, value in vars(changed).items() if value is not None}
    words = shlex.split(command_for(settings, out="runs/x"))
    run = get_command(app).commands["run"]  # type: ignore[attr-defined]
    assert words[:2] == ["fedveil", "run"]
    parsed = run.make_context("run", words[2:], resilient_parsing=False).params
    assert parse_model_options(list(parsed["model_option"])) == changed.model_options
    assert parse_model_options(list(parsed["option"])) == changed.options
    for name, value in settings.items():
        if name not in ("model_options", "options", "cohort"):
            default = next(one.default for one in fields(RunConfig) if one.name == name)
            assert parsed[name] == value or (parsed[name] is None and value == default), name
    assert parsed["cohort"] == "0.5"


def test_a_run_from_python_has_no_command() -> None:
    assert command_for({"dataset": "python", "scheme": "lossless"}, out="runs/x") == ""


def test_models_are_judged_side_by_side_and_the_constant_answer_stands_below(compared: Path) -> None:
    groups = grouped(gather([compared]).runs)
    table = judged_table(groups)
    assert [row[0] for row in table.rows[:-1]] == list(SCHEMES)
    assert table.columns[:3] == ("Scheme", "Accuracy", "Balanced accuracy")
    baselines = [run.summary["judged"]["figures"]["accuracy"]["baseline"] for group in groups for run in group.runs]
    assert f"{100 * min(baselines):.1f}" in table.rows[-1][1]
    views = judged_views(groups)
    assert [view.label for view in views] == list(SCHEMES)
    worst = min(run.summary["test_accuracy"] for run in groups[0].runs)
    assert views[0].judged.figures["accuracy"].value == worst
    assert [sum(count for count, _ in row) for _, row in views[0].confusion] == [
        part.samples for part in views[0].judged.classes
    ]
    picture = reliability(groups)
    assert picture is not None
    assert len(picture.drawing["data"]) == 1 + len(SCHEMES)


def test_a_run_that_does_not_beat_the_constant_answer_is_a_warning_on_the_page(compared: Path) -> None:
    page = view_of(gather([compared]))
    behind = [run for run in gather([compared]).runs if not run.summary["judged"]["beats_baseline"]]
    assert behind
    assert all(any(run.summary["judged"]["verdict"] in text for text in page.warnings) for run in behind)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("57.1 % (52.9–61.3 %)", "57.1~% (52.9|–|61.3~%)"),
        ("104.7 kB", "104.7~kB"),
        ("100.0 dB; chance 11.5 dB", "100.0~dB; chance 11.5~dB"),
        ("(ε = 2.826, δ = 1e-05)", "(ε~=~2.826, δ~=~1e|-|05)"),
        ("0.5 s (0.4–0.5 s)", "0.5~s (0.4|–|0.5~s)"),
        ("8 of 8 samples", "8 of 8 samples"),
        ("a – b, 5 Bytes", "a – b, 5 Bytes"),
    ],
)
def test_a_number_and_its_unit_stay_on_one_line(text: str, kept: str) -> None:
    assert whole(text) == kept.replace("~", "\u00a0").replace("|", "\u2060")


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ({"coverage": 0.999}, "99.9 %, up to scale"),
        (
            {"coverage": 0.9, "levels": {"moved": 0.2, "signed": 0.0, "scaled": 0.3, "mixed": 0.4}},
            "90.0 %: 20.0 % moved, 30.0 % scaled, 40.0 % mixed",
        ),
        ({"coverage": 0.0, "levels": {"moved": 0.0, "signed": 0.0, "scaled": 0.0, "mixed": 0.0}}, "0.0 %"),
        ({}, None),
    ],
)
def test_what_is_hidden_is_said_by_what_a_family_does(summary: dict[str, Any], said: str | None) -> None:
    run = run_of("lossless")
    page = view_of(ReportSources((replace(run, summary=run.summary | summary),), (), ()))
    assert dict(page.common).get("Parameters hidden") == said
