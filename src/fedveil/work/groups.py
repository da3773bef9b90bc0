"""Many simulated clients on one GPU: a group of them is one captured graph, each client on a stream of its own.

A small batch leaves most of a GPU idle, and launching its kernels one by one takes longer than running them. A captured
graph is launched at once, and the clients of a group are branches of it that run side by side. Nothing is shared by
them but the parameters they were sent: every client's vector is its own, and so are its batch statistics.

    fill      the group's batches, by numbers drawn once an epoch and kept on the device (`Orders`)
    replay    a step of every client, or a descent of every client's own copy of the parameters
    look      the host waits once per group for its largest number, while the next group is already running

A group works on a stream of its own, so that whoever waits for one group's vectors does not wait for the next group's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import Architecture
from fedveil.downlink.messages import Broadcast, PublicHead
from fedveil.tensors import LARGEST, recorded
from fedveil.work.batches import Batches, LocalOptimiser, PictureAugmentation, has_random_layers
from fedveil.work.losses import Loss
from fedveil.work.messages import ClientData, Workspace, prepare

TOGETHER = 16
"""So many clients are one group, at most."""

STREAMS = 16
_KEPT_NUMBERS = 1 << 26

Step = Callable[[Architecture, nn.Module, Loss, Tensor, Tensor, PublicHead | None], Tensor]


def captures(workspace: Workspace, loss: Loss) -> bool:
    """Whether every batch of a shape takes the same kernels of the GPU, so that they can be captured."""
    return loss.capturable and not groups_of(workspace).random


class Orders:
    """The samples of every client's present epoch in the order they are drawn in, on the device.

    They are those that `Batches.indices` gives, step by step.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[int, Tensor, Tensor]] = {}
        self._numbers = 0

    def batch(self, batches: Batches, data: ClientData, *, step: int) -> tuple[Tensor, Tensor]:
        """The numbers of the samples that a client trains on in a local step, and the rows of `data.x` they are."""
        samples = len(data)
        size = batches.batch_size(samples)
        epoch, position = (0, 0) if size == samples else divmod(step, samples // size)
        key = (data.client, samples)
        kept = self._kept.get(key)
        if kept is None or kept[0] != epoch:
            order = batches.order(client=data.client, samples=samples, epoch=epoch).to(data.x.device)
            rows = order if data.rows is None else data.rows[order]
            if kept is None:
                self._numbers += len(rows)
            if self._numbers > _KEPT_NUMBERS:
                self._kept.clear()
                self._numbers = len(rows)
            kept = self._kept[key] = (epoch, order, rows)
        span = slice(position * size, (position + 1) * size)
        return kept[1][span], kept[2][span]


@dataclass(frozen=True, eq=False)
class Task:
    """What every client of a group does, and what they were sent; `length` is that of a contribution."""

    architecture: Architecture
    loss: Loss
    length: int
    batches: Batches
    broadcast: Broadcast

    @property
    def key(self) -> tuple[object, ...]:
        """What of it decides which kernels a step takes."""
        sent = self.broadcast
        head = None if sent.head is None else (sent.head.count, sent.head.per_group)
        return self.loss, self.length, head, sent.statistics.numel(), sent.multipliers.numel()


class ClientGroup:
    """So many clients with batches of one shape: places for their batches and sizes, filled before each replay."""

    def __init__(self, task: Task, clients: Sequence[ClientData], *, channels_last: bool) -> None:
        first, device = clients[0], task.broadcast.parameters.device
        chosen = task.batches.indices(client=first.client, samples=len(first), step=0)
        x, y = (part.to(device) for part in first.take(chosen))
        self.count = len(clients)
        self.x, self.y = (torch.stack([part] * self.count) for part in (x, y))
        self.weights = torch.ones(self.count, dtype=task.broadcast.parameters.dtype, device=device)
        self._sizes: list[int] = []
        self._channels_last = channels_last and self.x.dim() == 5 and self.x.is_floating_point()
        self._augment = first.augment if isinstance(first.augment, PictureAugmentation) else None
        self._numbers = torch.zeros(self.x.shape[:2], dtype=torch.int64, device=device)
        self._keys = torch.zeros(self.count, dtype=torch.int64, device=device)

    def _skeleton(self, architecture: Architecture) -> nn.Module:
        module = architecture.new_skeleton()
        if self._channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module

    def _laid_out(self) -> Sequence[Tensor]:
        """Every client's inputs as they are trained on; pictures with their channels last, as a GPU's convolutions want
        them."""
        together = self.x.flatten(0, 1)
        if self._augment is not None:
            keys = self._keys.repeat_interleave(self.x.shape[1], output_size=len(together))
            together = self._augment.apply(together, self._augment.drawn(self._numbers.flatten(), keys[:, None]))
        if self._channels_last:
            together = together.contiguous(memory_format=torch.channels_last)
        return torch.split(together, self.x.shape[1])

    def weigh(self, clients: Sequence[ClientData]) -> None:
        """Take the clients' sizes, by which contributions are weighted."""
        sizes = [len(data) for data in clients]
        if sizes != self._sizes:
            self._sizes = sizes
            put(self.weights, sizes)

    def fill(self, clients: Sequence[ClientData], batches: Batches, orders: Orders, steps: Sequence[int]) -> None:
        """Every client's batch of its local step: by one look-up where all have their samples in one tensor."""
        first, taken = clients[0], list(zip(clients, steps, strict=True))
        if self._augment is not None:
            put(self._keys, [self._augment.key(data.client, step) for data, step in taken])
        if any(data.source is not None or data.augment is not self._augment for data in clients):
            for place, (data, step) in enumerate(taken):
                chosen = batches.indices(client=data.client, samples=len(data), step=step)
                augmented = data.augment is not self._augment
                x, y = data.take(chosen, step=step) if augmented else data.read(chosen, step=step)
                self.x[place].copy_(x)
                self.y[place].copy_(y)
                self._numbers[place].copy_(chosen)
            return
        drawn = [orders.batch(batches, data, step=step) for data, step in taken]
        if self._augment is not None:
            torch.stack([numbers for numbers, _ in drawn], out=self._numbers)
        if all(data.x is first.x and data.y is first.y for data in clients):
            where = torch.cat([rows for _, rows in drawn])
            torch.index_select(first.x, 0, where, out=self.x.flatten(0, 1))
            torch.index_select(first.y, 0, where, out=self.y.flatten(0, 1))
            return
        for place, (data, (_, rows)) in enumerate(zip(clients, drawn, strict=True)):
            torch.index_select(data.x, 0, rows, out=self.x[place])
            torch.index_select(data.y, 0, rows, out=self.y[place])


def put(place: Tensor, numbers: Sequence[float]) -> None:
    """Numbers of the host into a place on the device, without waiting for it."""
    place.copy_(torch.tensor(numbers, dtype=place.dtype).pin_memory(), non_blocking=True)


class BroadcastPlaces:
    """Fixed places from which captured graphs read what clients were sent."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._places = [part.clone() for part in _parts(broadcast)]
        head = broadcast.head
        if head is not None:
            head = PublicHead(self._places[4], self._places[5], head.count, head.per_group)
        parameters, epsilon, statistics, multipliers = self._places[:4]
        self.sent = Broadcast(parameters, epsilon, statistics, multipliers, head)

    def put(self, broadcast: Broadcast) -> None:
        """Another round's."""
        torch._foreach_copy_(self._places, _parts(broadcast))


def _parts(broadcast: Broadcast) -> list[Tensor]:
    head = [] if broadcast.head is None else [broadcast.head.vector, broadcast.head.groups]
    return [broadcast.parameters, broadcast.epsilon, broadcast.statistics, broadcast.multipliers, *head]


Result = tuple[Tensor, Tensor]
"""Every client's contribution, (clients, length), and the largest number in them; NaN where one is."""


class GroupStep(ClientGroup):
    """One step of every client of a group, on the model that all were sent."""

    def __init__(self, step: Step, task: Task, clients: Sequence[ClientData], *, channels_last: bool) -> None:
        super().__init__(task, clients, channels_last=channels_last)
        architecture = task.architecture
        # Held, since the graph goes on writing to them: what is let go of is somebody else's memory.
        self._module, self._places = self._skeleton(architecture), BroadcastPlaces(task.broadcast)
        module, sent = self._module, self._places.sent

        def work() -> Result:
            prepare(architecture, module, sent)
            x = self._laid_out()
            result = self.weights.new_empty(self.count, task.length)
            result[:, -1] = self.weights
            for place in branches(self.count):
                vector = step(architecture, module, task.loss, x[place], self.y[place], sent.head)
                torch.mul(vector, self.weights[place], out=result[place, :-1])
            return result, torch.linalg.vector_norm(result, torch.inf)

        self._graph, self._result = recorded(work)

    def run(self, broadcast: Broadcast) -> Result:
        """The step on the batches it is filled with."""
        self._places.put(broadcast)
        self._graph.replay()
        vectors, largest = self._result
        return vectors.clone(), largest


class GroupDescent(ClientGroup):
    """Local training of every client of a group, each on parameters of its own and with what its optimiser
    remembers."""

    def __init__(
        self,
        statistics_of: Callable[[nn.Module, Tensor], Tensor],
        task: Task,
        clients: Sequence[ClientData],
        *,
        channels_last: bool,
        optimiser: LocalOptimiser,
    ) -> None:
        super().__init__(task, clients, channels_last=channels_last)
        architecture = task.architecture
        self._places = BroadcastPlaces(task.broadcast)
        sent = self._places.sent
        self._modules = modules = [self._skeleton(architecture) for _ in range(self.count)]
        moving: list[list[Tensor]] = [
            [parameter for name, parameter in module.named_parameters() if name not in architecture.frozen]
            for module in modules
        ]
        self._memory = [optimiser.start(parts) for parts in moving]
        reports = task.length - architecture.size - 1
        self._sums = self.weights.new_zeros(self.count, reports)  # of the steps' losses and batch statistics
        self._rates, self._shares = torch.zeros_like(self.weights), torch.zeros_like(self.weights)

        def begin() -> Result:
            for module in modules:
                prepare(architecture, module, sent)
            for memory in self._memory:
                if memory:
                    torch._foreach_zero_(memory)
            self._sums.zero_()
            return self._sums, self._rates

        def step() -> Result:
            x = self._laid_out()
            for place in branches(self.count):
                module = modules[place]
                with torch.enable_grad():
                    value = task.loss.mean(module(x[place]), self.y[place])
                    grads = torch.autograd.grad(value, moving[place], allow_unused=True, materialize_grads=True)
                with torch.no_grad():
                    optimiser.step(moving[place], grads, self._memory[place], self._rates[place])
                    told = torch.cat([value.detach().reshape(1), statistics_of(module, value)])
                    self._sums[place].addcmul_(told, self._shares[place])
            return self._sums, self._rates

        def end() -> Result:
            result = self.weights.new_empty(self.count, task.length)
            result[:, -1] = self.weights
            for place in branches(self.count):
                there = torch.cat([parameter.detach().reshape(-1) for parameter in modules[place].parameters()])
                moved = torch.cat([sent.parameters - there, self._sums[place]])
                torch.mul(moved, self.weights[place], out=result[place, :-1])
            return result, torch.linalg.vector_norm(result, torch.inf)

        self._begin, _ = recorded(begin)
        self._step, _ = recorded(step)
        self._end, self._result = recorded(end)

    def run(self, broadcast: Broadcast, fill: Callable[[int], None], counts: Sequence[int], rate: float) -> Result:
        """`counts` steps of the clients; `fill` puts the batches of a step where it reads them."""
        self._places.put(broadcast)
        self._begin.replay()
        going: list[bool] = []
        for step in range(max(counts)):
            before, going = going, [step < count for count in counts]
            if before != going:  # whoever is done stays where it is, and tells no more
                put(self._rates, [rate * go for go in going])
                put(self._shares, [go / count for go, count in zip(going, counts, strict=True)])
            fill(step)
            self._step.replay()
        self._end.replay()
        vectors, largest = self._result
        return vectors.clone(), largest


def branches(count: int) -> Iterator[int]:
    """0 to `count` − 1, each with a stream of its own that begins with the present one's work done; in the end the
    present one waits for all."""
    main = torch.cuda.current_stream()
    side = _side_streams(main.device, min(count, STREAMS))
    for stream in side:
        stream.wait_stream(main)
    for number in range(count):
        with torch.cuda.stream(side[number % len(side)]):
            yield number
    for stream in side:
        main.wait_stream(stream)


_SIDE: dict[torch.device, list[torch.cuda.Stream]] = {}


def _side_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    made = _SIDE.setdefault(device, [])
    while len(made) < count:
        made.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return made[:count]


@dataclass(frozen=True, eq=False)
class Launched:
    """A group whose work is under way."""

    positions: Sequence[int]
    vectors: Tensor
    largest: Tensor
    done: torch.cuda.Event

    def in_range(self) -> bool:
        """Wait for the work; whether all of its numbers are finite and of a size to be added."""
        here = torch.cuda.current_stream()
        here.wait_event(self.done)
        self.vectors.record_stream(here)
        self.done.synchronize()
        return float(self.largest) < LARGEST


_Made = TypeVar("_Made", bound=ClientGroup)
_Group = TypeVar("_Group", bound=ClientGroup, covariant=True)


class Make(Protocol[_Group]):
    """Captures a group of such clients."""

    def __call__(self, clients: Sequence[ClientData], *, channels_last: bool) -> _Group:
        """The group, ready to be filled."""
        ...


def groups_of(workspace: Workspace) -> Groups:
    """The workspace's own."""
    made = workspace.captured.get(Groups)
    if not isinstance(made, Groups):
        made = workspace.captured[Groups] = Groups(workspace.module)
    return made


class Groups:
    """A client machine's captured groups, and the stream on which they run."""

    def __init__(self, module: nn.Module) -> None:
        self._stream = torch.cuda.Stream(next(module.parameters()).device)  # type: ignore[no-untyped-call]
        self.random = has_random_layers(module)
        self._made: dict[object, ClientGroup] = {}
        self._most = TOGETHER
        self._channels_last = True
        self.orders = Orders()

    def run(
        self,
        task: Task,
        clients: Sequence[ClientData],
        make: Make[_Made],
        work: Callable[[_Made, Sequence[ClientData]], Result],
    ) -> Iterator[tuple[Sequence[int], Tensor | None, bool]]:
        """Positions, contributions and whether these are in range, group by group; while one is looked at, the next is
        running. Without contributions the steps cannot be captured, and are left to the caller."""
        self._stream.wait_stream(torch.cuda.current_stream())
        before: Launched | None = None
        by_size: dict[int, list[int]] = {}
        for position, data in enumerate(clients):
            by_size.setdefault(task.batches.batch_size(len(data)), []).append(position)
        for size, waiting in by_size.items():
            while waiting:
                if not self._most:
                    yield waiting, None, False
                    break
                count = -(-len(waiting) // -(-len(waiting) // self._most))  # groups of one size: each is captured
                part = [clients[position] for position in waiting[:count]]
                launched = self._launch((*task.key, size, count), make, work, waiting[:count], part)
                if launched is None:
                    continue
                waiting = waiting[count:]
                if before is not None:
                    yield before.positions, before.vectors, before.in_range()
                before = launched
        if before is not None:
            yield before.positions, before.vectors, before.in_range()

    def _launch(
        self,
        key: object,
        make: Make[_Made],
        work: Callable[[_Made, Sequence[ClientData]], Result],
        positions: Sequence[int],
        part: Sequence[ClientData],
    ) -> Launched | None:
        with torch.cuda.stream(self._stream):
            group: _Made | None = self._made.get(key)  # type: ignore[assignment]
            if group is None:
                try:
                    group = self._captured(make, part)
                except torch.cuda.OutOfMemoryError:
                    self._made.clear()
                    torch.cuda.empty_cache()
                    self._most = len(part) // 2
                    return None
                except RuntimeError:
                    self._most = 0  # something waits for the host, or is never the same: launched one by one, it works
                    return None
                self._made[key] = group
            group.weigh(part)
            vectors, largest = work(group, part)
            seen = torch.empty((), dtype=largest.dtype, pin_memory=True)
            seen.copy_(largest, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return Launched(positions, vectors, seen, done)

    def _captured(self, make: Make[_Made], part: Sequence[ClientData]) -> _Made:
        if self._channels_last:
            try:
                return make(part, channels_last=True)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError:  # a network may `view` its pictures in the order they had
                self._channels_last = False
        return make(part, channels_last=False)
