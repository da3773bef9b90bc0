"""What clients' samples may be given as in Python: the same model, whatever the form; a batch in memory, not all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedveil
from fedveil.data import intake as module
from fedveil.errors import DataError

QUICK: dict[str, Any] = {"rounds": 3, "seed": 1, "progress": False, "batch_size": 6}


def pairs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(14 + k, 5, generator=generator) for k in range(3)]
    return [(x, (x[:, 0] > 0).long()) for x in inputs]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))


class Numbered(Dataset[Any]):
    """A map-style data set; which samples were read, and how many at most between two looks."""

    def __init__(self, x: Tensor, y: Tensor, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.x, self.y, self.change = x, y, change
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return self.change(self.x[index]), int(self.y[index])


class AsDict(Numbered):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"pixel_values": x, "label": y}


class Streaming(IterableDataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        return zip(self.x, self.y, strict=True)


def doubled(rows: list[Any]) -> dict[str, Tensor]:
    """A collate function of one's own."""
    return {"x": torch.stack([2 * x for x, _ in rows]), "y": torch.tensor([y for _, y in rows])}


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a Dataset": Numbered,
    "a Dataset of dicts": AsDict,
    "a TensorDataset": TensorDataset,
    "a DataLoader": lambda x, y: DataLoader(Numbered(x, y), batch_size=4, shuffle=True),
    "a DataLoader of dicts": lambda x, y: DataLoader(AsDict(x, y), batch_size=4),
    "a collate function": lambda x, y: DataLoader(Numbered(x / 2, y), batch_size=4, collate_fn=doubled),
    "an IterableDataset": Streaming,
    "a DataLoader over one": lambda x, y: DataLoader(Streaming(x, y), batch_size=4),
    "a generator": lambda x, y: iter(Streaming(x, y)),
    "a list of rows": lambda x, y: list(Streaming(x, y)),
    "a dict of columns": lambda x, y: {"x": x, "y": y},
}


@pytest.fixture(scope="module")
def plain() -> fedveil.api.Trained:
    return fedveil.train(net(), pairs(), test=pairs()[0], **QUICK)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_model_and_the_scores_of_tensors(form: str, plain: fedveil.api.Trained) -> None:
    given = [FORMS[form](x, y) for x, y in pairs()]
    result = fedveil.train(net(), given, test=FORMS[form](*pairs()[0]), **QUICK)
    assert same(result.model, plain.model)
    assert result.summary["test_loss"] == plain.summary["test_loss"]


@pytest.mark.parametrize("scheme", [{"scheme": "ldp", "epsilon": 8.0}, {"scheme": "fedavg", "local_epochs": 2}])
def test_lazily_read_samples_give_the_same_model_under_clipping_and_local_training(scheme: dict[str, Any]) -> None:
    settings = {**QUICK, **scheme}
    lazily = fedveil.train(net(), [Numbered(*pair) for pair in pairs()], **settings)
    assert same(lazily.model, fedveil.train(net(), pairs(), **settings).model)


def test_a_round_reads_the_samples_of_its_batches_and_no_others() -> None:
    x = torch.randn(150, 5)
    clients = [Numbered(x, (x[:, 0] > 0).long()) for _ in range(3)]
    fedveil.train(net(), clients, **{**QUICK, "rounds": 1})
    # Beside its batch of 6, the first 64 samples are looked at to see what all are like.
    assert all(len(set(client.read)) <= 70 for client in clients)


