"""What the README and the pages it leads to show works when it is typed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from shell import fedveil, script

LEARNED = {
    "a": 0.7,
    "secagg": 0.65,
    "nadp": 0.7,
    "veil-dp": 0.6,
    "ldp": 0.4,
    "cdp": 0.7,
    "mpdp": 0.35,
    "paraaegis": 0.9,
    "ckks": 0.7,
    "own": 0.7,
}
PAGES = ("README.md", "docs/choose-a-scheme.md", "docs/ledger.md", "docs/paraaegis.md", "docs/how-to/audit.md")
README, *GUIDES = ((Path(__file__).parents[1] / page).read_text(encoding="utf-8") for page in PAGES)


def blocks(language: str) -> list[str]:
    return [found for page in (README, *GUIDES) for found in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)]


def test_the_python_block_runs(tmp_path: Path) -> None:
    (block,) = blocks("python")
    done = script(block, folder=tmp_path)
    assert done.code == 0, done.error
    accuracy, seen, cover = map(float, done.output.split())
    assert 0 <= accuracy <= 1
    assert 0 <= seen <= 1
    assert cover == 1.0
    assert (tmp_path / "server-model.pt").exists()


# Further schemes of the same kind, and a comparison, which tests of `fedveil compare` run too.
FURTHER = {"compared", "papers", "veil-dp", "ldp", "cdp", "mpdp", "ckks"}
# Settings that no figure of the page hangs on but accuracies, which are then not asked for; by a command's last word.
SHORTER = {
    "runs/a": ("--rounds 50", "--rounds 3"),
    "runs/secagg": ("--rounds 20", "--rounds 2"),
    "runs/paraaegis": ("--local-epochs 3 --batch-size 32", "--local-epochs 1 --batch-size 200 -o depth=2 -o width=8"),
    "--one-run": ("--one-run", "--one-run --canaries 600"),
    "runs/own": ("--rounds 30", "--rounds 2"),
}


@pytest.mark.parametrize(
    ("left_out", "shorter"),
    [
        pytest.param(FURTHER, SHORTER, id="main path"),
        pytest.param(set(), {}, id="everything", marks=pytest.mark.slow),
    ],
)
def test_the_fedveil_commands_run_one_after_the_other_and_say_what_is_shown(
    left_out: set[str], shorter: dict[str, tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks("toml"):
        name = block.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(block)
    lines = [line.partition("#")[0].strip() for block in blocks("console") for line in block.splitlines()]
    commands = list(dict.fromkeys(line for line in lines if line.startswith("fedveil ")))
    assert len(commands) >= 15
    further = [command for command in commands if command.rpartition(" --out runs/")[2] in left_out]
    assert len(further) == len(left_out)
    said = {}
    for command in (one for one in commands if one not in further):
        long, short = shorter.get(command.rpartition(" ")[2], ("", ""))
        assert long in command
        command = command.replace(long, short) if long else command
        done = fedveil(*shlex.split(command)[1:])
        assert done.code == 0, f"{command}: {done.error}"
        said[command] = " ".join(done.output.split())
    shown = " ".join(next(block for block in blocks("text") if block.startswith("Ledger of nadp")).split())
    for figure in (*re.findall(r"\(ε = [^)]*\)", shown), *re.findall(r"for ε = .*? less", shown)):
        assert figure in said["fedveil ledger runs/nadp"]
    for point in re.findall(r"– (.*?)(?= – | What | The paper's| Not | $|$)", shown):
        assert point in said["fedveil ledger runs/nadp"]
    (asked,) = (text for command, text in said.items() if "--rounds 200 --epsilon 1" in command)
    assert "44.5% less noise than the paper's formula" in asked
    accuracies = {
        name: json.loads((tmp_path / "runs" / name / "summary.json").read_text())["test_accuracy"]
        for name in LEARNED
        if name not in left_out and f"runs/{name}" not in shorter
    }
    # Most runs draw their secrets anew: these are 10 points and more below the worst of several runs each.
    assert {name: figure for name, figure in accuracies.items() if figure < LEARNED[name]} == {}
    assert "any case ε = 11.72" in said[next(one for one in said if "--out runs/paraaegis" in one)]
    (asked,) = (text for command, text in said.items() if "--samples 947" in command)
    assert "(ε = 20,315, δ = 1e-05)" in asked
    for figure in ("ε = 11.72 in any case", "ε = 20,315"):
        assert any(figure in page for page in GUIDES)
    for figure in re.findall(r"\(ε = [^)]*\)", README):
        assert figure in said["fedveil ledger runs/nadp"]


@pytest.mark.parametrize("target", ["run", "test"])
def test_the_two_commands_are_targets_of_the_makefile(target: str) -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
