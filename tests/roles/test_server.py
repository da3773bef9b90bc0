"""The server's run under faults: rounds fail alone, the refused are named, and what arrives decides, not when."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from driving import drive
from federation import job, next_ask, same_bits, server_of, trained
from fedveil.engine import LocalEngine
from fedveil.errors import NumericError, ProtocolError
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import decode, encode
from fedveil.protocol.directory import Directory, Hello, Nonces
from fedveil.protocol.messages import Reply, Train, Upload
from fedveil.protocol.phases import Ask, Gathered, RoundDone
from fedveil.roles.server import ServerRole, ServerState
from fedveil.runs import loop as training
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role, fresh_state, train_job
from fedveil.runs.privacy_journal import accountant_for
from fedveil.uplink.noised import NoisedSum
from fedveil.uplink.unmasking import Unmask
from fedveil.work import ClientData
from pairs import crossed

SUMS: dict[str, dict[str, Any]] = {
    "exact": {"scheme": "lossless"},
    "exact, with sizes": {"scheme": "cdp"},
    "noised": {"scheme": "nadp"},
    "noised, tolerant": {"scheme": "nadp", "dropouts": "tolerate"},
    "masked": {"scheme": "veil-secagg"},
    "masked, sparse": {"scheme": "veil-secagg", "neighbours": 4},
    "masked, on dropout": {"scheme": "veil-secagg", "unmask": "on-dropout"},
    "masked and noised": {"scheme": "veil-dp", "cover": "masks"},
    "assumed": {"scheme": "mpdp"},
}


def of(name: str, **settings: Any) -> Job:
    return job(**{"clients": 7, "rounds": 4, "loss": "square", "how": "size", "ratio": 3.0, **SUMS[name], **settings})


def equal(ours: ServerState, theirs: ServerState) -> bool:
    return (
        same_bits(ours.weights.parameters, theirs.weights.parameters)
        and same_bits(ours.velocity, theirs.velocity)
        and ours.head_level == theirs.head_level
    )


def missing_in(rounds: dict[int, set[int]]) -> Callable[[Any, int], bool]:
    def absent(request: Any, client: int) -> bool:
        return isinstance(request, Train) and client in rounds.get(request.round, set())

    return absent


# --- order and absence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUMS)
def test_neither_the_order_of_arrival_nor_of_revelation_changes_a_bit(name: str) -> None:
    """With somebody missing in the second round, so that there is something to reveal."""
    gone = missing_in({1: {3}})
    in_order, boundaries = trained(of(name, rounds=3), absent=gone)
    assert [done.failed for done in boundaries] == [""] * 3
    assert [len(done.gathered.arrived) for done in boundaries] == [7, 6, 7]
    shuffle = random.Random(1)
    shuffled, _ = trained(
        of(name, rounds=3), absent=gone, reorder=lambda replies: shuffle.sample(replies, len(replies))
    )
    assert equal(in_order, shuffled)


def bare_sum(present: list[int], **settings: Any) -> torch.Tensor:
    """What these clients' bare contributions to the first round add up to."""
    bare = of("exact", **settings)
    ask, role = next_ask(server_of(bare).run()), client_role(bare)
    for client in present:
        ask.into.add(role.handle(ClientState(client), ask.common, bare.pool.clients[client])[1])
    return ask.into.total()  # type: ignore[attr-defined, no-any-return]


