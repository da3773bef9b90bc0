"""What is audited: the batches behind uploads, held-out halves, and rounds that are enacted or replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from audit.small_runs import QUICK, folder, job_of, scene, subject_of
from fedveil.audit.record import server_view
from fedveil.audit.subject import Subject, enacted, plain_gradient, replayed, scene_of
from fedveil.audit.trials import model_trials, uploads_of
from fedveil.data.lazy import LazyTensor
from fedveil.errors import ConfigError


def apart(subject: Subject, *, client: int, round: int, truly: int) -> float:
    """How far the gradient on a round's batch is from the one that was sent in round `truly`."""
    view = server_view(subject.record, client, round=truly)
    assert view.recovered is not None
    x, y = subject.batch(client, round=round)
    module = view.model()
    loss = view.facts.objective().mean(module(x), y)
    grads = torch.cat([one.reshape(-1) for one in torch.autograd.grad(loss, list(module.parameters()))])
    return float((grads - view.recovered.gradient).norm() / grads.norm())


@pytest.mark.parametrize("scheme", ["fedavg", "lossless"])
@pytest.mark.parametrize(("size", "augment"), [(0, None), (5, None), (5, "crop:2,flip")])
def test_a_batch_is_the_one_whose_gradient_the_server_recovered(scheme: str, size: int, augment: str | None) -> None:
    subject = subject_of(scheme=scheme, batch_size=size, dtype="float64", augment=augment)
    for client in (0, 3):
        for round in (1, 4):
            assert len(subject.batch(client, round=round)[1]) == (size or len(subject.job.pool.clients[client]))
            assert apart(subject, client=client, round=round, truly=round) < 1e-9
    if size:
        assert apart(subject, client=0, round=1, truly=2) > 0.1


def test_held_out_data_is_halved_once_and_for_all() -> None:
    subject = subject_of()
    public, asked = subject.halves()
    again, _ = subject.halves()
    assert torch.equal(public.x, again.x)
    assert len(public) + len(asked) == len(subject.test)
    rows = {bytes(one.numpy().tobytes()) for one in public.x}
    assert not any(one.numpy().tobytes() in rows for one in asked.x)


def test_a_run_without_held_out_data_says_that_an_audit_needs_some() -> None:
    from dataclasses import replace

    whole = subject_of()
    with pytest.raises(ConfigError, match="held-out data"):
        _ = replace(whole, job=replace(whole.job, test=None)).test


def test_the_first_rounds_alone_are_those_of_the_whole_run() -> None:
    """The noise is not calibrated anew for fewer rounds: the same bytes pass."""
    changes = {"scheme": "nadp", "epsilon": 5.0}
    whole = subject_of(**changes)
    begun = enacted(job_of(**changes), folder() / "record", rounds=1)
    assert begun.record.rounds == ((1, 0),)
    ours, theirs = (one.record.find(kind="reply", phase="train", round=1) for one in (begun, whole))
    assert len(ours) == 4
    assert [begun.record.read(one) for one in ours] == [whole.record.read(one) for one in theirs]


def test_a_replay_shows_one_sample_a_client_and_a_model_that_stands_still() -> None:
    close = scene(scheme="lossless", dtype="float64").close
    assert [len(one) for one in close.job.pool.clients] == [1] * 4
    assert [one.round for one in uploads_of(close)] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    first, last = (server_view(close.record, 0, round=one).weights for one in (1, 4))
    original = server_view(subject_of(scheme="lossless", dtype="float64").record, 0, round=1).weights
    assert first is not None
    assert last is not None
    assert original is not None
    torch.testing.assert_close(first.parameters, original.parameters, rtol=0, atol=0)
    torch.testing.assert_close(first.parameters, last.parameters, rtol=0, atol=1e-10)


def test_a_replay_of_local_training_keeps_its_rate_so_that_noise_is_no_larger_than_in_the_run() -> None:
    close = scene(scheme="fedavg", local_steps=3, batch_size=2, lr=0.25).close
    view = server_view(close.record, 1, round=1)
    assert view.facts.lr == 0.25
    assert (view.facts.returns, view.facts.local_epochs) == ("update", 1)
    assert view.recovered is not None
    sent, step = view.recovered.gradient.double(), 0.25 * plain_gradient(close, view)
    assert float((sent - step).norm() / step.norm()) < 1e-4


@pytest.mark.parametrize("cohort", [2, 0.25])
def test_a_replay_of_small_cohorts_still_shows_uploads_of_every_round(cohort: float) -> None:
    subject = subject_of(clients=24, cohort=cohort)
    close = replayed(subject, folder() / "record", samples=1, clients=10, rounds=4)
    assert {one.round for one in uploads_of(close)} == {1, 2, 3, 4}
    assert all(len(one.cohort) == (2 if cohort == 2 else 6) for one in uploads_of(close))


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ({"batch_size": 8}, False),
        ({"batch_size": 9}, True),
        ({"scheme": "fedavg", "local_steps": 2, "batch_size": 2}, True),
        ({"scheme": "veil-secagg", "batch_size": 2}, False),
        ({"scheme": "veil-secagg", "batch_size": 2, "clients": 6, "simulate_dropout": 0.1}, True),
        ({"scheme": "paraaegis", "cipher": "pads"}, False),
    ],
)
def test_rounds_are_replayed_where_uploads_are_out_of_reach(changes: dict[str, object], again: bool) -> None:
    said: list[str] = []
    found = scene_of(subject_of(**changes), QUICK, folder(), say=said.append)
    assert found.replayed is again
    assert len(said) == again
    assert (found.close is found.run) is not again
    assert all(len(one) == 1 for one in found.close.job.pool.clients) is again


def test_a_record_in_which_no_chosen_client_answered_is_refused() -> None:
    """Clients introduce themselves before the first round: that alone is nothing to attack."""
    subject = subject_of(scheme="nadp", clients=12, cohort=2, record_clients="0", record_rounds="1")
    assert 0 not in {one.client for one in uploads_of(subject)}, "choose another seed"
    assert subject.record.clients == (0,)
    with pytest.raises(ConfigError, match="record more clients"):
        scene_of(subject, QUICK, folder())


def test_making_trials_leaves_the_model_of_a_run_as_it_was() -> None:
    """Batch norms of the true model, which clients hold, must answer in evaluation mode."""
    found = scene(scheme="paraaegis", cipher="pads")
    assert list(model_trials(found))
    assert not found.run.model.training


def test_held_out_pictures_that_stayed_bytes_are_all_there_for_an_audit() -> None:
    subject = subject_of()
    x = subject.test.x
    lazy = replace(subject.test, x=LazyTensor(lambda rows: x[rows], tuple(x.shape), dtype=x.dtype))
    again = Subject(subject.record, replace(subject.job, test=lazy), subject.model)
    assert type(again.test.x) is torch.Tensor
    assert torch.equal(again.test.x, x)
    assert again.box == subject.box
