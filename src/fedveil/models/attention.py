"""Transformers of the catalogue: an encoder and a decoder for text, and a vision Transformer.

The encoder is that of Vaswani et al. (2017) with its norms before its parts, the vision Transformer that of Dosovitskiy
et al. (2021); the decoder has RMSNorm, rotary positions, grouped queries and SwiGLU, as Llama does. All three give one
vector for each sample.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.errors import ConfigError
from fedveil.models.networks import PADDING, at_least, not_too_deep, present_words, token_table

MOST_POSITIONS = 4096
"""Attention takes memory for every pair of positions."""
SMALL = 0.02
ROTARY_BASE = 10_000.0


class Attention(nn.Module):
    """Softmax attention of ``heads`` heads; those of a group of queries share their keys and values.

    Every head is ``width / heads`` numbers wide. Rotary positions turn the pairs (i, i + d/2) of queries and keys.
    """

    samples_apart = True

    def __init__(self, *, width: int, heads: int, groups: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.groups = heads if groups is None else groups
        shared = self.groups * (width // heads)
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, shared, bias=bias)
        self.value = nn.Linear(width, shared, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """What every position of ``(batch, positions, width)`` gathers where ``mask`` is true."""
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        value = self.value(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        if turns is not None:
            query, key = turned(query, *turns), turned(key, *turns)
        if self.groups < self.heads:
            key, value = self._repeated(key), self._repeated(value)
        gathered = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out: Tensor = self.out(gathered.transpose(1, 2).flatten(-2))
        return out

    def _repeated(self, shared: Tensor) -> Tensor:
        each = self.heads // self.groups
        return shared.unsqueeze(2).expand(-1, -1, each, -1, -1).flatten(1, 2)


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions: every pair (i, i + d/2) of ``(batch, heads, positions, d)``, turned by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + the two layers of (norm(x)) with GELU between them."""

    samples_apart = True

    def __init__(self, *, width: int, heads: int, expansion: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width=width, heads=heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, expansion * width)
        self.gelu = nn.GELU()
        self.down = nn.Linear(expansion * width, width)
        # A layer that drops nothing would still count as random, and keep clients from being trained together.
        self.drop1, self.drop2 = (nn.Dropout(dropout) if dropout else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The stream, with what this block adds."""
        x = x + self.drop1(self.attention(self.norm1(x), mask))
        out: Tensor = x + self.drop2(self.down(self.gelu(self.up(self.norm2(x)))))
        return out


class DecoderBlock(nn.Module):
    """RMSNorm, rotary attention with grouped queries, RMSNorm, SwiGLU; no biases."""

    def __init__(self, *, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width=width, heads=heads, groups=groups, bias=False)
        self.norm2 = nn.RMSNorm(width, eps=1e-6)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.silu = nn.SiLU()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """The stream, with what this block adds."""
        x = x + self.attention(self.norm1(x), mask, turns)
        read = self.norm2(x)
        out: Tensor = x + self.down(self.silu(self.gate(read)) * self.up(read))
        return out


class TransformerClassifier(nn.Module):
    """Classifies token ids, of which 0 is padding, by the mean over the words of what the last block gives."""

    def __init__(
        self, *, steps: int, vocabulary: int, outputs: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = token_table(vocabulary, width, std=SMALL)
        self.positions = nn.Parameter(torch.empty(steps, width))
        nn.init.normal_(self.positions, std=SMALL)
        self.blocks = nn.ModuleList(
            EncoderBlock(width=width, heads=heads, expansion=4, dropout=dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(batch, outputs)`` of token ids ``(batch, steps)``."""
        words = tokens.ne(PADDING)
        # Where a text is padding alone, everything may be read: a softmax of nothing is no number.
        mask = words.logical_or(words.any(1, keepdim=True).logical_not())[:, None, None, :]
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x, mask)
        present = present_words(tokens, x)
        mean = (self.norm(x) * present).sum(1) / present.sum(1).clamp(min=1)
        scores: Tensor = self.head(mean)
        return scores


