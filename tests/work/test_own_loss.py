"""Losses as people write them: PyTorch's modules and own functions, under schemes that allow them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedveil
from fedveil.downlink.messages import PublicHead
from fedveil.downlink.rescaling import HeadSecret
from fedveil.errors import ConfigError, DataError
from fedveil.work import BinaryCrossEntropy, CrossEntropy, SquareLoss
from fedveil.work.own_loss import OwnLoss, own_loss, tried

CLASSES, FEATURES = 3, 5
WEIGHTS = torch.tensor([0.5, 3.0, 1.25])
EXACT: dict[str, Any] = {"rounds": 4, "seed": 1, "lr": 0.3, "dtype": "float64", "progress": False}


def net(outputs: int = CLASSES) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, outputs))


def clients(kind: str = "classes", count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Clients of different sizes, so that a mean over clients is not one over samples."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for client in range(count):
        x = torch.randn(10 + 4 * client, FEATURES, generator=generator, dtype=torch.float64)
        targets = {"classes": x[:, :CLASSES].argmax(1), "labels": (x[:, :CLASSES] > 0).double(), "numbers": x[:, :2]}
        made.append((x, targets[kind]))
    return made


def huber(output: Tensor, target: Tensor) -> Tensor:
    return F.huber_loss(output, target, reduction="none").sum(1)


def pairwise(output: Tensor, target: Tensor) -> Tensor:
    """A loss that compares samples with each other."""
    return F.cross_entropy(output - output.mean(0), target)


OWN: dict[str, tuple[str, int, Any]] = {
    "weighted cross-entropy": ("classes", CLASSES, nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1)),
    "several labels": ("labels", CLASSES, nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)),
    "huber module": ("numbers", 2, nn.HuberLoss(delta=0.5)),
    "lambda": ("numbers", 2, lambda output, target: (output - target).abs().mean()),
    "per-sample function": ("numbers", 2, huber),
    "mixes samples": ("classes", CLASSES, pairwise),
    "margins": ("classes", CLASSES, nn.MultiMarginLoss()),
}


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


@pytest.mark.parametrize("name", OWN)
def test_a_veil_without_head_noise_ends_in_plain_averagings_model_under_any_loss(name: str) -> None:
    kind, outputs, loss = OWN[name]
    plain, veiled = (
        fedveil.train(net(outputs), clients(kind), scheme=scheme, loss=loss, **EXACT, **more)
        for scheme, more in (("fedavg", {}), ("lossless", {"head_noise": False}))
    )
    assert float((parameters(plain.model) - parameters(veiled.model)).abs().max()) < 1e-9
    assert plain.metrics[-1]["loss"] < plain.metrics[0]["loss"]
    assert float((parameters(plain.model) - parameters(net(outputs))).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["weighted cross-entropy", "several labels", "huber module", "per-sample function"])
def test_plain_averaging_trains_the_mean_over_all_samples_of_the_loss(name: str) -> None:
    """One step of everybody is a step of PyTorch's on all samples, with the loss unreduced: sizes and weights count."""
    kind, outputs, loss = OWN[name]
    model, data = net(outputs).double(), clients(kind)
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    unreduced = loss if not isinstance(loss, nn.Module) else own_loss(loss, dtype=x.dtype, device=x.device).compute
    value = unreduced(model(x), y).mean()
    value.backward()  # type: ignore[no-untyped-call]
    moved = torch.cat([(p - 0.3 * p.grad).detach().flatten() for p in model.parameters()])  # type: ignore[operator]
    done = fedveil.train(net(outputs), data, scheme="fedavg", loss=loss, **{**EXACT, "rounds": 1})
    assert float((parameters(done.model) - moved).abs().max()) < 1e-12
    assert done.metrics[0]["loss"] == pytest.approx(float(value.detach()), rel=1e-12)


def hardest(output: Tensor, target: Tensor) -> Tensor:
    """Online hard example mining: of a small batch it is the mean."""
    losses = F.cross_entropy(output, target, reduction="none")
    return losses.topk(min(256, len(losses))).values.mean()


