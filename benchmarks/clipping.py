"""Per-sample clipping against the ways it is usually written, and against a step that does not clip.

`python -m benchmarks.clipping` shows these rows alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.rows import Row
from benchmarks.timing import interleaved, ratio
from fedveil import models
from fedveil.downlink import Broadcast, Plain, draw
from fedveil.downlink.architecture import Architecture
from fedveil.secrets import SeededSecrets
from fedveil.tensors import flatten
from fedveil.work import Batches, ClientData, CrossEntropy, Gradients, Workspace
from fedveil.work.clipping import ClippedSamples

LOSS = CrossEntropy()
CLIP = 1.0
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 4 << 30}
CASES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "mlp": ((784,), None),
    "cnn": ((1, 28, 28), None),
    "gru": ((40,), 2000),
}


def clipping(device: torch.device, *, repeats: int) -> list[Row]:
    """One client's clipped step, batches of 64 and 600."""
    rows = []
    for name in CASES:
        for batch in (64, 600):
            bed = _Bed(name, device, clients=1, samples=batch)
            candidates: dict[str, Callable[[], object]] = {
                "plain": bed.work(Gradients(LOSS, Batches(0, 0))),
                "clipped": bed.work(ClippedSamples(LOSS, Batches(0, 0), CLIP)),
                "vmap": bed.one_pass,
                "two passes": bed.two_passes,
            }
            if device.type == "cpu":  # seconds per repetition on a GPU
                candidates["loop"] = bed.work(ClippedSamples(LOSS, Batches(0, 0), CLIP, vectorise=False))
            timed = interleaved(candidates, repeats=repeats)
            milliseconds = f"{1e3 * timed['clipped'].median:.1f} ms"
            title = f"clipped step, {name}, batch {batch}"
            rows.append(Row(title, "plain step", ratio(timed["clipped"], timed["plain"]), note=milliseconds))
            bound = 1.0 if device.type == "cpu" else None  # a single step on a GPU is launches, however it is written
            rows += [
                Row(f"{how}, {name}, batch {batch}", "clipped step", ratio(timed[how], timed["clipped"]), bound, True)
                for how in ("loop", "vmap", "two passes")
                if how in timed
            ]
    return rows


def clipped_rounds(device: torch.device, *, repeats: int) -> list[Row]:
    """A round of 100 clients, flattened against one client after the other."""
    rows = []
    for name, samples in (("mlp", 16), ("cnn", 16), ("cnn", 480)):
        if samples > 64 and device.type == "cpu":
            continue
        bed = _Bed(name, device, clients=100, samples=samples)
        work = ClippedSamples(LOSS, Batches(0, 0), CLIP)
        timed = interleaved({"loop": bed.singly(work), "together": bed.work(work)}, repeats=repeats)
        note = f"{1e3 * timed['together'].median:.1f} ms together"
        title = f"100 clients' clipped round, {name}, {samples} samples: loop"
        rows.append(Row(title, "together", ratio(timed["loop"], timed["together"]), 1.0, True, note))
    return rows


class _Bed:
    """A model as broadcast, and clients with random data."""

    def __init__(self, name: str, device: torch.device, *, clients: int, samples: int) -> None:
        shape, vocabulary = CASES[name]
        generator = torch.Generator().manual_seed(0)

        def inputs(count: int) -> Tensor:
            if vocabulary is not None:
                return torch.randint(0, vocabulary, (count, *shape), generator=generator)
            return torch.randn(count, *shape, generator=generator)

        self.net = models.build(name, input_shape=shape, outputs=10, seed=0, vocabulary=vocabulary).train()
        architecture, weights = draw(self.net, inputs(2), traced=False)
        self.architecture: Architecture = architecture.to(device=device)
        self.net.to(device)
        veil = Plain().veil(
            self.architecture, weights.to(device=device), stream=SeededSecrets(0).stream("bench"), head_level=None
        )
        self.sent: Broadcast = veil.broadcast()
        self.clients = [
            ClientData(
                number,
                inputs(samples).to(device),
                torch.randint(0, 10, (samples,), generator=generator).to(device),
            )
            for number in range(clients)
        ]
        self.at_once = max(1, CHUNK_BYTES[device.type] // (4 * self.architecture.size))

    def work(self, work: Gradients | ClippedSamples) -> Callable[[], object]:
        workspace = Workspace(self.architecture, work.layout(self.architecture, tensors=1))
        return lambda: list(work.run_many(workspace, self.sent, self.clients, round=0))

    def singly(self, work: ClippedSamples) -> Callable[[], object]:
        workspace = Workspace(self.architecture, work.layout(self.architecture, tensors=1))
        return lambda: [work.run(workspace, self.sent, one, round=0) for one in self.clients]

    def one_pass(self) -> Tensor:
        """vmap over grad, everything written out, Σ c_i·g_i chunk by chunk."""
        total = torch.zeros(self.architecture.size, device=self.clients[0].x.device)
        for gradients in self._chunks():
            total += _factors(gradients) @ gradients
        return total

    def two_passes(self) -> Tensor:
        """Norms from vmap over grad, then one backward pass over Σ c_i·loss_i."""
        factors = torch.cat([_factors(gradients) for gradients in self._chunks()])
        data = self.clients[0]
        losses = torch.nn.functional.cross_entropy(self.net(data.x), data.y, reduction="none")
        return flatten(torch.autograd.grad((factors * losses).sum(), list(self.net.parameters())))

    def _chunks(self) -> Iterator[Tensor]:
        values = {name: one.detach() for name, one in self.net.named_parameters()}

        def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return LOSS.mean(torch.func.functional_call(self.net, values, (x[None],)), y[None])

        mapped = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        data = self.clients[0]
        for start in range(0, len(data), self.at_once):
            part = slice(start, start + self.at_once)
            yield torch.cat([one.flatten(1) for one in mapped(values, data.x[part], data.y[part]).values()], 1)


def _factors(gradients: Tensor) -> Tensor:
    return (CLIP / gradients.norm(dim=1)).clamp(max=1.0)


def main() -> int:
    from benchmarks.__main__ import alone

    def rows_of(device: torch.device, repeats: int) -> list[Row]:
        return [*clipping(device, repeats=repeats), *clipped_rounds(device, repeats=repeats)]

    return alone(rows_of, __doc__, repeats=7)


if __name__ == "__main__":
    sys.exit(main())
