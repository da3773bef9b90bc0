"""Everything reachable from some objects, and whether a secret is among it."""

from __future__ import annotations

import base64
import gc
import math
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from fedveil.crypto.keys import Identity, PairSecret, RunKey
from fedveil.downlink.rescaling import HeadSecret, ScaledVeil
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.key_agreement import Keyring
from fedveil.roles.client import ClientRole
from fedveil.roles.server import ServerRole, ServerState
from fedveil.secrets import Guarded
from fedveil.work.messages import ClientData

# Guarded covers whatever holds secrets by design; each side has some of its own.
CLIENTS_OWN = (Keyring, Identity, RunKey, PairSecret)
SERVERS_OWN = (HeadSecret, ScaledVeil)
SERVER_SIDE = (Guarded, ServerRole, ServerState)
CLIENT_SIDE = (Guarded, ClientRole, ClientState, ClientData, X25519PrivateKey, Ed25519PrivateKey)
_DECIMALS = re.compile(r"-?\d+\.\d{5,}(?:e[+-]?\d+)?")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{40,}")
_DEAD_ENDS = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.GetSetDescriptorType)


@dataclass
class Secrets:
    """Numbers that must not be found. Zero and one are left out: they are found everywhere."""

    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    strings: dict[bytes, str] = field(default_factory=dict)

    def add(self, label: str, values: Tensor | Iterable[float]) -> None:
        if isinstance(values, Tensor):
            values = values.detach().reshape(-1).to(torch.float64).cpu().numpy()
        fresh = np.asarray(list(values), dtype=np.float64)
        fresh = fresh[(fresh != 0.0) & (np.abs(fresh) != 1.0)]
        self.numbers[label] = np.union1d(self.numbers.get(label, np.empty(0)), fresh)

    def add_bytes(self, label: str, content: bytes) -> None:
        """Keys and seeds; of longer strings the beginning is enough."""
        assert len(content) >= 16, "too short to be found for certain"
        self.strings[content[:32]] = label

    def within(self, content: bytes) -> list[str]:
        beginnings = np.sort(np.frombuffer(b"".join(secret[:8] for secret in self.strings), dtype="<u8"))
        for start in range(8):  # a quick look at every place, eight bytes at a time
            if len(content) < start + 8:
                break
            words = np.frombuffer(content, dtype="<u8", count=(len(content) - start) // 8, offset=start)
            if _met(words, beginnings):
                return [label for secret, label in self.strings.items() if secret in content]
        return []

    def among(self, values: np.ndarray) -> list[str]:
        values = values.astype(np.float64)
        values = values[np.isfinite(values)]
        return [label for label, known in self.numbers.items() if _met(values, known)]


def _met(values: np.ndarray, known: np.ndarray) -> bool:
    """Whether any value is among the known ones, which are sorted."""
    if not known.size or not values.size:
        return False
    places = np.minimum(np.searchsorted(known, values), known.size - 1)
    return bool((known[places] == values).any())


def reachable(roots: Iterable[object]) -> Iterator[object]:
    """Every object that can be reached without going through a class or a module.

    Follows what the garbage collector follows (attributes, slots, containers, closures, generators,
    bound methods) and, beyond that, __dict__, the storage behind a tensor and numpy arrays' bases.
    """
    globals_of_modules = {id(vars(one)) for one in list(sys.modules.values()) if isinstance(one, types.ModuleType)}
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or id(one) in globals_of_modules or isinstance(one, _DEAD_ENDS):
            continue
        seen.add(id(one))
        yield one
        waiting.extend(gc.get_referents(one))
        if hasattr(one, "__dict__"):
            waiting.extend(vars(one).values())
        if isinstance(one, np.ndarray) and one.base is not None:
            waiting.append(one.base)
        if isinstance(one, Tensor):
            one = _unwrapped(one)
            if one.is_leaf and one.grad is not None:
                waiting.append(one.grad)


def leaks(
    roots: Iterable[object],
    secrets: Secrets,
    *,
    forbidden: tuple[type, ...] = SERVER_SIDE,
    owned: tuple[type, ...] = CLIENTS_OWN,
    allowed: Iterable[object] = (),
) -> list[str]:
    """A line for every secret that can be reached from `roots`.

    Objects of `forbidden` classes count as secrets, except those of `owned` classes and the `allowed`
    ones; these are looked into all the same.
    """
    found = []
    known = {id(one) for one in allowed}
    kept = list(reachable(roots))  # alive until the end, or ids would be used twice
    for one in kept:
        if isinstance(one, forbidden) and not isinstance(one, owned) and id(one) not in known:
            found.append(f"an object of class {type(one).__name__}")
        elif isinstance(one, Tensor) and one.device.type != "meta":
            # All of the storage, not just the view: what a slice hangs on to counts.
            bare = _unwrapped(one).detach()
            whole = torch.empty(0, dtype=bare.dtype).set_(bare.untyped_storage())
            found += [f"{label} in a tensor of shape {tuple(one.shape)}" for label in secrets.among(whole.numpy())]
            found += [f"{label} in a tensor's bytes" for label in secrets.within(whole.numpy().tobytes())]
        elif isinstance(one, np.ndarray) and one.dtype.kind in "fiu":
            found += [f"{label} in an array" for label in secrets.among(one.reshape(-1))]
            found += [f"{label} in an array's bytes" for label in secrets.within(one.tobytes())]
        elif isinstance(one, (bytes, bytearray, memoryview)):
            found += [f"{label} in bytes" for label in secrets.within(bytes(one))]
        elif isinstance(one, int) and one.bit_length() > 96:
            whole_number = one.to_bytes((one.bit_length() + 7) // 8, "big")
            found += [f"{label} as a number" for label in secrets.within(whole_number)]
        elif isinstance(one, float) and math.isfinite(one):
            found += [f"{label} as the number {one!r}" for label in secrets.among(np.array([one]))]
        elif isinstance(one, str):
            found += leaks_in_text(one, secrets)
    return found


def _unwrapped(tensor: Tensor) -> Tensor:
    # torch.func leaves wrappers behind in a module that it called.
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def leaks_in_text(text: str, secrets: Secrets) -> list[str]:
    """Secrets that were printed, with five digits or more."""
    found = [f"{label} in the text {text[:60]!r}" for label in _spelled(text, secrets)]
    printed = np.array([float(one) for one in _DECIMALS.findall(text)])
    if not printed.size:
        return found
    for label, numbers in secrets.numbers.items():
        near = np.abs(printed[:, None]) - np.abs(numbers)
        if (np.abs(near) <= 2e-6 * np.abs(numbers)).any():
            found.append(f"{label} in the text {text[:60]!r}")
    return found


def _spelled(text: str, secrets: Secrets) -> list[str]:
    # Hexadecimal digits or base64; the latter at any of its three alignments.
    found = [label for secret, label in secrets.strings.items() if secret.hex() in text.lower()]
    for piece in _BASE64.findall(text):
        for start in range(4):
            whole = piece[start : start + (len(piece) - start) // 4 * 4]
            found += secrets.within(base64.b64decode(whole))
    return found
