"""Named schemes: importing this package registers them, in the order in which they are listed."""

# isort: off
from fedveil.schemes.registry import SchemeInfo, Setting, assemble, find, info_of, scheme, schemes
from fedveil.schemes import fedavg, noised, lossless, hardened, mpdp, client_held, baselines

__all__ = [
    "SchemeInfo",
    "Setting",
    "assemble",
    "baselines",
    "client_held",
    "fedavg",
    "find",
    "hardened",
    "info_of",
    "lossless",
    "mpdp",
    "noised",
    "scheme",
    "schemes",
]
