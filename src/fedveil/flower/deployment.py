"""What keeps a deployment running: service units for systemd and files for containers, beside an app's settings.

`deploy/server` is for the machine with the SuperLink, `deploy/client` for every client's. The commands are those of
`commands`; every process has a user of its own, and a client's worker has no network.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import sysconfig
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError
from fedveil.flower.certificates import Certificates
from fedveil.flower.commands import (
    COMMANDS,
    FLOWER_VARIABLES,
    require_flower,
    superexec_command,
    superlink_command,
    supernode_command,
)

WORKER_USER, NODE_USER, SERVER_USER = "fedveil-worker", "flower-node", "flower"
_HEARTBEAT = 60
"""Seconds after which Flower forgets a node that was killed; one that comes back with its key earlier is refused."""
_IDS = {WORKER_USER: 10001, NODE_USER: 10002, SERVER_USER: 10003}
"""Users in containers, where there are only numbers."""


@dataclass(frozen=True)
class Deployment:
    """Where things lie and who listens where."""

    server: Path = Path("/srv/fedveil-server")
    """The server's folder: certificates, database, run folders."""
    home: Path = Path("/srv/fedveil")
    """A client's home."""
    key: Path = Path("/etc/flower-node.key")
    """A SuperNode's private key."""
    node_state: Path = Path("/var/lib/flower-node")
    """What Flower keeps on a client's machine."""
    environment: Path = Path("/etc/fedveil")
    """Where server.env, client.env and a client's copy of ca.pem lie."""
    scripts: Path = field(default_factory=lambda: Path(sysconfig.get_path("scripts")))
    """Where the commands are installed: with this interpreter's."""
    superlink: str = "server.example.org:8443"
    """Where nodes reach the gate."""
    port: int = 8000
    """The SuperLink's, on loopback."""
    gate_host: str = "0.0.0.0"
    gate_port: int = 8443
    node_port: int = 9094

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}", self.superlink):
            raise ConfigError(f"A server is given as name:port, like server.example.org:8443 (got {self.superlink!r}).")
        for path in (self.server, self.home, self.key, self.node_state, self.environment, self.scripts):
            if not re.fullmatch(r"/[\w./+-]+", str(path)):
                raise ConfigError(f"Services need a full path of letters, digits and . _ + - (got {str(path)!r}).")

    @property
    def certificates(self) -> Certificates:
        """The server's."""
        return Certificates(self.server / "certificates")

    @property
    def inside(self) -> str:
        """Where the SuperLink answers on its own machine."""
        return f"127.0.0.1:{self.port}"

    def server_commands(self) -> dict[str, list[str]]:
        """By the names of their services, in the order of their start."""
        secret = self.server / "superexec.secret"
        return {
            "superlink": superlink_command(
                host="127.0.0.1",
                port=self.port,
                database=self.server / "superlink.db",
                secret=secret,
                certificates=self.certificates,
            ),
            "superexec": superexec_command(address=self.inside, secret=secret, certificates=self.certificates),
            "gate": [
                *("fedveil", "flower", "gate", "--certificates", str(self.certificates.folder)),
                *("--superlink", self.inside, "--host", self.gate_host, "--port", str(self.gate_port)),
            ],
        }

    def client_commands(self) -> dict[str, list[str]]:
        """By the names of their services, in the order of their start."""
        node = supernode_command(
            address=self.superlink,
            home=self.home,
            port=self.node_port,
            key=self.key,
            certificates=Certificates(self.environment),
        )
        return {"worker": ["fedveil", "flower", "worker", str(self.home)], "supernode": node}

    def write(self, folder: Path) -> list[Path]:
        """Write everything into `folder`, which gets a folder for either side; returns the files."""
        require_flower()
        contained = Deployment(gate_port=self.gate_port, superlink=self.superlink)
        files = {
            "README.md": _README.format(**vars(self)),
            "Containerfile": _CONTAINERFILE.format(**_IDS_BY_NAME),
            "server/fedveil-server.sysusers": _SERVER_USERS.format(**vars(self)),
            "server/server.env": _variables({"FLWR_HOME": self.server / "flwr"}, self.scripts),
            "server/compose.yaml": _server_compose(contained),
            "client/fedveil-client.sysusers": _CLIENT_USERS.format(**vars(self)),
            "client/client.env": _variables({"FLWR_HOME": self.node_state}, self.scripts),
            "client/compose.yaml": _client_compose(contained),
        }
        for name, command in self.server_commands().items():
            files[f"server/fedveil-{name}.service"] = self._unit(name, command)
        for name, command in self.client_commands().items():
            files[f"client/fedveil-{name}.service"] = self._unit(name, command)
        written = []
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(path)
        return written

    def _unit(self, name: str, command: Sequence[str]) -> str:
        """A service: hardened, as a user of its own, and started again when it fails."""
        side = "client" if name in self.client_commands() else "server"
        head, service = _SERVICES[name]
        return _UNIT.format(
            head=head,
            environment=self.environment / f"{side}.env",
            command=" ".join(map(_quoted, [str(self.scripts / command[0]), *command[1:]])),
            service=service.format(**vars(self), heartbeat=_HEARTBEAT),
        )


