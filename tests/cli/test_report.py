"""`fedveil report`: where the page goes, and one clear line where there is none."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

import pytest

from fedveil.errors import CheckpointError, MissingExtraError
from shell import fedveil


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    small = ("--clients", 3, "--rounds", 2, "--seed", 1, "-o", "depth=2", "-o", "width=8")
    assert fedveil("run", "--scheme", "fedavg", *small, "--out", folder).code == 0
    return folder


def test_the_page_is_written_beside_the_run_or_where_it_is_asked_for(ran: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="needs the extra report")
    done = fedveil("report", ran)
    assert (done.code, done.error) == (0, "")
    assert f"wrote {ran / 'report.html'}" in done.output
    assert "fedavg on digits" in (ran / "report.html").read_text(encoding="utf-8")
    done = fedveil("report", ran, "--out", tmp_path / "new" / "page.html")
    assert done.code == 0
    assert (tmp_path / "new" / "page.html").read_bytes() == (ran / "report.html").read_bytes()


def test_it_is_opened_where_that_is_asked_for(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly", reason="needs the extra report")
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert fedveil("report", ran, "--out", tmp_path / "page.html", "--open").code == 0
    assert opened == [(tmp_path / "page.html").resolve().as_uri()]


def test_what_is_nothing_to_report_on_is_said(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="needs the extra report")
    done = fedveil("report", tmp_path)
    assert done.code == CheckpointError.exit_code
    assert "nothing to report on" in done.error
    assert "Traceback" not in done.error


def test_a_missing_extra_is_named(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    done = fedveil("report", ran, "--out", tmp_path / "page.html")
    assert done.code == MissingExtraError.exit_code
    assert "pip install 'fedveil[report]'" in done.error
    assert not (tmp_path / "page.html").exists()


def test_help_shows_examples() -> None:
    output = fedveil("report", "--help").output
    assert "Examples" in output
    assert "fedveil report runs/a" in output
