"""What the cells of ParaAegis's tables amount to: accuracy, seconds, and where each comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from papers.cells import Results, numbers
from papers.paraaegis_rows import BY_LABEL, Bench, Row
from papers.report import EMPTY, mean, shown


@dataclass(frozen=True)
class Trained:
    """A row's training: accuracies of finished runs by seed, those of unfinished ones, and whose run it was."""

    finished: Mapping[int, float]
    unfinished: Mapping[int, tuple[float, int]]
    epsilon: float | None
    noise: float | None
    seconds: float | None
    of: Row | None

    @property
    def accuracy(self) -> float | None:
        """The mean over the seeds that were run to the end."""
        return mean(self.finished)

    def text(self, row: Row) -> str:
        """The accuracy, as a table shows it: whose it is if not its own, and the round if it stopped early."""
        if self.of is None:
            return EMPTY
        whose = "" if self.of is row else f" (= {self.of.title})"
        if self.finished:
            return shown(self.finished) + whose
        reached = ", ".join(f"{value:.1f} at round {round}" for value, round in self.unfinished.values())
        return reached + whose


def trained(results: Results, cell: str, *, rounds: int) -> Trained:
    """A cell's training; runs of fewer than `rounds` rounds count as unfinished."""
    accuracies, reached = numbers(results, cell), numbers(results, cell, "rounds")
    done = {seed: value for seed, value in accuracies.items() if reached.get(seed, 0) >= rounds}
    short = {seed: (value, int(reached.get(seed, 0))) for seed, value in accuracies.items() if seed not in done}
    return Trained(
        done,
        short,
        mean(numbers(results, cell, "epsilon")),
        mean(numbers(results, cell, "noise")),
        mean({seed: one for seed, one in numbers(results, cell, "seconds").items() if seed in done}),
        None,
    )


def training_of(results: Results, bench: Bench, partition: str, row: Row) -> Trained:
    """A row's own training, or its twin's where it was not trained itself."""
    for candidate in (row, *([] if row.twin is None else [BY_LABEL[row.twin]])):
        found = trained(results, bench.cell(partition, candidate.label), rounds=bench.rounds)
        if found.finished or found.unfinished:
            return Trained(found.finished, found.unfinished, found.epsilon, found.noise, found.seconds, candidate)
    return trained({}, "", rounds=bench.rounds)


def pace(results: Results, bench: Bench) -> float | None:
    """Seconds of a round's training by all clients, one after the other, without protection; timed by itself."""
    return mean(numbers(results, bench.pace, "round_seconds"))


def protection(results: Results, bench: Bench, row: Row) -> float | None:
    """Seconds that protection adds to a round: 0 where there is none."""
    if row.cipher == "none" and not row.noisy:
        return 0.0
    return mean(numbers(results, bench.cost(row.label), "protection"))


def counting(results: Results, bench: Bench, row: Row) -> float | None:
    """Seconds of a round in which the server counts votes."""
    return mean(numbers(results, bench.cost(row.label), "counting_seconds"))


def seconds(results: Results, bench: Bench, partition: str, row: Row) -> float | None:
    """Training of all rounds, and T × the protection of one."""
    cost, each = protection(results, bench, row), pace(results, bench)
    training = training_of(results, bench, partition, row).seconds if each is None else each * bench.rounds
    return None if cost is None or training is None else training + bench.rounds * cost


def efficiency(accuracy: float | None, time: float | None) -> float | None:
    """The paper's ratio: 100 × accuracy / seconds."""
    return None if accuracy is None or not time else 100.0 * accuracy / time
