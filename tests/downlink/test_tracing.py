"""Tracing: torch.fx, torch.export where fx cannot, and a refusal rather than a wrong table."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from downlink.exactness import assert_exact, free_sides, pinned_by
from downlink.networks import IMAGE, VECTOR, Net
from fedveil.downlink import trace
from fedveil.errors import TraceError


class AskingShapes(nn.Module):
    """Every kind of layer behind questions about shapes, which fx refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(4)
        self.body = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.body_norm = nn.BatchNorm2d(4)
        self.wide = nn.Conv2d(4, 6, 1)
        self.bare = nn.BatchNorm2d(6, affine=False)
        self.instance = nn.InstanceNorm2d(6, affine=True)
        self.group = nn.GroupNorm(2, 6)
        self.layer = nn.LayerNorm((4, 4))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 3
        if x.shape[1] > 3:
            raise ValueError("too many channels")
        x = F.relu(self.stem_norm(self.stem(x)), inplace=True)
        x = x + self.body_norm(self.body(x)) if x.dim() == 4 else x
        x = F.max_pool2d(x, 2).to(x.dtype)
        x = torch.relu(self.instance(self.bare(self.wide(x))))
        x = self.group(x)
        first, second = x.chunk(2, 1)
        x = torch.cat([second, self.layer(first)], 1)
        x = F.pad(F.avg_pool2d(self.drop(x), 2), (0, 0, 0, 0))
        return self.head(x.reshape(x.size(0), -1))  # type: ignore[no-any-return]


def test_fx_refuses_the_network_that_asks_for_shapes() -> None:
    with pytest.raises(Exception, match="symbolically traced"):
        fx.Tracer().trace(AskingShapes())


@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("training", [True, False])
def test_what_fx_cannot_trace_goes_through_export_and_is_hidden(training: bool, groups: int) -> None:
    table = assert_exact(AskingShapes().train(training), IMAGE, groups=groups)
    sides = free_sides(table)
    assert {name for name, free in sides.items() if not free} == {"head.bias"}
    assert sides["stem.weight"] == "out"
    assert sides["body.weight"] == sides["wide.weight"] == "out in"
    assert table.pins == ()
    assert table.head is not None
    assert {norm.path for norm in table.norms} == {"stem_norm", "body_norm", "bare", "instance", "group", "layer"}


