"""Refusing what is not a usable number, by name."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.errors import NumericError
from fedveil.flat import LARGEST


def check_finite(vector: Tensor, values: Tensor, *, client: int, round: int, chosen: Tensor) -> None:
    """Refuse NaN, infinity and runaway numbers in a contribution, naming the client and the batch."""
    low, high = vector.aminmax()
    if bool((low > -LARGEST) & (high < LARGEST)):  # false for NaN too
        return
    sort = "gradient" if torch.isfinite(values).all() else "loss"
    what = "has grown beyond 2^36" if torch.isfinite(vector).all() else "is not finite"
    first = ", ".join(str(int(one)) for one in chosen[:5])
    more = ", …" if len(chosen) > 5 else ""
    raise NumericError(
        f"The {sort} of client {client} {what} in round {round + 1} "
        f"(batch of {len(chosen)} samples: local numbers {first}{more}). Lower the learning rate (the "
        "square loss often wants 0.01 or less) or check the client's data. Checkpoints written so far are untouched."
    )


def reported(vector: Tensor, values: Tensor) -> Tensor:
    """A contribution that is sent hidden, whatever it holds: a refusal would tell about it, and the uplink cuts it off.

    `values` is the part of it that reports losses: one that is no number is a large one, for 0 would look like success.
    """
    values.nan_to_num_(nan=LARGEST, posinf=LARGEST)
    return vector
