"""The networks FedVeil can train: built by name, reproducible from a seed, checked before use."""

from fedveil.models.building import Adapted, build
from fedveil.models.catalogue import ModelInfo, describe, names, register

__all__ = ["Adapted", "ModelInfo", "build", "describe", "names", "register"]
