"""The papers' tables and figures, run again: what they say, what comes out here, and a verdict."""

from fedveil.reproduce.catalogue import entries, find
from fedveil.reproduce.cells import Cell
from fedveil.reproduce.entry import Entry
from fedveil.reproduce.report import Check, Report
from fedveil.reproduce.running import Tick, reproduce, run_entry

__all__ = ["Cell", "Check", "Entry", "Report", "Tick", "entries", "find", "reproduce", "run_entry"]
