"""Which trials a scheme gets: all that its adversaries could try, nothing they could not; and no truth in a view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from audit.small_runs import QUICK, folder, job_of, scene, subject_of
from fedveil.audit.attack import attacks
from fedveil.audit.attacks.membership import UNKNOWN
from fedveil.audit.findings import Trial, judged
from fedveil.audit.measures import Labels
from fedveil.audit.trials import References, all_trials
from fedveil.audit.views import ClientView, OutsiderView, ServerHistory, ServerView, from_bytes, to_bytes
from fedveil.errors import NotApplicableError

SEARCHES = ("dlg", "idlg", "inverting", "generative")
ALONE = {f"server/{one}" for one in ("labels", "closed-form", *SEARCHES)}
READ = {"closed-form", "idlg"}
SUM = {f"server/sum/{one}" for one in (*READ, "labels")}
MASKED = {f"server/{one}" for one in READ} | SUM
WIRE = {f"wire/{one}" for one in READ}
MODEL = {
    f"client/{one}"
    for one in (
        *("received", "probe", "parameters"),
        *("membership", "membership-layers", "likelihood", "class-inversion"),
    )
}
NOISE_OFF = {
    f"client/{one}/adaptive" for one in ("membership", "membership-layers", "likelihood", "class-inversion")
} | {"client/calibration"}
VEILED = {"client/alignment"}
PAIRS = {f"server+{count}/{one}" for count in (1, 3) for one in READ}
ROUNDS = {"server/rounds/averaging"}

EXPECTED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "fedavg": ({}, ALONE | ROUNDS | WIRE | MODEL),
    "lossless": ({}, ALONE | ROUNDS | {"server/phi", "wire/phi"} | MODEL | NOISE_OFF | VEILED),
    "lossless without head noise": ({"head_noise": False}, ALONE | ROUNDS | WIRE | MODEL | VEILED),
    "pbpfl": ({}, ALONE | ROUNDS | {"server/phi", "wire/phi"} | MODEL | NOISE_OFF | VEILED),
    "ldp": ({}, ALONE | SUM | ROUNDS | WIRE | MODEL),
    "nadp": ({}, ALONE | SUM | ROUNDS | PAIRS | WIRE | MODEL),
    "mpdp": ({}, ALONE | SUM | ROUNDS | PAIRS | {"server/phi", "wire/phi"} | MODEL | NOISE_OFF | VEILED),
    "veil-secagg": ({}, MASKED | PAIRS | WIRE | MODEL | NOISE_OFF | VEILED),
    "veil-dp": ({}, ALONE | SUM | ROUNDS | PAIRS | WIRE | MODEL | VEILED),
    "veil-dp under masks": ({"cover": "masks"}, MASKED | WIRE | MODEL | VEILED),
    "paraaegis": ({"cipher": "pads"}, MODEL),
    "dbcl": ({}, ALONE | SUM | ROUNDS | WIRE | MODEL | {"client/sketches"}),
    "spn": ({}, ALONE | SUM | ROUNDS | WIRE | MODEL | {"server/polarised"}),
}


def names(trials: Iterator[Trial] | list[Trial]) -> set[str]:
    found = [one.name for one in trials]
    assert len(set(found)) == len(found)
    return set(found)


ALIKE = ("pbpfl", "ldp", "mpdp", "veil-dp")
"""Made of what others here are made of: lossless, nadp without its pairs, both, and nadp."""


@pytest.mark.parametrize(
    "what", [what if what not in ALIKE else pytest.param(what, marks=pytest.mark.slow) for what in EXPECTED]
)
def test_a_scheme_gets_the_trials_that_fit_it(what: str) -> None:
    more, expected = EXPECTED[what]
    assert names(all_trials(scene(scheme=what.split()[0], **more))) == expected


def test_only_a_client_that_is_not_alone_in_the_record_can_have_colluders() -> None:
    one = all_trials(scene(scheme="nadp", samples=1, record_clients="2"))
    assert not any(name.startswith("server+") for name in names(one))
    assert {f"server+{count}/closed-form" for count in (1, 2)} < names(
        all_trials(scene(scheme="nadp", samples=1, record_clients="0-2"))
    )


@pytest.mark.parametrize("scheme", ["nadp", "veil-secagg"])
def test_colluders_took_part_in_the_victims_round(scheme: str) -> None:
    found = scene(scheme=scheme, samples=1, clients=8, cohort=4, record_clients="0-7")
    asked = {(one.round, one.attempt): set(one.to) for one in found.run.record.find(kind="request", phase="train")}
    seen = 0
    for trial in all_trials(found):
        for attempt in trial.attempts:
            if trial.name.startswith("server+"):
                assert isinstance(attempt.view, ServerView)
                view = attempt.view
                assert {view.victim, *view.colluders} <= asked[view.round, view.attempt]
                assert f"with {len(view.colluders)} of 8" in trial.adversary
                seen += 1
    assert seen > 4


def test_rounds_are_averaged_only_over_one_clients_own_samples() -> None:
    assert names(all_trials(scene(scheme="nadp", samples=2))) >= ROUNDS
    assert not ROUNDS & names(all_trials(scene(scheme="nadp", batch_size=2)))
    assert not ROUNDS & names(all_trials(scene(scheme="nadp", samples=2, record_rounds="1,2")))
    assert not ROUNDS & names(all_trials(scene(scheme="nadp", samples=2, clients=24, cohort=2, record_clients="0-23")))
    (trial,) = (one for one in all_trials(scene(scheme="nadp", samples=2)) if one.name in ROUNDS)
    assert trial.seen.startswith("4 of 4 rounds' uploads")
    assert "standing still" not in trial.seen
    (trial,) = (one for one in all_trials(scene(scheme="nadp")) if one.name in ROUNDS)
    assert "standing still" in trial.seen


def table_of_numbers(place: Path) -> Path:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((120, 3), generator=generator)
    rows = [f"{a:.4f},{b:.4f},{c:.4f},{2 * a - b:.4f}" for a, b, c in x.tolist()]
    (place / "numbers.csv").write_text("a,b,c,y\n" + "\n".join(rows) + "\n")
    return place / "numbers.csv"


def test_a_regression_has_no_labels_no_classes_and_no_pictures(tmp_path: Path) -> None:
    given = {"dataset": str(table_of_numbers(tmp_path)), "target": "y", "task": "regression"}
    found = names(all_trials(scene(scheme="lossless", **given)))
    server = {f"server/{one}" for one in ("closed-form", "dlg", "idlg", "inverting", "phi")}
    client = {f"client/{one}" for one in ("received", "calibration", "parameters", "alignment")}
    assert found == server | ROUNDS | {"wire/phi"} | client


@pytest.mark.slow
def test_text_is_audited_as_far_as_attacks_go(tmp_path: Path) -> None:
    rows = [f"{'good nice' if number % 2 else 'bad sad'} film {number % 7},{number % 2}" for number in range(120)]
    (tmp_path / "text.csv").write_text("t,y\n" + "\n".join(rows) + "\n")
    given = {"dataset": str(tmp_path / "text.csv"), "text": "t", "target": "y", "model": "gru", "model_options": None}
    found = names(all_trials(scene(scheme="fedavg", **given)))
    assert {"client/received", "client/membership", "server/labels"} <= found
    assert not {"client/probe", "client/class-inversion", "server/generative"} & found


def samples_of(part: Tensor) -> list[bytes]:
    """Every sample as it would lie in memory, in either precision."""
    return [one.to(kind).numpy().tobytes() for one in part for kind in (torch.float32, torch.float64)]


def occurs(samples: list[bytes], content: bytes) -> bool:
    return any(one in content for one in samples)


@pytest.mark.parametrize(
    ("samples", "changes"),
    [
        (1, {"scheme": "nadp"}),
        (1, {"scheme": "veil-secagg"}),
        pytest.param(2, {"scheme": "mpdp", "dtype": "float64"}, marks=pytest.mark.slow),
        (None, {"scheme": "lossless"}),
    ],
)
def test_no_view_of_the_server_or_the_wire_holds_what_clients_trained_on(
    samples: int | None, changes: dict[str, Any]
) -> None:
    found = scene(samples, **changes)
    everybody = samples_of(torch.cat([found.run.own(one)[0] for one in range(4)]))
    # Of whole data sets, every eighth sample besides those an attack is after: each is looked for in every view.
    private = everybody if samples is not None else everybody[::16] + everybody[1::16]
    looked_at = 0
    searched: set[bytes] = set()  # attacks on one upload are given the same view
    for trial in all_trials(found):
        if trial.name.startswith("client"):
            continue
        for attempt in trial.attempts:
            wanted = samples_of(attempt.truth["x"])
            assert not set(wanted).isdisjoint(everybody), "this test could not fail"
            for view in (attempt.view, attempt.twin):
                assert isinstance(view, (ServerView, ServerHistory, OutsiderView))
                content = to_bytes(view)
                assert not occurs(wanted if content in searched else [*private, *wanted], content), trial.name
                searched.add(content)
                if isinstance(view, ServerView):
                    assert view.labels is None
                looked_at += 1
    assert looked_at > 20


@pytest.mark.parametrize("scheme", ["lossless", "paraaegis"])
def test_a_clients_view_holds_its_own_samples_and_no_answer_to_what_it_is_asked(scheme: str) -> None:
    found = scene(scheme=scheme, **({"cipher": "pads"} if scheme == "paraaegis" else {}))
    mine = samples_of(found.run.own(0)[0][:20])
    _, asked = found.run.halves()
    others = samples_of(torch.cat([found.run.own(one)[0] for one in (1, 2, 3)]))
    for trial in all_trials(found):
        if not trial.name.startswith("client"):
            continue
        (attempt,) = trial.attempts
        assert isinstance(attempt.view, ClientView)
        content = to_bytes(attempt.view)
        assert all(occurs([one], content) for one in mine[::2]), "this test could not fail"
        assert asked.y.numpy().tobytes() not in content
        for answer in attempt.truth.values():
            granted = any(torch.equal(answer, known) for known in attempt.view.known.values())
            assert answer.numpy().tobytes() not in content or trial.attack == "parameters" or granted
        if "candidates.x" in attempt.view.known:
            told = attempt.view.known["candidates.membership"]
            assert occurs(others, content)  # candidates are shown: who of them is a member is what is asked
            assert int((told == UNKNOWN).sum()) == len(attempt.truth["member"])
        else:
            assert not occurs(others[::8] + others[1::8], content)  # every fourth sample: each is looked for everywhere


def test_candidates_are_half_members_half_not_and_half_of_each_is_told() -> None:
    found = scene(scheme="lossless")
    trial = next(one for one in all_trials(found) if one.name == "client/membership")
    view = trial.attempts[0].view
    assert isinstance(view, ClientView)
    told, x = view.known["candidates.membership"], view.known["candidates.x"]
    truth = torch.empty_like(told)
    truth[told != UNKNOWN] = told[told != UNKNOWN]
    truth[told == UNKNOWN] = trial.attempts[0].truth["member"]
    trained = {one.numpy().tobytes() for client in (1, 2, 3) for one in found.run.own(client)[0]}
    for row, member in zip(x, truth, strict=True):
        assert (row.numpy().tobytes() in trained) is bool(member)
    for kind in (0, 1):
        assert abs(int((told == kind).sum()) - int(((told == UNKNOWN) & (truth == kind)).sum())) <= 1
    public = {one.numpy().tobytes() for one in view.known["public.x"]}
    assert not any(row.numpy().tobytes() in public for row in x)


def doubled(place: Path, *, rows: int = 300, copies: int = 60) -> Path:
    """A table of two classes, two thirds of one, in which some rows come twice."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((rows, 5), generator=generator)
    y = (x[:, 0] > 0.43).long()
    again = torch.randint(rows, (copies,), generator=generator)
    numpy.savez(place / "own.npz", x=torch.cat([x, x[again]]).numpy(), y=torch.cat([y, y[again]]).numpy())
    return place / "own.npz"


