"""Noise under a claim, as every role adds it: on the grid that a round's public facts give."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedveil.protocol.client_state import ClientState
from fedveil.protocol.parts import RoundContext, Terms, bounded, planned
from fedveil.secrets import SecretSource
from fedveil.tensors import STATISTICS_CUT, statistics_in
from fedveil.uplink.grid import FixedPoint, add_noise, grid_of
from fedveil.uplink.noise_plan import NoisePlan

_PAIR = "pair noise"


def gridded(plan: NoisePlan, context: RoundContext, terms: Terms) -> FixedPoint:
    """The grid of a round: a function of public facts, the same for everybody."""
    return _gridded(plan, context, terms)


@lru_cache(maxsize=8)
def _gridded(plan: NoisePlan, context: RoundContext, terms: Terms) -> FixedPoint:
    # Remembered by context and terms, which simulated clients share. The weight is a number of the upload, too, but
    # not of one in short words.
    noise_layout, most = planned(plan, context, terms.work), max(context.samples())
    whole = 1.0 if plan.word_bits == 64 else 0.0
    widest = max(whole, bounded(terms.work).largest, STATISTICS_CUT if statistics_in(terms.layout) else 0.0)
    return grid_of(noise_layout, length=terms.layout.length, largest=most * widest, word_bits=plan.word_bits)


def add_residual(
    words: NDArray[np.uint64],
    client: int,
    plan: NoisePlan,
    context: RoundContext,
    terms: Terms,
    *,
    secrets: SecretSource,
) -> None:
    """Add a client's own noise, from fresh randomness, in place."""
    noise_layout = planned(plan, context, terms.work)
    variance = float(noise_layout.residual[noise_layout.place(client)])
    seed = secrets.stream("residual", client, context.round, context.attempt).bytes(32)
    add_noise(words, variance=variance, step=gridded(plan, context, terms).step, seed=seed)


def pair_purpose(graph: str) -> str:
    """What a round's pair noise is drawn for: the cohort of this graph seed and no other.

    Clients that were told of different cohorts would add noise of different size. Did they draw it from one
    seed, it could be cancelled in part; so they draw unlike numbers, and each keeps all of its cover.
    """
    return f"{_PAIR} {graph}"


def pair_seed(state: ClientState, peer: int, context: RoundContext) -> bytes:
    """The seed of the noise that a client shares with `peer` in a round."""
    purpose = pair_purpose(context.graph_seed().hex())
    return state.ring().pair(peer).seed(round=context.round, attempt=context.attempt, purpose=purpose)


def add_shared(
    words: NDArray[np.uint64], seed: bytes, *, client: int, peer: int, variance: float, step: float, sign: int = 1
) -> None:
    """Add `sign` × what `client` shares with `peer`, in place; −1 × that is in the peer's upload."""
    add_noise(words, variance=variance, step=step, seed=seed, subtract=(client < peer) != (sign > 0))
