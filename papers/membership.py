"""A client infers members from the model of a recorded run: as it was sent, with the head noise taken off, and bare.

Every figure is in percent. The candidates are samples of other clients and as many that nobody trained on; of half of
them the attacker knows which they are, and the other half is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedveil.audit.attacks.membership import LAYERS
from fedveil.audit.findings import TOLD_APART, Score, Trial, judged
from fedveil.audit.measures import Members
from fedveil.audit.metrics import CHANCE
from fedveil.audit.running import TIME_LIMIT
from fedveil.audit.sandbox import AttackProcess
from fedveil.audit.subject import Effort, Scene, Subject, enacted
from fedveil.audit.trials import References, model_trials
from fedveil.audit.views import View, to_bytes
from fedveil.errors import AttackError, NotApplicableError, NumericError
from fedveil.runs.evaluation import predict
from papers.cells import EMPTY, Cell, Check, Figures, Report, Results, mean, numbers, paper
from papers.stage import Entry, OnRound, Stage

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


GUESS = 100.0 * CHANCE
LEAST = 100.0 * TOLD_APART
"""An attack has to tell this many of an unprotected, overfitted model's members before anything follows from it."""

NAMES = {
    "last": "last layer",
    "second": "second to last",
    "third": "third to last",
    "three": "last three",
    LIKELIHOOD: "likelihood ratio (ours)",
}
OF_PAPER = tuple(row for row in NAMES if row != LIKELIHOOD)
INEFFECTIVE = "attack not effective here"
UNTRAINED = "no members to tell, veiled or not"


@dataclass(frozen=True)
class Told:
    """How many candidates are told right, in percent, and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f}, {self.high:.1f}]"

    @property
    def blind(self) -> bool:
        """Whether it may be a guess: the interval does not lie above 50 %."""
        return self.low <= GUESS


def told(results: Results, cell: str, row: str, way: str) -> Told | None:
    """A cell's figure. Over seeds value and ends are averaged, which keeps at least the confidence of one."""
    ends = [mean(numbers(results, cell, f"{row} {way}{end}")) for end in ("", " low", " high")]
    value, low, high = ends
    return None if value is None or low is None or high is None else Told(value, low, high)


def written(results: Results, cell: str, row: str, way: str) -> str:
    """A figure, why there is none, or a dash."""
    found = told(results, cell, row, way)
    failed = any(f"{row} {way} failed" in figures for figures in results.get(cell, {}).values())
    return "failed" if found is None and failed else EMPTY if found is None else str(found)


def effective(results: Results, plain: str, row: str) -> bool | None:
    """Whether an attack tells members of the unprotected run; None where it was not run."""
    unprotected = told(results, plain, row, RECEIVED)
    return None if unprotected is None else unprotected.value > LEAST


def meaning(results: Results, cell: str, plain: str, row: str) -> str:
    """What is told once the noise is taken off, beside what the same run's true model tells, in a word."""
    ours, bare = told(results, cell, row, ADAPTIVE), told(results, cell, row, BARE)
    if ours is None or bare is None:
        return EMPTY
    if nobody_told(results, cell):
        return UNTRAINED
    if bare.blind or effective(results, plain, row) is False:
        return INEFFECTIVE
    return judged(Members(), _share(ours), _share(bare))[0]


def nobody_told(results: Results, cell: str) -> bool:
    """Whether no attack tells members even from a run's true model."""
    found = [told(results, cell, row, BARE) for row in NAMES]
    return all(one is not None and one.blind for one in found)


def _share(found: Told) -> Score:
    return Score(found.value / 100, found.low / 100, found.high / 100)


def told_without_protection(results: Results, plain: str, where: str) -> Check:
    """The papers' first line: an unprotected model gives its members away."""
    found = {row: told(results, plain, row, RECEIVED) for row in OF_PAPER}
    seen = ", ".join(f"{NAMES[row]} {one}" for row, one in found.items() if one is not None)
    there = [one for one in found.values() if one is not None]
    held = all(one.value > LEAST for one in there) if len(there) == len(found) else None
    claim = f"{where}: without protection more than {LEAST:g} % are told by every layer"
    return Check(claim, held, seen, premise=True)


