"""What a model is worth on samples nobody trained on, as its field judges it, beside what no model at all would get.

The baseline is the best constant answer: the most frequent class, or the mean, of the very samples that are judged. No
run can hide behind a baseline that is easier than that, and nobody has to know the clients' training data for it. A run
beats it if the 95 % interval of its accuracy (R² for a regression) lies wholly above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import DataError
from fedveil.plain import made
from fedveil.runs.intervals import (
    Array,
    Bits,
    Codes,
    Figures,
    Measured,
    mean_of_shares,
    missing,
    recoded,
    share_of,
    wilson,
)
from fedveil.runs.metrics import (
    BINS,
    KINDS,
    auroc,
    class_columns,
    class_figures,
    counted,
    error_columns,
    error_figures,
    label_columns,
    label_figures,
    ranked,
    total,
)

TITLES = {name: kind.title for name, kind in KINDS.items()}
_MOST_PARTS = 50
_MOST_CLASSES = 50  # of a confusion matrix, or more is stored than anybody reads
IMBALANCED = 0.6
_UNDEFINED = {
    "kappa": "all samples and all answers are of one class",
    "f1": "no sample is of that class, and none was called so",
    "r2": "the targets do not vary",
    "balanced_accuracy": "every label has the same answer throughout",
}
_TOO_LARGE = "the outputs, or the targets, are too large to be squared"


@dataclass(frozen=True)
class Subset:
    """The figures of one class, or of the samples of one site."""

    name: str
    samples: int
    figures: Figures


@dataclass(frozen=True)
class Bin:
    """Answers of about the same confidence, and how many of them are right."""

    samples: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Judgement:
    """Every figure of a model, with its interval and baseline; by class and by part of the samples where known.

    `figures` go by the names of `TITLES`. `baseline` is the constant answer: a class's name, empty for the mean.
    """

    task: str
    samples: int
    figures: Figures
    baseline: str = ""
    positive: str = ""
    """The class that F1 and average precision are of, where there are two."""
    probabilities: str = ""
    clusters: int | None = None
    constant: bool = False
    """Whether every sample got the same answer."""
    classes: tuple[Subset, ...] = ()
    parts: tuple[Subset, ...] = ()
    parted_by: str = ""
    """What those are: "site" or "group"."""
    confusion: tuple[tuple[int, ...], ...] = ()
    """By true class, then by answer."""
    reliability: tuple[Bin, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def primary(self) -> str:
        """The figure that decides whether the baseline is beaten."""
        return "r2" if self.task == "regression" else "accuracy"

    @property
    def beats_baseline(self) -> bool | None:
        """Whether it does; None where that figure is not defined."""
        return beats(self.primary, self.figures[self.primary])

    @property
    def constant_answer(self) -> str:
        """The baseline in a few words."""
        return {"regression": "always the mean", "multilabel": "each label as most"}.get(
            self.task, f"always {self.baseline}"
        )

    @property
    def verdict(self) -> str:
        """How the model stands to the baseline, in a sentence or two."""
        return _verdict(self)

    @property
    def imbalanced(self) -> bool:
        """Whether there are two classes, and one has 60 % of the samples or more."""
        share = self.figures["accuracy"].baseline if self.positive else None
        return share is not None and share >= IMBALANCED

    def title(self, name: str) -> str:
        """A figure's name, with what it is of where that is not plain."""
        if self.positive and name in ("average_precision", "f1"):
            return f"{TITLES[name]} ({self.positive})"
        if not self.positive and name in ("auroc", "average_precision", "f1"):
            return f"{TITLES[name]} (mean of {'labels' if self.task == 'multilabel' else 'classes'})"
        return TITLES[name]

    def as_data(self) -> dict[str, Any]:
        """As summary.json has it."""
        data = {name: _bare(value) for name, value in dataclasses.asdict(self).items() if value not in ("", None, ())}
        return {**data, "beats_baseline": self.beats_baseline, "verdict": self.verdict}


def judgement_from(data: object, *, where: str) -> Judgement:
    """A judgement from plain data; what follows from its figures is not taken from there."""
    if isinstance(data, Mapping):
        data = {name: value for name, value in data.items() if name not in ("beats_baseline", "verdict")}
    return made(Judgement, data, where=f"{where}: what is judged")


