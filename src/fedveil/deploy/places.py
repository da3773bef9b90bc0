"""A cluster's folder: where everything of it lies, and what is remembered from one start to the next."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import ssl
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedveil.deploy.certificates import Certificates
from fedveil.deploy.flower import environment
from fedveil.deploy.namespace import entering
from fedveil.errors import CheckpointError, ConfigError

HOST = "127.0.0.1"
CONNECTION = "fedveil"
"""What the cluster is called in its own Flower configuration."""


@dataclass
class Remembered:
    """What a cluster keeps for its next start."""

    port: int
    nodes: int
    tls: bool
    registered: list[int] = field(default_factory=list)
    network: int | None = None
    """The process that holds the cluster's own network; None: it is in the machine's."""


@dataclass(frozen=True)
class Places:
    """The files of the cluster in `folder`, an absolute path."""

    folder: Path

    @staticmethod
    def of(folder: str | Path) -> Places:
        """The places in this folder, which need not exist."""
        return Places(Path(folder).expanduser().resolve())

    @property
    def flwr_home(self) -> Path:
        """Flower's configuration, for whoever submits runs."""
        return self.folder / "flwr"

    @property
    def database(self) -> Path:
        """The SuperLink's state."""
        return self.folder / "superlink.db"

    @property
    def secret(self) -> Path:
        """What the SuperExec proves itself with."""
        return self.folder / "superexec.secret"

    @property
    def certificates(self) -> Certificates:
        """The SuperLink's certificates, under TLS."""
        return Certificates(self.folder / "certificates")

    def key(self, node: int) -> Path:
        """A node's private key, under TLS."""
        return self.folder / "keys" / f"node-{node}"

    def home(self, node: int) -> Path:
        """A client's home."""
        return self.folder / "homes" / f"client-{node}"

    def log(self, name: str) -> Path:
        """A process's log."""
        return self.folder / "logs" / f"{name}.log"

    def remembered(self) -> Remembered | None:
        """What the last start left, if there was one."""
        path = self.folder / "cluster.json"
        try:
            return Remembered(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as reason:
            raise CheckpointError(f"{path} is damaged ({reason}): give another folder, or remove this one.") from reason

    def remember(self, what: Remembered) -> None:
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
        if known.nodes != clients:
            raise ConfigError(
                f"The run has {clients} clients, but the cluster in {self.folder} has {known.nodes} nodes: give "
                f"--clients {known.nodes}, or start the cluster with --nodes {clients}."
            )

    def answers(self, cluster: Remembered) -> bool:
        """Whether this cluster's SuperLink answers."""
        address, ca = f"{HOST}:{cluster.port}", self.certificates.ca if cluster.tls else None
        if cluster.network is None:
            return healthy(address, ca=ca)
        # Asked by a process of its own, as this one is outside and may have threads, which cannot enter.
        env = environment(network=cluster.network)
        asking = [*entering(env), sys.executable, "-P", "-m", __name__, address, *([] if ca is None else [str(ca)])]
        return subprocess.run(asking, env=env, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the folder, closed to other users: a second cluster in it is refused, and another user's folder."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = self.folder.stat()
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{self.folder} belongs to another user (number {found.st_uid}): give another folder.")
        if stat.S_IMODE(found.st_mode) & 0o077:
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


def healthy(address: str, *, ca: Path | None) -> bool:
    """Whether a SuperLink answers at this address."""
    context = None if ca is None else ssl.create_default_context(cafile=str(ca))
    # No proxy of the environment's stands between this machine and itself.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    url = f"{'http' if ca is None else 'https'}://{address}/health"
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(0 if healthy(given[0], ca=Path(given[1]) if given[1:] else None) else 1)
