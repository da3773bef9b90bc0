"""The noised uplink: what cancels, what stays, what is given away, and that no noise is ever used twice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from driving import drive
from federation import distance, job, same_bits
from fedveil.config import RunConfig
from fedveil.engine import LocalEngine
from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.correlated import NoiseLayout
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.messages import Reply, Request, Train, Upload
from fedveil.protocol.parts import RoundContext, planned
from fedveil.protocol.phases import Ask, Gathered, RoundDone
from fedveil.roles.server import ServerRole
from fedveil.runs import session
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role, fresh_state, train_job
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.uplink import noised as grid_module
from fedveil.uplink import noised as noised_module
from fedveil.uplink.grid import FixedPoint
from fedveil.uplink.noised import Noised, Repair, add_residual, add_shared, gridded, pair_seed
from fedveil.work.messages import Workspace

UNEVEN: dict[str, Any] = {"loss": None, "how": "size", "ratio": 2.0}


class Federation:
    """A run driven by hand, with everything that travels kept."""

    def __init__(self, one: Job) -> None:
        self.job = one
        self.privacy_journal = PrivacyJournal(one)
        self.server = ServerRole(
            one.scheme,
            one.architecture,
            fresh_state(one),
            secrets=one.secrets,
            cohort=one.cohort,
            optimiser=one.optimiser,
            rounds=one.config.rounds,
            accountant=self.privacy_journal.accountant,
        )
        self.role = client_role(one)
        self.states = {data.client: ClientState(data.client) for data in one.pool.clients}
        self.steps = self.server.run()
        self.step: Any = next(self.steps)

    def reply(self, ask: Ask, client: int) -> Reply:
        self.states[client], reply = self.role.handle(
            self.states[client], ask.common, self.job.pool.clients[client], ask.each.get(client)
        )
        return reply

    def gather(self, ask: Ask, absent: Iterable[int] = ()) -> dict[int, Reply]:
        """Answer an ask and go on to the next step."""
        replies = {client: self.reply(ask, client) for client in ask.to if client not in set(absent)}
        for one in replies.values():
            ask.into.add(one)
        missing = tuple(client for client in ask.to if client not in replies)
        self.step = self.steps.send(Gathered(tuple(replies), {}, missing, 0, 0))
        return replies

    def until(self, kind: type[Request]) -> Ask:
        """Go on until clients are asked for `kind`."""
        while not (isinstance(self.step, Ask) and isinstance(self.step.common, kind)):
            assert not isinstance(self.step, RoundDone), self.step.failed
            if isinstance(self.step, Ask):
                self.gather(self.step)
            else:
                self.step = self.steps.send(None)
        return self.step

    def context(self, ask: Ask) -> RoundContext:
        train = ask.common
        assert isinstance(train, Train)
        keys = self.states[0].keys
        assert keys is not None
        return RoundContext(train.round, train.attempt, ask.to, keys.directory, keys.beacon)

    def noise_layout(self, ask: Ask) -> NoiseLayout:
        plan = self.job.scheme.uplink.plan
        assert plan is not None
        return planned(plan, self.context(ask), self.job.scheme.work)

    def bare(self, ask: Ask, client: int) -> Tensor:
        """A client's contribution before noise."""
        scheme, architecture = self.job.scheme, self.job.architecture
        workspace = Workspace(architecture, scheme.layout(architecture))
        assert isinstance(ask.common, Train)
        data = self.job.pool.clients[client]
        return scheme.work.run(workspace, ask.common.broadcast, data, round=ask.common.round).double()

    def codec(self, ask: Ask) -> FixedPoint:
        """The round's grid."""
        plan, terms = self.job.scheme.uplink.plan, self.job.scheme.terms(self.job.architecture)
        assert plan is not None
        return gridded(plan, self.context(ask), terms)

    def rounded(self, ask: Ask, client: int) -> Tensor:
        """A client's contribution before noise, in steps."""
        return torch.from_numpy(self.codec(ask).encode(self.bare(ask, client)).view(np.int64))

    def residual(self, ask: Ask, client: int) -> Tensor:
        """A client's residual noise in steps, which simulated secrets let us draw again."""
        plan, context = self.job.scheme.uplink.plan, self.context(ask)
        words = np.zeros(self.job.architecture.size, dtype=np.uint64)
        terms, secrets = self.job.scheme.terms(self.job.architecture), self.job.secrets.branch("clients")  # type: ignore[attr-defined]
        assert plan is not None
        add_residual(words, client, plan, context, terms, secrets=secrets)
        return torch.from_numpy(words.view(np.int64))

    def between(self, ask: Ask, one: int, other: int) -> Tensor:
        """What `one` adds for the sake of `other`, in steps."""
        noise_layout, seed = self.noise_layout(ask), pair_seed(self.states[one], other, self.context(ask))
        variance = dict(noise_layout.partners(one))[other]
        words = np.zeros(self.job.architecture.size, dtype=np.uint64)
        add_shared(words, seed, client=one, peer=other, variance=variance, step=self.codec(ask).step)
        return torch.from_numpy(words.view(np.int64))


