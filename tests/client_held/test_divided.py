"""Two protections side by side: the same models as with one, or none, of them, whoever drops out when."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from client_held.relaying import Covered, watch_uploads
from federation import HeldRun, held_run, job, same_bits, trained
from fedveil.client_held import divided as parallel
from fedveil.client_held.divided import Parallel
from fedveil.client_held.messages import Begin, Divide
from fedveil.crypto import ckks
from fedveil.errors import ConfigError
from fedveil.protocol.messages import Request, Train
from fedveil.protocol.phases import RoundDone
from fedveil.roles.server import ServerState
from fedveil.runs.job import Job
from fedveil.uplink import grid
from fedveil.uplink.unmasking import Unmask
from pairs import chosen, crossed

pytest.importorskip("tenseal")

EXACT = 1e-9
LEARNING: dict[str, Any] = {
    "loss": "cross-entropy",
    "lr": 0.1,
    "momentum": 0.9,
    "batch_size": 16,
    "local_epochs": 1,
    "how": "size",
    "ratio": 4.0,
    "clients": 6,
    "rounds": 3,
}
# With this range, CKKS rounds so that a decrypted sum follows from the values alone: votes cannot flip by chance.
RANGE = {"value_range": 64.0}
PADS: dict[str, Any] = {"cipher": "pads"}
ON_DROPOUT: dict[str, Any] = {"cipher": "pads", "unmask": "on-dropout"}
CIPHERS: dict[str, dict[str, Any]] = {"ckks": {}, "pads": PADS, "pads, on dropout": ON_DROPOUT}
BATCH_NORM = {"depth": 2, "width": 16, "norm": "batch"}
CASES: dict[str, dict[str, Any]] = {
    "everybody": {},
    "batch norm": {"options": BATCH_NORM},
    "some of many": {"clients": 9, "cohort": 5, "rounds": 5},
    "two epochs, no momentum": {"local_epochs": 2, "momentum": 0.0, "how": "iid"},
}
LOUD = {"epsilon": 1000.0, "clip": 0.5}
ONE = {"share": 1.0}


def of(scheme: str, **changes: Any) -> Job:
    masked = scheme in ("ckks-fedavg", "serial", "paraaegis")
    return job(scheme=scheme, **{**LEARNING, **(RANGE if masked else {}), **changes})


def rounding(one: Job) -> float:
    """How far CKKS may carry a model away.

    A decrypted mean is off by `error` times (samples asked)/(samples arrived) ≤ 2; T rounds with momentum β add
    up at most T/(1 − β) of them. The factor 2 is for what training makes of a model that is off by so little.
    """
    error = ckks.choose(addends=one.cohort.size, largest=RANGE["value_range"]).error
    return 2 * 2 * one.config.rounds / (1 - one.config.momentum) * error


@cache
def reference(scheme: str, given: str) -> tuple[ServerState, list[RoundDone]]:
    """A run of a scheme whose server holds the model; `given` are settings as JSON, for they are its key."""
    return trained(of(scheme, **json.loads(given)))


def plain(scheme: str = "fedavg", **changes: Any) -> tuple[ServerState, list[RoundDone]]:
    return reference(scheme, json.dumps(changes, sort_keys=True))


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def check_same(ours: HeldRun, theirs: ServerState, their_rounds: list[RoundDone], *, within: float) -> None:
    """Models, statistics and losses; and there was something to get wrong."""
    assert not ours.stops
    assert [bool(one.failed) for one in ours.rounds] == [bool(one.failed) for one in their_rounds]
    assert apart(ours.model, theirs.weights.parameters) < within
    assert apart(ours.model, ours.job.weights.parameters) > 100 * within
    if theirs.weights.statistics.numel():
        assert apart(ours.state.weights.statistics, theirs.weights.statistics) < within
        assert apart(ours.state.weights.statistics, ours.job.weights.statistics) > 100 * within
    for mine, other in zip(ours.rounds, their_rounds, strict=True):
        if mine.loss is not None:
            assert mine.loss == pytest.approx(other.loss, abs=max(within, 1e-9))


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings under which dividing an update and putting it together again must change nothing."""
    monkeypatch.setattr(parallel, "add_residual", lambda *noise, **named: None)
    monkeypatch.setattr(grid, "ROUNDING", 2.0**-44)  # nor rounding
    return {"clip": 10.0}


