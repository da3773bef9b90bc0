"""Small modern networks, each with an input: what the larger families are for."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from downlink.networks import IMAGE, VECTOR, Net

TOKENS = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(7))
SEQUENCE = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(8))


def mlp(activation: Callable[[], nn.Module]) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 7), activation(), nn.Linear(7, 3))


class SelfAttention(nn.Module):
    """Attention by the function: grouped queries and rotary positions where asked for."""

    cosine: Tensor
    sine: Tensor

    later: Tensor

    def __init__(
        self,
        size: int,
        heads: int,
        *,
        shared: int | None = None,
        rotary: bool = False,
        by_hand: bool = False,
        normed: bool = False,
    ) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.norms = nn.ModuleList((nn.LayerNorm if normed else nn.Identity)(size // heads) for _ in range(2))
        self.register_buffer("later", torch.ones(6, 6, dtype=torch.bool).triu(1))
        self.heads, self.shared, self.width, self.rotary = heads, shared or heads, size // heads, rotary
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, self.shared * self.width)
        self.value = nn.Linear(size, self.shared * self.width)
        self.out = nn.Linear(size, size)
        angle = torch.arange(6.0)[:, None] * torch.logspace(0, -2, self.width // 2)[None, :]
        self.register_buffer("cosine", torch.cat([angle, angle], 1).cos())
        self.register_buffer("sine", torch.cat([angle, angle], 1).sin())

    def turned(self, x: Tensor) -> Tensor:
        if not self.rotary:
            return x
        left, right = x.chunk(2, -1)
        return x * self.cosine + torch.cat([-right, left], -1) * self.sine

    def forward(self, x: Tensor) -> Tensor:
        samples, length, size = x.size(0), x.size(1), x.size(2)
        q = self.query(x).view(samples, length, self.heads, self.width).transpose(1, 2)
        k = self.key(x).view(samples, length, self.shared, self.width).transpose(1, 2)
        v = self.value(x).view(samples, length, self.shared, self.width).transpose(1, 2)
        q, k = self.norms[0](q), self.norms[1](k)
        if self.by_hand:
            scores = torch.matmul(self.turned(q), self.turned(k).transpose(-2, -1)) / math.sqrt(self.width)
            weights = scores.masked_fill(self.later, float("-inf")).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).reshape(samples, length, size))  # type: ignore[no-any-return]
        grouped = self.shared != self.heads
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).reshape(samples, length, size))


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, with RMSNorm."""

    def __init__(self, size: int, **how: object) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size), nn.RMSNorm(size)
        self.attention = SelfAttention(size, 4, **how)  # type: ignore[arg-type]
        self.gate, self.up, self.down = nn.Linear(size, 10), nn.Linear(size, 10), nn.Linear(10, size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """RMSNorm, rotary positions, grouped queries, SwiGLU; the head may be tied to the embedding."""

    def __init__(self, *, tied: bool, rotary: bool = True, shared: int = 2, **how: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block(16, rotary=rotary, shared=shared, **how) for _ in range(2))
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y)).mean(1)  # type: ignore[no-any-return]


class Vit(nn.Module):
    """Patches, class token, learned positions, torch's own encoder layers."""

    def __init__(self, *, norm_first: bool = True, activation: str = "gelu", whole: bool = False) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 12, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.positions = nn.Parameter(torch.randn(1, 5, 12))

        def layer() -> nn.TransformerEncoderLayer:
            return nn.TransformerEncoderLayer(
                12, 3, 20, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
            )

        self.encoder: nn.Module = nn.Sequential(layer(), layer())
        if whole:
            self.encoder = nn.TransformerEncoder(layer(), 2, norm=nn.LayerNorm(12), enable_nested_tensor=False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(y.size(0), -1, -1), y], 1) + self.positions
        return self.head(self.encoder(y)[:, 0])  # type: ignore[no-any-return]


