"""Decomposed noise: random factors whose product is exactly Gaussian, and the network that carries them.

ln|Z| of a standard normal Z is ln √2 − E₀ − Σ_ℓ [E_ℓ/(2ℓ+1) − ½ ln(1 + 1/ℓ)] with independent
exponentials E (Euler's product for Γ), so Z splits into independent factors:

    DN(σ, 1) = ±√2σ·exp(−E₀)        = Uniform(−√2σ, √2σ)       "bounded", what a client draws
    DN*(1)   = the whole series      = √Gamma(3/2, 1) = χ₃/√2    "whole", one secret factor
    DN*(2)   = the series with Gamma(½, 1) in place of E         "half", one of two secret factors

    whole·bounded ~ half·half'·bounded ~ N(0, σ²)

The signs of the secret factors are dropped: scales must be positive, and the bounded factor is symmetric.

Rescaling gives an edge one scale r: its producer multiplies by r, and whoever reads it divides by r. A
transitional layer multiplies channel i by 1/(r_i·s_i) directly before the weight that reads it, so that
the weight sees an edge of scale 1/s and is multiplied by s, a number of its own:

    R = r_out·s_in     for a weight, both factors independent
    R = r_out          for a bias, an affine parameter of a normalisation, a weight that reads the input
    R = s_in           for a weight that makes the output
    R = 1              for an output bias and whatever else is pinned

Each number serves many coordinates, so its law follows from all of them. A number that meets another
one in some coordinate has the law DN*(2), one that never does DN*(1). The two factors of a coordinate
are then two DN*(2), a single factor is DN*(1) or, where it meets another elsewhere, DN*(2); clients
know which it is, because the architecture alone decides, and draw the noise that makes R ∘ noise Gaussian.

No transitional layer hides more than plain rescaling: whoever multiplies its numbers into the weight
behind it holds r_out/r_in ∘ W.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import digamma, polygamma
from torch import Tensor, nn

from fedveil.downlink.architecture import Architecture, Weights
from fedveil.downlink.messages import Downlink
from fedveil.downlink.rescaling import (
    HeadNoise,
    Rescaling,
    ScaledVeil,
    head_tensors,
    scale_table,
    scaled_veil,
)
from fedveil.downlink.scales import Scaled, ScaleTable
from fedveil.downlink.symmetry import PINNED, Classes, unmoved
from fedveil.errors import ConfigError, TraceError
from fedveil.ledger.releases import Caveats, Cover
from fedveil.secrets import SecretStream

Floats = NDArray[np.float64]
Uniforms = Callable[[int], Floats]
"""Gives as many independent numbers, uniform on [0, 1) with 53 random bits, as it is asked for."""

GAUSSIAN, BOUNDED, BOUNDED_HALF = 0, 1, 2
"""The kinds of client noise: N(0, σ²) where nothing is secret; DN(σ, 1) where the secret factor has the
law DN*(1); DN(σ, 1)·DN*(2) where it is a single DN*(2)."""

_TERMS = 200
_WORDS_AT_ONCE = 1 << 14
_ROWS_AT_ONCE = 1 << 10


def secret_uniforms(stream: SecretStream) -> Uniforms:
    """Numbers of a secret stream."""
    return lambda count: stream.uniform(count).numpy()


def _from_words(take: Callable[[int], NDArray[np.uint64]]) -> Uniforms:
    def draw(count: int) -> Floats:
        numbers = np.empty(count)
        for start in range(0, count, _WORDS_AT_ONCE):
            part = numbers[start : start + _WORDS_AT_ONCE]
            part[:] = take(len(part)) >> np.uint64(11)
        numbers *= 2.0**-53
        return numbers

    return draw


def bounded(count: int, *, sigma: float, uniforms: Uniforms) -> Floats:
    """DN(σ, 1): uniform on (−√2σ, √2σ)."""
    return (uniforms(count) * 2.0 - 1.0) * (math.sqrt(2.0) * sigma)


def gaussian(count: int, *, sigma: float, uniforms: Uniforms) -> Floats:
    """N(0, σ²), by Box–Muller."""
    return np.sqrt(2.0 * _exponential(count, uniforms)) * np.cos(2.0 * np.pi * uniforms(count)) * sigma


def whole(count: int, uniforms: Uniforms) -> Floats:
    """DN*(1) = √Gamma(3/2, 1) = √(E + Z²/2), exactly."""
    first, second = _exponential(count, uniforms), _exponential(count, uniforms)
    # Z²/2 = E·cos² of an independent angle.
    result: Floats = np.sqrt(first + second * np.cos(2.0 * np.pi * uniforms(count)) ** 2)
    return result


def half(count: int, uniforms: Uniforms) -> Floats:
    """DN*(2) = exp(−Σ_ℓ [G_ℓ/(2ℓ+1) − ¼ ln(1 + 1/ℓ)]), G_ℓ ~ Gamma(½, 1).

    200 terms, and for the rest a Gaussian of its mean and variance (6·10⁻⁴). What that neglects, the
    rest's third cumulant 1.6·10⁻⁶, moves the distribution function by less than 10⁻⁶.
    """
    result = np.empty(count)
    for start in range(0, count, _ROWS_AT_ONCE):
        part = result[start : start + _ROWS_AT_ONCE]
        rows = len(part)
        # An exponential E and an independent angle make two independent Gamma(½): E·cos² and E·sin².
        both = _exponential(rows * _TERMS // 2, uniforms).reshape(rows, -1)
        share = np.cos(2.0 * np.pi * uniforms(rows * _TERMS // 2).reshape(rows, -1)) ** 2
        tail = gaussian(rows, sigma=_TAIL_DEVIATION, uniforms=uniforms)
        np.exp(_CENTRE + tail - both @ _SECOND - (both * share) @ (_FIRST - _SECOND), out=part)
    return result


def client_noise(kinds: Tensor, *, sigma: float, seed: bytes) -> Floats:
    """Noise that becomes N(0, σ²) when a secret scale multiplies it, one number for each of `kinds`.

    Both ends of a pair make the same numbers from the same 32-byte seed.
    """
    from fedveil.crypto.keys import WordStream  # training in memory does not need `cryptography`

    if not (math.isfinite(sigma) and sigma >= 0.0):
        raise ConfigError(f"the deviation of client noise must be a number from 0 on (got {sigma}).")
    stream = WordStream(seed)
    kind = kinds.detach().cpu().numpy().reshape(-1)
    noise = np.empty(len(kind))
    for start in range(0, len(noise), _WORDS_AT_ONCE):
        part = noise[start : start + _WORDS_AT_ONCE]
        # Odd multiples of 2⁻⁵³: symmetric about zero to the last bit, and each one exact in float64.
        part[:] = (stream.take(len(part)).view(np.int64) >> 10) | 1
        part *= 2.0**-53 * math.sqrt(2.0) * sigma
    uniforms = _from_words(stream.take)
    plain, single = np.flatnonzero(kind == GAUSSIAN), np.flatnonzero(kind == BOUNDED_HALF)
    if len(plain) + len(single) + int(np.count_nonzero(kind == BOUNDED)) != len(kind):
        raise ValueError("kinds of client noise are 0, 1 and 2")
    noise[plain] = gaussian(len(plain), sigma=sigma, uniforms=uniforms)
    noise[single] *= half(len(single), uniforms)
    return noise


def simulated_noise(kinds: Tensor, *, sigma: float, stream: SecretStream, like: Tensor) -> Tensor:
    """`client_noise` for simulated secrets, drawn by PyTorch's generator where `like` lives."""
    generator = torch.Generator(device=like.device).manual_seed(int.from_bytes(stream.bytes(8), "big") >> 1)
    placed, count = kinds.to(like.device), len(kinds)
    uniform = torch.rand(count, generator=generator, device=like.device, dtype=like.dtype)
    noise = (uniform * 2.0 - 1.0) * (math.sqrt(2.0) * sigma)
    plain, single = (placed == GAUSSIAN).nonzero().flatten(), (placed == BOUNDED_HALF).nonzero().flatten()
    drawn = torch.randn(len(plain), generator=generator, device=like.device, dtype=like.dtype)
    noise[plain] = drawn * sigma
    if len(single):
        factors = half(len(single), secret_uniforms(stream))
        noise[single] *= torch.from_numpy(factors).to(like)
    return noise


