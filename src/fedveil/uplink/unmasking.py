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

import hashlib
import itertools
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import Code, ConfigError, ProtocolError
from fedveil.ledger.releases import Party, Released
from fedveil.protocol.codec import message
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.key_agreement import Keyring
from fedveil.protocol.messages import SECTIONS, Attempt, Reply, Request, Round, Upload
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.phases import Inbox
from fedveil.secrets import SecretStream
from fedveil.shapes import Sizes, clients, counts, octets, words
from fedveil.uplink.graph import Graph, threshold
from fedveil.uplink.grid import FixedPoint

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
    reach = graph.around(holder)
    own = [(sender, LOCK), *([(sender, sender)] if self_mask else [])] if sender in reach else []
    return own + [(sender, peer) for peer in near if peer in reach]


def holders_of(graph: Graph, sender: int) -> list[int]:
    """Everybody to whom `sender` deals at least one share: among them itself, a neighbour of its neighbours."""
    holders = set(graph.neighbours(sender))
    for peer in graph.neighbours(sender):
        holders.update(graph.neighbours(peer))
    return sorted(holders)


def deal(
    graph: Graph, ring: Keyring, *, secrets: Mapping[int, bytes], quorum: Quorum, stream: SecretStream, label: Label
) -> dict[int, bytes]:
    """Sealed bundles for every holder; `secrets` are pair seeds by peer, and the client's own by itself and LOCK."""
    from fedveil.crypto.keys import seal
    from fedveil.crypto.shamir import split_many

    sender = ring.client
    shares: dict[int, dict[int, bytes]] = {}
    around = {about: graph.neighbours(sender if about == LOCK else about) for about in secrets}
    for size in sorted({len(holders) for holders in around.values()}):
        alike = [about for about in secrets if len(around[about]) == size]
        dealt = split_many(
            [secrets[about] for about in alike],
            holders=[around[about] for about in alike],
            threshold=quorum.of(size),
            stream=stream,
        )
        shares |= dict(zip(alike, dealt, strict=True))
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
    from fedveil.crypto.keys import unseal

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
    from fedveil.crypto.keys import seal

    plain = b"".join(_ITEM.pack(*item, share) for item, share in shares.items())
    return seal(plain, key=key, purpose=_revelation(client))


def unlock_shares(locked: bytes, *, client: int, key: bytes) -> dict[Item, bytes]:
    """What a client revealed; refused if it is not under this key, or not a list of shares."""
    from fedveil.crypto.keys import unseal

    plain = unseal(locked, key=key, purpose=_revelation(client))
    if len(plain) % _ITEM.size:
        raise ProtocolError(f"what client {client} revealed is malformed")
    return {(dealer, peer): share for dealer, peer, share in _ITEM.iter_unpack(plain)}


def _unlocks(locked: bytes, client: int, key: bytes) -> bool:
    try:
        unlock_shares(locked, client=client, key=key)
    except ProtocolError:
        return False
    return True


def _revelation(client: int) -> str:
    return f"revelation of client {client}"


SIGNATURE_BYTES = 64
MORE_NEIGHBOURS = "where clients often drop out, raise neighbours or lower threshold"
"""What helps against neighbourhoods that fall short."""

Bundles = dict[int, bytes]
_BOTH: tuple[Party, ...] = ("server", "clients")


@message
@dataclass(frozen=True, eq=False)
class MaskedUpload(Upload):
    """Client → server: a masked vector, and sealed shares of this round's secrets for their holders."""

    payload: Annotated[Tensor, words("contribution"), SECTIONS]
    holders: Annotated[Tensor, clients("holders"), Released("to whom shares are dealt")]
    lengths: Annotated[Tensor, counts("holders"), Released("how long the sealed shares are")]
    bundles: Annotated[
        Tensor,
        octets("bundles"),
        Released("shares of the round's secrets", _BOTH, hiding="sealed for each holder"),
    ]

    released_as = "upload"


@message
@dataclass(frozen=True, eq=False)
class Unmask(Request):
    """Server → client: whose uploads arrived."""

    round: Round
    attempt: Attempt
    survivors: Annotated[Tensor, clients("survivors"), Released("whose uploads arrived")]


