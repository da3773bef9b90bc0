"""`fedveil flower run`: submit a run to a SuperLink and follow it to its end."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from fedveil.cli.run import show_ledger_of, show_summary
from fedveil.cli.settings import located_here, takes_settings
from fedveil.cli.tables import aside

if TYPE_CHECKING:
    from fedveil.deploy.submission import Submission

_STOPPED, _LEFT = 130, 129
_SECONDS_TO_THINK = 3.0


@takes_settings
def run(
    app: Path = typer.Argument(..., help="An app folder, made by `fedveil flower init`."),
    folder: Path = typer.Option(Path(".fedveil"), "--folder", help="The cluster of `fedveil flower up` to run on."),
    superlink: str | None = typer.Option(
        None, "--superlink", help="Run elsewhere: a SuperLink of your own Flower configuration, by name."
    ),
    out: str = typer.Option(
        "", "--out", help="Run folder, on the SuperLink's machine. (default: runs/flower-<run id>)"
    ),
    resume: bool = typer.Option(False, "--resume", help="Continue the run in --out from its newest checkpoint."),
    deadline: float | None = typer.Option(
        None, "--deadline", help="Seconds that a phase of a round may take. (default: the app's)"
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress bar, no table and no ledger."),
    *,
    settings: dict[str, Any],
) -> None:
    """Submit a run and follow it: progress, figures and ledger as `fedveil run` shows them, and its exit codes.

    A SuperLink that restarts in between is waited for. Ctrl-C stops watching (exit code 129) and the run goes on; a
    second Ctrl-C within three seconds stops the run as well (130). Settings given here win over the app's.

    [bold]Examples[/bold]

      fedveil flower run app --out runs/a

      fedveil flower run app --rounds 50 --lr 0.05 --out runs/b

      fedveil flower run app --resume --out runs/b

      fedveil flower run app --superlink production
    """
    from fedveil.deploy.flower import environment, require_flower
    from fedveil.deploy.places import CONNECTION, Places
    from fedveil.deploy.project import prepared
    from fedveil.deploy.submission import Submission

    require_flower()
    places = Places.of(folder)
    if superlink is None:
        settings, out = located_here(settings), str(Path(out).expanduser().resolve()) if out else ""
    extras = {"out": out or None, "resume": resume or None, "deadline": deadline}
    changes = {**settings, **{name: value for name, value in extras.items() if value is not None}}
    ready = prepared(app, changes)
    if superlink is None:
        places.require_up(clients=ready.config.clients)
    env = places.environment() if superlink is None else environment()
    submission = Submission(superlink or CONNECTION, env=env, say=aside)
    try:
        summary, where = _follow(submission, app, ready.override, rounds=ready.config.rounds, quiet=quiet)
    except KeyboardInterrupt:
        _interrupted(submission, flwr_home=places.flwr_home if superlink is None else None)
    if not quiet:
        show_summary(summary, where)
        show_ledger_of(summary, where)


def _follow(
    submission: Submission, app: Path, override: str, *, rounds: int, quiet: bool
) -> tuple[dict[str, Any], Path]:
    from contextlib import ExitStack

    from fedveil.errors import FedVeilError
    from fedveil.runs.progress import Progress, Quiet, progress_for, working

    bar: Progress = Quiet()
    with ExitStack() as shown:
        shown.enter_context(working("submitting the run", quiet=quiet))
        for event in submission.events(app, override):
            match event["event"]:
                case "began":
                    shown.close()
                    bar = progress_for(event["scheme"], total=event["rounds"], done=event["round"], quiet=quiet)
                    shown.enter_context(bar)
                    if not quiet:
                        aside(f"run {submission.run_id} in {event['out']}")
                case "round":
                    bar.update(event)
                case "said":
                    aside(event["text"])
                case "done":
                    return event["summary"], Path(event["out"])
                case "failed":
                    failure = FedVeilError(event["text"])
                    failure.exit_code = event.get("exit_code", FedVeilError.exit_code)
                    raise failure
    raise AssertionError("events end with `done` or `failed`, or raise")


def _interrupted(submission: Submission, *, flwr_home: Path | None) -> NoReturn:
    if submission.run_id is None:
        raise typer.Exit(_STOPPED)
    setting = "" if flwr_home is None else f"FLWR_HOME={shlex.quote(str(flwr_home))} "
    named = f"{submission.run_id} {submission.superlink}"
    aside("The run goes on. Ctrl-C once more, now, stops it as well.")
    try:
        time.sleep(_SECONDS_TO_THINK)
    except KeyboardInterrupt:
        submission.stop()
        aside(f"run {submission.run_id} is stopped")
        raise typer.Exit(_STOPPED) from None
    aside(f"To see its log: {setting}flwr log {named}. To stop it: {setting}flwr stop {named}.")
    raise typer.Exit(_LEFT)
