"""A part of a data set of pictures, for what two cores shall get through: its first samples, as train.npz and test.npz.

`python -m benchmarks.subset FASHION-MNIST OUT --train 6000 --test 2000` reads what `fedveil run --dataset` does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from fedveil import data


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=6000)
    parser.add_argument("--test", type=int, default=2000)
    given = parser.parse_args()
    split = data.load(given.source, seed=0, normalise=False)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, part, count in (("train", split.train, given.train), ("test", split.test, given.test)):
        kept = part.subset(torch.arange(min(count, len(part))))
        pictures = (kept.x * 255).round().to(torch.uint8).movedim(1, -1)  # as files have them: the colour last
        np.savez_compressed(given.out / f"{name}.npz", x=pictures.numpy(), y=kept.y.numpy())
        print(f"{name}: {len(kept)} of {len(part)} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
