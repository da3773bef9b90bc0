"""No clipped contribution exceeds its bound at any magnitude: against exact arithmetic, in every form and type."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedveil import models
from fedveil.downlink import Broadcast, Plain, draw
from fedveil.errors import ConfigError
from fedveil.secrets import SecretStream, SeededSecrets
from fedveil.work import Batches, ClientData, CrossEntropy, LocalSteps, Loss, Schedule, SquareLoss, Workspace
from fedveil.work.clipping import SMALLEST_CLIP, ClippedSamples, ClippedUpdate
from fedveil.work.per_sample import (
    Dense,
    Factor,
    clip_weights,
    clipped,
    embedding_weight,
    full_precision,
    linear_weight,
    measured,
    safe_bound,
    working,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e-45, 3e-39, 1e-38, 3.4e38, 1.7e308]
POWERS = st.builds(lambda mantissa, power: mantissa * 10.0**power, st.floats(1, 10), st.integers(-46, 38))
NUMBERS = st.one_of(POWERS, POWERS.map(lambda one: -one), st.floats(-2, 2), st.sampled_from(ODD))
CLIPS = st.sampled_from([SMALLEST_CLIP, 1e-6, 1e-3, 0.1, 1.0, 100.0, 1e9])

Exact = list[list[Fraction]]


def exact(values: Tensor) -> list[Fraction]:
    return [Fraction(one) for one in values.double().flatten().tolist()]


def square(values: list[Fraction]) -> Fraction:
    return sum((one * one for one in values), Fraction(0))


def finite(*tensors: Tensor) -> bool:
    return all(bool(one.isfinite().all()) for one in tensors)


# --- factors, one by one ---------------------------------------------------------------------------------------------


def dense(take: Callable[..., Tensor], samples: int) -> tuple[Factor, list[list[Fraction] | None]]:
    rows = take(samples, 5)
    return Dense(rows), [exact(one) if finite(one) else None for one in rows]


def outer(take: Callable[..., Tensor], samples: int) -> tuple[Factor, list[list[Fraction] | None]]:
    a, d = take(samples, 1, 3), take(samples, 1, 2)
    truth = [[x * y for x in exact(d[k]) for y in exact(a[k])] if finite(a[k], d[k]) else None for k in range(samples)]
    return linear_weight(a, d), truth


def sequence(take: Callable[..., Tensor], samples: int) -> tuple[Factor, list[list[Fraction] | None]]:
    """A layer that is called several times: its gradient is the sum that backward passes make, rounding and all."""
    factor = linear_weight(take(samples, 3, 2), take(samples, 3, 2))
    return factor, [exact(one) if finite(one) else None for one in factor.parts[0]]


def embedding(take: Callable[..., Tensor], samples: int) -> tuple[Factor, list[list[Fraction] | None]]:
    words = torch.tensor([[0, 1, 0], [2, 2, 2], [1, 0, 2]])[torch.arange(samples) % 3]
    values = take(samples, 3, 2)
    factor = embedding_weight(words, values, size=3, padding=None)
    truth: list[list[Fraction] | None] = []
    for k, merged in enumerate(factor.parts[0].reshape(samples, 3, 2)):
        table = [Fraction(0)] * 6
        for word, row in zip(words[k].tolist(), merged, strict=True) if finite(merged) else ():
            for place, value in enumerate(exact(row)):
                table[2 * word + place] += value
        truth.append(table if finite(merged) else None)
    return factor, truth


FORMS = {"dense": dense, "outer": outer, "sequence": sequence, "embedding": embedding}


@settings(deadline=None, max_examples=80)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), clip=CLIPS, samples=st.integers(1, 3))
def test_no_form_of_gradient_exceeds_its_bound_at_any_magnitude(
    data: st.DataObject, dtype: torch.dtype, clip: float, samples: int
) -> None:
    """Every sample's contribution as it is summed, against exact fractions of what went in."""

    def take(*shape: int) -> Tensor:
        # One magnitude for most of a factor, as a crafted layer has it, and single numbers that differ.
        size = math.prod(shape)
        common = data.draw(NUMBERS)
        single = data.draw(st.dictionaries(st.integers(0, size - 1), NUMBERS, max_size=2))
        values = torch.full((size,), common, dtype=torch.float64)
        for place, value in single.items():
            values[place] = value
        return values.reshape(shape).to(dtype)

    names = data.draw(st.lists(st.sampled_from(sorted(FORMS)), min_size=1, max_size=3, unique=True))
    made = {name: FORMS[name](take, samples) for name in names}
    factors, norms = measured({name: factor for name, (factor, _) in made.items()})
    bound = safe_bound(clip, dtype, 1)
    weights = clip_weights(norms, bound, working(dtype)).reshape(samples, 1)
    found = torch.cat([factor.total(weights) for factor in factors.values()], 1)
    assert finite(found)
    for k, row in enumerate(found):
        assert square(exact(row)) <= Fraction(clip) ** 2
        truth = [one for _, rows in made.values() for one in (rows[k] or [None])]  # type: ignore[list-item]
        if None in truth:
            assert not row.any()
            continue
        length = square(truth)  # type: ignore[arg-type]
        # Near zero norms are bounds from above; past the type's range a gradient may count as zero.
        if not Fraction(1, 10**16) < length < Fraction(10**60):
            continue
        factor = min(1.0, clip / math.sqrt(length))
        error = square([x - Fraction(factor) * y for x, y in zip(exact(row), truth, strict=True)])  # type: ignore[operator]
        assert error <= (Fraction(2e-3) * Fraction(factor)) ** 2 * length or float(weights[k]) < 1e-37


