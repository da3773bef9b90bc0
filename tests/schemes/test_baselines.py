"""The papers' yardsticks: each does what its source says, and its ledger what holds."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from federation import distance, job, same_bits, trained
from fedveil import schemes
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError, ProtocolError
from fedveil.ledger.accountant import Accountant
from fedveil.protocol.messages import Upload
from fedveil.runs import session
from fedveil.runs.loop import fresh_state, train_job
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.uplink.noise_plan import NoisePlan, Target
from fedveil.uplink.unmasking import MaskedUpload
from interrupting import interrupted_run, same_tensors

SMALL: dict[str, Any] = {"rounds": 3, "loss": "cross-entropy", "options": {"depth": 2, "width": 8}}
PLANNED = [info.name for info in schemes.schemes() if "noise_decay" in info.options]


@pytest.mark.parametrize("local", [{}, {"local_steps": 2}, {"local_epochs": 1, "batch_size": 32}], ids=str)
def test_secagg_trains_the_model_of_fedavg(local: dict[str, Any]) -> None:
    """Up to fixed point: 2⁻³⁹ a number and client, over weights of 60 samples."""
    masked, plain = (trained(job(scheme=name, **SMALL, **local))[0].weights.parameters for name in ("secagg", "fedavg"))
    assert 0 < distance(masked, plain) < 1e-8


def test_secagg_opens_the_sum_of_who_is_there() -> None:
    """A client that vanishes after it was asked leaves what fedavg has without it."""
    gone = lambda ask, client: client == 2  # noqa: E731
    models = []
    for name in ("secagg", "fedavg"):
        state, rounds = trained(job(scheme=name, **SMALL), absent=gone)
        assert [done.failed for done in rounds] == ["", "", ""]
        assert all(done.gathered.arrived == (0, 1, 3, 4) for done in rounds)
        models.append(state.weights.parameters)
    assert distance(*models) < 1e-8


TWINS = {info.name: dict(info.twin) for info in schemes.schemes() if info.twin}
UNDER: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "everybody": ({}, ()),
    "the paper's noise": ({"accounting": "paper"}, ()),
    "the paper's noise, shrinking": ({"accounting": "paper", "noise_decay": 0.9}, ()),
    "four of eight away": ({"clients": 8}, (0, 1, 2, 3)),
    "four of twelve away": ({"clients": 12}, (0, 1, 2, 3)),
    "drawn by chance": ({"clients": 12, "sampling_rate": 0.6}, ()),
    "drawn by chance, by the paper": ({"clients": 12, "sampling_rate": 0.6, "accounting": "paper"}, ()),
    # Of twenty clients two or three may collude in the largest round: some small ones cannot be.
    "rounds that cannot be": ({"clients": 20, "sampling_rate": 0.3}, ()),
}


CASES = {
    f"{name}, {what}": (name, more, away)
    for name in TWINS
    for what, (more, away) in UNDER.items()
    if "accounting" in schemes.find(name).options or "accounting" not in more
}


@pytest.mark.parametrize(("name", "more", "away"), CASES.values(), ids=CASES)
def test_a_ciphers_twin_trains_its_very_model(name: str, more: dict[str, Any], away: tuple[int, ...]) -> None:
    """To the last bit, with its noise by either accounting, in rounds of any size; what one fails, both fail."""
    shared = {"scheme": name, "rounds": 3, "options": {"depth": 2, "width": 2}, **more}
    jobs = job(**shared), job(**shared, **TWINS[name])
    gone = lambda ask, client: client in away  # noqa: E731
    (ours, rounds), (theirs, others) = (trained(one, absent=gone) for one in jobs)
    assert jobs[0].scheme.plan == jobs[1].scheme.plan
    assert [bool(done.failed) for done in rounds] == [bool(done.failed) for done in others]
    assert not all(done.failed for done in rounds)
    assert same_bits(ours.weights.parameters, theirs.weights.parameters)


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("clients", [5, 13, 32])
@pytest.mark.parametrize("collusion", [0.0, 0.1, 0.25, 0.3])
def test_as_many_may_be_missing_under_a_ciphers_twin_in_rounds_of_any_size(
    name: str, clients: int, collusion: float
) -> None:
    """And no twin does a round that the cipher would refuse."""
    shared = {"clients": clients, "collusion": collusion, "options": {"depth": 2, "width": 2}}
    cipher, twin = (job(scheme=name, **shared, **more).scheme.uplink for more in ({}, TWINS[name]))
    for size in range(3, clients + 1):
        assert twin.absences(size) == cipher.absences(size)
        try:
            cipher.fits(size, asked=clients)
        except ConfigError:
            with pytest.raises(ConfigError):
                twin.fits(size, asked=clients)


def forged(replies: list[Any]) -> list[Any]:
    """Client 1's upload, if it is among them, without its last number."""
    return [
        type(said)(said.client, said.round, said.attempt, said.payload[:-1], *_shares(said))
        if isinstance(said, (Upload, MaskedUpload)) and said.client == 1
        else said
        for said in replies
    ]


