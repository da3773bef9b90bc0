from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from audit.recorded import recorded_once
from fedveil.audit.isolation import AttackError, attacked, attacked_tensors
from fedveil.audit.registry import attack_at
from fedveil.audit.seen import server_view
from fedveil.audit.views import to_bytes
from fedveil.errors import ConfigError

ATTACKS = {name: f"audit.misbehaving:{name}" for name in ("counts", "raises", "dies", "leaves", "hangs", "missing")}


def view() -> bytes:
    return to_bytes(server_view(recorded_once(scheme="lossless")[1], 0, round=1))


def run(name: str, **more: Any) -> bytes:
    return attacked(name, view(), attacks=ATTACKS, **more)


def test_an_attack_gets_its_view_and_settings_and_sends_progress_and_tensors() -> None:
    heard: list[float] = []
    found = attacked_tensors(run("counts", settings={"number": 7}, on_progress=heard.append))
    record = recorded_once(scheme="lossless")[1]
    weights = server_view(record, 0, round=1).weights
    assert weights is not None
    assert (found["messages"].tolist(), found["given"].tolist()) == ([2], [7])
    assert torch.equal(found["parameters"], weights.parameters)
    assert heard == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_what_is_not_in_the_view_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen_by_server = view()
    run_folder = tmp_path / "the-run-of-the-day"
    run_folder.mkdir()
    (run_folder / "config.toml").write_text("seed = 1")
    monkeypatch.chdir(run_folder)
    monkeypatch.syspath_prepend(str(run_folder))
    monkeypatch.setenv("FEDVEIL_DATA", str(run_folder))
    monkeypatch.setenv("PYTHONPATH", str(run_folder))
    with (run_folder / "config.toml").open() as held_open:
        os.set_inheritable(held_open.fileno(), True)
        seen = json.loads(attacked_tensors(attacked("surroundings", seen_by_server))["seen"].numpy().tobytes())
    assert seen["lies here"] == []
    assert not Path(seen["folder"]).exists()
    assert set(seen["environment"]) <= {
        *("LC_ALL", "LC_CTYPE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
        *("CUBLAS_WORKSPACE_CONFIG", "SYSTEMROOT"),
    } | {name for name in seen["environment"] if name.startswith(("KMP_", "TORCH", "PYTORCH"))}
    for what in (run_folder.name, "config.toml"):
        assert what not in json.dumps(seen)


def test_an_error_inside_an_attack_is_told() -> None:
    with pytest.raises(AttackError, match="'raises' failed: ValueError: the picture would not come out"):
        run("raises")


def test_a_killed_attack_is_told_from_one_that_leaves() -> None:
    with pytest.raises(AttackError, match="'dies' was killed by signal 9"):
        run("dies")
    with pytest.raises(AttackError, match=r"'leaves' ended without a result \(exit code 3\).*no more of this"):
        run("leaves")


def test_an_attack_that_takes_too_long_is_stopped() -> None:
    started = time.perf_counter()
    with pytest.raises(AttackError, match="not done after 4 seconds"):
        run("hangs", time_limit=4.0)
    assert time.perf_counter() - started < 60


def test_whoever_listens_may_break_off() -> None:
    def enough(fraction: float) -> None:
        raise KeyboardInterrupt

    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run("hangs", on_progress=enough)
    assert time.perf_counter() - started < 60


def test_unknown_attacks_and_settings_that_are_no_plain_data_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Unknown attack 'count'\. Did you mean 'counts'"):
        run("count")
    with pytest.raises(ConfigError, match="plain data"):
        run("counts", settings={"number": torch.ones(1)})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        attack_at(ATTACKS["missing"])
