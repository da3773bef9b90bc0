"""One bad upload does not ruin a run: what honest clients cannot have sent costs an upload or a round, and no more."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from federation import accuracy, job, same_bits, trained
from fedveil.config import RunConfig
from fedveil.errors import Code, ConfigError, ProtocolError, StopTraining
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.phases import Gathered, RoundDone
from fedveil.protocol.plausible import Reach
from fedveil.roles.client import ClientRole
from fedveil.roles.server import ServerState
from fedveil.runs import session
from fedveil.runs.best import LossGuard
from fedveil.runs.callbacks import WARNING
from fedveil.runs.folder import RunFolder
from fedveil.runs.job import Job
from fedveil.runs.loop import fresh_state, train_job
from fedveil.runs.privacy_journal import PrivacyJournal
from interrupting import interrupted_run, same_tensors

Spoil = Callable[[Tensor], Tensor]
BAD = 2
"""The client that misbehaves."""


def huge(vector: Tensor) -> Tensor:
    return torch.cat([vector[:-1] * 1e6, vector[-1:]])


def not_a_number(vector: Tensor) -> Tensor:
    return torch.cat([vector[:-1] * math.nan, vector[-1:]])


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have client BAD spoil its contribution, or the words of its upload, in these rounds (counted from 0)."""

    protect = ClientRole._protect  # as it is: spoiling again replaces what was spoilt before

    def spoil(rounds: Any, contribution: Spoil = lambda vector: vector, words: int = 0) -> None:
        def spoilt(self: ClientRole, state: ClientState, vector: Tensor, context: RoundContext) -> Any:
            bad = state.client == BAD and context.round in rounds
            after, reply = protect(self, state, contribution(vector) if bad else vector, context)
            if bad and words:  # masks are added modulo 2⁶⁴, and so is this
                reply.payload[:-1] += words  # type: ignore[attr-defined]
            return after, reply

        monkeypatch.setattr(ClientRole, "_protect", spoilt)

    return spoil


def masked(**settings: Any) -> Job:
    rules = {"max_update_norm": 20.0, "on_bad_round": "skip"}
    return job(scheme="veil-secagg", head_noise=False, loss="cross-entropy", **rules, **settings)


def noised_under_masks(**settings: Any) -> Job:
    return job(scheme="veil-dp", cover="masks", loss=None, epsilon=50.0, **settings)


@pytest.mark.parametrize(
    ("make", "contribution", "words"),
    [
        (masked, huge, 0),
        (masked, None, 1 << 62),
        (masked, None, -(1 << 63)),
        (noised_under_masks, huge, 0),
        (noised_under_masks, None, 1 << 61),
    ],
    ids=["masks, huge", "masks, wrapped", "masks, at the edge", "noise, huge", "noise, wrapped"],
)
def test_a_sum_under_masks_that_nobody_honest_reaches_costs_its_round(
    make: Callable[..., Job], contribution: Spoil | None, words: int, hostile: Callable[..., None]
) -> None:
    hostile({1}, contribution or (lambda vector: vector), words)
    one, models, said = make(rounds=3), list[Tensor](), list[str]()
    outcome = train_job(
        one,
        state=fresh_state(one),
        on_round=lambda row, state: models.append(state.weights.parameters.clone()),
        say=said.append,
    )
    assert ["failed" in row for row in outcome.rows] == [False, True, False]
    assert same_bits(models[0], models[1])
    assert not torch.equal(models[1], models[2])
    assert outcome.rows[1]["code"] == Code.IMPLAUSIBLE
    assert outcome.rows[1]["suspects"] == [0, 1, 2, 3, 4]
    assert [text for text in said if text.startswith(WARNING) and "round 2" in text and "0, 1, 2, 3, 4" in text]
    account = outcome.privacy_journal.accountant
    if account is not None:  # shown is shown: the round costs what the others do, against everybody
        assert account.rounds == 3
        plain = make(rounds=3)
        hostile(set())
        undisturbed = train_job(plain, state=fresh_state(plain)).privacy_journal.accountant
        assert undisturbed is not None
        assert {who: list(spent) for who, spent in account.spent.items()} == {
            who: list(spent) for who, spent in undisturbed.spent.items()
        }


