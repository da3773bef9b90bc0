"""One HTML file about runs, comparisons and audits: curves, trade-offs, the ledger, findings, how to get them again."""

from fedveil.report.view import write_report

__all__ = ["write_report"]
