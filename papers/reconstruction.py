"""MP-DP's Table 2: how large ours is, what the paper prints, and how figures are found again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fedveil.audit.attacks.gradients import client_gradient
from fedveil.audit.findings import Found, Score, Truth, Verdict, judged
from fedveil.audit.measures import Labels, Likeness
from fedveil.audit.record import server_view
from fedveil.audit.subject import Effort, Subject, enacted
from fedveil.audit.trials import uploads_of
from fedveil.audit.views import ServerView
from fedveil.engine import ClientPool
from fedveil.runs.job import Job
from fedveil.work.batches import mixed_seed
from fedveil.work.messages import ClientData
from papers.attacking import (
    REFERENCES,
    Scale,
    Tried,
    as_text,
    from_text,
    interval,
    judge_of,
    proven,
    reference_figures,
    scale_of,
    short,
    side_by_side,
    tried,
)
from papers.cells import EMPTY, Cell, Check, Figures, Report, Results
from papers.stage import Entry, OnRound, Stage

PHI = "Φ"
SCHEMES = ("fedavg", "mp-cdp", "mpdp", "lossless", "veil-secagg")
NAMES = {"fedavg": "FedAvg", "mp-cdp": "MP-CDP", "mpdp": "MP-DP", "lossless": "lossless", "veil-secagg": "veil-secagg"}
PRINTED: dict[str, tuple[float, float, float]] = {
    "fedavg": (13.56, 0.80, 0.15),
    "PILE": (13.68, 0.78, 0.14),
    "TP-SMC": (10.39, 1.54, 1.29),
    "HybridAlpha": (10.21, 1.53, 1.91),
    "mp-cdp": (12.15, 0.91, 0.51),
    "mpdp": (9.22, 2.00, 4.13),
}
"""PSNR, Test-MSE and Feat-MSE on CIFAR-10 at ε = 3."""

BLIND, NOISE = "mean picture", "random picture"
ADAPTIVE = "phi"


@dataclass(frozen=True)
class Place:
    """A data set, a network, a batch size, and the attacks that are tried there."""

    data: str
    model: str
    batch: int
    attacks: tuple[str, ...]
    usual: bool = True

    @property
    def name(self) -> str:
        """As cells begin."""
        return f"{self.data}/{self.model}/b{self.batch}"

    @property
    def matching(self) -> tuple[str, ...]:
        """The attacks that read the gradient itself, as the paper's does."""
        return tuple(one for one in self.attacks if one != ADAPTIVE)

    def cell(self, scheme: str) -> str:
        """A cell's name."""
        return f"{self.name}/{scheme}"


@dataclass(frozen=True)
class Form:
    """The size of a run of the table; `hasty` are the attacks that get the small budget even in the full form."""

    places: tuple[Place, ...]
    clients: int
    quick: bool
    hasty: tuple[str, ...] = ()

    @property
    def attacks(self) -> tuple[str, ...]:
        """Every attack that is tried anywhere."""
        return tuple(dict.fromkeys(one for place in self.places for one in place.attacks))


FULL = Form(
    (
        Place("cifar10", "lenet-sigmoid", 1, ("idlg", "inverting", "generative", ADAPTIVE)),
        Place("cifar10", "mlp", 1, ("closed-form", ADAPTIVE)),
        Place("cifar10", "cnn", 1, ("inverting", "generative", ADAPTIVE), usual=False),
        *(Place("cifar10", "lenet-sigmoid", size, ("idlg", "inverting", ADAPTIVE), usual=False) for size in (2, 4, 8)),
        Place("cifar10", "mlp", 8, ("closed-form", ADAPTIVE), usual=False),
    ),
    clients=8,
    quick=False,
    hasty=("idlg", "inverting", "generative"),
)
QUICK = Form(
    (
        Place("digits", "lenet-sigmoid", 1, ("idlg", ADAPTIVE)),
        Place("digits", "mlp", 1, ("closed-form", ADAPTIVE)),
    ),
    clients=4,
    quick=True,
)


def form_of(quick: bool) -> Form:
    """The size of a run."""
    return QUICK if quick else FULL


def figures_of(results: Results, place: Place, scheme: str) -> list[Figures]:
    """The figures of a cell, one for each seed."""
    return list(results.get(place.cell(scheme), {}).values())


def listed(results: Results, place: Place, scheme: str, what: str) -> list[float]:
    """One figure for every victim of every seed."""
    found: list[float] = []
    for figures in figures_of(results, place, scheme):
        value = figures.get(what, [])
        found += [float(one) for one in value] if isinstance(value, list) else []
    return found


