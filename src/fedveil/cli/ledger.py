"""How a ledger looks on a terminal."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedveil.cli import options as flag
from fedveil.cli.tables import aside, listed, percent, plainly, table

if TYPE_CHECKING:
    from fedveil.ledger.statement import Ledger, Line, PaperFigure
    from fedveil.runs.planning import Noise, Planned, Sampled


_MANY = 10.0
_SAME = 5e-4


def show_ledger(ledger: Ledger, *, title: str | None = None) -> None:
    """Against whom what is proven; assumptions; the paper's figure; what is not protected."""
    rows = [(line.adversary, line.result, line.unit or "–", _why(line)) for line in ledger.lines]
    counted = f" after {ledger.rounds} rounds" if ledger.rounds else ""
    table(
        title or f"Ledger of {ledger.scheme}{counted}",
        ("against", "result", "protected", "why"),
        rows,
        whole=(1,),
        ruled=True,
    )
    listed("Assumed", _assumptions(ledger.lines))
    listed("What may change", list(dict.fromkeys(line.relation for line in ledger.lines if line.relation)))
    listed("Beside figures of others", relations(ledger.lines))
    if ledger.paper is not None:
        listed("The paper's own figure", _paper(ledger.paper, summed(ledger)))
    if ledger.measured is not None:
        listed("Measured beside proven", ledger.measured.told)
    listed("Not protected", ledger.unprotected)
    listed("Note", ledger.notes)
    if ledger.simulation:
        plainly("SIMULATION: the first model, secrets and noise follow from the seed; leave --seed out for real ones.")


def relations(lines: Sequence[Line]) -> list[str]:
    """What ε would be under the relation that others count with, each figure once."""
    return list(dict.fromkeys(line.add_remove for line in lines if line.add_remove))


def _why(line: Line) -> str:
    worst = f"; client {line.worst_client} is worst off" if line.worst_client is not None else ""
    return f"{line.why}{worst}"


def _assumptions(lines: Sequence[Line]) -> list[str]:
    everywhere = dict.fromkeys(assumption for line in lines for assumption in line.assumptions)
    claims = [line for line in lines if line.assumptions]
    shown = []
    for assumption in everywhere:
        where = [line.adversary for line in claims if assumption in line.assumptions]
        shown.append(assumption if len(where) == len(claims) else f"{assumption} (against {', '.join(where)})")
    return shown


def _paper(figure: PaperFigure, what: str) -> list[str]:
    lines = [figure.formula]
    if figure.noise_by_paper is not None and figure.noise_used is not None and figure.saving is not None:
        lines.append(
            f"for ε = {figure.claimed_epsilon:g} it puts noise of σ = {figure.noise_by_paper:.4g} into the sum of "
            f"{what}; used here: {figure.noise_used:.4g}, {compared(figure.noise_used, figure.noise_by_paper)}"
        )
    return lines


def summed(ledger: Ledger) -> str:
    """What clients' uploads are: gradients, or the updates of local training."""
    return "updates" if any(line.unit.startswith("all data") for line in ledger.lines) else "gradients"


def compared(noise: float, other: float) -> str:
    """How much noise this is, beside another."""
    if noise >= _MANY * other:
        return f"{noise / other:,.0f} times as much"
    saving = 1.0 - noise / other
    if abs(saving) < _SAME:
        return "as much"
    return f"{percent(abs(saving))} {'less' if saving > 0 else 'more'}"


_ASKED = "Instead of a run: a question"


_OPTIONS = (
    *("epsilon", "delta", "clip", "accounting", "collusion", "pair_strength", "neighbours", "dropouts"),
    *("honest_arrivals", "secret_sampling", "cover", "unmask", "threshold"),
    *("share", "share_decay", "strategy", "vote", "cipher"),
)


