"""Groups of options that several schemes have, each declared once: a scheme takes a group as one parameter.

`dp: DpOptions` in a scheme's signature gives it the options epsilon, delta, clip and accounting; with
`= DpOptions(clip=0.5)` behind it, with another default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from fedveil.crypto.paillier import KEY_BITS
from fedveil.downlink.rescaling import HeadNoise
from fedveil.downlink.symmetry import STEP_BY_STEP
from fedveil.errors import ConfigError, spelled, unknown_name
from fedveil.ledger.gaussian import mpdp_sigma, paper_sigma
from fedveil.plain import list_of
from fedveil.protocol.directory import draws_of
from fedveil.schemes.registry import Setting
from fedveil.uplink.graph import COLLUSION, colluding, default_degree, threshold, withstood
from fedveil.uplink.masked import Masked, Unmasking
from fedveil.uplink.noise_plan import Accounting, NoisePlan, Target
from fedveil.uplink.noised import Dropouts, Noised
from fedveil.uplink.threshold import OpenedByKey, ThresholdPaillier
from fedveil.uplink.unmasking import Quorum
from fedveil.work.batches import LocalOptimiser, OptimiserName, Schedule
from fedveil.work.clipping import AdaptiveClip, ClippedSamples, ClippedUpdate, check_bound, check_clip_decay
from fedveil.work.local_sgd import LocalSteps
from fedveil.work.losses import SquareLoss, refuse_head_noise

SIMULATED_BITS = 256
"""Of a key in a simulation: sums are the same under any."""

CLIPPED_STEPS = {"lr": 0.1}
"""What schemes that clip samples declare for comparisons: clipped gradients are small, and bear larger steps."""
SMALL_CLIP = {"clip": 1e-4}
"""And those that cover a whole client: noise follows the clip, and a small one leaves something of what is hidden."""
ASSUMED_STEPS = {"lr": 0.003, "head_groups": 1}
"""And MP-DP with its baselines: noise of a length that nobody clips to bears small steps alone; one γ, as it has it."""


@dataclass(frozen=True)
class Budget:
    """How much may be learnt: (ε, δ)."""

    epsilon: float = 3.0
    delta: float = 1e-5

    def target(self, setting: Setting) -> Target:
        """What a whole run aims at."""
        return Target(self.epsilon, self.delta, setting.rounds, setting.participations, setting.rate)


Calibration = Literal["equations", "tail"]


@dataclass(frozen=True)
class AssumedBudget(Budget):
    """(ε, δ) of one round as MP-DP reckons, for gradients that are taken to lie within a ball."""

    sensitivity: float = 1.0
    calibration: Calibration = "equations"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sensitivity) and self.sensitivity > 0):
            raise ConfigError(f"sensitivity must be a positive number (got {self.sensitivity}).")
        if self.calibration not in get_args(Calibration):
            raise unknown_name("calibration", self.calibration, get_args(Calibration))

    def sigma(self, strength: float = math.inf) -> float:
        """The deviation of the noise in a sum, `strength` that of pairs over what each client adds for itself."""
        if self.calibration == "tail":
            return self.sensitivity * paper_sigma(self.epsilon, self.delta)
        return self.sensitivity * mpdp_sigma(self.epsilon, self.delta, strength or math.inf)


@dataclass(frozen=True)
class DpOptions(Budget):
    """Differential privacy that is proven: what is clipped, and who counts."""

    clip: float = 1.0
    accounting: Accounting = "exact"
    noise_decay: float = 1.0
    clip_decay: float = 1.0
    epsilon_per_client: str | None = None

    def target(self, setting: Setting) -> Target:
        """What a whole run aims at, with noise that shrinks over its rounds and ε of each client's own where asked."""
        whole = replace(super().target(setting), decay=self.noise_decay)
        if self.epsilon_per_client is None:
            return whole
        each = list_of(self.epsilon_per_client, "epsilon_per_client")
        if setting.clients and len(each) != setting.clients:
            raise ConfigError(
                f"epsilon_per_client names {len(each)} clients, and there are {setting.clients}: give one ε for each."
            )
        return replace(whole, epsilon=min(each), each=each)

    @property
    def by_paper(self) -> bool:
        """Whether noise is the paper's, of whatever worth."""
        return self.accounting == "paper"

    def shrinking(self, setting: Setting) -> float:
        """The factor on the clip each round, if the last round's can be computed with."""
        check_clip_decay(self.clip_decay)
        check_bound(self.clip * self.clip_decay ** (setting.rounds - 1))
        return self.clip_decay


