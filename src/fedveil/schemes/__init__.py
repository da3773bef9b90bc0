"""Named schemes."""

from fedveil.schemes import fedavg, hardened, mpdp, noised, parallel, veiled
from fedveil.schemes.registry import SchemeInfo, Setting, assemble, find, schemes

__all__ = [
    "SchemeInfo",
    "Setting",
    "assemble",
    "fedavg",
    "find",
    "hardened",
    "mpdp",
    "noised",
    "parallel",
    "schemes",
    "veiled",
]
