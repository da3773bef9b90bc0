"""What a run is: one flat, validated description. TOML in, TOML out."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError, spelled, unknown_name
from fedveil.own_code import OwnCode
from fedveil.plain import (
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARES,
    Check,
    ModelOption,
    augmenting,
    checked_setting,
    declare,
    list_of,
    numbers_of,
    toml_of,
    typed_list,
    up_to,
)

OBJECT = "python:"
"""How a setting begins that was given as an object from Python: no file or command can stand for it."""

_DATA, _TRAIN, _VEIL, _PRIVACY, _MASKS = "Data", "Training", "Veil", "Privacy", "Masks"
_HIDDEN, _LIMITS, _MACHINE, _AUDIT, _BAD = "Hidden share", "Clients' own limits", "Machine", "Audit", "Bad uploads"
PANELS = ("", _DATA, _TRAIN, _VEIL, _PRIVACY, _MASKS, _HIDDEN, _BAD, _LIMITS, _MACHINE, _AUDIT)
"""In which order settings stand in the help; within a panel, as they are declared."""

_STEPS = up_to(10**7)
_AUGMENTED: Check = (
    lambda value: value.startswith(OBJECT) or bool(augmenting(value)),
    "must be a list of crop, flip and cutout, each once, with sizes of 1 or more if you like: crop:4,flip,cutout:8",
)
ADAPTIVE = ("adam", "adagrad", "yogi")
# Settings that mean something beside others alone.
_BELONGS: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "lr_steps": ("lr_schedule", ("step",)),
    "lr_drop": ("lr_schedule", ("step",)),
    "lr_power": ("lr_schedule", ("polynomial",)),
    "momentum": ("optimiser", ("sgd", None)),
    "beta1": ("optimiser", ADAPTIVE),
    "beta2": ("optimiser", ("adam", "yogi")),
    "tau": ("optimiser", ADAPTIVE),
    "client_momentum": ("client_optimiser", ("sgd", None)),
    "client_beta1": ("client_optimiser", ("adam",)),
    "client_beta2": ("client_optimiser", ("adam",)),
    "client_tau": ("client_optimiser", ("adam",)),
}

_option = functools.partial(declare, of_scheme=True)
_later = functools.partial(_option, _PRIVACY, before=None)
_recipe = functools.partial(declare, _TRAIN, before=None)
_local = functools.partial(_option, _TRAIN, before=None)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every setting of a run, declared once: flags, TOML, `fedveil.train` and their help follow from it.

    None means: the scheme's or the data's own default.
    """

    scheme: str = declare("", "Named scheme (see `fedveil schemes`), or file.py:function of your own.", "lossless")
    dataset: str = declare(_DATA, "digits, breast-cancer, a file or folder, or file.py:function of your own.", "digits")
    model: str = declare(_TRAIN, "Model name, or package.module:factory.", "mlp")
    model_options: dict[str, ModelOption] = field(
        default_factory=dict, metadata={"help": "key=value, repeatable: -o depth=5.", "panel": _TRAIN}
    )
    options: dict[str, ModelOption] | None = field(
        default=None,
        metadata={"help": "An option of your own scheme, repeatable: --set keep=0.2 (see `fedveil schemes SCHEME`)."},
    )
    clients: int = declare(
        _TRAIN,
        "Number of clients; 0: one per site or group.",
        10,
        shown="10; sites: one each",
        check=up_to(1 << 20, least=0),
    )
    rounds: int = declare(_TRAIN, "Number of rounds.", 50, check=up_to(10**7), shapes_run=False)
    seed: int | None = declare(
        _MACHINE,
        "Reproducible run; its secrets are simulated.",
        check=(lambda value: 0 <= value < 1 << 63, "must lie between 0 and 2^63 − 1"),
    )
    secrets: str | None = declare(_MACHINE, "os, or seeded (a simulation).", choices=("os", "seeded"))

    target: str | None = declare(_DATA, "CSV: the column to predict.")
    task: str | None = declare(
        _DATA,
        "classification, regression or multilabel (several labels of 0 and 1).",
        choices=("classification", "regression", "multilabel"),
    )
    text: str | None = declare(_DATA, "CSV: the column of texts.")
    group: str | None = declare(
        _DATA, "CSV, npz: the column of patients, writers …: no two parts of the data share one."
    )
    site: str | None = declare(
        _DATA, "CSV, npz: the column of hospitals, banks …: each holds out samples of its own.", before=None
    )
    picture_size: int | None = declare(
        _DATA,
        "Picture folders: resize to this many pixels a side; predictions then do the same.",
        shown="all have one size",
        check=POSITIVE,
        before=None,
    )
    test_fraction: float = declare(_DATA, "Share held out where there is no test part.", 0.2)
    validation_fraction: float = declare(
        _DATA, "Share held out to validate by, beside the test part.", 0.0, shown="none", check=BELOW_ONE, before=0.0
    )
    client_test_fraction: float | None = declare(
        _DATA,
        "Schemes under masks: share of its own samples that each client holds back, to judge the model by.",
        shown="none",
        check=(lambda value: 0 < value < 1, "must lie between 0 and 1"),
        before=None,
    )
    split: str = declare(
        _DATA,
        "stratified: classes in equal shares; random: not; rows: row by row, whatever belongs together.",
        "auto",
        shown="auto: stratified with groups or sites, else random",
        choices=("auto", "random", "stratified", "rows"),
        before="rows",
    )
    partition: str = declare(
        _DATA, "iid, dirichlet, size, group, site, replacement.", "iid", shown="iid; with --site, site"
    )
    alpha: float = declare(_DATA, "dirichlet: concentration.", 0.5)
    ratio: float = declare(_DATA, "size: largest client over smallest.", 2.0)

    cohort: float | int | None = declare(_TRAIN, "Clients per round: 0.1 (a fraction) or 5 (a count).", shown="all")
    sampling_rate: float | None = _recipe("Instead: each client's probability to be in a round.", check=SHARE)
    batch_size: int = declare(_TRAIN, "Samples per step; 0 takes all.", 0, check=NOT_NEGATIVE)
    lr: float | str | None = declare(
        _TRAIN,
        "Learning rate; auto: found by short trials (not where privacy is accounted for).",
        shown="0.1; for the square loss 0.02; for adam, adagrad and yogi 0.01; for --client-optimiser adam 0.001; "
        "beside --client-lr 1",
        check=(
            lambda value: value == "auto" if isinstance(value, str) else value > 0,
            "must be a positive number, or auto",
        ),
    )
    lr_decay: float = declare(_TRAIN, "Factor on the rate per round.", 1.0, check=POSITIVE)
    lr_schedule: str = declare(
        _TRAIN,
        "constant; cosine, to 0 at the end; step, by --lr-drop after each of --lr-steps; polynomial, to 0 with "
        "--lr-power.",
        "constant",
        choices=("constant", "cosine", "step", "polynomial"),
    )
    warm_up: float | None = _recipe(
        "Share of the rounds in which the rate grows to what it is: 0.05. Where training diverges at once, try this.",
        shown="none",
        check=BELOW_ONE,
    )
    lr_steps: str | None = _recipe("step: after which shares of rounds.", shown="0.5,0.75", check=SHARES, listed=float)
    lr_drop: float | None = _recipe("step: the factor each time, up to 1.", shown="0.1", check=SHARE)
    lr_power: float | None = _recipe("polynomial: the power.", shown="1", check=POSITIVE)
    momentum: float = declare(_TRAIN, "Server momentum, of sgd.", 0.0, check=BELOW_ONE)
    weight_decay: float = declare(_TRAIN, "Server weight decay.", 0.0, check=NOT_NEGATIVE)
    optimiser: str | None = _recipe(
        "The server's: sgd, adam, adagrad or yogi, on the recovered gradient or the mean update (then with "
        "--client-lr).",
        shown="sgd",
        choices=("sgd", *ADAPTIVE),
    )
    beta1: float | None = _recipe("adam, adagrad, yogi: momentum β₁.", shown="0.9; adagrad 0", check=BELOW_ONE)
    beta2: float | None = _recipe("adam, yogi: β₂ of squares.", shown="0.99", check=BELOW_ONE)
    tau: float | None = _recipe("adam, adagrad, yogi: τ, beside √v.", shown="0.001", check=POSITIVE)
    augment: str | None = _recipe(
        "Pictures of training, drawn anew each time: crop,flip,cutout, or with sizes crop:4,flip,cutout:8.",
        shown="as they are",
        check=_AUGMENTED,
        listed=str,
    )
    loss: str | None = declare(
        _TRAIN,
        "square, cross-entropy or binary-cross-entropy.",
        shown="square where there can be head noise; else cross-entropy for classes, binary for several labels",
        choices=("square", "cross-entropy", "binary-cross-entropy"),
    )
    target_scale: float = declare(_TRAIN, "Square loss: the true class's target M.", 1.0)
    true_weight: float = declare(_TRAIN, "Square loss: the true class's weight k.", 1.0)
    class_weights: str | None = _recipe(
        "How much a sample of each class counts: 1,4.5,2; or balanced: by the training part's counts, in simulations "
        "of schemes that promise nothing about data.",
        shown="1 each",
    )
    label_smoothing: float = declare(
        _TRAIN, "Share of a sample's target that goes to all classes alike.", 0.0, check=BELOW_ONE, before=0.0
    )
    weights: str | None = _recipe(
        "Begin with the weights in this file: .safetensors, or a state_dict (.pt, .pth).", shown="drawn by the seed"
    )
    early_stopping: int | None = _recipe(
        "Stop after so many evaluations without a better --monitor.", check=POSITIVE, shapes_run=False
    )
    monitor: str | None = _recipe(
        "The figure that tells the best round, as metrics.jsonl has it: validation_loss, validation_accuracy, loss. "
        "Its model is kept too (best.safetensors).",
        shown="validation_loss where there is a validation part",
        shapes_run=False,
    )
    target_accuracy: float | None = _recipe(
        "summary.json says in which round, and after how many seconds of training, the test accuracy was this: 0.65.",
        check=SHARE,
        shapes_run=False,
    )

    local_steps: int | None = _option(
        _TRAIN,
        "fedavg, secagg, ldp, cdp, nadp, tp-smc, hybridalpha, lwe-secagg, paraaegis: local steps per round.",
        shown="1; more make a client the unit",
        check=_STEPS,
    )
    local_epochs: int | None = _option(
        _TRAIN,
        "fedavg, secagg, ldp, cdp, nadp, tp-smc, hybridalpha, lwe-secagg, paraaegis: local epochs per round.",
        shown="paraaegis and its baselines 1",
        check=_STEPS,
    )
    client_lr: float | None = _local(
        "Local training: the clients' own rate; --lr and its schedule are then the server's, on their mean update.",
        shown="--lr, and the server takes updates whole",
        check=POSITIVE,
    )
    client_optimiser: str | None = _local(
        "Local training: sgd, or adam, which begins anew in every round; under a veil with --family signed.",
        shown="sgd",
        choices=("sgd", "adam"),
    )
    client_momentum: float | None = _local(
        "Local training: momentum of sgd, from 0 in every round.", shown="0", check=BELOW_ONE
    )
    client_weight_decay: float | None = _local(
        "Local training: weight decay; of adam decoupled from its gradients, as AdamW has it.",
        shown="0",
        check=NOT_NEGATIVE,
    )
    client_beta1: float | None = _local("Local training by adam: momentum β₁.", shown="0.9", check=BELOW_ONE)
    client_beta2: float | None = _local("Local training by adam: β₂ of squares.", shown="0.999", check=BELOW_ONE)
    client_tau: float | None = _local(
        "Local training by adam: τ, beside √v (torch's eps).", shown="1e-8", check=POSITIVE
    )
    head_noise: bool | None = _option(_VEIL, "Noise on the last layer.", shown="on")
    stream_rotations: bool | None = _option(
        _VEIL,
        "Fold the gains of LayerNorm and RMSNorm into the linear layers that read them, so that residual streams are "
        "rotated in secret; with family full or isometry and one gradient a round.",
        shown="off",
        before=None,
    )
    head_groups: int | None = _option(
        _VEIL, "Head noise: number m of secret γ.", shown="one per output; pbpfl: 1", check=up_to(1 << 20)
    )
    head_partition: str | None = _option(
        _VEIL,
        "Head noise: which outputs share a γ, as one number from 0 for each output: 0,0,1,1,2.",
        shown="in equal parts, drawn every round",
        listed=float,
        before=None,
    )
    head_strength: float | None = _option(_VEIL, "Head noise relative to the outputs.", shown="1")
    spread: float | None = _option(
        _VEIL, "Scales lie in 1/spread … spread; set for veil-dp, it takes them.", shown="4; veil-dp: 1.5"
    )
    epsilon: float | None = _option(
        _PRIVACY, "ε of the whole run; for mpdp, mpdp-naive and mp-cdp of one round.", shown="3"
    )
    epsilon_per_client: str | None = _later(
        "ε of each client, in their order: 1,2,4. Noise of a client's own is made for its own; shared noise for the "
        "strictest.",
        listed=float,
    )
    delta: float | None = _option(_PRIVACY, "δ.", shown="1e-5")
    clip: float | None = _option(
        _PRIVACY, "Largest L2 norm of a sample's gradient; of an update, with local training.", shown="1"
    )
    adaptive_clip: bool | None = _later(
        "dp-fedavg, varying-dp; ldp, cdp, nadp with local training: the clip begins with --clip and follows updates.",
        shown="no",
    )
    clip_quantile: float | None = _later("adaptive clip: the share of updates that should be within it.", shown="0.5")
    clip_rate: float | None = _later("adaptive clip: how fast it moves, up to 1.", shown="0.2")
    clip_share: float | None = _later("adaptive clip: share of every round's μ² that pays for it.", shown="0.1")
    clip_range: float | None = _later("adaptive clip: within how many times --clip it stays.", shown="10")
    noise_decay: float | None = _later("Factor on the deviation of noise, each round.", shown="1; varying-dp: 0.9")
    clip_decay: float | None = _later("Factor on the clip, each round, and on the noise with it.", shown="1")
    accounting: str | None = _option(
        _PRIVACY, "exact: the least noise that meets ε; paper: what the paper's formula says.", shown="exact"
    )
    collusion: float | None = _option(
        _PRIVACY,
        "nadp, veil-dp, veil-secagg, secagg, tp-smc, hybridalpha, pile, lwe-secagg: share of clients that may side "
        "with the server.",
        shown="noise: 0; masks and shared keys: 0.1",
    )
    pair_strength: float | None = _option(
        _PRIVACY,
        "nadp, veil-dp, mpdp: how strong the noise is that cancels.",
        shown="10, on a sparse graph what that calls for; the paper's with --accounting paper or --dropouts tolerate",
    )
    dropouts: str | None = _option(
        _PRIVACY,
        "nadp, veil-dp: what becomes of noise shared with missing clients. repair or tolerate.",
        shown="repair",
    )
    repair_limit: float | None = _option(
        _PRIVACY, "nadp, veil-dp: largest share of a cohort that clients repair for.", shown="1/3"
    )
    honest_arrivals: bool | None = _option(
        _PRIVACY, "nadp, veil-dp: take the server's word for who did not arrive.", shown="no"
    )
    neighbours: int | None = _option(
        _PRIVACY,
        "With how many others each client shares masks (an even number), or how many it picks to share noise with.",
        shown="as many as collusion calls for; all up to 128 clients for noise, up to 32 for masks; mpdp: 5",
    )
    sensitivity: float | None = _option(
        _PRIVACY, "mpdp, mpdp-naive, mp-cdp: S, how long gradients are taken to be.", shown="1", before=None
    )
    calibration: str | None = _option(
        _PRIVACY,
        "mpdp, mpdp-naive, mp-cdp: σ by their paper's equations, or by a tail bound (as FedVeil had it first).",
        shown="equations",
        before="tail",
        before_of=("mpdp", "mpdp-naive", "mp-cdp"),
    )
    sigma_own: float | None = _later(
        "mpdp: σ_η itself, the deviation of what each client adds for itself to its gradient, instead of ε."
    )
    sigma_pair: float | None = _later("mpdp: σ_Δ itself, of what each pair shares; goes with --sigma-own.")
    client_weights: str | None = _later(
        "mpdp, mpdp-naive, mp-cdp: clients count by their samples, or equal: the paper's mean, 1/K.", shown="samples"
    )
    skip_cancelling: bool | None = _option(
        _PRIVACY, "nadp, mpdp: leave out noise that cancels: same accuracy, no protection.", shown="no"
    )
    cover: str | None = _option(
        _MASKS, "masks; or veil-dp: noise, tp-smc and pile: paillier, hybridalpha: keys.", shown="not masks"
    )
    unmask: str | None = _option(
        _MASKS, "always: two phases a round; on-dropout: one, if the server is honest about arrivals.", shown="always"
    )
    threshold: float | None = _option(_MASKS, "More than this share of a neighbourhood must answer.", shown="2/3")
    value_range: float | None = _option(
        _MASKS, "Numbers beyond it are cut off, 1 to 2^40.", shown="2^24; for a hidden share 256"
    )
    key_bits: int | None = _later(
        "tp-smc, pile: length of the key that clients hold together.", shown="2048; under a seed, a simulation, 256"
    )
    lwe_dimension: int | None = _later("lwe-secagg: length of the secrets behind its masks.", shown="1024")
    secret_sampling: float | None = _option(
        _PRIVACY, "ldp: each record is in a round's batch with this chance, drawn in secret.", shown="no sampling"
    )
    share: float | None = _option(
        _HIDDEN, "paraaegis: share r of the update that travels hidden; 0 is dp-fedavg, 1 ckks-fedavg.", shown="0.1"
    )
    upload_share: float | None = _later("ppdl: share of the coordinates that is sent at most.", shown="0.1")
    upload_choice: str | None = _later("ppdl: largest, or random ones above --select-above.", shown="largest")
    upload_noise: str | None = _later("ppdl: gaussian; laplace: the sparse vector technique.", shown="gaussian")
    noise_variance: float | None = _later("ppdl: variance of Gaussian noise on what is sent.", shown="0.001")
    round_epsilon: float | None = _later("ppdl, laplace: ε of one round, for all data of a client.", shown="1")
    cut: float | None = _later("ppdl: every coordinate is cut to ± this.", shown="no; with laplace 0.001")
    select_above: float | None = _later("ppdl: threshold of random choices, and of laplace.", shown="0.0001")
    sketch_ratio: int | None = _later("dbcl: of so many directions in which a layer reads, one is sent.", shown="2")
    sketch_layers: str | None = _later("dbcl: all layers, or the head alone.", shown="all")
    private_bits: int | None = _later("spn: numbers of the private head.", shown="64")
    private_margin: float | None = _later("spn: margin of the private hinge loss.", shown="1")
    private_weight: float | None = _later("spn: weight of the private loss.", shown="1")
    shared_weight: float | None = _later("spn: weight of the shared loss.", shown="1")
    share_decay: float | None = _option(_HIDDEN, "paraaegis: factor λ on the share per round.", shown="1")
    strategy: str | None = _option(
        _HIDDEN,
        "paraaegis: hide the max (largest), min or random coordinates; random-votes: each client votes at random.",
        shown="max",
    )
    vote: str | None = _option(
        _HIDDEN,
        "paraaegis: tags (the server sees which votes overlap) or histogram (it does not; 8 bytes per parameter).",
        shown="tags",
    )
    cipher: str | None = _option(
        _HIDDEN,
        "paraaegis, ckks-fedavg, serial: ckks (extra he; one client's help opens it), or pads (faster; it does not).",
        shown="ckks",
    )
    ckks_degree: int | None = _option(
        _HIDDEN,
        "ckks: degree of the ring, 4096, 8192 or 16384; what is below 128 bits of security is refused.",
        shown="the smallest that holds the sums",
        before=None,
    )
    ckks_scale: int | None = _option(
        _HIDDEN,
        "ckks: bits of the scale; one that leaves no room, or errs by more than 10⁻⁶, is refused.",
        shown="the largest with room",
        before=None,
    )
    max_update_norm: float | None = declare(
        _BAD,
        "Longest gradient or update of a client where nothing is clipped: longer uploads are refused, under masks "
        "rounds whose mean is longer.",
        shown="none; clipped ones are held to --clip",
        check=POSITIVE,
        before=None,
    )
    on_bad_round: str | None = declare(
        _BAD,
        "A round whose sum honest clients cannot have sent leaves the model as it was. Then: skip it, or stop.",
        shown="skip; stop where masks alone hide uploads",
        choices=("skip", "stop"),
        shapes_run=False,
        before=None,
    )
    max_bad_rounds: int | None = declare(
        _BAD,
        "Stop after so many bad rounds without a good one between them.",
        shown="3",
        check=up_to(10**7),
        shapes_run=False,
        before=None,
    )
    max_loss_jump: float | None = declare(
        _BAD,
        "Take a round back that makes the loss on the validation part more than so many times as large: 3.",
        shown="never",
        check=(lambda value: value > 1, "must be more than 1"),
        before=None,
    )
    robust_groups: int | None = declare(
        _BAD,
        "fedavg, lossless, pbpfl, secagg, veil-secagg: so many groups, four or more, of at least five clients and a "
        "sum each; their means are averaged without the extremes, so that a bad upload moves nothing.",
        shown="one sum",
        check=up_to(1 << 20, least=0),
        before=None,
    )
    policy: str | None = declare(
        _LIMITS,
        "TOML file: max_epsilon, delta, collusion, min_cohort, max_clip, min_clip, max_size_ratio. No message can "
        "widen it.",
    )
    max_size_ratio: float = declare(
        _LIMITS,
        "Who claims more samples than this many times the median of all clients takes no part.",
        100.0,
        check=(lambda value: value >= 1, "must be at least 1"),
    )
    roster: str | None = declare(_LIMITS, "TOML file of everybody's public signing key (see `fedveil keys`).")
    identities: str | None = declare(_LIMITS, "Folder of the clients' private signing keys.", shown="the roster's")
    simulate_dropout: float = declare(
        _MACHINE,
        "Chance that a client vanishes before it uploads; with a vote, also before that.",
        0.0,
        check=BELOW_ONE,
    )
    bn_eps: str = declare(
        _VEIL,
        "ε of normalisation layers: public, the layers' own; secret, drawn under a veil of scales, which would be read "
        "off a known one, and in runs without a veil, to compare with such; auto, secret under a veil of scales alone.",
        "auto",
        choices=("auto", "secret", "public"),
    )
    family: str = declare(
        _VEIL,
        "What hides a veiled model: scale; signed, orders and signs; isometry, rotations of attention heads too; full, "
        "scales and invertible blocks too; auto, what fits the scheme: scale under head noise and MP-DP, isometry "
        "under veil-dp and with local training (signed for --client-optimiser adam), else full.",
        "auto",
        choices=("auto", "scale", "signed", "isometry", "full"),
        before="scale",
    )
    public_start: bool | None = declare(
        _VEIL,
        "The model begins with weights that others know, as everybody knows published ones: a veil then hides nothing "
        "of it. To be said, yes or no, wherever weights are loaded.",
        shown="not said",
        before=None,
    )
    min_coverage: float = declare(
        _VEIL,
        "Stop if the network lets a veil reach less of it; who knows its first weights (public_start) is not asked.",
        0.9,
        check=(lambda value: 0 <= value <= 1, "must lie in [0, 1]"),
    )

    device: str = declare(_MACHINE, "cpu, cuda, or auto: cuda where it is there.", "cpu")
    dtype: str = declare(_MACHINE, "float32 or float64.", "float32", choices=("float32", "float64"))
    vectorise: bool | None = declare(_MACHINE, "Many clients or samples at once.", shown="where faster and safe")
    workers: int | None = declare(
        _MACHINE,
        "Processes that share the clients' work on the CPU, each on one core: the model is the same for any number.",
        shown="one per core, where clients are many and it pays",
        check=up_to(1 << 10),
        shapes_run=False,
        before=None,
    )
    checkpoint_every: int | None = declare(
        _MACHINE,
        "Rounds between checkpoints; 0: never. Else a run that is stopped leaves one of its last round, too.",
        shown="10; 1 where every round costs ε",
        check=NOT_NEGATIVE,
        shapes_run=False,
    )
    evaluate_every: int = declare(
        _MACHINE, "Rounds between evaluations; 0: at the end.", 1, check=NOT_NEGATIVE, shapes_run=False
    )
    record: bool = declare(
        _AUDIT,
        "Keep what passes in some rounds for an audit, in OUT/record: messages, and the server's secrets beside them.",
        False,
        shapes_run=False,
    )
    record_rounds: str | None = declare(
        _AUDIT, "Which rounds: 1,2,10.", shown="the first three and the last", shapes_run=False
    )
    record_clients: str | None = declare(_AUDIT, "Which clients: 0,1.", shown="0 and 1", shapes_run=False)

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, check = getattr(self, setting.name), setting.metadata.get("check")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{setting.name} must be a finite number (got {value}).")
            if value is None:
                continue
            if setting.metadata.get("listed") is float:
                list_of(value, setting.name)
            if check is not None and not check[0](value):
                raise ConfigError(f"{setting.name} {check[1]} (got {value!r}).")
            if setting.metadata.get("choices") and value not in setting.metadata["choices"]:
                if setting.name in ("loss", "lr_schedule") and value.startswith(OBJECT):
                    continue
                raise unknown_name(setting.name, str(value), setting.metadata["choices"])
        for name, (other, which) in _BELONGS.items():
            if getattr(self, name) != _FIELDS[name].default and (now := getattr(self, other)) not in which:
                named = [word for word in which if word]
                where = f"{name} is of {other} = {' or '.join(named)}, and {other} is {now or 'sgd'}"
                raise ConfigError(f"{where}: set {spelled(other, named[0])}, or leave {name} out.")
        for name, value in (self.options or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{name} must be a finite number (got {value}).")
            if (known := name.replace("-", "_")) in _FIELDS:
                raise ConfigError(
                    f"{known} is a setting of its own: write it as such ({spelled(known, value)}), not "
                    "among the scheme's options."
                )
        for name in ("record_rounds", "record_clients"):
            if (given := getattr(self, name)) is None:
                continue
            if not self.record:
                raise ConfigError(
                    f"{name} says what to record, but nothing is recorded: set record ({spelled('record', True)}) too."
                )
            numbers_of(given, name)
        if None not in (self.epsilon, self.epsilon_per_client):
            raise ConfigError("Give epsilon, or epsilon_per_client, not both.")
        if self.sigma_own is not None or self.sigma_pair is not None:
            for name in ("epsilon", "calibration", "pair_strength"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"sigma_own and sigma_pair say how much noise there is, and {name} would say it again: leave "
                        f"{spelled(name)} out. The ledger says what ε follows."
                    )
        if self.secrets == "seeded" and self.seed is None:
            raise ConfigError("secrets = 'seeded' needs a seed.")
        if self.clients == 0 and self.partition not in ("site", "group"):
            raise ConfigError(
                f"clients must be positive (got 0), unless every site or group is one: {spelled('partition', 'site')}."
            )

    @property
    def simulated_secrets(self) -> bool:
        """Whether secrets derive from the seed, so that anyone who knows it can predict them."""
        return self.secrets == "seeded" or (self.secrets is None and self.seed is not None)

    @property
    def scheme_options(self) -> dict[str, int | float | str | bool | None]:
        """The settings that belong to the scheme."""
        return {
            setting.name: getattr(self, setting.name) for setting in fields(self) if setting.metadata.get("of_scheme")
        }

    def with_changes(self, **changes: Any) -> RunConfig:
        """The same run with some settings changed."""
        return dataclasses.replace(self, **changes)

    def fingerprint(self) -> str:
        """A digest of everything that decides the trained model (except how long it trains)."""
        skipped = {setting.name for setting in fields(self) if not setting.metadata.get("shapes_run", True)}
        skipped -= {"rounds"} if self.lr_schedule != "constant" or self.warm_up else set()
        kept = {name: value for name, value in dataclasses.asdict(self).items() if name not in skipped} | self.unsaid()
        if self.options is None:  # as it was before schemes could have options of their own
            del kept["options"]
        for name, value in BEFORE.items():
            if name in kept and kept[name] in ((value, None) if _FIELDS[name].metadata["before_of"] else (value,)):
                del kept[name]
        for name in ("scheme", "model", "dataset"):
            value = getattr(self, name)
            if isinstance(value, OwnCode) or (":" in value and name != "dataset"):
                kept[name] = "own code"  # wherever it lies; whoever resumes the run names it again
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def unsaid(self) -> dict[str, str]:
        """Defaults that are stored as if they had been said: where they are missing, what was before them is meant."""
        left = {self.calibration, self.sigma_own, self.sigma_pair} == {None}
        told = left and self.scheme in _FIELDS["calibration"].metadata["before_of"]
        return {"calibration": "equations"} if told else {}

    def to_toml(self) -> str:
        """The configuration as a TOML document; settings left to defaults of others are omitted."""
        lines, tables = [], []
        for setting in fields(self):
            value = self.unsaid().get(setting.name, getattr(self, setting.name))
            if isinstance(value, dict):
                rows = [f"{key} = {toml_of(item)}" for key, item in value.items()]
                tables += ["", f"[{setting.name}]", *rows] if rows else []
            elif value is not None:
                lines.append(f"{setting.name} = {toml_of(value)}")
        return "\n".join([*lines, *tables]) + "\n"

    @staticmethod
    def from_mapping(settings: Mapping[str, Any], *, where: str = "configuration") -> RunConfig:
        """A configuration from plain data; unknown keys and wrong types are refused by name."""
        known = _FIELDS
        cleaned: dict[str, Any] = {}
        for key, value in settings.items():
            name = key.replace("-", "_")
            if name not in known:
                raise unknown_setting(key, where=where)
            if value is None and str(known[name].type).endswith("| None"):
                continue
            if name in cleaned:
                raise ConfigError(f"{where}: {name} is given twice, as {name} and as {name.replace('_', '-')}.")
            if known[name].metadata.get("listed") and isinstance(value, list | tuple):
                value = typed_list(name, value, where)
            cleaned[name] = checked_setting(name, value, str(known[name].type), where)
        if "site" in cleaned:
            cleaned.setdefault("partition", "site")
        if cleaned.get("partition") == "site":
            cleaned.setdefault("clients", 0)
        return RunConfig(**cleaned)

    @staticmethod
    def read(path: str | Path) -> dict[str, Any]:
        """The settings of a TOML file, as plain data; batch-size is read as batch_size."""
        path = Path(path)
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file: give a TOML file.")
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as reason:
            raise ConfigError(f"Cannot read the configuration {path}: {reason.strerror}.") from reason
        except (ValueError, RecursionError) as reason:  # not TOML, not text, numbers or nesting without end
            raise ConfigError(f"{path} is not valid TOML: {reason}.") from reason
        return {key.replace("-", "_"): value for key, value in settings.items()}


_FIELDS = {setting.name: setting for setting in fields(RunConfig)}
BEFORE: dict[str, Any] = {
    name: setting.metadata["before"]
    for name, setting in _FIELDS.items()
    if setting.metadata.get("before", dataclasses.MISSING) is not dataclasses.MISSING
}
"""What settings mean that a run folder or model file does not have, because there was no such setting yet."""


def as_before(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Stored settings, with what those mean that there were not yet when they were stored."""
    scheme = stored.get("scheme", RunConfig.scheme)
    schemes = {name: _FIELDS[name].metadata["before_of"] for name in BEFORE}
    return {name: value for name, value in BEFORE.items() if not schemes[name] or scheme in schemes[name]} | {**stored}


def unknown_setting(
    name: str, *, where: str, further: Iterable[str] = (), without: Collection[str] = ()
) -> ConfigError:
    """A ConfigError that names the settings nearest to one that is not known, by name or by what they say."""
    words = {known: setting.metadata.get("words", "") for known, setting in _FIELDS.items() if known not in without}
    hint = "All of them: `fedveil run --help`."
    return unknown_name(f"setting in {where}:", name, {*words, *further}, hint=hint, words=words)
