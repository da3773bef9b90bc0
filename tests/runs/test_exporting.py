"""From a run folder to a usable file, and predictions from either."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedveil
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError, DataError, FedVeilError
from fedveil.own_code import OwnCode
from fedveil.runs import session
from fedveil.runs.model_file import export_run, load_model
from fedveil.runs.predicting import predict_dataset, predict_file, write_predictions

Small = Callable[..., RunConfig]
FACTORY = """
from torch import nn
def net(input_shape, outputs, width=8):
    return nn.Sequential(
        nn.Conv2d(input_shape[0], width, 3, padding=1), nn.BatchNorm2d(width), nn.LeakyReLU(0.1),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, outputs),
    )
"""


def check_export(run: Path, out: Path, *, tolerance: float, model: OwnCode | None = None) -> None:
    """Equal predictions, equal accuracy, other numbers."""
    found = export_run(run, out, model=model)
    server, usable = (predict_dataset(one, dataset=None, part="test", model=model) for one in (run, out))
    assert (server.kind, usable.kind) == ("server", "export")
    assert float((server.outputs - usable.outputs).abs().max()) < tolerance * float(server.outputs.abs().max())
    assert server.accuracy == usable.accuracy
    assert server.mse is None or server.mse == pytest.approx(usable.mse, rel=1e-4)
    truth, sent = load_file(run / "model.safetensors"), load_file(out)
    hidden = [one.name for one in found.parameters if one.hidden == one.size]
    assert hidden
    for name in hidden:
        if name in sent:
            # Two scales may meet within a rounding (once in some 10⁷ pairs): then one pair's numbers stay, no more.
            assert (sent[name] == truth[name])[truth[name] != 0].double().mean() < 0.01, name


MODELS = {
    "mlp": {"model": "mlp", "model_options": {"depth": 3, "width": 12}},
    "mlp, batch norm": {},
    "cnn": {"model": "cnn", "model_options": {"width": 4}},
    "resnet20": {
        "model": "resnet20",
        "model_options": {},
        "clients": 2,
        "rounds": 2,
        "batch_size": 8,
        "scheme": "pbpfl",
    },
    "densenet": {
        "model": "densenet",
        "model_options": {},
        "clients": 2,
        "rounds": 2,
        "batch_size": 8,
        "scheme": "pbpfl",
    },
    "float64": {"dtype": "float64"},
    "breast cancer": {"dataset": "breast-cancer"},
}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(one, id=name, marks=pytest.mark.slow if name == "densenet" else ()) for name, one in MODELS.items()],
)
def test_an_export_is_as_good_as_the_server_and_has_other_numbers(
    tmp_path: Path, small: Small, settings: dict[str, object]
) -> None:
    session.run(small(**{"rounds": 2, "lr": 0.02, **settings}), tmp_path / "run", quiet=True)
    check_export(tmp_path / "run", tmp_path / "usable.safetensors", tolerance=1e-4)


def test_a_users_own_network_exports_too(tmp_path: Path, small: Small) -> None:
    (tmp_path / "nets.py").write_text(FACTORY)
    reference = OwnCode(f"{tmp_path / 'nets.py'}:net")
    config = small(model=reference, model_options={"width": 6}, rounds=3)
    session.run(config, tmp_path / "run", quiet=True)
    check_export(tmp_path / "run", tmp_path / "usable.safetensors", tolerance=1e-4, model=reference)


def test_a_regression_exports_with_the_same_error(tmp_path: Path) -> None:
    table = tmp_path / "houses.csv"
    rng = np.random.default_rng(1)
    rooms, age = rng.uniform(1, 9, 200), rng.uniform(0, 80, 200)
    lines = [f"{r},{a},{2 * r - 0.05 * a + 1}" for r, a in zip(rooms, age, strict=True)]
    table.write_text("rooms,age,price\n" + "\n".join(lines) + "\n")
    config = RunConfig(dataset=str(table), target="price", task="regression", clients=4, rounds=4, seed=1, lr=0.02)
    summary = session.run(config, tmp_path / "run", quiet=True)
    assert "test_accuracy" not in summary
    assert predict_dataset(tmp_path / "run", dataset=None, part="test").mse == pytest.approx(summary["test_mse"])
    check_export(tmp_path / "run", tmp_path / "usable.safetensors", tolerance=1e-4)


def test_predictions_of_a_run_folder_score_as_the_run_did(straight: Path) -> None:
    summary = session.resume(straight, quiet=True)
    for place in (straight, straight / "model.safetensors"):
        assert predict_dataset(place, dataset=None, part="test").accuracy == summary["test_accuracy"]
    train = predict_dataset(straight, dataset=None, part="train")
    assert len(train.outputs) + len(predict_dataset(straight, dataset=None, part="test").outputs) == 1797


def test_an_export_of_an_export_is_refused(tmp_path: Path, straight: Path) -> None:
    export_run(straight, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="is an export already"):
        export_run(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


def test_an_existing_file_is_not_overwritten(tmp_path: Path, straight: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(CheckpointError, match="exists already"):
        export_run(straight, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "precious"


def flip(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit among the numbers": lambda raw: flip(raw, len(raw) - 40),
    "a flipped bit in the header": lambda raw: flip(raw, 100),
    "cut": lambda raw: raw[: len(raw) // 2],
    "empty": lambda raw: b"",
    "another file": lambda raw: b"PK\x03\x04 not a model at all",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_file_is_refused(tmp_path: Path, straight: Path, damage: Callable[[bytes], bytes]) -> None:
    export_run(straight, tmp_path / "usable.safetensors")
    for source in (straight / "model.safetensors", tmp_path / "usable.safetensors"):
        broken = tmp_path / "broken.safetensors"
        broken.write_bytes(damage(source.read_bytes()))
        with pytest.raises(ConfigError, match=r"broken\.safetensors (is damaged|is a safetensors file, but not)"):
            load_model(broken)


def test_a_strangers_safetensors_file_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="not a FedVeil model"):
        load_model(tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="There is no model at"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="There is no model at"):
        load_model(tmp_path)


def test_a_model_built_in_python_says_how_to_use_its_file(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    data = [(torch.randn(9, 4), torch.randint(0, 2, (9,))) for _ in range(3)]
    fedveil.train(net, data, rounds=2, seed=1, out=tmp_path / "run", progress=False)
    for use in (
        lambda: predict_dataset(tmp_path / "run", dataset=None, part="test"),
        lambda: export_run(tmp_path / "run", tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match="built in Python"):
            use()
    assert {"0.weight", "2.bias"} <= set(load_file(tmp_path / "run" / "model.safetensors"))


def test_inputs_from_a_file_are_predicted_and_written(tmp_path: Path, straight: Path) -> None:
    x = np.random.default_rng(1).uniform(0, 1, (7, 1, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    found = predict_file(straight, tmp_path / "x.npy")
    assert found.outputs.shape == (7, 10)
    assert found.accuracy is None
    write_predictions(tmp_path / "p.csv", found)
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [str(int(k)) for k in found.outputs.argmax(1)]
    assert float(rows[3]["output_4"]) == float(found.outputs[3, 4])


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path, straight: Path) -> None:
    np.save(tmp_path / "wrong.npy", np.zeros((3, 5)))
    with pytest.raises(DataError, match="the model takes"):
        predict_file(straight, tmp_path / "wrong.npy")
    np.save(tmp_path / "scalar.npy", np.zeros(()))
    (tmp_path / "text.npy").write_text("hello")
    for bad in ("scalar.npy", "text.npy", "absent.npy"):
        with pytest.raises(FedVeilError):
            predict_file(straight, tmp_path / bad)
    with pytest.raises(ConfigError, match="not the data this model was trained on"):
        predict_dataset(straight, dataset="breast-cancer", part="test")
    with pytest.raises(ConfigError, match="have no validation part"):
        predict_dataset(straight, dataset=None, part="validation")
    with pytest.raises(ConfigError, match="part must be test, train or validation"):
        predict_dataset(straight, dataset=None, part="whole")


def test_an_export_tells_the_seed_of_a_simulation_only(tmp_path: Path, small: Small) -> None:
    for name, changes in (("simulated", {"seed": 3}), ("real", {"seed": 3, "secrets": "os"})):
        session.run(small(rounds=1, **changes), tmp_path / name, quiet=True)
        export_run(tmp_path / name, tmp_path / f"{name}.safetensors")
    simulated, real = (load_model(tmp_path / f"{name}.safetensors").config for name in ("simulated", "real"))
    assert simulated["seed"] == 3
    assert "seed" not in real
    named = {"dataset", "target", "task", "text", "group", "site"}
    assert set(real) == named | {"test_fraction", "validation_fraction", "split", "picture_size"}
    assert not predict_dataset(tmp_path / "real.safetensors", dataset=None, part="test").split_known
