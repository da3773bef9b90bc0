"""One sentence per adversary, in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedveil.trials.trial import NOT_TRIED, Finding

CAVEAT = (
    "An audit shows what these attacks got, not what no attack can get. Not tried: servers that send crafted or "
    "different models, poisoning, side channels."
)

_GETS = {
    "data": "rebuilds what a client trained on",
    "labels": "reads the labels of what a client trained on",
    "the model's function": "can use the model as if it were its own",
    "the model's parameters": "knows the parameters up to scales that leave the function as it is",
    "members": "tells whose data was trained on",
    "what classes look like": "makes recognisable pictures of the classes",
}
_GETS_PART = {
    "data": "sees traces of what a client trained on",
    "labels": "reads some of the labels",
    "the model's function": "can use a worse copy of the model",
    "the model's parameters": "knows part of the parameters, up to scales that leave the function as it is",
    "members": "tells members better than by chance",
    "what classes look like": "makes pictures that are sometimes recognised",
}
_GETS_NOTHING = {
    "data": "cannot rebuild what a client trained on",
    "labels": "cannot tell labels",
    "the model's function": "cannot use the model",
    "the model's parameters": "knows none of the parameters, not even up to scales",
    "members": "cannot tell members",
    "what classes look like": "cannot picture the classes",
}
SHORT = {
    "as if unprotected": "as if unprotected",
    "in part": "in part",
    "nothing": "as chance",
    "not decided": "not decided",
    "not effective": "not effective here",
    "not applicable": "not applicable",
    "failed": "failed to run",
}
_ORDER = ("as if unprotected", "in part", "not decided", "nothing", "not effective", "not applicable", "failed")


_WHO = ("server", "clients", "wire", "client")


def sentences(findings: Iterable[Finding]) -> dict[str, str]:
    """What each adversary got, by its best attack on every asset, with chance and no protection beside it."""
    by_adversary: dict[str, list[Finding]] = {}
    for one in findings:
        by_adversary.setdefault(one.adversary, []).append(one)
    order = sorted(by_adversary, key=lambda who: (_WHO.index(who.split()[-1]) if who.split()[-1] in _WHO else 1, who))
    return {who: _sentence(who, by_adversary[who]) for who in order}


def best_of(findings: Iterable[Finding]) -> list[Finding]:
    """For every adversary and asset the attack that got most."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.adversary, one.asset), []).append(one)
    return [min(found, key=_rank) for found in groups.values()]


def _sentence(who: str, findings: Sequence[Finding]) -> str:
    parts = [_about(one, [each for each in findings if each.asset == one.asset]) for one in best_of(findings)]
    return f"{who[0].upper()}{who[1:]} {'; '.join(parts)}."


def _about(best: Finding, findings: Sequence[Finding]) -> str:
    """One asset: by the attack that got most, and what could not be tried where it got nothing."""
    said = _got(best)
    untried = [one for one in findings if one.verdict in ("not applicable", "failed") and one is not best]
    if best.verdict in ("nothing", "not decided", "not effective") and untried:
        said += f" (not measured: {', '.join(dict.fromkeys(_untried(one) for one in untried))})"
    return said


def _untried(one: Finding) -> str:
    return one.reason.rstrip(".") if one.attack == NOT_TRIED else f"{one.attack} on {one.seen}"


def _got(best: Finding) -> str:
    shown = best.shown
    figures = (
        f"({best.attack} on {best.seen}: {shown.get('value')}; chance {shown.get('chance')}, without protection "
        f"{shown.get('unprotected')})"
    )
    asset = best.asset
    if best.verdict == "as if unprotected":
        return f"{_GETS[asset]} {figures}"
    if best.verdict == "in part":
        return f"{_GETS_PART[asset]} {figures}"
    if best.verdict == "nothing":
        return f"{_GETS_NOTHING[asset]} by these attacks {figures}"
    if best.verdict == "not decided":
        return f"was measured on {asset} with too few samples to decide {figures}"
    if best.verdict == "not effective":
        return f"gets nothing that says anything about {asset}: no attack is effective here even without protection"
    return f"was not measured on {asset}: {best.reason.rstrip('.') or best.verdict}"


def _rank(one: Finding) -> tuple[int, float, float]:
    return _ORDER.index(one.verdict), -_reached(one), -(one.value or 0.0)


def _reached(one: Finding) -> float:
    if one.value is None or one.chance is None or one.unprotected is None or one.unprotected == one.chance:
        return 0.0
    return (one.value - one.chance) / (one.unprotected - one.chance)
