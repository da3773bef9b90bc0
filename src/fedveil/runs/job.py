"""Putting a run together: data, model, scheme and roles from one configuration."""

from __future__ import annotations

import math
import secrets as system_random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fedveil import data, models, own_code, schemes
from fedveil.config import OBJECT, RunConfig
from fedveil.data import Dataset, Split
from fedveil.data.description import Description, describe_split
from fedveil.data.preparation import Preparation
from fedveil.data.sources import EMBEDDED
from fedveil.downlink import Architecture, Weights, draw_for
from fedveil.downlink.architecture import draw_secret_epsilon
from fedveil.downlink.export import verified, verify
from fedveil.downlink.scales import Coverage, coverage, require_coverage
from fedveil.engine import ClientPool
from fedveil.errors import CheckpointError, ConfigError, DataError, FedVeilError, TraceError, spelled
from fedveil.ledger.policy import Policy
from fedveil.ledger.releases import Release
from fedveil.models.building import named, parameters_of
from fedveil.own_code import OwnCode
from fedveil.plain import read_text
from fedveil.protocol.directory import Cohort
from fedveil.protocol.parts import Scheme, bounded
from fedveil.roles.server import Optimiser
from fedveil.runs.evaluation import judged_by_clients
from fedveil.runs.judgement import probabilities
from fedveil.runs.metrics import OwnMetrics
from fedveil.runs.monitor import best_note, guard_note
from fedveil.runs.objective import BALANCED, check_weights, class_counts, loss_of, own_assumptions, weights_note
from fedveil.runs.pretrained import FROZEN, HANDED, PUBLISHED, fill_from, nothing_hidden
from fedveil.runs.recipe import augmentation_of, optimiser_of, rate_of, schedule_of
from fedveil.schemes import SchemeInfo, Setting
from fedveil.schemes.registry import Option
from fedveil.secrets import OsSecrets, SecretSource, SecretStream, SeededSecrets
from fedveil.tensors import statistics_in, twin_of
from fedveil.uplink.grouped import check_grouped
from fedveil.work import Batches, BinaryCrossEntropy, Loss
from fedveil.work.batches import Factor
from fedveil.work.clipping import refuse_batch_norm
from fedveil.work.losses import CrossEntropy, SquareLoss
from fedveil.work.own_loss import refuse_moving_state

if TYPE_CHECKING:
    from fedveil.crypto.keys import Roster

EPSILON = (
    "every normalisation has a secret ε of its own, since scales would be read off a known one: the model is that of "
    "plain training with these ε, not with the layers' own (other families than scale need none)"
)
UNBOUNDED = (
    "not a DP guarantee: batch normalisations mix the samples of a batch, and their statistics travel under noise that "
    "is made for the clipped update and not for them: no ε is counted (accounting = exact refuses such models)"
)
ADAM = (
    "clients step by Adam: a number whose true gradient is 0 (a bias before a batch normalisation, or of attention "
    "keys) is moved by rounding alone, without a veil as under one, and not to the same place; the function that is "
    "trained does not see it, running means lag behind it (a larger client_tau holds it still)"
)
DROPOUT = (
    "dropout meets other units under secret orders: training is that without a veil in law, and not number by number"
)

