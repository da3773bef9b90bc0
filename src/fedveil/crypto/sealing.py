"""Sealing: state leaves a process only encrypted and authenticated."""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedveil.errors import ProtocolError

_NONCE = 12


def seal(plain: bytes, *, key: bytes, purpose: str) -> bytes:
    """AES-256-GCM under a fresh nonce; `purpose` is authenticated with it."""
    nonce = os.urandom(_NONCE)
    return nonce + AESGCM(key).encrypt(nonce, plain, purpose.encode())


def unseal(sealed: bytes, *, key: bytes, purpose: str) -> bytes:
    """The plain bytes, or a ProtocolError if key, purpose or content do not match."""
    try:
        return AESGCM(key).decrypt(sealed[:_NONCE], sealed[_NONCE:], purpose.encode())
    except (InvalidTag, ValueError) as reason:
        raise ProtocolError(f"a sealed {purpose} was damaged, or sealed under another key") from reason
