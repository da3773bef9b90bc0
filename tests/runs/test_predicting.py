"""Predictions for raw samples: those of the training-time pipeline, from a file that holds all that takes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import nn

import fedveil
from fedveil import data
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError, DataError
from fedveil.runs import model_file, session
from fedveil.runs.job import Link
from fedveil.runs.model_file import export_onnx, export_run, export_torch, load_model
from fedveil.runs.predicting import predict_dataset, predict_file, refuse_too_large, write_predictions
from shell import fedveil as command

BRIEF: dict[str, Any] = {"rounds": 2, "clients": 2, "seed": 1, "checkpoint_every": 0, "evaluate_every": 0}
NARROW = {"model_options": {"depth": 2, "width": 6, "norm": "batch"}}


def rows_of(rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    return [
        {"age": int(rng.integers(20, 90)), "town": "ABC"[rng.integers(3)], "dose": float(rng.normal())}
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table of patients, in two parts, and a run on it."""
    place, rng = tmp_path_factory.mktemp("clinic"), np.random.default_rng(4)
    (place / "data").mkdir()
    for part, count in (("train", 60), ("test", 25)):
        with (place / "data" / f"{part}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["age", "town", "dose", "ill"])
            for row in rows_of(rng, count):
                writer.writerow([*row.values(), "yes" if row["age"] > 50 else "no"])
    config = RunConfig(dataset=str(place / "data"), target="ill", lr=0.05, **BRIEF, **NARROW)
    session.run(config, place / "run", quiet=True)
    return place


@pytest.fixture(scope="module")
def bytes_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on pictures stored as bytes."""
    place, rng = tmp_path_factory.mktemp("bytes"), np.random.default_rng(5)
    x = rng.integers(0, 256, (40, 4, 4)).astype(np.uint8)
    np.savez(place / "pictures.npz", x=x, y=np.arange(40) % 2, classes=np.array(["cat", "dog"]))
    settings: dict[str, Any] = {**BRIEF, **NARROW, "scheme": "fedavg", "loss": "cross-entropy"}
    session.run(RunConfig(dataset=str(place / "pictures.npz"), **settings), place / "run", quiet=True)
    return place


def test_raw_rows_are_predicted_bit_for_bit_as_the_training_pipeline_predicts_them(clinic: Path) -> None:
    prepared = data.load(clinic / "data", target="ill")
    model = fedveil.load(clinic / "run")
    expected = model(prepared.test.x)
    with (clinic / "data" / "test.csv").open() as file:
        rows = [{name: value for name, value in row.items() if name != "ill"} for row in csv.DictReader(file)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    told = predict_dataset(clinic / "run", dataset=None)
    for raw in (clinic / "data" / "test.csv", rows, columns):
        given = model.predict(raw)
        assert torch.equal(given.outputs, expected)
        assert torch.equal(given.outputs, told.outputs)
        assert given.probabilities is not None
        assert torch.equal(given.probabilities, told.probabilities)
        assert given.classes == [("no", "yes")[best] for best in expected.argmax(1).tolist()]
    scored = model.predict(clinic / "data" / "test.csv")
    assert (
        scored.accuracy == told.accuracy == json.loads((clinic / "run" / "summary.json").read_text())["test_accuracy"]
    )
    # One row alone is prepared to the same bits; a product of one row may round its last bit otherwise.
    assert torch.allclose(model.predict(rows[3]).outputs, expected[3:4], rtol=1e-5, atol=1e-6)


def test_an_export_takes_raw_rows_too(clinic: Path, tmp_path: Path) -> None:
    export_run(clinic / "run", tmp_path / "usable.safetensors")
    rows = rows_of(np.random.default_rng(1), 9)
    ours, theirs = (fedveil.load(place).predict(rows) for place in (clinic / "run", tmp_path / "usable.safetensors"))
    assert ours.classes == theirs.classes
    assert torch.allclose(ours.outputs, theirs.outputs, atol=1e-4)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_predict_writes_names_probabilities_and_what_was_kept(clinic: Path, tmp_path: Path, ending: str) -> None:
    rows = [{"patient": f"p{at}", **row} for at, row in enumerate(rows_of(np.random.default_rng(2), 5))]
    with (tmp_path / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if ending == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / f"p.{ending}"
    done = command("predict", clinic / "run", "--dataset", tmp_path / "new.csv", "--keep", "patient", "--out", out)
    assert done.code == 0, done.error
    assert "server model, 5 samples" in done.output
    expected = fedveil.load(clinic / "run").predict(rows, keep=["patient"])
    if ending == "parquet":
        written = parquet.read_table(out).to_pydict()
    else:
        with out.open() as file:
            lines = list(csv.DictReader(file))
        written = {name: [line[name] for line in lines] for name in lines[0]}
    assert list(written) == ["sample", "patient", "class", "p_no", "p_yes", "output_0", "output_1"]
    assert written["patient"] == [row["patient"] for row in rows]
    assert written["class"] == expected.classes
    assert expected.probabilities is not None
    assert [float(value) for value in written["p_yes"]] == expected.probabilities[:, 1].tolist()
    refused = command("predict", clinic / "run", "--dataset", tmp_path / "new.csv")
    assert (refused.code, "'patient'" in refused.error) == (DataError.exit_code, True)


def test_a_name_that_promises_another_kind_of_file_is_refused_before_anything_is_predicted(
    clinic: Path, tmp_path: Path
) -> None:
    refused = command("predict", clinic / "run", "--out", tmp_path / "p.xlsx")
    assert (refused.code, refused.output) == (ConfigError.exit_code, "")
    assert "written as .csv or .parquet, and not as .xlsx" in refused.error
    assert not list(tmp_path.iterdir())
    assert "--out FILE.csv" in command("predict", clinic / "run").output


def test_a_data_frame_is_a_table_gaps_and_all(clinic: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = rows_of(np.random.default_rng(2), 5)
    model = fedveil.load(clinic / "run")
    assert torch.equal(model.predict(pandas.DataFrame(rows)).outputs, model.predict(rows).outputs)
    frame = pandas.DataFrame(rows).astype({"age": "Int64"})
    frame.loc[1, "age"] = pandas.NA
    assert torch.equal(
        model.predict(frame).outputs, model.predict([rows[0], rows[1] | {"age": None}, *rows[2:]]).outputs
    )


def test_weights_alone_are_no_model_and_the_error_says_what_they_are_for(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"zip file, as torch.save writes them.*torch\.load"):
        fedveil.load(tmp_path / "w.pt")
    (tmp_path / "model.txt").write_text("no model at all")
    with pytest.raises(ConfigError, match=r"not a safetensors file .*: give a run folder"):
        fedveil.load(tmp_path / "model.txt")


def test_what_could_not_be_taken_as_it_is_is_said(clinic: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("age,town,dose\n,D,1\n40,A,2\n")
    done = command("predict", clinic / "run", "--dataset", tmp_path / "odd.csv")
    assert done.code == 0, done.error
    assert "note: column 'age': 1 of 2 rows are empty" in done.output
    assert "note: column 'town': 1 of 2 rows hold what training never saw ('D')" in done.output


def test_pictures_are_standardised_as_in_training_and_raw_numbers_refused(bytes_run: Path, tmp_path: Path) -> None:
    raw = np.load(bytes_run / "pictures.npz")["x"]
    whole = predict_dataset(bytes_run / "run", dataset=None, part="train").outputs
    order = np.random.default_rng([1, 1]).permutation(40)
    train = np.sort(order[8:])
    np.savez(tmp_path / "new.npz", x=raw[train])
    assert torch.equal(predict_dataset(bytes_run / "run", dataset=str(tmp_path / "new.npz")).outputs, whole)
    np.save(tmp_path / "bytes.npy", raw[train])
    said: list[str] = []
    assert torch.equal(predict_file(bytes_run / "run", tmp_path / "bytes.npy", say=said.append).outputs, whole)
    assert "prepared as the training samples" in said[0]
    np.save(tmp_path / "floats.npy", raw[train][:, None].astype(np.float32))
    with pytest.raises(DataError, match=r"numbers from 0 to 255, and pictures prepared for this model lie between"):
        predict_file(bytes_run / "run", tmp_path / "floats.npy")
    prepared = data.load(bytes_run / "pictures.npz", seed=1).train.x
    np.save(tmp_path / "ready.npy", prepared.numpy())
    assert torch.equal(predict_file(bytes_run / "run", tmp_path / "ready.npy").outputs, whole)


def test_a_folder_of_pictures_of_any_size_is_predicted_where_the_run_resized(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(6)
    for number in range(12):
        folder = tmp_path / "data" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (5 + number % 3, 6, 3)).astype(np.uint8)
        image.fromarray(pixels).save(folder / f"{number}.png")
    small = ("--rounds", 1, "--clients", 2, "--seed", 1, "-o", "depth=2", "-o", "width=6", "--scheme", "fedavg")
    ran = command("run", "--dataset", tmp_path / "data", "--picture-size", 4, *small, "--out", tmp_path / "run")
    assert ran.code == 0, ran.error
    (tmp_path / "new").mkdir()
    for file in (tmp_path / "data" / "dog").iterdir():
        file.rename(tmp_path / "new" / file.name)
    done = command("predict", tmp_path / "run", "--dataset", tmp_path / "new", "--out", tmp_path / "p.csv")
    assert done.code == 0, done.error
    with (tmp_path / "p.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [Path(row["file"]).name for row in rows] == sorted(f"{number}.png" for number in range(1, 12, 2))
    assert {row["class"] for row in rows} <= {"cat", "dog"}
    (tmp_path / "data" / "dog").rmdir()
    (tmp_path / "new").rename(tmp_path / "data" / "dog")
    order = [str(file) for file in sorted((tmp_path / "data" / "dog").iterdir())]
    again = predict_dataset(tmp_path / "run", dataset=str(tmp_path / "data" / "dog"))
    assert list(again.beside["file"]) == order
    whole = torch.cat(
        [predict_dataset(tmp_path / "run", dataset=None, part=part).outputs for part in ("train", "test")]
    )
    gaps = (again.outputs[:, None] - whole[None]).abs().amax(2).amin(1)
    assert float(gaps.max()) < 1e-5  # each is among those that the run itself predicts


def forged(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a model file that says something else of itself, checksum and all."""
    with safe_open(str(source), "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts = json.loads(metadata["facts"])
    change(facts)
    metadata["facts"] = json.dumps(facts)
    metadata["digest"] = model_file._digest(tensors, metadata)
    target.write_bytes(save(tensors, metadata))
    return target


def older(facts: dict[str, Any]) -> None:
    del facts["preparation"], facts["link"]


def test_files_from_before_there_were_preparations_predict_from_prepared_arrays_with_a_word(
    bytes_run: Path, tmp_path: Path
) -> None:
    old = forged(bytes_run / "run" / "model.safetensors", tmp_path / "old.safetensors", older)
    np.save(tmp_path / "ready.npy", data.load(bytes_run / "pictures.npz", seed=1).train.x.numpy())
    said: list[str] = []
    given = predict_file(old, tmp_path / "ready.npy", say=said.append)
    assert torch.equal(given.outputs, predict_dataset(old, dataset=None, part="train").outputs)
    assert given.probabilities is None
    assert "does not say how raw samples become inputs" in said[0]
    np.save(tmp_path / "bytes.npy", np.zeros((2, 1, 4, 4), np.uint8))
    with pytest.raises(DataError, match="bytes, and the model's file does not say"):
        predict_file(old, tmp_path / "bytes.npy")
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 4, 4), np.uint8))
    with pytest.raises(ConfigError, match="does not say how raw samples become inputs"):
        predict_dataset(old, dataset=str(tmp_path / "new.npz"))


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "wider than the model": lambda facts: facts["preparation"]["inputs"]["columns"].append(
        {"name": "x", "fill": 0.0, "mean": 0.0, "deviation": 1.0}
    ),
    "other classes": lambda facts: facts["preparation"].update(classes=["a", "b"]),
    "code": lambda facts: facts["preparation"].update(inputs={"function": "os:system"}),
    "no preparation at all": lambda facts: facts.update(preparation="sklearn.compose:ColumnTransformer"),
    "more categories than a run makes": lambda facts: facts["preparation"]["inputs"]["columns"][1].update(
        categories=[str(i) for i in range(20_000)]
    ),
    "a link to nowhere": lambda facts: facts.update(link={"loss": "os.system"}),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_strangers_preparation_is_data_that_fits_or_is_refused(
    clinic: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    file = forged(clinic / "run" / "model.safetensors", tmp_path / "forged.safetensors", change)
    with pytest.raises(CheckpointError, match="is damaged"):
        fedveil.load(file)


class Normed(nn.Module):
    """A network of somebody's own, with a layer that is used twice and a buffer that nobody trains."""

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6) if norm == "batch" else nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x) * self.scale)))  # type: ignore[no-any-return]


