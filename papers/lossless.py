"""Accuracy-lossless perturbation: Tables II to IV, Figures 4 and 5, and training curves. Settings: lossless.toml."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.audit.attacks.extraction import read_head
from fedveil.audit.findings import Found, Score
from fedveil.audit.measures import ClassMeasure, Judge
from fedveil.audit.metrics import knn_distance
from fedveil.audit.record import client_view, server_view
from fedveil.audit.subject import Effort, Subject, enacted
from fedveil.audit.views import ClientView
from fedveil.data import Dataset
from fedveil.downlink import Architecture
from fedveil.engine import ClientPool
from fedveil.errors import NumericError
from fedveil.roles.server import ServerState
from fedveil.runs.callbacks import Row as Round
from fedveil.runs.job import Job
from fedveil.runs.loop import fresh_state, train_job
from papers import curious, membership
from papers.attacks import (
    INEFFECTIVE,
    REFERENCES,
    VerdictRow,
    as_text,
    draw_sheet,
    from_text,
    judge_of,
    level,
    meaning,
    proven,
    reference_figures,
    score_of,
    sheet_note,
    short,
    side_by_side,
    told,
    tried,
)
from papers.cells import Cell, Figures, Results, difference, figures_of, mean, mean_of, number, numbers, standard_error
from papers.entries import Draw, Table, read_paper
from papers.reconstruction import BLIND, Pictures, Tried
from papers.report import EMPTY, POINTS, Check, Report, above, beside_trained, paper, ratio, shown, within
from papers.report import short as text
from papers.stage import OnRound, Stage

_PAPER = read_paper("lossless")
_T2, _T3, _T4, _F5, _CURVES = (_PAPER.table(one) for one in ("table2", "table3", "table4", "fig5", "curves"))
_PICTURES = Pictures(_F5)
BASELINES: dict[str, dict[str, Any]] = _PAPER["baselines"]
"""The paper's other defences: their settings by name."""


def under(name: str, rate: float, *, quick: bool) -> dict[str, Any]:
    """A defence's settings where FedAvg has this rate: one that would diverge at it has a part of it."""
    parts = _PAPER["rates"]["quick" if quick else "full"]
    return {**BASELINES[name], "lr": round(rate * parts.get(name, 1.0), 6)}


FEDAVG, LOSSLESS, CONTROL, REORDERED = "fedavg", "lossless", "untrained", "reordered"

# Table III: members told by a client.


def benches(quick: bool) -> list[dict[str, Any]]:
    """What Table III is run on."""
    found: list[dict[str, Any]] = _T3.form(quick)["benches"]
    return found if quick else [{**one, "settings": {**_T3["resnet"], **one["settings"]}} for one in found]


def _table3_cells(quick: bool) -> tuple[Cell, ...]:
    pairs = itertools.product(benches(quick), (FEDAVG, LOSSLESS))
    found = [membership.attacked_cell(bench, scheme, {"scheme": scheme}) for bench, scheme in pairs]
    bare = [{name: value for name, value in one.items() if name != "veiled"} for one in benches(quick)]
    for bench, name in itertools.product(bare, BASELINES):
        found.append(membership.attacked_cell(bench, name, under(name, bench["settings"]["lr"], quick=quick)))
    return tuple(found)


def _told_under(results: Results, bench: Mapping[str, Any], name: str) -> Iterator[tuple[str, ...]]:
    """A baseline's rows: what the model tells as clients receive it."""
    where, cell = membership.shown_as(bench), membership.name_of(bench, name)
    printed = _T3["printed_baselines"].get(bench["data"], {}).get(name, {})
    ours = {"accuracy": membership.percent(results, cell, "accuracy")}
    ours |= {row: membership.written(results, cell, row, membership.RECEIVED) for row in membership.NAMES}
    for row, got in ours.items():
        what = f"{name}: {membership.NAMES.get(row, row)}"
        yield (where, what, EMPTY, EMPTY, EMPTY, paper(printed.get(row)), got, EMPTY, EMPTY, EMPTY)


def _table3_report(results: Results, quick: bool) -> Report:
    there = [one for one in benches(quick) if one.get("usual", True) or membership.name_of(one, FEDAVG) in results]
    rows: list[tuple[str, ...]] = []
    checks = []
    for bench in there:
        where, printed = membership.shown_as(bench), _T3["printed"].get(bench["data"], {})
        plain, veiled = (membership.name_of(bench, one) for one in (FEDAVG, LOSSLESS))
        commonest = membership.percent(results, plain, "commonest")
        for what, name in (("accuracy", "accuracy"), ("train accuracy", "on training samples")):
            theirs = [paper(one) for one in printed.get(what, (None, None))]
            ours = [membership.percent(results, one, what) for one in (plain, veiled)]
            rows.append((where, name, commonest, theirs[0], ours[0], theirs[1], EMPTY, EMPTY, ours[1], EMPTY))
        for row in membership.NAMES:
            theirs = [paper(one) for one in printed.get(row, (None, None))]
            bare, sent = (membership.written(results, one, row, membership.RECEIVED) for one in (plain, veiled))
            judged = membership.verdict_row(results, veiled, plain, row)
            line = (theirs[0], bare, theirs[1], sent, judged.gets, judged.unprotected, judged.verdict)
            rows.append((where, judged.attack, judged.chance, *line))
        rows += [line for name in BASELINES for line in _told_under(results, bench, name)]
        checks.append(membership.told_without_protection(results, plain, where))
        checks.append(membership.close_accuracy(results, veiled, plain, where, points=_T3["points"]))
        checks += membership.guesses(results, veiled, plain, where)
        for name in BASELINES:
            rival = membership.name_of(bench, name)
            checks += _better_than(results, name, where, veiled, rival)
            checks.append(membership.advantage(results, rival, plain, f"{where}, {name}"))
    return _T3.report(rows, checks, quick=quick, notes=membership.notes(_T3, there))


