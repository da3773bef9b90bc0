"""Lazy tensors give what ordinary ones would; lazy samples are drawn by seed, client, step and number."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil.data import Dataset
from fedveil.data import lazy as module
from fedveil.data.lazy import Cache, LazySamples, LazyTensor, spans
from fedveil.errors import DataError
from fedveil.work.batches import mixed_seed

CONTENT = torch.arange(60.0).reshape(10, 2, 3)


class Reading:
    """Rows of a tensor, and which of them were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, rows: Tensor) -> Tensor:
        self.asked += rows.tolist()
        return CONTENT[rows]


@pytest.mark.parametrize(
    ("take", "rows"),
    [
        (lambda x: x[torch.tensor([7, 1, 1])], [7, 1, 1]),
        (lambda x: x[2:5], [2, 3, 4]),
        (lambda x: x[-1], [9]),
        (lambda x: x[1:9:3], [1, 4, 7]),
        (lambda x: x[torch.arange(10) % 4 == 0], [0, 4, 8]),
        (lambda x: x.index_select(0, torch.tensor([3])), [3]),
        (lambda x: x[[5, 2]], [5, 2]),
    ],
)
def test_choosing_rows_reads_these_rows_alone(take: Callable[[Tensor], Tensor], rows: list[int]) -> None:
    read = Reading()
    taken = take(LazyTensor(read, (10, 2, 3), dtype=torch.float32))
    assert read.asked == rows
    assert type(taken) is Tensor
    assert torch.equal(taken, take(CONTENT))


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.min(),
        lambda x: torch.cat([x, x]),
        lambda x: x.flatten(1) @ torch.ones(6, 2),
        lambda x: x[:, 1],
        lambda x: x[torch.tensor([0, 1]), torch.tensor([1, 0])],
        lambda x: torch.isfinite(x),
        lambda x: x.clone(),
        lambda x: torch.stack(list(torch.split(x, 4)[0])),
    ],
)
def test_anything_else_is_done_to_all_rows(use: Callable[[Tensor], Tensor]) -> None:
    done = use(LazyTensor(Reading(), (10, 2, 3), dtype=torch.float32))
    assert type(done) is Tensor
    assert torch.equal(done, use(CONTENT))


def test_type_subset_and_map_stay_lazy() -> None:
    read = Reading()
    x = LazyTensor(read, (10, 2, 3), dtype=torch.float32)
    changed = x.to(torch.float64).subset(torch.tensor([8, 3, 5])).map(lambda rows: rows * 2)
    assert read.asked == []
    assert (changed.dtype, tuple(changed.shape)) == (torch.float64, (3, 2, 3))
    assert torch.equal(changed[1:], 2 * CONTENT[[3, 5]].double())
    assert read.asked == [3, 5]
    assert torch.equal(changed.whole(), 2 * CONTENT[[8, 3, 5]].double())


def test_a_data_set_of_a_lazy_tensor_reads_nothing_until_it_is_asked() -> None:
    read = Reading()
    x = LazyTensor(read, (10, 2, 3), dtype=torch.float32)
    part = Dataset("lazy", "classification", x, torch.arange(10) % 2, 2).subset(torch.tensor([4, 2])).to(device="cpu")
    assert (len(part), part.input_shape, read.asked) == (2, (2, 3), [])
    assert torch.equal(part.x[:1], CONTENT[4:5])
    assert read.asked == [4]


def test_spans_are_bounded_in_rows_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(CONTENT[span]) for span in spans(CONTENT, most=4)] == [4, 4, 2]
    monkeypatch.setattr(module, "_CHUNK_BYTES", 3 * 6 * 4)
    assert [len(CONTENT[span]) for span in spans(CONTENT, most=4)] == [3, 3, 3, 1]


class Drawn:
    """Samples with a draw from every global generator in them; counts how often they were read."""

    def __init__(self, draw: Callable[[], float] | None = None) -> None:
        self.reads = 0
        self.draw = draw

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        more = 0.0 if self.draw is None else self.draw()
        return torch.full((3,), float(number)) + more, torch.tensor(number % 2)


def samples(fetch: Callable[[int], tuple[Tensor, Tensor]], *, client: int = 0, cache: int = 1 << 20) -> LazySamples:
    return LazySamples(
        fetch,
        6,
        who=f"Client {client}",
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=partial(mixed_seed, 5, client),
        cache=Cache(cache),
    )


