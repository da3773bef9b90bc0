"""How results are scored, by who knows the truth: reconstructions, labels, the model's function, members, classes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.audit.findings import KNOWN_FIRST, RECOGNISABLE, Found, Score, Truth, enough_above
from fedveil.audit.matching import aligning_basis
from fedveil.audit.metrics import (
    CHANCE,
    assignment,
    attack_success,
    exact_interval,
    feature_mse,
    knn_distance,
    parameter_knowledge,
    psnr,
    rates,
    reduced,
    ssim,
)
from fedveil.downlink import Architecture
from fedveil.downlink.rescaling import scale_table
from fedveil.errors import DataError, NotApplicableError, NumericError

# --- a judge of reconstructions: a classifier of its own that no attack ever sees
#
# It says which class a picture shows and how alike two pictures are in meaning. It is trained on data the audit holds,
# apart from the model under audit, so that a picture which merely fools that model does not fool the judge as well.

FEWEST_SAMPLES = 20
MOST_HELD_OUT = 2000
_SMALL_INPUT = 256
_SMALLEST_PICTURE_SIDE = 4
_LARGEST_SEED = 2**31
_AT_ONCE = 512


@dataclass(frozen=True)
class Study:
    """How a judge is trained: Adam with weight decay, the rate falling to zero along a cosine.

    `stride` is that of the first convolution: 2 reads a large picture at half its size, at a quarter of the cost.
    """

    steps: int
    batch: int = 64
    rate: float = 2e-3
    width: int = 16
    stride: int = 1
    blur: float = 0.1


SMALL, SMALL_QUICK = Study(steps=1000), Study(steps=400)
LARGE, LARGE_QUICK = Study(steps=6000, batch=128, width=48), Study(steps=600, stride=2)
LARGEST = Study(steps=3000, width=32, stride=2)
LARGEST_SIDE = 64
"""Pictures with longer sides are looked at in this size."""
_LARGE_SIDE = 32


@dataclass(frozen=True, eq=False)
class Judge:
    """A trained classifier; `accuracy` is on samples kept from its training. Inputs come in the run's own scale."""

    body: nn.Module
    head: nn.Module
    mean: Tensor
    spread: Tensor
    shape: tuple[int, ...]
    accuracy: float

    def features(self, x: Tensor) -> Tensor:
        """What the last layer reads, samples × features."""
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"The judge knows inputs of shape {self.shape}, not of {tuple(x.shape[1:])}.")
        with torch.no_grad():
            parts = torch.split(_looked_at(x.to(self.mean.device, torch.float32)), _AT_ONCE)
            return torch.cat([self.body((part - self.mean) / self.spread) for part in parts])

    def scores(self, x: Tensor) -> Tensor:
        """Class scores, samples × classes."""
        with torch.no_grad():
            scores: Tensor = self.head(self.features(x))
            return scores


