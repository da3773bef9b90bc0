"""What reports in tests are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fedveil.audit.findings import AuditStore, Finding, sentences
from fedveil.audit.pictures import contact_sheet
from fedveil.config import RunConfig

SCHEMES = ("fedavg", "lossless", "nadp")
SEEDS = (1, 2)
ROUNDS = 4


def small(**changes: Any) -> RunConfig:
    """A run of a second."""
    given = {"clients": 3, "rounds": ROUNDS, "seed": 1, "checkpoint_every": 0, **changes}
    return RunConfig(model_options={"depth": 2, "width": 8}, **given)


def audit_into(folder: Path, *, attack: str = "closed-form") -> None:
    """An audit's folder with one attack that works, one that does not, and a picture."""
    store = AuditStore(
        folder,
        identity={"record": "0", "quick": True},
        about={"scheme": "lossless", "dataset": "digits", "model": "mlp"},
    )
    store.pictures.mkdir(parents=True)
    pictures = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    rows = [("original", pictures), ("this run", pictures / 2), ("without protection", pictures)]
    contact_sheet(rows, store.pictures / "server-closed-form.png", box=None)
    rebuilt = Finding(
        *("server/closed-form", "the server", "data", attack, "one upload of 1 sample", False, "PSNR (dB)"),
        verdict="as if unprotected",
        value=100.0,
        chance=11.5,
        unprotected=100.0,
        taken_out=37,
        shown={"value": "100.0 dB", "chance": "11.5 dB", "unprotected": "100.0 dB"},
        pictures="server-closed-form.png",
    )
    unused = Finding(
        *("client/probe", "a client", "the model's function", "probe", "the model it receives", True, "accuracy"),
        verdict="not effective",
        reason="even without protection it gets 9.0 %",
        value=0.09,
        low=0.05,
        high=0.13,
        chance=0.1,
        unprotected=0.09,
        shown={"value": "9.0 %", "chance": "10.0 %", "unprotected": "9.0 %"},
    )
    for one in (rebuilt, unused):
        store.keep(one)
    store.conclude(sentences(store.findings.values()))
