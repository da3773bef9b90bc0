"""Masked uploads: the same model as without masks, uploads that look like noise, and settings that are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from driving import drive
from federation import job, same_bits, server_of, trained
from fedveil.crypto import keys as stream
from fedveil.engine import LocalEngine
from fedveil.errors import ConfigError, ProtocolError
from fedveil.protocol.messages import Request, Train
from fedveil.protocol.phases import Ask, RoundDone
from fedveil.roles.client import ClientRole
from fedveil.roles.server import ServerState
from fedveil.runs.job import Job
from fedveil.runs.loop import fresh_state, train_job
from fedveil.secrets import OsSecrets
from fedveil.uplink.grid import FixedPoint
from fedveil.uplink.masked import MOST_UNEXPLAINED, Masked
from fedveil.uplink.unmasking import Unmask
from shell import fedveil
from uplink.masking import Federation, epoch_of, mask_purpose, words

SAMPLES = 300
SPREAD = 4.0
LEARNING = {"lr": 0.05, "momentum": 0.9, "how": "size", "ratio": 4.0}
BATCH_NORM = {"depth": 2, "width": 16, "norm": "batch"}


def tolerance(one: Job) -> float:
    """How far fixed point may carry a model away.

    Rounding moves a sum by at most K·step/2 and the mean by 1/N of that; recovery multiplies a coordinate
    by at most spread², and T rounds with momentum β add up at most T·lr/(1 − β) gradients.
    """
    clients, config = len(one.pool), one.config
    assert isinstance(one.scheme.uplink, Masked)
    step = FixedPoint(one.scheme.uplink.value_range, one.cohort.size).step
    travelled = config.rounds * config.lr / (1 - config.momentum)
    return travelled * SPREAD**2 * clients * step / (2 * SAMPLES)


CASES: dict[str, dict[str, Any]] = {
    "complete": {"clients": 8, "rounds": 3, "head_groups": 1},
    "complete, ten head groups": {"clients": 6, "rounds": 3, "head_groups": 10},
    "complete, batch norm": {"clients": 6, "rounds": 3, "head_groups": 1, "options": BATCH_NORM},
    "ring of 40": {"clients": 40, "rounds": 2, "head_groups": 1, "neighbours": 8},
    "ring of 40, batch norm, default neighbours": {
        "clients": 40,
        "rounds": 1,
        "head_groups": 1,
        "options": BATCH_NORM,
    },
    "ring of 60, ten head groups": {"clients": 60, "rounds": 1, "head_groups": 10, "neighbours": 6},
    "coarse": {"clients": 8, "rounds": 3, "head_groups": 1, "value_range": 2.0**40},
}


OFTEN = {(name, "always") for name in CASES} | {("complete", "on-dropout"), ("ring of 40", "on-dropout")}


@pytest.mark.parametrize(
    ("case", "unmask"),
    [
        pytest.param(case, how, id=f"{name}-{how}", marks=() if (name, how) in OFTEN else pytest.mark.slow)
        for name, case in CASES.items()
        for how in ("always", "on-dropout")
    ],
)
def test_training_under_masks_ends_in_the_model_of_training_without(case: dict[str, Any], unmask: str) -> None:
    bare = {name: value for name, value in case.items() if name not in ("neighbours", "value_range")}
    theirs, their_rounds = trained(job(scheme="lossless", **LEARNING, **bare))
    one = job(scheme="veil-secagg", unmask=unmask, **LEARNING, **case)
    ours, our_rounds = trained(one)
    assert not any(done.failed or done.gathered.refused for done in our_rounds)
    apart = float((ours.weights.parameters - theirs.weights.parameters).abs().max())
    assert 0 < apart < tolerance(one)
    moved = float((ours.weights.parameters - one.weights.parameters).abs().max())
    assert moved > 1e3 * tolerance(one)  # there was something to get wrong
    if theirs.weights.statistics.numel():
        assert float((ours.weights.statistics - theirs.weights.statistics).abs().max()) < tolerance(one)
    for mine, other in zip(our_rounds, their_rounds, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=1e-4)


# ---- dropouts in a run


def run_with(one: Job, absent: Callable[[Request, int], bool]) -> tuple[ServerState, list[RoundDone], list[Tensor]]:
    """A run with faults: its rounds, and the parameters after each."""
    server, rounds, models = server_of(one), [], []

    def boundary(done: RoundDone) -> None:
        rounds.append(done)
        models.append(server.state.weights.parameters.clone())

    drive(
        LocalEngine(ClientRole(one.scheme, one.architecture), one.pool, absent=absent), server.run(), on_round=boundary
    )
    return server.state, rounds, models


def dropping(kind: type[Request], share: float, *, clients: int) -> Callable[[Request, int], bool]:
    """Clients that do not answer the first round's requests of one kind."""
    gone = set(range(2, 2 + round(share * clients)))
    return lambda request, client: isinstance(request, kind) and request.round == 0 and client in gone  # type: ignore[attr-defined]


