"""Verdicts follow from the figures: what holds, what does not, and what is open."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from papers import Check, Report, find, mpdp, nadp, veil_dp
from papers.cells import Results, difference, mean, standard_error
from papers.nadp import printed as published
from papers.report import above, all_above, beside_trained, decided, paper, rising, shown, within


def results(accuracies: Mapping[str, float], *, seeds: int = 1) -> Results:
    return {name: {seed: {"accuracy": one} for seed in range(1, seeds + 1)} for name, one in accuracies.items()}


def judged(*held: bool | None) -> str:
    checks = tuple(Check(f"claim {number}", one) for number, one in enumerate(held))
    return Report("title", ("a",), (("1",),), checks).verdict


def test_a_verdict_counts_what_held_and_names_what_did_not() -> None:
    assert judged(True, True) == "holds: no number here stands beside a printed one"
    assert judged(True, False, False) == "refuted in part: did not hold: claim 1; did not hold: claim 2"
    assert judged(False) == "refuted: did not hold: claim 0"
    assert judged(True, None) == "so far holds: no number here stands beside a printed one; 1 of 2 claims are open"
    assert judged(True, None, False).startswith("so far refuted in part: did not hold: claim 2; 1 of 3")
    assert judged(None, None).startswith("not decidable")
    assert judged().startswith("not decidable")


def test_what_claims_stand_on_and_claims_of_ours_are_not_counted() -> None:
    def word(*checks: Check) -> str:
        return Report("title", ("a",), (("1",),), checks).word

    held, failed = Check("a", True), Check("b", False)
    unfounded, ours = Check("c", False, premise=True), Check("d", False, ours=True)
    assert word(held, unfounded) == "not decidable"
    assert word(held, failed, unfounded) == "refuted"
    elsewhere = Check("e", True, topic="another")
    assert word(held, elsewhere, unfounded) == "holds"
    assert word(held, failed, elsewhere, unfounded) == "refuted in part"
    assert word(held, ours) == "holds"
    assert word(ours) == "not decidable"
    assert "| ours: d | no |  |" in Report("title", ("a",), (("1",),), (held, ours)).markdown()


def test_a_verdict_says_by_whom_claims_are_refuted() -> None:
    def verdict(*checks: Check) -> str:
        return Report("title", ("a",), (("1",),), checks).verdict

    own, aware = Check("own", True), Check("aware", False, adaptive=True)
    whom = (
        "by the paper's own attacks and comparisons 2 of 2 held, by attackers of ours, who know the scheme, 1 of 2 held"
    )
    found = verdict(own, Check("b", True), aware, Check("c", True, adaptive=True), Check("d", None, adaptive=True))
    assert found == f"so far refuted in part: {whom}; did not hold: aware; 1 of 5 claims are open"
    assert verdict(aware).startswith("refuted: by attackers of ours, who know the scheme, 0 of 1 held; did not hold")
    assert "attackers" not in verdict(Check("own", False), Check("aware", True, adaptive=True))
    assert "attackers" not in verdict(own, Check("ours", False, adaptive=True, ours=True))


def test_a_papers_figure_has_the_decimals_it_was_printed_with() -> None:
    assert [paper(one) for one in (92.05, 50.85, 82.2, 3571, 20.0, -0.01, None, float("nan"))] == [
        *("92.05", "50.85", "82.2", "3571", "20", "-0.01"),
        *("–", "–"),
    ]


def test_a_rival_that_has_not_trained_refutes_nothing() -> None:
    for held in (True, False):
        check = Check("x", held, "+3.0")
        assert beside_trained(check, 30.0, 10.0) == check
        assert beside_trained(check, None, 10.0) == beside_trained(check, 9.0, None) == check
        found = beside_trained(check, 11.9, 10.0)
        assert (found.held, found.seen) == (None, "+3.0; the rival has not trained: 11.9 %, by a guess 10.0")


def test_a_figure_is_above_a_bound_where_its_seeds_can_tell() -> None:
    assert decided({1: 2.1}) is True
    assert decided({1: -2.1}) is False
    assert decided({1: 1.9}) is None
    assert decided({}) is None
    # Student's t, 95 %: 4.30 standard errors with three seeds, 12.7 with two.
    assert decided({1: 1.0, 2: 1.1, 3: 1.2}) is True
    assert decided({1: 1.0, 2: 1.2}, 0.9) is None
    assert decided({1: 1.0, 2: 2.0, 3: 3.0}) is None
    assert decided({1: 1.0, 2: 1.0}, 0.999) is True
    assert decided({1: 10.0}, 9.5, leeway=0.4) is True
    assert above("x", {1: 1.0}).held is None
    assert "too near to +0 to tell" in above("x", {1: 1.0}).seen
    assert above("x", {1: -3.0}, below=True).held is True
    assert above("x", {}).seen == "not run"
    # The difference of two margins is made of four runs: with one seed it has to be as much larger.
    assert decided({1: 3.9}, runs=4) is None
    assert decided({1: 4.1}, runs=4) is True


def test_two_accuracies_are_near_each_other_where_seeds_can_tell() -> None:
    assert within("x", {1: 0.1}, 2.0).held is None
    assert within("x", {1: 4.1}, 2.0).held is False
    assert within("x", {1: -4.1}, 2.0).held is False
    assert within("x", {1: 0.1, 2: 0.2, 3: 0.3}, 2.0).held is True
    assert within("x", {1: -2.4, 2: -2.5, 3: -2.6}, 2.0).held is False
    assert within("x", {1: 1.0, 2: 2.0, 3: 3.0}, 2.0).held is None
    assert within("x", {}, 2.0).seen == "not run"


def test_of_several_figures_one_that_surely_does_not_decides() -> None:
    high, near, low = {1: 10.0}, {1: 1.0}, {1: -10.0}
    assert all_above("x", {"a": high, "b": high}).held is True
    assert all_above("x", {"a": high, "b": near}).held is None
    assert all_above("x", {"a": low, "b": near, "c": {}}).held is False
    assert all_above("x", {"a": low}, below=True).held is True
    assert all_above("x", {"a": low, "b": high}, below=True).held is False
    assert all_above("x", {}).held is None


def test_means_errors_and_differences_are_taken_seed_by_seed() -> None:
    values = {1: 70.0, 2: 72.0, 3: 74.0}
    assert mean(values) == 72.0
    assert standard_error(values) == pytest.approx(2.0 / 3**0.5)
    assert shown(values) == "72.0 ± 1.2"
    assert shown({1: -0.5}, signed=True) == "-0.5"
    assert shown({}) == "–"
    assert difference(values, {2: 70.0, 3: 75.0, 4: 1.0}) == {2: 2.0, 3: -1.0}


def test_rising_means_no_step_down_and_a_rise_that_seeds_can_tell() -> None:
    def rises(*values: float | None) -> bool | None:
        seeds = [{} if one is None else dict.fromkeys((1, 2, 3), one) for one in values]
        return rising("grows", seeds, ["a", "b", "c"][: len(values)]).held

    assert rises(1.0, 2.0, 3.0) is True
    assert rises(1.0, 3.0, 2.0) is False
    assert rises(1.0, None, 2.0) is True
    assert rises(1.0, 1.0) is None
    assert rises(None, 2.0) is None
    one = [{1: 10.0}, {1: 14.0}, {1: 12.5}]
    assert rising("grows", one, ["a", "b", "c"]).held is True
    assert rising("grows", one[:1] + one[2:], ["a", "c"], leeway=3.0).held is None
    found = rising("grows", [{1: 10.0}, {1: 7.0}], ["a", "b"], unit=" s")
    assert (found.held, found.seen) == (False, "a: +10.0 s, b: +7.0 s; not from a → b (-3.0 s)")


def there(value: float | None) -> float:
    assert value is not None
    return value


def papers_own(data: str = "fashion-mnist") -> dict[str, float]:
    found = {}
    for clients in (10, 50, 100):
        found[nadp.cell(data, clients, "fedavg")] = there(published(data, clients, scheme="fedavg"))
        for epsilon in (3.0, 2.0, 1.0, 0.5):
            local, paired = (there(published(data, clients, scheme=one, epsilon=epsilon)) for one in ("ldp", "nadp"))
            found[nadp.cell(data, clients, "ldp", epsilon)] = local
            found[nadp.cell(data, clients, "nadp", epsilon)] = paired
            found[nadp.cell(data, clients, "nadp-exact", epsilon)] = paired + 1.0
    return found


def test_the_papers_own_figures_reproduce_its_table() -> None:
    report = find("nadp-table1").report(results(papers_own()), False)
    assert report.verdict == "so far reproduced: 3 of 11 claims are open"  # two data sets, and N = 10 with one seed
    row = next(row for row in report.rows if row[:3] == ("fashion-mnist", "100", "0.5"))
    assert row[3:] == ("83.23 / 83.2", "52.81 / 52.8", "77.71 / 77.7", "78.7", "–", "24.9 / +24.9")


def test_other_data_sets_are_judged_once_they_were_run() -> None:
    report = find("nadp-table1").report(results(papers_own() | papers_own("mnist"), seeds=3), False)
    assert report.verdict == "so far reproduced: 1 of 21 claims are open"
    assert len(report.checks) == (2 + 2 + 2 + 3 + 2) + (2 + 4 + 2 + 3 + 2) + 1
    # On IMDb the paper's own figures do not grow: 1.92 points at N = 10, 1.71 at N = 50.
    report = find("nadp-table1").report(results(papers_own() | papers_own("imdb"), seeds=3), False)
    assert [one.claim for one in report.checks if one.held is False] == [
        "imdb: the margin NADP − LDP grows with N at ε = 3"
    ]


def test_all_figures_of_the_published_table_are_shown() -> None:
    rows = find("nadp-table1").report({}, False).rows
    assert len(rows) == 4 * 3 * 4
    assert all("–" not in one.split(" / ")[0] for row in rows for one in row[3:6])


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({("ldp", 100, 0.5): 60.0}, "the margin is at least 20 points at N = 100, ε = 0.5"),
        ({("nadp", 10, 1.0): 95.0}, "the margin NADP − LDP grows with N at ε = 1"),
        ({("nadp", 10, 0.5): 70.0}, "NADP is ahead of LDP at every N and ε"),
        ({("ldp", 50, 1.0): 55.0}, "the margin grows as ε falls at N = 50"),
        ({("nadp", 100, 0.5): 70.0}, "NADP loses at most 3 points from N = 10 to 100 at ε = 0.5"),
        ({("ldp", 100, 0.5): 76.0}, "LDP loses more than NADP from N = 10 to 100 at ε = 0.5"),
    ],
)
def test_a_table_that_differs_in_one_claim_says_which(change: dict[tuple[str, int, float], float], claim: str) -> None:
    figures = papers_own()
    for (scheme, clients, epsilon), value in change.items():
        figures[nadp.cell("fashion-mnist", clients, scheme, epsilon)] = value
    report = find("nadp-table1").report(results(figures, seeds=3), False)
    assert report.word == "refuted in part"
    assert any(one.held is False and one.claim.startswith(claim) for one in report.checks)


def test_cells_that_were_not_run_leave_claims_open_and_places_empty() -> None:
    wanted = ("n10/", "n100/")
    figures = {name: one for name, one in papers_own().items() if any(part in name for part in wanted)}
    report = find("nadp-table1").report(results(figures), False)
    assert report.standing == "so far reproduced"
    row = next(row for row in report.rows if row[:3] == ("fashion-mnist", "50", "1"))
    assert row[3] == "82.44 / –"
    only = {name: one for name, one in figures.items() if "n10/" in name}
    assert find("nadp-table1").report(results(only, seeds=3), False).verdict.startswith("so far holds: no number")


def test_the_published_table_is_found_by_scheme_and_epsilon() -> None:
    assert published("mnist", 100, scheme="ldp", epsilon=0.5) == 10.44
    assert published("mnist", 10, scheme="nadp", epsilon=3.0) == 82.20
    assert published("fashion-mnist", 50, scheme="fedavg") == 82.44
    assert published("fashion-mnist", 50, scheme="nadp", epsilon=4.0) is None
    assert published("fashion-mnist", 40, scheme="nadp", epsilon=1.0) is None


def mpdp_figures(**losses: float) -> dict[str, float]:
    """Accuracies of one bench at one ε, as losses against FedAvg's 80."""
    bench = mpdp._ACCURACY["full"]["benches"][0]
    found = {mpdp.accuracy_cell(bench, "fedavg"): 80.0}
    for scheme, loss in losses.items():
        found[mpdp.accuracy_cell(bench, scheme.replace("_", "-"), bench["epsilons"][1])] = 80.0 - loss
    return found