def payloads(replies: dict[int, Reply]) -> dict[int, Tensor]:
    assert all(isinstance(one, Upload) for one in replies.values())
    return {client: one.payload for client, one in replies.items()}  # type: ignore[attr-defined]


def total_of(ask: Ask) -> Tensor:
    return ask.into.total()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("settings", [{}, {"neighbours": 2}], ids=["complete", "sparse"])
def test_pair_noise_cancels_in_the_sum_to_the_last_bit(dtype: str, settings: dict[str, Any]) -> None:
    """To the last bit: residual noise and contributions are all that stays."""
    one = Federation(job(scheme="nadp", dtype=dtype, rounds=1, **UNEVEN, **settings))
    ask = one.until(Train)
    sent = payloads(one.gather(ask))
    kept = {k: one.rounded(ask, k)[:-1] + one.residual(ask, k) for k in ask.to}
    largest = max(int((sent[k][:-1] - kept[k]).abs().max()) for k in ask.to)
    stayed = max(int(one.residual(ask, k).abs().max()) for k in ask.to)
    assert largest > 5 * stayed
    stays = torch.stack(list(kept.values())).sum(0)
    assert torch.equal(torch.stack(list(sent.values())).sum(0)[:-1], stays)
    assert torch.equal(total_of(ask)[:-1], stays.double() * one.codec(ask).step)
    assert all(one.dtype == torch.int64 for one in sent.values())


def test_uploads_carry_the_noise_that_the_plan_promises() -> None:
    """The sample covariance of the noise on uploads is Σ: 20 rounds × 1,210 coordinates of 5 clients.

    After whitening by the promised Σ, the 15 entries of the covariance of 24,200 draws stray by more than five
    standard deviations (1/√n off the diagonal, √(2/n) on it) with probability below 1e-5.
    """
    one = Federation(job(scheme="nadp", rounds=20, pair_strength=1.0, dropouts="tolerate", **UNEVEN))
    noise = []
    for _ in range(20):
        ask = one.until(Train)
        noise_layout = one.noise_layout(ask)
        bare = {k: one.rounded(ask, k) for k in ask.to}
        step = one.codec(ask).step
        sent = payloads(one.gather(ask))
        noise.append(torch.stack([(sent[k] - bare[k]).double() * step for k in ask.to])[:, :-1])
        assert isinstance(one.step, RoundDone)
        if one.server.state.round < 20:
            one.step = one.steps.send(None)
    drawn = torch.cat(noise, 1).numpy()
    sigma = np.diag(noise_layout.residual)
    for first, second, pair in zip(noise_layout.first, noise_layout.second, noise_layout.pairs, strict=True):
        for i, j, sign in ((first, first, 1), (second, second, 1), (first, second, -1), (second, first, -1)):
            sigma[i, j] += sign * pair
    white = np.linalg.solve(np.linalg.cholesky(sigma), drawn)
    count = drawn.shape[1]
    assert count == 24_200
    found = white @ white.T / count
    allowed = np.full((5, 5), 5 / math.sqrt(count)) + np.eye(5) * (5 * math.sqrt(2 / count) - 5 / math.sqrt(count))
    assert (abs(found - np.eye(5)) < allowed).all()
    # The test would notice a tenth less noise.
    assert not (abs(0.81 * found - np.eye(5)) < allowed).all()


