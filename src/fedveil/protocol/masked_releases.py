"""What clients and server tell each other under masks, field by field."""

from __future__ import annotations

from fedveil.flat import Layout
from fedveil.ledger.releases import Party, Protection, Release
from fedveil.protocol.parts import UPLOAD_FIELDS


def masked_releases(layout: Layout, *, noised: bool, evidence: bool) -> tuple[Release, ...]:
    """Everything masked; what opens masks is declared too."""
    hiding = "masks modulo 2^64: the server learns the sum"
    protection: Protection = "noised" if noised else "masked"
    noise = "integer Gaussian, in the sum" if noised else "none"
    known = [name for name in layout.names if name in UPLOAD_FIELDS]
    return (
        *(
            Release(
                f"upload.{name}",
                "client",
                ("server",),
                UPLOAD_FIELDS[name],
                noise="none" if name == "weight" else noise,
                hiding=hiding,
                about="data",
                protection="masked" if name == "weight" else protection,
            )
            for name in known
        ),
        *dealing_releases("upload"),
        *unmasking_releases(evidence=evidence),
    )


_EVIDENCE = (
    Release("evidence.signers", "server", ("clients",), "who signed the last survivor list"),
    Release("evidence.signatures", "server", ("clients",), "their signatures"),
)


_OPENING = (
    Release("unmask.round", "server", ("clients",), "the round's number"),
    Release("unmask.attempt", "server", ("clients",), "the round's repetition"),
    Release("unmask.survivors", "server", ("clients",), "whose uploads arrived"),
    Release("relayed.senders", "server", ("clients",), "who dealt the shares"),
    Release("relayed.lengths", "server", ("clients",), "how long they are"),
    Release("relayed.bundles", "server", ("clients",), "sealed shares", hiding="sealed for each holder"),
    Release("revealed.client", "client", ("server",), "the client's number"),
    Release("revealed.round", "client", ("server",), "the round's number"),
    Release("revealed.attempt", "client", ("server",), "the round's repetition"),
    Release("revealed.signature", "client", ("server", "clients"), "its signature on the survivor list"),
    Release("revealed.peers", "client", ("server",), "whose keys the shares belong to"),
    Release("revealed.keys", "client", ("server",), "shares of the keys that lock what survivors reveal"),
    Release(
        "revealed.locked",
        "client",
        ("server",),
        "shares of this round's seeds, one kind per neighbour",
        hiding="readable if enough neighbours were told that this client's upload arrived",
    ),
)


def dealing_releases(prefix: str) -> tuple[Release, ...]:
    """The shares that travel with a masked vector, in the message that `prefix` names."""
    both: tuple[Party, ...] = ("server", "clients")
    return (
        Release(f"{prefix}.holders", "client", ("server",), "to whom shares are dealt"),
        Release(f"{prefix}.lengths", "client", ("server",), "how long the sealed shares are"),
        Release(f"{prefix}.bundles", "client", both, "shares of the round's secrets", hiding="sealed for each holder"),
    )


def unmasking_releases(*, evidence: bool) -> tuple[Release, ...]:
    """What opens masks."""
    return (*_OPENING, *(_EVIDENCE if evidence else ()))
