"""Union-find over classes: united, pinned and multiplied scales come out as declared."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.downlink.slots import ClassSet
from fedveil.downlink.symmetry import PINNED


def scales_of(classes: ClassSet, seed: int = 0) -> torch.Tensor:
    compiled, compact = classes.compile()
    logs = torch.randn(compiled.count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return compiled.scales(logs)[compact]


def test_class_zero_is_one() -> None:
    assert float(scales_of(ClassSet())[PINNED]) == 1.0


def test_united_classes_share_a_scale_and_others_do_not() -> None:
    classes = ClassSet()
    left, right = classes.fresh(3), classes.fresh(3)
    classes.unite(left[:2], right[:2])
    scales = scales_of(classes)
    assert torch.equal(scales[left[:2]], scales[right[:2]])
    assert len(scales[torch.cat([left, right])].unique()) == 4


def test_unions_broadcast() -> None:
    classes = ClassSet()
    rows, one = classes.fresh(3), classes.fresh(1)
    classes.unite(rows[:, None], one[None, :].expand(1, 4))
    assert len(scales_of(classes)[rows].unique()) == 1


def test_a_product_class_has_the_product_of_scales() -> None:
    classes = ClassSet()
    left, right = classes.fresh(3), classes.fresh(3)
    product = classes.product(left, right)
    nested = classes.product(product, left)
    scales = scales_of(classes)
    assert torch.allclose(scales[product], scales[left] * scales[right])
    assert torch.allclose(scales[nested], scales[left] ** 2 * scales[right])


def test_a_product_with_a_pinned_factor_is_the_other_factor() -> None:
    classes = ClassSet()
    left, right = classes.fresh(2), classes.fresh(2)
    early = classes.product(left, torch.tensor(PINNED))
    late = classes.product(left, right)
    classes.pin(right)
    assert torch.equal(classes.find(early), classes.find(left))
    assert torch.equal(classes.find(late), classes.find(left))


def test_uniting_a_product_pins_its_factors_and_counts_the_loss() -> None:
    classes = ClassSet()
    left, right, other = classes.fresh(1), classes.fresh(1), classes.fresh(1)
    product = classes.product(left, right)
    assert classes.lost == 0
    classes.unite(product, other)
    assert not classes.find(torch.cat([left, right, other, product])).any()
    assert classes.lost > 0


def test_unions_of_free_classes_lose_nothing() -> None:
    classes = ClassSet()
    classes.unite(classes.fresh(4), classes.fresh(4))
    assert classes.lost == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["unite", "pin", "product"]), st.integers(0, 30), st.integers(0, 30)), max_size=25
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(STEPS)
def test_every_declared_equation_holds(steps: list[tuple[str, int, int]]) -> None:
    classes = ClassSet()
    ids = classes.fresh(6).tolist()
    equal: list[tuple[int, int]] = []
    products: list[tuple[int, int, int]] = []
    for kind, one, other in steps:
        left, right = ids[one % len(ids)], ids[other % len(ids)]
        if kind == "unite":
            classes.unite(torch.tensor([left]), torch.tensor([right]))
            equal.append((left, right))
        elif kind == "pin":
            classes.pin(torch.tensor([left]))
            equal.append((left, PINNED))
        else:
            made = int(classes.product(torch.tensor([left]), torch.tensor([right])))
            products.append((made, left, right))
            ids.append(made)
    scales = scales_of(classes)
    assert bool((scales > 0).all())
    for left, right in equal:
        assert float(scales[left]) == float(scales[right])
    for made, left, right in products:
        assert abs(float(scales[made] / (scales[left] * scales[right])) - 1.0) < 1e-12
