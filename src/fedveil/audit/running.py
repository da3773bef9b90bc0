"""What an audit does not try on a run, and why: said, so that silence is not taken for safety."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock

from fedveil.audit.client_trials import CLIENT, model_trials
from fedveil.audit.findings import NOT_TRIED, Finding, Found, Settings, Trial, judged, sentences
from fedveil.audit.pictures import sheet_of
from fedveil.audit.references import References
from fedveil.audit.registry import ATTACKS
from fedveil.audit.sandbox import AttackProcess
from fedveil.audit.scene import Effort, Scene, scene_of
from fedveil.audit.server_trials import OUTSIDER, SERVER, upload_trials
from fedveil.audit.store import AuditStore, identity_of
from fedveil.audit.subject import Subject, alike, from_folder
from fedveil.audit.views import View, to_bytes
from fedveil.errors import AttackError, ConfigError, FedVeilError, NotApplicableError, unknown_name
from fedveil.runs.job import device_of

COALITION = "the server with some clients"
_HELD = "the server holds no model, and what it sees is hidden or noised: no attack on that is built; see ledger.json"
_TOLD = (
    "a client that sides with the server tells it the model and, under a cipher, the key: see ledger.json for what is "
    "then open"
)
_SECRET = "which records were in a secret batch is not recorded, so that nothing can be scored; see ledger.json"
_OWN_NOISE = "colluders would take their own noise off the sum, which no record holds; the ledger counts them"
_SUCCESSIVE = (
    "two successive models less a client's own part are the others' sum; where few take part that could say much, "
    "and no attack on it is built"
)


def missing_trials(scene: Scene) -> Iterator[Finding]:
    """Every adversary and asset of which this audit measures nothing, or not all."""
    scheme = scene.run.job.scheme
    if scene.run.held:
        yield _untried("server", SERVER, _HELD)
        yield _untried("coalition", COALITION, _TOLD)
        yield _untried("wire", OUTSIDER, _HELD)
    elif scene.run.config.secret_sampling:
        yield _untried("server", SERVER, _SECRET)
        yield _untried("wire", OUTSIDER, _SECRET)
    elif not scheme.readable and scheme.plan is not None:
        yield _untried("coalition", COALITION, _OWN_NOISE)
    yield _untried("client", CLIENT, _SUCCESSIVE)


def _untried(where: str, adversary: str, reason: str) -> Finding:
    return Finding(f"{where}/not tried", adversary, "data", NOT_TRIED, "–", False, "–", "not applicable", reason)


LISTING: dict[str, tuple[str, str, str]] = {
    "labels": ("server", "an upload", "labels read off the last layer's gradient"),
    "closed-form": ("server, wire", "an upload", "the first linear layer's gradient is the input, up to a factor"),
    "dlg": ("server", "an upload", "gradient matching by L-BFGS, labels too (Zhu et al. 2019)"),
    "idlg": ("server, wire", "an upload, a sum", "the same after reading the labels (Zhao et al. 2020)"),
    "inverting": ("server", "an upload", "cosine distance, total variation, Adam (Geiping et al. 2020)"),
    "generative": ("server", "an upload", "matching within a prior learned from public pictures"),
    "phi": ("server, wire", "Ψ and Φ", "what travels bare beside a noised gradient, read or matched (ours)"),
    "averaging": ("server", "many uploads", "noise averaged away over rounds (ours)"),
    "received": ("client", "the model", "used as it is"),
    "calibration": ("client", "the model", "head noise estimated from few samples and taken off (ours)"),
    "probe": ("client", "the model", "a last layer of one's own on the model's features (ours)"),
    "parameters": ("client", "the model", "numbers known up to scales that leave the function as it is (ours)"),
    "membership": ("client", "the model", "attack network on outputs, half of the members known"),
    "membership-layers": ("client", "the model", "the same on the last three layers"),
    "likelihood": ("client", "the model", "likelihood ratio with shadow models (Carlini et al. 2022)"),
    "class-inversion": ("client", "the model", "pictures of each class within a learned prior (Zhang et al. 2020)"),
}
"""By name: who, on what, how. A client's attacks are also made after the head noise is taken off."""


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
    own: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
    tick: Callable[[Tick], None] = lambda now: None,
) -> Audit:
    """Attack a recorded run with everything that fits, and write RUN/audit/audit.json and pictures.

    An audit that was stopped goes on where it ended, if it is asked for with the same effort. `own` is the
    caller's own code by setting (scheme, model, dataset), where the run had such: what a folder names is not run.
    """
    started = time.perf_counter()
    effort = Effort(quick=quick, seed=seed, device=device)
    subject = from_folder(run, device=device, own=own, say=say)
    facts = subject.record.facts
    about = {"scheme": facts.scheme, "dataset": subject.config.dataset, "model": facts.model}
    folder = Path(run) / "audit" if out is None else Path(out)
    store = AuditStore(folder, identity=identity_of(subject.record, effort), about=about)
    findings = audit(subject, store, attacks=attacks, effort=effort, workers=workers, say=say, tick=tick)
    told = sentences(store.findings.values())  # of all that was ever tried, whatever was asked for now
    store.conclude(told)
    return Audit(facts.scheme, tuple(findings), told, folder, time.perf_counter() - started)
