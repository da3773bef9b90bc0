"""The papers' tables and figures, run again: what they say, what comes out here, and a verdict."""

from papers.cells import Cell
from papers.entries import Entry
from papers.page import page
from papers.report import Check, Figure, Report
from papers.runner import (
    ALL,
    Options,
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

__all__ = [
    "ALL",
    "Cell",
    "Check",
    "Entry",
    "Figure",
    "Options",
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
