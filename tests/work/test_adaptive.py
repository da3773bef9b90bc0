"""A clip that follows the updates: what it releases, what that costs, and who checks it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from federation import job, next_ask, same_bits, server_of
from fedveil.downlink.messages import ClipBroadcast
from fedveil.engine import LocalEngine
from fedveil.errors import CheckpointError, ConfigError, ProtocolError
from fedveil.ledger.policy import Policy
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.messages import Train
from fedveil.protocol.plausible import Reach
from fedveil.roles.client import ClientRole
from fedveil.roles.server import ServerState
from fedveil.runs.checkpoint import load_checkpoint, save_checkpoint
from fedveil.runs.job import Job
from fedveil.runs.loop import Outcome, client_role, fresh_state, train_job
from fedveil.work.clipping import AdaptiveClip, ClippedUpdate
from fedveil.work.messages import Workspace

CLIP = 0.05
UPDATES: dict[str, Any] = {"loss": "cross-entropy", "local_steps": 2, "client_lr": 0.1, "lr": 1.0, "clip": CLIP}


def adapted(scheme: str = "cdp", **settings: Any) -> Job:
    given = {"epsilon": 100.0, "adaptive_clip": True, **UPDATES, **settings}
    return job(scheme=scheme, options={"depth": 1}, **given)


def contributions(one: Job, clip: float) -> dict[int, Tensor]:
    """What clients add up in the first round, before noise, under this clip."""
    ask = train_request(one)
    workspace = Workspace(one.architecture, one.scheme.layout(one.architecture))
    sent = ClipBroadcast.of(ask.broadcast, clip)
    made = one.scheme.work.run_many(workspace, sent, one.pool.clients, round=0)
    return {place: vector for place, vector in made if isinstance(vector, Tensor)}


def train_request(one: Job) -> Train:
    """What clients are sent in the first round, once they have introduced themselves."""
    steps, engine = server_of(one).run(), LocalEngine(client_role(one), one.pool)
    ask = next_ask(steps)
    while not isinstance(ask.common, Train):
        ask = next_ask(steps, engine.gather(ask))
    return ask.common


def test_a_contribution_and_its_answer_are_within_what_noise_is_made_for() -> None:
    one = adapted(dtype="float32")
    work = one.scheme.work
    assert isinstance(work, ClippedUpdate)
    assert work.adaptive is not None
    wide, narrow = contributions(one, 100.0), contributions(one, 1e-3)
    for client, data in enumerate(one.pool.clients):
        count, layout = len(data), one.scheme.layout(one.architecture)
        for vector, sign, clip in ((wide[client], 1, 100.0), (narrow[client], -1, 1e-3)):
            parts = layout.split(vector.double())
            assert float(parts["within"]) == pytest.approx(sign * count * CLIP / 3, rel=1e-5)
            assert float(vector[:-1].double().norm()) <= count * work.largest
            # Within the clip an update arrives whole, once it is multiplied by what the server multiplies by.
            length = float(parts["gradients"].norm()) / count * clip / CLIP
            assert (length == pytest.approx(clip, rel=1e-3)) if sign < 0 else length < clip
        assert float((wide[client] - narrow[client]).double().norm()) <= work.sensitivity(count)
    assert work.largest == pytest.approx(CLIP / math.sqrt(0.9))


def test_the_answers_are_paid_for_out_of_the_same_epsilon() -> None:
    """z⁻² = z_Δ⁻² + σ_b⁻², and the ledger ends where it would without them."""
    fixed, moving = adapted("nadp", rounds=2, adaptive_clip=None), adapted("nadp", rounds=2)
    lines = [train_job(one, state=fresh_state(one)).privacy_journal.ledger().lines for one in (fixed, moving)]
    assert [line.epsilon for line in lines[0]] == pytest.approx([line.epsilon for line in lines[1]])
    sigma = {}
    for one in (fixed, moving):
        assert one.scheme.plan is not None
        counts = [len(data) for data in one.pool.clients]
        reach = [one.scheme.work.sensitivity(count) for count in counts]  # type: ignore[attr-defined]
        layout = one.scheme.plan.noise_layout(range(5), counts, reach, seed=b"")
        sigma[one] = math.sqrt(float(layout.residual.sum()))
    unit = 2 * CLIP * 60  # how far an update reaches, of 60 samples
    z, z_update, z_answer = sigma[fixed] / unit, sigma[moving] / unit, sigma[moving] / (unit / 3)
    assert z**-2 == pytest.approx(z_update**-2 + z_answer**-2, rel=1e-4)
    ledger = train_job(moving, state=fresh_state(moving)).privacy_journal.ledger()
    assert {"upload.within", "train.clip"} <= {release.field for release in ledger.releases}
    assert {release.protection for release in ledger.releases if release.field == "upload.within"} == {"noised"}
    assert [note for note in ledger.notes if "the clip follows" in note and "0.1" in note]


@pytest.mark.parametrize("start", [CLIP / 20, CLIP * 100])
def test_the_clip_comes_to_the_quantile_of_the_updates(start: float) -> None:
    """At an ε of 10⁴, where noise is nearly nothing."""
    rule = {"clip_rate": 1.0, "clip_quantile": 0.6, "clip_range": 1000.0}
    one = adapted(rounds=20, clip=start, epsilon=1e4, client_lr=0.01, **rule)
    rows: list[float] = []
    outcome = train_job(one, state=fresh_state(one), on_round=lambda row, state: rows.append(row["clip"]))
    lengths = sorted(
        float(vector[: one.architecture.size].norm()) / float(vector[-1]) * 1e3 / start
        for vector in contributions(replace(one, weights=outcome.state.weights), 1e3).values()
    )
    assert lengths[0] / 2 < rows[-1] < lengths[-1] * 2
    assert rows[0] == pytest.approx(start * math.exp(-(1 - 0.6) if start > CLIP else 0.6), rel=0.05)


@pytest.mark.parametrize("scheme", ["cdp", "ldp", "nadp", "dp-fedavg"])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_clip_bit_for_bit(scheme: str, tmp_path: Path) -> None:
    one, kept = adapted(scheme, rounds=4), dict[int, Path]()

    def keep(row: dict[str, Any], state: ServerState) -> None:
        kept[row["round"]] = save_checkpoint(tmp_path, state, fingerprint="a")

    whole = train_job(one, state=fresh_state(one), on_round=keep)
    assert whole.state.clip not in (None, CLIP)
    resumed = load_checkpoint(kept[3], one.weights, fingerprint="a")
    after = train_job(one, state=resumed).state
    assert after.clip == whole.state.clip
    assert same_bits(after.weights.parameters, whole.state.weights.parameters)
    resumed.clip = -1.0
    with pytest.raises(CheckpointError, match="its clip is no number"):
        load_checkpoint(save_checkpoint(tmp_path, resumed, fingerprint="a"), one.weights, fingerprint="a")


def test_clients_take_no_clip_that_answers_cannot_lead_to_or_that_their_policy_forbids() -> None:
    one = adapted("dp-fedavg")
    request = train_request(one)
    assert isinstance(request.broadcast, ClipBroadcast)
    role = ClientRole(one.scheme, one.architecture, policy=Policy(max_clip=CLIP * 1.05))
    told = {
        (CLIP, 0): None,
        (CLIP * 1.01, 0): "cannot follow",
        (CLIP * math.exp(0.1) * 1.01, 1): "cannot follow",
        (CLIP * math.exp(0.1) * 0.99, 1): "its policy",
        (CLIP * math.exp(-0.1), 1): None,
        (math.nan, 1): "cannot follow",
        (0.0, 1): "cannot follow",
    }
    for (clip, round), why in told.items():
        sent = replace(request, round=round, broadcast=ClipBroadcast.of(request.broadcast, clip))
        if why is None:
            role._check_clip(ClientState(0), sent)
            continue
        with pytest.raises(ProtocolError, match=why):
            role._check_clip(ClientState(0), sent)
    fixed = adapted("dp-fedavg", adaptive_clip=None)
    with pytest.raises(ProtocolError, match="comes with a clip"):
        ClientRole(fixed.scheme, fixed.architecture)._check_clip(ClientState(0), request)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"local_steps": None, "client_lr": None}, "every sample is clipped by itself"),
        ({"adaptive_clip": None, "clip_share": 0.2}, "adaptive-clip too"),
        ({"clip_quantile": 1.0}, "clip_quantile must"),
        ({"clip_rate": 0.0}, "clip_rate must"),
        ({"clip_range": 1.0}, "clip_range must"),
        ({"clip_share": 0.0}, "clip_share must"),
    ],
)
def test_rules_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        adapted(**settings)


def test_noise_moves_a_clip_by_no_more_than_a_true_answer_could() -> None:
    rule = AdaptiveClip(quantile=0.3, rate=0.5)
    for loud, true, moved in ((1e9, 1.0, -0.35), (-1e9, -1.0, 0.15)):
        told = [rule.following(2.0, answers, start=2.0) for answers in (loud, true)]
        assert told == [2.0 * math.exp(moved)] * 2


@pytest.mark.parametrize("answers", [-30.0, 30.0])
def test_a_clip_that_is_lied_about_stays_within_its_range(answers: float) -> None:
    rule, clip = AdaptiveClip(range=8.0), 2.0
    for round in range(1, 60):
        clip = rule.following(clip, answers, start=2.0)
        rule.check(clip, start=2.0, round=round)
    assert clip == (16.0 if answers < 0 else 0.25)
    with pytest.raises(ProtocolError, match="clip_range of 8"):
        rule.check(clip * (1.01 if answers < 0 else 0.99), start=2.0, round=100)


def test_an_answer_is_held_to_what_clients_give() -> None:
    """Twice as loud as all together, which is short enough for an update: where noise is nearly nothing it shows."""
    work = adapted("nadp").scheme.work
    assert isinstance(work, ClippedUpdate)
    assert work.adaptive is not None
    true = 50 * CLIP * work.adaptive.mark
    reach = Reach.of([20, 30], work, variance=1e-12, length=4)
    reach.check(torch.tensor([0.0, 0.0, 0.0, -true]), "a sum")
    for lie in (2 * true, -2 * true):
        with pytest.raises(ProtocolError, match="whether updates were clipped"):
            reach.check(torch.tensor([0.0, 0.0, 0.0, lie]), "a sum")


# ---- a clip that shrinks by a schedule

SHRINKING: dict[str, dict[str, Any]] = {
    "ldp, samples": {"scheme": "ldp"},
    "cdp, updates": {"scheme": "cdp", **UPDATES},
    "nadp": {"scheme": "nadp"},
    "veil-dp": {"scheme": "veil-dp"},
    "veil-dp under masks": {"scheme": "veil-dp", "cover": "masks"},
    "dp-fedavg": {"scheme": "dp-fedavg", "local_steps": 2},
    "serial": {"scheme": "serial", "cipher": "pads", "local_steps": 2},
    "paraaegis, nothing hidden": {"scheme": "paraaegis", "share": 0.0, "local_steps": 2},
}


def steps_of(**settings: Any) -> tuple[list[Tensor], Outcome]:
    """A run's steps, its clip being far below every gradient or update."""
    given = {"loss": "cross-entropy", "lr": 1.0, "rounds": 3, "clip": 1e-4, **settings} | {"clip": 1e-4}
    one = job(clients=4, options={"depth": 2, "width": 8}, **given)
    models = [one.weights.parameters.clone()]
    outcome = train_job(
        one, state=fresh_state(one), on_round=lambda row, state: models.append(state.weights.parameters.clone())
    )
    return [after - before for before, after in itertools.pairwise(models)], outcome


