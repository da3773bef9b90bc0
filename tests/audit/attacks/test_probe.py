"""A head fitted on veiled features is as good as one fitted on the true ones: scales do not hide features."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from audit.attacks.listening import Heard, listen, percent
from federation import job
from fedveil import data
from fedveil.audit.attacks.extraction import PENALTIES, fit_probe, read_head, received
from fedveil.errors import DataError
from fedveil.work.gradients import head_alpha


@cache
def run(scheme: str, rounds: int = 30) -> Heard:
    options = {"depth": 3, "width": 32}
    # MP-DP's noise would drown so small a federation's training: all but none of it here.
    given = {"epsilon": 1e6} if scheme == "mpdp" else {}
    return listen(job(scheme=scheme, rounds=rounds, lr=0.5, clients=2, dtype="float32", options=options, **given))


@cache
def own() -> tuple[Tensor, Tensor]:
    rest = data.load("digits", seed=7).train
    return rest.x[300:1300].float(), rest.y[300:1300]


def probed(heard: Heard, inputs: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """Scores of a head fitted to a client's own labelled inputs on the features it received."""
    architecture = heard.job.architecture
    module = received(architecture, heard.broadcasts[-1])
    probe = fit_probe(read_head(architecture, module, inputs).features, labels, outputs=10)
    return probe(read_head(architecture, module, queries).features)


def true_outputs(heard: Heard) -> Tensor:
    assert heard.job.test is not None
    with torch.no_grad():
        return heard.true_model()(heard.job.test.x.float())


@pytest.mark.parametrize("scheme", ["lossless", "mpdp"])
def test_a_probe_on_veiled_features_reaches_the_true_model(scheme: str) -> None:
    heard = run(scheme)
    assert heard.job.test is not None
    truth, found = true_outputs(heard), probed(heard, *own(), heard.job.test.x.float())
    assert percent(found, heard.job.test.y) >= percent(truth, heard.job.test.y) - 2
    # A probe on a thousand labels is better than so young a model, so they cannot agree more often than it is right.
    assert percent(found, truth.argmax(1)) >= percent(truth, heard.job.test.y) - 5


def test_scales_make_no_difference_to_a_probe() -> None:
    """The same model with and without a veil: scores agree to rounding."""
    veiled = listen(job(scheme="lossless", rounds=3, clients=2))
    plain = listen(job(scheme="fedavg", rounds=3, clients=2))
    inputs, labels = (one[:200] for one in own())
    scores = [probed(heard, inputs.double(), labels, inputs.double()) for heard in (veiled, plain)]
    assert float((scores[0] - scores[1]).abs().max()) < 1e-6


def test_it_is_the_trained_features_that_help() -> None:
    """Control: features that say nothing (shuffled against their labels) give chance."""
    heard = run("lossless")
    inputs, labels = own()
    readings = read_head(heard.job.architecture, received(heard.job.architecture, heard.broadcasts[-1]), inputs)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    probe = fit_probe(readings.features[:500], labels[order][:500], outputs=10)
    # 500 samples at a chance of 10 %: three in a million exceed 17 %.
    assert percent(probe(readings.features[500:]), labels[500:]) < 17


@pytest.mark.parametrize("scheme", ["lossless", "mpdp"])
def test_alpha_is_what_a_client_computes(scheme: str) -> None:
    heard = run(scheme, 2)
    module = received(heard.job.architecture, heard.broadcasts[-1])
    inputs = own()[0][:5]
    readings = read_head(heard.job.architecture, module, inputs)
    with torch.no_grad():
        output = module(inputs)
    assert torch.allclose(readings.outputs, output.double())
    assert torch.allclose(readings.alpha, head_alpha(heard.job.architecture, module).detach().double(), rtol=1e-5)


def test_constant_features_are_left_out() -> None:
    features = torch.stack([torch.ones(6), torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0])], 1)
    probe = fit_probe(features, torch.tensor([0, 1, 0, 1, 0, 1]), outputs=2)
    assert probe(features).argmax(1).tolist() == [0, 1, 0, 1, 0, 1]
    assert bool(probe(features + torch.tensor([5.0, 0.0])).isfinite().all())


@pytest.mark.parametrize("samples", [12, 300], ids=["more features", "more samples"])
def test_a_probe_is_the_ridge_of_least_leave_one_out_error(samples: int) -> None:
    """Against each sample left out in turn, for every penalty."""
    generator = torch.Generator().manual_seed(samples)
    features, labels = (
        torch.randn(samples, 40, generator=generator).double(),
        torch.randint(2, (samples,), generator=generator),
    )
    features[:, 0] += labels
    probe = fit_probe(features, labels, outputs=2)
    inputs = (features - features.mean(0)) / features.std(0, unbiased=False)
    centred = torch.nn.functional.one_hot(labels, 2).double() - probe.offset
    errors = {}
    for penalty in PENALTIES:
        hat = inputs @ torch.linalg.solve(inputs.T @ inputs + penalty * samples * torch.eye(40).double(), inputs.T)
        left = 1 - hat.diagonal() - 1 / samples
        errors[penalty] = float(((centred - hat @ centred) / left[:, None]).square().sum())
    assert probe.penalty == min(errors, key=lambda penalty: errors[penalty])
    gram = inputs.T @ inputs + probe.penalty * samples * torch.eye(40).double()
    assert torch.allclose(probe.weight, torch.linalg.solve(gram, inputs.T @ centred))


def test_many_samples_of_few_features_cost_what_their_features_cost() -> None:
    """A table of forty thousand rows: a matrix of rows by rows would be 12 GB."""
    features = torch.randn(40_000, 8, generator=torch.Generator().manual_seed(1))
    labels = (features[:, 0] > 0).long()
    assert percent(fit_probe(features, labels, outputs=2)(features), labels) > 95


def test_bad_requests_are_refused() -> None:
    features = torch.zeros(3, 2)
    with pytest.raises(DataError, match="as many labels"):
        fit_probe(features, torch.zeros(2, dtype=torch.int64), outputs=2)
