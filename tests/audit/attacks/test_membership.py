"""The reference: digits, 40 training samples, fitted until the loss is nearly nothing.

With 200 samples the digits generalise so well (about 95 %) that little is left to find: about 59 % success.
"""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from fedveil import data, models
from fedveil.audit.attacks.membership import (
    FEATURES,
    UNKNOWN,
    AttackNetwork,
    Candidates,
    Criterion,
    Features,
    Guess,
    class_fit,
    describe,
    last_layers,
    membership,
)
from fedveil.audit.metrics import CHANCE, Estimate, area_under_curve, success_rate
from fedveil.errors import ConfigError, DataError, FedVeilError, NotApplicableError, NumericError

SAMPLES = 40
TARGETS = 5


@cache
def target(seed: int, *, seen: bool = True, kind: str = "cross-entropy") -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A fitted model, candidates with labels, and which are members (of its training, or of nothing it saw)."""
    digits = data.load("digits", seed=1).train
    rows = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    candidates, strangers = rows[: 2 * SAMPLES], rows[2 * SAMPLES : 3 * SAMPLES]
    fitted = candidates[:SAMPLES] if seen else strangers
    model = models.build("mlp", input_shape=digits.input_shape, outputs=10, width=128, seed=seed)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = Criterion(kind)  # type: ignore[arg-type]
    for _ in range(150):
        adam.zero_grad()
        criterion.losses(model(digits.x[fitted]), digits.y[fitted]).mean().backward()
        adam.step()
    model.zero_grad()
    return model.eval(), digits.x[candidates], digits.y[candidates], torch.arange(2 * SAMPLES) < SAMPLES


def half_known(member: Tensor, *, seed: int) -> Tensor:
    """Membership with half of the members and half of the others hidden."""
    generator = torch.Generator().manual_seed(seed)
    shown = member.long()
    for kind in (True, False):
        rows = (member == kind).nonzero().flatten()
        shown[rows[torch.randperm(len(rows), generator=generator)[: len(rows) // 2]]] = UNKNOWN
    return shown


def pooled(guesses: list[tuple[Guess, Tensor]]) -> tuple[Estimate, Estimate]:
    """Success rate and AUC over several models, at 99.9 % confidence."""
    scores = torch.cat([guess.scores - guess.threshold for guess, _ in guesses])
    member = torch.cat([truth[guess.rows] for guess, truth in guesses])
    return (
        success_rate(scores, member=member, threshold=0.0, confidence=0.999),
        area_under_curve(scores, member=member, confidence=0.999),
    )


def attacked(features: Features, *, seen: bool = True, shuffled: bool = False) -> tuple[Estimate, Estimate]:
    guesses = []
    for seed in range(TARGETS):
        model, x, y, member = target(seed, seen=seen)
        generator = torch.Generator().manual_seed(seed)
        if shuffled:
            member = member[torch.randperm(len(member), generator=generator)]
        candidates = Candidates(x, y, half_known(member, seed=seed))
        guesses.append((membership(model, candidates, features=features, generator=generator), member))
    return pooled(guesses)


@pytest.mark.parametrize(
    "features", ["outputs", pytest.param("classes", marks=pytest.mark.slow), "layers", "gradients"]
)
def test_an_overfitted_model_gives_its_members_away(features: Features) -> None:
    success, area = attacked(features)
    assert success.value > 0.6
    assert min(success.low, area.low) > CHANCE


@pytest.mark.parametrize("features", ["outputs", pytest.param("layers", marks=pytest.mark.slow)])
def test_a_model_that_never_saw_the_members_gives_nothing_away(features: Features) -> None:
    """Four figures at 99.9 %: a false alarm in at most 0.4 % of seeds."""
    success, area = attacked(features, seen=False)
    assert success.covers(CHANCE)
    assert area.covers(CHANCE)


def test_shuffled_memberships_cannot_be_inferred() -> None:
    """Known and judged memberships are shuffled together: two figures at 99.9 %, 0.2 % false alarms."""
    success, area = attacked("outputs", shuffled=True)
    assert success.covers(CHANCE)
    assert area.covers(CHANCE)


def test_a_model_of_the_square_loss_gives_its_members_away() -> None:
    guesses = []
    for seed in range(3):
        model, x, y, member = target(seed, kind="square")
        candidates = Candidates(x, y, half_known(member, seed=seed))
        generator = torch.Generator().manual_seed(seed)
        guesses.append((membership(model, candidates, criterion=Criterion("square"), generator=generator), member))
    assert pooled(guesses)[0].value > 0.6


@pytest.mark.parametrize(("features", "told"), [("second", True), pytest.param("third", False, marks=pytest.mark.slow)])
def test_the_second_layer_from_the_end_gives_members_away_by_itself(features: Features, told: bool) -> None:
    """Square loss, eight models, 99.9 %; the third layer, hardly trained, says nothing yet."""
    guesses = []
    for seed in range(8):
        model, x, y, member = target(seed, kind="square")
        candidates, generator = Candidates(x, y, half_known(member, seed=seed)), torch.Generator().manual_seed(seed)
        guess = membership(model, candidates, features=features, criterion=Criterion("square"), generator=generator)
        guesses.append((guess, member))
    _, area = pooled(guesses)
    assert (area.low > CHANCE) == told


def test_how_well_a_class_fits_does_not_depend_on_scales_or_on_order() -> None:
    _, x, y, _ = target(0)
    generator = torch.Generator().manual_seed(0)
    values = x.flatten(1).double()
    scales, order = 4 ** torch.randn(values.shape[1], generator=generator), torch.randperm(len(y), generator=generator)
    fit = class_fit(values, y, classes=10)
    assert torch.allclose(class_fit(values * scales, y, classes=10), fit)
    assert torch.allclose(class_fit(values[order], y[order], classes=10), fit[order])


def test_how_well_a_class_fits_is_told_by_all_others() -> None:
    """Against the definition: a ridge regression without candidate i, kernel and mean target taken from all."""
    generator = torch.Generator().manual_seed(1)
    values, y = torch.randn(12, 5, generator=generator, dtype=torch.float64), torch.arange(12) % 3
    standard = (values - values.mean(0)) / values.std(0, correction=0)
    kernel, targets = standard @ standard.T / 5, torch.eye(3, dtype=torch.float64)[y]
    fit = class_fit(values, y, classes=3)
    for i in range(12):
        rest = torch.arange(12) != i
        inverse = torch.linalg.inv(kernel[rest][:, rest] + 0.3 * torch.eye(11, dtype=torch.float64))
        told = targets.mean(0) + kernel[i, rest] @ inverse @ (targets[rest] - targets.mean(0))
        others = torch.cat([told[: y[i]], told[y[i] + 1 :]])
        assert fit[i, 0].exp() == pytest.approx(1 / float((targets[i] - told).square().sum()))
        assert float(fit[i, 1]) == pytest.approx(float(told[y[i]] - others.max()))


class Veiled(nn.Module):
    """A model whose outputs carry a large multiple of a secret vector, different for every sample."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.secret = 50 * torch.randn(10, generator=torch.Generator().manual_seed(9))

    def alpha(self, x: Tensor) -> Tensor:
        return (1000 * x.flatten(1).sum(1, keepdim=True)).sin()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) + self.alpha(x) * self.secret


