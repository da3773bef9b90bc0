"""A user's own factory is found, called with what it takes, and checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedveil
from fedveil import models
from fedveil.errors import ConfigError
from fedveil.models.building import refuse_shared_memory
from fedveil.own_code import OwnCode

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Settings:
    width: int = 4

class Zoo:
    @staticmethod
    def flat(outputs):
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(outputs))

def small(input_shape, *, outputs, width=4):
    inputs = input_shape[0] * input_shape[1]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.Linear(width, outputs))

def everything(**settings):
    assert settings == {"input_shape": (6,), "outputs": 2, "vocabulary": 9, "width": 3}
    return nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(18, 2))

def half_frozen(outputs):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12).eval(), nn.Linear(12, outputs))

def number(outputs): return outputs
def tuple_model(outputs): return TupleModel()
class TupleModel(nn.Module):
    def forward(self, x): return x, x
def wrong_size(outputs): return nn.Sequential(nn.Flatten(), nn.Linear(12, outputs + 1))
def wrong_input(outputs): return nn.Linear(99, outputs)
def needs_more(outputs, secret): return nn.Linear(12, outputs)
def breaks(outputs): raise RuntimeError("no luck")
constant = 3
"""


@pytest.fixture
def zoo(tmp_path: Path) -> str:
    path = tmp_path / "zoo.py"
    path.write_text(SOURCE)
    return str(path)


def make(reference: str, **options: int) -> nn.Module:
    return models.build(OwnCode(reference), input_shape=(3, 4), outputs=5, **options)


def test_a_factory_in_a_file_is_seeded_and_gets_its_options(zoo: str) -> None:
    first, same = make(f"{zoo}:small", width=7), make(f"{zoo}:small", width=7)
    assert first.get_parameter("1.weight").shape == (7, 12)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))


def test_a_factory_in_a_module_and_nested_names_work(zoo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(zoo).parent))
    assert make("zoo:Zoo.flat")(torch.zeros(2, 3, 4)).shape == (2, 5)


def test_a_factory_with_keywords_gets_everything(zoo: str) -> None:
    models.build(OwnCode(f"{zoo}:everything"), input_shape=(6,), outputs=2, vocabulary=9, width=3)


def test_the_check_keeps_frozen_parts_frozen(zoo: str) -> None:
    model = make(f"{zoo}:half_frozen")
    assert [m.training for m in model.modules()] == [True, True, False, True]


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("number", "returned 5, not a torch.nn.Module"),
        ("tuple_model", r"returns a tuple .* needs \(2, 5\)"),
        ("wrong_size", r"returns \(2, 6\) .* needs \(2, 5\): make its last layer give 5"),
        ("wrong_input", r"failed on a batch of shape \(2, 3, 4\)"),
        ("needs_more", "missing a required argument: 'secret'.*Give defaults"),
        ("breaks", r"called with outputs=5, raised RuntimeError: no luck"),
        ("constant", "is 3, not a callable"),
        ("absent", r"zoo\.py was imported but has no 'absent'\.$"),
        ("smal", r"has no 'smal'\. Did you mean 'small'\?"),
        ("", "not of the form package.module:factory"),
    ],
)
def test_a_faulty_factory_is_refused_with_the_reason(zoo: str, factory: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(f"{zoo}:{factory}")


def test_an_option_the_factory_does_not_take_is_refused(zoo: str) -> None:
    with pytest.raises(ConfigError, match=r"no option 'widht'\. Did you mean 'width'\? It takes: width\."):
        make(f"{zoo}:small", widht=3)


def test_import_failures_say_what_was_tried(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import surely_not_installed")
    with pytest.raises(ConfigError, match=r"Tried to load a model from .*broken\.py: ModuleNotFoundError"):
        make(f"{broken}:factory")
    with pytest.raises(ConfigError, match="but there is no such file"):
        make(f"{tmp_path}/nowhere.py:factory")
    with pytest.raises(ConfigError, match=r"Tried to import the module 'surely\.absent'.*PYTHONPATH"):
        make("surely.absent:factory")


def test_a_failed_build_leaves_the_global_random_state_alone(zoo: str) -> None:
    torch.manual_seed(3)
    with pytest.raises(ConfigError):
        make(f"{zoo}:wrong_size")
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))


