"""Plain fields and tensors as one piece of bytes, for state that is sealed: no pickle, nothing executable."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedveil.errors import ProtocolError

_DTYPES = {str(one): one for one in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)}


def as_bytes(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Length of the header, the header (JSON), the tensors' raw bytes in its order."""
    flat = {name: one.detach().cpu().contiguous() for name, one in tensors.items()}
    shapes = {name: [str(one.dtype), list(one.shape)] for name, one in flat.items()}
    header = json.dumps({"fields": fields, "tensors": shapes}).encode()
    raw = [one.reshape(-1).view(torch.uint8).numpy().tobytes() if one.numel() else b"" for one in flat.values()]
    return b"".join([struct.pack("<Q", len(header)), header, *raw])


def from_stored(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors back."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        position, tensors = 8 + length, {}
        for name, (kind, shape) in header["tensors"].items():
            dtype = _DTYPES[kind]
            count = dtype.itemsize * int(torch.Size(shape).numel())
            raw = bytearray(data[position : position + count])
            if len(raw) != count:
                raise ProtocolError("stored state is truncated")
            tensors[name] = (
                torch.frombuffer(raw, dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
            )
            position += count
        return dict(header["fields"]), tensors
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as reason:
        raise ProtocolError("stored state is damaged") from reason
