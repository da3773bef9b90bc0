"""Every command and block of the pages that show how to do something, run in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.pages import DOCS, blocks, commands, typed
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


def test_own_data(tmp_path: Path) -> None:
    said = typed("how-to/own-data.md", tmp_path)
    assert len(said) == 3
    (printed,) = (text for block, text in said.items() if "test_mse" in block)
    assert float(printed) < 1.0  # the targets' own variance is 5
    assert (tmp_path / "runs" / "visits" / "ledger.json").exists()


def test_own_scheme(tmp_path: Path) -> None:
    said = typed("how-to/own-scheme.md", tmp_path)
    composed, written = said.values()
    shown, refusal = (text for language, text in blocks("how-to/own-scheme.md") if language == "text")
    assert composed == shown
    accuracy, verdicts = written.split(" ", 1)
    assert float(accuracy) > 0.8
    assert verdicts.strip() == "{'none'}"
    with pytest.raises(Exception, match="proves nothing") as refused:
        _noise_on_what_nothing_bounds()
    assert " ".join(refusal.split()) == str(refused.value)


def test_own_uplink(tmp_path: Path) -> None:
    """Random-k under masks: equal to plain averaging on what is sent, and rounds survive clients that drop out."""
    said = typed("how-to/own-uplink.md", tmp_path)
    (code, printed), (_, fields) = said.items()
    assert len(code.splitlines()) <= 100
    compared, trained = printed.splitlines()
    assert compared.startswith("37 of 370 coordinates, off by ")
    assert 0 < float(compared.rsplit(" ", 1)[1]) < 1e-9
    accuracy, verdicts = trained.split(" ", 1)
    assert float(accuracy) > 0.8
    assert verdicts in ("{'aggregate only', 'none'}", "{'none', 'aggregate only'}")
    assert fields == next(text for language, text in blocks("how-to/own-uplink.md") if language == "text")


def _noise_on_what_nothing_bounds() -> None:
    import torch

    from fedveil import train
    from fedveil.downlink import Plain
    from fedveil.protocol.parts import Scheme
    from fedveil.schemes import registry
    from fedveil.uplink.noise_plan import NoisePlan, Target
    from fedveil.uplink.noised import Noised
    from fedveil.work import Gradients

    def unbounded(setting: registry.Setting) -> Scheme:
        plan = NoisePlan(Target(3.0, 1e-5, setting.rounds, setting.participations), "local")
        work = Gradients(setting.loss, setting.batches)
        return Scheme(name="unbounded", downlink=Plain(), work=work, uplink=Noised(plan))

    before = dict(registry._SCHEMES)
    registry.scheme("unbounded", paper="", summary="", protects="")(unbounded)
    try:
        clients = [(torch.randn(9, 3), torch.randint(0, 2, (9,))) for _ in range(3)]
        train(torch.nn.Linear(3, 2), clients, scheme="unbounded", rounds=1, progress=False)
    finally:
        registry._SCHEMES.clear()
        registry._SCHEMES.update(before)


def test_commands_of_choose_a_scheme() -> None:
    found = [one for language, text in blocks("choose-a-scheme.md") if language == "console" for one in commands(text)]
    assert len(found) == 2
    for command in found:
        done = fedveil(*command.split()[1:])
        assert done.code == 0, done.error
