"""Service units and compose files: every command in them exists, is ours, and runs as it is written there."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.flower.app_folder import create_app, prepared
from fedveil.flower.certificates import create_certificates, create_node_key
from fedveil.flower.cluster import free_port
from fedveil.flower.commands import FLOWER_VARIABLES, Submission, connection, environment, flwr, healthy
from fedveil.flower.deployment import Deployment
from fedveil.flower.home import create_home

SIDES = {"superlink": "server", "superexec": "server", "gate": "server", "worker": "client", "supernode": "client"}


def unit(folder: Path, name: str) -> dict[str, list[str]]:
    """A unit's settings, by name; lines that are no settings are refused."""
    settings: dict[str, list[str]] = {}
    for line in (folder / SIDES[name] / f"fedveil-{name}.service").read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            key, equals, value = line.partition("=")
            assert equals, line
            settings.setdefault(key, []).append(value)
    return settings


def command(folder: Path, name: str) -> list[str]:
    """What systemd would execute."""
    (line,) = unit(folder, name)["ExecStart"]
    assert not set(line) & {"%", "$"}
    return shlex.split(line)


def variables(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("app") / "app"
    done = CliRunner().invoke(app, ["flower", "init", str(folder), "--deploy", "--server", "flower.example.org:443"])
    assert done.exit_code == 0, done.output
    return folder / "deploy"


@pytest.mark.parametrize("name", SIDES)
def test_a_unit_runs_an_installed_command_hardened_and_as_a_user_of_its_own(name: str, written: Path) -> None:
    settings, words = unit(written, name), command(written, name)
    assert os.access(words[0], os.X_OK)
    expected = {**Deployment().server_commands(), **Deployment(superlink="flower.example.org:443").client_commands()}
    assert [Path(words[0]).name, *words[1:]] == expected[name]
    assert settings["User"] == [{"worker": "fedveil-worker", "supernode": "flower-node"}.get(name, "flower")]
    for key, value in (("NoNewPrivileges", "yes"), ("ProtectSystem", "strict"), ("CapabilityBoundingSet", "")):
        assert settings[key] == [value]
    # A worker ends by itself; a node that comes back before its heartbeat has run out is refused.
    assert settings["Restart"] == ["always" if name == "worker" else "on-failure"]
    assert settings["StartLimitIntervalSec"] == ["0"]
    assert int(settings["RestartSec"][0]) >= (60 if name == "supernode" else 1)
    assert (settings.get("PrivateNetwork") == ["yes"]) == (name == "worker")
    environment_file = variables(written / SIDES[name] / Path(settings["EnvironmentFile"][0]).name)
    assert FLOWER_VARIABLES.items() <= environment_file.items()
    assert shutil.which("flwr-serverapp", path=environment_file["PATH"]) is not None


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_units(written: Path) -> None:
    units = [str(written / side / f"fedveil-{name}.service") for name, side in SIDES.items()]
    checked = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert not [line for line in checked.stderr.splitlines() if "fedveil-" in line]


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_compose_file_runs_the_same_commands(side: str, written: Path) -> None:
    yaml = pytest.importorskip("yaml")
    services: dict[str, Any] = yaml.safe_load((written / side / "compose.yaml").read_text())["services"]
    deployment = Deployment(superlink="flower.example.org:443")
    commands = deployment.server_commands() if side == "server" else deployment.client_commands()
    assert {name: service["command"] for name, service in services.items()} == commands
    users = {service["user"] for service in services.values()}
    assert len(users) == (1 if side == "server" else 2)
    for name, service in services.items():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["restart"] == ("always" if name == "worker" else "on-failure")
        # Nothing but the gate is reachable, and the worker has no network at all.
        assert service.get("ports", ["8443:8443"]) == ["8443:8443"]
        mode = {"superlink": None, "supernode": None, "worker": "none"}.get(name, "service:superlink")
        assert service.get("network_mode") == mode
    if side == "client":
        assert not any(volume.startswith("./home:") for volume in services["supernode"]["volumes"])


@pytest.mark.parametrize("server", ["flower.example.org", "a b:1", 'x"y:1', "host:port", "a:1\nUser=root"])
def test_a_server_is_a_name_and_a_port(server: str) -> None:
    with pytest.raises(ConfigError, match="name:port"):
        Deployment(superlink=server)


@pytest.mark.parametrize(
    "home", ["/srv/a home", "/srv/100%", "/srv/$USER", '/srv/"', "srv/fedveil", "/srv/a\nUser=root"]
)
def test_a_path_that_means_something_else_to_systemd_is_refused(home: str) -> None:
    with pytest.raises(ConfigError, match="full path"):
        Deployment(home=Path(home))


@contextlib.contextmanager
def running(folder: Path, name: str, log: Path) -> Iterator[None]:
    """A unit's command in its environment and working directory, without what only systemd can do."""
    settings = unit(folder, name)
    env = {**variables(folder / SIDES[name] / f"{SIDES[name]}.env"), "HOME": str(folder)}
    for path in ("PYTHONPATH", "COVERAGE_PROCESS_START"):
        if path in os.environ:
            env[path] = os.environ[path]
    with (log / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(
            command(folder, name), env=env, cwd=settings["WorkingDirectory"][0], stdout=output, stderr=output
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(true: Any, *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.slow
def test_the_units_commands_make_a_deployment_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = [free_port() for _ in range(3)]
    at = Deployment(
        server=tmp_path / "server",
        home=tmp_path / "home",
        key=tmp_path / "node.key",
        node_state=tmp_path / "node",
        environment=tmp_path / "etc",
        superlink=f"127.0.0.1:{ports[1]}",
        port=ports[0],
        gate_host="127.0.0.1",
        gate_port=ports[1],
        node_port=ports[2],
    )
    for folder in (at.server, at.node_state, at.environment):
        folder.mkdir()
    at.write(tmp_path / "deploy")
    made = create_certificates(at.certificates.folder, hosts=["127.0.0.1"])
    shutil.copy(made.ca, at.environment / "ca.pem")
    (at.server / "superexec.secret").write_bytes(os.urandom(32))
    create_node_key(at.key)
    create_home(at.home, client=0, simulation=True)
    operator = tmp_path / "operator"
    operator.mkdir()
    (operator / "config.toml").write_text(connection("ours", address=at.inside, ca=made.ca))
    env = environment(operator)
    create_app(
        tmp_path / "app", RunConfig.from_mapping({"scheme": "fedavg", "clients": 1, "rounds": 1, "seed": 1, "lr": 0.1})
    )
    deploy = tmp_path / "deploy"
    with contextlib.ExitStack() as services:
        services.enter_context(running(deploy, "superlink", tmp_path))
        until(lambda: healthy(at.inside, ca=made.ca))
        flwr("supernode", "register", f"{at.key}.pub", "ours", env=env)
        for name in ("superexec", "gate", "worker", "supernode"):
            services.enter_context(running(deploy, name, tmp_path))
        until(lambda: [n for n in flwr("supernode", "list", "ours", env=env)["nodes"] if n["status"] == "online"])
        ready = prepared(tmp_path / "app", {"out": "runs/first"})
        events = list(Submission("ours", env=env).events(tmp_path / "app", ready.override))
    assert events[-1]["event"] == "done", events[-1]
    # Relative run folders lie in the SuperExec's working directory.
    assert json.loads((at.server / "runs" / "first" / "summary.json").read_text())["rounds"] == 1
