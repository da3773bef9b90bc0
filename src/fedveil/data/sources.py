"""Where data come from: small sets that come along, files in the usual layouts, and functions of the user's own."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.data import arrays as npz
from fedveil.data import pictures, tabular
from fedveil.data.arrays import Array, Arrays, Part, assemble, plain_name
from fedveil.data.dataset import How, Options, Split, Task
from fedveil.data.preparation import Preparation, numbers_like
from fedveil.data.tabular import Fixed, Table
from fedveil.errors import ConfigError, DataError, FedVeilError, unknown_name
from fedveil.own_code import OwnCode, load_callable, refuse_code


def digits(options: Options) -> Split:
    """1,797 handwritten digits of 8×8 pixels in [0, 1]."""
    rows = _stored_digits()
    x = (rows[:, :-1].reshape(-1, 1, 8, 8) / 16.0).astype(np.float32)
    names = tuple(map(str, range(10)))
    return assemble(Arrays(Part("digits", x, rows[:, -1].astype(np.int64)), classes=names), options, name="digits")


@functools.cache
def _stored_digits() -> NDArray[np.float64]:
    """64 pixels and a label for each digit, as scikit-learn stores them.

    Its file is read here where it can be found: importing the package takes longer than training on it.
    """
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz" if package and package.origin else None
    if file is not None and file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    stored = load_digits()
    return np.column_stack([stored.data, stored.target])


def breast_cancer(options: Options) -> Split:
    """569 tumours, 30 measurements each, benign or malignant."""
    from sklearn.datasets import load_breast_cancer

    stored = load_breast_cancer()
    names = tuple(str(name) for name in stored.target_names)
    arrays = Arrays(Part("breast-cancer", stored.data, stored.target), classes=names)
    split = assemble(arrays, options, name="breast-cancer")
    if not options.normalise:
        return split
    deviation, mean = torch.std_mean(split.train.x, dim=0, correction=0)
    inputs = replace(numbers_like(split.train.x), mean=tuple(mean.tolist()), deviation=tuple(deviation.tolist()))
    parts = {which: replace(part, x=inputs.standardised(part.x)) for which, part in split.parts.items()}
    preparation = Preparation(inputs, names)
    return Split(parts["train"], parts["test"], parts.get("validation"), preparation=preparation)


EMBEDDED: dict[str, Callable[[Options], Split]] = {"digits": digits, "breast-cancer": breast_cancer}
_OURS = frozenset(EMBEDDED)


def source(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Register a function of your own as a data set, by a name that `dataset` then takes.

    It is called with those of test_fraction, validation_fraction, split, seed, target, task, text, group, site and
    picture_size that its signature has, and gives a `Split`; or x and y, of which a part is held out, also x, y and the
    samples' groups; or (x, y) to train and (x, y) to test, as arrays or tensors.
    """

    def register(function: Callable[..., object]) -> Callable[..., object]:
        if name in _OURS:
            raise ConfigError(f"{name!r} is a data set that comes with FedVeil: give yours another name.")
        EMBEDDED[name] = functools.partial(_called, function, name)
        return function

    return register


def _called(function: Callable[..., object], name: str, options: Options) -> Split:
    """What somebody's own function gives, as a Split."""
    offered = vars(options)
    parameters = inspect.signature(function).parameters
    try:
        given: Any = function(**{option: offered[option] for option in parameters if option in offered})
    except FedVeilError:
        raise
    except Exception as error:
        raise DataError(f"Data {name!r}: the function raised {type(error).__name__}: {error}") from error
    if isinstance(given, Split):
        return given
    for option in ("target", "text", "group", "site"):
        if option not in parameters and getattr(options, option) is not None:
            raise ConfigError(f"{option} names a CSV column, and the function of {name!r} does not ask for it.")
    if "picture_size" not in parameters:
        options.refuse_picture_size(repr(name))
    pairs = given if _is_pair(given) and all(map(_is_samples, given)) else (given,)
    if not all(map(_is_samples, pairs)):
        raise DataError(
            f"Data {name!r}: the function gave {type(given).__name__}, not a fedveil.data.Split, (x, y), "
            "(x, y, groups), or (x, y) to train and (x, y) to test."
        )
    parts = [_part_of(name, *(np.asarray(array) for array in samples)) for samples in pairs]
    return assemble(Arrays(parts[0], parts[1] if len(parts) == 2 else None), options, name=name)


