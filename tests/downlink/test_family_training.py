"""Whole trainings under fresh secrets: what the server's optimisers, clients' own steps and noise make of a family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from downlink.exactness import scramble
from downlink.modern import NETWORKS
from fedveil.downlink import Architecture, Mean, Rescaling, Weights, draw
from fedveil.downlink.architecture import load_parameters
from fedveil.secrets import SeededSecrets
from fedveil.tensors import flatten

SAMPLES = 6
OPTIMISERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda values: torch.optim.SGD(values, lr=0.05),
    "momentum": lambda values: torch.optim.SGD(values, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda values: torch.optim.Adam(values, lr=1e-3),
    "adamw": lambda values: torch.optim.AdamW(values, lr=1e-3, weight_decay=1e-2),
}


class Client:
    """Somebody who computes plain gradients of whatever it is sent, and knows nothing else."""

    def __init__(self, name: str, family: str, dtype: torch.dtype = torch.float64, *, streams: bool = False) -> None:
        make, example, _ = NETWORKS[name]
        torch.manual_seed(0)
        model = make().double()
        scramble(model)
        self.example = example.double() if example.is_floating_point() else example
        self.architecture, self.weights = draw(model, self.example, traced=True, family=family, streams=streams)
        self.module = self.architecture.new_skeleton().to(dtype)
        self.dtype = dtype

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (SAMPLES, *self.example.shape[1:])
        if self.example.is_floating_point():
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
        else:
            x = torch.randint(0, 11, shape, generator=generator)
        return x, torch.randint(0, 3, (SAMPLES,), generator=generator)

    def gradient(self, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
        load_parameters(self.module, parameters.to(self.dtype))
        loss = nn.functional.cross_entropy(self.module(x), y)
        named = list(self.module.parameters())
        found = torch.autograd.grad(loss, named, allow_unused=True, materialize_grads=True)
        return flatten([part.detach() for part in found]).double()

    def veil(self, parameters: Tensor, seed: int, family: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What it is sent, and how the server reads the answer."""
        weights = Weights(parameters, self.weights.epsilon, self.weights.statistics, self.weights.buffers)
        stream = SeededSecrets(seed).stream("veil")
        veil = Rescaling(family=family).veil(self.architecture, weights, stream=stream, head_level=None)
        nothing = torch.empty(0, dtype=torch.float64)
        return veil.broadcast().parameters, lambda found: veil.recover(Mean(found[None], nothing, nothing)).gradient


