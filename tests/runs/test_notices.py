"""What a person would notice: a loss that runs away, a model that cannot be trained, little memory, no spare client."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedveil
from federation import job
from fedveil.config import RunConfig
from fedveil.engine import ClientPool
from fedveil.errors import ConfigError, TraceError
from fedveil.runs import preflight as checks
from fedveil.runs import session
from fedveil.runs.job import ModelFacts, assemble_job, job_from_config
from fedveil.runs.preflight import preflight, with_found_rate
from shell import fedveil as command

Small = Callable[..., RunConfig]
TINY = ("--clients", 3, "--rounds", 6, "--seed", 1, "-o", "depth=2", "-o", "width=8")


def test_a_model_that_came_off_in_its_first_round_and_stays_there_is_told(tmp_path: Path, small: Small) -> None:
    """The loss of the first round is as far out as those after it: ten times that of the first is never reached."""
    settings = {"scheme": "fedavg", "local_steps": 2, "rounds": 2, "evaluate_every": 0, "loss": "cross-entropy"}
    network = {"model_options": {"depth": 1}}
    summary = session.run(small(**settings, **network, lr=1e4, momentum=0.0), tmp_path / "run", quiet=True)
    rows = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[1] < 10 * rows[0], "or the rule for a loss that grows would tell"
    assert (summary["diverged"], summary["recovered"]) == (1, False)


@pytest.mark.parametrize(("lr", "recovers"), [("0.3", None), ("2", False)])
def test_a_run_that_diverges_says_so_when_it_happens_and_at_the_end(
    tmp_path: Path, lr: str, recovers: bool | None
) -> None:
    """Full gradients of the square loss, no noise: which rates diverge on these data follows from the seed."""
    done = command("run", "--scheme", "fedavg", "--loss", "square", *TINY, "--lr", lr, "--out", tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    away = [row["round"] for row in rows if row["loss"] >= 10 * rows[0]["loss"]]
    if recovers is None:
        assert (done.code, away, "diverged" in summary, "warning" in summary) == (0, [], False, False)
        return
    assert (summary["diverged"], summary["recovered"], done.code) == (away[0], recovers, 5)
    first, *_, last = done.error.splitlines()
    assert f"warning: training has diverged in round {away[0]}" in first
    assert "--lr 0.2" in first
    assert last.startswith(f"error: Training has diverged in round {away[0]} and has not recovered")
    events = [json.loads(line)["text"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any("has diverged" in text for text in events)


def test_a_round_that_cannot_go_on_says_each_thing_once_and_promises_no_file(tmp_path: Path) -> None:
    given = ("run", "--scheme", "fedavg", *TINY, "--lr", 1e12, "--quiet")
    without = command(*given, "--checkpoint-every", 0, "--out", tmp_path / "without")
    kept = command(*given, "--checkpoint-every", 1, "--out", tmp_path / "kept")
    last = without.error.splitlines()[-1]
    assert (without.code, last.lower().count("lower the learning rate")) == (5, 1)
    assert "checkpoint" not in without.error.lower()
    assert "The model of the last checkpoint is untouched (round-" in kept.error


def test_a_run_that_has_recovered_is_not_told_to_start_anew() -> None:
    """Ten samples, one weight: steps that overshoot at first, until a smaller rate takes over."""
    x = torch.ones(10, 1)
    settings = {"scheme": "fedavg", "loss": "square", "lr": 2.2, "lr_schedule": "cosine", "rounds": 60, "seed": 1}
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 1.1)
    done = fedveil.train(net, [(x, x)] * 2, progress=False, **settings)  # type: ignore[arg-type]
    assert (done.summary["diverged"] > 1, done.summary["recovered"]) == (True, True)
    assert "It has recovered. It ended at" in done.summary["warning"]
    assert "Start anew" not in done.summary["warning"]


@pytest.mark.parametrize(
    ("settings", "loss", "why", "rate"),
    [
        ({"scheme": "lossless"}, "square", "because head noise needs it", 0.02),
        ({"scheme": "fedavg"}, "cross-entropy", "because the targets are classes", 0.1),
        ({"scheme": "fedavg", "loss": "square"}, "square", "as it was set", 0.02),
        ({"scheme": "fedavg", "lr": 0.5}, "cross-entropy", "because the targets are classes", 0.5),
        ({"scheme": "fedavg", "true_weight": 2.0}, "square", "because target_scale and true_weight are of it", 0.02),
    ],
)
def test_a_run_says_which_loss_it_took_and_why_and_the_rate_goes_with_it(
    settings: dict[str, Any], loss: str, why: str, rate: float
) -> None:
    config = RunConfig.from_mapping({"clients": 2, "seed": 1, "model_options": {"depth": 2, "width": 4}, **settings})
    made = job_from_config(config)
    assert (made.loss.name, made.loss_because, made.config.lr) == (loss, why, rate)


def test_a_rate_is_found_by_trials_that_are_the_same_each_time_and_told(tmp_path: Path, small: Small) -> None:
    said: list[str] = []
    tiny = {"clients": 2, "rounds": 2, "batch_size": 20, "model_options": {"depth": 2, "width": 4}}
    config = small(scheme="fedavg", loss="square", lr="auto", **tiny)
    session.run(config, tmp_path, quiet=True, say=said.append)
    again, told = with_found_rate(job_from_config(config))
    stored = RunConfig.read(tmp_path / "config.toml")["lr"]
    assert 0.001 <= stored <= 2
    assert stored == again.config.lr
    assert said == [told]
    assert f"lr: {stored:g}, found with" in told


@pytest.mark.parametrize("scheme", ["nadp", "veil-secagg", "dp-fedavg"])
def test_no_rate_is_tried_on_data_whose_privacy_is_accounted_for(tmp_path: Path, small: Small, scheme: str) -> None:
    options = {"model_options": {"depth": 2, "width": 4}}
    with pytest.raises(ConfigError, match="such trials would not be in its ledger"):
        session.run(small(scheme=scheme, lr="auto", **options), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("there is no way back")


class _Stuck(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 2), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layer(x))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (_NoWayBack.apply, r"fails with RuntimeError \(there is no way back\)"),
        (Tensor.detach, "fails with RuntimeError"),
        (lambda out: out.round() + torch.zeros_like(out, requires_grad=True), None),
    ],
    ids=["raises", "detached", "rounded"],
)
def test_a_backward_pass_that_fails_is_found_before_training(
    tmp_path: Path, how: Callable[[Tensor], Tensor], says: str | None
) -> None:
    data = [(torch.randn(6, 4), torch.arange(6) % 2) for _ in range(2)]
    if says is None:  # a gradient of zeros is a gradient
        fedveil.train(_Stuck(how), data, scheme="fedavg", rounds=1, progress=False)
        return
    with pytest.raises(ConfigError, match=says):
        fedveil.train(_Stuck(how), data, scheme="fedavg", rounds=1, progress=False, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("clients", "tolerated"), [(3, 0), (4, 0), (5, 1), (9, 2)])
def test_masks_that_tolerate_no_absence_are_told_of_before_the_start(clients: int, tolerated: int) -> None:
    made = job(scheme="veil-secagg", clients=clients, rounds=1)
    assert made.scheme.uplink.absences(clients) == tolerated
    warned = [text for text in preflight(made) if "tolerate no absence" in text]
    assert bool(warned) == (tolerated == 0)
    assert all("From 5 clients on, one may be missing" in text for text in warned)


def test_where_no_number_of_clients_tolerates_an_absence_none_is_named() -> None:
    """Sums that clients decrypt are of all of them where none sides with the server."""
    (warned,) = [text for text in preflight(job(scheme="tp-smc", collusion=0.0)) if "tolerate no absence" in text]
    assert "may be missing" not in warned


@pytest.mark.parametrize(
    ("width", "activation", "forms"), [(2, nn.GELU, "2"), (9, nn.GELU, "362,880"), (10, nn.GELU, ""), (2, nn.ReLU, "")]
)
def test_a_veil_that_a_client_guesses_is_told_of(width: int, activation: type[nn.Module], forms: str) -> None:
    """Orders of 2, 9 and 10 units have 1, 18.5 and 21.8 bits; scales are real numbers."""
    net = nn.Sequential(nn.Linear(4, width), activation(), nn.Linear(width, 2))
    config = RunConfig(scheme="lossless", clients=2, seed=1, family="full", head_noise=False, min_coverage=0.0)
    pool = ClientPool.separate([(torch.randn(6, 4), torch.arange(6) % 2)] * 2)
    made = assemble_job(config, net, pool, None, ModelFacts(None, {}, (4,), 2, "classification"))
    warned = [text for text in preflight(made) if "a client guesses it" in text]
    assert [f"one of only {forms} forms" in text for text in warned] == ([True] if forms else [])
    assert made.coverage is not None
    assert made.coverage.as_data()["guessed"] is bool(forms)


def test_inspect_says_that_a_client_guesses_a_veil(tmp_path: Path) -> None:
    made = tmp_path / "nets.py"
    made.write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Linear(4, 2), nn.GELU(), nn.Linear(2, 3))\n"
    )
    given = ("inspect", "--model", f"{made}:net", "--input-shape", "4", "--outputs", "3", "--family", "full")
    assert "warning: the veil of this model takes one of only 2 forms" in command(*given).output
    assert "a client guesses" not in command(*given, "--public-start").output


def test_memory_that_will_not_suffice_is_told_of_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job(scheme="fedavg", rounds=1)
    assert checks.free_bytes(torch.device("cpu")), "what this machine has free can be read"
    assert preflight(made) == []
    monkeypatch.setattr(checks, "free_bytes", lambda device: 1000)
    (warned,) = preflight(made)
    assert "the memory will probably not suffice" in warned
    assert "--batch-size" in warned or "--head-groups" in warned


def test_what_cannot_be_veiled_is_refused_with_the_schemes_that_train_it(small: Small) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.layer(x).mean(1))
            return out

    data = [(torch.randn(6, 3, 4), torch.arange(6) % 2) for _ in range(3)]
    with pytest.raises(TraceError) as refused:
        fedveil.train(Attention(), data, rounds=1, progress=False)
    named = str(refused.value).partition("this model trains under ")[2].rstrip(".").split(", ")
    assert {"fedavg", "nadp", "ldp"} <= set(named)
    assert not {"lossless", "veil-dp", "veil-secagg"} & set(named)
    for scheme in ("fedavg", "nadp"):
        fedveil.train(Attention(), data, scheme=scheme, rounds=1, progress=False)


def test_python_is_warned_by_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    data = [(10 * torch.ones(8, 4), torch.arange(8) % 2) for _ in range(2)]
    with caplog.at_level(logging.WARNING, logger="fedveil"):
        result = fedveil.train(
            nn.Linear(4, 2), data, scheme="fedavg", loss="square", lr=0.02, rounds=3, seed=1, progress=False
        )
    assert result.summary["diverged"] == 2
    assert any("training has diverged in round 2" in record.getMessage() for record in caplog.records)