def test_what_occurs_twice_is_no_candidate_and_is_counted(tmp_path: Path) -> None:
    found = scene(scheme="fedavg", dataset=str(doubled(tmp_path)))
    trials = {one.name: one for one in all_trials(found)}
    trial = trials["client/likelihood"]
    (attempt,) = trial.attempts
    assert isinstance(attempt.view, ClientView)
    candidates = [one.numpy().tobytes() for one in attempt.view.known["candidates.x"]]
    every = torch.cat([*(found.run.own(one)[0] for one in range(4)), found.run.test.x])
    often = Counter(one.numpy().tobytes() for one in every)
    assert max(often.values()) > 1, "this test could not fail"
    assert all(often[one] == 1 for one in candidates)
    assert trial.taken_out > 40
    _, asked = found.run.halves()
    pool = torch.cat([*(found.run.own(one)[0] for one in (1, 2, 3)), asked.x])
    assert trial.taken_out == sum(often[one.numpy().tobytes()] > 1 for one in pool)
    result = attacks()["likelihood"](attempt.view, {"quick": True, "shadows": 2, "epochs": 1})
    assert len(result["scores"]) == len(attempt.truth["member"])


def test_a_table_of_nothing_but_copies_leaves_no_candidates_and_attacks_say_so(tmp_path: Path) -> None:
    found = scene(scheme="fedavg", dataset=str(doubled(tmp_path, rows=12, copies=300)))
    for trial in all_trials(found, [attacks()[name] for name in ("membership", "likelihood")]):
        with pytest.raises(NotApplicableError, match="candidates: an attacker has to know"):
            attacks()[trial.attack](trial.attempts[0].view, {"quick": True})


