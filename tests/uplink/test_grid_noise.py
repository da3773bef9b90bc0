"""Under every claim, what leaves is whole numbers of the round's grid; and rounding stays within what is counted."""

from __future__ import annotations

from typing import Any

import torch

from federation import held_run, job, trained
from fedveil import schemes
from fedveil.client_held.messages import Divided
from fedveil.protocol.messages import Train, Upload
from fedveil.protocol.parts import planned
from fedveil.secrets import SeededSecrets
from fedveil.uplink.noised import gridded
from fedveil.uplink.plain import PlannedCentral
from uplink.test_noised import Federation

MORE: dict[str, dict[str, Any]] = {
    "paraaegis": {"cipher": "pads", "share": 0.2, "local_steps": 2},
    "serial": {"cipher": "pads", "local_steps": 2},
    "dp-fedavg": {"local_steps": 2},
    "varying-dp": {"local_steps": 2},
}
SMALL: dict[str, Any] = {"clients": 4, "rounds": 1, "loss": None, "options": {"depth": 2, "width": 8}, "seed": 3}


def claimed() -> list[str]:
    """The schemes whose plan a ledger rests on."""
    found = []
    for name in (one.name for one in schemes.schemes()):
        given = {**SMALL, **MORE.get(name, {})}
        if schemes.find(name).default_loss == "square":
            given["loss"] = "square"
        if job(scheme=name, **given).scheme.plan is not None:
            found.append(name)
    return found


def test_every_claim_rests_on_whole_numbers() -> None:
    names = claimed()
    held, keyed = {"serial", "paraaegis"}, {"tp-smc", "hybridalpha", "lwe-secagg"}
    assert set(names) == {*held, *keyed, "ldp", "cdp", "nadp", "veil-dp", "dp-fedavg", "varying-dp"}
    for name in names:
        for more in ({"cover": "noise"}, {"cover": "masks"}) if name == "veil-dp" else ({},):
            one = job(scheme=name, **{**SMALL, **MORE.get(name, {}), **more})
            seen: list[Any] = []
            keep = lambda replies, seen=seen: seen.extend(replies) or replies  # noqa: E731
            if one.scheme.holder == "server":
                _, rounds = trained(one, reorder=keep)
            else:
                rounds = held_run(one, reorder=keep).rounds
            assert not rounds[0].failed
            uploads = (said for said in seen if isinstance(said, (Upload, Divided)))
            sent = [said.payload if isinstance(said, Upload) else said.rest for said in uploads]
            assert len(sent) >= 4
            if one.scheme.central is None:
                assert all(words.dtype in (torch.int64, torch.uint8) for words in sent), name  # uint8: ciphertexts
            else:
                assert isinstance(one.scheme.central, PlannedCentral)


def test_a_trusted_server_uses_no_sum_but_a_rounded_one_under_integer_noise() -> None:
    one = Federation(job(scheme="cdp", **SMALL))
    ask = one.until(Train)
    central, terms, context = one.job.scheme.central, one.job.scheme.terms(one.job.architecture), one.context(ask)
    assert isinstance(central, PlannedCentral)
    step = gridded(central.plan, context, terms).step
    total = torch.stack([one.bare(ask, client) for client in ask.to]).sum(0)
    found = central.on_sum(total, context, terms, stream=SeededSecrets(1).stream("x"))
    assert torch.equal((found / step).round() * step, found)
    assert float(found[-1]) == float(total[-1])
    noise = (found - total)[:-1]
    sigma = float(planned(central.plan, context, terms.work).residual.sum()) ** 0.5
    assert len(noise) == 610
    assert 0.85 < float(noise.std()) / sigma < 1.15  # five deviations: false alarm below 1e-6
