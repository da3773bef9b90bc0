"""One folder a site: FOLDER/hospital-a/…, FOLDER/hospital-b/…, each in a layout that is read alone too.

Classes, columns and shapes are those of all sites together. Groups are the site's own: patient 7 of one hospital is not
patient 7 of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedveil.data.arrays import Array, Arrays, Part
from fedveil.data.dataset import Options
from fedveil.data.tabular import Fixed, Table
from fedveil.errors import ConfigError, DataError


def folders_of(path: Path) -> dict[str, Path]:
    """The visible folders in a folder, by name."""
    if not path.is_dir():
        return {}
    return {entry.name: entry for entry in sorted(path.iterdir()) if entry.is_dir() and not entry.name.startswith(".")}


def joined_arrays(sites: Mapping[str, Arrays], *, where: Path) -> Arrays:
    """The arrays of all sites as one source whose samples know their site."""
    given = list(sites.values())
    for what in ("outputs", "vocabulary"):
        if len({getattr(arrays, what) for arrays in given}) > 1:
            raise DataError(f"{where}: its sites differ in {what}. Bring them to the same.")
    if len({bool(arrays.classes) for arrays in given}) > 1:
        raise DataError(f"{where}: classes have names at some sites and numbers at others. Write them alike.")
    classes = tuple(sorted({name for arrays in given for name in arrays.classes}))
    parts: dict[str, Part | None] = {}
    for which in ("train", "test", "validation"):
        here = {name: getattr(arrays, which) for name, arrays in sites.items()}
        _all_or_none({name: part is not None for name, part in here.items()}, which, where=where)
        named = {name: _renamed(part, sites[name].classes, classes) for name, part in here.items() if part is not None}
        parts[which] = _joined(named, where=where) if named else None
    train = parts["train"]
    assert train is not None
    return Arrays(train, parts["test"], classes, given[0].outputs, given[0].vocabulary, parts["validation"])


def _all_or_none(there: Mapping[str, bool], what: str, *, where: Path) -> None:
    if len(set(there.values())) > 1:
        lacking = ", ".join(name for name, has in there.items() if not has)
        raise DataError(
            f"{where}: some sites have a {what} part of their own and others do not ({lacking}). Give one to every "
            "site, or to none."
        )


def _renamed(part: Part, own: tuple[str, ...], common: tuple[str, ...]) -> Part:
    """The part with class numbers that mean the same at every site."""
    if not own or part.y.dtype.kind not in "iu":
        return part
    if part.y.size and not 0 <= int(part.y.min()) <= int(part.y.max()) < len(own):
        raise DataError(f"{part.origin}: class {int(part.y.max())}, but {len(own)} classes have names.")
    return replace(part, y=np.array([common.index(name) for name in own], np.int64)[part.y])


def _joined(parts: Mapping[str, Part], *, where: Path) -> Part:
    first = next(iter(parts.values()))
    for part in parts.values():
        if part.x.shape[1:] != first.x.shape[1:] or (part.x.dtype == np.uint8) != (first.x.dtype == np.uint8):
            raise DataError(
                f"{part.origin}: samples of shape {part.x.shape[1:]} ({part.x.dtype}), but {first.origin} has "
                f"{first.x.shape[1:]} ({first.x.dtype}). Bring all sites to one shape and type."
            )
        if part.sites is not None:
            raise DataError(f"{part.origin}: names sites, and its folder is a site already. Remove one of the two.")
        if (part.groups is None) != (first.groups is None):
            raise DataError(f"{where}: groups are known at some sites and not at others. Give them at every site.")
        if part.y.ndim != first.y.ndim or (part.y.dtype.kind in "US") != (first.y.dtype.kind in "US"):
            raise DataError(f"{part.origin}: targets of another kind than those of {first.origin}. Write them alike.")
    groups = None
    if first.groups is not None:
        named: list[Array] = [
            np.char.add(f"{name}/", np.asarray(part.groups).astype(np.str_)) for name, part in parts.items()
        ]
        groups = np.concatenate(named)
    return Part(
        str(where),
        np.concatenate([part.x for part in parts.values()]),
        np.concatenate([part.y for part in parts.values()]),
        groups,
        np.repeat(np.arange(len(parts)), [len(part.x) for part in parts.values()]),
        tuple(parts),
    )


def joined_tables(
    sites: Mapping[str, tuple[Table, Fixed | None]], options: Options, *, where: Path
) -> tuple[Table, Fixed | None, Options]:
    """The tables of all sites below each other, the rows of their parts, and options that name the column of sites."""
    if options.site is not None:
        raise ConfigError(f"site={options.site!r} names a column, but {where} has one folder a site. Leave site out.")
    for which in ("test", "validation"):
        _all_or_none({name: which in (fixed or {}) for name, (_, fixed) in sites.items()}, which, where=where)
    column = "site"
    while any(column in table.columns for table, _ in sites.values()):
        column += "_"
    whole: Table | None = None
    rows: dict[str, list[Array]] = {}
    for name, (table, fixed) in sites.items():
        columns = dict(table.columns)
        if options.group in columns:
            columns[options.group] = [
                f"{name}/{value.strip()}" if value.strip() else "" for value in columns[options.group]
            ]
        own = Table({**columns, column: [name] * len(table)}, table.places)
        start = 0 if whole is None else len(whole)
        for part, chosen in (fixed or {}).items():
            rows.setdefault(part, []).append(chosen + start)
        whole = own if whole is None else whole.below(own)
    assert whole is not None
    fixed_rows = {part: np.concatenate(chosen).astype(np.int64) for part, chosen in rows.items()} or None
    return whole, fixed_rows, replace(options, site=column)