def own_run(place: Path, net: nn.Module, **settings: Any) -> fedveil.Trained:
    torch.manual_seed(3)
    clients = [(torch.randn(12, 5), torch.randint(0, 3, (12,))) for _ in range(2)]
    settings = {"scheme": "fedavg", "rounds": 2, "seed": 1, "progress": False, **settings}
    return fedveil.train(net, clients, out=place, **settings)


def test_a_model_from_python_is_loaded_with_its_network_or_what_builds_it(tmp_path: Path) -> None:
    net = Normed()
    trained = own_run(tmp_path / "run", net)
    x = torch.randn(7, 5)
    expected = trained.model(x)
    for model in (net, Normed, lambda outputs: Normed()):
        given = fedveil.load(tmp_path / "run", model=model).predict(x)
        assert torch.equal(given.outputs, expected)
        assert given.probabilities is not None
        assert torch.equal(given.probabilities, expected.double().softmax(1).float())
        assert given.classes == [str(best) for best in expected.argmax(1).tolist()]
    with pytest.raises(ConfigError, match="built in Python"):
        fedveil.load(tmp_path / "run")
    with pytest.raises(ConfigError, match="does not fit the model that was given"):
        fedveil.load(tmp_path / "run", model=nn.Linear(5, 3))
    with pytest.raises(DataError, match="look like raw pixels"):
        fedveil.load(tmp_path / "run", model=net).predict(torch.linspace(0, 255, 10).reshape(2, 5))


