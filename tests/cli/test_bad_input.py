"""Bad input: one line on standard error that says what, where and what to do; the documented exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedveil import errors
from fedveil.errors import CheckpointError, ConfigError, DataError, FedVeilError, NumericError, TraceError
from shell import Done, fedveil

RUN = ("run", "--quiet", "--rounds", 2, "--seed", 1)  # so that nothing is said of the data either
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

POLICIES = {
    "little": "max_epsilon = 0.01",
    "many": "min_cohort = 11",
    "short": "max_clip = 0.5",
    "odd": "max_epsilo = 1",
    "torn": "max_epsilon = = 1",
    "nan": "max_epsilon = nan",
    "worded": 'min_cohort = "three"',
    "sure": "delta = 1.5",
}


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
    for name, text in POLICIES.items():
        (tmp_path / f"{name}.toml").write_text(text)
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
    "a file without its function": (
        ("--scheme", "light_veil.py"),
        ConfigError,
        ("'light_veil.py' is a file: name the function in it too, as in light_veil.py:function",),
    ),
    "a setting among options": (
        ("--set", "batch-size=3"),
        ConfigError,
        ("batch_size is a", "(--batch-size 3)"),
    ),
    "unknown model": (("--model", "resnet-20"), ConfigError, ("'resnet-20'", "Did you mean 'resnet20'?")),
    "unknown dataset": (("--dataset", "digit"), ConfigError, ("'digit'", "Did you mean 'digits'?")),
    "absent file": (("--dataset", "none.csv"), DataError, ("none.csv: no such file",)),
    "unknown partition": (("--partition", "dirichle"), ConfigError, ("Did you mean 'dirichlet'?",)),
    "unknown loss": (("--loss", "squared"), ConfigError, ("Did you mean 'square'?",)),
    "a loss by another name": (("--loss", "mse"), ConfigError, ("Did you mean 'square'?",)),
    "unknown model option": (("-o", "dept=3"), ConfigError, ("Did you mean 'depth'?",)),
    "malformed model option": (("-o", "depth"), ConfigError, ("key=value",)),
    "model option of the wrong type": (("-o", "depth=deep"), ConfigError, ("'depth'", "int")),
    "csv without a target": (
        ("--dataset", "{p}/good.csv"),
        ConfigError,
        ("which column is the target", "--target", "a, b, y"),
    ),
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
    "no groups": (("--head-groups", 0), ConfigError, ("head_groups must be positive",)),
    "too little cover": (
        ("--model", "{p}/nets.py:squashed"),
        TraceError,
        ("Sigmoid", "1.weight", "--min-coverage", "trains under fedavg"),
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
    "an option of another scheme": (
        ("--scheme", "fedavg", "--spread", 2),
        ConfigError,
        ("has no option 'spread'", "Schemes that have 'spread': ", "lossless", "veil-dp"),
    ),
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
    "no privacy at all": (("--scheme", "nadp", "--epsilon", 0), ConfigError, ("epsilon must be a positive number",)),
    "a negative ε": (("--scheme", "mpdp", "--epsilon", -1), ConfigError, ("epsilon is -1", "number above 0")),
    "an ε that is no number": (("--scheme", "ldp", "--epsilon", "nan"), ConfigError, ("epsilon must be a finite",)),
    "a δ of one": (("--scheme", "cdp", "--delta", 1), ConfigError, ("delta must lie strictly between 0 and 1",)),
    "a δ of zero": (("--scheme", "veil-dp", "--delta", 0), ConfigError, ("delta must lie strictly", "1e-5 is usual")),
    "a clip of zero": (("--scheme", "ldp", "--clip", 0), ConfigError, ("clip", "must be a positive number")),
    "a negative clip": (("--scheme", "nadp", "--clip", -2), ConfigError, ("clip", "must be a positive number")),
    "a clip that is no number": (("--scheme", "nadp", "--clip", "nan"), ConfigError, ("clip must be a finite",)),
    "everybody colludes": (("--scheme", "nadp", "--collusion", 1), ConfigError, ("collusion must lie in [0, 1)",)),
    "all but nobody collude": (("--scheme", "nadp", "--collusion", 0.95), ConfigError, ("at least one honest",)),
    "negative pair noise": (("--scheme", "nadp", "--pair-strength", -1), ConfigError, ("must not be negative",)),
    "too much to repair": (("--scheme", "nadp", "--repair-limit", 1), ConfigError, ("repair_limit", "[0, 1)")),
    "nobody stays": (("--simulate-dropout", 1), ConfigError, ("simulate_dropout must lie in [0, 1)",)),
    "a graph that falls apart": (
        ("--scheme", "nadp", "--clients", 100, "--neighbours", 1, "--rounds", 16),
        ConfigError,
        ("100 clients", "fall apart", "Raise --neighbours"),
    ),
    "a graph that falls apart under mpdp": (
        ("--scheme", "mpdp", "--clients", 100, "--neighbours", 1, "--rounds", 16),
        ConfigError,
        ("fall apart", "Raise --neighbours"),
    ),
    "no neighbours": (("--scheme", "nadp", "--neighbours", 0), ConfigError, ("between 1 and 9 neighbours, not 0",)),
    "no neighbours under mpdp": (("--scheme", "mpdp", "--neighbours", 0), ConfigError, ("between 1 and 9",)),
    "odd neighbours under masks": (("--scheme", "veil-secagg", "--neighbours", 3), ConfigError, ("even number",)),
    "a threshold of less than half": (
        ("--scheme", "veil-secagg", "--threshold", 0.3),
        ConfigError,
        ("threshold must lie in [0.5, 1)",),
    ),
    "a threshold of everybody": (("--scheme", "veil-secagg", "--threshold", 1), ConfigError, ("[0.5, 1)",)),
    "two clients under masks": (("--scheme", "veil-secagg", "--clients", 2), ConfigError, ("at least three clients",)),
    "two in a round under masks": (
        ("--scheme", "veil-dp", "--cover", "masks", "--cohort", 2),
        ConfigError,
        ("at least three clients in a round, not 2",),
    ),
    "one client that shares noise": (("--scheme", "nadp", "--clients", 1), ConfigError, ("at least two clients",)),
    "numbers too large for masks": (
        ("--scheme", "veil-secagg", "--value-range", 1e30),
        ConfigError,
        ("value_range", "Lower value_range"),
    ),
    "batch norm under a claim": (
        ("--scheme", "nadp", "-o", "norm=batch"),
        ConfigError,
        ("batch normalisation", "GroupNorm", "norm=group"),
    ),
    "an unknown accounting": (("--scheme", "nadp", "--accounting", "exat"), ConfigError, ("Did you mean 'exact'?",)),
    "an unknown way to unmask": (("--scheme", "veil-secagg", "--unmask", "alway"), ConfigError, ("'always'?",)),
    "an unknown way with dropouts": (("--scheme", "nadp", "--dropouts", "repairs"), ConfigError, ("'repair'?",)),
    "an unknown cover": (("--scheme", "veil-dp", "--cover", "mask"), ConfigError, ("Did you mean 'masks'?",)),
    "an absent policy": (("--scheme", "nadp", "--policy", "{p}/no.toml"), ConfigError, ("Cannot read the policy",)),
    "a torn policy": (("--scheme", "nadp", "--policy", "{p}/torn.toml"), ConfigError, ("torn.toml is not valid TOML",)),
    "a typing error in a policy": (
        ("--scheme", "nadp", "--policy", "{p}/odd.toml"),
        ConfigError,
        ("odd.toml", "Did you mean 'max_epsilon'?"),
    ),
    "a policy of no number": (("--scheme", "nadp", "--policy", "{p}/nan.toml"), ConfigError, ("max_epsilon must be",)),
    "a policy in words": (("--scheme", "nadp", "--policy", "{p}/worded.toml"), ConfigError, ("must be a number",)),
    "a policy with a δ of more than one": (("--policy", "{p}/sure.toml"), ConfigError, ("delta must lie strictly",)),
    "a policy that the first round breaks": (
        ("--scheme", "nadp", "--dropouts", "tolerate", "--policy", "{p}/little.toml"),
        ConfigError,
        ("not even one round", "client 0", "its limit is 0.01"),
    ),
    "a policy where others could give its noise away": (
        ("--scheme", "nadp", "--policy", "{p}/little.toml"),
        ConfigError,
        ("--dropouts tolerate", "--honest-arrivals"),
    ),
    "a policy for larger rounds": (
        ("--scheme", "nadp", "--policy", "{p}/many.toml"),
        ConfigError,
        ("no round of 10 clients", "its policy asks for 11"),
    ),
    "a policy for shorter gradients": (
        ("--scheme", "nadp", "--policy", "{p}/short.toml"),
        ConfigError,
        ("clip = 1 exceeds", "max_clip = 0.5", "Lower clip"),
    ),
    "a policy that a scheme without noise cannot keep": (
        ("--scheme", "fedavg", "--policy", "{p}/little.toml"),
        ConfigError,
        ("no noise of its own", "Use ldp, nadp, veil-dp, dp-fedavg or serial"),
    ),
    "an absent roster": (("--scheme", "nadp", "--roster", "{p}/no.toml"), ConfigError, ("Cannot read the roster",)),
    "a roster that is none": (("--scheme", "nadp", "--roster", "{p}/odd.toml"), ConfigError, ("no [clients] table",)),
    "keys without a roster": (("--scheme", "nadp", "--identities", "{p}"), ConfigError, ("give --roster too",)),
    "resuming nothing": (("--resume",), CheckpointError, ("holds no run to resume",)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_clear_line(place: Path, case: str) -> None:
    given, error, parts = BAD[case]
    arguments = [str(one).format(p=place) for one in given]
    out = [] if "--out" in arguments else ["--out", str(place / "run")]
    check(fedveil(*RUN, *arguments, *out), error, *parts)
    if error is ConfigError:
        assert not (place / "run").exists()  # so that the same command can be tried again


@pytest.mark.parametrize("given", [("--veil", "strong"), ("--veil=strong",)])
def test_an_option_of_ones_own_scheme_that_is_written_as_a_flag_is_told_how_to_write_it(given: tuple[str, ...]) -> None:
    done = fedveil("run", "--scheme", "my.py:f", *given, "--out", "nowhere")
    assert done.code == ConfigError.exit_code
    assert "--set veil=strong" in " ".join(done.error.replace("│", " ").split())
    done = fedveil("run", "--scheme", "fedavg", *given, "--out", "nowhere")
    assert done.code == ConfigError.exit_code
    assert "--set" not in done.error


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


LEDGER: dict[str, tuple[tuple[object, ...], type[FedVeilError], tuple[str, ...]]] = {
    "nothing asked": ((), ConfigError, ("Give a run folder", "--scheme nadp")),
    "both asked": (("{p}", "--scheme", "nadp"), ConfigError, ("not both",)),
    "no run there": (("{p}/absent",), CheckpointError, ("There is no run at",)),
    "not a ledger": (("{p}/good.csv",), CheckpointError, ("good.csv is damaged: it is no JSON",)),
    "unknown scheme": (("--scheme", "napd"), ConfigError, ("Did you mean 'nadp'?",)),
    "an option of another scheme": (("--scheme", "fedavg", "--epsilon", 1), ConfigError, ("no option 'epsilon'",)),
    "no clients": (("--scheme", "nadp", "--clients", 0), ConfigError, ("at least one client",)),
    "no rounds": (("--scheme", "nadp", "--rounds", 0), ConfigError, ("rounds must be positive",)),
    "no privacy": (("--scheme", "nadp", "--epsilon", 0), ConfigError, ("epsilon must be a positive number",)),
    "sizes in words": (("--scheme", "nadp", "--sizes", "few,many"), ConfigError, ("written like 480,600",)),
    "too few sizes": (("--scheme", "nadp", "--sizes", "3,4"), ConfigError, ("2 sample counts for 100 clients",)),
    "a size of nothing": (("--scheme", "ldp", "--clients", 2, "--sizes", "0,4"), ConfigError, ("at least one sample",)),
    "a ratio below one": (("--scheme", "nadp", "--size-ratio", 0.5), ConfigError, ("at least 1 (got 0.5)",)),
    "a cohort in words": (("--scheme", "nadp", "--cohort", "most"), ConfigError, ("a fraction like 0.1",)),
    "a negative batch": (("--scheme", "nadp", "--batch-size", -1), ConfigError, ("batch_size must not be negative",)),
    "all pairs of very many": (
        ("--scheme", "nadp", "--clients", 5000, "--neighbours", 4999),
        ConfigError,
        ("pairs", "fewer --neighbours"),
    ),
    "two clients under masks": (("--scheme", "veil-secagg", "--clients", 2), ConfigError, ("at least three clients",)),
    "sampling that the server sees": (
        ("--scheme", "nadp", "--secret-sampling", 0.1),
        ConfigError,
        ("amplifies nothing under nadp", "drawn by the server"),
    ),
    "unknown model": (("--scheme", "mpdp", "--model", "mpl"), ConfigError, ("Did you mean 'mlp'?",)),
}


@pytest.mark.parametrize("case", LEDGER)
def test_a_question_that_cannot_be_answered_is_refused_in_one_clear_line(place: Path, case: str) -> None:
    given, error, parts = LEDGER[case]
    check(fedveil("ledger", *(str(one).format(p=place) for one in given)), error, *parts)


def test_a_run_that_has_not_ended_says_what_it_has_spent_so_far(place: Path) -> None:
    (place / "run").mkdir()
    (place / "run" / "config.toml").write_text("rounds = 3\nseed = 1\n")
    done = fedveil("ledger", place / "run")
    assert done.code == 0, done.error
    assert "the run has not ended" in done.output
    (place / "python").mkdir()
    (place / "python" / "config.toml").write_text('rounds = 3\nseed = 1\ndataset = "python"\n')
    check(fedveil("ledger", place / "python"), CheckpointError, "started from Python", "resume=True")


def test_keys_are_never_written_over(place: Path) -> None:
    check(fedveil("keys", place / "used", "--clients", 3), ConfigError, "not empty", "never overwritten")
    check(fedveil("keys", place / "new", "--clients", 0), ConfigError, "at least one client")
    check(fedveil("keys", place / "file", "--clients", 2), FedVeilError, "file")


def test_an_unknown_flag_or_command_is_a_usage_error() -> None:
    for arguments in (("run", "--nosuch"), ("nosuch",)):
        done = fedveil(*arguments)
        assert done.code == 2
        assert "No such" in done.error


def test_every_error_has_its_own_exit_code() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, FedVeilError)]
    codes = [one.exit_code for one in kinds if one is not errors.NotApplicableError]  # a kind of ConfigError
    assert len(set(codes)) == len(codes) == 10
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