class AskingAndSharing(nn.Module):
    """Two batch norms that share their affine parameters, behind a question fx refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.one, self.two = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.two.weight, self.two.bias = self.one.weight, self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            raise ValueError
        return self.head(F.relu(self.two(self.b(F.relu(self.one(self.a(x)))))))  # type: ignore[no-any-return]


def test_norms_that_share_parameters_keep_their_own_epsilon_through_export() -> None:
    table = assert_exact(AskingAndSharing(), VECTOR)
    assert {norm.path for norm in table.norms} == {"one", "two"}
    assert table.free() == 12


def test_unknown_operations_pin_through_export_too() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        assert x.shape[1] == 6
        return n.head(F.relu(n.b(torch.sigmoid(n.a(x)))))  # type: ignore[no-any-return]

    table = assert_exact(Net(run, a=nn.Linear(6, 4), b=nn.Linear(4, 5), head=nn.Linear(5, 3)), VECTOR)
    assert pinned_by(table) == {"sigmoid"}
    assert free_sides(table)["b.weight"] == "out"


class Timid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.clamp(-0.01, 0.01)


def test_a_custom_function_behind_export_pins_everything() -> None:
    # Export looks into it and sees only the forward pass.
    def run(n: Net, x: Tensor) -> Tensor:
        assert x.shape[1] == 6
        return n.head(Timid.apply(n.a(x)))  # type: ignore[no-any-return]

    table = assert_exact(Net(run, a=nn.Linear(6, 4), head=nn.Linear(4, 3)), VECTOR)
    assert table.free() == 0
    assert "Timid" in pinned_by(table)
    assert table.head is None


def test_code_that_asks_for_the_mode_is_traced_in_its_own_mode() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        h = n.a(x)
        h = torch.sigmoid(h) if n.training else F.relu(h)
        return n.head(h)  # type: ignore[no-any-return]

    for training, pins in ((True, {"sigmoid"}), (False, set())):
        model = Net(run, a=nn.Linear(6, 4), head=nn.Linear(4, 3)).train(training)
        assert pinned_by(assert_exact(model, VECTOR)) == pins


def test_a_branch_that_fx_takes_wrongly_is_noticed() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        h = n.a(x)
        # A proxy is no Tensor: fx would record a ReLU and hide what the sigmoid pins.
        h = torch.sigmoid(h) if isinstance(h, Tensor) else F.relu(h)
        return n.head(h)  # type: ignore[no-any-return]

    table = assert_exact(Net(run, a=nn.Linear(6, 4), head=nn.Linear(4, 3)), VECTOR)
    assert pinned_by(table) == {"sigmoid"}


def test_parameters_read_by_eager_code_are_noticed() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        size = sum(p.square().sum() for p in n.a.parameters())  # fx would freeze this number
        return n.head(F.relu(n.a(x)) * size)  # type: ignore[no-any-return]

    table = assert_exact(Net(run, a=nn.Linear(6, 4), head=nn.Linear(4, 3)), VECTOR)
    assert free_sides(table)["a.weight"] == ""


@pytest.mark.parametrize("source", ["torch", "python"])
def test_random_branches_in_python_code_are_refused(source: str) -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        draw = float(torch.rand(1)) if source == "torch" else random.random()
        h = n.a(x)
        return n.head(torch.sigmoid(h) if draw < 0.5 else F.relu(h))  # type: ignore[no-any-return]

    with pytest.raises(TraceError, match=r"neither by torch\.fx"):
        trace(Net(run, a=nn.Linear(6, 4), head=nn.Linear(4, 3)), VECTOR)


def test_random_masks_drawn_in_the_forward_pass_are_followed() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        h = F.relu(n.a(x))
        keep = (torch.rand(4) < 0.7).to(x.dtype)
        return n.head(h * keep)  # type: ignore[no-any-return]

    table = assert_exact(Net(run, a=nn.Linear(6, 4), head=nn.Linear(4, 3)), VECTOR)
    assert free_sides(table)["a.weight"] == "out"


def test_control_flow_that_depends_on_values_is_refused_with_a_way_out() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        return n.head(F.relu(n.a(x)) if x.sum() > 0 else n.a(x))  # type: ignore[no-any-return]

    with pytest.raises(TraceError, match="--scheme fedavg"):
        trace(Net(run, a=nn.Linear(6, 4), head=nn.Linear(4, 3)), VECTOR)


def test_a_model_of_two_inputs_is_refused() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    with pytest.raises(TraceError, match="one input tensor"):
        trace(Two(), VECTOR)


def test_a_second_input_with_a_default_is_left_at_it() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
            return self.head(F.relu(self.a(x)) * scale)  # type: ignore[no-any-return]

    assert free_sides(assert_exact(Optional(), VECTOR))["a.weight"] == "out"


def test_an_example_of_one_sample_is_enough_for_batch_norms() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    assert assert_exact(model, VECTOR[:1]).free() == 8


def test_a_trace_leaves_model_example_and_random_state_alone() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    example, state, python = VECTOR.clone(), torch.get_rng_state(), random.getstate()
    trace(model, example)
    assert torch.equal(example, VECTOR)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert "apply" in torch.autograd.Function.__dict__
    assert torch.autograd.Function.apply.__func__.__module__ == "torch.autograd.function"  # type: ignore[attr-defined]


def test_the_model_itself_may_be_one_layer() -> None:
    assert_exact(nn.Linear(6, 3), VECTOR)
    assert_exact(nn.Linear(6, 3), VECTOR, groups=2)