PREPARED = (
    "how samples are prepared was computed from everybody's raw training samples, in the open and before any noise or "
    "mask, and stands in the model's file ({}): whoever prepares the data or has the file knows it, and no figure here "
    "counts it"
)

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Link:
    """How outputs become probabilities of classes or labels: by what they tend to under the loss of the training."""

    loss: Literal["square", "cross-entropy", "binary-square", "binary-cross-entropy"]
    target_scale: float = 1.0
    true_weight: float = 1.0

    def __post_init__(self) -> None:
        if not all(0 < number < math.inf for number in (self.target_scale, self.true_weight)):
            raise ValueError("outputs are scaled by numbers that cannot be used")

    @staticmethod
    def of(loss: Loss, task: str) -> Link | None:
        """That of a loss; none where outputs are no classes, or the loss is not one of ours."""
        if task == "multilabel" and isinstance(loss, SquareLoss | BinaryCrossEntropy):
            return Link("binary-square" if isinstance(loss, SquareLoss) else "binary-cross-entropy")
        if task != "classification" or not isinstance(loss, SquareLoss | CrossEntropy):
            return None
        if isinstance(loss, SquareLoss):
            return Link("square", loss.target_scale, loss.true_weight)
        return Link("cross-entropy")

    @property
    def terms(self) -> dict[str, Any]:
        """The loss as `judge` and `probabilities` take it."""
        name = "square" if self.loss.endswith("square") else self.loss
        return {"loss": name, "target_scale": self.target_scale, "true_weight": self.true_weight}

    def probabilities(self, outputs: Tensor) -> Tensor:
        """One row per sample, each summing to 1, unless a sample may have several labels."""
        task = "multilabel" if self.loss.startswith("binary") else "classification"
        return probabilities(outputs, task=task, **self.terms)[0].to(outputs.dtype)


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """What it takes to build the same architecture again, and to take raw samples to it and names from it."""

    name: str | None
    options: dict[str, int | float | str | bool]
    input_shape: tuple[int, ...]
    outputs: int
    task: str
    vocabulary: int | None = None
    labels: tuple[str, ...] = ()
    preparation: Preparation | None = None
    link: Link | None = None
    fields: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and shape of every input, where samples have several."""

    @staticmethod
    def of(config: RunConfig, train: Dataset, preparation: Preparation | None = None) -> ModelFacts:
        """Of the architecture that settings name, for these data."""
        return ModelFacts(
            config.model,
            config.model_options,
            train.input_shape,
            train.outputs,
            train.task,
            train.vocabulary,
            train.labels,
            preparation,
        )

    def check_size(self, *, most: int, unlike: str) -> None:
        """Refuse a model of the catalogue that has more than `most` parameters, before anything is allocated for it."""
        assert self.name is not None
        if isinstance(self.name, OwnCode):
            return
        parameters = parameters_of(
            self.name,
            input_shape=self.input_shape,
            outputs=self.outputs,
            vocabulary=self.vocabulary,
            options=self.options,
        )
        if parameters > most:
            raise ConfigError(f"{unlike}: that has {parameters:,} parameters, and there are {most:,} numbers.")

    def build(self, *, seed: int | SecretStream) -> nn.Module:
        """The architecture, with the first values that follow from a seed or from a secret stream."""
        assert self.name is not None
        return models.build(
            self.name,
            input_shape=self.input_shape,
            outputs=self.outputs,
            seed=seed,
            vocabulary=self.vocabulary,
            **self.options,
        )


@dataclass(frozen=True, eq=False)
class Guard:
    """What clients keep to themselves: their policy, everybody's public keys, their own private ones."""

    policy: Policy | None = None
    roster: Roster | None = None
    identities: Mapping[int, bytes] | None = None


