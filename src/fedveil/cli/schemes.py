"""`fedveil schemes` and `fedveil models`: what there is to choose from."""

from __future__ import annotations

import dataclasses
import json as json_module

import typer

from fedveil.cli.tables import table


def schemes(json: bool = typer.Option(False, "--json", help="As data.")) -> None:
    """List every scheme: its paper, what it does, and what it protects from whom.

    [bold]Example[/bold]  fedveil schemes --json
    """
    from fedveil.schemes import schemes as registered

    if json:
        rows = [{f.name: getattr(s, f.name) for f in dataclasses.fields(s) if f.name != "build"} for s in registered()]
        typer.echo(json_module.dumps(rows, indent=2, ensure_ascii=False))
        return
    table(
        "Schemes",
        ("name", "paper", "what it does", "what it protects from whom"),
        [(s.name, s.paper, s.summary, s.protects) for s in registered()],
        whole=(0,),
        ruled=True,
    )


def models(json: bool = typer.Option(False, "--json", help="As data.")) -> None:
    """List every built-in model and its options (set them with -o key=value).

    [bold]Example[/bold]  fedveil run --model mlp -o depth=5 -o width=64
    """
    from fedveil.models import describe

    if json:
        data = [{**vars(one), "options": dict(one.options), "choices": dict(one.choices)} for one in describe()]
        typer.echo(json_module.dumps(data, indent=2, ensure_ascii=False))
        return
    table(
        "Models",
        ("name", "what it is", "options"),
        [(m.name, m.summary, ", ".join(f"{k}={v}" for k, v in m.options.items())) for m in describe()],
    )
