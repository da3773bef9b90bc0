"""Which samples train, validate and test, and how they are dealt out to clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedveil.data.dataset import Dataset, Options, Task
from fedveil.errors import ConfigError, DataError, spelled, unknown_name

# --- which samples train, which validate and which test
#
# Samples of one group (a patient, a lesion, a writer) are never in two parts: a model that has seen a patient's first
# picture is not judged on the second. Every site (a hospital, a bank) holds out samples of its own, and classes come in
# the same shares everywhere, as far as whole groups allow.
#
# All of it is one rule. Groups, in random order and the largest first, go one after the other to the part that is then
# further behind: behind in samples of that class, of that site, of both together and in all, each weighed by how many
# there are. A sample without a group is a group of its own.

Rows: TypeAlias = npt.NDArray[np.int64]

_BINS, _LEAST_IN_BIN = 10, 5


class Purpose(IntEnum):
    """What a generator is for."""

    SPLIT = 1
    PARTITION = 2
    VALIDATION = 3


def generator(seed: int, *, purpose: Purpose) -> np.random.Generator:
    """The generator of ``purpose`` under ``seed``: no two purposes share a stream, whatever the seed."""
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be 0 or a positive whole number.")
    return np.random.default_rng([seed, int(purpose)])


class PartRows(NamedTuple):
    """The rows of each part, in the order of the file."""

    train: Tensor
    test: Tensor
    validation: Tensor | None


@dataclass(frozen=True, eq=False)
class Samples:
    """What a split may look at; ``where`` names the source in errors."""

    where: str
    task: Task
    y: Tensor
    groups: Tensor | None = None
    sites: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)


def split_rows(samples: Samples, options: Options, *, fixed: tuple[Rows, Rows] | None = None) -> PartRows:
    """The rows of every part; ``fixed`` are the training and the test rows where the source says so itself.

    The test rows are the same with and without a validation part.
    """
    count = len(samples)
    if fixed is None:
        rest, test = _held(samples, np.arange(count), options.test_fraction, options, purpose=Purpose.SPLIT)
        share = options.validation_fraction / (1.0 - options.test_fraction)
    else:
        (rest, test), share = fixed, options.validation_fraction
    validation = None
    if share:
        rest, chosen = _held(samples, rest, share, options, purpose=Purpose.VALIDATION)
        validation = torch.from_numpy(chosen)
    return PartRows(torch.from_numpy(rest), torch.from_numpy(test), validation)


def _held(samples: Samples, rows: Rows, fraction: float, options: Options, *, purpose: Purpose) -> tuple[Rows, Rows]:
    """``rows`` as those that stay and those that are held out, each ascending."""
    if len(rows) < 2:
        part = "validation" if purpose is Purpose.VALIDATION else "test"
        raise DataError(f"{samples.where}: {len(rows)} sample(s) cannot be split into a training and a {part} part.")
    rng = generator(options.seed, purpose=purpose)
    looked_at = (samples.groups, samples.sites) if options.split != "rows" else (None, None)
    groups, sites = (None if codes is None else codes.numpy()[rows] for codes in looked_at)
    stratified = options.split == "stratified" or (
        options.split == "auto" and (groups is not None or sites is not None)
    )
    if groups is None and sites is None and not stratified:
        held = min(max(round(len(rows) * fraction), 1), len(rows) - 1)
        order = rng.permutation(len(rows))
        return rows[np.sort(order[held:])], rows[np.sort(order[:held])]
    classes = strata(samples.y.numpy()[rows], samples.task) if stratified else np.zeros(len(rows), np.int64)
    _, members = np.unique(np.arange(len(rows)) if groups is None else groups, return_inverse=True)
    if int(members.max()) == 0:
        raise DataError(
            f"{samples.where}: all {len(rows)} samples belong to one group, and a group is never in two parts. Name "
            "another column as the group, hold out less, or give parts of their own."
        )
    out = _apart(members, classes, sites, fraction, rng, where=samples.where)
    return rows[~out], rows[out]


def strata(y: npt.NDArray[np.generic], task: Task) -> Rows:
    """What a split is balanced by: the class; of one number to regress on, which tenth of all values it lies in."""
    if task == "classification":
        return y.astype(np.int64)
    bins = min(_BINS, len(y) // _LEAST_IN_BIN)
    if y.shape[1] != 1 or bins < 2:
        return np.zeros(len(y), np.int64)
    values = y[:, 0].astype(np.float64)
    return np.searchsorted(np.unique(np.quantile(values, np.arange(1, bins) / bins)), values).astype(np.int64)


def _apart(
    members: Rows, classes: Rows, sites: Rows | None, fraction: float, rng: np.random.Generator, *, where: str
) -> npt.NDArray[np.bool_]:
    """Which samples are held out; ``members`` numbers the groups from 0 without gaps."""
    traits = [np.zeros(len(members), np.int64), classes]
    if sites is not None:
        traits += [sites, _pairs(sites, classes)]
    numbered, known = [], 0
    for codes in traits:
        distinct, position = np.unique(codes, return_inverse=True)
        numbered.append(position + known)
        known += len(distinct)
    # Every group's count of samples with each trait, trait by trait, as one long list in the order of the groups.
    flat = np.concatenate([members * known + codes for codes in numbered])
    cells, counts = np.unique(flat, return_counts=True)
    owner, trait = np.divmod(cells, known)
    sizes = np.bincount(members)
    totals = np.bincount(np.concatenate(numbered), minlength=known)
    weight = 1.0 / totals
    if sites is not None:
        # A class too rare at a site to have one sample held out there would only keep it from being held out anywhere.
        pairs = np.arange(known) >= numbered[-1].min()
        weight[pairs & (totals * fraction < 1.0)] = 0.0
    starts = np.searchsorted(owner, np.arange(len(sizes) + 1)).tolist()
    shuffled = rng.permutation(len(sizes))
    order = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    held = _dealt(order.tolist(), starts, trait.tolist(), counts.tolist(), weight.tolist(), fraction)
    _none_without(held, members, sites, sizes, order)
    if not held.any():
        raise DataError(
            f"{where}: every site has one group left, and a group is never in two parts: nothing more can be held out. "
            "Hold out less, or give parts of their own."
        )
    return held[members]


def _pairs(sites: Rows, classes: Rows) -> Rows:
    return np.unique(sites, return_inverse=True)[1] * (int(classes.max()) + 1) + classes


def _dealt(
    order: Sequence[int],
    starts: Sequence[int],
    trait: Sequence[int],
    counts: Sequence[int],
    weight: Sequence[float],
    fraction: float,
) -> npt.NDArray[np.bool_]:
    """Whether each group is held out.

    With h of a trait's samples held out and r not, h/f − r/(1 − f) says how far the held-out part is ahead. A group
    goes where Σ weight · ahead² is then smaller.
    """
    ahead = [0.0] * len(weight)
    up, down = 1.0 / fraction, 1.0 / (1.0 - fraction)
    held = np.zeros(len(starts) - 1, np.bool_)
    for group in order:
        cells = range(starts[group], starts[group + 1])
        gain = 0.0
        for cell in cells:
            now, more = ahead[trait[cell]], counts[cell]
            gain += weight[trait[cell]] * ((now - more * down) ** 2 - (now + more * up) ** 2)
        out = gain > 0
        held[group] = out
        for cell in cells:
            ahead[trait[cell]] += counts[cell] * (up if out else -down)
    return held


def _none_without(held: npt.NDArray[np.bool_], members: Rows, sites: Rows | None, sizes: Rows, order: Rows) -> None:
    """Move a smallest group wherever a part, or one of a site, would be left without; a site's only group trains."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    homes = [np.arange(len(sizes))]
    if sites is not None:
        by_site = np.argsort(sites, kind="stable")
        cuts = np.flatnonzero(np.diff(sites[by_site])) + 1
        homes += [np.unique(part) for part in np.split(members[by_site], cuts)]
    alone = np.zeros(len(sizes), np.bool_)
    alone[[home[0] for home in homes if len(home) == 1]] = True
    held &= ~alone
    for home in homes:
        for part in (True, False):
            movable = home[~alone[home]] if part else home
            if len(home) > 1 and len(movable) and not (held[home] == part).any():
                # By the order they were dealt in, which is random among equals.
                held[movable[np.lexsort((place[movable], sizes[movable]))[0]]] = part


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


