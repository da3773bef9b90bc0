"""The head noise: what clients see, when it is refused, and how the server undoes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from downlink.exactness import (
    TOLERANCE,
    assert_exact,
    assert_within,
    batch,
    client_output,
    scramble,
    trial,
)
from downlink.networks import IMAGE, SERIES, VECTOR, Net
from fedveil.downlink import HeadNoise, Rescaling, draw, trace
from fedveil.errors import ConfigError, TraceError
from fedveil.secrets import SeededSecrets
from fedveil.work import CrossEntropy, SquareLoss
from fedveil.work.losses import refuse_head_noise

OUTPUTS = 4


def network(*, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, OUTPUTS, bias=bias)
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", range(1, OUTPUTS + 1))
def test_every_number_of_secrets_is_undone(groups: int, bias: bool) -> None:
    assert_exact(network(bias=bias), VECTOR, groups=groups)


@pytest.mark.parametrize("partition", [(0, 0, 0, 0), (0, 1, 0, 0), (2, 1, 0, 1)])
@pytest.mark.parametrize("weight", [1.0, 5.0])
def test_every_partition_of_the_outputs_is_undone(partition: tuple[int, ...], weight: float) -> None:
    assert_exact(network(), VECTOR, partition=partition, loss=SquareLoss(true_weight=weight))


def test_outputs_share_a_secret_as_the_partition_says() -> None:
    partition = (1, 0, 1, 1)
    architecture, weights = draw(network().double(), VECTOR.double(), traced=True)
    downlink = Rescaling(head=HeadNoise(None, partition=partition))
    assert downlink.head_tensors(architecture) == 2 + 2
    for round in range(3):
        stream = SeededSecrets(0).stream("veil", round)
        head = downlink.veil(architecture, weights, stream=stream, head_level=None).broadcast().head
        assert head is not None
        assert (tuple(head.groups.tolist()), head.count) == (partition, 2)
    with pytest.raises(ConfigError, match="names 3 outputs, and the model has 4"):
        Rescaling(head=HeadNoise(None, partition=(0, 1, 0))).head_tensors(architecture)


@pytest.mark.parametrize("groups", [0, 1, 2, OUTPUTS])
def test_weighted_outputs_and_scaled_targets_are_undone(groups: int) -> None:
    assert_exact(network(), VECTOR, groups=groups, loss=SquareLoss(target_scale=3.0, true_weight=5.0))


@pytest.mark.parametrize("groups", [0, 1, OUTPUTS])
def test_regression_targets_are_undone(groups: int) -> None:
    assert_exact(network(), VECTOR, groups=groups, regression=True)


def test_cross_entropy_without_head_noise_is_exact() -> None:
    assert_exact(network(), VECTOR, loss=CrossEntropy())


def test_cross_entropy_with_head_noise_is_refused_with_both_ways_out() -> None:
    with pytest.raises(ConfigError, match=r"--loss square.*--no-head-noise"):
        refuse_head_noise(CrossEntropy())


def test_weighted_outputs_without_their_own_betas_are_refused() -> None:
    # One φ_β for all groups would be silently wrong.
    model = network().double()
    architecture, weights = draw(model, VECTOR.double(), traced=True)
    veil = Rescaling(head=HeadNoise(groups=2)).veil(
        architecture, weights, stream=SeededSecrets(0).stream("veil"), head_level=None
    )
    public = veil.broadcast().head
    assert public is not None
    output, target = torch.randn(3, OUTPUTS).double(), torch.tensor([0, 1, 2])
    with pytest.raises(ConfigError, match="true_weight"):
        SquareLoss(true_weight=2.0).basis(output, torch.ones(3).double(), target, public)


@pytest.mark.parametrize("strength", [0.1, 3.0, 10.0])
def test_any_strength_is_undone(strength: float) -> None:
    assert_exact(network(), VECTOR, groups=2, strength=strength)


def test_clients_do_not_see_the_true_outputs() -> None:
    model = network().double()
    scramble(model)
    x = batch(VECTOR.double(), 5)
    architecture, weights = draw(model, VECTOR.double(), traced=True)
    veil = Rescaling(head=HeadNoise(groups=OUTPUTS)).veil(
        architecture, weights, stream=SeededSecrets(0).stream("veil"), head_level=None
    )
    true = model(x).detach()
    seen = client_output(architecture, veil.broadcast(), x)
    assert float((seen - true).abs().min()) > 1e-3 * float(true.abs().max())


def test_a_linear_model_is_its_own_head() -> None:
    # α does not depend on any parameter, so that φ_β has no gradient at all.
    assert_exact(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), IMAGE, groups=3)


def test_convolutional_networks_with_head_noise() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    for groups in (1, 3):
        assert_exact(model, IMAGE, groups=groups)


def test_float32_stays_within_a_thousandth_at_strength_one() -> None:
    model = network()
    scramble(model)
    for groups in (0, 1, OUTPUTS):
        assert_within(trial(model, VECTOR, groups=groups), 1e-3)


def test_the_number_of_groups_must_fit_the_outputs() -> None:
    architecture, _ = draw(network(), VECTOR, traced=True)
    for groups in (0, OUTPUTS + 1):
        with pytest.raises(ConfigError, match="choose between 1 and 4"):
            Rescaling(head=HeadNoise(groups=groups)).head_tensors(architecture)
    assert Rescaling(head=HeadNoise(groups=None)).head_tensors(architecture) == OUTPUTS + 2
    assert Rescaling(head=HeadNoise(groups=2, weighted_outputs=True)).head_tensors(architecture) == 5
    assert Rescaling().head_tensors(architecture) == 1


def functional_head(n: Net, x: Tensor) -> Tensor:
    return F.linear(F.relu(n.a(x)), n.head.weight, n.head.bias)  # type: ignore[arg-type]


def tied_head(n: Net, x: Tensor) -> Tensor:
    return n.head(F.relu(n.head(x)))  # type: ignore[no-any-return]


def changed_in_place(n: Net, x: Tensor) -> Tensor:
    y = n.head(F.relu(n.a(x)))
    y.mul_(2.0)
    return y  # type: ignore[no-any-return]


def changed_by_assignment(n: Net, x: Tensor) -> Tensor:
    y = n.head(F.relu(n.a(x)))
    y *= 2.0
    return y  # type: ignore[no-any-return]


def changed_through_a_view(n: Net, x: Tensor) -> Tensor:
    y = n.head(F.relu(n.a(x)))
    y.view(-1).relu_()
    return y  # type: ignore[no-any-return]


REFUSED = {
    "softmax after it": lambda n, x: torch.softmax(n.head(F.relu(n.a(x))), 1),
    "scaled": lambda n, x: n.head(F.relu(n.a(x))) * 2,
    "a slice": lambda n, x: n.head(F.relu(n.a(x)))[:, :3],
    "called as a function": functional_head,
    "used twice": tied_head,
    "changed in place": changed_in_place,
    "changed by assignment": changed_by_assignment,
    "changed through a view": changed_through_a_view,
    "a sum of two": lambda n, x: n.head(F.relu(n.a(x))) + n.head(F.relu(n.a(x))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_head_noise_is_refused_unless_the_output_is_the_last_layers(case: str) -> None:
    model = Net(REFUSED[case], a=nn.Linear(6, 6), head=nn.Linear(6, 6))
    table = assert_exact(model, VECTOR)
    assert table.head is None
    architecture, _ = draw(model, VECTOR.double(), traced=True)
    with pytest.raises(TraceError, match="Head noise cannot be used"):
        Rescaling(head=HeadNoise()).head_tensors(architecture)


def test_head_noise_is_refused_for_a_tied_last_layer() -> None:
    model = Net(lambda n, x: n.head(F.relu(n.a(x))), a=nn.Linear(6, 6), head=nn.Linear(6, 6))
    model.head.weight = model.a.weight  # type: ignore[union-attr,assignment]
    table = assert_exact(model, VECTOR)
    assert table.head is None
    assert "more than once" in table.head_refusal


def test_head_noise_is_refused_for_one_vector_per_step() -> None:
    model = nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 4))
    table = assert_exact(model, SERIES, regression=True)
    assert table.head is None
    assert "one vector per sample" in table.head_refusal


def test_head_noise_is_refused_for_a_convolution_at_the_end() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 6), nn.Flatten())
    assert trace(model, IMAGE).head is None


def test_a_weight_that_an_idle_layer_shares_does_not_mislead_the_head() -> None:
    model = Net(lambda n, x: n.head(F.relu(n.a(x))), idle=nn.Linear(4, 3), a=nn.Linear(6, 4), head=nn.Linear(4, 3))
    model.idle.weight = model.head.weight  # type: ignore[union-attr,assignment]
    table = assert_exact(model, VECTOR, groups=3)
    assert table.head is not None
    assert table.head.path == "head"


def test_the_next_rounds_level_is_the_size_of_alpha() -> None:
    model = network().double()
    scramble(model)
    found = trial(model, VECTOR.double(), groups=2)
    assert_within(found, TOLERANCE)
    architecture, weights = draw(model, VECTOR.double(), traced=True)
    for level in (0.5, 2.0):
        veil = Rescaling(head=HeadNoise()).veil(
            architecture, weights, stream=SeededSecrets(0).stream("veil"), head_level=level
        )
        plain = Rescaling().veil(architecture, weights, stream=SeededSecrets(0).stream("veil"), head_level=None)
        last = architecture.parameters.split(veil.broadcast().parameters - plain.broadcast().parameters)["5.weight"]
        public = veil.broadcast().head
        assert public is not None
        gamma = last[:, 0] / public.vector
        sizes = gamma.abs() * level
        assert bool(((sizes >= 0.5) & (sizes < 1.5)).all())


def test_the_size_of_every_secret_is_its_own() -> None:
    model = network().double()
    architecture, weights = draw(model, VECTOR.double(), traced=True)
    veil = Rescaling(head=HeadNoise(groups=None)).veil(
        architecture, weights, stream=SeededSecrets(0).stream("veil"), head_level=1.0
    )
    assert veil._head is not None
    gamma = veil._head.gamma
    assert len(torch.unique(gamma.abs())) == len(gamma) > 1


def test_embeddings_take_head_noise_in_the_first_round() -> None:
    model = Net(lambda n, x: n.head(n.table(x).mean(1)), table=nn.Embedding(7, 5), head=nn.Linear(5, 3))
    assert_exact(model, torch.tensor([[0, 1, 2], [6, 4, 5]]), groups=2)