def test_calibrated_outputs_undo_a_perturbed_head() -> None:
    found = {"true": [], "veiled": [], "calibrated": []}
    for seed in range(3):
        model, x, y, member = target(seed)
        veiled = Veiled(model)
        candidates = Candidates(x, y, half_known(member, seed=seed))
        for name, held, outputs in (
            ("true", model, None),
            ("veiled", veiled, None),
            ("calibrated", veiled, lambda x: veiled(x) - veiled.alpha(x) * veiled.secret),
        ):
            generator = torch.Generator().manual_seed(seed)
            found[name].append((membership(held, candidates, outputs=outputs, generator=generator), member))
    areas = {name: pooled(guesses)[1].value for name, guesses in found.items()}
    assert areas["calibrated"] == pytest.approx(areas["true"], abs=0.01)
    assert areas["veiled"] < areas["true"] - 0.1


def test_an_attack_leaves_the_model_as_it_was() -> None:
    model, x, y, member = target(0)
    held = copy.deepcopy(model).train()
    held.get_submodule("relu1").eval()
    before = copy.deepcopy(held.state_dict())
    for features in FEATURES:
        describe(held, Candidates(x, y, half_known(member, seed=0)), features=features, criterion=Criterion())
    assert all(torch.equal(value, before[name]) for name, value in held.state_dict().items())
    assert all(one.grad is None for one in held.parameters())
    assert held.training
    assert not held.get_submodule("relu1").training
    assert not any(part._forward_hooks for part in held.modules())


def batch_normed() -> nn.Module:
    """A model in evaluation mode but for a norm without running statistics, which uses the batch."""
    model = models.build("mlp", input_shape=(4,), outputs=3, norm="batch", width=8).eval()
    model.get_submodule("norm1").train()
    return model