def score(results: Results, place: Place, scheme: str, attack: str, what: str = "psnr") -> Score | None:
    """A figure's mean over victims, with its interval."""
    return interval(listed(results, place, scheme, f"{attack} {what}"))


def best(results: Results, place: Place, scheme: str, attacks: tuple[str, ...]) -> str | None:
    """The attack with the highest mean PSNR."""
    found = {name: score(results, place, scheme, name) for name in attacks}
    there = {name: one.value for name, one in found.items() if one is not None}
    return max(there, key=lambda name: there[name]) if there else None


def reference_of(results: Results) -> Figures:
    """How attacks did on their references."""
    for figures in results.get(REFERENCES, {}).values():
        return figures
    return {}


def verdict(results: Results, place: Place, scheme: str, attack: str) -> Verdict | None:
    """What an attack's figure means beside the mean picture's and the same attack's without protection.

    Φ does not exist without protection: beside it stands the best of the others, or what it gets itself if more.
    """
    ours, blind = score(results, place, scheme, attack), score(results, place, scheme, BLIND)
    bare_attack = best(results, place, "fedavg", place.matching) if attack == ADAPTIVE else attack
    bare = None if bare_attack is None else score(results, place, "fedavg", bare_attack)
    if ours is None or blind is None or bare is None:
        return None
    if attack == ADAPTIVE and ours.value > bare.value:
        bare = ours
    if not proven(reference_of(results), attack):
        return "not effective" if proven(reference_of(results), attack) is False else None
    return judged(Likeness(peak=1.0, chance=blind.value, random=blind.value), ours, bare)[0]


MARGIN = 3.0
"""Decibels above the mean picture below which nothing was reconstructed."""

EXACT = 40.0
"""Decibels at which no eye tells a reconstruction from the original."""

_NOT_BUILT = ("PILE", "TP-SMC", "HybridAlpha")


def report(results: Results, quick: bool) -> Report:
    """The table and its verdict."""
    form = form_of(quick)
    return Report(
        title=f"MP-DP, Table 2: reconstruction by the server from one upload{' (quick form)' if quick else ''}",
        columns=(
            *("data", "network", "batch", "scheme", "paper: PSNR, Test-MSE, Feat-MSE", "noise / gradient"),
            *("gradient attacks here: PSNR (dB) [95 %]", f"adaptive here ({PHI}): PSNR (dB) [95 %]"),
            *("best here: Test-MSE, features, labels told", "mean picture", "random picture", "no protection"),
        ),
        rows=tuple(_rows(results, form)),
        checks=tuple(_checks(results, form)),
        notes=tuple(_notes(results, form)),
        quick=quick,
    )


def _rows(results: Results, form: Form) -> Iterator[tuple[str, ...]]:
    for number, place in enumerate(form.places):
        for scheme in SCHEMES:
            if number == 0 or figures_of(results, place, scheme):
                yield _row(results, place, scheme, main=number == 0)
        if number == 0:
            for name in _NOT_BUILT:
                yield (*_where(place), name, _printed(name), *(EMPTY,) * 3, "not built", *(EMPTY,) * 3)


def _where(place: Place) -> tuple[str, ...]:
    return place.data, place.model, str(place.batch)


def _row(results: Results, place: Place, scheme: str, *, main: bool) -> tuple[str, ...]:
    top = best(results, place, scheme, place.attacks)
    bare = best(results, place, "fedavg", place.matching)
    noise = listed(results, place, scheme, "noise")
    read = EMPTY if not noise else "unreadable" if min(noise) < 0 else f"{sum(noise) / len(noise):.2g}"
    return (
        *_where(place),
        NAMES[scheme],
        _printed(scheme) if main else EMPTY,
        read,
        "; ".join(_attack(results, place, scheme, one) for one in place.matching),
        _attack(results, place, scheme, ADAPTIVE, named=False),
        EMPTY if top is None else _beside(results, place, scheme, top),
        _level(score(results, place, scheme, BLIND)),
        _level(score(results, place, scheme, NOISE)),
        EMPTY if bare is None else f"{_level(score(results, place, 'fedavg', bare))} ({bare})",
    )


def _printed(scheme: str) -> str:
    return EMPTY if scheme not in PRINTED else ", ".join(f"{one:.2f}" for one in PRINTED[scheme])


def _attack(results: Results, place: Place, scheme: str, attack: str, *, named: bool = True) -> str:
    ours = score(results, place, scheme, attack)
    start = f"{attack} " if named else ""
    if ours is None:
        refused = any(f"{attack} reason" in one for one in figures_of(results, place, scheme))
        return f"{start}{'not applicable' if refused else EMPTY}"
    word = verdict(results, place, scheme, attack)
    told = "attack not effective here" if word == "not effective" else word
    return f"{start}{_level(ours)}" + (f" {told}" if told else "")


