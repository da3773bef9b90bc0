"""Nothing secret can be reached from a client: not its role, its state, nor any message it saw."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from federation import job, server_of
from fedveil.downlink.rescaling import ScaledVeil
from fedveil.engines import LocalEngine
from fedveil.protocol import ClientRole
from fedveil.runs.job import Job
from fedveil.secrets import SeededSecrets
from reach import Secrets, leaks, leaks_in_text

BATCH_NORM = {"depth": 3, "width": 12, "norm": "batch"}


class Recording:
    """A client role that keeps every message."""

    def __init__(self, role: ClientRole) -> None:
        self.role = role
        self.received: list[Any] = []
        self.replied: list[Any] = []

    def handle_many(self, states: Any, request: Any, clients: Any) -> Any:
        self.received.append(request)
        for state, reply in self.role.handle_many(states, request, clients):
            self.replied.append((state, reply))
            yield state, reply


@dataclass
class Observed:
    """One run, everything a client had, and everything it must not have."""

    job: Job
    role: ClientRole
    veils: list[ScaledVeil]
    truths: list[torch.Tensor]
    client_side: list[object]
    secrets: Secrets = field(default_factory=Secrets)


def observe(monkeypatch: pytest.MonkeyPatch, *, fresh: bool = False, **settings: Any) -> Observed:
    """Run a few rounds, recording messages and, from inside the server, every secret."""
    one = job(rounds=3, **{"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, **settings})
    if not fresh:
        # As after some training: a batch norm's weights are no longer the ones everybody starts with.
        one.weights.parameters.mul_(1.0 + 0.1 * torch.rand(one.blueprint.size, dtype=torch.float64))
    secrets, veils, truths = Secrets(), [], []
    original = type(one.scheme.downlink).veil

    def spying(self: Any, blueprint: Any, weights: Any, **named: Any) -> ScaledVeil:
        veil = original(self, blueprint, weights, **named)
        veils.append(veil)
        truths.append(weights.parameters.clone())
        secrets.add("a true parameter", weights.parameters)
        secrets.add("a true parameter (32 bits)", weights.parameters.float())
        secrets.add("a true ε", weights.epsilon)
        secrets.add("a running statistic", weights.statistics)
        secrets.add("a scale", veil._scales)
        secrets.add("an inverse scale", veil._scales.reciprocal())
        if veil._head is not None:
            secrets.add("γ", veil._head.gamma)
            secrets.add("the head noise", veil._head.noise())
        return veil

    monkeypatch.setattr(type(one.scheme.downlink), "veil", spying)
    role = ClientRole(one.scheme, one.blueprint)
    recording = Recording(role)
    server = server_of(one)
    engine = LocalEngine(recording, one.pool)  # type: ignore[arg-type]
    engine.drive(server.run(), on_round=lambda done: None)
    secrets.add("a true parameter", server.state.weights.parameters)
    secrets.add("the server's velocity", server.state.velocity)
    client_side = [role, recording.received, recording.replied, engine._states, one.pool]
    return Observed(one, role, veils, truths, client_side, secrets)


@pytest.mark.parametrize("scheme", ["lossless", "pbpfl"])
@pytest.mark.parametrize("options", [{"depth": 3, "width": 12}, BATCH_NORM], ids=["mlp", "batch norm"])
@pytest.mark.parametrize("vectorise", [True, False], ids=["together", "one by one"])
def test_no_secret_can_be_reached_from_a_client(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    scheme: str,
    options: dict[str, Any],
    vectorise: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    seen = observe(monkeypatch, scheme=scheme, options=options, vectorise=vectorise)
    assert leaks(seen.client_side, seen.secrets) == []
    printed = "".join(capfd.readouterr()) + caplog.text
    assert leaks_in_text(printed, seen.secrets) == []
    assert seen.secrets.numbers["a true parameter"].size > 3 * seen.job.blueprint.size
    assert seen.secrets.numbers["γ"].size >= 3


def test_every_parameter_is_hidden_element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is broadcast differs from the truth in every single number that is not zero."""
    seen = observe(monkeypatch, options=BATCH_NORM)
    for request, truth in zip(seen.client_side[1], seen.truths, strict=True):  # type: ignore[call-overload]
        off = (request.broadcast.parameters - truth).abs()
        assert (off[truth != 0] > 1e-6 * truth[truth != 0].abs()).all()


