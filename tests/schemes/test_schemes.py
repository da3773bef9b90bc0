"""Named schemes: found by name, options checked, contradictions explained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedveil.client_held.divided import Parallel
from fedveil.config import RunConfig
from fedveil.downlink import Plain, Rescaling
from fedveil.errors import ConfigError
from fedveil.protocol.parts import Scheme, bounded
from fedveil.schemes import Setting, assemble, find, schemes
from fedveil.uplink.masked import Masked
from fedveil.uplink.noise_plan import Target
from fedveil.uplink.threshold import ThresholdPaillier
from fedveil.work import Batches, CrossEntropy, Gradients, LocalSteps, Schedule, SquareLoss
from fedveil.work.batches import LocalOptimiser

SQUARE = Setting(SquareLoss(), Batches(0, 1), Schedule(0.1))
ENTROPY = Setting(CrossEntropy(), Batches(0, 1), Schedule(0.1))
VEILED = ("pbpfl", "lossless")
PLANNED = [one.name for one in schemes() if "clip" in one.options]


def head(scheme: Scheme) -> tuple[int | None, float] | None:
    assert isinstance(scheme.downlink, Rescaling)
    return None if scheme.downlink.head is None else (scheme.downlink.head.groups, scheme.downlink.head.strength)


def test_every_scheme_says_what_it_is_and_what_it_protects() -> None:
    assert len(schemes()) >= 15
    for one in schemes():
        assert find(one.name) is one
        assert one.paper
        assert one.summary
        assert one.protects
        assert assemble(one.name, SQUARE, {}).name == one.name


def test_exactly_the_schemes_that_cover_uploads_promise_to_protect_client_data_from_the_server() -> None:
    for one in schemes():
        denied = "not at all" in one.protects or "nothing" in one.protects
        built = assemble(one.name, SQUARE, {})
        covers = built.uplink.plan is not None or isinstance(built.uplink, (Masked, Parallel, ThresholdPaillier))
        assert covers is not denied, one.name


def test_exactly_the_schemes_that_clip_have_a_plan_for_the_ledger() -> None:
    """Noise of an assumed size (mpdp and its baselines, who clip nothing) must not look like a guarantee."""
    for one in schemes():
        assert (assemble(one.name, SQUARE, {}).plan is not None) is (one.name in PLANNED), one.name


def test_every_option_of_a_named_scheme_is_a_setting_of_its_own() -> None:
    """Whoever bounds a run's settings, a client or a policy, must not miss one that hides among a scheme's options."""
    known = RunConfig().scheme_options
    for one in schemes():
        assert set(one.options) <= set(known), one.name


TRAINING = [one.name for one in schemes() if "local_steps" in one.options and one.name != "dbcl"]


@pytest.mark.parametrize("name", TRAINING)
def test_whoever_trains_locally_may_do_so_by_adam(name: str) -> None:
    given: dict[str, Any] = {"local_steps": 3, "client_optimiser": "adam", "client_beta2": 0.9, "client_lr": 0.01}
    if "head_noise" in find(name).options:
        given["head_noise"] = False
    work = assemble(name, ENTROPY, given).work
    local = next(getattr(work, part) for part in ("local", "training", "__class__") if hasattr(work, part))
    trains = work if isinstance(work, LocalSteps) else local
    assert trains.optimiser == LocalOptimiser("adam", beta2=0.9)
    assert trains.schedule.at(7) == 0.01
    if work.clip is not None:
        without = assemble(name, ENTROPY, {**given, "client_optimiser": None, "client_beta2": None}).work
        assert (work.clip, bounded(work).sensitivity(9)) == (without.clip, bounded(without).sensitivity(9))


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_aims_at_the_target_that_was_asked_for(name: str) -> None:
    setting = replace(SQUARE, rounds=20, participations=7, rate=0.5)
    plan = assemble(name, setting, {"epsilon": 2.0, "delta": 1e-6, "clip": 0.5}).plan
    assert plan is not None
    assert plan.target == Target(2.0, 1e-6, 20, 7, 0.5, 0.9 if name == "varying-dp" else 1.0)


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"clip": 0.0}, "clip"),
        ({"accounting": "guess"}, "accounting"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused_by_name(name: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        assemble(name, SQUARE, options)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("nadp", {"dropouts": "ignore"}, "dropouts 'ignore'"),
        ("nadp", {"repair_limit": 1.0}, "repair_limit must lie"),
        ("nadp", {"collusion": 1.0}, "collusion must lie"),
        ("nadp", {"pair_strength": -1.0}, "pair_strength must not be negative"),
        ("veil-dp", {"cover": "paint"}, "cover 'paint'"),
        ("veil-secagg", {"unmask": "never"}, "unmask 'never'"),
        ("veil-secagg", {"threshold": 0.4}, "threshold must lie"),
        ("veil-secagg", {"neighbours": 3}, "neighbours must be an even number"),
        ("mpdp", {"pair_strength": -1.0}, "pair_strength must not be negative"),
        ("mpdp", {"epsilon": 0.0}, "epsilon is 0.0: a privacy target needs a finite number above 0"),
        ("mp-cdp", {"delta": 2.0}, "delta is 2.0: it must lie strictly between 0 and 1"),
        ("mpdp", {"sensitivity": 0.0}, "sensitivity must be a positive number"),
        ("mp-cdp", {"calibration": "tale"}, "Unknown calibration 'tale'"),
        ("mpdp-naive", {"neighbours": 2}, "share no noise"),
    ],
)
def test_options_of_the_uplinks_that_make_no_sense_are_refused(
    name: str, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        assemble(name, SQUARE, options)


@pytest.mark.parametrize(("wrong", "near"), [("losless", "lossless"), ("pbfl", "pbpfl"), ("fedavgg", "fedavg")])
def test_an_unknown_scheme_suggests_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"Unknown scheme '{wrong}'. Did you mean '{near}'"):
        find(wrong)


def test_an_option_the_scheme_does_not_have_is_refused_and_its_own_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"Scheme 'pbpfl' has no option 'head_groups'\..* It takes: head_strength"):
        assemble("pbpfl", SQUARE, {"head_groups": 3})
    with pytest.raises(ConfigError, match="'fedavg' has no option 'spread'"):
        assemble("fedavg", SQUARE, {"spread": 2.0})


def test_an_option_that_is_none_takes_the_schemes_default() -> None:
    scheme = assemble("fedavg", SQUARE, {"spread": None, "head_groups": None, "local_steps": None})
    assert scheme == assemble("fedavg", SQUARE, {})


def test_pbpfl_has_one_secret_and_lossless_one_per_output() -> None:
    assert head(assemble("pbpfl", SQUARE, {})) == (1, 1.0)
    assert head(assemble("lossless", SQUARE, {})) == (None, 1.0)
    assert head(assemble("lossless", SQUARE, {"head_groups": 4, "head_strength": 2.0})) == (4, 2.0)
    assert head(assemble("lossless", SQUARE, {"head_noise": False})) is None


@pytest.mark.parametrize("name", ["lossless", "veil-secagg", "mpdp", "mpdp-naive", "mp-cdp"])
def test_outputs_are_parted_as_one_likes(name: str) -> None:
    downlink = assemble(name, SQUARE, {"head_partition": "0,1,0,2"}).downlink
    assert downlink.head.partition == (0, 1, 0, 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head_partition": "0,2"}, "none left out"),
        ({"head_partition": "0,0.5"}, "whole numbers"),
        ({"head_partition": "0,1", "head_groups": 2}, "--head-groups"),
        ({"head_partition": "0,1", "head_noise": False}, "--no-head-noise"),
    ],
)
def test_partitions_that_make_no_sense_are_refused(options: dict[str, int | str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        assemble("lossless", SQUARE, options)


@pytest.mark.parametrize("name", VEILED)
@pytest.mark.parametrize("options", [{"local_steps": 2}, {"local_epochs": 1}, {"local_steps": 0}])
def test_local_training_under_a_veil_is_refused_with_the_reason(name: str, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="exactly one gradient per round") as caught:
        assemble(name, SQUARE, options)
    assert "--scheme fedavg" in str(caught.value)
    assert "more rounds" in str(caught.value).replace("\n", " ")


@pytest.mark.parametrize("name", VEILED)
def test_one_local_step_under_a_veil_is_what_happens_anyway(name: str) -> None:
    assert assemble(name, SQUARE, {"local_steps": 1}) == assemble(name, SQUARE, {})


@pytest.mark.parametrize("name", VEILED)
def test_cross_entropy_with_head_noise_is_refused_with_the_reason_and_two_ways_out(name: str) -> None:
    with pytest.raises(ConfigError, match="cross-entropy loss cannot be undone") as caught:
        assemble(name, ENTROPY, {})
    message = str(caught.value)
    assert "quadratic" in message
    assert "--loss square" in message
    assert "--no-head-noise" in message
    assert head(assemble(name, ENTROPY, {"head_noise": False})) is None


@pytest.mark.parametrize("strength", [0.0, -1.0, float("nan")])
def test_a_strength_that_is_not_positive_is_refused(strength: float) -> None:
    with pytest.raises(ConfigError, match="head_strength must be positive"):
        assemble("lossless", SQUARE, {"head_strength": strength})


@pytest.mark.parametrize("spread", [1.0, 0.5, 0.0, -4.0, float("inf"), float("nan")])
@pytest.mark.parametrize("scheme", ["lossless", "veil-dp"])
def test_a_spread_that_hides_nothing_is_refused(scheme: str, spread: float) -> None:
    with pytest.raises(ConfigError, match="spread must be a number above 1"):
        assemble(scheme, SQUARE, {"spread": spread})


def test_plain_averaging_takes_one_gradient_or_local_steps() -> None:
    assert isinstance(assemble("fedavg", ENTROPY, {}).work, Gradients)
    assert isinstance(assemble("fedavg", ENTROPY, {"local_steps": 1}).work, Gradients)
    assert isinstance(assemble("fedavg", ENTROPY, {"local_steps": 3}).work, LocalSteps)
    assert isinstance(assemble("fedavg", ENTROPY, {"local_epochs": 1}).work, LocalSteps)
    assert isinstance(assemble("fedavg", ENTROPY, {}).downlink, Plain)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"local_steps": 2, "local_epochs": 2}, "not both"),
        ({"local_steps": 0}, "local_steps must be at least 1"),
        ({"local_epochs": -1}, "local_epochs must be at least 1"),
    ],
)
def test_local_steps_that_make_no_sense_are_refused(options: dict[str, int], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        assemble("fedavg", SQUARE, options)


@pytest.mark.parametrize("name", ["paraaegis", "ckks-fedavg", "serial"])
def test_the_ring_and_the_scale_of_ckks_are_taken_and_told(name: str) -> None:
    scheme = assemble(name, SQUARE, {"ckks_degree": 8192, "ckks_scale": 40})
    told = [text for text in scheme.caveats.assumptions if "degree 8192" in text]
    assert len(told) == 1
    assert "60 + 60 + 60 bits and a scale of 2^40" in told[0]
    assert not any("degree" in text for text in assemble(name, SQUARE, {}).caveats.assumptions)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ckks_degree": 2048}, "must be one of 4096, 8192, 16384"),
        ({"ckks_scale": 20}, "an error of up to"),
        ({"ckks_scale": 52, "ckks_degree": 4096}, "no room"),
        ({"ckks_scale": 40, "cipher": "pads"}, "--ckks-scale is of --cipher ckks"),
    ],
)
def test_rings_and_scales_that_are_unsafe_or_fail_are_refused(options: dict[str, int | str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        assemble("paraaegis", SQUARE, options)
