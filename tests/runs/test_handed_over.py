"""Files that somebody hands over are plain data: no name in them is ever imported or called."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import CheckpointError, ConfigError
from fedveil.own_code import OwnCode
from fedveil.runs.model_file import load_model
from shell import fedveil

SMALL = ("--rounds", 2, "--clients", 3, "--seed", 1, "-o", "depth=2", "-o", "width=8")
EVIL = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
def make(**given):
    Path(__file__).with_name("called").touch()
    from fedveil.models.networks import mlp
    given.pop("vocabulary")
    return mlp(**given)
def veil(setting, *, keep: float = 2.0):
    Path(__file__).with_name("called").touch()
    from fedveil.downlink import Rescaling
    from fedveil.protocol.parts import Scheme
    from fedveil.uplink.plain import Bare
    from fedveil.work import Gradients
    work = Gradients(setting.loss, setting.batches)
    return Scheme(name="veil", downlink=Rescaling(keep), work=work, uplink=Bare())
def load(seed: int):
    Path(__file__).with_name("called").touch()
    from fedveil.data import load
    return load("digits", seed=seed)
"""
# A setting that may name code, what a run has without, and code that does as well.
OWN = {"model": ("mlp", "make"), "scheme": ("lossless", "veil"), "dataset": ("digits", "load")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that commands read: a recorded run, and a comparison."""
    place = tmp_path_factory.mktemp("handed")
    for arguments in (
        ("run", *SMALL, "--record", "--out", place / "run"),
        (
            "compare",
            "--schemes",
            "fedavg",
            "--jobs",
            1,
            "-q",
            *SMALL[:4],
            *SMALL[6:],
            "--no-vectorise",
            "--out",
            place / "compared",
        ),
    ):
        done = fedveil(*arguments)
        assert done.code == 0, done.error
    return place


@pytest.fixture
def received(made: Path, tmp_path: Path) -> Path:
    """Copies that an attacker may change, and the code that it would like to see run."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "evil.py").write_text(EVIL)
    return tmp_path


def forge_model(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a model file says of itself, checksum and all."""
    from safetensors import safe_open
    from safetensors.torch import save

    from fedveil.runs import model_file

    with safe_open(str(file), "pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    facts = json.loads(metadata["facts"])
    change(facts)
    metadata["facts"] = json.dumps(facts)
    metadata["digest"] = model_file._digest(tensors, metadata)
    file.write_bytes(save(tensors, metadata))


def forge_text(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def names_code(place: Path, setting: str = "model") -> str:
    return f"{place / 'evil.py'}:{OWN[setting][1]}"


def in_model(place: Path, setting: str = "model") -> None:
    forge_model(place / "run" / "model.safetensors", lambda facts: facts.update(name=names_code(place)))


def in_config(place: Path, setting: str = "model") -> None:
    usual = f'{setting} = "{OWN[setting][0]}"'
    forge_text(place / "run" / "config.toml", usual, f"{setting} = {json.dumps(names_code(place, setting))}")


def in_config_of_a_stopped_run(place: Path, setting: str = "model") -> None:
    in_config(place, setting)
    for name in ("ledger.json", "summary.json"):
        (place / "run" / name).unlink()


def in_record(place: Path, setting: str = "model") -> None:
    forge_text(place / "run" / "record" / "facts.json", '"model": "mlp"', f'"model": {json.dumps(names_code(place))}')


def in_comparison(place: Path, setting: str = "model") -> None:
    usual, code = OWN[setting][0], json.dumps(names_code(place, setting))
    for file in (place / "compared").rglob("*"):
        if file.name == "compare.json" and setting == "scheme":
            forge_text(file, '"fedavg"', code)
        elif file.name == "compare.json":
            forge_text(file, f'"{setting}": "{usual}"', f'"{setting}": {code}')
        elif file.name == "config.toml" and setting == "scheme":
            forge_text(file, 'scheme = "fedavg"', f"scheme = {code}")
        elif file.name == "config.toml":
            forge_text(file, f'{setting} = "{usual}"', f"{setting} = {code}")
        elif file.name == "summary.json":
            file.unlink()


def in_settings(place: Path, setting: str = "model") -> None:
    code = json.dumps(names_code(place, setting))
    (place / "settings.toml").write_text(f"{setting} = {code}\nrounds = 1\nclients = 2\n")


AUDIT = ("audit", "run", "--quick", "--workers", 1, "--attacks", "closed-form,received")
Forged = Callable[[Path, str], None]
ATTACKS: dict[str, tuple[Forged, tuple[str | int, ...]]] = {
    "predict, a model file": (in_model, ("predict", "run/model.safetensors")),
    "predict, a run folder": (in_model, ("predict", "run")),
    "export": (in_model, ("export", "run", "--out", "usable.safetensors")),
    "audit, by its settings": (in_config, AUDIT),
    "audit, by its model": (in_model, AUDIT),
    "audit, by its record": (in_record, AUDIT),
    "resume": (in_config_of_a_stopped_run, ("run", "--resume", "--out", "run", "--rounds", 3)),
    "ledger": (in_config_of_a_stopped_run, ("ledger", "run")),
    "compare": (in_comparison, ("compare", "--resume", "--out", "compared", "--jobs", 1)),
    "run, a settings file": (in_settings, ("run", "-c", "settings.toml", "--out", "new")),
}


# What stands in settings may be any of them; a model file and a record name models alone.
IN_SETTINGS = [name for name, (forge, _) in ATTACKS.items() if forge not in (in_model, in_record)]
CASES = [
    *((name, "model") for name in ATTACKS),
    *((name, setting) for name in IN_SETTINGS for setting in ("scheme", "dataset")),
]


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_no_name_in_a_file_is_imported(
    name: str, setting: str, received: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge, command = ATTACKS[name]
    forge(received, setting)
    monkeypatch.chdir(received)
    done = fedveil(*command)
    assert not (received / "imported").exists()
    assert not (received / "called").exists()
    assert done.code == ConfigError.exit_code, done
    for part in (names_code(received, setting), f"--{setting}", "nothing was run"):
        assert part in done.error
    assert "Traceback" not in done.error


def _huge(facts: dict[str, Any]) -> None:
    """Pictures that are brought to a size at which a single one takes gigabytes."""
    facts |= {"name": "cnn", "input_shape": [3, 8192, 8192]}
    facts["preparation"]["inputs"] = {"shape": [3, 8192, 8192], "resize": True}


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts["link"].update(target_scale=0.0),
        lambda facts: facts["link"].update(target_scale=-1.0),
        lambda facts: facts["link"].update(true_weight=float("nan")),
        lambda facts: (facts.update(labels=["a", "b"]), facts["preparation"].update(classes=["a", "b"])),
        _huge,
    ],
    ids=["no scale", "negative scale", "no weight", "too few labels", "huge pictures"],
)
def test_a_model_file_that_says_what_cannot_be_is_damaged(
    received: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    forge_model(received / "run" / "model.safetensors", change)
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(received / "run" / "model.safetensors")


SEEN_BELOW = ("resume", "compare")


def _once(name: str, setting: str) -> Any:
    """An audit is long: that it runs named code is slow, and that it runs no other is seen above."""
    return pytest.param(name, setting, marks=pytest.mark.slow if name.startswith("audit") else ())


@pytest.mark.parametrize(("name", "setting"), [_once(*case) for case in CASES if case[0] not in SEEN_BELOW])
def test_what_is_named_on_the_command_itself_is_run(
    name: str, setting: str, received: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge, command = ATTACKS[name]
    forge(received, setting)
    monkeypatch.chdir(received)
    done = fedveil(*command, f"--{setting}", f"evil.py:{OWN[setting][1]}")
    assert done.code == 0, done
    assert (received / "called").exists()
    assert "nothing was run" not in done.error


def test_a_run_of_ones_own_scheme_and_data_goes_on_where_they_are_named_again(
    received: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(received)
    named = ("--scheme", "evil.py:veil", "--dataset", "evil.py:load")
    done = fedveil("run", *SMALL, *named, "--set", "keep=1.5", "--out", "own")
    assert done.code == 0, done
    assert "keep = 1.5" in (received / "own" / "config.toml").read_text()
    (received / "called").unlink()
    go_on = ("run", "--resume", "--rounds", 3, "--out", "own")
    for some in ((), named[:2], named[2:]):
        assert fedveil(*go_on, *some).code == ConfigError.exit_code
    assert not (received / "called").exists()
    (received / "evil.py").rename(received / "moved.py")
    moved = [word.replace("evil", "moved") for word in named]
    done = fedveil(*go_on, *moved, "--set", "keep=3.0")
    assert done.code == CheckpointError.exit_code, done
    done = fedveil(*go_on, *moved)
    assert done.code == 0, done
    assert len((received / "own" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_of_ones_own_model_goes_on_where_it_is_named_again(
    received: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(received)
    begin = ("run", *SMALL, "--model", "evil.py:make", "--out", "own")
    assert fedveil(*begin).code == 0
    go_on = ("run", "--resume", "--rounds", 3, "--out", "own")
    (received / "called").unlink()
    done = fedveil(*go_on)
    assert done.code == ConfigError.exit_code, done
    assert not (received / "called").exists()
    (received / "evil.py").rename(received / "moved.py")
    done = fedveil(*go_on, "--model", "moved.py:make")
    assert done.code == 0, done
    assert f"'{received / 'moved.py'}:make' is used instead" in done.error
    assert (received / "called").exists()
    assert len((received / "own" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_comparison_of_ones_own_model_goes_on_where_it_is_named_again(
    received: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(received)
    begin = ("compare", "--schemes", "fedavg", "--jobs", 1, *SMALL[:4], *SMALL[6:], "--out", "own", "-q")
    done = fedveil(*begin, "--model", "evil.py:make")
    assert done.code == 0, done
    (received / "own" / "fedavg" / "seed-1" / "summary.json").unlink()
    (received / "called").unlink()
    go_on = ("compare", "--resume", "--out", "own", "-q")
    assert fedveil(*go_on).code == ConfigError.exit_code
    assert not (received / "called").exists()
    done = fedveil(*go_on, "--model", "evil.py:make")
    assert done.code == 0, done
    assert (received / "called").exists()


def test_the_code_that_was_named_is_used_and_a_difference_is_told(received: Path) -> None:
    in_model(received)
    ours = received / "mine.py"
    ours.write_text(EVIL.replace('"called"', '"mine"'))
    done = fedveil("predict", received / "run", "--model", f"{ours}:make")
    assert done.code == 0, done
    assert (received / "mine").exists()
    assert not (received / "called").exists()
    assert names_code(received) in done.error
    assert f"'{ours}:make' is used instead" in done.error


def test_a_catalogue_name_replaces_code_where_it_fits(received: Path) -> None:
    in_model(received)
    done = fedveil("predict", received / "run", "--model", "mlp")
    assert done.code == 0, done
    assert not (received / "imported").exists()


def test_python_names_code_by_its_own_type_only(received: Path) -> None:
    from fedveil import models
    from fedveil.config import RunConfig
    from fedveil.runs import session

    name = names_code(received)
    session.run(RunConfig(model=OwnCode(name), rounds=2, clients=2, seed=1), received / "own", quiet=True)
    for made in ("imported", "called"):
        (received / made).unlink()
    for act in (
        lambda: models.build(name, input_shape=(1, 8, 8), outputs=10),
        lambda: session.resume(received / "own", changes={"rounds": 3}, quiet=True),
        lambda: session.resume(received / "own", changes={"rounds": 3, "model": name}, quiet=True),
        lambda: session.run(RunConfig(model=name), received / "new", quiet=True),
    ):
        with pytest.raises(ConfigError, match="nothing was run"):
            act()
    assert not (received / "imported").exists()
    session.resume(received / "own", changes={"rounds": 3, "model": OwnCode(name)}, quiet=True)
    assert (received / "called").exists()


def test_the_mark_of_the_owners_own_code_cannot_be_stored(received: Path) -> None:
    from fedveil.config import RunConfig

    config = RunConfig(model=OwnCode("a:b"))
    assert isinstance(config.with_changes(rounds=3).model, OwnCode)
    (received / "config.toml").write_text(config.to_toml())
    assert type(RunConfig.read(received / "config.toml")["model"]) is str
    assert type(json.loads(json.dumps(config.model))) is str
