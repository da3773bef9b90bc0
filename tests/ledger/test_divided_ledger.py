"""The ledgers of ParaAegis and its baselines: against whom what is proven, why, and what they admit to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedveil.client_held.client import MOST_MISREAD
from fedveil.ledger.accountant import CLIENTS, COLLUSION, SERVER
from fedveil.ledger.gaussian import epsilon_of, mu_of, sigma_of
from fedveil.ledger.statement import OUTSIDER, Ledger, Line
from fedveil.runs.planning import Planned, Question, plan_run

# The paper's figures: θ = 1, |D| = 947, T = 50, N = 10, ε = 1, δ = 10⁻⁵.
SAMPLES, ROUNDS, CLIENTS_IN_ALL, DELTA = 947, 50, 10, 1e-5


def planned(scheme: str, **options: float | str) -> Planned:
    given = {"epsilon": 1.0, **options} if scheme != "ckks-fedavg" else options
    return plan_run(Question(scheme=scheme, samples=(SAMPLES,) * CLIENTS_IN_ALL, rounds=ROUNDS, options=given))


def ledger_of(scheme: str, **options: float | str) -> Ledger:
    return planned(scheme, **options).ledger


def verdicts(ledger: Ledger) -> dict[str, str]:
    return {one.adversary: one.verdict for one in ledger.lines}


# --- who learns what

OPENED, ALIKE, SUMS = "divided.hidden", "vote.tags", "the sums of what is hidden"
DP, GIVEN, SUM, UNREAD, NONE = "differential privacy", "conditional", "aggregate only", "ciphertexts only", "none"

CASES: dict[str, tuple[str, dict[str, float | str], tuple[str, str | None, str]]] = {
    # against the server, the server with one client, other clients
    "dp-fedavg": ("dp-fedavg", {}, (DP, None, DP)),
    "ckks-fedavg": ("ckks-fedavg", {}, (UNREAD, NONE, SUM)),
    "ckks-fedavg under pads": ("ckks-fedavg", {"cipher": "pads"}, (UNREAD, SUM, SUM)),
    "serial": ("serial", {}, (UNREAD, DP, DP)),
    "serial under pads": ("serial", {"cipher": "pads"}, (UNREAD, DP, DP)),
    "paraaegis": ("paraaegis", {}, (GIVEN, NONE, SUM)),
    "pads, tags": ("paraaegis", {"cipher": "pads"}, (GIVEN, NONE, SUM)),
    "ckks, histogram": ("paraaegis", {"vote": "histogram"}, (GIVEN, NONE, SUM)),
    "pads, histogram": ("paraaegis", {"cipher": "pads", "vote": "histogram"}, (GIVEN, SUM, SUM)),
    "ckks, by lot": ("paraaegis", {"strategy": "random"}, (GIVEN, NONE, SUM)),
    "pads, by lot": ("paraaegis", {"strategy": "random", "cipher": "pads"}, (GIVEN, SUM, SUM)),
    "ckks, random votes": ("paraaegis", {"strategy": "random-votes"}, (GIVEN, NONE, SUM)),
    "pads, random votes": ("paraaegis", {"strategy": "random-votes", "cipher": "pads"}, (GIVEN, SUM, SUM)),
    "smallest changes": ("paraaegis", {"strategy": "min", "cipher": "pads"}, (GIVEN, NONE, SUM)),
    "share 0": ("paraaegis", {"share": 0.0}, (DP, None, DP)),
    "share 0, pads": ("paraaegis", {"share": 0.0, "cipher": "pads"}, (DP, None, DP)),
    "share 1": ("paraaegis", {"share": 1.0}, (UNREAD, NONE, SUM)),
    "share 1, pads": ("paraaegis", {"share": 1.0, "cipher": "pads"}, (UNREAD, SUM, SUM)),
    "a share that falls from 1": ("paraaegis", {"share": 1.0, "share_decay": 0.9}, (GIVEN, NONE, SUM)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_scheme_says_what_each_adversary_learns(case: str) -> None:
    scheme, options, (server, colluding, clients) = CASES[case]
    found = verdicts(ledger_of(scheme, **options))
    assert found[SERVER] == found[OUTSIDER] == server
    assert found.get(COLLUSION) == colluding
    assert found[CLIENTS] == clients


@pytest.mark.parametrize("case", CASES)
def test_a_ledger_reads_the_same_from_its_file(case: str) -> None:
    import json

    from fedveil.runs.folder import ledger_from

    scheme, options, _ = CASES[case]
    ledger = ledger_of(scheme, **options)
    assert ledger_from(json.loads(json.dumps(ledger.as_data(), allow_nan=False))) == ledger


def test_the_hidden_part_is_protected_by_computation_alone_and_the_ledger_says_so() -> None:
    ckks = ledger_of("ckks-fedavg").line(SERVER)
    assert ckks.epsilon is None
    assert ckks.why == "sees nothing but CKKS under a key that all clients share"
    assumed = " | ".join(ckks.assumptions)
    for part in ("CKKS with the parameters chosen is secure", "no client gives away the secret key", "cipher = pads"):
        assert part in assumed
    pads = ledger_of("ckks-fedavg", cipher="pads").line(SERVER)
    assert "pads that only clients can take off" in pads.why
    assumed = " | ".join(pads.assumptions)
    assert "no client gives away" not in assumed
    for part in (
        "lets it read sums, though nobody's own values",
        "at most a third of each client's neighbours",
    ):
        assert part in assumed


@pytest.mark.parametrize("scheme", ["ckks-fedavg", "paraaegis"])
def test_under_ckks_a_server_that_changes_hidden_sums_is_outside_the_claim(scheme: str) -> None:
    ledger = ledger_of(scheme, cipher="ckks")
    (passed_on,) = (one for one in ledger.line(SERVER).assumptions if "passes sums and models on as it got them" in one)
    assert MOST_MISREAD == 3  # and once it can be read
    assert "up to four times a run, and in every new run again" in passed_on
    assert any("a server can add to sums what it likes" in one for one in ledger.unprotected)
    assert not any("is found out whatever is hidden" in one for one in ledger.notes)


@pytest.mark.parametrize("scheme", ["ckks-fedavg", "paraaegis", "serial"])
def test_under_pads_nothing_is_assumed_of_what_the_server_passes_on(scheme: str) -> None:
    ledger = ledger_of(scheme, cipher="pads")
    assert not any("passes sums and models on" in one for line in ledger.lines for one in line.assumptions)
    assert not any("a server can add to sums what it likes" in one for one in ledger.unprotected)
    assert any("is found out whatever is hidden, but for a chance of 2^-65" in one for one in ledger.notes)


def test_with_one_client_on_its_side_the_server_opens_ckks_and_reads_tags() -> None:
    line = ledger_of("paraaegis").line(COLLUSION)
    assert line.why == f"with one client on its side, sees uncovered: {ALIKE}, {OPENED}"
    assert line.epsilon is None
    assert ledger_of("paraaegis", cipher="pads").line(COLLUSION).why.endswith(f"uncovered: {ALIKE}")
    assert ledger_of("paraaegis", vote="histogram").line(COLLUSION).why.endswith(f"uncovered: {OPENED}")
    assert ledger_of("ckks-fedavg").line(COLLUSION).why.endswith(f"uncovered: {OPENED}")


def test_under_pads_one_client_gives_the_server_sums_of_the_honest_and_no_more() -> None:
    both = ledger_of("paraaegis", cipher="pads", vote="histogram").line(COLLUSION)
    assert SUMS in both.why
    assert "over a round's honest clients" in both.why
    assert "every upload's rest under noise" in both.why
    alone = ledger_of("ckks-fedavg", cipher="pads").line(COLLUSION)
    assert alone.why == "with one client on its side, sees the sum over a round's honest clients and nothing else"


def test_clients_read_sums_without_noise_so_no_epsilon_is_claimed_against_them() -> None:
    for scheme, options in (("ckks-fedavg", {}), ("paraaegis", {}), ("paraaegis", {"cipher": "pads"})):
        ledger = ledger_of(scheme, **options)  # type: ignore[arg-type]
        line = ledger.line(CLIENTS)
        assert (line.epsilon, line.unit) == (None, "")
        assert "without noise: no (ε, δ)" in line.why
        assert any("every client reads them, without noise" in one for one in ledger.unprotected)
        assert any("each of them holds it" in one for one in ledger.unprotected)


@pytest.mark.parametrize("cipher", ["ckks", "pads"])
def test_noise_under_the_cipher_holds_against_a_server_with_a_client_too(cipher: str) -> None:
    """Each client's noise is enough for itself: what the key opens is still private, sum or not."""
    line = ledger_of("serial", cipher=cipher).line(COLLUSION)
    assert line.epsilon == pytest.approx(1.0, abs=1e-6)
    assert line.why == "with one client on its side, sees every upload under noise"


