"""Every setting of `fedveil.train` by name and type, so that editors complete and check them.

Written from `RunConfig` by `python -m tools.typed_settings`: change that, not this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn

Objective = Callable[[Tensor, Tensor], Tensor]


class Settings(TypedDict, total=False):
    """The settings of a run; those that are left out have the defaults that are named."""

    options: dict[str, int | float | str | bool] | None
    """An option of your own scheme, repeatable: --set keep=0.2 (see `fedveil schemes SCHEME`)."""
    rounds: int
    """Number of rounds. (default: 50)"""
    seed: int | None
    """Reproducible run; its secrets are simulated."""
    secrets: Literal["os", "seeded"] | None
    """os, or seeded (a simulation)."""
    task: Literal["classification", "regression", "multilabel"] | None
    """classification, regression or multilabel (several labels of 0 and 1)."""
    client_test_fraction: float | None
    """Schemes under masks: share of its own samples that each client holds back, to judge the model by. (default:
    none)"""
    cohort: float | int | None
    """Clients per round: 0.1 (a fraction) or 5 (a count). (default: all)"""
    sampling_rate: float | None
    """Instead: each client's probability to be in a round."""
    batch_size: int
    """Samples per step; 0 takes all. (default: 0)"""
    lr: float | str | None
    """Learning rate; auto: found by short trials (not where privacy is accounted for). (default: 0.1; for the square
    loss 0.02; for adam, adagrad and yogi 0.01; for --client-optimiser adam 0.001; beside --client-lr 1)"""
    lr_decay: float
    """Factor on the rate per round. (default: 1)"""
    lr_schedule: Literal["constant", "cosine", "step", "polynomial"] | Callable[[int, int], float]
    """constant; cosine, to 0 at the end; step, by --lr-drop after each of --lr-steps; polynomial, to 0 with --lr-power.
    (default: constant)"""
    warm_up: float | None
    """Share of the rounds in which the rate grows to what it is: 0.05. Where training diverges at once, try this.
    (default: none)"""
    lr_steps: str | Sequence[float] | None
    """step: after which shares of rounds. (default: 0.5,0.75)"""
    lr_drop: float | None
    """step: the factor each time, up to 1. (default: 0.1)"""
    lr_power: float | None
    """polynomial: the power. (default: 1)"""
    momentum: float
    """Server momentum, of sgd. (default: 0)"""
    weight_decay: float
    """Server weight decay. (default: 0)"""
    optimiser: Literal["sgd", "adam", "adagrad", "yogi"] | None
    """The server's: sgd, adam, adagrad or yogi, on the recovered gradient or the mean update (then with --client-lr).
    (default: sgd)"""
    beta1: float | None
    """adam, adagrad, yogi: momentum β₁. (default: 0.9; adagrad 0)"""
    beta2: float | None
    """adam, yogi: β₂ of squares. (default: 0.99)"""
    tau: float | None
    """adam, adagrad, yogi: τ, beside √v. (default: 0.001)"""
    augment: str | Sequence[str] | Callable[[Tensor], Tensor] | None
    """Pictures of training, drawn anew each time: crop,flip,cutout, or with sizes crop:4,flip,cutout:8. (default: as
    they are)"""
    loss: Literal["square", "cross-entropy", "binary-cross-entropy"] | nn.Module | Objective | None
    """square, cross-entropy or binary-cross-entropy. (default: square where there can be head noise; else cross-entropy
    for classes, binary for several labels)"""
    target_scale: float
    """Square loss: the true class's target M. (default: 1)"""
    true_weight: float
    """Square loss: the true class's weight k. (default: 1)"""
    class_weights: str | Sequence[float] | Tensor | None
    """How much a sample of each class counts: 1,4.5,2; or balanced: by the training part's counts, in simulations of
    schemes that promise nothing about data. (default: 1 each)"""
    label_smoothing: float
    """Share of a sample's target that goes to all classes alike. (default: 0)"""
    early_stopping: int | None
    """Stop after so many evaluations without a better --monitor."""
    monitor: str | None
    """The figure that tells the best round, as metrics.jsonl has it: validation_loss, validation_accuracy, loss. Its
    model is kept too (best.safetensors). (default: validation_loss where there is a validation part)"""
    target_accuracy: float | None
    """summary.json says in which round, and after how many seconds of training, the test accuracy was this: 0.65."""
    local_steps: int | None
    """fedavg, secagg, ldp, cdp, nadp, tp-smc, hybridalpha, lwe-secagg, paraaegis: local steps per round. (default: 1;
    more make a client the unit)"""
    local_epochs: int | None
    """fedavg, secagg, ldp, cdp, nadp, tp-smc, hybridalpha, lwe-secagg, paraaegis: local epochs per round. (default:
    paraaegis and its baselines 1)"""
    client_lr: float | None
    """Local training: the clients' own rate; --lr and its schedule are then the server's, on their mean update.
    (default: --lr, and the server takes updates whole)"""
    client_optimiser: Literal["sgd", "adam"] | None
    """Local training: sgd, or adam, which begins anew in every round; under a veil with --family signed. (default:
    sgd)"""
    client_momentum: float | None
    """Local training: momentum of sgd, from 0 in every round. (default: 0)"""
    client_weight_decay: float | None
    """Local training: weight decay; of adam decoupled from its gradients, as AdamW has it. (default: 0)"""
    client_beta1: float | None
    """Local training by adam: momentum β₁. (default: 0.9)"""
    client_beta2: float | None
    """Local training by adam: β₂ of squares. (default: 0.999)"""
    client_tau: float | None
    """Local training by adam: τ, beside √v (torch's eps). (default: 1e-8)"""
    head_noise: bool | None
    """Noise on the last layer. (default: on)"""
    stream_rotations: bool | None
    """Fold the gains of LayerNorm and RMSNorm into the linear layers that read them, so that residual streams are
    rotated in secret; with family full or isometry and one gradient a round. (default: off)"""
    head_groups: int | None
    """Head noise: number m of secret γ. (default: one per output; pbpfl: 1)"""
    head_partition: str | Sequence[float] | None
    """Head noise: which outputs share a γ, as one number from 0 for each output: 0,0,1,1,2. (default: in equal parts,
    drawn every round)"""
    head_strength: float | None
    """Head noise relative to the outputs. (default: 1)"""
    spread: float | None
    """Scales lie in 1/spread … spread; set for veil-dp, it takes them. (default: 4; veil-dp: 1.5)"""
    epsilon: float | None
    """ε of the whole run; for mpdp, mpdp-naive and mp-cdp of one round. (default: 3)"""
    epsilon_per_client: str | Sequence[float] | None
    """ε of each client, in their order: 1,2,4. Noise of a client's own is made for its own; shared noise for the
    strictest."""
    delta: float | None
    """δ. (default: 1e-5)"""
    clip: float | None
    """Largest L2 norm of a sample's gradient; of an update, with local training. (default: 1)"""
    adaptive_clip: bool | None
    """dp-fedavg, varying-dp; ldp, cdp, nadp with local training: the clip begins with --clip and follows updates.
    (default: no)"""
    clip_quantile: float | None
    """adaptive clip: the share of updates that should be within it. (default: 0.5)"""
    clip_rate: float | None
    """adaptive clip: how fast it moves, up to 1. (default: 0.2)"""
    clip_share: float | None
    """adaptive clip: share of every round's μ² that pays for it. (default: 0.1)"""
    clip_range: float | None
    """adaptive clip: within how many times --clip it stays. (default: 10)"""
    noise_decay: float | None
    """Factor on the deviation of noise, each round. (default: 1; varying-dp: 0.9)"""
    clip_decay: float | None
    """Factor on the clip, each round, and on the noise with it. (default: 1)"""
    accounting: str | None
    """exact: the least noise that meets ε; paper: what the paper's formula says. (default: exact)"""
    collusion: float | None
    """nadp, veil-dp, veil-secagg, secagg, tp-smc, hybridalpha, pile, lwe-secagg: share of clients that may side with
    the server. (default: noise: 0; masks and shared keys: 0.1)"""
    pair_strength: float | None
    """nadp, veil-dp, mpdp: how strong the noise is that cancels. (default: 10, on a sparse graph what that calls for;
    the paper's with --accounting paper or --dropouts tolerate)"""
    dropouts: str | None
    """nadp, veil-dp: what becomes of noise shared with missing clients. repair or tolerate. (default: repair)"""
    repair_limit: float | None
    """nadp, veil-dp: largest share of a cohort that clients repair for. (default: 1/3)"""
    honest_arrivals: bool | None
    """nadp, veil-dp: take the server's word for who did not arrive. (default: no)"""
    neighbours: int | None
    """With how many others each client shares masks (an even number), or how many it picks to share noise with.
    (default: as many as collusion calls for; all up to 128 clients for noise, up to 32 for masks; mpdp: 5)"""
    sensitivity: float | None
    """mpdp, mpdp-naive, mp-cdp: S, how long gradients are taken to be. (default: 1)"""
    calibration: str | None
    """mpdp, mpdp-naive, mp-cdp: σ by their paper's equations, or by a tail bound (as FedVeil had it first). (default:
    equations)"""
    sigma_own: float | None
    """mpdp: σ_η itself, the deviation of what each client adds for itself to its gradient, instead of ε."""
    sigma_pair: float | None
    """mpdp: σ_Δ itself, of what each pair shares; goes with --sigma-own."""
    client_weights: str | None
    """mpdp, mpdp-naive, mp-cdp: clients count by their samples, or equal: the paper's mean, 1/K. (default: samples)"""
    skip_cancelling: bool | None
    """nadp, mpdp: leave out noise that cancels: same accuracy, no protection. (default: no)"""
    cover: str | None
    """masks; or veil-dp: noise, tp-smc and pile: paillier, hybridalpha: keys. (default: not masks)"""
    unmask: str | None
    """always: two phases a round; on-dropout: one, if the server is honest about arrivals. (default: always)"""
    threshold: float | None
    """More than this share of a neighbourhood must answer. (default: 2/3)"""
    value_range: float | None
    """Numbers beyond it are cut off, 1 to 2^40. (default: 2^24; for a hidden share 256)"""
    key_bits: int | None
    """tp-smc, pile: length of the key that clients hold together. (default: 2048; under a seed, a simulation, 256)"""
    lwe_dimension: int | None
    """lwe-secagg: length of the secrets behind its masks. (default: 1024)"""
    secret_sampling: float | None
    """ldp: each record is in a round's batch with this chance, drawn in secret. (default: no sampling)"""
    share: float | None
    """paraaegis: share r of the update that travels hidden; 0 is dp-fedavg, 1 ckks-fedavg. (default: 0.1)"""
    upload_share: float | None
    """ppdl: share of the coordinates that is sent at most. (default: 0.1)"""
    upload_choice: str | None
    """ppdl: largest, or random ones above --select-above. (default: largest)"""
    upload_noise: str | None
    """ppdl: gaussian; laplace: the sparse vector technique. (default: gaussian)"""
    noise_variance: float | None
    """ppdl: variance of Gaussian noise on what is sent. (default: 0.001)"""
    round_epsilon: float | None
    """ppdl, laplace: ε of one round, for all data of a client. (default: 1)"""
    cut: float | None
    """ppdl: every coordinate is cut to ± this. (default: no; with laplace 0.001)"""
    select_above: float | None
    """ppdl: threshold of random choices, and of laplace. (default: 0.0001)"""
    sketch_ratio: int | None
    """dbcl: of so many directions in which a layer reads, one is sent. (default: 2)"""
    sketch_layers: str | None
    """dbcl: all layers, or the head alone. (default: all)"""
    private_bits: int | None
    """spn: numbers of the private head. (default: 64)"""
    private_margin: float | None
    """spn: margin of the private hinge loss. (default: 1)"""
    private_weight: float | None
    """spn: weight of the private loss. (default: 1)"""
    shared_weight: float | None
    """spn: weight of the shared loss. (default: 1)"""
    share_decay: float | None
    """paraaegis: factor λ on the share per round. (default: 1)"""
    strategy: str | None
    """paraaegis: hide the max (largest), min or random coordinates; random-votes: each client votes at random.
    (default: max)"""
    vote: str | None
    """paraaegis: tags (the server sees which votes overlap) or histogram (it does not; 8 bytes per parameter).
    (default: tags)"""
    cipher: str | None
    """paraaegis, ckks-fedavg, serial: ckks (extra he; one client's help opens it), or pads (faster; it does not).
    (default: ckks)"""
    ckks_degree: int | None
    """ckks: degree of the ring, 4096, 8192 or 16384; what is below 128 bits of security is refused. (default: the
    smallest that holds the sums)"""
    ckks_scale: int | None
    """ckks: bits of the scale; one that leaves no room, or errs by more than 10⁻⁶, is refused. (default: the largest
    with room)"""
    max_update_norm: float | None
    """Longest gradient or update of a client where nothing is clipped: longer uploads are refused, under masks rounds
    whose mean is longer. (default: none; clipped ones are held to --clip)"""
    on_bad_round: Literal["skip", "stop"] | None
    """A round whose sum honest clients cannot have sent leaves the model as it was. Then: skip it, or stop. (default:
    skip; stop where masks alone hide uploads)"""
    max_bad_rounds: int | None
    """Stop after so many bad rounds without a good one between them. (default: 3)"""
    max_loss_jump: float | None
    """Take a round back that makes the loss on the validation part more than so many times as large: 3. (default:
    never)"""
    robust_groups: int | None
    """fedavg, lossless, pbpfl, secagg, veil-secagg: so many groups, four or more, of at least five clients and a sum
    each; their means are averaged without the extremes, so that a bad upload moves nothing. (default: one sum)"""
    policy: str | None
    """TOML file: max_epsilon, delta, collusion, min_cohort, max_clip, min_clip, max_size_ratio. No message can widen
    it."""
    max_size_ratio: float
    """Who claims more samples than this many times the median of all clients takes no part. (default: 100)"""
    roster: str | None
    """TOML file of everybody's public signing key (see `fedveil keys`)."""
    identities: str | None
    """Folder of the clients' private signing keys. (default: the roster's)"""
    simulate_dropout: float
    """Chance that a client vanishes before it uploads; with a vote, also before that. (default: 0)"""
    bn_eps: Literal["auto", "secret", "public"]
    """ε of normalisation layers: public, the layers' own; secret, drawn under a veil of scales, which would be read off
    a known one, and in runs without a veil, to compare with such; auto, secret under a veil of scales alone. (default:
    auto)"""
    family: Literal["auto", "scale", "signed", "isometry", "full"]
    """What hides a veiled model: scale; signed, orders and signs; isometry, rotations of attention heads too; full,
    scales and invertible blocks too; auto, what fits the scheme: scale under head noise and MP-DP, isometry under
    veil-dp and with local training (signed for --client-optimiser adam), else full. (default: auto)"""
    public_start: bool | None
    """The model begins with weights that others know, as everybody knows published ones: a veil then hides nothing of
    it. To be said, yes or no, wherever weights are loaded. (default: not said)"""
    min_coverage: float
    """Stop if the network lets a veil reach less of it; who knows its first weights (public_start) is not asked.
    (default: 0.9)"""
    device: str | torch.device
    """cpu, cuda, or auto: cuda where it is there. (default: cpu)"""
    dtype: Literal["float32", "float64"] | torch.dtype
    """float32 or float64. (default: float32)"""
    vectorise: bool | None
    """Many clients or samples at once. (default: where faster and safe)"""
    workers: int | None
    """Processes that share the clients' work on the CPU, each on one core: the model is the same for any number.
    (default: one per core, where clients are many and it pays)"""
    checkpoint_every: int | None
    """Rounds between checkpoints; 0: never. Else a run that is stopped leaves one of its last round, too. (default: 10;
    1 where every round costs ε)"""
    evaluate_every: int
    """Rounds between evaluations; 0: at the end. (default: 1)"""
    record: bool
    """Keep what passes in some rounds for an audit, in OUT/record: messages, and the server's secrets beside them.
    (default: no)"""
    record_rounds: str | None
    """Which rounds: 1,2,10. (default: the first three and the last)"""
    record_clients: str | None
    """Which clients: 0,1. (default: 0 and 1)"""