def close_accuracy(results: Results, cell: str, plain: str, where: str, *, points: float) -> Check:
    """The papers' second line: protection costs next to nothing."""
    ours, theirs = mean(numbers(results, cell)), mean(numbers(results, plain))
    claim = f"{where}: accuracy within {points:g} points of FedAvg"
    if ours is None or theirs is None:
        return Check(claim, None, stopped(results, cell))
    return Check(claim, abs(ours - theirs) <= points, f"{ours:.1f} and {theirs:.1f}")


def no_better_than_a_guess(results: Results, cell: str, plain: str, where: str, row: str, way: str) -> Check:
    """The papers' claim. It stays open where the attack is not effective, or the true model has no members to tell."""
    how = "as received" if way == RECEIVED else "with the noise taken off"
    claim = f"{where}, {how}, {NAMES[row]}: a blind guess"
    ours, bare = told(results, cell, row, way), told(results, cell, row, BARE)
    if ours is None or bare is None:
        return Check(claim, None, stopped(results, cell))
    seen = f"{ours}; without the veil {bare}"
    if nobody_told(results, cell):
        return Check(claim, None, f"{seen}: {UNTRAINED}")
    if bare.blind or effective(results, plain, row) is not True:
        return Check(claim, None, f"{seen}: {INEFFECTIVE}")
    return Check(claim, ours.blind, seen)


def stopped(results: Results, cell: str) -> str:
    """Why a run has no figures."""
    said = [figures["stopped"] for figures in results.get(cell, {}).values() if "stopped" in figures]
    return str(said[0]) if said else "not run"


def percent(results: Results, cell: str, what: str = "accuracy") -> str:
    """A share of a cell, in percent, or a dash."""
    return _text(mean(numbers(results, cell, what)), lambda value: f"{value:.1f}")


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return EMPTY if value is None else form(value)


EPSILON = 3.0
QUIET = 10_000.0
"""An ε of a round so large that next to no noise is left: what the veil does by itself."""

DELTA = 1e-5
_POINTS = 2.0

LOSSLESS_TABLE3: dict[str, dict[str, tuple[float, float]]] = {
    "ham10000": {
        "accuracy": (72.79, 72.83),
        "last": (70.21, 50.24),
        "second": (68.50, 49.96),
        "third": (66.45, 49.87),
        "three": (72.33, 50.02),
    },
    "cifar10": {
        "accuracy": (93.18, 93.20),
        "last": (77.31, 50.24),
        "second": (75.17, 50.13),
        "third": (76.48, 49.83),
        "three": (77.56, 49.93),
    },
}
"""Table III by data and row: FedAvg and the paper's method, in percent (LDC is HAM10000)."""

MPDP_TABLE4: dict[str, dict[str, tuple[float, float]]] = {
    "cifar10": {
        "FedAvg": (84.60, 72.01),
        "PILE": (83.74, 50.44),
        "TP-SMC": (65.66, 58.19),
        "HybridAlpha": (67.13, 59.49),
        "MP-DP": (83.15, 50.30),
    },
}
"""Table 4 by data and method: accuracy and success of the attack, in percent."""


@dataclass(frozen=True)
class Bench:
    """A data set, its size, and a training that overfits; `shadows` and `epochs` are the likelihood ratio's.

    `noisy` are settings that take the place of others under noise of ε = 3, which needs smaller steps, `veiled` those
    of schemes with a veil.
    """

    data: str
    clients: int
    samples: int
    settings: Mapping[str, object] = field(default_factory=dict)
    noisy: Mapping[str, object] = field(default_factory=dict)
    veiled: Mapping[str, object] = field(default_factory=dict)
    shadows: int = 8
    epochs: int = 40
    held_out: int | None = None
    label: str = ""
    usual: bool = True

    def cell(self, name: str, scheme: Mapping[str, object], *, quick: bool) -> AttackedCell:
        """One run under attack."""
        veiled = {} if scheme["scheme"] == "fedavg" else self.veiled
        settings = {
            "dataset": self.data,
            "clients": self.clients,
            "loss": "square",
            **self.settings,
            **veiled,
            **scheme,
        }
        return AttackedCell(
            self.name(name),
            settings,
            self.samples,
            usual=self.usual,
            shadows=self.shadows,
            epochs=self.epochs,
            quick=quick,
            held_out=self.held_out,
        )

    def name(self, scheme: str) -> str:
        """A cell's name."""
        return f"{self.shown}/{scheme}"

    @property
    def shown(self) -> str:
        """What the bench is called."""
        return self.label or self.data


