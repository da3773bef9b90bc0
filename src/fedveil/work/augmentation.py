"""Pictures drawn anew each time they are trained on: a crop, a flip, a hole.

What is drawn follows from the run's seed, the client, the local step and the sample's number alone: a resumed run,
another scheme, another engine, and clients in groups of another size see the same pictures. `draw` gives it as a few
whole numbers per sample; `apply` is a pure function of pictures and those numbers, with shapes that do not depend on
them, so that it runs on any device and inside a captured graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.work.batches import mixed_seed

_PURPOSE = 0xA06
_DRAWS = 5
_TOP, _LEFT, _FLIP, _ROW, _COLUMN = range(_DRAWS)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_STEP, _FIRST, _SECOND = (_signed(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _words(places: Tensor, key: int | Tensor) -> Tensor:
    """63 random bits for each place under a key: splitmix64, whose products are taken modulo 2⁶⁴."""
    state = (places + 1) * _STEP + key
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        state = (state ^ _shifted(state, shift)) * factor
    return _shifted(state ^ _shifted(state, 31), 1)


def _shifted(words: Tensor, count: int) -> Tensor:
    """To the right, with zeros coming in: of negative numbers PyTorch shifts the sign in."""
    return (words >> count) & ((1 << 64 - count) - 1)


@dataclass(frozen=True)
class PictureAugmentation:
    """Random crops, flips and holes for pictures (channels, height, width) of one `size`.

    Args:
        seed: The run's.
        size: Height and width.
        crop: So many pixels are mirrored around a picture, of which a part of its own size is then cut out.
        flip: Whether half of the pictures are turned left to right.
        cutout: The side of a square, its centre anywhere in the picture, that is set to 0, the mean of standardised
            pictures (DeVries and Taylor 2017).
    """

    seed: int
    size: tuple[int, int]
    crop: int = 0
    flip: bool = False
    cutout: int = 0

    def __call__(self, x: Tensor, numbers: Tensor, *, client: int, step: int) -> Tensor:
        """The pictures `x` of a client's samples with these numbers, as they are in a step."""
        return self.apply(x, self.draw(numbers, client=client, step=step).to(x.device, non_blocking=True))

    def draw(self, numbers: Tensor, *, client: int, step: int) -> Tensor:
        """Five whole numbers for each sample: top and left of the crop, flip, row and column of the hole's centre."""
        return self.drawn(numbers, self.key(client, step))

    def key(self, client: int, step: int) -> int:
        """What a client's draws in a step depend on, beside the samples' numbers."""
        return mixed_seed(self.seed, _PURPOSE, client, step)

    def drawn(self, numbers: Tensor, keys: int | Tensor) -> Tensor:
        """What is drawn for samples with these numbers under one key, or under a key each (B, 1)."""
        places = numbers.to(torch.int64)[:, None] * _DRAWS + torch.arange(_DRAWS, device=numbers.device)
        limits = (2 * self.crop + 1, 2 * self.crop + 1, 1 + self.flip, *self.size)
        words = _words(places, keys).unbind(1)
        return torch.stack([word % limit for word, limit in zip(words, limits, strict=True)], 1)

    def apply(self, pictures: Tensor, drawn: Tensor) -> Tensor:
        """(B, channels, height, width) with what was `drawn` for each (B, 5), on the same device."""
        (height, width), drawn = self.size, drawn[:, :, None]
        rows = torch.arange(height, device=pictures.device)
        columns = torch.arange(width, device=pictures.device)
        if self.crop or self.flip:
            across = torch.where(drawn[:, _FLIP] > 0, columns.flip(0), columns)
            down = _mirrored(rows + drawn[:, _TOP] - self.crop, height)
            across = _mirrored(across + drawn[:, _LEFT] - self.crop, width)
            places = (down[:, :, None] * width + across[:, None]).flatten(1)
            every = places[:, None].expand(-1, pictures.shape[1], -1)
            pictures = pictures.flatten(2).gather(2, every).view_as(pictures)
        if self.cutout:
            inside = [
                (place >= centre - self.cutout // 2) & (place < centre - self.cutout // 2 + self.cutout)
                for place, centre in ((rows, drawn[:, _ROW]), (columns, drawn[:, _COLUMN]))
            ]
            pictures = pictures.masked_fill((inside[0][:, :, None] & inside[1][:, None])[:, None], 0.0)
        return pictures


def _mirrored(places: Tensor, size: int) -> Tensor:
    """Places beyond an edge, mirrored at the last pixel before it."""
    return (size - 1) - (size - 1 - places.abs()).abs()