@pytest.mark.parametrize(
    ("losses", "held"),
    [
        (
            {"mp_cdp": 4.0, "mpdp": 5.0, "mpdp_naive": 30.0, "tp_smc": 6.0, "tp_smc_half": 4.0, "tp_smc_two": 50.0},
            (True, True, True, False, True),
        ),
        ({"mp_cdp": 4.0, "mpdp": 5.6, "mpdp_naive": 30.0, "tp_smc": 5.0}, (False, True, False, None, None)),
        ({"mp_cdp": 4.0, "mpdp": 2.4, "mpdp_naive": 13.0}, (True, False, None, None, None)),
        ({"mp_cdp": 0.5, "mpdp": 9.0, "mpdp_naive": 0.0, "tp_smc": 12.0}, (False, True, None, None)),
        ({"mp_cdp": 11.0, "mpdp": 30.0, "mpdp_naive": 50.0, "tp_smc": 12.0}, (False, False, None, None)),
        ({"mp_cdp": 4.0, "mpdp": 4.0}, (True, None, None, None, None)),
    ],
)
def test_mpdp_is_judged_at_every_budget_and_a_collapse_where_central_noise_costs_one_to_ten_points(
    losses: dict[str, float], held: tuple[bool | None, ...]
) -> None:
    report = find("mpdp-accuracy").report(results(mpdp_figures(**losses), seeds=3), False)
    assert tuple(one.held for one in of_one_budget(report)) == held


