"""`fedveil predict`: run a server's model or an export on data; `fedveil export`: write one that others can use."""

from __future__ import annotations

from pathlib import Path

import typer

from fedveil.cli import options as flag
from fedveil.cli.tables import aside, percent, plainly
from fedveil.errors import ConfigError, unknown_name


def export(
    run: Path = typer.Argument(..., help="A run folder."),
    out: Path = typer.Option(..., "--out", help="The file to write."),
    form: str = typer.Option(
        "fedveil", "--format", help="fedveil (for clients), torch (state_dict of your class), or onnx (extra onnx)."
    ),
    spread: float = typer.Option(4.0, help="fedveil: scales lie in 1/spread … spread."),
    model: flag.OwnModel = None,
) -> None:
    """Write a model for others to use.

    By default one that clients may have: rescaled, without head noise, exact predictions, no hidden number the
    server's. --format torch and --format onnx write the server's own numbers, for its owner.

    [bold]Examples[/bold]

      fedveil export runs/a --out usable.safetensors

      fedveil export runs/a --format torch --out weights.pt
    """
    from fedveil.runs.callbacks import working
    from fedveil.runs.model_file import export_onnx, export_run, export_torch
    from fedveil.runs.pretrained import PUBLISHED

    named = flag.own_code(model=model).get("model")
    if form not in _FORMATS:
        raise unknown_name("format", form, _FORMATS)
    meant = _OF_SUFFIX.get(out.suffix.lower(), form)
    if meant != form:
        raise ConfigError(
            f"{out} is named like a file of --format {meant}, but --format is {form}. Say --format {meant}, "
            "or give --out another name."
        )
    with working("exporting"):
        if form == "torch":
            folded = export_torch(run, out, model=named, say=aside)
        elif form == "onnx":
            export_onnx(run, out, model=named, say=aside)
        else:
            exported = export_run(run, out, spread=spread, model=named, say=aside)
    if form == "fedveil" and exported.known:
        plainly(f"wrote {out}: predictions equal the model's; nothing is hidden")
        plainly(PUBLISHED)
        return
    if form == "fedveil":
        plainly(f"wrote {out}: {percent(exported.fraction)} of the parameters rescaled; predictions equal the model's")
        if exported.visible:
            names = ", ".join(parameter.name for parameter in exported.visible)
            plainly(f"visible, as in any usable model (the output is not rescaled): {names}")
        return
    plainly(f"wrote {out}: the model's own numbers, not for clients that must not know them")
    if form == "torch" and folded:
        plainly(
            f"the secret ε of {len(folded)} batch normalisations went into their running variances: outputs are the "
            "model's in evaluation mode (--bn-eps public trains with your own ε)"
        )


_FORMATS = ("fedveil", "torch", "onnx")
_OF_SUFFIX = {".onnx": "onnx", ".pt": "torch", ".pth": "torch", ".safetensors": "fedveil"}


def predict(
    model: Path = typer.Argument(..., help="A run folder, its model.safetensors, or an export."),
    dataset: str | None = typer.Option(
        None,
        help="New data, with or without targets: a table, a folder of pictures or one of them, .npz, .npy. "
        "(default: the run's own)",
    ),
    part: str = typer.Option("test", help="Of the run's own data: test, train or validation."),
    keep: list[str] = typer.Option(
        [], help="A column of a new table that the model does not take, to stand beside the predictions; repeatable."
    ),
    inputs: Path | None = typer.Option(
        None, "--inputs", help="Instead: a .npy file of inputs as the model takes them, prepared already."
    ),
    out: Path | None = typer.Option(None, "--out", help="Write predictions as CSV, or .parquet (extra parquet)."),
    own: flag.OwnModel = None,
) -> None:
    """Predict with a trained or exported model, and score it where targets are known.

    New data are prepared as the run prepared its own, by what the model's file says; what does not fit is refused by
    name. Model files are plain data, whoever they come from: one that names code as its model is refused, unless you
    name that code here (--model).

    [bold]Examples[/bold]

      fedveil predict runs/a

      fedveil predict runs/own --dataset new-patients.csv --keep patient --out predictions.csv

      fedveil predict runs/own --model nets.py:build
    """
    from fedveil.cli.judged import show_judgement
    from fedveil.runs.callbacks import working
    from fedveil.runs.predicting import predict_dataset, predict_file, refuse_other_tables, write_predictions

    if out is not None:
        refuse_other_tables(out)
    with working("predicting"):
        named = flag.own_code(model=own).get("model")
        if inputs is None:
            result = predict_dataset(model, dataset=dataset, part=part, keep=keep, model=named, say=aside)
        else:
            result = predict_file(model, inputs, model=named, say=aside)
    for note in result.notes:
        plainly(f"note: {note}")
    if out is not None:
        write_predictions(out, result)
        plainly(f"wrote {len(result)} predictions to {out}")
    figures = []
    if result.accuracy is not None:
        figures.append(f"accuracy {percent(result.accuracy)}")
    if result.mse is not None:
        figures.append(f"MSE {result.mse:.6f}")
    plainly(f"{result.kind} model, {len(result)} samples" + "".join(f", {figure}" for figure in figures))
    if result.judged is not None:
        show_judgement(result.judged, what="samples with targets")
    if not result.split_known:
        plainly(
            "note: an export does not tell how the run split its data; if the data has no test part of its own, this "
            "split is a new one and may hold samples the model was trained on"
        )
    if out is None:
        plainly("the predictions themselves, a line a sample: --out FILE.csv")
