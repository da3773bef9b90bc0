"""Named schemes: importing this package registers them, in the order in which they are listed."""

# isort: off
from fedveil.schemes.registry import SchemeInfo, Setting, assemble, find, info_of, scheme, schemes
from fedveil.schemes import server_held, mpdp, client_held, baselines

__all__ = [
    "SchemeInfo",
    "Setting",
    "assemble",
    "baselines",
    "client_held",
    "find",
    "info_of",
    "mpdp",
    "scheme",
    "schemes",
    "server_held",
]
