"""What a run is: validated, and the same after a trip through TOML."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.plain import parse_model_options

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
POSITIVE = st.floats(1e-12, 1e6)
CONFIGS = st.builds(
    RunConfig,
    scheme=TEXT,
    dataset=TEXT,
    model=TEXT,
    model_options=st.dictionaries(
        st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True),
        st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | TEXT,
        max_size=4,
    ),
    clients=st.integers(1, 10**6),
    rounds=st.integers(1, 10**6),
    seed=st.integers(0, 2**63 - 1),
    secrets=st.sampled_from([None, "os", "seeded"]),
    target=st.none() | TEXT,
    test_fraction=POSITIVE,
    cohort=st.none() | st.integers(1, 100) | st.floats(0.01, 1.0),
    lr=POSITIVE,
    momentum=st.floats(0, 0.999),
    weight_decay=st.floats(0, 10),
    head_noise=st.none() | st.booleans(),
    head_groups=st.none() | st.integers(1, 10),
    spread=st.none() | POSITIVE,
    loss=st.sampled_from([None, "square", "cross-entropy"]),
    dtype=st.sampled_from(["float32", "float64"]),
    vectorise=st.none() | st.booleans(),
)


def through_toml(config: RunConfig, folder: Path) -> RunConfig:
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    return RunConfig.from_mapping(RunConfig.read(folder / "config.toml"))


@given(config=CONFIGS)
def test_a_configuration_survives_toml(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> None:
    again = through_toml(config, tmp_path_factory.getbasetemp())
    assert again == config
    assert again.fingerprint() == config.fingerprint()
    assert type(again.cohort) is type(config.cohort)


def test_the_defaults_survive_toml(tmp_path: Path) -> None:
    assert through_toml(RunConfig(), tmp_path) == RunConfig()


@pytest.mark.parametrize("given", ["0,0,1", [0, 0, 1], (0, 0, 1)])
def test_a_list_may_be_given_as_one_or_as_it_is_typed(tmp_path: Path, given: object) -> None:
    config = RunConfig.from_mapping({"head_partition": given})
    assert config.head_partition == "0,0,1"
    assert through_toml(config, tmp_path) == config


@pytest.mark.parametrize("given", ["0,x", "", [0, "1"], [True], []])
def test_what_is_no_list_of_numbers_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="head_partition is a list of numbers"):
        RunConfig.from_mapping({"head_partition": given})


@pytest.mark.parametrize("text", ['quo"te', "back\\slash", "new\nline", "tab\t", "ümläut ε", "# no comment", "'''"])
def test_awkward_texts_survive_toml(tmp_path: Path, text: str) -> None:
    assert through_toml(RunConfig(dataset=text), tmp_path).dataset == text


def test_an_unknown_setting_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Unknown setting in my\.toml: 'momentun'\. Did you mean 'momentum'\?"):
        RunConfig.from_mapping({"momentun": 0.9}, where="my.toml")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("learning_rate", "lr"), ("batchsize", "batch_size"), ("epochs", "local_epochs"), ("zzz", None)],
)
def test_an_unknown_setting_names_the_nearest_three_by_name_or_meaning(given: str, meant: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping({given: 1}, where="my.toml")
    nearest = re.findall(r"The nearest are (.*?)\.", str(caught.value))[0].split(", ")
    assert len(nearest) == 3
    assert meant in (None, nearest[0])


def test_hyphens_and_underscores_are_the_same(tmp_path: Path) -> None:
    assert RunConfig.from_mapping({"batch-size": 8}).batch_size == 8
    (tmp_path / "a.toml").write_text("batch-size = 8\nlr_decay = 0.5\n")
    assert RunConfig.read(tmp_path / "a.toml") == {"batch_size": 8, "lr_decay": 0.5}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rounds": "many"}, "rounds must be int"),
        ({"rounds": 2.5}, "rounds must be int"),
        ({"rounds": True}, "rounds must be int"),
        ({"lr": "fast"}, "lr must be a positive number, or auto"),
        ({"head_noise": 1}, "head_noise must be bool"),
        ({"scheme": 3}, "scheme must be str"),
        ({"model_options": "depth=3"}, "model_options must be dict"),
        ({"rounds": None}, "rounds must be int"),
        ({"rounds": [1]}, "rounds must be int"),
    ],
)
def test_a_wrong_type_is_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        RunConfig.from_mapping(settings)


def test_a_whole_number_does_for_a_float_but_a_cohort_keeps_the_difference() -> None:
    config = RunConfig.from_mapping({"lr": 1, "cohort": 1})
    assert type(config.lr) is float
    assert type(config.cohort) is int
    assert type(RunConfig.from_mapping({"cohort": 1.0}).cohort) is float


def test_none_means_the_default() -> None:
    assert RunConfig.from_mapping({"seed": None, "loss": None, "head_groups": None}) == RunConfig()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"clients": 0}, "clients must be positive"),
        ({"rounds": -1}, "rounds must be positive"),
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"lr_decay": -0.5}, "lr_decay must be positive"),
        ({"batch_size": -1}, "batch_size must not be negative"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"checkpoint_every": -1}, "checkpoint_every must not be negative"),
        ({"evaluate_every": -1}, "evaluate_every must not be negative"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
        ({"momentum": -0.1}, "momentum must lie"),
        ({"min_coverage": 1.5}, "min_coverage must lie"),
        ({"seed": -1}, "seed must lie between 0 and"),
        ({"seed": 2**63}, "seed must lie between 0 and"),
        ({"secrets": "seeded"}, "needs a seed"),
        ({"dtype": "float16"}, "Unknown dtype 'float16'. Did you mean 'float64'"),
        ({"lr_schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"bn_eps": "hidden"}, "Unknown bn_eps"),
        ({"secrets": "so"}, "Unknown secrets"),
        ({"rounds": 10**12}, "rounds must be positive, and at most 10,000,000"),
        ({"clients": 10**7}, "clients must not be negative, and at most 1,048,576"),
        ({"local_steps": 10**12}, "local_steps must be positive"),
        ({"lr": "fast"}, "lr must be a positive number, or auto"),
        ({"task": "regresion"}, "Did you mean 'regression'"),
        ({"loss": "crossentropy"}, "Did you mean 'cross-entropy'"),
        ({"warm_up": 1.0}, r"warm_up must lie in \[0, 1\)"),
        ({"lr_schedule": "step", "lr_steps": "0.75,0.5"}, "lr_steps must be shares of the rounds in ascending order"),
        ({"lr_schedule": "step", "lr_steps": "half"}, "lr_steps is a list of numbers"),
        ({"lr_schedule": "step", "lr_steps": "0.5,nan"}, "lr_steps is a list of numbers"),
        ({"lr_schedule": "cosine", "lr_steps": "0.5"}, "set --lr-schedule step, or leave lr_steps out"),
        ({"lr_power": 2.0}, "lr_power is of lr_schedule = polynomial, and lr_schedule is constant"),
        ({"optimiser": "adamm"}, "Did you mean 'adam'"),
        ({"optimiser": "adam", "momentum": 0.9}, "momentum is of optimiser = sgd, and optimiser is adam"),
        ({"beta1": 0.5}, "beta1 is of optimiser = adam or adagrad or yogi, and optimiser is sgd"),
        ({"optimiser": "adagrad", "beta2": 0.9}, "beta2 is of optimiser = adam or yogi"),
        ({"optimiser": "adam", "tau": 0.0}, "tau must be positive"),
        ({"augment": "crop,rotate"}, "augment must be a list of crop, flip and cutout"),
        ({"augment": "crop,crop"}, "each once"),
        ({"augment": "crop:0"}, "sizes of 1 or more"),
        ({"augment": "flip:2"}, "augment must be"),
        ({"augment": ""}, "augment must be"),
        ({"client_momentum": 1.0}, "client_momentum must lie"),
        ({"client_lr": 0.0}, "client_lr must be positive"),
        ({"client_optimiser": "adamw"}, "Did you mean 'adam'"),
        (
            {"client_optimiser": "adam", "client_momentum": 0.9},
            "client_momentum is of client_optimiser = sgd, and client_optimiser is adam: set --client-optimiser sgd",
        ),
        ({"client_beta1": 0.5}, "client_beta1 is of client_optimiser = adam, and client_optimiser is sgd"),
        ({"client_optimiser": "sgd", "client_tau": 1e-6}, "set --client-optimiser adam, or leave client_tau out"),
        ({"client_optimiser": "adam", "client_beta2": 1.0}, "client_beta2 must lie"),
        ({"client_optimiser": "adam", "client_tau": 0.0}, "client_tau must be positive"),
    ],
)
def test_a_value_out_of_range_is_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        RunConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"lr_schedule": "step", "lr_steps": []}, r"lr_steps is a list of numbers, and not \[\]"),
        ({"rounds": 1.0}, r"rounds must be int \(got 1\.0\)"),
        ({"rounds": "3"}, r"rounds must be int \(got '3'\)"),
    ],
)
def test_what_was_given_stands_in_the_refusal_as_it_was(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        RunConfig.from_mapping(settings)


def test_whole_numbers_of_numpy_and_lists_of_words_are_taken() -> None:
    given = RunConfig.from_mapping({"rounds": np.int64(3), "augment": ["crop:2", "flip"]})
    assert (given.rounds, type(given.rounds), given.augment) == (3, int, "crop:2,flip")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["lr", "lr_decay", "momentum", "weight_decay", "alpha", "cohort", "spread", "target_scale", "min_coverage"]
)
def test_no_setting_may_be_nan_or_infinite(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a finite number"):
        RunConfig(**{name: value})


def test_secrets_are_simulated_only_with_a_seed() -> None:
    assert not RunConfig().simulated_secrets
    assert RunConfig(seed=1).simulated_secrets
    assert RunConfig(seed=1, secrets="seeded").simulated_secrets
    assert not RunConfig(seed=1, secrets="os").simulated_secrets


def test_every_setting_that_decides_the_model_changes_the_fingerprint() -> None:
    config = RunConfig(seed=1, loss="square")
    free: dict[str, Any] = {
        "rounds": 51,
        "checkpoint_every": 1,
        "evaluate_every": 3,
        "record": True,
        "early_stopping": 3,
    }
    free |= {"monitor": "loss", "target_accuracy": 0.5, "workers": 2, "on_bad_round": "stop", "max_bad_rounds": 2}
    for name, value in free.items():
        assert config.with_changes(**{name: value}).fingerprint() == config.fingerprint()
    recorded = {"record_rounds": "1,2", "record_clients": "3"}
    assert config.with_changes(record=True, **recorded).fingerprint() == config.fingerprint()
    free |= recorded
    other: dict[str, Any] = {
        "seed": 2,
        "secrets": "os",
        "loss": "cross-entropy",
        "lr_schedule": "cosine",
        "bn_eps": "public",
        "family": "full",
        "dtype": "float64",
        "task": "regression",
        "model_options": {"depth": 4},
        "options": {"keep": 0.5},
        "vectorise": True,
        "head_noise": False,
        "cohort": 0.5,
        "momentum": 0.5,
        "min_coverage": 0.5,
        "simulate_dropout": 0.5,
        "validation_fraction": 0.1,
        "split": "stratified",
        "label_smoothing": 0.1,
        "lr_steps": "0.3,0.6",
        "optimiser": "yogi",
        "client_optimiser": "adam",
        "max_loss_jump": 3.0,
        "augment": "crop,flip",
        "head_partition": "0,1",
        "epsilon_per_client": "1,2",
    }
    schedules = {"lr_steps": "step", "lr_drop": "step", "lr_power": "polynomial"}
    beside: dict[str, dict[str, Any]] = {name: {"lr_schedule": shape} for name, shape in schedules.items()}
    for name in ("beta1", "beta2", "tau"):
        beside |= {name: {"optimiser": "adam"}, f"client_{name}": {"client_optimiser": "adam"}}
    for one in dataclasses.fields(config):
        if one.name in free:
            continue
        config = RunConfig(seed=1, loss="square", **beside.get(one.name, {}))
        now = getattr(config, one.name)
        plus_one = now + 1 if isinstance(now, int | float) else 3 if "int" in str(one.type) else "else"
        value = other.get(one.name, 0.25 if "float" in str(one.type) and now is None else plus_one)
        assert config.with_changes(**{one.name: value}).fingerprint() != config.fingerprint(), one.name
    for lasting in ({"lr_schedule": "cosine"}, {"lr_schedule": "step"}, {"warm_up": 0.1}):
        scheduled = RunConfig(seed=1, **lasting)
        assert scheduled.with_changes(rounds=51).fingerprint() != scheduled.fingerprint()


def test_every_setting_is_explained() -> None:
    assert all(one.metadata["help"] for one in dataclasses.fields(RunConfig))


def test_options_of_a_scheme_are_a_table_that_comes_back_and_decides_the_run() -> None:
    config = RunConfig.from_mapping({"options": {"keep": 0.2, "way": "far", "loud": True}})
    assert RunConfig.from_mapping(tomllib.loads(config.to_toml())) == config
    assert config.fingerprint() != config.with_changes(options={"keep": 0.3}).fingerprint() != RunConfig().fingerprint()
    assert "options" not in RunConfig().to_toml().replace("model_options", "")
    for wrong, complaint in (
        ({"epsilon": 1000.0}, "epsilon is a setting of its own"),
        ({"keep": [1]}, "numbers, texts and true or false"),
        ({"keep": float("nan")}, "keep must be a finite number"),
        (3, "options must be dict"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            RunConfig.from_mapping({"options": wrong})


def test_every_setting_has_a_flag_with_its_own_words() -> None:
    from fedveil.cli.options import FLAGS

    named = {"model_options": "model_option", "options": "option"}
    for one in dataclasses.fields(RunConfig):
        (told,) = FLAGS[named.get(one.name, one.name)].annotation.__metadata__
        assert told.help == one.metadata["help"]
    assert len(FLAGS) == len(dataclasses.fields(RunConfig))


def test_model_options_are_read_as_values() -> None:
    pairs = ["depth=3", "rate=0.5", "norm=batch", "flag=true", "name='x'", "text=a=b"]
    assert parse_model_options(pairs) == {
        "depth": 3,
        "rate": 0.5,
        "norm": "batch",
        "flag": True,
        "name": "x",
        "text": "a=b",
    }
    for bad in ("depth", "=3", ""):
        with pytest.raises(ConfigError, match="key=value"):
            parse_model_options([bad])


def test_a_file_that_is_no_toml_or_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read the configuration .*absent\.toml"):
        RunConfig.read(tmp_path / "absent.toml")
    for content in (b"rounds = = 3", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML"):
            RunConfig.read(tmp_path / "bad.toml")


def test_one_setting_under_two_spellings_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size is given twice"):
        RunConfig.from_mapping({"batch-size": 8, "batch_size": 16})
