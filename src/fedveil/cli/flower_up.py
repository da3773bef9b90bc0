"""`fedveil flower up`: a SuperLink and SuperNodes on this machine, until Ctrl-C."""

from __future__ import annotations

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
) -> None:
    """Start a SuperLink and SuperNodes on this machine, and keep them running until Ctrl-C.

    Prints what runs where, and the commands that do the same on machines of their own. A process that ends by itself
    is started again.

    [bold]Examples[/bold]

      fedveil flower up

      fedveil flower up --nodes 5 --tls --folder trial
    """
    from fedveil.deploy.cluster import Cluster
    from fedveil.runs.progress import working

    with _signals() as ended:
        try:
            with working("starting a SuperLink and its nodes"):
                cluster = Cluster(folder, nodes=nodes, tls=tls, port=port, data=data, keys=keys, say=aside)
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
        "Flower asks nobody who submits runs or registers nodes for a name: let only those reach the SuperLink's port "
        "whom you trust with that, or use Flower's own accounts."
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
    address, secret = f"{host}:8000", "superexec.secret"
    superlink = superlink_command(host="0.0.0.0", port=8000, database="superlink.db", secret=secret, certificates=files)
    superexec = superexec_command(address=address, secret=secret, certificates=files)
    supernode = supernode_command(address=address, home="/srv/fedveil", port=9094, key="node-0.key", certificates=files)
    known = connection("NAME", address=address, ca="/path/to/ca.pem").strip().splitlines()
    return [
        (
            "The SuperLink's machine",
            [
                f"fedveil flower certificates certificates --host {host}",
                f"(umask 077; head -c 32 /dev/urandom > {secret})",
                shlex.join(superlink),
                f"{shlex.join(superexec)}   # starts the server's part of a run, in its working directory",
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
            "Whoever submits runs, with fedveil flower run APP --superlink NAME: in ~/.flwr/config.toml",
            [one for one in known if one],
        ),
    ]