def of_one_budget(report: Report) -> list[Check]:
    """What is judged of the bench and the ε of `mpdp_figures`."""
    return [one for one in report.checks if one.claim.startswith("fashion-mnist K = 5 ε = 10: ")]


def test_at_a_small_budget_mpdp_loses_little_and_tp_smc_more() -> None:
    bench = mpdp._ACCURACY["full"]["benches"][0]

    def judged(**losses: float) -> tuple[bool | None, ...]:
        figures = {mpdp.accuracy_cell(bench, "fedavg"): 80.0}
        for scheme, loss in losses.items():
            figures[mpdp.accuracy_cell(bench, scheme.replace("_", "-"), 1.0)] = 80.0 - loss
        checks = find("mpdp-accuracy").report(results(figures, seeds=3), False).checks
        return tuple(one.held for one in checks if "loses" in one.claim and "ε = 1:" in one.claim and one.seen)[:2]

    assert judged(mpdp=5.0, tp_smc=20.0) == (True, True)
    assert judged(mpdp=7.0, tp_smc=5.0) == (False, False)
    usual = {cell.name: cell.usual for cell in find("mpdp-accuracy").cells(False)}
    assert [usual[mpdp.accuracy_cell(bench, "mpdp", epsilon)] for epsilon in (1.0, 3.0, 5.0)] == [False, False, True]


