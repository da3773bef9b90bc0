"""Every command and block of the pages that show how to do something, run in order."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from audit.in_process import without_processes
from docs.pages import DOCS, blocks, commands, typed
from fedveil import train
from fedveil.audit.attacks.gradients import Observed
from fedveil.downlink import Plain
from fedveil.errors import ConfigError, NumericError
from fedveil.protocol.parts import Scheme
from fedveil.schemes import Setting
from fedveil.uplink.noise_plan import NoisePlan, Target
from fedveil.uplink.noised import Noised
from fedveil.work import Gradients
from shell import fedveil


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_own_model(tmp_path: Path) -> None:
    said = typed("how-to/own-model.md", tmp_path)
    assert len(said) == 7
    (printed,) = (text for block, text in said.items() if "fedveil.train(" in block)
    assert f"It prints {float(printed):.3f}" in (DOCS / "how-to" / "own-model.md").read_text(encoding="utf-8")
    (inspected,) = (text for command, text in said.items() if "fedveil inspect" in command)
    assert "coverage 100.0%" in inspected
    assert (tmp_path / "runs" / "own-model" / "model.safetensors").exists()


def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    films = "\n".join(f"{'good' if n % 2 else 'bad'} film number {n},{n % 2}" for n in range(60))
    (tmp_path / "films.csv").write_text(f"text,liked\n{films}\n", encoding="utf-8")
    said = typed("how-to/hugging-face.md", tmp_path, small={"--rounds 5": "--rounds 1"})
    assert len(said) == 3
    (printed,) = (text for block, text in said.items() if "fedveil.train(" in block)
    assert 0.9 < float(printed) < 1.0


def test_misbehaving_clients(tmp_path: Path) -> None:
    small = {f"--rounds {count}": "--rounds 2" for count in (10, 8, 6, 5)}
    said = typed("how-to/misbehaving-clients.md", tmp_path, small=small)
    assert len(said) == 4


def test_own_data(tmp_path: Path) -> None:
    said = typed("how-to/own-data.md", tmp_path)
    assert len(said) == 6
    (inspected,) = (text for command, text in said.items() if "inspect-data" in command)
    (shown,) = (text for language, text in blocks("how-to/own-data.md") if language == "text")
    for line in re.findall(r"^(?:│.*│|.*'forty'.*)$", shown, flags=re.MULTILINE):
        assert " ".join(line.split()) in inspected
    (augmented,) = (text for block, text in said.items() if "class Visits" in block)
    assert float(augmented) > 0.85
    assert (tmp_path / "runs" / "own-data" / "model.safetensors").exists()
    (printed,) = (text for block, text in said.items() if "test_mse" in block)
    assert float(printed) < 1.0  # the targets' own variance is 5
    assert (tmp_path / "runs" / "visits" / "ledger.json").exists()


def test_own_training(tmp_path: Path) -> None:
    said = typed("how-to/own-training.md", tmp_path)
    losses, stopped, frozen = (
        next(text for block, text in said.items() if word in block) for word in ("quantile", "enough", "backbone")
    )
    assert losses.splitlines() == ["quantile True", "HuberLoss True", "own function True"]
    assert "round 3" in stopped
    assert "round 4" not in stopped
    assert stopped.endswith("three rounds are enough here\n")
    assert frozen == "True\n"
    for run in ("weighted", "private", "labels", "early"):
        assert (tmp_path / "runs" / run / "summary.json").exists()
    early = json.loads((tmp_path / "runs" / "early" / "summary.json").read_text(encoding="utf-8"))
    assert early["rounds"] < 60
    assert early["best"]["monitor"] == "validation_loss"


def test_good_accuracy(tmp_path: Path) -> None:
    small = {"--dataset CIFAR --model resnet20": "--dataset digits --model cnn", "--rounds 15000": "--rounds 1"}
    small["--model vit"] = "--model mlp -o depth=2 -o width=16"
    said = typed("how-to/good-accuracy.md", tmp_path, small=small)
    (same,) = (text for block, text in said.items() if "def noisy" in block)
    assert same == "True\n"
    plain, veiled = (load_file(tmp_path / "runs" / run / "model.safetensors") for run in ("local-adam", "veiled-adam"))
    assert all(torch.allclose(veiled[name], value, rtol=0, atol=1e-4) for name, value in plain.items())
    warm = json.loads((tmp_path / "runs" / "warm" / "summary.json").read_text(encoding="utf-8"))
    assert f"This ends at {100 * warm['test_accuracy']:.0f} %" in (DOCS / "how-to" / "good-accuracy.md").read_text(
        encoding="utf-8"
    )
    (command,) = (command for command in said if "--warm-up 0.25" in command)
    cold = command.replace("--warm-up 0.25", "").replace("runs/warm", "runs/cold")
    assert fedveil(*cold.split()[1:]).code == NumericError.exit_code


def test_predict(tmp_path: Path) -> None:
    said = typed("how-to/predict.md", tmp_path)
    assert len(said) == 5
    with (tmp_path / "monday-predicted.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["patient"] for row in rows] == [f"P{number}" for number in range(500, 508)]
    assert {row["class"] for row in rows} == {"no", "yes"}
    (printed,) = (text for block, text in said.items() if "fedveil.load(" in block)
    assert printed.startswith("['yes', 'no'] [")
    assert all(
        isinstance(value, torch.Tensor) for value in torch.load(tmp_path / "weights.pt", weights_only=True).values()
    )


def test_own_scheme(tmp_path: Path) -> None:
    # The same sampling, target and rounds throughout: looking for their noise takes two seconds, and once is enough.
    said = typed("how-to/own-scheme.md", tmp_path, small={"keep=0.5, rounds=20": "keep=0.2, rounds=3"})
    listed, ran, resumed, composed, built, written = said.values()
    for word in ("--set keep=…", "Chance of each record", "--epsilon", "exact | paper"):
        assert word in listed
    assert "Ledger of veil-ldp after 3 rounds" in ran
    assert "veil-ldp" in resumed
    shown, refusal = (text for language, text in blocks("how-to/own-scheme.md") if language == "text")
    assert composed == shown
    assert float(built) > 0.8
    accuracy, verdicts = written.split(" ", 1)
    assert float(accuracy) > 0.8
    assert verdicts.strip() == "{'none'}"
    with pytest.raises(Exception, match="proves nothing") as refused:
        _noise_on_what_nothing_bounds()
    assert " ".join(refusal.split()) == str(refused.value)


def test_own_uplink(tmp_path: Path) -> None:
    """Random-k under masks: equal to plain averaging on what is sent, and rounds survive clients that drop out."""
    said = typed("how-to/own-uplink.md", tmp_path)
    (code, printed), (_, fields), (_, one_bit) = said.items()
    assert len(code.splitlines()) <= 100
    assert len((tmp_path / "one_bit.py").read_text(encoding="utf-8").splitlines()) <= 100
    for field in ("upload.gradients", "upload.signs", "upload.largest"):
        assert field in one_bit
    compared, trained = printed.splitlines()
    assert compared.startswith("37 of 370 coordinates, off by ")
    assert 0 < float(compared.rsplit(" ", 1)[1]) < 1e-9
    accuracy, verdicts = trained.split(" ", 1)
    assert float(accuracy) > 0.8
    assert verdicts in ("{'aggregate only', 'none'}", "{'none', 'aggregate only'}")
    assert fields == next(text for language, text in blocks("how-to/own-uplink.md") if language == "text")


def test_a_scheme_is_one_file_of_at_most_45_lines_and_runs_from_the_command_line(tmp_path: Path) -> None:
    (code,) = (text for _, text in blocks("how-to/own-scheme.md") if text.startswith("# my_scheme.py"))
    assert len(code.splitlines()) <= 45
    (tmp_path / "my_scheme.py").write_text(code, encoding="utf-8")
    settings = "rounds = 3\nclients = 3\nseed = 1\nepsilon = 3.0\n\n[options]\nkeep = 0.2\n"
    (tmp_path / "run.toml").write_text(settings, encoding="utf-8")
    own = ("--scheme", "my_scheme.py:veil_ldp", "-c", "run.toml", "-o", "depth=2", "-o", "width=8")

    done = fedveil("run", *own, "--out", "by-file", "-q")
    assert done.code == 0, done.error
    assert "keep = 0.2" in (tmp_path / "by-file" / "config.toml").read_text()
    done = fedveil("run", *own, "--set", "keep=1.0", "--out", "by-flag", "-q")
    assert done.code == 0, done.error
    assert "keep = 1.0" in (tmp_path / "by-flag" / "config.toml").read_text()
    done = fedveil("run", *own, "--set", "kept=0.2", "--out", "wrong")
    assert done.code == ConfigError.exit_code
    assert "has no option 'kept'. Did you mean 'keep'?" in done.error


def test_own_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file of at most sixty lines; its reference comes out, and so does a finding, like ours."""
    without_processes(monkeypatch)
    said = typed("how-to/own-attack.md", tmp_path)
    assert len((tmp_path / "loss_threshold.py").read_text(encoding="utf-8").splitlines()) <= 60
    listed, _, tried = said.values()
    assert "loss-threshold │ client │ the model" in listed
    assert "A client, after members" in tried
    (found,) = json.loads((tmp_path / "runs" / "own-attack" / "audit" / "audit.json").read_text())["findings"]
    assert found["name"] == "client/loss-threshold"
    assert found["reference"] > found["threshold"] == 0.6
    assert 0.5 < found["value"] < found["reference"]
    assert found["verdict"] == "not effective"


def test_own_attack_names_every_field_of_what_an_attack_on_uploads_is_given() -> None:
    page = (DOCS / "how-to" / "own-attack.md").read_text(encoding="utf-8")
    _, _, table = page.partition("gives an `Observed`:")
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == {field.name for field in dataclasses.fields(Observed)}


def _noise_on_what_nothing_bounds() -> None:
    def unbounded(setting: Setting) -> Scheme:
        plan = NoisePlan(Target(3.0, 1e-5, setting.rounds, setting.participations), "local")
        work = Gradients(setting.loss, setting.batches)
        return Scheme(name="unbounded", downlink=Plain(), work=work, uplink=Noised(plan))

    clients = [(torch.randn(9, 3), torch.randint(0, 2, (9,))) for _ in range(3)]
    train(torch.nn.Linear(3, 2), clients, scheme=unbounded, rounds=1, progress=False)


def test_commands_of_choose_a_scheme() -> None:
    found = [one for language, text in blocks("choose-a-scheme.md") if language == "console" for one in commands(text)]
    found = [command for command in found if not command.startswith("fedveil run")]  # test_readme.py trains
    assert len(found) == 3
    for command in found:
        done = fedveil(*command.split("#")[0].split()[1:])
        assert done.code == 0, done.error
