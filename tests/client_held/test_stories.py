"""Servers that tell clients different stories, repeat rounds, go back to old models, or ask too often.

Tests of uniformity are those of masked uploads: fixed seeds, and less than one false alarm in a million seeds each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from client_held.relaying import Hall, watch_uploads
from federation import job
from fedveil.client_held import ciphers
from fedveil.client_held import client as holder
from fedveil.client_held import client as keeping
from fedveil.client_held.ciphers import Pads
from fedveil.client_held.client import MOST_MISREAD, UnreadableError
from fedveil.client_held.divided import _vote_key, divided
from fedveil.client_held.messages import Begin, Borrowed, Divide, Divided, Finish, Lend
from fedveil.crypto.keys import add_mask, add_words
from fedveil.crypto.linear_mac import MAC_WORDS, mac_words
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import Nonces
from fedveil.protocol.messages import Request
from fedveil.protocol.parts import RoundContext
from fedveil.runs.job import Job
from fedveil.uplink import masked
from fedveil.uplink.masked import Masked
from fedveil.uplink.unmasking import Label, MaskedUpload
from fedveil.uplink.vote import tags, vote_label
from uplink.masking import Federation, words
from uplink.test_masked import assert_uniform, byte_p_value

pytest.importorskip("tenseal")

SMALL: dict[str, Any] = {
    "loss": "cross-entropy",
    "lr": 0.1,
    "batch_size": 16,
    "options": {"depth": 1, "width": 4},
    "cipher": "pads",
}
WIDE = {**SMALL, "options": {"depth": 2, "width": 64}}
KEY = bytes(range(32))


def whole(**changes: Any) -> Job:
    """Everything hidden."""
    return job(scheme="ckks-fedavg", **{**SMALL, "clients": 5, "rounds": 4, **changes})


def parted(**changes: Any) -> Job:
    settings = {**SMALL, "clients": 5, "rounds": 6, "share": 0.2, "epsilon": 1000.0, **changes}
    return job(scheme="paraaegis", **settings)


def hall(one: Job, kind: type[Request], *, round: int = 0) -> Hall:
    found = Hall(one)
    found.until(kind, round=round)
    return found


def pads(one: Hall) -> Pads:
    cipher = one.role._uplink.cipher
    assert isinstance(cipher, Pads)
    return cipher


def added(uploads: Iterable[MaskedUpload], *, wide: int = MAC_WORDS) -> NDArray[np.uint64]:
    first, *others = (words(one) for one in uploads)
    total = first.copy()
    for other in others:
        add_words(total, other, wide=wide)
    return total


def signed(content: NDArray[np.uint64]) -> Tensor:
    return torch.from_numpy(content.view(np.int64))


# ---- different outcomes of one vote


BAD, VICTIM = 6, 0
"""The client on the server's side, and the one they want to read."""


class Outcomes:
    """A server that has the victim hide what matters, and everybody else what hardly moves."""

    def __init__(self, vote: str, unmask: str) -> None:
        how = {**WIDE, "clients": 7, "rounds": 2, "share": 0.1, "epsilon": 3.0, "local_epochs": 1}
        self.hall = hall(job(scheme="paraaegis", vote=vote, unmask=unmask, **how), Divide)
        self.size = self.hall.job.architecture.size
        self.count = self.hall.role._uplink.count(0, self.size)
        self.group = self.hall.states[BAD].membership()
        ring = self.hall.states[BAD].ring()
        self.context = RoundContext(0, 0, tuple(range(7)), ring.known(), ring.beacon)
        pending = self.hall.states[BAD].pending
        assert pending is not None
        self.before = self.hall.role._transcript(self.hall.states[BAD], pending)
        order = torch.argsort(pending.contribution[: self.size].abs(), stable=True)
        self.dead, self.big = order[: self.count].sort().values, order[-self.count :].sort().values
        own = self.hall.states[VICTIM].pending
        assert own is not None
        self.truth = divided(own.contribution, self.big, self.size)[1][: self.count]

    def told(self, winners: Tensor) -> Request:
        """An outcome that a client on the server's side forged: it has the key of the tags, and the ballots' pads."""
        request: Any = self.hall.ask.common
        if request.winners is not None:
            return replace(request, winners=tags(winners, key=_vote_key(self.group), label=vote_label(0, 0)))  # type: ignore[no-any-return]
        ballots = self.hall.role._uplink.ballots
        assert ballots is not None
        counts = np.zeros(self.size, dtype=np.uint64)
        counts[winners.numpy()] = 7
        stage = self.context.stage(0)
        code = ciphers._code(self.group, range(7), stage, self.before, counts)
        counts = np.concatenate([mac_words(code), counts])
        for client in ballots.padding(stage):
            add_mask(counts, ciphers._pad_seed(self.group, client, stage), wide=MAC_WORDS)
        return replace(request, counts=signed(counts))  # type: ignore[no-any-return]

    def replies(self) -> list[Divided]:
        chosen = {client: self.big if client == VICTIM else self.dead for client in range(7)}
        return [self.hall.answer(client, self.told(chosen[client])) for client in range(7)]

    def opened(self, total: Tensor) -> NDArray[np.uint64]:
        """The sum of the winners, pads off."""
        found = pads(self.hall).unpadded(self.group, total, range(7), self.context.stage(1))
        return found[MAC_WORDS : MAC_WORDS + self.count]

    def error(self, opened: NDArray[np.uint64]) -> float:
        """How far what was read is from the victim's own numbers, relative to these."""
        read = torch.from_numpy(pads(self.hall).codec(self.context).decode(opened)) * sum(self.context.samples())
        return float((read - self.truth).norm() / self.truth.norm())


