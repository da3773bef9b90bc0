"""`fedveil flower …`: make an app folder, start a cluster, submit runs and follow them; and what real machines need."""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from fedveil.cli.options import SUGGESTS_COMMANDS, Config, located_here, read_settings, takes_flags
from fedveil.cli.run import show_ledger_of, show_summary
from fedveil.cli.tables import aside, console, listed, plainly, table

if TYPE_CHECKING:
    from fedveil.flower.cluster import Cluster
    from fedveil.flower.commands import Submission


_CLIENTS = 3
_STOPPED, _LEFT = 130, 129
_SECONDS_TO_THINK = 3.0

flower = typer.Typer(
    name="flower",
    help="Run on Flower: over a network, every client on its own machine. Needs the extra flower.",
    epilog="Start with: fedveil flower init app · fedveil flower up · fedveil flower run app",
    no_args_is_help=True,
    rich_markup_mode="rich",
    suggest_commands=SUGGESTS_COMMANDS,
)


@flower.command("init")
@takes_flags()
def init(
    folder: Path = typer.Argument(..., help="A new or empty folder, named with letters, digits and hyphens."),
    own_data: bool = typer.Option(False, "--own-data", help="Add fedveil_data.py, which describes data of your own."),
    deadline: float = typer.Option(600.0, "--deadline", help="Seconds that a phase of a round may take."),
    deploy: bool = typer.Option(
        False, "--deploy", help="Add deploy/: service units and compose files for real machines, under TLS."
    ),
    server: str = typer.Option(
        "server.example.org:8443", "--server", help="With --deploy: where nodes reach the server, name:port."
    ),
    config: Config = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Make a Flower app folder that trains with these settings. It has 3 clients unless --clients says otherwise.

    [bold]Examples[/bold]

      fedveil flower init app --scheme veil-secagg --rounds 20

      fedveil flower init app --own-data --clients 5 --scheme veil-dp --epsilon 2

      fedveil flower init app --deploy --server flower.example.org:8443
    """
    from fedveil.config import RunConfig
    from fedveil.flower.app_folder import create_app
    from fedveil.flower.deployment import Deployment

    settings = located_here(read_settings(config, flags))
    planned = RunConfig.from_mapping({"clients": _CLIENTS, "checkpoint_every": 1, **settings})
    deployment = Deployment(superlink=server) if deploy else None
    project = create_app(folder, planned, own_data=own_data, deadline=deadline)
    plainly(f"wrote {project}: {planned.scheme}, {planned.clients} clients, {planned.rounds} rounds")
    if deployment is not None:
        deployment.write(folder / "deploy")
        plainly(f"wrote services for the server and for clients: see {folder / 'deploy' / 'README.md'}")
    if own_data:
        plainly(f"describe your data in {folder / 'fedveil_data.py'}, and copy it into every client's home")
    data = f" --data {folder / 'fedveil_data.py'}" if own_data else ""
    plainly(
        f"next: fedveil flower up --nodes {planned.clients}{data}, and in another terminal: fedveil flower run {folder}"
    )


@flower.command("up")
def up(
    nodes: int = typer.Option(3, "--nodes", help="Number of SuperNodes: one per client."),
    tls: bool = typer.Option(False, "--tls", help="With certificates, and nodes that prove who they are."),
    folder: Path = typer.Option(
        Path(".fedveil"), "--folder", help="Everything of the cluster; what it holds is used again."
    ),
    port: int = typer.Option(
        0, "--port", show_default=False, help="The SuperLink's port. (default: that of the last time, or a free one)"
    ),
    data: Path | None = typer.Option(None, "--data", help="Python file with client(number), for homes made now."),
    keys: Path | None = typer.Option(None, "--keys", help="Folder made by `fedveil keys`, for homes made now."),
    authority: bool = typer.Option(
        False, "--authority", help="One node more, of a key authority (hybridalpha); for trials: it is yours, too."
    ),
    as_root: bool = typer.Option(False, "--as-root", help="Run as root, although submitted code then runs as root."),
    shared: bool = typer.Option(
        False,
        "--share-with-local-users",
        help="Open its ports to every user of this machine, each of whom can then run code as you.",
    ),
) -> None:
    """Start a SuperLink and SuperNodes on this machine, and keep them running until Ctrl-C.

    Whoever reaches a SuperLink may submit runs, and so run code as whoever started it: Flower asks nobody who they are.
    So the cluster gets a network of its own, which only you (and root) can enter; `fedveil flower run` does it by
    itself. What runs in it reaches no other network.

    Prints what runs where, and the commands that do the same on machines of their own. A process that ends by itself
    is started again.

    [bold]Examples[/bold]

      fedveil flower up

      fedveil flower up --nodes 5 --tls --folder trial
    """
    from fedveil.errors import ConfigError
    from fedveil.flower.cluster import Cluster
    from fedveil.runs.callbacks import working

    if os.geteuid() == 0 and not as_root:
        raise ConfigError(
            "This would run as root: whoever submits a run, or changes an app that you submit, would run code as root. "
            "Start it as an ordinary user, or say --as-root if nothing else can be had (in a container, for one)."
        )
    for line in _danger(shared=shared):
        aside(line)
    with _signals() as ended:
        try:
            with working("starting a SuperLink and its nodes"):
                cluster = Cluster(
                    folder,
                    nodes=nodes,
                    tls=tls,
                    port=port,
                    data=data,
                    keys=keys,
                    shared=shared,
                    authority=authority,
                    say=aside,
                )
                cluster.start()
            try:
                _show(cluster, folder)
                cluster.watch(ended)
            finally:
                _ignore_signals()
                with working("ending everything"):
                    cluster.stop()
        except KeyboardInterrupt:
            pass  # asked to end while it started: start() has cleaned up
    aside("ended; the folder is kept for the next time")


def _danger(*, shared: bool) -> list[str]:
    """Who can run code as whom; the first thing to know about a cluster."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = f"user {os.geteuid()}"
    runs = f"Whoever can submit runs to this cluster runs code as {name}: Flower asks nobody who they are."
    if shared:
        return [runs, "DANGER: every user of this machine can, as its ports are open to all of them."]
    return [runs, f"It has a network of its own, which only {name} and root can enter."]


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM set the event and break off whatever waits."""
    ended = threading.Event()

    def end(number: int, frame: object) -> None:
        if not ended.is_set():
            ended.set()
            raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    # An impatient second Ctrl-C would leave processes behind.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _show(cluster: Cluster, folder: Path) -> None:
    rows = []
    for process in cluster.processes:
        node = process.name.removeprefix("supernode-")
        place = f"home {cluster.places.home(int(node))}" if node.isdecimal() else cluster.address
        rows.append((process.name, str(process.pid), place))
    table("Running", ("process", "pid", "where"), rows, right=(1,))
    plainly(f"Logs: {cluster.places.log('superlink').parent}")
    plainly("On machines of their own, the same is:")
    for where, lines in _elsewhere():
        console.print(f"[bold]{where}[/bold]")
        for line in lines:
            plainly(f"  {line}")
    plainly(
        "Flower's control interface (/v1/control) asks nobody who they are: only the gate's port may be reachable for "
        "others, and on the SuperLink's machine nobody else may log in. See docs/deployment.md."
    )
    chosen = "" if folder == Path(".fedveil") else f" --folder {shlex.quote(str(folder))}"
    plainly("")
    plainly(
        f"Submit a run, in another terminal: fedveil flower run APP{chosen} (make APP with: fedveil flower init APP)"
    )
    plainly("Ctrl-C ends everything.")


def _elsewhere() -> list[tuple[str, list[str]]]:
    from fedveil.flower.certificates import Certificates
    from fedveil.flower.commands import connection, superexec_command, superlink_command, supernode_command

    host, files = "flower.example.org", Certificates(Path("certificates"))
    inside, secret = "127.0.0.1:8000", "superexec.secret"
    superlink = superlink_command(
        host="127.0.0.1", port=8000, database="superlink.db", secret=secret, certificates=files
    )
    superexec = superexec_command(address=inside, secret=secret, certificates=files)
    supernode = supernode_command(
        address=f"{host}:8443", home="/srv/fedveil", port=9094, key="node-0.key", certificates=files
    )
    known = connection("NAME", address=inside, ca="/path/to/ca.pem").strip().splitlines()
    return [
        (
            "The SuperLink's machine",
            [
                f"fedveil flower certificates certificates --host {host} --host 127.0.0.1",
                f"(umask 077; head -c 32 /dev/urandom > {secret})",
                shlex.join(superlink),
                f"{shlex.join(superexec)}   # starts the server's part of a run, in its working directory",
                f"fedveil flower gate --certificates certificates --superlink {inside} --port 8443   # for nodes",
                "flwr supernode register node-0.key.pub NAME   # once per node, before it starts",
            ],
        ),
        (
            "Every client's machine (certificates/ca.pem comes from the SuperLink's)",
            [
                "fedveil flower client /srv/fedveil --number 0",
                "fedveil flower node-key node-0.key   # hand over node-0.key.pub",
                shlex.join(supernode),
            ],
        ),
        (
            "Whoever submits runs, there or through `ssh -L 8000:127.0.0.1:8000`, with fedveil flower run APP "
            "--superlink NAME: in ~/.flwr/config.toml",
            [line for line in known if line],
        ),
    ]


@flower.command("run")
@takes_flags()
def run(
    app: Path = typer.Argument(..., help="An app folder, made by `fedveil flower init`."),
    folder: Path = typer.Option(Path(".fedveil"), "--folder", help="The cluster of `fedveil flower up` to run on."),
    superlink: str | None = typer.Option(
        None, "--superlink", help="Run elsewhere: a SuperLink of your own Flower configuration, by name."
    ),
    out: str = typer.Option(
        "", "--out", help="Run folder, on the SuperLink's machine. (default: runs/flower-<run id>)"
    ),
    resume: bool = typer.Option(False, "--resume", help="Continue the run in --out from its newest checkpoint."),
    deadline: float | None = typer.Option(
        None, "--deadline", help="Seconds that a phase of a round may take. (default: the app's)"
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress bar, no table and no ledger."),
    config: Config = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Submit a run and follow it: progress, figures and ledger as `fedveil run` shows them, and its exit codes.

    A SuperLink that restarts in between is waited for. Ctrl-C stops watching (exit code 129) and the run goes on; a
    second Ctrl-C within three seconds stops the run as well (130). Settings given here win over the app's.

    [bold]Examples[/bold]

      fedveil flower run app --out runs/a

      fedveil flower run app --rounds 50 --lr 0.05 --out runs/b

      fedveil flower run app --resume --out runs/b

      fedveil flower run app --superlink production
    """
    from fedveil.flower.app_folder import prepared
    from fedveil.flower.cluster import CONNECTION, Places
    from fedveil.flower.commands import Submission, environment, require_flower

    require_flower()
    places, settings = Places(folder), read_settings(config, flags)
    if superlink is None:
        settings, out = located_here(settings), str(Path(out).expanduser().resolve()) if out else ""
    extras = {"out": out or None, "resume": resume or None, "deadline": deadline}
    changes = {**settings, **{name: value for name, value in extras.items() if value is not None}}
    ready = prepared(app, changes)
    if superlink is None:
        places.require_up(clients=ready.config.clients)
    env = places.environment() if superlink is None else environment()
    submission = Submission(superlink or CONNECTION, env=env, say=aside)
    try:
        summary, where = _follow(submission, app, ready.override, rounds=ready.config.rounds, quiet=quiet)
    except KeyboardInterrupt:
        _interrupted(submission, flwr_home=places.flwr_home if superlink is None else None)
    if not quiet:
        show_summary(summary, where)
        show_ledger_of(summary, where)


def _follow(
    submission: Submission, app: Path, override: str, *, rounds: int, quiet: bool
) -> tuple[dict[str, Any], Path]:
    from contextlib import ExitStack

    from fedveil.errors import FedVeilError
    from fedveil.runs.callbacks import Progress, working

    bar = Progress("", total=rounds, quiet=True)
    with ExitStack() as shown:
        shown.enter_context(working("submitting the run", quiet=quiet))
        for event in submission.events(app, override):
            match event["event"]:
                case "began":
                    shown.close()
                    bar = Progress(event["scheme"], total=event["rounds"], done=event["round"], quiet=quiet)
                    shown.enter_context(bar)
                    if not quiet:
                        aside(f"run {submission.run_id} in {event['out']}")
                case "round":
                    bar.update(event)
                case "said":
                    aside(event["text"])
                case "done":
                    return event["summary"], Path(event["out"])
                case "failed":
                    failure = FedVeilError(event["text"])
                    failure.exit_code = event.get("exit_code", FedVeilError.exit_code)
                    raise failure
    raise AssertionError("events end with `done` or `failed`, or raise")


def _interrupted(submission: Submission, *, flwr_home: Path | None) -> NoReturn:
    if submission.run_id is None:
        raise typer.Exit(_STOPPED)
    setting = "" if flwr_home is None else f"FLWR_HOME={shlex.quote(str(flwr_home))} "
    named = f"{submission.run_id} {submission.superlink}"
    aside("The run goes on. Ctrl-C once more, now, stops it as well.")
    try:
        time.sleep(_SECONDS_TO_THINK)
    except KeyboardInterrupt:
        submission.stop()
        aside(f"run {submission.run_id} is stopped")
        raise typer.Exit(_STOPPED) from None
    aside(f"To see its log: {setting}flwr log {named}. To stop it: {setting}flwr stop {named}.")
    raise typer.Exit(_LEFT)


@flower.command("client")
def client(
    home: Path = typer.Argument(..., help="The client's folder, on its own machine."),
    number: int | None = typer.Option(None, "--number", help="The client's number in the federation, from 0."),
    data: Path | None = typer.Option(
        None, "--data", help="Python file with client(number). (default: the run's data set, for demonstrations)"
    ),
    roster: Path | None = typer.Option(None, "--roster", help="Everybody's public signing keys (see `fedveil keys`)."),
    identity: Path | None = typer.Option(None, "--identity", help="This client's private signing key."),
    policy: Path | None = typer.Option(None, "--policy", help="This client's limits: max_epsilon, min_cohort, …"),
    model: list[str] = typer.Option([], "--model", help="Own architecture it may build, file.py:function; repeatable."),
    require: list[str] = typer.Option(
        [], "--require", help="setting=value that a run must have; repeat a setting to allow several values."
    ),
    simulation: bool = typer.Option(
        False, "--simulation", help="Take part in runs with a seed, whose secrets the server can predict."
    ),
    authority: bool = typer.Option(
        False, "--authority", help="No client: a key authority (hybridalpha), with the number after the last client's."
    ),
    show: bool = typer.Option(False, "--show", help="Make nothing: say what the client of this home accepts."),
) -> None:
    """Make a client's home: who it is, which data it trains on, and what it agrees to; and say what that is.

    What the proofs of a scheme rest on has bounds of its own, whatever a server proposes: --require replaces them, for
    one setting each.

    [bold]Examples[/bold]

      fedveil flower client /srv/fedveil --number 0 --data data.py

      fedveil flower client /srv/fedveil --number 0 --roster roster.toml --identity client-0.key
      --require scheme=veil-secagg --require scheme=veil-dp --require 'clip={min=0.1, max=2}'

      fedveil flower client /srv/fedveil --show
    """
    from fedveil.errors import ConfigError
    from fedveil.flower.home import create_home, parse_required

    if show:
        _show_terms(home)
        return
    if number is None:
        raise ConfigError("A client needs its number: give --number, or --show for a home that exists.")
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
        authority=authority,
    )
    plainly(f"wrote {written}")
    _show_terms(home)
    plainly(f"next: give the SuperNode --node-config 'fedveil-home=\"{written.parent}\"'")


