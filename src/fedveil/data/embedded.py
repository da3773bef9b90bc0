"""Small data sets that come with scikit-learn, for demonstrations and tests without any download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from fedveil.data.arrays import Arrays, Part, assemble
from fedveil.data.dataset import Split
from fedveil.data.options import Options


def digits(options: Options) -> Split:
    """1,797 handwritten digits of 8×8 pixels in [0, 1]."""
    from sklearn.datasets import load_digits

    stored = load_digits()
    x = (stored.images / 16.0).astype(np.float32)[:, None]
    names = tuple(str(name) for name in stored.target_names)
    return assemble(Arrays(Part("digits", x, stored.target), classes=names), options, name="digits")


def breast_cancer(options: Options) -> Split:
    """569 tumours, 30 measurements each, benign or malignant."""
    from sklearn.datasets import load_breast_cancer

    stored = load_breast_cancer()
    names = tuple(str(name) for name in stored.target_names)
    arrays = Arrays(Part("breast-cancer", stored.data, stored.target), classes=names)
    split = assemble(arrays, options, name="breast-cancer")
    if not options.normalise:
        return split
    deviation, mean = torch.std_mean(split.train.x, dim=0, correction=0)
    return Split(*(replace(part, x=(part.x - mean) / deviation) for part in (split.train, split.test)))


EMBEDDED: dict[str, Callable[[Options], Split]] = {"digits": digits, "breast-cancer": breast_cancer}
