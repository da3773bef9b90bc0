"""Samples that are read when they are asked for: memory holds a batch of them, not all.

`LazyTensor` is for inputs that are always the same (pictures kept as bytes, a test set): a tensor without a content,
whose rows are made as they are taken. `LazySamples` is for what a client trains on, where a sample may be drawn anew
each time: a random crop, a flip. What global generators give while a sample is read follows from the run's seed, the
client, the step and the sample's number alone, so that a resumed run and another scheme see the same crops; the
generators themselves are left as they were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedveil.errors import Code, DataError, FedVeilError

_aten = torch.ops.aten
# Operations that choose rows: done to the rows' numbers, then these are read.
_CHOOSING: dict[Any, Callable[..., bool]] = {
    _aten.index.Tensor: lambda first, indices: len(indices) == 1,
    _aten.index_select.default: lambda first, dim, index: dim == 0,
    _aten.slice.Tensor: lambda first, dim=0, *limits: dim == 0,
    _aten.select.int: lambda first, dim, index: dim == 0,
}
_CHUNK_BYTES = 16 << 20
_STATISTICS_ROWS = 16

Read = Callable[[Tensor], Tensor]


class LazyTensor(Tensor):
    """A tensor of which x[rows], x[2:5] and x[7] read these rows; any other operation reads all.

    ``read`` gives the rows at the numbers it is given, on the CPU; ``x.to()`` is lazy, too.
    """

    _read: Read

    @staticmethod
    def __new__(
        cls, read: Read, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> LazyTensor:
        """Without a content."""
        made: LazyTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device(device))
        made._read = read
        return made

    def rows(self, numbers: Tensor) -> Tensor:
        """The rows with these numbers, as an ordinary tensor."""
        return self._read(numbers.cpu()).to(self.device, self.dtype)

    def subset(self, numbers: Tensor) -> LazyTensor:
        """Only the rows with these numbers, still lazy."""
        kept = numbers.cpu()
        return self._like(lambda rows: self._read(kept[rows]), (len(kept), *self.shape[1:]))

    def map(self, function: Callable[[Tensor], Tensor]) -> LazyTensor:
        """What ``function`` makes of the rows; it keeps their shape and type."""
        return self._like(lambda rows: function(self._read(rows)), tuple(self.shape))

    def whole(self) -> Tensor:
        """All rows, as an ordinary tensor."""
        result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for span in spans(self):
            result[span] = self[span]
        return result

    def _like(self, read: Read, shape: tuple[int, ...], **kind: Any) -> LazyTensor:
        return LazyTensor(read, shape, **{"dtype": self.dtype, "device": self.device, **kind})

    def __deepcopy__(self, memo: object) -> LazyTensor:
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Rows where rows are chosen; a lazy one where type or device change; otherwise everything."""
        given = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyTensor):
            if operation in _CHOOSING and _CHOOSING[operation](*args):
                numbers = operation(torch.arange(len(first)), *tree_map(_on_cpu, args[1:]))
                return first.rows(numbers) if numbers.dim() else first.rows(numbers[None])[0]
            if operation is _aten._to_copy.default:
                kind = {name: given[name] for name in ("dtype", "device") if given.get(name) is not None}
                return first._like(first._read, tuple(first.shape), **kind)
            if operation is _aten.detach.default:
                return first._like(first._read, tuple(first.shape))
            if operation is _aten.clone.default:
                return first.whole()
        return operation(*tree_map(whole, args), **tree_map(whole, given))


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def whole(value: Any) -> Any:
    """All of a lazy tensor; anything else as it is."""
    return value.whole() if isinstance(value, LazyTensor) else value


