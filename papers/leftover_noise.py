"""Collusion: a server and some clients take off the victim's upload what those clients share with it.

Pair noise Δ (or a pair mask) is in two uploads with opposite signs, and both ends can make it again. What
remains on the victim's upload is its own noise and what it shares with honest clients:

    residual_v + Σ_{honest j} pair_vj                    seen alone
    1/(Σ_H⁻¹)_vv = S_v²/μ_v²                             by who also knows what the honest others computed

Σ_H is the covariance of the honest clients' uploads without the colluders' pairs: the ledger's own figure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import ConfigError
from fedveil.ledger.correlated import NoiseLayout


def remaining_variance(noise_layout: NoiseLayout, victim: int, *, colluders: Collection[int] = ()) -> float:
    """residual_v + Σ pair_vj over honest j: the noise per coordinate left on the victim's upload, seen alone."""
    place = _place(noise_layout, victim, colluders)
    known = _known(noise_layout, colluders)
    here = (noise_layout.first == place) | (noise_layout.second == place)
    other = noise_layout.first[here] + noise_layout.second[here] - place
    return float(noise_layout.residual[place]) + math.fsum(noise_layout.pairs[here][~known[other]])


def sharpest_variance(noise_layout: NoiseLayout, victim: int, *, colluders: Collection[int] = ()) -> float:
    """1/(Σ_H⁻¹)_vv: what is left against one who knows all that the honest others computed."""
    place = _place(noise_layout, victim, colluders)
    honest, sigma = _covariance(noise_layout, colluders)
    at = honest.index(place)
    others = [k for k in range(len(honest)) if k != at]
    if not others:
        return float(sigma[at, at])
    across = sigma[at, others]
    return float(sigma[at, at] - across @ np.linalg.solve(sigma[np.ix_(others, others)], across))


def sharpest_estimate(
    uploads: Mapping[int, Tensor],
    known: Mapping[int, Tensor],
    noise_layout: NoiseLayout,
    victim: int,
    *,
    colluders: Collection[int] = (),
) -> Tensor:
    """The best estimate of the victim's contribution, given what every honest other computed.

    `uploads` of all honest clients have had the colluders' shared parts taken off; `known` are the honest others'
    contributions. What their uploads show beyond those is their noise, of which the victim's shares a part:

        ĉ_v = u_v − Σ_vo·Σ_oo⁻¹·(u_o − c_o)
    """
    place = _place(noise_layout, victim, colluders)
    honest, sigma = _covariance(noise_layout, colluders)
    at = honest.index(place)
    others = [k for k in range(len(honest)) if k != at]
    if not others:
        return uploads[victim].double()
    names = [noise_layout.members[honest[k]] for k in others]
    noise = torch.stack([uploads[name].double() - known[name].double() for name in names])
    factor = np.linalg.solve(sigma[np.ix_(others, others)], sigma[at, others])
    return uploads[victim].double() - torch.from_numpy(np.asarray(factor)).to(noise) @ noise


def _place(noise_layout: NoiseLayout, victim: int, colluders: Collection[int]) -> int:
    if victim in colluders:
        raise ConfigError(f"Client {victim} cannot be the victim and a colluder at once.")
    if victim not in noise_layout.members:
        raise ConfigError(f"Client {victim} is not of this round: its members are {noise_layout.members}.")
    return noise_layout.members.index(victim)


def _known(noise_layout: NoiseLayout, colluders: Collection[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.asarray([member in colluders for member in noise_layout.members], dtype=np.bool_)


def _covariance(
    noise_layout: NoiseLayout, colluders: Collection[int]
) -> tuple[list[int], np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
    """(places of honest members, covariance of their uploads per coordinate without the colluders' pairs)."""
    known = _known(noise_layout, colluders)
    size = len(noise_layout.members)
    sigma = np.diag(noise_layout.residual).astype(np.float64)
    free = ~known[noise_layout.first] & ~known[noise_layout.second]
    first, second, pairs = noise_layout.first[free], noise_layout.second[free], noise_layout.pairs[free]
    np.add.at(sigma, (first, first), pairs)
    np.add.at(sigma, (second, second), pairs)
    np.subtract.at(sigma, (first, second), pairs)
    np.subtract.at(sigma, (second, first), pairs)
    honest = [place for place in range(size) if not known[place]]
    return honest, sigma[np.ix_(honest, honest)]