ALL = torch.arange(6)
GENERATORS = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),
    "python": lambda: random.random(),
    "numpy's normal": lambda: float(np.random.randn()),
}


@pytest.mark.parametrize("draw", GENERATORS)
def test_draws_are_fresh_each_step_and_follow_from_seed_client_step_and_sample(draw: str) -> None:
    ours, again = samples(Drawn(GENERATORS[draw])), samples(Drawn(GENERATORS[draw]))
    first, second = ours.read(ALL, step=0)[0], ours.read(ALL, step=1)[0]
    assert not torch.equal(first, second)
    assert len({float(value) for value in (first - ALL[:, None])[:, 0]}) == 6, "samples do not share a draw"
    # In another order, after other steps, in other batches: the same.
    assert torch.equal(again.read(torch.tensor([4, 2]), step=1)[0], second[[4, 2]])
    assert torch.equal(again.read(ALL, step=0)[0], first)
    assert not torch.equal(samples(Drawn(GENERATORS[draw]), client=1).read(ALL, step=0)[0], first)


def test_global_generators_stay_as_they_were() -> None:
    def draws() -> list[float]:
        return [draw() for draw in GENERATORS.values()]

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    expected = draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    lazy = samples(Drawn(lambda: sum(draws())))
    lazy.read(ALL, step=2)
    with pytest.raises(DataError):
        samples(lambda number: (_ for _ in ()).throw(ValueError(str(draws()))))
    assert draws() == expected


def test_what_draws_nothing_is_read_once_but_for_one_sample_a_step() -> None:
    fetch = Drawn()
    lazy = samples(fetch)
    x, y = lazy.read(ALL, step=0)
    assert fetch.reads == 1 + 6  # one says what the others are like
    for step in (1, 2):
        again = lazy.read(ALL, step=step)
        assert torch.equal(again[0], x)
        assert torch.equal(again[1], y)
    assert fetch.reads == 7 + 2
    again[0].zero_()
    assert torch.equal(lazy.read(ALL, step=3)[0], x), "what is handed out may be changed"


def test_the_cache_is_bounded_and_shared() -> None:
    each = 3 * 4 + 8
    assert Cache(100).reserve(each, 2) == 2
    fetch = Drawn()
    lazy = samples(fetch, cache=4 * each + 3)
    for step in range(3):
        assert torch.equal(lazy.read(ALL, step=step)[0][:, 0], ALL.float())
    assert fetch.reads == 1 + 6 + 2 * (1 + 2)  # four are kept, two are read every time


def test_a_generator_of_its_own_is_noticed_and_nothing_is_kept_any_more() -> None:
    own = np.random.default_rng(1)
    lazy = samples(Drawn(own.random))
    first, second, third = (lazy.read(ALL, step=step)[0] for step in range(3))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (
            lambda x, y: (x[:2], y),
            r"the input is float32 of shape \(2,\), that of sample 0 float32 of shape \(3,\)",
        ),
        (lambda x, y: (x.long(), y), "the input is int64 of shape"),
        (lambda x, y: (x, y.float()), "the target is float32"),
        (lambda x, y: (x * float("nan"), y), "the input holds NaN or infinity"),
        (lambda x, y: (x, y + 7), r"has class 7, but the model has 2 outputs \(classes 0 to 1\)"),
        (lambda x, y: 1 // 0, r"cannot be read \(ZeroDivisionError"),
    ],
)
def test_a_sample_that_does_not_fit_is_named_with_its_client_when_it_is_read(
    broken: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], complaint: str
) -> None:
    good = Drawn()
    lazy = samples(lambda number: broken(*good(number)) if number == 4 else good(number), client=2)
    lazy.expect_classes(2)
    lazy.read(torch.tensor([0, 1, 5]))
    with pytest.raises(DataError, match=rf"Client 2, sample 4:? {complaint}"):
        lazy.read(ALL)


def test_targets_alone_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2 * 3 * 4)
    lazy, sizes = samples(Drawn()), []
    read = lazy.read
    monkeypatch.setattr(lazy, "read", lambda rows, **step: sizes.append(len(rows)) or read(rows, **step))
    assert lazy.targets.whole().tolist() == [0, 1, 0, 1, 0, 1]
    assert max(sizes) == 2
