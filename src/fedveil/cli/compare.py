"""`fedveil compare`: a table while it goes on, and what it found at the end; `fedveil report`: one page about runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from fedveil.cli import options as flag
from fedveil.cli.options import takes_flags
from fedveil.cli.tables import aside, complaints, fits, percent, plainly, table
from fedveil.plain import legible_size

if TYPE_CHECKING:
    from fedveil.compare import CellEvent, CellProgress, Comparison


Watch = Callable[[Sequence["CellProgress"], "CellEvent | None"], None]

_COLUMNS = ("scheme", "seed", "round", "loss", "test", "ε", "down", "up", "seconds", "state")
_COLOURS = {"running": "cyan", "finished": "green", "kept": "green", "failed": "red"}
_COLOURS |= {"auditing": "cyan", "timing": "cyan"}
_AROUND = 7  # lines of a terminal that a table's head and foot take
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
            live.update(Group(_live_table(standings, most=complaints.height - _AROUND), _bar(standings)))
            if event is not None and (event.kind == "say" or event.standing.state == "failed"):
                aside(f"{event.standing.cell.name}: {event.text or f'failed: {event.standing.reason}'}")

        yield watch


def _bar(standings: Sequence[CellProgress]) -> ProgressBar:
    """Rounds that are over, of all; an audit and a timing count as one each."""
    done = sum(1.0 if one.over else 0.9 * one.round / max(one.cell.config.rounds, 1) for one in standings)
    return ProgressBar(total=len(standings), completed=done)


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
            legible_size(progress.bytes_down) if begun else "–",
            legible_size(progress.bytes_up) if begun else "–",
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
    _show_glance(results)
    for note in [*_notes(results), *not_beating(judged)]:
        plainly(note)


def _figures(name: str, figures: dict[str, Any], metrics: Sequence[str]) -> tuple[str, ...]:
    from fedveil.cli.judged import measured

    runs = f"{figures['n']}" + (f", {figures['failed']} failed" if figures["failed"] else "")
    down, up = (legible_size(figures[way]["mean"]) if way in figures else "–" for way in ("bytes_down", "bytes_up"))
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


GLANCE = ("scheme", "accuracy", "ε", "CPU", "bytes", "data", "members", "model")
READING = (
    "ε: towards the server, in brackets towards clients alone. CPU: seconds of processors, of all clients and the "
    "server, all rounds. bytes: of one client and round, both ways. What quick attacks got, all of it, part or none "
    "(? where nothing follows: the attack does not work without protection either, or too few samples): data rebuilt "
    "by the server, or who reads the wire, from an upload of one sample or a sum (unread: it holds no model, and reads "
    "ciphertexts or noise); members told by a client [95 %]; the share of the model's numbers that a client knows "
    "exactly."
)


def _show_glance(results: dict[str, Any]) -> None:
    """A line a scheme: what it reaches, proves, costs and gives away; of those that cannot be trained here, why."""
    schemes = results["schemes"]
    if not any("attacked" in figures or "cannot" in figures for figures in schemes.values()):
        return
    rows = [glance(name, figures) for name, figures in schemes.items() if figures["n"]]
    table("At a glance", GLANCE, rows, right=range(1, 5), whole=(0, 1))
    for line in (*glance_notes(schemes), READING):
        plainly(line)


def glance_notes(schemes: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Why some were not trained, and how the cost of others was found."""
    for name, figures in schemes.items():
        if "cannot" in figures:
            yield f"{name} cannot be trained here: {figures['cannot']}"
        if "slice" in figures.get("cost", {}):
            yield f"= {name}: trained under masks, which open the same sums; {_scaled(figures['cost']['slice'])}"
    off = [name for name, figures in schemes.items() if "came_off" in figures]
    if off:
        yield f"† the training of {', '.join(off)} came off: where it ended tells of the learning rate alone"
    untried = [name for name, figures in schemes.items() if figures["n"] and "attacked" not in figures]
    if untried:
        yield f"not tried, and so not in the picture: attacks on {', '.join(untried)}"


def _scaled(timed: dict[str, float]) -> str:
    return (
        f"its cipher took {timed['round']:.1f} s a round on {timed['parameters']:.0f} parameters, here times "
        f"{timed['times']:.1f}, and {timed['keys']:.1f} s for keys"
    )