def test_values_that_all_but_cancel_are_summed_as_they_are_measured() -> None:
    """A word twice, with values ±1e30 but for the last digit: scaled before they are added, rounding would be all."""
    big = torch.tensor(1e30)
    values = torch.stack([big, -torch.nextafter(big, 2 * big)]).reshape(1, 2, 1)
    factors, norms = measured({"table": embedding_weight(torch.tensor([[0, 0]]), values, size=1, padding=None)})
    for clip in (1.0, 0.3, 1e-3):
        found = factors["table"].total(clip_weights(norms, safe_bound(clip, torch.float32, 1), torch.float32)[:, None])
        assert 0.999 * clip < float(found.abs()) <= clip


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=25)
@given(numbers=st.lists(NUMBERS, min_size=1, max_size=6), clip=CLIPS)
@example(numbers=[1e20] * 6, clip=1.0)
@example(numbers=[1e-30] * 6, clip=SMALLEST_CLIP)
def test_no_vector_exceeds_its_bound_at_any_magnitude(dtype: torch.dtype, numbers: list[float], clip: float) -> None:
    vector = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    found = clipped(vector, clip)
    assert found.dtype == working(dtype)
    assert finite(found)
    assert square(exact(found)) <= Fraction(clip) ** 2
    if not finite(vector):
        assert not found.any()
    elif square(exact(vector)) <= Fraction(clip) ** 2 * Fraction(99, 100):
        assert torch.equal(found, vector.to(found.dtype))


def test_matrices_are_multiplied_without_short_cuts() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


# --- whole networks with crafted layers ------------------------------------------------------------------------------