def _shares(said: Upload | MaskedUpload) -> tuple[Any, ...]:
    return (said.holders, said.lengths, said.bundles) if isinstance(said, MaskedUpload) else ()


@pytest.mark.parametrize("name", ["secagg", "varying-dp"])
def test_a_message_of_another_size_is_refused_and_the_round_goes_on_without_it(name: str) -> None:
    _, rounds = trained(job(scheme=name, **SMALL), reorder=forged)
    assert [done.failed for done in rounds] == ["", "", ""]
    assert all(list(done.gathered.refused) == [1] for done in rounds)


def test_secagg_proves_that_sums_alone_are_seen_and_nothing_of_clients() -> None:
    ledger = PrivacyJournal(job(scheme="secagg", **SMALL)).ledger()
    verdicts = {line.adversary: line.verdict for line in ledger.lines}
    assert set(verdicts.values()) == {"aggregate only", "none"}
    assert verdicts["server"] == "aggregate only"
    assert verdicts["clients"] == "none"
    assert all(release.protection == "masked" for release in ledger.releases if release.field.startswith("upload.g"))


def spent(name: str, **settings: Any) -> tuple[Accountant, list[str]]:
    """What a run's rounds have cost, and which of them failed."""
    more = {"cipher": "pads", "share": 0.3} if name == "paraaegis" else {"cipher": "pads"} if name == "serial" else {}
    loss = schemes.find(name).default_loss
    one = job(scheme=name, **{**SMALL, "loss": "square" if loss == "square" else "cross-entropy", **more, **settings})
    outcome = train_job(one, state=fresh_state(one))
    account = outcome.privacy_journal.accountant
    assert account is not None
    return account, [row.get("failed", "") for row in outcome.rows]


@pytest.mark.parametrize("name", PLANNED)
def test_every_scheme_under_a_claim_meets_its_target_with_noise_that_shrinks(name: str) -> None:
    account, failed = spent(name, noise_decay=0.5, epsilon=2.0)
    worst = max(account.epsilon(adversary, 1e-5) for adversary in account.adversaries)
    assert failed == ["", "", ""]
    assert 1.999 < worst <= 2.0


def test_the_named_scheme_is_dp_fedavg_with_a_decay() -> None:
    models = [
        trained(job(scheme=name, **SMALL, **more))[0].weights.parameters
        for name, more in (
            ("varying-dp", {}),
            ("dp-fedavg", {"noise_decay": 0.9}),
            ("dp-fedavg", {}),
        )
    ]
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


