"""What a client knows of another's upload: the noise or the mask that the pair shares."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedveil.downlink import client_noise, noise_kinds
from fedveil.protocol.assumed import AssumedNoise
from fedveil.protocol.masked import Masked
from fedveil.protocol.noised import Noised, pair_purpose, partners
from fedveil.protocol.parts import Channel, RoundContext, Terms, answered
from fedveil.protocol.state import ClientState
from fedveil.uplink.gaussian import add_seeded


def shared_part(
    uplink: Channel, terms: Terms, state: ClientState, peer: int, *, round: int, attempt: int
) -> Tensor | None:
    """What the pair (client of `state`, `peer`) put into the client's own upload; −1 × that is in the peer's.

    Computed from the client's real keys, right after it answered (`round` counts from 0). Noise comes as a
    float64 vector of an upload's length, a mask as int64 words modulo 2⁶⁴; None where they share nothing.
    """
    if uplink.introduction != "keys" or peer == state.client or peer not in state.seat:
        return None
    context = RoundContext(round, attempt, state.seat, state.ring().known())
    if isinstance(uplink, Noised):
        return _noise(uplink, terms, state, peer, context)
    if isinstance(uplink, AssumedNoise):
        return _assumed_noise(uplink, terms, state, peer, context)
    if isinstance(uplink, Masked):
        return _mask(uplink, terms, state, peer, context)
    return None


def _seed(state: ClientState, peer: int, context: RoundContext, purpose: str) -> bytes:
    return state.ring().pair(peer).seed(round=context.round, attempt=context.attempt, purpose=purpose)


def _sign(client: int, peer: int) -> float:
    return 1.0 if client < peer else -1.0


def _noise(uplink: Noised, terms: Terms, state: ClientState, peer: int, context: RoundContext) -> Tensor | None:
    covering = answered(uplink.plan, state, terms.work)
    variance = dict(partners(covering, covering.members.index(state.client))).get(peer)
    if variance is None:
        return None
    found = torch.zeros(terms.layout.length, dtype=torch.float64)
    seed = _seed(state, peer, context, pair_purpose(context))
    add_seeded(found[:-1], scale=_sign(state.client, peer) * math.sqrt(variance), seed=seed)
    return found


def _assumed_noise(
    uplink: AssumedNoise, terms: Terms, state: ClientState, peer: int, context: RoundContext
) -> Tensor | None:
    if peer not in uplink.graph(context).neighbours(state.client):
        return None
    count, blueprint = len(context.cohort), terms.blueprint
    size = uplink.sigma / math.sqrt(count) * uplink.strength * sum(context.samples()) / count
    decomposed = uplink.law == "decomposed"
    kinds = noise_kinds(blueprint) if decomposed else torch.zeros(blueprint.size, dtype=torch.uint8)
    noise = client_noise(kinds, sigma=size, seed=_seed(state, peer, context, "pair noise"))
    found = torch.zeros(terms.layout.length, dtype=torch.float64)
    terms.layout.split(found)["gradients"][0].add_(
        torch.from_numpy(np.asarray(noise)).to(found), alpha=_sign(state.client, peer)
    )
    return found


def _mask(uplink: Masked, terms: Terms, state: ClientState, peer: int, context: RoundContext) -> Tensor | None:
    from fedveil.crypto.stream import add_mask

    if peer not in uplink.graph(context).neighbours(state.client):
        return None
    words = np.zeros(terms.layout.length, dtype=np.uint64)
    seed = _seed(state, peer, context, f"mask on {state.graph}")
    add_mask(words, seed, subtract=state.client > peer)
    return torch.from_numpy(words.view(np.int64))
