"""All checks in their order; one that breaks is itself a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fedveil.doctor.finding import PROBLEM, Finding
from fedveil.doctor.packages import core_packages, extras, flower_commands, homomorphic
from fedveil.doctor.selftest import same_model
from fedveil.doctor.surroundings import disk, folders, memory, processors, python, torch_and_device, variables

Checks = Sequence[Callable[[], Iterable[Finding]]]

CHECKS: Checks = (
    python,
    torch_and_device,
    processors,
    core_packages,
    extras,
    flower_commands,
    homomorphic,
    folders,
    memory,
    disk,
    variables,
    same_model,
)


def examine(checks: Checks = CHECKS) -> Iterator[Finding]:
    """Every finding, as soon as it is there."""
    for check in checks:
        try:
            yield from check()
        except Exception as reason:  # whatever is wrong with the installation is what this is meant to tell
            name = check.__name__.replace("_", " ")
            yield Finding(name, PROBLEM, f"the check broke: {type(reason).__name__}: {reason}", "install fedveil again")
