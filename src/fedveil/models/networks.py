"""The networks of the catalogue, and the pieces they share: normalisation, He initialisation, range checks.

ResNets are those of He et al. (2016), DenseNet that of Huang et al. (2017).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedveil.errors import ConfigError

MOST_GROUPS = 8
LEAST_CHANNELS_PER_GROUP = 4


def groups_for(channels: int) -> int:
    """The number of GroupNorm groups: the largest divisor of ``channels`` up to 8 that leaves 4 in each.

    Fewer than four channels per group would come close to erasing the features where they have no
    spatial extent (one channel per group on a vector normalises everything to zero).
    """
    fitting = (g for g in range(1, MOST_GROUPS + 1) if channels % g == 0 and channels // g >= LEAST_CHANNELS_PER_GROUP)
    return max(fitting, default=1)


def image_norm(kind: str, channels: int) -> nn.Module:
    """The normalisation of a ``(batch, channels, height, width)`` tensor: ``batch`` or ``group``."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(groups_for(channels), channels)


def vector_norm(kind: str, features: int) -> nn.Module:
    """The normalisation of a ``(batch, features)`` tensor: ``batch``, ``layer`` or ``group``."""
    if kind == "batch":
        return nn.BatchNorm1d(features)
    if kind == "layer":
        return nn.LayerNorm(features)
    return nn.GroupNorm(groups_for(features), features)