# ---- the ends of the dial, and the combinations


@pytest.mark.parametrize(("cipher", "case"), crossed(CIPHERS, CASES))
def test_everything_hidden_ends_in_the_model_of_plain_averaging(cipher: dict[str, Any], case: dict[str, Any]) -> None:
    theirs = plain(**case)
    one = of("ckks-fedavg", **cipher, **case)
    within = EXACT if cipher else rounding(one)
    check_same(held_run(one), *theirs, within=within)


@pytest.mark.parametrize(("cipher", "case"), [({}, "some of many"), (PADS, "batch norm"), (ON_DROPOUT, "everybody")])
def test_a_share_of_one_is_everything_hidden(cipher: dict[str, Any], case: str) -> None:
    """Under pads to the last bit."""
    whole, share = (of(name, **cipher, **CASES[case], **how) for name, how in (("ckks-fedavg", {}), ("paraaegis", ONE)))
    ours, theirs = held_run(share), held_run(whole)
    assert same_bits(ours.model, theirs.model) or not cipher
    assert apart(ours.model, theirs.model) < rounding(whole)


NOISED = {name: case for name, case in CASES.items() if name != "batch norm"}


@pytest.mark.parametrize("case", chosen(NOISED, slow=["everybody", "two epochs, no momentum"]))
def test_a_share_of_zero_is_dp_fedavg(case: dict[str, Any]) -> None:
    theirs = plain("dp-fedavg", **LOUD, **case)
    check_same(held_run(of("paraaegis", share=0.0, **LOUD, **case)), *theirs, within=EXACT)


@pytest.mark.parametrize(
    ("cipher", "case"),
    [
        ({}, "some of many"),
        (PADS, "some of many"),
        (ON_DROPOUT, "everybody"),
        pytest.param({}, "everybody", marks=pytest.mark.slow),
        pytest.param({}, "two epochs, no momentum", marks=pytest.mark.slow),
    ],
)
def test_noise_then_a_cipher_is_dp_fedavg(cipher: dict[str, Any], case: str) -> None:
    theirs = plain("dp-fedavg", **LOUD, **CASES[case])
    one = of("serial", **LOUD, **cipher, **CASES[case])
    check_same(held_run(one), *theirs, within=EXACT if cipher else rounding(one))


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        ("some of many", "max"),
        ("batch norm", "random"),
        pytest.param("everybody", "max", marks=pytest.mark.slow),
        pytest.param("batch norm", "max", marks=pytest.mark.slow),
        pytest.param("two epochs, no momentum", "max", marks=pytest.mark.slow),
    ],
)
def test_both_ciphers_end_in_the_same_model(case: str, strategy: str) -> None:
    one, other = (of("paraaegis", strategy=strategy, **LOUD, **cipher, **CASES[case]) for cipher in ({}, PADS))
    ours, theirs = held_run(one), held_run(other)
    check_same(ours, theirs.state, theirs.rounds, within=rounding(one))


@pytest.mark.parametrize(
    ("case", "strategy", "cipher"),
    [
        ("some of many", "max", PADS),
        ("everybody", "min", ON_DROPOUT),
        pytest.param("everybody", "max", PADS, marks=pytest.mark.slow),
        pytest.param("batch norm", "max", PADS, marks=pytest.mark.slow),
        pytest.param("two epochs, no momentum", "max", PADS, marks=pytest.mark.slow),
    ],
)
def test_counting_tags_and_summing_ballots_elect_the_same(case: str, strategy: str, cipher: dict[str, Any]) -> None:
    given = {"strategy": strategy, "share": 0.3, "share_decay": 0.8, **LOUD, **cipher, **CASES[case]}
    ours, theirs = (held_run(of("paraaegis", vote=vote, **given)) for vote in ("tags", "histogram"))
    assert same_bits(ours.model, theirs.model)
    assert not any(one.failed for one in (*ours.rounds, *theirs.rounds))


