"""A chosen part of the gradient, under noise (PPDL, Shokri and Shmatikov 2015).

Of d coordinates at most c = ⌈share·d⌉ travel, as places and values; the server puts zeros where nothing came. Noise is

    gaussian   N(0, v) on every value that travels. Nothing bounds what it covers.
    laplace    the sparse vector technique on values cut to ± γ, so that replacing all of a client's data moves none
               by more than Δf = 2γ. With σ(x) = 2cΔf/x, ε₁ = 8ε/9 and ε₂ = 2ε/9: coordinates come in random order,
               a threshold gets Lap(σ(ε₁)), a coordinate's size Lap(2σ(ε₁)); where it reaches the threshold τ, its
               value is sent with Lap(σ(ε₂)), and the threshold is drawn anew.

Of places and values together, the latter is ε-private in real numbers: c searches that are ε₁/c-private each, and c
values at ε₂/(2c), 8ε/9 + ε/9 in sum. Here numbers are floating-point ones, the loss travels beside them as it is, and
so nothing is claimed; what the rounds would add up to is a note of the ledger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.downlink import client_noise
from fedveil.errors import ConfigError, ProtocolError, spelled, unknown_name
from fedveil.ledger import caveats
from fedveil.ledger.accountant import composed_pure_epsilon
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.releases import Caveats, Cover, Release, Released
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import message
from fedveil.protocol.messages import SECTIONS, Reply, Upload, releases_of
from fedveil.protocol.parts import RoundContext, Summing, Terms, Uplink, UploadSum
from fedveil.secrets import SecretSource
from fedveil.shapes import REALS, Number, Shape, reals
from fedveil.tensors import Layout

Choice = Literal["largest", "random"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
SelectionNoise = Literal["gaussian", "laplace"]
_DELTA = 1e-5
_CHUNK = 1 << 14
Floats = NDArray[np.float64]


@message
@dataclass(frozen=True, eq=False)
class SelectedUpload(Upload):
    """Client → server: the values at `places` of a contribution of `size` numbers, and all that is behind them."""

    payload: Annotated[Tensor, reals("kept"), SECTIONS]
    places: Annotated[
        Tensor,
        Shape((torch.int64,), ("chosen",), least=0, below="contribution", ascending=True),
        Released("which coordinates were chosen, which speaks of the data too", about="data"),
    ]
    size: Annotated[int, Number("contribution"), Released("how many numbers a contribution has")]

    released_as = "upload"

    def dense(self, length: int) -> Tensor:
        """With zeros where nothing was chosen."""
        beside = length - self.size if self.size < length else -1
        chosen = len(self.places)
        if beside < 0 or len(self.payload) != chosen + beside or (chosen and int(self.places[-1]) >= self.size):
            raise ProtocolError("an upload of chosen values has other values than it has places for")
        whole = torch.zeros(length, dtype=self.payload.dtype, device=self.payload.device)
        whole[self.places.to(whole.device)] = self.payload[:chosen]
        whole[self.size :] = self.payload[chosen:]
        return whole


@dataclass(frozen=True)
class Selected(Uplink):
    """At most a `share` of the gradient's coordinates, cut to ± `cut` where it is given, under noise.

    `variance` is that of Gaussian noise; `epsilon`, of one round, asks for the sparse vector technique instead, whose
    threshold is `above`, as is that of a `random` choice.
    """

    share: float = 0.1
    choice: Choice = "largest"
    variance: float = 1e-3
    epsilon: float | None = None
    cut: float | None = None
    above: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"{spelled('upload_share')} must lie in (0, 1] (got {self.share}).")
        if self.choice not in CHOICES:
            raise unknown_name("upload_choice", self.choice, CHOICES)
        for name, value in (("noise_variance", self.variance), ("select_above", self.above)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{spelled(name)} must be a number from 0 on (got {value}).")
        for name, given in (("round_epsilon", self.epsilon), ("cut", self.cut)):
            if given is not None and not (math.isfinite(given) and given > 0):
                raise ConfigError(f"{spelled(name)} must be a positive number (got {given}).")
        if self.epsilon is not None and self.cut is None:
            raise ConfigError(f"The sparse vector technique needs a bound on every coordinate: give {spelled('cut')}.")

    def most(self, length: int) -> int:
        """c: how many of `length` coordinates travel at most."""
        return max(1, math.ceil(self.share * length - 1e-9))

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """Choose, cut, and add noise, all in the units of a mean over the client's samples."""
        size = _gradient_size(terms.layout)
        weight = float(vector[-1])
        mean = vector[:size].detach().double().cpu().numpy() / max(weight, 1.0)
        if self.cut is not None:
            mean = np.clip(mean, -self.cut, self.cut)
        stream = secrets.stream("selected", state.client, context.round, context.attempt)
        order, noise = _uniforms(stream.bytes(32), size), stream.bytes(32)
        places, values = (
            self._gaussian(mean, order, noise) if self.epsilon is None else self._sparse(mean, order, noise)
        )
        sent = torch.from_numpy(np.ascontiguousarray(values * max(weight, 1.0))).to(vector)
        payload = torch.cat([sent, vector[size:]])
        which = (state.client, context.round, context.attempt)
        return state, SelectedUpload(*which, payload, torch.from_numpy(places), size)

    def _gaussian(self, mean: Floats, order: Floats, seed: bytes) -> tuple[NDArray[np.int64], Floats]:
        count = self.most(len(mean))
        if self.choice == "largest":
            chosen = np.argpartition(-np.abs(mean), count - 1)[:count]
        else:
            shuffled = np.argsort(order, kind="stable")
            chosen = shuffled[np.abs(mean[shuffled]) > self.above][:count]
        places = np.sort(chosen).astype(np.int64)
        kinds = torch.zeros(len(places), dtype=torch.uint8)
        return places, mean[places] + client_noise(kinds, sigma=math.sqrt(self.variance), seed=seed)

    def _sparse(self, mean: Floats, order: Floats, seed: bytes) -> tuple[NDArray[np.int64], Floats]:
        """The sparse vector technique: each coordinate is asked for once, in random order."""
        assert self.epsilon is not None
        assert self.cut is not None
        count = self.most(len(mean))
        searching, telling = (4 * count * self.cut / part for part in (8 * self.epsilon / 9, 2 * self.epsilon / 9))
        draws = _laplace(_uniforms(seed, 2 * len(mean) + 2 * count))
        asked = np.abs(mean) + 2 * searching * draws[: len(mean)]
        told = mean + telling * draws[len(mean) : 2 * len(mean)]
        thresholds = iter((self.above + searching * draws[2 * len(mean) :]).tolist())
        threshold, chosen = next(thresholds), []
        for place in np.argsort(order, kind="stable").tolist():
            if asked[place] >= threshold:
                chosen.append(place)
                if len(chosen) == count:
                    break
                threshold = next(thresholds)
        places = np.sort(np.asarray(chosen, dtype=np.int64))
        return places, told[places]

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> Summing:
        """An exact sum of what came, zeros elsewhere."""
        return SelectedSum(self.most(_gradient_size(terms.layout)), terms, context, device=device)

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """Chosen values under noise that proves nothing; places, loss and statistics as they are."""
        law = f"Gaussian, variance {self.variance:g}" if self.epsilon is None else "Laplace, in floating point"
        cover = Cover(noise=f"{law}, on the chosen values", what="a chosen part of the client's gradient or update")
        return releases_of(SelectedUpload, sections=layout.names, covers={"gradients": cover})

    def caveats(self, run: RunFacts) -> Caveats:
        """Which part of a gradient is sent is a choice by the data; and what the noise would be worth."""
        return Caveats(unprotected=(caveats.CHOSEN_PLACES, caveats.MODEL_OPEN), notes=(self._worth(run),))

    def _worth(self, run: RunFacts) -> str:
        if self.epsilon is None:
            return (
                f"noise of variance {self.variance:g} is on values that nothing bounds"
                + ("" if self.cut is None else f" but the cut at ± {self.cut:g}, and none on which of them are sent")
                + ": no ε follows from it"
            )
        whole = composed_pure_epsilon(self.epsilon, rounds=run.rounds, delta=_DELTA)
        return (
            f"the sparse vector technique is ε = {self.epsilon:g} a round for all data of a client, for places and "
            f"values together; {run.rounds} rounds come to ε = {run.rounds * self.epsilon:,.4g}, or {whole:,.4g} at "
            f"δ = {_DELTA:g}. The paper's figures are this ε over the number of values sent. Not claimed: numbers are "
            "floating-point ones, and the loss and the statistics of BatchNorm travel beside them as they are"
        )


