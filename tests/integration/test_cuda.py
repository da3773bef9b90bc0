"""On a GPU the same run works; without one the message says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.runs import session
from fedveil.runs.job import device_of
from fedveil.runs.predicting import predict_dataset
from shell import fedveil

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


def trained(folder: Path, **settings: object) -> float:
    config = RunConfig.from_mapping({"seed": 1, "dtype": "float64", "loss": "square", **settings})
    return float(session.run(config, folder, quiet=True)["train_loss"])


@needs_cuda
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_run_on_the_gpu_ends_in_the_model_of_a_run_on_the_cpu(tmp_path: Path, model: str) -> None:
    options = {"depth": 2, "width": 16} if model == "mlp" else {"width": 4, "norm": "batch"}
    shared = {"model": model, "model_options": options, "rounds": 10, "clients": 4, "lr": 0.05}
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
def test_a_run_on_the_gpu_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    settings = {"device": "cuda", "rounds": 4, "checkpoint_every": 2, "clients": 4}
    trained(tmp_path / "a", **settings)
    again = session.resume(tmp_path / "a", changes={"rounds": 8}, quiet=True)
    straight = trained(tmp_path / "b", **{**settings, "rounds": 8})
    assert again["rounds"] == 8
    assert again["train_loss"] == pytest.approx(straight, rel=1e-9)