def _better_than(results: Results, name: str, where: str, veiled: str, rival: str) -> Iterator[Check]:
    """The paper's claim: the best accuracy and the strongest defence of all."""
    gain = difference(numbers(results, veiled), numbers(results, rival))
    reached, guess = (mean_of(results, rival, one) for one in ("accuracy", "commonest"))
    yield beside_trained(above(f"{where}: lossless is more accurate than {name}", gain), reached, guess)
    ours, theirs = (membership.members_told(results, one, "three", membership.RECEIVED) for one in (veiled, rival))
    claim = f"{where}: fewer members are told under lossless than under {name}"
    seen = f"{level(ours)} and {level(theirs)} by the last three layers"
    yield beside_trained(Check(claim, _lower(ours, theirs), seen, topic=membership.MEMBERS), reached, guess)


def _lower(ours: Score | None, theirs: Score | None) -> bool | None:
    """Whether a success lies below another's; open where their intervals meet."""
    if ours is None or theirs is None or None in (ours.low, ours.high, theirs.low, theirs.high):
        return None
    assert ours.low is not None
    assert ours.high is not None
    assert theirs.low is not None
    assert theirs.high is not None
    return True if ours.high < theirs.low else False if ours.low > theirs.high else None


# Table IV: class inversion from the model that a client holds.

ATTACK = "class-inversion"
OTHERS, ALL = PRIORS = tuple(_T4["priors"])
AS_IS, ADAPTIVE = "as-is", "adaptive"
JUDGE, OWN = "judge", "own"
"""Who says what a picture shows: an independent classifier, or the server's own model, as in the paper."""

_CLIENT = 0
_ROWS = (
    (FEDAVG, AS_IS, "FedAvg"),
    (LOSSLESS, AS_IS, "lossless, as received"),
    (LOSSLESS, ADAPTIVE, "lossless, head noise taken off"),
    *((one, AS_IS, one.upper()) for one in BASELINES),
    (CONTROL, AS_IS, "control: an untrained model"),
)


