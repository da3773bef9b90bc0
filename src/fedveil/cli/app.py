"""The application: every command registered once."""

from __future__ import annotations

import typer

from fedveil.cli.audit import audit
from fedveil.cli.compare import compare, report
from fedveil.cli.flower import flower, keys
from fedveil.cli.inspect import inspect, inspect_data
from fedveil.cli.ledger import ledger
from fedveil.cli.options import SUGGESTS_COMMANDS, Command, flowing
from fedveil.cli.predict import export, predict
from fedveil.cli.reproduce import reproduce
from fedveil.cli.run import demo, run
from fedveil.cli.schemes import doctor, models, schemes
from fedveil.version import __version__

app = typer.Typer(
    name="fedveil",
    help="Bidirectional privacy in federated learning: data privacy proven, model secrecy measured.",
    epilog="Start with: fedveil demo · fedveil run --scheme lossless --dataset digits --seed 1 --out runs/first\n\n"
    "Exit codes: 0 fine · 1 files, or a problem found · 2 settings · 3 data · 4 network · 5 NaN or diverged · "
    "6 protocol · 7 run folder · 8 missing extra · 9 attack · 10 ε contradicted · 130 interrupted · 143 SIGTERM",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    suggest_commands=SUGGESTS_COMMANDS,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def top(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Bidirectional privacy in federated learning: data privacy proven, model secrecy measured."""


for command in (
    *(run, compare, audit, report, ledger, keys, demo, inspect, inspect_data),
    *(schemes, models, export, predict, reproduce, doctor),
):
    app.command(cls=Command, help=flowing(command.__doc__))(command)
for info in flower.registered_commands:
    info.help = flowing(info.callback.__doc__)
app.add_typer(flower)
