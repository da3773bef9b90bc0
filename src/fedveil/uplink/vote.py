"""The partition vote: which parameters most clients name, counted by a server that does not learn which.

A client names the parameters whose update is largest, one tag each:

    tag(index) = AES_k(label ‖ index)         label: 8 bytes for round and attempt, index: 8 bytes

The key k is shared by the clients alone. Equal indices have equal tags, so the server can count them;
AES permutes 16-byte blocks, so the clients turn the winning tags back into indices; and a block that
no client made decrypts to this label with probability 2⁻⁶⁴, so the server cannot make up a winner
(it can, however, declare any of the tags it received the winners).

Ties at the last place are broken by the tag, the lower one first. Without the key a tag is a random
number: it is the keyed hash of its index, and no position enters.

The other way to count, the histogram, sums 0/1 vectors under masks. The clients read the counts and
break ties by the same tags, so both ways elect the same parameters.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, ROUND_CEILING, Context, Decimal
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import ConfigError, NumericError, ProtocolError, unknown_name

TAG_BYTES = 16
"""A tag is one AES block."""

LABEL_BYTES = 8
"""Round and attempt; the other half of the block is the index."""

Ranking = Literal["max", "min"]
Strategy = Literal["max", "min", "random", "random-votes"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
"""Which parameters are named: the largest updates, the smallest, the same random ones by all clients (without a vote),
or random ones by each client for itself."""

_MOST_WORDS = 1 << 14
_Words = NDArray[np.uint64]
_Half = NDArray[np.uint64]
_Indices = NDArray[np.int64]


def vote_label(round: int, attempt: int) -> bytes:
    """The 8 bytes that keep the tags of different rounds and attempts apart."""
    try:
        return struct.pack("<II", round, attempt)
    except struct.error as reason:
        raise ProtocolError(f"round {round}, attempt {attempt}: a vote counts both from 0 and below 2^32") from reason


def choice(update: Tensor, count: int, strategy: Ranking) -> Tensor:
    """The indices, ascending, of the `count` largest ("max") or smallest ("min") |u|; of equal ones the first."""
    if strategy not in get_args(Ranking):
        raise unknown_name("ranking", strategy, get_args(Ranking))
    if update.dim() != 1:
        raise ValueError(f"a flat update is ranked, not one of shape {tuple(update.shape)}")
    _check_count(count, len(update))
    if update.device.type != "cpu":
        return _choice_there(update.detach(), count, strategy)
    plain = update.detach().cpu()
    # numpy knows no bfloat16, and float32 holds both short types exactly.
    values = np.asarray(plain if plain.dtype.itemsize >= 4 else plain.float())
    sizes = np.abs(values)
    if not np.max(sizes, initial=0) < np.inf:  # also catches NaN
        place = int(np.argmin(np.isfinite(values)))
        raise NumericError(f"Number {place} of an update is {values[place]}: training has diverged.")
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    last = len(sizes) - count if strategy == "max" else count - 1
    sizes.partition(last)
    bound = sizes[last]
    # Partitioning has moved the numbers; the same memory takes them again, in order.
    np.abs(values, out=sizes)
    named = sizes > bound if strategy == "max" else sizes < bound
    equal = np.flatnonzero(sizes == bound)
    named[equal[: count - int(np.count_nonzero(named))]] = True
    return torch.from_numpy(np.flatnonzero(named))


def _choice_there(update: Tensor, count: int, strategy: Ranking) -> Tensor:
    """The same choice, made on the device that holds the update."""
    sizes = update.abs()
    if not bool(torch.isfinite(sizes).all()):
        place = int(torch.isfinite(sizes).int().argmin())
        raise NumericError(f"Number {place} of an update is {float(update[place])}: training has diverged.")
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    bound = torch.topk(sizes, count, largest=strategy == "max", sorted=True).values[-1]
    named = sizes > bound if strategy == "max" else sizes < bound
    named[(sizes == bound).nonzero().flatten()[: count - int(named.sum())]] = True
    return named.nonzero().flatten().cpu()


def random_choice(size: int, count: int, *, seed: bytes) -> Tensor:
    """`count` of `size` indices, ascending, every subset equally likely; the same for the same 32-byte seed.

    Indices are drawn until `count` different ones have come up; above one half, those to leave out are.
    """
    # Training in memory must not need the package behind this.
    from fedveil.crypto.keys import WordStream

    _check_count(count, size)
    stream = WordStream(seed)
    leave_out = count > size // 2
    missing = size - count if leave_out else count
    drawn = np.zeros(size, dtype=np.bool_)
    while missing:
        candidates = _below(size, stream.take(min(_MOST_WORDS, missing + missing // 2 + 8)))
        candidates = candidates[~drawn[candidates]]
        _, first = np.unique(candidates, return_index=True)
        candidates = candidates[np.sort(first)[:missing]]
        drawn[candidates] = True
        missing -= len(candidates)
    return torch.from_numpy(np.flatnonzero(drawn != leave_out))


def tags(indices: Tensor, *, key: bytes, label: bytes) -> Tensor:
    """AES_k(label ‖ index) of every index, (count, 16) bytes, in the order of the tags: it tells nothing."""
    words = _encrypted(_checked_indices(indices), key=key, label=label)
    return _as_tags(words[_order(words)])


def indices_of(tags: Tensor, *, key: bytes, label: bytes, size: int, winners: int) -> Tensor:
    """The indices, ascending, behind the winning tags; refuses what cannot be the result of this vote."""
    words = _as_words(tags, what="the vote's result")
    if len(words) != winners:
        raise ProtocolError(f"the vote's result has {len(words)} tags where {winners} belong")
    blocks = _permuted(words.astype(">u8"), key=key, back=True).view("<u8")
    foreign = int(np.count_nonzero(blocks[:, 0] != _label_word(label)))
    if foreign:
        raise ProtocolError(
            f"{foreign} of {winners} tags in the vote's result were not made by a client for this round: "
            "they were changed on the way, or belong to another round or key"
        )
    indices = np.sort(blocks[:, 1])
    if winners and indices[-1] >= size:
        raise ProtocolError(f"the vote elected index {indices[-1]} of a model with {size} parameters")
    again = np.flatnonzero(indices[1:] == indices[:-1])
    if len(again):
        raise ProtocolError(f"the vote's result holds index {indices[again[0]]} more than once")
    return torch.from_numpy(indices.astype(np.int64))


class Tally:
    """The server's count: every vote names `most` indices, and the `winners` most often named are elected.

    The result does not depend on the order of arrival. Memory grows with the number of different tags,
    not with the number of votes: 24 bytes each, and as much again while a vote is merged.
    """

    def __init__(self, *, most: int, winners: int) -> None:
        if most < 0 or winners < 0:
            raise ValueError(f"a vote for {most} indices cannot elect {winners}")
        self._most = most
        self._winners = winners
        self._upper: _Half = np.empty(0, dtype=np.uint64)
        self._lower: _Half = np.empty(0, dtype=np.uint64)
        self._votes: _Indices = np.empty(0, dtype=np.int64)

    def add(self, tags: Tensor) -> None:
        """Count one vote; refuses, unchanged, tags of the wrong form or number and any that come twice."""
        words = _as_words(tags, what="a vote")
        if len(words) > self._most:
            raise ProtocolError(f"a client voted for {len(words)} indices where {self._most} are allowed")
        if len(words) < self._most:
            raise ProtocolError(f"a client voted for {len(words)} indices where exactly {self._most} belong in a vote")
        words = words[_order(words)]
        upper, lower = (np.ascontiguousarray(half) for half in words.T)
        twice = int(np.count_nonzero((upper[1:] == upper[:-1]) & (lower[1:] == lower[:-1])))
        if twice:
            raise ProtocolError(f"a client voted for {twice} of {self._most} indices more than once")
        place = np.searchsorted(self._upper, upper)
        known = np.zeros(len(upper), dtype=np.bool_)
        inside = place < len(self._upper)
        known[inside] = self._upper[place[inside]] == upper[inside]
        if bool((self._lower[place[known]] != lower[known]).any()) or bool((upper[1:] == upper[:-1]).any()):
            # Only forged tags, or a chance of 2⁻⁶⁴ a pair, share one half and not the other.
            self._count_again(upper, lower)
            return
        self._votes[place[known]] += 1
        new = ~known
        self._upper = np.insert(self._upper, place[new], upper[new])
        self._lower = np.insert(self._lower, place[new], lower[new])
        self._votes = np.insert(self._votes, place[new], 1)

    def _count_again(self, upper: _Half, lower: _Half) -> None:
        """Sort everything by both halves."""
        words = np.stack([np.concatenate([self._upper, upper]), np.concatenate([self._lower, lower])], axis=1)
        votes = np.concatenate([self._votes, np.ones(len(upper), dtype=np.int64)])
        order = np.lexsort((words[:, 1], words[:, 0]))
        words = words[order]
        first = np.ones(len(words), dtype=np.bool_)
        np.any(words[1:] != words[:-1], axis=1, out=first[1:])
        starts = np.flatnonzero(first)
        self._upper, self._lower = (np.ascontiguousarray(half) for half in words[starts].T)
        self._votes = np.add.reduceat(votes[order], starts)

    def result(self) -> Tensor:
        """The tags with most votes, (winners, 16) bytes, in the order of the tags, which hides the counts.

        Where votes are equal, the lower tag wins: AES_k(label ‖ index) is a keyed hash of the index, so
        neither a parameter's position nor the server's wish decides.
        """
        votes, winners = self._votes, self._winners
        if len(votes) < winners:
            raise ProtocolError(
                f"{winners} indices are to be elected, and the votes name only {len(votes)}; did any client vote?"
            )
        if winners == 0:
            return torch.empty(0, TAG_BYTES, dtype=torch.uint8)
        bound = _last_place(votes, winners)
        named = votes > bound
        named[np.flatnonzero(votes == bound)[: winners - int(np.count_nonzero(named))]] = True
        return _as_tags(np.stack([self._upper[named], self._lower[named]], axis=1))


def _last_place(votes: _Indices, winners: int) -> int:
    """How many votes the last of so many winners has."""
    reached = np.cumsum(np.bincount(votes)[::-1])  # how many have at least the most votes, one less, …
    return int(votes.max()) - int(np.searchsorted(reached, winners))


def ballot(indices: Tensor, size: int) -> NDArray[np.uint64]:
    """1 for every index voted for and 0 for the others, as words to be masked and summed."""
    chosen = _checked_indices(indices)
    if len(chosen) and chosen.max() >= size:
        raise ValueError(f"a vote for index {chosen.max()} of a model with {size} parameters")
    words = np.zeros(size, dtype=np.uint64)
    words[chosen] = 1
    return words


def elected(counts: NDArray[np.uint64], winners: int, *, voters: int, most: int, key: bytes, label: bytes) -> Tensor:
    """The indices, ascending, with most votes in the summed ballots; ties as in `Tally`, by the indices' tags.

    Refuses counts that `voters` ballots for `most` indices each cannot add up to.
    """
    highest, total = int(counts.max(initial=0)), int(counts.sum(dtype=np.uint64))
    if highest > voters or total != voters * most:
        raise ProtocolError(
            f"{voters} ballots for {most} indices each cannot give {total} votes, {highest} of them for one index: "
            "masks have not cancelled, or a client voted for more than it may"
        )
    if winners == 0:
        return torch.empty(0, dtype=torch.int64)
    bound = _last_place(counts.view(np.int64), min(winners, len(counts)))
    if bound <= 0 or winners > len(counts):
        raise ProtocolError(
            f"{winners} indices are to be elected, and the votes name only {np.count_nonzero(counts)}; "
            "did any client vote?"
        )
    named = counts > np.uint64(bound)
    tied = np.flatnonzero(counts == np.uint64(bound))
    missing = winners - int(np.count_nonzero(named))
    if missing < len(tied):
        tied = tied[_order(_encrypted(tied, key=key, label=label))[:missing]]
    named[tied] = True
    return torch.from_numpy(np.flatnonzero(named))


def _check_count(count: int, size: int) -> None:
    if not 0 <= count <= size:
        raise ValueError(f"{count} of {size} indices cannot be chosen")


def _below(size: int, words: _Words) -> _Indices:
    """Uniform indices below `size`: the words of the incomplete last range are left out."""
    complete = words <= np.uint64((1 << 64) - 1 - (1 << 64) % size)
    return (words[complete] % np.uint64(size)).astype(np.int64)


def _checked_indices(indices: Tensor) -> _Indices:
    if indices.dim() != 1 or indices.dtype != torch.int64:
        raise ValueError(f"indices are a flat int64 tensor, not {indices.dtype} of shape {tuple(indices.shape)}")
    plain: _Indices = indices.detach().cpu().numpy()
    if len(plain) and plain.min() < 0:
        raise ValueError(f"{plain.min()} is not an index")
    return plain


def _label_word(label: bytes) -> np.uint64:
    if len(label) != LABEL_BYTES:
        raise ValueError(f"a vote's label has {LABEL_BYTES} bytes, not {len(label)}")
    return np.uint64(int.from_bytes(label, "little"))


def _encrypted(indices: _Indices, *, key: bytes, label: bytes) -> _Words:
    """The tags as pairs of numbers, upper half first, in the order of the indices."""
    blocks = np.empty((len(indices), 2), dtype="<u8")
    blocks[:, 0] = _label_word(label)
    blocks[:, 1] = indices
    return _permuted(blocks, key=key).view(">u8").astype(np.uint64)


def _permuted(blocks: _Words, *, key: bytes, back: bool = False) -> NDArray[np.uint8]:
    """AES_k of every 16-byte row, or its inverse."""
    # Training in memory must not need the package behind this.
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    if len(key) not in (16, 32):
        raise ValueError(f"a vote's key has 16 or 32 bytes, not {len(key)}")
    # ECB is AES as it is; that equal blocks stay equal is what lets the server count them.
    cipher = Cipher(algorithms.AES(key), modes.ECB())
    # update_into wants room for one more block than it writes.
    room = np.empty((len(blocks) + 1) * TAG_BYTES, dtype=np.uint8)
    step = cipher.decryptor() if back else cipher.encryptor()
    step.update_into(blocks.reshape(-1).view(np.uint8).data, room.data)
    return room[:-TAG_BYTES].reshape(-1, TAG_BYTES)


def _as_words(tags: Tensor, *, what: str) -> _Words:
    """Tags as pairs of numbers, upper half first, in memory of their own."""
    if tags.dtype != torch.uint8 or tags.dim() != 2 or tags.shape[1] != TAG_BYTES:
        raise ProtocolError(
            f"{what} is {tags.dtype} of shape {tuple(tags.shape)} where uint8 of shape (count, {TAG_BYTES}) belongs"
        )
    return np.ascontiguousarray(tags.detach().cpu().numpy()).view(">u8").astype(np.uint64)


def _as_tags(words: _Words) -> Tensor:
    return torch.from_numpy(words.astype(">u8").view(np.uint8))


def _order(words: _Words) -> _Indices:
    """The places that sort tags as 128-bit numbers."""
    upper = words[:, 0]
    if bool((upper[1:] > upper[:-1]).all()):  # as an honest vote arrives
        return np.arange(len(words))
    # Signed numbers sort alike once the highest bit is flipped; torch's sort takes a third of numpy's time.
    ordered = torch.sort(torch.from_numpy((upper ^ np.uint64(1 << 63)).view(np.int64)), stable=True)
    places: _Indices = ordered.indices.numpy()
    same = np.flatnonzero((ordered.values[1:] == ordered.values[:-1]).numpy())
    # Equal upper halves are equal tags, but for forged ones and a chance of 2⁻⁶⁴ a pair.
    if len(same) and bool((words[places[same], 1] != words[places[same + 1], 1]).any()):
        return np.lexsort((words[:, 1], upper))
    return places


# Whole numbers of parameters must come out the same on every machine, and ⌈0.1 · 30⌉ must be 3.
_DECIMAL = Context(prec=60, Emin=MIN_EMIN, Emax=MAX_EMAX)


@dataclass(frozen=True)
class Ratio:
    """r_t = start · decayᵗ, rounds counted from 0; decay = 1 keeps r as it is."""

    start: float
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.start <= 1.0:
            raise ConfigError(
                f"share, the part r of a model that is hidden, goes from 0 to 1; it cannot be {self.start:g}."
            )
        if not 0.0 < self.decay <= 1.0:
            raise ConfigError(
                f"share_decay, the factor λ on r per round, is above 0 and up to 1, not {self.decay:g}; 1 keeps r as it"
                " is."
            )

    def at(self, round: int) -> float:
        """r_t of this round."""
        return float(self._exact(round))

    def winners(self, round: int, size: int) -> int:
        """⌈r_t · size⌉ with r and λ taken as the decimals they are written as: ⌈0.1 · 30⌉ is 3, not 4."""
        if size < 0:
            raise ValueError(f"a model has no {size} parameters")
        product = _DECIMAL.multiply(self._exact(round), Decimal(size))
        return int(product.to_integral_value(rounding=ROUND_CEILING, context=_DECIMAL))

    def _exact(self, round: int) -> Decimal:
        if round < 0:
            raise ValueError(f"rounds are counted from 0, not {round}")
        decayed = _DECIMAL.power(Decimal(repr(float(self.decay))), round)
        return _DECIMAL.multiply(Decimal(repr(float(self.start))), decayed)
