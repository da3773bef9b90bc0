"""A private task beside the shared one: what is sent, what stays, and who reads the gradient all the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from driving import drive
from federation import distance, job, reordered, server_of, trained
from fedveil import data, models
from fedveil.audit.attacks.deep_leakage import Search, idlg, polarised
from fedveil.audit.attacks.gradients import Problem
from fedveil.audit.metrics import psnr
from fedveil.downlink.architecture import draw
from fedveil.downlink.plain import Unveiled
from fedveil.engine import LocalEngine
from fedveil.engine.local import Absent
from fedveil.errors import ConfigError, ProtocolError, TraceError
from fedveil.flower.client_memory import Memory, Promise, Remembered
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.messages import Upload
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role, fresh_state
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.work import Batches, CrossEntropy, SquareLoss
from fedveil.work.batches import Schedule
from fedveil.work.messages import ClientData, KeptTensors, Workspace
from fedveil.work.polarised import Polarised, _rows, head_of, reading

SMALL: dict[str, Any] = {"scheme": "spn", "rounds": 3, "loss": "cross-entropy", "options": {"depth": 2, "width": 8}}


def heard(one: Job, absent: Absent | None = None) -> tuple[list[Upload], LocalEngine]:
    """The uploads of a whole run, and the engine with what its clients remember."""
    said: list[Any] = []
    keep = lambda replies: said.extend(replies) or replies  # noqa: E731
    engine = reordered(LocalEngine(client_role(one), one.pool, absent=absent), keep)
    drive(engine, server_of(one).run(), on_round=lambda done: None)
    return said, engine


def explicit(one: Job, module: nn.Module, kept: KeptTensors, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of both losses together, written out: by parameter, and V's."""
    work: Any = one.scheme.work
    head, codes = kept.tensors["head"].clone().requires_grad_(True), kept.tensors["codes"]
    features = module[:-1](x)  # type: ignore[index]
    bits = features @ head.T
    hinge = torch.stack([(work.margin - bits[i] * codes[y[i]]).clamp_min(0).sum() / work.bits for i in range(len(y))])
    total = work.shared * one.loss.mean(module(x), y) + work.private * hinge.mean()
    named = dict(module.named_parameters())
    *grads, own = torch.autograd.grad(total, [*named.values(), head])
    return dict(zip(named, grads, strict=True)), own


def test_what_is_sent_is_the_gradient_of_both_losses_and_the_private_head_takes_its_step_at_home() -> None:
    one = job(**{**SMALL, "rounds": 2, "private_weight": 3.0, "shared_weight": 0.5, "private_bits": 5})
    state = fresh_state(one)
    workspace = Workspace(one.architecture, one.scheme.layout(one.architecture), client_role(one)._secrets)
    broadcast = one.scheme.downlink.veil(
        one.architecture, state.weights, stream=one.secrets.stream("veil", 0), head_level=None
    ).broadcast()
    data_ = dataclasses.replace(one.pool.clients[1], kept=KeptTensors())
    layer = head_of(one.architecture.skeleton)
    first = one.scheme.work._kept(data_, layer, workspace.secrets)  # type: ignore[attr-defined]
    sent = one.scheme.work.run(workspace, broadcast, data_, round=0)
    x, y = data_.take(one.scheme.work.batches.indices(client=1, samples=len(data_), step=0))  # type: ignore[attr-defined]
    module = models.build("mlp", input_shape=(64,), outputs=10, seed=1, depth=2, width=8).double()
    torch.nn.utils.vector_to_parameters(state.weights.parameters, module.parameters())
    network = nn.Sequential(*[layer for layer in module.modules() if not list(layer.children())])
    grads, own = explicit(one, network, KeptTensors(first), x, y)
    parts = one.scheme.layout(one.architecture).split(sent / len(data_))
    expected = torch.cat([grad.flatten() for grad in grads.values()])
    torch.testing.assert_close(parts["gradients"][0], expected, rtol=0, atol=1e-12)
    assert float(parts["values"]) == pytest.approx(one.loss.mean(network(x), y).item(), abs=1e-12)
    assert data_.kept is not None
    stepped = first["head"] - one.scheme.work.schedule.at(0) * own  # type: ignore[attr-defined]
    torch.testing.assert_close(data_.kept.tensors["head"], stepped, rtol=0, atol=1e-12)
    assert torch.equal(data_.kept.tensors["codes"], first["codes"])
    # The last layer's own gradient is that of the shared loss: whoever reads labels off it still does.
    plain = torch.autograd.grad(0.5 * one.loss.mean(network(x), y), list(network[-1].parameters()))
    torch.testing.assert_close(list(grads.values())[-2:], list(plain), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "local",
    [
        {},
        {"local_steps": 2, "client_momentum": 0.5},
        {"local_epochs": 1},
        {"local_steps": 2, "client_optimiser": "adam", "client_weight_decay": 0.1},
    ],
    ids=str,
)
def test_without_a_private_loss_it_is_plain_averaging(local: dict[str, Any]) -> None:
    ours = trained(job(**SMALL, batch_size=32, private_weight=0.0, **local))[0].weights.parameters
    theirs = trained(job(**{**SMALL, "scheme": "fedavg"}, batch_size=32, **local))[0].weights.parameters
    with_it = trained(job(**SMALL, batch_size=32, **local))[0].weights.parameters
    assert distance(ours, theirs) < 1e-12
    assert distance(with_it, theirs) > 1e-6