@pytest.mark.parametrize("scheme", ["nadp", "mpdp"])
def test_leaving_out_what_cancels_trains_the_same_model_but_claims_nothing(scheme: str) -> None:
    """The same residual noise from the same seed: models agree to the last bit, MP-DP's to float64's rounding."""
    settings: dict[str, Any] = {"loss": None} if scheme == "nadp" else {"neighbours": 3}
    full, quick = (job(scheme=scheme, rounds=4, skip_cancelling=skip, **settings) for skip in (False, True))
    states = [train_job(one, state=fresh_state(one)) for one in (full, quick)]
    trained = [one.state.weights.parameters for one in states]
    assert same_bits(*trained) if scheme == "nadp" else distance(trained[1], trained[0]) < 1e-9
    assert not same_bits(states[0].state.weights.parameters, full.weights.parameters)
    released = {one.field: one for one in quick.scheme.releases(quick.architecture)}
    assert "LEFT OUT" in released["upload.gradients"].noise
    assert released["upload.gradients"].protection == "open"
    ledger = states[1].privacy_journal.ledger()
    assert ledger.line("server").verdict == "none"
    assert ledger.line("outsider").verdict == "none"
    assert states[0].privacy_journal.ledger().line("server").verdict == (
        "none" if scheme == "mpdp" else "differential privacy"
    )


def test_without_cancelling_noise_colluders_do_not_help_the_claim() -> None:
    one = job(scheme="nadp", rounds=1, loss=None, skip_cancelling=True, collusion=0.3)
    ledger = train_job(one, state=fresh_state(one)).privacy_journal.ledger()
    assert [ledger.line(name).verdict for name in ("server", "server and colluding clients")] == ["none", "none"]
    assert ledger.line("clients").verdict == "differential privacy"


def test_tolerated_dropouts_leave_their_pairs_noise_and_divide_by_the_weight_that_arrived() -> None:
    one = Federation(job(scheme="nadp", rounds=2, dropouts="tolerate", lr=0.1, epsilon=20.0, **UNEVEN))
    ask = one.until(Train)
    before = one.server.state.weights.parameters.clone()
    gone = {1, 3}
    one.gather(ask, gone)
    done = one.step
    assert isinstance(done, RoundDone)
    assert not done.failed
    here = [k for k in ask.to if k not in gone]
    stays = sum(one.rounded(ask, k)[:-1] + one.residual(ask, k) for k in here)
    left = sum(one.between(ask, k, m) for k in here for m in gone)
    assert isinstance(left, Tensor)
    total = total_of(ask)
    assert torch.equal(total[:-1], (stays + left).double() * one.codec(ask).step)
    assert int(left.abs().max()) > 0
    weight = sum(len(one.job.pool.clients[k]) for k in here)
    assert float(total[-1]) == weight
    moved = before - one.server.state.weights.parameters
    assert distance(moved, 0.1 * total[:-1] / weight) < 1e-12


def repaired(gone: set[int], **settings: Any) -> tuple[Federation, Ask, Ask]:
    """A federation whose first round waits for repair answers."""
    settings = {"rounds": 40, "epsilon": 20.0, "clients": 6, **UNEVEN, **settings}
    one = Federation(job(scheme="nadp", **settings))
    train = one.until(Train)
    one.gather(train, gone)
    return one, train, one.until(Repair)


@pytest.mark.parametrize("settings", [{}, {"neighbours": 3}], ids=["complete", "sparse"])
def test_repair_takes_off_exactly_the_noise_shared_with_the_missing(settings: dict[str, Any]) -> None:
    gone = {1, 4}
    one, train, repair = repaired(gone, **settings)
    with_noise = total_of(train)[:-1].clone()
    one.gather(repair)
    done = one.step
    assert isinstance(done, RoundDone)
    assert not done.failed
    here = [k for k in train.to if k not in gone]
    stays = sum(one.rounded(train, k)[:-1] + one.residual(train, k) for k in here).double() * one.codec(train).step
    assert isinstance(stays, Tensor)
    assert float((with_noise - stays).abs().max()) > 3 * float(stays.abs().max())
    assert torch.equal(total_of(repair)[:-1], stays)
    assert {frozenset(pair) & gone for pair in done.revealed} == {frozenset({1}), frozenset({4})}
    noise_layout = one.noise_layout(train)
    shared = {
        frozenset((noise_layout.members[i], noise_layout.members[j]))
        for i, j in zip(noise_layout.first, noise_layout.second, strict=True)
    }
    expected = {pair for pair in shared if len(pair & gone) == 1}
    assert {frozenset(pair) for pair in done.revealed} == expected


