"""MP-DP's Table 2: how large ours is, what the paper prints, and how figures are found again."""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.trials.measures import Likeness
from fedveil.trials.trial import Score, Verdict, judged
from papers.attacking import REFERENCES, interval, proven
from papers.cells import Figures, Results

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
