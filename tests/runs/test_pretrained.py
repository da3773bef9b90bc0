"""Weights that a run begins with, and parts of a model that stay as they are."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedveil
from fedveil import models
from fedveil.config import RunConfig
from fedveil.errors import Code, ConfigError, TraceError
from fedveil.ledger import caveats
from fedveil.runs import session
from fedveil.runs.job import job_from_config
from fedveil.runs.pretrained import HANDED, PUBLISHED, fill_from
from shell import fedveil as command

SIZES: dict[str, Any] = {"input_shape": (64,), "outputs": 10, "depth": 2, "width": 8}
CONFIG = RunConfig(scheme="fedavg", rounds=1, clients=3, seed=1, lr=0.1, model_options={"depth": 2, "width": 8})


def pretrained() -> nn.Module:
    return models.build("mlp", seed=77, **SIZES)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.pth"])
def test_a_run_begins_with_the_weights_of_a_file(tmp_path: Path, name: str) -> None:
    state = pretrained().state_dict()
    if name.endswith("safetensors"):
        save_file(state, tmp_path / name)
    else:
        torch.save(state, tmp_path / name)
    job = job_from_config(CONFIG.with_changes(weights=str(tmp_path / name)))
    assert torch.equal(job.weights.parameters, torch.cat([value.flatten() for value in state.values()]))


def test_a_runs_own_model_file_is_such_a_file_and_a_run_with_one_resumes(tmp_path: Path) -> None:
    session.run(CONFIG, tmp_path / "a", quiet=True)
    more = CONFIG.with_changes(weights=str(tmp_path / "a" / "model.safetensors"), seed=2)
    session.run(more, tmp_path / "b", quiet=True)
    assert session.resume(tmp_path / "b", changes={"rounds": 2}, quiet=True)["rounds"] == 2


class Trap:
    """What a pickle of it would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path("sprung"), "!"))


