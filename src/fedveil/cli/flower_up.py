"""`fedveil flower up`: a SuperLink and SuperNodes on this machine, until Ctrl-C."""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedveil.cli.tables import aside, console, plainly, table

if TYPE_CHECKING:
    from fedveil.deploy.cluster import Cluster


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
    from fedveil.deploy.cluster import Cluster
    from fedveil.errors import ConfigError
    from fedveil.runs.progress import working

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
                    folder, nodes=nodes, tls=tls, port=port, data=data, keys=keys, shared=shared, say=aside
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
    from fedveil.deploy.certificates import Certificates
    from fedveil.deploy.flower import connection, superexec_command, superlink_command, supernode_command

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
            [one for one in known if one],
        ),
    ]
