"""A client's own limits: read from its own file, never from a message."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import Code, ConfigError, ProtocolError, spelled, unknown_name
from fedveil.ledger.correlated import NoiseLayout, by_peer, charges, without, worst_collusion
from fedveil.ledger.gaussian import epsilon_of


@dataclass(frozen=True)
class Policy:
    """The largest ε (at `delta`) a client spends in a run, the smallest cohort and the range of clips it accepts.

    ε is counted as if a share `collusion` of a round's clients added no noise and told the server theirs, or as many
    as the run counts if those are more. `max_size_ratio` is how many times the median number of samples a client of
    a round may claim.
    """

    max_epsilon: float | None = None
    delta: float = 1e-5
    min_cohort: int | None = None
    max_clip: float | None = None
    min_clip: float | None = None
    collusion: float = 0.0
    max_size_ratio: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ConfigError(f"policy: delta must lie strictly between 0 and 1 (got {self.delta}).")
        if not 0 <= self.collusion < 1:
            raise ConfigError(f"policy: collusion must lie in [0, 1) (got {self.collusion}).")
        if self.max_size_ratio is not None and not self.max_size_ratio >= 1:
            raise ConfigError(f"policy: max_size_ratio must be at least 1 (got {self.max_size_ratio}).")
        for name in ("max_epsilon", "min_cohort", "max_clip", "min_clip", "max_size_ratio"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"policy: {name} must be positive (got {value}).")
        if self.min_clip is not None and self.max_clip is not None and self.min_clip > self.max_clip:
            raise ConfigError(
                f"policy: min_clip = {self.min_clip:g} is above max_clip = {self.max_clip:g}: no clip would do."
            )

    @staticmethod
    def parse(text: str, *, where: str = "the policy") -> Policy:
        """A policy from its file's text, which names any of the limits."""
        try:
            given = tomllib.loads(text)
        except tomllib.TOMLDecodeError as reason:
            raise ConfigError(f"{where} is not valid TOML: {reason}.") from reason
        known = {field.name for field in fields(Policy)}
        for name, value in given.items():
            if name not in known:
                raise unknown_name(f"setting in {where}:", name, known)
            if isinstance(value, bool) or not isinstance(value, int if name == "min_cohort" else (int, float)):
                raise ConfigError(f"{where}: {name} must be a number (got {value!r}).")
        return Policy(**given)

    def held_to(self, target: Policy) -> Policy:
        """A run's own `target`, with the limits here that are not about ε."""
        return replace(
            target,
            min_cohort=self.min_cohort,
            max_clip=self.max_clip,
            min_clip=self.min_clip,
            max_size_ratio=self.max_size_ratio,
        )

    def check_scheme(
        self, *, noised: bool, clip: float | None, acquainted: bool = True, repaired: bool = False
    ) -> None:
        """Refuse a scheme under which these limits could not be kept; `clip` is None where nothing is clipped.

        `repaired` says that others may give away the noise they share with a client, on the server's word alone.
        """
        if self.max_epsilon is not None and repaired:
            raise ConfigError(
                f"The client's policy allows at most ε = {self.max_epsilon:g}, but with dropouts = 'repair' the server "
                f"could tell others that this client is missing and be given the noise that covers it. Use "
                f"{spelled('dropouts', 'tolerate')}, or accept the server's word with "
                f"{spelled('honest_arrivals', True)}."
            )
        if self.max_epsilon is not None and not noised:
            raise ConfigError(
                f"The client's policy allows at most ε = {self.max_epsilon:g}, but under this scheme its uploads, or "
                "part of them, carry no noise of its own that would bound ε. Use ldp, nadp, veil-dp, dp-fedavg or "
                "serial, or drop max_epsilon from the policy."
            )
        asked = f"rounds of at least {self.min_cohort} clients" if self.min_cohort is not None else "sizes that compare"
        for name in ("min_cohort", "max_size_ratio"):
            if getattr(self, name) is not None and not acquainted:
                raise ConfigError(
                    f"The client's policy asks for {asked}, but under this scheme clients are not told who else takes "
                    f"part. Use another scheme, or drop {name} from the policy."
                )
        for name, limit in (("max_clip", self.max_clip), ("min_clip", self.min_clip)):
            if limit is not None and clip is None:
                raise ConfigError(
                    f"The client's policy asks for clipping ({name} = {limit:g}), but this scheme clips nothing. "
                    f"Use ldp, nadp or veil-dp, or drop {name} from the policy."
                )
        if self.max_clip is not None and clip is not None and clip > self.max_clip:
            raise ConfigError(
                f"clip = {clip:g} exceeds the client's policy (max_clip = {self.max_clip:g}). Lower clip."
            )
        if self.min_clip is not None and clip is not None and clip < self.min_clip:
            raise ConfigError(
                f"clip = {clip:g} is below the client's policy (min_clip = {self.min_clip:g}). Raise clip."
            )

    def check_cohort(self, client: int, size: int) -> None:
        """Refuse a round with too few clients."""
        if self.min_cohort is not None and size < self.min_cohort:
            raise ProtocolError(
                f"client {client} takes part in no round of {size} clients: its policy asks for {self.min_cohort}"
            )

    def check_clip(self, client: int, clip: float) -> None:
        """Refuse a round whose clip, where it changes from round to round, is out of range."""
        low, high = self.min_clip or 0.0, self.max_clip or math.inf
        if not low <= clip <= high:
            raise ProtocolError(
                f"client {client} takes part in no round with a clip of {clip:g}: its policy asks for one between "
                f"{low:g} and {high:g}"
            )

    def size_ratio(self, agreed: float) -> float:
        """How far a size may stand out: as the run has it, or as this policy has it if that is less."""
        return agreed if self.max_size_ratio is None else min(agreed, self.max_size_ratio)

    def charged(
        self, noise_layout: NoiseLayout, *, client: int, spent: float, colluders: int = 0, asked: int | None = None
    ) -> float:
        """The μ² spent after this round, against the server with `colluders` clients or against those clients alone.

        The policy's own share of colluders is of all that the round has `asked`. Refused if the policy allows less.
        """
        dishonest = self._dishonest(noise_layout, colluders, asked)
        price = float(_charges(noise_layout, colluders=dishonest)[noise_layout.place(client)])
        return self._allowed(spent + price, client=client, what="this round")

    def surcharged(
        self,
        noise_layout: NoiseLayout,
        *,
        client: int,
        spent: float,
        revealed: Collection[tuple[int, int]],
        colluders: int = 0,
        asked: int | None = None,
    ) -> float:
        """The μ² spent once the noise of `revealed` pairs, counted on when the round was charged, is known."""
        place, colluders = noise_layout.place(client), self._dishonest(noise_layout, colluders, asked)
        before = float(_charges(noise_layout, colluders=colluders)[place])
        extra = float(_charges(noise_layout, frozenset(revealed), colluders)[place]) - before
        return self._allowed(spent + max(extra, 0.0), client=client, what="giving away noise shared with others")

    def _dishonest(self, noise_layout: NoiseLayout, colluders: int, asked: int | None) -> int:
        """As many as the run counts or this policy does, whichever are more; the client itself is honest."""
        count = len(noise_layout.members)
        return min(max(colluders, math.ceil(self.collusion * max(count, asked or 0) - 1e-9)), count - 1)

    def _allowed(self, total: float, *, client: int, what: str) -> float:
        if self.max_epsilon is not None:
            reached = epsilon_of(math.sqrt(total), self.delta)
            if reached > self.max_epsilon:
                raise ProtocolError(
                    f"client {client} takes no further part: {what} would bring it to ε = {reached:.3g}, and "
                    f"its limit is {self.max_epsilon:g} (δ = {self.delta:g})",
                    code=Code.ENDED,
                )
        return total


