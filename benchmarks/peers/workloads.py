"""What all candidates compute: networks, samples, batches and cohorts, written down once for every process.

A peer's environment holds neither FedVeil's dependencies nor its engine: nothing here needs more than torch, numpy and
`fedveil.models`, which needs no more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil.models.networks import cifar_resnet, cnn

WARM_ROUNDS = 3
CLIP = 1.0


def _logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "logistic": _logistic,
    "cnn": lambda: cnn(input_shape=(1, 28, 28), outputs=10),
    "resnet20": lambda: cifar_resnet(3)(input_shape=(3, 32, 32), outputs=10, norm="group"),
}


@dataclass(frozen=True)
class Workload:
    """Rounds of `cohort` of `clients` clients with `samples` each: an epoch of `batch`es, or one gradient (`local`).

    With `clipped`, a round is one client's step on a batch whose per-sample gradients are clipped.
    """

    name: str
    what: str
    network: str
    shape: tuple[int, ...]
    clients: int
    cohort: int
    samples: int
    batch: int
    lr: float
    local: bool = False
    clipped: bool = False
    block: int = 5
    """Rounds in a turn."""

    @property
    def steps(self) -> int:
        """Local steps of a client in a round."""
        return self.samples // self.batch if self.local else 1


WORKLOADS = (
    Workload("lr-mnist", "LR_MNIST, 10 of 1,000", "logistic", (1, 28, 28), 1000, 10, 60, 10, 0.03, True, block=20),
    Workload("cnn", "CNN, 100 × 60, one gradient", "cnn", (1, 28, 28), 100, 100, 60, 60, 0.1, block=2),
    Workload(
        "resnet20",
        "ResNet-20, 10 × 32, one gradient",
        "resnet20",
        (3, 32, 32),
        10,
        10,
        32,
        32,
        0.01,
        block=2,
    ),
    Workload("clip-cnn", "CNN, 64 gradients clipped", "cnn", (1, 28, 28), 1, 1, 64, 64, 0.1, clipped=True, block=10),
    Workload(
        "clip-resnet20",
        "ResNet-20, 32 gradients clipped",
        "resnet20",
        (3, 32, 32),
        1,
        1,
        32,
        32,
        0.01,
        clipped=True,
        block=3,
    ),
)


@dataclass(frozen=True, eq=False)
class Plan:
    """One workload, ready to run: samples (clients, samples, …), the first model, and who takes which rows when."""

    workload: Workload
    rounds: int
    x: Tensor
    y: Tensor
    cohorts: NDArray[np.int64]
    """(rounds, cohort)"""
    rows: NDArray[np.int64]
    """(rounds, cohort, steps × batch)"""
    first: Tensor

    def model(self) -> nn.Module:
        """The network with the first values."""
        net = NETWORKS[self.workload.network]().train()
        torch.nn.utils.vector_to_parameters(self.first, net.parameters())
        for parameter in net.parameters():  # views of one vector until here
            parameter.data = parameter.data.clone()
        return net

    def taken(self, round: int, position: int) -> tuple[Tensor, Tensor]:
        """The samples that a client of a round's cohort goes through, in their order."""
        client, rows = self.cohorts[round, position], torch.from_numpy(self.rows[round, position])
        return self.x[client][rows], self.y[client][rows]

    def write(self, folder: Path) -> None:
        """For `read` in another process."""
        np.save(folder / "x.npy", self.x.numpy())
        small = {"y": self.y.numpy(), "cohorts": self.cohorts, "rows": self.rows, "first": self.first.numpy()}
        np.savez(folder / "plan.npz", **small)
        (folder / "plan.json").write_text(json.dumps({"rounds": self.rounds, "workload": asdict(self.workload)}))

    @staticmethod
    def read(folder: Path) -> Plan:
        """What `write` wrote."""
        facts = json.loads((folder / "plan.json").read_text())
        workload = Workload(**{**facts["workload"], "shape": tuple(facts["workload"]["shape"])})
        with np.load(folder / "plan.npz", allow_pickle=False) as stored:
            small = {name: stored[name] for name in stored.files}
        x = torch.from_numpy(np.load(folder / "x.npy", allow_pickle=False))
        y, first = torch.from_numpy(small["y"]), torch.from_numpy(small["first"])
        return Plan(workload, facts["rounds"], x, y, small["cohorts"], small["rows"], first)


def flat(net: nn.Module) -> Tensor:
    """All parameters side by side."""
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach()
