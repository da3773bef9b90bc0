"""What stands below NADP-FL's Table 4: how it was run, what its noise means, and what adaptive attacks get."""

from __future__ import annotations

from collections.abc import Iterator

from papers.cells import Results
from papers.nadp_attacks_table import (
    ALL,
    FULL,
    LDP,
    ROUNDS,
    SHARPEST,
    STRONGER,
    TABLE4,
    TAUS,
    Form,
    average,
    ledger,
    listed,
    nadp_row,
    name_of,
)


def notes(results: Results, form: Form, quick: bool) -> Iterator[str]:
    """What the paper claims, how it was run here, and what adaptive attacks get."""
    if quick:
        yield (
            f"Quick form: handwritten digits of 8 × 8, N = {form.clients}, τ = "
            f"{', '.join(f'{tau:g}' for tau in form.taus)}. It shows directions; its figures are not the paper's cells."
        )
    yield (
        f"The paper: N = 100, q = 0.8, T = 200, one sample a client, the first round, L-BFGS, 300 iterations, best of "
        f"10. Here: N = {form.clients}, {form.cohort} clients in the round, lenet-sigmoid, {form.victims} victims with "
        "two starts of up to 500 iterations each; figures are the best of them, means over victims in brackets, and "
        "claims are judged by the means. Views come from a recorded run, and attacks run in processes that get nothing "
        "else. The paper's LPIPS network is not to be had: beside it stands "
        "the squared distance in the features of a classifier trained on the held-out part, over that of two different "
        "pictures. The paper's table has a third data set without a name, which is left out."
    )
    yield (
        f"Clipping: C = {form.clip:g} instead of the paper's 10, above every gradient here, so that none is shortened "
        "and iDLG's hard labels can match; noise grows with C, and is beside these gradients about 1.3 times what it "
        "would be beside shortened ones. "
        "Victims are clients whose gradient is at least C/3 long: shorter ones drown sooner."
    )
    yield _on_noise(results, form)
    yield (
        "Is NADP's advantage real? At equal utility both leave the same noise in the sum, and NADP's pair noise comes "
        "on top for whoever cannot take it off: against few colluders the advantage is real, and it is what the ledger "
        "says. That it reads ε = 5 against 20√2 is bookkeeping: NADP's residual noise is LDP's (with one seed even "
        "the same draw), so that once all others collude it proves what LDP proves. "
        f"{_on_epsilon(results, form)}"
    )
    yield from _adaptive(results, form)


def _on_noise(results: Results, form: Form) -> str:
    spent = ledger(results, form.data[0], form.fitted, LDP, "epsilon")
    worth = "" if spent is None else f"; by the ledger, LDP's ε is then {spent:.2g}, which is no privacy"
    fitted = (
        f"LDP's printed figures need noise as if |D_i| were about {form.fitted}, though one sample is used{worth}. "
        "That size is our fit to LDP's printed MSE"
        if form is FULL
        else f"|D_i| = {form.fitted} is noise through which attacks see something{worth}"
    )
    return (
        "How much noise: LDP's σ is 2C·√(2qT·ln(1/δ))/(ε·|D_i|). With one sample a client, as the paper has it, |D_i| "
        "= 1, and the noise is hundreds of times as long as the gradient: nothing is reconstructed under LDP or NADP. "
        f"{fitted}: claims about attacks are judged there. {_not_met(results, form)}{_elsewhere(results, form)}"
    )


def _not_met(results: Results, form: Form) -> str:
    """How far NADP's figures are from the printed ones at the size that was fitted to LDP's."""
    told = []
    for data in form.data:
        ratios = []
        for row in map(nadp_row, form.taus):
            ours = listed(results, data, form.fitted, row, "idlg mse")
            if ours and data in TABLE4:
                ratios.append(f"{min(ours) / TABLE4[data][row]['mse'][1]:.2g}")
        if ratios:
            told.append(f"{data} {', '.join(ratios)}")
    if not told:
        return ""
    names = ", ".join(f"{tau:g}" for tau in form.taus)
    return (
        "That one fit does not bring NADP's printed figures about: iDLG's best MSE here over the printed one, at τ = "
        f"{names}: {'; '.join(told)}. "
    )


def _elsewhere(results: Results, form: Form) -> str:
    """How LDP and NADP compare under the other sizes."""
    told = []
    for size in (one for one in form.sizes if one != form.fitted):
        for data in form.data:
            found = [average(results, data, size, row, "idlg mse") for row in (LDP, *map(nadp_row, form.taus))]
            if None not in found:
                told.append(f"{data}, |D_i| = {size}: {', '.join(f'{one:.2g}' for one in found)}")
    names = ", ".join(f"τ = {tau:g}" for tau in form.taus)
    return f"iDLG's MSE under the other sizes (LDP, then NADP at {names}): {'; '.join(told)}." if told else ""


def _on_epsilon(results: Results, form: Form) -> str:
    rows = (LDP, ALL, *(nadp_row(tau) for tau in form.taus))
    spent = {name_of(row): ledger(results, form.data[0], 1, row, "epsilon") for row in rows}
    there = [f"{name}: {value:.3g}" for name, value in spent.items() if value is not None]
    if not there:
        return ""
    return (
        f"ε of the whole run by the ledger, |D_i| = 1: {', '.join(there)}. LDP's formula is one for small ε and for "
        "the expected number of rounds, so that it proves less than it states; NADP's has room, since it counts two "
        "queries a round and all rounds."
    )


def _adaptive(results: Results, form: Form) -> Iterator[str]:
    """What those get who adapt: to several rounds, to what others computed, to noise in the gradient."""
    size, most = form.fitted, nadp_row(TAUS[0])
    for data in form.data:
        told = []
        rounds = average(results, data, size, ROUNDS, "rounds")
        if rounds is not None and (both := _compared(results, data, size, (ROUNDS, "averaging"), (most, "idlg"))):
            told.append(
                f"the mean of {rounds:.3g} rounds' uploads, τ = 0.9: MSE {both[0]:.3g} instead of {both[1]:.3g}"
            )
        if both := _compared(results, data, size, (SHARPEST, "idlg"), (most, "idlg")):
            told.append(f"what honest others computed being known, τ = 0.9: {both[0]:.3g} instead of {both[1]:.3g}")
        told += [
            f"Inverting Gradients on {name_of(row)}: {both[0]:.3g} instead of iDLG's {both[1]:.3g}"
            for row in form.stronger
            if (both := _compared(results, data, size, (row, STRONGER), (row, "idlg")))
        ]
        if told:
            yield f"Who adapts, {data}, |D_i| = {size}: {'; '.join(told)} (the same victims in both)."
    yield (
        "Averaging leaves 1/√n of the noise after n rounds with the same samples; after the run's 160 it would be a "
        "thirteenth, which is what the ledger charges for. Labels are told by the sign of the last layer's bias "
        "gradient long after pictures are gone. Under much noise DLG fits the noise, and ends farther from the truth "
        "than the mean picture is: a large MSE is then a poor attack as much as a good defence. The closed form does "
        "not apply: the first layer is a convolution."
    )


def _compared(
    results: Results, data: str, size: int, one: tuple[str, str], other: tuple[str, str]
) -> tuple[float, float] | None:
    """The mean MSE of two (row, attack) over the victims that both have."""
    found = [listed(results, data, size, row, f"{attack} mse") for row, attack in (one, other)]
    common = list(zip(*found, strict=False))
    if not common:
        return None
    return sum(first for first, _ in common) / len(common), sum(second for _, second in common) / len(common)