def opened_sum(one: Job, absent: Any, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The sum the server opens in its only round."""
    sums: list[torch.Tensor] = []
    original = ServerRole._recovered

    def noting(self: Any, veil: Any, total: Any, context: Any, *, arrived: Any) -> Any:
        sums.append(total.total().clone())
        return original(self, veil, total, context, arrived=arrived)

    with monkeypatch.context() as patched:
        patched.setattr(ServerRole, "_recovered", noting)
        _, (done,) = trained(one, absent=absent)
    assert done.failed == ""
    return sums[0]


@pytest.mark.parametrize(
    ("settings", "seed"),
    crossed({"all": {}, "sparse": {"neighbours": 8}, "on dropout": {"unmask": "on-dropout"}}, range(3)),
)
def test_whoever_is_absent_a_masked_sum_is_the_sum_of_who_is_there(
    settings: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the codec's step (below 2⁻³⁴ here), by half of which each client rounds; weights are whole numbers."""
    gone = set(random.Random(seed).sample(range(11), seed))
    found = opened_sum(of("masked", rounds=1, clients=11, **settings), missing_in({0: gone}), monkeypatch)
    expected = bare_sum([client for client in range(11) if client not in gone], rounds=1, clients=11)
    assert torch.allclose(found, expected, rtol=0, atol=11 * 2.0**-35)
    assert float(found[-1]) == float(expected[-1])


@pytest.mark.parametrize("name", ["exact", "masked"])
def test_a_client_that_is_away_changes_the_same_bits_however_it_went(name: str) -> None:
    """Not asked to answer, refused for what it sent, or its upload lost: the sum is over the others.

    Without masks of one's own nobody opens those of an upload that came (`test_bad_uploads.py`).
    """
    away, _ = trained(of(name), absent=missing_in({1: {2}}))
    refused, boundaries = trained(
        of(name), role=Spoiling(client_role(of(name)), lambda reply: [replace(reply, round=9)])
    )
    assert list(boundaries[1].gathered.refused) == [2]
    assert equal(away, refused)


# --- failed rounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exact", "noised", "masked", "masked, on dropout"])
def test_a_failed_round_leaves_the_model_untouched_and_training_goes_on(name: str) -> None:
    """Everybody (or, where the others can do without one, nearly everybody) is missing in the second round."""
    one = of(name, momentum=0.9, lr=0.05)
    gone = set(range(7)) if name == "exact" else set(range(5))
    server, seen = server_of(one), []

    def boundary(done: RoundDone) -> None:
        seen.append((done, server.state.weights.parameters.clone(), server.state.velocity.clone(), server.state.round))

    drive(LocalEngine(client_role(one), one.pool, absent=missing_in({1: gone})), server.run(), on_round=boundary)
    assert [bool(done.failed) for done, *_ in seen] == [False, True, False, False]
    assert [done.loss is None for done, *_ in seen][1]
    assert [number for *_, number in seen] == [1, 2, 3, 4]
    (_, before, velocity, _), (_, after, same, _), (_, later, _, _) = seen[:3]
    assert same_bits(before, after)
    assert same_bits(velocity, same)
    assert not same_bits(after, later)


def test_a_failed_round_is_a_row_with_its_reason_and_the_run_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    one = of("masked", rounds=5)
    monkeypatch.setattr(training, "_simulated_dropout", lambda job: missing_in({2: {0, 1, 2, 3}}))
    outcome = train_job(one, state=fresh_state(one))
    assert ["failed" in row for row in outcome.rows] == [False, False, True, False, False]
    assert "needed uploads arrived" in outcome.rows[2]["failed"]
    assert outcome.rows[2]["loss"] is None
    assert outcome.state.round == 5
    assert outcome.stopped == ""


def test_a_round_that_nobody_answers_fails_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    one = of("exact")
    monkeypatch.setattr(training, "_simulated_dropout", lambda job: missing_in({0: set(range(7))}))
    rows = train_job(one, state=fresh_state(one)).rows
    assert [row.get("failed", "") for row in rows] == ["no upload arrived", *[""] * (len(rows) - 1)]
    assert len(rows) > 1


def test_a_run_without_any_upload_stops_with_an_error_and_no_advice_about_learning_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = of("exact")
    never = missing_in({number: set(range(7)) for number in range(one.config.rounds)})
    monkeypatch.setattr(training, "_simulated_dropout", lambda job: never)
    with pytest.raises(ProtocolError, match="no upload arrived") as caught:
        train_job(one, state=fresh_state(one))
    assert "learning rate" not in str(caught.value)


def test_a_run_in_which_round_after_round_fails_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    one = of("masked", rounds=30)
    rows: list[Any] = []
    always = missing_in({number: set(range(4)) for number in range(30)})
    monkeypatch.setattr(training, "_simulated_dropout", lambda job: always)
    with pytest.raises(ProtocolError, match="Round 10 failed"):
        train_job(one, state=fresh_state(one), on_round=lambda row, state: rows.append(row))
    assert len(rows) == 9


# --- what is refused --------------------------------------------------------------------------------------------------


class Spoiling:
    """Clients of which one, in one round, sends what `spoil` makes of its upload."""

    def __init__(self, role: Any, spoil: Any, *, client: int = 2, round_: int = 1) -> None:
        self._role, self._spoil, self._client, self._round = role, spoil, client, round_
        self.work_by = role.work_by

    def handle_many(self, states: Any, request: Any, clients: Any, private: Any) -> Any:
        for state, reply in self._role.handle_many(states, request, clients, private):
            mine = isinstance(request, Train) and state.client == self._client and request.round == self._round
            for one in self._spoil(reply) if mine else [reply]:
                yield state, one


def with_nan(reply: Upload) -> Upload:
    payload = reply.payload.clone()
    payload[0] = float("nan")
    return replace(reply, payload=payload)


@pytest.mark.parametrize("name", ["exact", "exact, with sizes", "assumed"])
def test_a_nan_in_an_upload_is_named_in_the_row_and_the_round_equals_the_one_without_that_client(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt, away = of(name), of(name)
    original = training.client_role
    with monkeypatch.context() as patched:
        patched.setattr(training, "client_role", lambda one, state: Spoiling(original(one), lambda r: [with_nan(r)]))
        ours = train_job(spoilt, state=fresh_state(spoilt))
    with monkeypatch.context() as patched:
        patched.setattr(training, "client_role", lambda one, state: Spoiling(original(one), lambda r: []))
        theirs = train_job(away, state=fresh_state(away))
    assert [list(row.get("refused", {})) for row in ours.rows] == [[], ["2"], [], []]
    assert "NaN" in ours.rows[1]["refused"]["2"]
    assert [row["clients"] for row in ours.rows] == [row["clients"] for row in theirs.rows] == [7, 6, 7, 7]
    assert "refused" not in theirs.rows[1]
    assert equal(ours.state, theirs.state)


@pytest.mark.parametrize("name", [one for one in SUMS if of(one).scheme.plan is None])
def test_nan_in_a_clients_data_is_refused_by_the_client_itself_and_the_round_goes_on(name: str) -> None:
    """Under masks or noise a refusal would tell about the data: there, what is no number counts as zero."""
    one = of(name)
    poisoned = one.pool.clients[2]
    x, y = poisoned.take(torch.arange(len(poisoned)))
    own = ClientData(2, x.clone(), y)
    own.x[:] = float("nan")
    clients = (*one.pool.clients[:2], own, *one.pool.clients[3:])
    state, boundaries = trained(replace(one, pool=replace(one.pool, clients=clients)))
    for done in boundaries:
        assert done.failed == ""
        if name.startswith("masked"):
            assert set(done.gathered.arrived) == set(range(7))
            continue
        assert list(done.gathered.refused) == [2]
        assert "client 2" in done.gathered.refused[2].text
        assert set(done.gathered.arrived) == {0, 1, 3, 4, 5, 6}
    assert torch.isfinite(state.weights.parameters).all()


def test_when_everybodys_numbers_run_away_the_error_says_so() -> None:
    one = of("exact", lr=1e12, rounds=6)
    with pytest.raises(NumericError, match="Training has probably diverged: lower the learning rate"):
        train_job(one, state=fresh_state(one))


def test_under_masks_numbers_that_run_away_show_in_the_loss_alone() -> None:
    one = of("masked", lr=1e12, rounds=6, head_groups=None)
    done = train_job(one, state=fresh_state(one))
    assert all("refused" not in row for row in done.rows)
    assert done.rows[-1]["loss"] > 1000 * done.rows[0]["loss"]


# --- message by message ---------------------------------------------------------------------------------------------


class Hall:
    """A server's run and its clients, driven by hand up to the first round's question."""

    def __init__(self, one: Job, *, attempt: int = 0) -> None:
        self.job, self.role = one, client_role(one)
        state = fresh_state(one)
        state.attempt = attempt
        self.steps = server_of(one, state).run()
        self.states = {data.client: ClientState(data.client) for data in one.pool.clients}
        self.ask = next_ask(self.steps)
        while isinstance(self.ask.common, (Hello, Directory, Nonces)):
            self.ask = self.go_on([self.answer(client) for client in self.ask.to])

    def answer(self, client: int) -> Any:
        """A client's honest reply, through the wire."""
        private = self.ask.each.get(client)
        request = decode(encode(self.ask.common))
        self.states[client], reply = self.role.handle(
            self.states[client], request, self.job.pool.clients[client], private
        )
        return decode(encode(reply))

    def go_on(self, replies: list[Any]) -> Ask:
        for reply in replies:
            self.ask.into.add(reply)
        return next_ask(self.steps, Gathered(tuple(reply.client for reply in replies), {}, (), 0, 0))


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another round": (lambda r: replace(r, round=r.round + 1), "upload for round 2, attempt 0 arrived in round 1"),
    "an earlier attempt": (lambda r: replace(r, attempt=r.attempt + 1), "attempt 1 arrived in round 1, attempt 0"),
    "a stranger": (lambda r: replace(r, client=99), "was not asked"),
    "a longer vector": (lambda r: replace(r, payload=torch.cat([r.payload, r.payload[:1]])), "has shape"),
    "a shorter vector": (lambda r: replace(r, payload=r.payload[:-1]), "has shape"),
    "a matrix": (lambda r: replace(r, payload=r.payload[None]), "has shape"),
    "another type of numbers": (
        lambda r: replace(r, payload=r.payload.long() if r.payload.is_floating_point() else r.payload.double()),
        "int64",
    ),
    "truth values": (lambda r: replace(r, payload=r.payload > 0), "bool"),
    "another message": (lambda r: Reply(r.client), "a Reply arrived where"),
}


@pytest.mark.parametrize("name", ["exact", "noised", "masked", "assumed"])
def test_uploads_that_do_not_belong_are_refused_and_the_honest_ones_still_add_up(name: str) -> None:
    ours, clean = (Hall(of(name, rounds=1, clients=4)) for _ in range(2))
    replies = [ours.answer(client) for client in range(4)]
    before = _partial(ours.ask.into)
    for what, (spoil, why) in WRONG.items():
        with pytest.raises(ProtocolError) as caught:
            ours.ask.into.add(spoil(replies[1]))
        assert why in str(caught.value), what
        assert _partial(ours.ask.into) == before, what
    for reply in replies:
        ours.ask.into.add(reply)
        with pytest.raises(ProtocolError, match="a second one"):
            ours.ask.into.add(reply)
    for client in range(4):
        clean.ask.into.add(clean.answer(client))
    assert _partial(ours.ask.into) == _partial(clean.ask.into)


def _partial(accumulator: Any) -> bytes:
    """What has been summed so far, masks and all."""
    held = accumulator._words if isinstance(accumulator, NoisedSum) else accumulator._sum
    return held.tobytes() if hasattr(held, "tobytes") else held.total().numpy().tobytes()


@pytest.mark.parametrize("name", ["exact", "noised", "masked", "assumed"])
def test_an_upload_cut_anywhere_or_lengthened_is_no_message(name: str) -> None:
    hall = Hall(of(name, rounds=1, clients=4))
    before = _partial(hall.ask.into)
    whole = encode(hall.answer(1))
    cuts = sorted({*range(64), *range(len(whole) - 64, len(whole)), *random.Random(0).sample(range(len(whole)), 100)})
    for length in cuts:
        with pytest.raises(ProtocolError):
            decode(whole[:length])
    with pytest.raises(ProtocolError, match="too many"):
        decode(whole + b"\0")
    assert _partial(hall.ask.into) == before
    hall.ask.into.add(decode(whole))


@pytest.mark.parametrize("name", ["exact", "noised", "masked"])
def test_an_upload_of_an_earlier_round_or_attempt_cannot_be_played_again(name: str) -> None:
    first, again = Hall(of(name, clients=4)), Hall(of(name, clients=4), attempt=1)
    old = [first.answer(client) for client in range(4)]
    for reply in old:
        with pytest.raises(ProtocolError, match="upload for round 1, attempt 0 arrived in round 1, attempt 1"):
            again.ask.into.add(reply)
    ask = first.go_on(old)
    while not isinstance(ask.common, Train):
        first.ask = ask
        ask = first.go_on([first.answer(client) for client in ask.to])
    assert ask.common.round == 1
    for reply in old:
        with pytest.raises(ProtocolError, match="upload for round 1, attempt 0 arrived in round 2"):
            ask.into.add(reply)


def test_a_client_cannot_be_made_to_upload_or_reveal_twice() -> None:
    hall = Hall(of("masked", clients=4))
    replies = [hall.answer(client) for client in range(4)]
    with pytest.raises(ProtocolError, match="client 1 was asked for round 1 of this run, which it has answered"):
        hall.answer(1)
    hall.ask = hall.go_on(replies)
    assert isinstance(hall.ask.common, Unmask)
    hall.answer(1)
    with pytest.raises(ProtocolError, match="client 1 was asked to reveal twice for round 1"):
        hall.answer(1)


@pytest.mark.parametrize("name", ["masked", "noised"])
def test_an_upload_that_comes_after_the_round_was_closed_is_refused(name: str) -> None:
    hall = Hall(of(name, clients=7))
    late = hall.answer(6)
    hall.ask = hall.go_on([hall.answer(client) for client in range(6)])
    assert not isinstance(hall.ask.common, Train)
    with pytest.raises(ProtocolError, match=r"Upload arrived where a (revealed|repaired) belongs"):
        hall.ask.into.add(late)


# --- the end of a run -------------------------------------------------------------------------------------------------


def test_when_the_target_is_spent_the_run_stops_and_says_so() -> None:
    """Six rounds' worth of privacy, four of which an earlier attempt has used."""
    one = job(scheme="nadp", rounds=6, loss=None)
    accountant = accountant_for(one.scheme, 5)
    assert accountant is not None
    assert accountant.limit is not None
    for name in accountant.adversaries:
        accountant.spent[name] += accountant.limit * 4 / 6
    server = server_of(one)
    server._accountant = accountant
    boundaries: list[RoundDone] = []
    stops: list[str] = []

    def book(done: RoundDone) -> None:
        boundaries.append(done)
        for name in accountant.adversaries:
            accountant.spent[name] += accountant.limit / 6  # type: ignore[operator]

    drive(LocalEngine(client_role(one), one.pool), server.run(), on_round=book, on_stop=stops.append)
    assert len(boundaries) == 2
    assert stops == ["round 3 would bring clients over the privacy target, and 0 are left that it would not"]
    assert server.state.round == 2


def test_a_client_whose_privacy_is_spent_is_left_out_while_the_others_go_on() -> None:
    one = job(scheme="ldp", rounds=4, loss=None)
    accountant = accountant_for(one.scheme, 5)
    assert accountant is not None
    assert accountant.limit is not None
    for name in accountant.adversaries:
        accountant.spent[name][3] = accountant.limit
    server = server_of(one)
    server._accountant = accountant
    boundaries: list[RoundDone] = []
    drive(LocalEngine(client_role(one), one.pool), server.run(), on_round=boundaries.append)
    assert [done.cohort for done in boundaries] == [(0, 1, 2, 4)] * 4


def test_a_run_that_stops_early_keeps_what_it_has(tmp_path: Any) -> None:
    """Resumed with nothing left to spend: the model of the rounds that were paid for stays, and the reason is told."""
    one = job(scheme="nadp", rounds=3, loss=None)
    journal = tmp_path / "privacy.jsonl"
    first = train_job(one, state=fresh_state(one), journal=journal)
    assert len(first.rows) == 3
    state = first.state
    state.round, state.attempt = 2, 1  # back to the checkpoint before the last round
    before = state.weights.parameters.clone()
    said: list[str] = []
    second = train_job(one, state=state, journal=journal, say=said.append)
    assert second.rows == []
    assert "over the privacy target" in second.stopped
    assert len(said) == 1
    assert said[0].startswith(
        f"The run ends after 2 rounds: {second.stopped}. 1 round was begun before that no checkpoint holds"
    )
    assert same_bits(state.weights.parameters, before)