def _bare(value: Any) -> Any:
    """Plain data without what is not there."""
    if isinstance(value, Mapping):
        return {k: _bare(v) for k, v in value.items() if v not in ("", None) or k == "value"}
    return [_bare(item) for item in value] if isinstance(value, tuple) else value


def beats(name: str, figure: Measured) -> bool | None:
    """Whether a figure's whole interval is on the better side of its baseline."""
    if figure.value is None or figure.baseline is None:
        return None
    if figure.low is None or figure.high is None:  # too few samples to tell
        return False
    return figure.low > figure.baseline if KINDS[name].higher_is_better else figure.high < figure.baseline


def shown(name: str, value: float | None) -> str:
    """A figure the way people read it."""
    if value is None:
        return "–"
    if KINDS[name].share:
        return f"{100 * value:.1f} %"
    return f"{value:.4g}" if name in ("mae", "rmse", "mse") else f"{round(value, 3) + 0.0:.3f}"


def bracket(name: str, figure: Measured) -> str:
    """Its interval: [93.2–97.5]."""
    if figure.low is None or figure.high is None:
        return ""
    low, high = (shown(name, end).removesuffix(" %") for end in (figure.low, figure.high))
    return f"[{low} to {high}]" if "-" in low + high else f"[{low}–{high}]"


def told(name: str, figure: Measured) -> str:
    """A figure with its interval."""
    return " ".join(part for part in (shown(name, figure.value), bracket(name, figure)) if part)


def _verdict(judged: Judgement) -> str:
    name, figure = judged.primary, judged.figures[judged.primary]
    if figure.value is None or figure.baseline is None:
        return f"Whether the model beats a constant answer cannot be told: {figure.reason}."
    against = f"{_constant(judged)} ({shown(name, figure.baseline)})"
    ours = f"{TITLES[name]} {told(name, figure)}"
    above = figure.value > figure.baseline
    if judged.beats_baseline:
        return f"The model beats {against}: {ours}."
    if _worse(judged):
        said = f"The model is worse than {against}: {ours}."
    elif above and figure.low is None:
        said = f"The model is not shown to beat {against}: {ours}, with {figure.reason}."
    elif above:
        said = f"The model is not shown to beat {against}: {ours} reaches down to it."
    else:
        said = f"The model does not beat {against}: {ours}."
    if judged.constant:
        said += " It gives every sample the same answer."
    ranking = judged.figures.get("auroc")
    if ranking is None or ranking.value is None:
        return said
    if not beats("auroc", ranking):
        ranks = "is not shown to rank samples better" if ranking.value > 0.5 else "ranks samples no better"
        return f"{said} It {ranks} than chance either (AUROC {told('auroc', ranking)})."
    fails = "" if above else ": what fails is the threshold, or the balance of classes"
    return f"{said} It does rank samples better than chance (AUROC {told('auroc', ranking)}){fails}."


def _worse(judged: Judgement) -> bool:
    """Whether a constant answer is shown to be better: its share of right answers is known from the same few samples,
    and has an interval too."""
    figure, count = judged.figures[judged.primary], judged.clusters or judged.samples
    if figure.high is None or figure.baseline is None:
        return False
    share = judged.primary == "accuracy"
    return figure.high < (wilson(figure.baseline * count, count)[0] if share else figure.baseline)


def _constant(judged: Judgement) -> str:
    if judged.task == "regression":
        return "always answering the mean"
    if judged.task == "multilabel":
        return "always giving each label its more frequent answer"
    return f"always answering {judged.baseline!r}"


def probabilities(
    outputs: Tensor, *, task: str, loss: str | None, target_scale: float = 1.0, true_weight: float = 1.0
) -> tuple[Tensor, str]:
    """The probabilities that outputs stand for, by the loss they were trained with, and how they were had.

    Under the square loss an output is an estimate of M·k·p/(k·p + 1 − p), with p the class's probability,
    M = `target_scale` and k = `true_weight` (of M·p where k = 1): that is solved for p, cut to 0 … 1, and for classes
    divided by its sum. Under any other loss outputs are taken for logits.
    """
    outputs = outputs.detach().double().cpu()
    if loss != "square":
        if task == "multilabel":
            return outputs.sigmoid(), "sigmoid of the outputs"
        return outputs.softmax(1), "softmax of the outputs"
    cut = (outputs / target_scale).clamp(0.0, 1.0)
    solved = cut / (true_weight * (1 - cut) + cut)
    if task == "multilabel":
        return solved, "outputs (square loss) cut to 0 … 1"
    whole = solved.sum(1, keepdim=True)
    even = torch.full_like(solved, 1.0 / solved.shape[1])
    return torch.where(whole > 0, solved / whole, even), "outputs (square loss) cut to 0 … 1, divided by their sum"


