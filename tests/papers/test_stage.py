"""Data are found or asked for, dealt in tiers, and the same for every scheme."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedveil import schemes
from fedveil.config import RunConfig
from fedveil.errors import ConfigError, DataError
from idx_folders import idx_folder
from papers import Cell, Entry, entries
from papers.mpdp import LOCAL
from papers.stage import DATA_VARIABLE, Stage, composed, tiered

DIGITS: dict[str, object] = {
    "dataset": "digits",
    "model": "mlp",
    "model_options": {"depth": 2, "width": 8},
    "clients": 4,
    "rounds": 3,
    "batch_size": 16,
    "loss": "square",
}


def test_missing_data_are_named_with_the_folder_they_would_be_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(DataError, match=r"needs the data set 'mnist': give --data, or set FEDVEIL_DATA"):
        Stage().split("mnist")
    with pytest.raises(DataError, match=f"No data set 'mnist' under {tmp_path}: it would be the folder"):
        Stage(folder=tmp_path).split("mnist")


def test_data_are_found_by_option_by_variable_and_by_their_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = idx_folder(tmp_path / "mnist")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert Stage().place("mnist") == own
    monkeypatch.setenv(DATA_VARIABLE, "/nowhere")
    assert Stage(folder=tmp_path).place("mnist") == own
    assert Stage(folder=own).place("mnist") == own


def test_data_are_read_once_and_a_part_of_them_is_always_the_same_part(tmp_path: Path) -> None:
    idx_folder(tmp_path / "mnist")
    stage = Stage(folder=tmp_path)
    assert stage.split("mnist") is stage.split("mnist")
    part = stage.split("mnist", samples=30)
    assert len(part.train) == 30
    assert part.test is stage.split("mnist").test
    assert torch.equal(part.train.x, Stage(folder=tmp_path).split("mnist", samples=30).train.x)


def test_tiers_are_equal_within_and_grow_up_to_the_ratio() -> None:
    train = Stage().split("digits").train
    parts = tiered(train, clients=20, tiers=5, ratio=2.0, seed=3)
    sizes = [len(rows) for rows in parts]
    assert [len(set(sizes[start : start + 4])) for start in range(0, 20, 4)] == [1] * 5
    assert sizes == sorted(sizes)
    assert sizes[-1] / sizes[0] == pytest.approx(2.0, rel=0.05)
    rows = torch.cat(parts)
    assert len(rows) == len(rows.unique())
    assert len(train) - len(rows) < 20
    assert all(
        torch.equal(one, other)
        for one, other in zip(parts, tiered(train, clients=20, tiers=5, ratio=2.0, seed=3), strict=True)
    )
    with pytest.raises(ConfigError, match="21 clients cannot be dealt evenly to 5 sizes"):
        tiered(train, clients=21, tiers=5, ratio=2.0, seed=3)


def test_every_scheme_starts_from_the_same_weights_data_and_batches() -> None:
    stage = Stage()
    jobs = [stage.job(Cell("x", {**DIGITS, "scheme": scheme}), seed=2) for scheme in ("fedavg", "mp-cdp", "mpdp")]
    first = jobs[0]
    for other in jobs[1:]:
        assert torch.equal(other.weights.parameters, first.weights.parameters)
        assert [one.rows.tolist() for one in other.pool.clients] == [one.rows.tolist() for one in first.pool.clients]
        assert other.scheme.work.batches == first.scheme.work.batches  # type: ignore[attr-defined]


def test_a_run_that_diverges_is_judged_by_its_last_finite_model_and_says_so() -> None:
    figures = Stage().train(Cell("x", {**DIGITS, "scheme": "fedavg", "lr": 1e9, "rounds": 20}), seed=1)
    assert str(figures["stopped"]).startswith("diverged in round")
    assert isinstance(figures["accuracy"], float)


def test_figures_tell_epsilon_and_noise_where_there_is_a_plan() -> None:
    settings = {**DIGITS, "scheme": "ldp", "epsilon": 3.0, "batch_size": 0, "loss": "cross-entropy"}
    figures = Stage().train(Cell("x", settings), seed=1)
    assert figures["epsilon"] == pytest.approx(3.0, rel=1e-3)
    assert figures["rounds"] == 3
    # σ = 2C·√3/(μ·|D_k|) at each of four clients, divided by √4 in the mean; μ(3, 1e-5) = 1/1.391
    assert figures["noise"] == pytest.approx(2 * 3**0.5 * 1.391 / 359 / 2, rel=0.01)
    assert "epsilon" not in Stage().train(Cell("x", {**DIGITS, "scheme": "fedavg"}), seed=1)


def test_rounds_compose_to_the_analytic_epsilon() -> None:
    # One round at σ(1) = 4.799 composes to less than the formula's 1; a hundred to more than √100.
    from fedveil.ledger.gaussian import paper_sigma

    assert composed(1.0, delta=1e-5, rounds=1, sigma=paper_sigma) == pytest.approx(0.76, abs=0.02)
    assert composed(1.0, delta=1e-5, rounds=100, sigma=paper_sigma) > 10


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_cells_settings_are_those_of_its_scheme(entry: Entry) -> None:
    for quick in (False, True) if entry.has_quick else (False,):
        for cell in entry.cells(quick):
            if "scheme" not in cell.settings or cell.settings["scheme"] == LOCAL:
                continue
            config = RunConfig.from_mapping(cell.settings, where=cell.name)
            given = {name for name, value in config.scheme_options.items() if value is not None}
            assert given <= set(schemes.find(config.scheme).options), cell.name
            assert config.clients % (cell.tiers or 1) == 0