_RESNET: dict[str, object] = {
    "model": "resnet20",
    "batch_size": 128,
    "target_scale": 3.0,
    "lr": 0.01,
    "momentum": 0.9,
    "lr_schedule": "cosine",
    "rounds": 1500,
}
_FEW: dict[str, object] = {**_RESNET, "batch_size": 50, "rounds": 90}
"""For two CPU cores."""

_ONE_GAMMA: dict[str, object] = {"head_groups": 1}
"""On ResNet-20 one secret γ: three gradients a step instead of twelve."""

_MLP: dict[str, object] = {"model": "mlp", "lr": 0.05, "momentum": 0.9, "rounds": 300}

LOSSLESS = (
    Bench("cifar10", 2, 300, _FEW, veiled=_ONE_GAMMA, shadows=4, epochs=30, held_out=1000),
    Bench("cifar10", 2, 2000, _RESNET, veiled=_ONE_GAMMA, label="cifar10-2000", usual=False),
    Bench("ham10000", 2, 2000, _RESNET, veiled=_ONE_GAMMA, usual=False),
)
LOSSLESS_QUICK = (Bench("digits", 2, 160, _MLP, shadows=6),)
_SMALL_STEPS: dict[str, object] = {"lr": 0.01, "momentum": 0.0}
MPDP = (Bench("cifar10", 5, 2000, {**_RESNET, "batch_size": 64}, _SMALL_STEPS, _ONE_GAMMA),)
MPDP_QUICK = (Bench("digits", 5, 160, _MLP, _SMALL_STEPS, shadows=6),)

_CHOSEN = (
    "Settings were chosen by how far FedAvg overfits, never by what an attack finds: of the learning rates and target "
    "scales tried on few hundred samples those with the lowest training loss, and many rounds. How well the training "
    "samples are known stands in the table. All schemes have the same settings."
)
_HOW = (
    f"Success is balanced over members and others (chance: {GUESS:g} %), on candidates whose membership the attacker "
    "does not know; it knows that of as many others. Brackets: 95 % confidence. The attacker's threshold and the epoch "
    "of its network come from what it knows; the paper picks the epoch with the best test accuracy, which flatters. "
    "AUC and true positives at 1 % false ones are in the JSON file."
)
_MEANT = (
    "A blind guess: the interval does not lie above 50 %. An attack counts only if it tells more than "
    f"{LEAST:g} % of FedAvg's members here; otherwise the claim stays open. What it tells on the audit's own reference "
    "run (an overfitted mlp on digits) is in the JSON file."
)
_WHY = (
    "The veil multiplies hidden activations by positive numbers, and an attacker standardises what it reads: layers "
    "before the last are as good as bare. The last one is hidden by r·1ᵀ, which a least-squares fit on the client's "
    "own samples estimates. An attacker who takes nothing off ignores the defence."
)


def _lossless_cells(quick: bool) -> tuple[Cell, ...]:
    return tuple(
        bench.cell(scheme, {"scheme": scheme}, quick=quick)
        for bench in (LOSSLESS_QUICK if quick else LOSSLESS)
        for scheme in ("fedavg", "lossless")
    )


