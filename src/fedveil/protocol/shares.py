"""Who holds which share of a round's secrets, and the sealed bundles in which shares travel.

For every client d, all secrets about d lie with its neighbours N(d), n of them, and t > 2n/3 shares are
needed for each: the seed of d's own mask and the key that locks what d reveals, both dealt by d; and
the seed of each pair (v, d), dealt by v. A holder reveals one kind per peer: the first two if it was
told that d's upload arrived, the last if not. Everything it reveals is locked, but for its shares of
others' keys.

Why a server that tells clients different stories gains nothing, with c < n/3 of N(d) on its side
(2t > n + c, so that no two sets of t shares come from holders who were told different things):
what d reveals can be read only if t of N(d) were told that d arrived, and then the seeds of d's pairs
stay closed. A client's own mask comes off only by what t − c honest neighbours revealed and the
server could read. None of these neighbours' pairs with the client can then be opened, from either end,
so that its upload is hidden in a sum over at least t − c other honest clients.

Without the lock this fails on a sparse graph: the server would call each neighbour of one client
missing, to all but that neighbour itself, and read the client's upload without anybody's help.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from fedveil.errors import ConfigError, ProtocolError
from fedveil.protocol.keyring import Keyring
from fedveil.secrets import SecretStream
from fedveil.uplink.graph import Graph, threshold

SHARE_BYTES = 33
"""The length of one share."""

LOCK = -1
"""Stands for the key of a client's revelation where the peer of a pair would stand."""

Item = tuple[int, int]
"""(dealer, peer): the seed of a pair; (dealer, dealer): of the dealer's own mask; (dealer, LOCK): its key."""

SEAL_BYTES = 28
"""What sealing adds: a nonce and a tag."""

_ITEM = struct.Struct(f"<qq{SHARE_BYTES}s")
ITEM_BYTES = _ITEM.size
"""The length of one share with what it is of."""


@dataclass(frozen=True)
class Quorum:
    """How many of a neighbourhood must answer: more than `fraction` of it."""

    fraction: float = 2 / 3

    def __post_init__(self) -> None:
        if not 0.5 <= self.fraction < 1:
            raise ConfigError(
                f"threshold must lie in [0.5, 1) (got {self.fraction:g}): more than that share of a neighbourhood must "
                "answer, and with half of it or less a server could learn both of a client's secrets."
            )

    def of(self, holders: int) -> int:
        """⌊fraction·n⌋ + 1 of n."""
        # A float just below a whole number must not lose it: 2/3 of 9 is 6.
        return threshold(holders, wanted=min(int(self.fraction * holders + 1e-9) + 1, holders))

    @property
    def colluding(self) -> float:
        """The share of a neighbourhood below which the server's allies learn nothing: 2t > n + c."""
        return 2 * self.fraction - 1


@dataclass(frozen=True)
class Label:
    """The round a bundle belongs to, and the graph on which its dealer saw it.

    A holder with another graph (another cohort, another directory) would read other secrets into the
    same bytes; it cannot open them.
    """

    round: int
    attempt: int
    graph: bytes

    def key(self, ring: Keyring, *, sender: int, holder: int) -> bytes:
        """One key per round, graph and direction; a client's bundle for itself is under a key of its own."""
        purpose = f"{self.purpose(sender, holder)} on {self.graph.hex()}"
        other = sender if ring.client == holder else holder
        secret = ring.own if other == ring.client else ring.pair(other).seed
        return secret(round=self.round, attempt=self.attempt, purpose=purpose)

    @staticmethod
    def purpose(sender: int, holder: int) -> str:
        """What a bundle is for."""
        return f"shares {sender} > {holder}"


def contents(graph: Graph, *, sender: int, holder: int, self_mask: bool) -> list[Item]:
    """What `sender` deals to `holder`, in order: shares of what is its own, then of pairs' seeds."""
    near = graph.neighbours(sender)
    reach = set(graph.neighbours(holder))
    own = [(sender, LOCK), *([(sender, sender)] if self_mask else [])] if sender in reach else []
    return own + [(sender, peer) for peer in near if peer in reach]


def holders_of(graph: Graph, sender: int) -> list[int]:
    """Everybody to whom `sender` deals at least one share: among them itself, a neighbour of its neighbours."""
    found = set(graph.neighbours(sender))
    for peer in graph.neighbours(sender):
        found.update(graph.neighbours(peer))
    return sorted(found)


def deal(
    graph: Graph, ring: Keyring, *, secrets: Mapping[int, bytes], quorum: Quorum, stream: SecretStream, label: Label
) -> dict[int, bytes]:
    """Sealed bundles for every holder; `secrets` are pair seeds by peer, and the client's own by itself and LOCK."""
    from fedveil.crypto.sealing import seal
    from fedveil.crypto.shamir import split

    sender = ring.client
    shares = {}
    for about, secret in secrets.items():
        around = graph.neighbours(sender if about == LOCK else about)
        shares[about] = split(secret, holders=around, threshold=quorum.of(len(around)), stream=stream)
    bundles = {}
    for holder in holders_of(graph, sender):
        items = contents(graph, sender=sender, holder=holder, self_mask=sender in secrets)
        plain = b"".join(shares[about][holder] for _, about in items)
        key = label.key(ring, sender=sender, holder=holder)
        bundles[holder] = seal(plain, key=key, purpose=label.purpose(sender, holder))
    return bundles


def open_bundle(
    graph: Graph, ring: Keyring, sealed: bytes, *, sender: int, self_mask: bool, label: Label
) -> dict[Item, bytes]:
    """The shares in a bundle; a damaged or foreign bundle is refused, naming its sender."""
    from fedveil.crypto.sealing import unseal

    items = contents(graph, sender=sender, holder=ring.client, self_mask=self_mask)
    key = label.key(ring, sender=sender, holder=ring.client)
    try:
        plain = unseal(sealed, key=key, purpose=label.purpose(sender, ring.client))
    except ProtocolError as reason:
        raise ProtocolError(
            f"the shares client {sender} sent client {ring.client} are damaged, forged or of another round"
        ) from reason
    if len(plain) != SHARE_BYTES * len(items):
        raise ProtocolError(f"the shares client {sender} sent client {ring.client} have the wrong length")
    return {item: plain[SHARE_BYTES * n : SHARE_BYTES * (n + 1)] for n, item in enumerate(items)}


def lock_shares(shares: Mapping[Item, bytes], *, client: int, key: bytes) -> bytes:
    """What a client reveals, under its key."""
    from fedveil.crypto.sealing import seal

    plain = b"".join(_ITEM.pack(*item, share) for item, share in shares.items())
    return seal(plain, key=key, purpose=_revelation(client))


def unlock_shares(locked: bytes, *, client: int, key: bytes) -> dict[Item, bytes]:
    """What a client revealed; refused if it is not under this key, or not a list of shares."""
    from fedveil.crypto.sealing import unseal

    plain = unseal(locked, key=key, purpose=_revelation(client))
    if len(plain) % _ITEM.size:
        raise ProtocolError(f"what client {client} revealed is malformed")
    return {(dealer, peer): share for dealer, peer, share in _ITEM.iter_unpack(plain)}


def _revelation(client: int) -> str:
    return f"revelation of client {client}"
