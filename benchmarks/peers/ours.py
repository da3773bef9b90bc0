"""What runs in FedVeil's own environment: a plain PyTorch loop, FedVeil, and clipping as PyTorch users write it.

`python -m benchmarks.peers.ours HOW FOLDER`, given turns by `contest`.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import fedveil
from benchmarks.peers.turns import Turns
from benchmarks.peers.workloads import CLIP, Plan, flat
from fedveil.config import RunConfig
from fedveil.downlink import Plain, draw
from fedveil.secrets import SeededSecrets
from fedveil.work import Batches, ClientData, CrossEntropy, Workspace
from fedveil.work.clipping import ClippedSamples
from fedveil.work.per_sample import safe_bound

SEED = 1
"""Of FedVeil's batches and cohorts, which the plan repeats for everybody."""


def plain_loop(plan: Plan, turns: Turns) -> Tensor:
    """Federated averaging with nothing around it."""
    workload, net = plan.workload, plan.model()
    local = copy.deepcopy(net)
    weights, own = list(net.parameters()), list(local.parameters())
    turns.begin()
    for round in range(plan.rounds):
        total = [torch.zeros_like(value) for value in weights]
        for position in range(workload.cohort):
            x, y = plan.taken(round, position)
            with torch.no_grad():
                torch._foreach_copy_(own, weights)
            for start in range(0, len(y), workload.batch):
                batch = slice(start, start + workload.batch)
                grads = torch.autograd.grad(F.cross_entropy(local(x[batch]), y[batch]), own)
                with torch.no_grad():
                    torch._foreach_add_(own, grads, alpha=-workload.lr)
            with torch.no_grad():
                torch._foreach_add_(total, torch._foreach_sub(own, weights))
        with torch.no_grad():
            torch._foreach_add_(weights, total, alpha=1 / workload.cohort)
        turns.lap()
    return flat(net)


def engine(plan: Plan, turns: Turns, *, processes: int = 1) -> Tensor:
    """`fedveil.train` as a user calls it, on so many processes."""
    workload = plan.workload
    given = {"local_epochs": 1} if workload.local else {}
    if workload.cohort < workload.clients:
        given["cohort"] = workload.cohort
    if spreads():
        given[PROCESSES] = processes
    turns.begin()
    trained = fedveil.train(
        plan.model(),
        list(zip(plan.x, plan.y, strict=True)),
        scheme="fedavg",
        rounds=plan.rounds,
        batch_size=workload.batch,
        lr=workload.lr,
        seed=SEED,
        loss="cross-entropy",
        bn_eps="public",
        evaluate_every=0,
        progress=False,
        callbacks=[lambda row: turns.lap()],
        **given,
    )
    return flat(trained.model)


PROCESSES = "workers"
"""The setting that spreads a round over processes."""


def spreads() -> bool:
    """Whether this FedVeil can spread a round over processes."""
    return PROCESSES in RunConfig.__dataclass_fields__


def clipped_step(plan: Plan, turns: Turns) -> Tensor:
    """A client's clipped work, from a received model to the finished contribution."""
    workload = plan.workload
    # What FedVeil takes off a bound for rounding is put on, so that all clip to the same length.
    clip = CLIP**2 / safe_bound(CLIP, torch.float32, workload.samples)
    work = ClippedSamples(CrossEntropy(), Batches(0, 0), clip)
    architecture, weights = draw(plan.model(), plan.x[0, :2], traced=False)
    workspace = Workspace(architecture, work.layout(architecture, tensors=1))
    veil = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream("bench"), head_level=None)
    sent, data = veil.broadcast(), ClientData(0, plan.x[0], plan.y[0])
    turns.begin()
    for round in range(plan.rounds):
        contribution = work.run(workspace, sent, data, round=round)
        moved = sent.parameters - workload.lr / workload.samples * contribution[:-1]
        sent = replace(sent, parameters=moved)
        turns.lap()
    return sent.parameters


def vmap_step(plan: Plan, turns: Turns) -> Tensor:
    """torch.func's own way: vmap over grad, every gradient written out."""
    net, x, y = plan.model(), plan.x[0], plan.y[0]
    values = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss(values: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net, values, (sample[None],)), target[None])

    mapped = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    turns.begin()
    for _ in range(plan.rounds):
        grads = mapped(values, x, y)
        norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads.values()]).norm(dim=0)
        shares = (CLIP / norms).clamp(max=1.0) / len(y)
        values = {
            name: value - plan.workload.lr * torch.tensordot(shares, grads[name], 1) for name, value in values.items()
        }
        turns.lap()
    return torch.cat([value.flatten() for value in values.values()])


def bare_step(plan: Plan, turns: Turns) -> Tensor:
    """The same step without clipping: what the clipping is to be seen beside, and another model."""
    net, x, y = plan.model(), plan.x[0], plan.y[0]
    weights = list(net.parameters())
    turns.begin()
    for _ in range(plan.rounds):
        grads = torch.autograd.grad(F.cross_entropy(net(x), y), weights)
        with torch.no_grad():
            torch._foreach_add_(weights, grads, alpha=-plan.workload.lr)
        turns.lap()
    return flat(net)


HOW = {
    "plain": plain_loop,
    "fedveil": engine,
    "fedveil-2": lambda plan, turns: engine(plan, turns, processes=2),
    "clipped": clipped_step,
    "vmap": vmap_step,
    "bare": bare_step,
}


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    turns = Turns()
    turns.finish(folder, HOW[how](Plan.read(folder), turns))


if __name__ == "__main__":
    main()
