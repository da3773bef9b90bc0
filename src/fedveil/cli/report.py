"""`fedveil report`: one HTML file about runs, comparisons and audits."""

from __future__ import annotations

from pathlib import Path

import typer

from fedveil.cli.tables import plainly, size


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
    plainly(f"wrote {made} ({size(made.stat().st_size)})")
    if with_records and "records" in made.name:
        plainly("it may show samples of clients: keep it as you keep their data")
    if show:
        import webbrowser

        webbrowser.open(made.resolve().as_uri())
