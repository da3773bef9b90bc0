"""A clip that follows the updates (Andrew et al. 2021), by one number a round that is under noise like all the rest.

Beside its update, a client of n samples tells whether that was within the round's clip: + or − n·τ·C, one number more
in the same vector. Updates travel in units of the clip: what is sent is u·C/C_t, shortened to C, where C is the clip
of the settings and C_t that of the round. So noise, its grid and its price are those of C in every round, and the
server multiplies what it gets by C_t/C.

Replacing a client's data moves its vector by 2nC·√(1 + τ²) at most. Noise that meets the target for that is z times as
large; on updates it is z_Δ = z·√(1 + τ²) times their 2nC, on the answers σ_b = z·√(1 + τ²)/τ times their 2nτC, and

    z⁻² = z_Δ⁻² + σ_b⁻²

which is the paper's z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2), whose answers are half as far apart. τ² = s/(1 − s) gives the
answers the share s of what a round may cost, as μ².
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedveil.errors import ConfigError, ProtocolError

_SMALLEST, _LARGEST = 1e-12, 2.0**36
_WIDEST = 1e6
# So that what single precision rounds up is still within the bound.
_BELOW = 1 - 2.0**-20


@dataclass(frozen=True)
class AdaptiveClip:
    """C ← C·e^(−rate·(b − quantile)), b being the noised share, by samples, of updates within the clip.

    `share` is how much of a round's μ² pays for b. Under noise one client can answer for many, so that a liar moves the
    clip as fast as the rule allows: it stays within `range` times the first, up and down.
    """

    quantile: float = 0.5
    rate: float = 0.2
    share: float = 0.1
    range: float = 10.0

    def __post_init__(self) -> None:
        for name, value in (("clip_quantile", self.quantile), ("clip_share", self.share)):
            if not 0 < value < 1:
                raise ConfigError(f"{name} must lie strictly between 0 and 1 (got {value}).")
        if not 0 < self.rate <= 1:
            raise ConfigError(f"clip_rate must lie in (0, 1] (got {self.rate}).")
        if not 1 < self.range <= _WIDEST:
            raise ConfigError(f"clip_range must be more than 1, and at most {_WIDEST:g} (got {self.range}).")

    @property
    def _mark(self) -> float:
        return math.sqrt(self.share / (1 - self.share))

    @property
    def mark(self) -> float:
        """What stands for "within", over the clip of the settings and the client's number of samples."""
        return self._mark * _BELOW

    @property
    def longer(self) -> float:
        """√(1 + τ²): by how much the answer lengthens a contribution, and with it the noise on updates."""
        return math.sqrt(1 + self._mark**2)

    def following(self, clip: float, answers: float, *, start: float) -> float:
        """The next round's clip, by the mean of answers under noise, over what stands for "within"."""
        within = min(max((answers + 1) / 2, 0.0), 1.0)
        low, high = max(start / self.range, _SMALLEST), min(start * self.range, _LARGEST)
        return min(max(clip * math.exp(-self.rate * (within - self.quantile)), low), high)

    def check(self, clip: float, *, start: float, round: int) -> None:
        """Refuse a clip that this rule cannot have reached by a round (counted from 0), whatever clients answered."""
        most = math.log(self.range)
        up, down = (min(self.rate * round * share, most) for share in (self.quantile, 1 - self.quantile))
        if not (clip > 0 and -down - 1e-6 <= math.log(clip / start) <= up + 1e-6):
            raise ProtocolError(
                f"a clip of {clip:g} in round {round + 1} cannot follow from {start:g} in the first, with a clip_rate "
                f"of {self.rate:g} and a clip_range of {self.range:g}"
            )