def _level(found: Score | None) -> str:
    if found is None:
        return EMPTY
    return f"{found.value:.1f}" + ("" if found.low is None else f" [{found.low:.1f}, {found.high:.1f}]")


def _beside(results: Results, place: Place, scheme: str, attack: str) -> str:
    parts = [score(results, place, scheme, attack, what) for what in ("mse", "features", "labels")]
    shown = [EMPTY if one is None else form.format(one.value) for one, form in zip(parts, _FORMS, strict=True)]
    return f"{', '.join(shown)} ({attack})"


_FORMS = ("{:.3g}", "{:.2g}", "{:.0%}")


def _checks(results: Results, form: Form) -> Iterator[Check]:
    main = form.places[0]
    yield _gradient_hidden(results, main)
    yield _cdp_hides(results, main)
    for place in form.places:
        if place.batch == 1 and (place is main or figures_of(results, place, "mpdp")):
            yield _gives_away(results, place)
    yield _adaptive_hidden(results, main)
    yield _as_plain(results, main)
    yield _veiled(results, form)


def _effective(results: Results, place: Place) -> str | None:
    """The best attack without protection, if it gets anywhere there."""
    attack = best(results, place, "fedavg", place.matching)
    works = attack is not None and verdict(results, place, "fedavg", attack) == "as if unprotected"
    return attack if works else None


def _gradient_hidden(results: Results, place: Place) -> Check:
    claim = f"{place.name}: MP-DP's noise keeps attacks on the gradient from reconstructing (the paper's claim)"
    return _nothing(results, place, "mpdp", place.matching, claim)


def _nothing(results: Results, place: Place, scheme: str, attacks: tuple[str, ...], claim: str) -> Check:
    """Whether every attack stays within the margin of the mean picture; open where none works without protection."""
    found = {one: score(results, place, scheme, one) for one in attacks}
    blind = score(results, place, scheme, BLIND)
    there = {name: one for name, one in found.items() if one is not None}
    seen = ", ".join(f"{name}: {_level(one)}" for name, one in there.items())
    if not there or blind is None:
        return Check(claim, None, seen)
    seen = f"{seen}; mean picture {blind.value:.1f} dB"
    beyond = any(one.surely > blind.value + MARGIN for one in there.values())
    if not beyond and _effective(results, place) is None:
        return Check(claim, None, f"{seen}; attack not effective here even without protection")
    return Check(claim, not beyond, seen)


def _cdp_hides(results: Results, place: Place) -> Check:
    claim = f"{place.name}: MP-CDP hides uploads from the server better than FedAvg (12.15 against 13.56 dB printed)"
    attack = _effective(results, place)
    noise = listed(results, place, "mp-cdp", "noise")
    if not noise or attack is None:
        return Check(claim, None)
    ours, bare = (score(results, place, one, attack) for one in ("mp-cdp", "fedavg"))
    if ours is None or bare is None or bare.low is None:
        return Check(claim, None)
    seen = f"{attack}: {_level(ours)} against {_level(bare)}; the gradients differ by {max(noise):.1g} of their length"
    return Check(claim, ours.value < bare.low, seen)


def _gives_away(results: Results, place: Place) -> Check:
    claim = f"{place.name}: {PHI}, which travels bare, gives a batch of one away whatever noise covers the gradient"
    ours = score(results, place, "mpdp", ADAPTIVE)
    told = interval(listed(results, place, "mpdp", f"{ADAPTIVE} labels"))
    if ours is None or not proven(reference_of(results), ADAPTIVE):
        return Check(claim, None)
    worst = min(listed(results, place, "mpdp", f"{ADAPTIVE} psnr"))
    seen = f"PSNR {_level(ours)} dB, worst {worst:.1f}" + ("" if told is None else f", labels told {told.value:.0%}")
    blind = score(results, place, "mpdp", BLIND)
    assert blind is not None
    exact = " (indistinguishable)" if worst > EXACT else ""
    return Check(claim, ours.surely > max(20.0, blind.value + MARGIN), seen + exact)


def _adaptive_hidden(results: Results, place: Place) -> Check:
    claim = f"{place.name}: MP-DP keeps the server from reconstructing, {PHI} included"
    ours, blind = (score(results, place, "mpdp", one) for one in (ADAPTIVE, BLIND))
    if ours is None or blind is None or not proven(reference_of(results), ADAPTIVE):
        return Check(claim, None)
    return Check(
        claim, ours.surely <= blind.value + MARGIN, f"{_level(ours)} dB; the mean picture has {blind.value:.1f}"
    )


