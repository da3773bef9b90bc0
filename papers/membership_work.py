"""A client infers members from the model of a recorded run: as it was sent, with the head noise taken off, and bare.

Every figure is in percent. The candidates are samples of other clients and as many that nobody trained on; of half of
them the attacker knows which they are, and the other half is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedveil.audit.attempts.membership import LAYERS
from fedveil.audit.isolation import AttackProcess
from fedveil.audit.views import View, to_bytes
from fedveil.errors import AttackError, NotApplicableError, NumericError
from fedveil.runs.evaluate import predict
from fedveil.trials.received import model_trials
from fedveil.trials.references import References
from fedveil.trials.running import TIME_LIMIT
from fedveil.trials.scene import Effort, Scene
from fedveil.trials.subject import Subject, enacted
from fedveil.trials.trial import Score, Trial
from papers.cells import Cell, Figures
from papers.stage import OnRound, Stage

RECEIVED, ADAPTIVE, BARE = "received", "adaptive", "bare"
"""The model as it was sent; with the noise taken off; the server's own model of the same round."""

WAYS = (RECEIVED, ADAPTIVE, BARE)
NETWORK, LIKELIHOOD = "membership-layers", "likelihood"
ROWS = (*LAYERS, LIKELIHOOD)
"""The attack network by the last, second, third, last three layers, and the likelihood ratio."""

ATTACKS = ((NETWORK, tuple(LAYERS)), (LIKELIHOOD, (LIKELIHOOD,)))
_REFERENCES: WeakKeyDictionary[Stage, dict[str, float]] = WeakKeyDictionary()


@dataclass(frozen=True)
class AttackedCell(Cell):
    """A run whose last model is attacked; `shadows` models are trained for at most `epochs` by the likelihood ratio.

    `held_out` cuts the test part, on halves of which shadows learn and candidates are drawn.
    """

    shadows: int = 8
    epochs: int = 40
    quick: bool = False
    held_out: int | None = None

    def identity(self) -> dict[str, object]:
        """What decides the figures: the attack's effort too."""
        cut = {} if self.held_out is None else {"held_out": self.held_out}
        return {**super().identity(), "shadows": self.shadows, "epochs": self.epochs, **cut}


def work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    """Train and record a cell's run, then attack the last model that client 0 was sent."""
    assert isinstance(cell, AttackedCell)
    figures: Figures = {"device": stage.describe(), "torch": torch.__version__}
    with TemporaryDirectory(prefix="fedveil-members-") as folder:
        try:
            subject, reason = _trained(stage, cell, Path(folder), seed=seed, on_round=on_round)
        except NumericError as early:
            return {**figures, "stopped": f"diverged, and there is no model to attack: {early}"}
        if reason:
            figures["stopped"] = reason
        figures |= {"parameters": subject.job.blueprint.size, **fitted(subject)}
        stage.tidy()
        figures |= _attacked(stage, cell, subject, seed=seed)
    return figures


def _trained(stage: Stage, cell: AttackedCell, folder: Path, *, seed: int, on_round: OnRound) -> tuple[Subject, str]:
    """The run with its last round on record; of one that diverges the last round that did not, and why."""
    total = cell.settings["rounds"]
    assert isinstance(total, int)
    past = [0]

    def enact(last: int, place: Path) -> Subject:
        recorded = {"record": True, "record_rounds": str(last), "record_clients": "0"}
        job = stage.job(replace(cell, settings={**cell.settings, **recorded}), seed=seed)
        if cell.held_out is not None and job.test is not None:
            order = torch.randperm(len(job.test), generator=torch.Generator().manual_seed(0))
            job = replace(job, test=job.test.subset(order[: cell.held_out]))
        return enacted(job, place, rounds=last, on_round=watch)

    def watch(done: int) -> None:
        past[0] = done
        on_round(done, total)

    try:
        return enact(total, folder / "record"), ""
    except NumericError:
        if not past[0]:
            raise
    last = past[0]
    return enact(last, folder / "again"), f"diverged after round {last}, whose model is attacked"