def train_judge(
    x: Tensor,
    y: Tensor,
    *,
    outputs: int,
    generator: torch.Generator,
    quick: bool = False,
    study: Study | None = None,
    device: str | torch.device = "cpu",
) -> Judge:
    """A convolutional network for pictures, a perceptron for other numbers, by cross-entropy."""
    if len(x) != len(y) or len(x) < FEWEST_SAMPLES or y.dtype is not torch.int64 or x.dim() < 2:
        raise DataError(
            f"A judge learns from {FEWEST_SAMPLES} labelled samples or more, with a class number each, not from "
            f"{len(x)} samples and {len(y)} labels of {y.dtype}."
        )
    if int(y.min()) < 0 or int(y.max()) >= outputs:
        raise DataError(f"Labels must lie in 0…{outputs - 1}, and go from {int(y.min())} to {int(y.max())}.")
    full = tuple(x.shape[1:])
    x, y = _looked_at(x.detach().float()).to(device), y.to(device)
    shape = tuple(x.shape[1:])
    study = study or _study(shape, quick=quick)
    order = torch.randperm(len(x), generator=generator, device=generator.device).to(device)
    held = min(len(x) // 5, MOST_HELD_OUT)
    kept, shown = order[:held], order[held:]
    mean, spread = _standard(x[shown])
    seed = int(torch.randint(_LARGEST_SEED, (), generator=generator, device=generator.device))
    body, head = _network(shape, outputs, study=study, seed=seed)
    body, head = body.to(device), head.to(device)
    _train(body, head, (x[shown] - mean) / spread, y[shown], study=study, generator=generator)
    with torch.no_grad():
        scores = torch.cat([head(body(part)) for part in torch.split((x[kept] - mean) / spread, _AT_ONCE)])
    if not bool(scores.isfinite().all()):
        raise NumericError("The judge's training ended in NaN or infinity: check the data it was given.")
    return Judge(body, head, mean, spread, full, float((scores.argmax(1) == y[kept]).float().mean()))


def _looked_at(x: Tensor) -> Tensor:
    return reduced(x, side=LARGEST_SIDE) if x.dim() == 4 else x


def _study(shape: tuple[int, ...], *, quick: bool) -> Study:
    if math.prod(shape) <= _SMALL_INPUT:
        return SMALL_QUICK if quick else SMALL
    if quick:
        return LARGE_QUICK
    return LARGEST if len(shape) == 3 and max(shape[1:]) > _LARGE_SIDE else LARGE


def _standard(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread, of each channel of pictures and of each number of a vector; constant ones are left alone."""
    over = [0, *range(2, x.dim())] if x.dim() > 2 else [0]
    spread, mean = torch.std_mean(x, dim=over, keepdim=True)
    return mean, torch.where(spread > 1e-6, spread, torch.ones_like(spread))


def _network(shape: tuple[int, ...], outputs: int, *, study: Study, seed: int) -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if len(shape) == 3 and min(shape[1:]) >= _SMALLEST_PICTURE_SIDE:
            body, features = _convolutions(shape, width=study.width, stride=study.stride)
        else:
            features = 8 * study.width
            numbers = math.prod(shape)
            body = nn.Sequential(
                nn.Flatten(), nn.Linear(numbers, features), nn.SiLU(), nn.Linear(features, features), nn.SiLU()
            )
        return body, nn.Linear(features, outputs)


def _convolutions(shape: tuple[int, ...], *, width: int, stride: int) -> tuple[nn.Module, int]:
    """Pairs of convolutions, halving until a side is below 8; then the coarse map is read by a linear layer."""
    channels, height, breadth = shape
    height, breadth = -(-height // stride), -(-breadth // stride)
    layers: list[nn.Module] = []
    while True:
        for _ in range(2):
            layers.append(nn.Conv2d(channels, width, 3, stride=stride, padding=1))
            layers += [nn.GroupNorm(math.gcd(8, width), width), nn.SiLU()]
            channels, stride = width, 1
        layers.append(nn.MaxPool2d(2))
        height, breadth = height // 2, breadth // 2
        if min(height, breadth) < 8:
            break
        width *= 2
    features = 8 * width
    layers += [nn.Flatten(), nn.Linear(channels * height * breadth, features), nn.SiLU()]
    return nn.Sequential(*layers), features


def _train(body: nn.Module, head: nn.Module, x: Tensor, y: Tensor, *, study: Study, generator: torch.Generator) -> None:
    parameters = [*body.parameters(), *head.parameters()]
    adam = torch.optim.AdamW(parameters, lr=study.rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, study.steps)
    for _ in range(study.steps):
        rows = torch.randint(len(x), (study.batch,), generator=generator, device=generator.device).to(x.device)
        # Reconstructions are never quite clean; the judge must not stumble over a little noise.
        noise = torch.randn(x[rows].shape, generator=generator, device=generator.device).to(x)
        loss = F.cross_entropy(head(body(x[rows] + study.blur * noise)), y[rows])
        adam.zero_grad()
        torch.autograd.backward(loss)
        adam.step()
        schedule.step()
    body.eval().requires_grad_(False)
    head.requires_grad_(False)


_CONFIDENCE = 0.95
_DECIDING = 0.99
FALSE_ALARMS = (1 - _DECIDING) / 2
"""How often, at most, an attack that knows nothing is said to do better than chance, whatever chance is."""
MOST_ATTEMPTS = 64
"""Attempts at reading labels, however frequent one class is."""
_MOST_DECIBELS = 100.0
_FAR = 1e6
EXACT = 1e-6
"""A number is known that is missed by less than this, over the size of numbers in its tensor."""


@dataclass(frozen=True, eq=False)
class Likeness:
    """PSNR of reconstructions in decibels, capped at 100; beside it MSE, SSIM, feature MSE, KNN distance, ASR.

    Chance is the best guess of one who saw nothing, the mean public picture (`blind`, compared with the very samples
    that are scored); `random` is the level of a random one. A sample that is missed by more than that counts as if it
    were guessed: whoever fails on most and rebuilds a few would otherwise look worse than one who saw nothing.
    `private` are samples among which the nearest neighbour of a reconstruction is looked for.
    """

    peak: float
    chance: float
    random: float
    blind: Tensor | None = None
    judge: Callable[[], Judge] | None = None
    private: Tensor | None = None
    name: str = "PSNR (dB)"
    margin: float = 3.0
    enough: float = 40.0
    """Where the eye sees no difference any more."""

    def score(self, results: Sequence[Found], truths: Sequence[Truth]) -> Score:
        """The mean over all samples of all attempts."""
        inputs, originals, labels = [], [], []
        for result, truth in zip(results, truths, strict=True):
            x = truth["x"].double()
            guess = tamed(result["inputs"], x)
            inputs.append(guess[assignment(guess, x)])
            originals.append(x)
            labels.append(truth["y"])
        guess, x, y = torch.cat(inputs), torch.cat(originals), torch.cat(labels)
        each = psnr(guess, x, peak=self.peak).clamp_max(_MOST_DECIBELS)
        blind = torch.full_like(each, self.chance)
        if self.blind is not None:
            blind = psnr(self.blind.double().cpu().expand_as(x), x, peak=self.peak).clamp_max(_MOST_DECIBELS)
        clear = each > torch.clamp(blind + self.margin, min=RECOGNISABLE)
        more = {
            "mse": float((guess - x).square().mean() / self.peak**2),
            "recognisable": float(clear.double().mean()),
            "mean psnr": float(each.mean()),
            "best psnr": float(each.max()),
            "psnr of a random picture": self.random,
        }
        if x.dim() == 4:
            more["ssim"] = float(ssim(guess, x, peak=self.peak).mean())
        if self.judge is not None:
            judge, seen, true = self.judge(), guess.float(), x.float()
            more["feature mse"] = float(feature_mse(seen, true, extractor=judge.features).mean())
            if not y.is_floating_point():
                more["success rate"] = attack_success(seen, y, classifier=judge.scores).value
            if self.private is not None:
                private = self.private.float()
                more["knn distance"] = float(knn_distance(seen, private, extractor=judge.features).mean())
        if self.blind is None:
            return Score(float(each.mean()), more=more)
        level, chance = torch.maximum(each, blind), float(blind.mean())
        capped = float(level.clamp_max(enough_above(chance, self)).mean())
        some = bool(clear.any()) or float(level.mean()) > chance + self.margin
        return Score(float(level.mean()), more=more, chance=chance, some=some, capped=capped)

    def text(self, value: float) -> str:
        """In decibels."""
        return f"{value:.1f} dB"


def tamed(guess: Tensor, originals: Tensor) -> Tensor:
    """A reconstruction in the originals' shape and in float64; what is not a number, or beyond all reason, is not."""
    return guess.double().cpu().reshape(originals.shape).nan_to_num(0.0, _FAR, -_FAR).clamp(-_FAR, _FAR)


class _Percent:
    """A figure between 0 and 1."""

    @property
    def enough(self) -> float:
        """All of it."""
        return 1.0

    def text(self, value: float) -> str:
        """In percent."""
        return f"{100 * value:.1f} %"


@dataclass(frozen=True, eq=False)
class Share(_Percent):
    """A share of successes with its exact interval."""

    name: str
    chance: float
    margin: float = 0.0

    def of(self, hits: Tensor, more: dict[str, float] | None = None) -> Score:
        """The share of hits."""
        count, total = int(hits.sum()), hits.numel()
        floor = exact_interval(count, total, confidence=_DECIDING)[0]
        return Score(count / total, *exact_interval(count, total, confidence=_CONFIDENCE), more or {}, floor)


@dataclass(frozen=True, eq=False)
class Labels(_Percent):
    """How many of a batch's labels were found, whatever their order, beside the best blind guess.

    `shares` are the classes' shares, `samples` how many labels an attempt is after. Whether that is more than chance is
    tested exactly: one who guesses blindly finds as many with a probability of at most `FALSE_ALARMS`. An interval of
    the figure alone would need far more samples where one class is frequent.
    """

    shares: Tensor
    samples: int
    name: str = "labels told"
    margin: float = 0.0

    @cached_property
    def chance(self) -> float:
        """What the best blind guess gets."""
        return blind_labels(self.shares, batch=self.samples)

    @property
    def attempts(self) -> int:
        """How many tell one who is always right from one who guesses blindly, either way; at most MOST_ATTEMPTS."""
        lucky = float(_blindly_matched(self.shares, batch=self.samples)[-1])
        for count in range(1, MOST_ATTEMPTS):
            total = count * self.samples
            guessed = exact_interval(round(self.chance * total), total, confidence=_CONFIDENCE)[1]
            if lucky**count <= FALSE_ALARMS and guessed < exact_interval(total, total, confidence=_CONFIDENCE)[0]:
                return count
        return MOST_ATTEMPTS

    def score(self, results: Sequence[Found], truths: Sequence[Truth]) -> Score:
        """Over all attempts."""
        hits = [matched(result["labels"], truth["y"]) for result, truth in zip(results, truths, strict=True)]
        each = {batch: _blindly_matched(self.shares, batch=batch) for batch in set(map(len, hits))}
        by_luck = np.ones(1)
        for labels in hits:
            by_luck = np.convolve(by_luck, each[len(labels)])
        told = torch.cat(hits)
        count, total = int(told.sum()), len(told)
        luck = min(1.0, float(by_luck[count:].sum()))
        blind = float(by_luck @ np.arange(total + 1)) / total
        interval = exact_interval(count, total, confidence=_CONFIDENCE)
        return Score(count / total, *interval, {"by luck": luck}, chance=blind, some=luck <= FALSE_ALARMS)


def blind_labels(shares: Tensor, *, batch: int) -> float:
    """What the best blind guess at a batch's labels gets, for classes of these shares.

    A guess with g_c times class c gets Σ_c E min(g_c, N_c)/n, N_c binomial, and E min(g, N) = Σ_{j<g} P(N > j): the
    best n of all these chances.
    """
    return float(np.sort(_chances(shares, batch), axis=None)[-batch:].mean())


def _chances(shares: Tensor, batch: int) -> npt.NDArray[np.float64]:
    """P(N_c > j), j × classes: what a further guess at each class is worth."""
    from scipy.stats import binom  # slow to import, and few attacks need it

    worth: npt.NDArray[np.float64] = binom.sf(np.arange(batch)[:, None], batch, shares.double().numpy()[None])
    return worth


def _blindly_matched(shares: Tensor, *, batch: int) -> npt.NDArray[np.float64]:
    """How many of a batch's labels the best blind guess finds: the probability of 0…batch, exactly.

    One class after the other takes its binomial part of the labels that are left; state: labels left × found.
    """
    from scipy.stats import binom

    taken = np.argsort(_chances(shares, batch), axis=None, kind="stable")[-batch:] % len(shares)
    guess = np.bincount(taken, minlength=len(shares))
    state = np.zeros((batch + 1, batch + 1))
    state[batch, 0] = 1.0
    rest = 1.0
    for share, guessed in zip(shares.double().tolist(), guess.tolist(), strict=True):
        now = np.zeros_like(state)
        for left in range(batch + 1):
            part = binom.pmf(np.arange(left + 1), left, min(1.0, share / rest) if rest > 0 else 0.0)
            for number, probability in enumerate(part):
                hit = min(number, guessed)
                now[left - number, hit:] += probability * state[left, : batch + 1 - hit]
        state, rest = now, rest - share
    matched: npt.NDArray[np.float64] = state.sum(0)
    return matched


def matched(guess: Tensor, labels: Tensor) -> Tensor:
    """As many hits as labels that both have, counted with their multiplicity."""
    both = sum((Counter(guess.tolist()) & Counter(labels.tolist())).values())
    return torch.arange(len(labels)) < both


@dataclass(frozen=True, eq=False)
class Accuracy(Share):
    """How often the adversary's own model is right on queries: by the way that used most labels, the others beside it.

    The best of all ways would be the luckiest.
    """

    def score(self, results: Sequence[Found], truths: Sequence[Truth]) -> Score:
        """Over all attempts."""
        ways = _ways(results)
        rights = {
            way: torch.cat(
                [result[way].argmax(1).cpu() == truth["y"] for result, truth in zip(results, truths, strict=True)]
            )
            for way in ways
        }
        more = {way: float(hits.double().mean()) for way, hits in rights.items()}
        return self.of(rights[max(ways, key=_labels_used)], more)


def _ways(results: Sequence[Found]) -> list[str]:
    return sorted(set.intersection(*(set(result) for result in results)))


def _labels_used(way: str) -> int:
    """labelled.200 and probe.200 used 200 labels; ways without a number, or without labels, none."""
    kind, _, count = way.partition(".")
    return int(count) if kind in ("labelled", "probe") and count.isdigit() else 0


@dataclass(frozen=True, eq=False)
class Fit(_Percent):
    """Regression: the share of the targets' variance that the adversary's own model explains; ways as for accuracy."""

    name: str = "explained"
    chance: float = 0.0
    margin: float = 0.05

    def score(self, results: Sequence[Found], truths: Sequence[Truth]) -> Score:
        """1 − Σ(ŷ − y)²/Σ(y − ȳ)², at least 0."""
        ways = _ways(results)
        y = torch.cat([truth["y"].double() for truth in truths])
        spread = float((y - y.mean(0)).square().sum())
        more = {}
        for way in ways:
            guess = torch.cat([result[way].double().cpu() for result in results]).reshape(y.shape)
            more[way] = max(0.0, 1.0 - float((guess - y).square().sum()) / spread)
        return Score(more[max(ways, key=_labels_used)], more=more)


@dataclass(frozen=True, eq=False)
class Numbers(_Percent):
    """The share of parameters known to a thousandth once rows and columns may be rescaled, which changes no function.

    Beside it the share known exactly, and with their sign.
    """

    architecture: Architecture
    name: str = "known up to scale"
    chance: float = 0.0
    margin: float = 0.05

    def score(self, results: Sequence[Found], truths: Sequence[Truth]) -> Score:
        """Of one model."""
        known = parameter_knowledge(results[0]["parameters"], truths[0]["parameters"], self.architecture)
        return Score(known.determined, more={"exact": known.exact, "signs": known.signs})


@dataclass(frozen=True, eq=False)
class Updates:
    """The cosine of a server's update as a client makes it out and as it was, both in the server's basis.

    In which basis the client writes it does not matter: the auditor, who has the model that was updated, finds the one
    secret that is left. Chance is the difference of the two models as they were received. Beside it the relative error
    and, where the client was told the model that training began with, what it then has of the last one: the share of
    the numbers that changed which it knows to a millionth of their tensor's size, the cosine of the whole change, and
    how far what it followed round by round is off, over how far the model went.
    """

    architecture: Architecture
    covered: tuple[str, ...] = ()
    """Parameters under noise, from which no basis is concluded."""
    name: str = "cosine of the update"
    chance: float = 0.0
    margin: float = 0.05
    enough: float = 1.0

    def score(self, results: Sequence[Found], truths: Sequence[Truth]) -> Score:
        """Of one pair of rounds."""
        result, truth = results[0], truths[0]
        update = truth["after"] - truth["before"]
        if not bool(update.any()):
            raise NotApplicableError("the model did not change between the two rounds: there is no update to find")
        sent = truth["sent after"] - truth["sent before"]
        unaligned = _cosine(self._moved(truth["sent before"], sent, truth["before"]), update)
        got = self._moved(result["frame"], result["update"], truth["before"])
        more = {"relative error": float((got - update).norm() / update.norm())}
        if "direct" in result:
            more |= self._known(result, truth)
        return Score(_cosine(got, update), more=more, chance=max(unaligned, 0.0))

    def _moved(self, frame: Tensor, change: Tensor, before: Tensor) -> Tensor:
        """A change in the basis of `frame`, in the server's; bases are linear."""
        table = scale_table(self.architecture).sent
        basis = aligning_basis(table, frame.double(), before, ignored=self.covered)
        return table.hide(change.double(), basis)

    def _known(self, result: Found, truth: Truth) -> dict[str, float]:
        first, last = truth["first"], truth["last"]
        change = last - first
        sizes = self.architecture.parameters.join(
            {
                name: part.square().mean().sqrt().expand(part.shape)
                for name, part in self.architecture.parameters.split(last).items()
            }
        )
        private = change != 0
        off = (result["direct"] - last).abs()
        return {
            KNOWN_FIRST: float((off <= EXACT * sizes)[private].double().mean()),
            "cosine of the change, were the first model known": _cosine(result["direct"] - first, change),
            "error when followed, were the first model known": float(
                (result["followed"] - last).norm() / change.norm().clamp_min(1e-300)
            ),
        }

    def text(self, value: float) -> str:
        """Four digits tell an exact one from a good one."""
        return f"{value:.4f}"


def _cosine(left: Tensor, right: Tensor) -> float:
    return float(left @ right / (left.norm() * right.norm()).clamp_min(1e-300))


@dataclass(frozen=True, eq=False)
class Members(_Percent):
    """How often members are told from others (balanced); AUC and the true positives at 1 % false ones beside it."""

    name: str = "members told"
    chance: float = CHANCE
    margin: float = 0.0

    def score(self, results: Sequence[Found], truths: Sequence[Truth]) -> Score:
        """Of all attempts together; each is cut at the attacker's own threshold."""
        scores = torch.cat([result["scores"].double() - float(result["threshold"]) for result in results])
        member = torch.cat([truth["member"].bool() for truth in truths])
        judged = rates(scores, member=member, threshold=0.0)
        strict = rates(scores, member=member, threshold=0.0, confidence=_DECIDING)
        more = {
            "auc": judged.auc.value,
            "auc low": judged.auc.low,
            "auc high": judged.auc.high,
            "tpr at 1 % fpr": judged.true_positives.value,
            "tpr low": judged.true_positives.low,
            "tpr high": judged.true_positives.high,
            "members": float(judged.members),
            "others": float(judged.others),
        }
        # Few who are told apart for sure are a leak, whatever the rate over all.
        few = strict.auc.low > CHANCE or strict.true_positives.low > strict.false_positives.high
        success = judged.success
        some = few or strict.success.low > CHANCE
        return Score(success.value, success.low, success.high, more, strict.success.low, some=some)


@dataclass(frozen=True, eq=False)
class ClassMeasure(Share):
    """How often an independent judge sees in a made picture the class it was made for."""

    judge: Callable[[], Judge] | None = None
    private: Tensor | None = None

    def score(self, results: Sequence[Found], truths: Sequence[Truth]) -> Score:
        """Over all pictures."""
        assert self.judge is not None
        x = torch.cat([result["inputs"].float() for result in results])
        y = torch.cat([result["labels"] for result in results])
        judge = self.judge()
        with torch.no_grad():
            hits = judge.scores(x).argmax(1).cpu() == y
        more = {}
        if self.private is not None:
            more["knn distance"] = float(knn_distance(x, self.private.float(), extractor=judge.features).mean())
        return self.of(hits, more)