@dataclass(frozen=True)
class AdaptiveOptions:
    """A clip of updates that follows them."""

    adaptive_clip: bool = False
    clip_quantile: float | None = None
    clip_rate: float | None = None
    clip_share: float | None = None
    clip_range: float | None = None

    def rule(self) -> AdaptiveClip | None:
        """How it does, where it does."""
        given = {
            "quantile": self.clip_quantile,
            "rate": self.clip_rate,
            "share": self.clip_share,
            "range": self.clip_range,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if given and not self.adaptive_clip:
            raise ConfigError(
                f"clip_{min(given)} says how a clip follows the updates, and this one does not: set "
                f"{spelled('adaptive_clip', True)} too, or leave it out."
            )
        return AdaptiveClip(**given) if self.adaptive_clip else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class LocalOptions:
    """Training on a client between two rounds."""

    local_steps: int | None = None
    local_epochs: int | None = None
    client_lr: float | None = None
    client_optimiser: OptimiserName | None = None
    client_momentum: float | None = None
    client_weight_decay: float | None = None
    client_beta1: float | None = None
    client_beta2: float | None = None
    client_tau: float | None = None

    @property
    def one_gradient(self) -> bool:
        """Whether a round is one gradient."""
        return self.local_steps in (None, 1) and self.local_epochs is None

    @property
    def families(self) -> tuple[str, ...]:
        """Under which families of a veil clients may train so, the one that hides most first."""
        return STEP_BY_STEP[self.client_optimiser or "sgd"]

    @property
    def optimiser(self) -> LocalOptimiser:
        """What clients step by."""
        given = {
            "kind": self.client_optimiser,
            "momentum": self.client_momentum,
            "weight_decay": self.client_weight_decay,
            "beta1": self.client_beta1,
            "beta2": self.client_beta2,
            "tau": self.client_tau,
        }
        return LocalOptimiser(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def refuse_training(self) -> None:
        """Refuse what says how clients train by themselves, where a round is one gradient."""
        for name in CLIENTS_OWN:
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} is for local training, and here a client gives one gradient a round, of which the server "
                    f"takes the step: its own {spelled('lr')}, {spelled('optimiser')}, {spelled('momentum')} and "
                    f"{spelled('weight_decay')} do the same to the mean gradient, under a veil to what is recovered, "
                    f"and lose nothing. For local training give more than one {spelled('local_steps')}, or "
                    f"{spelled('local_epochs')}; under a veil, without head noise ({spelled('head_noise', False)})."
                )

    def training(self, setting: Setting, *, epochs: int | None = None) -> LocalSteps:
        """Steps of the clients' optimiser; as many `epochs` where nothing is said."""
        if self.local_steps is not None and self.local_epochs is not None:
            raise ConfigError("Give local_steps or local_epochs, not both.")
        epochs = self.local_epochs if self.local_steps is not None or self.local_epochs is not None else epochs
        return LocalSteps(
            setting.loss,
            setting.batches,
            setting.schedule if self.client_lr is None else Schedule(self.client_lr),
            self.local_steps,
            epochs,
            optimiser=self.optimiser,
        )

    def clipped(
        self,
        setting: Setting,
        dp: DpOptions,
        secret_sampling: float | None = None,
        adaptive: AdaptiveClip | None = None,
        *,
        statistics: bool = False,
    ) -> ClippedSamples | ClippedUpdate:
        """One step on clipped samples, or, with local training, a clipped update, batch `statistics` beside it."""
        decay = dp.shrinking(setting)
        if self.one_gradient:
            self.refuse_training()
            if adaptive is not None:
                raise ConfigError(
                    f"{spelled('adaptive_clip', True)} follows the updates of clients, and here the gradient of every "
                    f"sample is clipped by itself: give more than one {spelled('local_steps')}, or "
                    f"{spelled('local_epochs')}."
                )
            return ClippedSamples(setting.loss, setting.batches, dp.clip, setting.vectorise, secret_sampling, decay)
        if secret_sampling is not None:
            raise ConfigError("secret_sampling draws the one batch of a round: it does not go with local training.")
        return ClippedUpdate(self.training(setting), dp.clip, adaptive, clip_decay=decay, statistics=statistics)


