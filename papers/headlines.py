"""The few numbers that stand for an entry: read off its own table, so that both always say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from papers.cells import EMPTY, Figure, Report, Results
from papers.stage import Entry

CURVE = "a curve without numbers"
OWN = "no paper: our own comparison"
_BOTH = " / "


@dataclass(frozen=True)
class Pick:
    """A place of the table: the row whose columns hold `row`, and the column with our number.

    `printed` is the column with the paper's number, or words in its place; without it the column holds "paper / ours".
    """

    what: str
    row: Mapping[str, str]
    column: str
    printed: str = ""


_FASHION = {"data": "fashion-mnist", "N": "100", "ε": "0.5"}
_SMALL_FASHION = {"data": "fashion-mnist", "N": "40", "ε": "2"}
_STRENGTH = "(|D_max|/|D_min|)²"
_SAMPLED = tuple(
    Pick(f"NADP − LDP at N = 20, q = {one}, points", {"N": "20", "q": one}, "NADP − LDP", CURVE)
    for one in ("0.1", "0.5")
)
_DROPPED = tuple(
    Pick(f"{scheme}, dropout rate {rate}", {"dropout rate": rate}, scheme, CURVE)
    for scheme in ("LDP", "NADP λ = 1.0")
    for rate in ("0.1", "0.5")
)


def _nadp_table1(row: Mapping[str, str]) -> tuple[Pick, ...]:
    where = f"N = {row['N']}, ε = {row['ε']}"
    return tuple(Pick(f"{name}, {where}, %", row, name) for name in ("LDP", "NADP", "NADP − LDP"))


def _nadp_table4(data: str, size: str) -> tuple[Pick, ...]:
    names = {"no DP": EMPTY, "LDP": size, "NADP τ = 0.9": size, "NADP τ = 0.1": size}
    return tuple(
        Pick(f"MSE of DLG, iDLG: {name}", {"data": data, "row": name, "|D_i| in σ": place}, "MSE")
        for name, place in names.items()
    )


def _mpdp_accuracy(data: str, epsilon: str, printed: Mapping[str, str]) -> tuple[Pick, ...]:
    row = {"data": data, "K": "5", "ε of a round": epsilon}
    return tuple(
        Pick(f"{name}, here {data} at ε = {epsilon} a round, %", row, name, printed.get(name, EMPTY))
        for name in ("FedAvg", "MP-CDP", "MP-DP", "MP-DP-Naive")
    )


def _mpdp_table4(data: str) -> tuple[Pick, ...]:
    plain, ours = ({"data": data, "method": one, "by": "last layer"} for one in ("FedAvg", "MP-DP"))
    quiet = {**ours, "method": "MP-DP, ε = 10000"}
    return (
        Pick("members told, FedAvg, %", plain, "as received", "success: paper"),
        Pick("members told, MP-DP as received, %", ours, "as received", "success: paper"),
        Pick("… ε = 10000, noise taken off, %", quiet, "noise taken off", EMPTY),
    )


def _lossless_table3(data: str) -> tuple[Pick, ...]:
    row, accuracy = {"data": data, "by": "last three"}, {"data": data, "by": "accuracy"}
    return (
        Pick("members told, FedAvg, %", row, "FedAvg: here", "FedAvg: paper"),
        Pick("members told, as received, %", row, "as received", "method: paper"),
        Pick("members told, noise taken off, %", row, "noise taken off", EMPTY),
        Pick("accuracy, FedAvg, %", accuracy, "FedAvg: here", "FedAvg: paper"),
        Pick("accuracy, the method, %", accuracy, "its true model", "method: paper"),
    )


def _lossless_table4(data: str) -> tuple[Pick, ...]:
    row = {"data": data, "prior knows": "classes the model does not know"}
    printed, ours = "paper: KNN, Feat, ASR", "ASR by a judge [95 %]"
    return (
        Pick("classes shown (ASR), FedAvg", {**row, "the client's model": "FedAvg"}, ours, printed),
        Pick("ASR, as received", {**row, "the client's model": "lossless, as received"}, ours, printed),
        Pick("ASR, noise taken off", {**row, "the client's model": "lossless, head noise taken off"}, ours, EMPTY),
    )


def _mpdp_table2(data: str) -> tuple[Pick, ...]:
    printed, gradient = "paper: PSNR, Test-MSE, Feat-MSE", "gradient attacks here: PSNR (dB) [95 %]"
    row = {"data": data, "network": "lenet-sigmoid", "batch": "1"}
    schemes = ("FedAvg", "MP-CDP", "MP-DP")
    return (
        *(Pick(f"reconstruction, {one}", {**row, "scheme": one}, gradient, printed) for one in schemes),
        Pick("… MP-DP by Φ", {**row, "scheme": "MP-DP"}, "adaptive here (Φ): PSNR (dB) [95 %]", EMPTY),
    )


def _paraaegis_table1(run: str) -> tuple[Pick, ...]:
    names = ("FedAvg", "DP-FedAvg", "ParaAegis 1 %", "ParaAegis 10 %")
    return tuple(Pick(f"{name}, %", {"run": run, "algorithm": name}, "accuracy, %") for name in names)


def _paraaegis_table2(data: str) -> tuple[Pick, ...]:
    names = ("max (the scheme)", "min", "random")
    return tuple(Pick(f"{name}, %", {"data": data, "strategy": name}, "accuracy, %") for name in names)


_VEIL_DP = tuple(Pick(f"{name} at ε = 3, %", {"ε": "3"}, name, OWN) for name in ("nadp", "veil-dp", "veil-dp − nadp"))
_STRENGTHS = tuple(
    Pick(f"λ at k = {k}, {tau}, ratio² {ratio}", {_STRENGTH: ratio, "k": k}, tau)
    for ratio, k, tau in (("1", "25", "τ = 0.1"), ("2", "100", "τ = 0.5"))
)
_MPDP_PRINTED = {"FedAvg": "84.60 (Table 2, ε = 3)", "MP-CDP": "84.21", "MP-DP": "83.15"}

PICKS: dict[str, tuple[tuple[Pick, ...], tuple[Pick, ...]]] = {
    "nadp-table3": (_STRENGTHS, _STRENGTHS),
    "nadp-table1": (_nadp_table1(_FASHION), _nadp_table1(_SMALL_FASHION)),
    "nadp-fig3": (_SAMPLED, _SAMPLED),
    "nadp-fig4": (_DROPPED, _DROPPED),
    "nadp-table4": (_nadp_table4("mnist", "5000"), _nadp_table4("digits", "8000")),
    "mpdp-accuracy": (_mpdp_accuracy("cifar10", "10", _MPDP_PRINTED), _mpdp_accuracy("fashion-mnist", "20", {})),
    "mpdp-table4": (_mpdp_table4("cifar10"), _mpdp_table4("digits")),
    "lossless-table3": (_lossless_table3("cifar10"), _lossless_table3("digits")),
    "mpdp-table2": (_mpdp_table2("cifar10"), _mpdp_table2("digits")),
    "lossless-table4": (_lossless_table4("cifar10"), _lossless_table4("digits")),
    "paraaegis-table1": (_paraaegis_table1("imagenette IID"), _paraaegis_table1("digits IID")),
    "paraaegis-table2": (_paraaegis_table2("imagenette"), _paraaegis_table2("digits")),
    "veil-dp-accuracy": (_VEIL_DP, _VEIL_DP),
}
"""What to show of each entry's table, in full and in the quick form."""


def report_of(entry: Entry, results: Results, *, quick: bool) -> Report:
    """An entry's report with the figures that stand for it; figures whose row is not shown are left out."""
    report = entry.report(results, quick)
    picks = PICKS[entry.name][quick] if entry.name in PICKS else ()
    found = (_figure(report, one) for one in picks)
    return replace(report, figures=tuple(one for one in found if one is not None))


def _figure(report: Report, pick: Pick) -> Figure | None:
    place = {name: number for number, name in enumerate(report.columns)}
    row = next((row for row in report.rows if all(row[place[name]] == one for name, one in pick.row.items())), None)
    if row is None:
        return None
    text = row[place[pick.column]]
    if not pick.printed:
        printed, _, ours = text.partition(_BOTH)
        return Figure(pick.what, printed, ours)
    return Figure(pick.what, row[place[pick.printed]] if pick.printed in place else pick.printed, text)
