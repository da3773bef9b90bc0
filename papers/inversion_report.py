"""Table IV of accuracy-lossless perturbation beside ours, and which of its claims hold against whom."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedveil.trials.trial import Score
from papers.attacking import REFERENCES, from_text
from papers.cells import Figures, Results
from papers.inversion_rows import (
    ADAPTIVE,
    ALL,
    AS_IS,
    ATTACK,
    CONTROL,
    FEDAVG,
    JUDGE,
    LOSSLESS,
    OTHERS,
    OWN,
    PRINTED,
    PRIORS,
    Bench,
    benches,
    figures_of,
    number,
    success,
    verdict,
)
from papers.report import EMPTY, Check, Report

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