def conv(inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps the size (divided by ``stride``, rounded up)."""
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=bias)


def he_init(layers: Iterable[nn.Module], *, mode: Literal["fan_in", "fan_out"] = "fan_in") -> None:
    """Draw the weights of layers that feed a ReLU from N(0, 2/fan) (He et al. 2015); zero their biases.

    Only convolutions and linear layers are touched.
    """
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


MOST_LAYERS = 1000


def not_too_deep(depth: int) -> None:
    """Refuse a depth that would take forever to build."""
    if depth > MOST_LAYERS:
        raise ConfigError(f"The model option 'depth' must be at most {MOST_LAYERS}, not {depth}.")


def at_least(minimum: int, **options: int) -> None:
    """Refuse options smaller than ``minimum``, naming the first of them."""
    for option, value in options.items():
        if value < minimum:
            raise ConfigError(f"The model option {option!r} must be at least {minimum}, not {value}.")


def mlp(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    depth: int = 3,
    width: int = 128,
    norm: Literal["none", "batch", "layer", "group"] = "none",
    feature_scale: float = 1.0,
) -> nn.Module:
    """``depth`` linear layers with biases, ``width`` units in each hidden one, ReLU between them."""
    at_least(1, depth=depth, width=width)
    not_too_deep(depth)
    if width == 1 and norm in ("layer", "group"):
        raise ConfigError(f"norm={norm!r} over a single unit is always zero: set width to 2 or more.")

    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    features = math.prod(input_shape)
    for i in range(1, depth):
        layers[f"linear{i}"] = nn.Linear(features, width)
        if norm != "none":
            layers[f"norm{i}"] = vector_norm(norm, width)
        layers[f"relu{i}"] = nn.ReLU()
        features = width
    he_init(layers.values())
    with_head(layers, features, outputs, feature_scale)
    return nn.Sequential(layers)


class FeatureScale(nn.Module):
    """A constant multiplier on the features that the head reads.

    The curvature of the square loss along the head's weights is that of its features: a multiplier below 1 allows for
    larger first steps, as a warm-up does.
    """

    samples_apart = True

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """The features, multiplied."""
        return x * self.factor

    def extra_repr(self) -> str:
        """The factor."""
        return f"{self.factor:g}"


def with_head(layers: OrderedDict[str, nn.Module], features: int, outputs: int, feature_scale: float) -> None:
    """Add the last layer, and before it the multiplier of features, unless that is 1."""
    if not (math.isfinite(feature_scale) and feature_scale > 0):
        raise ConfigError(f"The model option 'feature_scale' must be a positive number, not {feature_scale}.")
    if feature_scale != 1.0:
        layers["scale"] = FeatureScale(feature_scale)
    layers["head"] = nn.Linear(features, outputs)


HIDDEN = 64


def cnn(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    width: int = 16,
    norm: Literal["none", "batch", "group"] = "none",
    feature_scale: float = 1.0,
) -> nn.Module:
    """Two conv-[norm]-ReLU-maxpool stages of ``width`` and ``2·width`` channels, then two linear layers."""
    at_least(1, width=width)
    channels, height, breadth = input_shape
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, wide in enumerate((width, 2 * width), start=1):
        layers[f"conv{i}"] = conv(channels, wide, bias=norm == "none")
        if norm != "none":
            layers[f"norm{i}"] = image_norm(norm, wide)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"pool{i}"] = nn.MaxPool2d(2)
        channels, height, breadth = wide, height // 2, breadth // 2
    layers["flatten"] = nn.Flatten()
    layers["linear"] = nn.Linear(channels * height * breadth, HIDDEN)
    layers["relu3"] = nn.ReLU()
    he_init(layers.values())
    with_head(layers, HIDDEN, outputs, feature_scale)
    return nn.Sequential(layers)


CHANNELS = 12
STRIDES = (2, 2, 1)
INIT_BOUND = 0.5


def lenet_sigmoid(*, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Three 5×5 convolutions of 12 channels with sigmoids, and one linear layer (Zhu et al. 2019).

    Smooth, so that L-BFGS attacks work on it. Parameters are uniform on ±0.5 as in the DLG code:
    with PyTorch's smaller default the sigmoids are nearly constant and the attacks lose their signal.
    """
    channels, height, breadth = input_shape
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, stride in enumerate(STRIDES, start=1):
        layers[f"conv{i}"] = conv(channels, CHANNELS, kernel=5, stride=stride, bias=True)
        layers[f"sigmoid{i}"] = nn.Sigmoid()
        channels, height, breadth = CHANNELS, -(-height // stride), -(-breadth // stride)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(channels * height * breadth, outputs)
    model = nn.Sequential(layers)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -INIT_BOUND, INIT_BOUND)
    return model


PADDING = 0


def token_table(vocabulary: int, width: int, *, std: float = 1.0) -> nn.Embedding:
    """The vectors of token ids, of which 0 is padding and stays zero."""
    if vocabulary < 2:
        raise ConfigError(f"A vocabulary of {vocabulary} leaves no word beside the padding id 0: give at least 2.")
    table = nn.Embedding(vocabulary, width, padding_idx=PADDING)
    if std != 1.0:
        with torch.no_grad():
            table.weight.mul_(std)
    return table


def present_words(tokens: Tensor, like: Tensor) -> Tensor:
    """``(batch, steps, 1)`` numbers of the type of ``like``: 1 where there is a word, 0 where there is padding."""
    return tokens.ne(PADDING).unsqueeze(-1).type_as(like)


class RecurrentClassifier(nn.Module):
    """Classifies sequences of ``steps`` token ids, of which ``0`` is padding, by the mean of the states at the words.

    A padding step leaves the state alone, so it does not matter on which side a text is padded. A cell of a kind has so
    many ``gates`` and keeps so many ``memories``, of which the first is read.
    """

    gates: int
    memories: int

    def __init__(self, *, steps: int, vocabulary: int, embedding: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.steps = steps
        self.hidden = hidden
        self.embedding = token_table(vocabulary, embedding)
        self.from_input = nn.Linear(embedding, self.gates * hidden)
        self.from_state = nn.Linear(hidden, self.gates * hidden)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(batch, outputs)`` of token ids ``(batch, steps)``."""
        projected: Tensor = self.from_input(self.embedding(tokens))
        words = present_words(tokens, projected)
        # unbind, not projected[:, t]: the gradient of an index is a zero tensor of full length per step.
        inputs = projected.unbind(1)
        present = words.unbind(1)
        memory = (torch.zeros_like(inputs[0][:, : self.hidden]),) * self.memories
        states = []
        for t in range(self.steps):
            memory = self._step(inputs[t], present[t], memory)
            states.append(memory[0])
        mean = (torch.stack(states, dim=1) * words).sum(1) / words.sum(1).clamp(min=1)
        scores: Tensor = self.head(mean)
        return scores

    def _step(self, x: Tensor, present: Tensor, memory: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        raise NotImplementedError


class GRUClassifier(RecurrentClassifier):
    """A gated recurrent unit.

    With reset gate r, update gate u and candidate c (Chung et al. 2014; the reset acts on the
    projected state, as in cuDNN, so that one product per step serves all three gates)::

        r = σ(W_r x + U_r h)   u = σ(W_u x + U_u h)   c = tanh(W_c x + r ∘ (U_c h))   h ← h + u ∘ (c − h)
    """

    gates, memories = 3, 1

    def _step(self, x: Tensor, present: Tensor, memory: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (state,) = memory
        h = self.from_state(state)
        n = self.hidden
        gates = torch.sigmoid(x[:, : 2 * n] + h[:, : 2 * n])
        candidate = torch.tanh(x[:, 2 * n :] + gates[:, :n] * h[:, 2 * n :])
        return (state + gates[:, n:] * present * (candidate - state),)


class LSTMClassifier(RecurrentClassifier):
    """A long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).

    With input gate i, forget gate f, output gate o and candidate g::

        i, f, o = σ(W x + U h)   g = tanh(W_g x + U_g h)   c ← f ∘ c + i ∘ g   h ← o ∘ tanh(c)

    The forget gate's bias begins at 1 (Jozefowicz et al. 2015): a new cell remembers.
    """

    gates, memories = 4, 2

    def __init__(self, *, steps: int, vocabulary: int, embedding: int, hidden: int, outputs: int) -> None:
        super().__init__(steps=steps, vocabulary=vocabulary, embedding=embedding, hidden=hidden, outputs=outputs)
        with torch.no_grad():
            self.from_input.bias[hidden : 2 * hidden] = 1.0
            self.from_state.bias[hidden : 2 * hidden] = 0.0

    def _step(self, x: Tensor, present: Tensor, memory: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        state, cell = memory
        into = x + self.from_state(state)
        n = self.hidden
        gates = torch.sigmoid(into[:, : 3 * n])
        renewed = gates[:, n : 2 * n] * cell + gates[:, :n] * torch.tanh(into[:, 3 * n :])
        said = gates[:, 2 * n :] * torch.tanh(renewed)
        return state + present * (said - state), cell + present * (renewed - cell)


def _recurrent(cell: type[RecurrentClassifier]) -> Callable[..., nn.Module]:
    """The builder of one of the recurrent networks."""

    def build(
        *,
        input_shape: tuple[int, ...],
        outputs: int,
        vocabulary: int,
        embedding: int = 64,
        hidden: int = 64,
    ) -> nn.Module:
        at_least(1, embedding=embedding, hidden=hidden)
        return cell(steps=input_shape[0], vocabulary=vocabulary, embedding=embedding, hidden=hidden, outputs=outputs)

    return build


gru = _recurrent(GRUClassifier)
lstm = _recurrent(LSTMClassifier)

SMALL_IMAGE = 64


class PadShortcut(nn.Module):
    """Shortcut A: every ``stride``-th pixel, and zero channels before and after; no parameters."""

    samples_apart = True

    def __init__(self, *, extra: int, stride: int) -> None:
        super().__init__()
        self.front = extra // 2
        self.back = extra - self.front
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """The thinned and widened input."""
        thinned = x[:, :, :: self.stride, :: self.stride]
        return nn.functional.pad(thinned, (0, 0, 0, 0, self.front, self.back))


class BasicBlock(nn.Module):
    """``relu(body(x) + shortcut(x))`` with two 3×3 convolutions in the body."""

    samples_apart = True

    expansion = 1
    """How many times as wide as the stage what leaves a block is."""

    def __init__(self, *, inputs: int, outputs: int, stride: int, shortcut: str, norm: str) -> None:
        super().__init__()
        self.body = self._body(inputs, outputs, stride=stride, norm=norm)
        self.shortcut: nn.Module
        if stride == 1 and inputs == outputs:
            self.shortcut = nn.Identity()
        elif shortcut == "A":
            self.shortcut = PadShortcut(extra=outputs - inputs, stride=stride)
        else:
            projection = conv(inputs, outputs, kernel=1, stride=stride)
            self.shortcut = nn.Sequential(OrderedDict(conv=projection, norm=image_norm(norm, outputs)))
        self.relu = nn.ReLU()

    def _body(self, inputs: int, outputs: int, *, stride: int, norm: str) -> nn.Sequential:
        return nn.Sequential(
            OrderedDict(
                conv1=conv(inputs, outputs, stride=stride),
                norm1=image_norm(norm, outputs),
                relu1=nn.ReLU(),
                conv2=conv(outputs, outputs),
                norm2=image_norm(norm, outputs),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


class BottleneckBlock(BasicBlock):
    """The same with 1×1, 3×3 and 1×1 convolutions, the last of which is four times as wide."""

    samples_apart = True

    expansion = 4

    def _body(self, inputs: int, outputs: int, *, stride: int, norm: str) -> nn.Sequential:
        narrow = outputs // self.expansion
        return nn.Sequential(
            OrderedDict(
                conv1=conv(inputs, narrow, kernel=1),
                norm1=image_norm(norm, narrow),
                relu1=nn.ReLU(),
                conv2=conv(narrow, narrow, stride=stride),
                norm2=image_norm(norm, narrow),
                relu2=nn.ReLU(),
                conv3=conv(narrow, outputs, kernel=1),
                norm3=image_norm(norm, outputs),
            )
        )


def _residual_network(
    stem: OrderedDict[str, nn.Module],
    *,
    widths: Sequence[int],
    blocks: int,
    outputs: int,
    shortcut: str,
    norm: str,
    feature_scale: float,
    block: type[BasicBlock] = BasicBlock,
) -> nn.Module:
    """Stages of ``blocks`` blocks after the stem; every stage but the first halves the size."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(stem))
    inputs = widths[0]
    for i, wide in enumerate(widths, start=1):
        stage: OrderedDict[str, nn.Module] = OrderedDict()
        for j in range(1, blocks + 1):
            stride = 2 if i > 1 and j == 1 else 1
            made = block.expansion * wide
            stage[f"block{j}"] = block(inputs=inputs, outputs=made, stride=stride, shortcut=shortcut, norm=norm)
            inputs = made
        layers[f"stage{i}"] = nn.Sequential(stage)
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    with_head(layers, inputs, outputs, feature_scale)
    model = nn.Sequential(layers)
    he_init((m for m in model.modules() if isinstance(m, nn.Conv2d)), mode="fan_out")
    return model


def cifar_resnet(blocks: int, block: type[BasicBlock] = BasicBlock) -> Callable[..., nn.Module]:
    """The builder of the CIFAR ResNet with 6·blocks + 2 weighted layers; with bottlenecks 9·blocks + 2."""

    def resnet(
        *,
        input_shape: tuple[int, ...],
        outputs: int,
        shortcut: Literal["A", "B"] = "A",
        norm: Literal["batch", "group"] = "batch",
        width: int = 16,
        feature_scale: float = 1.0,
    ) -> nn.Module:
        at_least(1, width=width)
        stem: OrderedDict[str, nn.Module] = OrderedDict(
            conv=conv(input_shape[0], width), norm=image_norm(norm, width), relu=nn.ReLU()
        )
        widths = (width, 2 * width, 4 * width)
        return _residual_network(
            stem,
            widths=widths,
            blocks=blocks,
            outputs=outputs,
            shortcut=shortcut,
            norm=norm,
            feature_scale=feature_scale,
            block=block,
        )

    return resnet


def resnet18(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    stem: Literal["auto", "small", "large"] = "auto",
    norm: Literal["batch", "group"] = "batch",
    width: int = 64,
    feature_scale: float = 1.0,
) -> nn.Module:
    """Four stages of two blocks; ``auto`` takes the small stem (3×3, no pooling) up to 64 pixels."""
    at_least(1, width=width)
    channels, height, breadth = input_shape
    small = stem == "small" or (stem == "auto" and max(height, breadth) <= SMALL_IMAGE)
    first = conv(channels, width) if small else conv(channels, width, kernel=7, stride=2)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=first, norm=image_norm(norm, width), relu=nn.ReLU())
    if not small:
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    widths = (width, 2 * width, 4 * width, 8 * width)
    return _residual_network(
        layers, widths=widths, blocks=2, outputs=outputs, shortcut="B", norm=norm, feature_scale=feature_scale
    )


