"""Rounds of the local engine against the same rounds written as a plain PyTorch loop, on this machine's CPU.

Four settings: the public anchor LR_MNIST (1,000 clients, 10 a round, batches of 10, a local epoch), one gradient each
of 100 clients with a CNN, of 4 that have many samples, and of 10 with a ResNet-20 (GroupNorm). Both sides take the
same batches and end in the same model, which is checked; rounds take turns. Then the same rounds by two workers against
one, a run after the other, which must end in the same bits, beside what two runs that share nothing get of the two
cores. `python -m benchmarks.simulation` shows these alone.
"""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedveil
from benchmarks.peers.workloads import NETWORKS, WORKLOADS, Workload
from benchmarks.rows import Row
from benchmarks.timing import Ratio
from fedveil.protocol.directory import Cohort
from fedveil.work import Batches

_SEED = 1


@dataclass(frozen=True)
class Setting:
    """What both sides train, and the most that the engine may take of the loop's time."""

    workload: Workload
    most: float
    settings: dict[str, Any] = field(default_factory=dict)

    def network(self) -> nn.Module:
        """The untrained network."""
        return NETWORKS[self.workload.network]()

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Every client's samples."""
        generator = torch.Generator().manual_seed(0)
        size = self.workload.clients, self.workload.samples
        x = torch.randn(*size, *self.workload.shape, generator=generator)
        y = torch.randint(0, 10, size, generator=generator)
        return list(zip(x, y, strict=True))


_WORKLOADS = {workload.name: workload for workload in WORKLOADS}
_LARGE = Workload("large", "CNN, 4 × 1,500, one gradient", "cnn", (1, 28, 28), 4, 4, 1500, 1500, 0.1)
SETTINGS = (
    Setting(_WORKLOADS["lr-mnist"], 1.15, {"local_epochs": 1}),
    Setting(_WORKLOADS["cnn"], 1.0),
    Setting(_LARGE, 0.75),
    Setting(_WORKLOADS["resnet20"], 1.05, {"bn_eps": "public"}),
)


def simulation(*, repeats: int) -> list[Row]:
    """Every setting, round by round in turns, then on two cores."""
    alone = [_compared(setting, repeats) for setting in SETTINGS]
    return alone + [_on_two_cores(setting, repeats) for setting in SETTINGS]


def _trained(setting: Setting, repeats: int, **further: Any) -> fedveil.Trained:
    """Two rounds to warm up, then `repeats`."""
    torch.manual_seed(0)
    task = setting.workload
    given: dict[str, Any] = {"rounds": repeats + 2, "batch_size": task.batch, "lr": task.lr, "seed": _SEED}
    if task.cohort < task.clients:
        given["cohort"] = task.cohort
    given |= {"loss": "cross-entropy", "evaluate_every": 0, "progress": False, **further, **setting.settings}
    return fedveil.train(setting.network(), setting.data(), scheme="fedavg", **given)


def _side_by_side(setting: Setting, repeats: int) -> float:
    """Seconds of a round where two runs that share nothing have a core each: all that there is for two workers."""
    code = (
        "import sys, torch; torch.set_num_threads(1); from benchmarks import simulation; "
        "print(simulation.alone(sys.argv[1], int(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, setting.workload.name, str(repeats)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return statistics.mean(float(one.communicate()[0]) for one in both)


def alone(name: str, repeats: int) -> float:
    """Seconds of a round of the setting by one worker."""
    (setting,) = (one for one in SETTINGS if one.workload.name == name)
    return statistics.median(row["seconds"] for row in _trained(setting, repeats, workers=1).metrics[2:])


def _on_two_cores(setting: Setting, repeats: int) -> Row:
    runs = [_trained(setting, repeats, workers=workers) for workers in (1, 2)]
    for own, other in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(own, other)
    one, two = ([row["seconds"] for row in run.metrics[2:]] for run in runs)
    ratios = sorted(a / b for a, b in zip(sorted(one), sorted(two), strict=True))
    measured = Ratio(statistics.median(one) / statistics.median(two), ratios[0], ratios[-1])
    most = 2 * statistics.median(one) / _side_by_side(setting, repeats)
    note = (
        f"{1e3 * statistics.median(two):.2f} ms against {1e3 * statistics.median(one):.2f}; two runs apart {most:.2f}"
    )
    what = f"a round of {setting.workload.what}: one worker"
    return Row(what, "two workers", measured, 1.7, at_least=True, note=note)


def _compared(setting: Setting, repeats: int) -> Row:
    torch.manual_seed(0)
    net = setting.network()
    loop = _loop(setting.workload, net, setting.data())
    ours, plain = [], [0.0]

    def in_turn(row: dict[str, Any]) -> None:
        ours.append(row["seconds"] - plain[-1])  # a row's seconds begin where the last one was told
        plain.append(next(loop))

    trained = _trained(setting, repeats, callbacks=[in_turn], workers=1)
    for own, other in zip(trained.model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
    pairs = list(zip(ours, plain[1:], strict=True))[2:]
    ratios = sorted(a / b for a, b in pairs)
    mine, theirs = (1e3 * statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    note = f"{mine:.2f} ms against {theirs:.2f}"
    measured = Ratio(statistics.median(ratios), ratios[0], ratios[-1])
    return Row(f"a round of {setting.workload.what}", "plain PyTorch loop", measured, setting.most, note=note)


def _loop(task: Workload, net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Iterator[float]:
    """Seconds of each round of plain federated averaging."""
    local = copy.deepcopy(net)
    weights, own = list(net.parameters()), list(local.parameters())
    batches, cohort = Batches(task.batch, _SEED), Cohort(task.clients, task.cohort, _SEED)
    round_ = 0
    while True:
        start = time.perf_counter()
        total = [torch.zeros_like(value) for value in weights]
        chosen = cohort.draw(round_)
        for client in chosen:
            x, y = data[client]
            with torch.no_grad():
                torch._foreach_copy_(own, weights)
            for step in range(task.steps):
                rows = batches.indices(client=client, samples=task.samples, step=round_ * task.steps + step)
                loss = F.cross_entropy(local(x[rows]), y[rows])
                grads = torch.autograd.grad(loss, own)
                with torch.no_grad():
                    if task.local:
                        torch._foreach_add_(own, grads, alpha=-task.lr)
                    else:
                        torch._foreach_add_(total, grads)
            if task.local:
                with torch.no_grad():
                    torch._foreach_add_(total, torch._foreach_sub(weights, own))
        with torch.no_grad():
            torch._foreach_add_(weights, total, alpha=-(1.0 if task.local else task.lr) / len(chosen))
        round_ += 1
        yield time.perf_counter() - start


if __name__ == "__main__":
    from benchmarks.__main__ import show

    torch.set_num_threads(1)
    show("one thread", simulation(repeats=15))