CLIENTS_OWN = tuple(option.name for option in fields(LocalOptions) if option.name.startswith("client_"))
"""What says how clients train by themselves, and means nothing where they do not."""


@dataclass(frozen=True)
class HeadOptions:
    """Noise on the last layer."""

    head_strength: float = 1.0
    head_noise: bool = True

    def noise(self, setting: Setting) -> HeadNoise | None:
        """The head noise that fits the loss, with one γ, if it is wanted."""
        if not self.head_noise:
            return None
        refuse_head_noise(setting.loss)
        weighted = isinstance(setting.loss, SquareLoss) and setting.loss.true_weight != 1.0
        if not self.head_strength > 0:
            raise ConfigError(f"head_strength must be positive (got {self.head_strength}); 1 is the default.")
        return HeadNoise(1, self.head_strength, weighted)


@dataclass(frozen=True)
class GroupedHeadOptions(HeadOptions):
    """The same with several γ: so many, or by a partition of the outputs."""

    head_groups: int | None = None
    head_partition: str | None = None

    def noise(self, setting: Setting) -> HeadNoise | None:
        """The head noise that fits the loss, if it is wanted."""
        noise, given = super().noise(setting), self.head_partition
        if given is not None and (noise is None or self.head_groups is not None):
            other = spelled("head_noise", False) if noise is None else spelled("head_groups")
            raise ConfigError(
                f"{spelled('head_partition')} says itself which outputs share a γ: leave it or {other} out."
            )
        if noise is None:
            return None
        return replace(noise, groups=self.head_groups, partition=None if given is None else _partition(given))


def _partition(text: str) -> tuple[int, ...]:
    numbers = list_of(text, "head_partition")
    count = len(set(numbers))
    if set(numbers) != set(range(count)):
        raise ConfigError(
            f"head_partition names the γ of every output by whole numbers from 0 on, none left out: {text[:60]!r} does "
            "not."
        )
    return tuple(map(int, numbers))


@dataclass(frozen=True)
class PairOptions:
    """Noise that pairs of clients share, and that cancels in the sum."""

    collusion: float = 0.0
    pair_strength: float | None = None
    dropouts: Dropouts = "repair"
    repair_limit: float = 1 / 3
    honest_arrivals: bool = False
    neighbours: int | None = None

    def noised(self, setting: Setting, dp: DpOptions, *, cancelling: bool = True) -> Noised:
        """Residual and pair noise; `tolerate` keeps the paper's pair strength, since it may stay behind."""
        plan = NoisePlan(
            dp.target(setting),
            "pairs",
            dp.accounting,
            self.pair_strength,
            self.collusion,
            self.neighbours,
            tolerant=self.dropouts == "tolerate",
            asked=setting.cohort,
            draws=draws_of(setting.rounds),
        )
        return Noised(plan, self.dropouts, self.repair_limit, cancelling=cancelling)


@dataclass(frozen=True)
class AssumedPairOptions:
    """Pair noise as MP-DP has it."""

    neighbours: int | None = 5
    pair_strength: float = math.sqrt(1000.0)
    skip_cancelling: bool = False


KeyCover = Literal["paillier", "masks"]