def spans(x: Tensor, *, most: int = 1 << 20) -> Iterator[slice]:
    """Slices of at most ``most`` rows and 16 MiB, one after the other, that make up all of ``x``."""
    row = max(1, math.prod(x.shape[1:]) * x.element_size())
    step = max(1, min(most, _CHUNK_BYTES // row))
    return (slice(start, start + step) for start in range(0, len(x), step))


def mapped(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``function`` makes of all rows of ``x``, lazily where it is lazy."""
    return x.map(function) if isinstance(x, LazyTensor) else function(x)


def std_mean(x: Tensor, *, dim: list[int]) -> tuple[Tensor, Tensor]:
    """torch.std_mean(x, dim, correction=0, keepdim=True) in double precision, a few rows at a time, rounded once."""
    total = squares = torch.zeros((), dtype=torch.float64)
    for span in spans(x):
        for part in torch.split(x[span], _STATISTICS_ROWS):
            numbers = part.double()
            total = total + numbers.sum(dim, keepdim=True)
            squares = squares + numbers.square_().sum(dim, keepdim=True)
    count = math.prod(x.shape[axis] for axis in dim)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    return deviation.to(x.dtype), mean.to(x.dtype)


class Cache:
    """How many bytes of samples may be kept so as not to be read again, among all who share it."""

    def __init__(self, size: int = 256 << 20) -> None:
        self._left = size

    def reserve(self, each: int, count: int) -> int:
        """How many of ``count`` samples of ``each`` bytes fit; their room is then taken."""
        fit = min(count, self._left // max(each, 1))
        self._left -= fit * each
        return fit


class LazySamples:
    """One party's samples, each read when it is asked for, and checked: shape, type, NaN, class.

    Samples are kept as far as the cache goes, unless a generator moves while one is read. Each time some are taken from
    there, one is read again: where it has changed (a generator of its own draws it), nothing is kept any more.

    Args:
        fetch: Gives the input and the target of the sample with a number.
        count: How many there are.
        who: Whose they are, for errors.
        dtype: Of floating-point inputs and targets; whole numbers are int64.
        device: Where samples are used.
        seed: A seed for a step and a sample's number.
        cache: Where samples are kept.
    """

    def __init__(
        self,
        fetch: Callable[[int], tuple[Tensor, Tensor]],
        count: int,
        *,
        who: str,
        dtype: torch.dtype,
        device: torch.device,
        seed: Callable[[int, int], int],
        cache: Cache,
    ) -> None:
        if count < 1:
            raise DataError(f"{who} has no samples. Give it data or leave it out.")
        self._fetch, self._count, self._who, self._seed = fetch, count, who, seed
        self._dtype, self._device = dtype, device
        self._like: tuple[Tensor, Tensor] | None = None
        self._classes: int | None = None
        with _generators_as_they_were():
            self._like = x, y = self._sample(0, step=0)[:2]
        self._check_finite(torch.zeros(1, dtype=torch.int64), x[None], y[None])
        each = x.numel() * x.element_size() + y.numel() * y.element_size()
        kept = cache.reserve(each, count)
        self._x, self._y = (torch.empty((kept, *like.shape), dtype=like.dtype, device=device) for like in (x, y))
        self._known = torch.zeros(kept, dtype=torch.bool)
        self._watched = False
        self.repeats = True
        """Whether a sample that is read again in the same step was the same, as far as that was tried."""

    def __len__(self) -> int:
        return self._count

    def expect_classes(self, count: int) -> None:
        """Refuse, from now on, targets that are none of so many classes."""
        self._classes = count
        self._known.fill_(False)

    def keep_apart(self) -> None:
        """Refuse, from now on, samples that are no longer the same after others were read: they hold some of those.

        Global generators are where they were each time a sample is read, so that random transforms repeat. Where a
        sample read three times in a row is three different ones, it is drawn by a generator of its own: that hides
        whether it depends on others, and `repeats` is then False.

        Raises:
            DataError: With `Code.STATEFUL`.
        """
        with _generators_as_they_were():
            for number in {0, self._count // 2}:
                others = [(number + 1) % self._count, self._count - 1]
                _, second, third = (self._sample(number, step=0)[:2] for _ in range(3))
                for other in others:
                    self._sample(other, step=0)
                again = self._sample(number, step=0)[:2]
                if not _equal(second, third):
                    self.repeats = False
                elif not _equal(third, again):
                    raise self._mixes(number)
        self._watched = self.repeats

    def _mixes(self, number: int) -> DataError:
        return DataError(
            f"{self._who}, sample {number}: is another one after other samples were read, and a differential-privacy "
            "claim rests on each sample being made of its own record alone. Keep nothing from one sample for the next "
            "(no mixing, no running statistics), and draw random transforms from the global generators of torch, numpy "
            "or Python, which are seeded for every sample.",
            code=Code.STATEFUL,
        )

    @property
    def inputs(self) -> LazyTensor:
        """All inputs, as step 0 draws them."""
        return self._column(0, lambda rows: self.read(rows)[0])

    @property
    def targets(self) -> LazyTensor:
        """All targets, as step 0 draws them; their inputs are read along with them, a few at a time."""

        def read(rows: Tensor) -> Tensor:
            return torch.cat([self.read(rows[span])[1] for span in spans(self.inputs.subset(rows))])

        return self._column(1, read)

    def _column(self, which: int, read: Read) -> LazyTensor:
        assert self._like is not None
        like = self._like[which]
        return LazyTensor(read, (self._count, *like.shape), dtype=like.dtype, device=self._device)

    def read(self, chosen: Tensor, *, step: int = 0) -> tuple[Tensor, Tensor]:
        """The chosen samples, as they are drawn in a step."""
        assert self._like is not None
        numbers = chosen.cpu()
        with _generators_as_they_were():
            held = self._held(numbers)
            if bool(held.any()) and not self._unchanged(int(numbers[held][step % int(held.sum())]), step):
                self._known = self._known[:0]
                held = torch.zeros_like(held)
            if bool(held.all()):
                where = chosen.to(self._device)
                return self._x[where], self._y[where]
            x, y = (torch.empty((len(numbers), *like.shape), dtype=like.dtype) for like in self._like)
            if bool(held.any()):
                where = numbers[held].to(self._device)
                x[held], y[held] = self._x[where].cpu(), self._y[where].cpu()
            for position in (~held).nonzero().flatten().tolist():
                number = int(numbers[position])
                keeps = number < len(self._known)
                x[position], y[position], moved = self._sample(number, step=step, watch=keeps)
                if moved:
                    self._known = self._known[:0]
                elif keeps:
                    self._x[number], self._y[number] = x[position], y[position]
                    self._known[number] = True
            self._check_finite(numbers, x, y)
            if self._watched and len(numbers):
                position = step % len(numbers)
                again = self._sample(int(numbers[position]), step=step)[:2]
                if not _equal((x[position], y[position]), again):
                    raise self._mixes(int(numbers[position]))
        return x.to(self._device), y.to(self._device)

    def _held(self, numbers: Tensor) -> Tensor:
        if not len(self._known):
            return torch.zeros(len(numbers), dtype=torch.bool)
        return (numbers < len(self._known)) & self._known[numbers.clamp(max=len(self._known) - 1)]

    def _unchanged(self, number: int, step: int) -> bool:
        x, y, moved = self._sample(number, step=step, watch=True)
        equal = _equal((self._x[number].cpu(), self._y[number].cpu()), (x, y))
        if self._watched and not moved and not equal:
            raise self._mixes(number)
        return equal and not moved

    def _sample(self, number: int, *, step: int, watch: bool = False) -> tuple[Tensor, Tensor, bool]:
        """Input and target of one sample, checked, and whether a generator moved (if it is to be watched)."""
        where = f"{self._who}, sample {number}"
        seed = self._seed(step, number)
        _seed_generators(seed)
        if watch:
            untouched = _next_draws()
            _seed_generators(seed)
        try:
            x, y = self._fetch(number)
        except FedVeilError as reason:
            raise DataError(f"{where}: {reason}") from reason
        except Exception as reason:  # whatever somebody's own code runs into
            said = " ".join(str(reason).split())[:200]
            raise DataError(f"{where}: cannot be read ({type(reason).__name__}: {said}).") from reason
        moved = watch and _next_draws() != untouched
        x = x.to(self._dtype if x.is_floating_point() else torch.int64)
        y = y.to(self._dtype if y.is_floating_point() else torch.int64)
        for what, value, like in zip(("input", "target"), (x, y), self._like or (x, y), strict=True):
            if value.shape != like.shape or value.dtype != like.dtype:
                raise DataError(
                    f"{where}: the {what} is {_kind(value)}, that of sample 0 {_kind(like)}. Bring all samples to one "
                    "shape and type."
                )
        if self._classes is not None and not y.is_floating_point() and not 0 <= int(y) < self._classes:
            raise DataError(
                f"{where} has class {int(y)}, but the model has {self._classes} outputs (classes 0 to "
                f"{self._classes - 1})."
            )
        return x.cpu(), y.cpu(), moved

    def _check_finite(self, numbers: Tensor, x: Tensor, y: Tensor) -> None:
        for what, values in (("input", x), ("target", y)):
            finite = torch.isfinite(values).flatten(1).all(1) if values.is_floating_point() else None
            if finite is not None and not bool(finite.all()):
                number = int(numbers[int((~finite).nonzero()[0])])
                raise DataError(
                    f"{self._who}, sample {number}: the {what} holds NaN or infinity. Clean it before training."
                )


class Transform:
    """A function of one sample's input, called anew each time the sample is trained on.

    What it draws from global generators follows from a seed for client, step and number, as where samples are read.

    Args:
        function: Takes an input and gives one of the same shape.
        seed: A seed for a client, a step and a sample's number.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], seed: Callable[[int, int, int], int]) -> None:
        self._function, self._seed = function, seed

    def __call__(self, x: Tensor, numbers: Tensor, *, client: int, step: int) -> Tensor:
        """The inputs ``x`` of a client's samples with these numbers, as they are in a step."""
        with _generators_as_they_were():
            made = [
                self._made(row, int(number), client=client, step=step)
                for row, number in zip(x.cpu(), numbers.tolist(), strict=True)
            ]
        return torch.stack(made).to(x.device)

    def _made(self, row: Tensor, number: int, *, client: int, step: int) -> Tensor:
        where = f"Client {client}, sample {number}"
        _seed_generators(self._seed(client, step, number))
        try:
            made = self._function(row.clone())
        except Exception as reason:  # whatever somebody's own code runs into
            said = " ".join(str(reason).split())[:200]
            raise DataError(f"{where}: augment raised {type(reason).__name__}: {said}.") from reason
        if not isinstance(made, Tensor) or made.shape != row.shape or made.dtype != row.dtype:
            kind = _kind(made) if isinstance(made, Tensor) else type(made).__name__
            raise DataError(f"{where}: augment made {kind} of {_kind(row)}. Give back the same shape and type.")
        if made.is_floating_point() and not bool(made.isfinite().all()):
            raise DataError(f"{where}: augment made NaN or infinity.")
        return made.detach().cpu()


def _equal(first: tuple[Tensor, Tensor], again: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


_BITS = np.random.MT19937(0)
_numpy: Any = np.random  # whose stubs leave out the next two functions


@contextmanager
def _generators_as_they_were() -> Iterator[None]:
    """Leave Python's, numpy's and torch's global generators as they were found."""
    ours, theirs = random.getstate(), torch.default_generator.get_state()
    bits = _numpy.get_bit_generator()
    _numpy.set_bit_generator(_BITS)  # which is much faster than copying its state twice
    try:
        yield
    finally:
        random.setstate(ours)
        _numpy.set_bit_generator(bits)
        torch.default_generator.set_state(theirs)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's global generators, seeded inside and afterwards as they were."""
    with _generators_as_they_were():
        _seed_generators(seed)
        yield


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU for good


def _next_draws() -> tuple[float, ...]:
    """What the generators give next: after something was drawn, something else than after seeding."""
    return random.random(), float(np.random.random_sample()), float(torch.rand((), dtype=torch.float64))