def test_norms_that_use_the_batch_go_on_doing_so_and_keep_their_buffers() -> None:
    model = batch_normed()
    before = copy.deepcopy(model.state_dict())
    x, y = 5 + torch.rand(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    scores = describe(
        model, Candidates(x, y, torch.tensor([1, UNKNOWN] * 10)), features="classes", criterion=Criterion()
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.allclose(scores[0][:, :3].float(), model(x), atol=1e-5)
    with pytest.raises(ConfigError, match="no gradient of its own"):
        describe(model, Candidates(x, y, torch.tensor([1, UNKNOWN] * 10)), features="gradients", criterion=Criterion())


def test_the_order_of_the_candidates_gives_no_one_away() -> None:
    """Outputs that betray nothing but the batch they came from, members listed first: two figures at 99.9 %."""
    member = torch.arange(513) < 257
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(513, 3, generator=generator), torch.randint(3, (513,), generator=generator)
    candidates = Candidates(x, y, half_known(member, seed=5))
    guess = membership(nn.Linear(3, 3), candidates, outputs=lambda x: x.mean(0).expand_as(x), generator=generator)
    success, area = pooled([(guess, member)])
    assert success.covers(CHANCE)
    assert area.covers(CHANCE)


def test_equal_seeds_give_equal_scores() -> None:
    model, x, y, member = target(0)
    candidates = Candidates(x, y, half_known(member, seed=0))
    first, again, other = (
        membership(model, candidates, generator=torch.Generator().manual_seed(seed)).scores for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_unknown_candidate_is_scored_and_no_other() -> None:
    model, x, y, member = target(0)
    shown = half_known(member, seed=0)
    done: list[float] = []
    generator = torch.Generator().manual_seed(0)
    guess = membership(model, Candidates(x, y, shown), generator=generator, progress=done.append)
    assert torch.equal(guess.rows, (shown == UNKNOWN).nonzero().flatten())
    assert guess.scores.shape == guess.rows.shape
    assert done == sorted(done)
    assert done[-1] == 1.0


def test_gradient_norms_are_those_of_the_closed_form() -> None:
    """One linear layer: ‖∂loss/∂W‖ = ‖p − 1_y‖·‖x‖ and ‖∂loss/∂b‖ = ‖p − 1_y‖."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3), torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    shown = torch.tensor([1, 0, 1, UNKNOWN])
    norms = describe(model, Candidates(x, y, shown), features="gradients", criterion=Criterion())[-1]
    error = (model(x).softmax(1) - torch.eye(3)[y]).norm(dim=1)
    assert torch.allclose(norms.exp().float(), torch.stack([error * x.norm(dim=1), error], 1), atol=1e-5)


def test_the_last_three_layers_are_those_a_sample_passes_last() -> None:
    cnn = models.build("cnn", input_shape=(1, 8, 8), outputs=10)
    assert last_layers(cnn, torch.zeros(1, 1, 8, 8)) == [cnn.get_submodule(n) for n in ("conv2", "linear", "head")]
    candidates = Candidates(torch.rand(9, 1, 8, 8), torch.arange(9), torch.tensor([1, 0, UNKNOWN] * 3))
    blocks = describe(cnn, candidates, features="layers", criterion=Criterion())
    assert [block.shape[1] for block in blocks[-3:]] == [128, 64, 10]
    gru = models.build("gru", input_shape=(6,), outputs=10, vocabulary=20)
    words = Candidates(torch.randint(20, (9, 6)), torch.arange(9), torch.tensor([1, 0, UNKNOWN] * 3))
    for features in ("layers", "gradients"):
        assert all(len(block) == 9 for block in describe(gru, words, features=features, criterion=Criterion()))


X, Y, SHOWN = torch.rand(6, 4), torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([1, 0, 1, 0, UNKNOWN, UNKNOWN])


@pytest.mark.parametrize(
    ("y", "shown", "options", "error", "words"),
    [
        (Y.float(), SHOWN, {}, DataError, "class labels"),
        (Y, SHOWN[:5], {}, DataError, "one label and one membership each"),
        (Y, SHOWN + 2, {}, DataError, "unknown to the attacker"),
        (Y, SHOWN.abs(), {}, DataError, "nothing is left to infer"),
        (Y + 1, SHOWN, {}, DataError, "Labels must lie in 0…1"),
        (Y, SHOWN, {}, DataError, "at least 4 known members"),
        (Y, SHOWN, {"features": "second"}, NotApplicableError, "no second one from the end"),
        (Y, SHOWN, {"features": "output"}, ConfigError, "Did you mean 'outputs'"),
        (Y, SHOWN, {"outputs": lambda x: x / 0}, NumericError, "NaN or infinity"),
        (Y, SHOWN, {"outputs": lambda x: x[:, :1]}, DataError, "at least two class scores"),
        (Y, SHOWN, {"features": "gradients", "outputs": lambda x: x}, ConfigError, "keep their gradient"),
    ],
)
def test_what_cannot_be_attacked_is_refused(
    y: Tensor, shown: Tensor, options: dict[str, object], error: type[FedVeilError], words: str
) -> None:
    with pytest.raises(error, match=words):
        membership(nn.Linear(4, 2), Candidates(X, y, shown), generator=torch.Generator(), **options)


def test_senseless_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="folds"):
        AttackNetwork(folds=1)
    with pytest.raises(ConfigError, match="Unknown loss"):
        Criterion("hinge")  # type: ignore[arg-type]
