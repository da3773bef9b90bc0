"""Papers' figures that our benchmarks take, judged like entries: the bank data and the curves on CIFAR-10."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import DataError
from papers.report import Check, Figure, Report

_DECIMALS = 5e-4
_ERRORS = 2.0
_LAST = 5
_CURVES = {
    "cifar10-k5-batch64": "--clients 5 --batch-size 64 --groups 2 --lr 0.01",
    "cifar10-k5": "--clients 5 --batch-size 256 --lr 0.02",
    "cifar10-k100": "--clients 100 --cohort 5 --batch-size 250 --lr 0.02 --tf32",
}


@dataclass(frozen=True)
class Benchmark:
    """One file of a benchmark: whose figures it checks, the report, and the command that takes them again."""

    name: str
    paper: str
    report: Report
    command: str
    machine: str


def benchmarks(folder: Path) -> Iterator[Benchmark]:
    """Those whose files the folder holds."""
    if (path := folder / "bank.json").exists():
        command = "python -m benchmarks.bank --data $DATA/bank --out bank.json"
        yield Benchmark("bank", "PBPFL; lossless perturbation", _bank(_read(path)), command, "cpu")
    for name, settings in _CURVES.items():
        if (path := folder / f"{name}.json").exists():
            command = f"python -m benchmarks.curves --data $DATA/cifar10 --device cuda --epochs 30 {settings}"
            yield Benchmark(name, "Lossless perturbation", _curve(_read(path)), command, "NVIDIA H200")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as reason:
        raise DataError(f"{path} holds no figures that can be read ({reason}).") from reason
    assert isinstance(content, dict)
    return content


def _bank(content: dict[str, Any]) -> Report:
    """The papers' Table 1: test errors of FedAvg and of their own scheme, by clients and layers."""
    rows = content["rows"]
    printed = max(abs(plain - own) for plain, own in (row["paper"] for row in rows))
    largest = float(content["largest_spread"])
    shown = [row for row in rows if (row["clients"], row["layers"]) in ((1, 3), (10, 7))]
    figures = [
        Figure(
            f"test MSE of FedAvg and own scheme, {row['clients']} clients, {row['layers']} layers",
            f"{row['paper'][0]:.3f}, {row['paper'][1]:.3f}",
            f"{row['fedavg']:.4f}, {row['lossless']:.4f}",
        )
        for row in shown
    ]
    claim = "pbpfl and lossless end at FedAvg's error, to three decimals"
    return Report(
        title="Table 1: bank data, three schemes",
        columns=("clients", "layers", "fedavg", "pbpfl", "lossless"),
        rows=tuple(
            (str(row["clients"]), str(row["layers"]), *(f"{row[one]:.6f}" for one in ("fedavg", "pbpfl", "lossless")))
            for row in rows
        ),
        checks=(Check(claim, largest < _DECIMALS, f"largest difference {largest:.1e}"),),
        figures=(*figures, Figure("largest difference to FedAvg", f"{printed:.3f}", f"{largest:.1e}")),
    )


def _curve(content: dict[str, Any]) -> Report:
    """The ends of the curves: the mean of the last evaluations that all runs have, by scheme and seed."""
    settings, runs = content["settings"], content["runs"]
    shortest = min(len(run["curve"]) for run in runs)
    ends: dict[str, list[float]] = {"fedavg": [], "lossless": []}
    for run in runs:
        last = [point[2] for point in run["curve"][shortest - _LAST : shortest]]
        ends[run["scheme"]].append(100 * statistics.mean(last))
    means = {scheme: statistics.mean(values) for scheme, values in ends.items()}
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in ends.values()))
    gap = means["lossless"] - means["fedavg"]
    claim = f"lossless ends where FedAvg does, within {_ERRORS:g} standard errors"
    return Report(
        title=f"Accuracy on CIFAR-10, ResNet-20, {settings['clients']} clients, batch {settings['batch_size']}",
        columns=("scheme", "accuracy, %"),
        rows=tuple((scheme, f"{value:.2f}") for scheme, value in means.items()),
        checks=(Check(claim, abs(gap) <= _ERRORS * error, f"{gap:+.2f} points, standard error {error:.2f}"),),
        figures=(
            Figure("accuracy of FedAvg, % (paper: ResNet-56, cross-entropy)", "93.18", f"{means['fedavg']:.2f}"),
            Figure("accuracy of the method, %", "93.20", f"{means['lossless']:.2f}"),
        ),
    )