@pytest.mark.parametrize("unmask", ["always", "on-dropout"])
@pytest.mark.parametrize("share", [pytest.param(0.1, marks=pytest.mark.slow), 0.3])
def test_who_drops_out_before_uploading_is_left_out_and_after_it_is_counted(share: float, unmask: str) -> None:
    settings: dict[str, Any] = {"clients": 20, "rounds": 2, "head_groups": 1, **LEARNING}
    for kind in (Train, Unmask):
        absent = dropping(kind, share, clients=20)
        theirs, _, _ = run_with(job(scheme="lossless", **settings), absent)
        one = job(scheme="veil-secagg", unmask=unmask, **settings)
        ours, rounds, _ = run_with(one, absent)
        assert not any(done.failed or done.gathered.refused for done in rounds)
        apart = float((ours.weights.parameters - theirs.weights.parameters).abs().max())
        assert apart < tolerance(one) * 20 / 14  # fewer samples share the rounding


@pytest.mark.parametrize("kind", [Train, Unmask])
def test_with_half_of_the_clients_gone_a_round_fails_untouched_and_the_next_one_succeeds(kind: type[Request]) -> None:
    one = job(scheme="veil-secagg", clients=20, rounds=3, head_groups=1, **LEARNING)
    _, rounds, models = run_with(one, dropping(kind, 0.5, clients=20))
    assert "needed" in rounds[0].failed
    assert rounds[0].loss is None
    assert same_bits(models[0], one.weights.parameters)
    assert not any(done.failed or done.gathered.refused for done in rounds[1:])
    assert not same_bits(models[1], models[0])


def test_a_client_that_misses_rounds_is_welcome_again() -> None:
    """It is still owed the evidence of the last round in which it revealed."""
    one = job(scheme="veil-secagg", clients=8, rounds=5, head_groups=1)
    _, rounds, _ = run_with(
        one, lambda request, client: isinstance(request, Train) and request.round in (1, 2) and client == 3
    )
    assert not any(done.failed or done.gathered.refused for done in rounds)
    assert [3 in done.gathered.arrived for done in rounds] == [True, False, False, True, True]


# ---- how many phases a round takes


def phases(one: Job, absent: Callable[[Request, int], bool] = lambda request, client: False) -> list[list[str]]:
    """The kinds of requests of every round."""
    found: list[list[str]] = [[]]
    server = server_of(one)

    def watched() -> Iterator[Any]:
        steps, answer = server.run(), None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            if isinstance(step, Ask):
                found[-1].append(type(step.common).__name__)
            elif isinstance(step, RoundDone):
                found.append([])
            answer = yield step

    engine = LocalEngine(ClientRole(one.scheme, one.architecture), one.pool, absent=absent)
    drive(engine, watched(), on_round=lambda done: None)  # type: ignore[arg-type]
    return [[name for name in names if name in ("Train", "Unmask")] for names in found[:-1]]


def test_unmasking_takes_a_second_phase_always_or_only_where_somebody_is_missing() -> None:
    def absent(request: Request, client: int) -> bool:
        return isinstance(request, Train) and request.round == 1 and client == 2

    for unmask, expected in (("always", [2, 2, 2]), ("on-dropout", [1, 2, 1])):
        one = job(scheme="veil-secagg", clients=6, rounds=3, head_groups=1, unmask=unmask)
        found = phases(one, absent)
        assert [len(names) for names in found] == expected
        assert all(names == ["Train", "Unmask"][: len(names)] for names in found)


