"""Flat vectors with named sections: splitting undoes joining."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.tensors import Layout, flatten

SHAPES = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=5)


def layout_of(shapes: list[tuple[int, ...]]) -> Layout:
    return Layout(tuple((f"part{place}", shape) for place, shape in enumerate(shapes)))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(SHAPES.filter(bool))
def test_splitting_undoes_joining(shapes: list[tuple[int, ...]]) -> None:
    layout = layout_of(shapes)
    parts = {name: torch.randn(shape) for name, shape in layout.sections}
    vector = layout.join(parts)
    assert vector.shape == (layout.length,)
    assert layout.length == sum(math.prod(shape) for shape in shapes)
    split = layout.split(vector)
    assert list(split) == list(layout.names)
    for name, part in parts.items():
        assert split[name].shape == part.shape
        assert torch.equal(split[name], part)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(SHAPES)
def test_splitting_keeps_leading_dimensions(shapes: list[tuple[int, ...]]) -> None:
    layout = layout_of(shapes)
    many = torch.randn(2, 3, layout.length)
    for name, part in layout.split(many).items():
        assert part.shape[:2] == (2, 3)
        assert torch.equal(part[1, 2], layout.split(many[1, 2])[name])


def test_a_section_may_be_one_number() -> None:
    layout = Layout((("scale", ()), ("rest", (2,))))
    assert layout.split(torch.tensor([1.0, 2.0, 3.0]))["scale"].shape == ()


def test_sections_are_views() -> None:
    layout = Layout((("a", (2, 2)), ("b", (3,))))
    vector = torch.zeros(7)
    layout.split(vector)["b"].fill_(1.0)
    assert vector.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_a_vector_that_is_too_short_is_refused() -> None:
    with pytest.raises(RuntimeError):
        Layout((("a", (4,)),)).split(torch.zeros(3))


def test_flattening_copies() -> None:
    one, two = torch.ones(2, 2), torch.zeros(1)
    flat = flatten([one, two])
    flat.zero_()
    assert one.tolist() == [[1, 1], [1, 1]]
    assert flatten([]).shape == (0,)
