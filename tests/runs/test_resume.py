"""Resuming: from good checkpoints only, to the same bits, with a clear word about everything else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedveil.config import RunConfig, as_before
from fedveil.engine import LocalEngine
from fedveil.errors import CheckpointError, ConfigError
from fedveil.protocol.phases import Ask
from fedveil.roles.client import ClientRole
from fedveil.roles.server import Optimiser
from fedveil.runs import loop as roles
from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from fedveil.runs.model_file import load_model
from interrupting import interrupted_run
from shell import fedveil

Interrupted = Callable[..., Path]
Small = Callable[..., RunConfig]


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("round-*.safetensors"))


def check_equal(folder: Path, reference: Path, *, rounds: int = 10) -> None:
    ours, theirs = (load_file(one / "model.safetensors") for one in (folder, reference))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8)) for n in ours)
    assert [row["round"] for row in RunFolder(folder).metrics()] == list(range(1, rounds + 1))


def resume(folder: Path, **changes: object) -> list[str]:
    said: list[str] = []
    session.resume(folder, changes=dict(changes), quiet=True, say=said.append)
    return said


@pytest.mark.parametrize("after", [*(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2, 6, 9)), 3, 4, 7, 10])
def test_a_run_stopped_after_any_round_resumes_to_the_same_bits(
    tmp_path: Path, interrupted: Interrupted, straight: Path, after: int
) -> None:
    folder = interrupted(tmp_path / "run", after=after)
    assert resume(folder) == (["No checkpoint yet: starting from the first round."] if after <= 3 else [])
    check_equal(folder, straight)


@pytest.mark.parametrize("place", ["between two rounds", "while clients answer", "while the model moves"])
def test_an_interrupted_run_goes_on_from_its_last_whole_round(
    tmp_path: Path, small: Small, straight: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Ctrl-C in the eighth round or right after it; checkpoints are due after rounds 3, 6 and 9."""

    def interrupted(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    def asked(engine: LocalEngine, ask: Ask) -> Any:
        return interrupted() if getattr(ask.common, "round", None) == 7 else gather(engine, ask)

    def stepped(one: Optimiser, *given: Any, round: int) -> Any:
        moved = step(one, *given, round=round)
        if round == 7:
            interrupted()  # its memory has moved, the model has not
        return moved

    gather, step = LocalEngine.gather, Optimiser.step
    with monkeypatch.context() as patched:
        if place == "between two rounds":
            interrupted_run(small(), tmp_path / "run", at=8)
        else:
            of_model = place == "while the model moves"
            patched.setattr(Optimiser, "step", stepped) if of_model else patched.setattr(LocalEngine, "gather", asked)
            with pytest.raises(KeyboardInterrupt):
                session.run(small(), tmp_path / "run", quiet=True)
    last = {"between two rounds": 8, "while clients answer": 7, "while the model moves": 6}[place]
    assert checkpoints(tmp_path / "run")[-1].name == f"round-{last:08d}.safetensors"
    assert resume(tmp_path / "run") == []
    check_equal(tmp_path / "run", straight)


@pytest.mark.parametrize("after", [1, 3])
def test_where_every_round_costs_epsilon_none_is_lost_to_a_killed_process(
    tmp_path: Path, interrupted: Interrupted, after: int
) -> None:
    settings = {"scheme": "ldp", "epsilon": 4.0, "rounds": 4, "checkpoint_every": None, "momentum": 0.0}
    network = {"model_options": {"depth": 2, "width": 12}}
    folder = interrupted(tmp_path / "run", after=after, **settings, **network)
    said = resume(folder)
    lost = 1  # its row was written, its checkpoint was not
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 4 - lost
    assert "1 round was begun before that no checkpoint holds" in said[-1]


def flip_middle(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return raw[:middle] + bytes(byte ^ 0xFF for byte in raw[middle : middle + 8]) + raw[middle + 8 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped bytes": flip_middle,
    "one flipped bit at the end": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
    "one flipped bit in the header": lambda raw: raw[:60] + bytes([raw[60] ^ 1]) + raw[61:],
    "cut in half": lambda raw: raw[: len(raw) // 2],
    "one byte short": lambda raw: raw[:-1],
    "empty": lambda raw: b"",
    "zeros": lambda raw: bytes(len(raw)),
    "not a checkpoint": lambda raw: b"hello, world",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_newest_checkpoint_is_refused_and_the_one_before_is_used(
    tmp_path: Path, interrupted: Interrupted, straight: Path, damage: Callable[[bytes], bytes]
) -> None:
    folder = interrupted(tmp_path / "run", after=8)
    earlier, newest = checkpoints(folder)
    assert (earlier.name, newest.name) == ("round-00000003.safetensors", "round-00000006.safetensors")
    newest.write_bytes(damage(newest.read_bytes()))
    (complaint,) = resume(folder)
    assert complaint.startswith("Checkpoint round-00000006.safetensors is damaged")
    assert complaint.endswith("Using the previous one.")
    check_equal(folder, straight)


def test_two_damaged_checkpoints_stop_the_resume(tmp_path: Path, interrupted: Interrupted) -> None:
    folder = interrupted(tmp_path / "run", after=8)
    for one in checkpoints(folder):
        one.write_bytes(flip_middle(one.read_bytes()))
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="No usable checkpoint is left") as caught:
        resume(folder)
    assert "round-00000003" in str(caught.value)
    assert "round-00000006" in str(caught.value)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, interrupted: Interrupted, straight: Path) -> None:
    """Same model, other seed: the file is whole, but it is not ours."""
    ours = interrupted(tmp_path / "ours", after=8)
    theirs = interrupted(tmp_path / "theirs", after=8, seed=6)
    newest, foreign = checkpoints(ours)[-1], checkpoints(theirs)[-1]
    newest.write_bytes(foreign.read_bytes())
    (complaint,) = resume(ours)
    assert "belongs to a run with other settings" in complaint
    check_equal(ours, straight)


@pytest.mark.parametrize("change", [{"seed": 6}, {"lr": 0.06}, {"scheme": "fedavg", "loss": "square"}, {"clients": 5}])
def test_resuming_with_other_settings_is_refused(
    tmp_path: Path, interrupted: Interrupted, change: dict[str, object]
) -> None:
    folder = interrupted(tmp_path / "run", after=8)
    config = (folder / "config.toml").read_bytes()
    with pytest.raises(CheckpointError, match="belongs to a run with other settings") as caught:
        resume(folder, **change)
    started = RunConfig.from_mapping(RunConfig.read(folder / "config.toml"))
    for name, value in change.items():
        if getattr(started, name) != value:
            assert f"{name} = {getattr(started, name)!r} and is now {value!r}" in str(caught.value)
    assert (folder / "config.toml").read_bytes() == config


def test_a_run_that_has_not_ended_is_no_model_and_says_how_to_go_on(tmp_path: Path, interrupted: Interrupted) -> None:
    folder = interrupted(tmp_path / "run", after=8)
    with pytest.raises(CheckpointError, match=f"has not ended.*--resume --out {folder}"):
        load_model(folder)


def test_repeated_rounds_are_a_new_attempt(
    tmp_path: Path, interrupted: Interrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = interrupted(tmp_path / "run", after=5)
    asked: list[tuple[int, int]] = []

    class Listening(ClientRole):
        def handle_many(self, states: Any, request: Any, clients: Any, private: Any = None) -> Any:
            asked.append((request.round, request.attempt))
            return super().handle_many(states, request, clients, private)

    monkeypatch.setattr(roles, "ClientRole", Listening)
    resume(folder, rounds=6)
    resume(folder, rounds=8)
    assert asked == [(3, 1), (4, 1), (5, 1), (6, 2), (7, 2)]


def test_more_rounds_extend_a_run(tmp_path: Path, small: Small, straight: Path) -> None:
    session.run(small(rounds=7), tmp_path / "run", quiet=True)
    summary = session.resume(tmp_path / "run", changes={"rounds": 10}, quiet=True)
    assert summary["rounds"] == 10
    check_equal(tmp_path / "run", straight)
    assert RunConfig.from_mapping(RunConfig.read(tmp_path / "run" / "config.toml")).rounds == 10


def test_a_cosine_schedule_is_bound_to_its_rounds(tmp_path: Path, small: Small) -> None:
    session.run(small(rounds=4, lr_schedule="cosine"), tmp_path / "run", quiet=True)
    with pytest.raises(CheckpointError, match="other settings"):
        resume(tmp_path / "run", rounds=8)


def test_how_often_to_write_and_to_judge_may_change(tmp_path: Path, interrupted: Interrupted, straight: Path) -> None:
    folder = interrupted(tmp_path / "run", after=8)
    assert resume(folder, checkpoint_every=1, evaluate_every=1) == []
    check_equal(folder, straight)


def test_a_finished_run_resumes_to_itself(tmp_path: Path, small: Small, straight: Path) -> None:
    first = session.run(small(), tmp_path / "run", quiet=True)
    again = session.resume(tmp_path / "run", quiet=True)
    assert again == json.loads(json.dumps(first))
    check_equal(tmp_path / "run", straight)


def test_the_summary_of_a_resumed_run_counts_all_rounds(
    tmp_path: Path, interrupted: Interrupted, straight: Path
) -> None:
    folder = interrupted(tmp_path / "run", after=8)
    summary = session.resume(folder, quiet=True)
    reference = json.loads((straight / "summary.json").read_text())
    rows = RunFolder(folder).metrics()
    assert summary["seconds"] == pytest.approx(sum(row["seconds"] for row in rows), abs=1e-3)
    same = ("rounds", "train_loss", "test_accuracy", "test_loss", "bytes_up", "bytes_down", "client_view_accuracy")
    assert {key: summary[key] for key in same} == {key: reference[key] for key in same}


def test_resuming_where_there_is_no_run_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="holds no run to resume"):
            resume(place)
    assert not (tmp_path / "nowhere").exists()


def test_a_damaged_config_is_refused(tmp_path: Path, interrupted: Interrupted) -> None:
    folder = interrupted(tmp_path / "run", after=4)
    (folder / "config.toml").write_text("rounds = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        resume(folder)


@pytest.mark.parametrize(
    "tail",
    [
        '{"round": 9, "lo',
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("{", '{"round": 9, "loss": 0.1, "seconds"')),
        "\x00\x00\x00",
    ],
)
def test_a_torn_last_line_of_metrics_is_left_out(
    tmp_path: Path, interrupted: Interrupted, straight: Path, tail: str
) -> None:
    folder = interrupted(tmp_path / "run", after=8)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(tail)
    assert [row["round"] for row in RunFolder(folder).metrics()] == list(range(1, 9))
    assert resume(folder) == []
    check_equal(folder, straight)


def test_two_checkpoints_are_kept(straight: Path) -> None:
    assert [one.name for one in checkpoints(straight)] == ["round-00000009.safetensors", "round-00000010.safetensors"]


def test_without_checkpoints_a_run_starts_again(tmp_path: Path, interrupted: Interrupted, straight: Path) -> None:
    folder = interrupted(tmp_path / "run", after=8, checkpoint_every=0)
    assert checkpoints(folder) == []
    assert resume(folder) == ["No checkpoint yet: starting from the first round."]
    check_equal(folder, straight)


def test_secrets_of_the_operating_system_are_drawn_anew_but_a_models_own_epsilon_stays(
    tmp_path: Path, interrupted: Interrupted
) -> None:
    folder = interrupted(tmp_path / "run", after=8, secrets="os")
    epsilon = load_file(checkpoints(folder)[-1])["epsilon"]
    resume(folder)
    assert torch.equal(load_file(folder / "model.safetensors")["norm1.epsilon"], epsilon)
    other = interrupted(tmp_path / "other", after=8, secrets="os")
    assert not torch.equal(load_file(checkpoints(other)[-1])["epsilon"], epsilon)


def test_a_failed_round_leaves_the_checkpoints(tmp_path: Path, small: Small) -> None:
    from fedveil.errors import NumericError

    with pytest.raises(NumericError, match="client 0 is not finite in round"):
        session.run(small(lr=1e20, checkpoint_every=1), tmp_path / "run", quiet=True)
    assert checkpoints(tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("family", {"head_noise": False, "family": "scale", "bn_eps": "secret"}),
        ("calibration", {"scheme": "mp-cdp", "calibration": "tail"}),
    ],
)
def test_a_folder_from_before_there_was_a_setting_goes_on_as_it_began(
    name: str, given: dict[str, object], tmp_path: Path, small: Small
) -> None:
    """Its fingerprint has no such name, and its run is what it was: scales and a secret ε; noise by a tail bound."""
    began = small(**given, rounds=4, checkpoint_every=2)
    session.run(began.with_changes(rounds=2), tmp_path / "run", quiet=True)
    file = tmp_path / "run" / "config.toml"
    lines = file.read_text().splitlines(True)
    file.write_text("".join(line for line in lines if not line.startswith(name)))
    assert len(file.read_text().splitlines()) == len(lines) - 1
    assert getattr(RunFolder(tmp_path / "run").config(), name) == given[name]
    resume(tmp_path / "run", rounds=4)
    if name == "family":  # noise is drawn anew
        session.run(began, tmp_path / "straight", quiet=True)
        check_equal(tmp_path / "run", tmp_path / "straight", rounds=4)


def test_a_run_of_mpdp_goes_on_with_the_noise_it_began_with(tmp_path: Path) -> None:
    """Where folders do not say how noise is made they are from before it could be said, and mean another way."""
    out = tmp_path / "run"
    asked = ["--scheme", "mpdp", "--epsilon", "3", "--lr", "0.01", "-o", "depth=2", "-o", "width=4", "--seed", "1"]
    assert fedveil("run", *asked, "--rounds", "1", "--checkpoint-every", "1", "--out", out).code == 0
    began = RunConfig.from_mapping(as_before(RunConfig.read(out / "config.toml")))
    assert began.calibration == "equations"
    assert began.fingerprint() != began.with_changes(calibration="tail").fingerprint()
    assert fedveil("run", "--resume", "--rounds", "2", "--out", out).code == 0
    assert RunConfig.read(out / "config.toml")["calibration"] == "equations"


def table(path: Path, *, yes: str = "yes", header: str = "a,b,c,y", rows: int = 120, first: str = "") -> None:
    drawn = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))
    lines = [",".join(f"{value:.3f}" for value in row) + ("," + (yes if row.sum() > 0 else "no")) for row in drawn]
    lines[0] = first or lines[0]
    path.write_text("\n".join([header, *lines]) + "\n")


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "classes": ({"yes": "maybe"}, r"classes were \['no', 'yes'\] and are \['maybe', 'no'\]"),
    "columns": ({"header": "b,a,c,y"}, r"columns were \['a', 'b', 'c', 'y'\] and are \['b', 'a', 'c', 'y'\]"),
    "rows": ({"rows": 121}, "rows of its parts were"),
}


