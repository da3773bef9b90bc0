"""Write docs/command-line.md from the commands' own help: python -m tools.command_page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"

_INTRODUCTION = """\
# Command line

What `fedveil COMMAND --help` says, on one page. It is written from the commands by `make docs`: change those, not this
page. What a command returns to the shell: [exit codes](exit-codes.md).
"""


def page() -> str:
    """The whole page."""
    import typer

    from fedveil.cli.app import app

    parts = [_INTRODUCTION]
    for name, command in _commands(typer.main.get_command(app), "fedveil"):
        parts.append(_section(name, command))
    return "\n".join(parts)


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command that can be typed, groups opened, in the order of the help."""
    for word, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def _section(name: str, command: Any) -> str:
    lines = [f"## {name}", "", "```text", _usage(name, command), "```", ""]
    said, examples = _told(command.help or "")
    for paragraph in said:
        lines += [_escaped(paragraph), ""]
    if examples:
        lines += ["```console", *examples, "```", ""]
    for title, rows in _panels(command).items():
        lines += [f"| {title} | |", "| --- | --- |", *rows, ""]
    return "\n".join(lines)


def _usage(name: str, command: Any) -> str:
    places = [_place(one) for one in command.params if one.param_type_name == "argument"]
    return " ".join([name, *places, "[OPTIONS]"])


def _place(argument: Any) -> str:
    shown = argument.name.upper() + ("..." if argument.nargs != 1 else "")
    return shown if argument.required else f"[{shown}]"


def _told(text: str) -> tuple[list[str], list[str]]:
    """The paragraphs of a help text, and its examples."""
    before, _, after = cleandoc(text.replace("\f", "")).partition("[bold]Examples[/bold]")
    paragraphs = [" ".join(one.split()) for one in before.split("\n\n") if one.strip()]
    examples = [" ".join(one.split()).replace(" \\ ", " ") for one in after.split("\n\n") if one.strip()]
    return [_plain(one) for one in paragraphs], [_plain(one) for one in examples]


def _plain(text: str) -> str:
    """Without the marks that give words a weight or colour on a terminal."""
    return re.sub(r"\[/?(?:bold|italic|dim|red|green|yellow|cyan)\]", "", text).replace("\\[", "[")


def _panels(command: Any) -> dict[str, list[str]]:
    """One table per panel of the help: what can be given, and what it means."""
    panels: dict[str, list[str]] = {}
    for one in command.params:
        if getattr(one, "hidden", False) or one.name == "help":
            continue
        argument = one.param_type_name == "argument"
        title = getattr(one, "rich_help_panel", None) or ("Arguments" if argument else "Options")
        shown = _place(one) if argument else _flags(one)
        panels.setdefault(title, []).append(f"| `{shown}` | {_cell(_plain(_meaning(one)))} |")
    return panels


def _flags(option: Any) -> str:
    names = ", ".join(option.opts)
    if option.secondary_opts:
        return f"{names} / {', '.join(option.secondary_opts)}"
    return names if option.is_flag else f"{names} {(option.metavar or option.type.name).upper()}"


def _meaning(one: Any) -> str:
    text = " ".join((one.help or "").split())
    default = one.default
    said = "(default" in text or "[default" in text
    worth_saying = isinstance(default, (int, float, str)) and not isinstance(default, bool) and default != ""
    if worth_saying and not said:
        text += f" (default: {default})"
    if one.required:
        text += " Must be given."
    return text.strip()


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
