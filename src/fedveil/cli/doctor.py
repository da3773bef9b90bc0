"""`fedveil doctor`: whether the installation works, and what to do where it does not."""

from __future__ import annotations

import json as json_module
import sys

import typer

from fedveil.cli.tables import complaints, plainly, table

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