@pytest.mark.parametrize("changed", CHANGED)
def test_a_run_does_not_go_on_with_other_data_than_it_began_with(tmp_path: Path, changed: str) -> None:
    data = tmp_path / "data.csv"
    table(data)
    given: tuple[Any, ...] = ("--target", "y", "--loss", "square", "-o", "depth=2", "-o", "width=4", "--clients", 3)
    out = tmp_path / "run"
    begun = fedveil("run", "--scheme", "fedavg", "--dataset", data, *given, "--rounds", 2, "--seed", 1, "--out", out)
    assert begun.code == 0
    kept = (out / "model.safetensors").read_bytes()
    how, complaint = CHANGED[changed]
    table(data, **how)
    with pytest.raises(CheckpointError, match=complaint):
        resume(out, rounds=3)
    assert (out / "model.safetensors").read_bytes() == kept
    table(data)
    assert resume(out, rounds=3) == []


def test_samples_with_other_values_are_told(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    table(data)
    given: tuple[Any, ...] = ("--target", "y", "--loss", "square", "-o", "depth=2", "-o", "width=4", "--clients", 3)
    out = tmp_path / "run"
    fedveil("run", "--scheme", "fedavg", "--dataset", data, *given, "--rounds", 2, "--seed", 1, "--out", out)
    table(data, first="9.9,9.9,9.9,yes" if "yes" in data.read_text().splitlines()[1] else "-9.9,-9.9,-9.9,no")
    (said,) = resume(out, rounds=3)
    assert "warning: the samples are not those that the run began with" in said


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_finished_run_writes_again_what_it_has_lost(
    tmp_path: Path, small: Small, straight: Path, damage: str
) -> None:
    session.run(small(), tmp_path / "run", quiet=True)
    model, ledger = tmp_path / "run" / "model.safetensors", tmp_path / "run" / "ledger.json"
    whole = ledger.read_text()
    for file in (model, ledger):
        file.unlink() if damage == "gone" else file.write_bytes(file.read_bytes()[:40])
    said = resume(tmp_path / "run")
    assert [text.split()[0] for text in said[:2]] == ["model.safetensors", "ledger.json"]
    check_equal(tmp_path / "run", straight)
    assert ledger.read_text() == whole


@pytest.mark.parametrize("text", ["", 'scheme = "fedavg"\nrounds = 3\n'])
def test_settings_that_no_run_has_left_are_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(CheckpointError, match="does not say the seed"):
        session.resume(tmp_path, quiet=True)


def test_more_rounds_are_offered_where_they_can_be_had(tmp_path: Path, small: Small) -> None:
    network = {"depth": 2, "width": 12}
    cases = {
        "more": ({}, "More rounds: --rounds."),
        "scheduled": ({"lr_schedule": "cosine"}, "learning rate is scheduled over all rounds"),
        "noised": ({"scheme": "nadp", "momentum": 0.0, "model_options": network}, "noise is made for"),
    }
    for name, (changes, told) in cases.items():
        session.run(small(rounds=2, **changes), tmp_path / name, quiet=True)
        assert told in resume(tmp_path / name)[-1]


def test_ctrl_c_while_a_round_is_judged_waits_until_it_is_written_down(tmp_path: Path, small: Small) -> None:
    config = small(rounds=6, evaluate_every=1)
    (tmp_path / "settings.toml").write_text(config.to_toml())
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from fedveil.config import RunConfig\n"
        "from fedveil.runs import loop, session\n"
        "judged = loop.evaluated\n"
        "def interrupted(job, state, **more):\n"
        "    if state.round == 5:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return judged(job, state, **more)\n"
        "loop.evaluated = interrupted\n"
        "place = Path(sys.argv[1])\n"
        "config = RunConfig.from_mapping(RunConfig.read(place / 'settings.toml'))\n"
        "session.run(config, place / 'run', quiet=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in done.stderr
    assert [row["round"] for row in RunFolder(tmp_path / "run").metrics()] == [1, 2, 3, 4, 5]
    assert "test_accuracy" in RunFolder(tmp_path / "run").metrics()[-1]
    assert checkpoints(tmp_path / "run")[-1].name == "round-00000005.safetensors"
    assert resume(tmp_path / "run") == []
