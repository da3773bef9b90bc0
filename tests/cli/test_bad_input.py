"""Bad input: one line on standard error that says what, where and what to do; the documented exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedveil import errors
from fedveil.errors import CheckpointError, ConfigError, DataError, FedVeilError, NumericError, TraceError
from shell import Done, fedveil

RUN = ("run", "--rounds", 2, "--seed", 1)
NETS = """
from torch import nn
import math
def squashed(input_shape, outputs):
    n = math.prod(input_shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(n, 16), nn.Sigmoid(), nn.Linear(16, outputs))
def ends_in_sigmoid(input_shape, outputs):
    n = math.prod(input_shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(n, 16), nn.ReLU(), nn.Linear(16, outputs), nn.Sigmoid())
def wide(outputs): return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs + 2))
def narrow(outputs): return nn.Linear(12, outputs)
def broken(outputs): raise RuntimeError("first line\\nsecond line")
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    rows = [f"{i / 10},{(7 * i) % 13},{i % 3}" for i in range(60)]
    (tmp_path / "good.csv").write_text("a,b,y\n" + "\n".join(rows) + "\n")
    (tmp_path / "inf.csv").write_text("a,b,y\n" + "\n".join([*rows[:6], "inf,2,1", *rows[7:]]) + "\n")
    (tmp_path / "one.csv").write_text("a,b,y\n1,2,0\n")
    (tmp_path / "typo.toml").write_text("rouns = 3\n")
    (tmp_path / "type.toml").write_text('rounds = "many"\n')
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("x")
    return tmp_path


def check(done: Done, error: type[FedVeilError], *parts: str) -> None:
    assert done.code == error.exit_code, done
    assert done.error.startswith("error: ")
    assert "\n" not in done.error
    assert "Traceback" not in done.error
    for part in parts:
        assert part in done.error
    assert done.output == ""