def test_claims_of_a_bench_whose_plain_training_gets_nowhere_are_not_counted() -> None:
    figures = mpdp_figures(mp_cdp=4.0, mpdp=4.0, mpdp_naive=30.0)
    assert find("mpdp-accuracy").report(results(figures, seeds=3), False).word == "holds"
    low = {name: value - 40.0 for name, value in figures.items()}
    found = find("mpdp-accuracy").report(results(low, seeds=3), False)
    assert any(one.held for one in of_one_budget(found))
    assert found.judged == ()
    assert "what it stands on did not hold: fashion-mnist K = 5: without DP the model trains" in found.verdict


def test_a_rival_that_is_as_accurate_at_every_budget_is_stopped_by_something_else_than_noise() -> None:
    bench = mpdp._ACCURACY["full"]["benches"][0]
    figures = mpdp_figures(mp_cdp=4.0, mpdp=5.0, mpdp_naive=30.0, tp_smc=40.0)
    places = {epsilon: mpdp.accuracy_cell(bench, "tp-smc", epsilon) for epsilon in bench["epsilons"]}

    def judged(**changed: float) -> Check:
        made = {places[float(epsilon[1:])]: one for epsilon, one in changed.items()}
        report = find("mpdp-accuracy").report(results({**figures, **made}, seeds=3), False)
        return next(one for one in report.checks if one.claim.endswith("above TP-SMC with all clients honest"))

    alike = judged(e5=39.5, e20=40.2, e40=40.4)
    assert alike.held is None
    assert "39.5 to 40.4 % at every ε: its clipped steps stop it" in alike.seen
    assert judged(e5=20.0, e20=60.0, e40=70.0).held is True


