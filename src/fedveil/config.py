"""What a run is: one flat, validated description. TOML in, TOML out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError, unknown_name

ModelOption = int | float | str | bool

_NOT_PART_OF_THE_RUN = frozenset(
    {"checkpoint_every", "evaluate_every", "rounds", "record", "record_rounds", "record_clients"}
)
_LARGEST_SEED = (1 << 63) - 1
_LARGEST_WHOLE = 1 << 53
_MOST_DIGITS = 7
_SCHEME_OPTIONS = (
    *("head_groups", "head_strength", "head_noise", "spread", "local_steps", "local_epochs"),
    *("epsilon", "delta", "clip", "accounting", "collusion", "pair_strength", "dropouts", "repair_limit"),
    *("honest_arrivals", "neighbours", "skip_cancelling", "cover", "unmask", "threshold", "value_range"),
    *("secret_sampling", "share", "share_decay", "strategy", "vote", "cipher"),
)


def _option(help_text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every setting of a run. None means: the scheme's or the data's own default."""

    scheme: str = _option("named scheme (see `fedveil schemes`)", "lossless")
    dataset: str = _option("embedded name (digits, breast-cancer) or a path", "digits")
    model: str = _option("model name, or package.module:factory", "mlp")
    model_options: dict[str, ModelOption] = field(default_factory=dict, metadata={"help": "model options"})
    clients: int = _option("number of clients", 10)
    rounds: int = _option("number of rounds", 50)
    seed: int | None = _option("seed of model, data order and (simulated) secrets")
    secrets: str | None = _option("os or seeded; default: seeded if a seed is given, otherwise os")

    target: str | None = _option("CSV: the column to predict")
    task: str | None = _option("classification or regression; default: from the data")
    text: str | None = _option("CSV: the column of texts")
    group: str | None = _option("CSV: the column that names each sample's owner")
    test_fraction: float = _option("share held out where the data has no test part", 0.2)
    partition: str = _option("iid, dirichlet, size, group or replacement", "iid")
    alpha: float = _option("dirichlet: concentration (small is skewed)", 0.5)
    ratio: float = _option("size: largest over smallest client", 2.0)

    cohort: float | int | None = _option("clients per round: a fraction in (0, 1] or a count")
    batch_size: int = _option("samples per step (0: all of the client's)", 0)
    lr: float = _option("learning rate", 0.1)
    lr_decay: float = _option("factor on the learning rate per round", 1.0)
    lr_schedule: str = _option("constant or cosine", "constant")
    momentum: float = _option("server momentum", 0.0)
    weight_decay: float = _option("server weight decay", 0.0)
    loss: str | None = _option("square or cross-entropy; default: the scheme's")
    target_scale: float = _option("square loss: the true class's target M", 1.0)
    true_weight: float = _option("square loss: the true class's weight k", 1.0)

    local_steps: int | None = _option("fedavg: local SGD steps per round")
    local_epochs: int | None = _option("fedavg: local epochs per round")
    head_noise: bool | None = _option("noise on the last layer")
    head_groups: int | None = _option("lossless: number m of secret γ (default: one per output)")
    head_strength: float | None = _option("size of the head noise relative to the outputs")
    spread: float | None = _option("scales lie in [1/spread, spread]")
    epsilon: float | None = _option("DP schemes: ε of the whole run (mpdp, mp-cdp: of one round)")
    delta: float | None = _option("DP schemes: δ")
    clip: float | None = _option(
        "DP schemes: largest L2 norm of a sample's gradient (of an update, with local training)"
    )
    accounting: str | None = _option("DP schemes: exact, or paper (the paper's formula)")
    collusion: float | None = _option("nadp, veil-dp, veil-secagg: share of clients that may side with the server")
    pair_strength: float | None = _option("nadp, veil-dp, mpdp: strength of the noise that cancels")
    dropouts: str | None = _option("nadp, veil-dp: repair, or tolerate")
    repair_limit: float | None = _option("nadp, veil-dp: largest share of a cohort that clients repair for")
    honest_arrivals: bool | None = _option("nadp, veil-dp: take the server's word for who did not arrive")
    neighbours: int | None = _option("how many others each client shares noise or masks with")
    skip_cancelling: bool | None = _option("nadp: leave out noise that cancels (accuracy simulations only)")
    cover: str | None = _option("veil-dp: noise, or masks (with integer noise)")
    unmask: str | None = _option("veil-secagg: always, or on-dropout")
    threshold: float | None = _option("veil-secagg: more than this share of a neighbourhood must answer")
    value_range: float | None = _option("veil-secagg: numbers beyond it are cut off")
    secret_sampling: float | None = _option("ldp: chance of each record to be in a round's secret batch")
    share: float | None = _option("paraaegis: share r of the parameters that travels hidden, 0 to 1")
    share_decay: float | None = _option("paraaegis: factor λ on the share per round, above 0 and up to 1")
    strategy: str | None = _option("paraaegis: hide the max (largest), min or random coordinates")
    vote: str | None = _option("paraaegis: tags, or histogram (hides who voted alike; 8 bytes per parameter)")
    cipher: str | None = _option("paraaegis, ckks-fedavg, serial: ckks, or pads (masks and pads)")
    policy: str | None = _option("clients' own limits: a TOML file with max_epsilon, min_cohort, …")
    max_size_ratio: float = _option("largest number of samples a client may announce, in medians of all", 100.0)
    roster: str | None = _option("clients' public signing keys: a TOML file made by `fedveil keys`")
    identities: str | None = _option("folder of the clients' private signing keys")
    simulate_dropout: float = _option("simulation: chance that a client vanishes before it uploads", 0.0)
    bn_eps: str = _option("ε of normalisation layers: secret or public", "secret")
    min_coverage: float = _option("stop if a veil hides less than this share of parameters", 0.9)

    device: str = _option("cpu or cuda", "cpu")
    dtype: str = _option("float32 or float64", "float32")
    vectorise: bool | None = _option("many clients at once (default: where that is faster)")
    checkpoint_every: int = _option("rounds between checkpoints (0: never)", 10)
    evaluate_every: int = _option("rounds between evaluations on the test part (0: only at the end)", 1)
    record: bool = _option("for audits: keep the messages of some rounds, and the server's secrets beside them", False)
    record_rounds: str | None = _option(
        "record: which rounds, like 1,2,10 or 1-5; default: the first three and the last"
    )
    record_clients: str | None = _option("record: which clients, like 0,1 or 0-9; default: 0 and 1")

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{one.name} must be a finite number (got {value}).")
        if self.seed is not None and not 0 <= self.seed <= _LARGEST_SEED:
            raise ConfigError(f"seed must lie between 0 and 2^63 − 1 (got {self.seed}).")
        positive = {"clients": self.clients, "rounds": self.rounds, "lr": self.lr, "lr_decay": self.lr_decay}
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"{name} must be positive (got {value}).")
        at_least_zero = {
            "batch_size": self.batch_size,
            "weight_decay": self.weight_decay,
            "checkpoint_every": self.checkpoint_every,
            "evaluate_every": self.evaluate_every,
        }
        for name, value in at_least_zero.items():
            if not value >= 0:
                raise ConfigError(f"{name} must not be negative (got {value}).")
        if not self.max_size_ratio >= 1:
            raise ConfigError(f"max_size_ratio must be at least 1 (got {self.max_size_ratio}).")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must lie in [0, 1) (got {self.momentum}).")
        if not 0 <= self.simulate_dropout < 1:
            raise ConfigError(f"simulate_dropout must lie in [0, 1) (got {self.simulate_dropout}).")
        if not 0 <= self.min_coverage <= 1:
            raise ConfigError(f"min_coverage must lie in [0, 1] (got {self.min_coverage}).")
        choices = {
            "dtype": ("float32", "float64"),
            "lr_schedule": ("constant", "cosine"),
            "bn_eps": ("secret", "public"),
            "secrets": (None, "os", "seeded"),
            "task": (None, "classification", "regression"),
            "loss": (None, "square", "cross-entropy"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise unknown_name(name, str(getattr(self, name)), [one for one in known if one])
        for name in ("record_rounds", "record_clients"):
            given = getattr(self, name)
            if given is not None and not self.record:
                raise ConfigError(f"{name} says what to record, but nothing is recorded: set record (--record) too.")
            if given is not None:
                numbers_of(given, name)
        if self.secrets == "seeded" and self.seed is None:
            raise ConfigError("secrets = 'seeded' needs a seed.")

    @property
    def simulated_secrets(self) -> bool:
        """Whether secrets derive from the seed, so that anyone who knows it can predict them."""
        return self.secrets == "seeded" or (self.secrets is None and self.seed is not None)

    @property
    def scheme_options(self) -> dict[str, int | float | str | bool | None]:
        """The settings that belong to the scheme."""
        return {name: getattr(self, name) for name in _SCHEME_OPTIONS}

    def with_changes(self, **changes: Any) -> RunConfig:
        """The same run with some settings changed."""
        return dataclasses.replace(self, **changes)

    def fingerprint(self) -> str:
        """A digest of everything that decides the trained model (except how long it trains)."""
        skipped = _NOT_PART_OF_THE_RUN - ({"rounds"} if self.lr_schedule == "cosine" else set())
        kept = {name: value for name, value in dataclasses.asdict(self).items() if name not in skipped}
        if ":" in self.model:
            kept["model"] = "own code"  # wherever it lies; whoever resumes the run names it again
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def to_toml(self) -> str:
        """The configuration as a TOML document; settings left to defaults of others are omitted."""
        lines, table = [], []
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, dict):
                table = [f"{key} = {toml_of(item)}" for key, item in value.items()]
            elif value is not None:
                lines.append(f"{one.name} = {toml_of(value)}")
        if table:
            lines += ["", "[model_options]", *table]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_mapping(settings: Mapping[str, Any], *, where: str = "configuration") -> RunConfig:
        """A configuration from plain data; unknown keys and wrong types are refused by name."""
        known = {one.name: one for one in fields(RunConfig)}
        cleaned: dict[str, Any] = {}
        for key, value in settings.items():
            name = key.replace("-", "_")
            if name not in known:
                raise unknown_name(f"setting in {where}:", key, known)
            if value is None and str(known[name].type).endswith("| None"):
                continue
            if name in cleaned:
                raise ConfigError(f"{where}: {name} is given twice, as {name} and as {name.replace('_', '-')}.")
            cleaned[name] = _checked(name, value, str(known[name].type), where)
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


def numbers_of(text: str, name: str) -> tuple[int, ...]:
    """Whole numbers as they are typed, 1,2,10 or 0-9: ascending, each once."""
    found: set[int] = set()
    for word in text.split(","):
        first, dash, last = (part.strip() for part in word.partition("-"))
        ends = (first, last) if dash else (first, first)
        fit = all(one.isascii() and one.isdigit() and len(one) <= _MOST_DIGITS for one in ends)
        if not fit or int(ends[0]) > int(ends[1]):
            raise ConfigError(f"{name} is a list of whole numbers like 1,2,10 or 0-9 (got {text[:60]!r}).")
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(found))