def test_what_the_vote_reveals_is_said_and_the_way_out_is_named() -> None:
    tags = ledger_of("paraaegis")
    assert f"what is alike in {ALIKE}" in tags.line(SERVER).why
    (said,) = (one for one in tags.unprotected if one.startswith("votes:"))
    for part in ("every overlap between clients' votes", "whose data are alike", "reads every vote", "histogram"):
        assert part in said
    histogram = ledger_of("paraaegis", vote="histogram")
    assert ALIKE not in histogram.line(SERVER).why
    (said,) = (one for one in histogram.unprotected if one.startswith("votes:"))
    assert "every client reads how many voted for each parameter" in said
    # Ballots travel under pads, whatever hides the winners.
    assert any("at most a third" in one for one in histogram.line(SERVER).assumptions)
    for options in ({"strategy": "random"}, {"share": 0.0}, {"share": 1.0}):
        assert not any(one.startswith("votes:") for one in ledger_of("paraaegis", **options).unprotected)  # type: ignore[arg-type]


def test_of_the_model_the_server_sees_what_is_not_hidden_and_in_which_order() -> None:
    some = ledger_of("paraaegis").unprotected
    assert any("noised changes in the model's order" in one for one in some)
    nothing = ledger_of("paraaegis", share=0.0).unprotected
    assert any("sees every change to it" in one for one in nothing)
    everything = ledger_of("paraaegis", share=1.0).unprotected
    assert not any("changes" in one or "change to it" in one for one in everything)