def test_train_stores_how_its_samples_were_prepared(clinic: Path, tmp_path: Path) -> None:
    split = data.load(clinic / "data", target="ill")
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    given = {"scheme": "fedavg", "rounds": 1, "seed": 1, "progress": False, "preparation": split.preparation}
    trained = fedveil.train(net, [(split.train.x, split.train.y)] * 2, out=tmp_path / "run", **given)
    predicted = fedveil.load(tmp_path / "run", model=net).predict(clinic / "data" / "test.csv")
    assert torch.equal(predicted.outputs, trained.model(split.test.x))
    assert set(predicted.classes) <= {"no", "yes"}
    with pytest.raises(ConfigError, match=r"samples of shape \(5,\), the clients' have \(4,\)"):
        fedveil.train(nn.Linear(4, 2), [(split.train.x[:, :4], split.train.y)] * 2, **given)


@pytest.mark.parametrize("epsilon", ["public", "secret"])
def test_a_state_dict_has_the_keys_of_the_users_class_and_gives_the_models_outputs(
    tmp_path: Path, epsilon: str
) -> None:
    net = Normed()
    trained = own_run(tmp_path / "run", net, bn_eps=epsilon)
    folded = export_torch(tmp_path / "run", tmp_path / "weights.pt", model=net)
    assert folded == (() if epsilon == "public" else ("norm",))
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert set(state) == set(net.state_dict())
    again = Normed()
    again.load_state_dict(state)
    x = torch.randn(20, 5)
    assert torch.allclose(again.eval()(x), trained.model(x), rtol=1e-5, atol=1e-6)
    if epsilon == "public":
        assert torch.equal(state["norm.running_var"], trained.model.state_dict()["norm.running_var"])
    assert type(fedveil.load(tmp_path / "run", model=net).stock()) is Normed
    with pytest.raises(CheckpointError, match="exists already"):
        export_torch(tmp_path / "run", tmp_path / "weights.pt", model=net)