def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that do not depend on what clients are told."""
    monkeypatch.setattr(holder, "told_outcome", lambda before, outcome: b"")
    monkeypatch.setattr(keeping, "told_sums", lambda before, sums, **sizes: b"")


@pytest.mark.parametrize("vote", ["tags", "histogram"])
def test_different_outcomes_of_a_vote_leave_a_uniform_sum(vote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Outcomes(vote, "on-dropout")
    opened = one.opened(signed(added(reply.hidden for reply in one.replies())))  # type: ignore[misc]
    assert_uniform(opened)
    assert one.error(opened) > 100
    unbound(monkeypatch)
    control = Outcomes(vote, "on-dropout")
    read = control.opened(signed(added(reply.hidden for reply in control.replies())))  # type: ignore[misc]
    assert control.error(read) < 0.1
    assert byte_p_value(read) < 1e-12


@pytest.mark.parametrize("vote", ["tags", "histogram"])
def test_after_different_outcomes_of_a_vote_nobody_takes_off_a_clients_own_mask(
    vote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Outcomes(vote, "always")
    one.hall.go_on(one.replies())
    one.hall.until(Begin, round=1)
    assert one.hall.done[0].failed
    assert one.hall.done[0].aggregate is None
    unbound(monkeypatch)
    control = Outcomes(vote, "always")
    control.hall.go_on(control.replies())
    control.hall.until(Begin, round=1)
    aggregate = control.hall.done[0].aggregate
    assert aggregate is not None
    assert aggregate.hidden is not None
    assert control.error(control.opened(aggregate.hidden)) < 0.1


def test_who_was_told_another_outcome_reads_no_sum_that_it_is_left_out_of() -> None:
    """Its weights would be others than everybody's, and nobody would notice: its masks cancelled in the next round."""
    one = hall(parted(unmask="always"), Begin)
    votes = [one.answer(client) for client in range(5)]
    one.go_on(votes)
    outcome: Any = one.ask.common
    pool = torch.unique(torch.cat([vote.tags for vote in votes]), dim=0)
    lost = torch.stack([tag for tag in pool if not (outcome.winners == tag).all(1).any()])
    other = torch.unique(torch.cat([outcome.winners[1:], lost[:1]]), dim=0)
    one.answer(4, replace(outcome, winners=other))
    one.go_on([one.answer(client) for client in range(4)])  # as if its upload had not arrived
    one.until(Begin, round=1) if not isinstance(one.ask.common, Begin) else None
    begin: Any = one.ask.common
    assert begin.latest.contributors.tolist() == [0, 1, 2, 3]
    one.ask = replace(one.ask, each={})  # nor is it lent the model
    one.answer(0)
    with pytest.raises(UnreadableError, match="is not what clients have sent"):
        one.answer(4, begin)


# ---- different sums


