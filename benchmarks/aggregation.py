"""What hiding single uploads costs, in the columns of MP-DP's Table 5, in real rounds of the real protocol.

`OMP_NUM_THREADS=1 python -m benchmarks.aggregation` trains a small network for a round under each scheme and prints the
seconds of one core, a client's and the server's apart, and the bytes of one client. What grows with the number of
parameters is then scaled to ResNet-20's. Keys are made of stored primes (benchmarks/safe_primes.json, which are for
benchmarks and not secret): `--fresh` also times how long two new ones take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.tables import markdown
from fedveil import data, models
from fedveil.config import RunConfig
from fedveil.crypto import paillier
from fedveil.engine import ClientPool, LocalEngine
from fedveil.protocol.phases import Ask, RoundDone
from fedveil.roles.client import Participant
from fedveil.roles.server import ServerRole
from fedveil.runs.job import Job, ModelFacts, assemble_job, settled
from fedveil.runs.loop import client_role, fresh_state
from fedveil.secrets import OsSecrets
from fedveil.uplink import lwe, masked, threshold

SCHEMES = ("secagg", "veil-secagg", "tp-smc", "pile", "lwe-secagg")
CLIENTS = 5
RESNET20 = 269_722
WIDTHS = {"tp-smc": 24, "pile": 8}
"""Of the hidden layer: ciphertexts take long, and of what does not a small slice would show beginnings alone."""
SCALED = ("encrypting", "noise", "decrypting (client)", "adding", "decrypting (server)")
COLUMNS = ("making keys", "training", *SCALED[:3], "perturbing", *SCALED[3:], "recovering")


class Clock:
    """Seconds of the processor by column; what is timed inside something else counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    @contextlib.contextmanager
    def column(self, name: str) -> Iterator[None]:
        self._inside.append(0.0)
        start = time.process_time()
        try:
            yield
        finally:
            spent = time.process_time() - start
            self.seconds[name] += spent - self._inside.pop()
            if self._inside:
                self._inside[-1] += spent

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            with self.column(name):
                return function(*given, **named)

        return run

    def timed_steps(self, name: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def run(*given: Any, **named: Any) -> Iterator[Any]:
            steps = function(*given, **named)
            while True:
                with self.column(name):
                    try:
                        step = next(steps)
                    except StopIteration:
                        return
                yield step

        return run


def small_job(scheme: str, *, key_bits: int) -> Job:
    """Five clients with digits and a network of one hidden layer."""
    width = WIDTHS.get(scheme, 512)
    options = {"key_bits": key_bits} if scheme in ("tp-smc", "pile") else {}
    groups = {"head_groups": 1} if scheme == "veil-secagg" else {}  # as pile has it
    given = {"scheme": scheme, "rounds": 1, "seed": 1, "dtype": "float64", "clients": CLIENTS, **options, **groups}
    config = settled(RunConfig.from_mapping(given))
    split = data.load("digits", seed=7)
    parts = data.partition(split.train, clients=CLIENTS, how="iid", seed=1)
    net = models.build("mlp", input_shape=split.train.input_shape, outputs=10, seed=1, depth=2, width=width)
    placed = split.train.to(dtype=torch.float64)
    facts = ModelFacts("mlp", {"depth": 2, "width": width}, split.train.input_shape, 10, "classification")
    return assemble_job(config, net, ClientPool.shared(placed.x, placed.y, parts), split.test, facts)


def measured(scheme: str, *, key_bits: int) -> tuple[dict[str, float], RoundDone, int]:
    """A round under a scheme: seconds of one client and of the server, what came of it, how many parameters."""
    stored = json.loads((Path(__file__).parent / "safe_primes.json").read_text())["key bits"][str(key_bits)]
    primes = tuple(int(prime, 16) for prime in stored)
    job, clock = small_job(scheme, key_bits=key_bits), Clock()
    uplink, work = type(job.scheme.uplink), type(job.scheme.work)
    with contextlib.ExitStack() as stack:

        def watch(owner: Any, name: str, column: str) -> None:
            stack.enter_context(patch.object(owner, name, clock.timed(column, getattr(owner, name))))

        stack.enter_context(patch.object(threshold, "fresh_primes", lambda bits, stream: primes))
        stack.enter_context(patch.object(work, "run_many", clock.timed_steps("training", work.run_many)))
        watch(Participant, "_introduced", "making keys")
        for name in ("_deal", "_take"):
            watch(threshold.ThresholdPaillier, name, "making keys")
        for module in (masked, threshold, lwe):
            watch(module, "add_residual", "noise")
        watch(uplink, "protect", "encrypting")
        watch(uplink, "answer", "decrypting (client)")
        watch(type(job.scheme.downlink), "veil", "perturbing")
        for kind in (masked.MaskedSum, threshold.CiphertextProduct):
            watch(kind, "_fold", "adding")
        for kind in (masked.MaskedSum, threshold.CiphertextProduct, lwe.LweSum):
            watch(kind, "total", "decrypting (server)")
        watch(ServerRole, "_recovered", "recovering")
        server = ServerRole(
            *(job.scheme, job.architecture, fresh_state(job)),
            secrets=job.secrets,
            cohort=job.cohort,
            optimiser=job.optimiser,
            rounds=1,
        )
        role = client_role(job)
        role.work_by(job.scheme.work.run_many)
        engine, steps, answer, done = LocalEngine(role, job.pool), server.run(), None, None
        with contextlib.suppress(StopIteration):
            while True:
                step = steps.send(answer)
                answer = engine.gather(step) if isinstance(step, Ask) else None
                done = step if isinstance(step, RoundDone) else done
    assert done is not None
    assert not done.failed
    each = dict.fromkeys(("making keys", "training", "encrypting", "noise", "decrypting (client)"), CLIENTS)
    if isinstance(job.scheme.uplink, threshold.ThresholdPaillier):
        each["decrypting (client)"] = job.scheme.uplink.quorum
    return {one: clock.seconds[one] / each.get(one, 1) for one in COLUMNS}, done, job.architecture.size


def rows(*, key_bits: int) -> Iterator[list[str]]:
    for scheme in SCHEMES:
        measured(scheme, key_bits=256)  # what is slow but once
        seconds, done, size = measured(scheme, key_bits=key_bits)
        down, up = (number / CLIENTS for number in (done.gathered.bytes_down, done.gathered.bytes_up))
        here = [f"{seconds[one]:.4f}" for one in COLUMNS]
        yield [scheme, f"{size:,} parameters", *here, f"{down:,.0f}", f"{up:,.0f}"]
        times = RESNET20 / size
        scaled = [f"{times * seconds[one]:.2f}" if one in SCALED else "–" for one in COLUMNS]
        yield [scheme, "ResNet-20", *scaled, f"{times * down / 1e6:.1f} MB", f"{times * up / 1e6:.1f} MB"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--key-bits", type=int, default=2048, choices=(256, 512, 2048))
    parser.add_argument("--fresh", action="store_true", help="time two new safe primes, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    how = "gmpy2" if paillier.accelerated() else "Python's own integers"
    print(f"{CLIENTS} clients, keys of {options.key_bits} bits, powers by {how}; seconds of one core\n")
    print(markdown(["scheme", "", *COLUMNS, "bytes down", "bytes up"], rows(key_bits=options.key_bits)))
    if options.fresh:
        start = time.process_time()
        paillier.fresh_primes(options.key_bits, OsSecrets().stream())
        print(f"\ntwo safe primes of {options.key_bits // 2} bits: {time.process_time() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