def fitted(subject: Subject) -> Figures:
    """Accuracy of the server's model on held-out and on training samples: how overfitted it is."""
    clients = len(subject.job.pool)
    x, y = subject.samples_of(range(clients))
    return {
        "accuracy": _right(subject, subject.test.x, subject.test.y),
        "train accuracy": _right(subject, x, y),
        "samples": len(y),
        "clients": clients,
        "commonest": round(100.0 * float(subject.test.y.bincount().max()) / len(subject.test), 3),
    }


def _right(subject: Subject, x: Tensor, y: Tensor) -> float:
    like = next(subject.model.parameters())
    scores = predict(subject.model, x.to(like.device, like.dtype))
    return round(100.0 * float((scores.argmax(1) == y.to(scores.device)).double().mean()), 3)


def _attacked(stage: Stage, cell: AttackedCell, subject: Subject, *, seed: int) -> Figures:
    effort = Effort(quick=cell.quick, seed=seed, device=stage.device)
    trials = member_trials(Scene(subject, subject, False, effort, judged=False))
    more = {"shadows": cell.shadows, "epochs": cell.epochs}
    figures: Figures = {f"{row} reference": value for row, value in _proofs(stage).items()}
    for attack, rows in ATTACKS:
        with AttackProcess(attack) as process:
            for row in rows:
                for way, view, settings in _ways(trials, attack):
                    told = {**settings, **more, **_named(row)}
                    figures |= _figures(f"{row} {way}", trials[attack, False], process, view, told)
    return figures


def member_trials(scene: Scene) -> dict[tuple[str, bool], Trial]:
    """Trials of an audit that ask for members, by attack and by whether the noise is taken off first."""
    wanted = (one for one in model_trials(scene) if one.attack in (NETWORK, LIKELIHOOD))
    return {(one.attack, one.adaptive): one for one in wanted}


def _ways(trials: Mapping[tuple[str, bool], Trial], attack: str) -> Iterator[tuple[str, View, dict[str, object]]]:
    """What is attacked: without a veil there is one way, for nothing is hidden."""
    plain = trials[attack, False]
    yield RECEIVED, plain.attempts[0].view, dict(plain.settings)
    if (attack, True) in trials:
        veiled = trials[attack, True]
        yield ADAPTIVE, veiled.attempts[0].view, dict(veiled.settings)
        twin = plain.attempts[0].twin
        assert twin is not None
        yield BARE, twin, dict(plain.twin_settings)


def _figures(name: str, trial: Trial, process: AttackProcess, view: View, settings: dict[str, object]) -> Figures:
    """Success with its interval, AUC, and true positives at 1 % false ones; or why there is none."""
    try:
        score = _score(trial, process, view, settings)
    except (AttackError, NotApplicableError) as reason:
        return {f"{name} failed": str(reason)}
    assert score.low is not None
    assert score.high is not None
    found = {
        name: score.value,
        f"{name} low": score.low,
        f"{name} high": score.high,
        f"{name} auc": score.more["auc"],
        f"{name} tpr": score.more["tpr at 1 % fpr"],
    }
    return {"judged": int(score.more["members"]), **{key: round(100.0 * value, 3) for key, value in found.items()}}


def _score(trial: Trial, process: AttackProcess, view: View, settings: dict[str, object]) -> Score:
    found = process.run(to_bytes(view), settings=settings, time_limit=TIME_LIMIT)
    return trial.score([found])


def _proofs(stage: Stage) -> dict[str, float]:
    """How often each attack tells members of its reference run, in percent: an audit's own run, made once."""
    known = _REFERENCES.setdefault(stage, {})
    if not known:
        with TemporaryDirectory(prefix="fedveil-reference-") as folder:
            references = References(Path(folder), Effort())
            for attack, rows in ATTACKS:
                reference = references.of(attack)
                assert reference is not None
                trial = reference.trial
                with AttackProcess(attack) as process:
                    for row in rows:
                        settings = {**trial.settings, **_named(row)}
                        known[row] = round(100.0 * _score(trial, process, trial.attempts[0].view, settings).value, 3)
    return known


def _named(row: str) -> dict[str, object]:
    return {"layer": row} if row in LAYERS else {}