@pytest.mark.parametrize("settings", SHRINKING.values(), ids=SHRINKING)
def test_clip_and_noise_shrink_together_and_a_round_costs_the_same(settings: dict[str, Any]) -> None:
    quiet, _ = steps_of(**settings, epsilon=1e5, clip_decay=0.5)
    lengths = [float(step.norm()) for step in quiet]
    for number, length in enumerate(lengths):  # means of clipped vectors are no longer than the clip, and not far below
        assert 0.05 < length / (1e-4 * 0.5**number) < 1.01
    # With much noise, nothing but noise is left: 1e-6 false alarms for lengths within a quarter of what they should be.
    noised, outcome = steps_of(**settings, epsilon=0.01, clip_decay=0.5)
    constant, plain = steps_of(**settings, epsilon=0.01)
    for number, (step, other) in enumerate(zip(noised, constant, strict=True)):
        assert float(step.norm() / other.norm()) == pytest.approx(0.5**number, rel=0.25)
    books, before = outcome.privacy_journal.accountant, plain.privacy_journal.accountant
    assert books is not None
    assert before is not None
    assert {name: spent.tolist() for name, spent in books.spent.items()} == {
        name: spent.tolist() for name, spent in before.spent.items()
    }
    assert [row["clip"] for row in outcome.rows] == pytest.approx([1e-4, 5e-5, 2.5e-5])
    assert any("the clip is multiplied by 0.5" in note for note in outcome.privacy_journal.ledger().notes)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip_decay": 0.0}, "above 0 and at most 1"),
        ({"clip_decay": 1.1}, "above 0 and at most 1"),
        ({"clip_decay": 1e-9, "rounds": 3}, "must lie between"),
        ({"clip_decay": 0.9, "adaptive_clip": True, **UPDATES}, "not both"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job(scheme="ldp", **settings)


def test_a_client_leaves_when_the_clip_falls_below_its_own_limit() -> None:
    one = job(scheme="ldp", loss="cross-entropy", clip=1.0, clip_decay=0.5, epsilon=50.0, rounds=3)
    guarded = replace(one, guard=replace(one.guard, policy=Policy(min_clip=0.4)))
    with pytest.raises(ProtocolError, match=r"no round with a clip of 0\.25"):
        train_job(guarded, state=fresh_state(guarded))