def _quoted(argument: str) -> str:
    """An argument as systemd reads it, which keeps quotes that are quoted; none has a % or $, which it replaces."""
    if re.fullmatch(r"[\w@+=:,./-]+", argument):
        return argument
    return '"' + argument.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _variables(own: Mapping[str, Path], scripts: Path) -> str:
    """An environment file: what Flower's processes need, whoever starts them."""
    path = f"{scripts}:/usr/local/bin:/usr/bin:/bin"
    given = {
        **FLOWER_VARIABLES,
        "PYTHONUNBUFFERED": "1",
        "PATH": path,
        **{name: str(value) for name, value in own.items()},
    }
    return "".join(f"{name}={value}\n" for name, value in given.items())


_UNIT = """\
[Unit]
{head}
# Tried again for as long as it takes.
StartLimitIntervalSec=0

[Service]
EnvironmentFile={environment}
ExecStart={command}
{service}
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectControlGroups=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""

_SERVER = f"""\
User={SERVER_USER}
WorkingDirectory={{server}}
ReadWritePaths={{server}}
PrivateDevices=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6"""

_SERVICES: dict[str, tuple[str, str]] = {
    "superlink": (
        "Description=Flower SuperLink, on loopback\nAfter=network.target",
        f"{_SERVER}\nRestart=on-failure\nRestartSec=2",
    ),
    "superexec": (
        # Not bound to the SuperLink: runs go on while that is started again.
        "Description=Starts the server's part of runs\nWants=fedveil-superlink.service\n"
        "After=fedveil-superlink.service",
        f"{_SERVER.replace('PrivateDevices=yes', '# A run may compute on a GPU: no PrivateDevices')}"
        "\nRestart=on-failure\nRestartSec=5",
    ),
    "gate": (
        "Description=Lets nodes, and nobody else, reach the SuperLink\nAfter=network.target fedveil-superlink.service",
        f"{_SERVER}\nRestart=on-failure\nRestartSec=2",
    ),
    "worker": (
        "Description=FedVeil worker: holds this client's data and secrets",
        f"""\
User={WORKER_USER}
# The socket's folder, and the socket, are open to the SuperNode's group.
Group={NODE_USER}
RuntimeDirectory=fedveil
RuntimeDirectoryMode=0750
WorkingDirectory={{home}}
ReadWritePaths={{home}}
# It speaks to the SuperNode alone, through a file. (A client on a GPU: nothing here hides devices.)
PrivateNetwork=yes
RestrictAddressFamilies=AF_UNIX
# It ends by itself when nothing came for idle_hours.
Restart=always
RestartSec=2""",
    ),
    "supernode": (
        "Description=Flower SuperNode of this client\nWants=network-online.target fedveil-worker.service\n"
        "After=network-online.target fedveil-worker.service",
        f"""\
User={NODE_USER}
WorkingDirectory={{node_state}}
StateDirectory={{node_state.name}}
ReadWritePaths=-{{node_state}}
PrivateDevices=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
Restart=on-failure
# A node that was killed is refused until its heartbeat has run out: started earlier, it would only fail.
RestartSec={{heartbeat}}""",
    ),
}

_SERVER_USERS = f"""\
# systemd-sysusers: the server's processes own nothing but their folder.
u {SERVER_USER} - "Flower SuperLink and runs" {{server}}
"""

_CLIENT_USERS = f"""\
# systemd-sysusers: what a SuperNode executes must not read what the worker has.
u {NODE_USER} - "Flower SuperNode" {{node_state}}
u {WORKER_USER} - "FedVeil worker" {{home}}
m {WORKER_USER} {NODE_USER}
"""

_CONTAINERFILE = """\
# One image for both sides: docker build -t fedveil -f Containerfile .
FROM python:3.11-slim
RUN pip install --no-cache-dir 'fedveil[flower]' \\
 && install -d -o {worker} -g {worker} -m 0750 /run/fedveil \\
 && install -d -o {node} -g {node} -m 0700 /var/lib/flower-node
