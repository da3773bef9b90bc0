"""What a client can do with the model it was sent, on views of recorded runs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audit.attacks.digit_runs import Run, digits_run, percent
from audit.recorded import recorded
from audit.test_views import own_data
from fedveil.audit.attacks.extraction import calibrated, held_model
from fedveil.audit.attacks.extraction import calibration_attack as calibration
from fedveil.audit.attacks.extraction import probe_attack as probe
from fedveil.audit.attacks.extraction import received_attack as received
from fedveil.audit.record import client_view, server_view
from fedveil.audit.running import AttackProcess
from fedveil.audit.views import ClientView, to_bytes
from fedveil.downlink.architecture import assemble
from fedveil.errors import ConfigError, DataError, NotApplicableError

COUNTS = [1, 2, 5, 10, 20, 50, 100, 150]
"""Of a client with 150 samples."""


def quiet(_: float) -> None:
    pass


@cache
def run(scheme: str) -> Run:
    return digits_run(samples=300, options={"depth": 2, "width": 32}, scheme=scheme, rounds=150, lr=0.2, momentum=0.9)


def asked(scheme: str) -> ClientView:
    return run(scheme).view(queries=run(scheme).test.x)


@cache
def found(scheme: str) -> dict[str, float]:
    """Accuracy on the test set, by how the outputs were got."""
    view, truth, labels = asked(scheme), run(scheme).true_outputs(run(scheme).test.x), run(scheme).test.y
    outputs = {"true": truth, **received(view, {}, quiet), **calibration(view, {}, quiet), **probe(view, {}, quiet)}
    return {name: percent(one, labels) for name, one in outputs.items()}


def test_under_head_noise_the_received_model_is_far_worse_than_the_true_one() -> None:
    accuracy = found("lossless")
    assert accuracy["true"] > 80
    assert accuracy["received"] < accuracy["true"] - 25


@pytest.mark.parametrize("count", COUNTS[3:])
def test_ten_labelled_samples_bring_the_true_accuracy_back(count: int) -> None:
    assert found("lossless")[f"labelled.{count}"] >= found("lossless")["true"] - 3


@pytest.mark.parametrize("count", COUNTS[3:])
def test_ten_inputs_without_labels_do_nearly_as_well(count: int) -> None:
    assert found("lossless")[f"unlabelled.{count}"] >= found("lossless")["true"] - 5


def test_a_head_of_its_own_reaches_the_true_accuracy_from_all_samples() -> None:
    assert found("lossless")["probe.150"] >= found("lossless")["true"] - 4
    assert found("lossless")["probe.1"] < 30


def test_results_come_for_every_count_there_are_samples_for() -> None:
    names = [f"{way}.{count}" for way in ("labelled", "unlabelled") for count in COUNTS]
    assert list(calibration(asked("lossless"), {}, quiet)) == ["weights", *names]
    assert list(probe(asked("lossless"), {"counts": [3, 7]}, quiet)) == ["probe.3", "probe.7"]
    assert list(probe(asked("lossless"), {"counts": [7, 700]}, quiet)) == ["probe.7", "probe.150"]


def test_samples_of_one_class_are_enough_to_calibrate_and_not_to_fit_a_head() -> None:
    view, labels = asked("lossless"), run("lossless").test.y
    assert view.x is not None
    assert view.y is not None
    lone = replace(view, x=view.x[view.y == 3], y=view.y[view.y == 3])
    outputs = {**calibration(lone, {"counts": [10]}, quiet), **probe(lone, {"counts": [10]}, quiet)}
    assert percent(outputs["labelled.10"], labels) >= found("lossless")["true"] - 3
    assert percent(outputs["probe.10"], labels) < 30


def test_one_secret_number_falls_to_the_sum_of_the_outputs_of_one_input() -> None:
    one = digits_run(samples=300, options={"depth": 2, "width": 32}, scheme="pbpfl", rounds=60, lr=0.3, momentum=0.9)
    outputs = calibration(one.view(queries=one.test.x), {"counts": [1, 20]}, quiet)
    assert {"total.1", "total.20"} <= set(outputs)
    truth = percent(one.true_outputs(one.test.x), one.test.y)
    seen = percent(received(one.view(queries=one.test.x), {}, quiet)["received"], one.test.y)
    assert seen < truth - 25
    assert min(percent(outputs[f"total.{count}"], one.test.y) for count in (1, 20)) >= truth - 4


def test_granted_samples_follow_the_clients_own() -> None:
    """With the labels of granted samples replaced by wrong ones, nothing changes up to the client's own."""
    one = run("lossless")
    more = {"labelled__x": one.others.x[:100], "labelled__y": one.others.y[:100]}
    view = one.view(queries=one.test.x, **more)
    wrong = one.view(queries=one.test.x, **{**more, "labelled__y": (more["labelled__y"] + 1) % 10})
    outputs, misled = (calibration(each, {}, quiet) for each in (view, wrong))
    assert "labelled.250" in outputs
    assert torch.equal(outputs["labelled.100"], misled["labelled.100"])
    assert not torch.allclose(outputs["labelled.200"], misled["labelled.200"])
    unowned = replace(view, x=None, y=None)
    assert "labelled.100" in calibration(unowned, {}, quiet)
    assert "probe.100" in probe(unowned, {}, quiet)


