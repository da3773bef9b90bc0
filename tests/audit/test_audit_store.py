"""audit.json: kept as it comes, refused where it is damaged, replaced where it is of something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from audit.small_runs import subject_of
from fedveil.audit.findings import FORMAT, AuditStore, Finding, finding_from, read_audit
from fedveil.audit.running import identity_of
from fedveil.audit.subject import Effort
from fedveil.errors import CheckpointError

FINDING = Finding(
    *("server/dlg", "the server", "data", "dlg", "one upload", False, "PSNR (dB)", "in part"),
    value=17.5,
    chance=11.0,
    unprotected=40.0,
    more={"ssim": 0.4},
    shown={"value": "17.5 dB"},
)


def store(folder: Path, **identity: Any) -> AuditStore:
    return AuditStore(folder, identity={"record": "abc", **identity}, about={"scheme": "nadp"})


def test_what_was_found_comes_back_as_it_was(tmp_path: Path) -> None:
    first = store(tmp_path / "audit")
    assert not first.has("server/dlg")
    first.keep(FINDING)
    first.keep(replace(FINDING, name="server/idlg", verdict="failed"))
    again = store(tmp_path / "audit")
    assert again.findings["server/dlg"] == FINDING
    assert not again.replaced
    assert again.has("server/dlg")
    assert not again.has("server/idlg"), "what failed is tried again"


def test_every_finding_is_on_the_disk_when_it_is_kept_and_is_plain_json(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.keep(FINDING)
    content = json.loads((tmp_path / "audit.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert content["format"] == FORMAT
    assert content["scheme"] == "nadp"
    assert content["findings"][0]["value"] == 17.5
    assert content["adversaries"] == {}
    kept.conclude({"the server": "The server sees traces."})
    assert read_audit(tmp_path / "audit.json")["adversaries"] == {"the server": "The server sees traces."}
    assert [one.name for one in tmp_path.iterdir()] == ["audit.json"]


def test_an_audit_of_another_record_or_effort_is_not_taken_over(tmp_path: Path) -> None:
    store(tmp_path, quick=True).keep(FINDING)
    other = store(tmp_path, quick=False)
    assert other.replaced
    assert other.findings == {}
    assert store(tmp_path, quick=True).findings, "nothing is lost before something new is found"


def test_the_record_and_the_effort_are_what_findings_depend_on() -> None:
    record, other = subject_of(scheme="nadp").record, subject_of(scheme="lossless").record
    ours = identity_of(record, Effort(quick=True))
    assert ours == identity_of(record, Effort(quick=True, device="cuda"))
    assert ours != identity_of(record, Effort())
    assert ours != identity_of(record, Effort(quick=True, seed=1))
    assert ours != identity_of(other, Effort(quick=True))


DAMAGED = {
    "cut short": '{"format": "fedveil-audit-1", "identity": {"rec',
    "no JSON": "verdict: fine",
    "a list": "[]",
    "another format": '{"format": "fedveil-audit-9", "identity": {}, "findings": []}',
    "somebody else's": '{"findings": []}',
    "without findings": '{"format": "fedveil-audit-1", "identity": {"record": "abc"}}',
    "without identity": '{"format": "fedveil-audit-1", "findings": []}',
    "half a finding": '{"format": "fedveil-audit-1", "identity": {"record": "abc"}, "findings": [{"name": "a"}]}',
    "no finding": '{"format": "fedveil-audit-1", "identity": {"record": "abc"}, "findings": ["server/dlg"]}',
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_audit_is_refused_and_left_as_it_is(tmp_path: Path, how: str) -> None:
    (tmp_path / "audit.json").write_text(DAMAGED[how])
    with pytest.raises(CheckpointError, match="Remove"):
        store(tmp_path)
    assert (tmp_path / "audit.json").read_text() == DAMAGED[how]


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot be read"):
        store(tmp_path)


def test_an_unknown_verdict_is_refused() -> None:
    data = {"name": "a", "adversary": "b", "asset": "data", "attack": "dlg", "seen": "", "adaptive": False}
    assert finding_from({**data, "figure": "x", "verdict": "nothing"}).verdict == "nothing"
    with pytest.raises(CheckpointError, match="verdict is 'splendid'"):
        finding_from({**data, "figure": "x", "verdict": "splendid"})