def _show_terms(home: Path) -> None:
    from fedveil.flower.home import Home

    client_home = Home.read(home.expanduser().resolve())
    table(
        f"What client {client_home.client} accepts of a run",
        ("setting", "accepted", "by"),
        [(term.setting, term.accepted, term.source) for term in client_home.terms()],
    )


@flower.command("certificates")
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
    from fedveil.flower.certificates import create_certificates

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


@flower.command("node-key")
def node_key(
    file: Path = typer.Argument(..., help="Where to write the private key; the public one gets .pub behind it."),
) -> None:
    """Make the key by which a SuperNode proves to the SuperLink who it is.

    [bold]Example[/bold]  fedveil flower node-key node-0.key
    """
    from fedveil.flower.certificates import create_node_key

    public = create_node_key(file)
    plainly(f"wrote {file} and {public}")
    plainly(f"next: hand {public} to whoever runs the SuperLink, for: flwr supernode register {public.name} NAME")


@flower.command("gate")
def gate(
    certificates: Path = typer.Option(..., "--certificates", help="Folder made by `fedveil flower certificates`."),
    superlink: str = typer.Option("127.0.0.1:8000", "--superlink", help="Where the SuperLink listens, under TLS."),
    host: str = typer.Option("0.0.0.0", "--host", help="Where nodes connect to."),
    port: int = typer.Option(8443, "--port", help="Its port."),
) -> None:
    """Let nodes reach a SuperLink, and nobody else: its control interface asks nobody who they are.

    [bold]Example[/bold]  fedveil flower gate --certificates certificates --superlink 127.0.0.1:8000 --port 8443
    """
    from fedveil.flower.deployment import serve

    plainly(f"nodes reach {superlink} at {host}:{port}; everything but /v1/fleet is refused")
    serve(superlink=superlink, certificates=certificates, host=host, port=port)


