"""NADP-FL's Table 4: how large ours is, what the paper prints, and how figures are found again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from papers.cells import Figures, Results

FEDAVG, LDP, BOTH, ROUNDS = "fedavg", "ldp", "nadp", "nadp-rounds"
ALL, SHARPEST = "nadp-all", "nadp-sharpest"
CHANCE = "chance"
TAUS = (0.9, 0.7, 0.5, 0.3, 0.1)
ATTACKS = ("dlg", "idlg")
STRONGER = "inverting"

Pair = tuple[float, float]
Printed = dict[str, Pair]


def nadp_row(tau: float) -> str:
    """A row's name."""
    return f"nadp-{tau:g}"


@dataclass(frozen=True)
class Form:
    """The size of a run of the table. `sizes` are the |D_i| put into the formula of the noise; at `fitted`, LDP's
    figure here is the one that the paper prints. `stronger` rows are attacked by Inverting Gradients too, for `few`
    victims."""

    data: tuple[str, ...]
    clients: int
    cohort: int
    clip: float
    sizes: tuple[int, ...]
    fitted: int
    taus: tuple[float, ...]
    victims: int
    rounds: int
    averaged: int
    stronger: tuple[str, ...]
    few: int

    @property
    def honest(self) -> int:
        """How many clients of a round the largest coalition of the table leaves."""
        return self.cohort - round(TAUS[0] * self.cohort)


FULL = Form(
    data=("mnist", "fashion-mnist"),
    clients=100,
    cohort=80,
    clip=30.0,
    sizes=(1, 5000),
    fitted=5000,
    taus=TAUS,
    victims=5,
    rounds=12,
    averaged=2,
    stronger=(LDP, nadp_row(0.9)),
    few=2,
)
QUICK = Form(
    data=("digits",),
    clients=40,
    cohort=32,
    clip=6.0,
    sizes=(1, 8000),
    fitted=8000,
    taus=(0.9, 0.5, 0.1),
    victims=2,
    rounds=4,
    averaged=1,
    stronger=(),
    few=0,
)


def form_of(quick: bool) -> Form:
    """The size of a run."""
    return QUICK if quick else FULL


def cell_of(data: str, size: int | None, kind: str) -> str:
    """A cell's name."""
    return f"{data}/{kind}" if size is None else f"{data}/d{size}/{kind}"


def _printed(mse: Sequence[Pair], lpips: Sequence[Pair], ssim: Sequence[Pair]) -> dict[str, Printed]:
    rows = (FEDAVG, LDP, *(nadp_row(tau) for tau in TAUS))
    return {row: {"mse": mse[place], "features": lpips[place], "ssim": ssim[place]} for place, row in enumerate(rows)}


TABLE4: dict[str, dict[str, Printed]] = {
    "mnist": _printed(
        (
            *((3.48e-4, 1.89e-4), (3.33e-3, 2.78e-3), (0.0291, 0.0251), (0.0331, 0.0265), (0.0768, 0.0536)),
            *((0.141, 0.149), (0.224, 0.212)),
        ),
        (
            *((4.81e-5, 4.63e-5), (1.55e-2, 1.23e-2), (0.0663, 0.0737), (0.0821, 0.0847), (0.105, 0.115)),
            *((0.188, 0.194), (0.355, 0.353)),
        ),
        (
            *((0.9390, 0.9439), (0.8228, 0.8186), (0.6527, 0.6840), (0.6665, 0.6841), (0.6165, 0.6488)),
            *((0.5287, 0.5201), (0.2900, 0.2922)),
        ),
    ),
    "fashion-mnist": _printed(
        (
            *((3.54e-4, 2.67e-4), (3.84e-3, 5.94e-3), (0.0171, 0.0163), (0.0756, 0.0577), (0.0468, 0.0821)),
            *((0.0718, 0.0871), (0.117, 0.105)),
        ),
        (
            *((2.41e-5, 3.24e-5), (7.56e-3, 4.05e-3), (0.0886, 0.0774), (0.0811, 0.0939), (0.0985, 0.1092)),
            *((0.179, 0.213), (0.257, 0.318)),
        ),
        (
            *((0.9875, 0.9647), (0.8817, 0.9105), (0.8444, 0.8135), (0.8220, 0.7669), (0.8164, 0.7250)),
            *((0.6842, 0.6703), (0.5994, 0.5060)),
        ),
    ),
}
"""(DLG, iDLG) by data, row and figure; "features" is the paper's LPIPS."""


def cell_of_row(data: str, size: int | None, row: str) -> str:
    """The name of the cell that fills a row."""
    if row in (FEDAVG, CHANCE):
        return cell_of(data, None, FEDAVG)
    return cell_of(data, size, row if row in (LDP, ROUNDS) else BOTH)


def figures_of(results: Results, data: str, size: int | None, row: str) -> list[Figures]:
    """The figures of the cell that fills a row, one for each seed."""
    return list(results.get(cell_of_row(data, size, row), {}).values())


def listed(results: Results, data: str, size: int | None, row: str, what: str) -> list[float]:
    """One figure for every victim of every seed."""
    found: list[float] = []
    for figures in figures_of(results, data, size, row):
        value = figures.get(f"{row} {what}", [])
        found += [float(one) for one in value] if isinstance(value, list) else []
    return found


def average(results: Results, data: str, size: int | None, row: str, what: str) -> float | None:
    """Its mean over victims."""
    values = listed(results, data, size, row, what)
    return sum(values) / len(values) if values else None


def ledger(results: Results, data: str, size: int | None, row: str, what: str = "ledger") -> float | None:
    """What the ledger says of a row."""
    for figures in figures_of(results, data, size, row):
        value = figures.get(f"{row} {what}")
        if isinstance(value, int | float):
            return float(value)
    return None


NAMES = {
    "originals": "originals",
    FEDAVG: "no DP",
    LDP: "LDP",
    ALL: "NADP, all others collude",
    SHARPEST: "NADP τ = 0.9, others' parts known",
}


def name_of(row: str) -> str:
    """A row as it is shown."""
    return NAMES.get(row, f"NADP τ = {row.removeprefix('nadp-')}")