DIVIDED: dict[str, dict[str, Any]] = {
    "a tenth, tags, ckks": {},
    "a tenth, tags, pads": {**PADS},
    "a tenth, ballots, ckks": {"vote": "histogram"},
    "half of it, ballots, pads": {"vote": "histogram", "share": 0.5, **PADS},
    "the smallest": {"strategy": "min", **PADS},
    "a lot": {"strategy": "random", "share": 0.25, **PADS},
    "random votes": {"strategy": "random-votes", "share": 0.25, **PADS},
    "a lot, ckks": {"strategy": "random", "share": 0.25},
    "ever less": {"share": 0.9, "share_decay": 0.5, **PADS},
    "less than everything": {"share": 1.0, "share_decay": 0.5, **PADS},
    "nearly nothing": {"share": 1e-9, **PADS},
    "nothing": {"share": 0.0},
    "on dropout": {"vote": "histogram", **ON_DROPOUT},
    "sparse masks": {"clients": 12, "neighbours": 6, "vote": "histogram", **PADS},
}


@pytest.mark.parametrize(
    "how",
    chosen(DIVIDED, slow=["a tenth, tags, pads", "a tenth, ballots, ckks", "a lot", "less than everything"]),
)
def test_without_noise_and_clipping_dividing_changes_nothing(
    without_noise: dict[str, Any], how: dict[str, Any]
) -> None:
    theirs = plain(clients=how.get("clients", 6))
    one = of("paraaegis", **without_noise, **how)
    within = EXACT if "cipher" in how or how.get("share") == 0.0 else rounding(one)
    check_same(held_run(one), *theirs, within=within)


@pytest.mark.parametrize(
    "name",
    [
        "a tenth, tags, pads",
        "a lot",
        pytest.param("half of it, ballots, pads", marks=pytest.mark.slow),
        pytest.param("ever less", marks=pytest.mark.slow),
    ],
)
def test_batch_statistics_travel_hidden_and_arrive(without_noise: dict[str, Any], name: str) -> None:
    theirs = plain(options=BATCH_NORM)
    ours = held_run(of("paraaegis", options=BATCH_NORM, **without_noise, **DIVIDED[name]))
    check_same(ours, *theirs, within=EXACT)


