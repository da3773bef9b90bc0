"""`fedveil demo`: the main job on embedded data, beside plain FedAvg."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import typer

from fedveil.cli.tables import console, percent, size, table


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
        ("bytes down per client and round", *(size(summary["bytes_down"]) for summary in summaries)),
        ("bytes up", *(size(summary["bytes_up"]) for summary in summaries)),
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
