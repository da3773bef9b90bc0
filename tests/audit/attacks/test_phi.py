"""What travels bare beside a noised gradient gives a batch of one away: exactly, label and all."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.attacks.listening import Heard, listen, psnr
from federation import job
from fedveil.audit.attacks.phi import (
    BareTensors,
    bare_tensors,
    invert_bare,
    read_first_layer,
    read_label,
    read_layer,
)
from fedveil.errors import ConfigError
from fedveil.work.losses import SquareLoss

CLIENTS = 3
REFERENCE = "lenet-sigmoid"


@cache
def run(scheme: str, model: str = "mlp", batch: int = 1, groups: int | None = None) -> Heard:
    given: dict[str, Any] = {"head_groups": groups} if scheme.startswith("mpdp") else {}
    given |= {"neighbours": 2} if scheme == "mpdp" else {}
    given |= {"reshape": (1, 8, 8), "options": {"width": 4} if model == "cnn" else {}} if model != "mlp" else {}
    given |= {"min_coverage": 0.0} if model == REFERENCE else {}
    return listen(job(scheme=scheme, model=model, clients=CLIENTS, batch_size=batch, rounds=1, **given))


def seen(heard: Heard, client: int) -> BareTensors:
    head = heard.broadcasts[0].head
    assert head is not None
    return bare_tensors(heard.uploads[0][client], heard.job.scheme.layout(heard.job.architecture), head)


def sample(heard: Heard, client: int) -> tuple[Tensor, Tensor]:
    """The batch that a client really trained on."""
    own = heard.job.pool.clients[client]
    batches = heard.job.scheme.work.batches  # type: ignore[attr-defined]
    return own.take(batches.indices(client=client, samples=len(own), step=0))


def loss_of(heard: Heard) -> SquareLoss:
    assert isinstance(heard.job.loss, SquareLoss)
    return heard.job.loss


@pytest.mark.parametrize("client", range(CLIENTS))
@pytest.mark.parametrize("scheme", ["mpdp", "mpdp-naive"])
def test_phi_gives_a_batch_of_one_away_exactly(scheme: str, client: int) -> None:
    heard = run(scheme)
    x, _ = sample(heard, client)
    found = read_first_layer(heard.job.architecture, seen(heard, client).phi)
    assert float((found.x - x[0]).abs().max()) < 1e-6
    assert psnr(found.x, x[0]) > 60
    assert found.misfit < 1e-9


@pytest.mark.parametrize("client", range(CLIENTS))
def test_psi_gives_it_away_too(client: int) -> None:
    heard = run("mpdp")
    x, _ = sample(heard, client)
    assert float((read_first_layer(heard.job.architecture, seen(heard, client).psi).x - x[0]).abs().max()) < 1e-6


@pytest.mark.parametrize("scheme", ["mpdp", "mpdp-naive"])
def test_the_tensor_under_noise_does_not(scheme: str) -> None:
    """Control: the same formula on the one tensor that noise covers."""
    heard = run(scheme)
    for client in range(CLIENTS):
        x, _ = sample(heard, client)
        found = read_first_layer(heard.job.architecture, seen(heard, client).first[None])
        assert psnr(found.x, x[0]) < 15
        assert found.misfit > 0.5


def test_masks_leave_nothing_to_read() -> None:
    """Control: veil-secagg sends the same tensors under masks."""
    heard = run("veil-secagg")
    for client in range(CLIENTS):
        x, _ = sample(heard, client)
        found = read_first_layer(heard.job.architecture, seen(heard, client).phi)
        assert psnr(found.x, x[0]) < 15
        assert found.misfit > 0.5


def test_a_larger_batch_gives_a_mixture_and_the_misfit_says_so() -> None:
    heard = run("mpdp", batch=4)
    x, _ = sample(heard, 0)
    found = read_first_layer(heard.job.architecture, seen(heard, 0).phi)
    assert found.misfit > 1e-3
    assert all(psnr(found.x, one) < 40 for one in x)


@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("model", ["mlp", "cnn", REFERENCE])
def test_the_label_is_read_off_whatever_the_architecture(model: str, groups: int | None) -> None:
    heard = run("mpdp", model, groups=groups)
    for client in range(CLIENTS):
        _, label = sample(heard, client)
        found = read_label(heard.job.architecture, heard.broadcasts[0], seen(heard, client), loss=loss_of(heard))
        assert found == int(label)


def test_what_a_later_linear_layer_read_is_given_away_too() -> None:
    heard = run("mpdp", "cnn")
    found = read_layer(heard.job.architecture, seen(heard, 0).phi, path="linear")
    assert found.misfit < 1e-9
    assert bool((found.x >= -1e-9).all())  # it reads past a ReLU
    assert float(found.x.max()) > 0


@pytest.mark.parametrize("client", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_matching_finds_the_input_where_the_first_layer_is_no_linear_one(client: int) -> None:
    heard = run("mpdp", REFERENCE)
    x, label = sample(heard, client)
    steps: list[float] = []
    found = invert_bare(
        heard.job.architecture,
        heard.broadcasts[0],
        seen(heard, client),
        loss=loss_of(heard),
        generator=torch.Generator().manual_seed(0),
        restarts=1,
        progress=steps.append,
    )
    assert psnr(found.inputs, x) > 20
    assert int(found.labels) == int(label)
    assert steps[-1] == 1.0


def test_matching_finds_nothing_once_psi_and_phi_are_under_the_same_noise() -> None:
    """Control: as if MP-DP's noise covered all tensors alike."""
    heard = run("mpdp", REFERENCE)
    x, _ = sample(heard, 0)
    bare = seen(heard, 0)
    truth = heard.job.scheme.layout(heard.job.architecture).split(heard.bare(0, 0))
    noise = bare.first - truth["gradients"][0] / truth["weight"]
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(len(noise), generator=generator) for _ in range(len(bare.psi) + len(bare.phi))]
    covered = torch.stack([noise[one] for one in orders])
    hidden = replace(bare, psi=bare.psi + covered[: len(bare.psi)], phi=bare.phi + covered[len(bare.psi) :])
    found = invert_bare(
        heard.job.architecture,
        heard.broadcasts[0],
        hidden,
        loss=loss_of(heard),
        generator=torch.Generator().manual_seed(0),
        restarts=1,
        steps=200,
    )
    assert psnr(found.inputs, x) < 15


def test_what_cannot_be_read_is_refused() -> None:
    heard = run("mpdp", "cnn")
    sent, bare = heard.broadcasts[0], seen(heard, 0)
    with pytest.raises(ConfigError, match="Use invert_bare"):
        read_first_layer(heard.job.architecture, bare.phi)
    assert sent.head is not None
    layout = heard.job.scheme.layout(heard.job.architecture)
    with pytest.raises(ConfigError, match="has 12 gradients"):
        bare_tensors(heard.uploads[0][0], layout, replace(sent.head, count=1))
    generator = torch.Generator()
    with pytest.raises(ConfigError, match="no head noise"):
        invert_bare(heard.job.architecture, replace(sent, head=None), bare, loss=loss_of(heard), generator=generator)
    with pytest.raises(ConfigError, match="at least 1"):
        invert_bare(heard.job.architecture, sent, bare, loss=loss_of(heard), generator=generator, restarts=0)


def test_a_sample_that_activates_nothing_gives_nothing_away() -> None:
    heard = run("mpdp")
    found = read_first_layer(heard.job.architecture, torch.zeros(1, heard.job.architecture.size))
    assert found.misfit == 1.0
    assert not bool(found.x.any())
