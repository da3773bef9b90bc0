"""Sketched weights: the same numbers as with S as a matrix, and what rounds together show of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from federation import distance, job, next_ask, server_of, trained
from fedveil.audit.attacks.averaging import fitted_to_sketches, mean_of_sketches, sketch_in
from fedveil.downlink.architecture import Architecture, Weights, draw
from fedveil.downlink.messages import Mean
from fedveil.downlink.sketched import Sketch, Sketched, SketchedVeil
from fedveil.errors import ConfigError, ProtocolError, TraceError
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.messages import Upload
from fedveil.runs.loop import client_role, fresh_state
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.secrets import SeededSecrets

SMALL: dict[str, Any] = {"scheme": "dbcl", "rounds": 3, "loss": "cross-entropy", "options": {"depth": 2, "width": 8}}


def matrix(sketch: Sketch, size: int) -> Tensor:
    """S, inputs × buckets."""
    whole = torch.zeros(size, len(sketch.buckets), dtype=torch.float64)
    for bucket, (inputs, signs) in enumerate(zip(sketch.buckets, sketch.signs, strict=True)):
        whole[inputs, bucket] = signs
    return whole


def veiled(model: nn.Module, x: Tensor, downlink: Sketched) -> tuple[Architecture, Weights, SketchedVeil]:
    architecture, weights = draw(model.double().train(), x, traced=False)
    stream = SeededSecrets(0).stream("veil", 0)
    return architecture, weights, downlink.veil(architecture, weights, stream=stream, head_level=None)


def sent_and_recovered(
    model: nn.Module, x: Tensor, target: Tensor, downlink: Sketched
) -> tuple[Tensor, dict[str, Tensor], SketchedVeil]:
    """What the network gives with Ŵ as its weights, and what the server makes of its gradient."""
    architecture, _, veil = veiled(model, x, downlink)
    module = architecture.new_skeleton().double()
    torch.nn.utils.vector_to_parameters(veil.broadcast().parameters, module.parameters())
    output = module(x)
    loss = (output * target).sum()
    grads = dict(
        zip(dict(module.named_parameters()), torch.autograd.grad(loss, list(module.parameters())), strict=True)
    )
    for name, sketch in veil.sketches.items():
        grads[name] = (sketch.applied(grads[name].flatten(1)) / downlink.ratio).view_as(grads[name])
    flat = torch.cat([grad.flatten() for grad in grads.values()])
    recovered = veil.recover(Mean(flat[None], loss.detach().reshape(1), torch.empty(0)))
    return output, architecture.parameters.split(recovered.gradient), veil


@settings(max_examples=12, deadline=None)
@given(inputs=st.integers(4, 23), outputs=st.integers(1, 6), ratio=st.integers(2, 4), seed=st.integers(0, 2**16))
def test_a_linear_layer_does_what_the_sketched_input_does_with_the_sketched_weight(
    inputs: int, outputs: int, ratio: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(5, size, dtype=torch.float64, generator=generator) for size in (inputs, outputs))
    model = nn.Linear(inputs, outputs).double()
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    output, found, veil = sent_and_recovered(model, x, target, Sketched(ratio))
    s = matrix(veil.sketches["weight"], inputs)
    small = (weight @ s).requires_grad_(True)
    expected = (x @ s) @ small.T + bias
    (gradient,) = torch.autograd.grad((expected * target).sum(), small)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["weight"], gradient @ s.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["bias"], target.sum(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kernel", "channels", "groups"), [(3, 2, 1), (2, 4, 2), (3, 3, 3)])
def test_a_convolution_does_what_sketched_patches_do_with_the_sketched_kernel(
    kernel: int, channels: int, groups: int
) -> None:
    generator = torch.Generator().manual_seed(kernel)
    x = torch.randn(3, channels, 6, 6, dtype=torch.float64, generator=generator)
    model = nn.Conv2d(channels, 6, kernel, padding=1, groups=groups).double()
    weight, bias = model.weight.detach().clone().flatten(1), model.bias.detach().clone()
    target = torch.randn_like(model(x))
    output, found, veil = sent_and_recovered(model, x, target, Sketched(2))
    s = matrix(veil.sketches["weight"], weight.shape[1])
    patches = torch.nn.functional.unfold(x, kernel, padding=1)  # (samples, channels·k·k, places)
    small = (weight @ s).requires_grad_(True)
    parts = [
        part.transpose(1, 2) @ s @ rows.T
        for part, rows in zip(patches.chunk(groups, 1), small.chunk(groups, 0), strict=True)
    ]
    expected = (torch.cat(parts, -1) + bias).transpose(1, 2).reshape(target.shape)
    (gradient,) = torch.autograd.grad((expected * target).sum(), small)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["weight"].flatten(1), gradient @ s.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "ratio"), [(6, 2), (7, 2), (9, 4)])
def test_sketches_are_the_identity_on_average_up_to_what_a_round_leaves_out(size: int, ratio: int) -> None:
    """300 seeded draws: one of 81 entries is beyond 5 deviations in one of 20,000 seeds."""
    draws = 300
    streams = (SeededSecrets(seed).stream("sketch") for seed in range(draws))
    mean = torch.zeros(size, size, dtype=torch.float64)
    for stream in streams:
        s = matrix(Sketch.drawn(size, ratio, stream), size)
        p = s @ s.T
        torch.testing.assert_close(p @ p, ratio * p, rtol=0, atol=1e-12)
        mean += p / draws
    expected = size // ratio * ratio / size * torch.eye(size, dtype=torch.float64)
    assert float((mean - expected).abs().max()) < 5 / draws**0.5
    if size % ratio == 0:
        assert torch.equal(mean.diagonal().round(decimals=9), torch.ones(size, dtype=torch.float64))


def test_biases_norms_and_embeddings_travel_as_they_are_and_the_head_alone_can_be_sketched() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.hidden = nn.Embedding(7, 6), nn.Linear(6, 6)
            self.norm, self.back = nn.LayerNorm(6), nn.Linear(6, 7, bias=False)
            self.back.weight = self.words.weight
            self.head = nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.back(self.norm(self.hidden(self.words(x).mean(1)))))

    x = torch.zeros(2, 4, dtype=torch.int64)
    assert set(Sketched().sizes(draw(Tied().train(), x, traced=False)[0])) == {"hidden.weight", "head.weight"}
    architecture, weights, veil = veiled(Tied(), x, Sketched(2, "head"))
    before = architecture.parameters.split(weights.parameters)
    after = architecture.parameters.split(veil.broadcast().parameters)
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["head.weight"]


def test_no_two_rounds_have_a_sketch_in_common_and_the_server_judges_its_own_model() -> None:
    one = job(**SMALL)
    weights, architecture = fresh_state(one).weights, one.architecture
    rounds = [
        one.scheme.downlink.veil(architecture, weights, stream=one.secrets.stream("veil", t), head_level=None)
        for t in (0, 1)
    ]
    sent = [veil.broadcast().parameters for veil in rounds]
    assert not torch.equal(*sent)
    assert torch.equal(weights.parameters, fresh_state(one).weights.parameters)


def test_what_a_client_sends_is_the_gradient_within_the_sketch_and_no_more() -> None:
    one, said, plain = job(**{**SMALL, "rounds": 1}), list[Any](), list[Any]()
    trained(one, reorder=lambda replies: said.extend(replies) or replies)
    veil = one.scheme.downlink.veil(
        one.architecture, fresh_state(one).weights, stream=one.secrets.stream("veil", 0), head_level=None
    )
    whole = job(**{**SMALL, "rounds": 1, "scheme": "fedavg"})
    whole.weights.parameters.copy_(veil.broadcast().parameters)
    trained(whole, reorder=lambda replies: plain.extend(replies) or replies)
    layout = one.scheme.layout(one.architecture)
    for ours, theirs in zip(said, plain, strict=True):
        sent, full = (
            one.architecture.parameters.split(layout.split(upload.payload)["gradients"][0]) for upload in (ours, theirs)
        )
        for name, part in sent.items():
            if name not in veil.sketches:
                torch.testing.assert_close(part, full[name], rtol=0, atol=1e-12)
                continue
            s = matrix(veil.sketches[name], part.shape[1])
            torch.testing.assert_close(part @ s, full[name] @ s, rtol=0, atol=1e-9)  # all that G·S says
            assert torch.linalg.matrix_rank(torch.cat([part, s.T])) == s.shape[1]  # and nothing outside of S


def test_a_model_without_its_seed_is_refused() -> None:
    one = job(**SMALL)
    role, plain = client_role(one), job(**{**SMALL, "scheme": "fedavg"})
    ask = next_ask(server_of(plain).run())
    with pytest.raises(ProtocolError, match="without what the scheme sends"):
        role.handle(ClientState(0), ask.common, one.pool.clients[0])


def test_a_still_model_is_read_off_a_few_rounds_and_its_mean_tends_to_it() -> None:
    weight = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sent = [Sketch.drawn(12, 2, SeededSecrets(t).stream("s")).applied(weight) for t in range(64)]
    assert sketch_in(weight) is None
    torch.testing.assert_close(fitted_to_sketches(sent[:12]), weight, rtol=0, atol=1e-9)
    errors = [float((mean_of_sketches(sent[:count]) - weight).norm()) for count in (1, 4, 64)]
    assert errors[0] > 1.5 * errors[1] > 4 * errors[2]


def test_a_round_with_a_dropout_is_the_recovered_mean_of_those_who_came() -> None:
    one, said = job(**{**SMALL, "rounds": 1}), list[Any]()
    state, rounds = trained(
        one, absent=lambda ask, client: client == 2, reorder=lambda replies: said.extend(replies) or replies
    )
    assert [(done.failed, done.gathered.arrived) for done in rounds] == [("", (0, 1, 3, 4))]
    before = fresh_state(one)
    stream = one.secrets.stream("veil", 0)
    veil = one.scheme.downlink.veil(one.architecture, before.weights, stream=stream, head_level=None)
    sums = one.scheme.layout(one.architecture).split(torch.stack([upload.payload for upload in said]).sum(0))
    parts = (sums[name] / sums["weight"] for name in ("gradients", "values", "statistics"))
    gradient = veil.recover(Mean(*parts)).gradient
    expected = one.optimiser.step(before.weights.parameters, gradient, before.velocity, round=0)
    assert distance(state.weights.parameters, expected) < 1e-12


@pytest.mark.parametrize("spoil", [lambda p: p[:-1], lambda p: p * torch.nan, lambda p: p.to(torch.int64)])
def test_a_forged_upload_is_refused_and_the_round_goes_on(spoil: Any) -> None:
    def forged(replies: list[Any]) -> list[Any]:
        return [
            Upload(said.client, said.round, said.attempt, spoil(said.payload)) if said.client == 1 else said
            for said in replies
        ]

    _, rounds = trained(job(**SMALL), reorder=forged)
    assert [done.failed for done in rounds] == ["", "", ""]
    assert all(list(done.gathered.refused) == [1] for done in rounds)


def test_nothing_is_claimed_and_what_a_sketch_hides_is_said() -> None:
    ledger = PrivacyJournal(job(**SMALL)).ledger()
    assert {line.verdict for line in ledger.lines} == {"none"}
    assert any("puts rounds together" in text for text in ledger.unprotected)
    hidden = {release.field: release.hiding for release in ledger.releases if release.field.startswith("train.")}
    assert "outside of a sketch" in hidden["train.parameters"]


def test_what_need_not_travel_is_counted() -> None:
    one = job(**{**SMALL, "sketch_ratio": 3})
    shapes = dict(one.architecture.parameters.sections)
    weights = [shape for shape in shapes.values() if len(shape) == 2]
    assert one.scheme.downlink.spared(one.architecture) == sum(rows * (n - n // 3) for rows, n in weights)


@pytest.mark.parametrize(
    "settings_", [{"sketch_ratio": 1}, {"sketch_layers": "first"}, {"local_steps": 2}, {"local_epochs": 1}], ids=str
)
def test_what_cannot_be_sketched_is_refused(settings_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        job(**SMALL, **settings_)


def test_a_model_without_such_layers_is_refused() -> None:
    architecture, _ = draw(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4)).train(), torch.zeros(2, 4), traced=False)
    with pytest.raises(TraceError):
        Sketched().head_tensors(architecture)
