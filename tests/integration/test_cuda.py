"""On a GPU the same run works; without one the message says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedveil as fedveil_package
from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from fedveil.runs.job import device_of
from fedveil.runs.predicting import predict_dataset
from fedveil.work.batches import PictureAugmentation
from shell import fedveil


def _own(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that waits for the device, which no captured step may."""
    return nn.functional.cross_entropy(output, target) * (1.0 if float(output.detach().abs().max()) < 1e9 else 0.0)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_asking_for_a_gpu_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = fedveil("run", "--device", "cuda", "--rounds", "1", "--out", tmp_path / "a")
    assert done.code == ConfigError.exit_code
    assert done.error == "error: device = 'cuda', but PyTorch sees no CUDA device here. Use --device cpu."
    assert not (tmp_path / "a").exists()


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="Unknown device 'tpux'"):
        device_of(RunConfig(device="tpux"))


def test_auto_takes_what_is_there_says_it_and_is_stored_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device_of(RunConfig(device="auto")).type == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(RunConfig(device="auto")).type == "cpu"
    said: list[str] = []
    config = RunConfig(device="auto", scheme="fedavg", rounds=1, clients=2, seed=1)
    summary = session.run(config, tmp_path / "a", quiet=True, say=said.append)
    assert summary["device"] == "cpu"
    assert said == ["Computing on cpu (--device auto)."]
    assert RunFolder(tmp_path / "a").config().device == "auto"


@needs_cuda
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(torch.tensor([1.0, 3.0])), nn.MultiMarginLoss(), _own])
def test_losses_as_people_write_them_train_alike_on_both(loss: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(12, 4, dtype=torch.float64)
    given: dict[str, Any] = {"scheme": "fedavg", "rounds": 3, "seed": 1, "dtype": "float64", "progress": False}
    for local in ({}, {"local_steps": 2}):
        ends = [
            fedveil_package.train(net, [(x, (x[:, 0] > 0).long())] * 3, loss=loss, device=device, **given, **local)
            for device in ("cpu", "cuda")
        ]
        assert ends[0].summary["train_loss"] == pytest.approx(ends[1].summary["train_loss"], rel=1e-8)


def trained(folder: Path, **settings: object) -> float:
    config = RunConfig.from_mapping({"seed": 1, "dtype": "float64", "loss": "square", **settings})
    return float(session.run(config, folder, quiet=True)["train_loss"])


@needs_cuda
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_run_on_the_gpu_ends_in_the_model_of_a_run_on_the_cpu(tmp_path: Path, model: str) -> None:
    options = {"depth": 2, "width": 16} if model == "mlp" else {"width": 4, "norm": "batch"}
    shared = {"model": model, "model_options": options, "rounds": 10, "clients": 4, "lr": 0.05, "bn_eps": "secret"}
    losses = {
        (scheme, device): trained(tmp_path / f"{scheme}-{device}", scheme=scheme, device=device, **shared)
        for scheme in ("fedavg", "lossless")
        for device in ("cpu", "cuda")
    }
    assert max(losses.values()) - min(losses.values()) < 1e-6 * max(losses.values())
    accuracies = {
        predict_dataset(tmp_path / f"lossless-{d}", dataset=None, part="test").accuracy for d in ("cpu", "cuda")
    }
    assert len(accuracies) == 1


@needs_cuda
@pytest.mark.parametrize(
    "recipe",
    [
        {"scheme": "lossless", "optimiser": "adam", "lr": 0.01, "augment": "crop:2,flip,cutout:3"},
        {"scheme": "fedavg", "local_steps": 3, "client_lr": 0.05, "client_momentum": 0.9, "client_weight_decay": 1e-3},
        {"scheme": "fedavg", "local_steps": 3, "client_optimiser": "adam", "client_weight_decay": 1e-3, "lr": 0.01},
        {"scheme": "fedavg", "local_steps": 3, "augment": "crop:2,flip", "warm_up": 0.5, "lr": 0.05},
    ],
)
def test_a_recipe_trains_alike_on_both(recipe: dict[str, Any], tmp_path: Path) -> None:
    shared = {"model": "cnn", "model_options": {"width": 4, "norm": "group"}, "rounds": 4, "clients": 3}
    losses = [trained(tmp_path / device, device=device, batch_size=8, **shared, **recipe) for device in ("cpu", "cuda")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@needs_cuda
def test_pictures_are_drawn_alike_on_both_and_inside_a_captured_graph() -> None:
    how = PictureAugmentation(seed=3, size=(32, 32), crop=4, flip=True, cutout=8)
    x, numbers = torch.randn(16, 3, 32, 32), torch.arange(16)
    there, drawn = x.cuda(), how.draw(numbers.cuda(), client=1, step=0)
    assert torch.equal(drawn.cpu(), how.draw(numbers, client=1, step=0))
    how.apply(there, drawn)  # allocates what is allocated once
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = how.apply(there, drawn)
    drawn.copy_(how.draw(numbers.cuda(), client=1, step=7))
    graph.replay()
    assert torch.equal(made.cpu(), how(x, numbers, client=1, step=7))


@needs_cuda
def test_a_run_on_the_gpu_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    settings = {"device": "cuda", "rounds": 4, "checkpoint_every": 2, "clients": 4}
    trained(tmp_path / "a", **settings)
    again = session.resume(tmp_path / "a", changes={"rounds": 8}, quiet=True)
    straight = trained(tmp_path / "b", **{**settings, "rounds": 8})
    assert again["rounds"] == 8
    assert again["train_loss"] == pytest.approx(straight, rel=1e-9)