@pytest.mark.parametrize("kind", ["uploads", "ballots"])
def test_clients_that_were_told_different_sums_leave_a_uniform_sum(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit in the last place of one number is difference enough."""
    how = {**WIDE, "unmask": "on-dropout"}

    def opened(different: bool, *, authentic: bool = True) -> NDArray[np.uint64]:
        """What holds besides, where sums that were changed are not noticed."""
        make = whole(**how) if kind == "uploads" else parted(**how, vote="histogram")
        one = hall(make, Begin, round=1)
        begin: Any = one.ask.common
        hidden = begin.latest.hidden.clone()
        hidden[-1] += 1
        forged = replace(begin, latest=replace(begin.latest, hidden=hidden))
        if different and authentic:
            assert "it was changed on its way" in one.refusal(3, forged)
            monkeypatch.setattr(ciphers, "_code", lambda *sent: 0)
            return opened(different, authentic=False)
        replies = [one.answer(client, forged if different and client == 3 else begin) for client in range(5)]
        ring = one.states[0].ring()
        context = RoundContext(1, 0, tuple(range(5)), ring.known(), ring.beacon)
        cipher = pads(one) if kind == "uploads" else one.role._uplink.ballots
        assert cipher is not None
        total = signed(added(one.hidden if kind == "uploads" else one for one in replies))
        stage = context.stage(1 if kind == "uploads" else 0)
        return cipher.unpadded(one.states[4].membership(), total, range(5), stage)

    assert byte_p_value(opened(different=False)) < 1e-12
    assert_uniform(opened(different=True))
    unbound(monkeypatch)
    assert byte_p_value(opened(different=True, authentic=False)) < 1e-12


# ---- the same round again, and different cohorts


@pytest.mark.parametrize("make", [whole, parted], ids=["everything hidden", "a vote"])
def test_a_round_is_not_answered_again_as_another_attempt(make: Callable[[], Job]) -> None:
    """Of two sums of one round, the second without the victim, the difference is the victim's upload."""
    one = hall(make(), Begin)
    for client in range(5):
        one.answer(client)
    for attempt, cohort in ((1, range(1, 5)), (1, range(5)), (2, range(5))):
        begin = Begin(0, attempt, torch.tensor(cohort), 0, None)
        for client in cohort:
            why = "has answered or left behind" if len(cohort) == 5 else "other clients than the epoch's schedule"
            assert why in one.refusal(client, begin)


def test_an_earlier_round_is_not_answered_as_another_attempt() -> None:
    one = hall(whole(), Begin, round=2)
    for number in (0, 1):
        begin = replace(one.ask.common, round=number, attempt=1)  # type: ignore[type-var]
        assert "has answered or left behind" in one.refusal(0, begin)
    one.answer(0)


def cornered(graph: Callable[[RoundContext], Any], context: Callable[[tuple[int, ...]], RoundContext]) -> Any:
    """For each of three clients a cohort in which its neighbours are the other two."""
    three, found = (9, 10, 11), {}
    for client in three:
        cohorts = (low + three for low in itertools.combinations(range(9), 5))
        near = set(three) - {client}
        found[client] = next(one for one in cohorts if set(graph(context(one)).neighbours(client)) == near)
    assert len(set(found.values())) > 1
    return found


def by_numbers(state: ClientState, round: int, attempt: int) -> Label:
    return Label(round, attempt, b"")


def test_clients_that_were_told_different_cohorts_leave_a_uniform_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a sparse graph three clients could otherwise be told to mask among themselves, and none of them pads."""

    def summed() -> NDArray[np.uint64]:
        one = hall(whole(**WIDE, clients=12, unmask="on-dropout", neighbours=2), Begin)
        ring = one.states[0].ring()
        masks = pads(one).masks.graph
        told = cornered(masks, lambda cohort: RoundContext(0, 0, cohort, ring.known(), ring.beacon).stage(1))
        begins = {client: Begin(0, 0, torch.tensor(cohort), 0, None) for client, cohort in told.items()}
        for client, begin in begins.items():
            assert "names other clients than the epoch's schedule" in one.refusal(client, begin)
        # What holds besides: masks are bound to the graph, whoever lets it be chosen.
        monkeypatch.setattr(RoundContext, "check_scheduled", lambda context: None)
        return added(one.answer(client, begin).hidden for client, begin in begins.items())

    covered = watch_uploads(monkeypatch)
    checked = RoundContext.check_scheduled
    assert_uniform(summed())
    monkeypatch.setattr(RoundContext, "check_scheduled", checked)
    monkeypatch.setattr(masked, "_label", by_numbers)
    covered.clear()
    bare = summed()
    assert byte_p_value(bare) < 1e-12
    assert len(covered) == 3


@pytest.mark.parametrize("bound", [True, False])
def test_under_masks_alone_different_cohorts_leave_a_uniform_sum_too(
    bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not bound:
        monkeypatch.setattr(masked, "_label", by_numbers)
    one = Federation(12, Masked(unmask="on-dropout", degree=2), length=20_000)
    told = cornered(one.graph, lambda cohort: one.context(cohort=cohort))
    vectors = one.vectors()
    uploads = (one.upload(client, vectors[client], one.context(cohort=cohort)) for client, cohort in told.items())
    total = added(uploads, wide=0)
    if bound:
        assert_uniform(total)
    else:
        context = one.context(cohort=next(iter(told.values())))
        read = one.uplink.codec(context, one.terms.work).decode(total)
        assert np.allclose(read, sum(vectors[client] for client in told))


# ---- models that go back


def test_a_client_does_not_go_back_to_an_earlier_version_of_the_model() -> None:
    one = hall(whole(), Begin, round=1)
    first: Any = one.ask.common
    lent = Borrowed(one.answer(0, Lend(1, first.latest)).sealed)
    one.until(Begin, round=2)
    second = one.ask.common
    one.answer(3)
    back = replace(second, round=3, version=1, latest=None)  # type: ignore[type-var]
    for request in (back, Lend(1, None), Finish(1, None)):
        assert "holds version 2 of the model and was asked to go back to 1" in one.refusal(3, request, lent)


def test_loans_that_are_sent_again_take_nobody_back_below_what_its_own_sums_have_led_to() -> None:
    """A server alone has honest clients' sealed models, and may pass on which it likes, as often as it likes."""
    one = hall(whole(rounds=8), Begin, round=1)
    early = Borrowed(one.answer(4, Lend(1, one.ask.common.latest)).sealed)  # type: ignore[attr-defined]
    one.until(Begin, round=4)
    begin: Any = one.ask.common
    late = Borrowed(one.answer(4, Lend(begin.version, begin.latest)).sealed)
    # Without the sums, as if it had missed them, it takes the loan; and then another of the same version.
    for _ in range(2):
        one.answer(0, Lend(begin.version, None), late)
    held = one.states[0].held
    assert held is not None
    assert (held.version, held.borrowed, held.reached) == (4, True, 3)
    assert "holds version 3 of the model and was asked to go back to 1" in one.refusal(0, Lend(1, None), early)
    slept = ClientState.unseal(one.states[0].seal(KEY), KEY).held
    assert slept is not None
    assert slept.reached == 3


def test_nobodys_loan_takes_the_place_of_sums_that_a_client_has_worked_for() -> None:
    """With a client on its side a server could make one model stand out, and read its upload off the next sum."""
    one = hall(whole(), Begin, round=1)
    begin: Any = one.ask.common
    lent = one.answer(1, Lend(1, begin.latest))
    ally = one.states[1]
    assert ally.held is not None
    weights = replace(ally.held.weights, parameters=ally.held.weights.parameters + 20.0)
    crafted = one.role._keeper.lend(replace(ally, held=replace(ally.held, weights=weights)))
    assert not torch.equal(crafted.sealed, lent.sealed)
    one.answer(4, begin, Borrowed(crafted.sealed))
    held = one.states[4].held
    assert held is not None
    assert not held.borrowed
    assert torch.equal(held.weights.parameters, ally.held.weights.parameters)


@pytest.mark.parametrize("scheme", ["paraaegis", "serial"])
def test_who_lacks_what_the_next_epochs_rounds_are_drawn_by_reads_the_sums_it_has_worked_for(scheme: str) -> None:
    """A server that keeps nonces back has nobody take a loan in place of them."""
    one = hall(job(scheme=scheme, **{**SMALL, "clients": 5, "rounds": 6, "epsilon": 1000.0}), Begin, round=1)
    introductions = one.relay._introductions
    assert introductions is not None
    introductions.renew()
    while not isinstance(one.ask.common, Nonces):
        one.go_on([one.answer(client) for client in one.ask.to])
    version, latest = one.relay.standing
    assert latest is not None
    one.answer(1, request=one.ask.common)
    lent = Borrowed(one.answer(1, Lend(version, latest)).sealed)  # type: ignore[attr-defined]
    one.states[0] = ClientState.unseal(one.states[0].seal(KEY), KEY)
    assert not one.states[0].ring().beacon
    one.answer(0, Finish(version, latest), lent)
    held, others = one.states[0].held, one.states[1].held
    assert held is not None
    assert others is not None
    assert (held.version, held.borrowed, one.states[0].misread) == (version, False, 0)
    assert torch.equal(held.weights.parameters, others.weights.parameters)


# ---- sums that cannot be read


def unreadable(request: Any, by: int = 1 << 62) -> Any:
    return replace(request, latest=replace(request.latest, hidden=request.latest.hidden + by))


def test_a_client_leaves_after_three_unreadable_sums_and_takes_part_in_a_new_run() -> None:
    """Every refusal tells whether some sum is in range; whoever has been put to sleep remembers how many it gave."""
    one = hall(whole(), Begin, round=1)
    begin: Any = one.ask.common
    lend, finish = Lend(1, begin.latest), Finish(1, begin.latest)
    # One sum, however often and with whatever it is asked about it, is refused once.
    again = [unreadable(request, by=1) for request in (begin, begin, lend, finish)]
    for request in (*again, unreadable(lend, by=2), unreadable(finish, by=3)):
        with pytest.raises(UnreadableError, match="a sum cannot be read"):
            one.answer(2, request)
        one.states[2] = ClientState.unseal(one.states[2].seal(KEY), KEY)
    assert one.states[2].misread == MOST_MISREAD == 3
    for request in (begin, Lend(1, begin.latest), Finish(1, begin.latest)):
        assert "has refused 3 sums of this run and takes no further part" in one.refusal(2, request)
    one.answer(1)
    again = Hall(whole(), attempt=1)
    again.states[2] = one.states[2]
    again.until(Begin)
    again.answer(2)
    assert again.states[2].misread == 0
