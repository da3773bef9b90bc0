"""Apps in the shape of Flower's quickstarts, PyTorch and scikit-learn; and the example, in one process and for real."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import fedveil.flower
from docs.pages import ROOT
from fedveil.errors import ProtocolError
from fedveil.flower import Protected, protect
from fedveil.flower.app_report import AppProgress
from fedveil.flower.cluster import CONNECTION
from fedveil.flower.commands import entering, program
from fedveil.runs.folder import RunFolder, read_ledger
from flower_apps import AppGrid
from harmed_cluster import Cluster

EXAMPLE = ROOT / "examples" / "protected_flower_app"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_app", EXAMPLE / "digits_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_trains_under_masks_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = example()
    settings = {"rounds": 2, "clients": 5, "scheme": "secagg", "out": str(tmp_path / "run"), "resume": False}
    context = Context(
        run_id=7,
        node_id=1,
        node_config={},
        state=RecordDict(),
        run_config={**settings, "deadline": 5.0, "fraction-evaluate": 1.0},
    )
    app.server_app(AppGrid(app.client_app), context)
    said = capsys.readouterr().out
    accuracy = float(said.split("round 2: ")[1].partition("%")[0])
    assert accuracy > 50.0
    assert "against server: aggregate only" in said
    assert read_ledger(tmp_path / "run").line("server").verdict == "aggregate only"


def logistic(mods: list[Any]) -> ClientApp:
    """scikit-learn's quickstart: a list of arrays in, a list of arrays out."""
    app = ClientApp(mods=mods)
    x, y = load_digits(return_X_y=True)

    def fitted(message: Message, number: int) -> LogisticRegression:
        model = LogisticRegression(max_iter=2, warm_start=True)
        model.classes_ = np.arange(10)
        model.coef_, model.intercept_ = message.content["arrays"].to_numpy_ndarrays()
        return model.fit(x[number::4], y[number::4]) if number >= 0 else model

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        model = fitted(message, number)
        figures = MetricRecord({"num-examples": len(y[number::4])})
        arrays = ArrayRecord([model.coef_, model.intercept_])
        return Message(RecordDict({"arrays": arrays, "metrics": figures}), reply_to=message)

    return app


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_scikit_learns_quickstart_ends_where_it_would_without_protection() -> None:
    first = ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
    plain = FedAvg(fraction_evaluate=0.0).start(AppGrid(logistic([]), 4), first, num_rounds=2)
    strategy = Protected(FedAvg(fraction_evaluate=0.0), deadline=1.0)
    result = strategy.start(AppGrid(logistic([protect()]), 4), first, num_rounds=2)
    for name in plain.arrays:
        np.testing.assert_allclose(result.arrays[name].numpy(), plain.arrays[name].numpy(), atol=1e-9)


def simulated(main: Callable[[Grid, Context], None], client_app: ClientApp, *, nodes: int, **settings: Any) -> None:
    """A server's function and an app under Flower's own simulation, every message of a client in some Ray actor.

    `run_simulation` takes no settings of a run: the function is handed these.
    """
    from flwr.simulation import run_simulation

    server_app = ServerApp()

    @server_app.main()
    def given(grid: Grid, context: Context) -> None:
        context.run_config = settings
        main(grid, context)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 2}}
    run_simulation(server_app=server_app, client_app=client_app, num_supernodes=nodes, backend_config=resources)


NO_RAY = "Flower's simulation needs Ray, which no extra of FedVeil's brings"


_VERDICTS = {
    "secagg": "aggregate only",
    "pads": "aggregate only",
    "paraaegis": "conditional",
    "dp-secagg": "differential privacy",
}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["secagg", "pads", "paraaegis", "dp-secagg"])
def test_the_example_in_flowers_simulation(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Actors hold no state of a client: it is in folders of the nodes, whichever actor a message meets."""
    pytest.importorskip("ray", reason=NO_RAY)
    monkeypatch.syspath_prepend(str(EXAMPLE))  # actors import the app by its name
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    app = importlib.import_module("digits_app")
    settings = {"rounds": 2, "clients": 5, "scheme": scheme, "out": str(tmp_path / "run"), "resume": False}
    settings |= {"deadline": 600.0, "fraction-evaluate": 1.0 if scheme in ("secagg", "pads") else 0.0}
    simulated(app.main, app.client_app, nodes=5, **settings)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [5, 5]
    assert not any("failed" in row or "refused" in row for row in rows)
    assert read_ledger(tmp_path / "run").line("server").verdict == _VERDICTS[scheme]
    nodes = list((tmp_path / "state" / "fedveil" / "flower-apps").iterdir())
    assert len(nodes) == 5
    if scheme in ("secagg", "pads"):
        accuracy = float(capsys.readouterr().out.split("round 2: ")[1].partition("%")[0])
        assert accuracy > 50.0


@pytest.mark.slow
def test_fedveils_own_app_says_why_it_has_no_clients_in_flowers_simulation(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason=NO_RAY)
    from fedveil.flower.server_app import serve

    with pytest.raises(ProtocolError, match="fedveil-home"):
        simulated(serve, fedveil.flower.client_app, nodes=3, clients=3, deadline=20.0, out=str(tmp_path / "run"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=5, tls=True) as made:
        yield made


def submitted(cluster: Cluster, out: Path, **settings: Any) -> subprocess.Popen[str]:
    """The example, on its way through SuperLink and SuperNodes."""
    given = {"out": str(out), "deadline": 120.0, "fraction-evaluate": 0.0, **settings}
    text = " ".join(f"{name}={json.dumps(value)}" for name, value in given.items())
    environment = cluster.places.environment()
    command = [program("flwr"), "run", str(EXAMPLE), CONNECTION, "--stream", "--run-config", text]
    return subprocess.Popen(
        [*entering(environment), *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["pads", "paraaegis"])
def test_clients_hold_the_examples_model_on_real_nodes_and_take_fedadams_step(
    scheme: str, cluster: Cluster, tmp_path: Path
) -> None:
    """Every message meets a new process, and the model is in the nodes' folders alone."""
    out = tmp_path / "run"
    process = submitted(cluster, out, rounds=2, scheme=scheme)
    try:
        said, _ = process.communicate(timeout=900)
    finally:
        process.kill()
        process.wait()
    rows = RunFolder(out).metrics()
    assert [row["clients"] for row in rows] == [5, 5], said
    assert not any("failed" in row or "refused" in row for row in rows)
    ledger = read_ledger(out)
    assert ledger.line("server").verdict == _VERDICTS[scheme]
    assert any("holds its names, shapes and types" in note for note in ledger.notes)
    progress = AppProgress.read(out / "app.state")
    assert progress is not None
    assert progress.standing is not None
    assert (progress.standing.reached, len(progress.arrays)) == (2, 0)


@pytest.mark.slow
def test_the_example_on_real_nodes_under_tls_one_of_which_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    """A SuperNode dies after the first round: the others' sum is opened without it, and the run goes on."""
    out = tmp_path / "run"
    process = submitted(cluster, out, rounds=2)
    try:
        end = time.monotonic() + 600
        while not (out / "metrics.jsonl").exists():
            assert process.poll() is None, "the run ended before its first round"
            assert time.monotonic() < end, "the first round never ended"
            time.sleep(0.5)
        cluster.kill_node(1)
        said, _ = process.communicate(timeout=900)
    finally:
        process.kill()
        process.wait()
    assert "against server: aggregate only" in said
    rows = RunFolder(out).metrics()
    assert [row["round"] for row in rows] == [1, 2]
    assert [row["clients"] for row in rows] == [5, 4]
    assert not any("failed" in row for row in rows)
