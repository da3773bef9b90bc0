"""`fedveil flower`: app folders, client homes, keys and workers for running on Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedveil.cli.flower_run import run
from fedveil.cli.flower_up import up
from fedveil.cli.settings import located_here, takes_settings
from fedveil.cli.tables import listed, plainly

flower = typer.Typer(
    name="flower",
    help="Run on Flower: over a network, every client on its own machine. Needs the extra flower.",
    epilog="Start with: fedveil flower init app · fedveil flower up · fedveil flower run app",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_CLIENTS = 3


@takes_settings
def init(
    folder: Path = typer.Argument(..., help="A new or empty folder, named with letters, digits and hyphens."),
    own_data: bool = typer.Option(False, "--own-data", help="Add fedveil_data.py, which describes data of your own."),
    deadline: float = typer.Option(600.0, "--deadline", help="Seconds that a phase of a round may take."),
    *,
    settings: dict[str, Any],
) -> None:
    """Make a Flower app folder that trains with these settings. It has 3 clients unless --clients says otherwise.

    [bold]Examples[/bold]

      fedveil flower init app --scheme veil-secagg --rounds 20

      fedveil flower init app --own-data --clients 5 --scheme veil-dp --epsilon 2
    """
    from fedveil.config import RunConfig
    from fedveil.deploy.project import create_app

    config = RunConfig.from_mapping({"clients": _CLIENTS, "checkpoint_every": 1, **located_here(settings)})
    project = create_app(folder, config, own_data=own_data, deadline=deadline)
    plainly(f"wrote {project}: {config.scheme}, {config.clients} clients, {config.rounds} rounds")
    if own_data:
        plainly(f"describe your data in {folder / 'fedveil_data.py'}, and copy it into every client's home")
    data = f" --data {folder / 'fedveil_data.py'}" if own_data else ""
    plainly(
        f"next: fedveil flower up --nodes {config.clients}{data}, and in another terminal: fedveil flower run {folder}"
    )


def client(
    home: Path = typer.Argument(..., help="The client's folder, on its own machine."),
    number: int = typer.Option(..., "--number", help="The client's number in the federation, from 0."),
    data: Path | None = typer.Option(
        None, "--data", help="Python file with client(number). (default: the run's data set, for demonstrations)"
    ),
    roster: Path | None = typer.Option(None, "--roster", help="Everybody's public signing keys (see `fedveil keys`)."),
    identity: Path | None = typer.Option(None, "--identity", help="This client's private signing key."),
    policy: Path | None = typer.Option(
        None, "--policy", help="This client's limits: max_epsilon, min_cohort, max_clip, min_clip."
    ),
    model: list[str] = typer.Option([], "--model", help="Own architecture it may build, file.py:function; repeatable."),
    require: list[str] = typer.Option(
        [], "--require", help="setting=value that a run must have; repeat a setting to allow several values."
    ),
    simulation: bool = typer.Option(
        False, "--simulation", help="Take part in runs with a seed, whose secrets the server can predict."
    ),
) -> None:
    """Make a client's home: who it is, which data it trains on, and what it agrees to.

    [bold]Examples[/bold]

      fedveil flower client /srv/fedveil --number 0 --data data.py

      fedveil flower client /srv/fedveil --number 0 --roster roster.toml --identity client-0.key
      --require scheme=veil-secagg --require scheme=veil-dp --require unmask=always
    """
    from fedveil.deploy.homes import create_home, parse_required

    written = create_home(
        home,
        client=number,
        data=data,
        roster=roster,
        identity=identity,
        policy=policy,
        models=model,
        require=parse_required(require),
        simulation=simulation,
    )
    plainly(f"wrote {written}")
    plainly(f"next: give the SuperNode --node-config 'fedveil-home=\"{written.parent}\"'")


def certificates(
    folder: Path = typer.Argument(..., help="Where to write ca.pem, server.pem and their keys."),
    host: list[str] = typer.Option(
        ..., "--host", help="Name or address under which the SuperLink is reached; repeatable."
    ),
    days: int = typer.Option(365, "--days", help="How long they are valid."),
) -> None:
    """Make a certificate authority and the SuperLink's certificate.

    [bold]Example[/bold]  fedveil flower certificates certificates --host flower.example.org --host 10.0.0.5
    """
    from fedveil.deploy.certificates import create_certificates

    made = create_certificates(folder, hosts=host, days=days)
    plainly(f"wrote {made.server} for {', '.join(host)}, valid for {days} days")
    listed(
        "Who gets what",
        (
            f"{made.ca}: every SuperNode, and everybody who submits runs",
            f"{made.server}, {made.server_key}: the SuperLink alone",
            f"{made.ca_key}: nobody; it can sign another server certificate, so put it away or delete it",
        ),
    )


def node_key(
    file: Path = typer.Argument(..., help="Where to write the private key; the public one gets .pub behind it."),
) -> None:
    """Make the key by which a SuperNode proves to the SuperLink who it is.

    [bold]Example[/bold]  fedveil flower node-key node-0.key
    """
    from fedveil.deploy.certificates import create_node_key

    public = create_node_key(file)
    plainly(f"wrote {file} and {public}")
    plainly(f"next: hand {public} to whoever runs the SuperLink, for: flwr supernode register {public.name} NAME")


def worker(
    home: Path = typer.Argument(..., help="The client's home."),
    stop: bool = typer.Option(False, "--stop", help="End the worker that runs."),
    status: bool = typer.Option(False, "--status", help="Say whether one runs, and what it is doing."),
) -> None:
    """Run a client's worker in the foreground: the process that holds its data. (A SuperNode starts one by itself.)

    [bold]Examples[/bold]

      fedveil flower worker /srv/fedveil

      fedveil flower worker /srv/fedveil --status
    """
    from fedveil.engines.flower import courier
    from fedveil.errors import ConfigError

    home = home.expanduser().resolve()
    if stop and status:
        raise ConfigError("--stop and --status are two questions: ask one.")
    courier.settings_of(home)
    if stop:
        plainly("the worker has ended" if courier.stop(home) else "no worker was running")
    elif status:
        found = courier.ping(home)
        if found is None:
            plainly("no worker is running")
            raise typer.Exit(1)
        plainly(", ".join(f"{name} {value}" for name, value in found.items()))
    else:
        from fedveil.engines.flower.worker import main

        main([str(home)])


for name, command in (
    ("init", init),
    ("up", up),
    ("run", run),
    ("client", client),
    ("certificates", certificates),
    ("node-key", node_key),
    ("worker", worker),
):
    flower.command(name)(command)
