"""`fedveil audit`: what real attacks get from a recorded run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedveil.cli import options as flag
from fedveil.cli.tables import aside, listed, plainly, table

if TYPE_CHECKING:
    from fedveil.audit.findings import Finding
    from fedveil.audit.running import Audit, Tick


def audit(
    run: Path | None = typer.Argument(None, help="The folder of a run made with --record (any run for --one-run)."),
    attacks: str | None = typer.Option(
        None, help="Only these attacks, by commas (see --list). (default: all that fit)"
    ),
    own: list[str] = typer.Option(
        [],
        "--attack",
        metavar="FILE.py:NAME",
        help="Your own attack besides, repeatable; its code is run. (docs/how-to/own-attack.md)",
    ),
    quick: bool = typer.Option(False, "--quick", help="Fewer victims and shorter searches: minutes on two cores."),
    one_run: bool = typer.Option(
        False, "--one-run", help="Instead: measure ε beside the one proven, by guessing at canaries."
    ),
    canaries: int | None = typer.Option(
        None, help="--one-run: how many canaries. (default: 20000 records, or 1000 clients)"
    ),
    list_attacks: bool = typer.Option(False, "--list", help="List the attacks and stop."),
    out: Path | None = typer.Option(None, help="Folder for audit.json and pictures. (default: RUN/audit)"),
    seed: int = typer.Option(0, help="Seed of the attacks' own randomness, and of canaries."),
    device: str = typer.Option("cpu", help="Where attacks compute: cpu or cuda."),
    workers: int | None = typer.Option(None, help="Attacks that run at a time. (default: one per core, at most 8)"),
    minutes: float | None = typer.Option(
        None, help="Most minutes of an attack on one view; one that would take longer says so. (default: 30, quick: 10)"
    ),
    client_record: list[Path] = typer.Option(
        [],
        "--client-record",
        help="Of a run on Flower: what a client kept itself (HOME/records/…), which the run's record must agree with.",
    ),
    model: flag.OwnModel = None,
    scheme: flag.OwnScheme = None,
    dataset: flag.OwnDataset = None,
    json: bool = typer.Option(False, "--json", help="Print audit.json instead of tables."),
) -> None:
    """Attack a recorded run as each role could have, and show what the attacks got.

    Every attack first has to work on an unprotected run; otherwise nothing is concluded from it. Each figure stands
    beside what blind guessing gets and what the same attack gets without protection. The folder RUN/audit then
    holds audit.json and pictures; those named ….records.png show clients' samples above what was rebuilt of them: keep
    them as you keep the data. The same command goes on where it was stopped.

    With --one-run the scheme plays a guessing game instead: canaries take one of two sides by a coin, an observer who
    sees what the ledger's claim allows guesses at the coins, and the right guesses bound ε from below. As many rounds
    are played as the run was charged for. The run's ledger and report then show both figures; one above the other
    contradicts the proof, and ends with exit code 10.

    [bold]Examples[/bold]

      fedveil run --scheme lossless --dataset digits --seed 1 --record --out runs/a

      fedveil audit runs/a --quick

      fedveil audit runs/a --attacks calibration,probe,phi

      fedveil audit runs/a --device cuda --workers 4

      fedveil audit runs/a --attack my_attack.py:loss_threshold --attacks loss-threshold

      fedveil audit runs/nadp --one-run
    """
    from fedveil.audit.running import audit_run
    from fedveil.errors import ConfigError

    if list_attacks:
        _show_attacks(own)
        return
    if run is None:
        raise ConfigError(
            "Name the folder of a recorded run: fedveil audit RUN. `fedveil audit --list` says with what."
        )
    if canaries is not None and not one_run:
        raise ConfigError("canaries are guessed at in a game of their own: add --one-run, or leave --canaries out.")
    if one_run:
        named = flag.own_code(scheme=scheme, model=model, dataset=dataset)
        _play(run, canaries=canaries, seed=seed, out=out, own=named, json=json)
        return
    names = [name.strip() for name in (attacks or "").split(",") if name.strip()]
    with _bar() as tick:
        audited = audit_run(
            run,
            attacks=names,
            own_attacks=own,
            quick=quick,
            seed=seed,
            device=device,
            out=out,
            workers=workers,
            minutes=minutes,
            own=flag.own_code(scheme=scheme, model=model, dataset=dataset),
            seen=client_record,
            say=aside,
            tick=tick,
        )
    if json:
        typer.echo((audited.folder / "audit.json").read_text(encoding="utf-8").rstrip())
    else:
        _show(audited)
    _refuse_nothing_but_failures(audited)


def _play(run: Path, *, canaries: int | None, seed: int, out: Path | None, own: Mapping[str, str], json: bool) -> None:
    from fedveil.audit.canaries import audit_one_run
    from fedveil.errors import ContradictionError
    from fedveil.runs.folder import MEASURED

    with _bar() as tick:
        measured = audit_one_run(run, canaries=canaries, seed=seed, out=out, own=own, say=aside, tick=tick)
    file = run.joinpath(*MEASURED) if out is None else out / MEASURED[-1]
    if json:
        typer.echo(file.read_text(encoding="utf-8").rstrip())
    else:
        plainly(measured.result)
        listed("Measured beside proven", measured.told)
        plainly(f"in full: {file}")
    if measured.contradicts:
        raise ContradictionError(f"More was measured than is proven: {measured.result}.")


def _refuse_nothing_but_failures(audited: Audit) -> None:
    """An audit says something if one attack that was tried came to an end."""
    from fedveil.audit.findings import NOT_TRIED
    from fedveil.errors import AttackError

    tried = [one for one in audited.findings if one.attack != NOT_TRIED and one.verdict != "not applicable"]
    if tried and all(one.verdict == "failed" for one in tried):
        raise AttackError(f"Every attack that was tried failed. {'; '.join(_reasons(tried))}")


def _show(audited: Audit) -> None:
    from fedveil.audit.findings import CAVEAT, SHORT, TAKEN_OUT, by_adversary

    for title, findings in by_adversary(audited.findings).items():
        doubled = any(finding.taken_out for finding in findings)
        columns = ("attack", "gets", "by chance", "unprotected", *("taken out",) * doubled, "verdict")
        rows = [
            (
                f"{finding.attack}{' *' * finding.adaptive}",
                *(finding.text(figure) for figure in ("value", "chance", "unprotected")),
                *(str(finding.taken_out),) * doubled,
                SHORT[finding.verdict],
            )
            for finding in findings
        ]
        table(title, columns, rows, right=range(1, len(columns) - 1), whole=(0, 1))
    if any(finding.adaptive for finding in audited.findings):
        plainly("* made for this kind of protection")
    if any(finding.taken_out for finding in audited.findings):
        plainly(f"taken out: {TAKEN_OUT}")
    listed("In one sentence each", list(audited.adversaries.values()))
    listed("Why nothing follows from some", _reasons(audited.findings))
    plainly(CAVEAT)
    plainly(f"in full: {audited.folder / 'audit.json'} ({audited.seconds:.0f} s)")
    if any(finding.pictures for finding in audited.findings):
        plainly(f"pictures: {audited.folder / 'pictures'} (rows: original, this run, without protection)")
        plainly("those named ….records.png show clients' samples: keep them as you keep the data")


def _reasons(findings: Sequence[Finding]) -> list[str]:
    """Why some say nothing; attacks with the same reason together."""
    groups: dict[str, list[str]] = {}
    for finding in findings:
        if finding.reason:
            groups.setdefault(finding.reason, []).append(finding.name)
    return [f"{', '.join(names)}: {reason}" for reason, names in groups.items()]


def _show_attacks(own: Sequence[str]) -> None:
    from fedveil.audit.attack import with_own

    rows = [(name, *attack.listing) for name, attack in with_own(own).items()]
    table("Attacks", ("name", "by", "on", "how"), rows)


@contextmanager
def _bar() -> Iterator[Callable[[Tick], None]]:
    """Trials done and time left, and what runs now; nothing where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield lambda tick: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fedveil.cli.tables import complaints

    shown = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*shown, console=complaints, transient=True) as progress:
        trials = progress.add_task("getting ready", total=None)

        def tick(now: Tick) -> None:
            names = ", ".join(f"{name} {part:.0%}" for name, part in now.running.items())
            progress.update(trials, description=names or "trials", completed=now.done, total=now.total)

        yield tick
