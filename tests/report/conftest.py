"""Real runs, small ones; an audit in its real format; the pages made of them; a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil.config import RunConfig
from fedveil.runs import session
from report.browser import Browser, browser, chromium
from report.material import SCHEMES, SEEDS, audit_into, small


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three schemes under two seeds, of which one more failed."""
    place = tmp_path_factory.mktemp("report") / "compared"
    runs = []
    for scheme in SCHEMES:
        for seed in SEEDS:
            folder = f"{scheme}/seed-{seed}"
            summary = session.run(small(scheme=scheme, seed=seed), place / folder, quiet=True)
            runs.append(
                {"scheme": scheme, "seed": seed, "folder": folder, "summary": summary, "ok": True, "reason": None}
            )
    lost = {"scheme": "mpdp", "seed": 1, "folder": "mpdp/seed-1", "summary": None, "ok": False, "reason": "no luck"}
    (place / "compare.json").write_text(json.dumps({"runs": [*runs, lost], "common": {}, "schemes": {}}))
    return place


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a seed, and what an audit of it found."""
    run = tmp_path_factory.mktemp("report") / "audited"
    session.run(RunConfig(**{**vars(small(scheme="lossless")), "seed": None}), run, quiet=True)
    audit_into(run / "audit")
    return run


@pytest.fixture(scope="session")
def comparison_page(compared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The comparison's page."""
    pytest.importorskip("plotly", reason="needs the extra report")
    from fedveil.report import write_report

    return write_report([compared], tmp_path_factory.mktemp("page") / "comparison.html")


@pytest.fixture(scope="session")
def audit_page(audited: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The audited run's page."""
    pytest.importorskip("plotly", reason="needs the extra report")
    from fedveil.report import write_report

    return write_report([audited], tmp_path_factory.mktemp("page") / "audited.html", with_records=True)


@pytest.fixture(scope="session")
def tab() -> Iterator[Browser]:
    """A page of a real browser."""
    program = chromium()
    if program is None:
        pytest.skip("no Chromium: set FEDVEIL_CHROMIUM or put chromium on the path")
    with browser(program) as made:
        yield made
