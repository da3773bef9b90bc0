"""MP-DP, Table 2: what the server reconstructs from one client's upload, with and without Φ, beside our schemes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fedveil.audit.attacks.matching import client_gradient
from fedveil.audit.seen import server_view
from fedveil.audit.views import ServerView
from fedveil.engines import ClientPool
from fedveil.runs.job import Job
from fedveil.trials.measures import Labels, Likeness
from fedveil.trials.scene import Effort
from fedveil.trials.subject import Subject, enacted
from fedveil.trials.trial import Found, Truth
from fedveil.trials.uploads import uploads_of
from fedveil.work.batches import mixed_seed
from fedveil.work.messages import ClientData
from papers.attacking import (
    REFERENCES,
    Scale,
    Tried,
    as_text,
    judge_of,
    reference_figures,
    scale_of,
    short,
    side_by_side,
    tried,
)
from papers.cells import Cell, Figures
from papers.entry import Entry
from papers.reconstruction_report import report, sheet_rows
from papers.reconstruction_rows import ADAPTIVE, PHI, SCHEMES, Form, Place, form_of
from papers.stage import OnRound, Stage

EPSILON, DELTA = 3.0, 1e-5
SHOWN = 6
"""How many pictures of an attack are kept for the contact sheet."""

LONG_SEARCH = {"steps": 2000, "restarts": 1}
"""What Φ's search takes on pictures of 32 × 32."""

_DECOMPOSED: dict[str, object] = {"epsilon": EPSILON, "delta": DELTA, "head_groups": 1}
_SETTINGS: dict[str, dict[str, object]] = {
    "fedavg": {"scheme": "fedavg"},
    "mp-cdp": {"scheme": "mp-cdp", **_DECOMPOSED},
    "mpdp": {"scheme": "mpdp", "neighbours": 5, **_DECOMPOSED},
    "lossless": {"scheme": "lossless"},
    "veil-secagg": {"scheme": "veil-secagg"},
}


def _cells(quick: bool) -> tuple[Cell, ...]:
    form = form_of(quick)
    found = [Cell(REFERENCES, {"attacks": ", ".join(form.attacks)})]
    for place in form.places:
        for scheme in SCHEMES:
            settings: dict[str, object] = {
                "dataset": place.data,
                "model": place.model,
                "loss": "square",
                "clients": form.clients,
                "rounds": 1,
                "batch_size": 0,
                # A sigmoid pins every scale: on that network nothing but the last layer is veiled.
                "min_coverage": 0.0,
                "record": True,
                "record_rounds": "1",
                "record_clients": f"0-{form.clients - 1}",
                **_SETTINGS[scheme],
            }
            found.append(Cell(place.cell(scheme), settings, form.clients * place.batch, usual=place.usual))
    return tuple(found)


def _work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    if cell.name == REFERENCES:
        names = str(cell.settings["attacks"]).split(", ")
        # With the small budget, which most attacks get in the full form too: what they show with it, they can.
        return reference_figures(names, Effort(quick=True, seed=seed, device=stage.device))
    form, place = _place_of(cell)
    with TemporaryDirectory(prefix="fedveil-mpdp-") as folder:
        scale = scale_of(stage, place.data)
        subject = enacted(between(stage.job(cell, seed=seed), scale), Path(folder) / "record", rounds=1)
        return _attacked(stage, subject, form, place, scale, seed=seed)


def between(job: Job, scale: Scale) -> Job:
    """The same job on pictures from 0 to 1: on standardised ones sigmoids saturate, and attacks lose their signal."""
    clients = job.pool.clients
    parts = [one.take(torch.arange(len(one))) for one in clients]
    assert job.test is not None
    return replace(
        job,
        pool=ClientPool(tuple(ClientData(one.client, scale(x), y) for one, (x, y) in zip(clients, parts, strict=True))),
        test=replace(job.test, x=scale(job.test.x)),
    )


def _place_of(cell: Cell) -> tuple[Form, Place]:
    for form in (form_of(True), form_of(False)):
        for place in form.places:
            if cell.name.startswith(f"{place.name}/"):
                return form, place
    raise AssertionError(cell.name)


@dataclass(frozen=True, eq=False)
class _Victims:
    """Views of uploads, and the samples behind them."""

    views: tuple[ServerView, ...]
    truths: tuple[Truth, ...]

    def originals(self) -> Tensor:
        return torch.cat([one["x"] for one in self.truths])


def _victims(subject: Subject, place: Place) -> _Victims:
    views, truths = [], []
    for one in uploads_of(subject):
        x, y = (part.cpu() for part in subject.batch(one.client, round=one.round))
        # Among several samples classes are granted to the attacker, as the literature does: an upper bound.
        labels = y if place.batch > 1 else None
        views.append(server_view(subject.record, one.client, round=one.round, attempt=one.attempt, labels=labels))
        truths.append({"x": x, "y": y})
    return _Victims(tuple(views), tuple(truths))