def test_accuracies_over_budgets_grow_but_for_the_naive_schemes() -> None:
    bench = mpdp._ACCURACY["full"]["benches"][0]

    def judged(naive: float) -> dict[str, bool | None]:
        ends = (bench["epsilons"][0], bench["epsilons"][-1])
        curves = {"mpdp": (60.0, 70.0), "mp-cdp": (70.0, 60.0), "mpdp-naive": (20.0, 20.0 + naive)}
        curves |= {"tp-smc": (30.0, 50.0), "tp-smc-two": (50.0, 30.0)}
        figures = {
            mpdp.accuracy_cell(bench, scheme, epsilon): value
            for scheme, curve in curves.items()
            for epsilon, value in zip(ends, curve, strict=True)
        }
        report = find("mpdp-accuracy").report(results(figures, seeds=3), False)
        start = f"{bench['data']} K = {bench['clients']}: "
        every = {one.claim.removeprefix(start): one.held for one in report.checks if one.claim.startswith(start)}
        return {claim: held for claim, held in every.items() if "with ε" in claim}

    assert judged(-3.0) == {
        "the accuracy of MP-DP grows with ε": True,
        "the accuracy of MP-CDP grows with ε": False,
        "the accuracy of TP-SMC with all clients honest grows with ε": True,
        "the accuracy of TP-SMC with half of the clients honest grows with ε": None,
        "the accuracy of TP-SMC with two clients honest grows with ε": False,
        "the accuracy of MP-DP-Naive does not grow with ε": True,
    }
    assert judged(9.0)["the accuracy of MP-DP-Naive does not grow with ε"] is False


def test_mpdp_of_one_seed_is_open_where_the_bound_is_near() -> None:
    figures = mpdp_figures(mp_cdp=4.0, mpdp=5.6, mpdp_naive=13.7)
    assert [one.held for one in of_one_budget(find("mpdp-accuracy").report(results(figures), False))] == [None] * 5
    low = {name: value - 55.0 for name, value in mpdp_figures(mp_cdp=4.0, mpdp_naive=10.0).items()}
    found = of_one_budget(find("mpdp-accuracy").report(results(low, seeds=3), False))[1]
    assert (found.held, found.seen) == (None, "-6.0 ± 0.0, of 21.0 %: no room for it")


def test_mpdp_shows_the_epsilon_of_the_run_beside_that_of_a_round() -> None:
    report = find("mpdp-accuracy").report({}, False)
    assert report.columns[2:4] == ("ε of a round", "ε of the run")
    assert all(float(row[3]) > float(row[2]) for row in report.rows)


def test_sampling_is_judged_by_the_crossing() -> None:
    figures = {}
    for clients in (20, 50, 100):
        for rate in (0.1, 0.3, 0.5):
            figures[nadp.sampled(clients, rate, "fedavg")] = 90.0
            figures[nadp.sampled(clients, rate, "ldp")] = 70.0
            figures[nadp.sampled(clients, rate, "nadp")] = 70.0 + 100 * (rate - (2 / clients) ** 0.5)
    assert find("nadp-fig3").report(results(figures), False).word == "holds"
    figures[nadp.sampled(20, 0.1, "nadp")] = 73.0
    assert "LDP is ahead at N = 20" in find("nadp-fig3").report(results(figures), False).verdict
    figures[nadp.sampled(20, 0.1, "nadp")] = 70.0 + 100 * (0.1 - (2 / 20) ** 0.5)
    figures |= {nadp.sampled(100, rate, "nadp"): 65.0 for rate in (0.1, 0.3)}
    moved = "the more clients there are, the lower the sampling rate"
    assert moved in find("nadp-fig3").report(results(figures), False).verdict
    figures[nadp.sampled(50, 0.1, "fedavg")] = 11.0
    assert "without DP the model trains" in find("nadp-fig3").report(results(figures), False).verdict


