"""The flags of trackers, which stand alone or before a place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

_PANEL = "Tracking"

TensorBoard = Annotated[
    str | None,
    typer.Option(
        "--tensorboard",
        metavar="[DIR]",
        help="Also write TensorBoard's event files. (alone: OUT/tensorboard; extra tensorboard)",
        rich_help_panel=_PANEL,
    ),
]
Mlflow = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="[URI]",
        help="Also log to MLflow; rounds arrive with the checkpoint that holds them. (alone: MLFLOW_TRACKING_URI, or "
        "./mlflow.db; extra mlflow)",
        rich_help_panel=_PANEL,
    ),
]
_ALONE = ("--tensorboard", "--mlflow")


class Command(TyperCommand):
    """A command whose tracking flags may stand alone: they then have an empty value, which is the usual place."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Give a flag that stands alone its empty value."""
        following: list[str | None] = [*args[1:], None]
        given = [
            f"{word}=" if word in _ALONE and (after is None or after.startswith("-")) else word
            for word, after in zip(args, following, strict=False)
        ]
        parsed: list[Any] = super().parse_args(ctx, given)
        return parsed


_DATA, _TRAIN, _VEIL = "Data", "Training", "Veil"
_PRIVACY, _MASKS, _LIMITS, _MACHINE = "Privacy", "Masks", "Clients' own limits", "Machine"
_HIDDEN, _AUDIT = "Hidden share", "Audit"


def _flag(panel: str, text: str, *names: str) -> typer.models.OptionInfo:
    made: typer.models.OptionInfo = typer.Option(*names, help=text, rich_help_panel=panel)
    return made


Dataset = Annotated[
    str | None, _flag(_DATA, "digits, breast-cancer, or a file or folder. (default: digits)", "--dataset")
]
Target = Annotated[str | None, _flag(_DATA, "CSV: the column to predict.")]
Task = Annotated[str | None, _flag(_DATA, "classification or regression.")]
Text = Annotated[str | None, _flag(_DATA, "CSV: the column of texts.")]
Group = Annotated[str | None, _flag(_DATA, "CSV: the column of sample owners.")]
TestFraction = Annotated[float | None, _flag(_DATA, "Share held out where there is no test part. (default: 0.2)")]
Partition = Annotated[str | None, _flag(_DATA, "iid, dirichlet, size, group, replacement. (default: iid)")]
Alpha = Annotated[float | None, _flag(_DATA, "dirichlet: concentration. (default: 0.5)")]
Ratio = Annotated[float | None, _flag(_DATA, "size: largest client over smallest. (default: 2)")]

Model = Annotated[str | None, _flag(_TRAIN, "Model name, or package.module:factory. (default: mlp)")]
ModelOption = Annotated[list[str], _flag(_TRAIN, "key=value, repeatable: -o depth=5.", "--model-option", "-o")]
Clients = Annotated[int | None, _flag(_TRAIN, "Number of clients. (default: 10)")]
Cohort = Annotated[str | None, _flag(_TRAIN, "Clients per round: 0.1 (a fraction) or 5 (a count). (default: all)")]
Rounds = Annotated[int | None, _flag(_TRAIN, "Number of rounds. (default: 50)")]
BatchSize = Annotated[int | None, _flag(_TRAIN, "Samples per step; 0 takes all. (default: 0)")]
LearningRate = Annotated[float | None, _flag(_TRAIN, "Learning rate. (default: 0.1)")]
LrDecay = Annotated[float | None, _flag(_TRAIN, "Factor on the rate per round. (default: 1)")]
LrSchedule = Annotated[str | None, _flag(_TRAIN, "constant or cosine. (default: constant)")]
Momentum = Annotated[float | None, _flag(_TRAIN, "Server momentum. (default: 0)")]
WeightDecay = Annotated[float | None, _flag(_TRAIN, "Server weight decay. (default: 0)")]
Loss = Annotated[
    str | None,
    _flag(
        _TRAIN,
        "square or cross-entropy. (default: square with head noise, which needs it; else cross-entropy for classes)",
    ),
]
TargetScale = Annotated[float | None, _flag(_TRAIN, "Square loss: the true class's target M. (default: 1)")]
TrueWeight = Annotated[float | None, _flag(_TRAIN, "Square loss: the true class's weight k. (default: 1)")]
LocalSteps = Annotated[
    int | None,
    _flag(
        _TRAIN, "fedavg, ldp, cdp, nadp, paraaegis: local steps per round. (default: 1; more make a client the unit)"
    ),
]
LocalEpochs = Annotated[
    int | None,
    _flag(
        _TRAIN, "fedavg, ldp, cdp, nadp, paraaegis: local epochs per round. (default: paraaegis and its baselines 1)"
    ),
]

