"""Opacus: ghost clipping (two backward passes), or per-sample gradients by its hooks: `... opacus_ghost HOW FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

from benchmarks.peers.turns import Turns
from benchmarks.peers.workloads import CLIP, Plan, flat


def main() -> None:
    torch.set_num_threads(1)
    how, folder = sys.argv[1], Path(sys.argv[2])
    plan, turns = Plan.read(folder), Turns()
    net, x, y = plan.model(), plan.x[0], plan.y[0]
    module = GradSampleModuleFastGradientClipping(net, max_grad_norm=CLIP, use_ghost_clipping=how == "ghost")
    optimiser = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=plan.workload.lr),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        expected_batch_size=len(y),
    )
    criterion = DPLossFastGradientClipping(module, optimiser, nn.CrossEntropyLoss())
    turns.begin()
    for _ in range(plan.rounds):
        optimiser.zero_grad()
        criterion(module(x), y).backward()
        optimiser.step()
        turns.lap()
    turns.finish(folder, flat(net))


if __name__ == "__main__":
    main()
