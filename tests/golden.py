"""What every scheme does today, taken so that tests/integration/test_golden.py can tell when it changes.

    python tests/golden.py             take everything again (a few minutes, nearly all of it audits)
    python tests/golden.py --no-audits keep the stored verdicts, take the rest again (a quarter of a minute)

Take it again only where behaviour is meant to change, and read the difference of integration/golden.json before you
commit it: it says what changes for users. Everything goes through the command line and the files of a run's folder, so
that modules may move and be renamed below it.

How near is near enough:
- A model's tensors: names, shapes and types exactly; norm and projection within 1e-5 of the norm. Runs are float64, so
  another processor's order of summation moves numbers by about 1e-15 a step; a number that then rounds to the next
  point of a grid (masks and noise are whole numbers) moves one step of it, which 1e-5 allows for. Below 1e-9 all is
  alike: the bias before a BatchNorm has no gradient but rounding.
- A ledger's figures: 1e-9 of themselves (its solvers stop nearer: a wanted ε = 3 is met to 1e-11). Its texts: exactly.
  Which client is worst off is not kept, only whether one is named: equals differ by rounding.
- Verdicts and names: exactly. An audit's scores are not kept.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shell import fedveil

DIVERGED = 5
STORED = Path(__file__).parent / "integration" / "golden.json"
MODEL_TOLERANCE = 1e-5
MODEL_FLOOR = 1e-9
LEDGER_TOLERANCE = 1e-9

Case = tuple[str | int | float, ...]

_TRAINING: Case = (
    *("--rounds", 3, "--seed", 7, "--dtype", "float64", "--batch-size", 24, "--lr", 0.05, "--checkpoint-every", 2),
    "--record",
)
_DIGITS: Case = ("--dataset", "digits", "--clients", 5, "-o", "width=8", "-o", "depth=2")
_SIX: Case = ("--dataset", "digits", "--clients", 6, "-o", "width=8", "-o", "depth=2")
_VARIANTS: dict[str, Case] = {
    "fedavg-cnn-momentum": (
        *("--scheme", "fedavg", "--dataset", "digits", "--model", "cnn", "-o", "width=2", "--clients", 4),
        *("--local-steps", 2, "--momentum", 0.9, "--weight-decay", 0.01, "--lr-schedule", "cosine"),
    ),
    "lossless-batchnorm-cohort": ("--scheme", "lossless", *_SIX, "-o", "norm=batch", "--cohort", 4),
    "lossless-text": (
        *("--scheme", "lossless", "--model", "gru", "-o", "embedding=4", "-o", "hidden=4", "--clients", 4),
        *("--min-coverage", 0.5),
    ),
    "nadp-dropout": ("--scheme", "nadp", *_SIX, "--simulate-dropout", 0.15),
    "ppdl-laplace": ("--scheme", "ppdl", *_DIGITS, "--upload-noise", "laplace", "--round-epsilon", 50),
    "nadp-noise-decay": ("--scheme", "nadp", *_DIGITS, "--noise-decay", 0.8),
    "nadp-local-epochs": ("--scheme", "nadp", *_DIGITS, "--local-epochs", 1),
    "veil-secagg-batchnorm-dropout": (
        *("--scheme", "veil-secagg", *_SIX, "-o", "norm=batch", "--simulate-dropout", 0.15, "--threshold", 0.5),
    ),
    "veil-dp-masks": ("--scheme", "veil-dp", *_DIGITS, "--cover", "masks"),
    "veil-dp-tolerate": ("--scheme", "veil-dp", *_SIX, "--dropouts", "tolerate", "--simulate-dropout", 0.15),
    "paraaegis-pads-histogram": ("--scheme", "paraaegis", *_DIGITS, "--cipher", "pads", "--vote", "histogram"),
}
# Enough rounds that a plain model is worth stealing; the attacks cost seconds each, the searching ones minutes.
_AUDITED: Case = (
    *("--rounds", 12, "--seed", 7, "--dtype", "float64", "--lr", 0.5, "--momentum", 0.9, "--evaluate-every", 0),
    "--record",
)
_ATTACKS = "closed-form,phi,parameters"


@cache
def schemes() -> tuple[str, ...]:
    """Every registered scheme."""
    return tuple(one["name"] for one in json.loads(_done("schemes", "--json")))


def cases() -> dict[str, Case]:
    """The runs that are kept: every scheme as it comes, and what else its parts can do."""
    return {**{name: ("--scheme", name, *_DIGITS) for name in schemes()}, **_VARIANTS}


def trained(case: str, folder: Path) -> dict[str, Any]:
    """Train one case into a new folder: its model, its ledger, and every name in its files."""
    settings = cases()[case]
    if "--dataset" not in settings:
        settings += ("--dataset", str(_sentences(folder.with_suffix(".csv"))), "--text", "said", "--target", "kind")
    _done("run", *_TRAINING, *settings, "--out", folder)
    return {
        "files": {str(one.relative_to(folder)): _names(one) for one in sorted(folder.rglob("*")) if one.is_file()},
        "model": _model(folder / "model.safetensors"),
        "ledger": _ledger(folder / "ledger.json"),
    }


def audited(scheme: str, folder: Path) -> dict[str, Any]:
    """Train a scheme into a new folder and attack it: who was after what, from what, and the verdict."""
    _done("run", "--scheme", scheme, *_DIGITS, *_AUDITED, "--out", folder)
    said = _done("audit", folder, "--attacks", _ATTACKS, "--quick", "--workers", 1, "--json")
    kept = ("adversary", "asset", "seen", "verdict")
    return {one["name"]: {key: one[key] for key in kept} for one in json.loads(said)["findings"]}


def differences(stored: Any, now: Any, at: str = "") -> Iterator[str]:
    """Where two takes differ, a line each; figures of a model and of a ledger by their tolerance."""
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in sorted(stored.keys() - now.keys()):
            yield f"{at}.{key} is gone (was {_short(stored[key])})"
        for key in sorted(now.keys() - stored.keys()):
            yield f"{at}.{key} is new: {_short(now[key])}"
        if {"norm", "projection"} <= stored.keys() & now.keys():
            near = max(MODEL_TOLERANCE * stored["norm"], MODEL_FLOOR)
            for key in ("norm", "projection"):
                if not abs(stored[key] - now[key]) <= near:
                    yield f"{at}.{key}: {stored[key]} has become {now[key]}"
            stored, now = ({k: v for k, v in one.items() if k not in ("norm", "projection")} for one in (stored, now))
        for key in sorted(stored.keys() & now.keys()):
            yield from differences(stored[key], now[key], f"{at}.{key}")
    elif isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        for i, (one, other) in enumerate(zip(stored, now, strict=True)):
            yield from differences(one, other, f"{at}[{i}]")
    elif isinstance(stored, float) and isinstance(now, float):
        if not abs(stored - now) <= LEDGER_TOLERANCE * abs(stored):
            yield f"{at}: {stored} has become {now}"
    elif type(stored) is not type(now) or stored != now:
        yield f"{at}: {_short(stored)} has become {_short(now)}"


def _done(*arguments: str | int | float | Path) -> str:
    done = fedveil(*arguments)
    if done.code and not (arguments[0] == "run" and done.code == DIVERGED):  # a model of no use is a model to compare
        raise RuntimeError(f"fedveil {' '.join(map(str, arguments))} ended with {done.code}: {done.error}")
    return done.output


def _sentences(file: Path) -> Path:
    """Forty-eight sentences of two kinds, from words that go round at different paces."""
    who, does, what = "ann bob eve".split(), "sees likes finds hides".split(), "tea rain sums keys notes".split()
    rows = [f"{who[i % 3]} {does[i % 4]} {what[i % 5]},{'odd' if i % 2 else 'even'}" for i in range(48)]
    file.write_text("\n".join(["said,kind", *rows]) + "\n", encoding="utf-8")
    return file


def _names(file: Path) -> Any:
    """The names a stored file uses; None where it has none that can be read from outside."""
    if file.suffix == ".toml":
        return sorted(tomllib.loads(file.read_text(encoding="utf-8")))
    if file.suffix == ".json":
        return sorted(json.loads(file.read_text(encoding="utf-8")))
    if file.suffix == ".jsonl":
        rows = [sorted(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
        if file.name == "events.jsonl":  # each kind of event has facts of its own beside these
            return sorted({"event", "text", "time"}.intersection(*rows))
        return rows[0] if all(row == rows[0] for row in rows) else rows
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            return {"tensors": sorted(opened.keys()), "metadata": sorted(opened.metadata() or {})}
    return None


def _model(file: Path) -> dict[str, Any]:
    with safe_open(file, framework="pt") as opened:
        return {name: _figures(opened.get_tensor(name)) for name in sorted(opened.keys())}


def _ledger(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for line in found["lines"]:
        # Clients with as many samples are as badly off: which of them is named hangs on the last bit of a figure.
        line["worst_client"] = line["worst_client"] is not None
    return found


def _figures(tensor: Tensor) -> dict[str, Any]:
    flat = tensor.to(torch.float64).flatten()
    # Multiples of the golden ratio modulo 1: spread evenly, the same on every machine and in every library's version.
    direction = torch.arange(1, flat.numel() + 1, dtype=torch.float64) * ((5**0.5 - 1) / 2) % 1 - 0.5
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "norm": flat.norm().item(),
        "projection": (flat @ (direction / direction.norm())).item(),
    }


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"


def _written(value: Any, margin: str = "") -> str:
    """JSON with what fits on a line on one line, so that differences can be read."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) <= 320 or not isinstance(value, dict | list):
        return flat
    inner = margin + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + _written(one, inner) for one in value) + f"\n{margin}]"
    items = (f"{inner}{json.dumps(key, ensure_ascii=False)}: {_written(one, inner)}" for key, one in value.items())
    return "{\n" + ",\n".join(items) + f"\n{margin}}}"


def _take(*, audits: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="fedveil-golden-") as scratch:
        runs = {name: trained(name, Path(scratch) / name) for name in cases()}
        if audits:
            verdicts = {name: audited(name, Path(scratch) / f"audited-{name}") for name in schemes()}
        else:
            verdicts = json.loads(STORED.read_text(encoding="utf-8"))["verdicts"]
    STORED.write_text(_written({"runs": runs, "verdicts": verdicts}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _take(audits="--no-audits" not in sys.argv[1:])
