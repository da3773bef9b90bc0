"""How large a part of a model the clients elect, round by round."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, ROUND_CEILING, Context, Decimal

from fedveil.errors import ConfigError

# Whole numbers of parameters must come out the same on every machine, and ⌈0.1 · 30⌉ must be 3.
_DECIMAL = Context(prec=60, Emin=MIN_EMIN, Emax=MAX_EMAX)


@dataclass(frozen=True)
class Ratio:
    """r_t = start · decayᵗ, rounds counted from 0; decay = 1 keeps r as it is."""

    start: float
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.start <= 1.0:
            raise ConfigError(
                f"share, the part r of a model that is hidden, goes from 0 to 1; it cannot be {self.start:g}."
            )
        if not 0.0 < self.decay <= 1.0:
            raise ConfigError(
                f"share_decay, the factor λ on r per round, is above 0 and up to 1, not {self.decay:g}; 1 keeps r as it"
                " is."
            )

    def at(self, round: int) -> float:
        """r_t of this round."""
        return float(self._exact(round))

    def winners(self, round: int, size: int) -> int:
        """⌈r_t · size⌉ with r and λ taken as the decimals they are written as: ⌈0.1 · 30⌉ is 3, not 4."""
        if size < 0:
            raise ValueError(f"a model has no {size} parameters")
        product = _DECIMAL.multiply(self._exact(round), Decimal(size))
        return int(product.to_integral_value(rounding=ROUND_CEILING, context=_DECIMAL))

    def _exact(self, round: int) -> Decimal:
        if round < 0:
            raise ValueError(f"rounds are counted from 0, not {round}")
        decayed = _DECIMAL.power(Decimal(repr(float(self.decay))), round)
        return _DECIMAL.multiply(Decimal(repr(float(self.start))), decayed)
