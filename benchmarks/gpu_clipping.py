"""Per-sample clipping of a ResNet-20 with GroupNorm, in images a second, beside a plain step and beside its FLOPs.

Local work is measured directly, so that nothing here needs keys or noise (a GPU host may lack `cryptography`). By its
FLOPs a clipped step is a plain one, with a norm and a weighted sum of every sample's gradient. `python -m
benchmarks.gpu_clipping` shows these rows alone; on a CPU (`--device cpu`) too, to see that they run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.rows import Row
from benchmarks.timing import Ratio, interleaved
from fedveil.downlink import Broadcast, Plain, draw
from fedveil.downlink.architecture import Architecture, load_epsilon, load_parameters
from fedveil.models.networks import cifar_resnet
from fedveil.secrets import SeededSecrets
from fedveil.work import Batches, ClientData, CrossEntropy, Gradients, Workspace
from fedveil.work.clipping import ClippedSamples

LOSS = CrossEntropy()
CLIP = 1.0
MOST = 3.0
"""So many times what the FLOPs say may clipping take of a plain step's time."""
BATCHES = {"cuda": (64, 512, 2048), "cpu": (16,)}


def gpu_clipping(device: torch.device, *, repeats: int) -> list[Row]:
    """A client's clipped step against its plain one."""
    architecture, sent, inputs, targets = _bed(device, max(BATCHES[device.type]))
    rows = []
    for batch in BATCHES[device.type]:
        data = ClientData(0, inputs[:batch], targets[:batch])
        plain, clipped = Gradients(LOSS, Batches(0, 0)), ClippedSamples(LOSS, Batches(0, 0), CLIP)
        work = {name: _step(architecture, kind, sent, data) for name, kind in (("plain", plain), ("clipped", clipped))}
        timed = interleaved(work, repeats=repeats)
        # torch's counter takes the groups of a convolution for full ones, so that only the plain step can be counted.
        share = 1 + 4 * architecture.size * batch / _flops(architecture, sent, data)
        ratios = sorted(
            first / second / share
            for first, second in zip(timed["clipped"].seconds, timed["plain"].seconds, strict=True)
        )
        speeds = {name: batch / taken.median for name, taken in timed.items()}
        note = f"{speeds['clipped']:,.0f} images/s of {speeds['plain']:,.0f}; FLOPs: {share:.3f}"
        measured = Ratio(statistics.median(ratios), ratios[0], ratios[-1])
        bound = MOST if device.type == "cuda" else None
        rows.append(
            Row(f"clipped step, ResNet-20, GroupNorm, batch {batch}", "plain step × FLOPs", measured, bound, note=note)
        )
    return rows


def _bed(device: torch.device, samples: int) -> tuple[Architecture, Broadcast, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, 32, 32, generator=generator)
    y = torch.randint(0, 10, (samples,), generator=generator)
    torch.manual_seed(0)
    net = cifar_resnet(3)(input_shape=(3, 32, 32), outputs=10, norm="group").train()
    architecture, weights = draw(net, x[:2], traced=False)
    there = architecture.to(device=device)
    veil = Plain().veil(there, weights.to(device=device), stream=SeededSecrets(0).stream("bench"), head_level=None)
    return there, veil.broadcast(), x.to(device), y.to(device)


def _step(
    architecture: Architecture, work: Gradients | ClippedSamples, sent: Broadcast, data: ClientData
) -> Callable[[], Tensor]:
    workspace = Workspace(architecture, work.layout(architecture, tensors=1))

    def step() -> Tensor:
        made = work.run(workspace, sent, data, round=0)
        if not workspace.vectorisable:
            raise RuntimeError("vmap gave up on this network: samples one by one are not what is to be measured.")
        return made

    return step


def _flops(architecture: Architecture, sent: Broadcast, data: ClientData) -> int:
    """Of one plain step, taken eagerly: the counter does not see into a captured one."""
    module = architecture.new_skeleton().to(data.x.device)
    load_parameters(module, sent.parameters)
    load_epsilon(architecture, module, sent.epsilon)
    with FlopCounterMode(display=False) as counter:
        LOSS.mean(module(data.x), data.y).backward()
    return counter.get_total_flops()


def main() -> int:
    from benchmarks.__main__ import alone

    return alone(
        lambda device, repeats: gpu_clipping(device, repeats=repeats), __doc__, devices=("cuda", "cpu"), repeats=7
    )


if __name__ == "__main__":
    sys.exit(main())