@pytest.mark.parametrize("layout", ["local", "pairs", "sum"])
@pytest.mark.parametrize("accounting", ["exact", "paper"])
def test_each_rounds_deviation_is_the_one_befores_times_the_factor(layout: Any, accounting: Any) -> None:
    plan = NoisePlan(Target(1.0, 1e-5, 6, 4, 4 / 6, decay=0.8), layout, accounting)
    own = [
        plan.noise_layout((0, 1, 2), (30, 40, 50), (2.0, 2.0, 2.0), seed=b"graph", round=t).residual ** 0.5
        for t in range(6)
    ]
    for earlier, later in pairwise(own):
        np.testing.assert_allclose(later / earlier, 0.8, rtol=1e-12)
    with pytest.raises(ProtocolError):
        plan.noise_layout((0, 1, 2), (30, 40, 50), (2.0, 2.0, 2.0), seed=b"graph")


def test_noise_by_the_papers_formula_follows_the_series() -> None:
    """σ_0 = (Δf/ε)·√(2q·ln(1/δ)·Σ_t ρ^(−2t))."""
    target = Target(2.0, 1e-5, 10, 5, 0.5, decay=0.9)
    by_hand = 0.1 / 2.0 * math.sqrt(2 * 0.5 * math.log(1e5) * sum(0.9 ** (-2 * t) for t in range(10)))
    assert NoisePlan(target, "local", "paper").paper_scale(0.1, 0) == pytest.approx(by_hand, rel=1e-11)


def test_secretly_drawn_batches_and_noise_that_shrinks_do_not_go_together() -> None:
    with pytest.raises(ConfigError):
        job(scheme="ldp", secret_sampling=0.1, noise_decay=0.9, **SMALL)


def test_a_client_that_misses_early_rounds_is_counted_on_for_the_last() -> None:
    """With 3 of 5 clients a round, whoever takes part in the dearest rounds stays within the target."""
    account, _ = spent("varying-dp", noise_decay=0.6, epsilon=2.0, cohort=3, rounds=5)
    assert max(account.epsilon(adversary, 1e-5) for adversary in account.adversaries) <= 2.0


def test_dropouts_under_noise_that_shrinks_cost_what_the_round_was_noised_for() -> None:
    """Repairs of the first round are cheap, since its noise is large; what is charged follows the round."""
    one = job(scheme="nadp", **{**SMALL, "rounds": 2}, noise_decay=0.5, epsilon=50.0, honest_arrivals=True)
    prices = []
    for t in range(2):
        context_layout = one.scheme.plan.noise_layout(  # type: ignore[union-attr]
            tuple(range(5)), [60] * 5, [2.0] * 5, seed=b"graph", round=t
        )
        account = Accountant(5, honest_arrivals=True)
        account.charge(context_layout, arrived=(0, 1, 2, 3), revealed=[(i, 4) for i in range(4)])
        prices.append(account.spent["server"])
    np.testing.assert_allclose(prices[1][:4] / prices[0][:4], 4.0, rtol=1e-9)
    _, rounds = trained(one, absent=lambda ask, client: client == 4)
    assert [done.failed for done in rounds] == ["", ""]


class StopsOnceKept:
    """Interrupts a run as soon as a checkpoint holds its second round."""

    rounds = 0

    def begin(self, *told: Any) -> None: ...

    def round(self, row: dict[str, Any]) -> None:
        self.rounds = row["round"]

    def kept(self) -> None:
        if self.rounds == 2:
            raise KeyboardInterrupt

    def end(self, *told: Any) -> None: ...

    def stopped(self, *told: Any) -> None: ...


