"""Networks that take inputs by name and give objects, Hugging Face's among them, train like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fedveil
from downlink.exactness import assert_exact
from fedveil.errors import ConfigError, DataError
from fedveil.models import Adapted, build
from fedveil.own_code import OwnCode
from fedveil.work import Batches, ClientData, CrossEntropy
from fedveil.work.clipping import ClippedSamples
from pairs import crossed
from shell import fedveil as command
from work.test_clipping import by_hand as by_hand_clipped
from work.test_clipping import opened, typical, workbench

STEPS, WORDS = 6, 20
QUICK: dict[str, Any] = {"rounds": 2, "seed": 1, "progress": False, "lr": 0.1, "dtype": "float64"}
SCHEMES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "lossless": {"head_noise": False, "min_coverage": 0.0},
    "veil-secagg": {"head_noise": False, "min_coverage": 0.0},
    "nadp": {},
    "veil-dp": {"min_coverage": 0.0},
}


def rows(samples: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(STEPS)[None] < torch.randint(2, STEPS + 1, (samples, 1), generator=generator)).long()
    ids = torch.randint(1, WORDS, (samples, STEPS), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 3, (samples,), generator=generator)}


CLIENTS = [rows(9, 1), rows(9, 2), rows(7, 3)]


class Reader(nn.Module):
    """The mean of the words that a mask leaves; gives an object, as its callers expect."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        words = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        present = words.to(self.table.weight.dtype)[..., None]
        mean = (torch.relu(self.inner(self.table(input_ids))) * present).sum(1) / present.sum(1)
        return SimpleNamespace(logits=self.head(mean), hidden_states=(mean,))


def reader() -> nn.Module:
    torch.manual_seed(0)
    return Reader()


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=8, num_labels=3, **sizes, **dropped)
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 12}
    config = transformers.LlamaConfig(
        vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=8, num_labels=3, pad_token_id=0, **sizes
    )
    return transformers.LlamaForSequenceClassification(config)  # type: ignore[no-any-return]


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **sizes)
    return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]


TEXT: dict[str, Callable[[], nn.Module]] = {"reader": reader, "bert": bert, "llama": llama}


def pictures() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {"pixel_values": torch.randn(n, 1, 8, 8, generator=generator), "labels": torch.arange(n) % 3} for n in (8, 8, 6)
    ]


def by_hand(net: nn.Module, clients: list[dict[str, Tensor]], rounds: int, rate: float) -> dict[str, Tensor]:
    """Gradient descent on everybody's samples, with the network's own call."""
    net = net.double().train()
    weights = torch.tensor([len(client["labels"]) for client in clients], dtype=torch.float64)
    for _ in range(rounds):
        total = torch.zeros((), dtype=torch.float64)
        for client, weight in zip(clients, weights / weights.sum(), strict=True):
            given = {k: v.double() if v.is_floating_point() else v for k, v in client.items() if k != "labels"}
            total = total + weight * nn.functional.cross_entropy(net(**given).logits, client["labels"])
        parameters = [p for p in net.parameters() if p.requires_grad]
        grads = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter -= rate * grad
    return dict(net.named_parameters())


@pytest.mark.parametrize(("name", "scheme"), crossed([*TEXT, "vit"], ["fedavg", "lossless", "veil-secagg"]))
def test_a_network_with_named_inputs_ends_where_gradient_descent_does(name: str, scheme: str) -> None:
    make, clients = (vit, pictures()) if name == "vit" else (TEXT[name], CLIENTS)
    given = {**QUICK, **SCHEMES[scheme], "batch_size": 0, "bn_eps": "public", "loss": "cross-entropy"}
    ended = fedveil.train(make(), clients, scheme=scheme, **given).model
    truth = by_hand(make(), clients, 2, 0.1)
    assert isinstance(ended, Adapted)
    trained = dict(ended.network.named_parameters())
    assert trained.keys() == truth.keys()
    # Masked sums are of fixed point numbers; that network normalises in single precision, whatever it is given.
    bound = 1e-4 if scheme == "veil-secagg" or name == "llama" else 1e-9
    for key, value in truth.items():
        assert float((trained[key] - value).abs().max()) < bound


@pytest.mark.parametrize(("name", "scheme"), crossed([*TEXT, "vit"], ["nadp", "veil-dp"]))
def test_a_network_with_named_inputs_trains_under_noise(name: str, scheme: str) -> None:
    make, clients = (vit, pictures()) if name == "vit" else (TEXT[name], CLIENTS)
    result = fedveil.train(make(), clients, scheme=scheme, **{**QUICK, **SCHEMES[scheme], "rounds": 1})
    assert result.ledger["lines"]
    assert all(bool(p.isfinite().all()) for p in result.model.parameters())


@pytest.mark.parametrize("name", [*TEXT, "vit"])
def test_what_is_clipped_is_every_samples_own_gradient(name: str) -> None:
    columns = pictures()[0] if name == "vit" else CLIENTS[0]
    inputs = [column for key, column in columns.items() if key != "labels"]
    fields = () if name == "vit" else (("input_ids", (STEPS,)), ("attention_mask", (STEPS,)))
    net = Adapted((vit if name == "vit" else TEXT[name])(), fields).double()
    x, y, loss = inputs[0].double() if name == "vit" else torch.cat(inputs, 1), columns["labels"], CrossEntropy()
    architecture, sent = opened(net, x)
    clip = typical(net, loss, x, y)
    work = ClippedSamples(loss, Batches(0, 0), clip)
    workspace = workbench(work, architecture)
    sums = workspace.layout.split(work.run(workspace, sent, ClientData(0, x, y), round=0))["gradients"][0]
    truth = by_hand_clipped(net, loss, x, y, clip)
    assert float((sums / len(y) - truth).abs().max()) < 1e-9 * float(truth.abs().max())