def noisy(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn(5) + random.random()


def test_random_transforms_are_drawn_anew_and_alike_under_every_scheme() -> None:
    settings = {**QUICK, "dtype": "float64", "loss": "square"}
    seen: list[Tensor] = []

    def watched(x: Tensor) -> Tensor:
        seen.append(noisy(x))
        return seen[-1]

    clients = [Numbered(*pair, watched) for pair in pairs()]
    fedavg = fedveil.train(net(), clients, scheme="fedavg", **settings)
    assert len({tuple(x.tolist()) for x in seen}) > 3 * 18  # three rounds of three batches of six, each drawn anew
    veiled = fedveil.train(net(), clients, scheme="lossless", **settings)
    for ours, theirs in zip(veiled.model.parameters(), fedavg.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    assert not same(fedavg.model, fedveil.train(net(), pairs(), scheme="fedavg", **settings).model)


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(tmp_path: Path) -> None:
    clients = [Numbered(*pair, noisy) for pair in pairs()]
    settings = {**QUICK, "checkpoint_every": 1, "local_steps": 2, "scheme": "fedavg"}
    straight = fedveil.train(net(), clients, **settings)
    fedveil.train(net(), clients, out=tmp_path / "run", **{**settings, "rounds": 2})
    random.seed(9)
    torch.manual_seed(9)
    resumed = fedveil.train(net(), clients, out=tmp_path / "run", resume=True, **settings)
    assert same(resumed.model, straight.model)


def test_the_test_set_is_drawn_alike_every_time() -> None:
    test = Numbered(*pairs()[0], noisy)
    first, second = (fedveil.train(net(), pairs(), test=test, **QUICK).summary["test_loss"] for _ in range(2))
    assert first == second


def test_a_stream_that_does_not_fit_is_refused_and_told_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 20 * (5 * 4 + 8))
    with pytest.raises(DataError, match=r"Client 1: Streaming can only be gone .* after 6 of them .* __getitem__"):
        fedveil.train(net(), [Streaming(*pair) for pair in pairs()], **QUICK)
    endless = (pairs()[0][0][0:1].clone().squeeze(0) for _ in iter(int, 1))
    with pytest.raises(DataError, match="Client 0: generator can only be gone through"):
        fedveil.train(net(), [((x, 1) for x in endless)], **QUICK)


class Changed(Numbered):
    """One sample is not like the others."""

    def __init__(self, x: Tensor, y: Tensor, index: int, sample: Any) -> None:
        super().__init__(x, y)
        self.index, self.sample = index, sample

    def __getitem__(self, index: int) -> Any:
        return self.sample if index == self.index else super().__getitem__(index)


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        ((torch.ones(4), 0), "the input is float32 of shape"),
        ((torch.full((5,), float("nan")), 0), "the input holds NaN"),
        ((torch.ones(5), 2), r"has class 2, but the model has 2 outputs"),
        ((torch.ones(5), torch.ones(1)), "the target is float32"),
        ((torch.ones(5), torch.tensor([1])), r"a class is one whole number, not \(1,\)"),
        ((torch.ones(5), "cat"), "a text where numbers are needed"),
        (("a review", 1), "a text where numbers are needed"),
        ((torch.ones(3, 5, dtype=torch.uint8), 1), r"bytes from 0 to 255 .* / 255"),
        ((torch.ones(()), 1), "a single number"),
        ({"left": 1, "right": 2}, "it is not clear what the input"),
        ((torch.ones(5),), "a sample has 1 parts"),
    ],
)
def test_what_does_not_fit_is_named_by_client_and_sample(sample: Any, complaint: str) -> None:
    clients: list[Any] = pairs()
    clients[1] = Changed(*clients[1], 11, sample)
    with pytest.raises(DataError, match=f"Client 1, sample 11:? .*{complaint}"):
        fedveil.train(net(), clients, **{**QUICK, "batch_size": 0})


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        ((torch.ones(4), 0), r"different shapes: \(4,\), \(5,\)"),
        ((torch.ones(5), torch.ones(2)), "Some clients have integer targets"),
        ((torch.ones(()), 1), "Client 1, sample 0: the input is a single number"),
    ],
)
def test_a_first_sample_unlike_other_clients_is_refused_before_training(sample: Any, complaint: str) -> None:
    clients: list[Any] = pairs()
    clients[1] = Changed(*clients[1], 0, sample)
    with pytest.raises(DataError, match=complaint):
        fedveil.train(net(), clients, **QUICK)


def test_raw_bytes_are_not_taken_for_token_ids() -> None:
    x = torch.randint(0, 256, (9, 1, 4, 4), dtype=torch.uint8)
    with pytest.raises(DataError, match=r"Client 0: the inputs are bytes from 0 to 255 \(uint8\)"):
        fedveil.train(net(), [(x, torch.arange(9) % 2)], **QUICK)


def test_a_loader_whose_batches_mix_samples_up_is_refused() -> None:
    def summed(rows: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in rows]).sum(0), torch.tensor([y for _, y in rows])

    with pytest.raises(DataError, match=r"Client 0, sample 0: of one sample the loader's collate function makes"):
        fedveil.train(net(), [DataLoader(Numbered(*pairs()[0]), collate_fn=summed)], **QUICK)


@pytest.fixture(scope="module")
def hugging_face() -> Any:
    return pytest.importorskip("datasets")


@pytest.fixture
def pictured(hugging_face: Any) -> Any:
    """Fourteen pictures of 4×4 pixels with the name of a class, and a column that is neither."""
    image = pytest.importorskip("PIL.Image")
    x, y = pictures()
    features = {
        "picture": hugging_face.Image(),
        "who": hugging_face.Value("string"),
        "diagnosis": hugging_face.ClassLabel(names=["benign", "malignant"]),
    }
    columns = {"picture": [image.fromarray(one) for one in x], "who": ["somebody"] * 14, "diagnosis": y.tolist()}
    return hugging_face.Dataset.from_dict(columns, features=hugging_face.Features(features))