def _exponential(count: int, uniforms: Uniforms) -> Floats:
    return -np.log1p(-uniforms(count))


def _series() -> tuple[Floats, Floats, float, float]:
    """Coefficients of the first and second G of every pair, the constant, and the tail's deviation.

    Σ_{ℓ≤M} ¼ ln(1 + 1/ℓ) = ¼ ln(M + 1). For ℓ > M, E[G_ℓ] = Var[G_ℓ] = ½ and the tail has the mean
    Σ [¼ ln(1 + 1/ℓ) − ½/(2ℓ+1)] = ¼ (ψ(M + 3/2) − ln(M + 1)) and the variance Σ ½/(2ℓ+1)² = ψ′(M + 3/2)/8.
    """
    inverse: Floats = 1.0 / (2.0 * np.arange(1.0, _TERMS + 1.0) + 1.0)
    centre = 0.25 * float(digamma(_TERMS + 1.5))
    return inverse[0::2], inverse[1::2], centre, math.sqrt(float(polygamma(1, _TERMS + 1.5)) / 8.0)


_FIRST, _SECOND, _CENTRE, _TAIL_DEVIATION = _series()


_BUFFER = "transitional"


@dataclass(frozen=True, eq=False)
class Transitional:
    """A scale table whose weights read edges of their own.

    `table` has one more class per channel that a weight reads, of scale 1/s. `before` and `after` are the
    classes of those channels on the two sides of the transitional layers, all layers in a row.
    """

    table: ScaleTable
    paths: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    before: Tensor
    after: Tensor
    inward: int
    halves: Tensor
    wholes: Tensor

    def scales(self, uniforms: Uniforms) -> Tensor:
        """Fresh scales for all classes: r ~ DN*(1) or DN*(2) as the module describes, 1/s on the new ones."""
        values = torch.ones(self.table.classes.count, dtype=torch.float64)
        values[self.halves] = torch.from_numpy(half(len(self.halves), uniforms))
        values[self.wholes] = torch.from_numpy(whole(len(self.wholes), uniforms))
        values[self.inward :] = 1.0 / values[self.inward :]
        return self.table.classes.scales(values.log())

    def multipliers(self, scales: Tensor) -> Tensor:
        """1/(r·s) for every channel of every transitional layer."""
        return scales[self.after] / scales[self.before]


