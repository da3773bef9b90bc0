"""`fedveil run`: train a model into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedveil.cli.tables import aside, console, percent, size, table

_DATA, _TRAIN, _VEIL, _MACHINE = "Data", "Training", "Veil", "Machine"


def run(
    context: typer.Context,
    config: Path | None = typer.Option(None, "--config", "-c", help="TOML file with these settings; flags win."),
    out: Path = typer.Option(Path("runs/latest"), "--out", help="Folder for the run's files."),
    resume: bool = typer.Option(False, "--resume", help="Continue the run in --out from its newest checkpoint."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress bar and no table."),
    scheme: str | None = typer.Option(None, help="Named scheme (see `fedveil schemes`). (default: lossless)"),
    dataset: str | None = typer.Option(
        None, help="digits, breast-cancer, or a file or folder. (default: digits)", rich_help_panel=_DATA
    ),
    target: str | None = typer.Option(None, help="CSV: the column to predict.", rich_help_panel=_DATA),
    task: str | None = typer.Option(None, help="classification or regression.", rich_help_panel=_DATA),
    text: str | None = typer.Option(None, help="CSV: the column of texts.", rich_help_panel=_DATA),
    group: str | None = typer.Option(None, help="CSV: the column of sample owners.", rich_help_panel=_DATA),
    test_fraction: float | None = typer.Option(
        None, help="Share held out where there is no test part. (default: 0.2)", rich_help_panel=_DATA
    ),
    partition: str | None = typer.Option(
        None, help="iid, dirichlet, size, group, replacement. (default: iid)", rich_help_panel=_DATA
    ),
    alpha: float | None = typer.Option(None, help="dirichlet: concentration. (default: 0.5)", rich_help_panel=_DATA),
    ratio: float | None = typer.Option(
        None, help="size: largest client over smallest. (default: 2)", rich_help_panel=_DATA
    ),
    model: str | None = typer.Option(
        None, help="Model name, or package.module:factory. (default: mlp)", rich_help_panel=_TRAIN
    ),
    model_option: list[str] = typer.Option(
        [], "--model-option", "-o", help="key=value, repeatable: -o depth=5.", rich_help_panel=_TRAIN
    ),
    clients: int | None = typer.Option(None, help="Number of clients. (default: 10)", rich_help_panel=_TRAIN),
    cohort: str | None = typer.Option(
        None, help="Clients per round: 0.1 (a fraction) or 5 (a count).", rich_help_panel=_TRAIN
    ),
    rounds: int | None = typer.Option(None, help="Number of rounds. (default: 50)", rich_help_panel=_TRAIN),
    batch_size: int | None = typer.Option(
        None, help="Samples per step; 0 takes all. (default: 0)", rich_help_panel=_TRAIN
    ),
    lr: float | None = typer.Option(None, help="Learning rate. (default: 0.1)", rich_help_panel=_TRAIN),
    lr_decay: float | None = typer.Option(
        None, help="Factor on the rate per round. (default: 1)", rich_help_panel=_TRAIN
    ),
    lr_schedule: str | None = typer.Option(
        None, help="constant or cosine. (default: constant)", rich_help_panel=_TRAIN
    ),
    momentum: float | None = typer.Option(None, help="Server momentum. (default: 0)", rich_help_panel=_TRAIN),
    weight_decay: float | None = typer.Option(None, help="Server weight decay. (default: 0)", rich_help_panel=_TRAIN),
    loss: str | None = typer.Option(
        None,
        help="square or cross-entropy. (default: square under a veil, cross-entropy for classes under fedavg)",
        rich_help_panel=_TRAIN,
    ),
    target_scale: float | None = typer.Option(
        None, help="Square loss: the true class's target M. (default: 1)", rich_help_panel=_TRAIN
    ),
    true_weight: float | None = typer.Option(
        None, help="Square loss: the true class's weight k. (default: 1)", rich_help_panel=_TRAIN
    ),
    local_steps: int | None = typer.Option(
        None, help="fedavg: local steps per round. (default: 1)", rich_help_panel=_TRAIN
    ),
    local_epochs: int | None = typer.Option(None, help="fedavg: local epochs per round.", rich_help_panel=_TRAIN),
    head_noise: bool | None = typer.Option(
        None, "--head-noise/--no-head-noise", help="Noise on the last layer. (default: on)", rich_help_panel=_VEIL
    ),
    head_groups: int | None = typer.Option(
        None, help="lossless: number m of secret γ. (default: one per output)", rich_help_panel=_VEIL
    ),
    head_strength: float | None = typer.Option(
        None, help="Head noise relative to the outputs. (default: 1)", rich_help_panel=_VEIL
    ),
    spread: float | None = typer.Option(
        None, help="Scales lie in 1/spread … spread. (default: 4)", rich_help_panel=_VEIL
    ),
    bn_eps: str | None = typer.Option(
        None, help="ε of normalisation layers: secret or public. (default: secret)", rich_help_panel=_VEIL
    ),
    min_coverage: float | None = typer.Option(
        None, help="Stop if less is hidden. (default: 0.9)", rich_help_panel=_VEIL
    ),
    seed: int | None = typer.Option(
        None, help="Reproducible run; its secrets are simulated.", rich_help_panel=_MACHINE
    ),
    secrets: str | None = typer.Option(None, help="os, or seeded (a simulation).", rich_help_panel=_MACHINE),
    device: str | None = typer.Option(None, help="cpu or cuda. (default: cpu)", rich_help_panel=_MACHINE),
    dtype: str | None = typer.Option(None, help="float32 or float64. (default: float32)", rich_help_panel=_MACHINE),
    vectorise: bool | None = typer.Option(
        None,
        "--vectorise/--no-vectorise",
        help="Many clients at once. (default: where faster)",
        rich_help_panel=_MACHINE,
    ),
    checkpoint_every: int | None = typer.Option(
        None, help="Rounds between checkpoints; 0: never. (default: 10)", rich_help_panel=_MACHINE
    ),
    evaluate_every: int | None = typer.Option(
        None, help="Rounds between evaluations; 0: at the end. (default: 1)", rich_help_panel=_MACHINE
    ),
) -> None:
    """Train a model federatedly, under a veil or plainly, into a folder.

    The folder then holds config.toml, metrics.jsonl, model.safetensors and summary.json.

    [bold]Examples[/bold]

      fedveil run --scheme lossless --dataset digits --model mlp --clients 10 --rounds 50 --seed 1 --out runs/a

      fedveil run -c my-run.toml --rounds 200 --out runs/b

      fedveil run --resume --out runs/b

      fedveil run --dataset bank.csv --target y --task regression -o depth=5 --scheme pbpfl --out runs/c
    """
    from fedveil.config import RunConfig, parse_model_options
    from fedveil.runs import session

    ours = {"context", "config", "out", "resume", "quiet", "model_option", "cohort"}
    flags: dict[str, Any] = {k: v for k, v in context.params.items() if k not in ours and v is not None}
    if cohort is not None:
        flags["cohort"] = _cohort(cohort)
    settings = RunConfig.read(config) if config is not None else {}
    if model_option:
        stored = settings.get("model_options", {})
        flags["model_options"] = {**(stored if isinstance(stored, dict) else {}), **parse_model_options(model_option)}
    if resume:
        summary = session.resume(out, changes={**settings, **flags}, quiet=quiet, say=aside)
    else:
        settled = RunConfig.from_mapping(settings, where=str(config)).with_changes(**flags)
        summary = session.run(settled, out, quiet=quiet)
    if not quiet:
        show_summary(summary, out)


def _cohort(text: str) -> float | int:
    from fedveil.errors import ConfigError

    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ConfigError(f"cohort is a fraction like 0.1 or a count like 5 (got {text!r}).") from None


def show_summary(summary: dict[str, Any], out: Path) -> None:
    """The run in a few lines."""
    rows = [("scheme", summary["scheme"]), ("loss", summary["loss"]), ("rounds", str(summary["rounds"]))]
    if "test_accuracy" in summary:
        rows.append(("test accuracy", percent(summary["test_accuracy"])))
        rows.append(("what a client sees", f"{percent(summary['client_view_accuracy'])} test accuracy"))
        if "client_view_uncovered_accuracy" in summary:
            rows.append(("… with the noise taken off", percent(summary["client_view_uncovered_accuracy"])))
    if "test_mse" in summary:
        rows.append(("test MSE", f"{summary['test_mse']:.4f}"))
        rows.append(("what a client sees", f"test MSE {summary['client_view_mse']:.4f}"))
    rows.append(("bytes per client and round", f"{size(summary['bytes_down'])} down, {size(summary['bytes_up'])} up"))
    rows.append(("seconds", f"{summary['seconds']:.1f}"))
    if "coverage" in summary:
        rows.append(("parameters hidden", f"{percent(summary['coverage'])} on at least one side"))
    table(f"Run in {out}", ("", ""), rows)
    if "warning" in summary:
        aside(f"warning: {summary['warning']}")
    if summary["simulation"] and "coverage" in summary:
        console.print("[dim]simulation: the secrets follow from the seed; leave --seed out for real ones[/dim]")
