"""Declared releases: every field that leaves a role, to whom, how sensitive, how noised, how hidden.

A message's field says what leaves with it where it is defined (`Released`), and a message with a field that does not
cannot be registered. What is proven about a run is computed from these declarations (`protocol.messages.releases_of`);
a field that leaves a role without one is an error, so nothing leaks by being forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from fedveil.errors import ProtocolError

Party = Literal["server", "client", "clients", "authority", "outsider"]
Subject = Literal["data", "model", "public"]
Protection = Literal["open", "linked", "masked", "noised", "encrypted"]


@dataclass(frozen=True)
class Release:
    """One field that leaves a role.

    `sensitivity` is the largest L2 change one unit of data can cause (None: unbounded), `noise` and
    `hiding` name what covers it ("none" where nothing does). `about` says what the field depends on:
    a client's data, the model, or only what everybody knows. `protection` is what a proof may rest on:
    nothing; tags that show which values are equal and nothing else; masks that leave the sum alone; noise of
    a known law on a bounded change; or a cipher whose key the receiver has not. `with_client` is what is
    left of it where one client sides with the receiver (None: the same).
    """

    field: str
    sender: Party
    to: tuple[Party, ...]
    what: str
    sensitivity: float | None = None
    noise: str = "none"
    hiding: str = "none"
    about: Subject = "public"
    protection: Protection = "open"
    with_client: Protection | None = None


@dataclass(frozen=True)
class Released:
    """What a field of a message gives away, as its annotation: `Annotated[int, Released("the round's number")]`.

    It goes to whom the message goes, unless `to` names others too. What is not said here is as in `Release`.
    """

    what: str
    to: tuple[Party, ...] = ()
    hiding: str = "none"
    about: Subject = "public"
    protection: Protection = "open"
    with_client: Protection | None = None


@dataclass(frozen=True)
class ContributionSections:
    """The same for a vector of which every named section is a release of its own."""

    what: Mapping[str, str]


class Cover(TypedDict, total=False):
    """What a part makes of a field: what covers it this time, or more exactly what is in it."""

    what: str
    noise: str
    hiding: str
    about: Subject
    protection: Protection
    with_client: Protection | None


class UndeclaredError(ProtocolError):
    """A field was about to leave a role without a declaration: a mistake in a scheme, never of the other side."""


def check_declared(fields: Iterable[str], releases: Iterable[Release]) -> None:
    """Refuse fields that nobody declared."""
    declared = {release.field for release in releases}
    missing = [field for field in fields if field not in declared]
    if missing:
        raise UndeclaredError(
            f"undeclared release: {', '.join(missing)}. Every field that leaves a role needs a Release "
            "(to whom, sensitivity, noise, hiding), or the ledger would not count it."
        )


@dataclass(frozen=True)
class Caveats:
    """`assumptions` are what a proof rests on, `unprotected` what nobody should expect, `paper` the paper's claim,
    `notes` what else a reader must know, `over` whose contributions a sum is of, if not all of a round's clients'.
    `opened` says by whom sums are opened, where no masks are taken off: "clients decrypt"."""

    assumptions: tuple[str, ...] = ()
    unprotected: tuple[str, ...] = ()
    paper: str = ""
    notes: tuple[str, ...] = ()
    over: str = ""
    opened: str = ""

    def followed_by(self, *others: Caveats) -> Caveats:
        """These and then the others', each sentence once; the paper's claim stays."""
        said = (self, *others)
        return Caveats(
            tuple(dict.fromkeys(text for one in said for text in one.assumptions)),
            tuple(dict.fromkeys(text for one in said for text in one.unprotected)),
            self.paper,
            tuple(dict.fromkeys(text for one in said for text in one.notes)),
            next((one.over for one in said if one.over), ""),
            next((one.opened for one in said if one.opened), ""),
        )
