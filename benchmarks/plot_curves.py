"""Draw curves of `benchmarks.curves` and compare their ends.

python -m benchmarks.plot_curves --out cifar10.png k5.json k100.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"fedavg": "#4477aa", "lossless": "#cc6677"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    figure, axes = pyplot.subplots(1, len(options.files), figsize=(6.5 * len(options.files), 4.2), squeeze=False)
    fine = True
    for axis, path in zip(axes[0], options.files, strict=True):
        stored = json.loads(path.read_text())
        fine &= draw(axis, stored["settings"], stored["runs"])
    figure.tight_layout()
    figure.savefig(options.out, dpi=130)
    return 0 if fine else 1


def draw(axis: pyplot.Axes, settings: dict[str, object], runs: list[dict[str, object]]) -> bool:
    """One panel; returns whether the ends agree within two standard errors."""
    shortest = min(len(run["curve"]) for run in runs)
    ends: dict[str, list[float]] = {}
    for run in runs:
        scheme, points = run["scheme"], run["curve"]
        epochs = [point[0] / run["rounds_per_epoch"] for point in points]
        first = scheme not in ends
        dashes = "-" if scheme == "fedavg" else (0, (4, 2))
        accuracy = [100 * point[2] for point in points]
        axis.plot(epochs, accuracy, color=COLOURS[scheme], linestyle=dashes, lw=1.6, label=scheme if first else None)
        last = [point[2] for point in points[shortest - 5 : shortest]]
        ends.setdefault(scheme, []).append(100 * statistics.mean(last))
    cohort = f", {settings['cohort']} per round" if settings["cohort"] else ""
    axis.set_title(f"{settings['clients']} clients{cohort}, batch {settings['batch_size']}", loc="left")
    axis.set_xlabel("epochs' worth of rounds")
    axis.set_ylabel("test accuracy (%)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    means = {scheme: statistics.mean(values) for scheme, values in ends.items()}
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in ends.values()))
    gap = means["lossless"] - means["fedavg"]
    verdict = abs(gap) <= 2 * error
    print(
        f"{settings['clients']} clients: evaluations {shortest - 4}–{shortest}, fedavg {means['fedavg']:.2f} "
        f"({', '.join(f'{v:.2f}' for v in ends['fedavg'])}), lossless {means['lossless']:.2f} "
        f"({', '.join(f'{v:.2f}' for v in ends['lossless'])}); gap {gap:+.2f}, standard error {error:.2f}: "
        f"{'within' if verdict else 'NOT within'} two"
    )
    return verdict


if __name__ == "__main__":
    sys.exit(main())
