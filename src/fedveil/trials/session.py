"""An audit of a run's folder, from start to verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil.trials.running import Tick, audit
from fedveil.trials.scene import Effort
from fedveil.trials.store import AuditStore, identity_of
from fedveil.trials.subject import from_folder
from fedveil.trials.trial import Finding
from fedveil.trials.words import sentences


@dataclass(frozen=True)
class Audit:
    """What an audit found, where it lies, and a sentence on each adversary."""

    scheme: str
    findings: tuple[Finding, ...]
    adversaries: dict[str, str]
    folder: Path
    seconds: float


def audit_run(
    run: str | Path,
    *,
    attacks: Sequence[str] = (),
    quick: bool = False,
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    workers: int | None = None,
    model: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    tick: Callable[[Tick], None] = lambda now: None,
) -> Audit:
    """Attack a recorded run with everything that fits, and write RUN/audit/audit.json and pictures.

    An audit that was stopped goes on where it ended, if it is asked for with the same effort. `model` is the caller's
    own code that builds the model, where the run had such a one: what a folder names is not run.
    """
    started = time.perf_counter()
    effort = Effort(quick=quick, seed=seed, device=device)
    subject = from_folder(run, device=device, model=model, say=say)
    facts = subject.record.facts
    about = {"scheme": facts.scheme, "dataset": subject.config.dataset, "model": facts.model}
    folder = Path(run) / "audit" if out is None else Path(out)
    store = AuditStore(folder, identity=identity_of(subject.record, effort), about=about)
    findings = audit(subject, store, attacks=attacks, effort=effort, workers=workers, say=say, tick=tick)
    told = sentences(store.findings.values())  # of all that was ever tried, whatever was asked for now
    store.conclude(told)
    return Audit(facts.scheme, tuple(findings), told, folder, time.perf_counter() - started)
