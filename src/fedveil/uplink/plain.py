"""Every contribution as it is: without protection, or under noise that a trusted server adds once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.downlink.decomposed import client_noise, simulated_noise
from fedveil.ledger import caveats
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.releases import Caveats, Release
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.key_agreement import Introduction
from fedveil.protocol.messages import Reply, Upload, releases_of
from fedveil.protocol.parts import Assumed, RoundContext, Summing, Terms, Uplink, UploadSum, bounded, planned
from fedveil.secrets import SecretSource, SecretStream
from fedveil.tensors import Layout
from fedveil.uplink.grid import FixedPoint, add_noise
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.uplink.noised import gridded


@dataclass(frozen=True)
class Bare(Uplink):
    """No protection on the way up: the server sees every contribution.

    `acquainted` clients announce their sample counts, where the size of a central noise depends on them. With `alike`
    every client counts the same.
    """

    acquainted: bool = False
    alike: bool = False

    @property
    def equal(self) -> bool:
        """As given."""
        return self.alike

    @property
    def introduction(self) -> Introduction:
        """Clients need not know of each other."""
        return "sizes" if self.acquainted else "none"

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """As it is; where clients count alike, over its weight, which stands last."""
        payload = vector / vector[-1] if self.alike else vector
        return state, Upload(state.client, context.round, context.attempt, payload)

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> Summing:
        """An exact sum. Of clipped contributions none can be longer than their bound, and is refused if it is.

        A sum is rounded by its size before noise is put on it, and nobody is to make others' part of it coarser.
        """
        most = None
        if context.directory is not None and terms.work.clip is not None:
            reach = bounded(terms.work).largest
            most = {client: count * reach for client, count in zip(context.cohort, context.samples(), strict=True)}
        return UploadSum(terms.layout, context, device=device, most=most, longest=terms.longest)

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """Everything, to the server and whoever listens, uncovered."""
        return releases_of(Upload, sections=layout.names)

    def caveats(self, run: RunFacts) -> Caveats:
        """The server has what every client sent."""
        if run.central:
            return Caveats(unprotected=(caveats.SEEN_BEFORE_NOISE,))
        return Caveats(unprotected=(caveats.DATA_RECOVERED if run.veiled else caveats.DATA_SEEN,))


# --- noise added once, by a server that is trusted with everything it receives


@dataclass(frozen=True)
class PlannedCentral:
    """The noise of a plan with layout "sum": the exact sum of uploads is rounded to the grid and gets integer noise."""

    plan: NoisePlan

    assumed_noise = None

    def caveats(self) -> Caveats:
        """It counts on announced sizes and on the server."""
        return Caveats(assumptions=(caveats.SIZES, caveats.TRUSTED))

    def on_sum(self, total: Tensor, context: RoundContext, terms: Terms, *, stream: SecretStream) -> Tensor:
        """Σ uploads + N(0, Σ residual variances), in whole steps; the weight is public and stays."""
        grid = gridded(self.plan, context, terms)
        codec = FixedPoint(grid.range * 2.0 ** (grid.addends - 1).bit_length(), 1)  # the same step, for a whole sum
        words = codec.encode(total)
        variance = float(planned(self.plan, context, terms.work).residual.sum())
        add_noise(words[:-1], variance=variance, step=codec.step, seed=stream.bytes(32))
        return torch.from_numpy(codec.decode(words)).to(total)

    def on_gradient(self, gradient: Tensor, context: RoundContext, *, stream: SecretStream) -> None:
        """Nothing more."""


@dataclass(frozen=True)
class AssumedCentral:
    """σ(ε, δ) of one round, for a mean of K client gradients each assumed to lie within a ball of radius S."""

    sigma: float
    sensitivity: float = 1.0

    plan = None

    @property
    def assumed_noise(self) -> Assumed:
        """σ of one round for S."""
        return Assumed(self.sigma, self.sensitivity)

    def caveats(self) -> Caveats:
        """Nobody clips."""
        return Caveats(assumptions=(caveats.UNCLIPPED,))

    def on_sum(self, total: Tensor, context: RoundContext, terms: Terms, *, stream: SecretStream) -> Tensor:
        """As it is: what is assumed is assumed of the true gradient."""
        return total

    def on_gradient(self, gradient: Tensor, context: RoundContext, *, stream: SecretStream) -> None:
        """Gaussian noise of deviation σ / K, in floating point: nothing is proven by it."""
        kinds, sigma = torch.zeros(len(gradient), dtype=torch.uint8), self.sigma / len(context.cohort)
        if gradient.device.type != "cpu" and stream.simulation:
            noise = simulated_noise(kinds, sigma=sigma, stream=stream, like=gradient)
        else:
            noise = torch.from_numpy(client_noise(kinds, sigma=sigma, seed=stream.bytes(32)))
        gradient += noise.to(gradient)