class Multihead(nn.Module):
    """torch's MultiheadAttention with residual and post-norm, over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(11, 12), nn.Embedding(6, 12)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.wide, self.narrow = nn.Linear(12, 20), nn.Linear(20, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x) + self.positions(torch.arange(6))
        y = self.norm1(y + self.attention(y, y, y, need_weights=False)[0])
        y = self.norm2(y + self.narrow(F.gelu(self.wide(y))))
        return self.head(y.mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A recurrent layer between an embedding and a head."""

    def __init__(self, kind: type[nn.RNNBase], **how: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.cell = kind(5, 7, batch_first=True, **how)  # type: ignore[arg-type]
        self.head = nn.Linear(7 * (1 + self.cell.bidirectional), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.cell(self.embedding(x))[0][:, -1]))  # type: ignore[no-any-return]


class Adapter(nn.Module):
    """A linear layer and a product of two parameters beside it, the other way round; the second begins as zeros."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 8)
        self.down, self.up = nn.Parameter(torch.randn(2, size)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.5 * (x @ self.down.T @ self.up.transpose(0, 1))  # type: ignore[no-any-return]


class Stateful(nn.Module):
    """One recurrent network goes on from another's last states, which began with zeros that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 5), nn.Linear(7, 3)
        self.reader, self.writer = (nn.LSTM(5, 7, num_layers=2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        zeros = torch.zeros(2, x.size(0), 7, dtype=self.head.weight.dtype)
        _, states = self.reader(y, (zeros, zeros))
        return self.head(self.writer(y.flip(1), states)[0][:, -1])  # type: ignore[no-any-return]


class Stepwise(nn.Module):
    """torch's recurrent cells in a loop: the first state is a parameter, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 5), nn.Linear(6, 3)
        self.lower, self.upper = nn.GRUCell(5, 7), nn.LSTMCell(7, 6)
        self.begin = nn.Parameter(torch.zeros(1, 7))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        state, above = self.begin.expand(x.size(0), -1), None
        for step in range(6):
            state = self.lower(y[:, step], state)
            above = self.upper(state, above)
        assert above is not None
        return self.head(above[0])  # type: ignore[no-any-return]


class OwnCell(nn.Module):
    """A gated cell written out, from a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 5), nn.Linear(7, 3)
        self.from_input, self.from_state = nn.Linear(5, 14), nn.Linear(7, 14)

    def forward(self, x: Tensor) -> Tensor:
        given = self.from_input(self.embedding(x)).unbind(1)
        state = torch.zeros_like(given[0][:, :7])
        for step in given:
            mixed = step + self.from_state(state)
            state = state + torch.sigmoid(mixed[:, :7]) * (torch.tanh(mixed[:, 7:]) - state)
        return self.head(state)  # type: ignore[no-any-return]


class SqueezeExcite(nn.Module):
    """BatchNorm, SiLU, depthwise convolutions, squeeze-excite and a residual: a mobile block."""

    def __init__(self, *, grouped: int = 12) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.wide, self.norm1 = nn.Conv2d(8, 12, 1), nn.BatchNorm2d(12)
        self.depth, self.norm2 = nn.Conv2d(12, 12, 3, padding=1, groups=grouped), nn.BatchNorm2d(12)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.narrow, self.norm3 = nn.Conv2d(12, 8, 1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm0(self.stem(x)))
        z = F.silu(self.norm1(self.wide(y)))
        z = F.silu(self.norm2(self.depth(z)))
        z = z * torch.sigmoid(self.excite(F.silu(self.squeeze(z.mean((2, 3), keepdim=True)))))
        y = y + self.norm3(self.narrow(z))
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


class Rms(nn.Module):
    """RMSNorm written out, as many decoders have it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _halves(net: Net, x: Tensor) -> Tensor:
    left, right = net.first(x).chunk(2, -1)  # type: ignore[operator]
    return net.last(left * torch.sigmoid(right))  # type: ignore[operator,no-any-return]


def _fixed_positions(net: Net, x: Tensor) -> Tensor:
    angles = torch.arange(6.0, dtype=torch.float64)[:, None] * torch.arange(1.0, 13.0, dtype=torch.float64) / math.pi
    y = net.embedding(x) + angles.sin()  # type: ignore[operator]
    return net.head(net.layer(y).mean(1))  # type: ignore[operator,no-any-return]


def _mixed_tokens(net: Net, x: Tensor) -> Tensor:
    y = net.embed(x)  # type: ignore[operator]
    z = net.over(net.norm(y).transpose(1, 2))  # type: ignore[operator]
    y = y + net.back(F.gelu(z)).transpose(1, 2)  # type: ignore[operator]
    return net.head(y.mean(1))  # type: ignore[operator,no-any-return]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, float]] = {
    "relu": (lambda: mlp(nn.ReLU), VECTOR, 1.0),
    "tanh": (lambda: mlp(nn.Tanh), VECTOR, 1.0),
    "sigmoid": (lambda: mlp(nn.Sigmoid), VECTOR, 1.0),
    "gelu": (lambda: mlp(nn.GELU), VECTOR, 1.0),
    "prelu": (lambda: mlp(lambda: nn.PReLU()), VECTOR, 0.9),
    "glu": (lambda: nn.Sequential(nn.Linear(6, 10), nn.GLU(), nn.Linear(5, 3)), VECTOR, 1.0),
    "halves": (lambda: Net(_halves, first=nn.Linear(6, 10), last=nn.Linear(5, 3)), VECTOR, 1.0),
    "rms by hand": (lambda: nn.Sequential(nn.Linear(6, 8), Rms(8), nn.Linear(8, 3)), VECTOR, 1.0),
    "layer norms": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, elementwise_affine=False), nn.ReLU(), nn.Linear(8, 3)),
        VECTOR,
        1.0,
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 3)),
        IMAGE,
        1.0,
    ),
    "mobile": (SqueezeExcite, IMAGE, 1.0),
    "grouped": (lambda: SqueezeExcite(grouped=3), IMAGE, 1.0),
    "vit": (Vit, IMAGE, 1.0),
    "vit, post-norm, relu": (lambda: Vit(norm_first=False, activation="relu"), IMAGE, 1.0),
    "encoder as a whole": (lambda: Vit(whole=True), IMAGE, 1.0),
    "multihead": (Multihead, TOKENS, 1.0),
    "decoder": (lambda: Decoder(tied=False), TOKENS, 1.0),
    "decoder, tied": (lambda: Decoder(tied=True), TOKENS, 1.0),
    "normalised queries": (lambda: Decoder(tied=False, rotary=False, normed=True), TOKENS, 0.95),
    "decoder, no rotary": (lambda: Decoder(tied=False, rotary=False, shared=4), TOKENS, 1.0),
    "attention by hand": (lambda: Decoder(tied=False, rotary=False, shared=4, by_hand=True), TOKENS, 1.0),
    "the same, rotary": (lambda: Decoder(tied=False, shared=4, by_hand=True), TOKENS, 1.0),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2), TOKENS, 1.0),
    "gru, both ways": (lambda: Recurrent(nn.GRU, bidirectional=True), TOKENS, 1.0),
    "adapters": (lambda: nn.Sequential(Adapter(6), nn.Tanh(), Adapter(8), nn.GELU(), nn.Linear(8, 3)), VECTOR, 1.0),
    "states that are given": (Stateful, TOKENS, 1.0),
    "cells in a loop": (Stepwise, TOKENS, 1.0),
    "a cell of one's own": (OwnCell, TOKENS, 1.0),
    "rnn": (lambda: Recurrent(nn.RNN), TOKENS, 1.0),
    "fixed positions": (
        lambda: Net(
            _fixed_positions,
            embedding=nn.Embedding(11, 12),
            layer=nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True),
            head=nn.Linear(12, 3),
        ),
        TOKENS,
        0.85,
    ),
    "mixer": (
        lambda: Net(
            _mixed_tokens,
            embed=nn.Linear(5, 8),
            norm=nn.LayerNorm(8),
            over=nn.Linear(6, 10),
            back=nn.Linear(10, 6),
            head=nn.Linear(8, 3),
        ),
        SEQUENCE,
        1.0 - 6 / 227,  # but for the last bias over tokens, whose order everybody knows
    ),
}
"""Name → how to build it, an input, and how much of it orders and more must hide."""