@dataclass(frozen=True)
class SampledRounds(Policy):
    """As many `rounds` as noise was made for, where records are drawn in secret: ε then follows from their number."""

    rounds: int = 1

    def charged(
        self, noise_layout: NoiseLayout, *, client: int, spent: float, colluders: int = 0, asked: int | None = None
    ) -> float:
        """The μ² spent after this round, not counting that records are drawn; refused if it is one round too many."""
        total = super().charged(noise_layout, client=client, spent=spent, colluders=colluders, asked=asked)
        if round(total / (total - spent)) > self.rounds:
            raise ProtocolError(
                f"client {client} takes no further part: its noise is made for {self.rounds} rounds, and it has "
                "answered as many",
                code=Code.ENDED,
            )
        return total


@dataclass(frozen=True)
class OwnLimits(Policy):
    """Every client's own limit, where the ε that clients ask for differ: `each` has them by client number."""

    each: tuple[float, ...] = ()

    def _allowed(self, total: float, *, client: int, what: str) -> float:
        return Policy(max_epsilon=self.each[client], delta=self.delta)._allowed(total, client=client, what=what)


@lru_cache(maxsize=8)
def _charges(
    noise_layout: NoiseLayout, revealed: frozenset[tuple[int, int]] = frozenset(), colluders: int = 0
) -> NDArray[np.float64]:
    # Remembered, because in a simulation every client charges itself for the same noise layout.
    charged = charges(noise_layout, revealed=revealed)
    if colluders:
        charged = np.maximum(charged, worst_collusion(without(noise_layout, revealed), colluders).proven)
    return (
        np.maximum(charged, by_peer(noise_layout, colluders=max(1, colluders)))
        if len(noise_layout.members) > 1
        else charged
    )
