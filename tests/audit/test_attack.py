"""The declaration of an attack, and attacks in files of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from audit.recorded import recorded_once
from fedveil.audit.attack import SIGHTS, AttackContext, attack, attack_at, attacks, with_own
from fedveil.audit.findings import ASSETS
from fedveil.audit.record import server_view
from fedveil.audit.running import AttackProcess
from fedveil.audit.views import View, to_bytes
from fedveil.errors import ConfigError

OWN = """
from fedveil.audit.attack import attack

@attack("blank", sees="upload", asset="data", reference="mlp", how="says nothing")
def blank(view, context, *, level: float = 0.5):
    import torch
    return {"inputs": torch.full((1, *view.facts.input_shape), level)}

def no_attack(view, context):
    return {}
"""


def given(view: View, context: AttackContext, *, with_: str = "", more: int = 3) -> dict[str, torch.Tensor]:
    return {"more": torch.tensor(more), "with": torch.tensor(len(with_)), "seed": torch.tensor(context.seed)}


def declared(**changes: Any) -> Any:
    how = {"sees": "upload", "asset": "data", "reference": "mlp", "how": "by a test", **changes}
    return attack("given", **how)(given)


@pytest.mark.parametrize("name", sorted(attacks()))
def test_every_attack_is_found_where_its_process_looks_for_it(name: str) -> None:
    assert attack_at(attacks()[name].target).name == name


def test_every_sight_and_every_asset_has_an_attack() -> None:
    assert {sight for one in attacks().values() for sight in one.sees} == set(SIGHTS)
    assert {one.asset for one in attacks().values()} == set(ASSETS)


def test_settings_are_the_functions_keywords_and_everybody_is_told_the_context() -> None:
    one = declared()
    assert one.settings == {"with": "", "more": 3}
    view = server_view(recorded_once(scheme="lossless")[1], 0, round=1)
    found = one(view, {"seed": 5, "with": "ab", "box": [0, 1]})
    assert {name: int(value) for name, value in found.items()} == {"more": 3, "with": 2, "seed": 5}
    assert int(one(view, {"shadows": 4})["more"]) == 3, "what one attack is told, others may be told too"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sees": "uploads"}, "Unknown sight of an attack 'uploads'. Did you mean 'upload'"),
        ({"asset": "dada"}, "Unknown asset 'dada'"),
        ({"reference": "lenett"}, "Unknown reference run 'lenett'"),
        ({"needs": ("class",)}, "Unknown need of an attack 'class'"),
        ({"granted": ("private",)}, "Unknown grant to an attack 'private'"),
        ({"sees": ("upload", "model")}, "of which that shows nothing an audit could score"),
        ({"sees": ()}, "of which that shows nothing"),
        ({"asset": "members"}, "of which that shows nothing"),
        ({"reference": None}, "needs a reference run"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        declared(**changes)


def test_an_attack_in_a_file_runs_in_a_process_like_ours(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    known = with_own([f"{file}:blank"])
    assert list(known)[-1] == "blank"
    assert known["blank"].listing == ("server", "an upload", "says nothing")
    assert "blank" not in attacks()
    view = to_bytes(server_view(recorded_once(scheme="lossless")[1], 0, round=1))
    with AttackProcess("blank", attacks=known) as process:
        assert set(process.run(view, settings={"level": 0.25})["inputs"].flatten().tolist()) == {0.25}


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("blank", "not of the form"),
        ("{file}:no_attack", r"declares no attack 'no_attack' \(but blank\)"),
        ("{file}:missing", "declares no attack 'missing'"),
        ("{folder}/other.py:blank", "there is no such file"),
        ("nowhere.at_all:blank", "cannot be loaded"),
        ("fedveil.audit.attacks.phi:phi_attack", "There is an attack 'phi' already"),
    ],
)
def test_what_is_no_attack_of_ones_own_is_refused(tmp_path: Path, target: str, complaint: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    with pytest.raises(ConfigError, match=complaint):
        with_own([target.format(file=file, folder=tmp_path)])
