"""Dealing samples out to clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedveil.data.dataset import Dataset
from fedveil.data.splitting import Purpose, generator
from fedveil.errors import ConfigError, unknown_name

Indices: TypeAlias = npt.NDArray[np.int64]

_SMALLEST_DRAW = 8


@dataclass(frozen=True, eq=False)
class _Deal:
    """What a way of dealing may look at."""

    dataset: Dataset
    clients: int
    alpha: float
    ratio: float
    rng: np.random.Generator


def partition(
    dataset: Dataset,
    *,
    clients: int,
    how: str = "iid",
    seed: int = 0,
    alpha: float = 0.5,
    ratio: float = 2.0,
) -> list[Tensor]:
    """One ascending int64 index tensor per client; the same arguments give the same partition.

    - ``iid``: at random, sizes as equal as possible.
    - ``dirichlet``: every class is shared out by proportions drawn from Dirichlet(``alpha``); the smaller
      ``alpha``, the fewer classes a client sees. Nobody is left without a sample.
    - ``size``: at random, sizes growing geometrically from the first client to the last, which has
      ``ratio`` times the samples of the first.
    - ``group``: whole groups of ``dataset.groups``, so that sizes are balanced; one each where there are as
      many clients as groups.
    - ``site``: the same by ``dataset.sites``; one client each is the hospital's, the bank's.
    - ``replacement``: every client draws with replacement, at least 8 samples; the only way that allows
      more clients than samples, and the only one that is not a partition in the strict sense.

    Args:
        dataset: The samples to share out.
        clients: Among how many.
        how: One of the ways above.
        seed: What draws the partition.
        alpha: Of ``dirichlet``.
        ratio: Of ``size``.

    Raises:
        ConfigError: The way is unknown, a number is out of range, or the way does not go with the data.
    """
    if how not in _WAYS:
        raise unknown_name("partition", how, _WAYS)
    if clients < 1:
        raise ConfigError(f"clients is {clients}; at least one client is needed.")
    if not 0.0 < alpha < np.inf:
        raise ConfigError(f"alpha is {alpha}; it must be positive, for example 0.5.")
    if not 1.0 <= ratio < np.inf:
        raise ConfigError(f"ratio is {ratio}; the largest client cannot be smaller than the smallest: use 1 or more.")
    if how != "replacement" and clients > len(dataset):
        raise ConfigError(
            f"{clients} clients but only {len(dataset)} samples. Use fewer clients, or partition 'replacement', "
            "under which clients may share samples."
        )
    deal = _Deal(dataset, clients, alpha, ratio, generator(seed, purpose=Purpose.PARTITION))
    return [torch.from_numpy(np.sort(rows)) for rows in _WAYS[how](deal)]


def owners_of(dataset: Dataset, how: str) -> int:
    """How many clients there are where each has one site, or one group, of its own."""
    codes = {"group": dataset.groups, "site": dataset.sites}.get(how)
    if codes is None:
        raise ConfigError(f"Say how many clients there are: partition {how!r} of {dataset.name!r} does not.")
    return len(torch.unique(codes))


def client_names(dataset: Dataset, parts: Sequence[Tensor], how: str) -> tuple[str, ...]:
    """What clients are called: as their site or group, where each has one of its own; else nothing."""
    codes = {"group": dataset.groups, "site": dataset.sites}.get(how)
    if codes is None or len(torch.unique(codes)) != len(parts):
        return ()
    names = {"group": dataset.group_names, "site": dataset.site_names}[how]
    owners = [int(codes[rows[0]]) for rows in parts]
    return tuple(names[owner] if names else str(owner) for owner in owners)


def _iid(deal: _Deal) -> list[Indices]:
    return np.array_split(deal.rng.permutation(len(deal.dataset)), deal.clients)


def _dirichlet(deal: _Deal) -> list[Indices]:
    if deal.dataset.task != "classification":
        raise ConfigError(
            f"partition 'dirichlet' skews class labels, but {deal.dataset.name!r} is a regression task. "
            "Use 'iid', 'size' or 'group'."
        )
    labels = deal.dataset.y.cpu().numpy()
    shares: list[list[Indices]] = [[] for _ in range(deal.clients)]
    for label in np.unique(labels):
        rows = deal.rng.permutation(np.flatnonzero(labels == label))
        # From 1e9 on the shares are equal, and further up the sampler overflows.
        proportions = deal.rng.dirichlet(np.full(deal.clients, min(deal.alpha, 1e9)))
        cuts = np.floor(np.cumsum(proportions)[:-1] * len(rows)).astype(np.int64)
        for share, piece in zip(shares, np.split(rows, cuts), strict=True):
            share.append(piece)
    dealt = [np.concatenate(share) for share in shares]
    sizes = np.array([len(rows) for rows in dealt])
    for client in np.flatnonzero(sizes == 0):
        richest = int(sizes.argmax())
        dealt[client], dealt[richest] = dealt[richest][-1:], dealt[richest][:-1]
        sizes[client], sizes[richest] = 1, sizes[richest] - 1
    return dealt


def _size(deal: _Deal) -> list[Indices]:
    count = len(deal.dataset)
    weights = np.geomspace(1.0, deal.ratio, deal.clients)
    exact = weights / weights.sum() * count
    sizes = np.maximum(np.floor(exact).astype(np.int64), 1)
    # What rounding left over goes to those it cut most; what the minimum of one took, the largest give back.
    for client in np.argsort(sizes - exact, kind="stable")[: max(count - int(sizes.sum()), 0)]:
        sizes[client] += 1
    for _ in range(int(sizes.sum()) - count):
        sizes[np.argmax(sizes)] -= 1
    return np.split(deal.rng.permutation(count), np.cumsum(np.sort(sizes))[:-1])


def _group(deal: _Deal) -> list[Indices]:
    return _whole(deal, deal.dataset.groups, "group")


def _site(deal: _Deal) -> list[Indices]:
    return _whole(deal, deal.dataset.sites, "site")


def _whole(deal: _Deal, codes: Tensor | None, what: str) -> list[Indices]:
    """Whole groups or sites, each to one client."""
    if codes is None:
        raise ConfigError(
            f"partition {what!r} needs to know the {what} of each sample, and {deal.dataset.name!r} has none. "
            f"Name a column with {what}=... when loading, or use 'iid', 'dirichlet' or 'size'."
        )
    groups = codes.cpu().numpy()
    names, sizes = np.unique(groups, return_counts=True)
    if deal.clients > len(names):
        held = " Whole groups are held out, too: to hold out rows of every client, name the column as the site."
        raise ConfigError(
            f"{deal.clients} clients but only {len(names)} {what}s to train on. Use at most {len(names)} clients."
            f"{held if what == 'group' else ''}"
        )
    owner = np.arange(len(names))
    if deal.clients < len(names):
        load = np.zeros(deal.clients, np.int64)
        shuffled = deal.rng.permutation(len(names))
        # The largest group first, each to whom has least: within 4/3 of the best possible balance.
        for group in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
            owner[group] = np.argmin(load)
            load[owner[group]] += sizes[group]
    client_of = owner[np.searchsorted(names, groups)]
    order = np.argsort(client_of, kind="stable")
    return np.split(order, np.searchsorted(client_of[order], np.arange(1, deal.clients)))


def _replacement(deal: _Deal) -> list[Indices]:
    count = len(deal.dataset)
    size = max(count // deal.clients, _SMALLEST_DRAW)
    return list(deal.rng.integers(0, count, (deal.clients, size), dtype=np.int64))


_WAYS: dict[str, Callable[[_Deal], list[Indices]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "size": _size,
    "group": _group,
    "site": _site,
    "replacement": _replacement,
}
