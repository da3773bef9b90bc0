"""The ledger of a run: against whom what is proven, under which assumptions, and what is not.

Computed from declared releases and from the account of what was spent. A field that carries data and
reaches an adversary uncovered settles the matter, whatever else is protected.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedveil.errors import ConfigError
from fedveil.ledger.accountant import CLIENTS, COLLUSION, SERVER, Accountant
from fedveil.ledger.caveats import HONEST_ARRIVALS, SECRET_BATCH
from fedveil.ledger.gaussian import MOST, Guesses, epsilon_of, excludes, follows
from fedveil.ledger.releases import Caveats, Release

OUTSIDER = "outsider"
Verdict = Literal["differential privacy", "conditional", "estimate", "aggregate only", "ciphertexts only", "none"]
_LONG = 1000.0
_ALIKE = 1e-3
_PLACES = "neither colluders nor the server choose a round's graph: it falls on them at random"
_UNITS = {
    "record": ("one record of one client", "replace one record; numbers of samples are public"),
    "client": ("all data of one client", "replace one client's data; numbers of samples are public"),
}


@dataclass(frozen=True)
class Line:
    """One adversary's line. `outright` is ε without the condition of a conditional figure, where one can be given."""

    adversary: str
    verdict: Verdict
    why: str
    epsilon: float | None = None
    delta: float | None = None
    mu: float | None = None
    worst_client: int | None = None
    unit: str = ""
    relation: str = ""
    assumptions: tuple[str, ...] = ()
    outright: float | None = None

    @property
    def add_remove_epsilon(self) -> float | None:
        """ε of the same noise under the neighbouring relation that most others count with; None where it is not known.

        Adding or removing a unit moves a sum half as far as replacing it. Of secretly drawn batches μ only stands for
        the ε it gives, and half of it for nothing.
        """
        if self.epsilon is None or self.delta is None or self.mu is None or not math.isfinite(self.mu):
            return None
        return None if SECRET_BATCH in self.assumptions else epsilon_of(self.mu / 2, self.delta)

    @property
    def add_remove(self) -> str:
        """The same in a sentence."""
        other = self.add_remove_epsilon
        if self.epsilon is None or other is None:
            return ""
        return (
            f"replace-one ε = {figure(self.epsilon)}; the same noise under add/remove, as Opacus and most tables "
            f"count, is ε = {figure(other)}"
        )

    @property
    def result(self) -> str:
        """The verdict in a few characters."""
        if self.epsilon is None or self.delta is None:
            return self.verdict
        figures = f"(ε = {figure(self.epsilon)}, δ = {self.delta:g})"
        given = f"{figures}\ngiven what is hidden"
        given += "" if self.outright is None else f"; in\nany case ε = {figure(self.outright)}"
        return {"estimate": f"about {figures}, not proven", "conditional": given}.get(self.verdict, figures)


def figure(value: float) -> str:
    """An ε as it is printed."""
    return f"{value:,.0f}" if value >= _LONG else f"{value:.4g}"


def _at_least(value: float) -> str:
    """A lower bound with four digits, never rounded up: that could put it above a claim that it is below."""
    if value <= 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(value)) - 3)
    return f"{math.floor(value / step) * step:.4g}"


def _rounds(count: int) -> str:
    return f"{count:,} round{'s' * (count != 1)}"


@dataclass(frozen=True)
class PaperFigure:
    """What the paper's formula says, beside what was used."""

    formula: str
    claimed_epsilon: float | None = None
    noise_by_paper: float | None = None
    noise_used: float | None = None

    @property
    def saving(self) -> float | None:
        """How much less noise was used than the paper's formula asks for."""
        if not self.noise_by_paper or self.noise_used is None:
            return None
        return 1.0 - self.noise_used / self.noise_by_paper


