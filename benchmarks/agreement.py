"""How far apart `lossless` and `fedavg` end, beside two plain runs that differ only in summation order.

python -m benchmarks.agreement --data digits --model mlp --out docs/results/digits.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from torch import Tensor

from fedveil.config import RunConfig
from fedveil.engine import ClientPool
from fedveil.runs.job import Job, job_from_config
from fedveil.runs.loop import fresh_state, train_job
from fedveil.work import ClientData


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--dtypes", default="float64,float32")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for dtype in options.dtypes.split(","):
        plain, accuracy = trained(options, "fedavg", dtype)
        other, other_accuracy = trained(options, "fedavg", dtype, turned=True)
        row: dict[str, object] = {
            "dtype": dtype,
            "fedavg_accuracy": accuracy,
            "fedavg_other_order_accuracy": other_accuracy,
            "fedavg_other_order": distance(other, plain),
        }
        for scheme in ("pbpfl", "lossless"):
            veiled, reached = trained(options, scheme, dtype)
            row |= {f"{scheme}_accuracy": reached, scheme: distance(veiled, plain)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    settings["data"] = Path(options.data).name
    options.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")
    return 0


def distance(one: Tensor, other: Tensor) -> float:
    """‖one − other‖ / ‖other‖."""
    return float((one - other).double().norm() / other.double().norm())


def trained(options: argparse.Namespace, scheme: str, dtype: str, *, turned: bool = False) -> tuple[Tensor, float]:
    """Final parameters and accuracy; `turned` reverses the order of the samples inside every batch."""
    config = RunConfig(
        scheme=scheme,
        dataset=options.data,
        model=options.model,
        clients=options.clients,
        rounds=options.rounds,
        batch_size=options.batch_size,
        lr=options.lr,
        momentum=options.momentum,
        loss="square",
        seed=1,
        dtype=dtype,
        bn_eps="secret",
        evaluate_every=0,
    )
    job = job_from_config(config)
    if turned:
        job = reversed_batches(job)
    outcome = train_job(job, state=fresh_state(job))
    assert outcome.scores is not None
    assert outcome.scores.accuracy is not None
    return outcome.state.weights.parameters, outcome.scores.accuracy


class Turned(ClientData):
    """The same batches, each in reverse order."""

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        x, y = super().take(chosen)
        return x.flip(0), y.flip(0)


def reversed_batches(job: Job) -> Job:
    pool = ClientPool(tuple(Turned(one.client, one.x, one.y, one.rows) for one in job.pool.clients))
    return Job(**{**vars(job), "pool": pool})


if __name__ == "__main__":
    sys.exit(main())
