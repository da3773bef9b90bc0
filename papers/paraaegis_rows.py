"""ParaAegis's rows: which scheme each is, how much of the model it encrypts, and on what it is run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Cipher = Literal["none", "ckks", "pads"]

TRAINED_UNDER = "pads"
"""Full-size cells train under pads: the same sums as under CKKS up to rounding to 2⁻²⁰, in a fraction of the time."""

PARTITIONS: dict[str, dict[str, object]] = {
    "iid": {"partition": "iid"},
    "dirichlet-1": {"partition": "dirichlet", "alpha": 1.0},
    "dirichlet-0.5": {"partition": "dirichlet", "alpha": 0.5},
}
PARTITION_TITLES = {"iid": "IID", "dirichlet-1": "Dir(1)", "dirichlet-0.5": "Dir(0.5)"}


@dataclass(frozen=True)
class Row:
    """One algorithm of Table 1.

    `encrypted` is the share r of the parameters under the cipher in the first round, multiplied by `decay`
    every round. A row with a `twin` trains what its twin trains by construction, up to rounding.
    """

    label: str
    title: str
    scheme: str
    encrypted: float = 0.0
    decay: float = 1.0
    cipher: Cipher = "none"
    noisy: bool = False
    twin: str | None = None
    usual: bool = True
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def votes(self) -> bool:
        """Whether clients elect what is encrypted."""
        return self.scheme == "paraaegis" and self.encrypted < 1.0

    def mean_share(self, rounds: int) -> float:
        """r̄ = r·(1 − λᵀ)/(T·(1 − λ)): the encrypted share of a mean round."""
        if math.isclose(self.decay, 1.0):
            return self.encrypted
        return self.encrypted * (1.0 - self.decay**rounds) / (rounds * (1.0 - self.decay))


def _static(percent: int) -> Row:
    share = percent / 100
    options: dict[str, object] = {"share": share}
    return Row(f"r{percent}", f"ParaAegis {percent} %", "paraaegis", share, 1.0, "ckks", True, options=options)


def _dynamic(percent: int, decay: float, *, usual: bool = False) -> Row:
    share = percent / 100
    return Row(
        f"r{percent}-x{decay:g}",
        f"ParaAegis {percent} % × {decay:g}",
        "paraaegis",
        share,
        decay,
        "ckks",
        True,
        usual=usual,
        options={"share": share, "share_decay": decay},
    )


STATIC = tuple(_static(percent) for percent in (1, 5, 10, 20))
ROWS = (
    Row("fedavg", "FedAvg", "fedavg"),
    Row("dp-fedavg", "DP-FedAvg", "dp-fedavg", noisy=True),
    Row("ckks-fedavg", "CKKS-FedAvg", "ckks-fedavg", 1.0, cipher="ckks", twin="fedavg", usual=False),
    Row("serial", "Serial", "serial", 1.0, cipher="ckks", noisy=True, twin="dp-fedavg", usual=False),
    *STATIC,
    _dynamic(5, 0.99),
    _dynamic(10, 0.99, usual=True),
    _dynamic(10, 0.95),
    _dynamic(10, 0.9),
    Row(
        "pads100",
        "ours: pads, 100 %",
        "paraaegis",
        1.0,
        cipher="pads",
        twin="fedavg",
        usual=False,
        options={"share": 1.0},
    ),
)
BY_LABEL = {row.label: row for row in ROWS}
DIAL = ("dp-fedavg", *(row.label for row in STATIC), "ckks-fedavg")
"""From r = 0 to r = 100 %."""

DIAL_NAMES = ("0 % (DP-FedAvg)", *(f"{100 * row.encrypted:g} %" for row in STATIC), "100 % (CKKS-FedAvg)")


@dataclass(frozen=True)
class Bench:
    """A data set with a network and the settings of its federation."""

    name: str
    data: str
    shape: tuple[int, ...]
    network: Mapping[str, object]
    federation: Mapping[str, object]
    noise: Mapping[str, object]
    words: str
    usual: bool = True
    outputs: int = 10
    trained_under: Cipher = TRAINED_UNDER  # type: ignore[assignment]

    @property
    def rounds(self) -> int:
        """T."""
        return _whole(self.federation["rounds"])

    @property
    def clients(self) -> int:
        """N."""
        return _whole(self.federation["clients"])

    def cell(self, partition: str, row: str) -> str:
        """The name of the cell that trains a row."""
        return f"{self.name}/{partition}/{row}"

    def cost(self, row: str) -> str:
        """The name of the cell that times a row's protection."""
        return f"{self.name}/cost/{row}"

    @property
    def pace(self) -> str:
        """The name of the cell that times training alone."""
        return f"{self.name}/pace"

    def settings(
        self, row: Row, partition: str, *, cipher: Cipher | None = None, **changes: object
    ) -> dict[str, object]:
        """A row's run."""
        under = row.cipher if row.cipher == "none" else cipher or self.trained_under
        return {
            "dataset": self.data,
            **self.network,
            **self.federation,
            **PARTITIONS[partition],
            "scheme": row.scheme,
            **(self.noise if row.noisy else {}),
            **row.options,
            **({} if under == "none" else {"cipher": under}),
            **changes,
        }


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value