class Rows(Dataset[Any]):
    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        # A column that no network takes, as tables of texts have them.
        return {"text": "a film", **{name: column[index] for name, column in self.columns.items()}}


FORMS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "rows": lambda columns: list(Rows(columns)),
    "a data set": Rows,
    "a loader": lambda columns: DataLoader(Rows(columns), batch_size=4),
    "inputs and targets": lambda columns: (
        {"attention_mask": columns["attention_mask"], "input_ids": columns["input_ids"]},
        columns["labels"],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_whatever_the_form_of_the_samples_the_model_is_the_same(form: str) -> None:
    truth = fedveil.train(reader(), CLIENTS, scheme="fedavg", **QUICK).model
    other = fedveil.train(reader(), [FORMS[form](columns) for columns in CLIENTS], scheme="fedavg", **QUICK).model
    for key, value in truth.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)


def test_a_hugging_face_dataset_trains_bert() -> None:
    datasets = pytest.importorskip("datasets")
    given = [datasets.Dataset.from_dict({k: v.tolist() for k, v in columns.items()}) for columns in CLIENTS]
    ended = fedveil.train(bert(), given, scheme="fedavg", **QUICK).model
    truth = fedveil.train(bert(), CLIENTS, scheme="fedavg", **QUICK).model
    for key, value in truth.state_dict().items():
        assert torch.equal(ended.state_dict()[key], value)


def test_token_ids_alone_are_masked_where_the_network_says_what_padding_is() -> None:
    net = bert().eval()
    data = CLIENTS[0]
    masked = net(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
    torch.testing.assert_close(Adapted(net)(data["input_ids"]), masked)
    assert not torch.allclose(net(data["input_ids"]).logits, masked)


@pytest.mark.parametrize("name", TEXT)
def test_a_veiled_round_recovers_the_gradient(name: str) -> None:
    net = Adapted(TEXT[name](), (("input_ids", (STEPS,)), ("attention_mask", (STEPS,))))

    class Masked(nn.Module):
        """Takes ids alone: the trial draws them at random, and any may be 0."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            mask = x.ne(0).logical_or(torch.arange(STEPS) == 0)
            return self.net(torch.cat([x, mask.to(x.dtype)], 1))  # type: ignore[no-any-return]

    assert_exact(Masked(), CLIENTS[0]["input_ids"][:2])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: {**row, "attention_mask": row["attention_mask"][:-1]}, "attention_mask of shape"),
        (lambda row: {**row, "attention_mask": row["attention_mask"].double()}, "whole numbers and real ones"),
    ],
)
def test_inputs_that_do_not_go_together_are_refused(change: Callable[[Any], Any], said: str) -> None:
    listed = list(Rows(CLIENTS[0]))
    with pytest.raises(DataError, match=said):
        fedveil.train(reader(), [[*listed, change(listed[0])]], scheme="fedavg", **QUICK)


def test_an_input_that_the_network_does_not_take_is_named() -> None:
    columns = CLIENTS[0]
    given = ({"input_ids": columns["input_ids"], "mask": columns["attention_mask"]}, columns["labels"])
    with pytest.raises(DataError, match="no input called 'mask'"):
        fedveil.train(reader(), [given], scheme="fedavg", **QUICK)


def test_an_object_without_logits_is_refused_by_its_type() -> None:
    class Odd(Reader):
        def forward(self, input_ids: Tensor) -> Any:  # type: ignore[override]
            return SimpleNamespace(scores=super().forward(input_ids).logits)

    with pytest.raises(ConfigError, match="SimpleNamespace"):
        fedveil.train(Odd(), [(CLIENTS[0]["input_ids"], CLIENTS[0]["labels"])], scheme="fedavg", **QUICK)


def test_a_stored_model_is_loaded_with_the_network_that_was_trained(tmp_path: Path) -> None:
    trained = fedveil.train(reader(), CLIENTS, scheme="fedavg", out=tmp_path / "run", **QUICK).model
    loaded = fedveil.load(tmp_path / "run", model=reader())
    x = torch.cat([CLIENTS[0]["input_ids"], CLIENTS[0]["attention_mask"]], 1)
    torch.testing.assert_close(loaded(x), trained(x))


FACTORY = """
from transformers import BertConfig, BertForSequenceClassification

def build(vocabulary, outputs, width=8):
    return BertForSequenceClassification(BertConfig(
        vocab_size=vocabulary, num_labels=outputs, hidden_size=width, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=256))
"""


def test_a_file_builds_a_hugging_face_model_on_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    (tmp_path / "nets.py").write_text(FACTORY, encoding="utf-8")
    texts = "\n".join(f"{'good' if n % 2 else 'bad'} film number {n},{n % 2}" for n in range(40))
    (tmp_path / "films.csv").write_text(f"t,y\n{texts}\n", encoding="utf-8")
    model = f"{tmp_path / 'nets.py'}:build"
    net = build(OwnCode(model), input_shape=(5,), outputs=2, vocabulary=9)
    assert isinstance(net, Adapted)
    data = ("--dataset", tmp_path / "films.csv", "--text", "t", "--target", "y", "--clients", 2)
    run = command("run", *data, "--model", model, "--scheme", "fedavg", "--rounds", 1, "--out", tmp_path / "run")
    assert run.code == 0, run.error
    assert command("predict", tmp_path / "run", "--model", model).code == 0
