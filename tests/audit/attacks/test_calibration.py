"""Head noise falls to a client with a few inputs, labelled or not, and even to one with none."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from audit.attacks.listening import Heard, listen, percent
from federation import job
from fedveil import data
from fedveil.audit.attacks.extraction import (
    Calibrated,
    from_balance,
    from_expected,
    from_total,
    head_calibration,
    read_head,
    received,
    targets_of,
    uncovered,
    without_noise,
)
from fedveil.errors import ConfigError, DataError

SCHEMES = ("pbpfl", "lossless")


@cache
def run(scheme: str) -> Heard:
    return listen(job(scheme=scheme, rounds=60, lr=0.5, clients=2, dtype="float32", options={"depth": 3, "width": 32}))


@cache
def own() -> tuple[Tensor, Tensor]:
    """A thousand samples that were not trained on."""
    rest = data.load("digits", seed=7).train
    return rest.x[300:1300].float(), rest.y[300:1300]


def test_part(heard: Heard) -> tuple[Tensor, Tensor]:
    assert heard.job.test is not None
    return heard.job.test.x.float(), heard.job.test.y


test_part.__test__ = False  # type: ignore[attr-defined]


@cache
def calibrated(scheme: str) -> Calibrated:
    heard = run(scheme)
    inputs, labels = own()
    queries, _ = test_part(heard)
    return head_calibration(heard.job.architecture, heard.broadcasts[-1], inputs=inputs, labels=labels, queries=queries)


def true_accuracy(scheme: str) -> float:
    heard = run(scheme)
    queries, labels = test_part(heard)
    with torch.no_grad():
        return percent(heard.true_model()(queries), labels)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_received_model_predicts_badly_as_it_is(scheme: str) -> None:
    _, labels = test_part(run(scheme))
    assert percent(calibrated(scheme).received, labels) < true_accuracy(scheme) - 25


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("count", [20, 100, 1000])
def test_a_few_labelled_samples_bring_the_true_models_accuracy_back(scheme: str, count: int) -> None:
    _, labels = test_part(run(scheme))
    assert percent(calibrated(scheme).labelled[count], labels) >= true_accuracy(scheme) - 2


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("count", [10, 20, 1000])
def test_the_same_inputs_without_labels_do_as_well(scheme: str, count: int) -> None:
    _, labels = test_part(run(scheme))
    assert percent(calibrated(scheme).unlabelled[count], labels) >= true_accuracy(scheme) - 2


def test_one_unlabelled_input_gives_a_single_secret_away() -> None:
    heard = run("pbpfl")
    queries, labels = test_part(heard)
    sent = heard.broadcasts[-1]
    assert sent.head is not None
    module = received(heard.job.architecture, sent)
    one = read_head(heard.job.architecture, module, own()[0][:1])
    found = uncovered(read_head(heard.job.architecture, module, queries), from_total(one, sent.head))
    assert torch.allclose(found, calibrated("pbpfl").total[1], atol=1e-4)
    assert not calibrated("lossless").total
    assert percent(found, labels) >= true_accuracy("pbpfl") - 5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_weights_alone_close_half_of_the_gap(scheme: str) -> None:
    _, labels = test_part(run(scheme))
    found = calibrated(scheme)
    seen, without_data = percent(found.received, labels), percent(found.weights, labels)
    assert without_data - seen >= 0.5 * (true_accuracy(scheme) - seen)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_expected_outputs_that_are_the_true_ones_give_the_noise_exactly(scheme: str) -> None:
    heard = listen(job(scheme=scheme, rounds=3, clients=2, lr=1e-12))
    inputs = own()[0][:20].double()
    sent = heard.broadcasts[-1]
    assert sent.head is not None
    readings = read_head(heard.job.architecture, received(heard.job.architecture, sent), inputs)
    with torch.no_grad():
        truth = heard.true_model()(inputs)
    found = uncovered(readings, from_expected(readings, truth, sent.head))
    assert float((found - truth).abs().max()) < 1e-9


@pytest.mark.parametrize("scheme", SCHEMES)
def test_noise_comes_off_the_weights_as_off_the_outputs(scheme: str) -> None:
    heard = run(scheme)
    sent, queries = heard.broadcasts[-1], test_part(heard)[0]
    module = received(heard.job.architecture, sent)
    noise = torch.linspace(-1.0, 2.0, 10, dtype=torch.float64)
    readings = read_head(heard.job.architecture, module, queries)
    with torch.no_grad():
        outputs = without_noise(heard.job.architecture, module, noise)(queries)
        assert torch.allclose(outputs.double(), uncovered(readings, noise), atol=1e-3)
        assert torch.allclose(module(queries).double(), readings.outputs)


def test_calibration_needs_the_public_vector_to_be_the_right_one() -> None:
    """Control: with another a, one secret does not fit all outputs, and accuracy does not come back."""
    heard = run("pbpfl")
    queries, labels = test_part(heard)
    inputs, known = own()
    sent = heard.broadcasts[-1]
    assert sent.head is not None
    wrong = replace(sent, head=replace(sent.head, vector=sent.head.vector.roll(1)))
    found = head_calibration(heard.job.architecture, wrong, inputs=inputs, labels=known, queries=queries, counts=(100,))
    assert percent(found.labelled[100], labels) < true_accuracy("pbpfl") - 10


def test_labels_that_belong_to_other_samples_do_not_mislead_more_than_no_labels() -> None:
    """Shuffled labels still say how often each class occurs, which is all that calibration needs."""
    heard = run("lossless")
    queries, labels = test_part(heard)
    inputs, known = own()
    shuffled = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(3))]
    found = head_calibration(
        heard.job.architecture, heard.broadcasts[-1], inputs=inputs, labels=shuffled, queries=queries, counts=(1000,)
    )
    assert percent(found.labelled[1000], labels) >= true_accuracy("lossless") - 3


def test_targets_carry_the_losss_scale_and_regression_targets_stay() -> None:
    assert targets_of(torch.tensor([1]), outputs=2, target_scale=5.0).tolist() == [[0.0, 5.0]]
    assert targets_of(torch.tensor([[0.25]]), outputs=1).tolist() == [[0.25]]


def test_what_cannot_be_calibrated_is_refused() -> None:
    heard = run("lossless")
    sent, (inputs, labels) = heard.broadcasts[-1], own()
    assert sent.head is not None
    with pytest.raises(ConfigError, match="no head noise"):
        head_calibration(
            heard.job.architecture, replace(sent, head=None), inputs=inputs, labels=labels, queries=inputs, counts=(1,)
        )
    readings = read_head(heard.job.architecture, received(heard.job.architecture, sent), inputs[:3])
    with pytest.raises(ConfigError, match="has 2"):
        from_total(readings, sent.head)
    with pytest.raises(DataError, match="at least one"):
        from_balance(readings.rows(0), sent.head)


def test_batch_norm_does_not_stand_in_the_way() -> None:
    """A client that was sent no running statistics uses those of its own inputs."""
    options = {"depth": 2, "width": 32, "norm": "batch"}
    heard = listen(job(scheme="lossless", rounds=20, lr=0.3, clients=2, dtype="float32", options=options))
    queries, labels = test_part(heard)
    inputs, known = own()
    found = head_calibration(
        heard.job.architecture, heard.broadcasts[-1], inputs=inputs, labels=known, queries=queries, counts=(100,)
    )
    with torch.no_grad():
        truth = percent(heard.true_model()(queries), labels)
    assert percent(found.received, labels) < truth - 25
    assert percent(found.labelled[100], labels) >= truth - 5
