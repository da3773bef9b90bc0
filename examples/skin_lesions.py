"""Lay HAM10000 out for five hospitals: a folder a class, and beside them whose each picture is.

    python examples/skin_lesions.py HAM10000 lesions new-lesions

HAM10000 (Tschandl, Rosendahl and Kittler 2018) is the folder as it is downloaded from
https://doi.org/10.7910/DVN/DBW86T: HAM10000_metadata.csv, and ISIC_….jpg in it or in folders below.
The story, step by step: docs/examples/skin-lesions.md.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
from pathlib import Path

from fedveil.errors import DataError

CLASSES = ("another", "melanoma")
SITES = ("north", "east", "south", "west", "centre")
NEW = 49  # every forty-ninth lesion has not been seen yet


def main() -> int:
    """Copy pictures to KNOWN, in folders by class with metadata.csv beside them, and those of new lesions to NEW."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, help="the folder of HAM10000")
    parser.add_argument("known", type=Path, help="a new folder for pictures to learn from")
    parser.add_argument("new", type=Path, help="a new folder for pictures to predict for")
    asked = parser.parse_args()
    try:
        arrange(asked.raw, asked.known, asked.new)
    except (OSError, DataError) as reason:
        print(f"error: {reason}", file=sys.stderr)
        return DataError.exit_code
    return 0


def arrange(raw: Path, known: Path, new: Path) -> None:
    """A lesion's number decides: every NEW-th is new, the others go to the sites in turn, with all their pictures."""
    with (raw / "HAM10000_metadata.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    pictures = {path.stem: path for path in raw.rglob("*.jpg")}
    missing = [row["image_id"] for row in rows if row["image_id"] not in pictures]
    if missing:
        raise DataError(f"{len(missing)} pictures are not in {raw} or below it: the first is {missing[0]}.jpg.")
    for folder in (new, *(known / name for name in CLASSES)):
        folder.mkdir(parents=True)
    owners = [("file_name", "lesion", "site")]
    for row in rows:
        picture, number = pictures[row["image_id"]], int(row["lesion_id"].removeprefix("HAM_"))
        if number % NEW == 0:
            shutil.copy(picture, new)
            continue
        name = CLASSES[row["dx"] == "mel"]
        shutil.copy(picture, known / name)
        owners.append((f"{name}/{picture.name}", row["lesion_id"], SITES[number % len(SITES)]))
    with (known / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(owners)
    learnt = len(owners) - 1
    print(f"{learnt} pictures of {len(SITES)} sites in {known}, {len(rows) - learnt} of new lesions in {new}")


if __name__ == "__main__":
    sys.exit(main())