class SelectedSum(UploadSum):
    """The exact sum of contributions of which a part was sent."""

    def __init__(self, most: int, terms: Terms, context: RoundContext, *, device: torch.device) -> None:
        super().__init__(terms.layout, context, device=device, longest=terms.longest)
        size = _gradient_size(terms.layout)
        beside = terms.layout.length - size
        self.expect(
            SelectedUpload,
            context.cohort,
            which=context.which,
            sizes={"contribution": size, "chosen": range(most + 1), "kept": range(beside, beside + most + 1)},
            types={"payload": REALS},
        )

    def _fold(self, reply: Upload) -> None:
        super()._fold(replace(reply, payload=reply.dense(self._layout.length)))


def _gradient_size(layout: Layout) -> int:
    name, shape = layout.sections[0]
    assert name == "gradients"
    return math.prod(shape)


def _uniforms(seed: bytes, count: int) -> Floats:
    """Numbers between 0 and 1, neither of them included."""
    from fedveil.crypto.keys import WordStream  # training in memory does not need `cryptography`

    stream = WordStream(seed)
    drawn = [stream.take(min(_CHUNK, count - start)) >> np.uint64(12) for start in range(0, count, _CHUNK)]
    return (np.concatenate(drawn).astype(np.float64) + 0.5) * 2.0**-52


def _laplace(uniforms: Floats) -> Floats:
    """Numbers of density exp(−|x|)/2."""
    centred = uniforms - 0.5
    result: Floats = -np.sign(centred) * np.log1p(-2 * np.abs(centred))
    return result
