"""App folders that Flower takes without a warning and that say what was asked for."""

from __future__ import annotations

import importlib.util
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.flower.app_folder import Extras, create_app, prepared

CONFIG = RunConfig(
    scheme="veil-dp",
    clients=3,
    epsilon=2.0,
    delta=1e-6,
    cohort=1.0,
    seed=7,
    head_noise=False,
    model_options={"depth": 2, "odd key": 'a "b"'},
)


@pytest.mark.parametrize("config", [RunConfig(), CONFIG], ids=["default", "full"])
def test_an_app_describes_the_run_it_was_made_for(tmp_path: Path, config: RunConfig) -> None:
    project = create_app(tmp_path / "app", config, deadline=30.0)
    usual = 0.02 if config.scheme == "lossless" else 0.1
    assert prepared(tmp_path / "app", {}).config == config.with_changes(lr=usual)
    assert prepared(tmp_path / "app", {}).extras == Extras(deadline=30.0)
    written = tomllib.loads(project.read_text())["tool"]["flwr"]["app"]["config"]
    for name in ("scheme", "model", "clients", "rounds", "lr", "batch-size"):
        assert name in written, "what most people change is there to be changed"


@pytest.mark.parametrize(
    "own_data", [pytest.param(False, id="named", marks=pytest.mark.slow), pytest.param(True, id="own")]
)
def test_flower_builds_it_without_a_warning(tmp_path: Path, own_data: bool) -> None:
    pytest.importorskip("flwr")
    from fedveil.flower.commands import environment, program

    create_app(tmp_path / "app", CONFIG, own_data=own_data)
    done = subprocess.run(
        [program("flwr"), "build", "--app", "app"],
        cwd=tmp_path,
        env=environment(tmp_path / "flwr"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Successfully built" in done.stdout
    assert "missing" not in done.stdout + done.stderr


def test_the_template_for_own_data_works_as_it_stands(tmp_path: Path) -> None:
    create_app(tmp_path / "app", CONFIG, own_data=True)
    assert prepared(tmp_path / "app", {}).extras.data == "fedveil_data"
    spec = importlib.util.spec_from_file_location("fedveil_data", tmp_path / "app" / "fedveil_data.py")
    assert spec is not None
    assert spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    held, labels = data.test()
    parts = [data.client(number) for number in range(3)]
    assert all(tuple(x.shape[1:]) == data.FACTS["input_shape"] and len(x) == len(y) for x, y in parts)
    assert int(labels.max()) + 1 == data.FACTS["outputs"]
    assert sum(len(x) for x, _ in parts) + len(held) == 1797, "every sample is somewhere, once"


def test_a_folder_that_holds_anything_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="holds something already"):
        create_app(tmp_path / "app", CONFIG)
    assert [path.name for path in (tmp_path / "app").iterdir()] == ["mine"]


@pytest.mark.parametrize("name", ["my_app", "1app", "a" * 33, "ä"], ids=["underscore", "digit", "long", "umlaut"])
def test_a_name_that_flower_would_refuse_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits and hyphens"):
        create_app(tmp_path / name, CONFIG)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("setting", [{"policy": "p.toml"}, {"simulate_dropout": 0.1}], ids=str)
def test_settings_of_one_machine_are_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} belongs to a run on one machine"):
        create_app(tmp_path / "app", CONFIG.with_changes(**setting))


def test_changes_are_checked_before_anybody_sees_them(tmp_path: Path) -> None:
    create_app(tmp_path / "app", CONFIG)
    ready = prepared(tmp_path / "app", {"lr": 0.5, "out": "/x", "model_options": {"depth": 9}})
    assert (ready.config.lr, ready.config.model_options["depth"], ready.extras.out) == (0.5, 9, "/x")
    assert list(tomllib.loads(ready.override)) == ["settings"]
    assert prepared(tmp_path / "app", {}).override == ""
    with pytest.raises(ConfigError, match="rounds must be positive"):
        prepared(tmp_path / "app", {"rounds": 0})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(None, "no app folder", id="missing"),
        pytest.param("[project]\nname = 1\n", "no valid", id="foreign"),
        pytest.param("[tool.flwr.app]\nconfig = 3\n", "no valid", id="number"),
        pytest.param("= nonsense", "no valid", id="broken"),
        pytest.param("[tool.flwr.app.config]\nlr = 1.0\n", 'no key settings = ""', id="older"),
        pytest.param(
            '[tool.flwr.app.components]\nserverapp = "fedveil.engines.flower:server_app"\n[tool.flwr.app.config]\n',
            "earlier version.*fedveil flower init",
            id="moved",
        ),
    ],
)
def test_a_folder_that_is_no_app_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        prepared(tmp_path, {"lr": 0.5})
