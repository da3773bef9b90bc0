"""The laws of decomposed noise: random factors whose product is exactly Gaussian.

ln|Z| of a standard normal Z is ln √2 − E₀ − Σ_ℓ [E_ℓ/(2ℓ+1) − ½ ln(1 + 1/ℓ)] with independent
exponentials E (Euler's product for Γ), so Z splits into independent factors:

    DN(σ, 1) = ±√2σ·exp(−E₀)        = Uniform(−√2σ, √2σ)       "bounded", what a client draws
    DN*(1)   = the whole series      = √Gamma(3/2, 1) = χ₃/√2    "whole", one secret factor
    DN*(2)   = the series with Gamma(½, 1) in place of E         "half", one of two secret factors

    whole·bounded ~ half·half'·bounded ~ N(0, σ²)

The signs of the secret factors are dropped: scales must be positive, and the bounded factor is symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import digamma, polygamma
from torch import Tensor

from fedveil.errors import ConfigError
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


def seeded_uniforms(seed: bytes) -> Uniforms:
    """Numbers that everybody who holds the 32-byte seed can make again."""
    from fedveil.crypto.streams import WordStream  # training in memory does not need `cryptography`

    return _from_words(WordStream(seed).take)


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
    from fedveil.crypto.streams import WordStream  # training in memory does not need `cryptography`

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
    plain, twice = (placed == 0).nonzero().flatten(), (placed == 2).nonzero().flatten()
    drawn = torch.randn(len(plain), generator=generator, device=like.device, dtype=like.dtype)
    noise[plain] = drawn * sigma
    if len(twice):
        factors = half(len(twice), secret_uniforms(stream))
        noise[twice] *= torch.from_numpy(factors).to(like)
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
