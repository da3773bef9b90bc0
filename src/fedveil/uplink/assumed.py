"""Noise whose size rests on an assumption: MP-DP's client noise, with sensitivities that nobody enforces.

A client's gradient is taken to lie within a ball of radius S (`sensitivity`: the paper sets 1, and clips nothing).
Noise covers the first tensor alone; Ψ and Φ, losses and statistics travel bare. Nothing is proven by it,
and no plan is handed to the ledger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedveil.downlink import Architecture, client_noise, noise_kinds
from fedveil.downlink.decomposed import simulated_noise
from fedveil.errors import ConfigError, unknown_name
from fedveil.ledger import caveats
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.releases import Caveats, Cover, Release
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.key_agreement import Introduction
from fedveil.protocol.messages import Reply, Request, Upload, releases_of
from fedveil.protocol.parts import Assumed, RoundContext, Terms, Uplink
from fedveil.secrets import SecretSource
from fedveil.tensors import Layout
from fedveil.uplink.graph import Graph, complete, covering_graph

Law = Literal["gaussian", "decomposed"]
LAWS: tuple[Law, ...] = get_args(Law)
_PAIR = "pair noise"


@dataclass(frozen=True)
class AssumedNoise(Uplink):
    """Independent noise η and pair noise Δ on one client gradient.

    `sigma` is the standard deviation that the sum of K gradients shall carry. With `shared`, each client
    adds σ/√K; without, σ itself (local DP). `strength` is σ_Δ/σ_η; 0 leaves pairs out. Under the law
    "decomposed" a client draws what becomes Gaussian only when multiplied by the server's secret scales. With `alike`
    every client counts the same, whatever its number of samples. `own` is σ_η itself, where it was given.
    """

    sigma: float
    law: Law
    shared: bool = True
    sensitivity: float = 1.0
    strength: float = math.sqrt(1000.0)
    neighbours: int | None = None
    cancelling: bool = True
    alike: bool = False
    own: float | None = None

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise unknown_name("noise law", self.law, LAWS)
        if not (math.isfinite(self.strength) and self.strength >= 0):
            raise ConfigError(f"pair_strength must not be negative (got {self.strength}).")

    @property
    def _paired(self) -> bool:
        return self.shared and self.strength > 0 and self.cancelling

    @property
    def introduction(self) -> Introduction:
        """Pairs share secrets."""
        return "keys" if self._paired else "sizes"

    @property
    def assumed_noise(self) -> Assumed:
        """σ for S."""
        return Assumed(self.sigma, self.sensitivity)

    def own_sigma(self, clients: int) -> float:
        """σ/√K where it is shared, or σ; or as it was given."""
        if self.own is not None:
            return self.own
        return self.sigma / math.sqrt(clients) if self.shared else self.sigma

    @property
    def equal(self) -> bool:
        """As given."""
        return self.alike

    def _size(self, context: RoundContext) -> float:
        """What a contribution of mean size weighs."""
        return 1.0 if self.alike else _mean_size(context)

    @property
    def noise_neighbours(self) -> int | None:
        """As given."""
        return self.neighbours

    def graph(self, context: RoundContext) -> Graph:
        """Who shares noise with whom."""
        return _graph_of(context, self.neighbours)

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """Noise shared by pairs needs a pair."""
        if self.shared and self.strength > 0 and clients < 2:
            raise ConfigError(
                f"Noise that clients share needs at least two clients in a round, not {clients}: nobody is there to "
                "share it with. Use more clients."
            )

    def admit(self, state: ClientState, context: RoundContext, private: Request | None) -> ClientState:
        """Refuse a round without this client."""
        context.check_member(state.client)
        return state

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """η_k and Σ ± Δ on the first tensor, in the units of a contribution of mean size."""
        count, mean_size = len(context.cohort), self._size(context)
        payload = vector.to(torch.float64, copy=True) if self._paired else vector.clone()
        if self.alike:
            payload /= payload[-1].clone()
        noised = terms.layout.split(payload)["gradients"][0]
        own = self.own_sigma(count)
        stream = secrets.stream("residual", state.client, context.round, context.attempt)
        if vector.device.type != "cpu" and stream.simulation:
            noise = simulated_noise(self._kinds(terms), sigma=own, stream=stream, like=vector)
            noised.add_(noise.to(payload.dtype), alpha=mean_size)
        else:
            self._add(noised, terms, sigma=own * mean_size, seed=stream.bytes(32))
        if self._paired:
            for peer in self.graph(context).neighbours(state.client):
                self.add_pair(noised, state, peer, context, terms)
        return replace(state, cohort=context.cohort), Upload(state.client, context.round, context.attempt, payload)

    def add_pair(self, target: Tensor, state: ClientState, peer: int, context: RoundContext, terms: Terms) -> None:
        """Add what a client shares with `peer` to its own first tensor, in place; −1 × that is in the peer's."""
        count, mean_size = len(context.cohort), self._size(context)
        seed = state.ring().pair(peer).seed(round=context.round, attempt=context.attempt, purpose=_PAIR)
        sigma = self.own_sigma(count) * self.strength * mean_size
        self._add(target, terms, sigma=sigma, seed=seed, sign=1.0 if state.client < peer else -1.0)

    def shared_part(self, state: ClientState, peer: int, context: RoundContext, terms: Terms) -> Tensor | None:
        """The noise of a pair, on the first tensor."""
        if not self._paired or peer not in self.graph(context).neighbours(state.client):
            return None
        noise = torch.zeros(terms.layout.length, dtype=torch.float64)
        self.add_pair(terms.layout.split(noise)["gradients"][0], state, peer, context, terms)
        return noise

    def _kinds(self, terms: Terms) -> Tensor:
        if self.law == "decomposed":
            return _kinds_of(terms.architecture)
        return torch.zeros(terms.architecture.size, dtype=torch.uint8)

    def _add(self, target: Tensor, terms: Terms, *, sigma: float, seed: bytes, sign: float = 1.0) -> None:
        noise = client_noise(self._kinds(terms), sigma=sigma, seed=seed)
        target.add_(torch.from_numpy(np.asarray(noise)).to(target), alpha=sign)

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """The first tensor under noise of an assumed size; everything else bare."""
        law = "Gaussian" if self.law == "gaussian" else "bounded, Gaussian only for who does not know the scales"
        tail = "" if self.cancelling else "; pair noise LEFT OUT to simulate accuracy"
        noise = f"{law}, on the first tensor alone; its sensitivity is assumed, not enforced{tail}"
        return releases_of(Upload, sections=layout.names, covers={"gradients": Cover(noise=noise)})

    def caveats(self, run: RunFacts) -> Caveats:
        """Nobody clips, and not everything is covered."""
        known = (caveats.SCALES_KNOWN,) if self.law == "decomposed" else ()
        return Caveats(assumptions=(caveats.UNCLIPPED,), unprotected=(caveats.HEAD_BARE, *known))


# Remembered by context, which simulated clients share.
@lru_cache(maxsize=4)
def _graph_of(context: RoundContext, neighbours: int | None) -> Graph:
    members = context.cohort
    if neighbours is None or neighbours >= len(members) - 1:
        return complete(members)
    return covering_graph(members, neighbours=neighbours, seed=context.graph_seed())


@lru_cache(maxsize=4)
def _mean_size(context: RoundContext) -> float:
    return sum(context.samples()) / len(context.cohort)


@lru_cache(maxsize=4)
def _kinds_of(architecture: Architecture) -> Tensor:
    return noise_kinds(architecture)
