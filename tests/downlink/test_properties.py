"""The identities of the spec, for random networks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from downlink.exactness import TOLERANCE, assert_within, scramble, trial
from downlink.random_networks import Plan, build, plans
from fedveil.work import CrossEntropy, Loss, SquareLoss

LOSSES = st.sampled_from(["square", "square", "weighted", "regression", "cross-entropy"])
PROFILE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def objective(kind: str) -> Loss:
    if kind == "cross-entropy":
        return CrossEntropy()
    return SquareLoss(target_scale=2.0, true_weight=4.0) if kind == "weighted" else SquareLoss()


def check_exact(plan: Plan, head: int, kind: str, samples: int) -> None:
    model, example = build(plan)
    model = model.double()
    scramble(model, plan.seed)
    groups = 0 if kind == "cross-entropy" else min(head, plan.outputs)
    found = trial(
        model,
        example.double(),
        groups=groups,
        loss=objective(kind),
        regression=kind == "regression",
        samples=samples,
        seed=plan.seed,
    )
    assert_within(found, TOLERANCE)


RANDOM = given(plan=plans, head=st.integers(0, 4), kind=LOSSES, samples=st.integers(3, 6))


@settings(PROFILE, max_examples=12)
@RANDOM
def test_random_networks_are_exact_in_float64(plan: Plan, head: int, kind: str, samples: int) -> None:
    check_exact(plan, head, kind, samples)


@pytest.mark.slow
@settings(PROFILE, max_examples=1000)
@RANDOM
def test_many_more_random_networks_are_exact(plan: Plan, head: int, kind: str, samples: int) -> None:
    check_exact(plan, head, kind, samples)


@settings(PROFILE, max_examples=5)
@given(plan=plans, head=st.integers(0, 4))
def test_random_networks_are_within_a_thousandth_in_float32(plan: Plan, head: int) -> None:
    model, example = build(plan)
    scramble(model, plan.seed)
    found = trial(model, example, groups=min(head, plan.outputs), seed=plan.seed)
    assert found.gradient < 1e-3
    assert found.output < 1e-3
