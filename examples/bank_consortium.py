"""Five banks learn together whom to call, without showing each other their customers.

    python examples/bank_consortium.py                          # on a small made-up table
    python examples/bank_consortium.py --data bank-additional-full.csv

The real table is UCI's Bank Marketing (Moro, Cortez and Rita 2014): bank-additional-full.csv, from
https://archive.ics.uci.edu/dataset/222/bank+marketing. The story, step by step: docs/examples/bank-consortium.md.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import fedveil
from fedveil.config import RunConfig
from fedveil.runs import session

BANKS = 5
SEED = 1
WORDS = {
    "job": "admin. blue-collar entrepreneur management retired services student technician unemployed",
    "marital": "divorced married single",
    "education": "basic.9y high.school professional.course university.degree",
    "default": "no unknown",
    "housing": "no yes",
    "loan": "no yes",
    "contact": "cellular telephone",
    "month": "apr may jun jul aug nov",
    "day_of_week": "mon tue wed thu fri",
    "poutcome": "failure nonexistent success",
}
COLUMNS = (
    "age job marital education default housing loan contact month day_of_week duration campaign pdays previous "
    "poutcome emp.var.rate cons.price.idx cons.conf.idx euribor3m nr.employed y"
).split()


def main() -> int:
    """The same model three times: bare, veiled, and veiled and masked; then what each proves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="bank-additional-full.csv[.xz]; without it a table is made up")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of training (default: 60)")
    parser.add_argument("--out", type=Path, default=Path("runs/banks"), help="folder of the runs; must be new")
    asked = parser.parse_args()
    try:
        compare(table(asked.data, asked.out), asked.rounds, asked.out)
    except fedveil.FedVeilError as reason:
        print(f"error: {reason}", file=sys.stderr)
        return reason.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def table(given: Path | None, out: Path) -> Path:
    """The table that was given, or one made up on the spot."""
    if given is not None:
        return given
    path = out / "made-up.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    made_up(path, rows=1500)
    print("NOT REAL DATA: no --data was given, so this runs on 1,500 made-up customers with the columns of the UCI")
    print("Bank Marketing table. The figures below show that the schemes agree, and say nothing about banking.\n")
    return path


def made_up(path: Path, *, rows: int) -> None:
    """A table with the real one's columns, in which long calls and earlier success make a yes likelier."""
    random = np.random.default_rng(SEED)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(COLUMNS)
        for _ in range(rows):
            word = {name: str(random.choice(choices.split())) for name, choices in WORDS.items()}
            duration, rate = int(random.exponential(260)), float(random.choice([0.7, 1.3, 4.1, 4.9]))
            score = 0.004 * duration - 0.5 * rate + 1.5 * (word["poutcome"] == "success") - 1.2
            numbers = {
                "age": int(np.clip(random.normal(40, 10), 18, 90)),
                "duration": duration,
                "campaign": int(random.geometric(0.4)),
                "pdays": 6 if word["poutcome"] == "success" else 999,
                "previous": int(word["poutcome"] != "nonexistent"),
                "emp.var.rate": round(rate - 3.5, 1),
                "cons.price.idx": round(float(random.normal(93.6, 0.5)), 3),
                "cons.conf.idx": round(float(random.normal(-40, 4)), 1),
                "euribor3m": rate,
                "nr.employed": int(random.choice([5099, 5191, 5228])),
                "y": "yes" if random.random() < 1 / (1 + np.exp(-score)) else "no",
            }
            writer.writerow([word.get(name, numbers.get(name)) for name in COLUMNS])


def compare(source: Path, rounds: int, out: Path) -> None:
    """Train under three schemes, side by side, from the same first model."""
    summaries = {}
    for scheme in ("fedavg", "lossless", "veil-secagg"):
        config = RunConfig(
            scheme=scheme,
            dataset=str(source),
            target="y",
            task="regression",
            test_fraction=0.1,
            clients=BANKS,
            partition="size",
            ratio=5.0,
            model_options={"depth": 3, "width": 64},
            loss="square",
            batch_size=128,
            lr=0.05,
            rounds=rounds,
            seed=SEED,  # a simulation: the same data, batches and first model every time
            evaluate_every=0,
        )
        summaries[scheme] = session.run(config, out / scheme, quiet=not sys.stderr.isatty())
    print(f"{BANKS} banks, {rounds} rounds; the error is the mean square of (prediction − answer), yes = 1 and no = 0")
    print(f"{'scheme':<13}{'test error':>11}{'a bank sees':>13}{'up per round':>14}   proven of data from the server")
    for scheme, found in summaries.items():
        server = next(line for line in found["ledger"]["lines"] if line["adversary"] == "server")
        seen = found.get("client_view_mse", found["test_mse"])
        up = f"{found['bytes_up'] / 1000:,.0f} kB"
        print(f"{scheme:<13}{found['test_mse']:>11.5f}{seen:>13.3f}{up:>14}   {server['verdict']}")
    errors = [found["test_mse"] for found in summaries.values()]
    print(f"largest difference between the three errors: {max(errors) - min(errors):.1e}")
    hidden = Counter(text for found in summaries.values() for text in found["ledger"]["unprotected"])
    print("not protected, and in how many of the three runs:")
    for text, times in hidden.items():
        print(f"  – {text} ({times})")


if __name__ == "__main__":
    sys.exit(main())