def _part_of(name: str, x: npz.Array, y: npz.Array, groups: npz.Array | None = None) -> Part:
    return Part(name, x, y, groups)


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple | list) and len(given) == 2


def _is_samples(given: object) -> bool:
    """Inputs and targets, and perhaps the samples' groups."""
    return isinstance(given, tuple | list) and len(given) in (2, 3)


@dataclass(frozen=True)
class _Layout:
    what: str
    recognises: Callable[[Path], bool]
    load: Callable[[Path, Options, str], Split]
    by_folder: bool = False  # one of the files stands for all of its folder
    read: Callable[[Path, Options], Arrays] | None = None  # of arrays; None: of a table
    resizes: bool = False


def _of_arrays(
    read: Callable[[Path, Options], Arrays],
    what: str,
    recognises: Callable[[Path], bool],
    *,
    by_folder: bool = False,
    owners: bool = False,
    resizes: bool = False,
) -> _Layout:
    """A layout of arrays; of the columns that options name, it has those of `owners` at most."""

    def read_arrays(path: Path, options: Options) -> Arrays:
        (replace(options, group=None, site=None) if owners else options).refuse_columns(_name(path))
        return read(path, options)

    def load_arrays(path: Path, options: Options, name: str) -> Split:
        return assemble(read_arrays(path, options), options, name=name)

    return _Layout(what, recognises, load_arrays, by_folder, read_arrays, resizes)


# The first that recognises the path reads it: the more particular a layout, the earlier it is asked.
_LAYOUTS = (
    _of_arrays(
        lambda path, options: pictures.read_idx_folder(path),
        "idx files (train-images-idx3-ubyte[.gz], …)",
        pictures.is_idx,
        by_folder=True,
    ),
    _of_arrays(
        lambda path, options: pictures.read_cifar(path),
        "CIFAR batches (data_batch_1[.bin], test_batch[.bin]; train[.bin], test[.bin])",
        pictures.is_cifar,
        by_folder=True,
    ),
    _of_arrays(npz.read, ".npz with x and y, or train.npz and test.npz", npz.recognises, owners=True),
    _of_arrays(
        pictures.read_pictures,
        "picture folders (train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png)",
        pictures.is_pictures,
        owners=True,
        resizes=True,
    ),
    _Layout(
        "tables with a header (one .csv[.gz|.xz] or .parquet, or train.csv and test.csv)",
        tabular.recognises,
        tabular.load_table,
    ),
)


def _layout_of(path: Path) -> _Layout | None:
    return next((layout for layout in _LAYOUTS if layout.recognises(path)), None)


def _is_sites(path: Path) -> bool:
    """Whether every folder in this folder is in a layout that is read alone too."""
    folders = folders_of(path)
    return len(folders) > 1 and all(_layout_of(folder) is not None for folder in folders.values())


def _load_sites(path: Path, options: Options, name: str) -> Split:
    folders = folders_of(path)
    layouts = {site: _layout_of(folder) for site, folder in folders.items()}
    if len(set(layouts.values())) > 1:
        kinds = "; ".join(f"{site}: {layout.what}" for site, layout in layouts.items() if layout is not None)
        raise DataError(f"{path}: its sites are stored in different ways ({kinds}). Bring them to one layout.")
    layout = next(iter(layouts.values()))
    assert layout is not None
    read = layout.read
    if read is not None:
        given = {site: read(folder, options) for site, folder in folders.items()}
        return assemble(joined_arrays(given, where=path), options, name=name)
    tables = {site: tabular.read_tables(folder) for site, folder in folders.items()}
    table, fixed, options = joined_tables(tables, options, where=path)
    return tabular.encode(table, fixed, options, name, where=path)


_SITES = _Layout("one folder a site, each in one of these layouts", _is_sites, _load_sites)