BAD: dict[str, tuple[tuple[object, ...], type[FedVeilError], tuple[str, ...]]] = {
    "unknown scheme": (("--scheme", "losless"), ConfigError, ("'losless'", "Did you mean 'lossless'?")),
    "unknown model": (("--model", "resnet-20"), ConfigError, ("'resnet-20'", "Did you mean 'resnet20'?")),
    "unknown dataset": (("--dataset", "digit"), ConfigError, ("'digit'", "Did you mean 'digits'?")),
    "absent file": (("--dataset", "none.csv"), DataError, ("none.csv: no such file",)),
    "unknown partition": (("--partition", "dirichle"), ConfigError, ("Did you mean 'dirichlet'?",)),
    "unknown loss": (("--loss", "squared"), ConfigError, ("Did you mean 'square'?",)),
    "unknown model option": (("-o", "dept=3"), ConfigError, ("Did you mean 'depth'?",)),
    "malformed model option": (("-o", "depth"), ConfigError, ("key=value",)),
    "model option of the wrong type": (("-o", "depth=deep"), ConfigError, ("'depth'", "int")),
    "csv without a target": (("--dataset", "{p}/good.csv"), ConfigError, ("which column is the target", "a, b, y")),
    "csv without that target": (
        ("--dataset", "{p}/good.csv", "--target", "z"),
        ConfigError,
        ("Unknown target column 'z'", "Known: a, b, y"),
    ),
    "infinite data": (("--dataset", "{p}/inf.csv", "--target", "y"), DataError, ("row 7", "'a'", "inf")),
    "one sample": (("--dataset", "{p}/one.csv", "--target", "y"), DataError, ("one.csv", "cannot be split")),
    "more clients than samples": (
        ("--dataset", "{p}/good.csv", "--target", "y", "--clients", 500),
        ConfigError,
        ("500 clients but only 48 samples", "replacement"),
    ),
    "no clients": (("--clients", 0), ConfigError, ("clients must be positive",)),
    "more groups than outputs": (("--head-groups", 11), ConfigError, ("head_groups = 11", "10 outputs", "1 and 10")),
    "no groups": (("--head-groups", 0), ConfigError, ("head_groups = 0",)),
    "too little cover": (
        ("--model", "{p}/nets.py:squashed"),
        TraceError,
        ("Sigmoid", "1.weight", "--min-coverage", "--scheme fedavg"),
    ),
    "head noise on no linear layer": (
        ("--model", "{p}/nets.py:ends_in_sigmoid", "--min-coverage", 0),
        TraceError,
        ("Head noise cannot be used", "linear layer"),
    ),
    "a model of another class count": (("--model", "{p}/nets.py:wide"), ConfigError, ("(2, 12)", "10 numbers")),
    "a model of another input shape": (("--model", "{p}/nets.py:narrow"), ConfigError, ("(1, 8, 8)",)),
    "a model that breaks": (("--model", "{p}/nets.py:broken"), ConfigError, ("first line second line",)),
    "a model for text": (("--model", "gru"), ConfigError, ("token",)),
    "pictures that are too small": (
        ("--dataset", "{p}/good.csv", "--target", "y", "--model", "cnn"),
        ConfigError,
        ("'cnn' takes images",),
    ),
    "local steps under a veil": (("--local-steps", 2), ConfigError, ("exactly one gradient per round",)),
    "local epochs under a veil": (("--local-epochs", 1), ConfigError, ("exactly one gradient per round",)),
    "cross-entropy with head noise": (
        ("--loss", "cross-entropy"),
        ConfigError,
        ("quadratic", "--loss square", "--no-head-noise"),
    ),
    "cross-entropy on numbers": (
        ("--dataset", "{p}/good.csv", "--target", "b", "--task", "regression", "--loss", "cross-entropy"),
        ConfigError,
        ("Cross-entropy needs classes",),
    ),
    "an option of another scheme": (("--scheme", "fedavg", "--spread", 2), ConfigError, ("has no option 'spread'",)),
    "groups for pbpfl": (("--scheme", "pbpfl", "--head-groups", 2), ConfigError, ("no option 'head_groups'",)),
    "a loss that explodes": (("--lr", 1e30), NumericError, ("client 0", "round 2", "batch of 144 samples")),
    "a learning rate that is no number": (("--lr", "nan"), ConfigError, ("lr must be a finite number",)),
    "a seed beyond all bounds": (("--seed", 2**70), ConfigError, ("seed must lie between",)),
    "a negative seed": (("--seed", -1), ConfigError, ("seed must lie between",)),
    "a cohort that is no number": (("--cohort", "most"), ConfigError, ("a fraction like 0.1 or a count like 5",)),
    "a cohort beyond the clients": (("--cohort", 11), ConfigError, ("cohort = 11 of 10 clients",)),
    "a folder with other files": (("--out", "{p}/used"), CheckpointError, ("holds other files",)),
    "a file for a folder": (("--out", "{p}/file"), CheckpointError, ("is a file",)),
    "a folder that cannot be": (("--out", "{p}/file/below"), FedVeilError, ("below", "Not a directory")),
    "a typing error in a config file": (
        ("-c", "{p}/typo.toml"),
        ConfigError,
        ("'rouns'", "typo.toml", "Did you mean 'rounds'?"),
    ),
    "a wrong type in a config file": (("-c", "{p}/type.toml"), ConfigError, ("type.toml: rounds must be int",)),
    "an absent config file": (("-c", "{p}/no.toml"), ConfigError, ("Cannot read the configuration",)),
    "resuming nothing": (("--resume",), CheckpointError, ("holds no run to resume",)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_clear_line(place: Path, case: str) -> None:
    given, error, parts = BAD[case]
    arguments = [str(one).format(p=place) for one in given]
    out = [] if "--out" in arguments else ["--out", str(place / "run")]
    check(fedveil(*RUN, *arguments, *out), error, *parts)


def test_an_output_folder_that_holds_another_run_is_refused(place: Path) -> None:
    small = ("-o", "depth=2", "-o", "width=4", "--clients", 2, "-q")
    assert fedveil(*RUN, *small, "--out", place / "run").code == 0
    check(fedveil(*RUN, *small, "--out", place / "run"), CheckpointError, "holds another run", "--resume")


@pytest.mark.parametrize("command", ["predict", "export"])
def test_no_model_or_a_damaged_one_is_refused(place: Path, command: str) -> None:
    more = ("--out", place / "x.safetensors") if command == "export" else ()
    check(fedveil(command, place / "absent", *more), ConfigError, "There is no model at")
    check(fedveil(command, place / "good.csv", *more), ConfigError, "damaged or not a safetensors file")


def test_inspect_refuses_what_it_cannot_read() -> None:
    check(fedveil("inspect", "--model", "mpl"), ConfigError, "Did you mean 'mlp'?")
    check(fedveil("inspect", "--model", "mlp", "--input-shape", "a,b"), ConfigError, "written like 3,32,32")
    check(fedveil("inspect", "--model", "mlp", "--bn-eps", "secrt"), ConfigError, "Did you mean 'secret'?")
    check(fedveil("inspect", "--model", "no.such.module:net"), ConfigError, "no.such.module")


def test_an_unknown_flag_or_command_is_a_usage_error() -> None:
    for arguments in (("run", "--nosuch"), ("nosuch",)):
        done = fedveil(*arguments)
        assert done.code == 2
        assert "No such" in done.error


def test_every_error_has_its_own_exit_code() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, FedVeilError)]
    codes = [one.exit_code for one in kinds]
    assert len(set(codes)) == len(codes) == 8
    assert 0 not in codes


def test_from_a_real_shell_too(place: Path) -> None:
    command = [sys.executable, "-m", "fedveil", "run", "--scheme", "losless", "--out", str(place / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ConfigError.exit_code
    assert done.stdout == ""
    assert done.stderr.startswith("error: Unknown scheme 'losless'. Did you mean 'lossless'?")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    from fedveil.runs import session

    def stopped(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "run", stopped)
    done = fedveil(*RUN, "--out", place / "run")
    assert done.code == 130
    assert "--resume" in done.error