@pytest.mark.parametrize(
    ("settings", "contribution", "code"),
    [
        ({"scheme": "fedavg", "max_update_norm": 20.0}, huge, Code.IMPLAUSIBLE),
        ({"scheme": "fedavg"}, not_a_number, Code.NUMBERS),
        ({"scheme": "cdp", "epsilon": 50.0}, huge, Code.IMPLAUSIBLE),
        ({"scheme": "ldp", "epsilon": 50.0}, huge, Code.IMPLAUSIBLE),
        ({"scheme": "nadp", "epsilon": 50.0, "dropouts": "tolerate"}, huge, Code.IMPLAUSIBLE),
        ({"scheme": "dp-fedavg", "epsilon": 50.0}, huge, Code.IMPLAUSIBLE),
        ({"scheme": "varying-dp", "epsilon": 50.0}, huge, Code.IMPLAUSIBLE),
    ],
    ids=lambda value: value["scheme"] if isinstance(value, dict) else "",
)
def test_an_upload_that_can_be_read_is_refused_by_itself(
    settings: dict[str, Any], contribution: Spoil, code: Code, hostile: Callable[..., None]
) -> None:
    hostile({1}, contribution)
    one = job(rounds=2, loss="cross-entropy", **settings)
    _, rounds = trained(one)
    assert [(done.failed, list(done.gathered.refused)) for done in rounds] == [("", []), ("", [BAD])]
    assert rounds[1].gathered.refused[BAD].code is code


@pytest.mark.parametrize("scheme", ["nadp", "veil-dp"])
def test_an_upload_that_was_refused_is_charged_as_seen_also_where_arrivals_are_believed(
    scheme: str, hostile: Callable[..., None], tmp_path: Path
) -> None:
    """The server has it, and others give away the noise that covered it: S²/x, by its own noise alone."""
    hostile({1}, huge)
    one = job(scheme=scheme, loss=None, clients=6, rounds=60, epsilon=20.0, honest_arrivals=True)
    journal = tmp_path / "privacy.jsonl"

    def after_two(row: dict[str, Any], state: ServerState) -> None:
        if row["round"] == 2:
            raise StopTraining("enough")

    outcome = train_job(one, state=fresh_state(one), journal=journal, on_round=after_two)
    assert [list(row.get("refused", {})) for row in outcome.rows] == [[], [str(BAD)]]
    assert ["failed" in row for row in outcome.rows] == [False, False]
    account, first = outcome.privacy_journal.accountant, outcome.privacy_journal.first
    assert account is not None
    assert first is not None
    alone = first.sensitivity[BAD] ** 2 / first.residual[BAD]
    assert account.spent["server"][BAD] > alone
    assert account.spent["server"][0] < 0.8 * account.spent["server"][BAD]
    again = PrivacyJournal(one, journal).accountant
    assert again is not None
    assert list(again.spent["server"]) == list(account.spent["server"])


def test_who_cannot_pay_for_a_refused_upload_takes_no_further_part(hostile: Callable[..., None]) -> None:
    hostile(set(range(9)), huge)
    one = job(scheme="nadp", loss=None, clients=6, rounds=3, epsilon=3.0, honest_arrivals=True)
    outcome = train_job(one, state=fresh_state(one))
    assert "takes no further part" in outcome.rows[0]["failed"]
    assert [("failed" in row, row["clients"]) for row in outcome.rows[1:]] == [(False, 5)] * (len(outcome.rows) - 1)
    assert len(outcome.rows) > 1, "the others go on without it"
    account = outcome.privacy_journal.accountant
    assert account is not None
    assert account.limit is not None
    assert all(float(spent.max()) <= account.limit * (1 + 1e-9) for spent in account.spent.values())


def test_without_masks_of_its_own_a_refused_upload_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    protect = ClientRole._protect

    def spoilt(self: ClientRole, state: ClientState, vector: Tensor, context: RoundContext) -> Any:
        after, reply = protect(self, state, vector, context)
        if state.client == BAD and context.round == 1:
            reply = replace(reply, payload=reply.payload[:-1])
        return after, reply

    monkeypatch.setattr(ClientRole, "_protect", spoilt)
    for unmask, failed in (("always", False), ("on-dropout", True)):
        _, rounds = trained(masked(rounds=2, clients=8, unmask=unmask))
        assert [bool(done.failed) for done in rounds] == [False, failed]


