"""What there is: `fedveil schemes`, `fedveil models`, and whether the installation works (`fedveil doctor`)."""

from __future__ import annotations

import dataclasses
import inspect
import json as json_module
import sys
from typing import TYPE_CHECKING, Any

import typer

from fedveil.cli.tables import complaints, plainly, table
from fedveil.config import RunConfig
from fedveil.own_code import typed
from fedveil.plain import toml_of

if TYPE_CHECKING:
    from fedveil.schemes.registry import Option, SchemeInfo


def schemes(
    name: str | None = typer.Argument(None, help="One scheme, or your own as file.py:function: its options."),
    json: bool = typer.Option(False, "--json", help="As data."),
) -> None:
    """List every scheme: its paper, what it does, and what it protects from whom; or the options of one.

    [bold]Examples[/bold]

      fedveil schemes --json

      fedveil schemes nadp

      fedveil schemes my_scheme.py:veil_ldp
    """
    from fedveil.schemes import find
    from fedveil.schemes import schemes as registered

    if name is not None:
        _show_scheme(find(typed(name)), json=json)
        return
    if json:
        typer.echo(json_module.dumps([_described(info) for info in registered()], indent=2, ensure_ascii=False))
        return
    table(
        "Schemes",
        ("name", "paper", "what it does", "what it protects from whom"),
        [(s.name, s.paper, s.summary, s.protects) for s in registered()],
        whole=(0,),
        ruled=True,
    )


def _described(info: SchemeInfo) -> dict[str, Any]:
    said = {field.name: getattr(info, field.name) for field in dataclasses.fields(info) if field.name != "build"}
    return {**said, "family": info.veil({})}


def _show_scheme(info: SchemeInfo, *, json: bool) -> None:
    """A scheme's options: their types, defaults, and what is said of them where they are declared."""
    helps = {setting.name: setting.metadata.get("words", "") for setting in dataclasses.fields(RunConfig)}
    rows = [
        (
            option.name,
            option.type_text,
            option.default,
            option.words or helps.get(option.name, ""),
            option.name in helps,
        )
        for option in info.declared.values()
    ]
    if json:
        options = [dict(zip(("name", "type", "default", "words"), row, strict=False)) for row in rows]
        typer.echo(json_module.dumps({**_described(info), "options": options}, indent=2, ensure_ascii=False))
        return
    said, family = inspect.getdoc(info.build) or "", info.veil({})
    bare = info.veil({"head_noise": False}) if "head_noise" in info.options else family
    veil = f"family of its veil: {family}" + (f", without head noise {bare}" if bare != family else "")
    told = (info.paper, info.summary, info.protects and f"protects: {info.protects}", family and veil)
    for line in (*told, said.partition("Args:")[0]):
        if line and line.strip():
            plainly(line.strip())
    shown = [
        (f"--{name.replace('_', '-')}" if ours else f"--set {name}=…", kind, _word(default), words)
        for name, kind, default, words, ours in rows
    ]
    if shown:
        table(f"Options of {info.name}", ("option", "type", "default", "what it is"), shown, whole=(0, 1, 2))
    else:
        plainly(f"{info.name} has no options of its own.")


def _word(default: Option) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return toml_of(default) if isinstance(default, bool) else "–" if default is None else str(default)


def models(json: bool = typer.Option(False, "--json", help="As data.")) -> None:
    """List every built-in model and its options (set them with -o key=value).

    [bold]Example[/bold]  fedveil run --model mlp -o depth=5 -o width=64
    """
    from fedveil.models import describe

    if json:
        data = [{**vars(model), "options": dict(model.options), "choices": dict(model.choices)} for model in describe()]
        typer.echo(json_module.dumps(data, indent=2, ensure_ascii=False))
        return
    table(
        "Models",
        ("name", "what it is", "options"),
        [(m.name, m.summary, ", ".join(f"{k}={v}" for k, v in m.options.items())) for m in describe()],
    )


_COLOURS = {"ok": "green", "advice": "yellow", "problem": "bold red"}


def doctor(json: bool = typer.Option(False, "--json", help="As data.")) -> None:
    """Check the installation: packages, device, folders, data, and a second of real training.

    Every finding is ok, an advice (something optional is missing or could be better) or a problem. Exit code 1 if
    there is a problem, else 0.

    [bold]Examples[/bold]

      fedveil doctor

      fedveil doctor --json
    """
    from fedveil.doctor import ADVICE, PROBLEM, examine

    if sys.stderr.isatty():
        with complaints.status("looking") as status:
            findings = []
            for check in examine():
                findings.append(check)
                status.update(f"{check.what}: {check.state}")
    else:
        findings = list(examine())
    states = [check.state for check in findings]
    if json:
        rows = list(map(vars, findings))
        typer.echo(
            json_module.dumps({"problems": states.count(PROBLEM), "findings": rows}, indent=2, ensure_ascii=False)
        )
    else:
        from rich.text import Text

        shown = [
            (check.what, Text(check.state, style=_COLOURS[check.state]), check.found, check.todo) for check in findings
        ]
        table("This installation", ("what", "state", "found", "what to do"), shown, whole=(0,))
        problems, advice = states.count(PROBLEM), states.count(ADVICE)
        plainly(
            f"{problems} problem{'s' * (problems != 1)}, {advice} advice" if problems else f"works; {advice} advice"
        )
    if PROBLEM in states:
        raise typer.Exit(1)
