"""Figures of samples that clients hold back: those of the model itself, read by the server in sum alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedveil
from federation import job
from fedveil.config import RunConfig
from fedveil.data import Dataset
from fedveil.errors import ConfigError, StopTraining
from fedveil.protocol.messages import Upload
from fedveil.runs import session
from fedveil.runs.evaluation import ClientFigures, score_outputs
from fedveil.runs.job import Job
from fedveil.runs.judgement import judge
from fedveil.runs.loop import Outcome, evaluated, fresh_state, summarise, train_job
from fedveil.uplink.unmasking import MaskedUpload
from fedveil.work.losses import BinaryCrossEntropy, CrossEntropy, SquareLoss


def held_back(of: Job) -> Dataset:
    """What the clients of a run hold back, all together."""
    parts = [data.held_back for data in of.pool.clients if data.held_back is not None]
    x, y = (torch.cat(part) for part in zip(*(each.take(torch.arange(len(each))) for each in parts), strict=True))
    return Dataset("held back", "classification", x, y, outputs=10)


def figures(row: dict[str, Any]) -> dict[str, float]:
    return {name.removeprefix("client_test_"): value for name, value in row.items() if name.startswith("client_test_")}


CASES: dict[str, dict[str, Any]] = {
    "head noise": {},
    "orders and signs": {"head_noise": False},
    "local training": {"head_noise": False, "loss": "cross-entropy", "local_steps": 2},
    "groups": {"head_noise": False, "clients": 20, "robust_groups": 4},
    "some of the clients": {"head_noise": False, "clients": 6, "cohort": 6, "unmask": "on-dropout"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_server_learns_how_good_its_model_is_on_what_clients_hold_back(case: str) -> None:
    """Of the model that a round began with, and after the last round of the model that the run ends with."""
    run = job(scheme="veil-secagg", rounds=2, client_test_fraction=0.25, **CASES[case])
    samples, state, expected = held_back(run), fresh_state(run), []

    def judged(*_: object) -> None:
        outputs, scores = evaluated(run, state, on=samples)
        known = judge(outputs, samples, loss=run.loss.name).figures
        counted = {name: known[name].value for name in ("balanced_accuracy", "f1", "kappa", "ece")}
        expected.append({"loss": scores.loss, "accuracy": scores.accuracy, **counted, "samples": len(samples.y)})

    judged()
    outcome = train_job(run, state=state, on_round=judged)
    told = [figures(row) for row in (*outcome.rows, outcome.held_back)]
    assert len(told) == len(expected) == 3
    # Under head noise a client sees other outputs than the model's: the loss can be had, and nothing that is counted.
    counted = {"loss", "samples"} if case == "head noise" else expected[0].keys()
    for said, known in zip(told, expected, strict=True):
        assert said == pytest.approx({name: known[name] for name in counted}, rel=1e-8)
    assert summarise(run, outcome)["client_test_loss"] == told[-1]["loss"]
    assert {data.held_back is None for data in run.pool.clients} == {False}


def test_the_model_is_that_of_clients_which_do_not_report() -> None:
    """Reports go with the uploads, and change nothing in them."""
    run = job(scheme="veil-secagg", rounds=2, client_test_fraction=0.25, head_noise=False)
    plain = job(scheme="veil-secagg", rounds=2, head_noise=False)
    plain = replace(plain, pool=run.pool)
    states = [fresh_state(each) for each in (run, plain)]
    for each, state in zip((run, plain), states, strict=True):
        train_job(each, state=state)
    assert torch.equal(states[0].weights.parameters, states[1].weights.parameters)


def test_figures_are_declared_and_masked() -> None:
    run = job(scheme="veil-secagg", rounds=1, client_test_fraction=0.25)
    released = {release.field: release for release in run.scheme.releases(run.architecture)}
    told = released["upload.figures"]
    assert (told.about, told.protection, told.sender) == ("data", "masked", "client")
    assert "upload.figures" not in {each.field for each in job(scheme="veil-secagg").scheme.releases(run.architecture)}
    heard: list[Any] = []
    train_job(run, state=fresh_state(run), listen=heard.append)
    uploads = [each.message for each in heard if isinstance(each.message, (Upload, MaskedUpload))]
    assert len(uploads) == 2 * 5, "a round, and once more after it"
    assert {upload.payload.dtype for upload in uploads if isinstance(upload, MaskedUpload)} == {torch.int64}
    # Whole words modulo 2^64 that look random: were a count bare, its word would be a small multiple of the step.
    place = [name for name, _ in run.scheme.layout(run.architecture).sections].index("figures")
    start = sum(int(torch.tensor(shape).prod()) for _, shape in run.scheme.layout(run.architecture).sections[:place])
    counts = [int(upload.payload[start]) for upload in uploads]
    assert len(set(counts)) == len(counts), "15 samples each: chance 2^-58 that masked words coincide"


@pytest.mark.parametrize("scheme", ["fedavg", "lossless", "nadp", "cdp", "veil-dp", "ckks-fedavg"])
def test_schemes_whose_server_could_read_one_clients_figures_are_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match="client-test-fraction does not go with"):
        job(scheme=scheme, client_test_fraction=0.2)


def test_running_statistics_that_clients_do_not_have_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    clients = [(torch.randn(9, 4), torch.arange(9) % 2) for _ in range(3)]
    with pytest.raises(ConfigError, match="running statistics of BatchNorm"):
        fedveil.train(net, clients, scheme="veil-secagg", rounds=1, client_test_fraction=0.2)


def test_a_record_for_audits_is_refused() -> None:
    with pytest.raises(ConfigError, match="record"):
        job(scheme="veil-secagg", client_test_fraction=0.2, record=True)


def test_a_run_that_is_stopped_early_is_judged_as_it_ends() -> None:
    run = job(scheme="veil-secagg", rounds=5, client_test_fraction=0.25, head_noise=False)
    state = fresh_state(run)

    def enough(row: dict[str, Any], _: object) -> None:
        if row["round"] == 2:
            raise StopTraining("enough")

    outcome: Outcome = train_job(run, state=state, on_round=enough)
    assert state.round == 2
    _, scores = evaluated(run, state, on=held_back(run))
    assert figures(outcome.held_back)["loss"] == pytest.approx(scores.loss, rel=1e-8)


def test_too_few_at_the_end_leave_a_run_without_figures_and_say_so() -> None:
    """With this seed one of five clients is away in the round, and two of them after it."""
    settings = {"scheme": "veil-secagg", "rounds": 1, "client_test_fraction": 0.25, "head_noise": False}
    run = job(**settings, seed=2, simulate_dropout=0.25)
    said: list[str] = []
    outcome = train_job(run, state=fresh_state(run), say=said.append)
    assert figures(outcome.rows[0])["samples"] == 4 * 15
    assert outcome.held_back == {}
    assert any("clients could not judge the last model" in text for text in said)
    assert "client_test_loss" not in summarise(run, outcome)


def test_a_run_folder_has_the_figures_and_a_resumed_run_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "scheme": "veil-secagg",
        "dataset": "digits",
        "clients": 4,
        "seed": 1,
        "lr": 0.1,
        "head_noise": False,
        "model_options": {"depth": 2, "width": 8},
        "client_test_fraction": 0.2,
        "checkpoint_every": 1,
    }
    whole = session.run(RunConfig(**settings, rounds=3), tmp_path / "whole", quiet=True)
    session.run(RunConfig(**settings, rounds=2), tmp_path / "parts", quiet=True)
    parts = session.resume(tmp_path / "parts", changes={"rounds": 3}, quiet=True)
    assert figures(parts) == figures(whole)
    assert figures(whole)["samples"] > 0.15 * 0.8 * 1797
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all({"loss", "accuracy", "samples"} <= figures(row).keys() for row in rows)


def test_python_takes_the_setting_too() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    clients = [(x := torch.randn(20, 4), x.sum(1, keepdim=True)) for _ in range(3)]
    told = fedveil.train(
        net, clients, scheme="veil-secagg", rounds=2, seed=1, head_noise=False, client_test_fraction=0.2
    ).summary
    assert told["client_test_samples"] == 12
    assert told["client_test_mse"] == pytest.approx(2 * told["client_test_loss"], rel=1e-5)


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
def test_sums_of_several_clients_make_the_figures_of_all(task: str) -> None:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    targets = {
        "classification": torch.randint(3, (60,), generator=generator),
        "multilabel": (torch.rand(60, 3, generator=generator) < 0.4).double(),
        "regression": torch.randn(60, 3, generator=generator, dtype=torch.float64),
    }[task]
    loss = {"classification": CrossEntropy(), "multilabel": BinaryCrossEntropy(), "regression": SquareLoss()}[task]
    counts = ClientFigures(task, 3, loss.name)
    sums = sum((counts(outputs[part], targets[part]) for part in torch.split(torch.arange(60), 17)), torch.zeros(()))
    assert sums.shape == (counts.width,)
    everything = Dataset("all", task, outputs, targets, outputs=3)  # type: ignore[arg-type]
    judged = judge(outputs, everything, loss=loss.name).figures
    named = counts.named(sums, 60)
    assert {"accuracy", "f1"} <= named.keys() if task != "regression" else set(named) == {"mse", "rmse", "mae"}
    assert named == pytest.approx({name: judged[name].value for name in named}, rel=1e-9)
    if task == "classification":
        assert named["accuracy"] == score_outputs(outputs, everything, loss).accuracy
