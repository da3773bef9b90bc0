"""A run's books: nothing shown is forgotten, whatever kills the run, and nothing goes over the target."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driving import drive
from federation import job
from fedveil.config import RunConfig
from fedveil.engine import LocalEngine
from fedveil.errors import ConfigError
from fedveil.ledger.accountant import CLIENTS, COLLUSION, SERVER
from fedveil.ledger.correlated import charges
from fedveil.ledger.gaussian import epsilon_of, mu_of
from fedveil.protocol.messages import Request, Train
from fedveil.protocol.phases import Gathered, RoundBegins, RoundDone
from fedveil.roles.client import ClientRole
from fedveil.roles.server import ServerRole
from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from fedveil.runs.job import Job, job_from_config
from fedveil.runs.loop import client_role, conduct, fresh_state, server_role, train_job
from fedveil.runs.privacy_journal import PrivacyJournal

Small = Callable[..., RunConfig]
Interrupted = Callable[..., Path]

NADP: dict[str, Any] = {
    "scheme": "nadp",
    "model_options": {"depth": 1, "width": 4},
    "momentum": 0.0,
    "batch_size": 0,
    "rounds": 4,
    "checkpoint_every": 1,
}


class Killed(BaseException):
    """Stands in for kill -9."""


@pytest.fixture
def killed_within(monkeypatch: pytest.MonkeyPatch, small: Small) -> Callable[..., Path]:
    """A run, or its resumption, that dies while clients are at work in round `within`."""

    def stop(folder: Path, *, within: int, resumed: bool = False, **changes: Any) -> Path:
        original = ClientRole.handle_many

        def fatal(self: ClientRole, states: Any, request: Request, *rest: Any) -> Any:
            if isinstance(request, Train) and request.round + 1 == within:
                raise Killed
            return original(self, states, request, *rest)

        with monkeypatch.context() as patched:
            patched.setattr(ClientRole, "handle_many", fatal)
            if resumed:
                with pytest.raises(Killed):
                    session.resume(folder, quiet=True)
            else:
                with pytest.raises(Killed):
                    session.run(small(**{**NADP, **changes}), folder, quiet=True)
        return folder

    return stop


def ledger_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "ledger.json").read_text())  # type: ignore[no-any-return]


def line(ledger: dict[str, Any], adversary: str) -> dict[str, Any]:
    return next(one for one in ledger["lines"] if one["adversary"] == adversary)


def one_round_of(folder: Path, adversary: str = SERVER) -> float:
    """μ² of one round by the stored settings."""
    config = RunConfig.from_mapping(RunFolder(folder).stored_settings())
    one = job_from_config(config)
    privacy_journal = PrivacyJournal(one)
    cohort = tuple(range(len(one.pool)))
    privacy_journal.begin(RoundBegins(0, 0, cohort))
    privacy_journal.end(RoundDone(0, None, cohort, Gathered(cohort, {}, (), 0, 0)))
    assert privacy_journal.accountant is not None
    return float(privacy_journal.accountant.spent[adversary].max())


def test_a_whole_run_spends_its_target_and_not_more(small: Small, tmp_path: Path) -> None:
    session.run(small(**NADP, epsilon=2.0), tmp_path / "run", quiet=True)
    ledger = ledger_in(tmp_path / "run")
    epsilons = [one["epsilon"] for one in ledger["lines"]]
    assert max(epsilons) <= 2.0
    assert max(epsilons) == pytest.approx(2.0, rel=1e-6)
    assert ledger["rounds"] == 4
    begun = [json.loads(row) for row in (tmp_path / "run" / "privacy.jsonl").read_text().splitlines()]
    assert [row["begin"][0] for row in begun if "begin" in row] == [0, 1, 2, 3]
    assert [row["end"][0] for row in begun if "end" in row] == [0, 1, 2, 3]


def test_a_round_that_was_killed_in_the_middle_is_paid_for(killed_within: Any, tmp_path: Path) -> None:
    """Round 3 was asked for twice: the model has 4 rounds in it, the ledger 5."""
    folder = killed_within(tmp_path / "run", within=3, accounting="paper")
    session.resume(folder, quiet=True)
    ledger = ledger_in(folder)
    assert ledger["rounds"] == 5
    assert line(ledger, SERVER)["mu"] == pytest.approx(math.sqrt(5 * one_round_of(folder)), rel=1e-9)
    assert [row["round"] for row in RunFolder(folder).metrics()] == [1, 2, 3, 4]


def test_a_round_killed_again_and_again_is_paid_for_every_time(killed_within: Any, tmp_path: Path) -> None:
    folder = killed_within(tmp_path / "run", within=3, accounting="paper")
    for _ in range(3):
        killed_within(folder, within=3, resumed=True)
    session.resume(folder, quiet=True)
    assert ledger_in(folder)["rounds"] == 8


def test_rounds_repeated_after_a_resume_are_counted_twice_in_the_ledger_and_once_in_the_model(
    interrupted: Interrupted, tmp_path: Path
) -> None:
    """Killed after round 3 with a checkpoint of round 2: round 3 is done again."""
    folder = interrupted(tmp_path / "run", after=3, **{**NADP, "checkpoint_every": 2, "accounting": "paper"})
    session.resume(folder, quiet=True)
    ledger = ledger_in(folder)
    assert ledger["rounds"] == 5
    assert line(ledger, SERVER)["mu"] == pytest.approx(math.sqrt(5 * one_round_of(folder)), rel=1e-9)
    assert [row["round"] for row in RunFolder(folder).metrics()] == [1, 2, 3, 4]


def test_a_target_stops_the_run_before_repetitions_exceed_it(interrupted: Interrupted, tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run", after=3, **{**NADP, "checkpoint_every": 2})
    said: list[str] = []
    summary = session.resume(folder, quiet=True, say=said.append)
    assert summary["rounds"] == 3
    assert "would bring clients over the privacy target" in summary["stopped"]
    assert any("The run ends after 3 rounds" in text for text in said)
    ledger = ledger_in(folder)
    assert ledger["rounds"] == 4
    assert max(one["epsilon"] for one in ledger["lines"]) <= 3.0


def test_more_rounds_after_the_end_are_not_paid_for_by_noise_that_was_never_added(small: Small, tmp_path: Path) -> None:
    """Raising the number of rounds means more noise from now on, and none more in rounds that are over."""
    folder = tmp_path / "run"
    session.run(small(**NADP), folder, quiet=True)
    spent = line(ledger_in(folder), CLIENTS)["mu"]
    summary = session.resume(folder, changes={"rounds": 8}, quiet=True)
    assert summary["rounds"] == 4
    assert summary["stopped"]
    assert line(ledger_in(folder), CLIENTS)["mu"] == pytest.approx(spent, rel=1e-12)


def test_more_rounds_in_the_middle_get_what_is_left_of_the_target(interrupted: Interrupted, tmp_path: Path) -> None:
    """Two of four rounds are spent, at a quarter each; what is left pays for four at an eighth."""
    folder = interrupted(tmp_path / "run", after=2, **NADP)
    summary = session.resume(folder, changes={"rounds": 8}, quiet=True)
    # Round 2 had no checkpoint yet: it is repeated, at the new price.
    assert summary["rounds"] == 5
    ledger = ledger_in(folder)
    epsilon = max(one["epsilon"] for one in ledger["lines"])
    assert epsilon <= 3.0
    assert epsilon == pytest.approx(3.0, rel=1e-6)
    assert ledger["rounds"] == 6
    assert summary["stopped"]


@pytest.mark.parametrize("torn", ["begin", "end"])
def test_a_torn_line_hides_nothing_that_comes_after_it(
    killed_within: Any, small: Small, tmp_path: Path, torn: str
) -> None:
    """A kill may tear a line; later attempts write behind it, and must be found there."""
    folder = killed_within(tmp_path / "run", within=3, accounting="paper")
    journal = folder / "privacy.jsonl"
    rows = journal.read_text().splitlines()
    assert "begin" in rows[-1]
    if torn == "begin":
        journal.write_text("\n".join(rows)[:-10])
        charged_before = 2
    else:
        journal.write_text("\n".join([*rows, '{"end":[2,0],"arri']))
        charged_before = 3
    for _ in range(2):
        killed_within(folder, within=3, resumed=True)
    session.resume(folder, quiet=True)
    assert ledger_in(folder)["rounds"] == charged_before + 2 + 2


def test_a_kill_while_noise_is_being_revealed_is_charged_with_what_was_asked_for(tmp_path: Path) -> None:
    one = job(scheme="nadp", rounds=40, loss=None, clients=6, epsilon=20.0)
    journal = tmp_path / "privacy.jsonl"
    privacy_journal = PrivacyJournal(one, journal)
    cohort = tuple(range(6))
    privacy_journal.begin(RoundBegins(0, 0, cohort, b"graph"))
    revealed = tuple((k, 5) for k in range(5))
    privacy_journal.begin(RoundBegins(0, 0, cohort, b"graph", cohort[:5], revealed))
    again = PrivacyJournal(one, journal)
    assert again.accountant is not None
    assert again.first is not None
    assert again.accountant.rounds == 1
    assert again.accountant.spent[SERVER] == pytest.approx(charges(again.first, revealed=revealed))
    assert again.accountant.spent[SERVER][5] == pytest.approx(4 * 6 / again.first.residual.sum(), rel=1e-5)


def test_the_server_tells_what_it_will_reveal_before_it_asks(tmp_path: Path) -> None:
    one = job(scheme="nadp", rounds=40, loss=None, clients=6, epsilon=20.0)
    order: list[str] = []

    def begin(begins: RoundBegins) -> None:
        order.append(f"begins, {0 if begins.arrived is None else len(begins.revealed)} revealed")

    def absent(request: Request, client: int) -> bool:
        if not order or order[-1] != type(request).__name__:
            order.append(type(request).__name__)
        return isinstance(request, Train) and client == 5

    privacy_journal = PrivacyJournal(one)
    engine = LocalEngine(client_role(one), one.pool, absent=absent)
    done: list[RoundDone] = []

    def boundary(boundary: RoundDone) -> None:
        done.append(boundary)
        raise Killed

    with pytest.raises(Killed):
        drive(engine, server(one, privacy_journal).run(), on_round=boundary, on_begin=begin)
    assert order == ["Hello", "Directory", "Nonces", "begins, 0 revealed", "Train", "begins, 5 revealed", "Repair"]
    assert len(done[0].revealed) == 5


def server(one: Job, privacy_journal: PrivacyJournal) -> ServerRole:
    return ServerRole(
        one.scheme,
        one.architecture,
        fresh_state(one),
        secrets=one.secrets,
        cohort=one.cohort,
        optimiser=one.optimiser,
        rounds=one.config.rounds,
        accountant=privacy_journal.accountant,
    )


def test_a_client_that_would_go_over_the_target_leaves_the_cohort_and_the_others_go_on() -> None:
    """Repaired for in the first round, client 2 has paid for about six; it stays until its target is reached."""
    one = job(scheme="nadp", rounds=12, loss=None, clients=6)
    privacy_journal = PrivacyJournal(one)
    cohorts: list[tuple[int, ...]] = []
    stops: list[str] = []

    def boundary(done: RoundDone) -> None:
        cohorts.append(done.cohort)
        assert not done.failed
        privacy_journal.end(done)

    engine = LocalEngine(
        client_role(one),
        one.pool,
        absent=lambda request, client: isinstance(request, Train) and (request.round, client) == (0, 2),
    )
    drive(
        engine,
        server(one, privacy_journal).run(),
        on_round=boundary,
        on_begin=privacy_journal.begin,
        on_stop=stops.append,
    )
    assert cohorts[0] == tuple(range(6))
    assert (0, 1, 3, 4, 5) in cohorts
    first_without = cohorts.index((0, 1, 3, 4, 5))
    assert 4 < first_without < 11
    assert set(cohorts[first_without:]) == {(0, 1, 3, 4, 5)}
    assert privacy_journal.accountant is not None
    limit = mu_of(3.0, 1e-5) ** 2
    assert all(float(spent.max()) <= limit * (1 + 1e-9) for spent in privacy_journal.accountant.spent.values())
    assert float(privacy_journal.accountant.spent[COLLUSION][2]) > 0.9 * limit


def test_failed_rounds_cost_what_the_server_saw_and_nothing_towards_clients(tmp_path: Path) -> None:
    one = job(scheme="nadp", rounds=4, loss=None)
    journal = tmp_path / "privacy.jsonl"
    privacy_journal = PrivacyJournal(one, journal)
    cohort = tuple(range(5))
    privacy_journal.begin(RoundBegins(0, 0, cohort, b"graph"))
    privacy_journal.end(RoundDone(0, None, cohort, Gathered(cohort[:4], {}, (4,), 0, 0), failed="no"))
    assert privacy_journal.accountant is not None
    for accountant in (privacy_journal.accountant, PrivacyJournal(one, journal).accountant):
        assert accountant is not None
        assert accountant.spent[CLIENTS].max() == 0
        assert accountant.spent[SERVER].min() > 0


def test_a_replayed_journal_gives_the_same_account(tmp_path: Path) -> None:
    one = job(scheme="nadp", rounds=5, loss=None, clients=8, cohort=5, collusion=0.2, neighbours=3, how="size")
    journal = tmp_path / "privacy.jsonl"
    outcome = train_job(one, state=fresh_state(one), journal=journal)
    replayed = PrivacyJournal(one, journal)
    assert outcome.privacy_journal.accountant is not None
    assert replayed.accountant is not None
    assert replayed.accountant.rounds == 5
    for name, spent in outcome.privacy_journal.accountant.spent.items():
        assert replayed.accountant.spent[name].tolist() == spent.tolist()
        assert spent.max() > 0


EVERYBODY = {"server": "dp", "server and colluding clients": "dp", "clients": "dp", "outsider": "dp"}
LINES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "fedavg": ({}, {"server": "none", "clients": "none", "outsider": "none"}),
    "lossless": ({"loss": "square"}, {"server": "none", "clients": "none", "outsider": "none"}),
    "ldp": ({}, {"server": "dp", "clients": "dp", "outsider": "dp"}),
    "cdp": ({}, {"server": "none", "clients": "dp", "outsider": "none"}),
    "nadp": ({}, EVERYBODY),
    "nadp, colluding": (
        {"collusion": 0.4},
        EVERYBODY,
    ),
    "veil-dp": ({}, EVERYBODY),
    "veil-dp, masks": ({"cover": "masks"}, EVERYBODY),
    "veil-secagg": (
        {"loss": "square"},
        {
            "server": "aggregate only",
            "server and colluding clients": "aggregate only",
            "clients": "none",
            "outsider": "aggregate only",
        },
    ),
    "mpdp": ({"loss": "square", "neighbours": 2}, {"server": "none", "clients": "none", "outsider": "none"}),
}


@pytest.mark.parametrize("name", LINES)
def test_what_each_scheme_claims_against_whom(name: str) -> None:
    settings, expected = LINES[name]
    one = job(**{"scheme": name.split(",")[0], "rounds": 2, "loss": None, **settings})
    ledger = train_job(one, state=fresh_state(one)).privacy_journal.ledger()
    short = {"differential privacy": "dp"}
    assert {one.adversary: short.get(one.verdict, one.verdict) for one in ledger.lines} == expected
    claims = [one for one in ledger.lines if one.verdict == "differential privacy"]
    assert all(one.epsilon is not None and one.epsilon <= 3.0 for one in claims)
    if claims:
        assert max(one.epsilon or 0.0 for one in claims) == pytest.approx(3.0, rel=1e-6)
        assert all(one.assumptions and one.unit and one.relation and one.delta == 1e-5 for one in claims)
    assert ledger.simulation


def test_mpdp_says_why_nothing_is_claimed() -> None:
    one = job(scheme="mpdp", rounds=2, neighbours=2)
    ledger = train_job(one, state=fresh_state(one)).privacy_journal.ledger()
    assert "upload.gradients" in ledger.line("server").why
    assert any("Ψ and Φ travel bare" in text for text in ledger.unprotected)
    assert any("bounded" in text for text in ledger.unprotected)
    assert ledger.paper is not None
    assert "Eq. (23)" in ledger.paper.formula


def test_the_written_ledger_holds_everything(small: Small, tmp_path: Path) -> None:
    session.run(small(**{**NADP, "rounds": 3}, epsilon=1.0, collusion=0.25), tmp_path / "run", quiet=True)
    ledger = ledger_in(tmp_path / "run")
    assert [one["adversary"] for one in ledger["lines"]] == [
        "server",
        "server and colluding clients",
        "clients",
        "outsider",
    ]
    for one in ledger["lines"]:
        assert one["unit"] == "one record of one client"
        assert one["relation"].startswith("replace one record")
        assert any("clip" in text for text in one["assumptions"])
        assert 0 <= one["worst_client"] < 4
    assert ledger["unprotected"] == ["the model: every client sees it"]
    assert ledger["simulation"] is True
    assert ledger["paper"]["claimed_epsilon"] == 1.0
    assert "σ_down = 4C" in ledger["paper"]["formula"]
    assert ledger["paper"]["saving"] == pytest.approx(
        1 - ledger["paper"]["noise_used"] / ledger["paper"]["noise_by_paper"]
    )
    assert "upload.gradients" in {one["field"] for one in ledger["releases"]}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ledger"] == ledger


def test_secrets_from_the_operating_system_are_no_simulation(small: Small, tmp_path: Path) -> None:
    session.run(small(**{**NADP, "rounds": 1}, secrets="os"), tmp_path / "run", quiet=True)
    assert ledger_in(tmp_path / "run")["simulation"] is False


@pytest.mark.parametrize("scheme", ["ldp", "nadp", "cdp"])
def test_the_papers_noise_is_in_the_units_of_what_was_used(scheme: str) -> None:
    """With the paper's accounting, what was used is what the paper says: the saving is nothing."""
    one = job(scheme=scheme, rounds=3, loss=None, accounting="paper", how="size")
    ledger = train_job(one, state=fresh_state(one)).privacy_journal.ledger()
    assert ledger.paper is not None
    assert ledger.paper.saving == pytest.approx(0.0, abs=1e-12)
    exact = job(scheme=scheme, rounds=3, loss=None, how="size")
    figure = train_job(exact, state=fresh_state(exact)).privacy_journal.ledger().paper
    assert figure is not None
    assert figure.saving is not None
    assert 0.1 < figure.saving < 0.45


