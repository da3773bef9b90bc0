"""Small data sets in the layouts of the real ones."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

SIDE = 8


def idx_folder(folder: Path, *, train: int = 80, test: int = 40) -> Path:
    """Pictures of a bright column whose place is the class: learnable, and small."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(5)
    for part, count in (("train", train), ("t10k", test)):
        labels = np.arange(count, dtype=np.uint8) % SIDE
        pictures = random.integers(0, 60, (count, SIDE, SIDE), dtype=np.uint8)
        pictures[np.arange(count), :, labels] = 250
        write(folder / f"{part}-images-idx3-ubyte", pictures)
        write(folder / f"{part}-labels-idx1-ubyte", labels)
    return folder


def write(path: Path, values: np.ndarray) -> None:
    shape = struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + shape + values.tobytes())
