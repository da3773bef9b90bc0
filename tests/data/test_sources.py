from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.data import load, sources
from fedveil.data.dataset import Options
from fedveil.errors import ConfigError, DataError
from fedveil.own_code import OwnCode, typed


def test_digits_are_pictures_between_zero_and_one() -> None:
    split = load("digits")
    assert split.train.input_shape == (1, 8, 8)
    assert (len(split.train), len(split.test)) == (1438, 359)
    assert (float(split.train.x.min()), float(split.train.x.max())) == (0.0, 1.0)
    assert (split.train.outputs, split.train.x.dtype) == (10, torch.float32)


@pytest.mark.parametrize("found", [True, False], ids=["its file", "the package"])
def test_digits_are_scikit_learns(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    if not found:
        monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    stored, rows = load_digits(), sources._stored_digits.__wrapped__()
    assert np.array_equal(rows[:, :-1], stored.data)
    assert np.array_equal(rows[:, -1], stored.target)


def test_breast_cancer_is_standardised_by_its_training_part() -> None:
    split = load("breast-cancer")
    assert split.train.labels == ("malignant", "benign")
    assert torch.allclose(split.train.x.mean(0), torch.zeros(30), atol=1e-5)
    assert torch.allclose(split.train.x.std(0, correction=0), torch.ones(30), atol=1e-4)
    assert not torch.allclose(split.test.x.mean(0), torch.zeros(30), atol=1e-3)


def test_normalise_false_keeps_the_measurements() -> None:
    assert float(load("breast-cancer", normalise=False).train.x.max()) > 1000


def test_two_classes_can_be_regressed_on() -> None:
    train = load("breast-cancer", task="regression").train
    assert (train.task, train.outputs, tuple(train.y.shape)) == ("regression", 1, (455, 1))
    assert set(train.y.flatten().tolist()) == {0.0, 1.0}


def test_ten_named_classes_cannot_be_regressed_on() -> None:
    with pytest.raises(DataError, match="task='classification'"):
        load("digits", task="regression")


def test_the_seed_and_the_fraction_decide_the_split() -> None:
    one, same, other = load("digits", seed=1), load("digits", seed=1), load("digits", seed=2)
    assert torch.equal(one.test.x, same.test.x)
    assert not torch.equal(one.test.x, other.test.x)
    assert len(load("digits", test_fraction=0.5).test) == 898


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_an_impossible_test_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        load("digits", test_fraction=fraction)


def test_an_unknown_name_suggests_the_nearest_and_that_paths_work() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'digits'.*path"):
        load("digts")


def test_an_absent_path_is_called_a_path() -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        load("nowhere/at/all")
    with pytest.raises(DataError, match="no such file or folder"):
        load("missing.csv")


def test_an_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(ConfigError, match="Unknown dataset"):
        load("")


def test_an_unknown_layout_is_refused_with_the_layouts_that_exist(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing to learn from")
    for source in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(DataError, match=r"idx files.*CIFAR.*npz.*picture folders.*csv"):
            load(source)


@pytest.mark.parametrize("option", ["target", "text", "group"])
def test_columns_of_something_without_columns_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}='y' names a CSV column"):
        load("digits", **{option: "y"})  # type: ignore[arg-type]


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'regression'"):
        load("digits", task="regresion")  # type: ignore[arg-type]


@pytest.mark.parametrize(("option", "value"), [("max_tokens", 0), ("vocabulary", 2), ("seed", -1)])
def test_a_number_out_of_range_is_refused(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=option):
        load("digits", **{option: value})  # type: ignore[arg-type]


X = np.arange(60, dtype="float32").reshape(20, 3)
Y = np.arange(20) % 4


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "EMBEDDED", dict(sources.EMBEDDED))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "given",
    [
        lambda: (X, Y),
        lambda: [torch.tensor(X), torch.tensor(Y)],
        lambda: ((X[:16], Y[:16]), (X[16:], Y[16:])),
        lambda: sources.assemble(sources.Arrays(sources.Part("own", X, Y)), Options(), name="own"),
    ],
)
def test_a_function_gives_data_by_a_name_of_its_own(given: Callable[[], object]) -> None:
    @sources.source("own")
    def loads(seed: int, test_fraction: float) -> object:
        assert (seed, test_fraction) == (3, 0.2)
        return given()

    split = load("own", seed=3)
    assert (len(split.train), len(split.test), split.train.input_shape, split.train.outputs) == (16, 4, (3,), 4)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (lambda: 3, "gave int, not a fedveil.data.Split"),
        (lambda: {}["x"], "the function raised KeyError: 'x'"),
        (lambda: (X, Y[:3]), "20 samples"),
        (lambda missing: 3, "the function raised TypeError"),
    ],
)
def test_a_function_that_gives_no_data_is_named(given: Callable[..., object], complaint: str) -> None:
    sources.source("own")(given)
    with pytest.raises(DataError, match=complaint):
        load("own")


def test_what_comes_along_keeps_its_name_and_columns_are_for_who_asks_for_them() -> None:
    with pytest.raises(ConfigError, match="'digits' is a data set that comes with FedVeil"):
        sources.source("digits")(lambda: (X, Y))
    with pytest.raises(ConfigError, match="does not ask for it"):
        sources._called(lambda: (X, Y), "own", Options(target="y"))


def test_code_is_loaded_where_its_type_says_so_and_a_file_may_have_a_colon_in_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import numpy as np\ndef load(seed):\n    return np.ones((9, 2)) * seed, np.arange(9) % 3\n")
    assert float(load(OwnCode(f"{file}:load"), seed=5).train.x.max()) == 5.0
    with pytest.raises(ConfigError, match="names code as its dataset"):
        load(f"{file}:load")
    odd = tmp_path / "a.py:load"
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    odd.mkdir()
    (tmp_path / "data.npz").rename(odd / "data.npz")
    assert typed(str(odd / "data.npz")) == str(odd / "data.npz")
    assert len(load(str(odd / "data.npz")).train) == 16
