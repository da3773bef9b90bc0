"""The local engine: order does not matter, bad clients are refused and named, seeds decide everything."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from federation import job, same_bits, trained
from fedveil.engine import ClientPool
from fedveil.errors import ConfigError, DataError
from fedveil.protocol.codec import encode
from fedveil.protocol.messages import Upload
from fedveil.roles.client import ClientRole
from fedveil.roles.server import ServerState
from fedveil.runs import loop as training
from fedveil.runs.loop import fresh_state, train_job

BATCH_NORM = {"depth": 2, "width": 12, "norm": "batch"}


def equal(ours: ServerState, theirs: ServerState) -> bool:
    return (
        same_bits(ours.weights.parameters, theirs.weights.parameters)
        and same_bits(ours.weights.statistics, theirs.weights.statistics)
        and same_bits(ours.velocity, theirs.velocity)
        and ours.head_level == theirs.head_level
    )


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", [{"scheme": "fedavg"}, {"scheme": "pbpfl"}, {"head_groups": 4}])
def test_whatever_the_order_of_arrival_the_model_is_the_same_bit_for_bit(scheme: dict[str, Any], dtype: str) -> None:
    settings = {
        **scheme,
        "dtype": dtype,
        "clients": 9,
        "rounds": 2,
        "momentum": 0.9,
        "lr": 0.05,
        "options": BATCH_NORM,
        "how": "size",
        "ratio": 5.0,
    }
    in_order, _ = trained(job(**settings))
    for number in range(2):
        shuffled, _ = trained(job(**settings), reorder=lambda replies: random.Random(number).sample(replies, 9))
        assert equal(in_order, shuffled)
    backwards, _ = trained(job(**settings), reorder=lambda replies: replies[::-1])
    assert equal(in_order, backwards)


def test_a_plain_sum_would_depend_on_the_order() -> None:
    """The test above could fail: in another order, ordinary addition gives other bits."""
    one = job(clients=9, rounds=1)
    seen: list[torch.Tensor] = []
    trained(one, reorder=lambda replies: [seen.append(reply.payload) for reply in replies] and replies)
    sums = {sum(random.Random(number).sample(seen, 9)).numpy().tobytes() for number in range(5)}  # type: ignore[union-attr]
    assert len(sums) > 1


@pytest.mark.parametrize("settings", [{}, {"batch_size": 8, "cohort": 0.6}, {"options": BATCH_NORM}])
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(settings: dict[str, Any]) -> None:
    first, again, other = (trained(job(seed=seed, **settings))[0] for seed in (1, 1, 2))
    assert equal(first, again)
    assert not torch.allclose(first.weights.parameters, other.weights.parameters, rtol=1e-3)


def test_with_secrets_of_the_operating_system_only_the_veil_changes() -> None:
    first, again = (trained(job(secrets="os", rounds=3)) for _ in range(2))
    assert not equal(first[0], again[0])  # other γ: other rounding
    assert torch.allclose(first[0].weights.parameters, again[0].weights.parameters, rtol=0, atol=1e-11)


class Spoiling:
    """Clients of which one, in one round, sends what `spoil` makes of its upload."""

    def __init__(self, role: ClientRole, spoil: Any, *, client: int = 2, round_: int = 1) -> None:
        self._role, self._spoil, self._client, self._round = role, spoil, client, round_
        self.work_by = role.work_by

    def handle_many(self, states: Any, request: Any, clients: Any, private: Any) -> Any:
        for state, reply in self._role.handle_many(states, request, clients, private):
            if reply.client != self._client or reply.round != self._round:
                yield state, reply
                continue
            for one in self._spoil(reply):
                yield state, one


def with_nan(reply: Upload) -> Upload:
    payload = reply.payload.clone()
    payload[0] = float("nan")
    return replace(reply, payload=payload)


REFUSED: dict[str, tuple[Any, int, str]] = {
    "not a number": (lambda r: [with_nan(r)], 2, "NaN"),
    "a wrong length": (lambda r: [replace(r, payload=r.payload[1:])], 2, "has shape"),
    "a wrong round": (lambda r: [replace(r, round=0)], 2, "an upload for round 1"),
    "a stranger's name": (lambda r: [replace(r, client=77)], 2, "names another client"),
}


@pytest.mark.parametrize(("spoil", "who", "why"), REFUSED.values(), ids=REFUSED)
def test_a_refused_client_is_named_and_the_round_goes_on(spoil: Any, who: int, why: str) -> None:
    one = job(rounds=3)
    state, boundaries = trained(one, role=Spoiling(ClientRole(one.scheme, one.architecture), spoil))
    assert [done.failed for done in boundaries] == ["", "", ""]
    assert [dict(done.gathered.refused) for done in (boundaries[0], boundaries[2])] == [{}, {}]
    assert list(boundaries[1].gathered.refused) == [who]
    assert why in boundaries[1].gathered.refused[who].text
    assert set(boundaries[1].gathered.arrived) == {0, 1, 3, 4}
    assert boundaries[1].gathered.missing == (() if who == 2 else (2,))
    assert state.round == 3
    assert torch.isfinite(state.weights.parameters).all()


def test_the_model_moves_as_if_the_refused_client_were_absent() -> None:
    absent, spoilt = (job(rounds=2) for _ in range(2))
    ours, _ = trained(spoilt, role=Spoiling(ClientRole(spoilt.scheme, spoilt.architecture), lambda r: [with_nan(r)]))
    theirs, done = trained(absent, role=Spoiling(ClientRole(absent.scheme, absent.architecture), lambda r: []))
    assert done[1].gathered.missing == (2,)
    assert equal(ours, theirs)


def test_a_repeated_upload_counts_once_and_its_sender_is_named() -> None:
    one, honest = (job(rounds=2) for _ in range(2))
    ours, boundaries = trained(one, role=Spoiling(ClientRole(one.scheme, one.architecture), lambda r: [r, r, r]))
    assert "a second one" in boundaries[1].gathered.refused[2].text
    assert 2 in boundaries[1].gathered.arrived
    assert equal(ours, trained(honest)[0])


def test_the_metrics_name_refused_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    one = job(rounds=3)
    spoilt = Spoiling(ClientRole(one.scheme, one.architecture), lambda r: [with_nan(r)])
    monkeypatch.setattr(training, "client_role", lambda job, state: spoilt)
    rows = train_job(one, state=fresh_state(one)).rows
    assert [row["clients"] for row in rows] == [5, 4, 5]
    assert [list(row.get("refused", {})) for row in rows] == [[], ["2"], []]


def test_bytes_are_those_of_the_encoded_messages() -> None:
    one = job(rounds=1, cohort=3)
    messages: list[Any] = []

    class Listening(ClientRole):
        def handle_many(self, states: Any, request: Any, clients: Any, private: Any = None) -> Any:
            messages.append(request)
            for state, reply in super().handle_many(states, request, clients, private):
                messages.append(reply)
                yield state, reply

    _, (done,) = trained(one, role=Listening(one.scheme, one.architecture))
    request, *replies = messages
    assert len(replies) == 3
    assert done.gathered.bytes_down == 3 * len(encode(request))
    assert done.gathered.bytes_up == sum(len(encode(reply)) for reply in replies)


def test_vectorised_and_one_by_one_clients_give_the_same_model() -> None:
    settings = {"rounds": 5, "options": BATCH_NORM, "how": "size", "ratio": 3.0}
    together, one_by_one = (trained(job(vectorise=v, **settings))[0] for v in (True, False))
    assert torch.allclose(together.weights.parameters, one_by_one.weights.parameters, rtol=0, atol=1e-11)


def test_a_pool_without_clients_or_with_an_empty_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        ClientPool(())
    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(DataError, match="Client 1 has no samples"):
        ClientPool.shared(x, y, [torch.arange(4), torch.arange(0)])
    with pytest.raises(DataError, match="Client 0 has no samples"):
        ClientPool.separate([(x[:0], y[:0])])


def test_a_pool_names_client_and_sample_of_what_is_not_finite() -> None:
    x, y = torch.zeros(4, 2, 3), torch.zeros(4, 1)
    bad = x.clone()
    bad[2, 1, 0] = float("inf")
    with pytest.raises(DataError, match="Client 1, sample 2: the input holds NaN or infinity"):
        ClientPool.separate([(x, y), (bad, y)])
    with pytest.raises(DataError, match="Client 0, sample 3: the target"):
        ClientPool.separate([(x, torch.tensor([0.0, 0.0, 0.0, float("nan")]))])
    with pytest.raises(DataError, match="Client 0 has 4 inputs but 3 targets"):
        ClientPool.separate([(x, y[:3])])