@dataclass(frozen=True)
class MeasuredEpsilon:
    """What a game with canaries has measured beside what is proven: ε is at least so large, at this confidence.

    `epsilon` takes the noise for Gaussian, where that is claimed; `any_noise` holds whatever it is. `proven` is the
    claim of the game's own ledger (None: there is none), and `expected` what a mechanism that spends all of it shows.
    `own` is the ε that the run's own ledger has against the same adversary, after `own_rounds` rounds (None: it has
    none). A run may have been charged otherwise than a game of its settings: then the figure is the mechanism's alone.
    """

    adversary: str
    unit: Literal["record", "client"]
    epsilon: float
    any_noise: float
    delta: float
    confidence: float
    canaries: int
    guessed: int
    correct: int
    proven: float | None
    expected: float | None
    rounds: int
    seed: int
    own: float | None = None
    own_rounds: int | None = None

    def check(self) -> None:
        """Hold what a file says to what follows from its guesses.

        Raises:
            ConfigError: Guesses that no game has, or figures that do not follow from them.
        """
        game = Guesses(self.canaries, self.guessed, self.correct)
        # The last of several parts with whole rounds of clients may have some more.
        possible = self.canaries <= 2 * MOST and 0 < self.delta < 1 and 0.5 <= self.confidence < 1 and self.rounds >= 1
        possible = possible and (self.proven is None or 0 < self.proven < math.inf)
        possible = possible and (self.expected is None or 0 <= self.expected < math.inf)
        terms = {"delta": self.delta, "confidence": self.confidence}
        if not (
            possible
            and follows(self.any_noise, game, gaussian=False, **terms)
            and follows(self.epsilon, game, gaussian=self.expected is not None, **terms)
        ):
            raise ConfigError(
                f"ε ≥ {self.epsilon:g} and ε ≥ {self.any_noise:g} do not follow from {self.correct:,} right of "
                f"{self.guessed:,} guesses at {self.canaries:,} canaries."
            )

    def beside(self, ledger: Ledger) -> MeasuredEpsilon:
        """The same beside what a run's own ledger says now.

        Raises:
            ConfigError: The ledger knows no such adversary, or protects another unit from it, at another δ.
        """
        line = next((line for line in ledger.lines if line.adversary == self.adversary), None)
        if line is None:
            raise ConfigError(f"the ledger has no line against {self.adversary[:60]!r}.")
        own = line.epsilon if line.verdict == "differential privacy" else None
        if own is not None and (self.proven is None or self.delta != line.delta or _UNITS[self.unit][0] != line.unit):
            raise ConfigError(f"it is not about what the ledger proves against {self.adversary}.")
        return dataclasses.replace(self, own=own, own_rounds=ledger.rounds)

    @property
    def of_the_run(self) -> bool:
        """Whether the game was charged what the run was: as many rounds, for the same claim."""
        if self.proven is None or self.own is None or self.rounds != self.own_rounds:
            return False
        return math.isclose(self.proven, self.own, rel_tol=_ALIKE)

    @property
    def contradicts(self) -> bool:
        """Whether what was measured cannot be, if what is proven holds: but for chance, something is broken."""
        claim = self.own if self.of_the_run else self.proven
        return claim is not None and self.epsilon > claim

    @property
    def could_contradict(self) -> bool:
        """Whether guesses that are all right would rule out what is proven."""
        if self.proven is None:
            return True
        best, gaussian = Guesses(self.canaries, self.guessed, self.guessed), self.expected is not None
        return excludes(best, epsilon=self.proven, delta=self.delta, gaussian=gaussian, confidence=self.confidence)

    @property
    def result(self) -> str:
        """Both figures side by side; a claim of the run's own only where the game was about it."""
        measured = f"ε ≥ {_at_least(self.epsilon)} ({self.confidence:.0%})"
        if self.proven is None:
            return f"{measured} beside nothing proven"
        if self.of_the_run and self.own is not None:
            return f"{measured} beside ε ≤ {figure(self.own)} (proven)"
        return f"{measured} in a game of {_rounds(self.rounds)}, of which ε ≤ {figure(self.proven)} is proven"

    @property
    def told(self) -> tuple[str, ...]:
        """In sentences."""
        of = {"record": "records", "client": "clients"}[self.unit]
        lines = [
            f"against {self.adversary}, replace one {self.unit}, at δ = {self.delta:g}: {self.result}",
            f"{self.correct:,} of {self.guessed:,} guesses were right, at the coins of {self.canaries:,} {of} over "
            f"{_rounds(self.rounds)}; whatever the noise is: ε ≥ {_at_least(self.any_noise)}",
        ]
        if self.proven is not None and not self.of_the_run:
            own = "the run has no such figure of its own yet"
            if self.own is not None and self.own_rounds is not None:
                own = f"the run's own line is ε = {figure(self.own)} after {_rounds(self.own_rounds)}"
            lines.append(f"these figures are the mechanism's and not this run's: {own}")
        if self.contradicts:
            lines.append(
                "this CONTRADICTS what is proven: noise, clipping or accounting is broken, or a chance of "
                f"{1 - self.confidence:.0%} has come true (repeat with another seed)"
            )
        elif not self.could_contradict:
            lines.append("no guesses could have contradicted this claim: there are too few canaries for it")
        elif self.expected is not None:
            lines.append(
                f"noise that spends all of its claim shows about ε ≥ {self.expected:.3g} in such a game: what lies "
                "between is the game's, and more canaries narrow it"
            )
        return tuple(lines)