def test_a_client_sampled_less_often_spends_less(tmp_path: Path) -> None:
    one = job(scheme="ldp", rounds=10, loss=None, clients=6, cohort=2)
    privacy_journal = train_job(one, state=fresh_state(one)).privacy_journal
    assert privacy_journal.accountant is not None
    spent = privacy_journal.accountant.spent[SERVER]
    took_part = [0] * 6
    for number in range(10):
        for client in one.cohort.draw(number):
            took_part[client] += 1
    assert spent / spent.max() == pytest.approx([count / max(took_part) for count in took_part], rel=1e-9)
    assert len(set(took_part)) > 1


# ---- clients that ask for different ε

EACH = (0.5, 2.0, 2.0, 1.0)
_UPDATE = {"local_steps": 2}
OWN_NOISE: dict[str, dict[str, Any]] = {
    "ldp": {"scheme": "ldp"},
    "ldp, shrinking": {"scheme": "ldp", "noise_decay": 0.8},
    "ldp, some of them": {"scheme": "ldp", "cohort": 2},
    "dp-fedavg": {"scheme": "dp-fedavg", **_UPDATE},
    "serial": {"scheme": "serial", "cipher": "pads", **_UPDATE},
}
SHARED: dict[str, dict[str, Any]] = {
    "nadp": {"scheme": "nadp"},
    "cdp": {"scheme": "cdp"},
    "veil-dp, masks": {"scheme": "veil-dp", "cover": "masks"},
}


