"""What each family of a veil costs: a client's step, bytes, and the server's part, against training without a veil.

`OMP_NUM_THREADS=1 python -m benchmarks.families` shows these rows alone (`--device cuda` on a GPU).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.rows import WORK, Bed, Row
from benchmarks.timing import Ratio, interleaved, ratio
from fedveil import models
from fedveil.downlink import Mean, Plain, Rescaling, draw
from fedveil.downlink.export import verified
from fedveil.downlink.symmetry import FAMILIES
from fedveil.protocol.codec import encode
from fedveil.protocol.messages import Train, Upload

BATCH = 32
WORDS, LENGTH = 10_000, 200
MOST_STEP, MOST_SERVER = 1.05, 0.05
NETWORKS = {"transformer": (LENGTH,), "resnet20": (3, 32, 32)}


def families(device: torch.device, *, repeats: int) -> list[Row]:
    """A step, a broadcast and the server's veil under every family, of a network of tokens and one of pictures."""
    return [row for name in NETWORKS for row in _network(name, device, repeats=repeats)]


def _bed(name: str, family: str, device: torch.device) -> Bed:
    """The network with the tables of a family; equal seeds give every family the same weights and batch."""
    shape, tokens = NETWORKS[name], name == "transformer"
    net = models.build(name, input_shape=shape, outputs=10, seed=0, vocabulary=WORDS if tokens else None).train()
    generator = torch.Generator().manual_seed(0)
    whole = (BATCH, *shape)
    x = torch.randint(0, WORDS, whole, generator=generator) if tokens else torch.randn(whole, generator=generator)
    y = torch.randint(0, 10, (BATCH,), generator=generator)
    architecture, weights = draw(net, x[:2], traced=True, family=family)
    architecture = verified(architecture, weights, x[:2], downlink=Rescaling(family=family))
    placed = architecture.to(device=device), weights.to(device=device)
    return Bed(net.to(device), *placed, x.to(device), y.to(device))


def _server(bed: Bed, downlink: Rescaling, sent: Tensor) -> Callable[[], object]:
    """A round's secrets, the veiled model, and the gradient recovered: the server's part, once for all clients."""
    layout = WORK.layout(bed.architecture, tensors=1)
    parts = layout.split(torch.cat([sent, torch.ones(1, device=sent.device)]).to(torch.float64))
    mean = Mean(parts["gradients"], parts["values"], parts["statistics"])

    def serve() -> object:
        veil = bed.veil(downlink)
        veil.broadcast()
        return veil.recover(mean)

    return serve


def _network(name: str, device: torch.device, *, repeats: int) -> list[Row]:
    plain = _bed(name, "scale", device)
    candidates: dict[str, Callable[[], object]] = {"plain": plain.client(Plain())}
    sizes = {}
    for family in FAMILIES:
        bed, downlink = _bed(name, family, device), Rescaling(family=family)
        step = bed.client(downlink)
        candidates |= {f"{family} step": step, f"{family} server": _server(bed, downlink, step())}
        up = len(encode(Upload(0, 0, 0, torch.zeros(WORK.layout(bed.architecture, tensors=1).length))))
        down = len(encode(Train(0, 0, bed.veil(downlink).broadcast())))
        sizes[family] = (up + down) / (2 * 4 * bed.architecture.size)
    before = os.getloadavg()[0]
    timed = interleaved(candidates, repeats=repeats)
    where = f"{name}, batch {BATCH}, {device.type}"
    load = f"load {before:.1f} to {os.getloadavg()[0]:.1f}"
    on_cpu = device.type == "cpu"  # on a GPU both sides are launches, not arithmetic
    rows = []
    for family in FAMILIES:
        step, server = (ratio(timed[f"{family} {what}"], timed["plain"]) for what in ("step", "server"))
        rows += [
            Row(f"step under {family} ({where})", "fedavg step", step, MOST_STEP if on_cpu else None, note=load),
            Row(f"server: veil + recover under {family}", "fedavg step", server, MOST_SERVER if on_cpu else None),
            Row(f"bytes both ways under {family}", "2 × model", Ratio(*3 * (sizes[family],)), 1.01),
        ]
    return rows


def main() -> int:
    from benchmarks.__main__ import alone

    return alone(lambda device, repeats: families(device, repeats=repeats), __doc__, repeats=15)


if __name__ == "__main__":
    sys.exit(main())
