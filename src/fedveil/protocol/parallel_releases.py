"""What clients and server tell each other where the model lives with the clients, field by field."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedveil.ledger.releases import Party, Protection, Release
from fedveil.protocol.masked_releases import dealing_releases, unmasking_releases

if TYPE_CHECKING:
    from fedveil.protocol.parallel import Parallel

_SERVER: tuple[Party, ...] = ("server",)
_CLIENTS: tuple[Party, ...] = ("clients",)
_BOTH: tuple[Party, ...] = ("server", "clients")


def parallel_releases(uplink: Parallel) -> tuple[Release, ...]:
    """Every field, with what covers it."""
    return (*_GROUP, *_ROUND, *_vote(uplink), *_upload(uplink), *_LENDING)


def _vote(uplink: Parallel) -> tuple[Release, ...]:
    start, decay = uplink.ratio.start, uplink.ratio.decay
    if start == 0 or (start == 1 and decay == 1) or uplink.strategy == "random":
        return ()
    outcome = (
        Release("divide.round", "server", _CLIENTS, "the round's number"),
        Release("divide.attempt", "server", _CLIENTS, "the round's repetition"),
        Release("divide.cohort", "server", _CLIENTS, "who has voted"),
        Release("divide.voters", "server", _CLIENTS, "whose ballots are in the sum"),
    )
    envelope = (
        Release("vote.client", "client", _SERVER, "the client's number"),
        Release("vote.round", "client", _SERVER, "the round's number"),
        Release("vote.attempt", "client", _SERVER, "the round's repetition"),
    )
    if uplink.ballots is None:
        hiding = "AES tags in the order of the tags: the server sees which clients' votes overlap"
        return (
            *envelope,
            *outcome,
            Release(
                "vote.tags",
                "client",
                _SERVER,
                "the indices of the client's largest changes",
                hiding=hiding,
                about="data",
                protection="linked",
                with_client="open",
            ),
            Release("divide.winners", "server", _CLIENTS, "the tags with most votes", hiding=hiding, about="model"),
        )
    return (
        *envelope,
        *outcome,
        Release(
            "vote.ballot",
            "client",
            _SERVER,
            "a one for each of the client's largest changes",
            hiding=uplink.ballots.hiding,
            about="data",
            protection="encrypted",
            with_client="masked",
        ),
        Release("divide.counts", "server", _CLIENTS, "how many voted for each index", hiding="pads", about="model"),
        *dealing_releases("vote"),
        # A cipher of pads declares what opens masks by itself.
        *(() if uplink.cipher is not None and uplink.cipher.name == "pads" else unmasking_releases(evidence=False)),
    )


def _upload(uplink: Parallel) -> tuple[Release, ...]:
    hides = uplink.cipher is not None
    fields = [
        Release("divided.client", "client", _SERVER, "the client's number"),
        Release("divided.round", "client", _SERVER, "the round's number"),
        Release("divided.attempt", "client", _SERVER, "the round's repetition"),
    ]
    exposes = uplink.noise is not None and not uplink.throughout
    if exposes:
        fields.append(
            Release(
                "divided.rest",
                "client",
                _SERVER,
                "the update where it is not hidden, clipped; where its coordinates belong is not said",
                noise="Gaussian",
                about="data",
                protection="noised",
            )
        )
    else:
        fields.append(Release("divided.rest", "client", _SERVER, "nothing: all of the update is hidden"))
    covered: Protection = "noised" if uplink.throughout else "masked"
    if hides:
        assert uplink.cipher is not None
        left = uplink.cipher.with_client
        fields += [
            Release(
                "divided.hidden",
                "client",
                _SERVER,
                "the update where it is hidden" + (", under noise" if uplink.throughout else ""),
                noise="Gaussian" if uplink.throughout else "none",
                hiding=uplink.cipher.hiding,
                about="data",
                protection="encrypted",
                with_client="noised" if uplink.throughout else left,
            ),
            Release(
                "aggregate.hidden",
                "server",
                _CLIENTS,
                "the sum of what was hidden, which every client can open",
                noise="Gaussian" if uplink.throughout else "none",
                about="data",
                protection=covered,
            ),
            *uplink.cipher.releases(),
        ]
    fields.append(
        Release(
            "aggregate.rest",
            "server",
            _CLIENTS,
            "the sum of what was not hidden",
            noise="Gaussian" if exposes else "none",
            about="data" if exposes else "public",
            protection="noised" if exposes else "open",
        )
    )
    return tuple(fields)


_ROUND = (
    Release("begin.round", "server", _CLIENTS, "the round's number"),
    Release("begin.attempt", "server", _CLIENTS, "the round's repetition"),
    Release("begin.cohort", "server", _CLIENTS, "who takes part in the round"),
    Release("begin.version", "server", _CLIENTS, "which version of the model to work on"),
    Release("aggregate.version", "server", _CLIENTS, "the version that the sums lead to"),
    Release("aggregate.round", "server", _CLIENTS, "the round's number"),
    Release("aggregate.attempt", "server", _CLIENTS, "the round's repetition"),
    Release("aggregate.asked", "server", _CLIENTS, "who was asked to upload"),
    Release("aggregate.contributors", "server", _CLIENTS, "whose uploads are in the sums"),
)

_GROUP = (
    Release("found.newcomers", "server", _CLIENTS, "who is to be let into the group"),
    Release("found.clients", "server", _CLIENTS, "how many clients a round has"),
    Release("founded.client", "client", _SERVER, "the client's number"),
    Release("founded.public", "client", _SERVER, "the public key of the group's cipher"),
    Release("founded.fingerprint", "client", _SERVER, "which group it is"),
    Release("founded.receivers", "client", _SERVER, "who is invited"),
    Release("founded.lengths", "client", _SERVER, "how long the invitations are"),
    Release("founded.bundles", "client", _BOTH, "the group's secrets", hiding="sealed for each newcomer"),
    Release("join.founder", "server", _CLIENTS, "who invites"),
    Release("invitation.sealed", "server", _CLIENTS, "the group's secrets", hiding="sealed for the newcomer"),
    Release("joined.client", "client", _SERVER, "the client's number"),
    Release("joined.fingerprint", "client", _SERVER, "which group it has joined"),
)

_LENDING = (
    Release("lend.version", "server", _CLIENTS, "which version of the model to lend"),
    Release("lent.client", "client", _SERVER, "the client's number"),
    Release("lent.version", "client", _SERVER, "which version it is"),
    Release("lent.sealed", "client", _BOTH, "the model", hiding="sealed under the group key", about="model"),
    Release("borrowed.sealed", "server", _CLIENTS, "the model", hiding="sealed under the group key", about="model"),
    Release("finish.version", "server", _CLIENTS, "the last version of the model"),
    Release("finished.client", "client", _SERVER, "the client's number"),
    Release("finished.version", "client", _SERVER, "which version it holds"),
)