class DecoderClassifier(nn.Module):
    """Reads token ids, of which 0 is padding, from left to right, and classifies by what it has at the last word.

    With windows of a text as samples and the token after each as its class, that is next-token prediction.
    """

    cosines: Tensor
    sines: Tensor
    before: Tensor
    itself: Tensor

    def __init__(
        self,
        *,
        steps: int,
        vocabulary: int,
        outputs: int,
        width: int,
        depth: int,
        heads: int,
        groups: int,
        hidden: int,
    ) -> None:
        super().__init__()
        self.embedding = token_table(vocabulary, width, std=SMALL)
        self.blocks = nn.ModuleList(
            DecoderBlock(width=width, heads=heads, groups=groups, hidden=hidden) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, outputs)
        half = width // heads // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        angles = torch.outer(torch.arange(steps, dtype=torch.float64), ROTARY_BASE**-exponents)
        kind = torch.get_default_dtype()
        self.register_buffer("cosines", angles.cos().to(kind), persistent=False)
        self.register_buffer("sines", angles.sin().to(kind), persistent=False)
        self.register_buffer("before", torch.ones(steps, steps, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("itself", torch.eye(steps, dtype=torch.bool), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(batch, outputs)`` of token ids ``(batch, steps)``."""
        words = tokens.ne(PADDING)
        # Padding before a text reads itself: a softmax of nothing is no number.
        mask = words[:, None, None, :].logical_and(self.before).logical_or(self.itself)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask, (self.cosines, self.sines))
        after = words.flip(1).cumsum(1).flip(1)
        last = words.logical_and(after.eq(1)).unsqueeze(-1).type_as(x)
        scores: Tensor = self.head((self.norm(x) * last).sum(1))
        return scores


class VisionTransformer(nn.Module):
    """Patches of a picture as words: classified by their mean, or by a token of its own (``pool="class"``)."""

    samples_apart = True

    def __init__(
        self,
        *,
        channels: int,
        patches: int,
        patch: int,
        outputs: int,
        width: int,
        depth: int,
        heads: int,
        pool: Literal["mean", "class"],
        dropout: float,
    ) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, width, patch, stride=patch)
        self.token = None
        if pool == "class":
            self.token = nn.Parameter(torch.empty(1, 1, width))
            nn.init.normal_(self.token, std=SMALL)
        self.positions = nn.Parameter(torch.empty(patches + (pool == "class"), width))
        nn.init.normal_(self.positions, std=SMALL)
        self.blocks = nn.ModuleList(
            EncoderBlock(width=width, heads=heads, expansion=4, dropout=dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(batch, outputs)`` of images ``(batch, channels, height, width)``."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        scores: Tensor = self.head(x.mean(1) if self.token is None else x[:, 0])
        return scores


def _check(*, positions: int, width: int, depth: int, heads: int, dropout: float = 0.0) -> None:
    at_least(1, width=width, depth=depth, heads=heads)
    not_too_deep(depth)
    if positions > MOST_POSITIONS:
        raise ConfigError(
            f"Attention over {positions:,} positions takes memory for every pair of them: {MOST_POSITIONS:,} are the "
            "most. Cut texts, or take larger patches."
        )
    if width % heads:
        raise ConfigError(f"The model option 'width' must be a multiple of 'heads' ({heads}), not {width}.")
    if not 0 <= dropout < 1:
        raise ConfigError(f"The model option 'dropout' must be in [0, 1), not {dropout}.")


def transformer(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    vocabulary: int,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    dropout: float = 0.0,
) -> nn.Module:
    """A Transformer encoder over ``input_shape[0]`` token ids below ``vocabulary``."""
    steps = input_shape[0]
    _check(positions=steps, width=width, depth=depth, heads=heads, dropout=dropout)
    return TransformerClassifier(
        steps=steps,
        vocabulary=vocabulary,
        outputs=outputs,
        width=width,
        depth=depth,
        heads=heads,
        dropout=dropout,
    )


def decoder(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    vocabulary: int,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    groups: int = 2,
    hidden: int = 176,
) -> nn.Module:
    """A decoder over token ids: ``heads`` heads of queries share ``groups`` of keys and values, ``hidden`` gates."""
    steps = input_shape[0]
    _check(positions=steps, width=width, depth=depth, heads=heads)
    at_least(1, groups=groups, hidden=hidden)
    if heads % groups:
        raise ConfigError(f"The model option 'heads' must be a multiple of 'groups' ({groups}), not {heads}.")
    if (width // heads) % 2:
        raise ConfigError(f"Rotary positions turn pairs: 'width' / 'heads' must be even, not {width} / {heads}.")
    return DecoderClassifier(
        steps=steps,
        vocabulary=vocabulary,
        outputs=outputs,
        width=width,
        depth=depth,
        heads=heads,
        groups=groups,
        hidden=hidden,
    )


def vit(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    patch: int = 4,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    pool: Literal["mean", "class"] = "mean",
    dropout: float = 0.0,
) -> nn.Module:
    """A vision Transformer over patches of ``patch`` × ``patch`` pixels."""
    channels, height, breadth = input_shape
    at_least(1, patch=patch)
    if height % patch or breadth % patch:
        raise ConfigError(
            f"Pictures of {height}×{breadth} pixels cannot be cut into patches of {patch}×{patch}: set the model "
            "option 'patch' to a number that divides both."
        )
    patches = (height // patch) * (breadth // patch)
    _check(positions=patches + 1, width=width, depth=depth, heads=heads, dropout=dropout)
    return VisionTransformer(
        channels=channels,
        patches=patches,
        patch=patch,
        outputs=outputs,
        width=width,
        depth=depth,
        heads=heads,
        pool=pool,
        dropout=dropout,
    )
