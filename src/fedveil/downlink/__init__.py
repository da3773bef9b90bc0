"""The way down: how a model travels to clients, and how the server undoes what it hid."""

from fedveil.downlink.architecture import Architecture, Weights, assemble, draw
from fedveil.downlink.decomposed import Decomposed, client_noise, noise_kinds
from fedveil.downlink.messages import Broadcast, Downlink, Mean, PublicHead, Recovered, Veil, draw_for
from fedveil.downlink.plain import Plain
from fedveil.downlink.rescaling import HeadNoise, Rescaling
from fedveil.downlink.scales import ScaleTable
from fedveil.downlink.trace import trace

__all__ = [
    "Architecture",
    "Broadcast",
    "Decomposed",
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
    "client_noise",
    "draw",
    "draw_for",
    "noise_kinds",
    "trace",
]
