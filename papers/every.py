"""Every entry, one after the other: one that fails is noted and does not keep the others from running."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedveil.errors import FedVeilError
from fedveil.runs.files import write_atomically
from papers.catalogue import entries
from papers.entry import Entry
from papers.report import Report
from papers.running import DEFAULT_OUT, Tick, reproduce

ALL = "all"
"""The name that stands for every entry."""


@dataclass(frozen=True)
class Outcome:
    """How an entry ended: with a report, or with the reason why there is none."""

    entry: Entry
    report: Report | None
    seconds: float
    failed: str = ""

    @property
    def word(self) -> str:
        """The verdict's word, or that it could not be run."""
        return "could not be run" if self.report is None else self.report.word

    def as_data(self) -> dict[str, object]:
        """As plain data."""
        about = {"name": self.entry.name, "paper": self.entry.paper, "seconds": round(self.seconds, 1)}
        return {**about, "failed": self.failed, "report": None if self.report is None else self.report.as_data()}


def reproduce_all(
    *,
    out: str | Path = DEFAULT_OUT,
    device: str = "cpu",
    data: str | Path | None = None,
    quick: bool = False,
    full: bool = False,
    seeds: int = 1,
    say: Callable[[str], None] = lambda text: None,
    tick: Callable[[Tick], None] = lambda tick: None,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run every entry; one without a quick form runs whole. Writes OUT/all.json (all-quick.json) as it goes on.

    Cells that `out` holds are not run again, so that the same call goes on where another was stopped.
    """
    outcomes: list[Outcome] = []
    for place, entry in enumerate(entries(), start=1):
        say(f"{place} of {len(entries())}: {entry.name} ({entry.paper}, {entry.what})")
        started = time.perf_counter()
        report, failed = None, ""
        try:
            report = reproduce(
                entry.name,
                out=out,
                device=device,
                data=data,
                quick=quick and entry.has_quick,
                full=full,
                seeds=seeds,
                say=say,
                tick=tick,
            )
        except FedVeilError as reason:
            failed = str(reason)
        except Exception as reason:  # a defect in one entry must not cost the others
            failed = f"{type(reason).__name__}: {reason}"
        outcomes.append(Outcome(entry, report, time.perf_counter() - started, failed))
        _write(Path(out) / f"{ALL}{'-quick' if quick else ''}.json", outcomes)
        done(outcomes[-1])
    return outcomes


def _write(path: Path, outcomes: list[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([one.as_data() for one in outcomes], indent=1, ensure_ascii=False)
    write_atomically(path, text + "\n")
