"""Plain fields and tensors as one piece of bytes, for state that is sealed: no pickle, nothing executable."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.flat import raw
from fedveil.protocol.wire import tensor_at

_DTYPES = {str(one): one for one in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)}


def as_bytes(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Length of the header, the header (JSON), the tensors' raw bytes in its order."""
    shapes = {name: [str(one.dtype), list(one.shape)] for name, one in tensors.items()}
    header = json.dumps({"fields": fields, "tensors": shapes}).encode()
    parts = [raw(one).tobytes() for one in tensors.values()]
    return b"".join([struct.pack("<Q", len(header)), header, *parts])


def from_stored(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors back; damage is refused, and takes no more memory than what is damaged."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        content, position, tensors = memoryview(data), 8 + length, {}
        for name, (kind, shape) in header["tensors"].items():
            tensors[name], position = tensor_at(content, position, _DTYPES[kind], shape)
        return dict(header["fields"]), tensors
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        raise ProtocolError("stored state is damaged") from reason