@pytest.mark.parametrize(
    ("scheme", "how"), [("dp-fedavg", {}), ("serial", {}), ("serial", PADS), ("paraaegis", {"share": 0.0})]
)
def test_batch_norm_is_refused_where_its_statistics_would_carry_no_protection(scheme: str, how: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be trained under a differential-privacy claim"):
        of(scheme, options=BATCH_NORM, **how)


# ---- who is elected


def votes_of(monkeypatch: pytest.MonkeyPatch, strategy: str, vote: str) -> tuple[list[Covered], HeldRun]:
    seen = watch_uploads(monkeypatch)
    return seen, held_run(of("paraaegis", strategy=strategy, vote=vote, share=0.2, share_decay=0.9, **LOUD, **PADS))


@pytest.mark.parametrize(("strategy", "vote"), crossed(["max", "min"], ["tags", "histogram"]))
def test_winners_are_the_coordinates_most_clients_named_and_the_same_for_all(
    monkeypatch: pytest.MonkeyPatch, strategy: str, vote: str
) -> None:
    seen, run = votes_of(monkeypatch, strategy, vote)
    size = run.job.architecture.size
    sign = -1.0 if strategy == "max" else 1.0
    for number in range(3):
        wanted = -(-2 * size * 9**number // 10 ** (number + 1))  # ⌈0.2·0.9ᵗ·d⌉ in whole numbers
        now = [one for one in seen if one.round == number]
        uploads = [(one.contribution[:size].abs().tolist(), one.winners.tolist()) for one in now]
        (winners,) = {tuple(told) for _, told in uploads}
        assert (len(uploads), len(winners)) == (6, wanted)
        counts: Counter[int] = Counter()
        for sizes, _ in uploads:
            counts.update(sorted(range(size), key=lambda index: (sign * sizes[index], index))[:wanted])
        lost = set(range(size)) - set(winners)
        assert min(counts[index] for index in winners) >= max(counts[index] for index in lost)


def test_a_lot_is_the_same_for_all_clients_and_another_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _ = votes_of(monkeypatch, "random", "tags")
    by_round = [{tuple(one.winners.tolist()) for one in seen if one.round == number} for number in range(3)]
    assert all(len(told) == 1 for told in by_round)
    lots = [set(next(iter(told))) for told in by_round]
    assert len({frozenset(one) for one in lots}) == 3
    assert all(len(lots[n] & lots[n + 1]) < 0.5 * len(lots[n + 1]) for n in range(2))


@pytest.mark.parametrize("vote", ["tags", "histogram"])
def test_random_votes_are_each_clients_own_and_say_nothing_of_its_data(
    monkeypatch: pytest.MonkeyPatch, vote: str
) -> None:
    cast: dict[int, list[set[int]]] = {}
    choose = Parallel.chosen

    def watched(self: Parallel, contribution: Tensor, *, client: int, round: int, **more: Any) -> Tensor:
        indices = choose(self, contribution, client=client, round=round, **more)
        again = choose(self, -7.0 * contribution.flip(0), client=client, round=round, **more)
        assert indices.tolist() == again.tolist()
        cast.setdefault(round, []).append(set(indices.tolist()))
        return indices

    monkeypatch.setattr(Parallel, "chosen", watched)
    seen, run = votes_of(monkeypatch, "random-votes", vote)
    for number, votes in cast.items():
        assert len({frozenset(one) for one in votes}) == 6
        (winners,) = {tuple(one.winners.tolist()) for one in seen if one.round == number}
        counts = Counter(index for one in votes for index in one)
        lost = set(range(run.job.architecture.size)) - set(winners)
        assert min(counts[index] for index in winners) >= max(counts[index] for index in lost)


# ---- who drops out, and when


def gone(kind: type[Request], *, round: int, clients: set[int], stage: int | None = None) -> Any:
    def absent(request: Any, client: int) -> bool:
        if not isinstance(request, kind) or client not in clients:
            return False
        if isinstance(request, Unmask):
            return request.round == 2 * round + (1 if stage is None else stage)
        return bool(request.round == round)  # type: ignore[attr-defined]

    return absent


EIGHT: dict[str, Any] = {"clients": 8, "rounds": 3}
TIMES: dict[str, Any] = {
    "before the vote": lambda: gone(Begin, round=1, clients={5, 6}),
    "between vote and upload": lambda: gone(Divide, round=1, clients={1, 6}),
    "after the upload": lambda: gone(Unmask, round=1, clients={2, 3}),
    "after the ballot": lambda: gone(Unmask, round=1, clients={2, 3}, stage=0),
}
LEFT_OUT: dict[str, set[int]] = {"before the vote": {5, 6}, "between vote and upload": {1, 6}}
WAYS: dict[str, dict[str, Any]] = {
    "ckks": {},
    "pads": PADS,
    "pads, on dropout": ON_DROPOUT,
    "ballots": {**PADS, "vote": "histogram"},
    "ballots, ckks": {"vote": "histogram"},
}


def can_be(way: str, when: str) -> bool:
    """Masks are opened after ballots, and after uploads under pads."""
    return {"after the ballot": "ballots" in way, "after the upload": "ckks" not in way}.get(when, True)


@pytest.mark.parametrize(("way", "when"), [case for case in crossed(list(WAYS), list(TIMES)) if can_be(*case.values)])
def test_a_round_is_the_mean_of_those_whose_upload_arrived(without_noise: dict[str, Any], way: str, when: str) -> None:
    away = gone(Train, round=1, clients=LEFT_OUT.get(when, set()))
    theirs = trained(of("fedavg", **EIGHT), absent=away)
    one = of("paraaegis", **without_noise, **WAYS[way], **EIGHT)
    ours = held_run(one, absent=TIMES[when]())
    check_same(ours, *theirs, within=EXACT if "cipher" in WAYS[way] else rounding(one))
    assert set(ours.rounds[1].gathered.arrived) == set(range(8)) - LEFT_OUT.get(when, set())
    assert set(ours.rounds[2].gathered.arrived) == set(range(8))  # whoever was away is lent the model


def test_everything_hidden_without_a_vote_loses_who_is_away() -> None:
    theirs = trained(of("fedavg", **EIGHT), absent=gone(Train, round=1, clients={0, 5}))
    for cipher in CIPHERS.values():
        one = of("ckks-fedavg", **cipher, **EIGHT)
        ours = held_run(one, absent=gone(Begin, round=1, clients={0, 5}))
        check_same(ours, *theirs, within=EXACT if cipher else rounding(one))


@pytest.mark.parametrize(("way", "kind"), crossed(WAYS, {"Begin": Begin, "Divide": Divide}))
def test_with_nearly_everybody_gone_a_round_fails_untouched_and_the_next_one_succeeds(
    way: dict[str, Any], kind: type[Request]
) -> None:
    run = held_run(of("paraaegis", **LOUD, **way, **EIGHT), absent=gone(kind, round=1, clients=set(range(1, 8))))
    assert [bool(one.failed) for one in run.rounds] == [False, True, False]
    assert run.rounds[1].aggregate is None
    assert same_bits(run.models[0], run.models[1])
    assert not same_bits(run.models[1], run.models[2])
    assert set(run.rounds[2].gathered.arrived) == set(range(8))


PHASES = ("begin", "ballot", "divide", "upload")
FAULTS = st.fixed_dictionaries({phase: st.sets(st.integers(0, 7), max_size=3) for phase in PHASES})


def phase_of(request: Request) -> str | None:
    if isinstance(request, Unmask):
        return PHASES[1 + 2 * (request.round % 2)]
    return {Begin: "begin", Divide: "divide"}.get(type(request))


@given(first=FAULTS, second=FAULTS, way=st.sampled_from(["pads", "pads, on dropout", "ballots"]))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
def test_whoever_drops_out_when_the_model_is_the_mean_of_those_who_arrived_or_as_it_was(
    without_noise: dict[str, Any], first: dict[str, set[int]], second: dict[str, set[int]], way: str
) -> None:
    def absent(request: Any, client: int) -> bool:
        phase = phase_of(request)
        if phase is None:
            return False
        round_ = request.round // 2 if isinstance(request, Unmask) else request.round
        return round_ < 2 and client in (first, second)[round_][phase]

    small = {"clients": 8, "rounds": 3, "options": {"depth": 1, "width": 4}}
    ours = held_run(of("paraaegis", **without_noise, **WAYS[way], **small), absent=absent)
    summed = [set() if one.failed else set(one.gathered.arrived) for one in ours.rounds]

    def left_out(request: Any, client: int) -> bool:
        return isinstance(request, Train) and client not in summed[request.round]

    theirs, _ = trained(of("fedavg", **small), absent=left_out)
    assert apart(ours.model, theirs.weights.parameters) < EXACT
    assert summed[2] == set(range(8))
    held = [ours.engine.state_of(client).held for client in range(8)]
    assert all(one is not None and apart(one.weights.parameters, ours.model) == 0.0 for one in held)
