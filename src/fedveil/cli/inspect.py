"""`fedveil inspect` and `inspect-data`: what a veil would hide of a model, and what was understood of data."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from fedveil.cli.options import Config, read_settings, takes_flags
from fedveil.cli.tables import console, listed, percent, plainly, table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedveil.downlink.scales import ParameterCover
    from fedveil.plain import ModelOption

_SIDES = {"both": "{} on both sides", "one": "{} on one side", "partly": "partly {}"}


def inspect(
    model: str = typer.Option(..., "--model", help="Model name, or package.module:factory."),
    model_option: list[str] = typer.Option([], "--model-option", "-o", help="key=value, repeatable."),
    input_shape: str | None = typer.Option(None, help="Like 3,32,32. (default: what suits the model)"),
    outputs: int | None = typer.Option(
        None, help="Number of outputs; your own model needs it. (default: 10 for a model of the catalogue)"
    ),
    vocabulary: int = typer.Option(1000, help="Text models: number of token ids."),
    scheme: str = typer.Option("lossless", help="Scheme with a veil, or your own as file.py:function."),
    head_noise: bool | None = typer.Option(
        None,
        "--head-noise/--no-head-noise",
        help="Count the noise on the last layer. (default: where the scheme has it)",
    ),
    bn_eps: str = typer.Option(
        "auto", help="ε of normalisation layers: secret, public, or auto: secret under the family scale."
    ),
    family: str = typer.Option(
        "auto", help="What hides it: scale, signed, isometry, full, or auto: what fits the scheme."
    ),
    stream_rotations: bool = typer.Option(
        False, "--stream-rotations", help="Fold gains into their readers, and rotate residual streams."
    ),
    public_start: bool = typer.Option(
        False, "--public-start", help="The model begins with weights that others know. (default: where it says so)"
    ),
    json: bool = typer.Option(False, "--json", help="As data."),
) -> None:
    """Show for every parameter whether a veil hides it, the coverage, and which operations pin.

    [bold]Examples[/bold]

      fedveil inspect --model resnet20

      fedveil inspect --model transformer --scheme veil-dp

      fedveil inspect --model mypackage.nets:make --input-shape 1,28,28 --outputs 10 --json
    """
    from fedveil import schemes
    from fedveil.downlink import Rescaling, draw_for
    from fedveil.downlink.export import verified
    from fedveil.downlink.scales import UNROTATED, coverage, pinned
    from fedveil.downlink.symmetry import FAMILIES, STEP_BY_STEP
    from fedveil.errors import ConfigError, spelled, unknown_name
    from fedveil.own_code import typed
    from fedveil.plain import parse_model_options
    from fedveil.runs.callbacks import WARNING, working
    from fedveil.runs.job import EPSILON
    from fedveil.runs.pretrained import PUBLISHED, loaded_from, nothing_hidden

    if bn_eps not in ("auto", "secret", "public"):
        raise unknown_name("bn_eps", bn_eps, ("auto", "secret", "public"))
    if family not in ("auto", *FAMILIES):
        raise unknown_name("family", family, ("auto", *FAMILIES))
    info = schemes.find(typed(scheme))
    noised = "head_noise" in info.options
    head_noise = noised if head_noise is None else head_noise
    asked = {"head_noise": head_noise} if noised else {}
    used = info.veil({**asked, **({"stream_rotations": True} if stream_rotations else {})}, family=family)
    if used is None:
        raise ConfigError(f"{spelled('scheme', scheme)} has no veil: whoever receives the model sees all of it.")
    if family not in ("auto", used):
        raise ConfigError(f"{spelled('family', family)} does not go with {spelled('scheme', scheme)}, only {used}.")
    family = used
    options = parse_model_options(model_option)
    if outputs is None and ":" in model:
        raise ConfigError(
            f"How many outputs {model} has is not known without data: give --outputs, like --outputs 2, and "
            "--input-shape, like --input-shape 3,32,32."
        )
    with working(f"tracing {model}"):
        net, example = example_of(
            model, options=options, input_shape=input_shape, outputs=outputs or 10, vocabulary=vocabulary
        )
        downlink = Rescaling(family=family, streams=stream_rotations)
        architecture, weights = draw_for(downlink, net.train(), example)
        architecture = verified(architecture, weights, example, downlink=downlink)
        assert architecture.table is not None
    covered = coverage(
        architecture.table,
        head_noise=head_noise and architecture.table.head is not None,
        secret_epsilon=bn_eps != "public",
    )
    public_start = public_start or bool(loaded_from(net))
    if public_start:
        covered = nothing_hidden(covered)
    shape = tuple(example.shape[1:])
    trains = "client_optimiser" in info.options and not (head_noise or stream_rotations)
    steps = [name for name, families in STEP_BY_STEP.items() if trains and family in families]
    if json:
        about = {"model": model, "input_shape": list(shape), "public_start": public_start, "local_training": steps}
        data = {**about, **covered.as_data()}
        typer.echo(json_module.dumps(data, indent=2))
        return
    rows = [(p.name, "×".join(map(str, p.shape)), _sides(p, family), _share(p, family)) for p in covered.parameters]
    last = "hidden" if family == "scale" else "of its numbers"
    table(f"{model} on inputs of shape {shape}", ("parameter", "shape", "under a veil", last), rows, right=(3,))
    console.print(
        f"family {family}: coverage {percent(covered.fraction)} of {architecture.size:,} parameters on at least one "
        f"side; {covered.secrets} secret scales per round"
    )
    if family == "scale" and bn_eps != "public" and len(weights.epsilon):
        plainly(EPSILON)
    if family != "scale":
        plainly(covered.told)
        plainly("secret every round: " + ("; ".join(covered.groups) or "nothing"))
        if family == "full" and not head_noise and architecture.table.head is not None:
            plainly("with cross-entropy also: a number on all logits")
    if family != "scale" and not public_start:
        plainly(
            "not hidden: the function; the server's update, from a client that aligns two rounds; anything, where the "
            "model began as a published one"
        )
    if trains:
        ways = [
            f"by {name}" if name in steps else f"by {name} with {spelled('family', families[0])}"
            for name, families in STEP_BY_STEP.items()
        ]
        plainly(f"local training: {'; '.join(ways if steps else ['none, one gradient a round', *ways])}")
    if covered.unrotated:
        plainly(WARNING + UNROTATED)
    if covered.guessed:
        plainly(WARNING + covered.guessed)
    if public_start:
        plainly(PUBLISHED)
    elif covered.visible:
        plainly("visible: " + ", ".join(parameter.name for parameter in covered.visible))
    if head_noise and covered.head_refusal:
        plainly(f"head noise cannot be used: {covered.head_refusal}")
    if covered.pins:
        table(
            "Operations that pin",
            ("operation", "where", "why"),
            pinned(covered.pins),
        )
    else:
        console.print("no operation pins, except the model's input and output")


def _sides(parameter: ParameterCover, family: str) -> Text:
    if parameter.sides == "visible":
        return Text("visible", style="bold red")
    return Text(_SIDES[parameter.sides].format("hidden" if family == "scale" else "changed"))


def _share(parameter: ParameterCover, family: str) -> str:
    """How much of it is hidden; under more than scales what is done to its numbers, the strongest first."""
    from fedveil.downlink.scales import LEVELS

    if family == "scale":
        return percent(parameter.fraction)
    shares = zip(reversed(LEVELS), reversed(parameter.levels), strict=True)
    return ", ".join(f"{percent(count / parameter.size)} {name}" for name, count in shares if count) or percent(0.0)


def example_of(
    model: str,
    *,
    options: dict[str, ModelOption],
    input_shape: str | None = None,
    outputs: int = 10,
    vocabulary: int = 1000,
) -> tuple[nn.Module, Tensor]:
    """A model by name and two inputs of the shape it takes, where no data decide that."""
    import torch

    from fedveil.models import build
    from fedveil.own_code import typed

    shape, tokens = _shape(model, input_shape)
    words = vocabulary if tokens else None
    net = build(typed(model), input_shape=shape, outputs=outputs, seed=0, vocabulary=words, **options)
    return net, torch.randint(2, 5, (2, *shape)) if tokens else torch.randn(2, *shape)


def _shape(model: str, given: str | None) -> tuple[tuple[int, ...], bool]:
    from fedveil.errors import ConfigError
    from fedveil.models import describe

    kinds = {info.name: info.inputs for info in describe()}
    tokens = kinds.get(model) == "tokens"
    if given is None:
        if tokens:
            return (20,), True
        return ((64,) if kinds.get(model) == "numbers" else (3, 32, 32)), False
    try:
        return tuple(int(part) for part in given.split(",")), tokens
    except ValueError:
        raise ConfigError(f"An input shape is written like 3,32,32 (got {given!r}).") from None


# --- `fedveil inspect-data`: what was understood of data, before anything is trained on them

if TYPE_CHECKING:
    from fedveil.data.description import Column, Counts, Description

_MOST_ROWS, _MOST_CLASSES, _MOST_VALUES = 40, 12, 4


@takes_flags(
    only=(
        *("target", "task", "text", "group", "site", "picture_size", "test_fraction", "validation_fraction", "split"),
        *("partition", "alpha", "ratio", "clients", "seed"),
    )
)
def inspect_data(
    dataset: str | None = typer.Argument(None, help="A file or folder, a data set's name, or file.py:function."),
    config: Config = None,
    *,
    flags: dict[str, Any],
    json: bool = typer.Option(False, "--json", help="As data: what a run's data.json holds."),
) -> None:
    """Show what is understood of data: columns, gaps, classes, parts, clients, duplicates, and what looks wrong.

    With the same flags and seed, `fedveil run` trains on exactly these parts and clients.

    [bold]Examples[/bold]

      fedveil inspect-data visits.csv --target ill --group patient --site hospital --validation-fraction 0.1

      fedveil inspect-data scans/ --partition site --json

      fedveil inspect-data -c my-run.toml
    """
    from fedveil import data
    from fedveil.config import RunConfig
    from fedveil.data.description import describe_split
    from fedveil.runs.callbacks import working
    from fedveil.runs.job import counted, dealt, loaded

    named = {} if dataset is None else {"dataset": dataset}
    settings = read_settings(config, {**flags, **named})
    settings.setdefault("seed", 0)
    given = RunConfig.from_mapping(settings, where="the command line")
    with working("reading the data", quiet=json):
        split = loaded(given)
        given = counted(given, split.train)
        clients = dealt(given, split.train)
        description = describe_split(split, clients, data.client_names(split.train, clients, given.partition))
    if json:
        typer.echo(json_module.dumps(description.as_data(), indent=2, ensure_ascii=False))
        return
    _show(description, split.remarks)


def _show(description: Description, remarks: Sequence[str]) -> None:
    plainly(description.lines()[0])
    for text in remarks:
        plainly(text)
    if description.columns:
        rows = [
            (column.name, column.role, str(column.kind), f"{column.missing:,}", f"{column.distinct:,}", _values(column))
            for column in description.columns
        ]
        _bounded("Columns", ("column", "role", "holds", "missing", "different", "values"), rows, right=(3, 4))
    _counts("Parts", "part", list(description.parts), list(description.parts.values()), description)
    if description.clients:
        names = description.client_names or [str(client) for client in range(len(description.clients))]
        _counts("Clients, of the training part", "client", list(names), description.clients, description)
    if description.duplicates is not None:
        equal = [
            (one, "the same part" if one == other else other, f"{count:,}")
            for one, others in description.duplicates.items()
            for other, count in others.items()
        ]
        table("Samples with an equal input", ("of", "in", "samples"), equal, right=(2,))
    listed("What looks wrong", description.warnings)


def _values(column: Column) -> str:
    if column.span is not None:
        return f"{column.span[0]:g} to {column.span[1]:g}"
    shown = [f"{text} ({count:,})" for text, count in list(column.categories.items())[:_MOST_VALUES]]
    return ", ".join([*shown, "…"] if shown and column.distinct > len(shown) else shown)


def _counts(title: str, what: str, names: Sequence[str], counts: Sequence[Counts], description: Description) -> None:
    """A line each for parts or clients: rows, groups, and classes as far as there is room."""
    classes = range(min(len(counts[0].classes), _MOST_CLASSES))
    grouped = counts[0].groups is not None
    targets = list(counts[0].target)
    columns = [what, "rows", *(["groups"] if grouped else []), *map(description.class_name, classes), *targets]
    rows = [
        (
            *(name, f"{count.rows:,}", *([f"{count.groups:,}"] if grouped else [])),
            *(*(f"{count.classes[code]:,}" for code in classes), *(f"{count.target[name]:g}" for name in targets)),
        )
        for name, count in zip(names, counts, strict=False)
    ]
    _bounded(title, columns, rows, right=range(1, len(columns)))
    if len(counts[0].classes) > _MOST_CLASSES:
        plainly(f"and {len(counts[0].classes) - _MOST_CLASSES:,} classes more (--json)")


def _bounded(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> None:
    table(title, columns, rows[:_MOST_ROWS], right=right)
    if len(rows) > _MOST_ROWS:
        plainly(f"and {len(rows) - _MOST_ROWS:,} more (--json)")
