"""How much of the parameters clients learn, on broadcasts of recorded runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from audit.attacks.digit_runs import Run, digits_run
from fedveil.audit.attacks.extraction import calibrated
from fedveil.audit.metrics import parameter_knowledge
from fedveil.downlink.architecture import draw
from fedveil.errors import DataError
from fedveil.tensors import flatten

MLP = {"depth": 3, "width": 16}


def run(scheme: str, **more: Any) -> Run:
    given = {"options": MLP, "rounds": 3, "lr": 0.1, "dtype": "float64", **more}
    return digits_run(samples=100, scheme=scheme, **given)


def sent(one: Run) -> Tensor:
    return one.view().broadcasts[-1].broadcast.parameters


def test_without_protection_every_number_is_received_as_it_is() -> None:
    one = run("fedavg")
    found = parameter_knowledge(sent(one), one.weights.parameters, one.job.architecture)
    assert (found.exact, found.signs, found.determined) == (1.0, 1.0, 1.0)
    assert max(found.residuals.values()) == 0.0


@pytest.mark.parametrize(
    ("scheme", "more"),
    [
        ("lossless", {}),
        ("mpdp", {}),
        ("lossless", {"model": "cnn", "options": {}}),
        ("lossless", {"options": {**MLP, "norm": "batch"}}),
    ],
)
def test_a_veil_hides_every_number_and_leaves_hidden_layers_known_up_to_scales(
    scheme: str, more: dict[str, Any]
) -> None:
    one = run(scheme, **more)
    found = parameter_knowledge(sent(one), one.weights.parameters, one.job.architecture)
    hidden = [value for name, value in found.residuals.items() if name != "head.weight"]
    assert found.exact < 0.01
    assert found.signs > 0.9
    assert len(hidden) >= 2
    assert max(hidden) < 1e-9
    assert found.residuals["head.weight"] > 0.1
    head = one.job.architecture.parameters.split(sent(one))["head.weight"].numel() / one.job.architecture.size
    assert found.determined == pytest.approx(1 - head, abs=0.05)


def test_without_head_noise_scales_are_all_that_is_hidden() -> None:
    one = run("lossless", head_noise=False, family="scale")
    found = parameter_knowledge(sent(one), one.weights.parameters, one.job.architecture)
    assert found.exact < 0.05
    assert (found.signs, found.determined) == (1.0, 1.0)
    assert max(found.residuals.values()) < 1e-9


def test_calibration_brings_most_of_the_head_back() -> None:
    one = run("lossless", rounds=40, lr=0.3)
    found = flatten([each.detach() for each in calibrated(one.view()).parameters()])
    before, after = (
        parameter_knowledge(each, one.weights.parameters, one.job.architecture).residuals["head.weight"]
        for each in (sent(one), found)
    )
    assert after < 0.5 * before


def test_another_model_says_nothing() -> None:
    """Control: signs agree by chance (3000 of them: 0.45 to 0.55 but for one seed in a million), and no scale fits."""
    one = run("fedavg", options={"depth": 3, "width": 32})
    other = torch.randn(one.job.architecture.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = parameter_knowledge(other, one.weights.parameters, one.job.architecture)
    assert found.exact == 0.0
    assert found.signs == pytest.approx(0.5, abs=0.05)
    assert found.determined < 0.01
    assert min(found.residuals.values()) > 0.7


def test_layers_that_count_their_outputs_second_are_read_that_way() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 5, 2), nn.Flatten(), nn.Linear(20, 2)).double()
    architecture, weights = draw(model, torch.zeros(2, 3, 1, 1, dtype=torch.float64), traced=False)
    scales = torch.rand(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    veiled = weights.parameters.clone()
    parts = architecture.parameters.split(veiled)
    parts["0.weight"] *= scales[:, None, None]
    parts["0.bias"] *= scales
    found = parameter_knowledge(veiled, weights.parameters, architecture)
    assert max(found.residuals.values()) < 1e-12
    assert found.determined == 1.0


def test_vectors_of_another_model_are_refused() -> None:
    one = run("fedavg")
    with pytest.raises(DataError, match="do not fit a model"):
        parameter_knowledge(sent(one)[1:], one.weights.parameters[1:], one.job.architecture)
