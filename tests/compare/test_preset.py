"""The preset of all schemes: who takes part, with what; what stands beside a run; and what the picture shows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fedveil import schemes
from fedveil.audit.findings import at_a_glance
from fedveil.cli.compare import glance, glance_notes
from fedveil.compare import compare
from fedveil.compare.grid import COST, SLICE, besides, complete, train
from fedveil.compare.plan import PRESETS, planned, preset_of
from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.schemes import registry
from fedveil.schemes.server_held import fedavg

SMALL: dict[str, Any] = {"rounds": 2, "clients": 3, "model_options": {"depth": 2, "width": 4}, "vectorise": False}
PAPERS = PRESETS["papers"]


def plan_of(names: list[str], given: dict[str, Any], only: dict[str, dict[str, Any]] | None = None) -> Any:
    own = PAPERS.only(names)
    merged = {name: {**own.get(name, {}), **(only or {}).get(name, {})} for name in names}
    return planned(names, seeds=[1], settings={**PAPERS.settings, **given}, only=merged, preset="papers")


def everybody() -> list[str]:
    return [info.name for info in schemes.schemes()]


def test_every_scheme_of_the_registry_takes_part_under_one_setting() -> None:
    plan = plan_of(everybody(), {})
    assert plan.schemes == tuple(everybody())
    configs = {cell.scheme: cell.config for cell in plan.cells}
    for name in ("clients", "rounds", "dataset", "model", "loss", "seed"):
        assert len({getattr(config, name) for config in configs.values()}) == 1, name
    budgets = {configs[info.name].epsilon for info in schemes.schemes() if "epsilon" in info.options}
    assert budgets == {PAPERS.settings["epsilon"]}


def test_what_schemes_declare_are_settings_they_have() -> None:
    for info in schemes.schemes():
        known = {*info.options, *(field.name for field in dataclasses.fields(RunConfig))}
        assert {*info.compared, *info.twin} <= known, info.name
        assert set(info.twin) <= set(info.options), info.name


def test_a_new_scheme_takes_part_by_itself_with_what_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))
    schemes.scheme("fresh", compared={"lr": 0.25})(fedavg)
    config = {cell.scheme: cell.config for cell in plan_of(everybody(), {}).cells}["fresh"]
    assert (config.lr, config.rounds) == (0.25, PAPERS.settings["rounds"])
    common = {cell.scheme: cell.config.lr for cell in plan_of(everybody(), {"lr": 0.5}).cells}
    assert (common["fedavg"], common["fresh"]) == (0.5, 0.25), "what one declares goes over what is given for all"
    own = {cell.scheme: cell.config.lr for cell in plan_of(everybody(), {"lr": 0.5}, {"fresh": {"lr": 2.0}}).cells}
    assert own["fresh"] == 2.0


def test_ciphers_that_take_long_are_trained_under_masks_unless_somebody_says_otherwise() -> None:
    plan = plan_of(["tp-smc", "fedavg"], {})
    assert plan.twin("tp-smc") == {"cover": "masks"}
    assert plan.twin("fedavg") == {}
    assert plan_of(["tp-smc"], {}, {"tp-smc": {"cover": "paillier"}}).twin("tp-smc") == {}
    assert planned(["tp-smc"], seeds=[1], settings={}, only={}).twin("tp-smc") == {}, "no preset, no twin"


def test_an_unknown_preset_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="papers"):
        compare(preset="paper", out=tmp_path / "c")
    with pytest.raises(ConfigError):
        preset_of("")


def test_schemes_that_cannot_be_trained_say_why_and_fail_nothing(tmp_path: Path) -> None:
    network = {"depth": 2, "width": 4, "norm": "batch"}  # whose statistics no noise covers
    given = {**SMALL, "model_options": network, "audit": False, "jobs": 1}
    done = compare(["fedavg", "nadp"], preset="papers", out=tmp_path / "c", **given)
    assert done.failed == []
    assert "batch normalisation" in done.results["schemes"]["nadp"]["cannot"]
    assert done.results["schemes"]["fedavg"]["n"] == 1
    assert done.results["schemes"]["fedavg"]["cost"]["seconds"] > 0
    alone = compare(["nadp"], out=tmp_path / "d", **given)
    assert [cell.exit_code for cell in alone.failed] == [ConfigError.exit_code], "without a preset it fails"


def test_a_preset_goes_on_with_what_it_began_with(tmp_path: Path) -> None:
    given = {**SMALL, "audit": False, "jobs": 1}
    begun = compare(["fedavg", "spn"], preset="papers", out=tmp_path / "c", lr=0.02, **given)
    again = compare(["secagg"], out=tmp_path / "c", resume=True, jobs=1)
    assert [cell.state for cell in again.standings] == ["kept", "kept", "finished"]
    assert again.plan.preset == "papers"
    assert not again.plan.audit
    assert {cell.config.lr for cell in again.plan.cells} == {0.02}
    assert again.results["schemes"]["fedavg"] == begun.results["schemes"]["fedavg"]
    with pytest.raises(ConfigError, match="not started with this preset"):
        compare(["fedavg"], out=tmp_path / "c", resume=True, preset="other")


def test_a_comparison_of_chosen_schemes_does_not_grow_and_says_what_was_not_attacked(tmp_path: Path) -> None:
    given = {**SMALL, "audit": False, "jobs": 1}
    begun = compare(["fedavg", "secagg"], preset="papers", out=tmp_path / "c", lr=0.02, **given)
    again = compare(out=tmp_path / "c", resume=True, jobs=1)
    assert [cell.state for cell in again.standings] == ["kept", "kept"]
    assert glance("fedavg", begun.results["schemes"]["fedavg"])[-3:-1] == ("not tried", "not tried")
    assert list(glance_notes(again.results["schemes"])) == [
        "not tried, and so not in the picture: attacks on fedavg, secagg"
    ]
    with pytest.raises(ConfigError, match="kept nothing of what passes, and cannot be attacked"):
        compare(out=tmp_path / "c", resume=True, audit=True)


def test_settings_that_are_given_again_on_resuming_leave_what_schemes_declare(tmp_path: Path) -> None:
    """Else a scheme went on without its head groups, or under the cipher whose twin it was to be."""
    given = {**SMALL, "audit": False, "jobs": 1}
    only = {"mp-cdp": {"lr": 0.002}}
    begun = compare(["fedavg", "mp-cdp"], preset="papers", out=tmp_path / "c", lr=0.02, only=only, **given)
    declared = {**schemes.find("mp-cdp").compared, "lr": 0.002}
    assert begun.plan.only["mp-cdp"] == declared
    again = compare(out=tmp_path / "c", schemes=["mp-cdp"], resume=True, only=only, jobs=1)
    assert again.plan.only["mp-cdp"] == declared
    assert [cell.state for cell in again.standings] == ["kept", "kept"]


def job_of(folder: Path, scheme: str, **more: Any) -> dict[str, Any]:
    twin = dict(schemes.find(scheme).twin)
    config = RunConfig(scheme=scheme, seed=1, loss="square", workers=1, **{**SMALL, **twin})
    plain = {"own": [], "title": scheme, "tracked": {}, "twin": twin, "audit": False}
    return {"config": dataclasses.asdict(config), "folder": str(folder), **plain, **more}


@pytest.mark.slow  # ciphertexts under a key of 2048 bits
def test_a_cipher_is_timed_under_a_real_key_on_a_slice_and_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With primes that are stored for benchmarks; the figures scale with the parameters, and are not the twin's."""
    from fedveil.uplink import threshold

    stored = json.loads((Path(__file__).parents[2] / "benchmarks" / "safe_primes.json").read_text())["key bits"]
    bits: list[int] = []

    def primes(count: int, stream: object) -> tuple[int, ...]:
        bits.append(count)
        return tuple(int(prime, 16) for prime in stored[str(count)])

    monkeypatch.setattr(threshold, "fresh_primes", primes)
    told: list[dict[str, Any]] = []
    found = train(job_of(tmp_path / "run", "tp-smc"), told.append)
    assert bits == [2048], "once, for the slice alone"
    cost, summary = found["besides"]["cost"], found["summary"]
    timed = cost["slice"]
    assert timed["parameters"] == 610
    assert timed["times"] == pytest.approx(summary["parameters"] / 610)
    assert cost["seconds"] == pytest.approx(
        timed["trained"] + summary["rounds"] * timed["times"] * timed["round"] + timed["keys"]
    )
    assert cost["bytes_up"] > 2 * 2048 / 8 * timed["times"]
    assert cost["bytes_up"] != summary["bytes_up"]
    assert {"kind": "stage", "stage": "timing"} in told
    assert complete(tmp_path / "run", twin=True, audit=False)
    again = train(job_of(tmp_path / "run", "tp-smc"), told.append)
    assert again["besides"] == found["besides"], "what is there is not done again"
    assert bits == [2048]


@pytest.mark.slow  # a whole audit, though a quick one
def test_what_attackers_got_stands_beside_a_run(tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", "fedavg")
    config = {**job["config"], "record": True}
    told: list[dict[str, Any]] = []
    found = train({**job, "config": config, "audit": True}, told.append)
    attacked = found["besides"]["attacked"]
    assert attacked["data"]["who"] == "the server"
    assert attacked["data"]["verdict"] == "as if unprotected"
    assert attacked["the model's parameters"]["exact"] == 1.0
    assert {"members", "labels"} <= set(attacked)
    assert besides(tmp_path / "run") == found["besides"]
    assert {"kind": "stage", "stage": "auditing"} in told
    (tmp_path / "run" / COST).unlink()
    assert "cost" not in besides(tmp_path / "run")


def test_at_a_glance_nobody_has_helpers() -> None:
    assert at_a_glance([]) == {}
    assert SLICE["rounds"] == 2, "the first round makes keys, the second is timed"