def _attacked(stage: Stage, subject: Subject, form: Form, place: Place, scale: Scale, *, seed: int) -> Figures:
    seen = _victims(subject, place)
    box = (0.0, 1.0)
    public = subject.halves()[0].x.cpu().float()
    judge, apart = judge_of(stage, place.data, quick=form.quick, scale=scale)
    measure = Likeness(peak=1.0, chance=0.0, random=0.0, judge=lambda: judge)
    scoring = _Scoring(measure, scale, apart, seen.truths)
    figures: Figures = {
        "device": stage.describe(),
        "torch": torch.__version__,
        "parameters": subject.job.blueprint.size,
        "victims": len(seen.views),
        "judge": short(judge.accuracy),
        "noise": [short(_distance(*pair)) for pair in zip(seen.views, seen.truths, strict=True)],
        "shape": [float(one) for one in subject.job.facts.input_shape],
        "originals": as_text(seen.originals()[:SHOWN], box=box),
        **scoring.figures("mean picture", [_repeated(public.mean(0), truth) for truth in seen.truths]),
        **scoring.figures("random picture", _random(seen.truths, box, seed=seed)),
    }

    def run(name: str) -> Tried:
        views = [replace(one, known={"public.x": public}) for one in seen.views] if name == "generative" else seen.views
        settings = [_settings(stage, name, form, box, seed=seed, place=place) for place in range(len(views))]
        return tried(name, views, settings)

    for name, outcome in side_by_side({name: lambda name=name: run(name) for name in place.attacks}).items():  # type: ignore[misc]
        if outcome.reason:
            figures[f"{name} reason"] = outcome.reason
            continue
        figures |= scoring.figures(name, outcome.found, labels=True)
        figures[f"{name} pictures"] = as_text(torch.cat([one["inputs"] for one in outcome.found])[:SHOWN], box=box)
    return figures


def _settings(
    stage: Stage, attack: str, form: Form, box: tuple[float, float], *, seed: int, place: int
) -> dict[str, Any]:
    return {
        "quick": form.quick or attack in form.hasty,
        "seed": mixed_seed(seed, place) % 2**31,
        "device": stage.device,
        "box": list(box),
        **(LONG_SEARCH if attack == ADAPTIVE and not form.quick else {}),
        "thorough_prior": not form.quick,
    }


@dataclass(frozen=True, eq=False)
class _Scoring:
    """Each victim's figures: PSNR, the squared error in the data's own units, and that of the judge's features
    over that of two different pictures."""

    measure: Likeness
    scale: Scale
    apart: float
    truths: Sequence[Truth]

    def figures(self, name: str, found: Sequence[Found], *, labels: bool = False) -> Figures:
        scores = [self.measure.score([one], [truth]) for one, truth in zip(found, self.truths, strict=True)]
        kept: dict[str, list[float]] = {
            "psnr": [score.value for score in scores],
            "mse": [score.more["mse"] * self.scale.square for score in scores],
            "features": [score.more["feature mse"] / self.apart for score in scores],
        }
        if labels:
            told = Labels("labels told", chance=0.0)
            kept["labels"] = [told.score([one], [each]).value for one, each in zip(found, self.truths, strict=True)]
        return {f"{name} {what}": [short(one) for one in values] for what, values in kept.items()}


def _distance(view: ServerView, truth: Truth) -> float:
    """‖ĝ − g‖/‖g‖ of the gradient that the server reads from the upload; −1 where it cannot read one."""
    if view.recovered is None:
        return -1.0
    module = view.model().double()
    plain = client_gradient(module, view.facts.objective(), truth["x"].double(), truth["y"])
    return float((view.recovered.gradient.double() - plain).norm() / plain.norm())


def _repeated(picture: Tensor, truth: Mapping[str, Tensor]) -> Found:
    return {"inputs": picture.expand_as(truth["x"]), "labels": truth["y"]}


def _random(truths: Sequence[Truth], box: tuple[float, float], *, seed: int) -> list[Found]:
    generator, (low, high) = torch.Generator().manual_seed(seed), box
    return [
        {"inputs": low + (high - low) * torch.rand(truth["x"].shape, generator=generator), "labels": truth["y"]}
        for truth in truths
    ]


ENTRY = Entry(
    name="mpdp-table2",
    paper="MP-DP",
    what=f"Table 2: reconstruction by the server, with {PHI} left out and read, beside lossless and veil-secagg "
    "(--full: more networks, larger batches)",
    takes="fifteen minutes on a GPU",
    takes_quick="two minutes",
    needs="cifar10 (--quick: nothing), and the package cryptography",
    cells=_cells,
    report=report,
    work=_work,
    pictures=sheet_rows,
)
