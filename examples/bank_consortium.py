"""Lay UCI's Bank Marketing table out for three banks, without what nobody knows before a call.

    python examples/bank_consortium.py bank-additional-full.csv customers.csv new-customers.csv

The table (Moro, Cortez and Rita 2014) is in bank-additional.zip of
https://archive.ics.uci.edu/dataset/222/bank+marketing. The story, step by step: docs/examples/bank-consortium.md.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from fedveil.errors import DataError

BANKS = {
    "officials": ("admin.", "technician", "student"),
    "owners": ("management", "entrepreneur", "self-employed", "retired"),
    "workers": ("blue-collar", "services", "housemaid", "unemployed", "unknown"),
}
BANK_OF = {job: bank for bank, jobs in BANKS.items() for job in jobs}
NEW = 50  # every fiftieth customer has not been called yet


def main() -> int:
    """Write who was called, with bank and answer, to KNOWN; who was not, with a number, to NEW."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, help="bank-additional-full.csv")
    parser.add_argument("known", type=Path, help="a new table of customers to learn from")
    parser.add_argument("new", type=Path, help="a new table of customers to predict for")
    asked = parser.parse_args()
    try:
        arrange(asked.raw, asked.known, asked.new)
    except (OSError, DataError) as reason:
        print(f"error: {reason}", file=sys.stderr)
        return DataError.exit_code
    return 0


def arrange(raw: Path, known: Path, new: Path) -> None:
    """A customer's job decides the bank, and the row's number who is new."""
    with raw.open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file, delimiter=";")
        columns = [name for name in table.fieldnames or () if name not in ("duration", "y")]
        rows = list(table)
    unknown = {row.get("job") for row in rows} - BANK_OF.keys()
    if unknown:
        raise DataError(f"{raw} is not the Bank Marketing table: {sorted(map(str, unknown))} are no jobs of it.")
    called: list[list[object]] = [["bank", *columns, "y"]]
    waiting: list[list[object]] = [["customer", *columns]]
    for number, row in enumerate(rows, start=1):
        cells = [row[name] for name in columns]
        if number % NEW == 0:
            waiting.append([number, *cells])
        else:
            called.append([BANK_OF[row["job"]], *cells, row["y"]])
    for path, lines in ((known, called), (new, waiting)):
        with path.open("x", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)
    print(f"{len(called) - 1} customers of {len(BANKS)} banks in {known}, {len(waiting) - 1} new ones in {new}")


if __name__ == "__main__":
    sys.exit(main())