def load(
    source: str | Path,
    *,
    target: str | None = None,
    task: Task | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    text: str | None = None,
    group: str | None = None,
    max_tokens: int = 200,
    vocabulary: int = 10_000,
    normalise: bool = True,
    picture_size: int | None = None,
    site: str | None = None,
    split: How = "auto",
    validation_fraction: float = 0.0,
) -> Split:
    """Load samples to train and to test with.

    Args:
        source: A data set's name, a file or folder in one of the usual layouts, or code of your own (`OwnCode`).
        target: The column of a CSV table to predict.
        task: classification or regression, where the data leave that open.
        test_fraction: How much is held out where the source has no test part of its own.
        seed: What draws the held-out samples.
        text: The column of a CSV table to learn from, alone.
        group: The column of a CSV table, or the array of an .npz file, that says which samples belong together: those
            of one patient or writer. No two parts share a group.
        max_tokens: How many ids a text has at most.
        vocabulary: How many different ids there are.
        normalise: Whether pictures stored as bytes are standardised per channel and numeric columns each, by
            statistics of the training part; arrays of floating-point numbers are taken as they are.
        picture_size: The pixels a side to which pictures of a folder are resized. (None: all must have one size.)
        site: The column or array that says where samples are from: each site holds out samples of its own.
        split: How samples are held out. stratified: with the classes in equal shares; random: without; rows: row by
            row, whatever belongs together; auto: stratified where samples have groups or sites, else random.
        validation_fraction: How much of the samples is held out to validate by, beside the test part.

    Returns:
        The training part, the test part, and the validation part where there is one; in `preparation` what was done to
        the raw samples.

    Raises:
        DataError: The source cannot be read, or holds no known layout.
        ConfigError: An option does not go with the source.
    """
    options = Options(
        target=target,
        task=task,
        test_fraction=test_fraction,
        seed=seed,
        text=text,
        group=group,
        max_tokens=max_tokens,
        vocabulary=vocabulary,
        normalise=normalise,
        picture_size=picture_size,
        site=site,
        split=split,
        validation_fraction=validation_fraction,
    )
    if isinstance(source, OwnCode):
        return _called(load_callable(source, what="data"), source.rpartition(":")[2], options)
    if isinstance(source, str) and source in EMBEDDED:
        if source in _OURS:
            options.refuse_columns(source)
            options.refuse_picture_size(source)
        return EMBEDDED[source](options)
    refuse_code(str(source), what="dataset")
    path = Path(source).expanduser()
    if not str(source) or not _is_there(path):
        raise _absent(str(source)[:200])
    place = path
    try:
        for layout in (*_LAYOUTS, _SITES):
            if layout.recognises(path):
                place = path.parent if layout.by_folder and path.is_file() else path
                if not layout.resizes:
                    options.refuse_picture_size(str(place))
                return layout.load(place, options, _name(place))
    except FedVeilError:
        raise
    except Exception as error:  # whatever a stranger's file, or a folder that is none, makes a reader run into
        said = " ".join(str(error).split())[:200]
        raise DataError(f"{place}: cannot be read ({type(error).__name__}: {said}).") from error
    known = "; ".join(layout.what for layout in (*_LAYOUTS, _SITES))
    raise DataError(f"{path}: holds no layout that can be read. Looked for: {known}.")


def _name(path: Path) -> str:
    return plain_name(path.resolve()).removesuffix(".csv").removesuffix(".npz").removesuffix(".parquet")


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name that a file could have
        return False


def _absent(source: str) -> Exception:
    is_path = "/" in source or os.sep in source or source.startswith("~") or bool(Path(source).suffix)
    if is_path:
        return DataError(f"{source}: no such file or folder.")
    return unknown_name("dataset", source, EMBEDDED, hint="A path to a file or a folder works too.")


# --- one folder a site: FOLDER/hospital-a/…, FOLDER/hospital-b/…, each in a layout that is read alone too
#
# Classes, columns and shapes are those of all sites together. Groups are the site's own: patient 7 of one hospital is
# not patient 7 of another.


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