@message
@dataclass(frozen=True, eq=False)
class Relayed(Request):
    """Server → one client: the sealed shares that others dealt to it."""

    senders: Annotated[Tensor, clients("senders"), Released("who dealt the shares")]
    lengths: Annotated[Tensor, counts("senders"), Released("how long they are")]
    bundles: Annotated[Tensor, octets("bundles"), Released("sealed shares", hiding="sealed for each holder")]


@message
@dataclass(frozen=True, eq=False)
class Revealed(Reply):
    """Client → server: the survivor list signed; shares of the keys of `peers`, and the rest under its own key.

    `keys[i]` is the client's share of the key that locks what `peers[i]` reveals. `locked` holds one kind
    of share per neighbour, and can be read once enough neighbours have revealed shares of this client's key.
    """

    round: Round
    attempt: Attempt
    signature: Annotated[Tensor, octets(SIGNATURE_BYTES), Released("its signature on the survivor list", _BOTH)]
    peers: Annotated[Tensor, clients("peers"), Released("whose keys the shares belong to")]
    keys: Annotated[
        Tensor, octets("peers", SHARE_BYTES), Released("shares of the keys that lock what survivors reveal")
    ]
    locked: Annotated[
        Tensor,
        octets("locked"),
        Released(
            "shares of this round's seeds, one kind per neighbour",
            hiding="readable if enough neighbours were told that this client's upload arrived",
        ),
    ]


@message
@dataclass(frozen=True, eq=False)
class Evidence(Request):
    """Server → one client: its neighbours' signatures on the survivor list of the round it revealed shares in last.

    It is owed whether or not the round could be opened: a quorum of a client's neighbours on one list leaves too few
    of them, with fewer than a third colluding, for another. Fewer than a quorum show nothing, since the others may
    have signed another list.
    """

    signers: Annotated[Tensor, clients("signers"), Released("who signed the last survivor list")]
    signatures: Annotated[Tensor, octets("signers", SIGNATURE_BYTES), Released("their signatures")]


