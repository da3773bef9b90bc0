"""The rows of the table: what is measured, and what it is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.timing import Ratio, Timed, interleaved, ratio
from fedveil import models
from fedveil.downlink import Broadcast, HeadNoise, Mean, Plain, Rescaling, Weights, draw
from fedveil.downlink.architecture import Architecture
from fedveil.downlink.messages import Downlink, Veil
from fedveil.protocol.codec import encode
from fedveil.protocol.messages import Train, Upload
from fedveil.secrets import SeededSecrets
from fedveil.tensors import ExactSum, flatten
from fedveil.work import Batches, ClientData, Gradients, SquareLoss, Workspace
from fedveil.work.gradients import step
from fedveil.work.messages import prepare


@dataclass(frozen=True)
class Row:
    """One line: a ratio, and the bound it must keep (None: no bound, a figure to know)."""

    what: str
    against: str
    measured: Ratio
    bound: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def holds(self) -> bool | None:
        if self.bound is None:
            return None
        return self.measured.middle >= self.bound if self.at_least else self.measured.middle <= self.bound


LOSS = SquareLoss()
WORK = Gradients(LOSS, Batches(0, 0))


@dataclass
class Bed:
    """A model, its architecture, one batch, and veils over it."""

    net: nn.Module
    architecture: Architecture
    weights: Weights
    x: Tensor
    y: Tensor

    @staticmethod
    def resnet20(batch: int, device: torch.device) -> Bed:
        net = models.build("resnet20", input_shape=(3, 32, 32), outputs=10, seed=0).train()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch, 3, 32, 32, generator=generator)
        y = torch.randint(0, 10, (batch,), generator=generator)
        architecture, weights = draw(net, x[:2], traced=True)
        placed = weights.to(device=device)
        return Bed(net.to(device), architecture.to(device=device), placed, x.to(device), y.to(device))

    def veil(self, downlink: Downlink) -> Veil:
        return downlink.veil(self.architecture, self.weights, stream=SeededSecrets(0).stream("bench"), head_level=1.0)

    def client(self, downlink: Downlink) -> Callable[[], Tensor]:
        """One whole client step, from a received broadcast to the finished contribution, eagerly."""
        sent = self.veil(downlink).broadcast()
        workspace = Workspace(
            self.architecture, WORK.layout(self.architecture, tensors=downlink.head_tensors(self.architecture))
        )

        def work() -> Tensor:
            prepare(self.architecture, workspace.module, sent)
            return step(self.architecture, workspace.module, LOSS, self.x, self.y, sent.head)

        return work

    def plain_torch(self) -> Callable[[], Tensor]:
        """The same step written directly in PyTorch with its own BatchNorm: the peer to beat."""

        def work() -> Tensor:
            loss = LOSS.mean(self.net(self.x), self.y)
            return flatten(torch.autograd.grad(loss, list(self.net.parameters())))

        return work


def head(groups: int) -> Rescaling:
    return Rescaling(head=HeadNoise(groups=groups))


def client_steps(device: torch.device, *, repeats: int) -> list[Row]:
    """Veiled client step against a plain one (ResNet-20, batch 32)."""
    bed = Bed.resnet20(32, device)
    candidates = {
        "torch": bed.plain_torch(),
        "fedavg": bed.client(Plain()),
        "m1": bed.client(head(1)),
        "m10": bed.client(head(10)),
    }
    timed = interleaved(candidates, repeats=repeats)
    where = f"ResNet-20, batch 32, {device.type}"
    bound = 1.05 * 7 / 3 if device.type == "cpu" else None
    return [
        Row(f"fedavg client step ({where})", "plain PyTorch step", ratio(timed["fedavg"], timed["torch"])),
        Row("veiled step, m = 1", "plain PyTorch step", ratio(timed["m1"], timed["torch"]), bound, note="FLOPs: 2.33"),
        Row("veiled step, m = 10", "plain PyTorch step", ratio(timed["m10"], timed["torch"]), note="FLOPs: 8.33"),
    ]


def server_work(device: torch.device, *, repeats: int) -> list[Row]:
    """The server's veil and recovery against one client step."""
    bed = Bed.resnet20(32, device)
    downlink = head(1)
    layout = WORK.layout(bed.architecture, tensors=3)
    vector = torch.cat([bed.client(downlink)(), torch.ones(1, device=device)])
    parts = layout.split(vector.to(torch.float64))
    mean = Mean(parts["gradients"], parts["values"], parts["statistics"])
    total = ExactSum(layout.length, device=device)

    def serve() -> object:
        veil = bed.veil(downlink)
        veil.broadcast()
        return veil.recover(mean)

    candidates: dict[str, Callable[[], object]] = {
        "server": serve,
        "sum": lambda: total.add(vector),
        "torch": bed.plain_torch(),
    }
    timed = interleaved(candidates, repeats=repeats)
    bound = 0.05 if device.type == "cpu" else None  # on a GPU both sides are launches, not arithmetic
    return [
        Row("server: veil + recover, m = 1", "plain PyTorch step", ratio(timed["server"], timed["torch"]), bound),
        Row("server: adding one upload exactly, m = 1", "plain PyTorch step", ratio(timed["sum"], timed["torch"])),
    ]


