"""A cluster on one machine: a SuperLink, its SuperExec and SuperNodes, with everything of theirs in one folder.

`Places` says where what lies, and what is remembered from one start to the next; a `Service` is one of its processes,
started again when it ends by itself; `Cluster` starts all of them in order, watches them and ends them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from fedveil.errors import CheckpointError, ConfigError
from fedveil.flower.certificates import Certificates, create_certificates, create_node_key, write_new
from fedveil.flower.commands import (
    COMMANDS,
    POLL_INTERVAL,
    FlowerError,
    connection,
    environment,
    flwr,
    healthy,
    program,
    require_flower,
    superexec_command,
    superlink_command,
    supernode_command,
)
from fedveil.flower.home import create_home
from fedveil.flower.network import Network, entering
from fedveil.flower.worker_client import SETTINGS, WORKER, give_way, start
from fedveil.processes import ChildProcess, supervised

HOST = "127.0.0.1"
CONNECTION = "fedveil"
"""What the cluster is called in its own Flower configuration."""


@dataclass
class ClusterMemory:
    """What a cluster keeps for its next start."""

    port: int
    nodes: int
    tls: bool
    authority: bool = False
    """Whether the last of the nodes is a key authority's."""
    registered: list[int] = field(default_factory=list)
    network: int | None = None
    """The process that holds the cluster's own network; None: it is in the machine's."""


