"""Named schemes."""

from fedveil.schemes import fedavg, veiled
from fedveil.schemes.registry import SchemeInfo, Setting, assemble, find, schemes

__all__ = ["SchemeInfo", "Setting", "assemble", "fedavg", "find", "schemes", "veiled"]