HeadNoise = Annotated[
    bool | None, _flag(_VEIL, "Noise on the last layer. (default: on)", "--head-noise/--no-head-noise")
]
HeadGroups = Annotated[
    int | None, _flag(_VEIL, "Head noise: number m of secret γ. (default: one per output; pbpfl: 1)")
]
HeadStrength = Annotated[float | None, _flag(_VEIL, "Head noise relative to the outputs. (default: 1)")]
Spread = Annotated[float | None, _flag(_VEIL, "Scales lie in 1/spread … spread. (default: 4; veil-dp: 1.5)")]
BnEps = Annotated[str | None, _flag(_VEIL, "ε of normalisation layers: secret or public. (default: secret)")]
MinCoverage = Annotated[float | None, _flag(_VEIL, "Stop if less is hidden. (default: 0.9)")]

Epsilon = Annotated[
    float | None,
    _flag(_PRIVACY, "ε of the whole run; for mpdp, mpdp-naive and mp-cdp of one round. (default: 3)"),
]
Delta = Annotated[float | None, _flag(_PRIVACY, "δ. (default: 1e-5)")]
Clip = Annotated[
    float | None,
    _flag(_PRIVACY, "Largest L2 norm of a sample's gradient; of an update, with local training. (default: 1)"),
]
Accounting = Annotated[
    str | None,
    _flag(_PRIVACY, "exact: the least noise that meets ε; paper: what the paper's formula says. (default: exact)"),
]
Collusion = Annotated[
    float | None,
    _flag(
        _PRIVACY,
        "nadp, veil-dp, veil-secagg: share of clients that may side with the server. (default: noise: 0; masks: 0.1)",
    ),
]
PairStrength = Annotated[
    float | None,
    _flag(
        _PRIVACY,
        "nadp, veil-dp, mpdp: how strong the noise is that cancels. (default: 10; on a sparse graph √1000; the "
        "paper's with --accounting paper or --dropouts tolerate)",
    ),
]
Neighbours = Annotated[
    int | None,
    _flag(
        _PRIVACY,
        "With how many others each client shares noise or masks; even for masks. (default: noise: all; mpdp: 5; "
        "masks: as many as collusion calls for, all up to 32 clients)",
    ),
]
Dropouts = Annotated[
    str | None,
    _flag(
        _PRIVACY,
        "nadp, veil-dp: what becomes of noise shared with missing clients. repair or tolerate. (default: repair)",
    ),
]
RepairLimit = Annotated[
    float | None, _flag(_PRIVACY, "nadp, veil-dp: largest share of a cohort that clients repair for. (default: 1/3)")
]
HonestArrivals = Annotated[
    bool | None,
    _flag(
        _PRIVACY,
        "nadp, veil-dp: take the server's word for who did not arrive. (default: no)",
        "--honest-arrivals/--no-honest-arrivals",
    ),
]
SkipCancelling = Annotated[
    bool | None,
    _flag(
        _PRIVACY,
        "nadp, mpdp: leave out noise that cancels: same accuracy, no protection. (default: no)",
        "--skip-cancelling/--no-skip-cancelling",
    ),
]

SecretSampling = Annotated[
    float | None,
    _flag(_PRIVACY, "ldp: each record is in a round's batch with this chance, drawn in secret. (default: no sampling)"),
]

Cover = Annotated[str | None, _flag(_MASKS, "veil-dp: noise, or masks with integer noise. (default: noise)")]
Unmask = Annotated[
    str | None,
    _flag(
        _MASKS,
        "always: two phases a round; on-dropout: one, if the server is honest about arrivals. (default: always)",
    ),
]
Threshold = Annotated[
    float | None, _flag(_MASKS, "More than this share of a neighbourhood must answer. (default: 2/3)")
]
ValueRange = Annotated[
    float | None, _flag(_MASKS, "Numbers beyond it are cut off, 1 to 2^40. (default: 2^24; for a hidden share 256)")
]

