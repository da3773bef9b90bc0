"""Pictures sorted into one folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedveil.data.arrays import Array, Arrays, Part
from fedveil.data.files import files_of, largest_of
from fedveil.errors import DataError, missing_extra

if TYPE_CHECKING:
    from collections.abc import Callable

_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
# Pillow goes by content, not by name, and hands PostScript to another program.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_TEST = ("test", "val", "valid", "validation")


def recognises(path: Path) -> bool:
    """Whether this folder holds class folders with pictures, directly or under train."""
    return path.is_dir() and (bool(_class_folders(path)) or bool(_class_folders(path / "train")))


def read(path: Path) -> Arrays:
    """Read PATH/{train,test|val}/CLASS/*.png or PATH/CLASS/*.png; other usual picture formats too."""
    decode = _decoder()
    if not _class_folders(path / "train"):
        classes = _class_folders(path)
        return Arrays(_part(path, classes, decode), None, tuple(classes))
    held = next((path / name for name in _TEST if _class_folders(path / name)), None)
    classes = _class_folders(path / "train")
    train = _part(path / "train", classes, decode)
    if held is None:
        return Arrays(train, None, tuple(classes))
    if set(_class_folders(held)) != set(classes):
        odd = sorted(set(_class_folders(held)) ^ set(classes))
        raise DataError(
            f"{held}: its class folders differ from those of {path / 'train'}: {', '.join(odd)} on one side only."
        )
    return Arrays(train, _part(held, _class_folders(held), decode), tuple(classes))


def _class_folders(path: Path) -> dict[str, list[Path]]:
    if not path.is_dir():
        return {}
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    pictures = {folder.name: [f for f in files_of(folder) if f.suffix.lower() in _ENDINGS] for folder in folders}
    return {name: files for name, files in pictures.items() if files}


def _decoder() -> Callable[[Path], Array]:
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "images", "Reading a folder of pictures") from error

    def decode(path: Path) -> Array:
        try:
            with Image.open(path, formats=_FORMATS) as picture:
                pixels = picture.width * picture.height * len(picture.getbands())
                if pixels > largest_of(path.stat().st_size):
                    raise ValueError(f"{picture.width}×{picture.height} pixels, too many for its size")
                grey = picture.mode in ("1", "L", "LA")
                return np.asarray(picture.convert("L" if grey else "RGB"))
        except Exception as error:  # each format has its own ways to fail on a damaged picture
            raise DataError(f"{path}: not a readable picture ({error}).") from error

    return decode


def _part(path: Path, classes: dict[str, list[Path]], decode: Callable[[Path], Array]) -> Part:
    pictures: list[Array] = []
    labels: list[int] = []
    first: Path | None = None
    left = largest_of(sum(file.stat().st_size for files in classes.values() for file in files))
    for code, files in enumerate(classes.values()):
        for file in files:
            picture = decode(file)
            first = first or file
            if pictures and picture.shape[:2] != pictures[0].shape[:2]:
                ours, theirs = (f"{shape[1]}×{shape[0]}" for shape in (pictures[0].shape, picture.shape))
                raise DataError(
                    f"{file}: {theirs} pixels, but {first} has {ours}. "
                    "Bring all pictures to one size first (for example with Pillow's Image.resize)."
                )
            left -= picture.nbytes
            if left < 0:
                raise DataError(f"{path}: its pictures are too large for the size of their files. Do not trust them.")
            pictures.append(picture)
            labels.append(code)
    if any(picture.ndim == 3 for picture in pictures):
        pictures = [np.stack([p] * 3, axis=-1) if p.ndim == 2 else p for p in pictures]
    return Part(str(path), np.stack(pictures), np.array(labels, np.int64))
