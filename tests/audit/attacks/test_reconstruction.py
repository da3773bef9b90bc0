"""What the server, and somebody on the wire, reads of a client's samples from a recorded upload."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from audit.attacks.reading import PICTURES, VICTIMS, batch_of, by_chance, decibels, run_of, tried
from fedveil.audit.attack import AttackContext
from fedveil.audit.attacks.closed_form import closed_form_attack as closed_form
from fedveil.audit.attacks.closed_form import labels_attack as labels
from fedveil.audit.attacks.deep_leakage import dlg_attack as dlg
from fedveil.audit.attacks.deep_leakage import idlg_attack as idlg
from fedveil.audit.attacks.deep_leakage import inverting_attack as inverting
from fedveil.audit.attacks.gradients import Problem, observed_in, problem_from, quiet
from fedveil.audit.record import client_view, outsider_view, server_history, server_view
from fedveil.audit.views import View, from_bytes, to_bytes
from fedveil.errors import ConfigError, NotApplicableError

SIGMOID: dict[str, Any] = {"model": "lenet-sigmoid", **PICTURES}


def problem_of(view: View, context: AttackContext) -> Problem:
    return problem_from(observed_in(view, context), context)


MARGIN = 3.0  # dB above what random pictures reach: far below anything one can recognise


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scheme", ["fedavg", "lossless", "cdp"])
def test_the_server_reads_a_sample_off_a_bare_upload_in_closed_form(scheme: str, dtype: str) -> None:
    job, record = run_of(scheme, dtype=dtype)
    for victim in VICTIMS:
        x, y = batch_of(job, victim)
        found = tried(closed_form, server_view(record, victim, round=1))
        assert decibels(found, x) >= 60
        assert found["labels"].tolist() == y.tolist()
        assert found["labels"].dtype == torch.int64
        assert float(found["loss"]) < 1e-6


@pytest.mark.parametrize("scheme", ["fedavg", "lossless"])
def test_so_does_whoever_listens_on_the_wire_with_the_model_as_sent(scheme: str) -> None:
    job, record = run_of(scheme)
    for victim in VICTIMS:
        for round in (1, 2):
            x, y = batch_of(job, victim, round=round)
            found = tried(closed_form, outsider_view(record), client=victim, round=round)
            assert decibels(found, x) >= 60
            assert found["labels"].tolist() == y.tolist()


def test_the_wire_shows_the_gradient_itself_at_its_size() -> None:
    """Of the model as sent: under a veil the loss there is another one than the server's."""
    for scheme in ("fedavg", "lossless"):
        job, record = run_of(scheme)
        for victim in VICTIMS:
            x, y = batch_of(job, victim)
            seen = observed_in(outsider_view(record), AttackContext(client=victim, round=1))
            seen.facts.objective().mean(seen.module(x), y).backward()  # type: ignore[no-untyped-call]
            gradient = torch.cat([one.grad.reshape(-1) for one in seen.module.parameters() if one.grad is not None])
            assert torch.allclose(seen.gradient, gradient, rtol=1e-6, atol=1e-9)
            own = server_view(record, victim, round=1).recovered
            assert own is not None
            assert torch.allclose(seen.gradient, own.gradient, rtol=1e-6, atol=1e-9) == (scheme == "fedavg")


def test_of_several_attempts_at_a_round_the_last_is_read() -> None:
    job, record = run_of("lossless")
    view = outsider_view(record)
    again = [dataclasses.replace(one, round=1, attempt=1) for one in view.messages if one.round == 2]
    found = tried(closed_form, dataclasses.replace(view, messages=(*view.messages, *again)), client=0, round=1)
    assert decibels(found, batch_of(job, 0, round=2)[0]) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["square", "cross-entropy"])
def test_clipping_alone_hides_nothing(loss: str) -> None:
    """Central noise comes after the server: what it sees is clipped to a tenth and less, and reads as before."""
    job, record = run_of("cdp", clip=0.1, loss=loss, **SIGMOID)
    x, y = batch_of(job, 0)
    view = server_view(record, 0, round=1)
    assert tried(labels, view)["labels"].tolist() == y.tolist()
    for attempt in (dlg, idlg, inverting):
        found = tried(attempt, view)
        assert decibels(found, x) > 20
        assert found["labels"].tolist() == y.tolist()