def test_every_client_keeps_a_head_and_codes_of_its_own_and_sends_neither() -> None:
    one = job(**SMALL, local_steps=2)
    said, engine = heard(one)
    length = job(**{**SMALL, "scheme": "fedavg"}, local_steps=2).scheme.layout(one.architecture).length
    assert {len(upload.payload) for upload in said} == {length}
    kept = engine.kept()
    assert sorted(kept) == [0, 1, 2, 3, 4]
    for name, shape in (("head", (64, 8)), ("codes", (10, 64))):
        each = [kept[client].tensors[name] for client in kept]
        assert all(tuple(value.shape) == shape for value in each)
        assert not torch.equal(each[0], each[1])
    assert bool((kept[0].tensors["codes"].abs() == 1).all())
    assert "hidden" in repr(kept[0])
    assert "tensor" not in repr(engine.state_of(0))


def test_numbers_get_two_codes_by_the_median_of_the_clients_own_targets() -> None:
    work = Polarised(SquareLoss(), Batches(0, 0), Schedule(0.1), bits=4)
    architecture, weights = draw(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double().train(),
                                 torch.zeros(2, 3, dtype=torch.float64), traced=False)  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, 3, dtype=torch.float64, generator=generator)
    y = torch.arange(9, dtype=torch.float64)[:, None]
    shared = ClientData(0, torch.cat([x, x]), torch.cat([y, y + 100]), rows=torch.arange(9), kept=KeptTensors())
    workspace = Workspace(architecture, work.layout(architecture, tensors=1))
    sent = work.run(workspace, Unveiled(architecture, weights).broadcast(), shared, round=0)
    assert shared.kept is not None
    codes = shared.kept.tensors["codes"]
    assert codes.shape == (2, 4)
    assert _rows(shared, y).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert bool(sent.isfinite().all())


def test_a_sealed_state_holds_what_its_work_keeps_and_an_older_one_nothing(tmp_path: Path) -> None:
    kept = KeptTensors({"head": torch.randn(4, 3, dtype=torch.float64), "codes": torch.ones(2, 4)})
    sealed = ClientState(3, answered=(1, 0), kept=kept).seal(bytes(32))
    again = ClientState.unseal(sealed, bytes(32)).kept
    assert again is not None
    assert {name: value.dtype for name, value in again.tensors.items()} == {
        "head": torch.float64,
        "codes": torch.float32,
    }
    assert all(torch.equal(again.tensors[name], kept.tensors[name]) for name in kept.tensors)
    assert kept.tensors["head"].numpy().tobytes() not in sealed
    assert ClientState.unseal(ClientState(3).seal(bytes(32)), bytes(32)).kept is None
    with pytest.raises(ProtocolError):
        ClientState.unseal(sealed, bytes([1] * 32))


def test_a_client_on_its_own_machine_has_its_head_after_a_restart_and_after_a_promise_that_was_broken(
    tmp_path: Path,
) -> None:
    kept = KeptTensors({"head": torch.randn(4, 3), "codes": torch.ones(2, 4)})
    lineage, state = "0" * 32, ClientState(0, kept=kept)
    memory = Memory(tmp_path / "state")
    memory.keep(lineage, Remembered(state, 0, "setup"))
    memory.promise(lineage, Promise(dataclasses.replace(state, answered=(0, 0)), "message", 1))
    recalled = Memory(tmp_path / "state").recall(lineage, device=torch.device("cpu"))
    assert recalled is not None
    assert recalled.promised.answered == (0, 0)
    for one in (recalled.state.kept, recalled.promised.kept):
        assert one is not None
        assert torch.equal(one.tensors["head"], kept.tensors["head"])