def test_a_layer_that_cannot_take_a_secret_epsilon_is_named(tmp_path: Path) -> None:
    net = Normed("layer")
    own_run(tmp_path / "secret", net, bn_eps="secret")
    with pytest.raises(ConfigError, match=r"The ε of norm was drawn in secret.*--bn-eps public"):
        export_torch(tmp_path / "secret", tmp_path / "weights.pt", model=net)
    assert not (tmp_path / "weights.pt").exists()
    trained = own_run(tmp_path / "public", net, bn_eps="public")
    export_torch(tmp_path / "public", tmp_path / "weights.pt", model=net)
    again = Normed("layer")
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    x = torch.randn(5, 5)
    assert torch.allclose(again(x), trained.model(x), atol=1e-6)


def test_the_command_exports_to_torch_and_refuses_what_is_none(clinic: Path, tmp_path: Path) -> None:
    done = command("export", clinic / "run", "--format", "torch", "--out", tmp_path / "w.pt")
    assert done.code == 0, done.error
    assert "not for clients" in done.output
    assert "secret ε of 1 batch" in done.output
    bare = load_model(clinic / "run").bare
    assert set(torch.load(tmp_path / "w.pt", weights_only=True)) == set(bare.state_dict())
    assert command("export", clinic / "run", "--format", "tensorflow", "--out", tmp_path / "w").code == 2
    done = command("export", clinic / "run", "--out", tmp_path / "model.onnx")
    assert done.code == 2
    assert "Say --format onnx" in done.error
    assert not (tmp_path / "model.onnx").exists()
    export_run(clinic / "run", tmp_path / "usable.safetensors")
    with pytest.raises(ConfigError, match="whose layers are not those of its class"):
        export_torch(tmp_path / "usable.safetensors", tmp_path / "x.pt")