def test_a_late_upload_is_refused_once_its_noise_is_being_given_away() -> None:
    one, train, repair = repaired({2})
    late = one.reply(train, 2)
    before = total_of(repair).clone()
    with pytest.raises(ProtocolError, match="a Upload arrived where a repaired belongs"):
        repair.into.add(late)
    assert same_bits(total_of(repair), before)


def test_a_client_reveals_once_and_only_for_the_round_it_answered() -> None:
    one, _, repair = repaired({2})
    request = repair.common
    assert isinstance(request, Repair)
    with pytest.raises(ProtocolError, match="not the one it answered last"):
        one.reply(replace(repair, common=replace(request, round=1)), 0)
    one.reply(repair, 0)
    with pytest.raises(ProtocolError, match="reveal twice"):
        one.reply(repair, 0)
    with pytest.raises(ProtocolError, match="reveal twice"):
        one.reply(replace(repair, common=replace(request, missing=torch.tensor([3]))), 0)


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ([0, 2], "for itself"),
        ([2, 17], "strangers"),
        ([2, 3, 4], "at most 2 of 6"),
        ([1, 2, 3, 4, 5], "at most 2 of 6"),
    ],
)
def test_a_client_reveals_for_others_of_its_round_and_for_a_limited_share_of_them(missing: list[int], why: str) -> None:
    one, _, repair = repaired({2})
    request = repair.common
    assert isinstance(request, Repair)
    with pytest.raises(ProtocolError, match=why):
        one.reply(replace(repair, common=replace(request, missing=torch.tensor(missing))), 0)


def test_too_many_missing_clients_make_the_round_fail_without_asking() -> None:
    one = Federation(job(scheme="nadp", rounds=40, epsilon=20.0, clients=6, loss=None))
    one.gather(one.until(Train), {1, 2, 3})
    done = one.step
    assert isinstance(done, RoundDone)
    assert "3 of 6 clients are missing" in done.failed
    assert done.revealed == ()
    assert same_bits(one.server.state.weights.parameters, one.job.weights.parameters)


def bad_repairs(reply: Any) -> dict[str, Any]:
    return {
        "a repaired for round 8, attempt 0 arrived in round 1": replace(reply, round=7),
        "not asked": replace(reply, client=2),
        "others than those that are missing": replace(reply, vanished=torch.tensor([3])),
    }


@pytest.mark.parametrize(
    "why",
    [
        "a repaired for round 8, attempt 0 arrived in round 1",
        "not asked",
        "others than those that are missing",
        "a second one",
    ],
)
def test_a_bad_repair_is_refused_and_leaves_the_sum_as_it_was(why: str) -> None:
    one, _, repair = repaired({2})
    reply = one.reply(repair, 0)
    if why == "a second one":
        repair.into.add(reply)
        bad = reply
    else:
        bad = bad_repairs(reply)[why]
    before = total_of(repair).clone()
    with pytest.raises(ProtocolError, match=why):
        repair.into.add(bad)
    assert same_bits(total_of(repair), before)


def spent(one: Federation) -> dict[str, np.ndarray]:
    assert one.privacy_journal.accountant is not None
    return one.privacy_journal.accountant.spent


@pytest.mark.parametrize("honest", [False, True])
def test_a_repaired_client_pays_for_an_upload_under_residual_noise_alone(honest: bool) -> None:
    """The server may hold the late upload: S²/x_i; unless it is taken at its word, and then nothing."""
    one, train, repair = repaired({2}, honest_arrivals=honest, collusion=0.2)
    noise_layout = one.noise_layout(train)
    one.privacy_journal.begin(next_begin(one, train))
    one.gather(repair)
    assert isinstance(one.step, RoundDone)
    one.privacy_journal.end(one.step)
    alone = noise_layout.sensitivity[2] ** 2 / noise_layout.residual[2]
    for adversary in ("server", "server and colluding clients"):
        assert spent(one)[adversary][2] == pytest.approx(0.0 if honest else alone, rel=1e-9)
        assert 0 < spent(one)[adversary][0] < 0.5 * alone
    said = one.privacy_journal.ledger().line("server").assumptions
    assert any("honest about whose upload" in text for text in said) == honest
    said = one.privacy_journal.ledger().line("server and colluding clients").assumptions
    assert any("honest about whose upload" in text for text in said) == honest


def next_begin(one: Federation, ask: Ask) -> Any:
    from fedveil.protocol.phases import RoundBegins

    context = one.context(ask)
    return RoundBegins(context.round, context.attempt, context.cohort, context.graph_seed())