def test_a_round_with_a_dropout_goes_on_and_leaves_that_clients_head_as_it_was() -> None:
    absent = lambda ask, client: client == 2 and ask.round == 1  # noqa: E731
    _, rounds = trained(job(**SMALL), absent=absent)
    assert [(done.failed, len(done.gathered.arrived)) for done in rounds] == [("", 5), ("", 4), ("", 5)]
    heads = []
    for count in (1, 2):
        kept = heard(job(**{**SMALL, "rounds": count}), absent)[1].kept()
        heads.append({client: each.tensors["head"] for client, each in kept.items()})
    assert [client for client in range(5) if torch.equal(heads[0][client], heads[1][client])] == [2]


def test_a_forged_upload_is_refused_and_the_round_goes_on() -> None:
    def forged(replies: list[Any]) -> list[Any]:
        return [
            Upload(said.client, said.round, said.attempt, said.payload[:-1]) if said.client == 1 else said
            for said in replies
        ]

    _, rounds = trained(job(**SMALL), reorder=forged)
    assert [done.failed for done in rounds] == ["", "", ""]
    assert all(list(done.gathered.refused) == [1] for done in rounds)


def test_nothing_is_claimed() -> None:
    ledger = PrivacyJournal(job(**SMALL)).ledger()
    assert {line.verdict for line in ledger.lines} == {"none"}
    assert any("nothing is proven" in text for text in ledger.unprotected)
    assert not [release for release in ledger.releases if "head" in release.field or "code" in release.field]


@pytest.mark.parametrize(
    "wrong",
    [
        {"private_bits": 0},
        {"private_margin": -1.0},
        {"private_weight": float("nan")},
        {"shared_weight": 0.0},
        {"loss": "binary-cross-entropy"},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        job(**{**SMALL, **wrong})


def test_a_model_that_does_not_end_in_a_linear_layer_is_refused() -> None:
    work = Polarised(CrossEntropy(), Batches(0, 0), Schedule(0.1))
    example = torch.zeros(2, 1, 4, 4)
    ends = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())
    with pytest.raises(TraceError):
        work.layout(draw(ends.train(), example, traced=False)[0], tensors=1)
    with pytest.raises(TraceError), reading(head_of(later := nn.Sequential(nn.Linear(4, 3), nn.Tanh()))) as read:
        read.features(later(torch.zeros(2, 4)))


def test_whoever_fits_the_private_loss_too_rebuilds_what_a_plain_search_does_not() -> None:
    """A private loss of fifty times its usual weight: the gradient is hardly the shared one's any more."""
    split = data.load("digits", seed=3)
    module = models.build("lenet-sigmoid", input_shape=split.train.input_shape, outputs=10, seed=1).double()
    x, y, head = split.train.x[1:2].double(), split.train.y[1:2], head_of(module)
    generator = torch.Generator().manual_seed(0)
    secret = (
        torch.rand(64, head.in_features, dtype=torch.float64, generator=generator) * 2 - 1
    ) / head.in_features**0.5
    codes = torch.randn(10, 64, dtype=torch.float64, generator=generator).sign()
    with reading(head) as read:
        output = module(x)
        total = CrossEntropy().mean(output, y)
        total = total + 50 * (1 - (read.features(output) @ secret.T) * codes[y]).relu().mean()
    gradient = torch.cat([grad.flatten() for grad in torch.autograd.grad(total, list(module.parameters()))])
    peak = float(split.train.x.max() - split.train.x.min())
    box = (float(split.train.x.min()), float(split.train.x.max()))
    problem = Problem(module, CrossEntropy(), gradient, tuple(x.shape[1:]), 10, box=box)
    likeness = {}
    for search in (idlg, polarised):
        found = search(problem, generator=torch.Generator().manual_seed(0), search=Search(steps=8, restarts=1))
        assert torch.equal(found.labels, y)
        likeness[search] = float(psnr(found.inputs, x, peak=peak))
    assert likeness[idlg] < 15
    assert likeness[polarised] > 40