def test_dropouts_are_judged_by_what_they_cost() -> None:
    curves = {"fedavg": (90, 90, 89), "ldp": (40, 37, 34), "nadp-1.0": (50, 38, 30), "nadp-1.4": (46, 36, 30.5)}
    reduced, *_, whole = nadp.panels(False)
    figures = {
        reduced.cell(rate, label): float(one)
        for label, curve in curves.items()
        for rate, one in zip((0.1, 0.3, 0.5), curve, strict=True)
    }

    def verdict(**changed: float) -> str:
        places = {f"{label}@{rate:g}": reduced.cell(rate, label) for label in curves for rate in (0.1, 0.3, 0.5)}
        return (
            find("nadp-fig4")
            .report(results({**figures, **{places[at]: one for at, one in changed.items()}}, seeds=3), False)
            .verdict
        )

    assert verdict().startswith("so far holds")  # of one number of clients no crossing moves
    assert "dropouts cost NADP more than LDP" in verdict(**{"nadp-1.0@0.1": 44.0, "nadp-1.0@0.5": 39.0})
    assert "NADP is at most 5 points behind LDP where half drop out" in verdict(**{"nadp-1.0@0.5": 28.0})
    assert "λ = 1.4 costs at most 5 points" in verdict(**{"nadp-1.4@0.1": 44.0})
    assert "NADP is ahead of LDP where few drop out" in verdict(**{"nadp-1.0@0.1": 39.5})
    assert "NADP is behind LDP where half drop out" in verdict(**{"nadp-1.0@0.5": 35.0})
    assert "LDP's accuracy falls as more drop out" in verdict(**{"ldp@0.3": 41.0})
    assert "NADP's accuracy falls as more drop out" in verdict(**{"nadp-1.0@0.3": 51.0})
    assert "a larger λ is no more accurate" in verdict(**{"nadp-1.4@0.3": 39.5})
    assert "without DP, dropouts cost at most 2 points" in verdict(**{"fedavg@0.5": 85.0})
    figures[whole.cell(0.1, "ldp")] = 80.0
    assert verdict().endswith("22 of 31 claims are open")


def test_what_a_larger_strength_costs_falls_with_the_number_of_clients() -> None:
    few, many, *_ = nadp.panels(False)

    def held(*costs: float) -> bool | None:
        figures = {
            panel.cell(rate, label): 50.0 - cost * (label == "nadp-1.4")
            for panel, cost in zip((few, many), costs, strict=True)
            for rate in (0.1, 0.3, 0.5)
            for label in ("nadp-1.0", "nadp-1.4")
        }
        report = find("nadp-fig4").report(results(figures, seeds=3), False)
        return next(one.held for one in report.checks if "λ = 1.4 costs less the more clients" in one.claim)

    assert held(8.0, 3.0) is True
    assert held(3.0, 8.0) is False
    assert held(3.0, 3.0) is None


def test_nadps_advantage_grows_as_epsilon_falls_and_with_the_number_of_clients() -> None:
    entry = find("nadp-fig3")

    def held(strict: float, *by_clients: float) -> list[bool | None]:
        figures = {nadp.sampled(20, 0.5, "ldp", 0.5): 40.0, nadp.sampled(20, 0.5, "nadp", 0.5): 40.0 + strict}
        for clients, margin in zip((20, 50, 100), by_clients, strict=True):
            figures |= {nadp.sampled(clients, 0.5, "ldp"): 50.0, nadp.sampled(clients, 0.5, "nadp"): 50.0 + margin}
        report = entry.report(results(figures), False)
        return [one.held for one in report.checks if "advantage" in one.claim]

    assert held(20.0, 10.0, 15.0, 20.0) == [True, None, None, True]
    assert held(5.0, 10.0, 15.0, 5.0) == [False, None, None, False]
    cells = {one.name: one for one in entry.cells(False)}
    assert cells["mnist/n20/q0.5/eps0.5/nadp"].settings["epsilon"] == 0.5
    assert {one.usual for one in cells.values() if "/eps0.5/" in one.name} == {False}
    assert not any("/eps" in one.name for one in entry.cells(True))


def test_every_panel_of_the_dropouts_is_there_and_at_the_papers_size_with_its_settings() -> None:
    assert [(one.clients, one.epsilon) for one in nadp.panels(False) if one.whole] == [
        (clients, epsilon) for clients in (25, 50, 100) for epsilon in (2.0, 1.0)
    ]
    cells = {one.name: one for one in find("nadp-fig4").cells(False)}
    cell = cells["paper/n100/eps1/d0.5/nadp-1.2"]
    assert (cell.settings["rounds"], cell.settings["clip"], cell.samples, cell.usual) == (200, 10.0, None, False)


def test_the_veils_cost_is_open_until_every_epsilon_is_there() -> None:
    figures = {veil_dp.cell("nadp", epsilon): 90.0 for epsilon in (1.0, 3.0, 8.0)}
    figures |= {veil_dp.cell("veil-dp", epsilon): 88.0 for epsilon in (1.0, 3.0)}
    assert find("veil-dp-accuracy").report(results(figures), False).checks[0].held is None
    figures[veil_dp.cell("veil-dp", 8.0)] = 86.0
    assert find("veil-dp-accuracy").report(results(figures), False).checks[0].held is True
    figures[veil_dp.cell("veil-dp", 8.0)] = 84.0
    assert find("veil-dp-accuracy").report(results(figures), False).checks[0].held is False
