"""The papers' Table 1: test MSE on the bank data, MLPs of 3, 5 and 7 layers, 1, 5 and 10 clients.

python -m benchmarks.bank --data $DATA/bank --out docs/results/bank.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fedveil.config import RunConfig
from fedveil.runs.job import job_from_config
from fedveil.runs.loop import fresh_state, train_job

PAPER = {  # FedAvg and "Ours" of paper 003, Table I, by (clients, layers)
    (1, 3): (0.059, 0.061), (1, 5): (0.059, 0.059), (1, 7): (0.058, 0.060),
    (5, 3): (0.079, 0.081), (5, 5): (0.079, 0.080), (5, 7): (0.086, 0.084),
    (10, 3): (0.097, 0.100), (10, 5): (0.100, 0.101), (10, 7): (0.113, 0.102),
}  # fmt: skip
SCHEMES = ("fedavg", "pbpfl", "lossless")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows, worst = [], 0.0
    print("clients layers  " + "  ".join(f"{name:>9}" for name in SCHEMES) + "   paper: FedAvg  ours")
    for clients, layers in PAPER:
        scores = {scheme: mse(options, scheme, clients, layers) for scheme in SCHEMES}
        spread = max(scores.values()) - min(scores.values())
        worst = max(worst, spread)
        theirs = PAPER[clients, layers]
        print(
            f"{clients:7} {layers:6}  " + "  ".join(f"{scores[name]:9.6f}" for name in SCHEMES) + f"   {theirs}",
            flush=True,
        )
        rows.append({"clients": clients, "layers": layers, **scores, "spread": spread, "paper": theirs})
    settings = {"rounds": options.rounds, "batch_size": options.batch_size, "lr": options.lr, "seed": 1}
    options.out.write_text(json.dumps({"settings": settings, "rows": rows, "largest_spread": worst}, indent=2) + "\n")
    print(f"largest difference between the three schemes: {worst:.2e}")
    return 0 if worst < 5e-4 else 1


def mse(options: argparse.Namespace, scheme: str, clients: int, layers: int) -> float:
    """Train one cell of the table."""
    config = RunConfig(
        scheme=scheme,
        dataset=options.data,
        target="y",
        task="regression",
        test_fraction=0.1,
        model="mlp",
        model_options={"depth": layers, "width": 64},
        clients=clients,
        batch_size=options.batch_size,
        rounds=options.rounds,
        lr=options.lr,
        loss="square",
        seed=1,
        evaluate_every=0,
    )
    job = job_from_config(config)
    outcome = train_job(job, state=fresh_state(job))
    assert outcome.scores is not None
    assert outcome.scores.mse is not None
    return outcome.scores.mse


if __name__ == "__main__":
    sys.exit(main())