@pytest.mark.slow
def test_onnx_gives_the_same_outputs_for_any_number_of_samples(clinic: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    export_onnx(clinic / "run", tmp_path / "m.onnx")
    stored = {entry.key: entry.value for entry in onnx.load(tmp_path / "m.onnx").metadata_props}
    loaded = load_model(clinic / "run")
    assert json.loads(stored["fedveil.preparation"])["target"] == "ill"
    assert json.loads(stored["fedveil.labels"]) == ["no", "yes"]
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"))
    for count in (1, 5):
        x = torch.randn(count, 5)
        (outputs,) = session.run(None, {"inputs": x.numpy()})
        assert np.allclose(outputs, loaded.module(x).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(("scale", "weight"), [(1.0, 1.0), (15.0, 1.0), (2.0, 5.0), (1.0, 0.5)])
def test_probabilities_undo_what_the_square_loss_tends_to(scale: float, weight: float) -> None:
    chances = torch.tensor([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0]], dtype=torch.float64)
    outputs = scale * weight * chances / (weight * chances + 1 - chances)
    assert torch.allclose(Link("square", scale, weight).probabilities(outputs), chances)


def test_probabilities_sum_to_one_whatever_the_outputs() -> None:
    outputs = torch.tensor([[-1.0, -2.0], [3.0, 2.0], [0.4, 0.2]])
    for link in (Link("square"), Link("cross-entropy"), Link("square", 2.0, 3.0)):
        given = link.probabilities(outputs)
        assert torch.allclose(given.sum(1), torch.ones(3))
        assert (given >= 0).all()
    assert Link("square").probabilities(outputs)[0].tolist() == [0.5, 0.5]


def test_a_regression_writes_values_and_knows_no_classes(tmp_path: Path) -> None:
    (tmp_path / "toy.csv").write_text("a,price\n" + "".join(f"{i},{2.5 * i}\n" for i in range(40)))
    config = RunConfig(dataset=str(tmp_path / "toy.csv"), target="price", scheme="fedavg", **BRIEF, **NARROW)
    session.run(config, tmp_path / "run", quiet=True)
    given = fedveil.load(tmp_path / "run").predict([{"a": 3, "price": 7.5}, {"a": 4, "price": None}])
    assert given.mse == pytest.approx((float(given.outputs[0, 0]) - 7.5) ** 2, rel=1e-5)
    with pytest.raises(ConfigError, match="predicts no class"):
        given.classes  # noqa: B018
    write_predictions(tmp_path / "p.csv", given)
    assert (tmp_path / "p.csv").read_text().splitlines()[0] == "sample,output_0"


def test_a_file_that_is_named_is_predicted_whole_also_the_one_that_was_trained_on(tmp_path: Path) -> None:
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "ill"], *([n, n % 7, n % 2] for n in range(40))])
    session.run(RunConfig(dataset=str(tmp_path / "t.csv"), target="ill", lr=0.05, **BRIEF, **NARROW), tmp_path / "run")
    said: list[str] = []
    whole = predict_dataset(tmp_path / "run", dataset=str(tmp_path / "t.csv"), keep=("ill",), say=said.append)
    assert (len(whole), len(predict_dataset(tmp_path / "run", dataset=None))) == (40, 8)
    assert "every sample is predicted" in said[0]
    assert whole.judged is not None


def test_raw_pixels_by_way_of_inputs_are_refused_too(tmp_path: Path) -> None:
    session.run(RunConfig(dataset="digits", lr=0.05, **BRIEF, **NARROW), tmp_path / "run", quiet=True)
    np.save(tmp_path / "raw.npy", np.linspace(0, 255, 128, dtype=np.float32).reshape(2, 1, 8, 8))
    with pytest.raises(DataError, match="look like raw pixels"):
        predict_file(tmp_path / "run", tmp_path / "raw.npy")


def test_samples_of_which_not_one_fits_into_memory_are_refused_before_anything_is_computed() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8192, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8192, 2))
    refuse_too_large(layers, (3, 64, 64))
    with pytest.raises(DataError, match=r"one of them takes about \d+\.\d GB"):
        refuse_too_large(layers, (3, 4096, 4096))
