"""`fedveil predict`: run a server's model or an export on data; `fedveil export`: one that clients can use."""

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
        exported = export_run(run, out, spread=spread, model=flag.own_code(model=model).get("model"), say=aside)
    plainly(f"wrote {out}: {percent(exported.fraction)} of the parameters rescaled; predictions equal the model's")
    if exported.visible:
        names = ", ".join(parameter.name for parameter in exported.visible)
        plainly(f"visible, as in any usable model (the output is not rescaled): {names}")


def predict(
    model: Path = typer.Argument(..., help="A run folder, its model.safetensors, or an export."),
    dataset: str | None = typer.Option(None, help="Data with targets. (default: the run's own)"),
    part: str = typer.Option("test", help="test or train."),
    inputs: Path | None = typer.Option(
        None, "--inputs", help="Instead: a .npy file of inputs as the model takes them."
    ),
    out: Path | None = typer.Option(None, "--out", help="Write predictions as CSV."),
    own: flag.OwnModel = None,
) -> None:
    """Predict with a trained or exported model, and score it where targets are known.

    Model files are plain data, whoever they come from: one that names code as its model is refused, unless you name
    that code here (--model).

    [bold]Examples[/bold]

      fedveil predict runs/a

      fedveil predict usable.safetensors --dataset digits --out predictions.csv

      fedveil predict runs/own --model nets.py:build
    """
    from fedveil.runs.callbacks import working
    from fedveil.runs.model_file import predict_dataset, predict_file, write_predictions

    with working("predicting"):
        named = flag.own_code(model=own).get("model")
        if inputs is None:
            result = predict_dataset(model, dataset=dataset, part=part, model=named, say=aside)
        else:
            result = predict_file(model, inputs, model=named, say=aside)
    if out is not None:
        write_predictions(out, result)
        plainly(f"wrote {len(result.outputs)} predictions to {out}")
    figures = []
    if result.accuracy is not None:
        figures.append(f"accuracy {percent(result.accuracy)}")
    if result.mse is not None:
        figures.append(f"MSE {result.mse:.6f}")
    plainly(f"{result.kind} model, {len(result.outputs)} samples" + "".join(f", {figure}" for figure in figures))
    if not result.split_known:
        plainly(
            "note: an export does not tell how the run split its data; if the data has no test part of its own, this "
            "split is a new one and may hold samples the model was trained on"
        )
