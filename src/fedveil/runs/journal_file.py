"""The file of a privacy journal: a line is a JSON object, and ends with a digest of itself and of all lines before.

So a line that was lost, changed, moved or written by hand is noticed when the file is read, as long as a later line
stands. That is for accidents and naive edits: whoever may write the file can compute all digests anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fedveil.errors import naming
from fedveil.plain import read_raw, read_text

_CHAIN = "chain"
_DIGITS = 32


class JournalFile:
    """A journal that is read once and then grows.

    Journals from before lines had digests are read as they are; the first line that has one covers them all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = ""
        self._chained = False

    def entries(self) -> list[dict[str, Any]]:
        """The journal's lines. Only one may be missing: the last before a power cut, which has torn it.

        Nobody was asked for what it says, and the next attempt begins with a plan. Any other line that cannot be read
        may tell of something spent.

        Raises:
            ValueError: A line is not one that was written, or others were before it.
        """
        self._digest, self._chained = "", False
        if not self.path.exists():
            return []
        self._mend()
        entries: list[dict[str, Any]] = []
        torn = 0
        for number, line in enumerate(read_text(self.path).split("\n"), start=1):
            if not line:
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as reason:
                if torn or (line.endswith("}") and not line.startswith('{"plan"')):
                    raise ValueError(f"line {torn or number} is not one that was written") from reason
                torn = number
                continue
            if torn and "plan" not in entry:
                raise ValueError(f"line {torn} is not one that was written")
            torn = 0
            self._follow(entry, number)
            entries.append(entry)
        return entries

    def write(self, entry: dict[str, Any]) -> None:
        """Add a line, which is on the disk afterwards."""
        body = json.dumps(entry, separators=(",", ":"))
        self._digest, self._chained = _digest_of(self._digest, body), True
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(f'{body[:-1]},"{_CHAIN}":"{self._digest}"}}\n')
            file.flush()
            os.fsync(file.fileno())

    def _follow(self, entry: dict[str, Any], number: int) -> None:
        """Hold a line to those before it."""
        said = entry.pop(_CHAIN, None)
        self._digest = _digest_of(self._digest, json.dumps(entry, separators=(",", ":")))
        if said is None and self._chained:
            raise ValueError(f"line {number} has no digest, unlike those before it: it was written by somebody else")
        if said is not None and said != self._digest:
            raise ValueError(f"line {number} does not follow from those before it: one was changed, moved or lost")
        self._chained = said is not None

    def _mend(self) -> None:
        """End a line that a kill has torn, so that what is written next stands on its own."""
        if (content := read_raw(self.path)) and not content.endswith(b"\n"):
            with naming(self.path), self.path.open("ab") as file:
                file.write(b"\n")


def _digest_of(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}\n{body}".encode()).hexdigest()[:_DIGITS]
