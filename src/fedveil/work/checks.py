"""Refusing what is not a number, by name."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.errors import NumericError


def check_finite(vector: Tensor, values: Tensor, *, client: int, round: int, chosen: Tensor) -> None:
    """Refuse NaN and infinity in a contribution, naming the client and the batch."""
    if torch.isfinite(vector.sum()) or torch.isfinite(vector).all():
        return
    sort = "gradient" if torch.isfinite(values).all() else "loss"
    first = ", ".join(str(int(one)) for one in chosen[:5])
    more = ", …" if len(chosen) > 5 else ""
    raise NumericError(
        f"The {sort} of client {client} is not finite in round {round + 1} "
        f"(batch of {len(chosen)} samples: local numbers {first}{more}). Lower the learning rate, check the "
        "client's data, or train with --dtype float64. Checkpoints written so far are untouched."
    )