# --- how much noise, and what it is worth


@pytest.mark.parametrize("scheme", ["dp-fedavg", "serial", "paraaegis"])
def test_a_whole_update_is_clipped_so_a_client_moves_it_by_twice_the_bound(scheme: str) -> None:
    """S = 2θ on an update, at client level: σ = 2θ·√T/μ, 53 for each of the paper's clients."""
    answer = planned(scheme)
    assert answer.exact is not None
    each = answer.exact.own[0] / SAMPLES
    assert each == pytest.approx(2.0 * math.sqrt(ROUNDS) / mu_of(1.0, DELTA), rel=1e-6)
    assert each == pytest.approx(2.0 * math.sqrt(ROUNDS) * sigma_of(1.0, DELTA), rel=1e-6)
    assert 52.5 < each < 53.5
    units = {one.unit for one in answer.ledger.lines if one.epsilon is not None}
    assert units == {"all data of one client"}
    assert all("replace one client's data" in one.relation for one in answer.ledger.lines if one.unit)


def test_twice_the_bound_takes_twice_the_noise() -> None:
    one, two = planned("paraaegis").exact, planned("paraaegis", clip=2.0).exact
    assert one is not None
    assert two is not None
    assert two.own[0] == pytest.approx(2 * one.own[0], rel=1e-9)


@pytest.mark.parametrize("scheme", ["dp-fedavg", "serial", "paraaegis"])
def test_the_papers_noise_for_one_epsilon_gives_twenty_thousand(scheme: str) -> None:
    answer = planned(scheme, accounting="paper")
    assert answer.paper is not None
    each = answer.paper.own[0] / SAMPLES
    by_formula = 2.0 / SAMPLES * math.sqrt(2 * ROUNDS * math.log(1 / DELTA))
    assert each == pytest.approx(by_formula, rel=1e-9)
    real = epsilon_of(2.0 * math.sqrt(ROUNDS) / by_formula, DELTA)
    assert 19_000 < real < 21_000
    line = answer.ledger.line(COLLUSION if scheme == "serial" else SERVER)
    assert line.epsilon == pytest.approx(real, rel=1e-5)  # rounding to the grid is counted
    assert f"{real:,.0f}" in line.result
    (note,) = (one for one in answer.ledger.notes if "not a DP guarantee" in one)
    assert "for ε = 1" in note
    assert f"{real:,.4g}" in note or f"{real:,.0f}" in note
    assert answer.exact is not None
    assert answer.exact.own[0] / answer.paper.own[0] == pytest.approx(736, rel=0.01)


