"""What noise of an assumed size would be worth: MP-DP's figure composed, and the δ its bounded noise cannot beat."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from fedveil.downlink import Blueprint, noise_kinds
from fedveil.downlink.decomposed import Decomposed, transitional
from fedveil.downlink.rescaling import scale_table
from fedveil.downlink.samplers import BOUNDED, secret_uniforms
from fedveil.ledger.bounded import delta_floor, delta_floor_even
from fedveil.ledger.gaussian import epsilon_of
from fedveil.protocol import Scheme
from fedveil.protocol.assumed import AssumedNoise
from fedveil.protocol.central import AssumedCentral
from fedveil.schemes.mpdp import SENSITIVITY
from fedveil.secrets import SecretStream


@dataclass(frozen=True)
class Composed:
    """ε of one round and of all, if the noise were Gaussian for everybody and S were enforced."""

    sigma: float
    delta: float
    rounds: int
    one_round: float
    all_rounds: float

    def said(self) -> str:
        """In a sentence."""
        return (
            f"were the noise Gaussian for whom it is meant against and S enforced, σ = {self.sigma:.4g} would give "
            f"ε = {self.one_round:.3g} in one round and ε = {self.all_rounds:.3g} in {self.rounds} "
            f"(exactly, δ = {self.delta:g})"
        )


@dataclass(frozen=True)
class Floors:
    """The least δ, at any ε, given the scales of one draw: a change on one coordinate, and one spread over all."""

    sharpest: float
    even: float
    coordinates: int

    def said(self) -> str:
        """In a sentence."""
        return (
            "if Ψ and Φ were hidden: given R, one round's bounded noise leaves δ of at least "
            f"{self.sharpest:.2g} at every ε for a change of the coordinate with the smallest R, and {self.even:.2g} "
            f"for one spread evenly over {self.coordinates:,} coordinates (one draw of R; a small number is no promise)"
        )


def composed(scheme: Scheme, *, rounds: int, delta: float) -> Composed | None:
    """MP-DP's figure for one round, and for `rounds` of them; None for other schemes."""
    sigma = _sigma(scheme)
    if sigma is None:
        return None
    mu = SENSITIVITY / sigma
    return Composed(sigma, delta, rounds, epsilon_of(mu, delta), epsilon_of(mu * math.sqrt(rounds), delta))


def floors(scheme: Scheme, blueprint: Blueprint, *, clients: int, stream: SecretStream) -> Floors | None:
    """The δ floors of a round of `clients` under decomposed noise, for one draw of R; None for other schemes."""
    uplink = scheme.uplink
    if not isinstance(scheme.downlink, Decomposed) or not isinstance(uplink, AssumedNoise):
        return None
    cpu = blueprint.to(device=torch.device("cpu"))
    layers = transitional(scale_table(cpu))
    scales = layers.scales(secret_uniforms(stream))
    factors = layers.table.rescale(torch.ones(cpu.size, dtype=torch.float64), scales)
    bounded = np.abs(factors[noise_kinds(cpu) == BOUNDED].numpy())
    if not bounded.size:
        return None
    scale = uplink.sigma / math.sqrt(clients) if uplink.shared else uplink.sigma
    return Floors(
        delta_floor(scale=scale, clients=clients, shift=SENSITIVITY / float(bounded.min())),
        abs(delta_floor_even(scale=scale, clients=clients, sensitivity=SENSITIVITY, factors=bounded)),
        bounded.size,
    )


def notes_on(
    scheme: Scheme, blueprint: Blueprint, *, clients: int, rounds: int, delta: float, stream: SecretStream
) -> tuple[str, ...]:
    """What a ledger says about noise of an assumed size."""
    found = (composed(scheme, rounds=rounds, delta=delta), floors(scheme, blueprint, clients=clients, stream=stream))
    return tuple(one.said() for one in found if one is not None)


def _sigma(scheme: Scheme) -> float | None:
    if isinstance(scheme.uplink, AssumedNoise):
        return scheme.uplink.sigma
    return scheme.central.sigma if isinstance(scheme.central, AssumedCentral) else None