def _lossless_report(results: Results, quick: bool) -> Report:
    benches = [one for one in (LOSSLESS_QUICK if quick else LOSSLESS) if one.usual or one.name("fedavg") in results]
    rows, checks = [], []
    for bench in benches:
        plain, veiled, printed = bench.name("fedavg"), bench.name("lossless"), LOSSLESS_TABLE3.get(bench.data, {})
        theirs = [paper(one) for one in printed.get("accuracy", (None, None))]
        commonest = percent(results, plain, "commonest")
        fits = (percent(results, plain), theirs[1], EMPTY, EMPTY, percent(results, veiled), EMPTY)
        rows.append((bench.shown, "accuracy", commonest, theirs[0], *fits))
        learned = [percent(results, one, "train accuracy") for one in (plain, veiled)]
        rows.append(
            (bench.shown, "on training samples", commonest, EMPTY, learned[0], *(EMPTY,) * 3, learned[1], EMPTY)
        )
        for row, name in NAMES.items():
            theirs = [paper(one) for one in printed.get(row, (None, None))]
            as_sent, noise_off, bare = (written(results, veiled, row, way) for way in WAYS)
            ours = (written(results, plain, row, RECEIVED), theirs[1], as_sent, noise_off, bare)
            rows.append((bench.shown, name, paper(GUESS), theirs[0], *ours, meaning(results, veiled, plain, row)))
        checks += [
            told_without_protection(results, plain, bench.shown),
            close_accuracy(results, veiled, plain, bench.shown, points=_POINTS),
            *(
                no_better_than_a_guess(results, veiled, plain, bench.shown, row, way)
                for way in (RECEIVED, ADAPTIVE)
                for row in NAMES
            ),
        ]
    size = "; ".join(
        f"{one.shown}: {one.samples} training samples, {one.settings['model']}, {one.settings['rounds']} rounds"
        for one in benches
    )
    return Report(
        title=f"Lossless perturbation, Table III: members told by a client (percent{', quick form' if quick else ''})",
        columns=(
            *(
                "data",
                "by",
                "chance",
                "FedAvg: paper",
                "FedAvg: here",
                "method: paper",
                "as received",
                "noise taken off",
            ),
            *("its true model", "noise taken off, beside the true model"),
        ),
        rows=tuple(rows),
        checks=tuple(checks),
        notes=(
            f"{size}. The paper: ResNet-56 on all of CIFAR-10 and LDC, 200 epochs, cross-entropy. Here the square loss "
            "for both columns, since head noise is exact for no other; few samples, so that the model overfits as far "
            "as the paper's attack figures need. Accuracy is therefore not to be compared with the paper's.",
            _CHOSEN,
            _HOW,
            _MEANT,
            _WHY,
            "The paper's other columns, PPDL, DBCL and SPN, are not built here.",
            "HAM10000 is split by lesion: a member's lesion may be pictured in other training samples, a non-member's "
            "is not. Its pictures are resized and compressed.",
        ),
        quick=quick,
    )


_NOISE: dict[str, object] = {"epsilon": EPSILON, "delta": DELTA, "head_groups": 1}
_PAIRED: dict[str, object] = {**_NOISE, "scheme": "mpdp", "skip_cancelling": True}
_METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "FedAvg": ("fedavg", {"scheme": "fedavg"}),
    "FedAvg, small steps": ("fedavg-slow", {"scheme": "fedavg"}),
    "MP-CDP": ("mp-cdp", {**_NOISE, "scheme": "mp-cdp"}),
    "MP-DP": ("mpdp", _PAIRED),
    f"MP-DP, ε = {QUIET:g}": ("mpdp-quiet", {**_PAIRED, "epsilon": QUIET}),
}
"""By name: the cell's name and its scheme."""

_SLOW = ("fedavg-slow", "mp-cdp", "mpdp")

_NOT_BUILT = ("PILE", "TP-SMC", "HybridAlpha")


def _mpdp_cells(quick: bool) -> tuple[Cell, ...]:
    return tuple(
        bench.cell(name, {**scheme, **(bench.noisy if name in _SLOW else {})}, quick=quick)
        for bench in (MPDP_QUICK if quick else MPDP)
        for name, scheme in _METHODS.values()
    )


