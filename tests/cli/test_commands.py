"""Every command: help with an example, data as JSON, the right exit code, silence where no terminal is."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedveil import models
from fedveil.config import RunConfig
from fedveil.runs.folder import RunFolder
from fedveil.schemes import find, schemes
from fedveil.version import __version__
from shell import fedveil

COMMANDS = (
    *("run", "compare", "audit", "report", "ledger", "keys", "demo", "inspect", "inspect-data"),
    *("schemes", "models", "export", "predict", "reproduce", "doctor"),
)
SMALL = ("--rounds", 3, "--clients", 3, "--seed", 1, "-o", "depth=2", "-o", "width=8")
NETS = """
from torch import nn
def squashed(input_shape, outputs):
    hidden = [nn.Linear(48, 16), nn.Sigmoid(), nn.Linear(16, 8), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(8, outputs))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    done = fedveil("run", *SMALL, "--out", folder)
    assert (done.code, done.error) == (0, "")
    assert "test accuracy" in done.output
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_shows_an_example(command: str) -> None:
    done = fedveil(command, "--help")
    assert done.code == 0
    assert done.error == ""
    assert "Example" in done.output
    assert f"fedveil {command}" in done.output or command in ("models", "schemes")


@pytest.mark.parametrize(("typed", "meant"), [(("rnu",), "run"), (("flower", "initt"), "init")])
def test_a_mistyped_command_is_answered_with_the_nearest_once(typed: tuple[str, ...], meant: str) -> None:
    done = fedveil(*typed)
    assert done.code == 2
    assert done.error.count("Did you mean") == 1
    assert f"'{meant}'" in done.error


def test_the_commands_listed_are_those_tested_here() -> None:
    done = fedveil("--help")
    assert done.code == 0
    assert "Start with: fedveil demo" in done.output
    from fedveil.cli.app import app

    listed = {one.callback.__name__.replace("_", "-") for one in app.registered_commands if one.callback}
    assert listed == set(COMMANDS)


@pytest.mark.parametrize("name", [one.name for one in schemes()])
def test_a_schemes_options_are_listed_with_type_default_and_words(name: str) -> None:
    done = fedveil("schemes", name, "--json")
    options = {one["name"]: one for one in json.loads(done.output)["options"]}
    assert {one: options[one]["default"] for one in options} == find(name).options
    assert all(one["type"] and one["words"] for one in options.values())
    shown = " ".join(fedveil("schemes", name).output.split())
    for one in options:
        assert f"--{one.replace('_', '-')}" in shown


def test_an_unknown_scheme_or_code_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "Did you mean 'lossless'" in fedveil("schemes", "losless").error
    for name, complaint in (("absent.py:veil", "no such file"), ("json:absent", "has no 'absent'"), ("json:", "form")):
        done = fedveil("schemes", name)
        assert (done.code, complaint in done.error) == (2, True), done


def test_every_setting_has_a_flag() -> None:
    output = fedveil("run", "--help").output
    named = {"model_options": "model-option", "options": "set"}
    flags = {named.get(name, name.replace("_", "-")) for name in RunConfig.__dataclass_fields__}
    assert [flag for flag in sorted(flags) if f"--{flag}" not in output] == []
    assert "--model-option" in output


def test_settings_are_grouped_by_what_they_are_about() -> None:
    output = fedveil("run", "--help").output
    panels = ("Privacy", "Masks", "Clients' own limits")
    places = [output.index(f" {panel} ") for panel in panels]
    assert places == sorted(places)
    assert places[0] < output.index("│ --epsilon") < places[1] < output.index("│ --unmask") < places[2]
    assert places[2] < output.index("│ --policy")


