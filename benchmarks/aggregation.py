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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.tables import markdown
from fedveil import data, models
from fedveil.config import RunConfig
from fedveil.crypto import paillier
from fedveil.engine import ClientPool, LocalEngine
from fedveil.protocol.parts import UploadSum
from fedveil.protocol.phases import Ask, RoundDone
from fedveil.roles.client import Participant
from fedveil.roles.server import ServerRole
from fedveil.runs.job import Job, ModelFacts, assemble_job, settled
from fedveil.runs.loop import authority_role, client_role, fresh_state
from fedveil.secrets import OsSecrets
from fedveil.uplink import functional, lwe, masked, threshold
from fedveil.uplink.assumed import AssumedNoise
from fedveil.uplink.unmasking import MaskedSum

SCHEMES = ("secagg", "veil-secagg", "tp-smc", "pile", "hybridalpha", "lwe-secagg")
CLIENTS = 5
RESNET20 = 269_722
WIDTHS = {"tp-smc": 24, "pile": 8, "hybridalpha": 24}
"""Of the hidden layer: ciphertexts take long, and of what does not a small slice would show beginnings alone."""
SCALED = ("encrypting", "noise", "decrypting (client)", "adding", "decrypting (server)")
COLUMNS = ("making keys", "training", *SCALED[:3], "perturbing", *SCALED[3:], "recovering")
AUTHORITY = "the key authority"


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
    """A round of a small network: seconds of one client and of the server, what came of it, how many parameters."""
    job = small_job(scheme, key_bits=key_bits)
    return *timed_round(job, key_bits=key_bits), job.architecture.size


def timed_round(job: Job, *, key_bits: int) -> tuple[dict[str, float], RoundDone]:
    """A round of a job: seconds of one client and of the server by column, and what came of it.

    Of a job of several rounds each column's least, but for the first, in which much is done once and for all.
    """
    stored = json.loads((Path(__file__).parent / "safe_primes.json").read_text())["key bits"][str(key_bits)]
    primes = tuple(int(prime, 16) for prime in stored)
    clock = Clock()
    uplink, work = type(job.scheme.uplink), type(job.scheme.work)
    with contextlib.ExitStack() as stack:

        def watch(owner: Any, name: str, column: str) -> None:
            stack.enter_context(patch.object(owner, name, clock.timed(column, getattr(owner, name))))

        stack.enter_context(patch.object(threshold, "fresh_primes", lambda bits, stream: primes))
        stack.enter_context(patch.object(work, "run_many", clock.timed_steps("training", work.run_many)))
        watch(Participant, "_introduced", "making keys")
        for name in ("_deal", "_take"):
            watch(threshold.ThresholdPaillier, name, "making keys")
        watch(functional.FunctionalEncryption, "admit", "making keys")
        watch(functional.KeyAuthority, "handle", AUTHORITY)
        for module in (masked, threshold, lwe, functional):
            watch(module, "add_residual", "noise")
        watch(uplink, "protect", "noise" if issubclass(uplink, AssumedNoise) else "encrypting")
        watch(uplink, "answer", "decrypting (client)")
        watch(type(job.scheme.downlink), "veil", "perturbing")
        sums: tuple[type[Any], ...] = (MaskedSum, threshold.CiphertextProduct, functional.FunctionalSum)
        for kind in (*sums, UploadSum):
            watch(kind, "_fold", "adding")
        for kind in (*sums, lwe.LweSum):
            watch(kind, "total", "decrypting (server)")
        watch(ServerRole, "_recovered", "recovering")
        server = ServerRole(
            *(job.scheme, job.architecture, fresh_state(job)),
            secrets=job.secrets,
            cohort=job.cohort,
            optimiser=job.optimiser,
            rounds=job.config.rounds,
        )
        role, rounds = client_role(job), []
        role.work_by(job.scheme.work.run_many)
        engine = LocalEngine(role, job.pool, authority=authority_role(job))
        steps, answer, done = server.run(), None, None
        with contextlib.suppress(StopIteration):
            while True:
                step = steps.send(answer)
                answer = engine.gather(step) if isinstance(step, Ask) else None
                if isinstance(step, RoundDone):
                    done = step
                    rounds.append(dict(clock.seconds))
                    clock.seconds.clear()
    assert done is not None
    assert not done.failed
    each = dict.fromkeys(("making keys", "training", "encrypting", "noise", "decrypting (client)"), len(job.pool))
    if isinstance(job.scheme.uplink, threshold.ThresholdPaillier):
        each["decrypting (client)"] = job.scheme.uplink.quorum
    least = {one: min(spent.get(one, 0.0) for spent in rounds[1:] or rounds) for one in (*COLUMNS, AUTHORITY)}
    least["making keys"] = rounds[0].get("making keys", 0.0)
    return {one: spent / each.get(one, 1) for one, spent in least.items()}, done


def rows(schemes: Sequence[str], *, key_bits: int, beside: list[str]) -> Iterator[list[str]]:
    """Two lines a scheme; what an authority takes goes `beside` them, since it is nobody's of the table."""
    for scheme in schemes:
        measured(scheme, key_bits=256)  # what is slow but once
        seconds, done, size = measured(scheme, key_bits=key_bits)
        down, up = (number / CLIENTS for number in (done.gathered.bytes_down, done.gathered.bytes_up))
        here = [f"{seconds[one]:.4f}" for one in COLUMNS]
        yield [scheme, f"{size:,} parameters", *here, f"{down:,.0f}", f"{up:,.0f}"]
        times = RESNET20 / size
        scaled = [f"{times * seconds[one]:.2f}" if one in SCALED else "–" for one in COLUMNS]
        yield [scheme, "ResNet-20", *scaled, f"{times * down / 1e6:.1f} MB", f"{times * up / 1e6:.1f} MB"]
        if taken := seconds[AUTHORITY]:
            beside.append(f"{AUTHORITY} of {scheme}: {taken:.4f} s, of ResNet-20 {times * taken:.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--key-bits", type=int, default=2048, choices=(256, 512, 2048))
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="which ones, with commas between")
    parser.add_argument("--fresh", action="store_true", help="time two new safe primes, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    how = "gmpy2" if paillier.accelerated() else "Python's own integers"
    print(f"{CLIENTS} clients, keys of {options.key_bits} bits, powers by {how}; seconds of one core\n")
    beside: list[str] = []
    lines = rows(options.schemes.split(","), key_bits=options.key_bits, beside=beside)
    print("\n\n".join([markdown(["scheme", "", *COLUMNS, "bytes down", "bytes up"], lines), *beside]))
    if options.fresh:
        start = time.process_time()
        paillier.fresh_primes(options.key_bits, OsSecrets().stream())
        print(f"\ntwo safe primes of {options.key_bits // 2} bits: {time.process_time() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
