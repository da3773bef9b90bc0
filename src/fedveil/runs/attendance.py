"""Who may be asked how often, and the scheme that reckons with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedveil.protocol.cohort import Cohort
from fedveil.protocol.parts import Scheme
from fedveil.schemes import SchemeInfo, Setting
from fedveil.schemes.registry import Option


def attended(
    info: SchemeInfo, setting: Setting, options: Mapping[str, Option], *, cohort: Cohort, simulation: bool
) -> tuple[Scheme, Cohort]:
    """A scheme for these cohorts, which are shuffled wherever clients share keys and their nonces are secret.

    Simulated nonces hide nothing; cohorts by the seed make simulations of different schemes comparable.
    """

    def assembled(cohort: Cohort) -> Scheme:
        known = replace(
            setting,
            participations=cohort.most_participations(setting.rounds),
            rate=cohort.size / cohort.clients,
            cohort=cohort.size,
            clients=cohort.clients,
        )
        return info.assemble(known, options)

    scheme = assembled(cohort)
    if simulation or cohort.size == cohort.clients or scheme.uplink.introduction != "keys":
        return scheme, cohort
    shuffled = replace(cohort, shuffled=True)
    return assembled(shuffled), shuffled
