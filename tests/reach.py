"""Everything reachable from some objects, and whether a secret is among it."""

from __future__ import annotations

import gc
import math
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedveil.downlink.rescaling import HeadSecret, ScaledVeil
from fedveil.protocol import ServerRole, ServerState
from fedveil.secrets import Guarded, OsSecrets, SecretStream, SeededSecrets

FORBIDDEN = (Guarded, HeadSecret, ScaledVeil, SeededSecrets, OsSecrets, SecretStream, ServerRole, ServerState)
_DECIMALS = re.compile(r"-?\d+\.\d{5,}(?:e[+-]?\d+)?")
_DEAD_ENDS = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.GetSetDescriptorType)


@dataclass
class Secrets:
    """Numbers that must not be found. Zero and one are left out: they are found everywhere."""

    numbers: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, label: str, values: Tensor | Iterable[float]) -> None:
        if isinstance(values, Tensor):
            values = values.detach().reshape(-1).to(torch.float64).cpu().numpy()
        fresh = np.asarray(list(values), dtype=np.float64)
        fresh = fresh[(fresh != 0.0) & (np.abs(fresh) != 1.0)]
        self.numbers[label] = np.union1d(self.numbers.get(label, np.empty(0)), fresh)

    def among(self, values: np.ndarray) -> list[str]:
        values = values.astype(np.float64)
        values = values[np.isfinite(values)]
        return [label for label, known in self.numbers.items() if np.isin(values, known).any()]


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


def leaks(roots: Iterable[object], secrets: Secrets) -> list[str]:
    """A line for every secret that can be reached from `roots`."""
    found = []
    kept = list(reachable(roots))  # alive until the end, or ids would be used twice
    for one in kept:
        if isinstance(one, FORBIDDEN):
            found.append(f"an object of class {type(one).__name__}")
        elif isinstance(one, Tensor) and one.device.type != "meta":
            # All of the storage, not just the view: what a slice hangs on to counts.
            bare = _unwrapped(one).detach()
            whole = torch.empty(0, dtype=bare.dtype).set_(bare.untyped_storage())
            found += [f"{label} in a tensor of shape {tuple(one.shape)}" for label in secrets.among(whole.numpy())]
        elif isinstance(one, np.ndarray) and one.dtype.kind in "fiu":
            found += [f"{label} in an array" for label in secrets.among(one.reshape(-1))]
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
    printed = np.array([float(one) for one in _DECIMALS.findall(text)])
    if not printed.size:
        return []
    found = []
    for label, numbers in secrets.numbers.items():
        near = np.abs(printed[:, None]) - np.abs(numbers)
        if (np.abs(near) <= 2e-6 * np.abs(numbers)).any():
            found.append(f"{label} in the text {text[:60]!r}")
    return found
