"""Texts name settings as whoever called writes them, and no text has to be read again for that."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import fedveil
from fedveil.config import RunConfig
from fedveil.errors import ConfigError, settings_as_arguments, spelled, unknown_name, unknown_option

ROOT = Path(fedveil.__file__).parent
# Commands and what only they call; help, which commands show; and what is said at import or to other machines.
FLAGS_THERE = ("cli", "flower", "compare", "report", "doctor.py", "tracking.py", "processes.py", "config.py")
WORDS_THERE = ("ledger/caveats.py", "runs/terms.py")


@pytest.mark.parametrize(
    ("name", "value", "flag", "argument"),
    [
        ("loss", "square", "--loss square", "loss='square'"),
        ("head_noise", False, "--no-head-noise", "head_noise=False"),
        ("record", True, "--record", "record=True"),
        ("lr", 0.02, "--lr 0.02", "lr=0.02"),
        ("min_coverage", None, "--min-coverage", "min_coverage"),
    ],
)
def test_a_setting_is_spelled_as_the_caller_writes_it(name: str, value: object, flag: str, argument: str) -> None:
    assert spelled(name, value) == flag
    with settings_as_arguments():
        assert spelled(name, value) == argument
        assert spelled(name, value, argument="validation=…") == "validation=…"
    assert spelled(name, value) == flag


def test_train_advises_what_train_takes() -> None:
    x = torch.randn(12, 4)
    with pytest.raises(ConfigError, match=r"hold one out \(validation=\(inputs, targets\)\).*monitor='loss'"):
        fedveil.train(nn.Linear(4, 2), [(x, (x[:, 0] > 0).long())] * 2, scheme="fedavg", early_stopping=3)


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    prose = {
        id(line.value)
        for node in ast.walk(tree)
        if isinstance(node, documented)
        for line in node.body
        if isinstance(line, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):  # whole, since a command in backticks may name a file
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            prose |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


def test_no_text_below_the_commands_has_a_flag_of_a_setting() -> None:
    names = {field.name.replace("_", "-") for field in fields(RunConfig)} | {"out", "resume"}
    flags = re.compile(r"`[^`]*`|--(?:no-)?([a-z]+(?:-[a-z]+)*)")
    bare = []
    for file in ROOT.rglob("*.py"):
        place, source = file.relative_to(ROOT), file.read_text()
        if place.parts[0] in FLAGS_THERE or place.as_posix() in WORDS_THERE or not re.search("--[a-z]", source):
            continue
        for line, text in texts(ast.parse(source)):
            bare += [f"{place}:{line}: --{name}" for name in flags.findall(text) if name in names]
    assert not bare


def test_a_name_without_end_is_cut_before_it_is_compared_and_shown() -> None:
    endless = "momentun" + "[" * 100_000
    for error in (unknown_name("setting", endless, ["momentum", "lr"]), unknown_option("Model 'mlp'", endless, ["lr"])):
        assert "momentun[[[" in str(error)
        assert len(str(error)) < 500
