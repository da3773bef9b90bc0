"""The papers' tables and figures, run again: what they say, what comes out here, and a verdict."""

from papers.cells import Cell
from papers.entries import Entry
from papers.page import page
from papers.plan import PLAN, Step, refuse_choice, run_plan, still_to_run
from papers.report import Check, Figure, Report
from papers.runner import (
    ALL,
    Options,
    Outcome,
    Stored,
    Tick,
    attempt,
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
    "PLAN",
    "Cell",
    "Check",
    "Entry",
    "Figure",
    "Options",
    "Outcome",
    "Report",
    "Step",
    "Stored",
    "Tick",
    "attempt",
    "entries",
    "find",
    "page",
    "refuse_choice",
    "reproduce",
    "reproduce_all",
    "run_entry",
    "run_plan",
    "still_to_run",
    "stored_result",
    "stored_results",
]
