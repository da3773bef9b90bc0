"""The LoRA example, in one process: five clients fine-tune adapters under masks, and under pads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("transformers")
pytest.importorskip(
    "peft", reason="the example's own requirement: pip install -r examples/lora_flower_app/requirements.txt"
)

from flwr.app import Context, RecordDict
from safetensors.numpy import load_file

from docs.pages import ROOT
from fedveil.runs.folder import RunFolder, read_ledger
from flower_apps import AppGrid, everything_in

EXAMPLE = ROOT / "examples" / "lora_flower_app"


@pytest.fixture(scope="module")
def app() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lora_app", EXAMPLE / "lora_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("scheme", ["secagg", "pads"])
def test_adapters_are_fine_tuned_and_nobody_elses_are_seen(
    app: ModuleType, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # First adapters of a seed, whatever the operating system draws: one pass over some is not enough for ten classes.
    monkeypatch.setattr(app, "secrets", SimpleNamespace(randbits=lambda bits: 11))
    settings = {"rounds": 1, "clients": 5, "epochs": 2, "scheme": scheme, "out": "run", "deadline": 30.0}
    context = Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config=settings)
    grid = AppGrid(app.client_app)
    app.server_app(grid, context)
    said = capsys.readouterr().out
    assert "14,986 numbers of 84,180" in said
    accuracy, before = (float(said.split("round 1: ")[1].split("%")[place].split()[-1]) for place in (0, 1))
    assert accuracy > before + 20
    assert read_ledger(tmp_path / "run").line("server").verdict == "aggregate only"
    (row,) = RunFolder(tmp_path / "run").metrics()
    assert row["clients"] == 5
    start = next(iter(app.adapters_of(app.network()).values())).numpy()
    known = start.tobytes() in b"".join(everything_in(part.content) for pair in grid.crossed for part in pair)
    assert known == (scheme == "secagg")
    models = [load_file(path) for path in sorted(Path("models").glob("*"))]
    assert len(models) == (5 if scheme == "pads" else 0)
    for model in models:
        assert all(np.array_equal(model[name], models[0][name]) for name in model)
        app.set_peft_model_state_dict(app.network(), {name: app.torch.from_numpy(model[name]) for name in model})