def test_without_a_bound_the_same_upload_ruins_the_model(hostile: Callable[..., None]) -> None:
    hostile({3}, huge)
    settings = {"scheme": "fedavg", "loss": "cross-entropy", "rounds": 5, "lr": 0.5}
    ruined, held = (job(**settings, **more) for more in ({}, {"max_update_norm": 20.0}))
    assert accuracy(ruined, trained(ruined)[0]) < 0.3 < accuracy(held, trained(held)[0])


def test_what_noise_reaches_is_known_closely() -> None:
    """4,000 draws of noise: none is refused (chance below 4000·2⁻⁴⁰), and half as much again always is."""
    work = job(scheme="ldp", loss=None, clip=1e-6).scheme.work
    generator = torch.Generator().manual_seed(3)
    noise = 2.0 * torch.randn(4000, 1000, generator=generator, dtype=torch.float64)
    reach = Reach.of([1], work, variance=4.0, length=1000)
    assert float(noise.norm(dim=1).max()) < reach.norm < 1.3 * 2.0 * math.sqrt(1000)
    assert float(noise.abs().max()) < reach.number < 10 * 2.0
    for vector in (noise[0] * 1.5, torch.cat([noise[0, :-1], torch.tensor([25.0])]), noise[0] * math.nan):
        with pytest.raises(ProtocolError) as refused:
            reach.check(vector, "it")
        assert refused.value.code is Code.IMPLAUSIBLE


@pytest.mark.parametrize("scheme", ["nadp", "mpdp", "paraaegis"])
def test_a_bound_on_updates_is_refused_where_sums_hold_noise_or_are_not_read(scheme: str) -> None:
    with pytest.raises(ConfigError, match="max-update-norm does not go with"):
        job(scheme=scheme, loss=None if scheme != "mpdp" else "square", max_update_norm=3.0)


# ---- whole runs

SMALL: dict[str, Any] = {
    "scheme": "veil-secagg",
    "head_noise": False,
    "loss": "cross-entropy",
    "dataset": "digits",
    "model": "mlp",
    "model_options": {"depth": 2, "width": 8},
    "clients": 4,
    "batch_size": 20,
    "momentum": 0.9,
    "rounds": 6,
    "seed": 5,
    "checkpoint_every": 2,
    "evaluate_every": 0,
    "max_update_norm": 20.0,
}


def test_a_run_with_a_bad_round_resumes_to_the_same_bits(tmp_path: Path, hostile: Callable[..., None]) -> None:
    hostile({1, 3, 4}, huge)
    config = RunConfig.from_mapping({**SMALL, "on_bad_round": "skip"})
    whole = session.run(config, tmp_path / "whole", quiet=True)
    assert whole["bad_rounds"] == [2, 4, 5]
    for at in (2, 3, 4):  # within a row of bad rounds too
        folder = tmp_path / f"after-{at}"
        interrupted_run(config, folder, at=at)
        assert session.resume(folder, quiet=True)["bad_rounds"] == [2, 4, 5]
        assert same_tensors(folder / "model.safetensors", tmp_path / "whole" / "model.safetensors")


@pytest.mark.parametrize(
    ("rules", "ended"),
    [({"on_bad_round": "skip"}, 5), ({"max_bad_rounds": 2}, 4), ({"on_bad_round": "stop"}, 3), ({}, 3)],
    ids=["3", "2", "stop", "masks alone"],
)
def test_a_run_ends_after_bad_rounds_in_a_row(
    rules: dict[str, Any], ended: int, tmp_path: Path, hostile: Callable[..., None]
) -> None:
    hostile(range(2, 10), huge)
    config = RunConfig.from_mapping({**SMALL, **rules})
    summary = session.run(config, tmp_path / "run", quiet=True)
    assert (summary["rounds"], summary["bad_rounds"]) == (ended, list(range(3, ended + 1)))
    assert "stopped" in summary
    folder = RunFolder(tmp_path / "run")
    checkpoint = folder.checkpoints / f"round-{ended:08d}.safetensors"
    assert checkpoint.exists()
    # How many in a row there were is remembered: one more ends the run again at once.
    assert session.resume(tmp_path / "run", quiet=True)["rounds"] == ended + 1
    assert [row["round"] for row in folder.metrics()] == list(range(1, ended + 2))
    assert json.loads(folder.summary_file.read_text())["bad_rounds"] == list(range(3, ended + 2))


