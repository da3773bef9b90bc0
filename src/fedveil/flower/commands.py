"""Flower's commands: which to type where, in an environment of their own; and a run, submitted and followed to its end.

A run's events are lines that begin with `MARK`: the server's app writes them (`Events`, `tell`), whoever follows reads
them (`Submission`), however often the connection is lost.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError, FedVeilError, missing_extra
from fedveil.flower.certificates import Certificates
from fedveil.flower.network import VARIABLE, entering

if TYPE_CHECKING:
    from fedveil.runs.folder import RunFolder

_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
# An app folder of ours lists no dependencies; without this the SuperLink would look for some over the network.
_OWN_PACKAGES = {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
POLL_INTERVAL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
FLOWER_VARIABLES = {**_QUIET, **_OWN_PACKAGES, POLL_INTERVAL: "0.2"}
"""What Flower's processes find in their environment, wherever they run."""


COMMANDS = "fedveil.flower.commands"
"""This module, which says as a program whether a SuperLink answers: `python -m … ADDRESS [CA]`."""


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
        inherited["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in packages.split(os.pathsep) if path)
    own = {"FLWR_HOME": str(flwr_home)} if flwr_home is not None else {}
    within = {} if network is None else {VARIABLE: str(network)}
    return {**inherited, **FLOWER_VARIABLES, **own, **within, "PYTHONUNBUFFERED": "1"}


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


MARK = "FEDVEIL "
"""How a line begins that programs read."""


class Events:
    """Writes events down as they happen, and says aloud what a person would want to know."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def note(self, event: str, text: str, **facts: Any) -> None:
        """One thing that happened, with the facts that programs may want."""
        self._folder.note(event, text, **facts)
        tell("said", text=text)


def tell(event: str, **facts: Any) -> None:
    """A line for whoever streams the output."""
    sys.stdout.write(MARK + json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


Event = dict[str, Any]

_ENDS = ("done", "failed")
_FRAME = re.compile(r"[╭╮╰╯│─]|\x1b\[[0-9;]*m")
_STARTED = re.compile(r"Successfully started run (\d+)")
_KEPT_LINES = 12
_BETWEEN_TRIES = 1.0
# Flower breaks its complaints to the width of a terminal, in the middle of words.
_WIDE = {"COLUMNS": "2000"}


class Submission:
    """One run on the SuperLink called `superlink` in the Flower configuration that `env` points to."""

    def __init__(
        self,
        superlink: str,
        *,
        env: Mapping[str, str],
        patience: float = 300.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`patience` is how many seconds a SuperLink may be gone before it is given up."""
        self.superlink, self._env, self._patience, self._say = superlink, {**env, **_WIDE}, patience, say
        self.run_id: int | None = None
        self._seen: set[str] = set()
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def events(self, app: Path, override: str) -> Iterator[Event]:
        """Submit `app`, with its configuration changed by the TOML document `override`, and follow it to its end.

        The last event is `done` or `failed`; a run that ends without a word raises a FlowerError.
        """
        with tempfile.TemporaryDirectory() as scratch:
            changes = Path(scratch) / "override.toml"
            changes.write_text(override, encoding="utf-8")
            options = ["--run-config", str(changes)] if override else []
            for event in self._follow("run", str(app), self.superlink, "--stream", *options):
                yield event
                if event["event"] in _ENDS:
                    return
        if self.run_id is None:
            raise FlowerError(f"Flower did not take the run: {self._words()}")
        yield from self._reconnected()

    def stop(self) -> None:
        """Have the SuperLink stop the run."""
        flwr("stop", str(self.run_id), self.superlink, env=self._env)

    def _reconnected(self) -> Iterator[Event]:
        while True:
            status = self._status()
            for event in self._follow("log", str(self.run_id), self.superlink, "--stream"):
                yield event
                if event["event"] in _ENDS:
                    return
            # Asked before the log was read, so that a log which ends with the run has been read to its end.
            if status.startswith("finished"):
                raise FlowerError(
                    f"Run {self.run_id} ended ({status}) without saying why. It said last: {self._words()}"
                )

    def _status(self) -> str:
        """What the SuperLink says about the run, as soon as it says anything."""
        deadline = time.monotonic() + self._patience
        told = False
        while True:
            try:
                listed = flwr("list", self.superlink, "--run-id", str(self.run_id), env=self._env)
                return str(listed["runs"][0]["status"])
            except FlowerError as reason:
                if time.monotonic() > deadline:
                    raise FlowerError(
                        f"The SuperLink has been gone for {self._patience:g} seconds; the run may go on. {reason}"
                    ) from reason
            if not told:
                self._say("lost the SuperLink: waiting for it")
                told = True
            time.sleep(_BETWEEN_TRIES)

    def _follow(self, *arguments: str) -> Iterator[Event]:
        """Events that were not heard before: a log is always told from its beginning."""
        process = subprocess.Popen(
            [*entering(self._env), program("flwr"), *arguments],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for whoever watches, not for this process
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if self.run_id is None and (started := _STARTED.search(line)):
                    self.run_id = int(started[1])
                event = parse_event(line)
                if event is None:
                    self._keep(line)
                elif (known := json.dumps(event, sort_keys=True)) not in self._seen:
                    self._seen.add(known)
                    yield event
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _keep(self, line: str) -> None:
        plain = _FRAME.sub("", line).strip()
        if plain and plain != "Error":
            self._last_lines.append(plain)

    def _words(self) -> str:
        return " ".join(self._last_lines) or "nothing."


def parse_event(line: str) -> Event | None:
    """The event in a line of the server app's log, if it holds one; what stands around it does not matter."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        event, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(0 if healthy(given[0], ca=Path(given[1]) if given[1:] else None) else 1)
