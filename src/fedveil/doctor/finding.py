"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass

OK, ADVICE, PROBLEM = "ok", "advice", "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: its state, what was found, and what to do where it is not fine."""

    what: str
    state: str
    found: str
    todo: str = ""

    def as_data(self) -> dict[str, str]:
        """As plain data."""
        return {"what": self.what, "state": self.state, "found": self.found, "todo": self.todo}
