"""Tables of membership: a client infers members from the last model it was sent, in three ways.

As it was sent, with the head noise taken off, and from the server's own model of the same round. Figures are in
percent. Candidates are samples of other clients and as many that nobody trained on; of half of them the attacker knows
which they are, and the other half is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedveil.audit.attacks.membership import LAYERS
from fedveil.audit.findings import TOLD_APART, Score, Trial
from fedveil.audit.measures import Members
from fedveil.audit.metrics import CHANCE
from fedveil.audit.subject import Effort, Scene, Subject, enacted
from fedveil.audit.trials import References, model_trials
from fedveil.audit.views import View
from fedveil.errors import AttackError, NotApplicableError, NumericError
from fedveil.runs.evaluation import predict
from papers.attacks import INEFFECTIVE, VerdictRow, level, meaning, score_of, told, tried
from papers.cells import Cell, Figures, Results, difference, figures_of, mean, mean_of, numbers
from papers.entries import Table
from papers.report import POINTS, Check, short, shown, within
from papers.stage import OnRound, Stage

MEMBERS = "members"
"""What claims of members are about; those of accuracy do not stand on an attack that works."""
RECEIVED, ADAPTIVE, BARE = WAYS = ("received", "adaptive", "bare")
NETWORK, LIKELIHOOD = "membership-layers", "likelihood"
NAMES = {
    "last": "last layer",
    "second": "second to last",
    "third": "third to last",
    "three": "last three",
    LIKELIHOOD: "likelihood ratio (ours)",
}
"""The attack network by the last, second, third, last three layers, and the likelihood ratio."""

ATTACKS = ((NETWORK, tuple(LAYERS)), (LIKELIHOOD, (LIKELIHOOD,)))
GUESS = 100.0 * CHANCE
LEAST = 100.0 * TOLD_APART
"""An attack has to tell this many of an unprotected, overfitted model's members before anything follows from it."""

UNTRAINED = "no members to tell, veiled or not"
CHOSEN = (
    "Settings were chosen by how far FedAvg overfits, never by what an attack finds: of the learning rates and target "
    "scales tried on few hundred samples those with the lowest training loss, and many rounds. How well the training "
    "samples are known stands in the table. All schemes have the same settings."
)
READING = (
    f"Success is balanced over members and others (chance: {GUESS:g} %), on candidates whose membership the attacker "
    "does not know; it knows that of as many others. Brackets: 95 % confidence. The attacker's threshold and the epoch "
    "of its network come from what it knows; the paper picks the epoch with the best test accuracy, which flatters. "
    "AUC and true positives at 1 % false ones are in the JSON file.",
    "A blind guess: the interval does not lie above 50 %. An attack counts only if it tells more than "
    f"{LEAST:g} % of FedAvg's members here; otherwise the claim stays open. What it tells on the audit's own reference "
    "run (an overfitted mlp on digits) is in the JSON file.",
    "The veil multiplies hidden activations by positive numbers, and an attacker standardises what it reads: layers "
    "before the last are as good as bare. The last one is hidden by r·1ᵀ, which a least-squares fit on the client's "
    "own samples estimates. An attacker who takes nothing off ignores the defence.",
)
_REFERENCES: WeakKeyDictionary[Stage, dict[str, float]] = WeakKeyDictionary()
Bench = Mapping[str, Any]
"""A data set, its size, and a training that overfits; `shadows` and `epochs` are the likelihood ratio's. `noisy` are
settings that take the place of others under noise, `veiled` those of schemes with a veil."""


def shown_as(bench: Bench) -> str:
    """What a bench is called."""
    return str(bench.get("label", bench["data"]))


def name_of(bench: Bench, cell: str) -> str:
    """A cell's name."""
    return f"{shown_as(bench)}/{cell}"


def attacked_cell(bench: Bench, name: str, scheme: Mapping[str, Any]) -> Cell:
    """A run under attack. `held_out` cuts the test part, on halves of which shadows learn and candidates are drawn."""
    settings = {
        "dataset": bench["data"],
        "clients": bench["clients"],
        "loss": "square",
        **bench["settings"],
        **({} if scheme["scheme"] == "fedavg" else bench.get("veiled", {})),
        **scheme,
    }
    more = {"shadows": bench.get("shadows", 8), "epochs": bench.get("epochs", 40), "held_out": bench.get("held_out")}
    return Cell(name_of(bench, name), settings, bench["samples"], usual=bench.get("usual", True), more=more)


def notes(table: Table, benches: Sequence[Bench]) -> list[str]:
    """What stands below a table, with the sizes of its benches."""
    words = table["words"]
    sizes = "; ".join(
        words["size"].format(data=shown_as(one), samples=one["samples"], clients=one["clients"], **one["settings"])
        for one in benches
    )
    head = [words["sizes"].format(sizes=sizes), *words["before"], CHOSEN]
    return [*head, *words["between"], *READING, *words["after"]]


