"""How a comparison looks: one table while it goes on, and what it found at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.live import Live
from rich.table import Table

from fedveil.cli import options as flag
from fedveil.cli.options import takes_flags
from fedveil.cli.tables import aside, complaints, fits, percent, plainly, size, table

if TYPE_CHECKING:
    from fedveil.compare import CellEvent, CellProgress, Comparison


Watch = Callable[[Sequence["CellProgress"], "CellEvent | None"], None]

_COLUMNS = ("scheme", "seed", "round", "loss", "test", "ε", "down", "up", "seconds", "state")
_COLOURS = {"running": "cyan", "finished": "green", "kept": "green", "failed": "red"}
_AROUND = 6  # lines of a terminal that a table's head and foot take
_OUTSIDER = "outsider"


@contextmanager
def shown_live(*, quiet: bool) -> Iterator[Watch]:
    """Something that shows all cells as they change: a table on a terminal, a line per beginning and end elsewhere."""
    if quiet:
        yield lambda standings, event: None
        return
    if not sys.stderr.isatty():
        yield _in_lines
        return
    with Live(console=complaints, refresh_per_second=4, transient=True) as live:

        def watch(standings: Sequence[CellProgress], event: CellEvent | None) -> None:
            live.update(_live_table(standings, most=complaints.height - _AROUND))
            if event is not None and (event.kind == "say" or event.standing.state == "failed"):
                aside(f"{event.standing.cell.name}: {event.text or f'failed: {event.standing.reason}'}")

        yield watch


def _in_lines(standings: Sequence[CellProgress], event: CellEvent | None) -> None:
    if event is None:
        kept = [progress for progress in standings if progress.state == "kept"]
        if kept:
            aside(f"{len(kept)} of {len(standings)} runs are there already")
        return
    progress = event.standing
    over = f"{sum(each.over for each in standings)}/{len(standings)}"
    if event.kind == "say":
        aside(f"{progress.cell.name}: {event.text}")
    elif event.kind == "start":
        aside(f"{progress.cell.name}: started")
    elif event.kind == "over" and progress.state == "failed":
        aside(f"{progress.cell.name}: failed: {progress.reason} [{over}]")
    elif event.kind == "over":
        rounds = f"{progress.round} rounds in {progress.seconds:.1f} s"
        aside(f"{progress.cell.name}: {_score(progress)} after {rounds} [{over}]")


def _live_table(standings: Sequence[CellProgress], *, most: int) -> Table:
    """All cells; where they are too many for the terminal, those that are not over."""
    many = len(standings) > most
    over = sum(progress.over for progress in standings)
    made = Table(title=f"{over} of {len(standings)} runs are over" if many else None, title_justify="left")
    for number, column in enumerate(_COLUMNS):
        made.add_column(column, justify="right" if 0 < number < len(_COLUMNS) - 1 else "left", no_wrap=True)
    for progress in [progress for progress in standings if not (many and progress.over)][: max(most, 1)]:
        colour = _COLOURS.get(progress.state, "dim")
        begun = bool(progress.round)
        made.add_row(
            progress.cell.scheme,
            str(progress.cell.seed),
            f"{progress.round}/{progress.cell.config.rounds}",
            "–" if progress.loss is None else f"{progress.loss:.4f}",
            _score(progress),
            _epsilon(progress),
            size(progress.bytes_down) if begun else "–",
            size(progress.bytes_up) if begun else "–",
            f"{progress.seconds:.1f}" if begun else "–",
            f"[{colour}]{progress.state}[/{colour}]",
        )
    return made


def _score(progress: CellProgress) -> str:
    if progress.score is None:
        return "–"
    return f"MSE {progress.score:.4f}" if progress.regression else percent(progress.score)


def _epsilon(progress: CellProgress) -> str:
    if progress.summary is None:
        return "–"
    server = progress.summary["ledger"]["lines"][0]
    return "–" if server["epsilon"] is None else f"{server['epsilon']:.4g}"


def show_comparison(done: Comparison, metrics: Sequence[str] | None = None) -> None:
    """The figures of every scheme, and against whom what is proven; then what to bear in mind.

    `metrics` are names of `fedveil.runs.judgement.TITLES`; by default those that fit the data.
    """
    from fedveil.cli.judged import judgements, not_beating, usual_metrics
    from fedveil.runs.judgement import TITLES, shown

    results = done.results
    common, seeds = results["common"], ", ".join(map(str, results["seeds"]))
    what = f"{common['dataset']}, {common['model']}, {common['clients']} clients, {common['rounds']} rounds"
    judged = judgements(results)
    names = list(metrics or usual_metrics(results, judged))
    columns = ("scheme", *(TITLES[name] for name in names), "loss", "down", "up", "seconds", "runs")
    rows = [_figures(name, figures, names) for name, figures in results["schemes"].items()]
    if judged:
        known = [figures["judged"] for figures in results["schemes"].values() if "judged" in figures]
        constant = [
            shown(name, next((each[name]["baseline"] for each in known if name in each), None)) for name in names
        ]
        answers = list(dict.fromkeys(each.constant_answer for _, each in judged))
        rows.append((answers[0] if len(answers) == 1 else "a constant answer", *constant, *("–",) * 5))
    measured = len(names) + 1
    if fits(columns, rows):
        table(f"{what}, seed {seeds}", columns, rows, right=range(1, len(columns)))
    else:  # no interval is cut in two
        figures = [row[:measured] for row in rows]
        table(f"{what}, seed {seeds}", columns[:measured], figures, right=range(1, measured), whole=range(1, measured))
        costs = [(row[0], *row[measured:]) for row in rows[: len(results["schemes"])]]
        table("What it cost", (columns[0], *columns[measured:]), costs, right=range(1, 6))
    _show_verdicts(results["schemes"])
    for note in [*_notes(results), *not_beating(judged)]:
        plainly(note)


def _figures(name: str, figures: dict[str, Any], metrics: Sequence[str]) -> tuple[str, ...]:
    from fedveil.cli.judged import measured

    runs = f"{figures['n']}" + (f", {figures['failed']} failed" if figures["failed"] else "")
    down, up = (size(figures[way]["mean"]) if way in figures else "–" for way in ("bytes_down", "bytes_up"))
    return (
        name,
        *(measured(figures, metric) for metric in metrics),
        _spread(figures.get("train_loss"), "{:.4f}"),
        down,
        up,
        _spread(figures.get("seconds"), "{:.1f}"),
        runs,
    )


def _spread(figure: dict[str, float | None] | None, form: str) -> str:
    if figure is None:
        return "–"
    mean = form.format(figure["mean"])
    return mean if figure["deviation"] is None else f"{mean} ± {form.format(figure['deviation'])}"


def _show_verdicts(schemes: dict[str, dict[str, Any]]) -> None:
    adversaries = list(dict.fromkeys(name for figures in schemes.values() for name in figures.get("privacy", {})))
    shown = [name for name in adversaries if name != _OUTSIDER]
    if not shown:
        return
    rows = [
        (name, *(_verdict(figures["privacy"].get(who)) for who in shown))
        for name, figures in schemes.items()
        if figures["n"]
    ]
    table("Against whom what is proven", ("scheme", *shown), rows, ruled=True)


def _verdict(line: dict[str, Any] | None) -> str:
    if line is None:
        return "–"
    from fedveil.ledger.statement import Line, figure

    figures = {name: line[name] for name in ("verdict", "epsilon", "delta", "outright")}
    other = line.get("add_remove_epsilon")
    return Line("", why="", **figures).result + ("" if other is None else f"\nadd/remove: ε = {figure(other)}")


def _notes(results: dict[str, Any]) -> list[str]:
    schemes = results["schemes"]
    losses = {figures["loss"] for figures in schemes.values() if "loss" in figures}
    notes = [
        f"note: {name} has {', '.join(f'{key} = {value}' for key, value in own.items())} of its own"
        for name, own in results["only"].items()
    ]
    for run in results["runs"]:
        summary, who = run.get("summary", {}), f"{run['scheme']}, seed {run['seed']}"
        if "stopped" in summary:
            notes.append(f"note: {who} ended after {summary['rounds']} rounds: {summary['stopped']}")
        if "warning" in summary:
            notes.append(f"warning: {who}: {summary['warning']}")
    veils = [f"{name} {figures['family']}" for name, figures in schemes.items() if "family" in figures]
    if veils:
        notes.append(f"note: the families of the veils are {', '.join(veils)}")
    proven = [line for figures in schemes.values() for line in figures.get("privacy", {}).values()]
    if any(line.get("add_remove_epsilon") is not None for line in proven):
        notes.append(
            "note: ε is for replacing what is protected; beside it stands what the same noise gives for adding or "
            "removing it, as Opacus and most tables count"
        )
    if len(losses) > 1:
        by = "; ".join(
            f"{loss}: {', '.join(k for k, v in schemes.items() if v.get('loss') == loss)}" for loss in sorted(losses)
        )
        notes.append(f"note: schemes train on different losses ({by}): --loss square gives all the same")
    return notes


@takes_flags(without=("scheme", "option"))
def compare(
    schemes: str | None = typer.Option(
        None,
        help="Schemes, by commas; file.py:function is one of your own, which --resume needs named again. "
        "(default: fedavg,lossless,veil-secagg,nadp,mpdp,veil-dp,paraaegis)",
    ),
    seeds: str | None = typer.Option(None, help="Seeds, like 1,2,3 or 1-5: every scheme runs once with each."),
    repeats: int | None = typer.Option(None, help="So many seeds, from --seed on. (default: 1)"),
    own: list[str] = typer.Option(
        [], "--set", help="A setting of one scheme, repeatable: --set nadp.lr=3, --set mine.py:veil.keep=0.2."
    ),
    jobs: int | None = typer.Option(None, help="Runs at once, one thread each. (default: one per core; 1 on a GPU)"),
    config: Path | None = typer.Option(None, "--config", "-c", help="TOML file with settings for all; flags win."),
    out: Path = typer.Option(Path("runs/compare"), "--out", help="Folder for the runs, compare.json and the report."),
    metric: list[str] = typer.Option(
        [],
        "--metric",
        help="Figures in the table, repeatable or by commas: accuracy, balanced_accuracy, auroc, average_precision, "
        "f1, kappa, ece, exact_match; mae, rmse, mse, r2. (default: accuracy, and auroc if a class is rare; mse, r2)",
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Go on in --out: finished runs are kept; schemes and seeds may be added."
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress and no tables."),
    *,
    flags: dict[str, Any],
    tensorboard: flag.TensorBoard = None,
    mlflow: flag.Mlflow = None,
    wandb: flag.Wandb = None,
) -> None:
    """Train several schemes with the same data, settings and seeds, and set them side by side.

    Every run is a folder of its own, OUT/SCHEME/seed-N, as `fedveil run` leaves it (a scheme of your own is
    OUT/FILE.py-FUNCTION/seed-N); OUT/compare.json holds all figures.
    A setting that a scheme does not have is left out for it; one that fails does not end the others. All train on one
    loss: the square loss where one of them needs it, unless --loss or --set SCHEME.loss=… say otherwise.

    [bold]Examples[/bold]

      fedveil compare --dataset digits --rounds 20 --cipher pads --out runs/all

      fedveil compare --schemes fedavg,nadp,ldp --epsilon 3 --repeats 3 --set nadp.lr=3 --set ldp.lr=3 --out runs/dp

      fedveil compare --schemes fedavg,nadp --dataset breast-cancer --metric auroc,balanced_accuracy --out runs/m

      fedveil compare --resume --out runs/dp

      fedveil compare --schemes mine.py:veil,lossless --set mine.py:veil.keep=0.2 --out runs/mine

      fedveil compare --schemes fedavg,lossless --loss square --rounds 50 --seeds 1-5 --tensorboard --out runs/b
    """
    from fedveil.cli.judged import named_metrics
    from fedveil.compare import compare as compare_schemes
    from fedveil.compare.plan import parse_own
    from fedveil.tracking import Tracked

    metrics = named_metrics(metric)
    seed, tracked = flags.pop("seed"), Tracked(tensorboard, mlflow, wandb)
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
        show_comparison(done, metrics)
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

    if all(progress.summary is None for progress in done.standings):
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
    from fedveil.errors import ConfigError
    from fedveil.plain import numbers_of

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
    from fedveil.own_code import typed

    return [typed(word.strip()) for word in text.split(",") if word.strip()]
