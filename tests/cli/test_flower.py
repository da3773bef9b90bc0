"""`fedveil flower` without a cluster: what it writes, what it says next, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main

from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.flower.app_folder import prepared
from fedveil.flower.home import Home
from fedveil.runs.terms import DEFAULTS, OneOf, create_identities
from shell import fedveil


@pytest.mark.parametrize("name", ["init", "run"])
def test_the_settings_flags_are_those_of_run(name: str) -> None:
    from fedveil.cli.app import app

    def flags(command: object) -> dict[str, tuple[str, ...]]:
        return {one.name: tuple(one.opts) for one in command.params}  # type: ignore[attr-defined]

    top = typer.main.get_command(app)
    run = flags(top.commands["run"])  # type: ignore[attr-defined]
    here = flags(top.commands["flower"].commands[name])  # type: ignore[attr-defined]
    settings = run.keys() - {"out", "resume", "quiet", "help", "tensorboard", "mlflow", "wandb"}
    assert len(settings) > 60
    assert {one: here.get(one) for one in settings} == {one: run[one] for one in settings}


def test_init_writes_an_app_with_three_clients_and_says_what_to_type_next(tmp_path: Path) -> None:
    done = fedveil("flower", "init", tmp_path / "app", "--scheme", "veil-secagg", "--cohort", "1.0", "-o", "depth=2")
    assert (done.code, done.error) == (0, "")
    assert "fedveil flower up --nodes 3" in done.output
    assert f"fedveil flower run {tmp_path / 'app'}" in done.output
    written = prepared(tmp_path / "app", {}).config
    expected = {"scheme": "veil-secagg", "clients": 3, "cohort": 1.0, "model_options": {"depth": 2}}
    assert written == RunConfig(**expected, lr=0.02, checkpoint_every=1)  # a round takes seconds: none should be lost


def test_init_takes_a_settings_file_and_flags_win(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("rounds = 7\nlr = 0.3\nclients = 5\n[model_options]\ndepth = 2\nwidth = 8\n")
    done = fedveil("flower", "init", tmp_path / "app", "-c", tmp_path / "run.toml", "--lr", 0.5, "-o", "depth=3")
    assert (done.code, done.error) == (0, "")
    written = prepared(tmp_path / "app", {}).config
    options = {"depth": 3, "width": 8}
    assert written == RunConfig(rounds=7, lr=0.5, clients=5, model_options=options, checkpoint_every=1)


def test_init_for_own_data_says_where_to_describe_and_to_put_them(tmp_path: Path) -> None:
    done = fedveil("flower", "init", tmp_path / "app", "--own-data", "--clients", 2)
    assert (done.code, done.error) == (0, "")
    assert f"--data {tmp_path / 'app' / 'fedveil_data.py'}" in done.output
    assert (tmp_path / "app" / "fedveil_data.py").exists()


def test_client_writes_a_home_the_worker_can_read(tmp_path: Path) -> None:
    create_identities(tmp_path / "keys", clients=2)
    home = tmp_path / "home"
    done = fedveil(
        *("flower", "client", home, "--number", 1, "--require", "scheme=veil-dp", "--require", "scheme=ldp"),
        *("--roster", tmp_path / "keys" / "roster.toml", "--identity", tmp_path / "keys" / "client-1.key"),
    )
    assert (done.code, done.error) == (0, "")
    assert f'fedveil-home="{home}"' in done.output
    assert Home.read(home).require == {"scheme": OneOf(("veil-dp", "ldp"))}


def test_client_says_what_it_accepts_and_on_whose_word(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("max_epsilon = 2.5\n")
    made = fedveil(
        *("flower", "client", tmp_path / "home", "--number", 0, "--policy", tmp_path / "policy.toml"),
        *("--require", "scheme=veil-dp", "--require", "clip={min=0.5, max=2}"),
    )
    assert (made.code, made.error) == (0, "")
    shown = fedveil("flower", "client", tmp_path / "home", "--show")
    assert (shown.code, shown.error) == (0, "")
    assert shown.output in made.output
    lines = [[part.strip() for part in line.split("│")[1:4]] for line in shown.output.splitlines() if "│" in line]
    found = {one[0]: one[1:] for one in lines}
    assert found["scheme"] == ["veil-dp", "require in client.toml"]
    assert found["clip"] == ["0.5 to 2", "require in client.toml"]
    assert found["threshold"][0] == "at least 0.6"
    assert found["policy: max_epsilon"] == ["2.5", "the policy file"]
    assert {*DEFAULTS, "neighbours", "cohort", "model", "simulations"} <= found.keys()
    assert fedveil("flower", "client", tmp_path / "other").code == ConfigError.exit_code
    assert not (tmp_path / "other").exists()


def test_certificates_and_a_node_key_say_who_gets_what(tmp_path: Path) -> None:
    done = fedveil("flower", "certificates", tmp_path / "c", "--host", "flower.example.org", "--host", "10.0.0.5")
    assert (done.code, done.error) == (0, "")
    assert "every SuperNode" in done.output
    done = fedveil("flower", "node-key", tmp_path / "node-0.key")
    assert (done.code, done.error) == (0, "")
    assert "flwr supernode register node-0.key.pub" in done.output
    assert fedveil("flower", "node-key", tmp_path / "node-0.key").code == ConfigError.exit_code


def test_a_worker_that_does_not_run_is_said_not_to(tmp_path: Path) -> None:
    assert fedveil("flower", "client", tmp_path, "--number", 0).code == 0
    assert fedveil("flower", "worker", tmp_path, "--status").output == "no worker is running\n"
    assert fedveil("flower", "worker", tmp_path, "--status").code == 1
    done = fedveil("flower", "worker", tmp_path, "--stop")
    assert (done.code, done.output) == (0, "no worker was running\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("init", "{}/a_b"), "letters, digits and hyphens", id="name"),
        pytest.param(("init", "{}/app", "--rounds", "0"), "rounds must be positive", id="setting"),
        pytest.param(("init", "{}/app", "--policy", "p.toml"), "belongs to a run on one machine", id="policy"),
        pytest.param(("client", "{}/h", "--number", "0", "--require", "x"), "setting=value", id="require"),
        pytest.param(("client", "{}/h", "--number", "0", "--data", "gone.py"), "no file gone.py", id="data"),
        pytest.param(("certificates", "{}/c", "--host", "a/b"), "neither a host name", id="host"),
        pytest.param(("worker", "{}/none", "--status"), "cannot be read", id="home"),
        pytest.param(("worker", "{}", "--status", "--stop"), "ask one", id="both"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = fedveil("flower", *(one.format(tmp_path) for one in arguments))
    assert done.code == ConfigError.exit_code
    assert said in done.error
    assert "\n" not in done.error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("{}/none",), "is no app folder", id="no-app"),
        pytest.param(("{}/app", "--folder", "{}/none"), "No cluster is up", id="no-cluster"),
        pytest.param(("{}/app", "--folder", "{}", "--resume"), "resume needs the folder", id="resume"),
        pytest.param(("{}/app", "--deadline", "0"), "positive number of seconds", id="deadline"),
    ],
)
def test_a_run_that_cannot_be_is_not_submitted(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    pytest.importorskip("flwr")
    assert fedveil("flower", "init", tmp_path / "app").code == 0
    done = fedveil("flower", "run", *(one.format(tmp_path) for one in arguments))
    assert done.code == ConfigError.exit_code
    assert said in done.error
    assert "\n" not in done.error


@pytest.mark.parametrize("setting", ["model", "scheme", "dataset"])
@pytest.mark.parametrize("command", ["init", "run"])
def test_code_that_a_settings_file_names_does_not_get_into_an_app(tmp_path: Path, command: str, setting: str) -> None:
    """A server takes what an app names for the word of whoever submits it: a file's name must not turn into one."""
    (tmp_path / "run.toml").write_text(f'{setting} = "evil.py:make"\n')
    app = tmp_path / "app"
    if command == "run":
        assert fedveil("flower", "init", app).code == 0
    done = fedveil("flower", command, app, "-c", tmp_path / "run.toml")
    assert done.code == 2
    assert f"names code as its {setting}" in done.error
    assert command == "run" or not app.exists()
