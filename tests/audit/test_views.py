from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from audit.recorded import recorded, recorded_once
from fedveil.audit.record import Record, client_view, outsider_view, server_history, server_view
from fedveil.audit.views import ClientView, Message, ServerView, View, from_bytes, to_bytes
from fedveil.downlink.architecture import Weights
from fedveil.errors import ConfigError, ProtocolError
from fedveil.protocol.messages import Train
from fedveil.uplink.grid import FixedPoint
from fedveil.uplink.unmasking import MaskedUpload
from fedveil.work.messages import ClientData


def held_in(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a view, messages opened, with the way to it; anything but plain data fails."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Message):
        yield from held_in(value.opened(), f"{path}.{value.phase}.{value.kind}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from held_in(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from held_in(one, path)
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from held_in(one, f"{path}.{name}")
    else:
        assert value is None or isinstance(value, (bool, int, float, str, bytes)), f"{path}: {type(value)}"


def weights_found(view: View, record: Record) -> list[str]:
    """Where numbers of the server's true weights, of any round, stand in a view."""
    known = []
    for number in (1, 2):
        weights = server_view(record, 0, round=number).weights
        assert weights is not None
        known.append(weights.parameters.numpy())
    values = np.concatenate(known)
    values = values[(values != 0) & (np.abs(values) != 1)]
    return [path for path, one in held_in(view) if np.isin(one.numpy().reshape(-1), values).any()]


def own_data(job: Any, client: int) -> tuple[Tensor, Tensor]:
    data: ClientData = job.pool.clients[client]
    return data.take(torch.arange(len(data)))


@pytest.mark.parametrize("scheme", ["lossless", "veil-secagg", "mpdp"])
def test_a_client_sees_what_it_was_sent_and_no_weight_of_the_server(scheme: str) -> None:
    job, record = recorded_once(scheme=scheme)
    view = client_view(record, 1, data=own_data(job, 1))
    assert [(one.round, one.attempt) for one in view.broadcasts] == [(1, 0), (2, 0)]
    assert {one.kind for one in view.messages} <= {"request", "private"}
    assert {one.client for one in view.messages} <= {None, 1}
    assert weights_found(view, record) == []


def test_the_walk_finds_weights_where_they_are() -> None:
    _, record = recorded_once(scheme="fedavg")
    assert weights_found(client_view(record, 1), record) == [".messages.train.request.broadcast.parameters"] * 2
    _, veiled = recorded_once(scheme="lossless")
    assert weights_found(server_view(veiled, 1, round=1), veiled) == [".weights.parameters"]


def test_a_client_that_was_not_asked_saw_nothing_of_the_round() -> None:
    _, record = recorded_once(scheme="lossless", clients=6, cohort=3, rounds=3, record_rounds="1,2,3", seed=2)
    for client in record.clients:
        seen = [one.round for one in client_view(record, client).broadcasts]
        asked = [one.round for one in record.find(kind="request", phase="train") if client in one.to]
        assert seen == asked
    assert any(len(client_view(record, client).broadcasts) < 3 for client in record.clients)


@pytest.mark.parametrize("scheme", ["fedavg", "lossless"])
def test_the_server_recovers_the_gradient_of_one_client(scheme: str) -> None:
    """The recovered gradient is that of the true model on the victim's samples, computed here by autograd."""
    job, record = recorded_once(scheme=scheme)
    view = server_view(record, 2, round=1)
    x, y = own_data(job, 2)
    assert view.recovered is not None
    assert (view.samples, view.batch_size) == (len(y), len(y))
    module = view.model()
    loss = view.facts.objective().mean(module(x), y)
    loss.backward()
    gradient = torch.cat([one.grad.reshape(-1) for one in module.parameters() if one.grad is not None])
    assert torch.allclose(view.recovered.gradient, gradient, rtol=1e-7, atol=1e-10)
    assert view.recovered.loss == pytest.approx(float(loss.detach()))
    assert view.labels is None


def uniform(words: Tensor) -> bool:
    """Whether the bytes of 64-bit words pass a χ² test with 255 degrees of freedom; false alarms: 1e-6."""
    counts = np.bincount(np.frombuffer(words.numpy().tobytes(), dtype=np.uint8), minlength=256)
    expected = counts.sum() / 256
    return bool(((counts - expected) ** 2 / expected).sum() < 372.0)


def test_under_masks_the_server_sees_uniform_words_and_the_opened_sum() -> None:
    _, record = recorded_once(scheme="veil-secagg")
    view = server_view(record, 1, round=1)
    assert view.upload is not None
    assert view.recovered is None
    assert uniform(view.upload)
    assert view.summed is not None
    allowed = (".summed.", ".weights.", ".messages.train.request.")
    numbers = [path for path, one in held_in(view) if one.is_floating_point() and not path.startswith(allowed)]
    assert numbers == []
    _, bare = recorded_once(scheme="lossless")
    own = server_view(bare, 1, round=1).recovered
    assert own is not None
    assert not torch.allclose(view.summed.gradient, own.gradient, rtol=1e-2)
    mean = sum(_weighted(bare, client) for client in range(3))
    assert torch.allclose(view.summed.gradient, mean / 300, rtol=1e-4, atol=1e-6)  # type: ignore[operator]


def _weighted(record: Record, client: int) -> Tensor:
    view = server_view(record, client, round=1)
    assert view.recovered is not None
    assert view.samples is not None
    return view.recovered.gradient * view.samples


@pytest.mark.parametrize("scheme", ["nadp", "mpdp", "mpdp-naive"])
def test_colluders_take_their_noise_off_and_nothing_else(scheme: str) -> None:
    """With all others colluding, what is left is the upload as it would be without pair noise at all."""
    sharing = {"calibration": "tail"} if scheme == "mpdp-naive" else {}
    _, record = recorded_once(scheme=scheme, **sharing)
    _, apart = recorded_once(scheme=scheme, skip_cancelling=True, **sharing)
    for victim in range(3):
        others = {0, 1, 2} - {victim}
        covered, plain = (server_view(one, victim, round=1) for one in (record, apart))
        some = server_view(record, victim, round=1, colluders={min(others)})
        view = server_view(record, victim, round=1, colluders=others)
        assert view.colluders == tuple(sorted(others))
        assert plain.upload is not None
        assert covered.upload is not None
        assert view.uncovered is not None
        assert some.uncovered is not None
        assert covered.uncovered is None
        seen, left, bare, most = (
            one.to(torch.float64) for one in (covered.upload, view.uncovered, plain.upload, some.uncovered)
        )
        assert torch.allclose(left, bare, rtol=1e-9, atol=1e-9)
        assert (seen - bare).norm() > 1.2 * (most - bare).norm()
        assert (most - bare).norm() > 1e-3 * bare.norm()
        assert view.recovered is not None
        assert plain.recovered is not None
        assert torch.allclose(view.recovered.gradient, plain.recovered.gradient, rtol=1e-7, atol=1e-7)


def test_without_masks_of_their_own_all_others_can_read_a_client() -> None:
    """unmask = on-dropout: pair masks are all there is, and n − 1 colluders know them; always: one mask is left."""
    _, record = recorded_once(scheme="veil-secagg", unmask="on-dropout")
    _, safe = recorded_once(scheme="veil-secagg")
    _, bare = recorded_once(scheme="lossless")
    step = FixedPoint(2.0**24, 3).step
    for victim in range(3):
        others = {0, 1, 2} - {victim}
        view, sent = server_view(record, victim, round=1, colluders=others), server_view(bare, victim, round=1).upload
        assert view.uncovered is not None
        assert sent is not None
        assert (view.uncovered.to(torch.float64) * step - sent).abs().max() <= step
        some = server_view(record, victim, round=1, colluders={min(others)}).uncovered
        left = server_view(safe, victim, round=1, colluders=others).uncovered
        assert some is not None
        assert left is not None
        assert uniform(some)
        assert uniform(left)


def test_an_outsider_sees_both_directions_and_no_secret() -> None:
    _, record = recorded_once(scheme="lossless")
    view = outsider_view(record)
    assert [one.round for one in view.broadcasts] == [1, 2]
    assert len(view.uploads_of(0)) == 2
    assert weights_found(view, record) == []


def test_a_history_holds_every_round_of_one_client() -> None:
    _, record = recorded_once(scheme="lossless")
    history = server_history(record, 1)
    assert [one.round for one in history.rounds] == [1, 2]
    first, second = (one.recovered for one in history.rounds)
    assert first is not None
    assert second is not None
    assert not torch.equal(first.gradient, second.gradient)


def test_views_survive_bytes(tmp_path: Any) -> None:
    job, record = recorded_once(scheme="nadp")
    _, masked = recorded_once(scheme="veil-secagg")
    _, _, held = recorded(tmp_path / "record", scheme="paraaegis", cipher="pads", share=0.2)
    labels = own_data(job, 0)[1]
    server = server_view(record, 0, round=2, colluders={1}, labels=labels)
    veiled = server_view(masked, 0, round=1)
    views: list[View] = [
        client_view(record, 0),
        client_view(record, 0, data=own_data(job, 0)),
        dataclasses.replace(client_view(record, 0), known={"x": torch.ones(2, 3), "y": torch.arange(2)}),
        dataclasses.replace(outsider_view(record), known={"x": torch.ones(2, 3)}),
        dataclasses.replace(server_view(record, 0, round=1), known={"box": torch.tensor([0.0, 1.0])}),
        outsider_view(masked),
        outsider_view(held),
        server,
        veiled,
        server_view(held, 0, round=1),
        server_history(record, 2),
    ]
    for view in views:
        raw = to_bytes(view)
        back = from_bytes(raw)
        assert type(back) is type(view)
        assert to_bytes(back) == raw
        ours, theirs = list(held_in(view)), list(held_in(back))
        assert [path for path, _ in ours] == [path for path, _ in theirs]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    again = from_bytes(to_bytes(server))
    assert isinstance(again, ServerView)
    assert (again.round, again.victim, again.colluders, again.facts) == (2, 0, (1,), record.facts)
    assert isinstance(again.weights, Weights)
    assert isinstance(again.messages[0].opened(), Train)
    assert isinstance(from_bytes(to_bytes(veiled)).messages[1].opened(), MaskedUpload)  # type: ignore[union-attr]


def test_bytes_that_are_no_view_are_refused() -> None:
    _, record = recorded_once(scheme="lossless")
    raw = to_bytes(client_view(record, 0))
    for bad in (b"", raw[:100], raw[:-1], raw.replace(b'"client"', b'"nobody"')):
        with pytest.raises(ProtocolError):
            from_bytes(bad)


def test_what_was_not_recorded_is_refused_by_name() -> None:
    _, record = recorded_once(scheme="lossless")
    with pytest.raises(ConfigError, match="Client 7 was not recorded; recorded are the clients 0, 1, 2"):
        client_view(record, 7)
    with pytest.raises(ConfigError, match="Round 5 was not recorded; recorded are the rounds 1, 2"):
        server_view(record, 0, round=5)
    with pytest.raises(ConfigError, match="both the victim and a colluder"):
        server_view(record, 0, round=1, colluders={0, 1})


def test_a_view_builds_its_model_anew() -> None:
    job, record = recorded_once(scheme="lossless")
    view = client_view(record, 0)
    assert isinstance(view, ClientView)
    assert view.facts.architecture().parameters == job.architecture.parameters
    with pytest.raises(ConfigError, match="came as a Python object"):
        dataclasses.replace(view.facts, model=None).module()
    with pytest.raises(ConfigError, match="holds no model"):
        dataclasses.replace(server_view(record, 0, round=1), weights=None).model()