@dataclass(frozen=True)
class KeyOptions:
    """A key that all clients hold together; or, with the cover masks, masks that open the same sums at once."""

    key_bits: int | None = None
    collusion: float = COLLUSION
    cover: KeyCover = "paillier"

    def uplink(
        self, setting: Setting, value_range: float = 2.0**24, *, noise: NoisePlan | None = None
    ) -> ThresholdPaillier | Masked:
        """Sums that clients decrypt; a key that could be found out is for simulations, which hide nothing anyway."""
        if self.cover == "masks" and self.key_bits is not None:
            raise ConfigError(f"{spelled('key_bits')} is of {spelled('cover', 'paillier')}: leave it out under masks.")
        usual = SIMULATED_BITS if setting.simulation else KEY_BITS
        bits = usual if self.key_bits is None else self.key_bits
        if bits < KEY_BITS and not setting.simulation:
            raise ConfigError(
                f"A key of {bits} bits can be found out: give {spelled('key_bits', KEY_BITS)} or more, or a "
                f"{spelled('seed')}, which makes the run a simulation."
            )
        cipher = ThresholdPaillier(bits, self.collusion, setting.clients, setting.cohort, value_range, noise)
        return cipher if self.cover == "paillier" else same_sums(cipher, value_range)


@dataclass(frozen=True)
class CiphersQuorum(Quorum):
    """Of a neighbourhood that is the whole round, whatever its size: as many as are in a cipher's smallest sum."""

    cipher: OpenedByKey = field(kw_only=True)

    def of(self, holders: int) -> int:
        """All of that sum but the one whose neighbours they are."""
        return threshold(holders, wanted=self.cipher.fewest(holders + 1) - 1)


@dataclass(frozen=True)
class SameSums(Masked):
    """Masks of the numbers and the noise that a `cipher` hides, in its sums and no others."""

    cipher: OpenedByKey = field(kw_only=True)

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """Rounds that the cipher would not do are not done, either."""
        self.cipher.fits(clients, asked=asked)
        super().fits(clients, asked=asked)


def same_sums(cipher: OpenedByKey, value_range: float) -> SameSums:
    """What a comparison trains in a cipher's place: the same model to the last bit, in seconds."""
    clients = max(cipher.cohort, 3)
    near, absent = clients - 1, cipher.absences(clients)
    if default_degree(clients) < near:
        raise ConfigError(
            f"Among {clients} clients a round masks are shared with some of them only, and their sums may lack "
            f"others than a key's: leave out {spelled('cover', 'masks')}, or have fewer clients a round."
        )
    # Of a whole round, for the ledger; never below one half, as the smallest sum is of more than that.
    quorum = CiphersQuorum(max((near - absent - 1) / near, 0.5), cipher=cipher)
    collusion = max(cipher.collusion, COLLUSION)
    if not withstood(clients, share=collusion, needed=quorum.of):
        raise ConfigError(
            f"Masks that open a cipher's sums do not withstand {colluding(clients, collusion)} of {clients} clients "
            f"that side with the server: leave out {spelled('cover', 'masks')}, or lower {spelled('collusion')}."
        )
    return SameSums(value_range, quorum=quorum, noise=cipher.plan, collusion=collusion, cipher=cipher)


@dataclass(frozen=True)
class MaskOptions:
    """Masks that pairs of clients share, modulo 2^64."""

    unmask: Unmasking = "always"
    threshold: float = 2 / 3
    neighbours: int | None = None

    def plan(self, setting: Setting, dp: DpOptions, *, collusion: float, word_bits: int = 64) -> NoisePlan:
        """The noise of everybody in a sum under them."""
        return NoisePlan(
            dp.target(setting),
            "sum",
            dp.accounting,
            collusion=collusion,
            neighbours=self.neighbours,
            quorum=self.threshold,
            asked=setting.cohort,
            word_bits=word_bits,
        )

    def masks(
        self, value_range: float = 2.0**24, *, noise: NoisePlan | None = None, collusion: float = COLLUSION
    ) -> Masked:
        """The uplink they make."""
        quorum = Quorum(self.threshold)
        return Masked(value_range, self.unmask, quorum, self.neighbours, noise=noise, collusion=collusion)
