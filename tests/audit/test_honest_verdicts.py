"""What would make an audit say too little or too much: each was once possible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from audit.small_runs import scene, subject_of
from fedveil.audit.findings import AuditStore, Finding, Score, judged, sentences
from fedveil.audit.measures import Likeness, Members
from fedveil.audit.record import client_view
from fedveil.audit.running import all_trials, missing_trials
from fedveil.audit.subject import Effort
from fedveil.audit.trials import _Model, _paired
from fedveil.errors import ConfigError


def test_a_few_that_are_rebuilt_are_not_hidden_by_many_that_are_missed() -> None:
    x = torch.rand((8, 1, 8, 8), generator=torch.Generator().manual_seed(1))
    measure = Likeness(peak=1.0, chance=10.0, random=6.0, blind=torch.full((1, 1, 8, 8), 0.5))
    guess = 1.0 - x  # worse than grey
    guess[:2] = x[:2] + 1e-3
    truth = [{"x": x, "y": torch.zeros(8).long()}]
    score = measure.score([{"inputs": guess}], truth)
    exact = measure.score([{"inputs": x}], truth)
    assert judged(measure, score, exact)[0] == "in part"
    assert score.more["recognisable"] == 0.25
    guess[:2] = x[:2]  # exactly: two of eight still do not stand for all
    assert judged(measure, measure.score([{"inputs": guess}], truth), exact)[0] == "in part"
    nothing = measure.score([{"inputs": 1.0 - x}], truth)
    assert nothing.value == pytest.approx(nothing.chance)
    assert judged(measure, nothing, exact)[0] == "nothing"


def test_who_is_sure_of_a_few_members_tells_members() -> None:
    """Ten of a hundred are told without a mistake; over all, the rate stays near one half."""
    generator = torch.Generator().manual_seed(3)
    member = torch.arange(400) < 200
    scores = torch.rand(400, generator=generator) - 0.5
    scores[:30] = 5.0
    score = Members().score([{"scores": scores, "threshold": torch.tensor(0.0)}], [{"member": member}])
    assert score.some
    assert judged(Members(), score, Score(0.9, 0.85, 0.95))[0] == "in part"


def test_chance_counts_for_a_scheme_only_if_the_unprotected_figure_is_surely_higher() -> None:
    members = Members()
    assert judged(members, Score(0.53, 0.496, 0.56), Score(0.54, 0.505, 0.57))[0] == "not decided"
    assert judged(members, Score(0.53, 0.496, 0.56), Score(0.8, 0.75, 0.85))[0] == "nothing"


def test_labels_alone_do_not_tell_members_apart() -> None:
    generator = torch.Generator().manual_seed(1)
    members = torch.tensor([0] * 50 + [1] * 10)
    others = torch.tensor([0] * 20 + [1] * 40)
    inside, outside = _paired(members, others, most=100, generator=generator)
    assert torch.equal(members[inside].bincount(), others[outside].bincount())
    assert len(inside) == len(set(inside.tolist())) == len(outside) == 30


def test_candidates_have_the_same_labels_under_a_skewed_partition() -> None:
    found = _Model(scene(scheme="fedavg", partition="dirichlet", alpha=0.1))
    known, member, taken_out = found.candidates
    assert not taken_out
    asked = known["candidates.membership"] == -1
    y = known["candidates.y"]
    told = torch.full((len(y),), -1)
    told[asked] = member
    told[~asked] = known["candidates.membership"][~asked]
    assert torch.equal(y[told == 1].bincount(minlength=10), y[told == 0].bincount(minlength=10))


def test_a_client_attacks_the_newest_model_on_record() -> None:
    found = scene(scheme="fedavg", clients=12, cohort=2, record_clients="0-11", rounds=4, record_rounds="1,4")
    view = next(one for one in all_trials(found) if one.name == "client/received").attempts[0].view
    assert view.broadcasts[-1].round == 4  # type: ignore[union-attr]
    everyone = [client_view(found.run.record, one).broadcasts for one in found.run.record.clients]
    assert min(sent[-1].round for sent in everyone if sent) == 1  # others have only an older one


def test_the_sum_is_attacked_wherever_an_upload_is_covered() -> None:
    covered = {one.name for one in all_trials(scene(scheme="nadp"))}
    assert {"server/sum/closed-form", "server/sum/idlg", "server/sum/labels"} <= covered
    assert not any("/sum/" in one.name for one in all_trials(scene(scheme="lossless")))


@pytest.mark.parametrize(("scheme", "held"), [("mp-cdp", True), ("cdp", True), ("mpdp", True), ("lossless", False)])
def test_noise_is_noticed_wherever_it_is_added(scheme: str, held: bool) -> None:
    assert subject_of(scheme=scheme).job.scheme.noisy is held


def test_what_is_not_tried_is_said() -> None:
    told = {one.adversary: one.reason for one in missing_trials(scene(scheme="paraaegis", cipher="pads"))}
    assert "the server" in told
    assert "the server with some clients" in told
    masked = {one.adversary for one in missing_trials(scene(scheme="veil-dp", cover="masks"))}
    assert "the server with some clients" in masked
    assert {one.adversary for one in missing_trials(scene(scheme="fedavg"))} == {"a client"}


def finding(name: str, verdict: str, **more: object) -> Finding:
    given = {"shown": {"value": "5 dB", "chance": "11 dB", "unprotected": "90 dB"}, **more}
    return Finding(name, "the server", "data", name, "one upload", False, "PSNR", verdict, **given)  # type: ignore[arg-type]


def test_a_sentence_says_what_could_not_be_measured() -> None:
    text = sentences([finding("idlg", "nothing"), finding("closed-form", "not applicable", reason="too many")])
    assert "not measured: closed-form on one upload" in text["the server"]


def test_a_quick_audit_does_not_replace_a_full_one(tmp_path: Path) -> None:
    full = AuditStore(tmp_path, identity={"record": "a", "quick": False}, about={})
    full.keep(finding("idlg", "nothing"))
    with pytest.raises(ConfigError, match="holds a full audit"):
        AuditStore(tmp_path, identity={"record": "a", "quick": True}, about={})
    assert AuditStore(tmp_path, identity={"record": "a", "quick": False}, about={}).findings
    assert Effort(quick=True).quick
