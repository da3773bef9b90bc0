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

from fedveil.ledger.accountant import CLIENTS, COLLUSION, SERVER, Accountant
from fedveil.ledger.caveats import SECRET_BATCH
from fedveil.ledger.gaussian import epsilon_of
from fedveil.ledger.releases import Caveats, Release

OUTSIDER = "outsider"
Verdict = Literal["differential privacy", "conditional", "estimate", "aggregate only", "ciphertexts only", "none"]
_LONG = 1000.0
_PLACES = "neither colluders nor the server choose a round's graph: it falls on them at random"
_ARRIVALS = "the server is honest about whose upload did not arrive"
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
    def add_remove(self) -> str:
        """The same noise under the neighbouring relation that most others count with, in a sentence.

        Adding or removing a unit moves a sum half as far as replacing it. Of secretly drawn batches μ only stands for
        the ε it gives, and half of it for nothing.
        """
        if self.epsilon is None or self.delta is None or self.mu is None or not math.isfinite(self.mu):
            return ""
        if any(text == SECRET_BATCH for text in self.assumptions):
            return ""
        other = _figure(epsilon_of(self.mu / 2, self.delta))
        return (
            f"replace-one ε = {_figure(self.epsilon)}; the same noise under add/remove, as Opacus and most tables "
            f"count, is ε = {other}"
        )

    @property
    def result(self) -> str:
        """The verdict in a few characters."""
        if self.epsilon is None or self.delta is None:
            return self.verdict
        figures = f"(ε = {_figure(self.epsilon)}, δ = {self.delta:g})"
        given = f"{figures}\ngiven what is hidden"
        given += "" if self.outright is None else f"; in\nany case ε = {_figure(self.outright)}"
        return {"estimate": f"about {figures}, not proven", "conditional": given}.get(self.verdict, figures)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= _LONG else f"{value:.4g}"


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

    @property
    def contradicts(self) -> bool:
        """Whether what was measured cannot be, if what is proven holds: but for chance, something is broken."""
        return self.proven is not None and self.epsilon > self.proven

    @property
    def result(self) -> str:
        """Both figures side by side."""
        proven = "nothing proven" if self.proven is None else f"ε ≤ {_figure(self.proven)} (proven)"
        return f"ε ≥ {self.epsilon:.3g} ({self.confidence:.0%}) beside {proven}"

    @property
    def told(self) -> tuple[str, ...]:
        """In sentences."""
        of = {"record": "records", "client": "clients"}[self.unit]
        lines = [
            f"against {self.adversary}, at δ = {self.delta:g}: {self.result}",
            f"{self.correct:,} of {self.guessed:,} guesses were right, at the coins of {self.canaries:,} {of} over "
            f"{self.rounds:,} rounds; whatever the noise is: ε ≥ {self.any_noise:.3g}",
        ]
        if self.contradicts:
            lines.append(
                "this CONTRADICTS what is proven: noise, clipping or accounting is broken, or a chance of "
                f"{1 - self.confidence:.0%} has come true (repeat with another seed)"
            )
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
        why = (
            f"the sum over the honest clients of {caveats.over or 'a round'}: masks between honest clients stay "
            "closed; who beyond a quorum is in it is the server's word"
        )
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
        why = f"{sees} the sums of what is hidden, over a round's honest clients, and every upload's rest under noise"
        return Line(SERVER, "aggregate only", why, assumptions=caveats.assumptions)
    # Whoever has a client's help takes that one's part out of the sum.
    over = caveats.over or ("a round's clients" if sees == "sees" else "a round's honest clients")
    return Line(
        SERVER, "aggregate only", f"{sees} the sum over {over} and nothing else", assumptions=caveats.assumptions
    )


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
    why = f"{sees} {'sums under noise, sized for the smallest sum the masks open' if summed else what}"
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
        assumptions=(*caveats.assumptions, *([] if proven else [_PLACES]), *([_ARRIVALS] if trusting else [])),
    )


def _dishonest(accountant: Accountant) -> str:
    return f"{accountant.collusion:.0%}" if accountant.collusion > 0 else "any one"