def relative(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


def trained(client: Client, optimiser: str, rounds: int, family: str | None, *, shuffled: bool = False) -> Tensor:
    """The server's model after rounds with fresh secrets, or plainly."""
    parameters = client.weights.parameters.clone()
    steps = OPTIMISERS[optimiser]([parameters])
    for round in range(rounds):
        x, y = client.batch(round)
        if shuffled:
            x, y = x.flip(0), y.flip(0)
        if family is None:
            found = client.gradient(parameters, x, y)
        else:
            sent, read = client.veil(parameters, 100 + round, family)
            found = read(client.gradient(sent, x, y))
        parameters.grad = found
        steps.step()
    return parameters


@pytest.mark.parametrize(
    ("name", "optimiser"),
    [
        ("gelu", "sgd"),
        ("gelu", "adam"),
        ("mobile", "momentum"),
        ("vit", "momentum"),
        ("decoder, tied", "sgd"),
        ("decoder, no rotary", "momentum"),
        ("decoder", "momentum"),
        ("decoder", "adam"),
        ("lstm", "momentum"),
        ("gru, both ways", "adam"),
    ],
)
def test_thirty_rounds_with_fresh_secrets_are_plain_training(name: str, optimiser: str) -> None:
    client = Client(name, "full")
    plain = trained(client, optimiser, 30, None)
    assert relative(trained(client, optimiser, 30, "full"), plain) < 1e-10
    assert relative(plain, client.weights.parameters) > 1e-3  # it went somewhere


@pytest.mark.parametrize(
    ("name", "optimiser"), [("encoder as a whole", "momentum"), ("decoder", "sgd"), ("decoder", "adam")]
)
def test_folded_gains_train_as_they_would_plainly(name: str, optimiser: str) -> None:
    client = Client(name, "full", streams=True)
    assert client.architecture.table.folds  # type: ignore[union-attr]
    plain = trained(client, optimiser, 30, None)
    assert relative(trained(client, optimiser, 30, "full"), plain) < 1e-10


def test_in_single_precision_a_veil_errs_as_another_order_of_sums_does() -> None:
    """Beside two plain runs whose batches are the same, in another order: at most twenty times their distance."""
    truth = trained(Client("vit", "full"), "momentum", 10, None)
    client = Client("vit", "full", torch.float32)
    plain, other = (trained(client, "momentum", 10, None, shuffled=turned) for turned in (False, True))
    veiled = trained(client, "momentum", 10, "full")
    assert relative(veiled, truth) < 20.0 * max(relative(plain, truth), relative(plain, other))
    assert relative(veiled, truth) < 1e-4


def stepped(client: Client, start: Tensor, optimiser: str, steps: int = 5) -> Tensor:
    """A client's own steps from what it was sent: the update."""
    parameters = start.clone()
    taken = OPTIMISERS[optimiser]([parameters])
    for step in range(steps):
        parameters.grad = client.gradient(parameters, *client.batch(step))
        taken.step()
    return parameters - start


@pytest.mark.parametrize("name", ["gelu", "mobile", "vit", "decoder", "lstm"])
def test_thirty_rounds_of_clients_own_adam_under_orders_and_signs_are_plain_training(name: str) -> None:
    client = Client(name, "signed")
    plain = veiled = client.weights.parameters
    for round in range(30):
        plain = plain + stepped(client, plain, "adamw", 3)
        sent, read = client.veil(veiled, 100 + round, "signed")
        veiled = veiled + read(stepped(client, sent, "adamw", 3))
    assert relative(veiled, plain) < 1e-9
    assert relative(plain, client.weights.parameters) > 1e-3  # it went somewhere


@pytest.mark.parametrize("name", ["vit", "decoder", "lstm"])
def test_local_steps_are_exact_under_isometries_and_adam_under_signs(name: str) -> None:
    for family, optimiser, right in (
        ("isometry", "momentum", True),
        ("signed", "momentum", True),
        ("signed", "adam", True),
        ("isometry", "adam", False),
        ("full", "momentum", False),
    ):
        client = Client(name, family)
        if family == "isometry" and not client.architecture.table.symmetry.blocks:  # type: ignore[union-attr]
            continue  # nothing is rotated, so that it is `signed`
        sent, read = client.veil(client.weights.parameters, 7, family)
        off = relative(read(stepped(client, sent, optimiser)), stepped(client, client.weights.parameters, optimiser))
        # Adam divides gradients that are 0 but for rounding (a key's bias) by themselves.
        assert (off < (1e-10 if optimiser == "momentum" else 1e-4)) == right, (family, optimiser, off)


@pytest.mark.parametrize("name", ["vit", "decoder, tied", "gru, both ways"])
def test_isometries_cost_noise_nothing(name: str) -> None:
    """Every sample's gradient keeps its norm, clipped sums are recovered, and noise is as long as it was."""
    client = Client(name, "isometry")
    x, y = client.batch(3)
    sent, read = client.veil(client.weights.parameters, 5, "isometry")

    def rows(parameters: Tensor) -> Tensor:
        return torch.stack([client.gradient(parameters, x[i : i + 1], y[i : i + 1]) for i in range(SAMPLES)])

    plain, theirs = rows(client.weights.parameters), rows(sent)
    norms = plain.norm(dim=1)
    assert float(((theirs.norm(dim=1) - norms) / norms).abs().max()) < 1e-10
    bound = float(norms.median())

    def clipped(given: Tensor) -> Tensor:
        return (given * (bound / given.norm(dim=1, keepdim=True)).clamp_max(1.0)).sum(0)

    assert relative(read(clipped(theirs)), clipped(plain)) < 1e-10
    noise = torch.randn(plain.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert float(read(noise).norm() / noise.norm()) == pytest.approx(1.0, abs=1e-12)
    other = Client(name, "full")
    grown = other.veil(other.weights.parameters, 5, "full")[1](noise)
    assert float(grown.norm() / noise.norm()) > 1.05


def test_an_architecture_keeps_its_symmetry_elsewhere() -> None:
    client = Client("vit", "full")
    moved: Architecture = client.architecture.to(device=torch.device("cpu"))
    assert moved.table is not None
    assert moved.table.symmetry is client.architecture.table.symmetry  # type: ignore[union-attr]