def _codes(dataset: Dataset, how: str) -> Tensor | None:
    """The group or the site of each sample, where clients are dealt whole ones and the data know them."""
    return {"group": dataset.groups, "site": dataset.sites}.get(how)


def owners_of(dataset: Dataset, how: str) -> int:
    """How many clients there are where each has one site, or one group, of its own."""
    codes = _codes(dataset, how)
    if codes is None:
        raise ConfigError(f"Say how many clients there are: partition {how!r} of {dataset.name!r} does not.")
    return len(torch.unique(codes))


def client_names(dataset: Dataset, parts: Sequence[Tensor], how: str) -> tuple[str, ...]:
    """What clients are called: as their site or group, where each has one of its own; else nothing."""
    codes = _codes(dataset, how)
    if codes is None or len(torch.unique(codes)) != len(parts):
        return ()
    names = {"group": dataset.group_names, "site": dataset.site_names}[how]
    owners = [int(codes[rows[0]]) for rows in parts]
    return tuple(names[owner] if names else str(owner) for owner in owners)


def _iid(deal: _Deal) -> list[Rows]:
    return np.array_split(deal.rng.permutation(len(deal.dataset)), deal.clients)


def _dirichlet(deal: _Deal) -> list[Rows]:
    if deal.dataset.task != "classification":
        kind = "has several labels for each sample" if deal.dataset.task == "multilabel" else "is a regression task"
        raise ConfigError(
            f"partition 'dirichlet' skews class labels, but {deal.dataset.name!r} {kind}. "
            "Use 'iid', 'size', 'group' or 'site'."
        )
    labels = deal.dataset.y.cpu().numpy()
    shares: list[list[Rows]] = [[] for _ in range(deal.clients)]
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


def _size(deal: _Deal) -> list[Rows]:
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


def _whole(deal: _Deal, *, what: str) -> list[Rows]:
    """Whole groups or sites, each to one client."""
    codes = _codes(deal.dataset, what)
    if codes is None:
        raise ConfigError(
            f"partition {what!r} needs to know the {what} of each sample, and {deal.dataset.name!r} has none. "
            f"Name a column with {spelled(what)}, or use 'iid', 'dirichlet' or 'size'."
        )
    groups = codes.cpu().numpy()
    names, sizes = np.unique(groups, return_counts=True)
    if deal.clients > len(names):
        held = " Whole groups are held out, too: to hold out rows of every client, "
        held += f"name the column with {spelled('site')} instead."
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


def _replacement(deal: _Deal) -> list[Rows]:
    count = len(deal.dataset)
    size = max(count // deal.clients, _SMALLEST_DRAW)
    return list(deal.rng.integers(0, count, (deal.clients, size), dtype=np.int64))


_WAYS: dict[str, Callable[[_Deal], list[Rows]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "size": _size,
    "group": partial(_whole, what="group"),
    "site": partial(_whole, what="site"),
    "replacement": _replacement,
}