@pytest.mark.parametrize(
    ("loss", "separable"),
    [
        (hardest, False),
        (lambda output, target: F.cross_entropy(output, target, ignore_index=29), False),
        (lambda output, target: F.cross_entropy(output, target, weight=torch.arange(1, 31).to(output)), False),
        (lambda output, target: F.cross_entropy(output, target), True),
        (lambda output, target: F.cross_entropy(output, target, reduction="none"), True),
    ],
    ids=["hardest", "a class left out", "weighted", "mean", "per sample"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_is_tried_on_a_large_batch_and_every_class(loss: Any, separable: bool, dtype: torch.dtype) -> None:
    """What a few samples of the first classes do not tell."""
    output = torch.randn(16, 30, dtype=dtype)

    made = own_loss(loss, dtype=dtype, device=torch.device("cpu"))
    assert tried(made, output, torch.arange(16)).separable is separable


def test_a_loss_of_ones_own_is_never_taken_in_parts() -> None:
    x = torch.randn(600, 1, 8, 8)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))
    seen: list[int] = []

    def counted(output: Tensor, target: Tensor) -> Tensor:
        seen.append(len(target))
        return F.cross_entropy(output, target)

    parts = [(x[:300], torch.arange(300) % 3), (x[300:], torch.arange(300) % 3)]
    fedveil.train(network, parts, scheme="fedavg", loss=counted, rounds=1, lr=0.1, seed=1, progress=False)
    assert seen[-2:] == [300, 300]


def test_schemes_that_clip_refuse_a_network_that_fails_on_one_sample_before_anything_is_sent() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.batch_norm(self.first(x), None, None, training=True))  # type: ignore[no-any-return]

    with pytest.raises(ConfigError, match=r"fails on a single one with ValueError.*use GroupNorm"):
        fedveil.train(Normed(), clients(), scheme="ldp", epsilon=8.0, rounds=1, lr=0.1, progress=False)


def test_class_weights_multiply_a_samples_loss_and_are_not_divided_away() -> None:
    output, target = torch.randn(6, CLASSES, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 1, 0])
    weights = tuple(WEIGHTS.tolist())
    losses = F.cross_entropy(output, target, reduction="none")
    assert torch.allclose(CrossEntropy(weights).mean(output, target), (losses * WEIGHTS[target]).mean())
    smoothed = F.cross_entropy(output, target, label_smoothing=0.2)
    assert torch.allclose(CrossEntropy(smoothing=0.2).mean(output, target), smoothed)
    alone = CrossEntropy(weights).mean(output[1:2], target[1:2])
    assert torch.allclose(alone, 3.0 * losses[1]), "PyTorch's own mean would give the loss without its weight"


@pytest.mark.parametrize(("true_weight", "smoothing"), [*itertools.product((1.0, 4.0), (0.0, 0.3))])
def test_head_noise_is_undone_under_class_weights_and_label_smoothing(true_weight: float, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(9)
    loss = SquareLoss(2.0, true_weight, tuple(WEIGHTS.tolist()), smoothing)
    true, alpha = (torch.randn(7, *rest, generator=generator, dtype=torch.float64) for rest in ((CLASSES,), ()))
    target = torch.randint(0, CLASSES, (7,), generator=generator)
    public = PublicHead(torch.randn(CLASSES, dtype=torch.float64), torch.tensor([0, 1, 1]), 2, true_weight != 1.0)
    secret = HeadSecret(public, torch.tensor([0.7, -1.2], dtype=torch.float64))
    phi = loss.basis(true + alpha[:, None] * secret.noise(), alpha, target, public)
    assert float(secret.coefficients() @ phi) == pytest.approx(float(loss.mean(true, target)), rel=1e-10)


def test_lossless_with_head_noise_takes_class_weights_with_the_square_loss() -> None:
    given = {"loss": "square", "class_weights": WEIGHTS, "label_smoothing": 0.1, "lr": 0.05}
    plain, veiled = (
        fedveil.train(net(), clients(), scheme=scheme, **{**EXACT, **given}) for scheme in ("fedavg", "lossless")
    )
    assert float((parameters(plain.model) - parameters(veiled.model)).abs().max()) < 1e-9
    bare = fedveil.train(net(), clients(), scheme="fedavg", **{**EXACT, "loss": "square", "lr": 0.05})
    assert float((parameters(plain.model) - parameters(bare.model)).abs().max()) > 1e-3


def test_clipped_samples_feel_their_class_weights() -> None:
    """With a clip that never bites and hardly any noise, a private step is the step on the weighted loss."""
    given = {**EXACT, "rounds": 1, "clip": 50.0, "epsilon": 1e7, "lr": 0.1}
    loss = nn.CrossEntropyLoss(weight=WEIGHTS)
    private = fedveil.train(net(), clients(), scheme="ldp", loss=loss, **given)
    plain, bare = (
        fedveil.train(net(), clients(), scheme="fedavg", loss=used, **{**EXACT, "rounds": 1, "lr": 0.1})
        for used in (loss, nn.CrossEntropyLoss())
    )
    near = float((parameters(private.model) - parameters(plain.model)).norm())
    far = float((parameters(bare.model) - parameters(plain.model)).norm())
    assert near < 0.2 * far


def test_a_loss_that_mixes_samples_is_refused_under_clipping_and_the_way_out_works() -> None:
    given = {**EXACT, "rounds": 1, "epsilon": 100.0}
    for scheme in ("ldp", "nadp", "cdp"):
        with pytest.raises(ConfigError, match="one number per sample") as refused:
            fedveil.train(net(), clients(), scheme=scheme, loss=pairwise, **given)
        assert "local_steps" in str(refused.value)
    divided = lambda output, target: F.cross_entropy(output, target, WEIGHTS.double())  # noqa: E731
    with pytest.raises(ConfigError, match="not the mean of its samples"):
        fedveil.train(net(), clients(), scheme="ldp", loss=divided, **given)
    assert fedveil.train(net(), clients(), scheme="ldp", loss=pairwise, local_steps=2, **given).summary["rounds"] == 1
    whole = lambda output, target: F.cross_entropy(output, target, WEIGHTS.double(), reduction="none")  # noqa: E731
    assert fedveil.train(net(), clients(), scheme="ldp", loss=whole, **given).summary["loss"] == "own function"


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (lambda output, target: output.argmax(1).float().mean(), "no gradient"),
        (lambda output, target: output, "one number per sample"),
        (lambda output, target: 3.0, "one number per sample"),
        (lambda output, target: output.nonsense(), "does not take outputs of shape"),
        (nn.MSELoss(), "does not take outputs of shape"),
        (nn.CTCLoss(), "does not take outputs of shape"),
        (nn.MultiMarginLoss(reduction="sum"), "reduction='mean'"),
        (nn.AdaptiveLogSoftmaxWithLoss(CLASSES, 4, [2]), "parameters of its own"),
        (nn.CrossEntropyLoss(weight=torch.ones(2)), "2 numbers, and the data have 3 classes"),
        (nn.CrossEntropyLoss(weight=-torch.ones(3)), "at least 0"),
        (nn.BCEWithLogitsLoss(), "neither 0 nor 1"),
    ],
)
def test_losses_that_cannot_be_used_are_refused_in_our_words(loss: Any, complaint: str) -> None:
    with pytest.raises((ConfigError, DataError), match=complaint):
        fedveil.train(net(), clients(), scheme="fedavg", loss=loss, **EXACT)


