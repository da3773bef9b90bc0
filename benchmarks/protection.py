"""What protecting a contribution costs a client, and opening the sum the server, against training without it.

`OMP_NUM_THREADS=1 python -m benchmarks.protection` shows these rows alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.rows import WORK, Bed, Row, head
from benchmarks.timing import Ratio, Timed, interleaved, ratio
from fedveil.downlink import Decomposed, HeadNoise, Plain, Rescaling
from fedveil.downlink.messages import Downlink
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.parts import RoundContext, Summing, Terms, Uplink
from fedveil.protocol.phases import Gathered
from fedveil.secrets import OsSecrets
from fedveil.tensors import Layout

if TYPE_CHECKING:
    from fedveil.protocol.directory import Directory

CLIENTS = 100
BATCH = 64
MOST = 1.15
_NOISE = "residual noise and six pairs' noise"
CPU = torch.device("cpu")


def protection(*, repeats: int) -> list[Row]:
    """A client's step and the server's round, with and without protection (ResNet-20, m = 1)."""
    return [*client_protection(repeats=repeats), *server_opening(repeats=repeats)]


def client_protection(*, repeats: int) -> list[Row]:
    """One whole step of one of 100 clients; what protects it is timed by itself, and takes turns with it."""
    from fedveil.uplink.assumed import AssumedNoise
    from fedveil.uplink.masked import Masked

    bed = Bed.resnet20(BATCH, CPU)
    decomposed, rescaled = Decomposed(HeadNoise(groups=1)), Rescaling(1.5)
    covers: dict[str, tuple[Downlink, Uplink]] = {
        "masks, 6 neighbours": (head(1), Masked(degree=6)),
        "masks, as many neighbours as the scheme takes (30)": (head(1), Masked()),
        "mpdp's noise, 5-out": (decomposed, AssumedNoise(1.0, "decomposed", neighbours=5)),
    }
    steps = {"fedavg": Plain(), "veiled": head(1), "decomposed": decomposed, "rescaled": rescaled}
    timed = interleaved(
        {
            **{name: bed.client(downlink) for name, downlink in steps.items()},
            **{name: _protecting(bed, *cover) for name, cover in covers.items()},
            _NOISE: _noising(bed),
        },
        repeats=repeats,
    )
    where = f"ResNet-20, batch {BATCH}, {CLIENTS} clients"
    against = ratio(timed["veiled"], timed["fedavg"])
    rows = [Row(f"veiled step, m = 1 ({where})", "fedavg step", against, note=_milliseconds(timed["veiled"]))]
    bare = {name: "decomposed" if downlink is decomposed else "veiled" for name, (downlink, _) in covers.items()}
    for name, which in {**bare, _NOISE: "rescaled"}.items():
        step = timed[which]
        whole = _sum(step, timed[name])
        rows += [
            Row(f"step + {name}", "the same step bare", ratio(whole, step), MOST, note=_milliseconds(timed[name])),
            Row(f"step + {name}", "fedavg step", ratio(whole, timed["fedavg"])),
        ]
    return rows


def _noising(bed: Bed) -> Callable[[], object]:
    """What `veil-dp` adds to the upload of a client with six partners: its own noise and that of six pairs."""
    from fedveil.protocol.parts import planned
    from fedveil.uplink.noise_plan import NoisePlan, Target
    from fedveil.uplink.noised import Noised
    from fedveil.work.clipping import ClippedSamples

    states, directory, beacon = federation(CLIENTS)
    # Without batch normalisation, which clipping refuses, the contribution would be as long.
    layout = Layout(
        (("gradients", (1, bed.architecture.size)), ("values", (0,)), ("statistics", (0,)), ("weight", (1,)))
    )
    terms = Terms(bed.architecture, layout, ClippedSamples(WORK.loss, WORK.batches, 1.0))
    plan = NoisePlan(Target(3.0, 1e-5, 100, 100), "pairs", neighbours=3)
    context = RoundContext(0, 0, tuple(range(CLIENTS)), directory, beacon)
    noise_layout = planned(plan, context, terms.work)
    client = next(one for one in context.cohort if len(noise_layout.partners(one)) == 6)
    uplink, vector = Noised(plan), torch.ones(layout.length)
    return lambda: uplink.protect(states[client], vector, context, terms, secrets=OsSecrets())


def _milliseconds(timed: Timed) -> str:
    return f"{1e3 * timed.median:.0f} ms"


def _sum(one: Timed, other: Timed) -> Timed:
    return Timed(tuple(a + b for a, b in zip(one.seconds, other.seconds, strict=True)))


def server_opening(*, repeats: int) -> list[Row]:
    """Accumulating, opening and decoding a round of 25, 50 and 100 masked uploads."""
    from fedveil.uplink.masked import Masked

    bed = Bed.resnet20(2, CPU)
    rounds = {clients: _Round(bed, Masked(degree=6), clients) for clients in (25, 50, 100)}
    candidates: dict[str, Callable[[], object]] = {str(clients): one.open for clients, one in rounds.items()}
    step = Bed.resnet20(BATCH, CPU).client(Plain())
    timed = interleaved({**candidates, "step": step}, repeats=max(3, repeats // 3), warm_ups=1)
    rows = [
        Row(
            f"server: adding, opening and decoding {clients} masked uploads",
            f"{clients} fedavg steps",
            _over(timed[str(clients)], timed["step"], clients),
            note=f"{1e3 * timed[str(clients)].median / clients:.1f} ms a client",
        )
        for clients in rounds
    ]
    for few, many in ((25, 50), (50, 100)):
        measured = _over(timed[str(many)], timed[str(few)], 2)
        rows.append(Row(f"the same for {many} clients, by client", f"{few} clients", measured, 1.3, note="linear: 1"))
    return rows


def _over(top: Timed, bottom: Timed, times: int) -> Ratio:
    found = ratio(top, bottom)
    return Ratio(found.middle / times, found.low / times, found.high / times)


@cache
def federation(clients: int) -> tuple[dict[int, ClientState], Directory, bytes]:
    """Clients who know each other's keys, their directory, and the beacon of its epoch."""
    from fedveil.protocol.directory import Cohort
    from fedveil.protocol.key_agreement import Introductions, introduce

    states = {client: ClientState(client) for client in range(clients)}
    known = Introductions("keys", "bench", cohort=Cohort(clients, clients, 0), rounds=100)
    steps, answer = known.steps(0), None
    while True:
        try:
            ask = steps.send(answer)
        except StopIteration:
            break
        for client in ask.to:
            states[client], reply = introduce(
                states[client], ask.common, samples=BATCH, how="keys", secrets=OsSecrets(), roster=None, identity=None
            )
            ask.into.add(reply)
        answer = Gathered(ask.to, {}, (), 0, 0)
    assert known.directory is not None
    return states, known.directory, known.beacon


