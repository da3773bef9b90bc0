"""Settings survive their way through Flower, and what does not fit is named."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Any

import pytest

from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.flower.app_folder import Extras, flattened, override, settings_of


def test_nothing_given_is_the_default_of_everything() -> None:
    assert settings_of({}) == (RunConfig(), Extras())


def test_hyphens_tables_and_extras_are_understood() -> None:
    given = {
        "scheme": "veil-dp",
        "batch-size": 8,
        "lr": 1,
        "cohort": 1,
        "head-noise": False,
        "model-options.depth": 3,
        "model-options.hidden_width": 16,
        "out": "runs/x",
        "resume": True,
        "deadline": 30,
        "data": "fedveil_data",
        "settings": "",
    }
    config, extras = settings_of(given)
    assert config == RunConfig(
        scheme="veil-dp",
        batch_size=8,
        lr=1.0,
        cohort=1,
        head_noise=False,
        model_options={"depth": 3, "hidden_width": 16},
    )
    assert type(config.cohort) is int
    assert extras == Extras(out="runs/x", resume=True, deadline=30.0, data="fedveil_data")


def test_what_a_command_line_adds_wins_over_the_app_and_over_what_the_app_adds_itself() -> None:
    app: dict[str, Any] = {
        "lr": 0.1,
        "rounds": 5,
        "deadline": 600.0,
        "model-options": {"depth": 2, "width": 8},
        "settings": '{"lr": 0.2, "momentum": 0.5, "model-options": {"depth": 3}}',
    }
    stored = flattened(app)
    changes = {"lr": 0.3, "deadline": 9.0, "out": 'an "odd" ünïcode\\path', "model_options": {"depth": 4}}
    merged = {**stored, **tomllib.loads(override(stored, changes))}
    assert set(merged) == set(stored), "Flower refuses keys that the app does not have"
    config, extras = settings_of(merged)
    assert config == RunConfig(lr=0.3, rounds=5, momentum=0.5, model_options={"depth": 4, "width": 8})
    assert extras == Extras(out='an "odd" ünïcode\\path', deadline=9.0)


def test_null_takes_a_setting_of_the_app_back() -> None:
    assert settings_of({"epsilon": 2.0, "settings": '{"epsilon": null}'})[0].epsilon is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param({"shceme": "ldp"}, "Did you mean 'scheme'", id="unknown"),
        pytest.param({"model.depth": 2}, "'model.depth'", id="table"),
        pytest.param({"rounds": "many"}, "rounds must be int", id="kind"),
        pytest.param({"rounds": 0}, "rounds must be positive", id="range"),
        pytest.param({"batch-size": 1, "batch_size": 2}, "given twice", id="twice"),
        pytest.param({"settings": "{lr: 1}"}, "not valid JSON", id="json"),
        pytest.param({"settings": "[1]"}, "must be a JSON object", id="list"),
        pytest.param({"settings": 3}, "must be a JSON object", id="number"),
        pytest.param({"settings": '{"batch-size": 1, "batch_size": 2}'}, "batch_size twice", id="json-twice"),
        pytest.param({"settings": '{"model_options": 3}'}, "must be a table", id="json-options"),
        pytest.param({"settings": '{"shceme": "ldp"}'}, "Did you mean 'scheme'", id="json-unknown"),
        pytest.param({"resume": True}, "resume needs the folder", id="resume"),
        pytest.param({"resume": "yes", "out": "x"}, "resume must be bool", id="resume-kind"),
        pytest.param({"out": 3}, "out must be str", id="out"),
        pytest.param({"deadline": 0}, "positive number of seconds", id="deadline"),
        pytest.param({"deadline": True}, "deadline must be float", id="deadline-kind"),
        pytest.param({"deadline": float("nan")}, "positive number of seconds", id="deadline-nan"),
        pytest.param({"data": "../evil"}, "names a Python module", id="data"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(given)


def test_reading_settings_needs_neither_flower_nor_torch() -> None:
    code = "import sys, fedveil.flower.app_folder; print({'flwr', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")