def of_each(**settings: Any) -> Any:
    one = job(clients=4, rounds=4, loss="cross-entropy", how="size", epsilon_per_client=EACH, **settings)
    return train_job(one, state=fresh_state(one))


@pytest.mark.parametrize("settings", OWN_NOISE.values(), ids=OWN_NOISE)
def test_every_client_spends_its_own_epsilon_where_noise_is_its_own(settings: dict[str, Any]) -> None:
    outcome = of_each(**settings)
    books = outcome.privacy_journal.accountant
    spent = np.maximum.reduce(list(books.spent.values()))
    proven = [epsilon_of(math.sqrt(one), 1e-5) for one in spent]
    assert all(one <= asked * (1 + 1e-6) for one, asked in zip(proven, EACH, strict=True))
    if "cohort" not in settings:
        assert proven == pytest.approx(EACH, rel=1e-5)
    (said,) = [note for note in outcome.privacy_journal.ledger().notes if "ask for different ε" in note]
    assert "each adds noise for its own" in said
    assert "2 by clients 1, 2: ε = " in said


@pytest.mark.parametrize("settings", SHARED.values(), ids=SHARED)
def test_shared_noise_is_made_for_the_strictest(settings: dict[str, Any]) -> None:
    outcome = of_each(**settings)
    spent = np.maximum.reduce(list(outcome.privacy_journal.accountant.spent.values()))
    assert 0 < epsilon_of(math.sqrt(float(spent.max())), 1e-5) <= 0.5 * (1 + 1e-6)
    (said,) = [note for note in outcome.privacy_journal.ledger().notes if "ask for different ε" in note]
    assert "made for the strictest, 0.5" in said


