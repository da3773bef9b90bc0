"""What happened in a run: one line each in the run folder, and to whoever streams the server's output."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MARK = "FEDVEIL "
"""How a line begins that programs read."""


class Events:
    """Writes events down as they happen, and says aloud what a person would want to know."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def note(self, event: str, text: str, **facts: Any) -> None:
        """One thing that happened, with the facts that programs may want."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **facts, "text": text}, ensure_ascii=False)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        tell("said", text=text)


def tell(event: str, **facts: Any) -> None:
    """A line for whoever streams the output."""
    sys.stdout.write(MARK + json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()