def test_a_repair_that_would_exceed_the_target_fails_the_round_and_asks_nobody() -> None:
    one = Federation(job(scheme="nadp", rounds=2, loss=None, clients=6))
    one.gather(one.until(Train), {2})
    done = one.step
    assert isinstance(done, RoundDone)
    assert "would bring client 2 over the privacy target" in done.failed
    assert done.revealed == ()
    assert same_bits(one.server.state.weights.parameters, one.job.weights.parameters)
    one.step = one.steps.send(None)
    one.gather(one.until(Train))  # and the run goes on
    assert isinstance(one.step, RoundDone)
    assert not one.step.failed


def test_missing_noise_that_would_expose_others_to_clients_fails_the_round() -> None:
    """Without two of four clients' residual noise in it, the sum would tell the others too much."""
    one = Federation(job(scheme="nadp", rounds=1, loss=None, clients=4, honest_arrivals=True, repair_limit=0.6))
    one.gather(one.until(Train), {1, 2})
    done = one.step
    assert isinstance(done, RoundDone)
    assert "2 of 4 uploads are missing, and with them their noise" in done.failed
    assert same_bits(one.server.state.weights.parameters, one.job.weights.parameters)


def test_clients_told_of_different_cohorts_share_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server could have some draw the same noise at another size, and cancel it in part."""
    drawn: list[bytes] = []
    one = Federation(job(scheme="nadp", rounds=3, loss=None, clients=4))
    ask = one.until(Train)
    train = ask.common
    assert isinstance(train, Train)
    monkeypatch.setattr(noised_module, "add_shared", lambda words, seed, **named: drawn.append(seed))
    with pytest.raises(ProtocolError, match="other clients than the epoch's schedule"):
        one.reply(replace(ask, common=replace(train, cohort=torch.tensor([0, 1]))), 0)
    # What holds besides: noise is bound to the cohort, whoever lets it be chosen.
    monkeypatch.setattr(RoundContext, "check_scheduled", lambda context: None)
    for client, cohort in ((0, [0, 1]), (1, [0, 1, 2, 3])):
        one.reply(replace(ask, common=replace(train, cohort=torch.tensor(cohort))), client)
    assert len(drawn) == 4
    assert len(set(drawn)) == 4
    drawn.clear()
    again = replace(train, round=1)
    for client in (0, 1):
        one.reply(replace(ask, common=replace(again, cohort=torch.tensor([0, 1]))), client)
    assert len(drawn) == 2
    assert len(set(drawn)) == 1


@pytest.mark.parametrize("cohort", [[1, 2, 3], [2, 0, 1, 3], [0, 1, 1], [0, 9], [0, 1, 2], []])
def test_a_cohort_that_is_not_the_schedules_is_refused(cohort: list[int]) -> None:
    one = Federation(job(scheme="nadp", rounds=1, loss=None, clients=4))
    ask = one.until(Train)
    assert isinstance(ask.common, Train)
    with pytest.raises(ProtocolError, match=r"other clients than the epoch's schedule|once, in ascending order"):
        one.reply(replace(ask, common=replace(ask.common, cohort=torch.tensor(cohort, dtype=torch.int64))), 0)


def test_local_noise_needs_no_keys_and_repairs_nothing() -> None:
    one = Federation(job(scheme="ldp", rounds=1, loss=None))
    assert one.job.scheme.uplink.introduction == "sizes"
    fields = {release.field for release in one.job.scheme.releases(one.job.architecture)}
    assert not any(name.startswith("repair") for name in fields)
    ask = one.until(Train)
    request = Repair(0, 0, torch.tensor([1]))
    sent = payloads(one.gather(ask, {1}))
    assert isinstance(one.step, RoundDone)
    for client, payload in sent.items():
        assert torch.equal(payload[:-1] - one.rounded(ask, client)[:-1], one.residual(ask, client))
        assert int(payload[-1]) * one.codec(ask).step == len(one.job.pool.clients[client])
    with pytest.raises(ProtocolError, match="Repair, which this scheme has not"):
        one.role.handle(one.states[0], request, one.job.pool.clients[0])


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"dropouts": "ignore"}, "ignore"), ({"repair_limit": 1.0}, "repair_limit"), ({"repair_limit": -0.1}, "repair")],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], why: str) -> None:
    plan = job(scheme="nadp", loss=None).scheme.uplink.plan
    assert plan is not None
    with pytest.raises(ConfigError, match=why):
        Noised(plan, **settings)


Spy = Callable[[], tuple[list[bytes], list[tuple[bytes, float]]]]


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Every seed that residual noise and pair noise were drawn from since the last look."""
    fresh: list[bytes] = []
    shared: list[tuple[bytes, float]] = []

    def one(words: NDArray[np.uint64], *, variance: float, step: float, seed: bytes) -> None:
        fresh.append(seed)

    def two(words: NDArray[np.uint64], seed: bytes, *, client: int, peer: int, variance: float, step: float) -> None:
        shared.append((seed, variance if client < peer else -variance))

    monkeypatch.setattr(grid_module, "add_noise", one)
    monkeypatch.setattr(noised_module, "add_shared", two)

    def taken() -> tuple[list[bytes], list[tuple[bytes, float]]]:
        found = (fresh.copy(), shared.copy())
        fresh.clear()
        shared.clear()
        return found

    return taken