def test_the_plain_scheme_is_seen_to_send_the_true_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search finds what is there: without a veil, clients do hold the parameters."""
    one = job(scheme="fedavg", rounds=2)
    secrets = Secrets()
    secrets.add("a true parameter", one.weights.parameters)
    recording = Recording(ClientRole(one.scheme, one.blueprint))
    LocalEngine(recording, one.pool).drive(server_of(one).run(), on_round=lambda done: None)  # type: ignore[arg-type]
    assert any("a true parameter" in line for line in leaks(recording.received, secrets))


def _in_closure(value: object) -> Any:
    return lambda: value


def _in_generator(value: object) -> Any:
    def generate() -> Any:
        yield value

    started = generate()
    next(started)
    return started


PLANTED = {
    "a veil": lambda seen: seen.veils[0],
    "a head secret": lambda seen: seen.veils[0]._head,
    "a secret source": lambda seen: SeededSecrets(1),
    "a secret stream": lambda seen: SeededSecrets(1).stream("veil", 0),
    "the parameters": lambda seen: seen.job.weights.parameters,
    "one parameter": lambda seen: seen.job.weights.parameters[17:18].clone(),
    "a parameter as a float": lambda seen: float(seen.job.weights.parameters[17]),
    "parameters in 32 bits": lambda seen: seen.job.weights.parameters.float(),
    "the scales": lambda seen: seen.veils[-1]._scales.numpy().copy(),
    "γ as a list": lambda seen: seen.veils[-1]._head.gamma.tolist(),
    "γ as a text": lambda seen: f"round 3: gamma={seen.veils[-1]._head.gamma[0]:.7f}",
    "γ as a key": lambda seen: {float(seen.veils[-1]._head.gamma[0]): "?"},
    "the true ε": lambda seen: {"epsilon": seen.job.weights.epsilon.clone()},
    "a slice of a storage that holds more": lambda seen: torch.cat([torch.zeros(3), seen.job.weights.parameters])[:2],
    "a closure": lambda seen: _in_closure(seen.veils[0]._scales.clone()),
    "a bound method": lambda seen: seen.veils[0].recover,
    "a running generator": lambda seen: _in_generator(seen.veils[0]._head.gamma.clone()),
    "the server's run": lambda seen: server_of(seen.job).run(),
}


def test_each_planted_secret_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observe(monkeypatch, options=BATCH_NORM)
    assert leaks(seen.client_side, seen.secrets) == []
    for name, plant in PLANTED.items():
        seen.role._bench.souvenir = plant(seen)  # type: ignore[attr-defined]
        assert leaks(seen.client_side, seen.secrets), f"{name} was not found"
        del seen.role._bench.souvenir  # type: ignore[attr-defined]
    assert leaks(seen.client_side, seen.secrets) == []


def test_known_limit_fresh_batch_norm_weights_are_one_and_show_their_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """1·r = r: in the first round, and only then exactly, clients read the scale behind a batch norm."""
    seen = observe(monkeypatch, fresh=True, options=BATCH_NORM)
    first, *later = seen.client_side[1]  # type: ignore[misc]
    assert {line.split(" in ")[0] for line in leaks([first], seen.secrets)} == {"a scale"}
    assert leaks(later, seen.secrets) == []


def test_a_printed_secret_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observe(monkeypatch)
    gamma = float(seen.veils[0]._head.gamma[0])  # type: ignore[union-attr]
    assert leaks_in_text(f"drew γ = {gamma}", seen.secrets)
    assert not leaks_in_text("drew nothing: 0.123456789", seen.secrets)


def test_a_client_is_only_shown_an_empty_architecture() -> None:
    one = job(options=BATCH_NORM)
    tensors = [*one.blueprint.skeleton.parameters(), *one.blueprint.skeleton.buffers()]
    assert all(not tensor.any() for tensor in tensors)
