"""A cluster's folder: where everything of it lies, and what is remembered from one start to the next."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedveil.deploy.certificates import Certificates
from fedveil.deploy.flower import environment
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
        return environment(self.flwr_home)

    def require_up(self, *, clients: int) -> None:
        """Refuse to go on unless a cluster answers here and has one node per client."""
        known = self.remembered()
        address = known and f"{HOST}:{known.port}"
        if known is None or not healthy(str(address), ca=self.certificates.ca if known.tls else None):
            raise ConfigError(
                f"No cluster is up in {self.folder}. Start one with `fedveil flower up` in another terminal, name its "
                "folder with --folder, or a SuperLink elsewhere with --superlink."
            )
        if known.nodes != clients:
            raise ConfigError(
                f"The run has {clients} clients, but the cluster in {self.folder} has {known.nodes} nodes: give "
                f"--clients {known.nodes}, or start the cluster with --nodes {clients}."
            )

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the folder: a second cluster in it is refused."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
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