# ---- one upload is noise


def byte_p_value(data: NDArray[np.uint64]) -> float:
    counts = np.bincount(data.view(np.uint8), minlength=256)
    return float(stats.chisquare(counts).pvalue)


def worst_bit(data: NDArray[np.uint64]) -> float:
    """The largest |z| of the 64 bits' frequencies."""
    ones = np.array([int(((data >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)])
    return float(np.abs(ones - len(data) / 2).max() / np.sqrt(len(data) / 4))


def serial(data: NDArray[np.uint64]) -> float:
    """|z| of the correlation of neighbouring words."""
    numbers = data / 2.0**64
    return float(abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) * np.sqrt(len(numbers)))


def assert_uniform(data: NDArray[np.uint64]) -> None:
    """On uniform words each of these fails by chance less than once in a million seeds; the seeds are fixed."""
    assert byte_p_value(data) > 1e-7
    assert worst_bit(data) < 6.2  # 64 × 6e-10
    assert serial(data) < 5.5


@pytest.fixture(scope="module")
def views() -> dict[str, NDArray[np.uint64]]:
    """What the server sees of client 1, with the same data in many runs, rounds and attempts."""
    seen: dict[str, list[NDArray[np.uint64]]] = {"upload": [], "rounds": [], "attempts": [], "runs": [], "bare": []}
    earlier: NDArray[np.uint64] | None = None
    for seed in range(40):
        federation = Federation(3, length=500, seed=seed)
        vector = torch.linspace(-1, 3, 500, dtype=torch.float64)
        first, other_round, other_attempt = (
            words(federation.upload(1, vector, federation.context(number, attempt)))
            for number, attempt in ((0, 0), (1, 0), (0, 1))
        )
        seen["upload"].append(first)
        seen["rounds"].append(first - other_round)
        seen["attempts"].append(first - other_attempt)
        if earlier is not None:
            seen["runs"].append(first - earlier)
        earlier = first
        seen["bare"].append(federation.uplink.codec(federation.context(), federation.terms.work).encode(vector))
    return {name: np.concatenate(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("name", ["upload", "rounds", "attempts", "runs"])
def test_an_upload_and_the_difference_of_two_of_equal_data_look_uniform(
    views: dict[str, NDArray[np.uint64]], name: str
) -> None:
    assert_uniform(views[name])


def test_the_same_numbers_without_masks_fail_every_test_of_uniformity(views: dict[str, NDArray[np.uint64]]) -> None:
    bare = views["bare"]
    assert byte_p_value(bare) < 1e-12
    assert worst_bit(bare) > 20
    assert serial(bare) > 20


@pytest.mark.parametrize("unmask", ["always", "on-dropout"])
def test_what_is_left_when_a_client_vanished_after_uploading_still_looks_uniform(unmask: Any) -> None:
    """The others call client 1 missing and take off their masks with it; with a mask of its own it stays covered."""
    federation = Federation(6, Masked(unmask=unmask), length=20_000)
    context = federation.context()
    vectors = {client: torch.ones(20_000, dtype=torch.float64) for client in federation.members}
    uploads = federation.uploads(vectors, context)
    opened = words(uploads[1]).copy()
    for peer in (0, 2, 3, 4, 5):
        seed = federation.states[peer].ring().pair(1).seed(round=0, attempt=0, purpose=mask_purpose(context))
        stream.add_mask(opened, seed, subtract=peer > 1)
    if unmask == "always":
        assert_uniform(opened)
    else:  # that is what the assumption of honest arrivals is for
        assert byte_p_value(opened) < 1e-12


# ---- seeds are used once


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bool]]:
    used: list[tuple[bytes, bool]] = []
    true = stream.add_mask

    def add_mask(total: NDArray[np.uint64], seed: bytes, *, subtract: bool = False, wide: int = 0) -> None:
        used.append((seed, subtract))
        true(total, seed, subtract=subtract, wide=wide)

    monkeypatch.setattr(stream, "add_mask", add_mask)
    return used


def resumed(one: Job) -> None:
    """A run of four rounds, and its third and fourth once more, as after a crash."""
    train_job(one, state=fresh_state(one))
    state = fresh_state(one)
    state.round, state.attempt = 2, 1
    train_job(one, state=state)


@pytest.mark.parametrize("unmask", ["always", "on-dropout"])
@pytest.mark.parametrize("secrets", ["os", "seeded"])
def test_no_seed_masks_two_uploads_and_every_mask_comes_off_once(
    monkeypatch: pytest.MonkeyPatch, secrets: str, unmask: str
) -> None:
    """Each seed is used exactly twice, with opposite signs: by a pair's two ends, or by a client and the server."""
    used = recorded(monkeypatch)
    one = job(scheme="veil-secagg", clients=5, rounds=4, secrets=secrets, head_groups=1, unmask=unmask)
    resumed(one)
    rounds = 4 + 2
    if secrets == "os":
        resumed(one)
        rounds *= 2
    assert max(Counter(used).values()) == 1
    by_seed = Counter(seed for seed, _ in used)
    assert set(by_seed.values()) == {2}
    assert len(by_seed) == rounds * (10 + (5 if unmask == "always" else 0))


# ---- numbers that do not fit


def test_contributions_at_the_edge_of_the_range_add_up_without_overflow() -> None:
    for sign in (1.0, -1.0):
        federation = Federation(9, Masked(value_range=1000.0))
        context = federation.context()
        edge = torch.full((40,), sign * 1000.0, dtype=torch.float64)
        total, ask = federation.collected(federation.uploads(dict.fromkeys(range(9), edge), context), context)
        assert ask is not None
        for client in ask.to:
            total.add(federation.answer(client, ask.common, ask.each[client]))
        assert torch.equal(total.total(), 9 * edge)


def test_in_a_run_a_client_beyond_the_range_is_cut_off_and_takes_part() -> None:
    one = job(scheme="veil-secagg", clients=8, rounds=1, head_groups=1, value_range=1e6, how="iid")
    data = one.pool.clients[3]
    rows = data.rows
    assert rows is not None
    data.x[rows] *= 100.0  # one client's inputs are out of proportion
    _, rounds = trained(one)
    assert not rounds[0].gathered.refused
    assert not rounds[0].failed
    assert 3 in rounds[0].gathered.arrived


def test_a_range_that_leaves_no_room_for_fractions_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="Lower value_range"):
        job(scheme="veil-secagg", value_range=2.0**60, clients=8)


