"""Without protection: the same gradients where nothing hides them, others where something does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from audit.small_runs import scene, subject_of
from fedveil.audit.attack import attacks
from fedveil.audit.record import client_view, server_history, server_view
from fedveil.audit.subject import (
    alike,
    less_colluders,
    plain_gradient,
    unprotected_history,
    unprotected_model,
    unprotected_upload,
)
from fedveil.audit.trials import model_trials
from fedveil.audit.views import ClientView, ServerView, to_bytes
from fedveil.downlink import assemble


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("scheme", ["fedavg", "lossless", pytest.param("pbpfl", marks=pytest.mark.slow), "cdp"])
def test_a_server_that_recovers_gradients_exactly_has_what_plain_averaging_sends(scheme: str) -> None:
    # Differential privacy clips: then only what is below the bound is the same.
    loose = {"clip": 1e6} if scheme == "cdp" else {}
    subject = subject_of(scheme=scheme, batch_size=5, dtype="float64", **loose)
    view = server_view(subject.record, 1, round=2)
    twin = unprotected_upload(subject, view)
    assert alike(view, twin)
    other = unprotected_upload(subject, server_view(subject.record, 1, round=3))
    assert not alike(view, other)


@pytest.mark.parametrize(
    "scheme", ["nadp", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ldp", "mpdp", "veil-dp"))]
)
def test_noise_makes_the_difference_between_a_view_and_its_twin(scheme: str) -> None:
    subject = scene(scheme=scheme).close
    view = server_view(subject.record, 1, round=2)
    twin = unprotected_upload(subject, view)
    assert not alike(view, twin)
    assert twin.recovered is not None
    assert twin.recovered.gradient.shape == plain_gradient(subject, view).shape


@pytest.mark.parametrize("changes", [{"scheme": "dp-fedavg"}, {"scheme": "nadp", "local_steps": 2, "batch_size": 4}])
def test_noised_updates_have_a_twin_without_noise(changes: dict[str, object]) -> None:
    subject = scene(**changes).close
    view = server_view(subject.record, 1, round=1)
    twin = unprotected_upload(subject, view)
    assert not alike(view, twin)
    assert twin.recovered is not None
    assert distance(twin.recovered.gradient, view.facts.lr * plain_gradient(subject, view)) < 1e-6


def test_what_clients_own_adam_hides_is_hidden_without_a_scheme_too() -> None:
    """One step of it is all but the signs of a gradient, and no merit of whoever sent it bare."""
    changes = {"local_steps": 2, "batch_size": 4, "client_optimiser": "adam", "lr": 0.01, "dtype": "float64"}
    subject = scene(scheme="fedavg", **changes).close
    view = server_view(subject.record, 1, round=1)
    twin = unprotected_upload(subject, view)
    assert alike(view, twin)
    assert twin.recovered is not None
    assert distance(twin.recovered.gradient, 0.01 * plain_gradient(subject, view)) > 0.5


def test_a_twin_holds_no_message_no_colluder_and_no_sum() -> None:
    subject = subject_of(scheme="nadp")
    view = server_view(subject.record, 1, round=2, colluders=[0, 2])
    assert view.uncovered is not None
    assert view.upload is not None
    twin = unprotected_upload(subject, view)
    assert (twin.messages, twin.colluders, twin.uncovered, twin.summed) == ((), (), None, None)
    sent = view.upload.numpy().tobytes()
    assert sent in to_bytes(view)
    assert sent not in to_bytes(twin)


def test_a_history_has_a_twin_of_every_round() -> None:
    subject = subject_of(scheme="nadp")
    history = server_history(subject.record, 1)
    twins = unprotected_history(subject, history)
    assert [one.round for one in twins.rounds] == [1, 2, 3, 4]
    for one, twin in zip(history.rounds, twins.rounds, strict=True):
        assert twin.recovered is not None
        assert distance(twin.recovered.gradient, plain_gradient(subject, one)) == 0.0


def test_the_sum_less_all_others_is_the_victims_own_gradient() -> None:
    subject = scene(scheme="veil-secagg", clients=5, record_clients="0-4").close
    cohort = (0, 1, 2, 3, 4)

    def left(*colluders: int) -> tuple[ServerView, int]:
        return less_colluders(subject, server_view(subject.record, 1, round=1, colluders=colluders), cohort=cohort)

    own = plain_gradient(subject, server_view(subject.record, 1, round=1))
    view, samples = left(0, 2, 3, 4)
    assert view.summed is not None
    assert samples == 1
    assert distance(view.summed.gradient, own) < 1e-4  # words in fixed point
    view, samples = left(0, 2, 3)
    assert view.summed is not None
    assert samples == 2
    assert distance(view.summed.gradient, own) > 0.1


def test_the_sum_less_others_weighs_clients_by_their_samples() -> None:
    subject = subject_of(scheme="veil-secagg", partition="size", ratio=3.0, dtype="float64")
    colluders = (0, 2, 3)
    view = server_view(subject.record, 1, round=1, colluders=colluders)
    found, samples = less_colluders(subject, view, cohort=(0, 1, 2, 3))
    assert found.summed is not None
    assert samples == len(subject.job.pool.clients[1])
    assert distance(found.summed.gradient, plain_gradient(subject, view)) < 1e-3


@pytest.mark.parametrize(
    "scheme", ["lossless", *(pytest.param(one, marks=pytest.mark.slow) for one in ("pbpfl", "mpdp")), "veil-secagg"]
)
def test_the_twin_of_a_client_was_sent_the_servers_model_as_it_is(scheme: str) -> None:
    subject = subject_of(scheme=scheme)
    view = client_view(subject.record, 1, data=subject.own(1))
    twin = unprotected_model(subject, view)
    weights = server_view(subject.record, 1, round=4).weights
    assert weights is not None
    (sent,) = twin.broadcasts
    assert sent.round == 4
    assert sent.broadcast.head is None
    assert torch.equal(sent.broadcast.parameters, weights.parameters)
    assert not torch.equal(view.broadcasts[-1].broadcast.parameters, weights.parameters)
    assert (twin.x is view.x, twin.client) == (True, 1)
    x = subject.test.x[:8]
    true = assemble(view.facts.architecture(), weights).eval()(x)
    theirs = view.facts.module()
    torch.nn.utils.vector_to_parameters(sent.broadcast.parameters, theirs.parameters())
    torch.testing.assert_close(theirs.eval()(x), true)


@pytest.mark.parametrize(
    "changes", [{"scheme": "nadp"}, pytest.param({"scheme": "mpdp"}, marks=pytest.mark.slow), {"scheme": "dp-fedavg"}]
)
def test_who_asks_for_members_of_a_noisy_run_is_compared_with_a_training_without_noise(
    changes: dict[str, object],
) -> None:
    found = scene(**changes)
    plain = found.noiseless()
    assert plain is not None
    more = {"local_epochs": 1} if changes["scheme"] == "dp-fedavg" else {}
    like = subject_of(scheme="fedavg", loss=found.run.job.loss.name, **more)
    for ours, theirs in zip(plain.model.parameters(), like.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    trials = {one.name: one for one in model_trials(found, [attacks()["membership"], attacks()["received"]])}
    twin = trials["client/membership"].attempts[0].twin
    assert isinstance(twin, ClientView)
    assert twin.facts.scheme == "fedavg"
    assert not any(name.startswith("weights.") for name in twin.known)
    assert torch.equal(twin.known["candidates.x"], trials["client/membership"].attempts[0].view.known["candidates.x"])


def test_a_training_without_noise_whose_numbers_run_away_is_begun_again_at_a_smaller_rate() -> None:
    """What clipping bears, bare gradients may not."""
    said: list[str] = []
    found = replace(scene(scheme="nadp", loss="square", lr=20.0, rounds=12), say=said.append, _plain={})
    plain = found.noiseless()
    assert plain is not None
    assert plain.config.lr in (4.0, 0.8, 0.16)
    assert all(bool(torch.isfinite(value).all()) for value in plain.model.parameters())
    assert [text for text in said if "begun again at a smaller one" in text]


@pytest.mark.parametrize("scheme", ["fedavg", "lossless", "veil-secagg"])
def test_a_run_without_noise_is_its_own_yardstick(scheme: str) -> None:
    assert scene(scheme=scheme).noiseless() is None