def private_classes(outputs: int) -> tuple[int, ...]:
    """The classes the model learns; a prior that follows the paper learns from the others."""
    return tuple(range((outputs + 1) // 2))


def _table4_cells(quick: bool) -> tuple[Cell, ...]:
    form = _T4.form(quick)
    found = [Cell(REFERENCES, {"quick": quick})]
    for label, bench in itertools.product((FEDAVG, LOSSLESS, CONTROL, *BASELINES), form["benches"]):
        rounds = 1 if label == CONTROL else form["settings"]["rounds"]
        scheme = {"scheme": LOSSLESS, **form.get("lossless", {})} if label == LOSSLESS else {"scheme": FEDAVG}
        scheme = under(label, form["settings"]["lr"], quick=quick) if label in BASELINES else scheme
        record = {"record": True, "record_rounds": str(rounds), "record_clients": str(_CLIENT)}
        shared = {**form["settings"], "dataset": bench["data"], "loss": "square", "rounds": rounds}
        settings = {**shared, **scheme, **record}
        found.append(Cell(f"{bench['data']}/{label}", settings, usual=bench.get("usual", True)))
    return tuple(found)


def _table4_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    if cell.name == REFERENCES:
        return reference_figures([ATTACK], Effort(quick=cell.settings["quick"], seed=seed, device=stage.device))
    job = stage.job(cell, seed=seed)
    classes, data = private_classes(job.facts.outputs), cell.settings["dataset"]
    count = next(one["per_class"] for one in _T4.form(stage.quick)["benches"] if one["data"] == data)
    job = knowing(job, classes)
    with TemporaryDirectory(prefix="fedveil-inversion-") as folder:
        try:
            subject = enacted(
                job, Path(folder) / "record", on_round=lambda done: on_round(done, job.config.rounds), victims=()
            )
        except NumericError as reason:
            return {"device": stage.describe(), "torch": torch.__version__, "stopped": f"diverged: {reason}"}
        return _attacked(stage, subject, data, classes, count, seed=seed)


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


def _attacked(stage: Stage, subject: Subject, data: str, classes: Sequence[int], count: int, *, seed: int) -> Figures:
    split = stage.split(data)
    box = (float(split.test.x.min()), float(split.test.x.max()))
    public = public_pictures(split.train, split.test, classes)
    own = subject.own(_CLIENT)
    view = client_view(subject.record, _CLIENT, data=(own[0].cpu(), own[1].cpu()))
    ways = (AS_IS, ADAPTIVE) if view.broadcasts[-1].broadcast.head is not None else (AS_IS,)
    judge, _ = judge_of(stage, data)
    truth, test = true_model(subject, view, device=stage.device), subject.test
    scorers = {JUDGE: _Scorer(judge, subject), OWN: _Scorer(truth, subject)}
    right = float((truth.scores(test.x.float()).argmax(1).cpu() == test.y.cpu()).double().mean())
    figures: Figures = {
        "device": stage.describe(),
        "torch": torch.__version__,
        "accuracy": short(100 * right),
        "judge": short(judge.accuracy),
        "classes": len(classes),
        "outputs": subject.job.facts.outputs,
        "shape": [float(one) for one in subject.job.facts.input_shape],
    }
    # Held-out pictures of the private classes: what a perfect attack would make.
    rows = torch.cat([(test.y == one).nonzero().flatten()[:count] for one in classes])
    for by, scorer in scorers.items():
        figures |= scorer.figures(f"real {by}", {"inputs": test.x[rows].cpu(), "labels": test.y[rows].cpu()})
    settings = {
        "quick": stage.quick,
        "seed": seed,
        "device": stage.device,
        "box": list(box),
        "classes": list(classes),
        "per_class": count,
    }

    def run(prior: str) -> list[Found | str]:
        seen = replace(view, known={"public.x": public[prior]})
        return tried(
            ATTACK, [seen] * len(ways), [{**settings, "adaptive": way == ADAPTIVE} for way in ways], every=True
        )

    for prior, outcome in side_by_side(PRIORS, run).items():
        for way, found in zip(ways, outcome, strict=True):
            if isinstance(found, str):
                figures[f"{prior} {way} reason"] = found
                continue
            for by, scorer in scorers.items():
                figures |= scorer.figures(f"{prior} {way} {by}", found)
            few = torch.cat([found["inputs"][found["labels"] == one][: _T4["shown"]] for one in classes])
            figures[f"{prior} {way} pictures"] = as_text(few, box=box)
    return figures


@dataclass(frozen=True, eq=False)
class _Scorer:
    """Attack success, distance to the nearest private picture and to the class's centroid, as one classifier sees."""

    judge: Judge
    subject: Subject

    def figures(self, name: str, found: Found) -> Figures:
        parts = [self.subject.own(one) for one in range(len(self.subject.job.pool))]
        x, y = torch.cat([x for x, _ in parts]).cpu().float(), torch.cat([y for _, y in parts]).cpu()
        outputs = self.subject.job.facts.outputs
        score = ClassMeasure("recognised", chance=1 / outputs, judge=lambda: self.judge).score([found], [{}])
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


class _Features(nn.Module):
    """What the last layer of a model reads."""

    def __init__(self, architecture: Architecture, module: nn.Module) -> None:
        super().__init__()
        self.architecture, self.module = architecture, module

    def forward(self, x: Tensor) -> Tensor:
        example = next(self.module.parameters())
        return read_head(self.architecture, self.module, x.to(example)).features.float()


def true_model(subject: Subject, view: ClientView, *, device: str) -> Judge:
    """The server's own model of the last round, read like a judge: the paper's measure of success."""
    last = view.broadcasts[-1]
    seen = server_view(subject.record, _CLIENT, round=last.round, attempt=last.attempt)
    module, architecture = seen.model().eval().requires_grad_(False).to(device), seen.facts.architecture()
    linear = [one for one in module.modules() if isinstance(one, nn.Linear)]
    shape = subject.job.facts.input_shape
    none = torch.zeros((1, *(1,) * len(shape)), device=device)
    return Judge(_Features(architecture, module), linear[-1].float(), none, none + 1, shape, 0.0)


@dataclass(frozen=True)
class _Inverted:
    """What attacks got on one data set with one prior. The table shows one trained model: that of the first seed."""

    results: Results
    data: str
    prior: str

    def number(self, label: str, what: str) -> float | None:
        return number(self.results, f"{self.data}/{label}", what)

    def success(self, label: str, way: str, by: str = JUDGE) -> Score | None:
        """An attack's success rate with its interval."""
        return score_of(self.results, f"{self.data}/{label}", f"{self.prior} {way} {by}", value=" asr", read=number)

    def row(self, label: str, way: str) -> VerdictRow:
        """What a success rate means beside chance and FedAvg's; chance is one in as many as the model has outputs."""
        ours, bare, outputs = self.success(label, way), self.success(FEDAVG, AS_IS), self.number(label, "outputs")
        word = None
        if outputs is not None:
            measure = ClassMeasure("recognised", chance=1 / outputs)
            word = meaning(measure, ours, bare, works=proven(self.results, ATTACK))
        chance = EMPTY if outputs is None else f"{100 / outputs:.0f} %"
        return VerdictRow(ATTACK, way == ADAPTIVE, _percent(ours), chance, _percent(bare), told(word))


def _percent(found: Score | None) -> str:
    return level(found, "{:.0f}", unit=" %", times=100)


def _table4_report(results: Results, quick: bool) -> Report:
    form, rows, checks = _T4.form(quick), [], []
    for bench in form["benches"]:
        data, usual = bench["data"], bench.get("usual", True)
        if usual or any(figures_of(results, f"{data}/{label}") for label, _, _ in _ROWS):
            for prior, (label, way, name) in itertools.product(PRIORS, _ROWS):
                rows.append(_table4_row(_Inverted(results, data, prior), label, way, name))
            real = [_by(results, f"{data}/{FEDAVG}", f"real {one}") for one in (JUDGE, OWN)]
            rates, distances = zip(*real, strict=True)
            rows.append((data, EMPTY, "real held-out pictures", EMPTY, EMPTY, *rates, *distances, EMPTY, EMPTY))
        if usual or figures_of(results, f"{data}/{FEDAVG}"):
            checks += [one for prior in PRIORS for one in _table4_checks(_Inverted(results, data, prior))]
    notes = [*([form["note"]] if quick else []), *_T4.notes(), *_table4_notes(results, form)]
    return _T4.report(rows, checks, quick=quick, notes=notes)


def _by(results: Results, cell: str, name: str) -> tuple[str, str]:
    """A rate, and the distances beside it."""
    both = [number(results, cell, f"{name} {one}") for one in ("knn", "centroid")]
    distances = EMPTY if None in both else ", ".join(f"{one:.3g}" for one in both)
    return _percent(score_of(results, cell, name, value=" asr", read=number)), distances


def _table4_row(found: _Inverted, label: str, way: str, name: str) -> tuple[str, ...]:
    own = way == AS_IS and found.prior == OTHERS
    printed = _T4["printed"].get(found.data, {}).get(label) if own else None
    accuracy = _T4["printed_accuracy"].get(found.data, {}).get(label) if own else None
    real = [_by(found.results, f"{found.data}/{label}", f"{found.prior} {way} {one}") for one in (JUDGE, OWN)]
    rates, distances = zip(*real, strict=True)
    row = found.row(label, way)
    return (
        *(
            found.data,
            _T4["priors"][found.prior],
            name,
            f"{paper(accuracy)} / {text(found.number(label, 'accuracy'), '{:.1f}')}",
        ),
        EMPTY if printed is None else f"{', '.join(map(paper, printed))} %",
        *(*rates, *distances, row.chance, EMPTY if label == CONTROL else row.verdict),
    )


def _table4_checks(found: _Inverted) -> Iterator[Check]:
    start = f"{found.data}, prior of {_T4['priors'][found.prior]}"
    bare, nothing = found.success(FEDAVG, AS_IS), found.success(CONTROL, AS_IS)
    word = found.row(FEDAVG, AS_IS).verdict
    claim = f"{start}: class inversion of FedAvg's model shows its classes"
    if word == EMPTY or bare is None:
        yield Check(claim, None, premise=True)
    else:
        alike = nothing is not None and nothing.value >= bare.surely
        seen = f"judge {_percent(bare)}, untrained {_percent(nothing)}"
        yield Check(claim, word == "as if unprotected" and not alike, seen, premise=True)
    yield _guessing(found, AS_IS, f"{start}: lossless leaves guessing")
    taken_off = _guessing(found, ADAPTIVE, f"{start}: lossless leaves guessing to who takes the head noise off")
    yield replace(taken_off, adaptive=True)
    for one in BASELINES:
        yield from _beside(found, one, start)
    claim = f"{start}: pictures are farther from private data than FedAvg's"
    ratios, after = (
        [
            ratio(
                *(
                    found.number(label, f"{found.prior} {how} {OWN} {one}")
                    for label, how in ((LOSSLESS, way), (FEDAVG, AS_IS))
                )
            )
            for one in ("knn", "centroid")
        ]
        for way in (AS_IS, ADAPTIVE)
    )
    if ratios[0] is None or ratios[1] is None:
        yield Check(claim, None)
        return
    seen = f"KNN × {ratios[0]:.2f}, Feat × {ratios[1]:.2f} in the true model's features"
    if after[0] is not None and after[1] is not None:
        seen += f"; head noise taken off: × {after[0]:.2f}, × {after[1]:.2f}"
    if word == INEFFECTIVE:
        yield Check(claim, None, f"{seen}; {INEFFECTIVE} even on FedAvg's model")
    else:
        yield Check(claim, min(ratios[0], ratios[1]) > 1, seen)


def _beside(found: _Inverted, rival: str, start: str) -> Iterator[Check]:
    """The paper's claims of another defence: it shows more classes, and some (about half of them, as printed)."""
    ours, theirs = found.success(LOSSLESS, AS_IS), found.success(rival, AS_IS)
    reached, learned = found.number(rival, "accuracy"), found.number(rival, "classes")
    guess = None if learned is None else 100 / learned
    seen = f"judge {_percent(ours)} and {_percent(theirs)}"
    fewer = Check(f"{start}: lossless shows fewer classes than {rival}", _lower(ours, theirs), seen)
    yield beside_trained(fewer, reached, guess)
    works = found.row(FEDAVG, AS_IS).verdict not in (EMPTY, INEFFECTIVE)
    held = theirs.surely > _by_chance(found, rival) if theirs is not None and works else None
    shows = Check(f"{start}: {rival} shows classes (to about 50 %, as printed)", held, f"judge {_percent(theirs)}")
    yield beside_trained(shows, reached, guess)


def _by_chance(found: _Inverted, label: str) -> float:
    """What chance gives, or an untrained model at most."""
    nothing = found.success(CONTROL, AS_IS)
    return max(1 / (found.number(label, "outputs") or 1.0), (nothing.high if nothing is not None else None) or 0.0)


def _guessing(found: _Inverted, way: str, claim: str) -> Check:
    """Whether success is no more than chance, or than an untrained model gives; open where FedAvg gives nothing."""
    ours, nothing, word = found.success(LOSSLESS, way), found.success(CONTROL, AS_IS), found.row(LOSSLESS, way).verdict
    if ours is None or word == EMPTY:
        return Check(claim, None)
    bare = found.success(FEDAVG, AS_IS)
    seen = f"judge {_percent(ours)}, FedAvg {_percent(bare)}, untrained {_percent(nothing)}"
    paper, control = found.success(LOSSLESS, way, OWN), found.success(CONTROL, AS_IS, OWN)
    if paper is not None and control is not None:
        seen += f"; by the attacked model, as the paper counts: {_percent(paper)}, untrained {_percent(control)}"
    if word == INEFFECTIVE:
        return Check(claim, None, f"{seen}; {INEFFECTIVE} even on FedAvg's model")
    return Check(claim, ours.surely <= _by_chance(found, LOSSLESS), seen)


def _table4_notes(results: Results, form: Mapping[str, Any]) -> Iterator[str]:
    value, asked = (number(results, REFERENCES, f"{ATTACK} {one}") for one in ("reference", "asked"))
    if value is not None and asked is not None:
        yield f"Reference (a well-trained unprotected mlp on digits): {value:.0%} recognised, {asked:.0%} asked."
    for bench in form["benches"]:
        data = bench["data"]
        judge = number(results, f"{data}/{FEDAVG}", "judge")
        if judge is not None:
            yield f"{data}: the judge is right on {judge:.0%} of pictures kept from its training."
        for (label, way, _), prior in itertools.product(_ROWS, PRIORS):
            for figures in figures_of(results, f"{data}/{label}")[:1]:
                if "stopped" in figures and (prior, way) == (OTHERS, AS_IS):
                    yield f"{data}/{label}: {figures['stopped']}"
                if f"{prior} {way} reason" in figures:
                    words = _T4["priors"][prior]
                    yield f"{data}/{label}, {way}, prior of {words}: {figures[f'{prior} {way} reason']}"


def sheet_rows(results: Results, quick: bool) -> list[tuple[str, Tensor]]:
    """What each attack made, a row for each; two pictures of every class."""
    return [
        (f"{bench['data']} {prior} {name}", made)
        for bench in _T4.form(quick)["benches"]
        for prior in PRIORS
        for label, way, name in _ROWS
        for figures in figures_of(results, f"{bench['data']}/{label}")[:1]
        if (made := from_text(figures, f"{prior} {way} pictures")) is not None
    ]


# Training curves.


def _curve_cells(quick: bool) -> tuple[Cell, ...]:
    found = []
    for label, run in _CURVES.form(quick)["runs"].items():
        shared = {**_CURVES["settings"], **run["settings"], "evaluate_every": run["epoch"]}
        more = {"tf32": True} if run.get("tf32") else {}
        found.append(Cell(f"{label}/{FEDAVG}", {**shared, "scheme": FEDAVG}, more=more))
        veiled = {**shared, "scheme": LOSSLESS, "head_groups": run["head_groups"]}
        found.append(Cell(f"{label}/{LOSSLESS}", veiled, more=more))
    return tuple(found)


def curve_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    """Train, with a test evaluation after an epoch's worth of rounds."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = cell.more.get("tf32", False)
    job = _reordered(stage.job(cell, seed=seed)) if cell.more.get("reordered") else stage.job(cell, seed=seed)
    rounds: list[float] = []
    losses: list[float] = []
    curve: list[float] = []

    def watch(row: Round, state: ServerState) -> None:
        on_round(state.round, job.config.rounds)
        if "test_accuracy" in row:
            rounds.append(float(row["round"]))
            if row.get("loss") is not None:  # under noise clients do not send it
                losses.append(float(row["loss"]))
            curve.append(round(100 * float(row["test_accuracy"]), 3))

    about: Figures = {"device": stage.describe(), "torch": torch.__version__}
    try:
        outcome = train_job(job, state=fresh_state(job), on_round=watch)
    except NumericError as reason:
        stopped = f"diverged: {reason}"
        return {**about, "stopped": stopped, "evaluated": rounds, "loss": losses, "curve": curve}
    about["seconds"] = round(outcome.seconds, 2)
    assert outcome.client_view is not None
    received = outcome.client_view.received.accuracy
    sent: Figures = {"client_view_accuracy": received, "bytes_down": outcome.bytes_down, "bytes_up": outcome.bytes_up}
    return {**about, "rounds": job.config.rounds, "evaluated": rounds, "loss": losses, "curve": curve, **sent}


def _ends(results: Results, label: str) -> dict[str, list[float]]:
    """The mean of the last evaluations that all runs of a setting have, by scheme and seed."""
    curves = {
        one: [figures["curve"] for figures in figures_of(results, f"{label}/{one}")] for one in (FEDAVG, LOSSLESS)
    }
    shortest = min((len(one) for found in curves.values() for one in found if isinstance(one, list)), default=0)
    last = slice(max(0, shortest - _CURVES["last"]), shortest)
    return {
        scheme: [statistics.mean(one[last]) for one in found if isinstance(one, list)]
        for scheme, found in curves.items()
    }


def _curve_report(results: Results, quick: bool) -> Report:
    rows, checks = [], []
    for label, run in _CURVES.form(quick)["runs"].items():
        ends = _ends(results, label)
        printed = [text(one, "{:.2f}") for one in run.get("printed", (None, None))]
        plain, ours = (dict(enumerate(ends[scheme])) for scheme in (FEDAVG, LOSSLESS))
        gap, error = _apart(plain, ours)
        figures = [shown(one, digits=2) for one in (plain, ours)]
        rows.append(
            (run["name"], printed[0], figures[0], printed[1], figures[1], text(gap, "{:+.2f}"), text(error, "{:.2f}"))
        )
        enough = min(len(plain), len(ours)) > 1
        checks.append(_ends_alike(run["name"], gap, error, difference(ours, plain), enough=enough, quick=quick))
        checks.append(_alike_all_along(run["name"], results, label, early=_CURVES["early"]))
    return _CURVES.report(rows, checks, quick=quick, notes=_CURVES.notes())


def _draw_curves(results: Results, quick: bool, path: Path) -> None:
    """One panel for each setting, one line for each run."""
    runs = _CURVES.form(quick)["runs"].items()
    draw_panels(results, [(label, run["name"], run["epoch"]) for label, run in runs], path)


_ACROSS = 4


def draw_panels(results: Results, panels: Sequence[tuple[str, str, int]], path: Path) -> None:
    """A panel for each label that has cells, with its title and the rounds of an epoch; a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    looks: dict[str, dict[str, Any]] = {
        FEDAVG: {"color": "#4477aa", "linestyle": "-"},
        REORDERED: {"color": "#999999", "linestyle": ":"},
        LOSSLESS: {"color": "#cc6677", "linestyle": (0, (4, 2))},
    }
    there = [one for one in panels if any(figures_of(results, f"{one[0]}/{scheme}") for scheme in looks)]
    across = min(_ACROSS, max(1, len(there)))
    down = max(1, math.ceil(len(there) / across))
    figure, axes = pyplot.subplots(down, across, figsize=(6.5 * across, 4.2 * down), squeeze=False)
    for axis, (label, title, epoch) in zip(axes.flatten(), there, strict=False):
        for scheme, look in looks.items():
            for place, figures in enumerate(figures_of(results, f"{label}/{scheme}")):
                rounds, curve = figures["evaluated"], figures["curve"]
                assert isinstance(rounds, list)
                epochs = [one / epoch for one in rounds]
                axis.plot(epochs, curve, lw=1.6, label=None if place else scheme, **look)
        axis.set_title(title, loc="left")
        axis.set_xlabel("epochs' worth of rounds")
        axis.set_ylabel("test accuracy (%)")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


# Table II: the accuracy that networks reach.


def _labels(table: Table, quick: bool) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Every setting: the start of its cells' names, the run, the loss."""
    form = table.form(quick)
    for run, loss in itertools.product(form["runs"], form["losses"]):
        yield f"{_network(run)}/k{run['clients']}/{loss}", run, loss


def _network(run: Mapping[str, Any]) -> str:
    """The network, with the data set where it is not the table's main one."""
    return f"{run['data']}/{run['model']}" if "data" in run else str(run["model"])


def accuracy_cells(table: Table, quick: bool) -> tuple[Cell, ...]:
    """FedAvg and the method on every network, with every number of clients and loss; then the paper's baselines."""
    form, cells, others = table.form(quick), [], []
    for label, run, loss in _labels(table, quick):
        own = {"model": run["model"], "clients": run["clients"], "rounds": run["rounds"], "lr": run["lr"][loss]}
        data = {"dataset": run["data"]} if "data" in run else {}
        shared = {**form["settings"], **data, **own, "loss": loss, "evaluate_every": run["epoch"]}
        usual, more = run.get("usual", True), {"tf32": True} if run.get("tf32") else {}
        plain = {**shared, "scheme": FEDAVG}
        cells.append(Cell(f"{label}/{FEDAVG}", plain, usual=usual, more=more))
        if "veiled" in form["losses"][loss]:
            veiled = {**shared, "scheme": LOSSLESS, **form["losses"][loss]["veiled"]}
            cells.append(Cell(f"{label}/{LOSSLESS}", veiled, usual=usual, more=more))
        if form.get("reordered") and "data" not in run:
            cells.append(Cell(f"{label}/{REORDERED}", plain, usual=usual, more={**more, "reordered": True}))
        if loss == table.data.get("baseline_loss"):
            for name in BASELINES:
                wanted, settings = (
                    usual and (quick or run.get("baselines", False)),
                    {**shared, **under(name, own["lr"], quick=quick)},
                )
                others.append(Cell(f"{label}/{name}", settings, usual=wanted, more=more))
    return (*cells, *others)


def _reordered(job: Job) -> Job:
    """The same run with its pictures' colours in another order, and the first layer's weights with them.

    The network computes the same function; only the order in which its first layer adds up is another.
    """
    first = next(job.architecture.new_skeleton().parameters())
    parameters = job.weights.parameters.clone()
    head = parameters[: first.numel()].view(first.shape)
    head.copy_(head.flip(1))
    shared = {id(data.x): data.x.flip(1) for data in job.pool.clients}
    clients = tuple(replace(data, x=shared[id(data.x)]) for data in job.pool.clients)
    test = None if job.test is None else replace(job.test, x=job.test.x.flip(1))
    pool, weights = replace(job.pool, clients=clients), replace(job.weights, parameters=parameters)
    return replace(job, pool=pool, weights=weights, test=test)


def _last(results: Results, cell: str) -> dict[int, float]:
    """The last model's accuracy, by seed."""
    curves = {seed: figures.get("curve") for seed, figures in results.get(cell, {}).items()}
    return {seed: curve[-1] for seed, curve in curves.items() if isinstance(curve, list) and curve}


def accuracy_report(table: Table, results: Results, quick: bool) -> Report:
    """The table, and whether the method ends where FedAvg does."""
    form, rows, checks = table.form(quick), [], []
    compared = "baseline_loss" in table.data
    for label, run, loss in _labels(table, quick):
        plain, again, ours = (_last(results, f"{label}/{one}") for one in (FEDAVG, REORDERED, LOSSLESS))
        others = {one: _last(results, f"{label}/{one}") for one in BASELINES}
        if not run.get("usual", True) and not (plain or ours or any(others.values()) or form.get("all_rows")):
            continue
        name = f"{_network(run)}, {run['clients']} clients, {loss}"
        printed = _printed(table, run, loss)
        gap, error = _apart(plain, ours)
        figures = [shown(values, digits=2) for values in (plain, again, ours)]
        theirs = [text(one, "{:.2f}") for one in printed]
        baselines = [
            f"{theirs[place]} / {text(mean(values), '{:.2f}')}" for place, values in enumerate(others.values(), 2)
        ]
        rows.append(
            (
                *(_network(run), str(run["clients"]), loss, theirs[0], *figures[:2], theirs[1], figures[2]),
                *(text(gap, "{:+.2f}"), text(error, "{:.2f}"), f"{len(plain)}, {len(ours)}"),
                *(baselines if compared else ()),
            )
        )
        if "veiled" not in form["losses"][loss]:
            continue
        loses = table.data.get("printed_loss", {}).get(_network(run), {}).get(str(run["clients"]))
        if loses is not None:
            usual_loss = _last(results, f"{_network(run)}/k{run['clients']}/cross-entropy/{FEDAVG}")
            checks.append(_loses(name, difference(usual_loss, ours), loses))
        least = run.get("least", form["losses"][loss]["least"])
        for scheme, values, figure in ((FEDAVG, plain, figures[0]), (LOSSLESS, ours, figures[2])):
            held = statistics.mean(values.values()) >= least if values else None
            checks.append(Check(f"{name}: {scheme} reaches {least:g} %", held, figure, premise=True))
        enough = min(len(plain), len(ours)) >= _T2["seeds"]
        apart = difference(ours, plain)
        checks.append(_ends_alike(name, gap, error, apart, enough=enough, quick=quick))
        if "early" in table.data:
            checks.append(_alike_all_along(name, results, label, early=table["early"]))
        if compared and loss == table["baseline_loss"] and (any(others.values()) or run.get("baselines") or quick):
            guess = table["commonest"][run.get("data", form["settings"]["dataset"])]
            checks += [
                beside_trained(
                    above(f"{name}: lossless is more accurate than {one}", difference(ours, values)),
                    mean(values),
                    guess,
                )
                for one, values in others.items()
            ]
    return table.report(rows, checks, quick=quick, notes=table.notes())


def _loses(name: str, gap: Mapping[int, float], printed: float) -> Check:
    """How much less accurate the method is than what nobody would do without: FedAvg on the cross-entropy."""
    claim = f"{name}: at most {printed:g} points below FedAvg on the cross-entropy (up to {POINTS:g} of chance)"
    return above(claim, gap, printed + POINTS, below=True)


def _apart(plain: Mapping[int, float], ours: Mapping[int, float]) -> tuple[float | None, float | None]:
    """How far the method's mean is from FedAvg's, and the standard error of that."""
    errors = [standard_error(values) for values in (plain, ours)]
    error = None if None in errors else math.hypot(*(one for one in errors if one is not None))
    return (statistics.mean(ours.values()) - statistics.mean(plain.values()) if plain and ours else None), error


def _printed(table: Table, run: Mapping[str, Any], loss: str) -> list[float | None]:
    """FedAvg, the method, and the baselines."""
    found = table["printed"].get(_network(run), {})
    by_loss = found.get(loss, {}) if loss in found else found
    there = list(by_loss.get(str(run["clients"]), ()))
    return [*there, *[None] * (2 + len(BASELINES) - len(there))]


def _ends_alike(
    name: str, gap: float | None, error: float | None, apart: Mapping[int, float], *, enough: bool, quick: bool
) -> Check:
    """Whether lossless ends where FedAvg does; open where the seeds say too little."""
    limit = f"{_T2['points']:g} points" if quick else f"{_T2['errors']:g} standard errors"
    claim = f"{name}: lossless ends where FedAvg does, within {limit}"
    if gap is None:
        return Check(claim, None)
    if quick:
        return within(claim, apart, _T2["points"])
    seen = f"{gap:+.2f} points, standard error {text(error, '{:.2f}')}"
    if error is None or not enough:
        return Check(claim, None, f"{seen}, too few seeds")
    if error > _T2["sure"]:
        return Check(claim, None, f"{seen}, too large to tell")
    return Check(claim, abs(gap) <= _T2["errors"] * error, seen)


def _alike_all_along(name: str, results: Results, label: str, *, early: float) -> Check:
    """The claim of both papers' Figure 3: the curves are one, but for their early part."""
    claim = f"{name}: the curves are within {POINTS:g} points of each other after the first {100 * early:g} %"
    plain, ours = (
        {seed: one["curve"] for seed, one in results.get(f"{label}/{scheme}", {}).items() if one.get("curve")}
        for scheme in (FEDAVG, LOSSLESS)
    )
    pairs = {seed: (plain[seed], ours[seed]) for seed in plain.keys() & ours.keys()}
    there = min((len(one) for both in pairs.values() for one in both if isinstance(one, list)), default=0)
    places = range(math.ceil(early * there), there)
    gaps = [
        {seed: b[place] - a[place] for seed, (a, b) in pairs.items() if isinstance(a, list) and isinstance(b, list)}
        for place in places
    ]
    if not gaps:
        return Check(claim, None)
    widest = max(gaps, key=lambda gap: abs(mean(gap) or 0.0))
    each = [within(claim, gap, POINTS).held for gap in gaps]
    seen = f"{shown(widest, signed=True, digits=2)} at most, at test {places[gaps.index(widest)] + 1} of {there}"
    return Check(claim, False if False in each else None if None in each else True, seen)


def draw_accuracy(table: Table) -> Draw:
    """A panel for each setting."""

    def draw(results: Results, quick: bool, path: Path) -> None:
        panels = [
            (label, f"{_network(run)}, {run['clients']} clients, {loss}", run["epoch"])
            for label, run, loss in _labels(table, quick)
        ]
        draw_panels(results, panels, path)

    return draw


# Figure 5: DLG against lossless and against PPDL with more and more noise.


def _fig5_report(results: Results, quick: bool) -> Report:
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    for place in _PICTURES.places(quick):
        found = Tried(results, place)
        if not (place.usual or figures_of(results, place.cell(FEDAVG))):
            continue
        for scheme, own in _F5["schemes"].items():
            got = [found.row(scheme, one) for one in place.attacks]
            told = [f"{one.attack} {one.gets} {one.verdict}".rstrip() for one in got]
            blind = level(found.score(scheme, BLIND))
            rows.append(
                (
                    place.data,
                    place.model,
                    _F5["names"][scheme],
                    str(own.get("noise_variance", EMPTY)),
                    "; ".join(told),
                    blind,
                )
            )
        attack = found.effective()
        claim = f"{place.name}: DLG rebuilds pictures from FedAvg's gradients"
        ran = bool(figures_of(results, place.cell(FEDAVG)))
        checks.append(Check(claim, attack is not None if ran else None, attack or "", premise=True))
        for scheme, claim in _F5["claims"].items():
            judged = found.nothing(scheme, place.attacks, f"{place.name}: {claim}")
            checks.append(replace(judged, ours=scheme == LOSSLESS))
    rows += curious.lines(_F5, results, quick)
    place = _PICTURES.places(quick)[0]
    noisiest, found = _F5["noisiest"], Tried(results, place)
    best = found.best(noisiest, place.attacks)
    checks += curious.checks(_F5, results, quick, beside=None if best is None else found.score(noisiest, best))
    return _F5.report(rows, checks, quick=quick, notes=[*_F5.notes(), *sheet_note(fig5_rows(results, quick))])


def _fig5_cells(quick: bool) -> tuple[Cell, ...]:
    return (*_PICTURES.cells(quick), *curious.cells(_F5, quick))


def _fig5_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    work = curious.work if f"/{curious.CURIOUS}/" in cell.name else _PICTURES.work
    return work(stage, cell, seed, on_round)


def fig5_rows(results: Results, quick: bool) -> list[tuple[str, Tensor]]:
    """Originals, then what the server's best attack made of them under every scheme; what a client made of models."""
    rows = []
    for place, scheme in itertools.product(_PICTURES.places(quick), _F5["schemes"]):
        for figures in figures_of(results, place.cell(scheme))[:1]:
            if scheme == FEDAVG and (originals := from_text(figures, "originals")) is not None:
                rows.append((f"{place.name} originals", originals))
            best = Tried(results, place).best(scheme, place.attacks)
            if (made := from_text(figures, f"{best} pictures")) is not None:
                rows.append((f"{place.name} {_F5['names'][scheme]}", made))
    return rows + curious.sheet_rows(_F5, results, quick)


ENTRIES = (
    _T2.entry(partial(accuracy_cells, _T2), partial(accuracy_report, _T2), work=curve_work, draw=draw_accuracy(_T2)),
    _T3.entry(_table3_cells, _table3_report, work=membership.work),
    _T4.entry(_table4_cells, _table4_report, work=_table4_work, draw=draw_sheet(sheet_rows)),
    _F5.entry(_fig5_cells, _fig5_report, work=_fig5_work, draw=draw_sheet(fig5_rows)),
    _CURVES.entry(_curve_cells, _curve_report, work=curve_work, draw=_draw_curves),
)
