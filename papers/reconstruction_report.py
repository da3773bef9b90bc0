"""MP-DP's Table 2 beside ours, and which of its claims hold against whom."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedveil.trials.trial import Score
from papers.attacking import from_text, interval, proven
from papers.cells import Results
from papers.reconstruction_rows import (
    ADAPTIVE,
    BLIND,
    NAMES,
    NOISE,
    PHI,
    PRINTED,
    SCHEMES,
    Form,
    Place,
    best,
    figures_of,
    form_of,
    listed,
    reference_of,
    score,
    verdict,
)
from papers.report import EMPTY, Check, Report

MARGIN = 3.0
"""Decibels above the mean picture below which nothing was reconstructed."""

EXACT = 40.0
"""Decibels at which no eye tells a reconstruction from the original."""

_NOT_BUILT = ("PILE", "TP-SMC", "HybridAlpha")


def report(results: Results, quick: bool) -> Report:
    """The table and its verdict."""
    form = form_of(quick)
    return Report(
        title=f"MP-DP, Table 2: reconstruction by the server from one upload{' (quick form)' if quick else ''}",
        columns=(
            *("data", "network", "batch", "scheme", "paper: PSNR, Test-MSE, Feat-MSE", "noise / gradient"),
            *("gradient attacks here: PSNR (dB) [95 %]", f"adaptive here ({PHI}): PSNR (dB) [95 %]"),
            *("best here: Test-MSE, features, labels told", "mean picture", "random picture", "no protection"),
        ),
        rows=tuple(_rows(results, form)),
        checks=tuple(_checks(results, form)),
        notes=tuple(_notes(results, form)),
        quick=quick,
    )


def _rows(results: Results, form: Form) -> Iterator[tuple[str, ...]]:
    for number, place in enumerate(form.places):
        for scheme in SCHEMES:
            if number == 0 or figures_of(results, place, scheme):
                yield _row(results, place, scheme, main=number == 0)
        if number == 0:
            for name in _NOT_BUILT:
                yield (*_where(place), name, _printed(name), *(EMPTY,) * 3, "not built", *(EMPTY,) * 3)


def _where(place: Place) -> tuple[str, ...]:
    return place.data, place.model, str(place.batch)


def _row(results: Results, place: Place, scheme: str, *, main: bool) -> tuple[str, ...]:
    top = best(results, place, scheme, place.attacks)
    bare = best(results, place, "fedavg", place.matching)
    noise = listed(results, place, scheme, "noise")
    read = EMPTY if not noise else "unreadable" if min(noise) < 0 else f"{sum(noise) / len(noise):.2g}"
    return (
        *_where(place),
        NAMES[scheme],
        _printed(scheme) if main else EMPTY,
        read,
        "; ".join(_attack(results, place, scheme, one) for one in place.matching),
        _attack(results, place, scheme, ADAPTIVE, named=False),
        EMPTY if top is None else _beside(results, place, scheme, top),
        _level(score(results, place, scheme, BLIND)),
        _level(score(results, place, scheme, NOISE)),
        EMPTY if bare is None else f"{_level(score(results, place, 'fedavg', bare))} ({bare})",
    )


def _printed(scheme: str) -> str:
    return EMPTY if scheme not in PRINTED else ", ".join(f"{one:.2f}" for one in PRINTED[scheme])


def _attack(results: Results, place: Place, scheme: str, attack: str, *, named: bool = True) -> str:
    ours = score(results, place, scheme, attack)
    start = f"{attack} " if named else ""
    if ours is None:
        refused = any(f"{attack} reason" in one for one in figures_of(results, place, scheme))
        return f"{start}{'not applicable' if refused else EMPTY}"
    word = verdict(results, place, scheme, attack)
    told = "attack not effective here" if word == "not effective" else word
    return f"{start}{_level(ours)}" + (f" {told}" if told else "")


def _level(found: Score | None) -> str:
    if found is None:
        return EMPTY
    return f"{found.value:.1f}" + ("" if found.low is None else f" [{found.low:.1f}, {found.high:.1f}]")


def _beside(results: Results, place: Place, scheme: str, attack: str) -> str:
    parts = [score(results, place, scheme, attack, what) for what in ("mse", "features", "labels")]
    shown = [EMPTY if one is None else form.format(one.value) for one, form in zip(parts, _FORMS, strict=True)]
    return f"{', '.join(shown)} ({attack})"


_FORMS = ("{:.3g}", "{:.2g}", "{:.0%}")


def _checks(results: Results, form: Form) -> Iterator[Check]:
    main = form.places[0]
    yield _gradient_hidden(results, main)
    yield _cdp_hides(results, main)
    for place in form.places:
        if place.batch == 1 and (place is main or figures_of(results, place, "mpdp")):
            yield _gives_away(results, place)
    yield _adaptive_hidden(results, main)
    yield _as_plain(results, main)
    yield _veiled(results, form)


def _effective(results: Results, place: Place) -> str | None:
    """The best attack without protection, if it gets anywhere there."""
    attack = best(results, place, "fedavg", place.matching)
    works = attack is not None and verdict(results, place, "fedavg", attack) == "as if unprotected"
    return attack if works else None


def _gradient_hidden(results: Results, place: Place) -> Check:
    claim = f"{place.name}: MP-DP's noise keeps attacks on the gradient from reconstructing (the paper's claim)"
    return _nothing(results, place, "mpdp", place.matching, claim)


def _nothing(results: Results, place: Place, scheme: str, attacks: tuple[str, ...], claim: str) -> Check:
    """Whether every attack stays within the margin of the mean picture; open where none works without protection."""
    found = {one: score(results, place, scheme, one) for one in attacks}
    blind = score(results, place, scheme, BLIND)
    there = {name: one for name, one in found.items() if one is not None}
    seen = ", ".join(f"{name}: {_level(one)}" for name, one in there.items())
    if not there or blind is None:
        return Check(claim, None, seen)
    seen = f"{seen}; mean picture {blind.value:.1f} dB"
    beyond = any(one.surely > blind.value + MARGIN for one in there.values())
    if not beyond and _effective(results, place) is None:
        return Check(claim, None, f"{seen}; attack not effective here even without protection")
    return Check(claim, not beyond, seen)


def _cdp_hides(results: Results, place: Place) -> Check:
    claim = f"{place.name}: MP-CDP hides uploads from the server better than FedAvg (12.15 against 13.56 dB printed)"
    attack = _effective(results, place)
    noise = listed(results, place, "mp-cdp", "noise")
    if not noise or attack is None:
        return Check(claim, None)
    ours, bare = (score(results, place, one, attack) for one in ("mp-cdp", "fedavg"))
    if ours is None or bare is None or bare.low is None:
        return Check(claim, None)
    seen = f"{attack}: {_level(ours)} against {_level(bare)}; the gradients differ by {max(noise):.1g} of their length"
    return Check(claim, ours.value < bare.low, seen)


def _gives_away(results: Results, place: Place) -> Check:
    claim = f"{place.name}: {PHI}, which travels bare, gives a batch of one away whatever noise covers the gradient"
    ours = score(results, place, "mpdp", ADAPTIVE)
    told = interval(listed(results, place, "mpdp", f"{ADAPTIVE} labels"))
    if ours is None or not proven(reference_of(results), ADAPTIVE):
        return Check(claim, None)
    worst = min(listed(results, place, "mpdp", f"{ADAPTIVE} psnr"))
    seen = f"PSNR {_level(ours)} dB, worst {worst:.1f}" + ("" if told is None else f", labels told {told.value:.0%}")
    blind = score(results, place, "mpdp", BLIND)
    assert blind is not None
    exact = " (indistinguishable)" if worst > EXACT else ""
    return Check(claim, ours.surely > max(20.0, blind.value + MARGIN), seen + exact)


def _adaptive_hidden(results: Results, place: Place) -> Check:
    claim = f"{place.name}: MP-DP keeps the server from reconstructing, {PHI} included"
    ours, blind = (score(results, place, "mpdp", one) for one in (ADAPTIVE, BLIND))
    if ours is None or blind is None or not proven(reference_of(results), ADAPTIVE):
        return Check(claim, None)
    return Check(
        claim, ours.surely <= blind.value + MARGIN, f"{_level(ours)} dB; the mean picture has {blind.value:.1f}"
    )


def _as_plain(results: Results, place: Place) -> Check:
    claim = f"{place.name}: lossless hides nothing from the server (ours: it protects the model, not uploads)"
    noise = listed(results, place, "lossless", "noise")
    if not noise:
        return Check(claim, None)
    return Check(claim, max(noise) < 1e-2, f"its gradient is FedAvg's up to {max(noise):.1g} of its length")


def _veiled(results: Results, form: Form) -> Check:
    claim = "veil-secagg leaves every attack at what one gets who saw nothing (mean picture + 3 dB)"
    there = [place for place in form.places if figures_of(results, place, "veil-secagg")]
    parts = {place.name: _nothing(results, place, "veil-secagg", place.attacks, claim) for place in there}
    seen = "; ".join(f"{name}: {part.seen}" for name, part in parts.items())
    if any(part.held is False for part in parts.values()):
        return Check(claim, False, seen)
    main = parts.get(form.places[0].name)
    return Check(claim, None if main is None else main.held, seen)


def _notes(results: Results, form: Form) -> Iterator[str]:
    if form.quick:
        yield "Quick form: handwritten digits of 8 × 8 beside the paper's figures for CIFAR-10. It shows directions."
    yield (
        f"The first round of a recorded run, {form.clients} clients, each a victim with its whole batch; ε = 3 of one "
        "round, δ = 1e-5, S = 1 assumed. Intervals are bootstraps over victims. The paper attacks ResNet-20 with a "
        "generative attack; here the sigmoid LeNet, on which attacks are known to work, is the main row: an attack "
        "that fails proves nothing. No veil fits a sigmoid, so that on it only the last layer is veiled; the noise on "
        "uploads is MP-DP's in full. mlp and cnn are veiled whole. All train on the square loss, for which the head "
        "noise is exact."
    )
    yield (
        "Units: pictures lie between 0 and 1, for on standardised ones the sigmoids saturate and attacks lose their "
        "signal. Test-MSE is given for standardised pictures, whose values span 4.1, as the paper's is: 10·log₁₀(4.1²/"
        "2.00) = 9.2, its PSNR. On CIFAR-10 one who answers with the mean picture gets about 13.0 dB, with uniform "
        "noise about 8.5: the paper's 13.56 dB without protection is half a decibel above the mean picture, and its "
        "MP-CDP (12.15) below it. Its figures compare attacks that hardly worked. Feature distances are over that of "
        "two different pictures in a classifier of our own, not the paper's scale."
    )
    yield (
        "The class of a batch of one is read off the last layer's gradient before matching; with larger batches "
        "classes are granted to attacks, an upper bound. `generative` has a prior from half of the held-out part, of "
        "all classes. 'noise / gradient' is ‖ĝ − g‖/‖g‖ of what the server reads from the upload."
    )
    yield (
        "MP-CDP's noise is added by the server to the sum, so that uploads reach it bare: it is no protection from the "
        "server. PILE, TP-SMC and HybridAlpha are not built; their figures are the paper's. CIFAR-100 is left out."
    )
    reached = reference_of(results)
    told = [
        f"{one} {float(value):.0f} dB of {reached[f'{one} asked']:g} asked"
        for one in form.attacks
        if isinstance(value := reached.get(f"{one} reference"), int | float)
    ]
    if told:
        yield f"References (unprotected digits): {', '.join(told)}."
    for place in form.places:
        for scheme in SCHEMES:
            for figures in figures_of(results, place, scheme):
                yield from (
                    f"{place.cell(scheme)}, {attack}: {figures[f'{attack} reason']}"
                    for attack in place.attacks
                    if f"{attack} reason" in figures and scheme != "fedavg"
                )


def sheet_rows(results: Results, quick: bool) -> list[tuple[str, Tensor]]:
    """Originals, then for every scheme what the best attack on the gradient made of them, and what Φ gave away."""
    found = []
    for place in form_of(quick).places[:2]:
        for scheme in SCHEMES:
            for figures in figures_of(results, place, scheme)[:1]:
                if scheme == SCHEMES[0] and (originals := from_text(figures, "originals")) is not None:
                    found.append((f"{place.name} originals", originals))
                both = (best(results, place, scheme, place.matching), ADAPTIVE)
                found += [
                    (f"{place.cell(scheme)} {attack}", made)
                    for attack in both
                    if (made := from_text(figures, f"{attack} pictures")) is not None
                ]
    return found