def packed(bundles: Mapping[int, bytes]) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, lengths, bytes) of bundles by client."""
    numbers = sorted(bundles)
    return (
        torch.tensor(numbers, dtype=torch.int64),
        torch.tensor([len(bundles[number]) for number in numbers], dtype=torch.int64),
        from_bytes(b"".join(bundles[number] for number in numbers)),
    )


def unpacked(numbers: Tensor, lengths: Tensor, content: Tensor) -> Bundles:
    """Bundles by client; refuses lengths that do not fit."""
    ends = list(itertools.accumulate(lengths.tolist(), initial=0))
    if ends[-1] != content.numel():
        raise ProtocolError("bundles of shares are malformed: their lengths do not add up to what was sent")
    data = to_bytes(content)
    return {
        number: data[start:end] for number, (start, end) in zip(numbers.tolist(), itertools.pairwise(ends), strict=True)
    }


def listed(numbers: Tensor) -> list[int]:
    """Client numbers from a message."""
    return [int(number) for number in numbers.tolist()]


def list_digest(survivors: Sequence[int], *, graph: bytes) -> bytes:
    """What a client signs before it reveals: everybody whose upload arrived, in the round of this graph seed."""
    numbers = np.asarray(sorted(survivors), dtype="<u8").tobytes()
    return hashlib.sha256(b"fedveil survivors 1" + graph + numbers).digest()


class _Relay(Mapping[int, "Relayed"]):
    """What every survivor is handed in private."""

    def __init__(self, total: MaskedSum) -> None:
        self._total = total

    def __getitem__(self, client: int) -> Relayed:
        if client not in self._total.alive:
            raise KeyError(client)
        return self._total.private(client)

    def __iter__(self) -> Iterator[int]:
        return iter(self._total.survivors)

    def __len__(self) -> int:
        return len(self._total.survivors)


class MaskedSum(Inbox[Any]):
    """Σ of masked vectors modulo 2⁶⁴, whose first `wide` words are one number, and what takes the masks off."""

    def __init__(
        self,
        codec: FixedPoint | None,
        length: int,
        graph: Graph,
        context: RoundContext,
        *,
        quorum: Quorum,
        self_mask: bool,
        signed: bool,
        name: str = "",
        wide: int = 0,
    ) -> None:
        self._codec = codec
        self._wide = wide
        self.then: Callable[[Tensor], Tensor] | None = None
        """What an uplink makes of the opened sum, where its uploads are not whole contributions."""
        self._sum = np.zeros(length, dtype=np.uint64)
        self.graph = graph
        self._context = context
        self._quorum = quorum
        self._self_mask = self_mask
        self._signed = signed
        self.asked = False
        self.survivors: tuple[int, ...] = ()
        self._members = frozenset(graph.members)
        self.alive: frozenset[int] = frozenset()
        self._digest = b""
        self.relay: dict[int, Bundles] = defaultdict(dict)
        self.signatures: dict[int, bytes] = {}
        self._locked: Bundles = {}
        self._shares: dict[Item, dict[int, bytes]] = defaultdict(dict)
        self._read: set[int] = set()
        self._unread: dict[int, str] = {}
        self._doubted: set[int] = set()
        self.opened = False
        self._largest = max(map(graph.degree, graph.members)) + 2  # pairs, and what is the dealer's own
        bundle = self._largest * SHARE_BYTES + SEAL_BYTES
        among = range(len(graph.members) + 1)
        sizes: Sizes = {"contribution": length, "holders": among, "bundles": range(len(graph.members) * bundle + 1)}
        self.expect(MaskedUpload, graph.members, which=context.which, sizes=sizes, name=name)

    def _fold(self, reply: MaskedUpload | Revealed) -> None:
        from fedveil.crypto.keys import add_words

        if isinstance(reply, Revealed):
            self._fold_revealed(reply)
            return
        bundles = unpacked(reply.holders, reply.lengths, reply.bundles)
        if not self._members.issuperset(bundles):
            raise ProtocolError("an upload deals shares to clients outside the round")
        add_words(self._sum, reply.payload.cpu().numpy().view(np.uint64), wide=self._wide)
        for holder, bundle in bundles.items():
            self.relay[holder][reply.client] = bundle

    def close(self, arrived: Sequence[int]) -> None:
        """No more uploads: from here on only revelations count."""
        self.survivors = tuple(sorted(arrived))
        self.alive = frozenset(arrived)
        self._digest = list_digest(self.survivors, graph=self._context.graph_seed())
        among = len(self.graph.members)
        sizes = {"peers": range(among + 1), "locked": range(among * self._largest * ITEM_BYTES + SEAL_BYTES + 1)}
        self.expect(Revealed, self.survivors, which=self._context.which, sizes=sizes)

    def check_reach(self) -> None:
        """Refuse to ask for shares where too few holders are left to open some client's secrets."""
        alive = set(self.survivors)
        gone = set(self.graph.members) - alive
        # A client with everybody around it says nothing new: only what the missing have left open can fall short.
        for around in gone | {near for client in gone for near in self.graph.neighbours(client)}:
            if around in alive and not self._self_mask:
                continue
            holders = self.graph.neighbours(around)
            left, needed = len(alive.intersection(holders)), self._quorum.of(len(holders))
            if left < needed:
                raise ProtocolError(
                    f"{left} of {needed} needed neighbours of client {around} are left, of {len(holders)}: the sum "
                    f"could not be opened; {MORE_NEIGHBOURS}"
                )

    def private(self, client: int) -> Relayed:
        """The sealed shares that survivors dealt to a client."""
        return Relayed(*packed({k: v for k, v in self.relay.get(client, {}).items() if k in self.alive}))

    def relayed(self) -> Mapping[int, Relayed]:
        """The same for every survivor, put together when asked for: all of them at once would double the memory."""
        return _Relay(self)

    def _fold_revealed(self, reply: Revealed) -> None:
        peers = reply.peers.tolist()
        if not set(peers) <= set(self.graph.neighbours(reply.client)):
            raise ProtocolError("a revelation of shares that are held by others")
        signature = to_bytes(reply.signature)
        if self._signed and not self._vouches(reply.client, signature):
            raise ProtocolError("a revelation does not sign the survivor list")
        self.signatures[reply.client] = signature
        self._locked[reply.client] = to_bytes(reply.locked)
        self.relay.pop(reply.client, None)  # it has been handed these: of many clients they are most of the memory
        for peer, share in zip(peers, reply.keys, strict=True):
            self._shares[(peer, LOCK)][reply.client] = to_bytes(share)

    def _vouches(self, client: int, signature: bytes) -> bool:
        """Whether a client signed the survivor list: with one that its neighbours would not take, they leave."""
        from fedveil.crypto.keys import signed_by

        directory = self._context.directory
        assert directory is not None
        return signed_by(directory.entry(client)[0], signature, self._digest, purpose=f"survivors of {directory.run}")

    def total(self) -> Tensor:
        """The sum of what arrived, masks taken off; too few or contradicting shares are refused."""
        if self._codec is None:
            raise ProtocolError("this sum is covered by more than masks: only clients can read it")
        total = torch.from_numpy(self._codec.decode(self.words()))
        return total if self.then is None else self.then(total)

    def words(self) -> NDArray[np.uint64]:
        """The same modulo 2⁶⁴."""
        from fedveil.crypto.keys import add_mask

        if not self.opened:
            self._read_revelations()
            alive = set(self.survivors)
            opened = self._sum.copy()
            if self._self_mask:
                for client in self.survivors:
                    add_mask(opened, self._secret(client, client), subtract=True, wide=self._wide)
            for gone in self.graph.members:
                if gone in alive:
                    continue
                for client in self.graph.neighbours(gone):
                    if client in alive:
                        # The survivor added this mask if its number is the smaller one.
                        add_mask(opened, self._secret(client, gone), subtract=client < gone, wide=self._wide)
            if self._codec is not None:
                self._refuse_rubbish(opened, self._codec)
            self._sum, self.opened = opened, True
        return self._sum

    def _refuse_rubbish(self, opened: NDArray[np.uint64], codec: FixedPoint) -> None:
        """A mask left in the sum makes its numbers uniform, and half of those are no sum of contributions."""
        if not codec.plausible(opened, addends=len(self.survivors)):
            raise ProtocolError(
                "the opened sum is beyond what clients may send: a client masked its upload with other seeds than it "
                "dealt shares of, or a holder revealed wrong shares",
                code=Code.IMPLAUSIBLE,
            )

    def _read_revelations(self) -> None:
        """Unlock what can be unlocked; one client's unreadable revelation must not cost the others their round."""
        for client, locked in self._locked.items():
            try:
                key = self._secret(client, LOCK, fits=partial(_unlocks, locked, client))
                opened = unlock_shares(locked, client=client, key=key)
            except ProtocolError as reason:
                self._unread[client] = str(reason)
                continue
            self._read.add(client)
            near = set(self.graph.neighbours(client))
            for (dealer, peer), share in opened.items():
                if peer in near:
                    self._shares[(dealer, peer)][client] = share
        self._locked = {}

    def spoilers(self, *, but: Collection[int] = ()) -> tuple[int, ...]:
        """Whose own mask cannot be taken off since a quorum of its neighbours had no share of it to reveal.

        With fewer of them it could be they who lie: a quorum that does could read the client's upload as well. A wrong
        share is either its holder's fault or its dealer's, and tells nothing. Of `but` nobody's word counts.
        """
        if self.opened or not self._self_mask:
            return ()
        heard = self._read.difference(but)
        found = []
        for client in self.survivors:
            near = self.graph.neighbours(client)
            lacking = heard.intersection(near).difference(self._shares.get((client, client), {}))
            if len(lacking) >= self._quorum.of(len(near)):
                found.append(client)
        return tuple(found)

    def _secret(self, dealer: int, about: int, *, fits: Callable[[bytes], bool] | None = None) -> bytes:
        from fedveil.crypto.shamir import corrected

        around = dealer if about == LOCK else about
        needed = self._quorum.of(self.graph.degree(around))
        shares = self._shares.get((dealer, about), {})
        if len(shares) < needed:
            raise ProtocolError(self._too_few(dealer, about, len(shares), needed))
        try:
            secret, wrong = corrected(shares, threshold=needed, fits=fits, doubted=self._doubted)
        except ProtocolError as reason:
            raise ProtocolError(f"shares about client {around}: {reason}") from reason
        self._doubted |= wrong
        return secret

    def _too_few(self, dealer: int, about: int, known: int, needed: int) -> str:
        if about == LOCK:
            return f"{known} of {needed} needed shares of its key were revealed"
        what = f"client {dealer}'s own mask" if dealer == about else f"the masks of clients {dealer} and {about}"
        holders = set(self.graph.neighbours(about))
        unread = next(((client, why) for client, why in sorted(self._unread.items()) if client in holders), None)
        said = "" if unread is None else f" (what client {unread[0]} revealed cannot be read: {unread[1]})"
        return f"{what} cannot be taken off: {known} of {needed} needed shares were revealed{said}; {MORE_NEIGHBOURS}"
