"""ParaAegis and its baselines on the command line: every option, what is printed, and what is refused how."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ConfigError, MissingExtraError
from shell import Done, fedveil

SMALL = ("--rounds", 2, "--clients", 4, "--batch-size", 32, "-o", "depth=2", "-o", "width=8", "--seed", 1)
QUIET_NOISE = ("--clip", 0.001)

RUNS: dict[str, tuple[object, ...]] = {
    "dp-fedavg": ("dp-fedavg", *QUIET_NOISE),
    "dp-fedavg, the paper's noise": ("dp-fedavg", "--accounting", "paper", "--epsilon", 1, "--delta", 1e-6),
    "dp-fedavg, local steps": ("dp-fedavg", "--local-steps", 2, *QUIET_NOISE),
    "ckks-fedavg": ("ckks-fedavg",),
    "ckks-fedavg under pads": ("ckks-fedavg", "--cipher", "pads", "--value-range", 16),
    "serial": ("serial", *QUIET_NOISE),
    "serial under pads": ("serial", "--cipher", "pads", "--local-epochs", 2, *QUIET_NOISE),
    "paraaegis": ("paraaegis", *QUIET_NOISE),
    "pads": ("paraaegis", "--cipher", "pads", *QUIET_NOISE),
    "pads, histogram": ("paraaegis", "--cipher", "pads", "--vote", "histogram", *QUIET_NOISE),
    "ckks, histogram": ("paraaegis", "--vote", "histogram", *QUIET_NOISE),
    "smallest": ("paraaegis", "--cipher", "pads", "--strategy", "min", *QUIET_NOISE),
    "by lot": ("paraaegis", "--cipher", "pads", "--strategy", "random", *QUIET_NOISE),
    "nothing hidden": ("paraaegis", "--share", 0, *QUIET_NOISE),
    "everything hidden": ("paraaegis", "--share", 1, "--cipher", "pads"),
    "less and less": ("paraaegis", "--share", 0.5, "--share-decay", 0.5, "--cipher", "pads", *QUIET_NOISE),
    "the paper's noise": ("paraaegis", "--cipher", "pads", "--accounting", "paper", "--epsilon", 1),
    "one phase": ("paraaegis", "--cipher", "pads", "--unmask", "on-dropout", *QUIET_NOISE),
    "a higher threshold": ("paraaegis", "--cipher", "pads", "--threshold", 0.75, *QUIET_NOISE),
    "few neighbours": ("paraaegis", "--cipher", "pads", "--neighbours", 2, *QUIET_NOISE),
    "a cohort": ("paraaegis", "--cipher", "pads", "--cohort", 3, *QUIET_NOISE),
}


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("case", RUNS)
def test_every_option_runs_and_ends_with_a_ledger(tmp_path: Path, case: str) -> None:
    name, *options = RUNS[case]
    if "pads" not in map(str, options) and name != "dp-fedavg" and "--share" not in options:
        pytest.importorskip("tenseal")
    done = fedveil("run", "--scheme", str(name), *options, *SMALL, "--out", tmp_path / "run")  # type: ignore[arg-type]
    assert (done.code, done.error) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["scheme"], summary["rounds"]) == (name, 2)
    assert "failed_rounds" not in summary
    assert f"Ledger of {name}" in done.output
    assert ("lives with the clients" in done.output) == (name != "dp-fedavg")
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    shown = words(done.output)
    for line in ledger["lines"]:
        assert line["why"][:30] in shown  # the whole may be broken into lines
        if line["epsilon"] is None:
            assert line["verdict"] in shown
    assert all(one in shown for one in ledger["unprotected"])
    warned = "not a DP guarantee" in shown
    assert warned == ("paper" in options)


def test_a_model_that_lives_with_clients_can_be_used_resumed_and_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = ("--scheme", "ckks-fedavg", "--cipher", "pads", *SMALL)
    assert fedveil("run", *given, "-q", "--out", run).code == 0
    resumed = fedveil("run", "--resume", "--rounds", 4, "-q", "--out", run)
    assert (resumed.code, resumed.error) == (0, "")
    assert json.loads((run / "summary.json").read_text())["rounds"] == 4
    predicted = fedveil("predict", run)
    assert predicted.output.startswith("client model, 359 samples")
    exported = fedveil("export", run, "--out", tmp_path / "usable.safetensors")
    assert exported.code == 0, exported.error


def test_a_runs_folder_shows_the_same_ledger_again(tmp_path: Path) -> None:
    given = ("--scheme", "paraaegis", "--cipher", "pads", "--vote", "histogram", *QUIET_NOISE, *SMALL)
    done = fedveil("run", *given, "--out", tmp_path / "run")
    again = fedveil("ledger", tmp_path / "run")
    assert again.output.strip()
    assert again.output in done.output


# --- questions

PAPER = ("--clients", 10, "--rounds", 50, "--samples", 947, "--epsilon", 1)


def test_the_papers_noise_is_shown_beside_what_it_takes() -> None:
    done = fedveil("ledger", "--scheme", "paraaegis", *PAPER)
    assert (done.code, done.error) == (0, "")
    shown = words(done.output)
    for part in (
        "σ left in the sum of updates",
        "… to its update, before × 947 │ 52.76 │ 0.07166",
        "Exact accounting takes 736 times as much noise as the paper's formula",
        "into the sum of updates; used here: 1.58e+05, 736 times as much",
        "no bound on an update of local epochs, so no guarantee",
    ):
        assert part in shown, part
    assert "not a DP guarantee" not in shown


def test_asked_for_the_papers_noise_the_answer_is_what_it_really_gives() -> None:
    shown = words(fedveil("ledger", "--scheme", "paraaegis", *PAPER, "--accounting", "paper").output)
    for part in ("(ε = 20,315, δ = 1e-05)", "not a DP guarantee", "used here: 214.6, as much"):
        assert part in shown, part


def asked(*arguments: object) -> dict[str, Any]:
    done = fedveil("ledger", *arguments, "--json")  # type: ignore[arg-type]
    assert (done.code, done.error) == (0, "")
    found: dict[str, Any] = json.loads(done.output)["ledger"]
    return found


def test_every_option_that_matters_to_a_claim_can_be_asked_about() -> None:
    base = ("--scheme", "paraaegis", *PAPER)
    server = asked(*base, "--cipher", "pads", "--vote", "histogram")["lines"][0]
    assert (server["verdict"], round(server["epsilon"], 6), round(server["outright"], 2)) == ("conditional", 1.0, 3.62)
    assert asked(*base, "--strategy", "random")["lines"][0]["outright"] == pytest.approx(server["outright"])
    assert asked(*base, "--share", 0)["lines"][0]["verdict"] == "differential privacy"
    assert asked(*base, "--share", 1)["lines"][0]["verdict"] == "ciphertexts only"
    assert asked(*base, "--share", 1, "--share-decay", 0.9)["lines"][0]["verdict"] == "conditional"
    trusting = asked(*base, "--cipher", "pads", "--unmask", "on-dropout")["lines"][0]
    assert any("honest about whose upload did not arrive" in one for one in trusting["assumptions"])


def test_a_ledger_fits_a_terminal_of_80_columns() -> None:
    done = fedveil("ledger", "--scheme", "paraaegis", *PAPER, columns=80)
    lines = done.output.splitlines()
    boxes = [line for line in lines if line and line[0] in "┏┃┡│├└"]
    assert len(boxes) > 20
    assert max(map(len, boxes)) <= 80
    assert (done.code, done.error) == (0, "")


def test_schemes_says_what_each_protects_from_whom() -> None:
    found = {one["name"]: one for one in json.loads(fedveil("schemes", "--json").output)}
    assert {"dp-fedavg", "ckks-fedavg", "serial", "paraaegis"} <= set(found)
    for name in ("ckks-fedavg", "paraaegis"):
        protects = found[name]["protects"]
        assert "computational" in protects
        assert "with ckks, while no client sides with it" in protects
        assert "only sums, without a bound" in protects
    assert "(ε, δ) given what is hidden" in found["paraaegis"]["protects"]


def test_help_has_a_panel_for_the_hidden_share() -> None:
    output = fedveil("run", "--help").output
    start = output.index(" Hidden share ")
    for name in ("--share", "--share-decay", "--strategy", "--vote", "--cipher"):
        assert f"│ {name} " in output[start:]


# --- refused in one clear line

BAD: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "more than all hidden": (("--scheme", "paraaegis", "--share", 1.5), ("share", "from 0 to 1", "1.5")),
    "less than nothing hidden": (("--scheme", "paraaegis", "--share", -0.1), ("share", "-0.1")),
    "a share that is no number": (
        ("--scheme", "paraaegis", "--share", "nan"),
        ("share must be a finite",),
    ),
    "a share that is gone at once": (
        ("--scheme", "paraaegis", "--share-decay", 0),
        ("share_decay", "above 0 and up to 1", "1 keeps r as it is"),
    ),
    "a share that grows": (("--scheme", "paraaegis", "--share-decay", 1.1), ("share_decay", "1.1")),
    "an unknown cipher": (("--scheme", "paraaegis", "--cipher", "pad"), ("Did you mean 'pads'?",)),
    "an unknown cipher for everything": (("--scheme", "serial", "--cipher", "aes"), ("ckks, pads",)),
    "an unknown vote": (("--scheme", "paraaegis", "--vote", "histo"), ("Did you mean 'histogram'?",)),
    "an unknown strategy": (("--scheme", "paraaegis", "--strategy", "maxi"), ("Did you mean 'max'?",)),
    "two clients under pads": (
        ("--scheme", "paraaegis", "--cipher", "pads", "--clients", 2),
        ("at least three clients in a round, not 2", "Use more clients"),
    ),
    "two in a round under pads": (
        ("--scheme", "ckks-fedavg", "--cipher", "pads", "--cohort", 2),
        ("at least three clients in a round, not 2",),
    ),
    "two clients whose votes are summed": (
        ("--scheme", "paraaegis", "--vote", "histogram", "--clients", 2),
        ("at least three clients",),
    ),
    "two clients under ckks": (("--scheme", "ckks-fedavg", "--clients", 2), ("at least three clients",)),
    "one client that holds the model": (
        ("--scheme", "paraaegis", "--share", 0, "--clients", 1),
        ("lives with its clients", "at least two"),
    ),
    "numbers too large for ckks": (
        ("--scheme", "ckks-fedavg", "--value-range", 1e12),
        ("value_range", "No CKKS parameters", "1e+12", "Lower"),
    ),
    "no numbers for ckks": (
        ("--scheme", "ckks-fedavg", "--value-range", 0),
        ("value_range must lie between 1 and 2^40", "Raise"),
    ),
    "numbers too large for pads": (
        ("--scheme", "ckks-fedavg", "--cipher", "pads", "--value-range", 1e30),
        ("value_range must lie between 1 and 2^40", "1e+30", "Lower value_range"),
    ),
    "privacy where there is no noise": (
        ("--scheme", "ckks-fedavg", "--epsilon", 1),
        ("'ckks-fedavg' has no option 'epsilon'",),
    ),
    "a share of everything": (("--scheme", "dp-fedavg", "--share", 0.1), ("has no option 'share'",)),
    "steps and epochs": (
        ("--scheme", "paraaegis", "--local-steps", 2, "--local-epochs", 2),
        ("local_steps or local_epochs, not both",),
    ),
    "no local steps": (("--scheme", "paraaegis", "--local-steps", 0), ("local_steps must be positive",)),
    "no local epochs": (
        ("--scheme", "dp-fedavg", "--local-epochs", 0),
        ("local_epochs must be positive",),
    ),
    "a threshold of less than half under pads": (
        ("--scheme", "paraaegis", "--cipher", "pads", "--threshold", 0.3),
        ("threshold must lie in [0.5, 1)",),
    ),
    "batch norm under dp-fedavg": (
        ("--scheme", "dp-fedavg", "-o", "norm=batch"),
        ("batch normalisation", "norm=group"),
    ),
    "an update that is clipped to nothing": (("--scheme", "paraaegis", "--clip", 0), ("positive number",)),
}

UNANSWERED: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "more than all hidden": (("--scheme", "paraaegis", "--share", 2), ("share", "from 0 to 1")),
    "an unknown vote": (("--scheme", "paraaegis", "--vote", "histo"), ("Did you mean 'histogram'?",)),
    "an unknown cipher": (("--scheme", "ckks-fedavg", "--cipher", "ckk"), ("Did you mean 'ckks'?",)),
    "two clients under pads": (
        ("--scheme", "ckks-fedavg", "--cipher", "pads", "--clients", 2),
        ("at least three clients",),
    ),
}


def refused(done: Done, *parts: str) -> None:
    assert (done.code, done.output) == (ConfigError.exit_code, ""), done
    assert done.error.startswith("error: ")
    assert "\n" not in done.error
    for part in parts:
        assert part in done.error


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_a_run_takes_its_folder(tmp_path: Path, case: str) -> None:
    given, parts = BAD[case]
    refused(fedveil("run", "--rounds", 2, "--seed", 1, *given, "--out", tmp_path / "run"), *parts)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("scheme", ["paraaegis", "ckks-fedavg"])
def test_a_client_that_limits_epsilon_takes_no_part_where_sums_are_without_noise(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "policy.toml").write_text("max_epsilon = 100\n")
    given = ("--scheme", scheme, "--cipher", "pads", "--policy", tmp_path / "policy.toml", "--out", tmp_path / "run")
    refused(fedveil("run", *SMALL, *given), "its uploads, or part of them, carry no noise", "serial")
    for noised in (("--scheme", "serial", "--cipher", "pads"), ("--scheme", "dp-fedavg")):
        done = fedveil("run", *SMALL, *noised, *QUIET_NOISE, *given[4:6], "-q", "--out", tmp_path / noised[1])
        assert (done.code, done.error) == (0, "")


@pytest.mark.parametrize("case", UNANSWERED)
def test_a_question_that_cannot_be_answered_is_refused(case: str) -> None:
    given, parts = UNANSWERED[case]
    refused(fedveil("ledger", *given), *parts)  # type: ignore[arg-type]


# --- without the extra


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if TenSEAL were not installed."""
    monkeypatch.setitem(sys.modules, "tenseal", None)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("scheme", ["paraaegis", "ckks-fedavg", "serial"])
def test_without_the_extra_the_one_command_that_installs_it_is_named(tmp_path: Path, scheme: str) -> None:
    done = fedveil("run", "--scheme", scheme, *SMALL, "--out", tmp_path / "run")
    assert done.output == ""
    assert "\n" not in done.error
    assert "'tenseal', which is not installed" in done.error
    assert "pip install 'fedveil[he]'" in done.error
    assert done.code == MissingExtraError.exit_code
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("bare")
def test_pads_and_questions_need_no_extra(tmp_path: Path) -> None:
    given = ("--scheme", "paraaegis", "--cipher", "pads", *QUIET_NOISE, *SMALL)
    done = fedveil("run", *given, "-q", "--out", tmp_path / "run")
    assert (done.code, done.error) == (0, "")
    assert fedveil("ledger", "--scheme", "ckks-fedavg", "--clients", 5).code == 0
