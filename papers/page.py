"""The page of all entries, paper by paper: its claim, whether that holds here and why, the figures, the command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedveil.runs.folder import write_atomically
from papers import lossless, mpdp, nadp, paraaegis, pbpfl, veil_dp
from papers.cells import Store
from papers.entries import Entry
from papers.report import EMPTY, POINTS, SHARE, WORDS, Figure, Report
from papers.runner import Stored, entries, stored_results

_FAILED = 3
_HEAD = ("what", "verdict", "why", "paper", "here", "again")
_INTRODUCTION = f"""\
# Reproduction

What five papers claim, and whether it holds here. This page is made from the figures stored in `docs/results` by

```console
fedveil reproduce --page docs/reproduction.md --from docs/results
```

How to read it. The verdict is counted from figures, not chosen:

- **reproduced**: every claim that could be judged held, *and* the numbers that stand for the table came out as they are
  printed, within {POINTS:g} points of a percentage and {100 * SHARE:g} % of any other number.
- **holds at other numbers**: the claims held, the printed numbers did not come out. Two curves that agree at another
  accuracy than the paper's are this, and not more.
- **holds**: the claims held, and no number here stands beside a printed one.
- **refuted**, **refuted in part**: claims, or some of them, did not hold here. Networks, data and sizes often differ
  from the paper's; the entry's page says how.
- **not decidable**: no claim could be judged, or those that held stand on something that did not: an attack that does
  not work without protection, a model that does not train. What does not hold is refuted all the same.

Claims are the paper's, judged by its own attacks and comparisons and, where it speaks of curious clients or servers as
such, by attackers of ours, whom it did not run: they know the scheme, or weigh likelihoods. One of them is enough to
refute such a claim; where one does, the reasons say first how many claims held by the paper's own attacks and
comparisons and how many against attackers of ours. What we claim besides stands on the entries' pages, marked as ours,
and decides nothing here. Of two accuracies one is higher where the difference lies outside its 95 % interval over
seeds; with one seed, where it is more than {POINTS:g} points. What lies closer is open.
Where a claim names a bound (at least ten times, at most 3 points), the bound is ours, put where the paper has a word
or a printed figure.

"So far": other claims are open, since their cells were not run or their seeds do not tell. An entry has up to three
sizes: "small" (`--quick`, on other data: directions only), the usual one, and the whole table (`--full`); how many
cells of each are here stands in the last column, and what is run next, what helps most to decide a verdict first, is
told by `fedveil reproduce plan --list --out docs/results`. "As received": by a client that uses the model as it was
sent; "noise taken off": by one that first estimates the noise on the last layer and subtracts it. Figures of rebuilt
pictures are PSNR in decibels. A dash in the paper's column: it prints no such number. "cpu": two cores of an AMD EPYC.
One seed, unless figures carry a ± (a standard error) or the command says otherwise. How settings were chosen, and what
was looked at before: [results](results/README.md).
"""
_CLAIMS: Mapping[str, tuple[str, Sequence[Entry], str, str]] = {
    "nadp": (
        "NADP-FL",
        nadp.ENTRIES,
        "Noise that pairs of clients share covers every upload and annihilates in the sum, so that server and clients "
        "learn no more than (ε, δ) allows, at far less noise in the model than local differential privacy leaves.",
        "",
    ),
    "mpdp": (
        "MP-DP",
        mpdp.ENTRIES,
        "A perturbed model down and distributed noise up keep the model from clients and gradients from the server, at "
        "the accuracy of central differential privacy and nearly FedAvg's cost.",
        "",
    ),
    "lossless": (
        "Accuracy-lossless perturbation",
        lossless.ENTRIES,
        "Clients train a perturbed model from which they can infer neither members nor what classes look like, and the "
        "server recovers the true gradient: no accuracy is lost.",
        "Its server is honest by assumption. Its Table I and Figure 3 are under PBPFL, whose data they share (`bank`, "
        "`pbpfl-table2`).",
    ),
    "pbpfl": (
        "PBPFL",
        pbpfl.ENTRIES,
        "Under a perturbed model clients know neither its course nor its end, the error is that of plain federated "
        "learning, and the server learns no more than in plain federated learning.",
        "What the server learns is in no table of the paper, and in our [audits](results/audits.md); it holds: with "
        "each upload come statistics that give a batch of one away in closed form, as bare gradients do, and no more "
        "is claimed. The paper's extension hides single uploads by masks that add up to zero; here `veil-secagg` does, "
        "which is ours and lets clients drop out. That clients do not learn the model's course does not hold against "
        "one that aligns two rounds ([alignment](results/alignment.md)).",
    ),
    "paraaegis": (
        "ParaAegis",
        paraaegis.ENTRIES,
        "Encrypting the share of an update that matters most, chosen by a vote, and noising the rest is a dial between "
        "accuracy and time at the same privacy.",
        "",
    ),
    "veil_dp": (
        "FedVeil's own",
        veil_dp.ENTRIES,
        "A veil on the model and honest noise on clipped gradients prove what `nadp` proves, at its accuracy where the "
        "veil is an isometry. No paper: our own comparison.",
        "",
    ),
}
"""By paper: its name, its entries, its claim in a sentence, and what of it tables do not tell."""


def page(folder: Path) -> str:
    """The page as Markdown, from a folder of stored figures."""
    found = stored_results(folder)
    parts = [_INTRODUCTION, *_counted(found)]
    placed: set[str] = set()
    for name, own, claim, beside in _CLAIMS.values():
        names = {entry.name for entry in own}
        placed |= names
        parts += _paper(name, claim, beside, [one for one in found if one.entry.name in names], own)
    rest = [entry for entry in entries() if entry.name not in placed]
    if rest:
        parts += _paper("Others", "", "", [one for one in found if one.entry in rest], rest)
    return "\n".join(parts).rstrip() + "\n"


def judge_again(folder: Path) -> None:
    """Write beside stored figures what they amount to, and every entry's own page."""
    for one in stored_results(folder):
        Store(one.path, entry=f"{one.entry.name}-quick" if one.quick else one.entry.name).conclude(one.report.as_data())
        write_atomically(one.path.with_suffix(".md"), one.report.markdown())