@pytest.mark.parametrize("attempt", [dlg, idlg, inverting])
def test_searching_attacks_read_it_off_a_convolution(attempt: Any) -> None:
    job, record = run_of("fedavg", loss="cross-entropy", **SIGMOID)
    x, y = batch_of(job, 0)
    found = tried(attempt, server_view(record, 0, round=1))
    assert decibels(found, x) > 20
    assert found["labels"].tolist() == y.tolist()


def test_labels_alone_are_read_and_known_ones_are_not_asked() -> None:
    job, record = run_of("fedavg", batch_size=4, loss="cross-entropy")
    for victim in VICTIMS:
        _, y = batch_of(job, victim)
        view = server_view(record, victim, round=1)
        assert tried(labels, view)["labels"].tolist() == sorted(y.tolist())
        wrong = dataclasses.replace(view, labels=torch.full((4,), 9))
        assert tried(labels, wrong)["labels"].tolist() == sorted(y.tolist())
        assert tried(closed_form, wrong)["labels"].tolist() == [9] * 4


@pytest.mark.parametrize("attempt", [closed_form, pytest.param(idlg, marks=pytest.mark.slow)])
def test_masked_uploads_give_nothing_away(attempt: Any) -> None:
    """The words read as numbers, by the server and on the wire: no better than pictures at random."""
    job, record = run_of("veil-secagg") if attempt is closed_form else run_of("veil-secagg", **SIGMOID)
    reached, chance = [], []
    for victim in VICTIMS:
        x, _ = batch_of(job, victim)
        view = server_view(record, victim, round=1)
        assert view.recovered is None
        reached += [decibels(tried(attempt, view), x)]
        reached += [decibels(tried(attempt, outsider_view(record), client=victim, round=1), x)]
        chance.append(by_chance(x))
    assert max(reached) < max(chance) + MARGIN


def test_masks_that_all_others_know_do_not_help() -> None:
    """unmask = on-dropout: two colluders hold every mask of the third, and read its fixed-point numbers exactly."""
    job, record = run_of("veil-secagg", unmask="on-dropout")
    for victim in VICTIMS:
        x, y = batch_of(job, victim)
        view = server_view(record, victim, round=1, colluders=set(VICTIMS) - {victim})
        found = tried(closed_form, view)
        assert decibels(found, x) >= 60
        assert found["labels"].tolist() == y.tolist()
        some = server_view(record, victim, round=1, colluders={(victim + 1) % 3})
        assert decibels(tried(closed_form, some), x) < by_chance(x) + MARGIN


@pytest.mark.parametrize("scheme", ["nadp", "mpdp"])
def test_strong_noise_covers_the_sample(scheme: str) -> None:
    job, record = run_of(scheme, epsilon=1.0)
    for victim in VICTIMS:
        x, _ = batch_of(job, victim)
        assert decibels(tried(closed_form, server_view(record, victim, round=1)), x) < by_chance(x) + MARGIN


def test_colluders_make_the_noise_smaller() -> None:
    job, record = run_of("nadp", epsilon=1e6, clip=1.0)
    for victim in VICTIMS:
        x, _ = batch_of(job, victim)
        others = set(VICTIMS) - {victim}
        alone, together = (
            decibels(tried(closed_form, server_view(record, victim, round=1, colluders=some)), x)
            for some in (set(), others)
        )
        assert together > alone + 6
        assert together > 20


def test_the_sum_is_read_as_one_batch_of_all() -> None:
    """Under masks the sum is all there is; a batch of three then has its say, and one that is not set is refused."""
    _, record = run_of("veil-secagg")
    view = server_view(record, 0, round=1)
    found = tried(closed_form, view, target="sum", batch=3)
    assert found["inputs"].shape == (3, 1, 8, 8)
    _, bare = run_of("lossless")
    ours, theirs = (
        observed_in(server_view(one, 0, round=1), AttackContext(target="sum", batch=3)) for one in (record, bare)
    )
    assert torch.allclose(ours.gradient, theirs.gradient, rtol=1e-4, atol=1e-7)
    with pytest.raises(NotApplicableError, match="set batch"):
        tried(closed_form, view, target="sum")
    with pytest.raises(ConfigError, match=r"Unknown target 'som'\. Did you mean 'sum'"):
        tried(closed_form, view, target="som")


