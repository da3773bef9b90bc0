"""Whole rounds of `fedveil.train` on a GPU, in images a second, beside the most that the card does with this network.

The most is measured in the same run: one captured step of plain PyTorch on a batch of 3,200, channels last.
`python -m benchmarks.gpu_rounds` shows these rows alone.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fedveil
from benchmarks.rows import LOSS, Row
from benchmarks.timing import Ratio
from fedveil.models.networks import cifar_resnet
from fedveil.tensors import recorded

_LIMIT_BATCH = 3200
_WARM_ROUNDS = 5


@dataclass(frozen=True)
class Cell:
    """So many clients with so many samples each; `least` images a second are asked for."""

    what: str
    clients: int
    batch: int
    samples: int
    rounds: int
    least: int | None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> int:
        """What one round trains on."""
        return self.clients * (self.samples if "local_epochs" in self.settings else self.batch)


_VEILED = {"scheme": "lossless", "head_groups": 1}
CELLS = (
    Cell("fedavg, 5 × 64", 5, 64, 2000, 60, 42_000, {"scheme": "fedavg"}),
    Cell("fedavg, 100 × 32", 100, 32, 500, 20, 45_000, {"scheme": "fedavg"}),
    Cell("lossless m = 1, 5 × 64", 5, 64, 2000, 40, 18_000, _VEILED),
    Cell("lossless m = 1, 100 × 32", 100, 32, 500, 15, 19_000, _VEILED),
    Cell("lossless m = 10, 5 × 64", 5, 64, 2000, 20, 6_000, {"scheme": "lossless"}),
    Cell("fedavg, local epochs, 10 × 64", 10, 64, 1280, 10, 40_000, {"scheme": "fedavg", "local_epochs": 1}),
)


def gpu_rounds() -> list[Row]:
    """Every cell against the limit, round by round after the first few."""
    limit = _limit()
    rows = []
    for cell in CELLS:
        speeds = sorted(cell.images / seconds for seconds in _seconds(cell))
        measured = Ratio(statistics.median(speeds) / limit, speeds[0] / limit, speeds[-1] / limit)
        least = None if cell.least is None else cell.least / limit
        note = f"{statistics.median(speeds):,.0f} images/s of {limit:,.0f}"
        rows.append(Row(f"{cell.what} (ResNet-20)", "one captured step", measured, least, at_least=True, note=note))
    return rows


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    return cifar_resnet(3)(input_shape=(3, 32, 32), outputs=10)


def _seconds(cell: Cell) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(cell.clients * cell.samples, 3, 32, 32, generator=generator).cuda()
    y = torch.randint(0, 10, (len(x),), generator=generator).cuda()
    clients = list(zip(x.split(cell.samples), y.split(cell.samples), strict=True))
    given: dict[str, Any] = {"rounds": cell.rounds, "batch_size": cell.batch, "lr": 0.01, "seed": 1, "loss": "square"}
    trained = fedveil.train(
        _network(), clients, device="cuda", evaluate_every=0, progress=False, **given, **cell.settings
    )
    return [row["seconds"] for row in trained.metrics[min(_WARM_ROUNDS, cell.rounds - 1) :]]


def _limit() -> float:
    net = _network().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(_LIMIT_BATCH, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (_LIMIT_BATCH,), device="cuda")

    def work() -> tuple[Tensor, ...]:
        return torch.autograd.grad(LOSS.mean(net(x), y), list(net.parameters()))

    graph, _ = recorded(work)
    seconds = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return _LIMIT_BATCH / statistics.median(seconds)


if __name__ == "__main__":
    from benchmarks.__main__ import show

    show(torch.cuda.get_device_name(), gpu_rounds())
