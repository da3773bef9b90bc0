"""Flower's commands: which to type where, found beside this interpreter and run in an environment of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError, FedVeilError, missing_extra
from fedveil.flower.certificates import Certificates
from fedveil.flower.network import VARIABLE, entering

_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
# An app folder of ours lists no dependencies; without this the SuperLink would look for some over the network.
_OWN_PACKAGES = {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
_PROMPT = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}


class FlowerError(FedVeilError):
    """A process of Flower's did not do what it was asked to; the message quotes what it said."""


def require_flower() -> None:
    """Refuse to go on where Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise missing_extra("flwr", "flower", "Running on Flower")


def program(name: str) -> str:
    """A command of Flower's that runs in this interpreter, found even where its environment is not activated."""
    require_flower()
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        raise ConfigError(
            f"{path} is missing: Flower is installed for another interpreter. Install FedVeil anew there."
        )
    return str(path)


def environment(flwr_home: Path | None = None, *, network: int | None = None) -> dict[str, str]:
    """The environment for Flower's processes; they find each other's commands and the packages of this interpreter.

    `network` is the process that holds the network they are to run in, where that is not the machine's.
    """
    scripts = sysconfig.get_path("scripts")
    inherited = {**os.environ, "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])}
    if packages := os.environ.get("PYTHONPATH"):
        inherited["PYTHONPATH"] = os.pathsep.join(os.path.abspath(one) for one in packages.split(os.pathsep) if one)
    own = {"FLWR_HOME": str(flwr_home)} if flwr_home is not None else {}
    within = {} if network is None else {VARIABLE: str(network)}
    return {**inherited, **_QUIET, **_OWN_PACKAGES, **_PROMPT, **own, **within, "PYTHONUNBUFFERED": "1"}


def superlink_command(
    *, host: str, port: int, database: str | Path, secret: str | Path, certificates: Certificates | None
) -> list[str]:
    """The SuperLink; its state is in a file and its ServerApps run elsewhere, so that a run survives its restart."""
    secured = (
        ["--insecure"]
        if certificates is None
        else [
            *("--ssl-certfile", str(certificates.server), "--ssl-keyfile", str(certificates.server_key)),
            *("--ssl-ca-certfile", str(certificates.ca), "--enable-supernode-auth"),
        ]
    )
    return [
        *("flower-superlink", "--host", host, "--port", str(port), *secured, "--database", str(database)),
        *("--isolation", "process", "--superexec-auth-secret-file", str(secret)),
        "--disable-runtime-dependency-installation",
    ]


def superexec_command(*, address: str, secret: str | Path, certificates: Certificates | None) -> list[str]:
    """The process that starts ServerApps for a SuperLink."""
    return [
        *("flower-superexec", "--runtime-api-address", address, *_trust(certificates)),
        *("--superexec-auth-secret-file", str(secret)),
    ]


def supernode_command(
    *, address: str, home: str | Path, port: int, key: str | Path | None, certificates: Certificates | None
) -> list[str]:
    """A client's SuperNode, told where its home is."""
    proof = [] if key is None else ["--auth-supernode-private-key", str(key)]
    return [
        *("flower-supernode", "--superlink", address, *_trust(certificates), *proof, "--port", str(port)),
        *("--node-config", f"fedveil-home={json.dumps(str(home), ensure_ascii=False)}"),
    ]


def connection(name: str, *, address: str, ca: str | Path | None) -> str:
    """A SuperLink in Flower's own configuration, FLWR_HOME/config.toml."""
    trust = "insecure = true" if ca is None else f"root-certificates = {json.dumps(str(ca), ensure_ascii=False)}"
    return f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{address}"\n{trust}\n'


def flwr(*arguments: str, env: Mapping[str, str], timeout: float = 60.0) -> Any:
    """Ask `flwr` something and return the JSON it answers; what it complains about becomes a FlowerError."""
    command = [*entering(env), program("flwr"), *arguments, "--format", "json"]
    try:
        done = subprocess.run(
            command, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as reason:
        raise FlowerError(f"`flwr {' '.join(arguments)}` gave no answer within {timeout:g} seconds.") from reason
    try:
        answer = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        answer = {"success": False, "error-message": done.stderr.strip() or done.stdout.strip()}
    if done.returncode or not answer.get("success", True):
        raise FlowerError(f"`flwr {' '.join(arguments)}` failed: {answer.get('error-message', done.stderr.strip())}")
    return answer


def _trust(certificates: Certificates | None) -> list[str]:
    return ["--insecure"] if certificates is None else ["--root-certificates", str(certificates.ca)]