def _terms(bed: Bed, downlink: Downlink) -> Terms:
    layout = WORK.layout(bed.architecture, tensors=downlink.head_tensors(bed.architecture))
    return Terms(bed.architecture, layout, WORK)


def _protecting(bed: Bed, downlink: Downlink, uplink: Uplink) -> Callable[[], object]:
    """Protection and, under masks, the revelation; the run's keys are already agreed on."""
    states, directory, beacon = federation(CLIENTS)
    terms, secrets = _terms(bed, downlink), OsSecrets()
    context = RoundContext(0, 0, tuple(range(CLIENTS)), directory, beacon)
    contribution = torch.randn(terms.layout.length, generator=torch.Generator().manual_seed(0))
    reveal = _revelation(uplink, context, terms)

    def work() -> object:
        state, reply = uplink.protect(states[0], contribution, context, terms, secrets=secrets)
        return reply, reveal(state)

    return work


def _revelation(uplink: Uplink, context: RoundContext, terms: Terms) -> Callable[[ClientState], object]:
    from fedveil.uplink.masked import Masked
    from fedveil.uplink.unmasking import MaskedSum, MaskedUpload, Unmask

    if not isinstance(uplink, Masked):
        return lambda state: None
    states, _, _ = federation(CLIENTS)
    nothing = torch.zeros(terms.layout.length)
    total = uplink.accumulator(context, terms, device=CPU)
    assert isinstance(total, MaskedSum)
    for state in states.values():
        _, reply = uplink.protect(state, nothing, context, terms, secrets=OsSecrets())
        assert isinstance(reply, MaskedUpload)
        total.add(reply)
    # Ten of a hundred are missing, as on a bad day.
    present = [one for one in context.cohort if one % 10 != 1]
    total.close(present)
    private = total.private(0)
    request = Unmask(context.round, context.attempt, torch.tensor(present, dtype=torch.int64))

    def reveal(state: ClientState) -> object:
        return uplink.answer(replace(state, answered=(0, 0)), request, private)

    return reveal


class _Round:
    """A round of masked uploads that can be opened again and again."""

    def __init__(self, bed: Bed, uplink: Uplink, clients: int) -> None:
        states, directory, beacon = federation(clients)
        self._uplink, self._terms = uplink, _terms(bed, head(1))
        self._context = RoundContext(0, 0, tuple(range(clients)), directory, beacon)
        self._arrived = Gathered(self._context.cohort, {}, (), 0, 0)
        nothing = torch.zeros(self._terms.layout.length)
        told, self._uploads = {}, []
        for client, state in states.items():
            told[client], upload = uplink.protect(state, nothing, self._context, self._terms, secrets=OsSecrets())
            self._uploads.append(upload)
        total = self._accumulated()
        ask = uplink.open(total, self._arrived, self._context)
        assert ask is not None
        self._revealed = [
            uplink.answer(replace(state, answered=(0, 0)), ask.common, ask.each[client])[1]
            for client, state in told.items()
        ]

    def _accumulated(self) -> Summing:
        total = self._uplink.accumulator(self._context, self._terms, device=CPU)
        for upload in self._uploads:
            total.add(upload)
        return total

    def open(self) -> Tensor:
        total = self._accumulated()
        self._uplink.open(total, self._arrived, self._context)
        for one in self._revealed:
            total.add(one)
        opened = total.total()
        assert not opened.any()
        return opened


def main() -> int:
    from benchmarks.__main__ import alone

    return alone(lambda device, repeats: protection(repeats=repeats), __doc__, devices=("cpu",), repeats=9)


if __name__ == "__main__":
    sys.exit(main())