def test_an_update_of_local_steps_stands_in_for_a_gradient() -> None:
    """w − w_k over lr·steps is near the gradient of the batch of all steps, nearer the smaller the rate."""
    apart = []
    for lr in (0.01, 0.0001):
        job, record = run_of("fedavg", local_steps=3, lr=lr, model="lenet-sigmoid", **PICTURES)
        view = server_view(record, 0, round=1)
        seen = observed_in(view, AttackContext())
        assert (view.facts.returns, seen.batch) == ("update", 3)
        own = job.pool.clients[0]
        batches: Any = job.scheme.work.batches  # type: ignore[attr-defined]
        x, y = own.take(torch.cat([batches.indices(client=0, samples=len(own), step=step) for step in range(3)]))
        module = view.model()
        view.facts.objective().mean(module(x), y).backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([one.grad.reshape(-1) for one in module.parameters() if one.grad is not None])
        apart.append(float((seen.gradient - gradient).norm() / gradient.norm()))
    assert apart[1] < 0.01
    assert apart[1] < apart[0] / 20


def test_dropout_is_left_out_and_normalisation_is_not() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Dropout2d(0.5)).train()
    modes = {type(one).__name__: one.training for one in quiet(module).children()}
    assert modes == {"Linear": True, "BatchNorm1d": True, "Dropout": False, "Dropout2d": False}


def test_a_problem_holds_what_the_settings_say() -> None:
    job, record = run_of("fedavg", batch_size=2)
    view = server_view(record, 0, round=1, labels=batch_of(job, 0)[1])
    problem = problem_of(view, AttackContext(box=(-1, 2)))
    assert (problem.batch, problem.box, problem.input_shape) == (2, (-1.0, 2.0), (1, 8, 8))
    assert problem.labels is not None
    assert problem_of(view, AttackContext()).box is None
    assert problem_of(dataclasses.replace(view, labels=None), AttackContext(batch=5)).batch == 5
    for bad in ({"box": [1]}, {"box": "ab"}, {"batch": 0}, {"batch": True}, {"device": "abacus"}):
        with pytest.raises(ConfigError):
            problem_of(view, AttackContext.of(bad))


def test_what_cannot_be_tried_says_why() -> None:
    _, record = run_of("fedavg")
    _, large = run_of("fedavg", batch_size=80)
    _, convolution = run_of("fedavg", **SIGMOID)
    view = server_view(record, 0, round=1)
    text = dataclasses.replace(view, facts=dataclasses.replace(view.facts, input_dtype="int64"))
    numbers = dataclasses.replace(view, facts=dataclasses.replace(view.facts, task="regression"))
    wire = {"client": 0, "round": 1}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (server_view(large, 0, round=1), {}, r"^a gradient of 80 samples: this attack takes up to 64$"),
        (server_view(convolution, 0, round=1), {}, r"^no linear layer with a bias reads the input"),
        (numbers, {}, r"^a regression task: this attack needs classes$"),
        (text, {}, r"^text as input"),
        (client_view(record, 0), {}, r"the view of a client, which gets no upload$"),
        (server_history(record, 0), {}, r"the view of many uploads at once$"),
        (outsider_view(record), {**wire, "round": 9}, r"^no model was sent in this round"),
        (outsider_view(record), {**wire, "client": 9}, r"^no upload came from this client"),
        (dataclasses.replace(view, samples=None), {}, r"^nobody but the client knows how many samples"),
        (dataclasses.replace(view, weights=None), {}, r"^the server holds no model"),
    ]
    for seen, settings, why in cases:
        with pytest.raises(NotApplicableError, match=why):
            tried(closed_form, from_bytes(to_bytes(seen)), **settings)
    assert tried(closed_form, from_bytes(to_bytes(view)))["inputs"].shape == (1, 1, 8, 8)


@pytest.mark.parametrize("scheme", ["paraaegis", "ckks-fedavg"])
def test_a_server_that_only_relays_has_nothing_to_match(scheme: str) -> None:
    _, record = run_of(scheme, cipher="pads")
    for view, settings in ((server_view(record, 0, round=1), {}), (outsider_view(record), {"client": 0, "round": 1})):
        with pytest.raises(NotApplicableError, match="lives with the clients"):
            tried(closed_form, view, **settings)


def test_the_wire_needs_to_be_told_whose_upload() -> None:
    _, record = run_of("fedavg")
    with pytest.raises(ConfigError, match="client and round"):
        tried(closed_form, outsider_view(record))
