"""The Transformers are what they are called, ignore padding, and learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedveil
from downlink.exactness import assert_exact
from fedveil import models
from fedveil.errors import ConfigError
from fedveil.models.attention import Attention, DecoderClassifier, EncoderBlock, TransformerClassifier, turned

STEPS, WORDS = 7, 11
TEXT = ("transformer", "decoder", "lstm")


def text_model(name: str, **options: int) -> nn.Module:
    size = {"hidden": 8, "embedding": 8} if name == "lstm" else {"width": 16, "depth": 2, "heads": 4, **options}
    return models.build(name, input_shape=(STEPS,), outputs=3, vocabulary=WORDS, **size)


def vision_model(**options: int | str) -> nn.Module:
    return models.build("vit", input_shape=(3, 8, 8), outputs=3, width=16, depth=2, heads=4, **options)


def tokens(batch: int, *, low: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(low, WORDS, (batch, STEPS), generator=torch.Generator().manual_seed(seed))


def test_a_block_is_the_encoder_layer_of_pytorch() -> None:
    block = EncoderBlock(width=16, heads=4, expansion=4, dropout=0.0).double()
    reference = nn.TransformerEncoderLayer(
        16, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    attention = block.attention
    parts = (attention.query, attention.key, attention.value)
    with torch.no_grad():
        reference.self_attn.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        reference.self_attn.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        pairs = ((reference.self_attn.out_proj, attention.out), (reference.linear1, block.up))
        for theirs, ours in (*pairs, (reference.linear2, block.down)):
            theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, STEPS, 16, dtype=torch.float64)
    mask = torch.rand(3, STEPS) > 0.3
    mask[:, 0] = True

    torch.testing.assert_close(block(x, mask[:, None, None]), reference(x, src_key_padding_mask=~mask))


def test_grouped_queries_are_heads_that_share_keys_and_values() -> None:
    grouped, whole = Attention(width=16, heads=4, groups=2), Attention(width=16, heads=4)
    with torch.no_grad():
        for name in ("query", "out"):
            getattr(whole, name).load_state_dict(getattr(grouped, name).state_dict())
        for name in ("key", "value"):
            shared = dict(getattr(grouped, name).named_parameters())
            for part, theirs in getattr(whole, name).named_parameters():
                theirs.copy_(shared[part].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1))
    x = torch.randn(3, STEPS, 16)
    torch.testing.assert_close(grouped(x), whole(x))


def test_rotary_positions_tell_distances_only() -> None:
    model = text_model("decoder")
    assert isinstance(model, DecoderClassifier)
    query, key = torch.randn(2, 1, 1, 1, 4).double().expand(2, 1, 1, STEPS, 4)
    cosines, sines = model.cosines.double(), model.sines.double()
    scores = (turned(query, cosines, sines) @ turned(key, cosines, sines).transpose(-1, -2))[0, 0]
    assert all(float(scores.diagonal(shift).std(correction=0)) < 1e-6 for shift in range(-STEPS + 1, STEPS))
    assert float(scores[0].std()) > 0.01


def test_a_decoder_is_told_nothing_by_what_comes_later() -> None:
    model = text_model("decoder").double()
    assert isinstance(model, DecoderClassifier)
    x, later = tokens(4), tokens(4, seed=1)
    later[:, :3] = x[:, :3]
    seen: list[Tensor] = []
    handle = model.norm.register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    model(x), model(later)
    handle.remove()
    torch.testing.assert_close(seen[0][:, :3], seen[1][:, :3])
    assert not torch.allclose(seen[0][:, 3:], seen[1][:, 3:])


@pytest.mark.parametrize("name", ["decoder", "lstm"])
def test_padding_does_not_matter_on_either_side(name: str) -> None:
    model = text_model(name).double()
    text, padding = tokens(4)[:, :3], torch.zeros(4, STEPS - 3, dtype=torch.long)
    behind, before = torch.cat([text, padding], 1), torch.cat([padding, text], 1)
    torch.testing.assert_close(model(behind), model(before), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(behind), model(tokens(4)))


def test_an_encoder_does_not_read_padding() -> None:
    model = text_model("transformer").double()
    assert isinstance(model, TransformerClassifier)
    x = tokens(4)
    x[:, 3:] = 0
    scores = model(x)
    with torch.no_grad():
        model.embedding.weight[0] = 5.0
        model.positions[3:] = -7.0
    torch.testing.assert_close(model(x), scores)


@pytest.mark.parametrize("name", TEXT)
def test_a_text_of_padding_alone_gives_the_bias_and_numbers(name: str) -> None:
    model = text_model(name)
    scores = model(torch.zeros(2, STEPS, dtype=torch.long))
    torch.testing.assert_close(scores, model.get_parameter("head.bias").expand(2, -1))
    scores.sum().backward()  # type: ignore[no-untyped-call]
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_the_lstm_is_that_of_pytorch() -> None:
    model = text_model("lstm").double()
    reference = nn.LSTM(8, 8, batch_first=True).double()
    order = torch.arange(32).reshape(4, 8)[[0, 1, 3, 2]].flatten()  # theirs: i, f, g, o
    with torch.no_grad():
        for kind, name in (("ih", "from_input"), ("hh", "from_state")):
            layer = model.get_submodule(name)
            getattr(reference, f"weight_{kind}_l0").copy_(layer.weight[order])  # type: ignore[index]
            getattr(reference, f"bias_{kind}_l0").copy_(layer.bias[order])  # type: ignore[index]
    x = tokens(6)
    states, _ = reference(model.get_submodule("embedding")(x))
    torch.testing.assert_close(model(x), model.get_submodule("head")(states.mean(1)))


@pytest.mark.parametrize("name", TEXT)
def test_it_learns_which_word_comes_first(name: str) -> None:
    # Both words are in every text: whoever sees no order learns nothing.
    model = text_model(name)
    x, y = tokens(200, low=3, seed=1), torch.arange(200) % 2
    x[:, 1], x[:, 4] = 1 + y, 2 - y
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    assert float((model(x).argmax(1) == y).float().mean()) > 0.95


@pytest.mark.parametrize("pool", ["mean", "class"])
def test_a_vision_transformer_learns_where_a_spot_is(pool: str) -> None:
    model = vision_model(pool=pool)
    generator = torch.Generator().manual_seed(1)
    x, y = 0.1 * torch.randn(60, 3, 8, 8, generator=generator), torch.arange(60) % 3
    for label, place in enumerate(((1, 1), (1, 6), (6, 1))):
        x[y == label, :, place[0], place[1]] += 3.0
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    assert float((model(x).argmax(1) == y).float().mean()) > 0.95


@pytest.mark.parametrize("name", [*TEXT, "vit", "vit with a class token"])
def test_a_veiled_round_recovers_the_gradient(name: str) -> None:
    if name in TEXT:
        assert_exact(text_model(name), tokens(2, low=0))
    else:
        assert_exact(vision_model(pool="mean" if name == "vit" else "class"), torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("name", [*TEXT, "vit"])
def test_it_trains_under_schemes_that_are_one_model_and_under_noise(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    shape = (8, 3, 8, 8) if name == "vit" else (8, STEPS)
    inputs = [torch.randn(shape, generator=generator) for _ in range(3)]
    if name != "vit":
        inputs = [torch.randint(0, WORDS, shape, generator=generator) for _ in inputs]
    clients = [(x, torch.randint(0, 3, (8,), generator=generator)) for x in inputs]
    net = vision_model() if name == "vit" else text_model(name)
    given: dict[str, Any] = {"rounds": 2, "seed": 1, "lr": 0.1, "dtype": "float64", "progress": False}
    given |= {"loss": "cross-entropy", "bn_eps": "public"}
    plain = fedveil.train(net, clients, scheme="fedavg", **given).model.state_dict()
    for scheme, near in (("lossless", 1e-9), ("veil-secagg", 1e-4)):
        veiled = fedveil.train(net, clients, scheme=scheme, head_noise=False, min_coverage=0.0, **given)
        assert veiled.summary["coverage"] > 0.3
        assert all(torch.allclose(value, plain[key], atol=near) for key, value in veiled.model.state_dict().items())
    noised = fedveil.train(net, clients, scheme="nadp", **given)
    assert all(bool(value.isfinite().all()) for value in noised.model.state_dict().values())
    assert any(line["epsilon"] is not None for line in noised.ledger["lines"])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("transformer", {"width": 10, "heads": 4}, "multiple of 'heads'"),
        ("transformer", {"dropout": 1.0}, "'dropout'"),
        ("transformer", {"depth": 1001}, "'depth'"),
        ("decoder", {"heads": 4, "groups": 3}, "multiple of 'groups'"),
        ("decoder", {"width": 12, "heads": 4}, "must be even"),
        ("decoder", {"hidden": 0}, "'hidden'"),
        ("vit", {"patch": 3}, "cannot be cut"),
        ("vit", {"patch": 0}, "'patch'"),
    ],
)
def test_options_that_no_transformer_can_have_are_refused(name: str, options: dict[str, int], said: str) -> None:
    shape, vocabulary = ((3, 8, 8), None) if name == "vit" else ((STEPS,), WORDS)
    with pytest.raises(ConfigError, match=said):
        models.build(name, input_shape=shape, outputs=2, vocabulary=vocabulary, **options)


def test_texts_that_are_too_long_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ConfigError, match="every pair"):
        models.build("decoder", input_shape=(5000,), outputs=2, vocabulary=9)