class JudgedSamples(Protocol):
    """What is judged: a `Dataset`, or anything else that knows its targets and its task.

    Targets are class numbers, a row of numbers a sample (regression), or a row of zeros and ones (multilabel).
    """

    @property
    def task(self) -> str:
        """classification, multilabel or regression."""

    @property
    def y(self) -> Tensor:
        """The targets."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of classes, where they have names."""

    @property
    def groups(self) -> Tensor | None:
        """Which samples belong together (one patient's), where that is known."""

    @property
    def sites(self) -> Tensor | None:
        """Where each sample is from, where that is known."""

    @property
    def site_names(self) -> tuple[str, ...]:
        """The names behind the numbers of sites, where they have any."""

    @property
    def group_names(self) -> tuple[str, ...]:
        """Those behind the numbers of groups."""


def judge(
    outputs: Tensor,
    data: JudgedSamples,
    *,
    loss: str | None = None,
    target_scale: float = 1.0,
    true_weight: float = 1.0,
) -> Judgement:
    """Judge a model's outputs on samples whose targets are known.

    Args:
        outputs: The model's, a row a sample.
        data: The samples; those of each site, or of each group where there are no sites, are judged by themselves too.
        loss: What the model was trained with, which says what outputs mean ("square": scores; otherwise: logits).
        target_scale: That of the square loss.
        true_weight: That of the square loss.

    Raises:
        DataError: There are no samples, or not as many outputs as samples.
    """
    if not len(data.y):
        raise DataError("There is nothing to judge a model by: the samples are none. Give at least one.")
    if len(outputs) != len(data.y):
        raise DataError(f"{len(outputs)} outputs for {len(data.y)} samples: give one row for each.")
    names = data.labels or tuple(str(number) for number in range(outputs.shape[1]))
    clusters = None if data.groups is None else recoded(data.groups.cpu().numpy())
    finite = torch.isfinite(outputs).flatten(1).all(1)
    if not bool(finite.all()):
        return _without_figures(data, int((~finite).sum()))
    chances, how = (
        (outputs.detach().double().cpu(), "")
        if data.task == "regression"
        else probabilities(outputs, task=data.task, loss=loss, target_scale=target_scale, true_weight=true_weight)
    )
    samples = _Arrays(
        task=data.task,
        truth=data.y.detach().cpu().numpy(),
        chances=chances.numpy(),
        scores=_scores(outputs.detach().double().cpu(), data.task, loss),
        clusters=clusters,
        names=names,
    )
    judged = samples.judged()
    places = data.groups if data.sites is None else data.sites
    names = data.group_names if data.sites is None else data.site_names
    if data.sites is None:  # a group by itself: its samples are all there is
        samples = dataclasses.replace(samples, clusters=None)
    parts = () if places is None else _parts(samples, places.cpu().numpy(), names)
    return dataclasses.replace(
        judged,
        probabilities=how,
        clusters=None if clusters is None else int(clusters.max()) + 1,
        parts=parts,
        parted_by="" if not parts else "group" if data.sites is None else "site",
    )


def quick_figures(outputs: Tensor, data: JudgedSamples, loss: str | None = None) -> dict[str, float]:
    """The figures that cost next to nothing, for every evaluated round; what is not defined is left out.

    The mean AUROC of many classes, whose samples are sorted once for each, is none of them.
    """
    if not bool(torch.isfinite(outputs).all()):
        return {}
    given, truth = outputs.detach().double().cpu(), data.y.detach().cpu().numpy()
    wanted: tuple[str, ...]
    if data.task == "regression":
        with np.errstate(over="ignore", invalid="ignore"):
            figures = error_figures(total(error_columns(truth.astype(np.float64), given.numpy())))
        wanted = ("mae", "r2")
    elif data.task == "multilabel":
        decided = given.numpy() >= (0.5 if loss == "square" else 0.0)
        figures = label_figures(total(label_columns(truth > 0.5, decided, np.ones(decided.shape))))
        wanted = ("balanced_accuracy", "f1")
    else:
        answer, classes = given.argmax(1).numpy(), given.shape[1]
        figures = class_figures(total(class_columns(truth, answer, np.ones(len(truth)), classes=classes)))
        wanted = ("balanced_accuracy", "f1")
        if classes == 2 and 0 < int(truth.sum()) < len(truth):
            figures["auroc"] = np.array([auroc(truth == 1, (given[:, 1] - given[:, 0]).numpy())[0]])
            wanted = (*wanted, "auroc")
    return {name: float(figures[name][0]) for name in wanted if np.isfinite(figures[name][0])}


