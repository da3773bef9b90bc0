"""The papers' tables and figures, run again: what they say, what comes out here, and a verdict."""

from papers.catalogue import entries, find
from papers.cells import Cell
from papers.entry import Entry
from papers.every import ALL, Outcome, reproduce_all
from papers.page import page
from papers.report import Check, Figure, Report
from papers.running import Tick, reproduce, run_entry
from papers.stored import Stored, stored_result, stored_results

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
