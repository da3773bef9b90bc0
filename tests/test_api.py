"""fedveil.train: the user's own network on the user's own clients."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedveil
from fedveil.downlink import Rescaling
from fedveil.errors import CheckpointError, ConfigError, DataError, FedVeilError, NumericError, TraceError
from fedveil.protocol.parts import Scheme
from fedveil.runs.session import resume
from fedveil.schemes import Setting
from fedveil.uplink.plain import Bare
from fedveil.work import Batches, CrossEntropy, Gradients, Schedule

QUICK: dict[str, Any] = {"rounds": 3, "seed": 1, "progress": False}


class Own(nn.Module):
    """A network of somebody else's making."""

    def __init__(self, inputs: int = 6, outputs: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 12)
        self.norm = nn.BatchNorm1d(12)
        self.last = nn.Linear(12, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def separable(clients: int = 4, samples: int = 30, *, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Three classes that a linear map tells apart."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(6, 3, generator=torch.Generator().manual_seed(99))
    inputs = [torch.randn(samples + k, 6, generator=generator) for k in range(clients)]
    return [(x, (x @ teacher).argmax(1)) for x in inputs]


def test_a_users_model_learns_from_clients_tensors() -> None:
    test = separable(1, 200, seed=5)[0]
    result = fedveil.train(Own(), separable(), test=test, rounds=40, lr=0.2, momentum=0.8, seed=1, progress=False)
    assert len(result.metrics) == 40
    assert result.summary["test_accuracy"] > 0.8
    assert result.summary["scheme"] == "lossless"
    with torch.no_grad():
        judged = float((result.model(test[0]).argmax(1) == test[1]).double().mean())
    assert judged == pytest.approx(result.summary["test_accuracy"])
    assert not result.model.training


def test_the_given_model_stays_as_it_was() -> None:
    net = Own().train()
    before = copy.deepcopy(net.state_dict())
    fedveil.train(net, separable(), **QUICK)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training
    assert all(parameter.grad is None for parameter in net.parameters())
    assert type(net.norm) is nn.BatchNorm1d


def test_the_veil_gives_the_model_of_plain_averaging() -> None:
    net = Own()
    settings = {**QUICK, "rounds": 20, "dtype": "float64", "loss": "square", "lr": 0.1, "bn_eps": "secret"}
    plain, veiled = (
        dict(fedveil.train(net, separable(), scheme=scheme, **settings).model.named_parameters())
        for scheme in ("fedavg", "pbpfl")
    )
    for name, value in plain.items():
        torch.testing.assert_close(veiled[name], value, rtol=1e-9, atol=1e-10)


class Squares(Dataset[tuple[Tensor, int]]):
    """A torch Dataset that is no tensor."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


def test_torch_datasets_give_the_same_model_as_tensors() -> None:
    net, pairs = Own(), separable()
    given = {
        "tensors": pairs,
        "TensorDatasets": [TensorDataset(*one) for one in pairs],
        "Datasets": [Squares(*one) for one in pairs],
        "numpy arrays": [(x.numpy(), y.numpy()) for x, y in pairs],
        "a mixture": [pairs[0], TensorDataset(*pairs[1]), Squares(*pairs[2]), pairs[3]],
    }
    models = {what: fedveil.train(net, data, **QUICK).model for what, data in given.items()}
    for what, model in models.items():
        for ours, theirs in zip(model.parameters(), models["tensors"].parameters(), strict=True):
            assert torch.equal(ours, theirs), what


def test_regression_with_vector_and_single_targets() -> None:
    generator = torch.Generator().manual_seed(1)
    map_ = torch.randn(6, 2, generator=generator)
    inputs = [torch.randn(40, 6, generator=generator) for _ in range(3)]
    settings = {"rounds": 50, "lr": 0.05, "momentum": 0.9, "seed": 1, "progress": False}
    x = torch.randn(50, 6, generator=generator)
    vector = fedveil.train(Own(outputs=2), [(x, x @ map_) for x in inputs], test=(x, x @ map_), **settings)
    assert vector.summary["test_mse"] < 0.2 * float((x @ map_).square().mean())
    assert "test_accuracy" not in vector.summary
    flat = fedveil.train(
        Own(outputs=1), [(x, (x @ map_)[:, 0]) for x in inputs], test=(x, (x @ map_)[:, 0]), **settings
    )
    assert flat.summary["test_mse"] < 0.2 * float((x @ map_)[:, 0].square().mean())


def test_metrics_have_a_row_per_round_with_the_training_loss() -> None:
    result = fedveil.train(Own(), separable(), **{**QUICK, "rounds": 5})
    assert [row["round"] for row in result.metrics] == [1, 2, 3, 4, 5]
    assert all(row["loss"] > 0 and row["clients"] == 4 for row in result.metrics)


def test_unequal_clients_and_cohorts_are_fine() -> None:
    pairs = [(x[: 3 + 7 * k], y[: 3 + 7 * k]) for k, (x, y) in enumerate(separable())]
    result = fedveil.train(Own(), pairs, cohort=2, batch_size=8, **QUICK)
    assert [row["clients"] for row in result.metrics] == [2, 2, 2]


@pytest.mark.parametrize(("value", "where"), [(float("nan"), 3), (float("inf"), 0), (float("-inf"), 17)])
def test_nan_and_infinity_in_a_clients_inputs_name_client_and_sample(value: float, where: int) -> None:
    pairs = separable()
    pairs[2][0][where, 4] = value
    with pytest.raises(DataError, match=f"Client 2, sample {where}: the input holds NaN or infinity"):
        fedveil.train(Own(), pairs, **QUICK)


def test_nan_in_a_regression_target_names_client_and_sample() -> None:
    pairs = [(x, x[:, :1].clone()) for x, _ in separable()]
    pairs[1][1][5] = float("nan")
    with pytest.raises(DataError, match="Client 1, sample 5: the target holds NaN or infinity"):
        fedveil.train(Own(outputs=1), pairs, **QUICK)


@pytest.mark.parametrize("scheme", ["fedavg", "lossless"])
@pytest.mark.parametrize("vectorise", [True, False])
def test_a_loss_that_explodes_names_the_client_and_the_batch(scheme: str, vectorise: bool) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    settings = {**QUICK, "rounds": 40, "lr": 1e12, "batch_size": 8, "loss": "square", "vectorise": vectorise}
    with pytest.raises(NumericError, match=r"of client \d+ is not finite in round \d+ \(batch of 8 samples: local"):
        fedveil.train(net, separable(), scheme=scheme, **settings)


def bad_inputs() -> dict[str, tuple[Any, Any, str]]:
    pairs = separable()
    x, y = pairs[0]
    return {
        "no clients": ([], ConfigError, "no clients"),
        "an empty client": ([pairs[0], (x[:0], y[:0])], DataError, "Client 1 has no samples"),
        "an empty dataset": ([pairs[0], TensorDataset(x[:0], y[:0])], DataError, "Client 1 has no samples"),
        "an empty client of a regression": (
            [(x, x[:, :3]), (x[:0], x[:0, :3])],
            DataError,
            "Client 1 has no samples",
        ),
        "an empty client with single targets": (
            [(x, x[:, 0]), (x[:0], x[:0, 0])],
            DataError,
            "Client 1 has no samples",
        ),
        "clients of different shapes": ([pairs[0], (x[:, :5], y)], DataError, r"different shapes: \(5,\), \(6,\)"),
        "more inputs than targets": ([(x, y[:-1])], DataError, "Client 0 has 30 inputs but 29 targets"),
        "a class too many": (
            [pairs[0], (x, y + 1)],
            DataError,
            r"Client 1 has class 3, .* 3 outputs \(classes 0 to 2\)",
        ),
        "a negative class": ([(x, y - 1)], DataError, "Client 0 has class -1"),
        "classes and numbers": ([pairs[0], (x, y.double())], DataError, "Some clients have integer targets"),
        "too many target columns": (
            [(x, x)],
            DataError,
            r"gives 3 outputs, the targets have 6 columns\. Floating-point targets are a regression",
        ),
        "inputs the model does not take": (
            [(x[:, :4], y)],
            ConfigError,
            r"does not take the clients' inputs of shape \(4,\)",
        ),
        "class numbers in a column": ([(x, y[:, None])], DataError, r"class numbers must have shape \(samples,\)"),
        "inputs without rows": ([(x[:, 0], y)], DataError, "both need one row per sample"),
        "a target without rows": ([(x, y[0])], DataError, "both need one row per sample"),
    }


def test_a_table_without_a_target_is_refused_with_what_to_give_instead() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(separable()[0][0].numpy())
    with pytest.raises(DataError, match=r"Client 0 is DataFrame, .* Give \(inputs, targets\)"):
        fedveil.train(Own(), [table], **QUICK)


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_clients_are_refused_by_name(case: str) -> None:
    clients, error, complaint = bad_inputs()[case]
    with pytest.raises(error, match=complaint):
        fedveil.train(Own(), clients, **QUICK)


def test_a_test_set_that_does_not_fit_is_refused() -> None:
    x, y = separable()[0]
    for test, complaint in (
        ((x[:, :4], y), r"test set's inputs have shape \(4,\), the clients' \(6,\)"),
        ((x, y + 1), "classes run from 0 to 2"),
        ((x[:0], y[:0]), "no samples"),
        ((x * float("nan"), y), "nan"),
        ((x, y[:-1]), "29 targets"),
    ):
        with pytest.raises(DataError, match=complaint):
            fedveil.train(Own(), separable(), test=test, **QUICK)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


class Shouting(Pair):
    def forward(self, x: Tensor) -> Any:
        raise ValueError("I only take six-packs")


@pytest.mark.parametrize(
    ("net", "complaint"),
    [
        (Pair(), "gives tuple per sample"),
        (Shouting(), "ValueError: I only take six-packs"),
        (nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 3)), r"gives \(2, 3\) per sample"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_reason(net: nn.Module, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        fedveil.train(net, separable(), **QUICK)


def test_a_model_that_a_veil_hardly_covers_is_refused_and_says_why() -> None:
    net = nn.Sequential(nn.Linear(6, 12), nn.Sigmoid(), nn.Linear(12, 3))
    with pytest.raises(TraceError, match="Operations that pin: Sigmoid"):
        fedveil.train(net, separable(), **QUICK)
    assert fedveil.train(net, separable(), min_coverage=0.0, **QUICK).summary["coverage"] < 0.5
    assert fedveil.train(net, separable(), scheme="fedavg", **QUICK).metrics


@pytest.mark.parametrize("name", ["dataset", "partition", "target", "weights", "model_options", "test_fraction"])
def test_settings_that_arguments_replace_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is not a setting of train"):
        fedveil.train(Own(), separable(), **{name: "x"}, **QUICK)


def test_an_unknown_setting_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Unknown setting in train\(\): 'round'. Did you mean 'rounds'") as refused:
        fedveil.train(Own(), separable(), round=3)
    assert "The nearest are rounds, " in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        fedveil.train(Own(), separable(), partitio="iid")
    assert not re.search(r"\bpartition\b", str(refused.value)), "which train() would refuse"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss": nn.CrossEntropyLoss()}, ("loss='square'", "target_scale and true_weight if", "(head_noise=False)")),
        ({"scheme": "fedavg", "options": {"batch_size": 3}}, ("(batch_size=3)",)),
        ({"scheme": "fedavg", "record_rounds": "1"}, ("(record=True)",)),
        ({"scheme": "fedavg", "device": "cuda:99"}, ("device",)),
        ({"scheme": "mine.py"}, ("'mine.py' is a file", "mine.py:function")),
    ],
)
def test_errors_name_settings_as_python_writes_them(settings: dict[str, Any], says: tuple[str, ...]) -> None:
    clients = [(torch.randn(9, 3), torch.randint(0, 2, (9,))) for _ in range(2)]
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ConfigError) as refused:
        fedveil.train(net, clients, **{"rounds": 1, "progress": False, **settings})
    for part in says:
        assert part in str(refused.value)
    assert "--" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_missing_is_told_in_python() -> None:
    with pytest.raises(ConfigError, match=r"Use device='cpu'\."):
        fedveil.train(nn.Linear(3, 2), [(torch.randn(9, 3), torch.randint(0, 2, (9,)))], device="cuda")


def test_a_folder_in_use_names_arguments(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    with pytest.raises(CheckpointError, match=r"give another out\."):
        fedveil.train(
            nn.Linear(3, 2), [(torch.randn(9, 3), torch.randint(0, 2, (9,)))], scheme="fedavg", out=tmp_path, rounds=1
        )


def test_out_leaves_a_folder_and_resume_continues_it(tmp_path: Path) -> None:
    net = Own()
    straight = fedveil.train(net, separable(), **{**QUICK, "rounds": 8})
    fedveil.train(net, separable(), out=tmp_path / "run", checkpoint_every=2, **{**QUICK, "rounds": 5})
    again = fedveil.train(net, separable(), out=tmp_path / "run", resume=True, **{**QUICK, "rounds": 8})
    assert [row["round"] for row in again.metrics] == list(range(1, 9))
    for ours, theirs in zip(again.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_run_without_a_seed_can_be_resumed(tmp_path: Path) -> None:
    net, settings = Own(), {"progress": False, "out": tmp_path / "run", "checkpoint_every": 1}
    first = fedveil.train(net, separable(), rounds=2, **settings)
    again = fedveil.train(net, separable(), rounds=4, resume=True, **settings)
    assert again.summary["seed"] == first.summary["seed"]
    assert again.summary["simulation"] is False
    assert len(again.metrics) == 4


def test_resume_without_a_run_starts_one(tmp_path: Path) -> None:
    result = fedveil.train(Own(), separable(), out=tmp_path / "run", resume=True, **QUICK)
    assert len(result.metrics) == 3


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    fedveil.train(Own(), separable(), out=tmp_path / "run", **QUICK)
    with pytest.raises(CheckpointError, match="holds another run"):
        fedveil.train(Own(), separable(), out=tmp_path / "run", **QUICK)


def test_frozen_parameters_stay_where_they_are() -> None:
    net = Own()
    net.first.weight.requires_grad_(False)
    for scheme in ("fedavg", "lossless"):
        after = fedveil.train(net, separable(), scheme=scheme, momentum=0.9, weight_decay=0.1, **QUICK).model
        assert torch.equal(after.first.weight, net.first.weight)  # type: ignore[arg-type, union-attr]
        assert not torch.equal(after.last.weight, net.last.weight)  # type: ignore[arg-type, union-attr]


def deep() -> nn.Sequential:
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(8, 3))
    for norm in (net[1], net[4]):
        norm.running_mean.uniform_(-0.5, 0.5)
        norm.running_var.uniform_(0.5, 2.0)
    return net


@pytest.mark.parametrize("frozen", [(1,), (1, 4)], ids=["one", "all"])
@pytest.mark.parametrize("scheme", ["fedavg", "lossless"])
def test_batch_norms_in_evaluation_mode_stay_frozen(scheme: str, frozen: tuple[int, ...]) -> None:
    net = deep()
    for place in frozen:
        net[place].eval()
    after = fedveil.train(net, separable(), scheme=scheme, **QUICK).model
    for place in (1, 4):
        same = torch.equal(after[place].running_mean, net[place].running_mean)  # type: ignore[index, union-attr]
        assert same == (place in frozen)
        assert net[place].training == (place not in frozen)


def test_frozen_batch_norms_train_to_the_model_of_plain_averaging() -> None:
    net = deep()
    net[1].eval()
    settings = {**QUICK, "rounds": 20, "dtype": "float64", "loss": "square", "bn_eps": "secret"}
    plain, veiled = (fedveil.train(net, separable(), scheme=s, **settings).model for s in ("fedavg", "pbpfl"))
    for (name, ours), theirs in zip(veiled.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=name)


def test_a_model_that_is_given_in_evaluation_mode_is_trained_as_a_whole() -> None:
    net = deep()
    after = [fedveil.train(one, separable(), **QUICK).model for one in (net, copy.deepcopy(net).eval())]
    for ours, theirs in zip(after[0].parameters(), after[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def tokens() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    net = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 2))
    return net, [(torch.randint(0, 20, (12, 5)), torch.randint(0, 2, (12,))) for _ in range(3)]


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "fedavg"},
        {"scheme": "lossless", "head_noise": False, "loss": "cross-entropy"},
        {"scheme": "lossless"},
    ],
)
def test_whole_numbers_reach_an_embedding(settings: dict[str, Any]) -> None:
    net, data = tokens()
    result = fedveil.train(net, data, min_coverage=0.0, **settings, **QUICK)
    assert len(result.metrics) == 3


def test_the_global_generator_is_left_alone() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    fedveil.train(net, separable(), **QUICK)
    assert torch.equal(torch.randn(4), expected)


def test_public_names_are_there_and_listed() -> None:
    assert dir(fedveil) == sorted(fedveil.__all__)
    for name in fedveil.__all__:
        assert getattr(fedveil, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fedveil.nonsense  # noqa: B018


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class Rows(Dataset[dict[str, Any]]):
    """Samples as dicts, as many hubs have them."""

    def __init__(self, x: Tensor, y: Tensor, names: tuple[str, str] = ("image", "label")) -> None:
        self.x, self.y, self.names = x, y, names

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(self.names, (self.x[index].tolist(), int(self.y[index])), strict=True))


KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True),
    "a loader of dicts": lambda x, y: DataLoader(Rows(x, y), batch_size=4),
    "dict rows": Rows,
    "a list of dicts": lambda x, y: [{"x": a, "y": b} for a, b in zip(x, y, strict=True)],
    "a list of pairs": lambda x, y: list(zip(x, y, strict=True)),
    "a dict of columns": lambda x, y: {"pixel_values": x, "labels": y},
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_however_samples_are_given_the_model_is_the_same(kind: str) -> None:
    data = separable(3)
    same = [
        fedveil.train(net(), given, rounds=2, seed=1, progress=False)
        for given in (data, [KINDS[kind](*one) for one in data])
    ]
    first, second = (list(one.model.parameters()) for one in same)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("clients", "complaint"),
    [
        (lambda x, y: [Rows(x, y, ("left", "right"))], "not clear what the input"),
        (lambda x, y: [[{"x": x, "image": x, "y": y}]], "'x', 'image', 'y'"),
        (lambda x, y: [TensorDataset(x)], r"Client 0, sample 0: a sample has 1 parts; \(input, target\) is needed"),
        (lambda x, y: [[(x[0], 1), (x[0, :2], 0)]], "Client 0: the samples cannot be read"),
        (lambda x, y: [("a", "b")], "Client 0: the samples cannot be read"),
        (lambda x, y: [7], "Client 0: the samples cannot be read"),
        (lambda x, y: (x, y), "one entry per client"),
        (lambda x, y: TensorDataset(x, y), "one entry per client"),
        (lambda x, y: 3, "one entry per client"),
    ],
)
def test_samples_that_cannot_be_read_are_refused_in_our_words(
    clients: Callable[[Tensor, Tensor], Any], complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        fedveil.train(net(), clients(*separable(1)[0]), rounds=1, progress=False)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"device": "tpu"}, "Unknown device 'tpu'"),
        ({"device": "meta"}, "use cpu or cuda"),
        ({"device": "cuda:99"}, "CUDA device"),
        ({"device": torch.device("meta")}, "use cpu or cuda"),
        ({"dtype": torch.bfloat16}, "Unknown dtype 'bfloat16'"),
        ({"loss": nn.MSELoss()}, "loss='square'"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "Head noise"),
        ({"loss": nn.functional.cross_entropy}, "Head noise"),
        ({"scheme": 3}, "a scheme is a function"),
        ({"loss": nn.CrossEntropyLoss}, r"is a class: give an object of it, CrossEntropyLoss\("),
        ({"callbacks": print}, "callbacks is builtin_function_or_method: give a list of them"),
        ({"out": 3}, "out is int: give the path of a folder"),
    ],
)
def test_objects_of_pytorch_that_cannot_be_used_are_refused_in_our_words(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        fedveil.train(net(), separable(2), rounds=1, progress=False, **settings)
    with pytest.raises(ConfigError, match=r"give a torch\.nn\.Module"):
        fedveil.train("net", separable(2))  # type: ignore[arg-type]


def test_objects_of_pytorch_that_say_what_a_setting_says_are_taken() -> None:
    given = {"loss": nn.CrossEntropyLoss(), "device": torch.device("cpu"), "dtype": torch.float64}
    done = fedveil.train(net(), separable(2), scheme="fedavg", rounds=1, progress=False, **given)
    assert (done.summary["loss"], done.summary["dtype"]) == ("cross-entropy", "float64")


def test_lists_of_python_are_what_words_with_commas_are() -> None:
    pictures = [(torch.rand(6, 1, 6, 6), torch.arange(6) % 2) for _ in range(2)]
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    given = {"scheme": "fedavg", "rounds": 4, "seed": 1, "progress": False, "lr_schedule": "step"}
    words = fedveil.train(network, pictures, lr_steps="0.25,0.5", augment="crop:1,flip", **given)
    lists = fedveil.train(network, pictures, lr_steps=[0.25, 0.5], augment=["crop:1", "flip"], **given)
    for ours, theirs in zip(lists.model.parameters(), words.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_of_python_is_not_gone_on_with_by_a_command(tmp_path: Path) -> None:
    fedveil.train(Own(), separable(), out=tmp_path / "run", **QUICK)
    with pytest.raises(ConfigError, match=r"begun in Python.*fedveil\.train\(…, out=.*, resume=True\)"):
        resume(tmp_path / "run", quiet=True)


def halved(round: int, rounds: int) -> float:
    return 0.5 if 2 * round >= rounds else 1.0


def mirrored(picture: torch.Tensor) -> torch.Tensor:
    return picture.flip(-1) if float(torch.rand(())) < 0.5 else picture


def test_a_schedule_and_an_augmentation_may_be_functions_and_resume_to_the_same_bits(tmp_path: Path) -> None:
    data, settings = separable(3), {"seed": 1, "progress": False, "scheme": "fedavg"}
    steps = {"lr_schedule": "step", "lr_steps": "0.5", "lr_drop": 0.5}
    named = fedveil.train(net(), data, rounds=4, **settings, **steps)
    done = fedveil.train(net(), data, rounds=4, lr_schedule=halved, **settings)
    for ours, theirs in zip(done.model.parameters(), named.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)

    functions: dict[str, Any] = {"lr_schedule": halved, "augment": mirrored}
    drawn = fedveil.train(net(), data, rounds=4, **settings, **functions)
    assert not torch.equal(next(drawn.model.parameters()), next(done.model.parameters()))
    kept = {"out": tmp_path / "run", "checkpoint_every": 2, **settings}

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedveil.train(net(), data, rounds=4, callbacks=[stop], **kept, **functions)
    again = fedveil.train(net(), data, rounds=4, resume=True, **kept, **functions)
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(again.model.parameters(), drawn.model.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"lr_schedule": lambda round, rounds: -1.0}, "lr_schedule gave -1.0 for round 1 of 1"),
        ({"augment": lambda x: x[:1]}, r"Client 0, sample 0: augment made float32 of shape \(1,\) of float32"),
        ({"augment": lambda x: x / 0}, "Client 0, sample 0: augment made NaN or infinity"),
        ({"augment": lambda x: 1 // 0}, "Client 0, sample 0: augment raised ZeroDivisionError"),
        ({"augment": "flip"}, "for pictures"),
    ],
)
def test_functions_that_give_nothing_to_train_with_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FedVeilError, match=complaint):
        fedveil.train(net(), separable(2), scheme="fedavg", rounds=1, progress=False, **settings)


def own(setting: Setting, *, keep: float = 4.0) -> Scheme:
    """A veil without noise on the last layer."""
    return Scheme(name="own", downlink=Rescaling(keep), work=Gradients(setting.loss, setting.batches), uplink=Bare())


def test_a_scheme_of_ones_own_is_taken_as_a_function_with_options_or_as_it_is() -> None:
    data = separable(3)
    settings: dict[str, Any] = {"rounds": 2, "seed": 1, "progress": False, "loss": "cross-entropy", "dtype": "float64"}
    plain = fedveil.train(net(), data, scheme="fedavg", **settings)
    seed, schedule = settings["seed"], Schedule(0.1)
    built = own(Setting(CrossEntropy(), Batches(0, seed), schedule))
    for scheme, options in ((own, {"keep": 2.0}), (built, {})):
        done = fedveil.train(net(), data, scheme=scheme, **settings, **options)
        assert done.summary["scheme"] == "own"
        for ours, theirs in zip(done.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    for options, complaint in (
        ({"kepe": 2.0}, r"Unknown setting in train\(\): 'kepe'. Did you mean 'keep'"),
        ({"keep": "wide"}, "'keep' of scheme 'own' must be float"),
        ({"keep": 0.5}, "spread must be a number above 1"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            fedveil.train(net(), data, scheme=own, **settings, **options)
    with pytest.raises(ConfigError, match="Unknown setting"):
        fedveil.train(net(), data, scheme=built, **settings, keep=2.0)


def test_a_run_of_an_object_is_continued_by_the_object_and_by_no_file(tmp_path: Path) -> None:
    from fedveil.runs import session

    data, settings = separable(3), {"seed": 1, "progress": False, "out": tmp_path / "run"}
    fedveil.train(net(), data, scheme=own, rounds=1, **settings)
    with pytest.raises(ConfigError, match="names code as its scheme, 'python:own'"):
        session.resume(tmp_path / "run", changes={"rounds": 2})
    done = fedveil.train(net(), data, scheme=own, rounds=2, resume=True, **settings)
    assert len(done.metrics) == 2


def test_what_happens_is_logged_and_quiet_unless_somebody_listens(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    code = "import fedveil, logging; logging.getLogger('fedveil.runs').warning('heard'); print(fedveil.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with caplog.at_level("DEBUG", logger="fedveil"):
        fedveil.train(net(), separable(3), rounds=2, seed=1, checkpoint_every=1, progress=False, out=tmp_path / "run")
    told = [(one.levelname, one.message.split(":")[0]) for one in caplog.records if one.name.startswith("fedveil.runs")]
    assert [one for one in told if one[0] == "INFO"] == [
        ("INFO", "lossless begins after round 0 of 2"),
        ("INFO", "round 1"),
        ("INFO", "round 2"),
        ("INFO", next(text for _, text in told if "ends after round 2" in text)),
    ]
    assert [text for level, text in told if level == "DEBUG"] == ["round 1", "round 2"]


def test_the_example_in_the_documentation_runs() -> None:
    import doctest

    from fedveil import api

    assert doctest.testmod(api).failed == 0


class Drifting(nn.Module):
    """Keeps a running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.inner(x - self.mean)


@pytest.mark.parametrize("scheme", ["fedavg", "lossless"])
def test_a_model_that_moves_a_buffer_of_its_own_is_refused(scheme: str) -> None:
    with pytest.raises(TraceError, match="buffer 'mean'"):
        fedveil.train(Drifting(), separable(), scheme=scheme, **QUICK)


def test_one_value_per_channel_is_refused_by_a_batch_norm() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    clients = [*separable(), (torch.randn(1, 6), torch.tensor([1]))]
    with pytest.raises(DataError, match="single value per channel"):
        fedveil.train(net, clients, scheme="lossless", **QUICK)


def test_a_client_can_take_the_head_noise_off_without_labels() -> None:
    samples = [torch.randn(60, 6) for _ in range(4)]
    *clients, held_out = [(x, x[:, :3].argmax(1)) for x in samples]
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    summary = fedveil.train(
        net, clients, test=held_out, rounds=50, lr=0.1, momentum=0.8, seed=2, progress=False
    ).summary
    assert summary["client_view_accuracy"] < summary["test_accuracy"] - 0.1
    assert summary["client_view_uncovered_accuracy"] > summary["client_view_accuracy"] + 0.1


def test_what_own_code_must_keep_to_is_in_the_ledger_of_a_scheme_with_noise() -> None:
    class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((4,), number / 12), torch.tensor(number % 2)

    net = torch.nn.Sequential(torch.nn.Linear(4, 2))
    common: dict[str, Any] = {"rounds": 1, "seed": 1, "lr": 0.1, "progress": False}
    own = {"loss": lambda outputs, targets: (outputs.sum(1) - targets).square()}
    noisy = fedveil.train(net, [Rows()] * 3, scheme="nadp", **own, **common)
    bare = fedveil.train(net, [Rows()] * 3, scheme="fedavg", **own, **common)
    words = ("keeps nothing from one sample for another", "made of one record alone")
    claims = [line for line in noisy.ledger["lines"] if line["epsilon"] is not None]
    assert claims
    for line in claims:
        assert all(any(word in text for text in line["assumptions"]) for word in words)
        assert "assuming" in line["why"]
    assert not any("own code" in text for line in bare.ledger["lines"] for text in (line["why"], *line["assumptions"]))
