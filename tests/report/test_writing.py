"""What the file holds, and what it does not let in."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
from pathlib import Path

import pytest

from fedveil.audit.findings import TAKEN_OUT
from fedveil.errors import CheckpointError, ConfigError
from report.browser import Browser
from report.material import audit_into

pytest.importorskip("plotly", reason="needs the extra report")

from fedveil.report import write_report

BAD = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>{{7*7}}&amp;'\""


def text_of(page: Path) -> str:
    """The page without scripts and tags."""
    bare = re.sub(r"<(script|style).*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", bare)).replace("\u2060", "").split())


def test_a_comparison_s_page_says_what_was_trained_what_holds_and_what_failed(comparison_page: Path) -> None:
    text = text_of(comparison_page)
    for part in (
        "3 schemes on digits",
        "seeds 1, 2",
        "mpdp, seed 1: no luck",
        "Nothing is proven",
        "Proven",
        "The other clients",
        "The paper’s claim beside what holds",
        "does not protect",
        "fedveil run --scheme nadp --dataset digits --model mlp --clients 3 --rounds 4 --seed 2",
        "Simulation.",
    ):
        assert part in text


def test_the_page_to_show_holds_no_record_of_a_client(audited: Path, tmp_path: Path) -> None:
    """Originals, and what was rebuilt of them, used to be in the page without a word."""
    sheets = [base64.b64encode(one.read_bytes()).decode() for one in (audited / "audit" / "pictures").iterdir()]
    made = write_report([audited], tmp_path / "page.html")
    assert made == tmp_path / "page.html"
    page = made.read_text(encoding="utf-8")
    assert not any(one in page for one in sheets)
    assert '<img src="data:image' not in page
    assert "1 picture with samples of clients" in text_of(made)
    assert "--with-records" in text_of(made)


def test_a_page_with_records_says_so_in_its_name_and_at_its_head(audited: Path, tmp_path: Path) -> None:
    made = write_report([audited], tmp_path / "page.html", with_records=True)
    assert made == tmp_path / "page.with-records.html"
    assert not (tmp_path / "page.html").exists()
    assert "Holds records." in text_of(made)
    assert '<img src="data:image' in made.read_text(encoding="utf-8")
    named = write_report([audited], tmp_path / "my-records.html", with_records=True)
    assert named == tmp_path / "my-records.html"


def test_an_audited_run_s_page_has_findings_and_pictures(audit_page: Path) -> None:
    text = text_of(audit_page)
    assert "The server rebuilds what a client trained on" in text
    assert "as if unprotected" in text
    assert "9.0 % [5–13]" in text
    assert "Without protection Taken out Verdict closed-form 100.0 dB 11.5 dB 100.0 dB 37" in text
    assert f"Taken out: {TAKEN_OUT}." in text
    assert text.count("Without protection Verdict") == 1, "where nothing was taken out, there is no such column"
    assert "An audit shows what these attacks got, not what no attack can get" in text
    assert "Simulation." not in text
    assert 'src="data:image/png;base64,' in audit_page.read_text(encoding="utf-8")


def test_it_is_one_file_that_may_connect_to_nothing_and_runs_only_its_own_scripts(comparison_page: Path) -> None:
    page = comparison_page.read_text(encoding="utf-8")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    policy = html.unescape(policy)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(scripts) == 2
    for one in scripts:
        assert base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() in policy
    assert sum("Plotly.react" in one for one in scripts) >= 1
    assert re.findall(r'<(?:link|script|img|iframe)[^>]*(?:src|href)="(?!data:)[^"]*"', page) == []


def test_the_same_sources_give_the_same_file(compared: Path, comparison_page: Path, tmp_path: Path) -> None:
    again = write_report([compared / "compare.json"], tmp_path / "again.html")
    assert again.read_bytes() == comparison_page.read_bytes()


@pytest.fixture
def hostile(audited: Path, tmp_path: Path) -> Path:
    """A run whose every word is an attack on whoever reads the report."""
    run = tmp_path / "hostile"
    shutil.copytree(audited, run, ignore=shutil.ignore_patterns("audit"))
    audit_into(run / "audit", attack=BAD)
    config = run / "config.toml"
    lines = [line for line in config.read_text().splitlines() if not line.startswith(("scheme", "dataset"))]
    config.write_text("\n".join([f"scheme = {json.dumps(BAD)}", f"dataset = {json.dumps(BAD)}", *lines]))
    ledger = json.loads((run / "ledger.json").read_text())
    ledger["unprotected"].append(BAD)
    ledger["lines"][0] |= {"why": BAD, "assumptions": [BAD], "adversary": BAD}
    (run / "ledger.json").write_text(json.dumps(ledger))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"warning": BAD, "torch": BAD}))
    return run


def test_hostile_words_stay_words(hostile: Path, tmp_path: Path) -> None:
    page = write_report([hostile], tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<script>") == 2
    assert "<img src=x" not in page.replace("\\u003c", "?")
    assert "{{7*7}}" in html.unescape(page)
    data = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, flags=re.DOTALL)
    assert "curve-loss" in json.loads(data[0])


def test_hostile_words_do_nothing_in_a_browser(hostile: Path, tab: Browser, tmp_path: Path) -> None:
    tab.show(write_report([hostile], tmp_path / "page.html", with_records=True))
    assert tab.complaints == []
    assert tab.run("window.hit === undefined")
    assert tab.run("document.querySelector('h1').textContent").startswith("</script><script>")
    assert tab.run("document.images.length") == 1
    assert tab.run("[...document.querySelectorAll('.plot')].every((one) => !one.querySelector('a, img, script'))")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: (run / "summary.json").write_text("{"), "summary.json is damaged"),
        (lambda run: (run / "summary.json").write_text("[]"), "holds no values by name"),
        (lambda run: (run / "ledger.json").write_text("{}"), "not a ledger"),
        (lambda run: (run / "metrics.jsonl").write_text("3\n"), "metrics.jsonl, line 1 is damaged"),
        (lambda run: (run / "config.toml").write_bytes(b"\xff"), "config.toml cannot be read"),
        (lambda run: next((run / "audit" / "pictures").iterdir()).unlink(), "picture of the audit is missing"),
        (lambda run: next((run / "audit" / "pictures").iterdir()).write_text("x"), "not a PNG"),
    ],
    ids=["torn summary", "no summary", "no ledger", "no metrics", "no text", "no picture", "no png"],
)
def test_damaged_folders_are_refused_by_name(audited: Path, tmp_path: Path, change, said: str) -> None:
    shutil.copytree(audited, tmp_path / "run")
    change(tmp_path / "run")
    with pytest.raises(CheckpointError, match=re.escape(said)):
        write_report([tmp_path / "run"], tmp_path / "page.html", with_records=True)
    assert not (tmp_path / "page.html").exists()


def test_a_comparison_that_names_folders_elsewhere_is_refused(tmp_path: Path, audited: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "compare.json").write_text(json.dumps({"runs": [{"folder": str(audited), "ok": True}]}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        write_report([tmp_path / "x"], tmp_path / "page.html")


def test_nothing_to_report_on_and_nowhere_to_write_are_said(tmp_path: Path, audited: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to report on"):
        write_report([tmp_path], tmp_path / "page.html")
    with pytest.raises(ConfigError, match="Name what to report on"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(ConfigError, match="is a folder"):
        write_report([audited], tmp_path)


def test_a_run_that_has_not_ended_is_reported_as_far_as_it_is(audited: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(audited, run, ignore=shutil.ignore_patterns("audit", "summary.json", "ledger.json"))
    text = text_of(write_report([run], tmp_path / "page.html"))
    assert "lossless has not ended: figures are those of its 4 rounds so far" in text
    assert "has no ledger yet" in text


def test_an_audit_alone_has_a_page_without_curves(tmp_path: Path) -> None:
    audit_into(tmp_path / "elsewhere")
    page = write_report([tmp_path / "elsewhere"], tmp_path / "page.html")
    text = text_of(page)
    assert "An audit of lossless on digits" in text
    assert "Curves" not in text
    assert page.stat().st_size < 100_000
