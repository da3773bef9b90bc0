"""Rotary positions and grouped heads: turns in every form of code, nothing where it is not certain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from downlink.exactness import assert_within, trial
from downlink.modern import TOKENS, Decoder
from downlink.test_symmetries import EXACT, error_under, exact, made
from fedveil.downlink import Rescaling, draw
from fedveil.downlink.export import verified
from fedveil.downlink.scales import ScaleTable, coverage
from fedveil.downlink.symmetry import Symmetry

WIDTH = 4


class Turning(nn.Module):
    """Attention of two heads, queries and keys turned by whatever code it is given."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, turn: Callable[..., Tensor], width: int = WIDTH, *, keys: Callable[..., Tensor] | None = None):
        super().__init__()
        self.turn, self.keys, self.width = turn, keys or turn, width
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(2 * width, 3)
        self.q, self.k, self.v = (nn.Linear(8, 2 * width) for _ in range(3))
        angle = torch.arange(6.0)[:, None] * torch.logspace(0, -2, WIDTH // 2)[None, :]
        self.register_buffer("cosine", angle.cos())
        self.register_buffer("sine", angle.sin())

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        q, k, v = (part(y).view(-1, 6, 2, self.width).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turn(self, q, x), self.keys(self, k, x), v)
        return self.head(torch.tanh(y).transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]


def halves(net: Turning, x: Tensor, _: object) -> Tensor:
    left, right = x.chunk(2, -1)
    cosine, sine = torch.cat([net.cosine, net.cosine], 1), torch.cat([net.sine, net.sine], 1)
    return x * cosine + torch.cat([-right, left], -1) * sine


def scaled(net: Turning, x: Tensor, _: object) -> Tensor:
    return halves(net, x, _) * 1.3


def parts(net: Turning, x: Tensor, _: object) -> Tensor:
    left, right = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return torch.cat([left * net.cosine - right * net.sine, left * net.sine + right * net.cosine], -1)


def neighbours(net: Turning, x: Tensor, _: object) -> Tensor:
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * net.cosine.repeat_interleave(2, -1) + turned * net.sine.repeat_interleave(2, -1)


def complexly(net: Turning, x: Tensor, _: object) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(x.size(0), 2, 6, WIDTH // 2, 2).contiguous())
    return torch.view_as_real(pairs * torch.complex(net.cosine, net.sine)).flatten(3)


def some(net: Turning, x: Tensor, _: object) -> Tensor:
    return torch.cat([halves(net, x[..., :WIDTH], None), x[..., WIDTH:]], -1)


def in_place_of_tokens(net: Turning, x: Tensor, tokens: Tensor) -> Tensor:
    angle = tokens[:, None, :, None] * 0.3
    return torch.cat(
        [x[..., :2] * angle.cos() - x[..., 2:] * angle.sin(), x[..., :2] * angle.sin() + x[..., 2:] * angle.cos()], -1
    )


def mirrored(net: Turning, x: Tensor, _: object) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * net.cosine + right * net.sine, left * net.sine - right * net.cosine], -1)


def uneven(net: Turning, x: Tensor, _: object) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * net.cosine - right * net.sine, left * net.sine + right * (net.cosine + 0.1)], -1)


def shifted(net: Turning, x: Tensor, _: object) -> Tensor:
    return halves(net, x, _) + net.sine.mean()


def later(net: Turning, x: Tensor, _: object) -> Tensor:
    return halves(net, x.roll(1, 2), None)


def turns(table: ScaleTable) -> int:
    """How many pairs turn in secret."""
    assert table.symmetry is not None
    return sum(blocks.count for blocks in table.symmetry.blocks if blocks.turn)


