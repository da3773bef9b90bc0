"""Training curves of fedavg and lossless on the same data and seed, as JSON: `python -m benchmarks.curves --help`.

Needs torch, numpy, scipy and scikit-learn alone, so that it runs on bare GPU hosts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedveil.config import RunConfig
from fedveil.runs.job import job_from_config
from fedveil.runs.loop import fresh_state, train_job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--cohort", type=int, default=0, help="clients per round (0: all)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=float, default=30)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--schemes", default="fedavg,lossless")
    parser.add_argument("--groups", type=int, default=1, help="m of lossless")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tf32", action="store_true", help="let the GPU round products to 10 bits, as PyTorch does")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = options.tf32
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    torch.backends.cudnn.benchmark = True
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    runs: list[dict[str, object]] = []
    for seed in map(int, options.seeds.split(",")):
        for scheme in options.schemes.split(","):
            runs.append({})

            def keep(run: dict[str, object]) -> None:
                runs[-1] = run
                options.out.write_text(json.dumps({"settings": settings, "runs": runs}))

            one(options, scheme, seed, keep)
    return 0


def one(options: argparse.Namespace, scheme: str, seed: int, keep: Callable[[dict[str, object]], None]) -> None:
    """Train once, with a test evaluation per epoch's worth of rounds; `keep` gets the curve as it grows."""
    config = RunConfig(
        scheme=scheme,
        dataset=options.data,
        model=options.model,
        clients=options.clients,
        cohort=options.cohort or None,
        batch_size=options.batch_size,
        rounds=1,
        lr=options.lr,
        lr_schedule="cosine",
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        loss="square",
        head_groups=options.groups if scheme == "lossless" else None,
        seed=seed,
        device=options.device,
        dtype=options.dtype,
    )
    samples = sum(len(data) for data in job_from_config(config).pool.clients)
    per_epoch = samples / ((options.cohort or options.clients) * options.batch_size)
    rounds = round(options.epochs * per_epoch)
    config = config.with_changes(rounds=rounds, evaluate_every=max(1, round(per_epoch)))
    job = job_from_config(config)
    started = time.perf_counter()
    run: dict[str, object] = {"scheme": scheme, "seed": seed, "rounds": rounds, "rounds_per_epoch": per_epoch}
    curve: list[list[object]] = []

    def say(row: dict[str, object], _: object) -> None:
        if "test_accuracy" in row:
            curve.append([row["round"], row["loss"], row["test_accuracy"]])
            keep({**run, "curve": curve})
            print(
                f"{scheme} seed {seed} round {row['round']}/{rounds} loss {row['loss']:.4f} "
                f"accuracy {row['test_accuracy']:.4f} {time.perf_counter() - started:.0f}s",
                flush=True,
            )

    outcome = train_job(job, state=fresh_state(job), on_round=say)
    assert outcome.client_view is not None
    keep(
        {
            **run,
            "curve": curve,
            "seconds": outcome.seconds,
            "client_view_accuracy": outcome.client_view.received.accuracy,
            "bytes_down": outcome.bytes_down,
            "bytes_up": outcome.bytes_up,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
