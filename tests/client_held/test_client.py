"""Clients that hold the model: what they refuse to be told, how often they answer, and what they spend."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from client_held.relaying import Hall
from federation import held_run, job, same_bits
from fedveil.client_held.messages import Begin, Borrowed, Divide, Lend
from fedveil.crypto import ckks
from fedveil.crypto.keys import seal
from fedveil.errors import ProtocolError
from fedveil.protocol.codec import as_bytes
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.messages import Aggregate, Request, Train
from fedveil.runs.job import Job
from fedveil.uplink.unmasking import Unmask
from fedveil.work.messages import ClientData

pytest.importorskip("tenseal")

SMALL: dict[str, Any] = {
    "loss": "cross-entropy",
    "lr": 0.1,
    "batch_size": 16,
    "options": {"depth": 1, "width": 4},
    "clients": 5,
    "rounds": 3,
    "value_range": 64.0,
}
WAYS: dict[str, dict[str, Any]] = {
    "ckks": {},
    "pads": {"cipher": "pads"},
    "ballots": {"cipher": "pads", "vote": "histogram"},
}


def of(name: str = "pads", **changes: Any) -> Job:
    return job(scheme="paraaegis", **{**SMALL, "share": 0.2, "epsilon": 1000.0, **WAYS[name], **changes})


def hall(kind: type[Request], name: str = "pads", *, round: int = 0, **changes: Any) -> Hall:
    one = Hall(of(name, **changes))
    one.until(kind, round=round)
    return one


def sent(one: Hall, **changes: Any) -> Any:
    """What the server asks now, with some of it changed."""
    return replace(one.ask.common, **changes)  # type: ignore[type-var]


# ---- rounds


COHORTS: dict[str, tuple[list[int], str]] = {
    "another order": ([1, 2, 3, 4, 0], "must name every client once, in ascending order"),
    "one twice": ([0, 0, 1, 2, 3], "must name every client once, in ascending order"),
    "without it": ([1, 2, 3, 4], "other clients than the epoch's schedule"),
    "a stranger": ([0, 1, 2, 9], "other clients than the epoch's schedule"),
    "nobody": ([], "other clients than the epoch's schedule"),
    "too few": ([0, 1], "other clients than the epoch's schedule"),
    "one less": ([0, 1, 2, 3], "other clients than the epoch's schedule"),
}


@pytest.mark.parametrize(("cohort", "why"), COHORTS.values(), ids=COHORTS)
@pytest.mark.parametrize("kind", [Begin, Divide])
def test_a_cohort_that_cannot_be_is_refused(kind: type[Request], cohort: list[int], why: str) -> None:
    """Who pads follows from the list. Told a list of its own that ends with itself, no client would pad."""
    one = hall(kind)
    assert why in one.refusal(0, sent(one, cohort=torch.tensor(cohort, dtype=torch.int64)))
    assert "is torch.float32" in one.refusal(0, sent(one, cohort=torch.zeros(3)))
    one.answer(0)


@pytest.mark.parametrize("name", WAYS)
def test_each_round_is_answered_once_at_every_stage(name: str) -> None:
    one = hall(Begin, name)
    vote = one.answer(0)
    assert "which it has answered" in one.refusal(0)
    one.go_on([vote, *(one.answer(client) for client in (1, 2, 3, 4))])
    one.until(Divide)
    upload = one.answer(0)
    assert "asked for a second upload of round 1" in one.refusal(0)
    begin = Begin(0, 0, torch.arange(5), 0, None)
    assert "which it has answered" in one.refusal(0, begin)
    one.go_on([upload, *(one.answer(client) for client in (1, 2, 3, 4))])
    if name != "ckks":
        assert isinstance(one.ask.common, Unmask)
        one.answer(0)
        assert "asked to reveal twice" in one.refusal(0)


def test_a_round_without_a_vote_is_answered_once() -> None:
    one = hall(Begin, share=1.0)
    one.answer(0)
    assert "which it has answered" in one.refusal(0)
    divide = Divide(0, 0, torch.arange(5), torch.zeros(0, 16, dtype=torch.uint8), None, torch.arange(5))
    assert "asked for a second upload" in one.refusal(0, divide)


def test_the_outcome_of_a_vote_in_which_it_has_no_part_is_refused() -> None:
    one = hall(Divide)
    before = hall(Begin)
    assert "in which it has no part" in before.refusal(0, one.ask.common)
    for changes in ({"round": 1}, {"attempt": 1}):
        assert "in which it has no part" in one.refusal(0, sent(one, **changes))
    one.answer(0)


def test_messages_of_other_schemes_are_refused() -> None:
    one = hall(Begin, "ckks")
    veil = one.job.scheme.downlink.veil(
        one.job.architecture, one.job.weights, stream=one.job.secrets.stream("veil"), head_level=None
    )
    assert "was sent a Train, which this scheme has not" in one.refusal(0, Train(0, 0, veil.broadcast()))
    for round_ in (0, 1):
        unmask = Unmask(round_, 0, torch.arange(5))
        assert "asked to unmask where nothing is masked" in one.refusal(0, unmask)


# ---- winners


def flipped(tags: torch.Tensor) -> torch.Tensor:
    changed = tags.clone()
    changed[3, 7] ^= 1
    return changed


def earlier_tags() -> torch.Tensor:
    winners = hall(Divide, "pads").ask.common.winners  # type: ignore[attr-defined]
    assert isinstance(winners, torch.Tensor)
    return winners


TAGS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "a flipped bit": (flipped, "1 of 130 tags in the vote's result were not made by a client for this round"),
    "one twice": (lambda tags: torch.cat([tags[1:], tags[-1:]]), "more than once"),
    "one too few": (lambda tags: tags[1:], "has 129 tags where 130 belong"),
    "one too many": (lambda tags: torch.cat([tags, tags[:1]]), "has 131 tags where 130 belong"),
    "of the round before": (lambda tags: earlier_tags(), "130 of 130 tags .* were not made"),
    "made up": (lambda tags: tags ^ 0x5A, "130 of 130 tags .* were not made"),
    "indices": (lambda tags: torch.arange(130), "where uint8 of shape"),
    "none": (lambda tags: None, "names no winners"),
}


@pytest.mark.parametrize(("forge", "why"), TAGS.values(), ids=TAGS)
def test_forged_winners_are_refused(forge: Callable[[torch.Tensor], torch.Tensor | None], why: str) -> None:
    one = hall(Divide, "pads", round=1)
    winners = one.ask.common.winners  # type: ignore[attr-defined]
    assert re.search(why, one.refusal(0, sent(one, winners=forge(winners))))
    one.answer(0)


COUNTS: dict[str, tuple[dict[str, Callable[[Any], Any]], str]] = {
    "one vote more": ({"counts": lambda c: c + torch.eye(1, len(c), dtype=torch.int64)[0]}, "was changed on its way"),
    "zeros": ({"counts": torch.zeros_like}, "was changed on its way"),
    "shorter": ({"counts": lambda c: c[1:]}, r"has shape \(651,\), and ballot is 652 here"),
    "no words": ({"counts": lambda c: c.double()}, "is torch.float64"),
    "nothing": ({"counts": lambda c: None}, "holds no sum of ballots"),
    "a voter less who padded": ({"voters": lambda v: without(v, 1)}, "its list of contributors is wrong"),
    "without it": ({"voters": lambda v: v[1:]}, "voters that were not asked, or not this client"),
    "a voter less": ({"voters": lambda v: v[:-1]}, "its list of contributors is wrong"),
}


@pytest.mark.parametrize(("changes", "why"), COUNTS.values(), ids=COUNTS)
def test_forged_counts_are_refused(changes: dict[str, Callable[[Any], Any]], why: str) -> None:
    one = hall(Divide, "ballots", round=1)
    forged = {name: change(getattr(one.ask.common, name)) for name, change in changes.items()}
    assert re.search(why, one.refusal(0, sent(one, **forged)))
    one.answer(0)


# ---- sums


def without(numbers: torch.Tensor, *gone: int) -> torch.Tensor:
    return torch.tensor([one for one in numbers.tolist() if one not in gone], dtype=torch.int64)


def other_ciphertext(content: torch.Tensor) -> torch.Tensor:
    key = ckks.generate(ckks.choose(addends=5, largest=64.0))
    return from_bytes(ckks.encrypt(torch.zeros(ckks.summary(to_bytes(content)).length), key.public))


Change = dict[str, Callable[[Any], Any]]
BOTH: dict[str, tuple[Change, str]] = {
    "a contributor that was not asked": ({"asked": lambda a: without(a, 4)}, "contributors that were not asked"),
    "one twice": ({"contributors": lambda c: torch.cat([c, c[:1]])}, "must name every client once"),
    "nobody": ({"contributors": lambda c: c[:0]}, "contributors that were not asked"),
    "so few that they are seen": ({"contributors": lambda c: c[:2]}, "at least three"),
    "a stranger": ({"asked": lambda a: torch.cat([a, torch.tensor([9])])}, "asked cannot be 6 here"),
    "a longer rest": ({"rest": lambda r: torch.cat([r, r[:1]])}, r"a sum under noise has shape \(521,\)"),
    "real numbers": ({"rest": lambda rest: rest.double()}, "is torch.float64 and has shape"),
    "nothing hidden": ({"hidden": lambda h: None}, "a round's hidden sum is missing"),
    "another round": ({"round": lambda r: 1}, "does not know which coordinates round 2 hid"),
    "another attempt": ({"attempt": lambda a: 1}, "does not know which coordinates"),
    "another version": ({"version": lambda v: 2}, "was not sent what it lacks"),
}
BY_CIPHER: dict[str, dict[str, tuple[Change, str]]] = {
    "pads": {
        "a contributor less who padded": ({"contributors": lambda c: without(c, 0)}, "its list of contributors is wr"),
        "a contributor less who did not": ({"contributors": lambda c: without(c, 4)}, "its list of contributors is wr"),
        "one asked less": (
            {"contributors": lambda c: without(c, 4), "asked": lambda a: without(a, 4)},
            "its list of contributors is wrong",
        ),
        "a shorter hidden sum": ({"hidden": lambda h: h[1:]}, "was changed on its way"),
        "a step more of a hidden number": ({"hidden": lambda h: h + (torch.arange(len(h)) == 7)}, "was changed on its"),
        "2^63 more of a hidden number": (
            {"hidden": lambda h: h ^ (torch.arange(len(h)) == 7) * -(1 << 63)},
            "was changed",
        ),
        "another code": ({"hidden": lambda h: h + (torch.arange(len(h)) == 0)}, "was changed on its way"),
        "a code with 2^64 more": ({"hidden": lambda h: h + (torch.arange(len(h)) == 1)}, "was changed on its way"),
        "a step more under noise": ({"rest": lambda r: r + (torch.arange(len(r)) == 3)}, "was changed on its way"),
        "two numbers under noise for each other": ({"rest": lambda r: r.flip(0)}, "was changed on its way"),
        "numbers": ({"hidden": lambda h: h.double()}, "is torch.float64"),
    },
    "ckks": {
        "a contributor less": ({"contributors": lambda c: without(c, 4)}, "is of 5 ciphertexts, and 4 contributors"),
        "a damaged hidden sum": ({"hidden": lambda h: h ^ 1}, ""),
        "a sum under another key": ({"hidden": other_ciphertext}, "is of 1 ciphertexts, and 5 contributors"),
        "words": ({"hidden": lambda h: h.long()}, "a sum of ciphertexts is malformed"),
    },
}
SUMS = [(way, *one) for way in BY_CIPHER for one in (*BOTH.items(), *BY_CIPHER[way].items())]


@pytest.fixture(scope="module")
def second_round() -> dict[str, Hall]:
    """Runs at their second round, which nobody has begun: clients leave refusals as they were."""
    return {way: hall(Begin, way, round=1) for way in BY_CIPHER}


@pytest.mark.parametrize(("way", "name", "wrong"), SUMS, ids=[f"{way}, {name}" for way, name, _ in SUMS])
def test_sums_that_cannot_be_are_refused(
    second_round: dict[str, Hall], way: str, name: str, wrong: tuple[Change, str]
) -> None:
    one, (changes, why) = second_round[way], wrong
    latest: Aggregate = one.ask.common.latest  # type: ignore[attr-defined]
    forged = replace(latest, **{name: change(getattr(latest, name)) for name, change in changes.items()})
    assert re.search(why, one.refusal(2, sent(one, latest=forged)))
    held = one.states[2].held
    assert held is not None
    assert held.version == 0


# ---- models


def test_work_on_a_version_it_does_not_have_is_refused(second_round: dict[str, Hall]) -> None:
    one = second_round["pads"]
    for changes in ({"version": 2}, {"version": 7, "latest": None}, {"latest": None}):
        assert "holds version 0 of the model" in one.refusal(1, sent(one, **changes))
        assert "holds version 0" in one.refusal(1, Lend(changes.get("version", 1), changes.get("latest")))  # type: ignore[arg-type]
    for wrong in (sent(one, version=-1), Lend(-1, None)):
        with pytest.raises(ProtocolError, match="out of range"):
            one.answer(1, wrong)


@pytest.fixture(scope="module")
def lending() -> Hall:
    """A run at the question who lends the model to client 4, which has missed the first round."""
    one = hall(Begin)
    one.go_on([one.answer(client) for client in range(4)])
    one.until(Lend)
    return one


def lent(one: Hall, facts: Any, tensors: Any, *, version: int = 1, group: int = 0) -> Borrowed:
    """A model that a member seals with whatever content."""
    key = one.states[group].membership().seed(round=0, attempt=0, purpose="model")
    return Borrowed(from_bytes(seal(as_bytes(facts, tensors), key=key, purpose=f"model of version {version}")))


def test_only_a_whole_model_of_the_right_version_and_group_is_borrowed(lending: Hall) -> None:
    sealed = lending.answer(lending.ask.to[0]).sealed
    begin = Begin(1, 0, torch.arange(5), 1, None)
    damaged = sealed.clone()
    damaged[40] ^= 1
    for wrong in (damaged, sealed[:-1], sealed[:0]):
        assert "damaged, or sealed under another key" in lending.refusal(4, begin, Borrowed(wrong))
    assert "damaged" in lending.refusal(4, replace(begin, version=2), Borrowed(sealed))
    assert "sealed under another key" in lending.refusal(4, begin, _another_group())
    held = lending.states[lending.ask.to[0]].held
    assert held is not None
    facts, tensors = held.facts(), held.tensors()
    for forged in (
        lent(lending, {**facts, "version": 3}, tensors),
        lent(lending, {}, tensors),
        lent(lending, facts, {}),
        lent(lending, facts, {**tensors, "held.parameters": tensors["held.parameters"][1:]}),
        lent(lending, facts, {**tensors, "held.velocity": tensors["held.velocity"][1:]}),
        lent(lending, facts, {**tensors, "held.parameters": tensors["held.parameters"].float()}),
        lent(lending, facts, {**tensors, "held.buffer.extra": tensors["held.velocity"]}),
    ):
        assert "a model of another version or architecture" in lending.refusal(4, begin, forged)
    lending.answer(4, begin, Borrowed(sealed))
    own = lending.states[4].held
    assert own is not None
    assert (own.version, own.loss) == (1, held.loss)
    assert same_bits(own.weights.parameters, held.weights.parameters)
    assert same_bits(own.velocity, held.velocity)


def _another_group() -> Borrowed:
    other = hall(Begin, seed=2)
    start = other.role._keeper._start
    return lent(other, {**start.facts(), "version": 1}, start.tensors())


# ---- numbers that run away


def poisoned(one: Job, client: int, number: float) -> Job:
    data = one.pool.clients[client]
    x, y = data.take(torch.arange(len(data)))
    own = ClientData(client, torch.full_like(x, number), y)
    return replace(
        one, pool=replace(one.pool, clients=tuple(own if d.client == client else d for d in one.pool.clients))
    )


def test_without_noise_no_refusal_tells_about_the_data_either() -> None:
    whole = job(scheme="ckks-fedavg", **{**SMALL, "clients": 5, "rounds": 1})
    for number in (float("nan"), 1e3):
        run = held_run(poisoned(whole, 2, number))
        assert not run.rounds[0].gathered.refused
        assert run.rounds[0].gathered.arrived == (0, 1, 2, 3, 4)
        assert bool(run.model.isfinite().all())


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("number", [float("nan"), 1e3, 1e9])
def test_under_a_privacy_claim_no_refusal_tells_about_the_data(name: str, number: float) -> None:
    """A training that ran away counts as one that moved nothing; what is beyond the range is cut off."""
    run = held_run(poisoned(of(name), 2, number))
    for done in run.rounds:
        assert not done.gathered.refused
        assert set(done.gathered.arrived) == set(range(5))
    assert bool(run.model.isfinite().all())
