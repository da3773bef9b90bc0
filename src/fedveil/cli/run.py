"""`fedveil run`: train a model into a folder; `fedveil demo`: the main job on embedded data."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedveil.cli.ledger import show_ledger
from fedveil.cli.options import Config, Mlflow, TensorBoard, Wandb, read_settings, takes_flags
from fedveil.cli.tables import aside, console, percent, plainly, table
from fedveil.plain import legible_size

if TYPE_CHECKING:
    from fedveil.data.description import Description


@takes_flags()
def run(
    config: Config = None,
    out: Path = typer.Option(Path("runs/latest"), "--out", help="Folder for the run's files."),
    resume: bool = typer.Option(False, "--resume", help="Continue the run in --out from its newest checkpoint."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress bar, no table and no ledger."),
    *,
    flags: dict[str, Any],
    tensorboard: TensorBoard = None,
    mlflow: Mlflow = None,
    wandb: Wandb = None,
) -> None:
    """Train a model federatedly into a folder, and say what that proves about the clients' data.

    What was understood of the data is said first. The folder then holds config.toml, data.json, metrics.jsonl,
    model.safetensors, summary.json and ledger.json.

    [bold]Examples[/bold]

      fedveil run --scheme lossless --dataset digits --model mlp --clients 10 --rounds 50 --seed 1 --out runs/a

      fedveil run --scheme nadp --epsilon 1 --clip 1 --rounds 100 --out runs/b

      fedveil run --scheme paraaegis --share 0.1 --cipher pads --clip 0.001 --local-epochs 3 --out runs/p

      fedveil run -c my-run.toml --rounds 200 --out runs/c

      fedveil run --resume --out runs/c

      fedveil run --rounds 100 --tensorboard --mlflow sqlite:///mlflow.db --out runs/t

      fedveil run --dataset bank.csv --target y --task regression -o depth=5 --scheme pbpfl --out runs/d

      fedveil run --dataset visits.csv --target ill --group patient --site hospital --out runs/v

      fedveil run --scheme my_scheme.py:veil_ldp --set keep=0.2 --out runs/e
    """
    from fedveil.config import RunConfig
    from fedveil.errors import NumericError
    from fedveil.runs import session
    from fedveil.tracking import Tracked, trackers

    settings = read_settings(config, flags)
    follow = trackers(Tracked(tensorboard, mlflow, wandb), out, say=aside)
    if resume:
        summary = session.resume(out, changes=settings, quiet=quiet, say=aside, follow=follow)
    else:
        settled = RunConfig.from_mapping(settings, where="the command line")
        told = {} if quiet else {"understood": show_data}
        summary = session.run(settled, out, quiet=quiet, say=aside, follow=follow, **told)
    if not quiet:
        show_summary(summary, out)
        show_ledger_of(summary, out)
    if summary.get("recovered") is False:
        raise NumericError(
            f"Training has diverged in round {summary['diverged']} and has not recovered: the model in {out} is of no "
            "use, and lies there with its ledger all the same. See the warning for what to change."
        )


def show_data(description: Description) -> None:
    """What was understood of the data, in a few lines."""
    for line in description.lines():
        plainly(line)


def show_summary(summary: dict[str, Any], out: Path) -> None:
    """The run in a few lines, and how good its model is."""
    from fedveil.cli.judged import show_judgement
    from fedveil.runs.judgement import judgement_from, shown

    judged = judgement_from(summary["judged"], where=str(out)) if "judged" in summary else None
    beside = ""
    if judged is not None and (constant := judged.figures[judged.primary].baseline) is not None:
        beside = f" ({judged.constant_answer}: {shown(judged.primary, constant)})"
    because = f", {summary['loss_because']}" if "loss_because" in summary else ""
    rows = [("scheme", summary["scheme"]), ("loss", summary["loss"] + because), ("rounds", str(summary["rounds"]))]
    if "skipped_rounds" in summary:
        rows.append(("rounds skipped", f"{summary['skipped_rounds']}: too few were drawn, and nobody was asked"))
    if "failed_rounds" in summary:
        rows.append(("rounds that failed", f"{summary['failed_rounds']}: they moved nothing (see metrics.jsonl)"))
    if "stopped" in summary:
        rows.append(("ended early", summary["stopped"]))
    if "test_accuracy" in summary:
        rows.append(("test accuracy", percent(summary["test_accuracy"]) + beside))
        if "client_view_accuracy" in summary:
            rows.append(("what a client sees", f"{percent(summary['client_view_accuracy'])} test accuracy"))
        if "client_view_uncovered_accuracy" in summary:
            rows.append(("… with the noise taken off", percent(summary["client_view_uncovered_accuracy"])))
    if "validation_accuracy" in summary:
        rows.append(("validation accuracy", percent(summary["validation_accuracy"])))
    if "validation_mse" in summary:
        rows.append(("validation MSE", f"{summary['validation_mse']:.4f}"))
    if "test_mse" in summary:
        rows.append(("test MSE", f"{summary['test_mse']:.4f}"))
        if "client_view_mse" in summary:
            rows.append(("what a client sees", f"test MSE {summary['client_view_mse']:.4f}"))
    if "client_test_loss" in summary:
        rows.append(("by clients' held-back samples", _by_clients(summary)))
    if "best" in summary:
        best = summary["best"]
        figure = f"{best['monitor']} {best['value']:.4f}"
        rows.append(("best round", f"{best['round']} ({figure}): {out / 'best.safetensors'}"))
    if summary["holder"] == "clients":
        rows.append(("the model", "lives with the clients; one of them wrote it here"))
    down, up = (legible_size(summary[f"bytes_{way}"]) for way in ("down", "up"))
    rows.append(("bytes per client and round", f"{down} down, {up} up"))
    if "needed_bytes_down" in summary:
        down, up = (legible_size(summary[f"needed_bytes_{way}"]) for way in ("down", "up"))
        rows.append(("… of which are needed", f"{down} down, {up} up"))
    rows.append(("seconds", f"{summary['seconds']:.1f}"))
    if "target" in summary:
        target = summary["target"]
        when = "not in these rounds"
        if target["round"] is not None:
            when = f"in round {target['round']}, after {target['seconds']:.1f} seconds"
        rows.append((f"test accuracy of {percent(target['accuracy'])}", when))
    if "coverage" in summary:
        levels = [f"{percent(share)} {name}" for name, share in summary.get("levels", {}).items() if share]
        how = ", ".join(levels) or f"{percent(summary['coverage'])} on at least one side"
        if "family" in summary:
            how += f" (family {summary['family']})"
        rows.append(("parameters hidden", how))
    table(f"Run in {out}", ("", ""), rows)
    if "warning" in summary:
        aside(f"warning: {summary['warning']}")
    if judged is not None:
        show_judgement(judged)


def _by_clients(summary: dict[str, Any]) -> str:
    """What clients say together of the model, by samples that they held back."""
    figures = [f"loss {summary['client_test_loss']:.4f}"]
    if "client_test_accuracy" in summary:
        figures.insert(0, f"accuracy {percent(summary['client_test_accuracy'])}")
    if "client_test_mse" in summary:
        figures.insert(0, f"MSE {summary['client_test_mse']:.4f}")
    return f"{', '.join(figures)} ({summary['client_test_samples']} samples)"


def show_ledger_of(summary: dict[str, Any], out: Path) -> None:
    """What the run proves, and where that is written."""
    from fedveil.runs.folder import ledger_from

    show_ledger(ledger_from(summary["ledger"], where=str(out)))
    plainly(f"in full: {out / 'ledger.json'}")


# --- `fedveil demo`: the main job on embedded data, beside plain FedAvg


def demo(
    seed: int = typer.Option(1, help="Seed of model, data order and (simulated) secrets."),
    rounds: int = typer.Option(100, help="Number of rounds."),
    clients: int = typer.Option(10, help="Number of clients."),
    out: Path | None = typer.Option(None, "--out", help="Keep both run folders here. (default: thrown away)"),
) -> None:
    """Train digits plainly and under a veil, and show that the model is the same while clients saw another one.

    [bold]Example[/bold]  fedveil demo --rounds 200 --out runs/demo
    """
    from fedveil.runs.judgement import judgement_from

    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch)
        summaries = [
            _train(scheme, folder / scheme, seed=seed, rounds=rounds, clients=clients)
            for scheme in ("fedavg", "lossless")
        ]
    judged = judgement_from(summaries[0]["judged"], where="the demo")
    constant = percent(judged.figures["accuracy"].baseline)
    rows = [
        ("accuracy of the server's model", *(percent(summary["test_accuracy"]) for summary in summaries)),
        ("accuracy of what a client saw", *(percent(summary["client_view_accuracy"]) for summary in summaries)),
        (
            "… with the noise taken off",
            *(percent(summary.get("client_view_uncovered_accuracy")) for summary in summaries),
        ),
        (f"accuracy of answering {judged.constant_answer}", *(constant for _ in summaries)),
        ("training loss", *(f"{summary['train_loss']:.5f}" for summary in summaries)),
        ("bytes down per client and round", *(legible_size(summary["bytes_down"]) for summary in summaries)),
        ("bytes up", *(legible_size(summary["bytes_up"]) for summary in summaries)),
        ("time", *(f"{summary['seconds']:.1f} s" for summary in summaries)),
    ]
    title = f"digits, mlp, {clients} clients, {rounds} rounds, seed {seed}"
    table(title, ("", *(summary["scheme"] for summary in summaries)), rows, right=(1, 2))
    console.print(
        "Same model on the server; under [bold]lossless[/bold] clients trained on a veiled one and saw none of its "
        "parameters as they are.\nNot protected: the server sees every client's "
        "gradients; and the noise on the last layer can be estimated from a few inputs, without labels, and taken off."
    )


def _train(scheme: str, folder: Path, *, seed: int, rounds: int, clients: int) -> dict[str, Any]:
    from fedveil.config import RunConfig
    from fedveil.runs import session

    config = RunConfig(
        scheme=scheme,
        seed=seed,
        rounds=rounds,
        clients=clients,
        loss="square",
        lr=0.05,
        momentum=0.9,
        evaluate_every=10,
    )
    return session.run(config, folder)