@pytest.mark.parametrize("name", ["varying-dp", "nadp"])
def test_a_run_goes_on_where_its_noise_was_and_pays_for_every_round_once(name: str, tmp_path: Path) -> None:
    """What is resumed draws fresh noise, as under every claim; of the same folder it ends in the same bits."""
    run = {"scheme": name, "dataset": "digits", "clients": 3, "rounds": 4, "seed": 5, "checkpoint_every": 1}
    noise = {"noise_decay": 0.7, "epsilon": 8.0, "clip": 0.01}
    settings = run | noise | {"batch_size": 16, "model_options": {"width": 4, "depth": 2}}
    straight, first, again = tmp_path / "straight", tmp_path / "first", tmp_path / "again"
    session.run(RunConfig.from_mapping(settings), straight, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        session.run(RunConfig.from_mapping(settings), first, quiet=True, follow=[StopsOnceKept()])
    shutil.copytree(first, again)
    for folder in (first, again):
        session.resume(folder, changes={}, quiet=True)
    assert same_tensors(first / "model.safetensors", again / "model.safetensors")
    resumed, whole = (json.loads((folder / "ledger.json").read_text()) for folder in (first, straight))
    assert resumed["rounds"] == whole["rounds"] == 4
    for ours, theirs in zip(resumed["lines"], whole["lines"], strict=True):
        assert ours["epsilon"] == pytest.approx(theirs["epsilon"], rel=1e-12)
    assert max(line["epsilon"] for line in resumed["lines"]) == pytest.approx(8.0, rel=1e-9)


@pytest.mark.parametrize("more", [{"scheme": "dbcl"}, {"scheme": "spn"}, {"scheme": "spn", "local_steps": 2}], ids=str)
def test_a_run_that_is_resumed_ends_in_the_same_bits(more: dict[str, Any], tmp_path: Path) -> None:
    run = {"dataset": "digits", "clients": 3, "rounds": 5, "seed": 5, "checkpoint_every": 2, "batch_size": 16}
    config = RunConfig.from_mapping({**run, **more, "model_options": {"width": 4, "depth": 2}})
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    session.run(config, straight, quiet=True)
    interrupted_run(config, broken, at=3)
    session.resume(broken, quiet=True)
    assert same_tensors(straight / "model.safetensors", broken / "model.safetensors")
    kept = {file.name for file in (broken / "checkpoints").glob("*.clients")}
    assert kept == ({"round-00000004.clients", "round-00000005.clients"} if more["scheme"] == "spn" else set())


def test_private_heads_that_are_gone_are_missed(tmp_path: Path) -> None:
    run = {"scheme": "spn", "dataset": "digits", "clients": 2, "rounds": 3, "seed": 5, "checkpoint_every": 1}
    config = RunConfig.from_mapping({**run, "model_options": {"width": 4, "depth": 2}})
    interrupted_run(config, tmp_path / "run", at=2)
    file = tmp_path / "run" / "checkpoints" / "round-00000001.clients"
    kept = file.read_bytes()
    assert file.stat().st_mode & 0o077 == 0
    for content in (kept[:-1] + bytes([kept[-1] ^ 1]), kept[:-40], b""):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=file.name):
            session.resume(tmp_path / "run", quiet=True)
    file.write_bytes(kept)
    session.resume(tmp_path / "run", quiet=True)


def test_the_bytes_that_a_sketch_needs_are_reported_beside_those_that_pass(tmp_path: Path) -> None:
    run = {"scheme": "dbcl", "dataset": "digits", "clients": 2, "rounds": 1, "seed": 5, "sketch_ratio": 4}
    config = RunConfig.from_mapping({**run, "model_options": {"width": 16, "depth": 2}})
    summary = session.run(config, tmp_path / "run", quiet=True)
    weights = 64 * 16 + 16 * 10
    for way in ("down", "up"):
        assert summary[f"bytes_{way}"] - summary[f"needed_bytes_{way}"] == 4 * weights * 3 / 4


@pytest.mark.parametrize(("clients", "collusion"), [(4, 0.25), (6, 0.2)])
def test_masks_in_a_ciphers_place_withstand_as_many_as_the_cipher_or_are_refused(
    clients: int, collusion: float
) -> None:
    """Of six, three of five neighbours open a mask that should withstand one: with two stories, one ally is enough."""
    assert job(scheme="tp-smc", loss=None, clients=clients, collusion=collusion)
    with pytest.raises(ConfigError, match="do not withstand"):
        job(scheme="tp-smc", loss=None, clients=clients, collusion=collusion, cover="masks")