"""
_IDS_BY_NAME = {"worker": _IDS[WORKER_USER], "node": _IDS[NODE_USER]}


def _service(command: Sequence[str], user: int, lines: str, *, writes: Sequence[str] = (), restart: str) -> str:
    volumes = "".join(f"      - {volume}\n" for volume in writes)
    return f"""\
    image: fedveil
    command: {json.dumps(list(command), ensure_ascii=False)}
    user: "{user}:{user}"
    restart: {restart}
    read_only: true
    tmpfs: [/tmp]
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
    volumes:
{volumes}{lines}"""


def _environment(home: Path) -> str:
    given = {**FLOWER_VARIABLES, "PYTHONUNBUFFERED": "1", "FLWR_HOME": str(home)}
    return "    environment:\n" + "".join(f"      {name}: {json.dumps(value)}\n" for name, value in given.items())


def _server_compose(at: Deployment) -> str:
    commands, user = at.server_commands(), _IDS[SERVER_USER]
    variables, folder = _environment(at.server / "flwr"), [f"./data:{at.server}"]
    # On loopback of a network that only these three share: the gate's port alone is published.
    shared = (
        "    network_mode: service:superlink\n    depends_on:\n      superlink:\n        condition: service_healthy\n"
        f"{variables}"
    )
    healthy = ["CMD", "python", "-m", COMMANDS, at.inside, str(at.certificates.ca)]
    own = (
        f'    ports: ["{at.gate_port}:{at.gate_port}"]\n    healthcheck:\n      test: {json.dumps(healthy)}\n'
        f"      interval: 5s\n      retries: 24\n{variables}"
    )
    return _COMPOSE_SERVER.format(
        user=user,
        superlink=_service(commands["superlink"], user, own, writes=folder, restart="on-failure"),
        superexec=_service(
            commands["superexec"], user, f"    working_dir: {at.server}\n{shared}", writes=folder, restart="on-failure"
        ),
        gate=_service(commands["gate"], user, shared, writes=folder, restart="on-failure"),
    )


def _client_compose(at: Deployment) -> str:
    commands, worker, node = at.client_commands(), _IDS[WORKER_USER], _IDS[NODE_USER]
    socket = "socket:/run/fedveil"
    reads = [
        f"./home/client.toml:{at.home}/client.toml:ro",
        f"./ca.pem:{at.environment}/ca.pem:ro",
        f"./node.key:{at.key}:ro",
    ]
    own = "    network_mode: none\n"
    joined = f'    group_add: ["{worker}"]\n    depends_on: [worker]\n{_environment(at.node_state)}'
    return _COMPOSE_CLIENT.format(
        worker_id=worker,
        node_id=node,
        worker=_service(commands["worker"], worker, own, writes=[f"./home:{at.home}", socket], restart="always"),
        supernode=_service(
            commands["supernode"], node, joined, writes=[*reads, f"node:{at.node_state}", socket], restart="on-failure"
        ),
    )


_COMPOSE_SERVER = """\
# The server's three processes. ./data belongs to {user}: certificates/, superexec.secret, and what they write.
# Submit runs from within: docker compose exec superexec fedveil flower run APP --superlink NAME
name: fedveil-server
services:
  superlink:
{superlink}
  superexec:
{superexec}
  gate:
{gate}"""

_COMPOSE_CLIENT = """\
# A client's two processes. ./home and what lies in it belong to {worker_id} (client.toml readable by all), node.key to
# {node_id}. In client.toml: worker_user = {worker_id}, courier_user = {node_id}, socket = "/run/fedveil/client.sock".
name: fedveil-client
services:
  worker:
{worker}
  # Started again until Flower has forgotten the node of before, a minute after a kill.
  supernode:
{supernode}
volumes:
  socket:
  node:
"""

_README = """\
# Services

`server/` is for the machine with the SuperLink, `client/` for every client's. The units name the commands of the
environment in which they were written: write them on the machine where they run, or replace the path.