def _without_figures(data: JudgedSamples, count: int) -> Judgement:
    primary = "r2" if data.task == "regression" else "accuracy"
    why = f"the model's outputs are not numbers for {count} of {len(data.y)} samples"
    return Judgement(data.task, len(data.y), {primary: missing(why)})


def _scores(outputs: Tensor, task: str, loss: str | None) -> Array:
    """What samples are ranked by: for two classes the difference, for more the logarithm of the probability, which
    never rounds to equal, or the score itself under the square loss."""
    if task == "classification" and outputs.shape[1] == 2:
        margin = outputs[:, 1] - outputs[:, 0]
        outputs = torch.stack([-margin, margin], 1)
    elif task == "classification" and loss != "square":
        outputs = outputs.log_softmax(1)
    scores: Array = outputs.numpy()
    return scores


def _parts(samples: _Arrays, places: Codes, names: Sequence[str]) -> tuple[Subset, ...]:
    """Figures of each site or group, where they are few enough to be read."""
    codes = np.unique(places)
    if not 2 <= len(codes) <= _MOST_PARTS:
        return ()
    made = []
    for code in codes.tolist():
        own = samples.at(places == code).judged()
        made.append(Subset(names[code] if 0 <= code < len(names) else str(code), own.samples, own.figures))
    return tuple(made)


