"""pfl's simulated backend, on one process or on several (`torch.distributed.run`): `... pfl_backend FOLDER`."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.peers.turns import Turns
from benchmarks.peers.workloads import Plan, flat


class Learner(nn.Module):
    """A network as pfl wants it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, object]:
        return {}


class Clock(TrainingProcessCallback):
    """Gives the turn back after every round; other processes than the first follow it by themselves."""

    def __init__(self, turns: Turns | None) -> None:
        self._turns = turns

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: object, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if self._turns:
            self._turns.lap()
        return False, Metrics()


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    plan = Plan.read(folder)
    workload = plan.workload
    turns = Turns() if os.environ.get("RANK", "0") == "0" else None
    seats = itertools.product(range(plan.rounds), range(workload.cohort))

    def dealt(seat: tuple[int, int]) -> Dataset:
        return Dataset(raw_data=plan.taken(*seat))

    net = plan.model()
    learner = Learner(net)
    model = PyTorchModel(learner, torch.optim.SGD, torch.optim.SGD(learner.parameters(), lr=1.0))
    dataset = FederatedDataset(dealt, lambda: next(seats))
    backend = SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[WeightByUser()])
    if turns:
        turns.begin()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=plan.rounds,
            evaluation_frequency=plan.rounds + 1,
            train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        backend,
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=workload.lr, local_batch_size=workload.batch),
        callbacks=[Clock(turns)],
        send_metrics_to_platform=False,
    )
    if turns:
        turns.finish(folder, flat(net))


if __name__ == "__main__":
    main()