STEM_CHANNELS = 16
DENSE_BLOCKS = 3
# Besides the dense layers: the stem, two transitions and the head.
OTHER_LAYERS = 4


class DenseLayer(nn.Module):
    """Appends ``growth`` new channels, norm-ReLU-conv of all earlier ones, to its input."""

    samples_apart = True

    def __init__(self, *, inputs: int, growth: int, norm: str) -> None:
        super().__init__()
        self.norm = image_norm(norm, inputs)
        self.relu = nn.ReLU()
        self.conv = conv(inputs, growth)

    def forward(self, x: Tensor) -> Tensor:
        """The input with the new channels behind it."""
        return torch.cat([x, self.conv(self.relu(self.norm(x)))], dim=1)


def densenet(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    growth: int = 12,
    depth: int = 22,
    compression: float = 0.5,
    norm: Literal["batch", "group"] = "batch",
    feature_scale: float = 1.0,
) -> nn.Module:
    """Three dense blocks of ``(depth - 4)/3`` layers; transitions keep ``compression`` of the channels."""
    at_least(1, growth=growth)
    not_too_deep(depth)
    per_block, rest = divmod(depth - OTHER_LAYERS, DENSE_BLOCKS)
    if per_block < 1 or rest:
        nearest = OTHER_LAYERS + DENSE_BLOCKS * max(1, per_block)
        raise ConfigError(
            f"The depth of 'densenet' must be 4 + 3·n with n ≥ 1, not {depth}: take {nearest} "
            f"or {nearest + DENSE_BLOCKS}."
        )
    if not 0 < compression <= 1:
        raise ConfigError(f"The compression of 'densenet' must be in (0, 1], not {compression}.")

    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=conv(input_shape[0], STEM_CHANNELS))
    channels = STEM_CHANNELS
    for i in range(1, DENSE_BLOCKS + 1):
        block: OrderedDict[str, nn.Module] = OrderedDict()
        for j in range(1, per_block + 1):
            block[f"layer{j}"] = DenseLayer(inputs=channels, growth=growth, norm=norm)
            channels += growth
        layers[f"block{i}"] = nn.Sequential(block)
        if i < DENSE_BLOCKS:
            kept = max(1, int(channels * compression))
            layers[f"transition{i}"] = _transition(channels, kept, norm=norm)
            channels = kept
    layers["norm"] = image_norm(norm, channels)
    layers["relu"] = nn.ReLU()
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    with_head(layers, channels, outputs, feature_scale)
    model = nn.Sequential(layers)
    he_init(m for m in model.modules() if isinstance(m, nn.Conv2d))
    return model


def _transition(inputs: int, outputs: int, *, norm: str) -> nn.Module:
    """Fewer channels and half the size."""
    return nn.Sequential(
        OrderedDict(
            norm=image_norm(norm, inputs),
            relu=nn.ReLU(),
            conv=conv(inputs, outputs, kernel=1),
            pool=nn.AvgPool2d(2),
        )
    )