@pytest.mark.parametrize("family", ["full", "isometry", "signed"])
@pytest.mark.parametrize("form", [halves, scaled, parts, neighbours, complexly])
def test_every_form_of_rotary_positions_leaves_a_turn_for_each_pair(form: Any, family: str) -> None:
    table = exact(lambda: Turning(form), TOKENS, family)
    assert turns(table) == (0 if family == "signed" else 2 * WIDTH // 2)
    assert coverage(table, head_noise=False).fraction > (0.95 if form is not complexly or family != "signed" else 0.5)


def test_channels_that_are_not_turned_are_mixed() -> None:
    table = exact(lambda: Turning(some, 7), TOKENS)
    assert turns(table) == 2 * WIDTH // 2
    assert table.symmetry is not None
    widths = sorted((blocks.members.shape[1], blocks.count) for blocks in table.symmetry.blocks if not blocks.turn)
    assert widths == [(3, 2)]  # of q and k; values meet a tanh


@pytest.mark.parametrize("form", [in_place_of_tokens, mirrored, uneven, shifted, later])
def test_what_is_not_certainly_a_turn_is_none(form: Any) -> None:
    table = exact(lambda: Turning(form), TOKENS)
    assert turns(table) == (4 if form is later else 0)  # tokens that are moved first do not matter to a turn


def test_pairs_that_queries_and_keys_do_not_share_do_not_turn() -> None:
    assert turns(exact(lambda: Turning(halves, keys=neighbours), TOKENS)) == 0
    assert turns(exact(lambda: Turning(halves, keys=lambda net, x, _: x), TOKENS)) == 4


def test_a_turn_that_another_layer_reads_apart_is_none() -> None:
    def read(net: Turning, x: Tensor, _: object) -> Tensor:
        return halves(net, torch.tanh(x), None)

    assert turns(exact(lambda: Turning(read), TOKENS)) == 0


def of_turns(**changes: object) -> Callable[[Symmetry], Symmetry]:
    """Change the blocks that are turns."""

    def change(symmetry: Symmetry) -> Symmetry:
        blocks = tuple(
            dataclasses.replace(stack, **changes) if stack.turn else stack  # type: ignore[arg-type]
            for stack in symmetry.blocks
        )
        return dataclasses.replace(symmetry, blocks=blocks)

    return change


@pytest.mark.parametrize("form", [halves, neighbours])
def test_any_other_matrix_on_a_pair_is_wrong(form: Any) -> None:
    model, x = made(lambda: Turning(form), TOKENS)
    assert error_under(model, x, lambda symmetry: symmetry) < EXACT
    assert error_under(model, x, of_turns(turn=False)) > 1e-6
    assert error_under(model, x, of_turns(turn=False, isometry=True)) > 1e-6

    def alike(symmetry: Symmetry) -> Symmetry:
        flat = [dataclasses.replace(one, dual=torch.zeros_like(one.dual)) for one in symmetry.blocks]
        return dataclasses.replace(symmetry, blocks=tuple(flat))

    assert error_under(model, x, alike) > 1e-6


# -- grouped queries ------------------------------------------------------------------------------------------------


class Repeated(Decoder):
    """Keys and values repeated for their queries, as code had it before torch did."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__(tied=False, by_hand=by_hand)
        for block in self.blocks:
            attention: Any = block.attention
            attention.heads_of = attention.shared

            def turned(x: Tensor, own: Any = attention, inner: Any = attention.turned) -> Tensor:
                y = inner(x)
                return y if x.size(1) == own.heads else y[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)

            attention.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        for block in self.blocks:
            own: Any = block.attention
            z = block.norm1(y)
            samples, length = z.size(0), z.size(1)
            q = own.query(z).view(samples, length, own.heads, own.width).transpose(1, 2)
            k = own.key(z).view(samples, length, own.shared, own.width).transpose(1, 2)
            v = own.value(z).view(samples, length, own.shared, own.width).transpose(1, 2)
            v = v[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
            q, k = own.turned(q), own.turned(k)
            if own.by_hand:
                weights = (q @ k.transpose(-2, -1)).masked_fill(own.later, float("-inf")).softmax(-1)
                z = weights @ v
            else:
                z = F.scaled_dot_product_attention(q, k, v)
            y = y + own.out(z.transpose(1, 2).flatten(2))
        return self.head(self.norm(y)).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: Decoder(tied=False), lambda: Repeated(by_hand=False)])
def test_queries_of_a_group_change_places_with_what_they_give(make: Callable[[], nn.Module]) -> None:
    table = exact(make, TOKENS)
    assert table.symmetry is not None
    width, each, shared = 4, 2, 2
    shapes = [tuple(order.shape) for order in table.symmetry.orders if order.shape[1] > 1]
    queries, whole = (each, 2 * width), (shared, 2 * width + each * 2 * width)
    assert sorted(shapes) == sorted([*[queries] * 4, *[whole] * 2])
    model, x = made(make, TOKENS)

    def across(symmetry: Symmetry) -> Symmetry:
        groups = [order for order in symmetry.orders if tuple(order.shape) == queries]
        return dataclasses.replace(symmetry, orders=(torch.cat(groups[:2]),))

    # Some draws keep every query in its group.
    assert max(error_under(model, x, across, seed) for seed in range(3)) > 1e-6

    def apart(symmetry: Symmetry) -> Symmetry:  # queries without what they give
        groups = [order[:, :width] for order in symmetry.orders if tuple(order.shape) == queries]
        return dataclasses.replace(symmetry, orders=tuple(groups))

    assert max(error_under(model, x, apart, seed) for seed in range(3)) > 1e-6


def test_repeated_keys_by_hand_are_the_heads_that_they_repeat() -> None:
    by_hand, function = (exact(lambda hand=hand: Repeated(by_hand=hand), TOKENS) for hand in (True, False))
    assert by_hand.symmetry is not None
    assert function.symmetry is not None
    assert by_hand.symmetry.freedom(by_hand.classes) == function.symmetry.freedom(function.classes)


# -- Hugging Face ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_llama_of_hugging_face_is_covered_and_its_heads_turn(attention: str) -> None:
    transformers = pytest.importorskip("transformers")

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            settings = transformers.LlamaConfig(
                vocab_size=11,
                hidden_size=16,
                intermediate_size=20,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                attn_implementation=attention,
            )
            self.base, self.head = transformers.LlamaModel(settings), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.base(input_ids=x, use_cache=False).last_hidden_state.mean(1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Llama()
    architecture, weights = draw(net, TOKENS, traced=True, family="isometry")
    # It asks for single precision by name; what is compared is exact all the same.
    table = verified(architecture, weights, TOKENS, downlink=Rescaling(family="isometry")).table
    assert table is not None
    assert not table.pins
    assert turns(table) == 2 * 2
    covered = coverage(table, head_noise=False)
    assert covered.fraction > 0.99
    assert covered.levels["mixed"] > 0.2
    assert_within(trial(net, TOKENS, family="isometry"), 1e-4)  # single precision
