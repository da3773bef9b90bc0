"""Table IV of accuracy-lossless perturbation: how large ours is, what the paper prints, how figures are found again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.audit.attacks.extraction import read_head
from fedveil.audit.findings import Found, Score, Verdict, judged
from fedveil.audit.judge import Judge
from fedveil.audit.measures import Classes
from fedveil.audit.metrics import knn_distance
from fedveil.audit.record import client_view, server_view
from fedveil.audit.subject import Effort, Subject, enacted
from fedveil.audit.views import ClientView
from fedveil.data import Dataset
from fedveil.downlink import Blueprint
from fedveil.engine import ClientPool
from fedveil.runs.job import Job
from papers.attacking import (
    REFERENCES,
    as_text,
    from_text,
    judge_of,
    proven,
    reference_figures,
    short,
    side_by_side,
    tried,
)
from papers.cells import EMPTY, Cell, Check, Figures, Report, Results
from papers.stage import Entry, OnRound, Stage

ATTACK = "class-inversion"
FEDAVG, LOSSLESS, CONTROL = "fedavg", "lossless", "untrained"
OTHERS, ALL = "others", "all"
PRIORS = {OTHERS: "classes the model does not know", ALL: "all classes"}
AS_IS, ADAPTIVE = "as-is", "adaptive"
JUDGE, OWN = "judge", "own"
"""Who says what a picture shows: an independent classifier, or the server's own model, as in the paper."""

PRINTED: dict[str, dict[str, tuple[float, float, float]]] = {
    "cifar10": {FEDAVG: (364.71, 405.61, 68.41), LOSSLESS: (1866.47, 1953.94, 10.63)},
    "ham10000": {FEDAVG: (682.23, 736.47, 60.22), LOSSLESS: (2248.56, 2203.71, 11.49)},
}
"""KNN distance, feature distance, ASR in percent, by data and scheme."""


@dataclass(frozen=True)
class Bench:
    """A data set with a network, and how many pictures are made of each class."""

    data: str
    settings: Mapping[str, object]
    per_class: int
    quick: bool = False
    usual: bool = True

    def cell(self, label: str) -> str:
        """A cell's name."""
        return f"{self.data}/{label}"


_RESNET: dict[str, object] = {
    "model": "resnet20",
    "clients": 5,
    "batch_size": 64,
    "lr": 0.01,
    "momentum": 0.9,
    "lr_schedule": "cosine",
    "rounds": 1500,
}
FULL = (Bench("cifar10", _RESNET, 40), Bench("ham10000", _RESNET, 40, usual=False))
QUICK = (
    Bench(
        "digits",
        {"model": "cnn", "clients": 5, "batch_size": 32, "lr": 0.05, "momentum": 0.9, "rounds": 150},
        20,
        quick=True,
    ),
)


def benches(quick: bool) -> tuple[Bench, ...]:
    """What a run of the table consists of."""
    return QUICK if quick else FULL


def bench_of(cell: str) -> Bench:
    """The bench a cell belongs to."""
    return next(one for one in (*QUICK, *FULL) if cell.startswith(f"{one.data}/"))


