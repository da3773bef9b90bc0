"""The examples run, at small settings, and say what their pages promise."""

from __future__ import annotations

import csv
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from audit.in_process import without_processes
from docs.pages import DOCS, ROOT, typed
from shell import Done, script


@pytest.fixture(autouse=True)
def _audits_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    without_processes(monkeypatch)


def example(name: str, *arguments: str | Path, folder: Path) -> Done:
    return script((ROOT / "examples" / name).read_text(encoding="utf-8"), *arguments, folder=folder, name=name)


def test_three_hospitals(tmp_path: Path) -> None:
    done = example("three_hospitals.py", "--rounds", "4", "--out", tmp_path / "run", folder=tmp_path)
    assert done.code == 0, done.error
    page = (DOCS / "examples" / "three-hospitals.md").read_text(encoding="utf-8")
    sizes = re.findall(r"(\d+) records, +(\d+) of them malignant", done.output)
    assert sizes == re.findall(r"(\d+) records, +(\d+) of them malignant", page)
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert max(line["epsilon"] for line in ledger["lines"]) <= 3.0
    assert not ledger["simulation"]
    for text in ledger["unprotected"]:
        assert f"– {text}" in done.output
    assert "The server cannot rebuild what a client trained on by these attacks" in done.output
    assert "The server with 2 of 3 clients cannot rebuild" in done.output


def test_three_hospitals_policy_is_the_one_the_page_shows() -> None:
    page = (DOCS / "examples" / "three-hospitals.md").read_text(encoding="utf-8")
    script = (ROOT / "examples" / "three_hospitals.py").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    (used,) = re.findall(r'POLICY = """\\\n(.*?)"""', script, flags=re.DOTALL)
    assert tomllib.loads(shown) == tomllib.loads(used)


@pytest.mark.slow
def test_three_hospitals_keep_to_their_own_limit(tmp_path: Path) -> None:
    """A server that asks for more than a hospital's file allows gets what the file allows."""
    done = example(
        "three_hospitals.py",
        "--epsilon",
        "8",
        "--rounds",
        "12",
        "--no-audit",
        "--out",
        tmp_path / "run",
        folder=tmp_path,
    )
    assert done.code == 0, done.error
    assert "its limit is 3" in done.output
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert 2.0 < max(line["epsilon"] for line in ledger["lines"]) <= 3.0


WORDS = {
    "job": "admin. blue-collar entrepreneur management retired services student technician unemployed",
    "marital": "divorced married single",
    "education": "basic.9y high.school professional.course university.degree",
    "default": "no unknown",
    "housing": "no yes",
    "loan": "no yes",
    "contact": "cellular telephone",
    "month": "apr may jun jul aug nov",
    "day_of_week": "mon tue wed thu fri",
    "poutcome": "failure nonexistent success",
}
NUMBERS = "age duration campaign pdays previous emp.var.rate cons.price.idx cons.conf.idx euribor3m nr.employed"


def bank_table(path: Path, *, rows: int) -> None:
    """A table with the real one's columns, in which low interest and earlier success make a yes likelier."""
    random = np.random.default_rng(1)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*WORDS, *NUMBERS.split(), "y"], delimiter=";", quoting=csv.QUOTE_NONNUMERIC)
        table.writeheader()
        for _ in range(rows):
            row = {name: str(random.choice(words.split())) for name, words in WORDS.items()}
            numbers = {name: round(float(random.normal()), 3) for name in NUMBERS.split()}
            score = 3 * (row["poutcome"] == "success") - 2 * numbers["euribor3m"] - 2
            table.writerow({**row, **numbers, "y": "yes" if random.random() < 1 / (1 + np.exp(-score)) else "no"})


def lesion_pictures(folder: Path, *, lesions: int) -> None:
    """HAM10000 as it is downloaded, in which melanomas are dark; pictures of several sizes, some lesions twice."""
    random = np.random.default_rng(1)
    rows = []
    for number in range(lesions):
        diagnosis = ("mel", "nv", "bkl")[number % 3]
        for view in range(1 + number % 2):
            name, part = f"ISIC_{2 * number + view:07d}", folder / f"HAM10000_images_part_{1 + number % 2}"
            part.mkdir(parents=True, exist_ok=True)
            pixels = random.normal(70 if diagnosis == "mel" else 160, 20, size=(45, 60 + 20 * view, 3))
            Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(part / f"{name}.jpg")
            rows.append([f"HAM_{number:07d}", name, diagnosis, "histo", "50.0", "female", "back"])
    with (folder / "HAM10000_metadata.csv").open("w", newline="", encoding="utf-8") as file:
        titles = ["lesion_id", "image_id", "dx", "dx_type", "age", "sex", "localization"]
        csv.writer(file).writerows([titles, *rows])