@pytest.mark.parametrize("scheme", ["dp-fedavg", "serial", "paraaegis", "ckks-fedavg"])
def test_exact_accounting_needs_no_such_warning(scheme: str) -> None:
    ledger = ledger_of(scheme)
    assert not any("not a DP guarantee" in one for one in ledger.notes)
    figures = [one.epsilon for one in ledger.lines if one.epsilon is not None]
    assert all(one <= 1.0 + 1e-9 for one in figures)


# --- given what is hidden


@pytest.mark.parametrize("options", [{"vote": "histogram"}, {"strategy": "random"}, {"strategy": "random-votes"}])
def test_without_the_condition_every_upload_counts(options: dict[str, float | str]) -> None:
    """A hidden sum moves everybody's next update, each by no more than its own bound: μ² = K·T·μ₀²."""
    line = ledger_of("paraaegis", **options).line(SERVER)
    assert line.mu is not None
    assert line.epsilon == pytest.approx(1.0, abs=1e-6)
    assert line.outright == pytest.approx(epsilon_of(math.sqrt(CLIENTS_IN_ALL) * line.mu, DELTA), rel=1e-6)
    assert line.outright == pytest.approx(3.62, abs=0.01)
    assert "given what is hidden" in line.result
    assert "any case ε = 3.619" in line.result
    assert any("in any case counts every upload of everybody" in one for one in line.assumptions)


def test_where_votes_are_compared_there_is_no_figure_without_the_condition() -> None:
    line = ledger_of("paraaegis").line(SERVER)
    assert line.outright is None
    assert "in any case" not in " ".join((line.result, *line.assumptions))
    assert any("the winners and their sums as given" in one for one in line.assumptions)


@pytest.mark.parametrize("strategy", ["random", "random-votes"])
@pytest.mark.parametrize("vote", ["tags", "histogram"])
def test_a_lot_depends_on_nobodys_data_and_the_condition_does_not_name_it(strategy: str, vote: str) -> None:
    ledger = ledger_of("paraaegis", strategy=strategy, vote=vote)
    assumed = " ".join(ledger.line(SERVER).assumptions)
    assert "with the hidden sums as given" in assumed
    assert "winners" not in assumed
    assert not any(text.startswith("votes:") for text in ledger.unprotected)
    said = [note for note in ledger.notes if "tell nothing about data" in note]
    assert len(said) == (strategy == "random-votes")


@pytest.mark.parametrize("options", [{"share": 0.0}])
def test_where_nothing_is_hidden_there_is_no_condition(options: dict[str, float | str]) -> None:
    line = ledger_of("paraaegis", **options).line(SERVER)
    assert (line.verdict, line.outright) == (DP, None)
    assert "given" not in " ".join((line.result, *line.assumptions))


def test_a_plan_for_very_many_clients_gives_no_sum_it_has_not_got() -> None:
    """Beyond some hundreds of clients a plan charges one worst client for all: no figure rather than a wrong one."""
    question = Question(
        scheme="paraaegis",
        samples=(20,) * 800,
        rounds=3,
        cohort=400,
        options={"strategy": "random", "cipher": "pads", "epsilon": 1.0},
    )
    assert plan_run(question).ledger.line(SERVER).outright is None


def test_a_line_without_a_condition_prints_as_before() -> None:
    line = Line(SERVER, "differential privacy", "why", epsilon=0.30125, delta=1e-5)
    assert line.result == "(ε = 0.3013, δ = 1e-05)"
    assert replace(line, epsilon=20_314.6).result == "(ε = 20,315, δ = 1e-05)"
    given = replace(line, verdict="conditional")
    assert given.result == "(ε = 0.3013, δ = 1e-05)\ngiven what is hidden"
    assert replace(given, outright=1.5).result.endswith("given what is hidden; in\nany case ε = 1.5")