def work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    """Train and record a cell's run, then attack the last model that client 0 was sent."""
    figures: Figures = {"device": stage.describe(), "torch": torch.__version__}
    with TemporaryDirectory(prefix="fedveil-members-") as folder:
        try:
            subject, reason = _trained(stage, cell, Path(folder), seed=seed, on_round=on_round)
        except NumericError as early:
            return {**figures, "stopped": f"diverged, and there is no model to attack: {early}"}
        if reason:
            figures["stopped"] = reason
        figures |= {"parameters": subject.job.architecture.size, **fitted(subject)}
        stage.tidy()
        return figures | _attacked(stage, cell, subject, seed=seed)


def _trained(stage: Stage, cell: Cell, folder: Path, *, seed: int, on_round: OnRound) -> tuple[Subject, str]:
    """The run with its last round on record; of one that diverges the last round that did not, and why."""
    total, past = cell.settings["rounds"], [0]

    def watch(done: int) -> None:
        past[0] = done
        on_round(done, total)

    def enact(last: int, place: Path) -> Subject:
        recorded = {"record": True, "record_rounds": str(last), "record_clients": "0"}
        job = stage.job(replace(cell, settings={**cell.settings, **recorded}), seed=seed)
        if cell.more.get("held_out") is not None and job.test is not None:
            order = torch.randperm(len(job.test), generator=torch.Generator().manual_seed(0))
            job = replace(job, test=job.test.subset(order[: cell.more["held_out"]]))
        return enacted(job, place, rounds=last, on_round=watch)

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


def _attacked(stage: Stage, cell: Cell, subject: Subject, *, seed: int) -> Figures:
    scene = Scene(subject, subject, False, Effort(quick=stage.quick, seed=seed, device=stage.device), judged=False)
    trials = {(one.attack, one.adaptive): one for one in model_trials(scene) if one.attack in (NETWORK, LIKELIHOOD)}
    effort = {name: cell.more[name] for name in ("shadows", "epochs")}
    figures: Figures = {f"{row} reference": value for row, value in _proofs(stage).items()}
    for attack, rows in ATTACKS:
        plain = trials[attack, False]
        ways = [(row, *one) for row in rows for one in _ways(plain, trials.get((attack, True)))]
        settings = [{**own, **effort, **_layer(row)} for row, _, _, own in ways]
        found = tried(attack, [view for *_, view, _ in ways], settings, every=True, time_limit=Effort().seconds)
        for (row, way, *_), one in zip(ways, found, strict=True):
            name = f"{row} {way}"
            try:
                figures |= {f"{name} failed": one} if isinstance(one, str) else _kept(name, plain.score([one]))
            except (AttackError, NotApplicableError) as reason:  # what it gave back cannot be scored
                figures[f"{name} failed"] = str(reason)
    return figures


def _ways(plain: Trial, veiled: Trial | None) -> Iterator[tuple[str, View, dict[str, Any]]]:
    """What is attacked: without a veil there is one way, for nothing is hidden."""
    first = plain.attempts[0]
    yield RECEIVED, first.view, dict(plain.settings)
    if veiled is not None:
        yield ADAPTIVE, veiled.attempts[0].view, dict(veiled.settings)
        assert first.twin is not None
        yield BARE, first.twin, dict(plain.twin_settings)


def _kept(name: str, score: Score) -> Figures:
    """Success with its interval, AUC, and true positives at 1 % false ones."""
    assert score.low is not None
    assert score.high is not None
    ends = {name: score.value, f"{name} low": score.low, f"{name} high": score.high}
    found = {**ends, f"{name} auc": score.more["auc"], f"{name} tpr": score.more["tpr at 1 % fpr"]}
    return {"judged": int(score.more["members"]), **{key: round(100.0 * value, 3) for key, value in found.items()}}


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
                settings = [{**trial.settings, **_layer(row)} for row in rows]
                found = tried(attack, [trial.attempts[0].view] * len(rows), settings, time_limit=Effort().seconds)
                for row, one in zip(rows, found, strict=False):
                    if not isinstance(one, str):
                        known[row] = round(100.0 * trial.score([one]).value, 3)
    return known


def _layer(row: str) -> dict[str, str]:
    return {"layer": row} if row in LAYERS else {}


def members_told(results: Results, cell: str, row: str, way: str) -> Score | None:
    """How many candidates are told right, in percent, and the interval that holds it with 95 % confidence."""
    return score_of(results, cell, f"{row} {way}")


def written(results: Results, cell: str, row: str, way: str) -> str:
    """A figure, why there is none, or a dash."""
    found = members_told(results, cell, row, way)
    failed = any(f"{row} {way} failed" in figures for figures in figures_of(results, cell))
    return "failed" if found is None and failed else level(found)


