"""An audit: every attack proves itself on its reference, then is tried on the run, in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from fedveil import framing
from fedveil.audit.attack import Attack, OnProgress, attack_at, silent, with_own
from fedveil.audit.attack import attacks as the_packages
from fedveil.audit.findings import AuditStore, Finding, Found, Settings, Trial, judged, sentences
from fedveil.audit.pictures import sheet_of
from fedveil.audit.record import Record
from fedveil.audit.subject import Effort, Subject, alike, from_folder, scene_of
from fedveil.audit.trials import References, all_trials, missing_trials
from fedveil.audit.views import ServerHistory, View, from_bytes, to_bytes
from fedveil.errors import (
    AttackError,
    ConfigError,
    FedVeilError,
    NotApplicableError,
    ProtocolError,
    spelled,
    unknown_name,
)
from fedveil.processes import ChildDiedError, ChildProcess, channel, python
from fedveil.protocol.codec import as_bytes, from_stored
from fedveil.runs.job import device_of
from fedveil.version import __version__

# --- an attack in a process of its own, which gets serialised views and settings, one after the other, and nothing else
#
# The process starts in an empty folder, with next to no environment, and is told no path but those of code.
# What it is given comes through its pipes alone, in frames (`fedveil.framing`), as progress and results leave it:
#
#     in    VIEW settings (JSON), view; until the input ends
#     out   PROGRESS fraction, any number of times; then RESULT, ERROR or NOT_APPLICABLE with its content
#
# A view is sent only after the result of the one before has left: nothing found on one can be changed by another.
# This keeps an attack honest, whoever wrote it by mistake. It is no prison: a process of the same user can
# open any file whose path it guesses.

TIME_LIMIT = 600.0
_SHARE = struct.Struct("<d")
# What numerical libraries need to find their code and to share a machine's cores.
_PASSED_ON = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
    *("CUBLAS_WORKSPACE_CONFIG", "SYSTEMROOT"),
)


class AttackProcess:
    """One attack, ready to be given views.

        with AttackProcess("idlg") as process:
            found = process.run(to_bytes(view), settings={"quick": True})

    The process starts on entering, or with the first view, and again with the next view where it has died. It takes
    `threads` cores, unless OMP_NUM_THREADS says otherwise.
    """

    def __init__(self, name: str, *, attacks: Mapping[str, Attack] | None = None, threads: int | None = None) -> None:
        known = the_packages() if attacks is None else attacks
        if name not in known:
            raise unknown_name("attack", name, known)
        self.name = name
        self._threads = threads
        self._target = known[name].target
        self._child: _Child | None = None
        self._busy = threading.Lock()

    def __enter__(self) -> Self:
        self._started()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, reason: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        view: bytes,
        *,
        settings: Mapping[str, Any] | None = None,
        on_progress: OnProgress = silent,
        time_limit: float = TIME_LIMIT,
    ) -> dict[str, Tensor]:
        """The attack's result on a serialised view.

        `settings` are plain data. `on_progress` is called with fractions from 0 to 1. An attack that cannot be
        tried on the view raises a NotApplicableError; one that fails, dies or is not done after `time_limit`
        seconds an AttackError that says so. What dies or is late is ended; after the rest, views can follow.
        """
        try:
            told = json.dumps({"attack": self._target, "settings": dict(settings or {})}).encode()
        except (TypeError, ValueError) as reason:
            raise ConfigError(f"The settings of the attack {self.name!r} must be plain data: {reason}.") from reason
        if not self._busy.acquire(blocking=False):
            raise ConfigError(f"The attack {self.name!r} is at work: give it a further view when its result is here.")
        try:
            return self._answer(self._started(), told, view, on_progress, time_limit)
        finally:
            self._busy.release()

    def close(self) -> None:
        """End the process; nothing of it is left."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _started(self) -> _Child:
        if self._child is None:
            self._child = _Child(self.name, self._threads)
        return self._child

    def _answer(
        self, child: _Child, told: bytes, view: bytes, on_progress: OnProgress, time_limit: float
    ) -> dict[str, Tensor]:
        try:
            kind, content = child.conversation(told, view, on_progress, deadline=time.monotonic() + time_limit)
            said = "" if kind is _Frame.RESULT else content.decode(errors="replace")
            result = from_stored(content)[1] if kind is _Frame.RESULT else {}
        except BaseException as reason:
            self.close()  # whatever it would still say belongs to nothing
            if isinstance(reason, TimeoutError):
                raise AttackError(
                    f"The attack {self.name!r} was not done after {time_limit:g} seconds and was stopped: give it more "
                    "time, or less to do."
                ) from None
            if isinstance(reason, ChildDiedError):
                raise AttackError(str(reason)) from reason
            if isinstance(reason, (ProtocolError, IndexError, struct.error)):
                raise AttackError(f"The attack {self.name!r} sent what is no result.") from reason
            raise
        if kind is _Frame.NOT_APPLICABLE:
            raise NotApplicableError(said)
        if kind is not _Frame.RESULT:
            raise AttackError(f"The attack {self.name!r} failed: {said}")
        return result


