"""Noise that shrinks from round to round, and how a run's budget is shared among rounds that cost unlike amounts.

Of T rounds, round t = 0 … T − 1 has noise of deviation σ_t = σ_0·ρᵗ. What a round costs, μ_t² = (S/σ_t)², grows as
ρ^(−2t), and costs of Gaussian releases add up exactly, whatever each of them is. Whoever takes part in P rounds pays
most if those are the last P, so that the budget μ² is met by everybody, whichever rounds are theirs, if

    μ_t² = μ² / n_t,      n_t = Σ_{j < P} ρ^(2(t − (T − 1 − j)))

where n_t is how many rounds like round t the budget would pay for: P for all t where ρ = 1.
"""

from __future__ import annotations

import math

from fedveil.errors import ConfigError, ProtocolError, spelled

MOST_SHRINKING = 2.0**20
"""How many times the noise of the last round that of the first may be: beyond, early rounds are nothing but noise."""


def check_decay(decay: float, *, rounds: int) -> None:
    """Refuse a factor a round that is none, or that makes first rounds of so much noise that no number holds it."""
    if not 0 < decay <= 1:
        raise ConfigError(
            f"{spelled('noise_decay')} is the factor by which noise shrinks each round: above 0 and at most 1, not "
            f"{decay}; 1 keeps it as it is."
        )
    if (rounds - 1) * -math.log(decay) > math.log(MOST_SHRINKING):
        least = MOST_SHRINKING ** (-1 / (rounds - 1))
        raise ConfigError(
            f"Noise that shrinks to {decay:g} of itself in each of {rounds} rounds is more than {MOST_SHRINKING:,.0f} "
            f"times as large in the first as in the last. Give fewer rounds, or a {spelled('noise_decay')} of at least "
            f"{math.ceil(least * 1000) / 1000:g}."
        )


def affordable_rounds(round: int | None, *, decay: float, rounds: int, participations: int) -> float:
    """How many rounds with the noise of `round` (from 0) the whole budget pays for; never rounded downwards.

    Args:
        round: Which of the run's rounds; None will do where all are alike.
        decay: The factor on the noise's deviation from one round to the next.
        rounds: How many rounds the run has.
        participations: In how many of them one client takes part at most.

    Returns:
        n_t: what one such round costs is a budget's n_t-th part.
    """
    if decay == 1:
        return float(participations)
    if round is None or not 0 <= round < rounds:
        which = "a round of no number" if round is None else f"round {round + 1}"
        raise ProtocolError(f"noise that shrinks is planned for rounds 1 to {rounds}, not for {which}")
    latest = math.fsum(decay ** (2 * place) for place in range(participations))
    return latest * decay ** (2 * (round - rounds + 1)) * (1 + 1e-12)
