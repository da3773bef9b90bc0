"""Schemes whose model lives with the clients: two protections side by side (ParaAegis), and its baselines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fedveil.client_held.ciphers import Cipher, Ckks, Pads
from fedveil.client_held.divided import Parallel, Voting
from fedveil.downlink.plain import Kept, Plain
from fedveil.errors import ConfigError, spelled
from fedveil.ledger.releases import Caveats
from fedveil.protocol.parts import Scheme
from fedveil.schemes.options import SMALL_CLIP, AdaptiveOptions, DpOptions, LocalOptions, MaskOptions
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.uplink.noised import Noised
from fedveil.uplink.vote import Ratio, Strategy
from fedveil.work.clipping import ClippedUpdate, DividedUpdate

CipherName = Literal["ckks", "pads"]
VALUE_RANGE = 256.0
_PAPER = "σ = min_i(2θ/|D_i|)·√(2qT·ln(1/δ))/ε (ParaAegis): no bound on an update of local epochs, so no guarantee"


@dataclass(frozen=True)
class CipherOptions:
    """What hides from a server that adds: CKKS, in a ring and at a scale, or pads."""

    cipher: CipherName = "ckks"
    ckks_degree: int | None = None
    ckks_scale: int | None = None
    value_range: float = VALUE_RANGE

    def hiding(self, masking: MaskOptions) -> Cipher:
        """The cipher, or why there is none such."""
        masks = masking.masks(self.value_range)  # refuses nonsense also where it is not used
        if self.cipher == "ckks":
            return Ckks(self.value_range, self.ckks_degree, self.ckks_scale)
        for name in ("ckks_degree", "ckks_scale"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{spelled(name)} is of {spelled('cipher', 'ckks')}, and the cipher here is {self.cipher}: leave "
                    "it out."
                )
        return Pads(masks)


def _plan(setting: Setting, dp: DpOptions) -> NoisePlan:
    return NoisePlan(dp.target(setting), "local", dp.accounting, per_sample=True)


@scheme(
    "dp-fedavg",
    paper="DP-FedAvg (Wei et al. 2020, client level), a baseline of ParaAegis",
    summary="local epochs; every client clips its update and adds enough Gaussian noise for itself",
    protects="all of a client's data from everybody, (ε, δ); the model from nobody",
    compared=SMALL_CLIP,
)
def dp_fedavg(setting: Setting, *, dp: DpOptions, local: LocalOptions, adaptive: AdaptiveOptions) -> Scheme:
    """A clipped update under local noise."""
    return Scheme(
        name="dp-fedavg",
        downlink=Plain(),
        work=ClippedUpdate(
            local.training(setting, epochs=1),
            dp.clip,
            adaptive.rule(),
            clip_decay=dp.shrinking(setting),
            statistics=dp.by_paper,
        ),
        uplink=Noised(_plan(setting, dp)),
        caveats=Caveats(paper=_PAPER),
    )


@scheme(
    "ckks-fedavg",
    paper="CKKS-FedAvg, a baseline of ParaAegis",
    summary="local epochs; updates travel encrypted, the server adds ciphertexts, the model lives with the clients",
    protects=(
        "client data and the model from the server (computational; with ckks, while no client sides with it); from "
        "clients: only sums, without a bound"
    ),
)
def ckks_fedavg(
    setting: Setting,
    *,
    ciphering: CipherOptions,
    local: LocalOptions,
    masking: MaskOptions,
) -> Scheme:
    """Everything hidden, nothing noised."""
    hiding = ciphering.hiding(masking)
    return Scheme(
        name="ckks-fedavg",
        downlink=Kept(),
        work=replace(local.training(setting, epochs=1), refuses=False),
        uplink=Parallel(Ratio(1.0), hiding),
        holder="clients",
    )


@scheme(
    "serial",
    paper="noise, then CKKS on everything: a baseline of ParaAegis",
    summary="local epochs; updates are clipped, noised and then encrypted; the model lives with the clients",
    protects="all of a client's data from everybody, (ε, δ); the model from the server (computational)",
    compared=SMALL_CLIP,
)
def serial(
    setting: Setting,
    *,
    dp: DpOptions,
    ciphering: CipherOptions,
    local: LocalOptions,
    masking: MaskOptions,
) -> Scheme:
    """Everything noised, then everything hidden."""
    hiding = ciphering.hiding(masking)
    return Scheme(
        name="serial",
        downlink=Kept(),
        work=DividedUpdate(local.training(setting, epochs=1), dp.clip, reports=False, clip_decay=dp.shrinking(setting)),
        uplink=Parallel(Ratio(1.0), hiding, _plan(setting, dp), throughout=True),
        holder="clients",
        caveats=Caveats(paper=_PAPER),
    )


@scheme(
    "paraaegis",
    paper="ParaAegis",
    summary=(
        "local epochs; a private vote picks the share of the update that travels hidden, the rest is clipped and "
        "noised; the model lives with the clients"
    ),
    protects=(
        "client data from the server: the hidden share computationally (with ckks, while no client sides with it), "
        "the rest (ε, δ) given what is hidden; from clients: only sums, without a bound; the model from the server, "
        "where it is hidden"
    ),
    compared=SMALL_CLIP,
)
def paraaegis(
    setting: Setting,
    *,
    share: float = 0.1,
    share_decay: float = 1.0,
    strategy: Strategy = "max",
    vote: Voting = "tags",
    ciphering: CipherOptions,
    dp: DpOptions,
    local: LocalOptions,
    masking: MaskOptions,
) -> Scheme:
    """`share` 0 is dp-fedavg, 1 is ckks-fedavg."""
    ratio = Ratio(share, share_decay)
    everything = (share, share_decay) == (1.0, 1.0)
    hiding = ciphering.hiding(masking)
    votes = share > 0 and not everything and strategy != "random"
    ballots = Pads(masking.masks(1.0)) if votes and vote == "histogram" else None
    training = local.training(setting, epochs=1)
    noised = DividedUpdate(training, dp.clip, reports=share > 0, clip_decay=dp.shrinking(setting))
    return Scheme(
        name="paraaegis",
        downlink=Kept(),
        work=replace(training, refuses=False) if everything else noised,
        uplink=Parallel(
            ratio,
            hiding if share > 0 else None,
            None if everything else _plan(setting, dp),
            strategy,
            ballots,
        ),
        holder="clients",
        caveats=Caveats(paper="" if everything else _PAPER),
    )
