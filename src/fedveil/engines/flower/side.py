"""A client's side of a run, built on its own machine: its role and its data. The server's model is no part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.config import RunConfig
from fedveil.downlink import Blueprint
from fedveil.downlink.blueprint import draw_secret_epsilon
from fedveil.engines.flower.home import Home
from fedveil.engines.flower.setup import Setup
from fedveil.engines.flower.sources import own_data
from fedveil.errors import ConfigError, ProtocolError
from fedveil.protocol import ClientRole, Held, HolderRole
from fedveil.runs.job import ModelFacts, agreed, device_of, drawn, dtype_of
from fedveil.secrets import OsSecrets, SecretSource, SecretStream, SeededSecrets
from fedveil.work.messages import ClientData


@dataclass(frozen=True, eq=False)
class Side:
    """A client's role and data in one attempt at a run.

    `start` is the model it begins with, where it holds one, unless that follows from a secret of the group (`hidden`).
    """

    config: RunConfig
    facts: ModelFacts
    role: ClientRole | HolderRole
    blueprint: Blueprint
    data: ClientData
    start: Held | None
    hidden: bool = False


def build_side(home: Home, setup: Setup, *, start: Held | None = None) -> Side:
    """The side of the client in `home`; `start` replaces the model of the seed where the run is resumed."""
    try:
        config = RunConfig.from_mapping(setup.settings, where="the run's settings")
    except ConfigError as reason:
        raise ProtocolError(f"a run's settings cannot be read: {reason}") from reason
    seed = config.seed
    if seed is None:
        raise ProtocolError("a run's settings name no seed")
    config = home.accepts(config)
    facts = _facts(config, setup.facts)
    common = agreed(config, clients=config.clients, task=facts.task)
    data = own_data(config, facts, client=home.client, loader=home.data)
    example = data.x[: min(2, len(data))].repeat(2, *([1] * (data.x.dim() - 1)))[:2].cpu()
    device = device_of(config)

    def beginning(own: int | SecretStream, source: SeededSecrets) -> tuple[Blueprint, Held]:
        model = facts.build(seed=own).to(dtype_of(config)).cpu()
        blueprint, weights = drawn(common.scheme, model, example, facts)
        if config.bn_eps == "secret":
            # Every client must begin with the same one, so it follows from what they share.
            draw_secret_epsilon(weights, source.stream("epsilon"))
        return blueprint.to(device=device), Held.fresh(weights.to(device=device))

    def agreed_upon(secret: bytes) -> Held:
        """The first model that follows from all of a secret of the group, which the server does not know."""
        source = SeededSecrets(int.from_bytes(secret, "big"))
        return beginning(source.stream("first model"), source)[1]

    blueprint, template = beginning(seed, SeededSecrets(seed))
    source: SecretSource = SeededSecrets(seed).branch("clients") if config.simulated_secrets else OsSecrets()
    own = {
        "secrets": source,
        "policy": home.policy,
        "roster": home.roster,
        "identities": None if home.identity is None else {home.client: home.identity},
    }
    if common.scheme.holder == "server":
        role = ClientRole(common.scheme, blueprint, **own)  # type: ignore[arg-type]
        return Side(config, facts, role, blueprint, data, None)
    # The server knows the seed. A run that is no simulation begins with a model that it cannot make from it.
    hidden = start is None and setup.start == 0 and not config.simulated_secrets
    begin = template if start is None else start
    holder = HolderRole(
        common.scheme,
        blueprint,
        start=begin,
        optimiser=common.optimiser,
        first=agreed_upon if hidden else None,
        **own,  # type: ignore[arg-type]
    )
    return Side(config, facts, holder, blueprint, data, begin, hidden)


def _facts(config: RunConfig, given: Mapping[str, Any]) -> ModelFacts:
    shape, outputs, vocabulary = given["input_shape"], given["outputs"], given["vocabulary"]
    numbers = [*(shape if isinstance(shape, list) else [0]), outputs, 1 if vocabulary is None else vocabulary]
    if not all(type(one) is int and 0 < one < 1 << 31 for one in numbers):
        raise ProtocolError("a run's setup describes its data wrongly")
    if given["task"] not in ("classification", "regression"):
        raise ProtocolError("a run's setup names no task")
    return ModelFacts(config.model, config.model_options, tuple(shape), outputs, given["task"], vocabulary)