Share = Annotated[
    float | None,
    _flag(
        _HIDDEN, "paraaegis: share r of the update that travels hidden; 0 is dp-fedavg, 1 ckks-fedavg. (default: 0.1)"
    ),
]
ShareDecay = Annotated[float | None, _flag(_HIDDEN, "paraaegis: factor λ on the share per round. (default: 1)")]
Strategy = Annotated[
    str | None, _flag(_HIDDEN, "paraaegis: hide the max (largest), min or random coordinates. (default: max)")
]
Vote = Annotated[
    str | None,
    _flag(
        _HIDDEN,
        "paraaegis: tags (the server sees which votes overlap) or histogram (it does not; 8 bytes per parameter). "
        "(default: tags)",
    ),
]
Cipher = Annotated[
    str | None,
    _flag(
        _HIDDEN,
        "paraaegis, ckks-fedavg, serial: ckks (extra he; one client's help opens it), or pads (faster; it does not). "
        "(default: ckks)",
    ),
]

Policy = Annotated[
    str | None,
    _flag(
        _LIMITS,
        "TOML file: max_epsilon, delta, collusion, min_cohort, max_clip, min_clip, max_size_ratio. "
        "No message can widen it.",
    ),
]
MaxSizeRatio = Annotated[
    float | None,
    _flag(
        _LIMITS,
        "Who claims more samples than this many times the median of all clients takes no part. (default: 100)",
    ),
]
Roster = Annotated[str | None, _flag(_LIMITS, "TOML file of everybody's public signing key (see `fedveil keys`).")]
Identities = Annotated[
    str | None, _flag(_LIMITS, "Folder of the clients' private signing keys. (default: the roster's)")
]

Seed = Annotated[int | None, _flag(_MACHINE, "Reproducible run; its secrets are simulated.")]
Secrets = Annotated[str | None, _flag(_MACHINE, "os, or seeded (a simulation).")]
SimulateDropout = Annotated[
    float | None,
    _flag(_MACHINE, "Chance that a client vanishes before it uploads; with a vote, also before that. (default: 0)"),
]
Device = Annotated[str | None, _flag(_MACHINE, "cpu or cuda. (default: cpu)")]
Dtype = Annotated[str | None, _flag(_MACHINE, "float32 or float64. (default: float32)")]
Vectorise = Annotated[
    bool | None, _flag(_MACHINE, "Many clients at once. (default: where faster)", "--vectorise/--no-vectorise")
]
CheckpointEvery = Annotated[int | None, _flag(_MACHINE, "Rounds between checkpoints; 0: never. (default: 10)")]
EvaluateEvery = Annotated[int | None, _flag(_MACHINE, "Rounds between evaluations; 0: at the end. (default: 1)")]

Record = Annotated[
    bool | None,
    _flag(
        _AUDIT,
        "Keep what passes in some rounds for an audit, in OUT/record: messages, and the server's secrets beside them. "
        "(default: no)",
        "--record/--no-record",
    ),
]
RecordRounds = Annotated[str | None, _flag(_AUDIT, "Which rounds: 1,2,10. (default: the first three and the last)")]
RecordClients = Annotated[str | None, _flag(_AUDIT, "Which clients: 0,1. (default: 0 and 1)")]


OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Your own code that builds the model, file.py:factory or package.module:factory: code that files name is "
        "not run.",
    ),
]


def own_model(text: str | None) -> str | None:
    """A model as it is typed: on a command, code may be named; in a file it may not."""
    from fedveil.models.custom import typed

    return None if text is None else typed(text)


def cohort_of(text: str) -> float | int:
    """A cohort as it is typed: 0.1 is a fraction, 5 a count."""
    from fedveil.errors import ConfigError

    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ConfigError(f"cohort is a fraction like 0.1 or a count like 5 (got {text!r}).") from None


def settings_given(flags: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among a command's flags, as a configuration takes them; `stored` are those of its TOML file."""
    from fedveil.config import parse_model_options

    settings = {name: value for name, value in flags.items() if name != "model_option" and value is not None}
    if "model" in settings:
        settings["model"] = own_model(settings["model"])
    if "cohort" in settings:
        settings["cohort"] = cohort_of(settings["cohort"])
    if pairs := flags.get("model_option"):
        before = stored.get("model_options", {})
        settings["model_options"] = {**(before if isinstance(before, dict) else {}), **parse_model_options(pairs)}
    return settings
