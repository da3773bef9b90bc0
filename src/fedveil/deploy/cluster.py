"""A SuperLink and SuperNodes on this machine: for trying things out, for demonstrations, and for tests of failures."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from fedveil.deploy.certificates import create_certificates, create_node_key, write_new
from fedveil.deploy.flower import (
    FlowerError,
    connection,
    environment,
    flwr,
    require_flower,
    superexec_command,
    superlink_command,
    supernode_command,
)
from fedveil.deploy.homes import CLIENT_FILE, create_home
from fedveil.deploy.namespace import Network
from fedveil.deploy.places import CONNECTION, HOST, Places, Remembered
from fedveil.deploy.processes import Janitor, Leashed, free_port, is_free
from fedveil.errors import ConfigError

Say = Callable[[str], None]

_BETWEEN_LOOKS = 0.25
_BEFORE_ANOTHER_TRY = 3.0
_SECRET_BYTES = 32
# In a network of its own nobody else has ports: below those that the kernel gives to outgoing connections.
_OWN_PORT, _OWN_NODE_PORTS = 8000, 20_000


class Cluster:
    """A SuperLink, its SuperExec and `nodes` SuperNodes, with everything they need in one folder.

    What the folder holds is used again by the next start: certificates, keys, homes, the SuperLink's database.
    Unless it is `shared`, all of it runs in a network of its own: whoever reaches a SuperLink may submit runs, and with
    them runs code as whoever started it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        nodes: int = 3,
        tls: bool = False,
        port: int = 0,
        data: str | Path | None = None,
        keys: str | Path | None = None,
        shared: bool = False,
        deadline: float = 120.0,
        say: Say = lambda text: None,
    ) -> None:
        """`data` and `keys` (a folder made by `fedveil keys`) go into client homes that do not exist yet."""
        if nodes < 1:
            raise ConfigError(f"A cluster needs at least one node (got {nodes}).")
        self.places = Places.of(folder)
        self.nodes, self.tls, self.shared = nodes, tls, shared
        self._port, self._data, self._keys = port, data, keys
        self._deadline, self._say = deadline, say
        self._open = contextlib.ExitStack()
        self._processes: dict[str, Leashed] = {}

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"{HOST}:{self._remembered.port}"

    @property
    def processes(self) -> Sequence[Leashed]:
        """Every process, in the order of their start."""
        return list(self._processes.values())

    def start(self) -> None:
        """Start everything and wait until all nodes are online; a failure leaves nothing running."""
        require_flower()
        try:
            self._open.enter_context(self.places.taken())
            network = None
            if not self.shared:
                network = Network()
                self._open.callback(network.close)
            self._prepare(None if network is None else network.pid)
            janitor = Janitor([self.places.home(node) for node in range(self.nodes)], log=self.places.log("janitor"))
            self._open.callback(janitor.finish)
            self._open.callback(self._end_all)
            for name in ("superlink", "superexec", *map(_node, range(self.nodes))):
                env = environment(self.places.flwr_home / name, network=self._remembered.network)
                self._processes[name] = Leashed(name, log=self.places.log(name), env=env, held=janitor.held)
            self._say("starting the SuperLink")
            self._start("superlink")
            self._await_superlink()
            self._start("superexec")
            if self.tls:
                self._register()
            self._say(f"starting {self.nodes} SuperNodes")
            for node in range(self.nodes):
                self._start(_node(node))
            self._await_nodes(range(self.nodes))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything, the clients' workers included; what the folder holds stays."""
        self._open.close()

    def restart_superlink(self) -> None:
        """Kill the SuperLink as a power cut would, start it again, and wait until it answers."""
        self._processes["superlink"].kill()
        self._start("superlink")
        self._await_superlink()

    def kill_node(self, node: int) -> None:
        """Kill a SuperNode as a power cut would; its client's worker lives on."""
        self._processes[_node(node)].kill()

    def start_node(self, node: int) -> None:
        """Start a SuperNode again and wait until it is online.

        One that was killed under TLS is refused until the SuperLink has missed two of its heartbeats, about a minute:
        it is started again until it is let in.
        """
        if not self._processes[_node(node)].alive:
            self._start(_node(node))
        self._await_nodes([node], patiently=True)

    def watch(self, until: threading.Event) -> None:
        """Start again whatever ends by itself, with longer and longer waits, until the event is set."""
        while not until.wait(_BETWEEN_LOOKS):
            for process in self.processes:
                if process.due:
                    self._say(f"{process.name} has ended: starting it again (see {process.log})")
                    self._start(process.name)

    def _prepare(self, network: int | None) -> None:
        places = self.places
        before = places.remembered()
        if before is not None and before.tls != self.tls:
            raise ConfigError(
                f"The cluster in {places.folder} was made {'with' if before.tls else 'without'} TLS, and its nodes are "
                f"known that way. Start it {'with' if before.tls else 'without'} --tls, or give another folder."
            )
        free = is_free if self.shared else lambda port: True
        found = before.port if before is not None and free(before.port) else 0
        port = self._port or found or (free_port() if self.shared else _OWN_PORT)
        if not free(port):
            raise ConfigError(f"Port {port} is taken: give another one, or none for a free one.")
        # A database that is gone has forgotten its nodes.
        registered = before.registered if before is not None and places.database.exists() else []
        self._remembered = Remembered(port=port, nodes=self.nodes, tls=self.tls, registered=registered, network=network)
        places.remember(self._remembered)
        if not places.secret.exists():
            write_new(places.secret, secrets.token_bytes(_SECRET_BYTES), private=True)
        if self.tls:
            if not places.certificates.server.exists():
                create_certificates(places.certificates.folder, hosts=[HOST, "localhost"])
            for node in range(self.nodes):
                if not places.key(node).exists():
                    create_node_key(places.key(node))
        keys = None if self._keys is None else Path(self._keys)
        for node in range(self.nodes):
            if not (places.home(node) / CLIENT_FILE).exists():
                create_home(
                    places.home(node),
                    client=node,
                    data=self._data,
                    roster=keys and keys / "roster.toml",
                    identity=keys and keys / f"client-{node}.key",
                    simulation=True,
                )
        places.flwr_home.mkdir(exist_ok=True)
        known = connection(CONNECTION, address=self.address, ca=places.certificates.ca if self.tls else None)
        (places.flwr_home / "config.toml").write_text(known, encoding="utf-8")

    def _start(self, name: str) -> None:
        places = self.places
        certificates = places.certificates if self.tls else None
        if name == "superlink":
            command = superlink_command(
                host=HOST,
                port=self._remembered.port,
                database=places.database,
                secret=places.secret,
                certificates=certificates,
            )
        elif name == "superexec":
            command = superexec_command(address=self.address, secret=places.secret, certificates=certificates)
        else:
            node = int(name.removeprefix(_node("")))
            command = supernode_command(
                address=self.address,
                home=places.home(node),
                port=free_port() if self.shared else self._own_port(node),
                key=places.key(node) if self.tls else None,
                certificates=certificates,
            )
        self._processes[name].start(command)

    def _own_port(self, node: int) -> int:
        port = _OWN_NODE_PORTS + node
        return port if port < self._remembered.port else port + 1

    def _await_superlink(self) -> None:
        superlink = self._processes["superlink"]
        deadline = time.monotonic() + self._deadline
        while not self.places.answers(self._remembered):
            if not superlink.alive:
                raise superlink.failed("ended while it started")
            if time.monotonic() > deadline:
                raise superlink.failed(f"did not answer within {self._deadline:g} seconds")
            time.sleep(_BETWEEN_LOOKS)

    def _register(self) -> None:
        for node in range(self.nodes):
            if node in self._remembered.registered:
                continue
            self._say(f"registering node {node}")
            public = self.places.key(node).with_suffix(".pub")
            try:
                flwr("supernode", "register", str(public), CONNECTION, env=self.places.environment())
            except FlowerError as reason:
                if "already in use" not in str(reason):
                    raise
            self._remembered.registered.append(node)
            self.places.remember(self._remembered)

    def _await_nodes(self, nodes: Sequence[int], *, patiently: bool = False) -> None:
        """Until the SuperLink lists these nodes as online, under the ids that they were given at this start."""
        deadline = time.monotonic() + self._deadline
        waiting = [self._processes[_node(node)] for node in nodes]
        while True:
            ids = [found[1] if (found := re.search(r"SuperNode ID: (\d+)", one.said())) else None for one in waiting]
            if None not in ids and set(ids) <= self._online():
                return
            for one in waiting:
                if not one.alive and not patiently:
                    raise one.failed("ended before it was online")
                if not one.alive:
                    time.sleep(_BEFORE_ANOTHER_TRY)
                    self._start(one.name)
                if time.monotonic() > deadline:
                    raise one.failed(f"was not online within {self._deadline:g} seconds")
            time.sleep(_BETWEEN_LOOKS)

    def _online(self) -> set[str]:
        listed = flwr("supernode", "list", CONNECTION, env=self.places.environment())
        return {one["node-id"] for one in listed["nodes"] if one["status"] == "online"}

    def _end_all(self) -> None:
        # Nodes first: they take their leave of the SuperLink, which must still be there to hear it.
        nodes = [one for name, one in self._processes.items() if name.startswith(_node(""))]
        for group in (nodes, [one for one in self._processes.values() if one not in nodes]):
            for one in group:
                one.ask_to_end()
            for one in group:
                one.wait()


def _node(number: int | str) -> str:
    return f"supernode-{number}"