@flag.takes_flags(only=("option", "model_option", *_OPTIONS))
def ledger(
    run: Path | None = typer.Argument(None, help="A run folder, or its ledger.json."),
    scheme: str | None = typer.Option(None, help="Named scheme: what would it prove?", rich_help_panel=_ASKED),
    clients: int = typer.Option(100, help="Number of clients.", rich_help_panel=_ASKED),
    rounds: int = typer.Option(200, help="Number of rounds.", rich_help_panel=_ASKED),
    cohort: str | None = typer.Option(
        None, help="Clients per round: 0.1 (a fraction) or 5 (a count). (default: all)", rich_help_panel=_ASKED
    ),
    sampling_rate: float | None = typer.Option(
        None, help="Instead: each client takes part in each round with this probability.", rich_help_panel=_ASKED
    ),
    samples: int = typer.Option(600, help="Samples of a client, on average.", rich_help_panel=_ASKED),
    size_ratio: float = typer.Option(1.0, help="Largest client's samples over the smallest's.", rich_help_panel=_ASKED),
    sizes: str | None = typer.Option(None, help="Instead: every client's, like 480,600.", rich_help_panel=_ASKED),
    batch_size: int = typer.Option(0, help="Samples per step; 0 takes all.", rich_help_panel=_ASKED),
    local_steps: int | None = typer.Option(
        None, help="Local steps per round; more than one make a client the unit.", rich_help_panel=_ASKED
    ),
    model: str | None = typer.Option(
        None,
        help="mpdp: a network, for bounds that depend on one. Of a run that has not ended: your own code that builds "
        "its model.",
        rich_help_panel=_ASKED,
    ),
    seed: int = typer.Option(0, help="Seed from which rounds' clients are drawn.", rich_help_panel=_ASKED),
    *,
    flags: dict[str, Any],
    dataset: flag.OwnDataset = None,
    json: bool = typer.Option(False, "--json", help="As data."),
) -> None:
    """Show what a run has proven, against whom; or, with --scheme, what one would prove and the noise it takes.

    [bold]Examples[/bold]

      fedveil ledger runs/a

      fedveil ledger --scheme nadp --clients 100 --rounds 200 --epsilon 1 --pair-strength 1

      fedveil ledger --scheme nadp --clients 10000 --neighbours 5 --collusion 0.1 --json

      fedveil ledger --scheme ldp --epsilon 1 --secret-sampling 0.1

      fedveil ledger --scheme paraaegis --clients 10 --rounds 50 --samples 947 --epsilon 1 --accounting paper
    """
    from fedveil.cli.inspect import example_of
    from fedveil.errors import ConfigError
    from fedveil.own_code import OwnCode
    from fedveil.runs.callbacks import working
    from fedveil.runs.folder import read_ledger
    from fedveil.runs.planning import Question, check_sizes, even_sizes, plan_run

    own = flag.own_code(scheme=scheme, model=model, dataset=dataset)
    asked = scheme is not None and (run is None or not isinstance(own["scheme"], OwnCode))
    if (run is None) is not asked:
        raise ConfigError("Give a run folder (fedveil ledger runs/a), or ask about a scheme (--scheme nadp), not both.")
    if run is not None:
        statement = read_ledger(run, own=own, say=aside)
        if json:
            typer.echo(json_module.dumps(statement.as_data(), indent=2, ensure_ascii=False))
        else:
            show_ledger(statement)
        return
    given = flag.settings_given(flags, {})
    if sizes is not None:
        counts = check_sizes(_numbers(sizes), clients=clients)
    else:
        counts = even_sizes(clients, mean=samples, ratio=size_ratio)
    question = Question(
        scheme=own["scheme"],
        samples=counts,
        rounds=rounds,
        cohort=None if cohort is None else flag.cohort_of(cohort),
        sampling_rate=sampling_rate,
        batch_size=batch_size,
        options={
            **given.pop("options", {}),
            **{name: given.get(name) for name in _OPTIONS},
            "local_steps": local_steps,
        },
        seed=seed,
    )
    with working(f"accounting for {clients:,} clients and {rounds:,} rounds"):
        network = None if model is None else example_of(model, options=given.get("model_options", {}))
        answer = plan_run(question, model=network)
    if json:
        typer.echo(json_module.dumps(answer.as_data(), indent=2, ensure_ascii=False))
    else:
        show_plan(answer, samples=question.samples)


def _numbers(text: str) -> list[int]:
    from fedveil.errors import ConfigError

    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"Sizes are written like 480,600,720 (got {text!r}).") from None


def show_plan(answer: Planned, *, samples: Sequence[int]) -> None:
    """The noise, then the ledger; `samples` are the clients'."""
    who = f"{answer.clients:,} clients"
    if answer.sampling_rate is not None:
        who += f", each in a round with probability {answer.sampling_rate:g}, in {answer.participations} at most"
    elif answer.cohort < answer.clients:
        who += f", {answer.cohort:,} in a round, each in {answer.participations} at most"
    if answer.exact is not None and answer.paper is not None:
        _show_noise(answer, answer.exact, answer.paper, who, samples)
    show_ledger(answer.ledger, title=f"What {answer.rounds} rounds of {answer.ledger.scheme} would prove ({who})")
    if answer.sampled is not None:
        listed("With records sampled in secret", _sampling(answer.sampled))
    plainly("Nothing was trained: this is what a run ends with if every client answers every time.")


def _show_noise(answer: Planned, exact: Noise, paper: Noise, who: str, samples: Sequence[int]) -> None:
    own = "σ each client's share has" if answer.ledger.scheme == "cdp" else "σ each client adds of its own"
    what = summed(answer.ledger)
    rows = [
        (f"σ left in the sum of {what}", _figure(exact.in_sum), _figure(paper.in_sum)),
        (f"σ on the mean {what.removesuffix('s')}", _figure(exact.on_mean), _figure(paper.on_mean)),
        (own, _range(exact.own), _range(paper.own)),
    ]
    if what == "updates" and max(samples) == min(samples):
        count = samples[0]
        own = f"… to its update, before × {count:,}"
        rows.append((own, _figure(exact.own[0] / count), _figure(paper.own[0] / count)))
    if exact.shared is not None or paper.shared is not None:
        rows.append(("σ shared by a pair, which cancels", _range(exact.shared), _range(paper.shared)))
        rows.append(("strength λ of what cancels", f"{exact.strength:.4g}", f"{paper.strength:.4g}"))
    if not answer.ledger.paper:  # our own scheme: there is no paper to compare with
        table(f"Noise of a round ({who})", ("", "exact"), [row[:2] for row in rows], right=(1,))
        return
    table(f"Noise of a round ({who})", ("", "exact", "by the paper's formula"), rows, right=(1, 2))
    how = compared(exact.in_sum, paper.in_sum)
    joint = "as" if how.endswith("as much") else "than"
    plainly(f"Exact accounting takes {how} noise {joint} the paper's formula; this run would use: {answer.accounting}.")


def _sampling(sampled: Sampled) -> list[str]:
    return [
        f"each record takes part in a round with probability {sampled.rate:g}, drawn by its client and seen by nobody",
        f"σ of {sampled.multiplier:.4g} clipping bounds on the sum of a batch meets the target; "
        f"{sampled.multiplier_without:.4g} would be needed if the server knew the batch",
        f"neighbouring relation: {sampled.relation}",
    ]


def _range(values: tuple[float, float] | None) -> str:
    if values is None:
        return "–"
    least, most = map(_figure, values)
    return least if least == most else f"{least} … {most}"


def _figure(value: float) -> str:
    return f"{value:.4g}"
