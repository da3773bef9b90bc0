"""Random small networks for property tests: depth, widths, biases, norms, skips, pooling, grouping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

LINEAR_SHAPE, CONV_SHAPE = (5,), (2, 6, 6)


@dataclass(frozen=True)
class BlockPlan:
    """One block: a map to `width` channels, a norm, an activation, and how it joins its input."""

    width: int
    bias: bool
    norm: str
    activation: str
    join: str
    groups: int
    kernel: int
    pool: str


@dataclass(frozen=True)
class Plan:
    """A whole network and the round it is trained in."""

    convolutional: bool
    blocks: tuple[BlockPlan, ...]
    frozen: bool
    dropout: float
    outputs: int
    head_bias: bool
    flatten: bool
    seed: int


WIDTHS = (2, 4, 6)
NORMS = ("none", "none", "batch", "batch", "bare batch", "group", "layer", "instance")
ACTIVATIONS = ("relu", "relu", "leaky", "prelu", "none")
JOINS = ("plain", "residual", "projected residual", "concat", "gate")

blocks = st.builds(
    BlockPlan,
    width=st.sampled_from(WIDTHS),
    bias=st.booleans(),
    norm=st.sampled_from(NORMS),
    activation=st.sampled_from(ACTIVATIONS),
    join=st.sampled_from(JOINS),
    groups=st.sampled_from((1, 1, 2, 0)),
    kernel=st.sampled_from((1, 3)),
    pool=st.sampled_from(("none", "none", "max", "avg", "stride")),
)
plans = st.builds(
    Plan,
    convolutional=st.booleans(),
    blocks=st.lists(blocks, min_size=1, max_size=4).map(tuple),
    frozen=st.booleans(),
    dropout=st.sampled_from((0.0, 0.0, 0.3)),
    outputs=st.integers(1, 4),
    head_bias=st.booleans(),
    flatten=st.booleans(),
    seed=st.integers(0, 2**16),
)


class Block(nn.Module):
    """A block of the plan; it only uses torch's own layers."""

    def __init__(self, plan: BlockPlan, channels: int, *, convolutional: bool, side: int) -> None:
        super().__init__()
        self.join = plan.join
        width = channels if plan.join == "residual" else plan.width
        self.convolutional = convolutional
        self.main = self._map(plan, channels, width)
        # One pixel has no variance, and torch refuses to normalise it.
        self.norm = nn.Identity() if plan.norm == "instance" and side == 1 else self._norm(plan.norm, width)
        self.act = {
            "relu": nn.ReLU,
            "leaky": nn.LeakyReLU,
            "prelu": lambda: nn.PReLU(width),
            "none": nn.Identity,
        }[plan.activation]()
        self.second = self._map(plan, width, width) if plan.join != "plain" else nn.Identity()
        self.skip = self._map(plan, channels, width) if plan.join in ("projected residual", "gate") else nn.Identity()
        self.pool: nn.Module = nn.Identity()
        if convolutional and plan.pool != "none":
            kinds = {"max": nn.MaxPool2d(2, ceil_mode=True), "avg": nn.AvgPool2d(2, ceil_mode=True)}
            self.pool = kinds.get(plan.pool) or nn.MaxPool2d(1, stride=2)
        self.width = width + channels if plan.join == "concat" else width

    def _map(self, plan: BlockPlan, into: int, out: int) -> nn.Module:
        if not self.convolutional:
            return nn.Linear(into, out, bias=plan.bias)
        groups = plan.groups or into
        if into % groups or out % groups:
            groups = 1
        return nn.Conv2d(into, out, plan.kernel, padding=plan.kernel // 2, bias=plan.bias, groups=groups)

    def _norm(self, kind: str, width: int) -> nn.Module:
        batch = nn.BatchNorm2d if self.convolutional else nn.BatchNorm1d
        if kind == "batch":
            return batch(width)
        if kind == "bare batch":
            return batch(width, affine=False)
        if kind == "group" or (kind == "layer" and self.convolutional):
            return nn.GroupNorm(2 if width % 2 == 0 and self.convolutional else 1, width)
        if kind == "layer":
            return nn.LayerNorm(width)
        if kind == "instance" and self.convolutional:
            return nn.InstanceNorm2d(width, affine=True)
        return nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.main(x)))
        if self.join in ("residual", "projected residual"):
            h = torch.relu(self.second(h) + self.skip(x))
        elif self.join == "concat":
            h = torch.cat([self.second(h), x], 1)
        elif self.join == "gate":
            h = self.second(h * self.skip(x))
        return self.pool(h)  # type: ignore[no-any-return]


class RandomNet(nn.Module):
    """Blocks and a linear head."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        shape = CONV_SHAPE if plan.convolutional else LINEAR_SHAPE
        self.blocks = nn.ModuleList()
        channels, side = shape[0], shape[-1]
        for block in plan.blocks:
            made = Block(block, channels, convolutional=plan.convolutional, side=side)
            side = side if block.pool == "none" else -(-side // 2)
            self.blocks.append(made)
            channels = made.width
        self.drop = nn.Dropout(plan.dropout)
        self.flatten = plan.flatten or not plan.convolutional
        with torch.no_grad():
            features = self.eval().features(torch.zeros(2, *shape)).shape[1]
        self.head = nn.Linear(features, plan.outputs, bias=plan.head_bias)
        self.train()
        if plan.frozen:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.drop(x).flatten(1) if self.flatten else self.drop(x).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


def build(plan: Plan) -> tuple[nn.Module, Tensor]:
    """The planned network and an example batch for it."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(plan.seed)
        model = RandomNet(plan)
        example = torch.randn(2, *(CONV_SHAPE if plan.convolutional else LINEAR_SHAPE))
    return model, example
