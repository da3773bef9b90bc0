"""`fedveil compare`: several schemes under the same data and seeds, side by side."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import typer

from fedveil.cli import options as flag
from fedveil.cli.compared import show_comparison, shown_live
from fedveil.cli.run import run
from fedveil.cli.tables import aside, plainly

if TYPE_CHECKING:
    from fedveil.compare import Comparison


def _with_settings_of(command: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command another one's flags, after its own and without those it has itself."""

    def give(function: Callable[..., None]) -> Callable[..., None]:
        own = [one for one in inspect.signature(function).parameters.values() if one.kind is not one.VAR_KEYWORD]
        names = {one.name for one in own} | {"scheme"}
        theirs = [one for one in inspect.signature(command).parameters.values() if one.name not in names]
        hints = get_type_hints(command, include_extras=True)
        function.__annotations__ |= {one.name: hints[one.name] for one in theirs}
        typed = [one.replace(annotation=hints[one.name]) for one in theirs]
        function.__signature__ = inspect.Signature([*own, *typed])  # type: ignore[attr-defined]
        return function

    return give


@_with_settings_of(run)
def compare(
    context: typer.Context,
    schemes: str | None = typer.Option(
        None, help="Schemes, by commas. (default: fedavg,lossless,veil-secagg,nadp,mpdp,veil-dp,paraaegis)"
    ),
    seeds: str | None = typer.Option(None, help="Seeds, like 1,2,3 or 1-5: every scheme runs once with each."),
    repeats: int | None = typer.Option(None, help="So many seeds, from --seed on. (default: 1)"),
    own: list[str] = typer.Option([], "--set", help="A setting of one scheme, repeatable: --set nadp.lr=3."),
    jobs: int | None = typer.Option(None, help="Runs at once, one thread each. (default: one per core; 1 on a GPU)"),
    config: Path | None = typer.Option(None, "--config", "-c", help="TOML file with settings for all; flags win."),
    out: Path = typer.Option(Path("runs/compare"), "--out", help="Folder for the runs, compare.json and the report."),
    resume: bool = typer.Option(
        False, "--resume", help="Go on in --out: finished runs are kept; schemes and seeds may be added."
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress and no tables."),
    **settings: Any,
) -> None:
    """Train several schemes with the same data, settings and seeds, and set them side by side.

    Every run is a folder of its own, OUT/SCHEME/seed-N, as `fedveil run` leaves it; OUT/compare.json holds all figures.
    A setting that a scheme does not have is left out for it; one that fails does not end the others.

    [bold]Examples[/bold]

      fedveil compare --dataset digits --rounds 20 --cipher pads --out runs/all

      fedveil compare --schemes fedavg,nadp,ldp --epsilon 3 --repeats 3 --set nadp.lr=3 --set ldp.lr=3 --out runs/dp

      fedveil compare --resume --out runs/dp

      fedveil compare --schemes fedavg,lossless --loss square --rounds 50 --seeds 1-5 --tensorboard --out runs/b
    """
    from fedveil.compare import compare as compare_schemes
    from fedveil.compare.plan import parse_own
    from fedveil.tracking import Tracked

    given = context.params
    with shown_live(quiet=quiet) as watch:
        done = compare_schemes(
            None if schemes is None else _words(schemes),
            out=out,
            seeds=_seeds(seeds, given["seed"], repeats),
            jobs=jobs,
            resume=resume,
            only=parse_own(own),
            tracked=Tracked(given["tensorboard"], given["mlflow"]),
            say=aside,
            watch=watch,
            **_settings(config, given),
        )
    if not quiet:
        show_comparison(done)
        plainly(f"in full: {done.file}")
    _report(done, quiet=quiet)
    if done.failed:
        first = done.failed[0]
        more = f" ({len(done.failed)} runs failed)" if len(done.failed) > 1 else ""
        aside(f"error: {first.cell.name}: {first.reason}{more}")
        raise typer.Exit(first.exit_code)


def _report(done: Comparison, *, quiet: bool) -> None:
    """Write the page about everything that finished; without its packages the figures stand all the same."""
    from fedveil.errors import MissingExtraError

    if all(one.summary is None for one in done.standings):
        return
    try:
        from fedveil.report import write_report

        page = write_report([done.file], done.out / "report.html")
    except MissingExtraError as reason:
        aside(f"no page: {reason}")
        return
    if not quiet:
        plainly(f"as a page: {page}")


def _settings(config: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """The settings common to all: those of the file, and the flags over them."""
    from fedveil.config import RunConfig, parse_model_options
    from fedveil.errors import ConfigError

    stored = RunConfig.read(config) if config is not None else {}
    for name in ("scheme", "seed"):
        if name in stored:
            raise ConfigError(f"{config}: a comparison takes --schemes and --seeds; leave {name} out of the file.")
    known = {name: given[name] for name in RunConfig.__dataclass_fields__ if given.get(name) is not None}
    known.pop("seed", None)
    if "cohort" in known:
        known["cohort"] = flag.cohort_of(known["cohort"])
    if given["model_option"]:
        known["model_options"] = {**stored.get("model_options", {}), **parse_model_options(given["model_option"])}
    return {**stored, **known}


def _seeds(seeds: str | None, seed: int | None, repeats: int | None) -> list[int] | None:
    from fedveil.config import numbers_of
    from fedveil.errors import ConfigError

    if seeds is not None:
        if seed is not None or repeats is not None:
            raise ConfigError("Give --seeds, or --seed and --repeats, not both.")
        return list(numbers_of(seeds, "seeds"))
    if repeats is not None and repeats < 1:
        raise ConfigError(f"repeats must be at least 1 (got {repeats}).")
    if seed is None and repeats is None:
        return None
    first = 1 if seed is None else seed
    return list(range(first, first + (repeats or 1)))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