def pictures() -> tuple[Any, Tensor]:
    y = torch.arange(14) % 2
    pixels = (
        torch.randint(0, 200, (14, 4, 4, 3), generator=torch.Generator().manual_seed(2)) + 50 * y[:, None, None, None]
    )
    return pixels.to(torch.uint8).numpy(), y


def as_numbers() -> tuple[Tensor, Tensor]:
    x, y = pictures()
    return torch.from_numpy(x).permute(0, 3, 1, 2).float().div(255), y


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.ReLU(), nn.Linear(4, 2))


def test_hugging_face_datasets_are_read_by_what_their_features_say(pictured: Any) -> None:
    """The only ClassLabel is the target, the only picture the input, scaled to [0, 1]."""
    expected = fedveil.train(small(), [as_numbers()] * 2, test=as_numbers(), **QUICK)
    result = fedveil.train(small(), [pictured, pictured], test=pictured, **QUICK)
    assert same(result.model, expected.model)
    assert result.summary["test_loss"] == expected.summary["test_loss"]
    streamed = fedveil.train(small(), [pictured.to_iterable_dataset()] * 2, **QUICK)
    assert same(streamed.model, expected.model)


def test_a_transform_of_a_hugging_face_dataset_is_applied_each_time(pictured: Any) -> None:
    def flipped(batch: dict[str, Any]) -> dict[str, Any]:
        chosen = [torch.rand(()) < 0.5 for _ in batch["picture"]]
        x = [module._tensor(one) for one in batch["picture"]]
        return {
            "x": [one.flip(2) if flip else one for one, flip in zip(x, chosen, strict=True)],
            "y": batch["diagnosis"],
        }

    client = pictured.with_transform(flipped)
    first, second = (fedveil.train(small(), [client], **QUICK).model for _ in range(2))
    assert same(first, second)
    assert not same(first, fedveil.train(small(), [as_numbers()], **QUICK).model)


def test_hugging_face_datasets_that_do_not_fit_are_refused(hugging_face: Any, pictured: Any) -> None:
    for given, complaint in (
        (pictured, "clients is Dataset: give a list"),
        ([hugging_face.DatasetDict({"train": pictured})], "Client 0: a dict of the parts 'train': give one of them"),
        ([pictured.with_format("torch")], "Client 0, sample 0: the inputs are bytes from 0 to 255"),
        ([pictured.remove_columns("diagnosis")], "Client 0, sample 0: of a sample with 'picture', 'who'"),
        ([pictured.select([])], "Client 0 has no samples"),
    ):
        with pytest.raises(DataError, match=complaint):
            fedveil.train(small(), given, **QUICK)


class Partitioner:
    """What a partitioner of flwr-datasets promises: a dataset, a number of partitions, and each of them."""

    def __init__(self, dataset: Any = None) -> None:
        self._dataset = dataset

    @property
    def num_partitions(self) -> int:
        return 3

    def load_partition(self, partition_id: int) -> Any:
        if self._dataset is None:
            raise AttributeError("The dataset field should be set before using it.")
        return self._dataset[partition_id]


class Federated:
    """What a FederatedDataset promises: its partitioner has data once a partition was loaded."""

    def __init__(self, *splits: str) -> None:
        self.partitioners = {split: Partitioner() for split in splits}

    def load_partition(self, partition_id: int, split: str | None = None) -> Any:
        partitioner = self.partitioners[split or next(iter(self.partitioners))]
        partitioner._dataset = [Numbered(*pair) for pair in pairs()]
        return partitioner.load_partition(partition_id)


@pytest.mark.parametrize("given", [Partitioner([Numbered(*pair) for pair in pairs()]), Federated("train")])
def test_the_partitions_of_a_partitioner_are_the_clients(given: Any, plain: fedveil.api.Trained) -> None:
    assert same(fedveil.train(net(), given, **QUICK).model, plain.model)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (Partitioner(), r"Partitioner, whose partitions cannot be loaded \(AttributeError.*Assign its dataset first"),
        (Federated("train", "test"), r"deals out 'train', 'test', each to clients of its own: give \[data\.load_part"),
    ],
)
def test_a_partitioner_that_cannot_deal_is_refused(given: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        fedveil.train(net(), given, **QUICK)


def test_the_partitioners_of_flwr_datasets_themselves(pictured: Any) -> None:
    partitioner = pytest.importorskip("flwr_datasets.partitioner").IidPartitioner(num_partitions=2)
    partitioner.dataset = pictured
    assert len(fedveil.train(small(), partitioner, **QUICK).metrics) == 3
