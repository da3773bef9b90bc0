"""ParaAegis's tables run for real: small cells, and timed rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from papers import Options, paraaegis, reproduce
from papers.cells import Figures
from papers.paraaegis import BY_LABEL, benches, measure

BENCHES, (QUICK,) = benches(False), benches(True)


def kept(out: Path, name: str) -> dict[str, Figures]:
    cells = json.loads((out / f"{name}.json").read_text())["cells"]
    return {one: seeds["1"]["result"] for one, seeds in cells.items()}


@pytest.mark.slow
def test_encrypting_a_tenth_saves_what_noise_on_everything_destroys(tmp_path: Path) -> None:
    pytest.importorskip("tenseal")
    only = ["digits/iid/fedavg", "digits/iid/dp-fedavg", "digits/iid/r10", "digits/cost/r10", "digits/pace"]
    report = reproduce("paraaegis-table1", Options(out=tmp_path, quick=True, only=only))
    figures = kept(tmp_path, "paraaegis-table1-quick")
    accuracy = {name: float(figures[f"digits/iid/{name}"]["accuracy"]) for name in ("fedavg", "dp-fedavg", "r10")}  # type: ignore[arg-type]
    assert accuracy["fedavg"] > 90
    assert accuracy["dp-fedavg"] < 30
    assert accuracy["r10"] > accuracy["dp-fedavg"] + 30
    # ε = 0.5 by the paper's formula; the same noise proves hundreds of times as much.
    assert figures["digits/iid/r10"]["epsilon"] > 100  # type: ignore[operator]
    assert figures["digits/iid/r10"]["epsilon"] == figures["digits/iid/dp-fedavg"]["epsilon"]
    line = dict(zip(report.columns, next(row for row in report.rows if "10 %" in row[1]), strict=True))
    assert float(line["seconds"].split(" / ")[1]) > 10 * float(line["protection, s a round"]) > 0


@pytest.mark.slow
def test_which_tenth_is_encrypted_decides(tmp_path: Path) -> None:
    pytest.importorskip("tenseal")
    report = reproduce("paraaegis-table2", Options(out=tmp_path, quick=True))
    # In the small form the other tenths train, too.
    assert [one.held for one in report.checks] == [True, False]
    assert len(kept(tmp_path, "paraaegis-table2-quick")) == 3


@pytest.mark.slow
def test_costs_are_those_of_one_client_and_the_server_in_real_rounds() -> None:
    pytest.importorskip("tenseal")
    found = {label: measure(QUICK, BY_LABEL[label]) for label in ("dp-fedavg", "r10", "ckks-fedavg", "pads100")}
    for one in found.values():
        assert one["protection"] == pytest.approx(one["client_seconds"] + one["server_seconds"])  # type: ignore[operator]
        assert one["parameters"] == one["timed_on"] == 85_002
    assert found["r10"]["counting_seconds"] > 0  # type: ignore[operator]
    assert found["ckks-fedavg"]["counting_seconds"] == found["dp-fedavg"]["counting_seconds"] == 0
    # About 32 bytes a value under CKKS, 8 under pads, 4 bare.
    up = {label: one["bytes_up"] / 85_002 for label, one in found.items()}  # type: ignore[operator]
    assert up["dp-fedavg"] == pytest.approx(8, rel=0.01)
    assert up["pads100"] == pytest.approx(8, rel=0.02)
    assert 25 < up["ckks-fedavg"] < 40


def test_a_large_model_is_timed_on_a_slice_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paraaegis, "SLICE", 1 << 15)
    threads = torch.get_num_threads()
    found = measure(BENCHES[0], BY_LABEL["pads100"])
    assert torch.get_num_threads() == threads
    assert found["parameters"] == 11_181_642
    assert found["timed_on"] == pytest.approx(1 << 15, rel=0.15)
    assert found["bytes_up"] == pytest.approx(8 * 11_181_642, rel=0.1)


def test_a_share_that_shrinks_is_timed_at_its_mean() -> None:
    pytest.importorskip("tenseal")
    found = measure(QUICK, BY_LABEL["r10-x0.9"])
    assert found["encrypted_share"] == pytest.approx(0.1 * (1 - 0.9**10) / (10 * 0.1))


def test_local_training_stands_still_while_costs_are_taken() -> None:
    job = paraaegis._standing_job(QUICK, BY_LABEL["serial"], large=False)
    local = job.scheme.work.local  # type: ignore[attr-defined]
    assert type(local) is paraaegis._Standing
    assert job.scheme.work.clip == QUICK["clip"]  # type: ignore[attr-defined]
