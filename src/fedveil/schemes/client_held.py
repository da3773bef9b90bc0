"""Schemes whose model lives with the clients: two protections side by side (ParaAegis), and its baselines."""

from __future__ import annotations

from dataclasses import replace

from fedveil.client_held.ciphers import Cipher, Ckks, Pads
from fedveil.client_held.divided import VOTES, Parallel, Voting
from fedveil.downlink.plain import Kept, Plain
from fedveil.errors import ConfigError, unknown_name
from fedveil.ledger.releases import Remarks
from fedveil.protocol.parts import Scheme
from fedveil.schemes import caveats as remarks
from fedveil.schemes.hardened import masked_assumptions
from fedveil.schemes.noised import CLIP, DELTA, EPSILON, target_of
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.masked import Masked, Unmasking
from fedveil.uplink.noise_plan import Accounting, NoisePlan
from fedveil.uplink.noised import Noised
from fedveil.uplink.unmasking import Quorum
from fedveil.uplink.vote import Ratio, Strategy
from fedveil.work.clipping import ClippedUpdate, DividedUpdate
from fedveil.work.local_sgd import LocalSteps

CIPHERS = ("ckks", "pads")
VALUE_RANGE = 256.0
_PAPER = "σ = min_i(2θ/|D_i|)·√(2qT·ln(1/δ))/ε (ParaAegis): no bound on an update of local epochs, so no guarantee"


def _local(setting: Setting, steps: int | None, epochs: int | None) -> LocalSteps:
    if steps is not None and epochs is not None:
        raise ConfigError("Give local_steps or local_epochs, not both.")
    if steps is None and epochs is None:
        epochs = 1
    return LocalSteps(setting.loss, setting.batches, setting.schedule, steps, epochs)


def _cipher(
    setting: Setting, name: str, value_range: float, unmask: Unmasking, threshold: float, neighbours: int | None
) -> tuple[Cipher, tuple[str, ...]]:
    """The cipher, and what hiding under it assumes."""
    if name not in CIPHERS:
        raise unknown_name("cipher", name, CIPHERS)
    masks = Masked(value_range, unmask, Quorum(threshold), neighbours)  # refuses nonsense also where it is not used
    if name == "ckks":
        return Ckks(value_range), (remarks.LATTICE, remarks.SHARED_KEY, remarks.UNCHANGED, remarks.LENDERS)
    return Pads(masks), (remarks.GROUP, *masked_assumptions(setting, masks), remarks.UNCHANGED, remarks.LENDERS)


def _plan(setting: Setting, epsilon: float, delta: float, accounting: Accounting) -> NoisePlan:
    return NoisePlan(target_of(setting, epsilon, delta), "local", accounting, per_sample=True)


def _given(votes: bool, *, tags: bool) -> tuple[str, ...]:
    """What the figure for the noised rest takes as given, and where there is one that does not."""
    given = remarks.GIVEN_WINNERS if votes else remarks.GIVEN_SUMS
    return (given,) if votes and tags else (given, remarks.IN_ANY_CASE)


@scheme(
    "dp-fedavg",
    paper="DP-FedAvg (Wei et al. 2020, client level), a baseline of ParaAegis",
    summary="local epochs; every client clips its update and adds enough Gaussian noise for itself",
    protects="all of a client's data from everybody, (ε, δ); the model from nobody",
)
def dp_fedavg(
    setting: Setting,
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    clip: float = CLIP,
    accounting: Accounting = "exact",
    local_steps: int | None = None,
    local_epochs: int | None = None,
) -> Scheme:
    """A clipped update under local noise."""
    return Scheme(
        name="dp-fedavg",
        downlink=Plain(),
        work=ClippedUpdate(_local(setting, local_steps, local_epochs), clip),
        uplink=Noised(_plan(setting, epsilon, delta, accounting)),
        remarks=Remarks(assumptions=(remarks.OWN_NOISE,), unprotected=(remarks.MODEL_OPEN,), paper=_PAPER),
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
    cipher: str = "ckks",
    local_steps: int | None = None,
    local_epochs: int | None = None,
    value_range: float = VALUE_RANGE,
    unmask: Unmasking = "always",
    threshold: float = 2 / 3,
    neighbours: int | None = None,
) -> Scheme:
    """Everything hidden, nothing noised."""
    hiding, assumed = _cipher(setting, cipher, value_range, unmask, threshold, neighbours)
    return Scheme(
        name="ckks-fedavg",
        downlink=Kept(),
        work=replace(_local(setting, local_steps, local_epochs), refuses=False),
        uplink=Parallel(Ratio(1.0), hiding),
        holder="clients",
        remarks=Remarks(
            assumptions=(remarks.KEYS, *assumed, remarks.START),
            unprotected=(remarks.SUMS_OPEN, remarks.DIFFERENCES, remarks.MODEL_WITH_CLIENTS, remarks.FORGED),
        ),
    )


