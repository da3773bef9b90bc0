"""Reading files that may be compressed, damaged or missing."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterable
from pathlib import Path

from fedveil.errors import DataError

_COMPRESSED = frozenset({".gz", ".xz"})
_SMALL, _MOST_TIMES = 1 << 26, 100


def read_bytes(path: Path) -> bytes:
    """The content of ``path``, decompressed where its name ends in .gz or .xz."""
    try:
        if not path.is_file():
            raise DataError(f"{path}: no file.")
        if path.suffix not in _COMPRESSED:
            return path.read_bytes()
        most = largest_of(path.stat().st_size)
        with gzip.open(path) if path.suffix == ".gz" else lzma.open(path) as stream:
            content = stream.read(most + 1)
        if len(content) > most:
            raise DataError(
                f"{path}: more than {most:,} bytes when decompressed, too many for its size. Do not trust it."
            )
        return content
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise DataError(f"{path}: the compressed file is damaged or cut short ({error}). Fetch it again.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error


def largest_of(compressed: int) -> int:
    """How many bytes so many compressed ones may hold: data sets take a tenth, a bomb takes a thousandth."""
    return max(_SMALL, _MOST_TIMES * compressed)


def plain_name(path: Path) -> str:
    """The file's name without the ending of its compression."""
    return path.name.removesuffix(path.suffix) if path.suffix in _COMPRESSED else path.name


def by_plain_name(paths: Iterable[Path]) -> dict[str, Path]:
    """Files by name without compression; an uncompressed file wins over its compressed twin."""
    ordered = sorted(paths, key=lambda path: (path.suffix not in _COMPRESSED, path.name))
    return {plain_name(path): path for path in ordered}


def files_of(folder: Path) -> list[Path]:
    """The visible plain files of a folder, by name."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