@pytest.mark.parametrize(("scheme", "name"), [("fedavg", "server/labels"), ("veil-secagg", "server/sum/labels")])
def test_labels_of_a_frequent_class_are_read_on_as_many_samples_as_it_takes(
    scheme: str, name: str, tmp_path: Path
) -> None:
    found = scene(scheme=scheme, dataset=str(doubled(tmp_path)))
    (trial,) = all_trials(found, [attacks()["labels"]])
    assert trial.name == name
    assert isinstance(trial.measure, Labels)
    assert 0.55 < trial.measure.chance < 0.9
    assert len(trial.attempts) == trial.measure.attempts > 4
    assert len({attempt.truth["x"].numpy().tobytes() for attempt in trial.attempts}) == len(trial.attempts)
    results = [attacks()["labels"](attempt.view, trial.told(attempt)) for attempt in trial.attempts]
    score = trial.score(results)
    if scheme == "fedavg":
        assert score.value == 1.0
        assert judged(trial.measure, score, score)[0] == "as if unprotected"
    lucky = [{"labels": torch.zeros_like(attempt.truth["y"])} for attempt in trial.attempts]
    assert not trial.score(lucky).above(trial.measure)


def test_views_reach_attacks_as_they_are() -> None:
    for trial in all_trials(scene(scheme="nadp")):
        view = trial.attempts[0].view
        back = from_bytes(to_bytes(view))
        assert type(back) is type(view)
        assert to_bytes(back) == to_bytes(view)


