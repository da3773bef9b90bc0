"""`fedveil compare`: several schemes under the same data and seeds, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedveil.cli import options as flag
from fedveil.cli.compared import show_comparison, shown_live
from fedveil.cli.settings import takes_flags
from fedveil.cli.tables import aside, plainly

if TYPE_CHECKING:
    from fedveil.compare import Comparison


@takes_flags(without=("scheme",))
def compare(
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
    *,
    flags: dict[str, Any],
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

    seed, tracked = flags.pop("seed"), Tracked(flags.pop("tensorboard"), flags.pop("mlflow"))
    with shown_live(quiet=quiet) as watch:
        done = compare_schemes(
            None if schemes is None else _words(schemes),
            out=out,
            seeds=_seeds(seeds, seed, repeats),
            jobs=jobs,
            resume=resume,
            only=parse_own(own),
            tracked=tracked,
            say=aside,
            watch=watch,
            **_settings(config, flags),
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


def _settings(config: Path | None, flags: dict[str, Any]) -> dict[str, Any]:
    """The settings common to all: those of the file, and the flags over them."""
    from fedveil.config import RunConfig
    from fedveil.errors import ConfigError

    stored = RunConfig.read(config) if config is not None else {}
    for name in ("scheme", "seed"):
        if name in stored:
            raise ConfigError(f"{config}: a comparison takes --schemes and --seeds; leave {name} out of the file.")
    return {**stored, **flag.settings_given(flags, stored)}


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
