"""The yardsticks that the papers hold themselves to: published systems made of parts that other schemes have too."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedveil.downlink.plain import Plain
from fedveil.downlink.sketched import Sketched, SketchedLayers
from fedveil.errors import ConfigError, spelled
from fedveil.ledger import caveats
from fedveil.ledger.releases import Caveats
from fedveil.protocol.parts import Scheme, Uplink
from fedveil.schemes.client_held import dp_fedavg
from fedveil.schemes.options import (
    CLIPPED_STEPS,
    SMALL_CLIP,
    AdaptiveOptions,
    DpOptions,
    GroupedHeadOptions,
    KeyOptions,
    LocalOptions,
    MaskOptions,
    same_sums,
)
from fedveil.schemes.registry import Setting, scheme
from fedveil.schemes.server_held import fedavg, veil_secagg
from fedveil.uplink.functional import FunctionalEncryption
from fedveil.uplink.graph import COLLUSION
from fedveil.uplink.grid import SHORT_BITS
from fedveil.uplink.lwe import WORD_BITS, LweMasked
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.uplink.selected import Choice, Selected, SelectionNoise
from fedveil.uplink.unmasking import Quorum
from fedveil.work.gradients import SketchedGradients
from fedveil.work.losses import BinaryCrossEntropy
from fedveil.work.polarised import Polarised

_VARYING = (
    "σ_t = ρᵗ·min_i(2θ/|D_i|)·√(2q·ln(1/δ)·Σ_s ρ^(−2s))/ε (Yuan et al. 2023 with ParaAegis's numbers): no bound on an "
    "update of local epochs, so no guarantee"
)
_SHARED = (
    "N(0, S²σ²/(t − 1)) by each client, t of them honest, with σ = √(2·ln(1.25/δ))/ε and ε of one round (Truex et al. "
    "2019)"
)
_PER_VALUE = "ε/c for each of the c = ⌈θ_u·d⌉ values of an epoch (Shokri and Shmatikov 2015)"
_SHRINKING = DpOptions(noise_decay=0.9)
_UNDER_MASKS = {"cover": "masks"}


@scheme(
    "secagg",
    paper="secure aggregation (Bonawitz et al. 2017, on the sparse graphs of Bell et al. 2020), a baseline of NADP-FL",
    summary="plain federated averaging; up, everything masked modulo 2^64: the server learns the sum",
    protects=(
        "client data from the server: it learns only sums (proven, with a tenth of the clients colluding, but for a "
        "chance that the ledger prints: 2^-30 a run unless cohorts are small); the model from nobody"
    ),
)
def secagg(
    setting: Setting,
    *,
    masking: MaskOptions,
    value_range: float = 2.0**24,
    collusion: float = COLLUSION,
    local: LocalOptions,
) -> Scheme:
    """`fedavg` with everything a client sends under masks; `collusion` is the share of clients they withstand."""
    plain = fedavg(setting, local=local)
    # Under masks a refusal would tell more than the sum does.
    work = replace(plain.work, refuses=False)  # type: ignore[type-var]
    return Scheme(name="secagg", downlink=Plain(), work=work, uplink=masking.masks(value_range, collusion=collusion))


@scheme(
    "varying-dp",
    paper="noise of varying amplitude (Yuan et al. 2023), a baseline of ParaAegis",
    summary="dp-fedavg with noise that shrinks by a factor each round",
    protects="all of a client's data from everybody, (ε, δ); the model from nobody",
    compared=SMALL_CLIP,
)
def varying_dp(
    setting: Setting, *, dp: DpOptions = _SHRINKING, local: LocalOptions, adaptive: AdaptiveOptions
) -> Scheme:
    """`dp-fedavg`, with 0.9 for `noise_decay` where nothing is said.

    The cited work lets ρ follow the loss as well; a ρ that depends on data would itself be a release, and is left out.
    """
    constant = dp_fedavg(setting, dp=dp, local=local, adaptive=adaptive)
    return replace(constant, name="varying-dp", caveats=Caveats(paper=_VARYING))


@scheme(
    "ppdl",
    paper="PPDL, selective sharing (Shokri and Shmatikov 2015), a baseline of accuracy-lossless perturbation",
    summary="plain averaging of a chosen part of each gradient or update, under noise of a fixed size",
    protects=(
        "nothing that is proven: less is sent, under Gaussian noise or by the sparse vector technique, of whose ε the "
        "ledger says what it comes to; the model from nobody"
    ),
)
def ppdl(
    setting: Setting,
    *,
    upload_share: float = 0.1,
    upload_choice: Choice | None = None,
    upload_noise: SelectionNoise = "gaussian",
    noise_variance: float | None = None,
    round_epsilon: float | None = None,
    cut: float | None = None,
    select_above: float = 1e-4,
    local: LocalOptions,
) -> Scheme:
    """What is largest, with N(0, v); or, with laplace, what a noisy threshold lets pass, as the original has it."""
    sparse = upload_noise == "laplace"
    idle = (
        {"upload_choice": upload_choice, "noise_variance": noise_variance}
        if sparse
        else {"round_epsilon": round_epsilon}
    )
    for name, value in idle.items():
        if value is not None:
            raise ConfigError(
                f"{spelled(name)} has no meaning with {spelled('upload_noise', upload_noise)}: leave out one of them."
            )
    uplink = Selected(
        upload_share,
        upload_choice or "largest",
        1e-3 if noise_variance is None else noise_variance,
        (1.0 if round_epsilon is None else round_epsilon) if sparse else None,
        0.001 if cut is None and sparse else cut,
        select_above,
    )
    return replace(
        fedavg(setting, local=local), name="ppdl", uplink=uplink, caveats=Caveats(paper=_PER_VALUE if sparse else "")
    )


@scheme(
    "dbcl",
    paper="DBCL, sketched weights (Zhang and Wang 2021), a baseline of accuracy-lossless perturbation",
    summary="plain averaging of gradients; clients are sent each round's model in part, by a random sketch",
    protects=(
        "nothing that is proven: clients know the sketch, and rounds together show the whole model (measured); client "
        "data from the server: not at all"
    ),
    compared={"lr": 0.0005},
)
def dbcl(
    setting: Setting, *, sketch_ratio: int = 2, sketch_layers: SketchedLayers = "all", local: LocalOptions
) -> Scheme:
    """`fedavg` under a fresh sketch a round, of every layer or of the last linear one (`head`)."""
    if not local.one_gradient:
        raise ConfigError(
            "A sketch takes exactly one gradient per round: it is undone at the broadcast point, and a second local "
            "step would start from weights of which the server cannot tell what they are without it. Leave out "
            f"{spelled('local_steps')} and {spelled('local_epochs')}, or take {spelled('scheme', 'fedavg')}."
        )
    plain, sketch = fedavg(setting, local=local), Sketched(sketch_ratio, sketch_layers)
    work = SketchedGradients(setting.loss, setting.batches, setting.vectorise, sketch=sketch)
    return replace(plain, name="dbcl", downlink=sketch, work=work)


@scheme(
    "spn",
    paper="secret polarization network (Fan et al. 2020), a baseline of accuracy-lossless perturbation",
    summary="plain averaging; every client trains on a private task too, by a head and codes of its own",
    protects=(
        "nothing that is proven: a gradient fits no public loss but in the last layer, and is read by closed forms all "
        "the same; the model from nobody"
    ),
)
def spn(
    setting: Setting,
    *,
    private_bits: int = 64,
    private_margin: float = 1.0,
    private_weight: float = 1.0,
    shared_weight: float = 1.0,
    local: LocalOptions,
) -> Scheme:
    """`fedavg` with a hinge loss on B private numbers beside the shared loss."""
    if isinstance(setting.loss, BinaryCrossEntropy):
        raise ConfigError(
            "A secret code belongs to one class, and here a sample has several labels: spn takes classes or numbers "
            f"({spelled('loss', 'cross-entropy')}, {spelled('loss', 'square')})."
        )
    plain = fedavg(setting, local=local)
    work = Polarised(
        setting.loss,
        setting.batches,
        setting.schedule,
        None if local.one_gradient else local.training(setting),
        private_bits,
        private_margin,
        shared_weight,
        private_weight,
    )
    return replace(plain, name="spn", work=work, caveats=Caveats(unprotected=(caveats.POLARISED,)))


@scheme(
    "tp-smc",
    paper="hybrid approach (Truex et al. 2019), threshold Paillier of Damgård and Jurik 2001, a baseline of MP-DP",
    summary="plain model down; up, clipped, with a share of the noise, encrypted: a quorum of clients decrypts the sum",
    protects=(
        "each client's records (with local training, all its data) from everybody, (ε, δ); single uploads from a "
        "server with fewer clients than a quorum (computational, one client is trusted to deal the key); the model "
        "from nobody"
    ),
    twin=_UNDER_MASKS,
    compared=CLIPPED_STEPS,
)
def tp_smc(setting: Setting, *, dp: DpOptions, key: KeyOptions, local: LocalOptions) -> Scheme:
    """Noise in the sum of the honest clients, and a sum that clients open together."""
    plan = NoisePlan(
        dp.target(setting), "sum", dp.accounting, collusion=key.collusion, asked=setting.cohort, decrypted=True
    )
    return Scheme(
        name="tp-smc",
        downlink=Plain(),
        work=local.clipped(setting, dp),
        uplink=key.uplink(setting, noise=plan),
        caveats=Caveats(paper=_SHARED),
    )


@scheme(
    "hybridalpha",
    paper="HybridAlpha (Xu et al. 2019), functional encryption of Abdalla et al. 2018 from DDH, a baseline of MP-DP",
    summary="plain model down; up, clipped, with a share of the noise, encrypted: a key authority lets sums be opened",
    protects=(
        "each client's records (with local training, all its data) from everybody, (ε, δ); single uploads from the "
        "server, if the key authority does not side with it (computational); the model from nobody"
    ),
    twin=_UNDER_MASKS,
    compared=CLIPPED_STEPS,
)
def hybridalpha(
    setting: Setting,
    *,
    dp: DpOptions,
    collusion: float = COLLUSION,
    cover: Literal["keys", "masks"] = "keys",
    local: LocalOptions,
) -> Scheme:
    """The noise of `tp-smc` in sums for which a third role, the key authority, gives a key a round."""
    plan = NoisePlan(
        dp.target(setting),
        "sum",
        dp.accounting,
        collusion=collusion,
        asked=setting.cohort,
        decrypted=True,
        word_bits=SHORT_BITS,
    )
    cipher = FunctionalEncryption(plan, setting.clients, setting.cohort, collusion)
    uplink: Uplink = cipher if cover == "keys" else same_sums(cipher, 2.0**24)
    return Scheme(
        name="hybridalpha",
        downlink=Plain(),
        work=local.clipped(setting, dp),
        uplink=uplink,
        caveats=Caveats(paper=_SHARED),
    )


@scheme(
    "pile",
    paper="PILE (Tang et al. 2023), without its proofs of correct gradients, a baseline of MP-DP",
    summary="veiled model down; up, everything encrypted, without proofs: a quorum of clients decrypts the sum",
    protects=(
        "single uploads from a server with fewer clients than a quorum (computational, one client is trusted to deal "
        "the key), not their sum; the model from clients up to secret scales (measured)"
    ),
    default_loss="square",
    twin=_UNDER_MASKS,
)
def pile(
    setting: Setting,
    *,
    head: GroupedHeadOptions,
    spread: float = 4.0,
    key: KeyOptions,
    value_range: float = 2.0**24,
) -> Scheme:
    """`lossless` with one γ, all of whose m + 2 tensors are encrypted; no noise is added to what clients send."""
    if head.head_groups is None and head.head_partition is None:
        head = replace(head, head_groups=1)
    veiled = veil_secagg(setting, head=head, spread=spread, masking=MaskOptions(), local=LocalOptions())
    return replace(veiled, name="pile", uplink=key.uplink(setting, value_range))


@scheme(
    "lwe-secagg",
    paper="secure aggregation by learning with errors (Stevens et al. 2022), a baseline of ParaAegis",
    summary="plain model down; up, clipped, behind masks whose errors are the noise; their secrets under pair masks",
    protects=(
        "each client's records (with local training, all its data) from everybody, (ε, δ); single uploads from the "
        "server (computational); the model from nobody"
    ),
    compared=CLIPPED_STEPS,
)
def lwe_secagg(
    setting: Setting,
    *,
    dp: DpOptions,
    masking: MaskOptions,
    collusion: float = COLLUSION,
    lwe_dimension: int = 1024,
    local: LocalOptions,
) -> Scheme:
    """The noise of `veil-dp --cover masks` without its veil, in words of 32 bits."""
    plan = masking.plan(setting, dp, collusion=collusion, word_bits=WORD_BITS)
    uplink = LweMasked(
        unmask=masking.unmask,
        quorum=Quorum(masking.threshold),
        degree=masking.neighbours,
        noise=plan,
        collusion=max(collusion, COLLUSION),
        dimension=lwe_dimension,
    )
    return Scheme(name="lwe-secagg", downlink=Plain(), work=local.clipped(setting, dp), uplink=uplink)