class _Frame(IntEnum):
    VIEW = 1
    PROGRESS = 2
    RESULT = 3
    ERROR = 4
    NOT_APPLICABLE = 5


class _Child(ChildProcess):
    """The process itself, in an empty folder."""

    def __init__(self, name: str, threads: int | None) -> None:
        fewer = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        passed_on = {variable: os.environ[variable] for variable in _PASSED_ON if variable in os.environ}
        self._empty = tempfile.TemporaryDirectory(prefix="fedveil-attack-")
        try:
            super().__init__(
                python(f"{__name__}:serve"),
                name=f"The attack {name!r}",
                cwd=self._empty.name,
                env={"LC_ALL": "C.UTF-8", **fewer, **passed_on},
            )
        except BaseException:
            self._empty.cleanup()
            raise

    def conversation(
        self, told: bytes, view: bytes, on_progress: OnProgress, *, deadline: float
    ) -> tuple[_Frame, bytes]:
        """The last frame of the answer."""
        self.mark()
        self.send(_Frame.VIEW, told, view, deadline=deadline)
        while True:
            kind, parts = self.receive(_Frame, deadline=deadline)
            if kind is not _Frame.PROGRESS:
                return kind, parts[0]
            on_progress(float(_SHARE.unpack(parts[0])[0]))

    def close(self) -> None:
        """Kill it if it lives, and clear up."""
        self.end()
        self._empty.cleanup()


def serve() -> None:
    """The other side: view after view, run the attack, send progress and result."""
    incoming, outgoing = channel()

    def progress(fraction: float) -> None:
        framing.send(outgoing, _Frame.PROGRESS, _SHARE.pack(_share(fraction)))

    with contextlib.suppress(framing.BrokenOffError):
        while True:
            _, (told, view) = framing.receive(incoming, _Frame)
            framing.send(outgoing, *_tried(json.loads(told), view, progress))


def _share(fraction: float) -> float:
    return min(max(fraction, 0.0), 1.0)


def _tried(told: Mapping[str, Any], view: bytes, progress: OnProgress) -> tuple[_Frame, bytes]:
    """The kind and content of an attack's answer, whatever becomes of it."""
    try:
        result = attack_at(told["attack"])(from_bytes(view), told["settings"], progress)
        return _Frame.RESULT, as_bytes({}, result)
    except NotApplicableError as reason:
        return _Frame.NOT_APPLICABLE, str(reason).encode()
    except FedVeilError as reason:
        return _Frame.ERROR, f"{reason}{_place(reason, told['attack'])}".encode()
    except Exception as reason:
        traceback.print_exc()
        return _Frame.ERROR, f"{type(reason).__name__}: {reason}{_place(reason, told['attack'])}".encode()


def _place(reason: Exception, target: str) -> str:
    """The last line of the attack's own file on the way to an error, for whoever wrote it; elsewhere nothing."""
    file = target.rpartition(":")[0]
    lines = [frame.lineno for frame in traceback.extract_tb(reason.__traceback__) if frame.filename == file]
    return f" ({os.path.basename(file)}, line {lines[-1]})" if lines and file.endswith(".py") else ""


_MOST_WORKERS = 8
_FORESEEN_AFTER = 0.1
"""The part of the time allowed after which an attack that would take twice as long is stopped."""
_UNUSABLE = (FedVeilError, RuntimeError, ValueError, LookupError)
"""What attacks and their results may raise: the audit notes it and goes on."""

Tried = Callable[[View, Settings], Found]