def test_an_own_loss_does_not_go_with_settings_of_named_ones_or_head_noise() -> None:
    with pytest.raises(ConfigError, match="build it into your own loss"):
        fedveil.train(net(), clients(), scheme="fedavg", loss=pairwise, label_smoothing=0.1, **EXACT)
    with pytest.raises(ConfigError, match="head_noise=False"):
        fedveil.train(net(), clients(), scheme="lossless", loss=pairwise, **EXACT)


def test_several_labels_from_python() -> None:
    numbers = [(x, y.long()) for x, y in clients("labels")]
    given = {**EXACT, "rounds": 30, "lr": 2.0}
    done = fedveil.train(net(), numbers, test=numbers[0], scheme="fedavg", task="multilabel", **given)
    assert done.summary["loss"] == "binary-cross-entropy"
    assert done.summary["test_accuracy"] > 0.8
    veiled = fedveil.train(net(), numbers, test=numbers[0], task="multilabel", **{**given, "lr": 0.2})
    assert (veiled.summary["loss"], veiled.summary["test_accuracy"] > 0.7) == ("square", True)
    with pytest.raises(DataError, match="neither 0 nor 1"):
        fedveil.train(net(), clients("numbers"), scheme="fedavg", task="multilabel", **EXACT)
    with pytest.raises(DataError, match="task='multilabel'"):
        fedveil.train(net(), numbers, scheme="fedavg", **EXACT)


@pytest.mark.parametrize(
    ("loss", "separable"),
    [(huber, True), (pairwise, False), (lambda o, t: F.cross_entropy(o, t), True), (nn.HuberLoss(), True)],
)
def test_whether_samples_are_apart_is_found_out_by_trying(loss: Callable[..., Any], separable: bool) -> None:
    output = torch.randn(6, CLASSES)
    target = torch.randn(6, CLASSES) if loss is huber or isinstance(loss, nn.Module) else torch.arange(6) % CLASSES
    made = own_loss(loss, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(made, OwnLoss)
    assert tried(made, output, target).separable is separable


def test_a_module_is_copied_and_left_as_it_was() -> None:
    given = nn.HuberLoss()
    own_loss(given, dtype=torch.float64, device=torch.device("cpu"))
    assert given.reduction == "mean"


def test_a_label_that_holds_counts_its_weight() -> None:
    output, target = torch.randn(4, CLASSES), (torch.randn(4, CLASSES) > 0).float()
    expected = F.binary_cross_entropy_with_logits(output, target, pos_weight=WEIGHTS)
    assert torch.equal(BinaryCrossEntropy(tuple(WEIGHTS.tolist())).mean(output, target), expected)