def write_archive(path: Path, said: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w/data.pkl", said)


def broken(folder: Path, how: str) -> Path:
    """A file of weights that cannot be taken."""
    state, path = pretrained().state_dict(), folder / "w.pt"
    if how == "code":
        torch.save({**state, "trap": Trap()}, path)
    elif how == "model":
        torch.save(pretrained(), path)
    elif how == "nested":
        torch.save({"state_dict": state}, path)
    elif how == "sparse":
        torch.save({name: value.to_sparse() for name, value in state.items()}, path)
    elif how == "meta":
        torch.save({name: value.to("meta") for name, value in state.items()}, path)
    elif how == "keys without end":
        # A tuple of two tuples of two tuples …, sixty deep: as a key, 2^60 steps to hash.
        doubled = b"".join(b"q" + bytes([depth]) + b"h" + bytes([depth]) + b"\x86" for depth in range(60))
        write_archive(path, b"\x80\x02}()" + doubled + b"K\x01u.")
    elif how in ("a copied dictionary", "a hidden key without end"):
        # OrderedDict makes neither copies of a dictionary, nor keys of what nobody has looked at.
        doubled = b"".join(b"q" + bytes([depth]) + b"h" + bytes([depth]) + b"\x86" for depth in range(60))
        given = b"}U\x01aNs" if how == "a copied dictionary" else b")" + doubled + b"N\x86\x85"
        write_archive(path, b"\x80\x02ccollections\nOrderedDict\n" + given + b"\x85R.")
    elif how == "instructions":
        write_archive(path, b"\x80\x02" + b"}" * 1000 + b".")
    elif how == "a long name":
        torch.save({**state, "a" * 50_000: torch.ones(1)}, path)
    elif how == "a long name of code":
        write_archive(path, b"\x80\x02c" + b"a" * 50_000 + b"\nb\n.")
    elif how == "not a number":
        torch.save({name: value.clone().fill_(float("nan")) for name, value in state.items()}, path)
    elif how == "too large a number":
        torch.save({name: value.double().fill_(1e300) for name, value in state.items()}, path)
    elif how == "infinite safetensors":
        path = folder / "w.safetensors"
        save_file({name: value.clone().fill_(float("inf")) for name, value in state.items()}, path)
    elif how == "beyond its storage":
        torch.save(state, folder / "plain.pt")
        with zipfile.ZipFile(folder / "plain.pt") as given, zipfile.ZipFile(path, "w") as cut:
            for member in given.infolist():
                content = given.read(member)
                cut.writestr(member.filename, content[:-4] if "/data/" in member.filename else content)
    elif how == "rubbish":
        path.write_bytes(b"PK\x03\x04 no archive")
    elif how == "compressed":
        torch.save(state, folder / "plain.pt")
        with zipfile.ZipFile(folder / "plain.pt") as given, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for member in given.infolist():
                packed.writestr(member.filename, given.read(member))
    elif how == "not safetensors":
        path = folder / "w.safetensors"
        path.write_bytes(b"\xff" * 64)
    elif how == "missing":
        path = folder / "nowhere.pt"
    elif how == "other kind":
        path = folder / "w.json"
        path.write_text("{}")
    return path


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("code", "weights alone"),
        ("model", "weights alone"),
        ("nested", "tensors by name"),
        ("sparse", "weights alone: it names torch._utils._rebuild_sparse_tensor"),
        ("meta", "weights alone: it names torch._utils._rebuild_meta_tensor"),
        ("keys without end", "weights alone"),
        ("a copied dictionary", "weights alone"),
        ("a hidden key without end", "weights alone"),
        ("instructions", "it asks for more than 1,000 instructions"),
        ("a long name", "aaa… is not in the model"),
        ("a long name of code", "names a+…, and nothing was run"),
        ("not a number", "weight in .* hold NaN or infinity"),
        ("too large a number", "weight in .* hold NaN or infinity"),
        ("infinite safetensors", "weight in .* hold NaN or infinity"),
        ("beyond its storage", "weights alone"),
        ("rubbish", "weights alone"),
        ("compressed", "compressed"),
        ("not safetensors", "not a safetensors file"),
        ("missing", "no weights at"),
        ("other kind", "no file of weights"),
    ],
)
def test_what_is_no_file_of_weights_is_refused_and_runs_nothing(
    tmp_path: Path, how: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedveil.data.pickles._MOST_STEPS", 1000)
    with pytest.raises(ConfigError, match=complaint) as refused:
        fill_from(pretrained(), broken(tmp_path, how))
    assert len(str(refused.value)) < 500 + len(str(tmp_path))
    assert not Path("sprung").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_state_dict_is_read_as_pytorch_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    """Parameters, views of one storage, another layout in memory, tensors of every floating-point type."""
    like = pretrained().state_dict()
    together = torch.randn(sum(value.numel() for value in like.values()), dtype=dtype)
    parts = torch.split(together, [value.numel() for value in like.values()])
    state: dict[str, Any] = {
        name: part.view(value.shape[::-1]).T if value.dim() == 2 else nn.Parameter(part)
        for (name, value), part in zip(like.items(), parts, strict=True)
    }
    torch.save(state, tmp_path / "w.pt")
    model = pretrained()
    fill_from(model, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded[name].to(value.dtype))


def test_a_storage_that_many_tensors_are_views_of_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like = pretrained().state_dict()
    parts = torch.split(torch.randn(sum(value.numel() for value in like.values())), [v.numel() for v in like.values()])
    state = {name: part.view(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}
    torch.save(state, tmp_path / "w.pt")
    names = []
    read = zipfile.ZipFile.read
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda self, name: (names.append(name), read(self, name))[1])
    model = pretrained()
    fill_from(model, tmp_path / "w.pt")
    assert [name for name in names if "/data/" in str(name)] == ["w/data/0"]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_tensor_that_is_kept_with_its_sign_turned_keeps_its_sign(tmp_path: Path) -> None:
    state = pretrained().state_dict()
    torch.save({name: torch._neg_view(value) for name, value in state.items()}, tmp_path / "w.pt")
    model = pretrained()
    fill_from(model, tmp_path / "w.pt")
    assert all(torch.equal(value, -state[name]) for name, value in model.state_dict().items())


def test_a_mask_of_the_models_own_may_be_infinite(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    torch.save(net.state_dict(), tmp_path / "w.pt")
    fill_from(net, tmp_path / "w.pt")
    assert torch.isinf(net.mask[0, 1])  # type: ignore[index]


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    wider = models.build("mlp", seed=1, **{**SIZES, "width": 9})
    save_file(wider.state_dict(), tmp_path / "w.safetensors")
    name = next(iter(wider.state_dict()))
    with pytest.raises(ConfigError, match=rf"{name} has shape \(9, 64\) there and \(8, 64\) in the model"):
        job_from_config(CONFIG.with_changes(weights=str(tmp_path / "w.safetensors")))
    less = pretrained().state_dict()
    value = less.pop(name)
    save_file({**less, "strange": value}, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=f"{name} is missing there; strange is not in the model"):
        fill_from(pretrained(), tmp_path / "w.safetensors")


def frozen_net() -> nn.Sequential:
    """A backbone with a batch normalisation, frozen as PyTorch's users do it, and a head."""
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    with torch.no_grad():
        backbone[1].running_mean.normal_()  # type: ignore[union-attr, operator]
        backbone[1].running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr, operator]
    backbone.requires_grad_(False).eval()
    return nn.Sequential(backbone, nn.Linear(8, 3))


FAMILIES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg, local": {"local_epochs": 2, "batch_size": 4},
    "fedavg, together": {"vectorise": True},
    "lossless": {},
    "pbpfl": {},
    "veil-secagg": {},
    "veil-dp": {},
    "nadp": {},
    "ldp": {},
    "cdp": {},
    "mpdp": {"neighbours": 2},
    "paraaegis": {"cipher": "pads"},
    "dp-fedavg": {},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_frozen_parts_stay_as_they_are_to_the_bit_and_the_rest_is_trained(name: str) -> None:
    net = frozen_net()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    clients = [(x, x[:, :3].argmax(1))] * 4
    given = {"rounds": 2, "seed": 1, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "progress": False}
    done = fedveil.train(net, clients, scheme=name.split(",")[0], **given, **FAMILIES[name])
    after = done.model.state_dict()
    for key, value in before.items():
        if not key.endswith("num_batches_tracked"):
            assert torch.equal(after[key], value) is key.startswith("0."), key


@pytest.mark.parametrize("vectorise", [False, True])
def test_nothing_about_frozen_parts_is_sent(tmp_path: Path, vectorise: bool) -> None:
    """Their gradient tells of data all the same: what is uploaded of them is zero."""
    from fedveil.downlink.messages import Broadcast
    from fedveil.engine import ClientPool
    from fedveil.runs.job import ModelFacts, assemble_job

    x = torch.randn(9, 6)
    facts = ModelFacts(None, {}, (6,), 3, "classification")
    config = RunConfig(scheme="fedavg", clients=2, seed=1, vectorise=vectorise)
    job = assemble_job(config, frozen_net(), ClientPool.separate([(x, x[:, :3].argmax(1))] * 2), None, facts)
    from fedveil.work.messages import Workspace

    work, layout = job.scheme.work, job.scheme.layout(job.architecture)
    weights = job.weights
    sent = Broadcast(weights.parameters, weights.epsilon, weights.statistics, torch.empty(0), None)
    for _, vector in work.run_many(Workspace(job.architecture, layout), sent, job.pool.clients, round=0):
        assert isinstance(vector, torch.Tensor)
        gradient = layout.split(vector)["gradients"][0]
        assert not gradient[~job.architecture.trainable].any()
        assert gradient[job.architecture.trainable].any()


def test_the_ledger_of_a_veil_says_what_known_frozen_weights_cost() -> None:
    x = torch.randn(12, 6)
    clients = [(x, x[:, :3].argmax(1))] * 3
    given: dict[str, Any] = {"rounds": 1, "seed": 1, "lr": 0.05, "progress": False}
    veiled, plain = (fedveil.train(frozen_net(), clients, scheme=name, **given) for name in ("lossless", "fedavg"))
    assert any("parameters are frozen" in note for note in veiled.ledger["notes"])
    assert not any("parameters are frozen" in note for note in plain.ledger["notes"])


def test_a_model_with_nothing_to_train_is_refused() -> None:
    x = torch.randn(12, 6)
    with pytest.raises(ConfigError, match="frozen"):
        fedveil.train(frozen_net().requires_grad_(False), [(x, x[:, :3].argmax(1))] * 3, rounds=1, progress=False)


def test_training_starts_from_the_models_own_weights_and_leaves_it_alone() -> None:
    net = frozen_net().requires_grad_(True)
    x = torch.randn(12, 6)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    done = fedveil.train(
        net, [(x, x[:, :3].argmax(1))] * 2, scheme="fedavg", rounds=1, lr=1e-12, seed=1, progress=False
    )
    for key, value in before.items():
        if not key.endswith(("num_batches_tracked", "running_mean", "running_var")):
            assert torch.equal(net.state_dict()[key], value)
            assert torch.allclose(done.model.state_dict()[key], value, atol=1e-6)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("weights") / "w.pt"
    torch.save(models.build("mlp", input_shape=(64,), outputs=10, depth=2, width=8).state_dict(), file)
    return str(file)


@pytest.mark.parametrize("scheme", ["lossless", "veil-secagg", "veil-dp"])
def test_weights_under_a_veil_need_a_word_on_who_knows_them(stored: str, scheme: str, tmp_path: Path) -> None:
    config = CONFIG.with_changes(scheme=scheme, weights=stored, clients=4)
    with pytest.raises(ConfigError, match=r"--public-start .* --no-public-start") as refused:
        session.run(config, tmp_path / "asked", quiet=True)
    assert refused.value.code is Code.PUBLIC_START
    assert not (tmp_path / "asked" / "config.toml").exists()
    known = session.run(config.with_changes(public_start=True), tmp_path / "known", quiet=True)
    assert known["coverage"] == 0.0
    assert set(known["visible"]) == {"linear1.weight", "linear1.bias", "head.weight", "head.bias"}
    assert PUBLISHED in known["ledger"]["notes"]
    own = session.run(config.with_changes(public_start=False), tmp_path / "own", quiet=True)
    assert own["coverage"] > 0.9
    assert PUBLISHED not in own["ledger"]["notes"]


@pytest.mark.parametrize("family", ["scale", "full"])
def test_a_ledger_says_of_no_known_model_that_it_is_hidden(family: str) -> None:
    config = CONFIG.with_changes(scheme="lossless", family=family, head_noise=False)
    hidden, known = (job_from_config(config.with_changes(public_start=said)) for said in (None, True))
    for job, hides in ((hidden, True), (known, False)):
        covered = {release.field: release.hiding != "none" for release in job.scheme.releases(job.architecture)}
        assert covered["train.parameters"] is hides
        open_ended = job.scheme.caveats.unprotected
        assert (caveats.KNOWN_START in open_ended) is not hides
        assert any(text in open_ended for text in (caveats.VEIL, caveats.ORDERS)) is hides
        assert (caveats.ALIGNED in open_ended) is hides
        assert job.coverage is not None
        assert job.coverage.known is not hides
        assert ("others know beforehand" in job.coverage.told) is not hides


@pytest.mark.parametrize(
    ("scheme", "public_start", "said"),
    [("lossless", None, True), ("lossless", False, False), ("lossless", True, False), ("fedavg", None, False)],
)
def test_of_a_model_that_was_handed_over_a_ledger_says_how_secret_its_start_is(
    scheme: str, public_start: bool | None, said: bool
) -> None:
    x = torch.randn(12, 6)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    clients = [(x, x[:, :3].argmax(1))] * 2
    given = {} if public_start is None else {"public_start": public_start}
    done = fedveil.train(net, clients, scheme=scheme, rounds=1, progress=False, **given)  # type: ignore[arg-type]
    assert (HANDED in done.ledger["notes"]) is said


def test_an_export_of_a_known_model_says_that_nothing_is_hidden(stored: str, tmp_path: Path) -> None:
    session.run(CONFIG.with_changes(scheme="lossless", weights=stored, public_start=True), tmp_path / "a", quiet=True)
    said = command("export", str(tmp_path / "a"), "--out", str(tmp_path / "usable.safetensors"))
    assert said.code == 0
    assert "0 of the model is hidden" in " ".join(said.output.split())
    assert "rescaled" not in said.output


def test_the_least_coverage_is_the_networks_whoever_knows_the_weights() -> None:
    config = CONFIG.with_changes(scheme="lossless", head_noise=False, public_start=True)
    assert job_from_config(config.with_changes(min_coverage=0.9)).coverage.fraction == 0.0  # type: ignore[union-attr]
    with pytest.raises(TraceError, match="min_coverage is 100%"):
        job_from_config(config.with_changes(min_coverage=1.0))


def test_nobody_is_asked_without_a_veil_or_in_a_run_that_has_begun(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run(CONFIG.with_changes(weights=stored), tmp_path / "plain", quiet=True)
    with monkeypatch.context() as before_there_was_the_question:
        before_there_was_the_question.setattr("fedveil.runs.preflight._check_start", lambda job: None)
        session.run(CONFIG.with_changes(scheme="lossless", weights=stored), tmp_path / "begun", quiet=True)
    assert session.resume(tmp_path / "begun", changes={"rounds": 2}, quiet=True)["rounds"] == 2


class _Loaded(nn.Sequential):
    """Carries the mark that `from_pretrained` leaves."""

    def __init__(self, origin: str) -> None:
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.config = SimpleNamespace(name_or_path=origin)


def test_a_network_that_says_where_it_was_loaded_from_is_asked_about() -> None:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    clients = [(x, x[:, :3].argmax(1))] * 3
    given: dict[str, Any] = {"scheme": "lossless", "rounds": 1, "seed": 1, "progress": False}
    with pytest.raises(ConfigError, match="weights from bert-base") as refused:
        fedveil.train(_Loaded("bert-base"), clients, **given)
    assert refused.value.code is Code.PUBLIC_START
    assert fedveil.train(_Loaded("bert-base"), clients, public_start=True, **given).summary["coverage"] == 0.0
    assert fedveil.train(_Loaded(""), clients, **given).summary["coverage"] > 0.9
    fedveil.train(_Loaded("bert-base"), clients, **{**given, "scheme": "fedavg"})


def test_inspect_says_that_nothing_of_a_published_model_is_hidden() -> None:
    said = command("inspect", "--model", "mlp", "--public-start")
    assert said.code == 0
    assert "coverage 0.0%" in said.output
    assert "0 of the model is hidden" in " ".join(said.output.split())
    data = json.loads(command("inspect", "--model", "mlp", "--public-start", "--json").output)
    assert (data["coverage"], data["public_start"]) == (0.0, True)
    assert json.loads(command("inspect", "--model", "mlp", "--json").output)["coverage"] > 0.9