def glance(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    """A scheme's line under `GLANCE`."""
    cost, attacked, proven = figures.get("cost", {}), figures.get("attacked", {}), figures["privacy"]
    score = figures.get("test_accuracy")
    moved = sum(cost.get(way, figures[way]["mean"]) for way in ("bytes_up", "bytes_down"))
    towards = [proven.get(who, {}).get("epsilon") for who in ("server", "clients")]
    exact = attacked.get("the model's parameters", {}).get("exact")
    epsilon = "–" if towards[1] is None else f"({towards[1]:.3g})"
    return (
        f"= {name}" if "slice" in cost else name,
        (f"MSE {figures['test_mse']['mean']:.4f}" if score is None else percent(score["mean"]))
        + " †" * ("came_off" in figures),
        epsilon if towards[0] is None else f"{towards[0]:.3g}",
        f"{cost['seconds']:,.{1 if cost['seconds'] < 100 else 0}f} s" if cost else "–",
        legible_size(moved),
        *(_got(attacked.get(asset)) if "attacked" in figures else "not tried" for asset in ("data", "members")),
        "–" if exact is None else f"{100 * exact:.0f} %",
    )


_GOT = {"as if unprotected": "all", "in part": "part", "nothing": "none"}


def _got(line: dict[str, Any] | None) -> str:
    """What an attacker got: all of it, part or none, and the figure; ? where nothing follows from that."""
    return "unread" if line is None else f"{_GOT.get(line['verdict'], '?')}: {line['got']}"


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
    preset: str | None = typer.Option(
        None,
        help="papers: every scheme there is under one setting (flags go over it), each with what it declares for "
        "itself (--set goes over that), attacked, in one picture; one that cannot be trained on the data says why.",
    ),
    audit: bool | None = typer.Option(
        None, "--audit/--no-audit", help="Attack every run, quickly. (default: with --preset papers)"
    ),
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
    OUT/FILE.py-FUNCTION/seed-N), with what it took of processors in cost.json; OUT/compare.json holds all figures.
    A setting that a scheme does not have is left out for it; one that fails does not end the others. All train on one
    loss: the square loss where one of them needs it, unless --loss or --set SCHEME.loss=… say otherwise.

    [bold]Examples[/bold]

      fedveil compare --preset papers --dataset digits --out runs/papers

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
            preset=preset,
            audit=audit,
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
    """Write the page about everything that finished, and of a preset the picture; without their packages the figures
    stand all the same."""
    from fedveil.errors import ConfigError, MissingExtraError

    if all(progress.summary is None for progress in done.standings):
        return

    def page() -> Path:
        from fedveil.report import write_report

        return write_report([done.file], done.out / "report.html")

    def picture() -> Path:
        from fedveil.report.figures import draw_overview

        return draw_overview(done.results, done.out / "overview.png")

    for what, write in (("page", page), *((("picture", picture),) if done.plan.preset is not None else ())):
        try:
            file = write()
        except (ConfigError, MissingExtraError) as reason:
            aside(f"no {what}: {reason}")
        else:
            if not quiet:
                plainly(f"as a {what}: {file}")


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


def report(
    sources: list[Path] = typer.Argument(
        ..., metavar="RUN|COMPARE|AUDIT…", help="Folders of runs, of a comparison, of an audit.", show_default=False
    ),
    out: Path | None = typer.Option(
        None, "--out", help="The file to write (.html). (default: report.html in the first folder)"
    ),
    with_records: bool = typer.Option(
        False,
        "--with-records",
        help="Show clients' samples too, and what attacks rebuilt of them; the file is then named …with-records.html.",
    ),
    show: bool = typer.Option(False, "--open", help="Open it in the browser."),
) -> None:
    """Write one HTML file that shows runs: curves, costs, the ledger in plain words, what attackers got.

    The file holds everything it shows and connects to nothing: send it, print it, keep it with the run. It ends with
    the settings and the commands that give the same again. Of an audit it shows the figures; pictures of clients'
    samples, and of what attacks rebuilt of them, are left out unless you ask for them (--with-records).

    [bold]Examples[/bold]

      fedveil report runs/a

      fedveil report runs/a runs/b --out both.html --open

      fedveil report compare/x --out compare/x/report.html
    """
    from fedveil.report import write_report
    from fedveil.runs.callbacks import working

    first = sources[0] if sources[0].is_dir() else sources[0].parent
    with working("writing the report"):
        made = write_report(sources, out or first / "report.html", with_records=with_records)
    plainly(f"wrote {made} ({legible_size(made.stat().st_size)})")
    if with_records and "records" in made.name:
        plainly("it may show samples of clients: keep it as you keep their data")
    if show:
        import webbrowser

        webbrowser.open(made.resolve().as_uri())