def many_clients(device: torch.device, *, repeats: int) -> list[Row]:
    """A round of 100 clients, vectorised against a plain loop."""
    rows = []
    cases = (("mlp", (64,), 14, {}), ("mlp", (64,), 14, {"norm": "batch"}), ("cnn", (1, 8, 8), 14, {}))
    for name, shape, samples, options in cases:
        for groups in (1, 10):
            net = models.build(name, input_shape=shape, outputs=10, seed=0, vocabulary=None, **options).train()
            architecture, weights = draw(net, torch.randn(2, *shape), traced=True)
            downlink = head(groups)
            veil = downlink.veil(architecture, weights, stream=SeededSecrets(0).stream("bench"), head_level=1.0)
            sent = veil.broadcast()
            clients = [
                ClientData(k, torch.randn(samples, *shape), torch.randint(0, 10, (samples,))) for k in range(100)
            ]
            workspace = Workspace(architecture, WORK.layout(architecture, tensors=downlink.head_tensors(architecture)))
            timed = interleaved(
                {
                    how: _round(Gradients(LOSS, Batches(0, 0), how == "together"), workspace, sent, clients)
                    for how in ("loop", "together")
                },
                repeats=repeats,
            )
            title = f"100 clients' round, {name}{' with BatchNorm' if options else ''}, m = {groups}: loop"
            rows.append(Row(title, "vectorised", ratio(timed["loop"], timed["together"]), 1.0, at_least=True))
    return rows


def _round(work: Gradients, workspace: Workspace, sent: Broadcast, clients: list[ClientData]) -> Callable[[], object]:
    def run() -> object:
        total = ExactSum(workspace.layout.length)
        for _, vector in work.run_many(workspace, sent, clients, round=0):
            total.add(vector)
        return total.total()

    return run


def bytes_on_the_wire() -> list[Row]:
    """Encoded uploads against (m + 2) × the model."""
    bed = Bed.resnet20(2, torch.device("cpu"))
    rows = []
    for groups in (1, 10):
        downlink = head(groups)
        layout = WORK.layout(bed.architecture, tensors=downlink.head_tensors(bed.architecture))
        up = len(encode(Upload(0, 0, 0, torch.zeros(layout.length))))
        down = len(encode(Train(0, 0, bed.veil(downlink).broadcast())))
        model = 4 * bed.architecture.size
        for what, count, factor in (("upload", up, groups + 2), ("broadcast", down, 1)):
            exact = count / (factor * model)
            rows.append(
                Row(f"bytes of one {what}, m = {groups}", f"{factor} × model", Ratio(exact, exact, exact), 1.01)
            )
    return rows


def streams(*, repeats: int) -> list[Row]:
    """Keyed streams: nanoseconds per number on one core."""
    # Not at the top: GPU hosts without `cryptography` run the other rows.
    import numpy as np

    from fedveil.crypto.keys import add_mask
    from fedveil.uplink.grid import add_discrete_gaussian

    count = 1_000_000
    words, plain = np.zeros(count, np.uint64), np.zeros(count)
    seed = bytes(range(32))
    generator = np.random.default_rng(0)
    timed = interleaved(
        {
            "mask": lambda: add_mask(words, seed),
            "2^10": lambda: add_discrete_gaussian(words, sigma=2.0**10, seed=seed),
            "2^24": lambda: add_discrete_gaussian(words, sigma=2.0**24, seed=seed),
            "2^40": lambda: add_discrete_gaussian(words, sigma=2.0**40, seed=seed),
            "numpy": lambda: generator.standard_normal(out=plain),
        },
        repeats=repeats,
    )

    def per_number(one: Timed) -> Ratio:
        each = [1e9 * value / count for value in one.seconds]
        return Ratio(1e9 * one.median / count, min(each), max(each))

    return [
        Row("mask stream, one 64-bit word", "nanoseconds", per_number(timed["mask"]), 3.0),
        *(
            Row(f"exact integer Gaussian, σ = {sigma} steps", "nanoseconds", per_number(timed[sigma]), 30.0)
            for sigma in ("2^10", "2^24", "2^40")
        ),
        Row("numpy's float64 standard_normal, for comparison", "nanoseconds", per_number(timed["numpy"])),
    ]
