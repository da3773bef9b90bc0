"""What runs do with the parts of their data: validation, sites as clients, and what was understood of them."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedveil as package
from fedveil.compare.plan import check_unchanged, planned
from fedveil.config import BEFORE, RunConfig
from fedveil.errors import ConfigError, DataError
from fedveil.flower.app_folder import settings_of
from fedveil.runs.folder import RunFolder
from fedveil.runs.session import resume, run
from shell import fedveil

SMALL: dict[str, Any] = {"scheme": "fedavg", "seed": 1, "model_options": {"depth": 2, "width": 4}, "lr": 0.05}


@pytest.fixture
def visits(tmp_path: Path) -> Path:
    """180 visits of 60 patients in three wards; one age is a word."""
    rows = [
        f"p{number},{'NES'[number % 3]},{number * 7 % 50 + 20},{number + visit / 4},{(number + visit) % 2}"
        for number in range(60)
        for visit in range(3)
    ]
    rows[16] = rows[16].replace(",55,", ",forty,")
    assert "forty" in rows[16]
    path = tmp_path / "visits.csv"
    path.write_text("patient,ward,age,score,ill\n" + "\n".join(rows) + "\n")
    return path


def of_visits(path: Path, **changes: object) -> RunConfig:
    given = {**SMALL, "dataset": str(path), "target": "ill", "group": "patient", "site": "ward", **changes}
    return RunConfig.from_mapping(given)


def test_a_run_by_site_validates_names_its_clients_and_keeps_what_it_understood(visits: Path, tmp_path: Path) -> None:
    said: list[str] = []
    config = of_visits(visits, rounds=3, evaluate_every=2, validation_fraction=0.15)
    summary = run(config, tmp_path / "run", quiet=True, say=said.append)
    assert [text for text in said if "'forty'" in text and "row 17 (line 18)" in text]
    assert (summary["clients"], summary["client_names"]) == (3, ["E", "N", "S"])
    folder = RunFolder(tmp_path / "run")
    rows = folder.metrics()
    assert ["validation_loss" in row for row in rows] == [False, True, False]
    assert {"validation_accuracy", "validation_loss", "test_loss"} <= summary.keys()
    assert summary["validation_loss"] != summary["test_loss"]
    stored = json.loads(folder.data_file.read_text(encoding="utf-8"))
    assert sum(part["groups"] for part in stored["parts"].values()) == 60
    assert [client["rows"] for client in stored["clients"]] == summary["data"]["client_rows"]
    assert summary["data"]["rows"] == {name: part["rows"] for name, part in stored["parts"].items()}
    assert "forty" not in json.dumps(summary)
    assert folder.stored_settings()["clients"] == 3
    again = resume(tmp_path / "run", changes={"rounds": 4}, quiet=True)
    assert (again["rounds"], again["client_names"], again["data"]) == (4, ["E", "N", "S"], summary["data"])


def test_the_validation_part_is_neither_trained_nor_tested_on(visits: Path, tmp_path: Path) -> None:
    plain = run(of_visits(visits, rounds=1), tmp_path / "plain", quiet=True)["data"]["rows"]
    more = run(of_visits(visits, rounds=1, validation_fraction=0.2), tmp_path / "more", quiet=True)["data"]["rows"]
    assert plain["test"] == more["test"]
    assert plain["train"] == more["train"] + more["validation"]
    assert more["validation"] == 36


@pytest.mark.parametrize(("scheme", "promises"), [("ldp", True), ("fedavg", False)])
def test_the_ledger_of_a_scheme_that_promises_something_says_what_preparing_told(
    visits: Path, tmp_path: Path, scheme: str, promises: bool
) -> None:
    notes = run(of_visits(visits, scheme=scheme, rounds=1), tmp_path / "run", quiet=True)["ledger"]["notes"]
    told = [note for note in notes if "how samples are prepared" in note]
    shown = r"mean and deviation of 1 column, all \d+ categories of 1 column"
    assert [bool(re.search(shown, note)) for note in told] == [True] * promises


def test_inspect_data_says_which_arrays_were_taken(tmp_path: Path) -> None:
    np.savez(tmp_path / "scans.npz", images=np.zeros((8, 3), np.float32), labels=np.arange(8) % 2, age=np.arange(8))
    shown = " ".join(fedveil("inspect-data", tmp_path / "scans.npz", "--clients", 2).output.split())
    assert "images was taken as the inputs and labels as the targets; age was not used" in shown


def test_what_a_run_says_of_its_data_is_what_inspect_data_shows(visits: Path, tmp_path: Path) -> None:
    asked = ("--target", "ill", "--group", "patient", "--site", "ward", "--seed", 1)
    run(of_visits(visits, rounds=1), tmp_path / "run", quiet=True)
    shown = fedveil("inspect-data", visits, *asked, "--json")
    assert json.loads(shown.output) == json.loads((tmp_path / "run" / "data.json").read_text(encoding="utf-8"))
    table = " ".join(fedveil("inspect-data", visits, *asked).output.split())
    for part in ("patient │ group", "│ E │", "What looks wrong", "'forty'"):
        assert part in table
    said = fedveil("run", "--dataset", visits, *asked, "--rounds", 1, "-o", "width=4", "--out", tmp_path / "told")
    assert "clients: 3 (E" in said.output
    assert "'forty'" in said.error


def test_a_folder_from_before_there_was_a_split_goes_on_as_it_began(visits: Path, tmp_path: Path) -> None:
    config = of_visits(visits, site=None, split="rows", family="scale", rounds=4)
    straight = run(config, tmp_path / "straight", quiet=True)
    run(config.with_changes(rounds=2), tmp_path / "old", quiet=True)
    file = tmp_path / "old" / "config.toml"
    kept = [line for line in file.read_text().splitlines() if line.split(" = ")[0] not in BEFORE]
    file.write_text("\n".join(kept) + "\n")
    assert "split" not in file.read_text()
    went_on = resume(tmp_path / "old", changes={"rounds": 4}, quiet=True)
    assert went_on["test_loss"] == straight["test_loss"]
    assert went_on["data"]["shared_groups"]["test"]["train"] > 0
    predicted = fedveil("predict", tmp_path / "old").output
    assert f"accuracy {went_on['test_accuracy']:.1%}" in predicted


def test_parts_of_their_own_that_share_patients_are_refused_unless_asked_for(tmp_path: Path) -> None:
    rows = [f"{number % 7},{number / 9},{number % 2}" for number in range(40)]
    for part, chosen in {"train": rows[:30], "test": rows[30:]}.items():
        (tmp_path / f"{part}.csv").write_text("\n".join(["patient,score,ill", *chosen]))
    config = RunConfig.from_mapping(
        {**SMALL, "dataset": str(tmp_path), "target": "ill", "group": "patient", "rounds": 1, "clients": 2}
    )
    with pytest.raises(DataError, match=r"7 groups are in two of its parts.*--split rows"):
        run(config, tmp_path / "refused", quiet=True)
    assert not (tmp_path / "refused").exists()
    said: list[str] = []
    run(config.with_changes(split="rows"), tmp_path / "asked", quiet=True, say=said.append)
    assert any("7 of 7 groups of the test part are in the training part too" in text for text in said)
    # A folder of a version that took them silently goes on.
    file = tmp_path / "asked" / "config.toml"
    file.write_text(file.read_text().replace('split = "rows"', 'split = "auto"'))
    for stored in (tmp_path / "asked" / "checkpoints").iterdir():
        stored.unlink()
    (tmp_path / "asked" / "summary.json").unlink()
    assert resume(tmp_path / "asked", changes={"rounds": 2}, quiet=True)["rounds"] == 2


def test_settings_that_came_later_leave_no_mark_where_they_do_nothing() -> None:
    """The digest that a folder of the version before has in its checkpoints."""
    config = RunConfig(seed=1, lr=0.1, split="rows", family="scale", bn_eps="secret")
    assert config.fingerprint() == "0cfe10adb749b26c3e5515a3eab58c46189111cca68c22cc3ce811c8511aca48"
    assert config.fingerprint() != RunConfig(seed=1, lr=0.1).fingerprint()


def test_a_site_column_makes_its_sites_the_clients_unless_told_otherwise() -> None:
    sited = RunConfig.from_mapping({"site": "ward"})
    assert (sited.partition, sited.clients) == ("site", 0)
    assert RunConfig.from_mapping({"site": "ward", "partition": "iid"}).clients == 10
    assert RunConfig.from_mapping({"partition": "site", "clients": 4}).clients == 4
    with pytest.raises(ConfigError, match="clients must be positive"):
        RunConfig.from_mapping({"clients": 0})
    with pytest.raises(ConfigError, match="say how many there are"):
        settings_of({"partition": "site"})


def test_a_cell_of_a_comparison_goes_on_with_the_clients_it_has_counted(visits: Path, tmp_path: Path) -> None:
    given = {name: value for name, value in SMALL.items() if name not in ("scheme", "seed")}
    common = {**given, "dataset": str(visits), "target": "ill", "site": "ward", "rounds": 1}
    (cell,) = planned(["fedavg"], seeds=[1], settings=common, only={}).cells
    assert cell.config.clients == 0
    run(cell.config, tmp_path / cell.folder, quiet=True)
    check_unchanged(cell, tmp_path)


def test_patients_as_clients_are_told_apart_from_sites(visits: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the column with --site instead"):
        run(of_visits(visits, site=None, partition="group", clients=60), tmp_path / "run", quiet=True)
    summary = run(of_visits(visits, site=None, partition="group", clients=0, rounds=1), tmp_path / "run", quiet=True)
    assert summary["clients"] == 48  # of 60, a fifth tests
    assert summary["client_names"][0] == "p0"


def test_train_in_python_validates_describes_and_stores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draws = torch.Generator().manual_seed(1)
    samples = [(x, (x[:, 0] > 0).long()) for x in torch.randn(4, 20, 3, generator=draws)]
    net = torch.nn.Linear(3, 2)
    given: dict[str, Any] = {"scheme": "fedavg", "rounds": 2, "seed": 1, "progress": False}
    with caplog.at_level(logging.INFO, logger="fedveil"):
        result = package.train(net, samples[:2], test=samples[2], validation=samples[0], out=tmp_path / "run", **given)
    assert all({"validation_loss", "validation_accuracy", "test_loss"} <= row.keys() for row in result.metrics)
    assert "20 of 20 samples of the validation part have an equal input in the training part." in caplog.text
    stored = json.loads((tmp_path / "run" / "data.json").read_text(encoding="utf-8"))
    assert [client["rows"] for client in stored["clients"]] == [20, 20]
    assert result.summary["data"]["duplicates"]["validation"]["train"] == 20
    with pytest.raises(ConfigError, match="'validation_fraction' is not a setting of train"):
        package.train(net, samples, validation_fraction=0.1, **given)


def test_own_code_may_give_groups(tmp_path: Path) -> None:
    def load() -> tuple[np.ndarray, ...]:
        whose = np.arange(60) // 3
        return whose[:, None].astype("float32"), np.arange(60) % 2, np.array([f"p{number}" for number in whose])

    package.data.source("mine")(load)
    split = package.data.load("mine")
    assert not {*split.train.x[:, 0].tolist()} & {*split.test.x[:, 0].tolist()}