class Places:
    """Where everything of the cluster in `folder` lies; the folder need not exist."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self.flwr_home = self.folder / "flwr"  # Flower's configuration, for whoever submits runs
        self.database = self.folder / "superlink.db"
        self.secret = self.folder / "superexec.secret"  # what the SuperExec proves itself with
        self.certificates = Certificates(self.folder / "certificates")  # the SuperLink's, under TLS

    def key(self, node: int) -> Path:
        """A node's private key, under TLS."""
        return self.folder / "keys" / f"node-{node}"

    def home(self, node: int) -> Path:
        """A client's home."""
        return self.folder / "homes" / f"client-{node}"

    def log(self, name: str) -> Path:
        """A process's log."""
        return self.folder / "logs" / f"{name}.log"

    def remembered(self) -> ClusterMemory | None:
        """What the last start left, if there was one."""
        path = self.folder / "cluster.json"
        try:
            return ClusterMemory(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as reason:
            raise CheckpointError(f"{path} is damaged ({reason}): give another folder, or remove this one.") from reason

    def remember(self, what: ClusterMemory) -> None:
        """Keep it for the next start."""
        path = self.folder / "cluster.json"
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(asdict(what)) + "\n", encoding="utf-8")
        scratch.replace(path)

    def environment(self) -> dict[str, str]:
        """The environment in which `flwr` knows this cluster."""
        known = self.remembered()
        return environment(self.flwr_home, network=None if known is None else known.network)

    def require_up(self, *, clients: int) -> None:
        """Refuse to go on unless a cluster answers here and has one node per client."""
        known = self.remembered()
        if known is None or not self.answers(known):
            raise ConfigError(
                f"No cluster is up in {self.folder}. Start one with `fedveil flower up` in another terminal, name its "
                "folder with --folder, or a SuperLink elsewhere with --superlink."
            )
        nodes = known.nodes - known.authority
        if nodes != clients:
            raise ConfigError(
                f"The run has {clients} clients, but the cluster in {self.folder} has {nodes} nodes: give "
                f"--clients {nodes}, or start the cluster with --nodes {clients}."
            )

    def answers(self, cluster: ClusterMemory) -> bool:
        """Whether this cluster's SuperLink answers."""
        address, ca = f"{HOST}:{cluster.port}", self.certificates.ca if cluster.tls else None
        if cluster.network is None:
            return healthy(address, ca=ca)
        # Asked by a process of its own, as this one is outside and may have threads, which cannot enter.
        env = environment(network=cluster.network)
        asking = [*entering(env), sys.executable, "-P", "-m", COMMANDS, address, *([] if ca is None else [str(ca)])]
        return subprocess.run(asking, env=env, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the folder, closed to other users: a second cluster in it is refused, and another user's folder."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = self.folder.stat()
        if status.st_uid != os.geteuid():
            raise ConfigError(f"{self.folder} belongs to another user (number {status.st_uid}): give another folder.")
        if stat.S_IMODE(status.st_mode) & 0o077:
            self.folder.chmod(0o700)
        handle = os.open(self.folder / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"A cluster is up in {self.folder} already: end it, or give another folder."
                ) from None
            yield
        finally:
            os.close(handle)


_FIRST_DELAY, _LONGEST_DELAY = 1.0, 30.0
_SETTLED_AFTER = 60.0
_MOST_PATIENCE = 30.0


class Service:
    """A command of Flower's that ends when this process ends, and takes everything it started along (workers apart)."""

    def __init__(self, name: str, *, log: Path, env: Mapping[str, str], held: int, nice: int = 0) -> None:
        """`held` is the end of a pipe that its supervisor keeps open as long as it lives; `nice` is by how much others
        go first."""
        self.name, self.log, self._env, self._held, self._nice = name, log, dict(env), held, nice
        self._child: ChildProcess | None = None
        self._wanted = False
        self._started = self._next_start = 0.0
        self._delay = 0.0

    def start(self, command: Sequence[str]) -> None:
        """Start it, once what ran before is gone; its output is appended to the log."""
        self.wait()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # A client's worker belongs to the client's home, and its parcels survive a node.
        whole = [*entering(self._env), *supervised([program(command[0]), *command[1:]], spare=WORKER)]
        with self.log.open("ab+") as log:
            self._child = ChildProcess(whole, name=self.name, env=self._env, log=log, answers=False, held=(self._held,))
        give_way(self._child.pid, self._nice)
        self._started, self._wanted = time.monotonic(), True

    @property
    def pid(self) -> int | None:
        """Its supervisor's process id, if it runs."""
        return self._child.pid if self._child is not None and self.alive else None

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.alive

    @property
    def due(self) -> bool:
        """Whether it ended unasked and should be started again now; the wait doubles as long as it keeps ending."""
        if self.alive or not self._wanted:
            return False
        now = time.monotonic()
        if self._next_start < self._started:
            settled = now - self._started > _SETTLED_AFTER
            self._delay = _FIRST_DELAY if settled else min(max(2 * self._delay, _FIRST_DELAY), _LONGEST_DELAY)
            self._next_start = now + self._delay
        return now >= self._next_start

    def said(self) -> str:
        """What it has written since it was last started."""
        return "" if self._child is None else self._child.said()

    def failed(self, what: str) -> FlowerError:
        """An error that shows what it said last."""
        tail = "" if self._child is None else self._child.tail()
        return FlowerError(f"{self.name} {what}. The end of {self.log}:\n{tail or '(nothing)'}")

    def ask_to_end(self) -> None:
        """SIGTERM, without waiting."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a power cut would (its client's worker apart), and wait."""
        self._signal(signal.SIGUSR1)
        self.wait()

    def wait(self) -> None:
        """Until it and all it started are gone."""
        if self._child is not None:
            self._child.end(patience=_MOST_PATIENCE)

    def _signal(self, number: signal.Signals) -> None:
        self._wanted = False
        if self._child is not None:
            self._child.signal(number)


class WorkerSupervisor:
    """Ends the workers of these homes when the cluster is gone, however that came about."""

    def __init__(self, homes: Sequence[Path], *, log: Path) -> None:
        self._log, self._patience = log, _MOST_PATIENCE * (1 + len(homes))  # its own start counts too
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "fedveil.flower.worker_client", *map(str, homes)]
        with log.open("ab+") as output:
            self._child = ChildProcess(command, name="worker supervisor", log=output, answers=False)
        self.held = self._child.input.fileno()

    def finish(self) -> None:
        """Let it end the workers now, and wait until it has."""
        if self._child.end(patience=self._patience) != 0:
            raise FlowerError(f"A client's worker would not end: see {self._log}.")


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on this port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def shared_out(nodes: int) -> dict[str, str]:
    """Threads of each of so many workers on this machine: more than there are cores wait for each other, spinning."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nodes))}


def shared_polls(nodes: int) -> dict[str, str]:
    """How often each of so many nodes looks for a message to start an app for: some ten times a second and core in all,
    for twenty nodes that look five times a second each take half a core."""
    pause = nodes / (_LOOKS_A_CORE * (os.cpu_count() or 1))
    return {POLL_INTERVAL: f"{min(max(pause, _LEAST_PAUSE), _MOST_PAUSE):.2g}"}


Say = Callable[[str], None]

_LOOKS_A_CORE, _LEAST_PAUSE, _MOST_PAUSE = 10, 0.2, 1.0
_NODES_NICE = 5
"""Nodes and workers let the SuperLink go first: one that waits for the processor while it writes keeps its database
locked, and answers whoever waits for that longer than five seconds with an error."""
_BETWEEN_LOOKS = 0.25
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
        authority: bool = False,
        deadline: float = 120.0,
        say: Say = lambda text: None,
    ) -> None:
        """`data` and `keys` (a folder made by `fedveil keys`) go into client homes that do not exist yet. With an
        `authority` there is one node more, of a key authority."""
        if nodes < 1:
            raise ConfigError(f"A cluster needs at least one node (got {nodes}).")
        self.places = Places(folder)
        self.nodes, self.tls, self.shared, self.authority = nodes + authority, tls, shared, authority
        self._port, self._data, self._keys = port, data, keys
        self._deadline, self._say = deadline, say
        self._open = contextlib.ExitStack()
        self._processes: dict[str, Service] = {}

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
    def processes(self) -> Sequence[Service]:
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
            homes = [self.places.home(node) for node in range(self.nodes)]
            supervisor = WorkerSupervisor(homes, log=self.places.log("worker-supervisor"))
            self._open.callback(supervisor.finish)
            self._open.callback(self._end_all)
            for name in ("superlink", "superexec", *map(_node, range(self.nodes))):
                env = self._environment(self.places.flwr_home / name)
                nice = _NODES_NICE if name.startswith(_node("")) else 0
                self._processes[name] = Service(
                    name, log=self.places.log(name), env=env, held=supervisor.held, nice=nice
                )
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
            # The first message would start them, and wait until each has loaded torch.
            env = self._environment()
            for node in range(self.nodes):
                start(self.places.home(node), within=entering(env), env=env, nice=_NODES_NICE)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything, the clients' workers included; what the folder holds stays."""
        self._open.close()

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
        usual = before.port if before is not None and free(before.port) else 0
        port = self._port or usual or (free_port() if self.shared else _OWN_PORT)
        if not free(port):
            raise ConfigError(f"Port {port} is taken: give another one, or none for a free one.")
        # A database that is gone has forgotten its nodes.
        registered = before.registered if before is not None and places.database.exists() else []
        self._remembered = ClusterMemory(
            port=port,
            nodes=self.nodes,
            tls=self.tls,
            authority=self.authority,
            registered=registered,
            network=network,
        )
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
            if not (places.home(node) / SETTINGS).exists():
                create_home(
                    places.home(node),
                    client=node,
                    authority=self.authority and node == self.nodes - 1,
                    data=self._data,
                    roster=keys and keys / "roster.toml",
                    identity=keys and keys / f"client-{node}.key",
                    simulation=True,
                )
        places.flwr_home.mkdir(exist_ok=True)
        known = connection(CONNECTION, address=self.address, ca=places.certificates.ca if self.tls else None)
        (places.flwr_home / "config.toml").write_text(known, encoding="utf-8")

    def _environment(self, flwr_home: Path | None = None) -> dict[str, str]:
        """The environment of a process here, which shares this machine with those of all other nodes."""
        env = environment(flwr_home, network=self._remembered.network)
        return {**shared_out(self.nodes), **env, **shared_polls(self.nodes)}

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

    def _await_nodes(self, nodes: Sequence[int]) -> None:
        """Until the SuperLink lists these nodes as online, under the ids that they were given at this start."""
        deadline = time.monotonic() + self._deadline
        waiting = [self._processes[_node(node)] for node in nodes]
        while True:
            ids = [match[1] if (match := re.search(r"SuperNode ID: (\d+)", node.said())) else None for node in waiting]
            if None not in ids and set(ids) <= self._online():
                return
            for node in waiting:
                if not node.alive:
                    raise node.failed("ended before it was online")
                if time.monotonic() > deadline:
                    raise node.failed(f"was not online within {self._deadline:g} seconds")
            time.sleep(_BETWEEN_LOOKS)

    def _online(self) -> set[str]:
        listed = flwr("supernode", "list", CONNECTION, env=self.places.environment())
        return {node["node-id"] for node in listed["nodes"] if node["status"] == "online"}

    def _end_all(self) -> None:
        # Nodes first: they take their leave of the SuperLink, which must still be there to hear it.
        nodes = [process for name, process in self._processes.items() if name.startswith(_node(""))]
        for group in (nodes, [process for process in self._processes.values() if process not in nodes]):
            for process in group:
                process.ask_to_end()
            for process in group:
                process.wait()


def _node(number: int | str) -> str:
    return f"supernode-{number}"