@dataclass(frozen=True)
class Ledger:
    """Everything a run can say about privacy."""

    scheme: str
    rounds: int
    lines: tuple[Line, ...]
    unprotected: tuple[str, ...]
    paper: PaperFigure | None
    simulation: bool
    releases: tuple[Release, ...]
    notes: tuple[str, ...] = ()
    measured: MeasuredEpsilon | None = None

    def line(self, adversary: str) -> Line:
        """One adversary's line."""
        return next(line for line in self.lines if line.adversary == adversary)

    def as_data(self) -> dict[str, Any]:
        """As plain data; an infinite ε is written as null with the verdict "none"."""
        data = dataclasses.asdict(self)
        if self.measured is None:
            del data["measured"]
        if self.paper is not None:
            data["paper"]["saving"] = self.paper.saving
        return data


def state(
    *,
    scheme: str,
    releases: Sequence[Release],
    caveats: Caveats,
    accountant: Accountant | None,
    delta: float,
    unit: str,
    paper: PaperFigure | None,
    simulation: bool,
    rounds: int = 0,
    notes: tuple[str, ...] = (),
) -> Ledger:
    """The ledger of a run; `rounds` counts where no account does."""
    lines = [_server_line(releases, caveats, accountant, delta, unit)]
    if accountant is not None and COLLUSION in accountant.adversaries:
        alone = dataclasses.replace(lines[0], adversary=COLLUSION)
        share = f"{_dishonest(accountant)} of a round's clients may side with the server, or add no noise"
        why = f"{share} ({accountant.how}{'' if accountant.certified else ': an estimate, not a proof'})"
        with_them = _spent_line(COLLUSION, accountant, delta, unit, caveats, why)
        lines.append(alone if alone.verdict == "none" else with_them)
    elif any(release.with_client is not None for release in releases):
        weaker = [_with_client(release) for release in releases]
        line = _server_line(weaker, caveats, accountant, delta, unit, sees="with one client on its side, sees")
        lines.append(dataclasses.replace(line, adversary=COLLUSION))
    elif lines[0].verdict == "aggregate only":
        closed = "masks between honest clients stay closed; who beyond a quorum is in it is the server's word"
        if caveats.opened:
            closed = "fewer clients than a quorum decrypt nothing; what the others decrypt is the server's word"
        why = f"the sum over the honest clients of {caveats.over or 'a round'}: {closed}"
        lines.append(Line(COLLUSION, "aggregate only", why, assumptions=caveats.assumptions))
    lines.append(_client_line(releases, caveats, accountant, delta, unit))
    lines.append(dataclasses.replace(lines[0], adversary=OUTSIDER, why=f"who reads every message: {lines[0].why}"))
    return Ledger(
        scheme=scheme,
        rounds=rounds if accountant is None else accountant.rounds,
        lines=tuple(lines),
        unprotected=caveats.unprotected,
        paper=paper,
        simulation=simulation,
        releases=tuple(releases),
        notes=notes,
    )


def _with_client(release: Release) -> Release:
    """What is left of a release's cover where one client sides with the receiver."""
    left = release.with_client
    if left is None:
        return release
    return dataclasses.replace(release, protection=left, hiding=release.hiding if left == "masked" else "none")


def _server_line(
    releases: Sequence[Release],
    caveats: Caveats,
    accountant: Accountant | None,
    delta: float,
    unit: str,
    *,
    sees: str = "sees",
) -> Line:
    carried = [
        release
        for release in releases
        if release.sender == "client" and "server" in release.to and release.about == "data"
    ]
    bare = [release.field for release in carried if release.protection == "open" and release.noise == "none"]
    futile = [release.field for release in carried if release.protection == "open" and release.noise != "none"]
    if bare or futile:
        seen = [f"uncovered: {', '.join(bare)}"] if bare else []
        seen += [f"under noise that proves nothing: {', '.join(futile)}"] if futile else []
        return Line(SERVER, "none", f"{sees} {'; '.join(seen)}")
    unread = [release for release in carried if release.protection == "encrypted"]
    linked = [release.field for release in carried if release.protection == "linked"]
    read = [release for release in carried if release.protection in ("masked", "noised")]
    if unread and not read and not linked:
        why = f"{sees} nothing but {unread[0].hiding}"
        return Line(SERVER, "ciphertexts only", why, assumptions=caveats.assumptions)
    if accountant is not None and all(
        release.protection == "noised" for release in read if release.field != "upload.weight"
    ):
        return _noised_line(caveats, accountant, delta, unit, unread=unread, linked=linked, read=read, sees=sees)
    if any(release.protection == "noised" for release in read):
        masked = ", ".join(release.field for release in read if release.protection == "masked")
        what = f"{masked}, over a round's clients," if unread else "what is hidden, over a round's honest clients,"
        why = f"{sees} the sums of {what} and every upload's rest under noise"
        return Line(SERVER, "aggregate only", why, assumptions=caveats.assumptions)
    # Whoever has a client's help takes that one's part out of the sum.
    over = caveats.over or ("a round's clients" if sees == "sees" else "a round's honest clients")
    why = f"{sees} the sum over {over} and nothing else"
    if unread:
        fields = ", ".join(release.field for release in read)
        why = f"{sees} the sum over {over} of {fields}, and of all else nothing but {unread[0].hiding}"
    return Line(SERVER, "aggregate only", why, assumptions=caveats.assumptions)


