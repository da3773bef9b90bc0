"""How a comparison looks: one table while it goes on, and what it found at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.table import Table

from fedveil.cli.tables import aside, complaints, percent, plainly, size, table

if TYPE_CHECKING:
    from fedveil.compare import Comparison, Event, Standing

Watch = Callable[[Sequence["Standing"], "Event | None"], None]

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

        def watch(standings: Sequence[Standing], event: Event | None) -> None:
            live.update(_live_table(standings, most=complaints.height - _AROUND))
            if event is not None and (event.kind == "say" or event.standing.state == "failed"):
                aside(f"{event.standing.cell.name}: {event.text or f'failed: {event.standing.reason}'}")

        yield watch


def _in_lines(standings: Sequence[Standing], event: Event | None) -> None:
    if event is None:
        kept = [one for one in standings if one.state == "kept"]
        if kept:
            aside(f"{len(kept)} of {len(standings)} runs are there already")
        return
    one = event.standing
    over = f"{sum(each.over for each in standings)}/{len(standings)}"
    if event.kind == "say":
        aside(f"{one.cell.name}: {event.text}")
    elif event.kind == "start":
        aside(f"{one.cell.name}: started")
    elif event.kind == "over" and one.state == "failed":
        aside(f"{one.cell.name}: failed: {one.reason} [{over}]")
    elif event.kind == "over":
        aside(f"{one.cell.name}: {_score(one)} after {one.round} rounds in {one.seconds:.1f} s [{over}]")


def _live_table(standings: Sequence[Standing], *, most: int) -> Table:
    """All cells; where they are too many for the terminal, those that are not over."""
    many = len(standings) > most
    over = sum(one.over for one in standings)
    made = Table(title=f"{over} of {len(standings)} runs are over" if many else None, title_justify="left")
    for number, column in enumerate(_COLUMNS):
        made.add_column(column, justify="right" if 0 < number < len(_COLUMNS) - 1 else "left", no_wrap=True)
    for one in [one for one in standings if not (many and one.over)][: max(most, 1)]:
        colour = _COLOURS.get(one.state, "dim")
        begun = bool(one.round)
        made.add_row(
            one.cell.scheme,
            str(one.cell.seed),
            f"{one.round}/{one.cell.config.rounds}",
            "–" if one.loss is None else f"{one.loss:.4f}",
            _score(one),
            _epsilon(one),
            size(one.bytes_down) if begun else "–",
            size(one.bytes_up) if begun else "–",
            f"{one.seconds:.1f}" if begun else "–",
            f"[{colour}]{one.state}[/{colour}]",
        )
    return made


def _score(one: Standing) -> str:
    if one.score is None:
        return "–"
    return f"MSE {one.score:.4f}" if one.regression else percent(one.score)


def _epsilon(one: Standing) -> str:
    if one.summary is None:
        return "–"
    server = one.summary["ledger"]["lines"][0]
    return "–" if server["epsilon"] is None else f"{server['epsilon']:.4g}"


def show_comparison(done: Comparison) -> None:
    """The figures of every scheme, and against whom what is proven; then what to bear in mind."""
    results = done.results
    common, seeds = results["common"], ", ".join(map(str, results["seeds"]))
    what = f"{common['dataset']}, {common['model']}, {common['clients']} clients, {common['rounds']} rounds"
    regression = any("test_mse" in one for one in results["schemes"].values())
    columns = ("scheme", "test MSE" if regression else "accuracy", "loss", "down", "up", "seconds", "runs")
    rows = [_figures(name, one, regression=regression) for name, one in results["schemes"].items()]
    table(f"{what}, seed {seeds}", columns, rows, right=range(1, len(columns)))
    _show_verdicts(results["schemes"])
    for note in _notes(results):
        plainly(note)


def _figures(name: str, one: dict[str, Any], *, regression: bool) -> tuple[str, ...]:
    score = _spread(one.get("test_mse"), "{:.4f}") if regression else _spread(one.get("test_accuracy"), "{:.1%}")
    runs = f"{one['n']}" + (f", {one['failed']} failed" if one["failed"] else "")
    down, up = (size(one[way]["mean"]) if way in one else "–" for way in ("bytes_down", "bytes_up"))
    return name, score, _spread(one.get("train_loss"), "{:.4f}"), down, up, _spread(one.get("seconds"), "{:.1f}"), runs


def _spread(figure: dict[str, float | None] | None, form: str) -> str:
    if figure is None:
        return "–"
    mean = form.format(figure["mean"])
    return mean if figure["deviation"] is None else f"{mean} ± {form.format(figure['deviation'])}"


def _show_verdicts(schemes: dict[str, dict[str, Any]]) -> None:
    adversaries = list(dict.fromkeys(name for one in schemes.values() for name in one.get("privacy", {})))
    shown = [name for name in adversaries if name != _OUTSIDER]
    if not shown:
        return
    rows = [(name, *(_verdict(one["privacy"].get(who)) for who in shown)) for name, one in schemes.items() if one["n"]]
    table("Against whom what is proven", ("scheme", *shown), rows, ruled=True)


def _verdict(line: dict[str, Any] | None) -> str:
    if line is None:
        return "–"
    from fedveil.ledger.statement import Line

    figures = {name: line[name] for name in ("verdict", "epsilon", "delta", "outright")}
    return Line("", why="", **figures).result


def _notes(results: dict[str, Any]) -> list[str]:
    schemes = results["schemes"]
    losses = {one["loss"] for one in schemes.values() if "loss" in one}
    notes = [
        f"note: {name} has {', '.join(f'{key} = {value}' for key, value in own.items())} of its own"
        for name, own in results["only"].items()
    ]
    for one in results["runs"]:
        summary, who = one.get("summary", {}), f"{one['scheme']}, seed {one['seed']}"
        if "stopped" in summary:
            notes.append(f"note: {who} ended after {summary['rounds']} rounds: {summary['stopped']}")
        if "warning" in summary:
            notes.append(f"warning: {who}: {summary['warning']}")
    if len(losses) > 1:
        by = "; ".join(
            f"{loss}: {', '.join(k for k, v in schemes.items() if v.get('loss') == loss)}" for loss in sorted(losses)
        )
        notes.append(f"note: schemes train on different losses ({by}): --loss square gives all the same")
    return notes