@lru_cache(maxsize=8)
def transitional(table: ScaleTable) -> Transitional:
    """The table with transitional layers; refused where a weight is not read by a module's call."""
    for reader in table.readers:
        if reader.refusal:
            raise TraceError(
                f"Transitional layers cannot be used: {reader.refusal}, so there is no place before it. Call an "
                "nn.Linear or nn.Conv module instead of the function, or use a scheme that rescales only."
            )
    entries = {entry.name: entry for entry in table.parameters}
    inward = count = table.classes.count
    before, after = [], []
    for reader in table.readers:
        read = entries[reader.weight].into
        assert read is not None
        free = read != PINNED
        fresh = torch.zeros_like(read)
        fresh[free] = torch.arange(count, count + int(free.sum()), device=read.device)
        count += int(free.sum())
        entries[reader.weight] = dataclasses.replace(entries[reader.weight], into=fresh)
        before.append(read.reshape(-1))
        after.append(fresh.reshape(-1))
    classes = Classes(count, table.classes.products)
    derived = dataclasses.replace(table, classes=classes, parameters=tuple(entries.values()))
    nothing = torch.empty(0, dtype=torch.int64)
    shares = _shares(derived)
    return Transitional(
        table=derived,
        paths=tuple(reader.paths for reader in table.readers),
        sizes=tuple(len(ids) for ids in before),
        before=torch.cat(before) if before else nothing,
        after=torch.cat(after) if after else nothing,
        inward=inward,
        halves=torch.nonzero(shares == 1).reshape(-1),
        wholes=torch.nonzero(shares == 2).reshape(-1),
    )


def _ends(entry: Scaled) -> tuple[Tensor, Tensor]:
    """The classes of R's two factors, in shapes that broadcast; PINNED where there is none."""
    none = torch.full((1,) * len(entry.view), PINNED)
    out = none if entry.out is None else entry.out.cpu()
    return out, none if entry.into is None else entry.into.cpu()


def _shares(table: ScaleTable) -> Tensor:
    """For every class how much of DN*(1) it is, in halves: 1 for DN*(2), 2 for DN*(1), 0 if it is not drawn."""
    shares = torch.full((table.classes.count,), 2)
    for entry in table.parameters:
        out, into = torch.broadcast_tensors(*_ends(entry))  # type: ignore[no-untyped-call]
        met = (out != PINNED) & (into != PINNED)
        shares[out[met]] = 1
        shares[into[met]] = 1
    shares[PINNED] = 0
    for made, _, _ in table.classes.products:
        shares[made] = 0
    return shares


