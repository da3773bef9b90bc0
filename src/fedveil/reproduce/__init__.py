"""The papers' tables and figures, run again: what they say, what comes out here, and a verdict."""

from fedveil.reproduce.catalogue import entries, find
from fedveil.reproduce.cells import Cell
from fedveil.reproduce.entry import Entry
from fedveil.reproduce.every import ALL, Outcome, reproduce_all
from fedveil.reproduce.page import page
from fedveil.reproduce.report import Check, Figure, Report
from fedveil.reproduce.running import Tick, reproduce, run_entry
from fedveil.reproduce.stored import Stored, stored_result, stored_results

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
