"""A veiled model is matched with another: exactly where both are the same, nearly where training lies between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from downlink.exactness import scramble
from downlink.modern import NETWORKS
from downlink.test_streams import NETWORKS as STREAMS
from fedveil import models
from fedveil.audit.matching import aligning_basis, balancing_basis
from fedveil.downlink import Architecture, Rescaling, ScaleTable, Weights, draw
from fedveil.downlink.rescaling import scale_table
from fedveil.errors import DataError
from fedveil.secrets import SeededSecrets
from pairs import crossed

FAMILIES = ("scale", "signed", "isometry", "full")
CATALOGUE = {
    "our mlp": {"depth": 3, "width": 16, "input_shape": (64,)},
    "our cnn": {"width": 4, "norm": "batch", "input_shape": (1, 8, 8)},
    "our transformer": {"width": 16, "depth": 1, "heads": 2, "input_shape": (8,), "vocabulary": 9},
    "our decoder": {"width": 16, "depth": 1, "hidden": 24, "input_shape": (8,), "vocabulary": 9},
}


def drawn(name: str, family: str, seed: int = 1, *, streams: bool = False) -> tuple[Architecture, Weights]:
    if name in CATALOGUE:
        options = dict(CATALOGUE[name])
        shape = options["input_shape"]
        model = models.build(name.removeprefix("our "), outputs=5, seed=seed, **options)  # type: ignore[arg-type]
        example = torch.zeros((2, *shape), dtype=torch.int64 if "vocabulary" in options else torch.float64)  # type: ignore[misc]
    else:
        make, example = (STREAMS if streams else NETWORKS)[name][:2]
        torch.manual_seed(seed)
        model = make()
    model = model.double()
    scramble(model, seed)
    example = example.double() if example.is_floating_point() else example
    return draw(model, example, traced=True, family=family, streams=streams)


def sent(architecture: Architecture, flat: Tensor, family: str, seed: int) -> Tensor:
    weights = Weights(flat, torch.empty(0), torch.empty(0), {})
    veil = Rescaling(family=family).veil(
        architecture, weights, stream=SeededSecrets(seed).stream("veil"), head_level=None
    )
    return scale_table(architecture).hide(flat, veil._basis)


def matched(table: ScaleTable, moving: Tensor, target: Tensor) -> Tensor:
    return table.hide(moving, aligning_basis(table, moving, target))


def off(guess: Tensor, true: Tensor) -> float:
    return float((guess - true).norm() / true.norm())


def noise(like: Tensor, seed: int = 4) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_that_is_known_is_found_again_under_every_secret(name: str) -> None:
    architecture, weights = drawn(name, "full")
    flat, table = weights.parameters, scale_table(architecture)
    veiled = sent(architecture, flat, "full", seed=5)
    assert off(veiled, flat) > 0.1, "this test could not fail"
    assert off(matched(table, veiled, flat), flat) < 1e-9


@pytest.mark.parametrize(("name", "family"), crossed(list(CATALOGUE), FAMILIES))
def test_what_lies_between_two_rounds_comes_out(name: str, family: str) -> None:
    """A change in all directions; those in which a veil moves models cannot be told from it: few, or none."""
    architecture, weights = drawn(name, family)
    flat, table = weights.parameters, scale_table(architecture)
    change = 1e-3 * noise(flat)
    first, second = (sent(architecture, model, family, seed) for seed, model in ((5, flat), (6, flat + change)))
    fresh = drawn(name, family, seed=9)[1].parameters
    frame = table.hide(first, balancing_basis(table, first, fresh))
    update = matched(table, second, frame) - frame
    truly = table.hide(update, aligning_basis(table, frame, flat))
    cosine = float(truly @ change / (truly.norm() * change.norm()))
    if family == "signed":
        assert off(truly, change) < 1e-9
    assert cosine > (0.9 if family in ("scale", "full") else 0.97)
    assert off(matched(table, second, flat), flat + change) < 1e-3


@pytest.mark.parametrize("name", STREAMS)
def test_rotated_streams_are_matched_too(name: str) -> None:
    """In the folded network, which is what clients are sent; what moves along its symmetries cannot be told apart."""
    (architecture, weights), fresh = (drawn(name, "full", seed, streams=True) for seed in (1, 9))
    table, true = scale_table(architecture), weights.parameters
    changed = true + 1e-3 * noise(true)
    first, second = (sent(architecture, model, "full", seed) for seed, model in ((5, true), (6, changed)))
    flat, change = table.folded(true), table.folded(changed) - table.folded(true)
    table = table.sent
    assert off(first, flat) > 0.1, "this test could not fail"
    assert off(matched(table, first, flat), flat) < 1e-9
    frame = table.hide(first, balancing_basis(table, first, scale_table(architecture).folded(fresh[1].parameters)))
    truly = table.hide(matched(table, second, frame) - frame, aligning_basis(table, frame, flat))
    assert float(truly @ change / (truly.norm() * change.norm())) > 0.9


@pytest.mark.parametrize("family", FAMILIES)
def test_two_models_that_have_nothing_to_do_with_each_other_stay_apart(family: str) -> None:
    """2,000 numbers: the best of all orders leaves more than half of the distance (0.1 would be a match)."""
    architecture, weights = drawn("our mlp", family)
    other = drawn("our mlp", family, seed=2)[1].parameters
    got = matched(scale_table(architecture), sent(architecture, other, family, 5), weights.parameters)
    assert off(got, weights.parameters) > 0.5


def test_what_is_covered_by_something_else_is_left_out() -> None:
    architecture, weights = drawn("our mlp", "signed")
    flat, table = weights.parameters, scale_table(architecture)
    veiled = sent(architecture, flat, "signed", 5)
    architecture.parameters.part(veiled, "head.weight").mul_(0.0).add_(100.0)
    basis = aligning_basis(table, veiled, flat, ignored=("head.weight",))
    got = architecture.parameters.split(table.hide(veiled, basis))
    true = architecture.parameters.split(flat)
    assert all(torch.equal(got[name], true[name]) for name in true if name != "head.weight")


def test_models_of_another_network_are_refused() -> None:
    architecture, weights = drawn("our mlp", "signed")
    table, flat = scale_table(architecture), weights.parameters
    with pytest.raises(DataError, match="cannot be matched"):
        aligning_basis(table, flat[1:], flat)
    with pytest.raises(DataError, match="cannot be matched"):
        aligning_basis(table, flat, torch.full_like(flat, torch.nan))
