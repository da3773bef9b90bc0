"""``load``: from a name or a path to a training and a test part."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedveil.data import cifar, folders, idx, npz, tabular
from fedveil.data.arrays import Arrays, assemble
from fedveil.data.dataset import Split, Task
from fedveil.data.embedded import EMBEDDED
from fedveil.data.files import plain_name
from fedveil.data.options import Options
from fedveil.errors import DataError, FedVeilError, unknown_name


@dataclass(frozen=True)
class _Layout:
    what: str
    recognises: Callable[[Path], bool]
    load: Callable[[Path, Options, str], Split]
    by_folder: bool = False  # one of the files stands for all of its folder


def _of_arrays(read: Callable[[Path], Arrays]) -> Callable[[Path, Options, str], Split]:
    def load_arrays(path: Path, options: Options, name: str) -> Split:
        options.refuse_columns(name)
        return assemble(read(path), options, name=name)

    return load_arrays


def _of_table(path: Path, options: Options, name: str) -> Split:
    return tabular.load_table(path, options, name=name)


# The first that recognises the path reads it: the more particular a layout, the earlier it is asked.
_LAYOUTS = (
    _Layout("idx files (train-images-idx3-ubyte[.gz], …)", idx.recognises, _of_arrays(idx.read), by_folder=True),
    _Layout(
        "CIFAR batches (data_batch_1[.bin], test_batch[.bin]; train[.bin], test[.bin])",
        cifar.recognises,
        _of_arrays(cifar.read),
        by_folder=True,
    ),
    _Layout(".npz with x and y, or train.npz and test.npz", npz.recognises, _of_arrays(npz.read)),
    _Layout(
        "picture folders (train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png)",
        folders.recognises,
        _of_arrays(folders.read),
    ),
    _Layout("CSV with a header (one .csv[.gz|.xz], or train.csv and test.csv)", tabular.recognises, _of_table),
)


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
) -> Split:
    """Load an embedded data set by name, or a file or folder in one of the usual layouts.

    Where the source has no test part of its own, ``test_fraction`` of the samples is drawn with ``seed``.
    ``target``, ``text`` and ``group`` name columns of a CSV table; ``text`` learns from that column alone,
    as up to ``max_tokens`` ids out of ``vocabulary``. With ``normalise``, pictures stored as bytes are
    standardised per channel and numeric columns each, by statistics of the training part; arrays of
    floating point numbers are taken as they are.
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
    )
    if isinstance(source, str) and source in EMBEDDED:
        options.refuse_columns(source)
        return EMBEDDED[source](options)
    path = Path(source).expanduser()
    if not str(source) or not _is_there(path):
        raise _absent(str(source)[:200])
    for layout in _LAYOUTS:
        if layout.recognises(path):
            place = path.parent if layout.by_folder and path.is_file() else path
            try:
                return layout.load(place, options, _name(place))
            except FedVeilError:
                raise
            except Exception as error:  # whatever a stranger's file makes a reader run into
                said = " ".join(str(error).split())[:200]
                raise DataError(f"{place}: cannot be read ({type(error).__name__}: {said}).") from error
    known = "; ".join(layout.what for layout in _LAYOUTS)
    raise DataError(f"{path}: holds no layout that can be read. Looked for: {known}.")


def _name(path: Path) -> str:
    return plain_name(path.resolve()).removesuffix(".csv").removesuffix(".npz")


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