def test_truth_has_as_many_samples_as_the_attack_is_told() -> None:
    for scheme in ("nadp", "veil-secagg"):
        for trial in all_trials(scene(scheme=scheme, batch_size=2)):
            for attempt in trial.attempts if not trial.name.startswith("client") else ():
                batch = {**trial.settings, **attempt.settings}.get("batch", 2)
                assert len(attempt.truth["y"]) == len(attempt.truth["x"]) == batch
                twin = attempt.truth if attempt.twin_truth is None else attempt.twin_truth
                assert len(twin["y"]) == 2


SHOWN = ("fedavg", "lossless", "nadp", "dbcl", "spn")


def test_every_attack_is_tried_somewhere() -> None:
    tried = {one.attack for what in SHOWN for one in all_trials(scene(scheme=what))}
    assert tried == set(attacks())


def test_every_attack_that_searches_or_guesses_has_a_reference() -> None:
    known_without = ("the model's function", "the model's parameters", "the server's updates")
    assert {one.asset for one in attacks().values() if one.reference is None} <= set(known_without)


@pytest.mark.parametrize("attack", ["closed-form", "phi", "averaging", "labels"])
def test_a_reference_is_one_attempt_on_an_unprotected_run_of_digits(attack: str) -> None:
    references = References(folder(), QUICK)
    found = references.of(attack)
    assert found is not None
    assert found.trial.attack == attack
    (attempt,) = found.trial.attempts
    assert len(attempt.truth["y"]) == 1
    view = attempt.view.rounds[0] if isinstance(attempt.view, ServerHistory) else attempt.view
    assert view.facts.scheme == ("lossless" if attack == "phi" else "fedavg")
    assert references.of("received") is None


def test_a_job_with_few_samples_is_cut_and_not_another_one() -> None:
    whole, few = job_of(), job_of(3)
    assert [len(one) for one in few.pool.clients] == [3] * 4
    for ours, theirs in zip(few.pool.clients, whole.pool.clients, strict=True):
        own = samples_of(theirs.take(torch.arange(len(theirs)))[0])
        assert all(one in own for one in samples_of(ours.take(torch.arange(3))[0]))
    assert subject_of(3).config == subject_of().config


def test_the_client_that_attacks_was_sent_a_model() -> None:
    """The first recorded client may have introduced itself and then not been asked."""
    found = scene(scheme="nadp", samples=1, clients=12, cohort=2, record_clients="0-11", record_rounds="1")
    came = {one.client for one in found.run.record.find(kind="reply", phase="train")}
    assert found.run.record.clients[0] not in came, "choose another seed"
    for trial in all_trials(found):
        if trial.name.startswith("client"):
            view = trial.attempts[0].view
            assert isinstance(view, ClientView)
            assert view.client in came
            assert view.broadcasts
