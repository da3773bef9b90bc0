"""PNG files of small pictures, without a picture library."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedveil.audit.findings import Attempt, Found, Trial
from fedveil.audit.measures import tamed
from fedveil.audit.metrics import assignment

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOURS = {1: 0, 3: 2}


def write_png(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    """Write an array (height, width, 1 or 3) as an 8-bit PNG."""
    height, width, channels = pixels.shape
    if channels not in _COLOURS:
        raise ValueError(f"a picture has 1 or 3 channels, not {channels}")
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_SIGNATURE + b"".join(_chunk(kind, content) for kind, content in parts))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


ROWS = ("original", "this run", "without protection")
RECORDS = ".records.png"
"""How the names of pictures end that show clients' samples."""
MOST_PICTURES = 24
_SIDE, _LARGEST_SIDE = 64, 128
_GAP = 4
_PAPER = 255


def contact_sheet(rows: Sequence[tuple[str, Tensor]], path: Path, *, box: tuple[float, float] | None) -> None:
    """Write rows of pictures (count, channels, height, width) as one PNG; `box` maps to black and white.

    Rows stand in the order given; each may have another number of pictures.
    """
    low, high = box or (0.0, 1.0)
    lines = []
    for _, pictures in rows:
        scaled = ((pictures[:MOST_PICTURES].double().cpu().nan_to_num() - low) / (high - low)).clamp(0, 1)
        lines.append([_tile(picture) for picture in scaled])
    side = max(max(tile.shape[1:]) for line in lines for tile in line)
    width = max(len(line) for line in lines) * (side + _GAP) + _GAP
    channels = max(tile.shape[0] for line in lines for tile in line)
    sheet = np.full((len(lines) * (side + _GAP) + _GAP, width, channels), _PAPER, np.uint8)
    for row, line in enumerate(lines):
        for column, tile in enumerate(line):
            top, left = _GAP + row * (side + _GAP), _GAP + column * (side + _GAP)
            image = (tile * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
            sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
    write_png(path, sheet)


def _tile(picture: Tensor) -> Tensor:
    """One picture of about 64 to 128 pixels; other numbers of channels than 1 and 3 are averaged."""
    shrink = _LARGEST_SIDE / max(picture.shape[1:])
    if shrink < 1:
        height, width = (max(1, round(side * shrink)) for side in picture.shape[1:])
        picture = F.adaptive_avg_pool2d(picture, (height, width))
    if picture.shape[0] not in (1, 3):
        picture = picture.mean(0, keepdim=True)
    factor = max(1, math.ceil(_SIDE / max(picture.shape[1:])))
    return picture.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


def sheet_of(trial: Trial, found: Sequence[Found], bare: Sequence[Found], *, folder: Path) -> str:
    """The contact sheet of a trial that makes pictures, and its file name; "" where there is nothing to show."""
    rebuilt = trial.asset == "data"
    if not (rebuilt or trial.asset == "what classes look like") or not found or found[0]["inputs"].dim() != 4:
        return ""
    rows: list[tuple[str, Tensor]] = []
    if rebuilt:
        rows.append((ROWS[0], torch.cat([attempt.truth["x"] for attempt in trial.attempts])))
        made = [
            _in_order(result["inputs"], each.truth["x"]) for result, each in zip(found, trial.attempts, strict=True)
        ]
        rows.append((ROWS[1], torch.cat(made)))
    else:
        rows.append((ROWS[1], torch.cat([result["inputs"] for result in found])))
    if bare:
        rows.append(
            (
                ROWS[2],
                torch.cat([_twin_in_order(result, each) for result, each in zip(bare, trial.attempts, strict=True)]),
            )
        )
    box = trial.settings.get("box")
    name = trial.name.replace("/", "-") + (RECORDS if rebuilt else ".png")
    contact_sheet(rows, folder / name, box=None if box is None else (box[0], box[1]))
    return name


def _twin_in_order(result: Found, attempt: Attempt) -> Tensor:
    truth = attempt.truth if attempt.twin_truth is None else attempt.twin_truth
    return _in_order(result["inputs"], truth["x"]) if "x" in truth else result["inputs"]


def _in_order(rebuilt: Tensor, originals: Tensor) -> Tensor:
    """A batch's reconstructions in the order of the originals they are compared with."""
    rebuilt = tamed(rebuilt, originals)
    return rebuilt[assignment(rebuilt, originals.double())].to(originals.dtype)