@dataclass(frozen=True)
class Tick:
    """How far an audit is: trials done of all, and how far each attack now running is with its view."""

    done: int
    total: int
    running: dict[str, float]


def audit(
    subject: Subject,
    store: AuditStore,
    *,
    attacks: Sequence[str] = (),
    known: Mapping[str, Attack] | None = None,
    effort: Effort | None = None,
    workers: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    tick: Callable[[Tick], None] = lambda now: None,
) -> list[Finding]:
    """Try `attacks` (all that are `known`, unless some are named) on a run; what `store` holds is not made again."""
    effort = effort or Effort()
    known = with_own() if known is None else known
    for name in attacks:
        if name not in known:
            raise unknown_name("attack", name, known, hint="Your own: --attack path/to/file.py:function.")
    device_of(subject.config.with_changes(device=effort.device))
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be at least 1 (got {workers}).")
    with tempfile.TemporaryDirectory(prefix="fedveil-audit-") as scratch:
        scene = scene_of(subject, effort, Path(scratch), say=say)
        trials = list(all_trials(scene, [attack for name, attack in known.items() if not attacks or name in attacks]))
        if not trials:
            raise ConfigError(f"None of these attacks fits a run of {subject.config.scheme}: {', '.join(attacks)}.")
        if store.replaced:
            say(f"{store.path} holds an audit of another record or effort: it is replaced.")
        waiting = [trial for trial in trials if not store.has(trial.name, code=known[trial.attack].digest)]
        if len(waiting) < len(trials):
            say(f"{len(trials) - len(waiting)} of {len(trials)} trials are in {store.path} already.")
        runner = _Runner(known, References(Path(scratch), effort), store, tick, total=len(trials), waiting=len(waiting))
        runner.run(waiting, workers=workers or min(os.cpu_count() or 1, _MOST_WORKERS))
    untried = [] if attacks else list(missing_trials(scene))
    for finding in untried:
        store.keep(finding)
    return [*(store.findings[trial.name] for trial in trials), *untried]


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
        known: Mapping[str, Attack],
        references: References,
        store: AuditStore,
        tick: Callable[[Tick], None],
        *,
        total: int,
        waiting: int,
    ) -> None:
        self._known = known
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
        # Attacks run side by side in processes of their own. What this process computes around them is done by one
        # thread at a time: a trace patches nn.Module, and a seeded draw resets torch's generator, for all threads.
        self._computing = Lock()

    def run(self, trials: Sequence[Trial], *, workers: int) -> None:
        """Attacks side by side, the trials of one attack after the other."""
        groups: dict[str, list[Trial]] = {}
        for trial in trials:
            groups.setdefault(trial.attack, []).append(trial)
        # The slowest first, so that no long one is left for the end.
        order = sorted(groups, key=lambda name: not self._known[name].slow)
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
        with AttackProcess(name, attacks=self._known, threads=self._threads) as process:
            with self._lock:
                self._processes.append(process)

            def attack(view: View, settings: Settings) -> Found:
                if self._stopped.is_set():
                    raise AttackError(f"The attack {name!r} was stopped.")
                limit, first = self._references.effort.seconds, None

                def watched(part: float) -> None:
                    nonlocal first
                    self._watch(name, part)
                    now = time.monotonic()
                    first = first or (now, part)
                    past, done = now - first[0], part - first[1]
                    if past > _FORESEEN_AFTER * limit and past > 2 * limit * done:
                        raise AttackError(_too_long(view, name, past / max(done, 1e-3), limit))

                return process.run(to_bytes(view), settings=settings, on_progress=watched, time_limit=limit)

            started = time.perf_counter()
            proof = self._proof(name, attack)
            for trial in trials:
                finding = self._tried(trial, attack, proof)
                seconds = time.perf_counter() - started
                with self._lock:
                    if self._stopped.is_set():
                        return
                    self._store.keep(replace(finding, seconds=round(seconds, 2)), code=self._known[name].digest)
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

    def _proof(self, name: str, attack: Tried) -> _Proof:
        with self._computing:
            reference = self._references.of(self._known[name])
        if reference is None:
            return _Proof()
        trial = reference.trial
        try:
            results = [attack(attempt.view, trial.told(attempt)) for attempt in trial.attempts]
            with self._computing:
                score = trial.score(results)
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

    def _tried(self, trial: Trial, attack: Tried, proof: _Proof) -> Finding:
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
            taken_out=trial.taken_out,
        )
        if proof.verdict:
            return replace(finding, verdict=proof.verdict, reason=proof.reason)  # type: ignore[arg-type]
        try:
            results = [attack(attempt.view, trial.told(attempt)) for attempt in trial.attempts]
            bare = self._unprotected(trial, attack, results)
            with self._computing:
                score = trial.score(results)
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
            pictures=sheet_of(trial, results, bare, folder=self._store.pictures),
        )

    def _unprotected(self, trial: Trial, attack: Tried, protected: Sequence[Found]) -> list[Found]:
        """Results on the twins; where nothing was hidden, or nothing hides, they are the same ones."""
        if trial.unprotected is not None:
            return []
        results = []
        for attempt, own in zip(trial.attempts, protected, strict=True):
            if attempt.twin is None or (not attempt.settings and alike(attempt.view, attempt.twin)):
                results.append(own)
            else:
                results.append(attack(attempt.twin, trial.twin_settings))
        return results


