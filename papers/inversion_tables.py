"""Accuracy-lossless perturbation, Table IV: pictures of classes made from the model that a client holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.audit.attacks.probe import read_head
from fedveil.audit.judge import Judge
from fedveil.audit.metrics import knn_distance
from fedveil.audit.seen import client_view, server_view
from fedveil.audit.views import ClientView
from fedveil.data import Dataset
from fedveil.downlink import Blueprint
from fedveil.engines import ClientPool
from fedveil.runs.job import Job
from fedveil.trials.measures import Classes
from fedveil.trials.scene import Effort
from fedveil.trials.subject import Subject, enacted
from fedveil.trials.trial import Found
from papers.attacking import (
    REFERENCES,
    as_text,
    judge_of,
    reference_figures,
    short,
    side_by_side,
    tried,
)
from papers.cells import Cell, Figures
from papers.entry import Entry
from papers.inversion_report import report, sheet_rows
from papers.inversion_rows import (
    ADAPTIVE,
    ALL,
    AS_IS,
    ATTACK,
    CONTROL,
    FEDAVG,
    LOSSLESS,
    OTHERS,
    OWN,
    PRIORS,
    Bench,
    bench_of,
    benches,
    private_classes,
)
from papers.stage import OnRound, Stage

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