def verdict_row(results: Results, cell: str, plain: str, row: str) -> VerdictRow:
    """What is told once the noise is taken off, beside what the same run's true model tells."""
    ours, bare = (members_told(results, cell, row, way) for way in (ADAPTIVE, BARE))
    works = None if bare is None else not _blind(bare) and effective(results, plain, row) is not False
    word = told(meaning(Members(), _share(ours), _share(bare), works=works))
    if ours is not None and bare is not None and nobody_told(results, cell):
        word = UNTRAINED
    gets, unprotected = (written(results, cell, row, way) for way in (ADAPTIVE, BARE))
    return VerdictRow(NAMES[row], True, gets, f"{GUESS:.1f}", unprotected, word)


def _share(found: Score | None) -> Score | None:
    """A figure in percent as a share of one."""
    if found is None or found.low is None or found.high is None:
        return None
    return Score(found.value / 100, found.low / 100, found.high / 100)


def _blind(found: Score) -> bool:
    """Whether it may be a guess: the interval does not lie above 50 %."""
    return found.low is not None and found.low <= GUESS


def effective(results: Results, plain: str, row: str) -> bool | None:
    """Whether an attack tells members of the unprotected run; None where it was not run."""
    unprotected = members_told(results, plain, row, RECEIVED)
    return None if unprotected is None else unprotected.value > LEAST


def nobody_told(results: Results, cell: str) -> bool:
    """Whether no attack tells members even from a run's true model."""
    found = [members_told(results, cell, row, BARE) for row in NAMES]
    return all(one is not None and _blind(one) for one in found)


def told_without_protection(results: Results, plain: str, where: str) -> Check:
    """The papers' first line: an unprotected model gives its members away, by the attack that is shown three layers."""
    found = {row: members_told(results, plain, row, RECEIVED) for row in LAYERS}
    seen = ", ".join(f"{NAMES[row]} {level(one)}" for row, one in found.items() if one is not None)
    claim = f"{where}: on unprotected FedAvg the attack tells more than {LEAST:g} % right"
    return Check(claim, effective(results, plain, "three"), seen, premise=True, topic=MEMBERS)


def close_accuracy(results: Results, cell: str, plain: str, where: str, *, points: float) -> Check:
    """The papers' second line: protection costs next to nothing."""
    ours, theirs = numbers(results, cell), numbers(results, plain)
    found = within(f"{where}: accuracy within {points:g} points of FedAvg", difference(ours, theirs), points)
    both = f"{shown(ours)} and {shown(theirs)}: {found.seen}" if ours and theirs else _stopped(results, cell)
    return replace(found, seen=both)


def guesses(results: Results, cell: str, plain: str, where: str) -> Iterator[Check]:
    """The papers' claim, for both ways and every attack: no better than a guess.

    It stays open where the attack is not effective, or the true model has no members to tell.
    """
    for way, how in ((RECEIVED, "as received"), (ADAPTIVE, "with the noise taken off")):
        for row, name in NAMES.items():
            check = Check(f"{where}, {how}, {name}: a blind guess", None, topic=MEMBERS)
            check = replace(check, adaptive=way == ADAPTIVE or row == LIKELIHOOD)
            ours, bare = members_told(results, cell, row, way), members_told(results, cell, row, BARE)
            if ours is None or bare is None:
                yield replace(check, seen=_stopped(results, cell))
                continue
            seen = f"{level(ours)}; without the veil {level(bare)}"
            if nobody_told(results, cell):
                yield replace(check, seen=f"{seen}: {UNTRAINED}")
            elif _blind(bare) or effective(results, plain, row) is not True:
                yield replace(check, seen=f"{seen}: {INEFFECTIVE}")
            else:
                yield replace(check, held=_blind(ours), seen=seen)


def advantage(results: Results, cell: str, plain: str, where: str) -> Check:
    """The papers' claim of rivals, whose clients have the model: an attack tells more than a guess would.

    Open where the model has learned its training samples no better than others: there are no members to tell.
    """
    claim = f"{where}: members are told better than by a guess (by about 10 points, as printed)"
    found = members_told(results, cell, "three", RECEIVED)
    if found is None or found.low is None or effective(results, plain, "three") is not True:
        return Check(claim, None, level(found), topic=MEMBERS)
    better = found.low > GUESS
    overfit = mean(difference(numbers(results, cell, "train accuracy"), numbers(results, cell)))
    if not better and overfit is not None and overfit < POINTS:
        seen = f"{level(found)}: no members to tell, {overfit:+.1f} points on training samples"
        return Check(claim, None, seen, topic=MEMBERS)
    return Check(claim, better, level(found), topic=MEMBERS)


def _stopped(results: Results, cell: str) -> str:
    """Why a run has no figures."""
    said = [figures["stopped"] for figures in figures_of(results, cell) if "stopped" in figures]
    return str(said[0]) if said else "not run"


def percent(results: Results, cell: str, what: str = "accuracy") -> str:
    """A share of a cell, in percent, or a dash."""
    return short(mean_of(results, cell, what), "{:.1f}")
