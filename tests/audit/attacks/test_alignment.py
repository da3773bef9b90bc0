"""A client that aligns: what it gets of the server's updates under every veil, and what it has who knows the start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from audit.small_runs import QUICK, folder, job_of, subject_of
from fedveil.audit.attack import attacks
from fedveil.audit.attacks.alignment import received
from fedveil.audit.findings import KNOWN_FIRST, Finding, Score, Trial, judged, sentences
from fedveil.audit.subject import Scene, enacted
from fedveil.audit.trials import model_trials
from fedveil.audit.views import ClientView, from_bytes, to_bytes
from fedveil.errors import DataError, NotApplicableError

CHANGE = "cosine of the change, were the first model known"
FOLLOWED = "error when followed, were the first model known"
OPEN: dict[str, Any] = {"head_noise": False}
VIT: dict[str, Any] = {"model": "vit", "model_options": {"width": 8, "depth": 1, "heads": 2, "patch": 4}}


def trial_of(**changes: Any) -> Trial:
    given = {"lr": 0.05, "momentum": 0.9, **changes}
    own = "model_options" in given  # which are no key to keep a run by
    subject = enacted(job_of(**given), folder() / "record") if own else subject_of(**given)
    (trial,) = model_trials(Scene(subject, subject, False, QUICK, judged=False), [attacks()["alignment"]])
    return trial


def score_of(trial: Trial) -> Score:
    """As an audit makes it: from the bytes of a view alone."""
    (attempt,) = trial.attempts
    return trial.score([attacks()["alignment"](from_bytes(to_bytes(attempt.view)), trial.told(attempt))])


def client_view(trial: Trial) -> ClientView:
    view = trial.attempts[0].view
    assert isinstance(view, ClientView)
    return view


def test_orders_and_signs_hide_no_update_and_nothing_from_who_knows_the_start() -> None:
    trial = trial_of(family="signed", **OPEN)
    assert trial.seen == "the models it receives in rounds 3 and 4"
    score = score_of(trial)
    assert score.value > 0.9999
    assert score.more["relative error"] < 1e-3
    assert score.chance is not None
    assert score.chance < 0.2
    assert score.more[KNOWN_FIRST] > 0.999
    assert score.more[FOLLOWED] < 1e-5
    assert trial.unprotected is not None
    assert judged(trial.measure, score, trial.unprotected)[0] == "as if unprotected"


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"family": "scale", **OPEN}, 0.98),
        ({"family": "full", **OPEN}, 0.98),
        ({"loss": "cross-entropy", **OPEN}, 0.98),
        ({"family": "scale"}, 0.8),
        pytest.param({"stream_rotations": True, **OPEN, **VIT}, 0.95, marks=pytest.mark.slow),
        ({"scheme": "veil-dp", "epsilon": 8.0, "family": "isometry"}, 0.999),
        ({"scheme": "mpdp", "epsilon": 8.0, "lr": 0.01, "momentum": 0.0}, 0.8),
    ],
    ids=["scale", "full", "shifted logits", "head noise", "streams", "differential privacy", "decomposed noise"],
)
def test_no_veil_keeps_updates_from_a_client_that_aligns(changes: dict[str, Any], least: float) -> None:
    score = score_of(trial_of(**changes))
    assert score.value > least
    assert score.chance is not None
    assert score.chance < 0.5
    assert score.more[CHANGE] > least


def test_models_of_two_runs_do_not_match() -> None:
    """Control: the other run has another first model; by chance the cosine of 1,500 numbers is below 0.2."""
    trial, other = trial_of(family="signed", **OPEN), trial_of(family="signed", seed=2, **OPEN)
    mine, theirs = client_view(trial), client_view(other)
    mixed = replace(
        mine,
        messages=tuple(
            their if our.round == 4 and our.phase == "train" else our
            for our, their in zip(mine.messages, theirs.messages, strict=True)
        ),
    )
    attempt = replace(trial.attempts[0], view=mixed)
    score = score_of(replace(trial, attempts=(attempt,)))
    assert abs(score.value) < 0.2


def test_one_model_is_nothing_to_match() -> None:
    trial = trial_of(family="signed", record_rounds="4", **OPEN)
    with pytest.raises(NotApplicableError, match="no two rounds"):
        score_of(trial)


def test_a_model_of_another_network_is_refused() -> None:
    view = client_view(trial_of(family="signed", **OPEN))
    architecture, broadcast = view.facts.architecture("signed"), view.broadcasts[0].broadcast
    for wrong in (broadcast.parameters[1:], broadcast.parameters.long()):
        with pytest.raises(DataError, match="not of this network"):
            received(architecture, replace(broadcast, parameters=wrong))
    with pytest.raises(DataError, match="transitional layers"):
        received(architecture, replace(broadcast, multipliers=torch.ones(3)))


def test_the_sentence_says_what_a_known_start_would_give() -> None:
    finding = Finding(
        *("client/alignment", "a client", "the server's updates", "alignment", "the models", True, "cosine"),
        verdict="as if unprotected",
        more={KNOWN_FIRST: 1.0},
    )
    assert "knew the first model would have 100.0 % of the numbers" in sentences([finding])["a client"]