def test_the_papers_noise_goes_by_each_clients_epsilon() -> None:
    one = job(scheme="ldp", clients=4, rounds=4, accounting="paper", epsilon_per_client=EACH)
    all_alike = job(scheme="ldp", clients=4, rounds=4, accounting="paper", epsilon=1.0)
    layouts = [
        each.scheme.plan.noise_layout(range(4), [10] * 4, [1.0] * 4, seed=b"", round=0) for each in (one, all_alike)
    ]
    ratio = np.sqrt(layouts[0].residual / layouts[1].residual)
    assert ratio.tolist() == pytest.approx([1 / epsilon for epsilon in EACH])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epsilon_per_client": "1,2"}, "names 2 clients, and there are 4"),
        ({"epsilon_per_client": "1,2,0,1"}, "client 2 asks for 0"),
        ({"epsilon_per_client": EACH, "epsilon": 1.0}, "not both"),
        ({"epsilon_per_client": EACH, "secret_sampling": 0.5}, "one noise is found for all"),
    ],
)
def test_epsilons_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job(scheme="ldp", clients=4, rounds=2, **given)


def test_a_journal_with_epsilons_of_each_is_read_again(tmp_path: Path) -> None:
    one = job(scheme="ldp", clients=4, rounds=2, loss="cross-entropy", epsilon_per_client=EACH)
    outcome = train_job(one, state=fresh_state(one), journal=tmp_path / "journal.jsonl")
    again = PrivacyJournal(one, tmp_path / "journal.jsonl").accountant
    assert again is not None
    assert again.spent["server"].tolist() == outcome.privacy_journal.accountant.spent["server"].tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("there", [1, 2, 3])
