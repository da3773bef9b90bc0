"""Running an audit: attack by attack in processes of their own, each first on its reference, every finding kept."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock

from fedveil.audit.isolation import AttackProcess
from fedveil.audit.registry import ATTACKS
from fedveil.audit.views import View, to_bytes
from fedveil.errors import AttackError, ConfigError, FedVeilError, NotApplicableError, unknown_name
from fedveil.runs.job import device_of
from fedveil.trials.missing import missing_trials
from fedveil.trials.pictures import sheet_of
from fedveil.trials.received import model_trials
from fedveil.trials.references import References
from fedveil.trials.scene import Effort, Scene, scene_of
from fedveil.trials.store import AuditStore
from fedveil.trials.subject import Subject
from fedveil.trials.trial import Finding, Found, Settings, Trial, judged
from fedveil.trials.twins import alike
from fedveil.trials.uploads import upload_trials

TIME_LIMIT = 1800.0
_NOT_ATTACKS = ("surroundings",)
_SLOWEST = ("likelihood", "generative", "dlg", "inverting", "idlg", "class-inversion", "membership-layers")
_MOST_WORKERS = 8
_UNUSABLE = (FedVeilError, RuntimeError, ValueError, LookupError)
"""What attacks and their results may raise: the audit notes it and goes on."""

Attack = Callable[[View, Settings], Found]


@dataclass(frozen=True)
class Tick:
    """How far an audit is: trials done of all, and how far each attack now running is with its view."""

    done: int
    total: int
    running: dict[str, float]


def attack_names() -> tuple[str, ...]:
    """Every attack that can be asked for."""
    return tuple(one for one in ATTACKS if one not in _NOT_ATTACKS)


def all_trials(scene: Scene, attacks: Sequence[str] = ()) -> Iterator[Trial]:
    """Every trial of `attacks` (all, unless some are named) that fits a run."""
    for one in (*upload_trials(scene), *model_trials(scene, attacks)):
        if not attacks or one.attack in attacks:
            yield one


def audit(
    subject: Subject,
    store: AuditStore,
    *,
    attacks: Sequence[str] = (),
    effort: Effort | None = None,
    workers: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    tick: Callable[[Tick], None] = lambda now: None,
) -> list[Finding]:
    """Try `attacks` (all, unless some are named) on a run; findings that `store` holds are not made again."""
    effort = effort or Effort()
    for one in attacks:
        if one not in attack_names():
            raise unknown_name("attack", one, attack_names())
    device_of(subject.config.with_changes(device=effort.device))
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be at least 1 (got {workers}).")
    with tempfile.TemporaryDirectory(prefix="fedveil-audit-") as scratch:
        scene = scene_of(subject, effort, Path(scratch), say=say)
        trials = list(all_trials(scene, attacks))
        if not trials:
            raise ConfigError(f"None of these attacks fits a run of {subject.config.scheme}: {', '.join(attacks)}.")
        if store.replaced:
            say(f"{store.path} holds an audit of another record or effort: it is replaced.")
        waiting = [one for one in trials if not store.has(one.name)]
        if len(waiting) < len(trials):
            say(f"{len(trials) - len(waiting)} of {len(trials)} trials are in {store.path} already.")
        runner = _Runner(References(Path(scratch), effort), store, tick, total=len(trials), waiting=len(waiting))
        runner.run(waiting, workers=workers or min(os.cpu_count() or 1, _MOST_WORKERS))
    untried = [] if attacks else list(missing_trials(scene))
    for finding in untried:
        store.keep(finding)
    return [*(store.findings[one.name] for one in trials), *untried]


@dataclass(frozen=True)
class _Proof:
    """How an attack did on its reference; `verdict` is set where that ends the matter."""

    value: float | None = None
    threshold: float | None = None
    verdict: str = ""
    reason: str = ""


class _Runner:
    def __init__(
        self,
        references: References,
        store: AuditStore,
        tick: Callable[[Tick], None],
        *,
        total: int,
        waiting: int,
    ) -> None:
        self._references = references
        self._store = store
        self._tick = tick
        self._total = total
        self._done = total - waiting
        self._running: dict[str, float] = {}
        self._threads = 1
        self._processes: list[AttackProcess] = []
        self._stopped = Event()
        self._lock = Lock()

    def run(self, trials: Sequence[Trial], *, workers: int) -> None:
        """Attacks side by side, the trials of one attack after the other."""
        groups: dict[str, list[Trial]] = {}
        for one in trials:
            groups.setdefault(one.attack, []).append(one)
        # The slowest first, so that no long one is left for the end.
        order = sorted(groups, key=lambda name: _SLOWEST.index(name) if name in _SLOWEST else len(_SLOWEST))
        # Processes that each take all cores stand in one another's way.
        self._threads = max(1, (os.cpu_count() or 1) // workers)
        with ThreadPoolExecutor(max_workers=workers) as pool:
            waiting = [pool.submit(self._group, name, groups[name]) for name in order]
            try:
                for done in as_completed(waiting):
                    done.result()
            except BaseException:
                for started in waiting:
                    started.cancel()
                self._stop()
                raise

    def _stop(self) -> None:
        """End every attack under way: Ctrl-C means now, and one may take half an hour."""
        self._stopped.set()
        with self._lock:
            for process in self._processes:
                process.close()

    def _group(self, name: str, trials: Sequence[Trial]) -> None:
        with AttackProcess(name, threads=self._threads) as process:
            with self._lock:
                self._processes.append(process)

            def attack(view: View, settings: Settings) -> Found:
                if self._stopped.is_set():
                    raise AttackError(f"The attack {name!r} was stopped.")
                watched = lambda part: self._watch(name, part)  # noqa: E731
                return process.run(to_bytes(view), settings=settings, on_progress=watched, time_limit=TIME_LIMIT)

            started = time.perf_counter()
            proof = self._proof(name, attack)
            for trial in trials:
                finding = self._tried(trial, attack, proof)
                seconds = time.perf_counter() - started
                with self._lock:
                    if self._stopped.is_set():
                        return
                    self._store.keep(replace(finding, seconds=round(seconds, 2)))
                    self._done += 1
                started = time.perf_counter()
                self._watch(name, 0.0)
        self._watch(name, None)

    def _watch(self, name: str, part: float | None) -> None:
        with self._lock:
            if part is None:
                self._running.pop(name, None)
            else:
                self._running[name] = part
            self._tick(Tick(self._done, self._total, dict(self._running)))

    def _proof(self, name: str, attack: Attack) -> _Proof:
        reference = self._references.of(name)
        if reference is None:
            return _Proof()
        trial = reference.trial
        try:
            score = trial.score([attack(one.view, trial.told(one)) for one in trial.attempts])
        except _UNUSABLE as reason:
            return _Proof(verdict="failed", reason=f"on its reference ({reference.what}): {reason}")
        if score.value > reference.threshold:
            return _Proof(score.value, reference.threshold)
        text = trial.measure.text
        return _Proof(
            score.value,
            reference.threshold,
            "not effective",
            f"on its own reference ({reference.what}) it gets {text(score.value)}, and {text(reference.threshold)} is "
            "asked for",
        )

    def _tried(self, trial: Trial, attack: Attack, proof: _Proof) -> Finding:
        finding = Finding(
            trial.name,
            trial.adversary,
            trial.asset,
            trial.attack,
            trial.seen,
            trial.adaptive,
            trial.measure.name,
            "failed",
            chance=trial.measure.chance,
            reference=proof.value,
            threshold=proof.threshold,
            attempts=len(trial.attempts),
        )
        if proof.verdict:
            return replace(finding, verdict=proof.verdict, reason=proof.reason)  # type: ignore[arg-type]
        try:
            found = [attack(one.view, trial.told(one)) for one in trial.attempts]
            bare = self._unprotected(trial, attack, found)
            score = trial.score(found)
            twin = trial.unprotected or trial.twin_score(bare)
        except NotApplicableError as reason:
            return replace(finding, verdict="not applicable", reason=str(reason))
        except AttackError as reason:
            return replace(finding, verdict="failed", reason=str(reason))
        except _UNUSABLE as reason:
            return replace(finding, verdict="failed", reason=f"its result cannot be judged: {reason}")
        verdict, reason_why = judged(trial.measure, score, twin)
        text = trial.measure.text
        return replace(
            finding,
            verdict=verdict,
            reason=reason_why,
            value=score.value,
            low=score.low,
            high=score.high,
            unprotected=twin.value,
            more=score.more,
            more_unprotected=twin.more,
            shown={
                "value": text(score.value),
                "chance": text(score.blind(trial.measure)),
                "unprotected": text(twin.value),
            },
            chance=score.blind(trial.measure),
            pictures=sheet_of(trial, found, bare, folder=self._store.pictures),
        )

    def _unprotected(self, trial: Trial, attack: Attack, found: Sequence[Found]) -> list[Found]:
        """Results on the twins; where nothing was hidden, or nothing hides, they are the same ones."""
        if trial.unprotected is not None:
            return []
        results = []
        for one, own in zip(trial.attempts, found, strict=True):
            if one.twin is None or (not one.settings and alike(one.view, one.twin)):
                results.append(own)
            else:
                results.append(attack(one.twin, trial.twin_settings))
        return results
