"""`fedveil export`: a model that clients can use, from a run."""

from __future__ import annotations

from pathlib import Path

import typer

from fedveil.cli import options as flag
from fedveil.cli.tables import aside, percent, plainly


def export(
    run: Path = typer.Argument(..., help="A run folder."),
    out: Path = typer.Option(..., "--out", help="The file to write (.safetensors)."),
    spread: float = typer.Option(4.0, help="Scales lie in 1/spread … spread."),
    model: flag.OwnModel = None,
) -> None:
    """Write a client-usable model: rescaled, without head noise, exact predictions, no hidden number the server's.

    [bold]Example[/bold]  fedveil export runs/a --out usable.safetensors
    """
    from fedveil.runs.callbacks import working
    from fedveil.runs.model_file import export_run

    with working("exporting"):
        found = export_run(run, out, spread=spread, model=flag.own_code(model=model).get("model"), say=aside)
    plainly(f"wrote {out}: {percent(found.fraction)} of the parameters rescaled; predictions equal the model's")
    if found.visible:
        names = ", ".join(one.name for one in found.visible)
        plainly(f"visible, as in any usable model (the output is not rescaled): {names}")
