"""What a client knows of another's upload: the noise or the mask that the pair shares."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedveil.protocol import grid
from fedveil.protocol.assumed import AssumedNoise
from fedveil.protocol.masked import Masked, pair_seed
from fedveil.protocol.noised import Noised
from fedveil.protocol.parts import Channel, RoundContext, Terms, planned
from fedveil.protocol.state import ClientState


def shared_part(
    uplink: Channel, terms: Terms, state: ClientState, peer: int, *, round: int, attempt: int
) -> Tensor | None:
    """What the pair (client of `state`, `peer`) put into the client's own upload; −1 × that is in the peer's.

    Computed from the client's real keys, right after it answered (`round` counts from 0). Noise and masks come as
    int64 words modulo 2⁶⁴, noise in floating point (MP-DP's) as float64; None where they share nothing.
    """
    if uplink.introduction != "keys" or peer == state.client or peer not in state.seat:
        return None
    context = RoundContext(round, attempt, state.seat, state.ring().known(), state.ring().beacon)
    if isinstance(uplink, Noised):
        return _noise(uplink, terms, state, peer, context)
    if isinstance(uplink, AssumedNoise):
        return _assumed_noise(uplink, terms, state, peer, context)
    if isinstance(uplink, Masked):
        return _mask(uplink, terms, state, peer, context)
    return None


def unit_of(uplink: Channel, terms: Terms, state: ClientState, *, round: int, attempt: int) -> float:
    """What one of an upload's whole numbers is in the units of a contribution; 1 where they are real numbers."""
    if not isinstance(uplink, Noised):
        return 1.0
    context = RoundContext(round, attempt, state.seat, state.ring().known(), state.ring().beacon)
    return grid.gridded(uplink.plan, context, terms).step


def _noise(uplink: Noised, terms: Terms, state: ClientState, peer: int, context: RoundContext) -> Tensor | None:
    covering, client = planned(uplink.plan, context, terms.work), state.client
    variance = dict(grid.partners(covering, covering.members.index(client))).get(peer)
    if variance is None:
        return None
    words = np.zeros(terms.layout.length, dtype=np.uint64)
    step, seed = grid.gridded(uplink.plan, context, terms).step, grid.pair_seed(state, peer, context)
    grid.add_shared(words[:-1], seed, client=client, peer=peer, variance=variance, step=step)
    return torch.from_numpy(words.view(np.int64))


def _assumed_noise(
    uplink: AssumedNoise, terms: Terms, state: ClientState, peer: int, context: RoundContext
) -> Tensor | None:
    if peer not in uplink.graph(context).neighbours(state.client):
        return None
    found = torch.zeros(terms.layout.length, dtype=torch.float64)
    uplink.add_pair(terms.layout.split(found)["gradients"][0], state, peer, context, terms)
    return found


def _mask(uplink: Masked, terms: Terms, state: ClientState, peer: int, context: RoundContext) -> Tensor | None:
    from fedveil.crypto.stream import add_mask

    if peer not in uplink.graph(context).neighbours(state.client):
        return None
    words = np.zeros(terms.layout.length, dtype=np.uint64)
    seed = pair_seed(state, peer, round=context.round, attempt=context.attempt)
    add_mask(words, seed, subtract=state.client > peer)
    return torch.from_numpy(words.view(np.int64))