class Opaque(nn.Module):
    """A recurrent kernel for which vmap has no rule: samples are taken one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.reshape(-1, 3, 2))[0][:, -1])  # type: ignore[no-any-return]


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: models.build("mlp", input_shape=(6,), outputs=3, width=8), (6,)),
    "convolution": (lambda: models.build("cnn", input_shape=(1, 8, 8), outputs=3, width=4), (1, 8, 8)),
    "recurrent": (
        lambda: models.build("gru", input_shape=(7,), outputs=3, vocabulary=12, embedding=4, hidden=5),
        (7,),
    ),
    "words": (lambda: nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Linear(28, 8), nn.Linear(8, 3)), (7,)),
    "sequences": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (3, 2)), nn.Linear(2, 4), nn.Linear(4, 4), nn.Flatten(), nn.Linear(12, 3)
        ),
        (6,),
    ),
    "one by one": (Opaque, (6,)),
}


def opened(model: nn.Module, x: Tensor) -> tuple[Any, Broadcast]:
    architecture, weights = draw(model.train(), x[:2], traced=False)
    veil = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=None)
    return architecture, veil.broadcast()


def scene(name: str, dtype: torch.dtype, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    factory, shape = NETS[name]
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = factory().to(dtype)
    if name in ("recurrent", "words"):
        x = torch.randint(0, 12, (samples, *shape), generator=generator)
    else:
        x = torch.randn(samples, *shape, dtype=torch.float64, generator=generator).to(dtype)
    return model, x, torch.randint(0, 3, (samples,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETS)
@settings(deadline=None, max_examples=4)
@given(
    loss=st.sampled_from([CrossEntropy(), SquareLoss()]),
    powers=st.lists(st.integers(-38, 38), min_size=16, max_size=16),
    clip=CLIPS,
)
@example(loss=CrossEntropy(), powers=[18, 18, -18, -18, -24, -24] + [0] * 10, clip=1e-6)
@example(loss=SquareLoss(), powers=[0, 37, 0, 37, 0, 37] + [0] * 10, clip=1.0)
def test_no_crafted_network_makes_a_sample_exceed_its_bound(
    name: str, dtype: torch.dtype, loss: Loss, powers: list[int], clip: float
) -> None:
    """Layers of any magnitude; each sample is a client of its own, so that its contribution is seen alone."""
    model, x, y = scene(name, dtype, 3)
    architecture, sent = opened(model, x)
    for part, power in zip(architecture.parameters.split(sent.parameters).values(), powers, strict=False):
        part.mul_(10.0 ** (power / 2)).mul_(10.0 ** (power / 2))
    if not finite(sent.parameters):
        return
    work = ClippedSamples(loss, Batches(0, 0), clip)
    workspace = Workspace(architecture, work.layout(architecture, tensors=1))
    clients = [ClientData(k, x[k : k + 1], y[k : k + 1]) for k in range(3)]
    for _, found in work.run_many(workspace, sent, clients, round=0):
        assert isinstance(found, Tensor)
        assert finite(found)
        assert square(exact(found[:-1])) <= Fraction(clip) ** 2
    together = work.run(workspace, sent, ClientData(0, x, y), round=0)
    assert finite(together)
    assert square(exact(together[:-1])) <= (3 * Fraction(clip)) ** 2


@pytest.mark.parametrize("sampling", [None, 0.5])
@settings(deadline=None, max_examples=12)
@given(
    samples=st.sampled_from([2, 70, 300]),
    power=st.integers(-20, 37),
    replaced=st.sampled_from([0.0, 1.0, -1.0, 1e-20, 1e30, math.nan]),
    clip=st.sampled_from([1e-3, 1.0]),
    seed=st.integers(0, 99),
)
def test_rounding_does_not_carry_one_record_past_the_sensitivity(
    sampling: float | None, samples: int, power: int, replaced: float, clip: float, seed: int
) -> None:
    """Single precision, hundreds of samples in one sum: what is rounded away in the others counts too."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator) * 10.0**power
    y = torch.randint(0, 3, (samples,), generator=generator)
    architecture, sent = opened(nn.Linear(6, 3), torch.zeros(2, 6))
    work = ClippedSamples(CrossEntropy(), Batches(0, 0), clip, sampling=sampling)
    workspace = Workspace(architecture, work.layout(architecture, tensors=1), SeededSecrets(seed))
    before = work.run(workspace, sent, ClientData(0, x, y), round=0)
    other = x.clone()
    other[seed % samples] = replaced
    after = work.run(workspace, sent, ClientData(0, other, y), round=0)
    assert before.dtype == torch.float32
    moved = square([a - b for a, b in zip(exact(after), exact(before), strict=True)])
    assert moved <= Fraction(work.sensitivity(samples)) ** 2