def test_only_a_good_round_ends_a_row_of_bad_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bad rounds and one that fails otherwise, by turns: the third bad one ends the run, with what it has."""
    protect = ClientRole._protect

    def spoilt(self: ClientRole, state: ClientState, vector: Tensor, context: RoundContext) -> Any:
        if state.client == BAD and context.round > 0:
            if context.round % 3 == 0:
                raise ProtocolError("away")
            vector = huge(vector)
        return protect(self, state, vector, context)

    monkeypatch.setattr(ClientRole, "_protect", spoilt)
    one = masked(clients=3, rounds=20)
    outcome = train_job(one, state=fresh_state(one))
    assert [row.get("code", "failed" in row) for row in outcome.rows] == [
        False,
        *["implausible"] * 2,
        True,
        "implausible",
    ]
    assert "no good one between them" in outcome.stopped


def test_a_ledger_says_what_going_on_after_a_bad_round_shows_under_masks_alone() -> None:
    told = "followed by one on the same model"
    plain = {"scheme": "veil-secagg", "head_noise": False, "loss": "cross-entropy"}
    for settings, said in (({}, False), ({"on_bad_round": "skip"}, True), ({"max_bad_rounds": 9}, True)):
        assert any(told in note for note in job(**plain, **settings).notes) == said
    assert not any(told in note for note in noised_under_masks(on_bad_round="skip").notes)


GUARDED: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name not in ("head_noise", "max_update_norm")},
    "scheme": "fedavg",
    "validation_fraction": 0.2,
    "max_loss_jump": 3.0,
}


def test_a_round_that_makes_the_held_out_loss_jump_is_taken_back(tmp_path: Path, hostile: Callable[..., None]) -> None:
    hostile({2, 3}, huge)
    config = RunConfig.from_mapping(GUARDED)
    whole = session.run(config, tmp_path / "whole", quiet=True)
    assert whole["bad_rounds"] == [3, 4]
    assert whole["validation_loss"] < 2.5
    rows = RunFolder(tmp_path / "whole").metrics()
    assert [row.get("code") for row in rows] == [None, None, Code.JUMPED, Code.JUMPED, None, None]
    assert any("held-out samples" in note and "no ε counts" in note for note in whole["ledger"]["notes"])
    for at in (3, 4):
        interrupted_run(config, tmp_path / f"after-{at}", at=at)
        assert session.resume(tmp_path / f"after-{at}", quiet=True)["bad_rounds"] == [3, 4]
        assert same_tensors(tmp_path / f"after-{at}" / "model.safetensors", tmp_path / "whole" / "model.safetensors")
    hostile(set())
    unspoilt = session.run(config, tmp_path / "unspoilt", quiet=True)
    assert "bad_rounds" not in unspoilt


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"validation_fraction": 0.0}, "there is none: hold one out"),
        ({"scheme": "ckks-fedavg", "cipher": "pads"}, "none to take back"),
        ({"max_loss_jump": 1.0}, "must be more than 1"),
    ],
)
def test_a_bound_on_the_held_out_loss_needs_samples_and_a_model(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        session.run(RunConfig.from_mapping({**GUARDED, **changes}), tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("begins", "after", "taken_back"), [(1.0, 2.9, 0), (1.0, 3.1, 1), (0.0, 1e-6, 0), (0.0, 1.0, 1)]
)
def test_losses_are_compared_by_their_ratio_down_to_next_to_nothing(
    begins: float, after: float, taken_back: int
) -> None:
    state, losses = fresh_state(job()), iter([begins, after])
    guard = LossGuard(3.0, state, lambda: next(losses))
    done = RoundDone(0, 1.0, (0,), Gathered((0,), {}, (), 0, 0))
    assert guard.judged(done, state).bad == taken_back
    with pytest.raises(ConfigError, match="never negative"):
        LossGuard(3.0, state, lambda: begins - 2.0)