# ---- settings


@pytest.mark.parametrize("clients", [1, 2])
def test_fewer_than_three_clients_are_refused_before_the_run(clients: int) -> None:
    with pytest.raises(ConfigError, match=f"at least three clients in a round, not {clients}"):
        job(scheme="veil-secagg", clients=clients)
    with pytest.raises(ConfigError, match=f"at least three clients in a round, not {clients}"):
        job(scheme="veil-secagg", clients=8, cohort=clients)


@pytest.mark.parametrize(("scheme", "clients"), [("veil-dp", 1), ("nadp", 1), ("mpdp", 1)])
def test_noise_that_clients_share_needs_two_of_them(scheme: str, clients: int) -> None:
    with pytest.raises(ConfigError, match="at least two clients in a round, not 1"):
        job(scheme=scheme, clients=clients, loss=None)


def test_the_command_line_says_in_one_line_that_two_clients_are_too_few() -> None:
    done = fedveil("run", "--dataset", "digits", "--scheme", "veil-secagg", "--clients", 2, "--rounds", 3)
    assert done.code == ConfigError.exit_code
    assert done.error.startswith("error: Masking needs at least three clients in a round, not 2")
    assert "\n" not in done.error


def test_clients_who_cannot_agree_on_keys_stop_the_run_with_a_reason() -> None:
    one = job(scheme="veil-secagg", clients=4, rounds=2, head_groups=1)
    stops: list[str] = []
    engine = LocalEngine(
        ClientRole(one.scheme, one.architecture),
        one.pool,
        absent=lambda request, client: type(request).__name__ == "Hello" and client > 1,
    )
    drive(engine, server_of(one).run(), on_round=lambda done: None, on_stop=stops.append)
    assert len(stops) == 1
    assert "at least three clients in a round, not 2" in stops[0]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"threshold": 1.0}, "threshold must lie in"),
        ({"threshold": 0.4}, "threshold must lie in"),
        ({"neighbours": 3}, "even number"),
        ({"neighbours": 0}, "even number"),
        ({"unmask": "never"}, "Unknown unmask"),
        ({"value_range": 0.0}, "value_range"),
        ({"value_range": -1.0}, "value_range"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        job(scheme="veil-secagg", **settings)


def test_the_ledger_states_how_much_collusion_a_threshold_bears() -> None:
    def assumed(**settings: Any) -> str:
        return " ".join(job(scheme="veil-secagg", **settings).scheme.caveats.assumptions)

    assert "at most a third of each client's neighbours" in assumed()
    assert "at most 0.6 of each client's neighbours" in assumed(threshold=0.8)
    assert "honest about whose upload" not in assumed()
    assert "honest about whose upload" in assumed(unmask="on-dropout")


# ---- client state


def test_evidence_is_not_asked_for_where_nothing_was_revealed() -> None:
    federation = Federation(5)
    vectors, context = federation.vectors(), federation.context()
    federation.uploads(vectors, context)
    federation.upload(0, vectors[0], federation.context(1))  # revealed nothing in round 0


def test_a_round_that_could_not_be_opened_is_accounted_for_or_costs_the_epoch_and_only_so_often() -> None:
    federation = Federation(5)
    vectors = federation.vectors()
    for number in range(MOST_UNEXPLAINED + 1):
        context = federation.context(number)
        total, ask = federation.collected(
            {one: federation.upload(one, vectors[one], context) for one in range(5)}, context
        )
        assert ask is not None
        for one in ask.to[:2]:
            total.add(federation.answer(one, ask.common, ask.each[one]))
        assert federation.uplink.parting(total) == dict.fromkeys(range(5))  # an honest server has nothing to show
        with pytest.raises(ProtocolError, match="was not shown what its neighbours signed there: it takes no further"):
            federation.upload(1, vectors[1], federation.context(number + 1))
        for one in (2, 3, 4):
            federation.answer(one, ask.common, ask.each[one])
        federation.enter(epoch_of(5, number=number + 1, first=number + 1))
    with pytest.raises(ProtocolError, match="has revealed shares in 4 rounds of this run without being shown"):
        federation.upload(1, vectors[1], federation.context(MOST_UNEXPLAINED + 1))


def test_a_round_that_cannot_be_opened_is_given_up_before_anybody_reveals() -> None:
    federation = Federation(40, Masked(degree=6))
    context = federation.context()
    near = federation.graph(context).neighbours(0)
    there = [one for one in federation.members if one not in near[:2]]
    uploads = federation.uploads(federation.vectors(), context, only=there)
    with pytest.raises(ProtocolError, match=r"4 of 5 needed neighbours of client \d+ are left, of 6"):
        federation.collected(uploads, context)


def test_a_signature_that_neighbours_would_not_take_is_refused_by_the_server() -> None:
    federation = Federation(5)
    context = federation.context()
    total, ask = federation.collected(federation.uploads(federation.vectors(), context), context)
    assert ask is not None
    reply = federation.answer(1, ask.common, ask.each[1])
    with pytest.raises(ProtocolError, match="does not sign the survivor list"):
        total.add(replace(reply, signature=reply.signature ^ 1))
    total.add(reply)


def test_masks_of_fresh_randomness_differ_between_runs_of_equal_seeds() -> None:
    first, second = (Federation(3, secrets=OsSecrets()) for _ in range(2))
    vector = torch.zeros(40, dtype=torch.float64)
    uploads = [words(one.upload(0, vector, one.context())) for one in (first, second)]
    assert not np.any(uploads[0] == uploads[1])