## systemd, server

    install -m 0644 server/fedveil-server.sysusers /etc/sysusers.d/fedveil-server.conf && systemd-sysusers
    install -D -m 0644 server/server.env {environment}/server.env
    install -d -o flower -m 0700 {server}
    install -m 0644 server/*.service /etc/systemd/system/
    # as the user flower, in {server}: certificates and superexec.secret (docs/deployment.md, step 1)
    systemctl enable --now fedveil-superlink fedveil-superexec fedveil-gate

## systemd, client

Nodes reach the server at {superlink}: `--superlink` in `client/fedveil-supernode.service`.

    install -m 0644 client/fedveil-client.sysusers /etc/sysusers.d/fedveil-client.conf && systemd-sysusers
    install -D -m 0644 client/client.env {environment}/client.env
    install -m 0644 ca.pem {environment}/ca.pem
    install -m 0644 client/*.service /etc/systemd/system/
    # {home} and {key}: docs/deployment.md, steps 3 and 4; in client.toml:
    #   worker_user = "fedveil-worker", courier_user = "flower-node", socket = "/run/fedveil/client.sock"
    systemctl enable --now fedveil-worker fedveil-supernode

## Containers

`docker build -t fedveil -f Containerfile .`, then `docker compose up -d` in `server/` or `client/`; the head of each
compose.yaml says whose files must lie beside it.
"""


# --- what a SuperLink shows to the network: the interface of nodes, and nothing else
#
# Flower serves nodes (/v1/fleet), whoever submits runs (/v1/control) and app processes (/v1/runtime) on one port, and
# asks only nodes who they are. A SuperLink that listens on loopback, behind this gate, is reached by nodes alone.

if TYPE_CHECKING:
    import httpx

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_FLEET = re.compile(r"/v1/fleet/[a-z]+(-[a-z]+)*")
# These belong to one connection, or would speak for somebody else's.
_NOT_PASSED = re.compile(
    rb"host|connection|keep-alive|te|trailer|transfer-encoding|upgrade|content-length|forwarded|x-.*"
)
_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 60.0
"""How long a request may pause in the middle of what it sends."""


class Gate:
    """An ASGI app that hands requests for /v1/fleet to the SuperLink behind `client`, and refuses all others."""

    def __init__(self, client: httpx.AsyncClient, *, silent: float = _SILENT_SECONDS) -> None:
        self._client = client
        self._silent = silent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        # Compared as it was sent: what the SuperLink would read otherwise than this gate does not pass.
        plain = scope.get("raw_path", path.encode()) == path.encode() and not scope["query_string"]
        if scope["method"] != "POST" or not plain or not _FLEET.fullmatch(path):
            await _answer(send, 404, b"only nodes are served here")
            return
        headers = [(name, value) for name, value in scope["headers"] if not _NOT_PASSED.fullmatch(name.lower())]
        import httpx

        asked = self._client.build_request("POST", path, headers=headers, content=_body(receive, self._silent))
        try:
            reply = await self._client.send(asked, stream=True)
        except httpx.TransportError:
            await _answer(send, 502, b"the SuperLink does not answer")
            return
        except TimeoutError:
            await _answer(send, 408, b"the request does not end")
            return
        except ConnectionResetError:  # nobody is left to answer
            return
        try:
            passed = [(name, value) for name, value in reply.headers.raw if not _NOT_PASSED.fullmatch(name.lower())]
            await send({"type": "http.response.start", "status": reply.status_code, "headers": passed})
            async for chunk in reply.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await reply.aclose()


def serve(*, superlink: str, certificates: str | Path, host: str, port: int) -> None:
    """Stand before the SuperLink at this address until told to end; both show the same certificate."""
    require_flower()
    import uvicorn

    files = Certificates(Path(certificates))
    for file in (files.ca, files.server, files.server_key):
        if not file.is_file():
            raise ConfigError(f"There is no {file}: make it with `fedveil flower certificates`.")
    trusted = ssl.create_default_context(cafile=str(files.ca))
    uvicorn.run(
        Gate(behind(f"https://{superlink}", verify=trusted)),
        host=host,
        port=port,
        ssl_certfile=str(files.server),
        ssl_keyfile=str(files.server_key),
        lifespan="off",
        ws="none",
        log_level="warning",
    )


def behind(address: str, *, verify: ssl.SSLContext | bool = True) -> httpx.AsyncClient:
    """A client of the SuperLink there, with a connection for every request: a hundred that never end block nobody."""
    import httpx

    patience, limits = httpx.Timeout(None, connect=_CONNECT_SECONDS), httpx.Limits(max_keepalive_connections=20)
    return httpx.AsyncClient(base_url=address, verify=verify, timeout=patience, limits=limits, trust_env=False)


async def _body(receive: Receive, silent: float) -> AsyncIterator[bytes]:
    while True:
        part = await asyncio.wait_for(receive(), silent)
        if part["type"] != "http.request":
            raise ConnectionResetError("a node went away in the middle of a request")
        yield part.get("body", b"")
        if not part.get("more_body", False):
            return


async def _answer(send: Send, status: int, text: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
