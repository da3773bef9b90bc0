"""Named schemes: importing this package registers them."""

from fedveil.schemes import client_held, hardened, lossless, mpdp, noised
from fedveil.schemes.registry import SchemeInfo, Setting, assemble, find, schemes

__all__ = [
    "SchemeInfo",
    "Setting",
    "assemble",
    "client_held",
    "find",
    "hardened",
    "lossless",
    "mpdp",
    "noised",
    "schemes",
]