@flower.command("worker")
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
    from fedveil.errors import ConfigError
    from fedveil.flower import worker_client

    home = home.expanduser().resolve()
    if stop and status:
        raise ConfigError("--stop and --status are two questions: ask one.")
    worker_client.settings_of(home)
    if stop:
        plainly("the worker has ended" if worker_client.stop(home) else "no worker was running")
    elif status:
        answer = worker_client.ping(home)
        if answer is None:
            plainly("no worker is running")
            raise typer.Exit(1)
        since = datetime.fromtimestamp(float(answer["since"])).astimezone().isoformat(" ", timespec="seconds")
        plainly(", ".join(f"{name} {value}" for name, value in {**answer, "since": since}.items()))
    else:
        from fedveil.flower.worker import main

        main([str(home)])


# --- `fedveil keys`: signing keys for clients, and the roster that pins them


def keys(
    folder: Path = typer.Argument(..., help="A new or empty folder."),
    clients: int = typer.Option(..., "--clients", help="Number of clients."),
) -> None:
    """Make a signing key per client and the roster of their public halves, so that no server can swap keys.

    [bold]Example[/bold]  fedveil keys keys --clients 10, then fedveil run --scheme nadp --roster keys/roster.toml
    """
    from fedveil.runs.terms import create_identities

    roster = create_identities(folder, clients=clients)
    plainly(f"wrote {clients} private keys and {roster}")
    listed(
        "Who gets what",
        (
            f"client-K.key: client K alone, before the run, by a way the server does not control ({folder} holds all "
            "of them: delete what you have handed out)",
            "roster.toml: every client, from the same trusted hand; it holds public keys only, and the server may see "
            "it",
            "the server: nothing; a key it swaps is refused by every client, which names whose it was",
        ),
    )
    plainly(f"next: fedveil run --roster {roster} … (a simulation holds all clients, so it reads all keys from there)")