def _noised_line(
    caveats: Caveats,
    accountant: Accountant,
    delta: float,
    unit: str,
    *,
    unread: Sequence[Release],
    linked: Sequence[str],
    read: Sequence[Release],
    sees: str,
) -> Line:
    """Noise on everything that the server reads.

    What it does not read (`unread`), bare of noise, or only compares (`linked`) steers later rounds, so the figure
    for a client's own uploads holds given those. Where nothing is compared there is one without that condition:
    through what is hidden a client's data reach other uploads too, each by no more than its own bound. All of them
    together are a Gaussian mechanism with μ² = Σ_k μ_k², as their noises are independent.
    """
    summed = any(release.protection == "noised" and release.hiding != "none" for release in read)
    hidden = [release for release in unread if release.noise == "none"]
    what = "every upload's rest under noise" if hidden or linked else "every upload under noise"
    opened = caveats.opened or "the masks open"
    why = f"{sees} {f'sums under noise, sized for the smallest sum {opened}' if summed else what}"
    if linked:
        why += f", and what is alike in {', '.join(linked)}"
    line = _spent_line(SERVER, accountant, delta, unit, caveats, why)
    if line.epsilon is None or not (hidden or linked):
        return line
    # A plan for very many clients keeps only the worst one's charge, of which there is no sum to take.
    spent = accountant.spent[SERVER]
    whole = not linked and int((spent > 0).sum()) > 1
    outright = epsilon_of(math.sqrt(float(spent.sum())), delta) if whole else None
    return dataclasses.replace(line, verdict="conditional", outright=outright)


def _client_line(
    releases: Sequence[Release], caveats: Caveats, accountant: Accountant | None, delta: float, unit: str
) -> Line:
    if any(
        "clients" in release.to and release.about == "data" and release.protection == "masked" for release in releases
    ):
        return Line(
            CLIENTS,
            "aggregate only",
            "read the sums of what is hidden, over a round's clients and without noise: no (ε, δ)",
            assumptions=caveats.assumptions,
        )
    if accountant is not None:
        own = f"; {_dishonest(accountant)} of them may know their part, or have added none"
        why = f"see the models, where others' data lie under the noise of the sums{'' if accountant.trusted else own}"
        return _spent_line(CLIENTS, accountant, delta, unit, caveats, why)
    hidden = any(release.field == "train.parameters" and release.hiding != "none" for release in releases)
    how = "veiled models" if hidden else "the models"
    return Line(CLIENTS, "none", f"see {how} of all rounds, and nothing bounds what those hold of others' data")


def _spent_line(adversary: str, accountant: Accountant, delta: float, unit: str, caveats: Caveats, why: str) -> Line:
    client, mu = accountant.worst(adversary)
    what, relation = _UNITS[unit]
    if not math.isfinite(mu):
        return Line(adversary, "none", f"{why}, but nothing covers client {client}")
    proven = adversary != COLLUSION or accountant.certified
    trusting = adversary != CLIENTS and accountant.honest_arrivals
    return Line(
        adversary,
        "differential privacy" if proven else "estimate",
        why,
        epsilon=accountant.epsilon(adversary, delta),
        delta=delta,
        mu=mu,
        worst_client=client,
        unit=what,
        relation=relation,
        assumptions=(*caveats.assumptions, *([] if proven else [_PLACES]), *([HONEST_ARRIVALS] if trusting else [])),
    )


def _dishonest(accountant: Accountant) -> str:
    return f"{accountant.collusion:.0%}" if accountant.collusion > 0 else "any one"