def _mpdp_report(results: Results, quick: bool) -> Report:
    benches = MPDP_QUICK if quick else MPDP
    rows, checks = [], []
    for bench in benches:
        plain, printed = bench.name("fedavg"), MPDP_TABLE4.get(bench.data, {})
        for method, (name, _) in _METHODS.items():
            rows += _mpdp_rows(results, bench, method, name, plain, printed.get(method))
        for method in _NOT_BUILT:
            theirs = printed.get(method)
            if theirs is not None:
                rows.append((bench.shown, method, paper(theirs[0]), "not built", EMPTY, EMPTY, EMPTY, paper(theirs[1])))
        checks += [
            told_without_protection(results, plain, bench.shown),
            close_accuracy(
                results, bench.name("mpdp"), plain, f"{bench.shown}, MP-DP at ε = {EPSILON:g}", points=_POINTS
            ),
        ]
        for method, name in ((f"MP-DP, ε = {EPSILON:g}", "mpdp"), (f"MP-DP, ε = {QUIET:g}", "mpdp-quiet")):
            checks += [
                no_better_than_a_guess(results, bench.name(name), plain, f"{bench.shown}, {method}", row, way)
                for way in (RECEIVED, ADAPTIVE)
                for row in NAMES
            ]
    wide = 12
    return Report(
        title=f"MP-DP, Table 4: members told by a client (percent{', quick form' if quick else ''})",
        columns=(
            *("data", "method", "accuracy: paper", "accuracy: here", "on training samples", "by", "chance"),
            *("success: paper", "as received", "noise taken off", "its true model"),
            "noise taken off, beside the true model",
        ),
        rows=tuple((*row, *(EMPTY,) * (wide - len(row))) for row in rows),
        checks=tuple(checks),
        notes=(
            f"ε = {EPSILON:g} is that of one round, as in the paper: σ = √(2·ln(1/δ))/ε for a sensitivity of 1, "
            "which is assumed. The mean gradient then carries noise of length σ·√d/K for d parameters. A model that "
            "does not train under it has no members to tell, with or without a veil: a success of 50 % says nothing "
            "about the veil. The server's true model of the same run stands beside it to tell the two apart, and "
            f"ε = {QUIET:g} shows the veil by itself, where next to no noise is left and the model is trained.",
            "; ".join(
                f"{one.shown}: {one.samples} training samples, K = {one.clients}, {one.settings['model']}, "
                f"{one.settings['rounds']} rounds"
                for one in benches
            )
            + ", the square loss. The paper: ResNet-20 on all of CIFAR-10, 100 epochs. Noise of pairs, which cancels "
            "in the sum, is left out of the simulation: no client sees it.",
            "The paper does not say which attack it makes; here it is the network on layers of Table III of the "
            "lossless perturbation, and a likelihood ratio. MP-CDP is in the paper's Table 2, not in its Table 4.",
            _CHOSEN,
            f"Only runs at ε = {EPSILON:g} take smaller steps, without momentum: with the others' they diverge. Of "
            "four learning rates tried on digits, MP-CDP's training loss was lowest with this one. What small steps do "
            "by themselves is seen on FedAvg with the same ones: where that tells no members either, noise is not the "
            "reason.",
            _HOW,
            _MEANT,
            _WHY,
            "PILE, TP-SMC and HybridAlpha are not built here; CIFAR-100 is not run.",
        ),
        quick=quick,
    )


def _mpdp_rows(
    results: Results, bench: Bench, method: str, name: str, plain: str, printed: tuple[float, float] | None
) -> list[tuple[str, ...]]:
    """A method's rows: one for each attack, the accuracies on the first."""
    cell, found = bench.name(name), []
    for place, (row, by) in enumerate(NAMES.items()):
        theirs = printed if printed is not None and place == 0 else (None, None)
        fits = (percent(results, cell), percent(results, cell, "train accuracy")) if place == 0 else (EMPTY, EMPTY)
        ours = [written(results, cell, row, way) for way in WAYS]
        word = meaning(results, cell, plain, row)
        found.append((bench.shown, method, paper(theirs[0]), *fits, by, paper(GUESS), paper(theirs[1]), *ours, word))
    return found


LOSSLESS_ENTRY = Entry(
    name="lossless-table3",
    paper="Lossless perturbation",
    what="Table III: members told by a client, as the paper attacks and adaptively (--full: HAM10000 too)",
    takes="fifteen minutes on two cores; --full: a GPU",
    takes_quick="two minutes",
    needs="cifar10 (--full: ham10000; --quick: nothing)",
    cells=_lossless_cells,
    report=_lossless_report,
    work=work,
)
MPDP_ENTRY = Entry(
    name="mpdp-table4",
    paper="MP-DP",
    what="Table 4: members told by a client, as the paper attacks and adaptively",
    takes="fifteen minutes on a GPU",
    takes_quick="two minutes",
    needs="cifar10 (--quick: nothing), and the package cryptography",
    cells=_mpdp_cells,
    report=_mpdp_report,
    work=work,
)
