"""Table IV of accuracy-lossless perturbation: how large ours is, what the paper prints, how figures are found again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedveil.trials.measures import Classes
from fedveil.trials.trial import Score, Verdict, judged
from papers.attacking import REFERENCES, proven
from papers.cells import Figures, Results

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
