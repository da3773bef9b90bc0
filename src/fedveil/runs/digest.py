"""A checksum over tensors: safetensors files have none of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from fedveil.flat import raw


def digest_of(tensors: Mapping[str, Tensor], *texts: str) -> str:
    """SHA-256 over names, types, shapes and numbers (on the CPU), and what else belongs to them."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text.encode()).to_bytes(8, "little") + text.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        digest.update(raw(value).data)
    return digest.hexdigest()