def test_without_labels_only_what_needs_none_is_tried() -> None:
    view = replace(asked("lossless"), y=None)
    assert {name.partition(".")[0] for name in calibration(view, {}, quiet)} == {"weights", "unlabelled"}
    with pytest.raises(NotApplicableError, match="no labels"):
        probe(view, {}, quiet)
    one = run("lossless")
    with torch.no_grad():
        assert percent(calibrated(view)(one.test.x), one.test.y) >= found("lossless")["true"] - 5


def test_without_protection_the_received_model_is_the_true_one() -> None:
    one, view = run("fedavg"), asked("fedavg")
    assert torch.allclose(received(view, {}, quiet)["received"], one.true_outputs(one.test.x), atol=1e-5)
    for attempt in (lambda: calibration(view, {}, quiet), lambda: calibrated(view)):
        with pytest.raises(NotApplicableError, match="no head noise"):
            attempt()
    assert percent(probe(view, {}, quiet)["probe.150"], one.test.y) >= found("lossless")["true"] - 4


def test_a_calibrated_model_gives_what_the_labelled_calibration_gives_and_keeps_its_gradient() -> None:
    one, view = run("lossless"), asked("lossless")
    model = calibrated(view)
    x = one.test.x[:20].clone().requires_grad_()
    scores = model(x)
    assert torch.allclose(scores.double(), calibration(view, {}, quiet)["labelled.150"][:20], atol=1e-4)
    (gradient,) = torch.autograd.grad(scores.sum(), x)
    assert gradient.abs().sum() > 0
    _, held, _ = held_model(view)
    assert not torch.allclose(held(x), scores, atol=0.1)


@cache
def normed() -> Run:
    options = {"depth": 2, "width": 32, "norm": "batch"}
    return digits_run(samples=300, options=options, scheme="lossless", rounds=40, lr=0.3)


def test_batch_norms_without_running_statistics_get_those_of_the_inputs_at_hand() -> None:
    one = normed()
    view = one.view(queries=one.test.x)
    truth = percent(one.true_outputs(one.test.x), one.test.y)
    assert not view.broadcasts[-1].broadcast.statistics.numel()
    assert percent(received(view, {}, quiet)["received"], one.test.y) < truth - 20
    assert percent(calibration(view, {}, quiet)["labelled.150"], one.test.y) >= truth - 5


def test_an_output_does_not_depend_on_the_batch_it_is_asked_in() -> None:
    one = normed()
    model = calibrated(one.view(queries=one.test.x))
    with torch.no_grad():
        alone = torch.cat([model(x[None]) for x in one.test.x[:5]])
        assert torch.allclose(alone, model(one.test.x)[:5], atol=1e-5)


def test_clients_that_hold_the_model_attack_what_they_hold(tmp_path: Path) -> None:
    job, outcome, record = recorded(tmp_path, scheme="paraaegis", cipher="pads", share=0.2)
    assert job.test is not None
    view = replace(client_view(record, 1, data=own_data(job, 1)), known={"queries": job.test.x})
    with pytest.raises(NotApplicableError, match="client 1 was sent none"):
        received(view, {}, quiet)
    holding = replace(view, known={**view.known, **outcome.state.weights.named("weights.")})
    with torch.no_grad():
        truth: Tensor = assemble(job.architecture, outcome.state.weights).eval()(job.test.x.double())
    assert torch.allclose(received(holding, {}, quiet)["received"], truth, atol=1e-12)
    assert "probe.100" in probe(holding, {}, quiet)
    with pytest.raises(NotApplicableError, match="no head noise"):
        calibration(holding, {}, quiet)


@pytest.mark.slow
def test_a_process_of_its_own_finds_the_same() -> None:
    view = asked("lossless")
    with AttackProcess("calibration") as process:
        outputs = process.run(to_bytes(view), settings={"counts": [10]})
        with pytest.raises(NotApplicableError, match="no head noise"):
            process.run(to_bytes(asked("fedavg")))
    here = calibration(view, {"counts": [10]}, quiet)
    assert list(outputs) == list(here)
    assert all(torch.allclose(outputs[name], here[name], atol=1e-6) for name in here)


def test_what_cannot_be_tried_is_refused() -> None:
    view = asked("lossless")
    with pytest.raises(ConfigError, match="no queries"):
        received(replace(view, known={}), {}, quiet)
    with pytest.raises(NotApplicableError, match="no samples"):
        calibration(replace(view, x=None, y=None), {}, quiet)
    with pytest.raises(NotApplicableError, match="what a client sees"):
        received(server_view(run("lossless").record, 0, round=150), {}, quiet)
    with pytest.raises(ConfigError, match="whole numbers"):
        probe(view, {"counts": [0]}, quiet)
    assert view.y is not None
    with pytest.raises(DataError, match="150 samples and 149 labels"):
        probe(replace(view, y=view.y[:-1]), {}, quiet)
