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
        self._said: list[str | None] = []

    def entries(self) -> list[dict[str, Any]]:
        """The journal's lines. Only what a kill has torn may be missing: the last line of an attempt.

        Nobody was asked for what it says, and the next attempt begins with a plan, which may be torn as well. Any
        other line that cannot be read may tell of something spent.

        Raises:
            ValueError: A line is not one that was written, or others were before it.
        """
        self._digest, self._said = "", []
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
                if not (_half_a_plan(line) if torn else _half_a_line(line)):
                    raise ValueError(f"line {torn or number} is not one that was written") from reason
                torn = torn or number
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
        self._digest = _digest_of(self._digest, body)
        self._said.append(self._digest)
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(f'{body[:-1]},"{_CHAIN}":"{self._digest}"}}\n')
            file.flush()
            os.fsync(file.fileno())

    @property
    def mark(self) -> tuple[int, str]:
        """How many lines there are and the last one's digest, to hold the file to later on."""
        return len(self._said), self._digest

    def has(self, mark: object) -> bool:
        """Whether the journal still has the lines of a mark, digests included; `mark` is as it was read."""
        match mark:
            case [int(count), str(digest)] if 0 < count <= len(self._said):
                return self._said[count - 1] == digest
        return False

    def _follow(self, entry: dict[str, Any], number: int) -> None:
        """Hold a line to those before it."""
        said = entry.pop(_CHAIN, None)
        self._digest = _digest_of(self._digest, json.dumps(entry, separators=(",", ":")))
        if said is None and self._said and self._said[-1] is not None:
            raise ValueError(f"line {number} has no digest, unlike those before it: it was written by somebody else")
        if said is not None and said != self._digest:
            raise ValueError(f"line {number} does not follow from those before it: one was changed, moved or lost")
        self._said.append(said)

    def _mend(self) -> None:
        """End a line that a kill has torn, so that what is written next stands on its own."""
        if (content := read_raw(self.path)) and not content.endswith(b"\n"):
            with naming(self.path), self.path.open("ab") as file:
                file.write(b"\n")


def _half_a_line(line: str) -> bool:
    """Whether a kill may have left this. Half a line ends like a whole one only where it has objects inside."""
    return not line.endswith("}") or line.startswith(('{"plan"', '{"joined"'))


def _half_a_plan(line: str) -> bool:
    """Whether a kill may have left this of the line that begins an attempt; a power cut leaves zeros."""
    begun, head = line.rstrip("\0"), '{"plan":'
    return begun.startswith(head) or head.startswith(begun)


def _digest_of(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}\n{body}".encode()).hexdigest()[:_DIGITS]
