"""Nothing is decided by the words of a message: errors and refusals have a class and a code for programs to go by."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedveil

ROOT = Path(fedveil.__file__).parent
FOREIGN = {"flower/cluster.py": "Flower tells only in words that a node's key is registered already"}
"""Where another program gives no code to go by."""

_MESSAGES = {"reason", "why", "refusal", "failed", "stopped"}
_LOOKING = {"startswith", "endswith", "find", "index", "count", "partition"}
_SEARCHING = {"search", "match", "fullmatch", "findall", "finditer"}


def _is_error(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).rstrip("'\"").endswith(("Error", "Exception", "Refusal"))


def decisions(source: str) -> Iterator[int]:
    """The lines of a module that decide by what an error, a refusal or a failure says in words."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    errors = {one.name for one in nodes if isinstance(one, ast.ExceptHandler) and one.name}
    errors |= {one.arg for one in nodes if isinstance(one, ast.arg) and _is_error(one.annotation)}
    texts = set(_MESSAGES)

    def says(value: ast.expr) -> bool:
        """Whether an expression is a message's text."""
        if isinstance(value, ast.Name):
            return value.id in texts
        if isinstance(value, ast.Attribute):
            return value.attr in {*_MESSAGES, "text", "args"} and not isinstance(value.value, ast.Constant)
        if isinstance(value, ast.Subscript):
            return says(value.value) or (isinstance(value.value, ast.Attribute) and value.value.attr == "refused")
        if isinstance(value, ast.JoinedStr):
            return any(isinstance(one, ast.FormattedValue) and names_error(one.value) for one in value.values)
        if isinstance(value, ast.Call):
            if isinstance(value.func, ast.Name) and value.func.id in {"str", "repr"} and value.args:
                return names_error(value.args[0]) or says(value.args[0])
            if isinstance(value.func, ast.Attribute) and value.func.attr in {"lower", "upper", "strip", "casefold"}:
                return says(value.func.value)
        return False

    def names_error(value: ast.expr) -> bool:
        return isinstance(value, ast.Name) and value.id in errors

    for one in nodes:
        if isinstance(one, ast.Assign) and says(one.value):
            texts |= {target.id for target in one.targets if isinstance(target, ast.Name)}
    for one in nodes:
        if isinstance(one, ast.Compare):
            worded = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
            sides = zip(one.ops, one.comparators, strict=True)
            if any(isinstance(how, worded) and says(side) for how, side in sides) or (
                isinstance(one.ops[0], (ast.Eq, ast.NotEq)) and says(one.left)
            ):
                yield one.lineno
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
            if one.func.attr in _LOOKING and says(one.func.value):
                yield one.lineno
            if one.func.attr in _SEARCHING and any(says(given) for given in one.args):
                yield one.lineno


def test_no_module_decides_by_words() -> None:
    found = {str(path.relative_to(ROOT)): list(decisions(path.read_text("utf-8"))) for path in ROOT.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines and name not in FOREIGN} == {}
    assert all(found[name] for name in FOREIGN)


@pytest.mark.parametrize(
    "planted",
    [
        "if UNREADABLE in reason:\n    pass",
        "try:\n    go()\nexcept Exception as error:\n    if 'finite' in str(error):\n        pass",
        "try:\n    go()\nexcept OSError as odd:\n    text = str(odd)\n    over = text.startswith('no')",
        "try:\n    go()\nexcept ValueError as odd:\n    over = re.search('in use', f'{odd}')",
        "def code_of(error: FedVeilError):\n    return 1 if 'ended' in str(error).lower() else 2",
        "over = any(word in one.text for one in gathered.refused.values())",
        "over = 'read' in done.gathered.refused[3]",
        "if done.failed == 'no upload arrived':\n    pass",
        "if error.args[0] == 'busy':\n    pass",
    ],
)
def test_a_planted_decision_is_found(planted: str) -> None:
    assert list(decisions(planted))


def test_what_only_passes_a_message_on_is_left_alone() -> None:
    passed = """
try:
    go()
except ProtocolError as reason:
    failed = str(reason).rstrip(".")
    if failed and reason.code is Code.ENDED and client in refused:
        raise ConfigError(f"it failed: {reason}") from reason
"""
    assert not list(decisions(passed))
