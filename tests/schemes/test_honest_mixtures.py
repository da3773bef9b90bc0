"""A mixture put together by hand says in its ledger what the named scheme with the same parts says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fedveil
from fedveil.client_held.ciphers import Pads
from fedveil.client_held.divided import Parallel
from fedveil.downlink import Plain, Rescaling
from fedveil.downlink.plain import Kept
from fedveil.downlink.rescaling import HeadNoise
from fedveil.ledger import caveats
from fedveil.ledger.releases import Caveats
from fedveil.protocol.parts import Scheme
from fedveil.schemes import Setting
from fedveil.schemes.options import DpOptions
from fedveil.uplink.masked import Masked
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.uplink.noised import Noised
from fedveil.uplink.plain import Bare, PlannedCentral
from fedveil.uplink.vote import Ratio
from fedveil.work import Gradients
from fedveil.work.clipping import ClippedSamples
from fedveil.work.local_sgd import LocalSteps

DP = DpOptions()


def own(**parts: Any) -> Scheme:
    return Scheme(name="own", **parts)


def clipped(setting: Setting) -> ClippedSamples:
    return ClippedSamples(setting.loss, setting.batches, DP.clip)


def veil_masked(setting: Setting) -> Scheme:
    work = Gradients(setting.loss, setting.batches, refuses=False)
    return own(downlink=Rescaling(4.0, HeadNoise(None)), work=work, uplink=Masked())


def veil_bare(setting: Setting) -> Scheme:
    return own(downlink=Rescaling(family="full"), work=Gradients(setting.loss, setting.batches), uplink=Bare())


def veil_paired(setting: Setting) -> Scheme:
    plan = NoisePlan(DP.target(setting), "pairs", asked=setting.cohort)
    return own(downlink=Rescaling(family="isometry"), work=clipped(setting), uplink=Noised(plan))


def veil_masked_noise(setting: Setting) -> Scheme:
    plan = NoisePlan(DP.target(setting), "sum", quorum=2 / 3, asked=setting.cohort)
    return own(downlink=Rescaling(family="isometry"), work=clipped(setting), uplink=Masked(noise=plan))


def plain_local(setting: Setting) -> Scheme:
    return own(downlink=Plain(), work=clipped(setting), uplink=Noised(NoisePlan(DP.target(setting), "local")))


def central(setting: Setting) -> Scheme:
    plan = NoisePlan(DP.target(setting), "sum", trusted=True)
    return own(downlink=Plain(), work=clipped(setting), uplink=Bare(acquainted=True), central=PlannedCentral(plan))


def held(setting: Setting) -> Scheme:
    work = LocalSteps(setting.loss, setting.batches, setting.schedule, None, 1, refuses=False)
    return own(downlink=Kept(), work=work, uplink=Parallel(Ratio(1.0), Pads(Masked(256.0))), holder="clients")


def ledger(scheme: Any, *, clients: int = 5, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    data = [(torch.randn(12, 4), torch.arange(12) % 2) for _ in range(clients)]
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    return fedveil.train(net, data, test=data[0], scheme=scheme, rounds=1, **settings).ledger


@pytest.mark.parametrize(
    ("function", "named", "options"),
    [
        (veil_masked, "veil-secagg", {"loss": "square"}),
        (veil_bare, "lossless", {"loss": "square", "head_noise": False}),
        (veil_paired, "veil-dp", {}),
        (veil_masked_noise, "veil-dp", {"cover": "masks"}),
        (plain_local, "ldp", {}),
        (central, "cdp", {}),
        (held, "ckks-fedavg", {"cipher": "pads"}),
    ],
)
def test_a_mixture_admits_to_all_that_the_named_scheme_does(
    function: Callable[[Setting], Scheme], named: str, options: dict[str, Any]
) -> None:
    theirs, ours = ledger(function, **{k: v for k, v in options.items() if k == "loss"}), ledger(named, **options)
    assert set(theirs["unprotected"]) == set(ours["unprotected"]) != set()

    def said(one: dict[str, Any]) -> list[Any]:
        return [(line["adversary"], line["verdict"], line["assumptions"]) for line in one["lines"]]

    assert said(theirs) == said(ours)


def test_a_mixture_under_masks_is_warned_of_too_many_that_collude() -> None:
    def crowded(setting: Setting) -> Scheme:
        return own(
            downlink=Plain(),
            work=Gradients(setting.loss, setting.batches, refuses=False),
            uplink=Masked(collusion=0.6),
            caveats=Caveats(assumptions=("the moon is full",)),
        )

    told = ledger(crowded)
    assumed = next(line["assumptions"] for line in told["lines"] if line["adversary"] == "server")
    assert assumed[:2] == ("the moon is full", caveats.KEYS)
    assert any("TOO MANY" in text for text in assumed)
    assert caveats.CRAFTED in told["unprotected"]
    assert caveats.MODEL_OPEN in told["unprotected"]