class Shared(nn.Module):
    """Two layers, something beside them, and two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm1, self.norm2 = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.b(self.norm1(self.a(x))))  # type: ignore[no-any-return]


def _buffer(net: Shared) -> None:
    net.register_buffer("twin", net.a.weight.detach()[1:])


def _parameter(net: Shared) -> None:
    net.b.weight = nn.Parameter(net.a.weight.detach())


def _statistics(net: Shared) -> None:
    net.norm2.running_mean = net.norm1.running_mean


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (_buffer, "'a.weight' and 'twin'"),
        (_parameter, "'a.weight' and 'b.weight'"),
        (_statistics, "'norm1.running_mean' and 'norm2.running_mean'"),
    ],
)
def test_tensors_in_each_others_memory_are_refused_under_every_scheme(
    share: Callable[[Shared], None], said: str
) -> None:
    net = Shared()
    share(net)
    clients = [(torch.randn(8, 4), torch.arange(8) % 4)] * 3
    with pytest.raises(ConfigError, match=said):
        fedveil.train(net, clients, scheme="fedavg", rounds=1, progress=False)


def test_tied_layers_shared_norms_constants_and_parts_of_one_memory_are_fine() -> None:
    net = Shared()
    net.b.weight, net.norm2 = net.a.weight, net.norm1
    constant = torch.arange(8.0)
    for name, part in (("c", constant[:4]), ("d", constant[2:6]), ("e", constant[:4])):
        net.register_buffer(name, part)
    whole = torch.randn(8)
    net.a.bias, net.b.bias = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
    refuse_shared_memory(net)
    refuse_shared_memory(nn.Sequential(nn.LazyLinear(3), nn.LSTM(4, 4)))
    with torch.device("meta"):
        refuse_shared_memory(Shared())


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def _tuned() -> nn.Module:
    net = _net()
    net[0].weight.register_hook(lambda grad: grad * 0)  # type: ignore[operator, union-attr]
    return net


def _tuned_after() -> nn.Module:
    net = _net()
    net[0].weight.register_post_accumulate_grad_hook(lambda weight: None)  # type: ignore[operator, union-attr]
    return net


class Overwriting(nn.Module):
    """Changes what its own gradient needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.first(x))
        hidden += 1
        scores: Tensor = self.last(hidden)
        return scores


class Remembering(nn.Module):
    """Keeps what it computed from a parameter, as the older weight normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.doubled = 2.0 * self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        self.doubled = 2.0 * self.last.weight
        return nn.functional.linear(x, self.doubled, self.last.bias)


@pytest.mark.parametrize("scheme", ["fedavg", "lossless"])
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (_tuned, "'0.weight' of the model has a hook"),
        (_tuned_after, "'0.weight' of the model has a hook"),
        (lambda: torch.jit.trace(_net(), torch.zeros(2, 4)), "'Sequential' takes cannot be read"),
        (Overwriting, "'Overwriting' cannot be trained: .* fails with RuntimeError"),
        (Remembering, "'doubled' of the model is computed from its parameters"),
    ],
    ids=["hook", "post-accumulate hook", "compiled", "in place", "kept"],
)
def test_what_training_would_ignore_or_trip_over_is_refused_at_once(
    make: Callable[[], nn.Module], complaint: str, scheme: str
) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    with pytest.raises(ConfigError, match=complaint):
        fedveil.train(make(), [(x, x[:, :2].argmax(1))] * 2, scheme=scheme, rounds=1, min_coverage=0.0, progress=False)
