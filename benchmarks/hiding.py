"""Hiding a vector from the server that adds it: pads against CKKS, and where the time of a ParaAegis round goes.

`OMP_NUM_THREADS=1 python -m benchmarks.hiding` shows these rows alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from benchmarks.protection import federation
from benchmarks.rows import Row
from benchmarks.timing import Ratio, Timed, interleaved, ratio
from fedveil.client_held.ciphers import Cipher, Ckks, Hidden, Pads
from fedveil.crypto import ciphertexts
from fedveil.protocol.client_state import Group
from fedveil.protocol.codec import size
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.phases import Gathered
from fedveil.secrets import OsSecrets
from fedveil.uplink.masked import Masked

CLIENTS = 10
VALUES = 270_000
FASTER = 15.0
SMALLER = 3.5
RANGE = 256.0


def hiding(*, repeats: int) -> list[Row]:
    """Pads against CKKS on one core; then the shares of a round."""
    before = ciphertexts.workers()
    ciphertexts.set_workers(1)
    try:
        return [*ciphers(repeats=max(3, repeats // 3)), *shares(repeats=max(3, repeats // 5))]
    finally:
        ciphertexts.set_workers(before)


class _Federated:
    """Ten clients who hide the same long vector, the server that adds, a client that reads."""

    def __init__(self, cipher: Cipher) -> None:
        states, directory, beacon = federation(CLIENTS)
        self.cipher = cipher
        opening = cipher.fresh_opening(CLIENTS)
        self._public = cipher.public_of(opening)
        self._group = Group("bench", bytes(32), opening)
        self._states = {client: replace(state, group=self._group) for client, state in states.items()}
        self._context = RoundContext(1, 0, tuple(range(CLIENTS)), directory, beacon)
        self._values = torch.randn(VALUES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        self.sent: list[Hidden] = [self.hide(client) for client in range(CLIENTS)]
        self._told = {
            client: cipher.hide(state, self._values, self._context, secrets=OsSecrets())[0]
            for client, state in self._states.items()
        }
        self._total = self.add()

    def hide(self, client: int = 0) -> Hidden:
        """What one client does before it sends."""
        return self.cipher.hide(self._states[client], self._values, self._context, secrets=OsSecrets())[1]

    def add(self) -> torch.Tensor:
        """What the server does, and, for masks, what clients answer when they are asked to reveal."""
        total = self.cipher.accumulator(VALUES, self._context, public=self._public)
        for part in self.sent:
            total.add(part)
        ask = total.open(Gathered(self._context.cohort, {}, (), 0, 0))
        if ask is not None:
            assert isinstance(self.cipher, Pads)
            for client in ask.to:
                told = replace(self._told[client], answered=(1, 0))
                ask.into.add(self.cipher.answer(told, ask.common, ask.each[client])[1])
        return total.total()

    def read(self) -> torch.Tensor:
        """What one client does with the sum."""
        return self.cipher.read(self._group, self._total, self._context.cohort, self._context)

    def whole(self) -> None:
        """All that hiding costs in a round, over all machines."""
        for client in range(CLIENTS):
            self.hide(client)
        self.add()
        for _ in range(CLIENTS):
            self.read()


def ciphers(*, repeats: int) -> list[Row]:
    """The same vector and ten clients under both ciphers."""
    pads, encrypted = _Federated(Pads(Masked(RANGE))), _Federated(Ckks(RANGE))
    wrong = float((pads.read() - encrypted.read()).abs().max())
    assert wrong < 2e-6, wrong
    timed = interleaved(
        {
            f"{kind} {what}": work
            for kind, one in (("pads", pads), ("ckks", encrypted))
            for what, work in (("hide", one.hide), ("whole", one.whole))
        },
        repeats=repeats,
        warm_ups=1,
    )
    where = f"{VALUES:,} numbers, {CLIENTS} clients"
    nanoseconds = 1e9 / VALUES
    bytes_pads, bytes_ckks = size(pads.sent[0]), size(encrypted.sent[0])
    smaller = bytes_ckks / bytes_pads
    return [
        Row(
            f"pads, a whole round of hiding ({where})",
            "ckks: times as fast",
            ratio(timed["ckks whole"], timed["pads whole"]),
            FASTER,
            at_least=True,
            note=f"{timed['pads whole'].median:.2f} s instead of {timed['ckks whole'].median:.2f}",
        ),
        Row(
            "pads, one client's hiding",
            "ckks: times as fast",
            ratio(timed["ckks hide"], timed["pads hide"]),
            note=f"{nanoseconds * timed['pads hide'].median:.0f} ns a number instead of "
            f"{nanoseconds * timed['ckks hide'].median:.0f}",
        ),
        Row(
            "pads, bytes of an upload",
            "ckks: times as small",
            Ratio(smaller, smaller, smaller),
            SMALLER,
            at_least=True,
            note=f"{bytes_pads / VALUES:.2f} bytes a number instead of {bytes_ckks / VALUES:.2f}; plain float32: 4",
        ),
    ]


_PARTS = {
    "training": (("fedveil.work.local_sgd.LocalSteps.run",)),
    "vote: choosing and tagging": ("fedveil.client_held.divided.Parallel.vote",),
    "vote: counting (server)": ("fedveil.client_held.server.Votes.add", "fedveil.client_held.server.Votes.winners"),
    "vote: reading the winners": ("fedveil.client_held.divided.Parallel.winners",),
    "clipping and noise": ("fedveil.client_held.divided.Parallel._noised",),
    "hiding": ("fedveil.client_held.ciphers.Ckks.hide", "fedveil.client_held.ciphers.Pads.hide"),
    "adding (server)": ("fedveil.client_held.server.DividedSum.add", "fedveil.client_held.server.DividedSum.aggregate"),
    "opening masks (clients)": ("fedveil.client_held.ciphers.Pads.answer",),
    "reading the sum": ("fedveil.client_held.ciphers.Ckks.read", "fedveil.client_held.ciphers.Pads.read"),
}


def shares(*, repeats: int) -> list[Row]:
    """Which share of a ParaAegis round each part takes, added over all machines (ResNet-20, r = 10 %)."""
    rows = []
    for cipher, share in (("ckks", 0.1), ("ckks", 1.0), ("pads", 0.1), ("pads", 1.0)):
        clocked = [_clocked(cipher, share) for _ in range(repeats)]
        found, traffic = [one for one, _ in clocked], clocked[0][1]
        rows += [
            Row(
                f"bytes {way}, {cipher}, r = {share:.0%} (ResNet-20)",
                "the model in float32",
                Ratio(times, times, times),
            )
            for way, times in traffic.items()
        ]
        totals = Timed(tuple(sum(one.values()) for one in found))
        for part in _PARTS:
            spent = Timed(tuple(one[part] for one in found))
            if spent.median > 0:
                what = f"{part}, {cipher}, r = {share:.0%}"
                rows.append(Row(what, "the whole round", ratio(spent, totals), note=f"{1e3 * spent.median:.0f} ms"))
    return rows


def _clocked(cipher: str, share: float) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of one round by part, and bytes against plain ones.

    Every client reads the sum itself, as it would on a machine of its own.
    """
    from fedveil import models
    from fedveil.config import RunConfig
    from fedveil.engine import ClientPool
    from fedveil.runs.job import ModelFacts, assemble_job, settled
    from fedveil.runs.loop import fresh_state, train_job

    config = settled(
        RunConfig(
            scheme="paraaegis",
            share=share,
            cipher=cipher,
            clients=CLIENTS,
            rounds=2,
            batch_size=32,
            local_epochs=1,
            lr=0.01,
            seed=1,
            evaluate_every=0,
        )
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * 160, 3, 32, 32, generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    net = models.build("resnet20", input_shape=(3, 32, 32), outputs=10, seed=0, norm="group")
    pool = ClientPool.shared(x, y, list(torch.arange(len(x)).chunk(CLIENTS)))
    job = assemble_job(config, net, pool, None, ModelFacts("resnet20", {}, (3, 32, 32), 10, "classification"))
    with _clocks() as spent:
        outcome = train_job(job, state=fresh_state(job))
    found = {part: sum(spent[name] for name in names) / 2 for part, names in _PARTS.items()}
    for part in ("reading the sum", "vote: reading the winners"):
        found[part] *= CLIENTS  # in one process, clients that were told the same work it out once
    plain, last = 4 * job.architecture.size, outcome.rows[-1]  # the first round brings no sums down
    return found, {"up": last["bytes_up"] / plain, "down": last["bytes_down"] / plain}


@contextmanager
def _clocks() -> Iterator[dict[str, float]]:
    """Seconds spent in the named methods."""
    spent = {name: 0.0 for names in _PARTS.values() for name in names}

    def clocked(name: str, method: Callable[..., object]) -> Callable[..., object]:
        def work(*given: object, **named: object) -> object:
            start = time.perf_counter()
            try:
                return method(*given, **named)
            finally:
                spent[name] += time.perf_counter() - start

        return work

    patches = []
    for name in spent:
        owner, method = name.rsplit(".", 1)
        module, kind = owner.rsplit(".", 1)
        cls = getattr(sys.modules[module], kind)
        patches.append(mock.patch.object(cls, method, clocked(name, getattr(cls, method))))
    for one in patches:
        one.start()
    try:
        yield spent
    finally:
        for one in patches:
            one.stop()


def main() -> int:
    from benchmarks.__main__ import alone

    return alone(lambda device, repeats: hiding(repeats=repeats), __doc__, devices=("cpu",), repeats=15)


if __name__ == "__main__":
    sys.exit(main())