@dataclass(frozen=True, eq=False)
class _Arrays:
    """Truths and answers as arrays; `truth` is class numbers, or a row of zeros and ones or of numbers a sample."""

    task: str
    truth: Any
    chances: Array
    scores: Array
    clusters: Codes | None
    names: Sequence[str]

    def at(self, rows: Bits) -> _Arrays:
        """Some of them."""
        clusters = None if self.clusters is None else recoded(self.clusters[rows])
        return dataclasses.replace(
            self, truth=self.truth[rows], chances=self.chances[rows], scores=self.scores[rows], clusters=clusters
        )

    def judged(self) -> Judgement:
        """Every figure."""
        if self.task == "regression":
            return self._regression()
        return self._labels() if self.task == "multilabel" else self._classes()

    def _classes(self) -> Judgement:
        truth, classes = self.truth.astype(np.int64), self.chances.shape[1]
        # Answers are those of the outputs: probabilities that were cut may be equal where outputs are not.
        answer = self.scores.argmax(1)
        confidence = self.chances[np.arange(len(truth)), answer]
        hits = truth == answer
        counts = np.bincount(truth, minlength=classes)
        most = int(counts.argmax())
        share = counts[most] / len(truth)
        columns = class_columns(truth, answer, confidence, classes=classes)
        alone = class_columns(truth, np.full_like(truth, most), np.full(len(truth), share), classes=classes)
        made = counted(columns, class_figures, constant=alone, clusters=self.clusters, undefined=_UNDEFINED)
        members = truth[:, None] == np.arange(classes)
        there = members[:, counts > 0]
        (ranking, aurocs), (precision, precisions) = (
            ranked(members, self.scores, self.clusters, kind=kind) for kind in ("auroc", "average_precision")
        )
        if classes == 2:
            ranking, precision = (
                dataclasses.replace(each[1], reason=mean.reason or each[1].reason)
                for mean, each in ((ranking, aurocs), (precision, precisions))
            )
        accuracy = dataclasses.replace(share_of(hits, self.clusters), baseline=float(share))
        figures = {
            "accuracy": accuracy,
            "balanced_accuracy": self._mean(there & hits[:, None], there, made["balanced_accuracy"][0]),
            "auroc": ranking,
            "average_precision": precision,
            "f1": made["f1"][0],
            "kappa": made["kappa"][0],
            "ece": made["ece"][0],
        }
        answered = [answer == number for number in range(classes)]
        each = tuple(
            Subset(
                self.names[number],
                int(counts[number]),
                {
                    "recall": self._share(hits, members[:, number], "no sample is of this class"),
                    "precision": self._share(hits, answered[number], "no sample was called this class"),
                    "f1": made["each f1"][number],
                    "auroc": aurocs[number],
                    "average_precision": precisions[number],
                },
            )
            for number in range(classes)
        )
        table = np.bincount(truth * classes + answer, minlength=classes * classes).reshape(classes, classes)
        absent = [name for name, count in zip(self.names, counts, strict=True) if not count]
        notes = [f"No sample is of {_listed(absent)}: means are over the other classes."] if absent else []
        return Judgement(
            self.task,
            len(truth),
            figures,
            baseline=self.names[most],
            positive=self.names[1] if classes == 2 else "",
            constant=len(np.unique(answer)) == 1,
            classes=each,
            confusion=tuple(tuple(row) for row in table.tolist()) if classes <= _MOST_CLASSES else (),
            reliability=_reliability(confidence, hits),
            notes=tuple(notes),
        )

    def _share(self, hits: Bits, among: Bits, reason: str) -> Measured:
        if not among.any():
            return missing(reason)
        return share_of(hits[among], None if self.clusters is None else recoded(self.clusters[among]))

    def _mean(self, hits: Bits, members: Bits, like: Measured) -> Measured:
        """A figure that is the mean of shares, with the interval that belongs to such a mean."""
        if like.value is None:
            return like
        return dataclasses.replace(mean_of_shares(hits, members, self.clusters), baseline=like.baseline)

    def _labels(self) -> Judgement:
        truth, answer = self.truth > 0.5, self.chances >= 0.5
        shares = np.broadcast_to(truth.mean(0), truth.shape)
        confidence = np.where(answer, self.chances, 1 - self.chances)
        made = counted(
            label_columns(truth, answer, confidence),
            label_figures,
            constant=label_columns(truth, shares >= 0.5, np.maximum(shares, 1 - shares)),
            clusters=self.clusters,
            undefined=_UNDEFINED,
        )
        (ranking, aurocs), (precision, precisions) = (
            ranked(truth, self.scores, self.clusters, kind=kind) for kind in ("auroc", "average_precision")
        )
        right = truth == answer
        whole = dataclasses.replace(
            share_of(right.all(1), self.clusters),
            baseline=float((truth == (shares >= 0.5)).all(1).mean()),
        )
        varied = truth.any(0) & ~truth.all(0)
        both = np.hstack([truth[:, varied], ~truth[:, varied]])
        each = tuple(
            Subset(
                self.names[number],
                int(truth[:, number].sum()),
                {
                    "accuracy": dataclasses.replace(
                        share_of(right[:, number], self.clusters),
                        baseline=float(max(truth[:, number].mean(), 1 - truth[:, number].mean())),
                    ),
                    "f1": made["each f1"][number],
                    "auroc": aurocs[number],
                    "average_precision": precisions[number],
                },
            )
            for number in range(truth.shape[1])
        )
        return Judgement(
            self.task,
            len(truth),
            {
                "accuracy": self._mean(right, np.ones_like(truth), made["accuracy"][0]),
                "exact_match": whole,
                "balanced_accuracy": self._mean(
                    np.hstack([right[:, varied]] * 2) & both, both, made["balanced_accuracy"][0]
                ),
                "auroc": ranking,
                "average_precision": precision,
                "f1": made["f1"][0],
                "ece": made["ece"][0],
            },
            constant=bool((answer == answer[:1]).all()),
            classes=each,
            reliability=_reliability(confidence.ravel(), right.ravel()),
        )

    def _regression(self) -> Judgement:
        truth = self.truth.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            columns = error_columns(truth, self.chances)
            huge = not np.isfinite(total(columns)).all()
            made = counted(
                columns,
                error_figures,
                constant=error_columns(truth, np.broadcast_to(truth.mean(0), truth.shape)),
                clusters=self.clusters,
                undefined=dict.fromkeys(("mae", "rmse", "mse", "r2"), _TOO_LARGE) if huge else _UNDEFINED,
            )
        constant = bool((self.chances == self.chances[:1]).all())
        return Judgement(self.task, len(truth), {name: figures[0] for name, figures in made.items()}, constant=constant)


def _reliability(confidence: Array, hits: Bits) -> tuple[Bin, ...]:
    """Answers in fifteen bins of equal width, by confidence; empty ones are left out."""
    places = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    return tuple(
        Bin(int(here.sum()), float(confidence[here].mean()), float(hits[here].mean()))
        for number in range(BINS)
        if (here := places == number).any()
    )


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