def _too_long(view: View, name: str, seconds: float, limit: float) -> str:
    facts = view.rounds[0].facts if isinstance(view, ServerHistory) else view.facts
    shape = "×".join(map(str, facts.input_shape))
    return (
        f"On inputs of {shape} under {facts.model} the attack {name!r} would take about {seconds / 60:.0f} minutes a "
        f"view, and may take {limit / 60:g}: --minutes allows more, {spelled('device', 'cuda')} is faster"
    )


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
    own_attacks: Sequence[str] = (),
    quick: bool = False,
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    workers: int | None = None,
    minutes: float | None = None,
    own: Mapping[str, str] | None = None,
    seen: Sequence[str | Path] = (),
    say: Callable[[str], None] = lambda text: None,
    tick: Callable[[Tick], None] = lambda now: None,
) -> Audit:
    """Attack a recorded run with everything that fits, and write RUN/audit/audit.json and pictures.

    An audit that was stopped goes on where it ended, if it is asked for with the same effort.

    Args:
        run: The folder of a recorded run.
        attacks: Only these, by name.
        own_attacks: Attacks of one's own besides, as FILE.py:function or package.module:function.
        quick: Whether to make do with less effort.
        seed: What attacks draw from.
        device: Where attacks compute.
        out: Another folder for the findings than RUN/audit.
        workers: How many trials run at once (default: one per core, within bounds).
        minutes: What an attack may take on one view (default: 30, 10 if quick); one that would take longer says so.
        own: The caller's own code by setting (scheme, model, dataset), where the run had such: what a folder names
            is not run.
        seen: Records that clients of a run on Flower kept themselves; the run's own is held to them.
        say: Gets remarks, a line each.
        tick: Gets the progress.

    Returns:
        The findings of the attacks asked for, and the sentences that sum up all that was ever tried.

    Raises:
        CheckpointError: The folder holds no recorded run, or its files are damaged.
        ConfigError: An attack is unknown, or the run has no held-out data to compare with.
    """
    started = time.perf_counter()
    known = with_own(own_attacks)
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"minutes must be above 0 (got {minutes}).")
    effort = Effort(quick=quick, seed=seed, device=device, minutes=minutes)
    subject = from_folder(run, device=device, own=own, seen=seen, say=say)
    facts = subject.record.facts
    about = {"scheme": facts.scheme, "dataset": subject.config.dataset, "model": facts.model}
    folder = Path(run) / "audit" if out is None else Path(out)
    store = AuditStore(folder, identity=identity_of(subject.record, effort), about=about)
    findings = audit(subject, store, attacks=attacks, known=known, effort=effort, workers=workers, say=say, tick=tick)
    told = sentences(store.findings.values())  # of all that was ever tried, whatever was asked for now
    store.conclude(told)
    return Audit(facts.scheme, tuple(findings), told, folder, time.perf_counter() - started)


def identity_of(record: Record, effort: Effort) -> dict[str, Any]:
    """What decides the findings: the record and the effort."""
    digest = hashlib.sha256()
    for name in ("index.jsonl", "facts.json"):
        digest.update((record.folder / name).read_bytes())
    return {"record": digest.hexdigest(), "fedveil": __version__, "quick": effort.quick, "seed": effort.seed}