def private_classes(outputs: int) -> tuple[int, ...]:
    """The classes the model learns; a prior that follows the paper learns from the others."""
    return tuple(range((outputs + 1) // 2))


def figures_of(results: Results, bench: Bench, label: str) -> Figures:
    """The figures of a cell's first seed: the table shows one trained model."""
    for figures in results.get(bench.cell(label), {}).values():
        return figures
    return {}


def number(figures: Figures, name: str) -> float | None:
    """A figure, if it is there."""
    value = figures.get(name)
    return float(value) if isinstance(value, int | float) else None


def success(figures: Figures, prior: str, way: str, by: str = JUDGE) -> Score | None:
    """An attack's success rate with its interval."""
    value, low, high = (number(figures, f"{prior} {way} {by} {one}") for one in ("asr", "low", "high"))
    return None if value is None else Score(value, low, high)


def verdict(results: Results, bench: Bench, label: str, prior: str, way: str) -> Verdict | None:
    """What a success rate means beside chance and FedAvg's; chance is one in as many as the model has outputs."""
    figures, bare = figures_of(results, bench, label), figures_of(results, bench, FEDAVG)
    ours, plain = success(figures, prior, way), success(bare, prior, AS_IS)
    outputs = number(figures, "outputs")
    if ours is None or plain is None or outputs is None or reference(results) is None:
        return None
    if not reference(results):
        return "not effective"
    return judged(Classes("recognised", chance=1 / outputs), ours, plain)[0]


def reference(results: Results) -> bool | None:
    """Whether the attack passed its reference."""
    for figures in results.get(REFERENCES, {}).values():
        return proven(figures, ATTACK)
    return None


_ROWS = (
    (FEDAVG, AS_IS, "FedAvg"),
    (LOSSLESS, AS_IS, "lossless, as received"),
    (LOSSLESS, ADAPTIVE, "lossless, head noise taken off"),
    (CONTROL, AS_IS, "control: an untrained model"),
)


def report(results: Results, quick: bool) -> Report:
    """The table and its verdict."""
    return Report(
        title=f"Accuracy-lossless perturbation, Table IV: class inversion{' (quick form)' if quick else ''}",
        columns=(
            *("data", "prior knows", "the client's model", "accuracy", "paper: KNN, Feat, ASR"),
            *("ASR by a judge [95 %]", "ASR by the true model", "KNN, Feat: judge", "KNN, Feat: true model"),
            *("chance", "means"),
        ),
        rows=tuple(_rows(results, quick)),
        checks=tuple(check for bench in benches(quick) for check in _checks(results, bench)),
        notes=tuple(_notes(results, quick)),
        quick=quick,
    )


def _rows(results: Results, quick: bool) -> Iterator[tuple[str, ...]]:
    for bench in benches(quick):
        if not bench.usual and not any(figures_of(results, bench, label) for label, _, _ in _ROWS):
            continue
        for prior in PRIORS:
            for label, way, name in _ROWS:
                yield _row(results, bench, prior, label, way, name)
        figures = figures_of(results, bench, FEDAVG)
        yield (
            *(bench.data, EMPTY, "real held-out pictures", EMPTY, EMPTY),
            *(_rate(figures, f"real {JUDGE}"), _rate(figures, f"real {OWN}")),
            *(_distances(figures, f"real {JUDGE}"), _distances(figures, f"real {OWN}"), EMPTY, EMPTY),
        )


def _row(results: Results, bench: Bench, prior: str, label: str, way: str, name: str) -> tuple[str, ...]:
    figures = figures_of(results, bench, label)
    printed = PRINTED.get(bench.data, {}).get(label) if way == AS_IS and prior == OTHERS else None
    accuracy, outputs = number(figures, "accuracy"), number(figures, "outputs")
    start = f"{prior} {way}"
    word = verdict(results, bench, label, prior, way)
    told = "attack not effective here" if word == "not effective" else word
    return (
        bench.data,
        PRIORS[prior],
        name,
        EMPTY if accuracy is None else f"{accuracy:.1f}",
        EMPTY if printed is None else f"{printed[0]:.0f}, {printed[1]:.0f}, {printed[2]:.1f} %",
        _rate(figures, f"{start} {JUDGE}"),
        _rate(figures, f"{start} {OWN}"),
        _distances(figures, f"{start} {JUDGE}"),
        _distances(figures, f"{start} {OWN}"),
        EMPTY if outputs is None else f"{100 / outputs:.0f} %",
        told if told is not None and label != CONTROL else EMPTY,
    )


def _rate(figures: Figures, name: str) -> str:
    value, low, high = (number(figures, f"{name} {one}") for one in ("asr", "low", "high"))
    if value is None or low is None or high is None:
        return EMPTY
    return f"{100 * value:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def _distances(figures: Figures, name: str) -> str:
    both = [number(figures, f"{name} {one}") for one in ("knn", "centroid")]
    return EMPTY if None in both else ", ".join(f"{one:.3g}" for one in both if one is not None)


def _checks(results: Results, bench: Bench) -> Iterator[Check]:
    if not bench.usual and not figures_of(results, bench, FEDAVG):
        return
    for prior in (OTHERS, ALL):
        start = f"{bench.data}, prior of {PRIORS[prior]}"
        yield _works(results, bench, prior, f"{start}: class inversion of FedAvg's model shows its classes")
        yield _guessing(results, bench, prior, AS_IS, f"{start}: lossless leaves guessing (the paper's claim)")
        yield _guessing(
            results, bench, prior, ADAPTIVE, f"{start}: lossless leaves guessing to who takes the head noise off"
        )
        yield _farther(results, bench, prior, f"{start}: pictures are farther from private data than FedAvg's")


def _works(results: Results, bench: Bench, prior: str, claim: str) -> Check:
    word = verdict(results, bench, FEDAVG, prior, AS_IS)
    figures, control = figures_of(results, bench, FEDAVG), figures_of(results, bench, CONTROL)
    ours, nothing = success(figures, prior, AS_IS), success(control, prior, AS_IS)
    if word is None or ours is None:
        return Check(claim, None, premise=True)
    seen = f"judge {_percent(ours)}, untrained {_percent(nothing)}"
    return Check(claim, word == "as if unprotected" and not _above(nothing, ours), seen, premise=True)


def _above(one: Score | None, other: Score) -> bool:
    """Whether one rate is not surely below another."""
    return one is not None and one.value >= other.surely


def _guessing(results: Results, bench: Bench, prior: str, way: str, claim: str) -> Check:
    """Whether success is no more than chance, or than an untrained model gives; open where FedAvg gives nothing."""
    figures, control = figures_of(results, bench, LOSSLESS), figures_of(results, bench, CONTROL)
    ours, nothing = success(figures, prior, way), success(control, prior, AS_IS)
    word = verdict(results, bench, LOSSLESS, prior, way)
    if ours is None or word is None:
        return Check(claim, None)
    bare = success(figures_of(results, bench, FEDAVG), prior, AS_IS)
    seen = f"judge {_percent(ours)}, FedAvg {_percent(bare)}, untrained {_percent(nothing)}"
    if word == "not effective":
        return Check(claim, None, f"{seen}; attack not effective here even on FedAvg's model")
    guess = max(
        1 / (number(figures, "outputs") or 1.0), 0.0 if nothing is None or nothing.high is None else nothing.high
    )
    return Check(claim, ours.surely <= guess, seen)


def _farther(results: Results, bench: Bench, prior: str, claim: str) -> Check:
    names = [f"{prior} {AS_IS} {OWN} {one}" for one in ("knn", "centroid")]
    ours = [number(figures_of(results, bench, LOSSLESS), one) for one in names]
    bare = [number(figures_of(results, bench, FEDAVG), one) for one in names]
    taken = [number(figures_of(results, bench, LOSSLESS), one.replace(AS_IS, ADAPTIVE)) for one in names]
    ratios = [a / b for a, b in zip(ours, bare, strict=True) if a is not None and b]
    after = [a / b for a, b in zip(taken, bare, strict=True) if a is not None and b]
    if len(ratios) < 2:
        return Check(claim, None)
    seen = f"KNN × {ratios[0]:.2f}, Feat × {ratios[1]:.2f} in the true model's features"
    if len(after) == 2:
        seen += f"; head noise taken off: × {after[0]:.2f}, × {after[1]:.2f}"
    if verdict(results, bench, FEDAVG, prior, AS_IS) == "not effective":
        return Check(claim, None, f"{seen}; attack not effective here even on FedAvg's model")
    return Check(claim, min(ratios) > 1, seen)


def _percent(found: Score | None) -> str:
    if found is None or found.low is None or found.high is None:
        return EMPTY
    return f"{100 * found.value:.0f} % [{100 * found.low:.0f}, {100 * found.high:.0f}]"


def _notes(results: Results, quick: bool) -> Iterator[str]:
    if quick:
        yield "Quick form: handwritten digits of 8 × 8 and a small cnn. It shows directions."
    yield (
        "As in the paper, classes are split in halves: the model learns the first, and the prior from training "
        "pictures of the second, which it never saw. Since such a prior cannot draw every class, the rows below "
        "grant it held-out pictures of the private classes too. The paper's model has ten classes and its accuracy "
        "that of training on all of them; here the last layer has an output for each of the data set's classes, of "
        "which half are learned, so that guessing succeeds once in as many as there are classes."
    )
    yield (
        "The judge is a classifier of our own, trained on all classes, that no attack sees; a picture that fools the "
        "attacked model alone does not count. The paper counts what the attacked model itself says: here that is the "
        "server's true model, since pictures are made so that the received one agrees. KNN is the distance to the "
        "nearest private picture, Feat to the class's centroid, in features of the judge and of the true model; their "
        "scales are not the paper's, so compare them with the row of real pictures. Rates have exact 95 % intervals."
    )
    yield (
        "The prior is a variational autoencoder instead of the paper's GAN; square loss instead of cross-entropy, for "
        "which the head noise is exact; ResNet-20 instead of ResNet-56; five clients. The adaptive client takes the "
        "head noise off by calibration on its own labelled samples. PPDL, DBCL and SPN are not built."
    )
    for figures in results.get(REFERENCES, {}).values():
        value, asked = number(figures, f"{ATTACK} reference"), number(figures, f"{ATTACK} asked")
        if value is not None and asked is not None:
            yield f"Reference (a well-trained unprotected mlp on digits): {value:.0%} recognised, {asked:.0%} asked."
    for bench in benches(quick):
        judge = number(figures_of(results, bench, FEDAVG), "judge")
        if judge is not None:
            yield f"{bench.data}: the judge is right on {judge:.0%} of pictures kept from its training."
        for label, way, _ in _ROWS:
            figures = figures_of(results, bench, label)
            yield from (
                f"{bench.cell(label)}, {way}, prior of {PRIORS[prior]}: {figures[f'{prior} {way} reason']}"
                for prior in PRIORS
                if f"{prior} {way} reason" in figures
            )


def sheet_rows(results: Results, quick: bool) -> list[tuple[str, Tensor]]:
    """What each attack made, a row for each; two pictures of every class."""
    return [
        (f"{bench.data} {prior} {name}", made)
        for bench in benches(quick)
        for prior in PRIORS
        for label, way, name in _ROWS
        if (made := from_text(figures_of(results, bench, label), f"{prior} {way} pictures")) is not None
    ]


CLIENT = 0
SHOWN = 2
"""How many pictures of each class are kept for the contact sheet."""


def _cells(quick: bool) -> tuple[Cell, ...]:
    found = [Cell(REFERENCES, {"quick": quick})]
    for bench in benches(quick):
        for label in (FEDAVG, LOSSLESS, CONTROL):
            rounds = 1 if label == CONTROL else bench.settings["rounds"]
            settings = {
                **bench.settings,
                "dataset": bench.data,
                "loss": "square",
                "rounds": rounds,
                "scheme": LOSSLESS if label == LOSSLESS else FEDAVG,
                "record": True,
                "record_rounds": str(rounds),
                "record_clients": str(CLIENT),
            }
            if label == LOSSLESS and not bench.quick:
                settings["head_groups"] = 1  # three gradients a step instead of twelve
            found.append(Cell(bench.cell(label), settings, usual=bench.usual))
    return tuple(found)


def _work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    if cell.name == REFERENCES:
        return reference_figures([ATTACK], Effort(quick=bool(cell.settings["quick"]), seed=seed, device=stage.device))
    bench, job = bench_of(cell.name), stage.job(cell, seed=seed)
    classes = private_classes(job.facts.outputs)
    job = knowing(job, classes)
    with TemporaryDirectory(prefix="fedveil-inversion-") as folder:
        subject = enacted(
            job, Path(folder) / "record", on_round=lambda done: on_round(done, job.config.rounds), victims=()
        )
        return _attacked(stage, subject, bench, classes, seed=seed)


def knowing(job: Job, classes: Sequence[int]) -> Job:
    """The same job with samples of some classes alone, dealt evenly to its clients, and judged on those classes."""
    parts = [one.take(torch.arange(len(one))) for one in job.pool.clients]
    x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    kept = _rows_of(y, classes).cpu()
    each = len(kept) // len(parts)
    assert job.test is not None
    return replace(
        job,
        pool=ClientPool.shared(x, y, [kept[place * each : (place + 1) * each] for place in range(len(parts))]),
        test=job.test.subset(_rows_of(job.test.y, classes)),
    )


def _rows_of(y: Tensor, classes: Sequence[int]) -> Tensor:
    return torch.isin(y, torch.tensor(list(classes), device=y.device)).nonzero().flatten()


def public_pictures(train: Dataset, test: Dataset, classes: Sequence[int]) -> dict[str, Tensor]:
    """What a prior learns from: training pictures of the classes the model does not know; and besides those half of
    the held-out pictures of the classes it knows."""
    others = [one for one in range(train.outputs) if one not in classes]
    unknown = train.x[_rows_of(train.y, others)].cpu().float()
    known = test.x[_rows_of(test.y, classes)].cpu().float()
    return {OTHERS: unknown, ALL: torch.cat([unknown, known[: len(known) // 2]])}


def _attacked(stage: Stage, subject: Subject, bench: Bench, classes: Sequence[int], *, seed: int) -> Figures:
    split = stage.split(bench.data)
    box = (float(split.test.x.min()), float(split.test.x.max()))
    public = public_pictures(split.train, split.test, classes)
    own = subject.own(CLIENT)
    view = client_view(subject.record, CLIENT, data=(own[0].cpu(), own[1].cpu()))
    ways = (AS_IS, ADAPTIVE) if view.broadcasts[-1].broadcast.head is not None else (AS_IS,)
    judge, _ = judge_of(stage, bench.data, quick=bench.quick)
    truth = true_model(subject, view, device=stage.device)
    scorers = {"judge": _Scorer(judge, subject), OWN: _Scorer(truth, subject)}
    figures: Figures = {
        "device": stage.describe(),
        "torch": torch.__version__,
        "accuracy": short(100 * _accuracy(subject, truth)),
        "judge": short(judge.accuracy),
        "classes": len(classes),
        "outputs": subject.job.facts.outputs,
        "shape": [float(one) for one in subject.job.facts.input_shape],
    }
    real = _real(subject, classes, count=bench.per_class)
    for by, scorer in scorers.items():
        figures |= scorer.figures(f"real {by}", real)
    settings: dict[str, Any] = {
        "quick": bench.quick,
        "seed": seed,
        "device": stage.device,
        "box": list(box),
        "classes": list(classes),
        "per_class": bench.per_class,
    }

    def run(prior: str) -> dict[str, Found | str]:
        seen = replace(view, known={"public.x": public[prior]})
        told = [{**settings, "adaptive": way == ADAPTIVE} for way in ways]
        outcomes = {way: tried(ATTACK, [seen], [own]) for way, own in zip(ways, told, strict=True)}
        return {way: one.reason or one.found[0] for way, one in outcomes.items()}

    for prior, outcome in side_by_side({prior: lambda prior=prior: run(prior) for prior in PRIORS}).items():  # type: ignore[misc]
        for way, found in outcome.items():
            if isinstance(found, str):
                figures[f"{prior} {way} reason"] = found
                continue
            for by, scorer in scorers.items():
                figures |= scorer.figures(f"{prior} {way} {by}", found)
            few = torch.cat([found["inputs"][found["labels"] == one][:SHOWN] for one in classes])
            figures[f"{prior} {way} pictures"] = as_text(few, box=box)
    return figures


@dataclass(frozen=True, eq=False)
class _Scorer:
    """Attack success, distance to the nearest private picture and to the class's centroid, as one classifier sees."""

    judge: Judge
    subject: Subject

    def figures(self, name: str, found: Found) -> Figures:
        x, y = self._private()
        outputs = self.subject.job.facts.outputs
        score = Classes("recognised", chance=1 / outputs, judge=lambda: self.judge).score([found], [{}])
        inputs, labels = found["inputs"].float(), found["labels"].cpu()
        nearest = knn_distance(inputs, x, extractor=self.judge.features)
        features, private = self.judge.features(inputs).cpu(), self.judge.features(x).cpu()
        centroids = {one: private[y == one].mean(0) for one in set(labels.tolist())}
        far = (features - torch.stack([centroids[one] for one in labels.tolist()])).norm(dim=1)
        assert score.low is not None
        assert score.high is not None
        return {
            f"{name} asr": short(score.value),
            f"{name} low": short(score.low),
            f"{name} high": short(score.high),
            f"{name} pictures made": len(labels),
            f"{name} knn": short(float(nearest.mean())),
            f"{name} centroid": short(float(far.mean())),
        }

    def _private(self) -> tuple[Tensor, Tensor]:
        parts = [self.subject.own(one) for one in range(len(self.subject.job.pool))]
        return torch.cat([x for x, _ in parts]).cpu().float(), torch.cat([y for _, y in parts]).cpu()


class _Features(nn.Module):
    """What the last layer of a model reads."""

    def __init__(self, blueprint: Blueprint, module: nn.Module) -> None:
        super().__init__()
        self.blueprint, self.module = blueprint, module

    def forward(self, x: Tensor) -> Tensor:
        example = next(self.module.parameters())
        return read_head(self.blueprint, self.module, x.to(example)).features.float()


def true_model(subject: Subject, view: ClientView, *, device: str) -> Judge:
    """The server's own model of the last round, read like a judge: the paper's measure of success."""
    last = view.broadcasts[-1]
    seen = server_view(subject.record, CLIENT, round=last.round, attempt=last.attempt)
    module, blueprint = seen.model().eval().requires_grad_(False).to(device), seen.facts.blueprint()
    linear = [one for one in module.modules() if isinstance(one, nn.Linear)]
    shape = subject.job.facts.input_shape
    none = torch.zeros((1, *(1,) * len(shape)), device=device)
    return Judge(_Features(blueprint, module), linear[-1].float(), none, none + 1, shape, 0.0)


def _accuracy(subject: Subject, truth: Judge) -> float:
    test = subject.test
    return float((truth.scores(test.x.float()).argmax(1).cpu() == test.y.cpu()).double().mean())


def _real(subject: Subject, classes: Sequence[int], *, count: int) -> Found:
    """Held-out pictures of the private classes: what a perfect attack would make."""
    test = subject.test
    rows = torch.cat([(test.y == one).nonzero().flatten()[:count] for one in classes])
    return {"inputs": test.x[rows].cpu(), "labels": test.y[rows].cpu()}


ENTRY = Entry(
    name="lossless-table4",
    paper="Accuracy-lossless perturbation",
    what="Table IV: class inversion (GMI) from the model a client holds, as received and with the noise taken off "
    "(--full: HAM10000 too)",
    takes="ten minutes on a GPU",
    takes_quick="two minutes",
    needs="cifar10, ham10000 (--quick: nothing)",
    cells=_cells,
    report=report,
    work=_work,
    pictures=sheet_rows,
)