class Drawn(SecretStream):
    """Draws the records that the test names."""

    def __init__(self, which: list[int]) -> None:
        super().__init__(b"")
        self._which = which

    def uniform(self, count: int) -> Tensor:
        numbers = torch.ones(count, dtype=torch.float64)
        numbers[self._which] = 0.0
        return numbers


class Drawing:
    """A source of such draws."""

    simulation = True

    def __init__(self, which: list[int]) -> None:
        self._which = which

    def stream(self, *label: str | int) -> SecretStream:
        return Drawn(self._which)


@pytest.mark.parametrize("others", [1, 2, 3, 7, 20, 39])
def test_a_record_more_in_a_secret_batch_does_not_move_what_the_others_contribute(others: int) -> None:
    """Hidden units whose inputs all but cancel: what is left of them is rounding, and so is the gradient's direction.

    Where samples were computed together, a fourth one that contributes nothing moved the sum by 3.6 C.
    """
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(64, generator=generator) + 0.5).repeat(40, 1)
    x[39] = 0.0
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 10, bias=False))
    architecture, sent = opened(model, x)
    first = next(iter(architecture.parameters.split(sent.parameters).values()))
    rows, along = torch.randn(128, 64, dtype=torch.float64, generator=generator), x[0].double()
    first.copy_(((rows - torch.outer(rows @ along, along) / (along @ along)) * 1e8).reshape(first.shape))
    work = ClippedSamples(CrossEntropy(), Batches(0, 0), 1.0, sampling=0.5)

    def contribution(which: list[int]) -> list[Fraction]:
        workspace = Workspace(architecture, work.layout(architecture, tensors=1), Drawing(which))
        return exact(work.run(workspace, sent, ClientData(0, x, torch.zeros(40, dtype=torch.int64)), round=0)[:-1])

    some = list(range(others))
    before, after = contribution(some), contribution([*some, 39])
    reach = Fraction(work.sensitivity(40)) / 2
    assert square(before) > 0
    assert square([a - b for a, b in zip(after, before, strict=True)]) <= reach**2


def test_a_sample_that_overflows_does_not_move_the_weights_of_the_others() -> None:
    """Equal gradients, so that rounding errors of all norms add up; with norms taken anew for all, it was 2.002 C."""
    samples, clip = 8192, 1.0
    rows = torch.full((samples, 100), 1 + 2**-12 + 2**-23)
    bound = safe_bound(clip, torch.float32, samples)

    def total(first: Tensor) -> Tensor:
        factors, norms = measured({"weight": Dense(torch.cat([first[None], rows[1:]]))})
        with full_precision():
            return factors["weight"].total(clip_weights(norms, bound, torch.float32)[None])[0].double()

    for sign in (1.0, -1.0):
        assert float((total(sign * rows[0]) - total(-sign * 1e25 * rows[0])).norm()) <= 2 * clip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=8)
@given(powers=st.lists(st.integers(-38, 38), min_size=6, max_size=6), clip=CLIPS)
def test_no_crafted_network_makes_an_update_exceed_its_bound(
    dtype: torch.dtype, powers: list[int], clip: float
) -> None:
    model, x, y = scene("mlp", dtype, 7)
    architecture, sent = opened(model, x)
    for part, power in zip(architecture.parameters.split(sent.parameters).values(), powers, strict=True):
        part.mul_(10.0 ** (power / 2)).mul_(10.0 ** (power / 2))
    if not finite(sent.parameters):
        return
    work = ClippedUpdate(LocalSteps(CrossEntropy(), Batches(3, 0), Schedule(0.1), steps=2), clip)
    found = work.run(Workspace(architecture, work.layout(architecture, tensors=1)), sent, ClientData(0, x, y), round=0)
    assert finite(found)
    assert square(exact(found[:-1])) <= (7 * Fraction(clip)) ** 2


@pytest.mark.parametrize("clip", [SMALLEST_CLIP / 2, 1e11, 1e300])
def test_a_bound_that_cannot_be_computed_with_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match="must lie between"):
        ClippedSamples(SquareLoss(), Batches(0, 0), clip)
