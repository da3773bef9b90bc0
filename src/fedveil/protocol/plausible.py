"""What honest clients can reach with a contribution or a sum of them, and the refusal of what is beyond.

A clipped contribution of a client with n samples is at most n·C long. To a sum of them noise of variance V a number is
added, which is an integer Gaussian on a grid, and so its exponential moments are at most those of a Gaussian. For d
such numbers and any t (Hsu, Kakade and Zhang 2012, and a union bound)

    ‖noise‖² > V·(d + 2√(d·t) + 2t)      with a chance of at most e⁻ᵗ
    some |noise| > √(2V·(t + ln 2d))     with a chance of at most e⁻ᵗ

With e⁻ᵗ = 2⁻⁴¹ honest clients are taken for others with a chance of at most 2⁻⁴⁰ a sum. Under masks nobody can tell
which upload it was: there, the sum is refused as a whole, and with it its round.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.downlink.messages import Recovered
from fedveil.errors import Code, ProtocolError
from fedveil.ledger.correlated import NoiseLayout
from fedveil.protocol.parts import RoundContext, Terms, adapting, bounded, planned
from fedveil.tensors import statistics_in
from fedveil.uplink.grid import finest_of, rounding_of
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.work.messages import LocalWork

FALSE_ALARM_BITS = 40
"""An honest sum, or an honest upload, is refused with a chance of at most 2 to the power of minus this."""

_TAIL = (FALSE_ALARM_BITS + 1) * math.log(2)


@dataclass(frozen=True)
class Reach:
    """How long a vector can be, and how large each of its numbers; where a clip follows the updates, the last of them
    answers whether they were within it, and is no larger than that takes."""

    norm: float
    number: float
    answer: float | None = None

    @staticmethod
    def of(samples: Sequence[int], work: LocalWork, *, variance: float, length: int, word_bits: int = 64) -> Reach:
        """That of a sum of clipped contributions, of clients with so many `samples`, under noise of this variance."""
        rounding = rounding_of(word_bits)
        clipped = sum(samples) * bounded(work).largest * (1 + rounding)
        # Integers are drawn with a variance of four steps² more than is planned; of the planned one the grid says more.
        wider = 1 + 4 / finest_of(word_bits) ** 2
        sigma, root = math.sqrt(variance * wider), math.sqrt(length * _TAIL)
        largest = sigma * math.sqrt(2 * (_TAIL + math.log(2 * max(length, 1))))
        rule, answer = adapting(work), None
        if rule is not None and work.clip is not None:
            answer = sum(samples) * work.clip * rule.mark * (1 + rounding) + largest
        return Reach(clipped + sigma * math.sqrt(length + 2 * root + 2 * _TAIL), clipped + largest, answer)

    def check(self, vector: Tensor, what: str) -> None:
        """Refuse a vector that is longer, or holds a larger number, or one that is no number."""
        norm, largest = float(vector.norm()), float(vector.abs().max()) if len(vector) else 0.0
        measured = [(norm, self.norm, "is {:.3g} long"), (largest, self.number, "holds a number of {:.3g}")]
        if self.answer is not None:
            measured.append((abs(float(vector[-1])), self.answer, "answers {:.3g} to whether updates were clipped"))
        for figure, most, said in measured:
            if not figure <= most:
                raise ProtocolError(
                    f"{what} {said.format(figure)}, and clients that clip and add the noise they should reach "
                    f"{most:.3g} at most",
                    code=Code.IMPLAUSIBLE,
                )


def check_sum(
    summed: Tensor,
    plan: NoisePlan,
    context: RoundContext,
    terms: Terms,
    *,
    arrived: Collection[int],
    repaired: bool,
) -> None:
    """Refuse the sum of a round's clipped contributions under noise if honest clients cannot have sent it.

    `repaired` says that noise shared with missing clients has been taken off.
    """
    layout = planned(plan, context, terms.work)
    here = np.isin(layout.members, list(arrived))
    samples = [count for count, there in zip(context.samples(), here, strict=True) if there]
    variance = float(layout.residual[here].sum())
    if not repaired:
        variance += float(layout.pairs[here[layout.first] != here[layout.second]].sum())
    numbers = clipped_part(summed, terms).to(torch.float64)
    reach = Reach.of(samples, terms.work, variance=variance, length=len(numbers), word_bits=plan.word_bits)
    reach.check(numbers, "the sum of the uploads")


def clipped_part(vector: Tensor, terms: Terms) -> Tensor:
    """What is bounded of a contribution or a sum: neither the weight, which is public, nor batch statistics."""
    return vector[: -1 - statistics_in(terms.layout)]


def upload_reach(layout: NoiseLayout, context: RoundContext, terms: Terms, client: int) -> Reach:
    """That of one client's upload under its own noise and all that it shares."""
    place = layout.place(client)
    variance = float(layout.residual[place]) + sum(each for _, each in layout.partners(client))
    samples = [context.samples()[place]]
    return Reach.of(samples, terms.work, variance=variance, length=terms.layout.length - 1)


# --- the mean of groups' means without the extremes: what one group says alone moves nothing

FEWEST_GROUPS = 3
"""Of two, nobody can tell which is bad."""


def trimmed_off(groups: int) -> int:
    """How many groups count as possibly bad: a quarter, and at least one."""
    return max(1, groups // 4)


def trimmed_mean(rows: Tensor) -> Tensor:
    """Of every column, the mean without the largest and the smallest quarter; what is no number is largest."""
    off = trimmed_off(len(rows))
    ordered = rows.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).sort(dim=0).values
    return ordered[off : len(rows) - off].mean(dim=0)


def outvoted(groups: Sequence[Recovered]) -> Recovered:
    """What is recovered from a round's groups, number by number; each group counts alike."""

    def scalar(values: Sequence[float | None]) -> float | None:
        told = [value for value in values if value is not None]
        return float(trimmed_mean(torch.tensor(told, dtype=torch.float64))) if len(told) == len(groups) else None

    return Recovered(
        trimmed_mean(torch.stack([group.gradient for group in groups])),
        scalar([group.loss for group in groups]),
        trimmed_mean(torch.stack([group.statistics for group in groups])),
        scalar([group.head_level for group in groups]),
    )