@pytest.mark.parametrize("scheme", ["veil-dp", "lwe-secagg"])
def test_sums_that_were_never_opened_bring_no_ledger_above_its_target(scheme: str, there: int, tmp_path: Path) -> None:
    """Of four clients under masks nobody can be spared: when one is away the round fails, and nothing opens."""
    given: dict[str, Any] = {"cover": "masks"} if scheme == "veil-dp" else {}
    one = job(scheme=scheme, clients=4, rounds=4, loss=None, epsilon=16.9, **given)
    journal, state = PrivacyJournal(one, tmp_path / "privacy.jsonl"), fresh_state(one)

    def away(request: Request, client: int) -> bool:
        return isinstance(request, Train) and request.round == 3 and client >= there

    engine = LocalEngine(client_role(one), one.pool, absent=away)
    outcome = conduct(one, engine, server_role(one, state, journal.accountant), journal, state=state)
    assert [row["clients"] for row in outcome.rows] == [4, 4, 4, there]
    assert [("failed" in row) for row in outcome.rows] == [False, False, False, True]
    told = [line.epsilon for line in journal.ledger(rounds=4).lines if line.epsilon is not None]
    # Not nothing either: what clients have sent they may yet be asked to open, and their own account says the same.
    assert max(told) == pytest.approx(16.9, rel=1e-6)
    assert max(told) <= 16.9 * (1 + 1e-9)
    assert journal.accountant is not None
    own = max(engine.state_of(client).spent for client in range(there))
    assert own == pytest.approx(max(float(spent.max()) for spent in journal.accountant.spent.values()), rel=1e-9)
    again = PrivacyJournal(one, tmp_path / "privacy.jsonl").accountant
    assert again is not None
    for name, spent in journal.accountant.spent.items():
        assert again.spent[name].tolist() == spent.tolist()