PAPER_FEDERATION: dict[str, object] = {
    "clients": 10,
    "rounds": 50,
    "local_epochs": 3,
    "batch_size": 32,
    "lr": 0.01,
    "loss": "cross-entropy",
}
PAPER_NOISE: dict[str, object] = {"epsilon": 1.0, "delta": 1e-5, "clip": 1.0, "accounting": "paper"}
_RESNET: dict[str, object] = {"model": "resnet18", "model_options": {"norm": "group"}}

_STEM7: dict[str, object] = {"model": "resnet18", "model_options": {"norm": "group", "stem": "large"}}


def _stem7(name: str, epsilon: float, words: str, *, usual: bool) -> Bench:
    noise = {**PAPER_NOISE, "epsilon": epsilon}
    return Bench(name, "imagenette", (3, 64, 64), _STEM7, PAPER_FEDERATION, noise, words, usual=usual)


BENCHES = (
    _stem7(
        "imagenette",
        1.0,
        "Imagenette at 64 × 64, ResNet-18 with GroupNorm and the usual 7 × 7 stem with pooling (maps of 16 to 2 px)",
        usual=True,
    ),
    _stem7("imagenette-30", 30.0, "the same with the noise of ε = 30 by the paper's formula, a thirtieth", usual=False),
    _stem7(
        "imagenette-100", 100.0, "the same with the noise of ε = 100 by the paper's formula, a hundredth", usual=False
    ),
    Bench(
        "imagenette-stem3",
        "imagenette",
        (3, 64, 64),
        _RESNET,
        PAPER_FEDERATION,
        PAPER_NOISE,
        "Imagenette at 64 × 64, ResNet-18 with GroupNorm and a 3 × 3 stem (maps of 64 to 8 pixels: fifteen times the "
        "work)",
        usual=False,
    ),
    Bench(
        "cifar10",
        "cifar10",
        (3, 32, 32),
        _RESNET,
        PAPER_FEDERATION,
        PAPER_NOISE,
        "CIFAR-10, ResNet-18 with GroupNorm and the 3 × 3 stem",
        usual=False,
    ),
)
QUICK = Bench(
    "digits",
    "digits",
    (1, 8, 8),
    {"model": "mlp", "model_options": {"depth": 3, "width": 256}},
    {**PAPER_FEDERATION, "rounds": 10, "lr": 0.3},
    {**PAPER_NOISE, "epsilon": 0.5},
    "digits, mlp 64-256-256-10, 10 rounds, learning rate 0.3, ε = 0.5 by the paper's formula, real CKKS in training",
    trained_under="ckks",
)
