"""From sources to one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fedveil.errors import ConfigError, missing_extra
from fedveil.report.sources import gather
from fedveil.report.view import View, view_of
from fedveil.runs.folder import write_atomically
from fedveil.version import __version__


def write_report(sources: Sequence[Path], out: Path, *, with_records: bool = False) -> Path:
    """Write a report on run folders, comparisons and audits to `out`; returns it.

    The file holds everything it shows, opens from disk, and its own policy forbids browsers any connection.
    Pictures of clients' samples, and of what attacks rebuilt of them, are left out; `with_records` puts them in, and
    then the file's name says so: report.html becomes report.with-records.html.
    """
    plotly = _plotly()
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: give the report's file, like {out / 'report.html'}.")
    view = view_of(gather([Path(one) for one in sources]), with_records=with_records)
    page = rendered(view, plotly=plotly)
    if view.holds_records and "records" not in out.name:
        out = out.with_name(f"{out.stem}.with-records{out.suffix}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    return out


def rendered(view: View, *, plotly: str) -> str:
    """The page; whatever came from files is escaped, and only our own scripts may run."""
    ours = _asset("report.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    figures = {one.name: one.drawing for one in (*view.curves, *view.trade_offs)}
    scripts = [plotly, ours] if figures else [ours]
    return environment.from_string(_asset("report.html")).render(
        view=view,
        figures=figures,
        style=Markup(_asset("report.css")),
        scripts=[Markup(one) for one in scripts],
        hashes=[_hash(one) for one in scripts],
        version=__version__,
    )


def _plotly() -> str:
    """plotly's script, as a text whose hash a browser gets too."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise missing_extra("plotly", "report", "Writing a report") from None
    return str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")


def _asset(name: str) -> str:
    return (files("fedveil.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