@dataclass(frozen=True)
class Surroundings:
    """What an engine lets out and takes for granted, beside the scheme."""

    engine: str = "local"
    releases: tuple[Release, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Job:
    """A run, ready to start."""

    config: RunConfig
    scheme: Scheme
    loss: Loss
    loss_because: str
    """Why it is this loss."""
    architecture: Architecture
    weights: Weights
    pool: ClientPool
    test: Dataset | None
    facts: ModelFacts
    coverage: Coverage | None
    secrets: SecretSource
    cohort: Cohort
    optimiser: Optimiser
    remarks: tuple[str, ...] = ()
    """What was guessed about its data."""
    guard: Guard = Guard()
    around: Surroundings = Surroundings()
    validation: Dataset | None = None
    client_names: tuple[str, ...] = ()
    shape: Factor | None = None
    """The caller's own shape of the learning rate."""
    description: Description | None = None
    metrics: OwnMetrics | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the ledger says of choices that settings and the model's author made."""
        said = weights_note(self.config, self.loss)
        learnt = "" if self.facts.preparation is None else self.facts.preparation.learnt
        if learnt and (self.scheme.plan is not None or not self.scheme.readable):
            said = (*said, PREPARED.format(learnt))
        frozen = int((~self.architecture.trainable).sum())
        if frozen and self.architecture.table is not None:
            said = (*said, FROZEN.format(frozen))
        if self.unbounded:
            said = (*said, UNBOUNDED)
        if self.own_epsilon_lost:
            said = (*said, EPSILON)
        if self.coverage is not None and self.coverage.family != "scale":
            said = (*said, self.coverage.told)
            if any(
                isinstance(part, nn.modules.dropout._DropoutNd) and part.p
                for part in self.architecture.skeleton.modules()
            ):
                said = (*said, DROPOUT)
            if self.config.client_optimiser == "adam":
                said = (*said, ADAM)
        if self.config.public_start and self.architecture.table is not None:
            said = (*said, PUBLISHED)
        elif self.architecture.table is not None and self.facts.name is None and self.config.public_start is None:
            said = (*said, HANDED)
        return (*said, *best_note(self), *guard_note(self.config, self.scheme))

    @property
    def unbounded(self) -> bool:
        """Whether batch statistics travel beside what is clipped, so that noise proves nothing."""
        noised = self.scheme.plan is not None and not self.scheme.work.reports
        return noised and statistics_in(self.scheme.layout(self.architecture)) > 0

    @property
    def own_epsilon_lost(self) -> bool:
        """Whether a veil of scales makes its normalisations another ε than the layers' own."""
        veiled = self.architecture.table is not None and bool(len(self.weights.epsilon))
        return veiled and secret_epsilon(self.config, self.scheme)

    @property
    def own_assumptions(self) -> tuple[str, ...]:
        """What an (ε, δ) takes for granted of code that is the caller's own."""
        if self.scheme.plan is None:
            return ()
        sources = [data.source for data in self.pool.clients if data.source is not None]
        augmented, unit = (self.config.augment or "").startswith(OBJECT), bounded(self.scheme.work).unit
        said = {"augmented": augmented, "together": self.config.vectorise is True}
        return own_assumptions(self.loss, self.architecture.skeleton, sources, unit=unit, **said)

    @property
    def model_here(self) -> bool:
        """Whether this process sees the model: not where it lives with clients on other machines."""
        return self.scheme.holder == "server" or bool(self.pool.clients)


def located(config: RunConfig) -> RunConfig:
    """The same configuration with paths that hold from any folder."""
    changes = {}
    if config.dataset not in EMBEDDED and Path(config.dataset).exists():
        changes["dataset"] = str(Path(config.dataset).resolve())
    for name in ("policy", "roster", "identities", "weights"):
        if (given := getattr(config, name)) is not None and Path(given).exists():
            changes[name] = str(Path(given).resolve())
    for name in own_code.SETTINGS:
        if isinstance(given := getattr(config, name), own_code.OwnCode):
            changes[name] = given.located()
    return config.with_changes(**changes) if changes else config


def settled(config: RunConfig) -> RunConfig:
    """The same configuration with a seed: drawn now, if none was given, and then never used for secrets."""
    if config.seed is not None:
        return config
    return config.with_changes(seed=system_random.randbelow(1 << 31), secrets="os")


def device_of(config: RunConfig) -> torch.device:
    """The device, if it is there; auto is a GPU where there is one."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError as reason:
        raise ConfigError(f"Unknown device {config.device!r}: use cpu, cuda or auto.") from reason
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device = {config.device!r} is not one that FedVeil computes on: use cpu or cuda, or auto.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device = 'cuda', but PyTorch sees no CUDA device here. Use {spelled('device', 'cpu')}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device = {config.device!r}, but there are {torch.cuda.device_count()} CUDA devices here.")
    return device


def dtype_of(config: RunConfig) -> torch.dtype:
    """The floating-point type."""
    return _DTYPES[config.dtype]


def loaded(config: RunConfig) -> Split:
    """The data set that settings name."""
    assert config.seed is not None
    return data.load(
        config.dataset,
        target=config.target,
        task=config.task,  # type: ignore[arg-type]
        test_fraction=config.test_fraction,
        seed=config.seed,
        text=config.text,
        group=config.group,
        picture_size=config.picture_size,
        site=config.site,
        split=config.split,  # type: ignore[arg-type]
        validation_fraction=config.validation_fraction,
    )


def dealt(config: RunConfig, train: Dataset) -> list[Tensor]:
    """The rows of every client, as settings deal them out."""
    assert config.seed is not None
    return data.partition(
        train, clients=config.clients, how=config.partition, seed=config.seed, alpha=config.alpha, ratio=config.ratio
    )


def first_seed(config: RunConfig) -> int | SecretStream:
    """What a model's first values are drawn from: the seed of a simulation, or the operating system.

    The seed of other runs is no secret: it decides about batches and cohorts, which everybody may know.
    """
    assert config.seed is not None
    return config.seed if config.simulated_secrets else OsSecrets().stream("first model")


def counted(config: RunConfig, train: Dataset) -> RunConfig:
    """The same configuration with its number of clients: one per site or group, where it leaves that to the data."""
    return config if config.clients else config.with_changes(clients=data.owners_of(train, config.partition))


def job_from_config(config: RunConfig, *, describe: bool = False) -> Job:
    """Load the data, build the model, deal the data to clients; `describe` also says what was understood of them."""
    schemes.find(config.scheme)
    assert config.seed is not None
    split = loaded(config)
    config = counted(config, split.train)
    facts = ModelFacts.of(config, split.train, split.preparation)
    model = first_model(config, facts, seed=first_seed(config))
    parts = dealt(config, split.train)
    names = data.client_names(split.train, parts, config.partition)
    placed = split.train.to(dtype=dtype_of(config), device=device_of(config))
    pool = ClientPool.shared(placed.x, placed.y, parts)
    counts = class_counts(split.train.y, split.train.outputs) if config.class_weights == BALANCED else None
    common = agreed(config, clients=len(pool), task=facts.task, outputs=facts.outputs, counts=counts)
    validation, groups = split.validation, split.train.groups
    job = assemble_job(config, model, pool, split.test, facts, common=common, validation=validation, groups=groups)
    description = describe_split(split, parts, names) if describe else None
    return replace(job, client_names=names, description=description, remarks=split.remarks)


def first_model(config: RunConfig, facts: ModelFacts, *, seed: int | SecretStream) -> nn.Module:
    """The model a run begins with: drawn, or with the weights of the file that settings name."""
    model = facts.build(seed=seed)
    if config.weights is not None:
        fill_from(model, Path(config.weights))
    return model


@dataclass(frozen=True, eq=False)
class Agreed:
    """What both sides of a run make of its settings, without a model or data."""

    scheme: Scheme
    loss: Loss
    loss_because: str
    cohort: Cohort
    optimiser: Optimiser


def agreed(
    config: RunConfig,
    *,
    clients: int,
    task: str,
    outputs: int = 1,
    own: SchemeInfo | None = None,
    loss: Loss | None = None,
    counts: Sequence[int] | None = None,
    shape: Factor | None = None,
) -> Agreed:
    """The scheme that settings name, or the caller's `own`, for so many clients, and how the model moves.

    `outputs` is how many the model has. `loss` is one of the caller's own, and so is `shape`, that of the learning
    rate; `counts` are the classes' (`objective.class_counts`), where somebody counts.
    """
    info = schemes.find(config.scheme) if own is None else own
    loss = loss_of(config, task, info.default_loss, counted=counts) if loss is None else loss
    schedule = schedule_of(config, rate_of(config, loss), shape)
    seed = config.seed
    assert seed is not None
    # Clients that hold back samples are asked once more after the last round.
    rounds = config.rounds + (config.client_test_fraction is not None)
    cohort = Cohort.of(
        clients, cohort=config.cohort, seed=seed, sampling_rate=config.sampling_rate, rounds=max(rounds, 1)
    )
    setting = Setting(
        *(loss, Batches(config.batch_size, seed), schedule, config.vectorise),
        rounds=rounds,
        family=config.family,
        known_start=bool(config.public_start),
        robust_groups=config.robust_groups or 0,
    )
    options = {**config.scheme_options, **(config.options or {})}
    scheme, cohort = attended(info, setting, options, cohort=cohort, simulation=config.simulated_secrets)
    if config.max_update_norm is not None and (scheme.noisy or scheme.holder == "clients"):
        why = "noise goes into its sums" if scheme.holder == "server" else "its server reads no sum"
        raise ConfigError(
            f"{spelled('max_update_norm')} does not go with {spelled('scheme', info.name)}: {why}. Where updates are "
            f"clipped, sums are held to {spelled('clip')} and to what noise adds, without a setting."
        )
    if config.robust_groups:
        check_grouped(scheme, everybody=cohort.everybody, recorded=config.record)
    scheme = replace(scheme, max_size_ratio=config.max_size_ratio, max_update_norm=config.max_update_norm)
    if config.family not in ("auto", scheme.downlink.family):
        why = "its noise is made for scales" if scheme.downlink.traced else "it has no veil"
        raise ConfigError(
            f"{spelled('family', config.family)} does not go with {spelled('scheme', info.name)}: {why}. It goes with "
            "lossless, pbpfl, veil-secagg and veil-dp."
        )
    scheme = judged_by_clients(scheme, config, loss, task=task, outputs=outputs)
    cohort.check_fits(scheme.uplink)
    because = _because(config, info, task, head_noise=scheme.downlink.head_noise)
    return Agreed(scheme, loss, because, cohort, optimiser_of(config, scheme, schedule))


def attended(
    info: SchemeInfo, setting: Setting, options: Mapping[str, Option], *, cohort: Cohort, simulation: bool
) -> tuple[Scheme, Cohort]:
    """A scheme for these cohorts, which are shuffled wherever clients share keys and their nonces are secret.

    Simulated nonces hide nothing; cohorts by the seed make simulations of different schemes comparable.
    """

    def assembled(cohort: Cohort) -> Scheme:
        known = replace(
            setting,
            participations=cohort.most_participations(setting.rounds),
            rate=cohort.rate or cohort.size / cohort.clients,
            cohort=cohort.size,
            clients=cohort.clients,
            least=cohort.least if cohort.rate else 0,
            simulation=simulation,
        )
        return info.assemble(known, options)

    scheme = assembled(cohort)
    if cohort.everybody or scheme.uplink.introduction != "keys":
        return scheme, cohort
    drawn = replace(cohort.hiding(), shuffled=not simulation)
    return (scheme if drawn == cohort else assembled(drawn)), drawn


def drawn(scheme: Scheme, model: nn.Module, example: Tensor, facts: ModelFacts) -> tuple[Architecture, Weights]:
    """A model's architecture and weights, checked to be something that this scheme can train."""
    _check_output(model, example, facts)
    if not model.training:
        model.train()  # as a whole; parts of a training model that are in evaluation mode stay frozen
    architecture, weights = draw_for(scheme.downlink, model, example)
    if architecture.size and not bool(architecture.trainable.any()):
        raise ConfigError("Every parameter of the model is frozen: let some be trained (requires_grad_(True)).")
    if scheme.plan is not None and not scheme.work.reports and not statistics_in(scheme.layout(architecture)):
        refuse_batch_norm(architecture)
    refuse_moving_state(architecture, weights, example)
    return architecture, weights


def assemble_job(
    config: RunConfig,
    model: nn.Module,
    pool: ClientPool,
    test: Dataset | None,
    facts: ModelFacts,
    *,
    common: Agreed | None = None,
    guard: Guard | None = None,
    validation: Dataset | None = None,
    groups: Tensor | None = None,
    augment: Callable[[Tensor], Tensor] | None = None,
) -> Job:
    """The scheme, its architecture and roles for a model and clients that are already there.

    `groups` says of the rows that clients share which belong together. `augment` is the caller's own function of an
    input, where settings say that there is one.
    """
    device, dtype = device_of(config), dtype_of(config)
    guard = _guard(config) if guard is None else guard
    if common is None:
        common = agreed(config, clients=len(pool), task=facts.task, outputs=facts.outputs)
    assert config.seed is not None
    pool = pool.holding_back(config.client_test_fraction, seed=config.seed, groups=groups)
    scheme = common.scheme
    check_weights(config, common.loss, scheme, outputs=facts.outputs)
    example = _example(pool, facts, dtype)
    augmentation = augmentation_of(config, facts.input_shape, text=facts.vocabulary is not None, own=augment)
    model = model.to(dtype).cpu()
    counts = [len(data) for data in pool.clients]
    sizes = [config.batch_size] if config.batch_size else sorted({min(counts), max(counts)} if counts else ())
    try:
        architecture, weights, covered = _covered(config, scheme, model, example, facts, sizes)
    except TraceError as reason:
        others = _instead(config, model, example, facts, clients=len(pool)) if scheme.downlink.traced else ()
        if not others:
            raise
        raise TraceError(f"{reason} Without a veil this model trains under {', '.join(others)}.") from reason
    source: SecretSource = SeededSecrets(config.seed) if config.simulated_secrets else OsSecrets()
    if secret_epsilon(config, scheme):
        draw_secret_epsilon(weights, source.stream("epsilon"))
    if architecture.table is not None and architecture.table.symmetry is None:  # else it has been verified
        verify(architecture, weights, example, downlink=scheme.downlink, sizes=sizes)  # type: ignore[arg-type]
    architecture = architecture.to(device=device)
    weights = weights.to(device=device)
    return Job(
        config=config.with_changes(lr=rate_of(config, common.loss)),
        scheme=scheme,
        loss=common.loss,
        loss_because=common.loss_because,
        architecture=architecture,
        weights=weights,
        pool=pool.augmented(augmentation),
        test=None if test is None else test.to(dtype=dtype, device=device),
        facts=replace(facts, link=Link.of(common.loss, facts.task)),
        coverage=covered,
        secrets=source,
        cohort=_accepted(common.cohort, guard.policy),
        guard=guard,
        optimiser=common.optimiser,
        validation=None if validation is None else validation.to(dtype=dtype, device=device),
    )


def _accepted(cohort: Cohort, policy: Policy | None) -> Cohort:
    """The same, and where chance decides how many a round has, none that the clients' policy would refuse."""
    least = 1 if policy is None or policy.min_cohort is None else policy.min_cohort
    return replace(cohort, least=min(max(cohort.least, least), cohort.size)) if cohort.rate else cohort


def _covered(
    config: RunConfig, scheme: Scheme, model: nn.Module, example: Tensor, facts: ModelFacts, sizes: Sequence[int] = ()
) -> tuple[Architecture, Weights, Coverage | None]:
    """What the scheme makes of a model, and how much of it a veil hides; too little is refused."""
    architecture, weights = drawn(scheme, model, example, facts)
    if architecture.table is None:
        return architecture, weights, None
    down, secret = scheme.downlink, secret_epsilon(config, scheme)
    down.head_tensors(architecture)
    if architecture.table.symmetry is not None:
        architecture = verified(architecture, weights, example, downlink=down, sizes=sizes)  # type: ignore[arg-type]
    assert architecture.table is not None
    covered = coverage(architecture.table, head_noise=down.head_noise, secret_epsilon=secret, shifted=down.shifted)
    require_coverage(covered, minimum=config.min_coverage)
    return architecture, weights, nothing_hidden(covered) if config.public_start else covered


def secret_epsilon(config: RunConfig, scheme: Scheme) -> bool:
    """Whether normalisation layers get a secret ε: only scales would be given away by theirs (k = √(ε_sent/ε)).

    Without a veil the layers keep their own, unless a run is to be compared with one that has secret ones.
    """
    wanted = config.bn_eps == "secret" or (config.bn_eps == "auto" and scheme.downlink.traced)
    return wanted and scheme.downlink.family == "scale"


def _instead(
    config: RunConfig, model: nn.Module, example: Tensor, facts: ModelFacts, *, clients: int
) -> tuple[str, ...]:
    """The schemes without a veil that take this model, tried one after the other with options of their own."""
    plain = config.with_changes(options=None, family="auto", **dict.fromkeys(config.scheme_options))
    fitting = []
    for info in schemes.schemes():
        with suppress(FedVeilError):
            scheme = agreed(
                plain.with_changes(scheme=info.name), clients=clients, task=facts.task, shape=lambda round, rounds: 1.0
            ).scheme
            if not scheme.downlink.traced:
                drawn(scheme, model, example, facts)
                fitting.append(info.name)
    return tuple(fitting)


def _guard(config: RunConfig) -> Guard:
    policy = None if config.policy is None else read_policy(config.policy)
    if config.roster is None:
        if config.identities is not None:
            raise ConfigError(f"identities are of use with a roster only: give {spelled('roster')} too.")
        return Guard(policy)
    from fedveil.runs.terms import read_identities

    folder = config.identities or str(Path(config.roster).parent)
    return Guard(policy, read_roster(config.roster), read_identities(folder, clients=config.clients))


def read_policy(path: str | Path) -> Policy:
    """A client's own limits, from their file."""
    return Policy.parse(_read(path, "policy"), where=str(path))


def read_roster(path: str | Path) -> Roster:
    """Everybody's public signing keys, from their file."""
    from fedveil.crypto.keys import Roster

    return Roster.parse(_read(path, "roster"), where=str(path))


def _read(path: str | Path, what: str) -> str:
    try:
        return read_text(Path(path))
    except CheckpointError as reason:
        raise ConfigError(f"Cannot read the {what} {path}: {reason}") from reason


def _because(config: RunConfig, info: SchemeInfo, task: str, *, head_noise: bool) -> str:
    """Why the loss is what it is."""
    if config.loss is not None:
        return "as it was set"
    if info.default_loss != "auto":
        return "because head noise needs it" if head_noise else f"which {info.name} takes unless another is set"
    if task == "regression":
        return "because the targets are numbers"
    if (config.target_scale, config.true_weight) != (1.0, 1.0):
        return "because target_scale and true_weight are of it"
    return "because there are several labels" if task == "multilabel" else "because the targets are classes"


def _example(pool: ClientPool, facts: ModelFacts, dtype: torch.dtype) -> Tensor:
    if not pool.clients:
        return example_of(facts, dtype)
    first = pool.clients[0]
    x, _ = first.take(torch.arange(min(2, len(first))))
    if tuple(x.shape[1:]) != facts.input_shape:
        raise DataError(f"Inputs have shape {tuple(x.shape[1:])}, the model expects {facts.input_shape}.")
    return x.repeat(2, *([1] * (x.dim() - 1)))[:2].cpu()


def example_of(facts: ModelFacts, dtype: torch.dtype) -> Tensor:
    """Two made-up samples of the shape that facts name, where no data are at hand."""
    generator = torch.Generator().manual_seed(0)
    if facts.vocabulary is not None:
        return torch.randint(facts.vocabulary, (2, *facts.input_shape), generator=generator)
    return torch.randn((2, *facts.input_shape), generator=generator, dtype=torch.float64).to(dtype)


def _check_output(model: nn.Module, example: Tensor, facts: ModelFacts) -> None:
    model = model.to(example.dtype) if example.is_floating_point() else model
    try:
        with torch.no_grad():
            output = twin_of(model).eval()(example)  # the model itself has been shown nothing yet
    except Exception as reason:
        raise ConfigError(
            f"The model does not take inputs of shape {facts.input_shape}: {type(reason).__name__}: {reason}"
        ) from reason
    if not isinstance(output, Tensor) or tuple(output.shape) != (2, facts.outputs):
        shape = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(
            f"The model gives {shape} per sample, the data need {facts.outputs} "
            f"{'classes' if facts.task == 'classification' else 'outputs'}: build it with that many outputs."
        )
    try:
        with torch.random.fork_rng(devices=[]):
            twin = twin_of(model)
            output = (twin if twin.training else twin.train())(example)
            if isinstance(output, Tensor) and output.requires_grad:
                output.sum().backward()  # type: ignore[no-untyped-call]
    except Exception as reason:
        raise ConfigError(
            f"The model {named(model)} cannot be trained: a pass over two samples of shape {facts.input_shape} "
            f"and back fails with {type(reason).__name__} ({' '.join(str(reason).split())[:300]}). Mend the model: "
            "values that gradients need must not be changed in place."
        ) from reason