def test_the_version_from_a_shell() -> None:
    for command in ([sys.executable, "-m", "fedveil"], [str(Path(sys.executable).with_name("fedveil"))]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == (f"{__version__}\n", "")


def test_schemes_as_data_and_as_a_table() -> None:
    data = json.loads(fedveil("schemes", "--json").output)
    assert [one["name"] for one in data] == [one.name for one in schemes()]
    assert all(one["paper"] and one["summary"] and one["protects"] for one in data)
    table = fedveil("schemes").output
    assert all(one["name"] in table for one in data)


def test_models_as_data_and_as_a_table() -> None:
    data = json.loads(fedveil("models", "--json").output)
    assert [one["name"] for one in data] == list(models.names())
    assert {"depth": 3, "width": 128, "norm": "none"}.items() <= data[0]["options"].items()
    assert "resnet20" in fedveil("models").output


def test_inspect_shows_that_a_resnet_is_covered_entirely() -> None:
    done = fedveil("inspect", "--model", "resnet20", "--json")
    assert (done.code, done.error) == (0, "")
    data = json.loads(done.output)
    assert data["coverage"] == 1.0
    assert data["visible"] == []
    sides = {one["name"]: one["sides"] for one in data["parameters"]}
    net = models.build("resnet20", input_shape=(3, 32, 32), outputs=10)
    assert list(sides) == [name for name, _ in net.named_parameters()]
    assert set(sides.values()) == {"one", "both"}
    first = next(iter(sides))
    assert sides[first] == "one"


def test_a_public_epsilon_lowers_the_cover() -> None:
    secret, public = (
        json.loads(fedveil("inspect", "--model", "resnet20", "--bn-eps", how, "--json").output)
        for how in ("secret", "public")
    )
    assert public["coverage"] < secret["coverage"]
    assert public["visible"]


def test_inspect_names_what_is_visible_and_what_pins_in_a_users_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mynets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for reference in ("mynets:squashed", f"{tmp_path / 'mynets.py'}:squashed"):
        shape = ("--input-shape", "3,4,4", "--outputs", 5)
        data = json.loads(fedveil("inspect", "--model", reference, *shape, "--json").output)
        assert data["visible"] == ["1.weight", "1.bias"]
        assert [pin["operation"] for pin in data["pins"]] == ["Sigmoid"]
        assert data["pins"][0]["where"]
        assert 0 < data["coverage"] < 0.9
        shown = fedveil("inspect", "--model", reference, *shape).output
        assert "visible: 1.weight, 1.bias" in shown
        assert "Sigmoid" in shown


def test_inspect_says_what_a_family_does_and_what_it_does_not_hide() -> None:
    data = json.loads(fedveil("inspect", "--model", "gru", "--family", "full", "--no-head-noise", "--json").output)
    assert data["family"] == "full"
    assert data["coverage"] > 0.99
    assert sum(data["levels"].values()) == pytest.approx(data["coverage"])
    assert set(data["levels"]) == {"moved", "signed", "scaled", "mixed"}
    assert data["secret_bits"] > 0
    words = fedveil("inspect", "--model", "gru", "--family", "signed").output
    assert "not hidden: the function" in words
    assert "% moved" in words
    assert "hidden on" not in words
    assert "real numbers a round" in words


@pytest.mark.parametrize(
    ("given", "groups"),
    [
        (
            ("decoder", "-o", "depth=1"),
            {"16 pairs of rotary channels, turned and scaled"},
        ),
        (("vit", "-o", "depth=1", "--stream-rotations"), {"1 rotated stream of 64 channels, their mean kept"}),
    ],
)
def test_inspect_lists_what_is_drawn_every_round(given: tuple[str, ...], groups: set[str]) -> None:
    data = json.loads(fedveil("inspect", "--model", *given, "--no-head-noise", "--json").output)
    assert groups <= set(data["groups"])


@pytest.mark.parametrize(
    ("given", "steps", "told"),
    [
        (("--family", "signed", "--no-head-noise"), ["sgd", "adam"], "local training: by sgd; by adam\n"),
        (("--family", "isometry", "--no-head-noise"), ["sgd"], "by sgd; by adam with --family signed"),
        (("--no-head-noise",), [], "none, one gradient a round; by sgd with --family isometry; by adam with"),
        (("--family", "signed"), [], ""),
        (("--scheme", "veil-dp"), [], ""),
    ],
)
def test_inspect_says_by_what_clients_may_train_under_a_veil(
    given: tuple[str, ...], steps: list[str], told: str
) -> None:
    small = ("inspect", "--model", "mlp", "-o", "width=8", *given)
    assert json.loads(fedveil(*small, "--json").output)["local_training"] == steps
    words = fedveil(*small).output
    assert told in words
    assert ("local training" in words) is bool(told)


def test_inspect_says_where_no_stream_is_rotated() -> None:
    words = fedveil("inspect", "--model", "mlp", "-o", "width=8", "--stream-rotations", "--no-head-noise").output
    assert "no residual stream" in words
    refused = fedveil("inspect", "--model", "mlp", "--scheme", "veil-dp", "--stream-rotations")
    assert refused.code == 2


@pytest.mark.parametrize(
    ("given", "family", "epsilon"),
    [
        ((), "scale", True),
        (("--bn-eps", "public"), "scale", False),
        (("--no-head-noise",), "full", False),
        (("--scheme", "veil-dp"), "isometry", False),
    ],
)
def test_inspect_takes_the_family_that_a_run_would(given: tuple[str, ...], family: str, epsilon: bool) -> None:
    words = fedveil("inspect", "--model", "mlp", "-o", "norm=batch", *given).output
    assert f"family {family}: coverage" in words
    assert ("secret ε of its own" in " ".join(words.split())) is epsilon


def test_inspect_refuses_a_scheme_without_a_veil_and_a_family_that_it_does_not_take() -> None:
    assert "has no veil" in fedveil("inspect", "--model", "mlp", "--scheme", "fedavg").error
    assert "only scale" in fedveil("inspect", "--model", "mlp", "--scheme", "mpdp", "--family", "full").error


def test_schemes_name_the_family_of_their_veil() -> None:
    listed = {one["name"]: one["family"] for one in json.loads(fedveil("schemes", "--json").output)}
    assert (listed["fedavg"], listed["lossless"], listed["veil-dp"]) == (None, "scale", "isometry")
    assert "family of its veil: scale, without head noise full" in fedveil("schemes", "lossless").output


def test_inspect_in_words() -> None:
    output = fedveil("inspect", "--model", "mlp", "-o", "depth=2").output
    assert "hidden on one side" in output
    assert "coverage 100.0% of" in output
    assert "no operation pins" in output
    without = fedveil("inspect", "--model", "mlp", "--no-head-noise").output
    assert "visible: head.bias" in without
    assert "[bold red]" not in without


def test_a_run_is_quiet_where_no_terminal_is(ran: Path, tmp_path: Path) -> None:
    done = fedveil("run", *SMALL, "-q", "--out", tmp_path / "b")
    assert (done.code, done.output, done.error) == (0, "", "")


@pytest.mark.slow
def test_no_progress_bar_bytes_reach_a_pipe(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedveil", "run", *map(str, SMALL), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stderr == b""
    assert b"\x1b" not in done.stdout
    assert "test accuracy" in done.stdout.decode()


def test_a_terminal_does_get_a_progress_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The silence above is a choice: on a terminal there is a bar."""
    from fedveil.runs.callbacks import Progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert Progress("lossless", total=3).shown is not None
    assert Progress("lossless", total=3, quiet=True).shown is None
    with Progress("lossless", total=3) as bar:
        bar.update({"round": 1, "loss": 0.5, "test_accuracy": 0.25})
        bar.update({"round": 2, "loss": 0.5, "test_mse": 0.25})


def test_within_a_long_round_the_bar_says_how_many_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedveil.runs import callbacks

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    clock = itertools.count(step=0.75)
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: next(clock))
    assert callbacks.Progress("nadp", total=3, quiet=True).listener is None
    bar = callbacks.Progress("nadp", total=3)
    assert bar.shown is not None
    assert bar.listener is not None
    said = []
    for answered in (10, 20, 9_000):
        bar.listener(answered, 10_000)
        said.append(bar.shown.tasks[0].fields["figures"])
    assert said == ["", "20 of 10,000 answered", "9,000 of 10,000 answered"]
    bar.update({"round": 1, "loss": 0.5})
    assert bar.shown.tasks[0].fields["figures"] == "loss 0.5000"


def test_export_then_predict_gives_the_same_accuracy(ran: Path, tmp_path: Path) -> None:
    exported = fedveil("export", ran, "--out", tmp_path / "usable.safetensors")
    assert exported.code == 0, exported.error
    assert "predictions equal the model's" in exported.output
    shown = [fedveil("predict", place).output for place in (ran, tmp_path / "usable.safetensors")]
    figures = [line.split("accuracy ")[1].split("%")[0] for line in shown]
    assert figures[0] == figures[1]
    assert shown[0].startswith("server model, 359 samples")
    assert shown[1].startswith("export model, 359 samples")


def test_predict_writes_a_line_per_sample(ran: Path, tmp_path: Path) -> None:
    done = fedveil("predict", ran, "--dataset", "digits", "--part", "train", "--out", tmp_path / "p.csv")
    assert done.code == 0, done.error
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 1 + 1438


def test_the_demo_shows_both_schemes_side_by_side(tmp_path: Path) -> None:
    done = fedveil("demo", "--rounds", 2, "--clients", 3, "--out", tmp_path / "demo")
    assert done.code == 0, done.error
    assert "fedavg" in done.output
    assert "lossless" in done.output
    assert "Not protected" in done.output
    assert (tmp_path / "demo" / "lossless" / "summary.json").exists()


def test_resume_from_the_command_line_extends_a_run(ran: Path, tmp_path: Path) -> None:
    fedveil("run", *SMALL, "--out", tmp_path / "run")
    done = fedveil("run", "--resume", "--rounds", 5, "--out", tmp_path / "run")
    assert done.code == 0, done.error
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 5


def test_resume_says_on_standard_error_which_checkpoint_it_refused(tmp_path: Path) -> None:
    fedveil("run", *SMALL, "--checkpoint-every", 1, "--out", tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    newest.write_bytes(b"")
    done = fedveil("run", "--resume", "--rounds", 5, "--out", tmp_path / "run", "-q")
    assert done.code == 0
    assert f"Checkpoint {newest.name} is damaged" in done.error
    assert "Using the previous one" in done.error


def test_square_brackets_in_a_path_are_just_square_brackets(tmp_path: Path) -> None:
    folder = tmp_path / "[" / "x] [bold]y"
    for arguments in (("run", *SMALL, "--out", folder), ("export", folder, "--out", tmp_path / "[red]z")):
        done = fedveil(*arguments)
        assert done.code == 0, done.error
    assert "[red]z" in done.output
    (sorted((folder / "checkpoints").iterdir())[-1]).write_bytes(b"")
    fedveil("run", "--resume", "--out", folder)


def stored(folder: Path) -> RunConfig:
    return RunConfig.from_mapping(RunConfig.read(folder / "config.toml"))


def test_settings_come_from_a_file_and_flags_win(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'scheme = "pbpfl"\nrounds = 9\nclients = 3\nbatch-size = 16\nlr = 1\nseed = 4\n'
        "[model_options]\ndepth = 2\nwidth = 8\n"
    )
    flags = ("--rounds", 2, "--lr", 0.5, "-o", "width=6")
    done = fedveil("run", "-c", tmp_path / "run.toml", *flags, "--out", tmp_path / "run")
    assert done.code == 0, done.error
    config = stored(tmp_path / "run")
    assert (config.scheme, config.rounds, config.clients, config.lr) == ("pbpfl", 2, 3, 0.5)
    assert (config.batch_size, config.seed) == (16, 4)
    assert config.model_options == {"depth": 2, "width": 6}


def test_a_stored_config_starts_the_same_run_again(ran: Path, tmp_path: Path) -> None:
    done = fedveil("run", "-c", ran / "config.toml", "--out", tmp_path / "again")
    assert done.code == 0, done.error
    assert stored(tmp_path / "again") == stored(ran)
    ours, theirs = (json.loads((one / "summary.json").read_text()) for one in (tmp_path / "again", ran))
    assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


@pytest.mark.parametrize(("text", "expected"), [("0.5", 0.5), ("2", 2), ("1.0", 1.0), ("1", 1)])
def test_a_cohort_is_a_fraction_or_a_count(tmp_path: Path, text: str, expected: float) -> None:
    assert fedveil("run", *SMALL, "--cohort", text, "--out", tmp_path / "run").code == 0
    cohort = stored(tmp_path / "run").cohort
    assert cohort == expected
    assert type(cohort) is type(expected)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_told_to_end_keeps_what_it_has_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    original, before = RunFolder.append_metrics, signal.getsignal(signal.SIGTERM)

    def told(self: RunFolder, row: dict[str, Any]) -> None:
        original(self, row)
        if row["round"] == 2:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "append_metrics", told)
        done = fedveil("run", *SMALL, "--checkpoint-every", 1, "--out", tmp_path / "run")
    assert done.code == code
    assert done.error.splitlines()[-1].startswith("stopped; what was written so far is kept")
    assert signal.getsignal(signal.SIGTERM) is before
    assert fedveil("run", "--resume", "--out", tmp_path / "run").code == 0


def test_inspect_asks_how_many_outputs_a_model_of_ones_own_has(tmp_path: Path) -> None:
    (tmp_path / "mynets.py").write_text(NETS)
    done = fedveil("inspect", "--model", f"{tmp_path / 'mynets.py'}:squashed", "--input-shape", "3,4,4")
    assert done.code == 2
    assert "give --outputs" in done.error