def toml_of(value: object) -> str:
    """A setting's value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _checked(name: str, value: object, kind: str, where: str) -> object:
    accepted: list[type] = []
    for word, types in (
        ("int", [int]),
        ("float", [float, int]),
        ("str", [str]),
        ("bool", [bool]),
        ("dict", [dict]),
    ):
        if word in kind.split("[")[0].replace("|", " ").split():
            accepted += types
    fits = isinstance(value, tuple(accepted)) and not (isinstance(value, bool) and bool not in accepted)
    if not fits:
        raise ConfigError(f"{where}: {name} must be {kind.replace(' | None', '')} (got {str(value)[:60]!r}).")
    if type(value) is int and name != "seed" and abs(value) > _LARGEST_WHOLE:
        raise ConfigError(f"{where}: {name} is too large a number.")
    if isinstance(value, dict):
        for option, one in value.items():
            if not isinstance(option, str) or not isinstance(one, int | float | str | bool):
                raise ConfigError(f"{where}: {name} holds numbers, texts and true or false by name.")
    # A whole number where a float belongs (lr = 1); a cohort keeps the difference between 1 and 1.0.
    return float(value) if float in accepted and type(value) is int and name != "cohort" else value


def parse_model_options(pairs: list[str]) -> dict[str, ModelOption]:
    """key=value pairs from a command line, with values read as TOML (true, 3, 0.5, text)."""
    options: dict[str, ModelOption] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"A model option is written key=value, like depth=5 (got {pair!r}).")
        try:
            options[key] = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            options[key] = text
    return options