def _counted(found: Sequence[Stored]) -> list[str]:
    words = sorted((one.report.standing for one in found), key=_rank)
    told = ", ".join(f"{count} {word}" for word, count in Counter(words).items())
    return [f"{len(found)} stored runs of {len({one.entry.name for one in found})} entries: {told}.", ""]


def _rank(standing: str) -> tuple[int, str]:
    """The best words first, those that stand "so far" behind those that stand."""
    return WORDS.index(standing.removeprefix("so far ")), standing


def _paper(name: str, claim: str, beside: str, found: Sequence[Stored], own: Sequence[Entry]) -> list[str]:
    """A paper's claim, how its tables stand, and those of which nothing is stored."""
    lines = [f"## {name}", ""]
    if claim:
        lines += [f"**The claim.** {claim}", ""]
    if found:
        lines += [" ".join(filter(None, (f"**Here.** {_in_short(found)}", beside))), ""]
        lines += ["| " + " | ".join(line) + " |" for line in (_HEAD, ("---",) * len(_HEAD), *map(_row, found))]
        lines.append("")
        lines += [
            f"![{one.entry.name}, drawn from these figures](results/{one.path.stem}.png)\n"
            for one in found
            if one.path.with_suffix(".png").exists()
        ]
    return lines + _missing(found, own)


def _in_short(found: Sequence[Stored]) -> str:
    """Which tables came to which verdict, the best first."""
    by_word = {word: [one for one in found if one.report.word == word] for word in WORDS}
    told = (f"{word}: {', '.join(_short(one) for one in tables)}" for word, tables in by_word.items() if tables)
    text = "; ".join(told)
    return f"{text[0].upper()}{text[1:]}."


def _short(one: Stored) -> str:
    so_far = " so far" if one.report.standing != one.report.word else ""
    return f"`{one.entry.name}`{' small' * one.quick}{so_far}"


def _row(one: Stored) -> tuple[str, ...]:
    where = "; ".join(filter(None, (one.machine, one.noted, one.cells)))
    form = " (small)" if one.quick else ""
    return (
        f"[{one.entry.name}](results/{one.path.stem}.md){form}<br>{_cell(one.entry.what)}",
        f"**{one.report.standing}**",
        _why(one.report),
        *_figures(one.report.figures),
        f"`{one.command}`<br>{_cell(where)}",
    )


def _figures(figures: Sequence[Figure]) -> tuple[str, str]:
    theirs, ours = (
        "<br>".join(f"{_cell(one.what)}: **{_cell(value)}**" for one, value in zip(figures, values, strict=True))
        for values in ([one.paper for one in figures], [one.ours for one in figures])
    )
    return theirs or EMPTY, ours or EMPTY


def _why(report: Report) -> str:
    """How many claims held; which did not, or which do; which numbers were missed; and how many claims are open."""
    judged = report.judged
    told = [f"{sum(one.held is True for one in judged)} of {len(judged)} judged claims held"]
    reasons = list(report.reasons)
    held = [one.claim for one in judged if one.held]
    if len(held) == len(judged) and held:
        told[0] += f" ({', '.join(held[:_FAILED])}{' …' * (len(held) > _FAILED)})"
    more = len(reasons) - _FAILED - 1
    told += reasons if more <= 0 else [*reasons[:_FAILED], f"and {more} more", reasons[-1]]
    return _cell("; ".join(told))


def _missing(found: Sequence[Stored], own: Sequence[Entry]) -> list[str]:
    there = {(one.entry.name, one.quick) for one in found}
    lines = [
        f"- `{entry.name}`: {entry.what}. It takes {entry.takes}"
        + (f", {entry.takes_quick} with `--quick`." if entry.has_quick else ".")
        + (" The small form is above." if (entry.name, True) in there else "")
        for entry in own
        if (entry.name, False) not in there
    ]
    return ["Not run in full:", "", *lines, ""] if lines else []


def _cell(text: str) -> str:
    """Text that neither ends a cell of a table nor starts a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
