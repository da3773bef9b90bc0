"""The networks FedVeil can train: built by name, reproducible from a seed, checked before use."""

from fedveil.models.building import build
from fedveil.models.catalogue import ModelInfo, describe, names, register
from fedveil.models.custom import Adapted

__all__ = ["Adapted", "ModelInfo", "build", "describe", "names", "register"]
