"""Pictures drawn anew: what is drawn follows from seed, client, step and sample alone, and is done as it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.runs.recipe import augmentation_of
from fedveil.work import ClientData
from fedveil.work.batches import PictureAugmentation

ALL = PictureAugmentation(seed=3, size=(7, 9), crop=3, flip=True, cutout=4)


def pictures(count: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, 7, 9, generator=torch.Generator().manual_seed(seed)) + 5.0  # none of them is 0


def one_by_one(how: PictureAugmentation, x: Tensor, drawn: Tensor) -> Tensor:
    """The same with PyTorch's own padding and slices, a picture at a time."""
    made = []
    for picture, (top, left, flip, row, column) in zip(x, drawn.tolist(), strict=True):
        wide = pad(picture[None], (how.crop,) * 4, mode="reflect")[0] if how.crop else picture
        cut = wide[:, top : top + how.size[0], left : left + how.size[1]]
        cut = (cut.flip(2) if flip else cut).clone()
        top, left = row - how.cutout // 2, column - how.cutout // 2
        cut[:, max(0, top) : max(0, top + how.cutout), max(0, left) : max(0, left + how.cutout)] = 0.0
        made.append(cut)
    return torch.stack(made)


@pytest.mark.parametrize("crop", [0, 1, 3])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("cutout", [0, 1, 4, 5])
def test_pictures_are_padded_cut_turned_and_holed_as_drawn(crop: int, flip: bool, cutout: int) -> None:
    how = replace(ALL, crop=crop, flip=flip, cutout=cutout)
    x = pictures(40)
    drawn = how.draw(torch.arange(40), client=1, step=2)
    made = how.apply(x, drawn)
    assert torch.equal(made, one_by_one(how, x, drawn))
    assert torch.equal(made, x) == (not (crop or flip or cutout))
    assert torch.equal(x, pictures(40))  # which are not changed themselves


def test_nothing_is_asked_of_the_values_on_the_way() -> None:
    """Tensors without values, of which nothing can be read back: no loop over samples, no waiting for a device."""
    drawn = ALL.draw(torch.empty(12, dtype=torch.int64, device="meta"), client=1, step=2)
    assert drawn.shape == (12, 5)
    assert ALL.apply(pictures().to("meta"), drawn).shape == (12, 2, 7, 9)


def test_a_sample_is_drawn_alike_in_any_batch_and_in_any_order() -> None:
    x, numbers = pictures(), torch.arange(12)
    together = ALL(x, numbers, client=4, step=7)
    for chosen in (torch.tensor([5]), torch.tensor([11, 0, 3]), numbers.flip(0)):
        assert torch.equal(ALL(x[chosen], chosen, client=4, step=7), together[chosen])
    assert torch.equal(ALL.draw(numbers, client=4, step=7), ALL.draw(numbers, client=4, step=7))


def test_seed_client_step_and_sample_each_change_what_is_drawn() -> None:
    numbers = torch.arange(64)
    base = ALL.draw(numbers, client=0, step=0)
    others = [ALL.draw(numbers, client=1, step=0), ALL.draw(numbers, client=0, step=1)]
    others += [replace(ALL, seed=4).draw(numbers, client=0, step=0), ALL.draw(numbers + 64, client=0, step=0)]
    for other in others:  # all five numbers agree by chance in one of 49·2·63 samples
        assert float((base == other).all(1).float().mean()) < 0.1


def test_draws_are_uniform_and_do_not_hang_together() -> None:
    """χ² of every column and of every two columns; the seed is fixed, and of another one in 10⁴ would fail."""
    count = 40_000
    drawn = torch.cat([ALL.draw(torch.arange(count // 40), client=client, step=9) for client in range(40)])
    limits = (7, 7, 2, 7, 9)
    cells = [(drawn[:, column], limit) for column, limit in enumerate(limits)]
    cells += [
        (drawn[:, left] * limits[right] + drawn[:, right], limits[left] * limits[right])
        for left in range(5)
        for right in range(left)
    ]
    for values, limit in cells:
        counts = torch.bincount(values, minlength=limit).double()
        assert len(counts) == limit
        excess = float(((counts - count / limit) ** 2 / (count / limit)).sum()) - (limit - 1)
        assert abs(excess) < 5 * (2 * (limit - 1)) ** 0.5 + 10


def test_samples_are_augmented_where_they_are_trained_on_and_nowhere_else() -> None:
    plain = ClientData(2, pictures(), torch.arange(12))
    data, chosen = replace(plain, augment=ALL), torch.tensor([3, 8, 1])
    assert torch.equal(data.take(chosen)[0], plain.take(chosen)[0])
    x, y = data.take(chosen, step=5)
    assert torch.equal(x, ALL(plain.x[chosen], chosen, client=2, step=5))
    assert torch.equal(y, chosen)
    assert not torch.equal(x, data.take(chosen, step=6)[0])
    rows = torch.tensor([7, 2, 9])
    shared = ClientData(2, plain.x, plain.y, rows=rows, augment=ALL)  # the client's own numbers count, not the rows
    own = ClientData(2, plain.x[rows], plain.y[rows], augment=ALL)
    assert torch.equal(shared.take(torch.arange(3), step=1)[0], own.take(torch.arange(3), step=1)[0])
    assert torch.equal(shared.take(torch.tensor([2, 0]), step=1)[0], own.take(torch.tensor([2, 0]), step=1)[0])


@pytest.mark.parametrize(
    ("text", "shape", "words", "complaint"),
    [
        ("crop", (30,), False, "the samples of digits are numbers of shape"),
        ("flip", (30,), True, "the samples of digits are texts"),
        ("cutout", (1, 8, 8), False, "cutout:8 is as large as the pictures of 8×8 pixels; write a smaller one"),
        ("crop:9,flip", (1, 28, 9), False, "like crop:2"),
        ("crop:1", (1, 1, 7), False, "crop:1 is as large as the pictures of 1×7 pixels; leave crop out"),
        ("python:turned", (1, 28, 28), False, "given as a function from Python"),
    ],
)
def test_what_cannot_be_augmented_is_refused_by_name(
    text: str, shape: tuple[int, ...], words: bool, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        augmentation_of(RunConfig(augment=text, seed=1), shape, text=words)


def test_sizes_are_the_usual_ones_unless_they_are_given() -> None:
    usual = augmentation_of(RunConfig(augment="crop,flip,cutout", seed=1), (3, 32, 32))
    assert usual == PictureAugmentation(1, (32, 32), 4, True, 8)
    given = augmentation_of(RunConfig(augment="cutout:16, crop:2", seed=1), (3, 32, 30))
    assert given == PictureAugmentation(1, (32, 30), 2, False, 16)
    assert augmentation_of(RunConfig(seed=1), (3, 32, 32)) is None
