"""The way down: how a model travels to clients, and how the server undoes what it hid."""

from fedveil.downlink.blueprint import Blueprint, Weights, assemble, draw
from fedveil.downlink.messages import Broadcast, Downlink, Mean, PublicHead, Recovered, Veil
from fedveil.downlink.plain import Plain
from fedveil.downlink.rescaling import HeadNoise, Rescaling
from fedveil.downlink.table import ScaleTable, trace

__all__ = [
    "Blueprint",
    "Broadcast",
    "Downlink",
    "HeadNoise",
    "Mean",
    "Plain",
    "PublicHead",
    "Recovered",
    "Rescaling",
    "ScaleTable",
    "Veil",
    "Weights",
    "assemble",
    "draw",
    "trace",
]
