"""The papers' tables and figures, run again: what they say, what comes out here, and a verdict."""

from papers.cells import Cell, Check, Figure, Report
from papers.page import page
from papers.runner import (
    ALL,
    Outcome,
    Stored,
    Tick,
    entries,
    find,
    reproduce,
    reproduce_all,
    run_entry,
    stored_result,
    stored_results,
)
from papers.stage import Entry

__all__ = [
    "ALL",
    "Cell",
    "Check",
    "Entry",
    "Figure",
    "Outcome",
    "Report",
    "Stored",
    "Tick",
    "entries",
    "find",
    "page",
    "reproduce",
    "reproduce_all",
    "run_entry",
    "stored_result",
    "stored_results",
]