def told(run: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / name).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=[pytest.mark.data, pytest.mark.slow])])
def test_a_bank_consortium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real: bool) -> None:
    """The page from the raw table to predictions; its figures, where the table is the real one."""
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "bank-additional-full.csv"
    if real:
        raw.symlink_to(real_data("bank", raw.name))
        said = typed("examples/bank-consortium.md", tmp_path)
    else:
        bank_table(raw, rows=450)
        said = typed(
            "examples/bank-consortium.md",
            tmp_path,
            small={"rounds = 30": "rounds = 3", "--quick": "--quick --attacks closed-form"},
        )
    run = tmp_path / "runs" / "banks"
    check(run, sites={"officials", "owners", "workers"}, better_than=0.7 if real else 0.5)
    lines = told(run, "ledger.json")["lines"]
    assert {line["adversary"]: line["epsilon"] <= 1 for line in lines} == {
        "server": True,
        "server and colluding clients": True,
        "clients": True,
        "outsider": True,
    }
    (audited,) = (text for command, text in said.items() if "fedveil audit" in command)
    assert "The server cannot rebuild what a client trained on by these attacks" in audited
    with (tmp_path / "calls.csv").open(newline="", encoding="utf-8") as file:
        calls = list(csv.DictReader(file))
    assert [call["customer"] for call in calls] == [str(50 * number) for number in range(1, len(calls) + 1)]
    assert len(calls) == (823 if real else 9)
    assert all(call["class"] == ("yes" if float(call["p_yes"]) > 0.5 else "no") for call in calls)
    if real:
        assert shown_auroc("examples/bank-consortium.md", r"^│ AUROC +│ +(\S+) │") == pytest.approx(
            auroc(run), abs=0.02
        )


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=[pytest.mark.data, pytest.mark.slow])])
def test_skin_lesions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real: bool) -> None:
    """The page from the folder as it is downloaded to predictions; its figures, where the pictures are real."""
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "HAM10000"
    if real:
        raw.symlink_to(real_data("ham10000", "HAM10000_metadata.csv").parent)
        typed("examples/skin-lesions.md", tmp_path)
    else:
        lesion_pictures(raw, lesions=100)
        small = {
            "rounds = 6": "rounds = 2",
            "picture_size = 64": "picture_size = 16",
            "--quick": "--quick --attacks received",
        }
        typed("examples/skin-lesions.md", tmp_path, small=small)
    run = tmp_path / "runs" / "lesions"
    check(run, sites={"north", "east", "south", "west", "centre"}, better_than=0.75 if real else 0.5)
    parts = told(run, "data.json")["parts"].values()
    assert sum(part["groups"] for part in parts) == len({line["lesion"] for line in owners(tmp_path / "lesions")})
    verdicts = {line["adversary"]: line["verdict"] for line in told(run, "ledger.json")["lines"]}
    assert verdicts["server"] == "ciphertexts only"
    with (tmp_path / "diagnoses.csv").open(newline="", encoding="utf-8") as file:
        diagnoses = list(csv.DictReader(file))
    assert len(diagnoses) == len(list((tmp_path / "new-lesions").iterdir())) == (205 if real else 4)
    assert all(line["class"] == ("melanoma" if float(line["p_melanoma"]) > 0.5 else "another") for line in diagnoses)
    if real:
        row = r"^\| AUROC (?:\| \S+ ){5}\| (\S+) \|"  # the sixth round's
        assert shown_auroc("examples/skin-lesions.md", row) == pytest.approx(auroc(run), abs=0.02)


def owners(folder: Path) -> list[dict[str, str]]:
    with (folder / "metadata.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def real_data(name: str, file: str) -> Path:
    path = Path(os.environ.get("FEDVEIL_DATA", "")) / name / file
    if not os.environ.get("FEDVEIL_DATA") or not path.exists():
        pytest.skip(f"FEDVEIL_DATA names no folder with {name}/{file}")
    return path.resolve()


def auroc(run: Path) -> float:
    return float(told(run, "summary.json")["judged"]["figures"]["auroc"]["value"])


def shown_auroc(page: str, row: str) -> float:
    (shown,) = re.findall(row, (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return float(shown)


def check(run: Path, *, sites: set[str], better_than: float) -> None:
    """A run was judged, also site by site, attacked and shown on a page."""
    judged = told(run, "summary.json")["judged"]
    assert auroc(run) > better_than
    assert judged["parted_by"] == "site"
    assert {part["name"] for part in judged["parts"]} == sites
    figures = [part["figures"]["auroc"] for part in judged["parts"]]
    assert all("low" in figure or "no interval" in figure["reason"] for figure in figures)
    assert told(run, "audit/audit.json")["findings"]
    assert "AUROC" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("bank_consortium.py", "gone.csv", "gone.csv"),
        ("bank_consortium.py", "other.csv", "is not the Bank Marketing table"),
        ("skin_lesions.py", "gone", "HAM10000_metadata.csv"),
        ("skin_lesions.py", "empty", "the first is ISIC_1.jpg"),
    ],
)
def test_what_cannot_be_laid_out_is_named(tmp_path: Path, name: str, raw: str, said: str) -> None:
    (tmp_path / "other.csv").write_text("a;job\n1;astronaut\n", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "HAM10000_metadata.csv").write_text(
        "lesion_id,image_id,dx\nHAM_1,ISIC_1,mel\n", encoding="utf-8"
    )
    done = example(name, raw, "known", "new", folder=tmp_path)
    assert done.code == 3
    assert done.error.startswith("error: ")
    assert said in done.error
    assert not (tmp_path / "known").exists()