def noise_kinds(architecture: Architecture) -> Tensor:
    """For every parameter coordinate the kind of client noise that R makes Gaussian (uint8, flat).

    0: N(0, σ²), where R = 1. 1: DN(σ, 1), where R is DN*(1) or a product of two DN*(2). 2: DN(σ, 1)·DN*(2),
    where R is a single DN*(2). Nothing but the architecture decides.
    """
    if architecture.table is None:
        raise TraceError("This architecture was not traced; the kinds of client noise follow from the scale table.")
    table = transitional(architecture.table).table
    shares = _shares(table)
    for made, left, right in table.classes.products:
        shares[made] = shares[left] + shares[right]
    by_share = torch.tensor([GAUSSIAN, BOUNDED_HALF, BOUNDED], dtype=torch.uint8)
    kinds = []
    for entry in table.parameters:
        out, into = _ends(entry)
        total = shares[out] + shares[into]
        if bool((total > 2).any()):
            raise TraceError(f"No client noise becomes Gaussian under the secret factors of {entry.name}.")
        kinds.append(by_share[total].expand(entry.view).reshape(-1))
    return torch.cat(kinds) if kinds else torch.empty(0, dtype=torch.uint8)


def load_multipliers(architecture: Architecture, module: nn.Module, flat: Tensor) -> None:
    """Put the transitional layers' numbers before the modules that they belong to; none at all count as 1."""
    if not flat.numel():
        for layer in module.modules():
            if _BUFFER in layer._buffers:
                layer.get_buffer(_BUFFER).fill_(1.0)
        return
    assert architecture.table is not None
    layers = transitional(architecture.table)
    for paths, part in zip(layers.paths, torch.split(flat, list(layers.sizes)), strict=True):
        for path in paths:
            reader = module.get_submodule(path)
            if _BUFFER not in reader._buffers:
                _attach(reader)
            buffer = reader.get_buffer(_BUFFER)
            buffer.copy_(part.view_as(buffer))


def has_multipliers(module: nn.Module) -> bool:
    """Whether transitional layers were put into a module."""
    return any(_BUFFER in layer._buffers for layer in module.modules())


def _attach(reader: nn.Module) -> None:
    weight = reader.weight
    assert isinstance(weight, Tensor)
    # Trailing dimensions broadcast: the features of a linear layer, the channels of a convolution.
    channels = reader.in_features if isinstance(reader, nn.Linear) else reader.in_channels
    shape = (channels, *(1,) * (weight.dim() - 2))
    ones = torch.ones(shape, dtype=weight.dtype, device=weight.device)  # type: ignore[arg-type]
    reader.register_buffer(_BUFFER, ones, persistent=False)
    reader.register_forward_pre_hook(_multiply)


def _multiply(reader: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * reader.get_buffer(_BUFFER), *args[1:])


@dataclass(frozen=True)
class Decomposed(Downlink):
    """Transitional layers, secret scales by the laws DN*(1) and DN*(2), and optionally head noise."""

    head: HeadNoise | None = None

    traced = True

    @property
    def head_noise(self) -> bool:
        """Where it is given."""
        return self.head is not None

    def noise_factors(self, architecture: Architecture, *, stream: SecretStream) -> Tensor | None:
        """|r/r′| of every parameter on which clients draw bounded noise."""
        cpu = architecture.to(device=torch.device("cpu"))
        layers = transitional(scale_table(cpu))
        factors = layers.table.rescale(
            torch.ones(cpu.size, dtype=torch.float64), layers.scales(secret_uniforms(stream))
        )
        return factors[noise_kinds(cpu) == BOUNDED].abs()

    def head_tensors(self, architecture: Architecture) -> int:
        """1 without head noise, m + 2 with it (2m + 1 with weighted outputs)."""
        transitional(scale_table(architecture))  # what cannot be veiled is refused before the first round
        return head_tensors(self.head, architecture)

    def covers(self) -> Mapping[str, Cover]:
        """As rescaling has it; and what the transitional layers' numbers are."""
        what = "1/(r·s) for every channel that a weight reads; with the parameters it gives r/r′ ∘ W"
        return {**Rescaling(head=self.head).covers(), "multipliers": Cover(what=what)}

    def caveats(self) -> Caveats:
        """As rescaling has it, but for figures."""
        return Rescaling(head=self.head).caveats_as("")

    def veil(
        self, architecture: Architecture, weights: Weights, *, stream: SecretStream, head_level: float | None
    ) -> ScaledVeil:
        """Fresh scales on both sides of every transitional layer and, with head noise, a fresh γ."""
        layers = transitional(scale_table(architecture))
        scales = layers.scales(secret_uniforms(stream)).to(weights.parameters.device)
        return scaled_veil(
            dataclasses.replace(architecture, table=layers.table),
            weights,
            unmoved(scales),
            head=self.head,
            stream=stream,
            head_level=head_level,
            multipliers=layers.multipliers(scales).to(weights.parameters.dtype),
        )