@scheme(
    "serial",
    paper="noise, then CKKS on everything: a baseline of ParaAegis",
    summary="local epochs; updates are clipped, noised and then encrypted; the model lives with the clients",
    protects="all of a client's data from everybody, (ε, δ); the model from the server (computational)",
)
def serial(
    setting: Setting,
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    clip: float = CLIP,
    accounting: Accounting = "exact",
    cipher: str = "ckks",
    local_steps: int | None = None,
    local_epochs: int | None = None,
    value_range: float = VALUE_RANGE,
    unmask: Unmasking = "always",
    threshold: float = 2 / 3,
    neighbours: int | None = None,
) -> Scheme:
    """Everything noised, then everything hidden."""
    hiding, assumed = _cipher(setting, cipher, value_range, unmask, threshold, neighbours)
    return Scheme(
        name="serial",
        downlink=Kept(),
        work=DividedUpdate(_local(setting, local_steps, local_epochs), clip, reports=False),
        uplink=Parallel(Ratio(1.0), hiding, _plan(setting, epsilon, delta, accounting), throughout=True),
        holder="clients",
        remarks=Remarks(
            assumptions=(remarks.KEYS, remarks.OWN_NOISE, *assumed, remarks.START),
            unprotected=(remarks.MODEL_WITH_CLIENTS, remarks.FORGED),
            paper=_PAPER,
        ),
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
)
def paraaegis(
    setting: Setting,
    *,
    share: float = 0.1,
    share_decay: float = 1.0,
    strategy: Strategy = "max",
    vote: Voting = "tags",
    cipher: str = "ckks",
    epsilon: float = EPSILON,
    delta: float = DELTA,
    clip: float = CLIP,
    accounting: Accounting = "exact",
    local_steps: int | None = None,
    local_epochs: int | None = None,
    value_range: float = VALUE_RANGE,
    unmask: Unmasking = "always",
    threshold: float = 2 / 3,
    neighbours: int | None = None,
) -> Scheme:
    """`share` 0 is dp-fedavg, 1 is ckks-fedavg."""
    ratio = Ratio(share, share_decay)
    if vote not in VOTES:
        raise unknown_name("vote", vote, VOTES)
    everything = (share, share_decay) == (1.0, 1.0)
    hiding, assumed = _cipher(setting, cipher, value_range, unmask, threshold, neighbours)
    votes = share > 0 and not everything and strategy != "random"
    ballots = Pads(Masked(1.0, unmask, Quorum(threshold), neighbours)) if votes and vote == "histogram" else None
    local = _local(setting, local_steps, local_epochs)
    noised = (remarks.OWN_NOISE, *(_given(votes, tags=ballots is None) if share > 0 else ()))
    if ballots is not None:
        assumed = tuple(dict.fromkeys((*assumed, remarks.GROUP, *masked_assumptions(setting, ballots.masks))))
    return Scheme(
        name="paraaegis",
        downlink=Kept(),
        work=replace(local, refuses=False) if everything else DividedUpdate(local, clip, reports=share > 0),
        uplink=Parallel(
            ratio,
            hiding if share > 0 else None,
            None if everything else _plan(setting, epsilon, delta, accounting),
            strategy,
            ballots,
        ),
        holder="clients",
        remarks=Remarks(
            assumptions=(
                remarks.KEYS,
                *(() if everything else noised),
                *(assumed if share > 0 else ()),
                remarks.START,
            ),
            unprotected=(
                *(((remarks.TAGS,) if ballots is None else (remarks.COUNTS,)) if votes else ()),
                *((remarks.SUMS_OPEN, remarks.DIFFERENCES) if share > 0 else ()),
                *(() if everything else (remarks.REST_OPEN if share > 0 else remarks.CHANGES_OPEN,)),
                remarks.MODEL_WITH_CLIENTS,
                remarks.FORGED,
            ),
            paper="" if everything else _PAPER,
        ),
    )
