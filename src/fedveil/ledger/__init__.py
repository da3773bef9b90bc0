"""What is proven: declared releases, from which a run's ledger is computed."""

from fedveil.ledger.releases import Release, check_declared

__all__ = ["Release", "check_declared"]