def _as_plain(results: Results, place: Place) -> Check:
    claim = f"{place.name}: lossless hides nothing from the server (ours: it protects the model, not uploads)"
    noise = listed(results, place, "lossless", "noise")
    if not noise:
        return Check(claim, None)
    return Check(claim, max(noise) < 1e-2, f"its gradient is FedAvg's up to {max(noise):.1g} of its length")


def _veiled(results: Results, form: Form) -> Check:
    claim = "veil-secagg leaves every attack at what one gets who saw nothing (mean picture + 3 dB)"
    there = [place for place in form.places if figures_of(results, place, "veil-secagg")]
    parts = {place.name: _nothing(results, place, "veil-secagg", place.attacks, claim) for place in there}
    seen = "; ".join(f"{name}: {part.seen}" for name, part in parts.items())
    if any(part.held is False for part in parts.values()):
        return Check(claim, False, seen)
    main = parts.get(form.places[0].name)
    return Check(claim, None if main is None else main.held, seen)


def _notes(results: Results, form: Form) -> Iterator[str]:
    if form.quick:
        yield "Quick form: handwritten digits of 8 × 8 beside the paper's figures for CIFAR-10. It shows directions."
    yield (
        f"The first round of a recorded run, {form.clients} clients, each a victim with its whole batch; ε = 3 of one "
        "round, δ = 1e-5, S = 1 assumed. Intervals are bootstraps over victims. The paper attacks ResNet-20 with a "
        "generative attack; here the sigmoid LeNet, on which attacks are known to work, is the main row: an attack "
        "that fails proves nothing. No veil fits a sigmoid, so that on it only the last layer is veiled; the noise on "
        "uploads is MP-DP's in full. mlp and cnn are veiled whole. All train on the square loss, for which the head "
        "noise is exact."
    )
    yield (
        "Units: pictures lie between 0 and 1, for on standardised ones the sigmoids saturate and attacks lose their "
        "signal. Test-MSE is given for standardised pictures, whose values span 4.1, as the paper's is: 10·log₁₀(4.1²/"
        "2.00) = 9.2, its PSNR. On CIFAR-10 one who answers with the mean picture gets about 13.0 dB, with uniform "
        "noise about 8.5: the paper's 13.56 dB without protection is half a decibel above the mean picture, and its "
        "MP-CDP (12.15) below it. Its figures compare attacks that hardly worked. Feature distances are over that of "
        "two different pictures in a classifier of our own, not the paper's scale."
    )
    yield (
        "The class of a batch of one is read off the last layer's gradient before matching; with larger batches "
        "classes are granted to attacks, an upper bound. `generative` has a prior from half of the held-out part, of "
        "all classes. 'noise / gradient' is ‖ĝ − g‖/‖g‖ of what the server reads from the upload."
    )
    yield (
        "MP-CDP's noise is added by the server to the sum, so that uploads reach it bare: it is no protection from the "
        "server. PILE, TP-SMC and HybridAlpha are not built; their figures are the paper's. CIFAR-100 is left out."
    )
    reached = reference_of(results)
    told = [
        f"{one} {float(value):.0f} dB of {reached[f'{one} asked']:g} asked"
        for one in form.attacks
        if isinstance(value := reached.get(f"{one} reference"), int | float)
    ]
    if told:
        yield f"References (unprotected digits): {', '.join(told)}."
    for place in form.places:
        for scheme in SCHEMES:
            for figures in figures_of(results, place, scheme):
                yield from (
                    f"{place.cell(scheme)}, {attack}: {figures[f'{attack} reason']}"
                    for attack in place.attacks
                    if f"{attack} reason" in figures and scheme != "fedavg"
                )


def sheet_rows(results: Results, quick: bool) -> list[tuple[str, Tensor]]:
    """Originals, then for every scheme what the best attack on the gradient made of them, and what Φ gave away."""
    found = []
    for place in form_of(quick).places[:2]:
        for scheme in SCHEMES:
            for figures in figures_of(results, place, scheme)[:1]:
                if scheme == SCHEMES[0] and (originals := from_text(figures, "originals")) is not None:
                    found.append((f"{place.name} originals", originals))
                both = (best(results, place, scheme, place.matching), ADAPTIVE)
                found += [
                    (f"{place.cell(scheme)} {attack}", made)
                    for attack in both
                    if (made := from_text(figures, f"{attack} pictures")) is not None
                ]
    return found


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