def test_no_noise_is_used_twice_over_runs_resumes_and_reruns(spied: Spy, tmp_path: Path) -> None:
    """Four clients: 4 residual seeds a round, and 6 pair seeds that exactly two clients use, with opposite signs."""
    given: dict[str, Any] = {"scheme": "nadp", "clients": 4, "checkpoint_every": 2, "evaluate_every": 0}
    # The paper's accounting knows no target that would stop a repetition.
    given |= {"model_options": {"depth": 1, "width": 4}, "accounting": "paper"}
    used: Counter[bytes] = Counter()
    rounds = 0
    for name, settings in (("seeded", {"seed": 5, "rounds": 3}), ("os", {"rounds": 3})):
        for again in range(3):
            if again == 0:
                session.run(RunConfig.from_mapping({**given, **settings}), tmp_path / name, quiet=True)
            else:  # back to round 2, then to the beginning: over rounds that were already done
                saved = sorted((tmp_path / name / "checkpoints").glob("*.safetensors"))
                finished = [tmp_path / name / one for one in ("model.safetensors", "summary.json")]
                for lost in (*(saved[-1:] if again == 1 else saved), *finished):
                    lost.unlink()
                session.resume(tmp_path / name, quiet=True)
            fresh, shared = spied()
            rounds += len(fresh) // 4
            assert len(fresh) == 4 * (3 if again in (0, 2) else 1)
            by_seed: dict[bytes, list[float]] = {}
            for seed, scale in shared:
                by_seed.setdefault(seed, []).append(scale)
            assert len(by_seed) == 6 * len(fresh) // 4
            assert all(len(scales) == 2 and scales[0] == -scales[1] for scales in by_seed.values())
            used.update(fresh)
            used.update(list(by_seed))
    assert len(used) == 10 * rounds == 140
    assert set(used.values()) == {1}


def test_a_simulated_client_and_one_alone_add_the_same_noise() -> None:
    one = Federation(job(scheme="nadp", rounds=1, loss=None))
    ask = one.until(Train)
    states = [one.states[k] for k in ask.to]
    together = {
        reply.client: reply.payload
        for _, reply in one.role.handle_many(states, ask.common, one.job.pool.clients)
        if isinstance(reply, Upload)
    }
    alone = payloads(one.gather(ask))
    assert all(torch.equal(together[k][-1:], alone[k][-1:]) for k in ask.to)
    assert all(int((together[k] - alone[k]).abs().max()) <= 1 for k in ask.to)


def test_a_run_with_dropouts_ends_with_the_books_in_order() -> None:
    """Through the engine: whoever is absent for Train is repaired for, and the account says so."""
    one = job(scheme="nadp", rounds=8, epsilon=30.0, loss=None, clients=6)
    privacy_journal = PrivacyJournal(one)
    server = Federation(one).server
    boundaries: list[RoundDone] = []

    def boundary(done: RoundDone) -> None:
        boundaries.append(done)
        privacy_journal.end(done)

    engine = LocalEngine(
        client_role(one),
        one.pool,
        absent=lambda request, client: isinstance(request, Train) and client == request.round,
    )
    drive(engine, server.run(), on_round=boundary, on_begin=privacy_journal.begin)
    assert [done.gathered.missing for done in boundaries] == [(0,), (1,), (2,), (3,), (4,), (5,), (), ()]
    assert privacy_journal.accountant is not None
    assert privacy_journal.accountant.rounds == 8
