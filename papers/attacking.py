"""What entries that attack have in common: attacks in processes of their own, their references, judges, pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedveil.audit.attack import Attack
from fedveil.audit.findings import Found, Score, Trial
from fedveil.audit.judge import Judge, train_judge
from fedveil.audit.metrics import bootstrap_mean, feature_mse
from fedveil.audit.sandbox import AttackProcess
from fedveil.audit.subject import Effort
from fedveil.audit.trials import References
from fedveil.audit.views import View, to_bytes
from fedveil.errors import AttackError, NotApplicableError
from papers.cells import Figures
from papers.stage import Stage

REFERENCES = "references"
"""The cell in which every attack of an entry shows that it works where it is known to."""

TIME_LIMIT = 1200.0
_MANY = 500
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Tried:
    """What an attack found on each view, or why it could not be tried."""

    found: tuple[Found, ...] = ()
    reason: str = ""


def tried(
    name: str,
    views: Sequence[View],
    settings: Sequence[Mapping[str, Any]],
    *,
    attacks: Mapping[str, Attack] | None = None,
) -> Tried:
    """One attack on view after view, in one process; one it cannot be tried on ends the matter."""
    found = []
    with AttackProcess(name, attacks=attacks) as process:
        for view, own in zip(views, settings, strict=True):
            try:
                found.append(process.run(to_bytes(view), settings=own, time_limit=TIME_LIMIT))
            except (AttackError, NotApplicableError) as reason:
                return Tried(reason=str(reason))
    return Tried(tuple(found))


def side_by_side(work: Mapping[str, Callable[[], Result]]) -> dict[str, Result]:
    """Every piece of work at once: attacks wait for processes of their own."""
    with ThreadPoolExecutor(max(1, len(work))) as pool:
        waiting = {name: pool.submit(one) for name, one in work.items()}
        return {name: one.result() for name, one in waiting.items()}


def reference_figures(attacks: Sequence[str], effort: Effort) -> Figures:
    """What each attack gets on its reference, and what is asked of it there."""
    figures: Figures = {}
    with TemporaryDirectory(prefix="fedveil-reference-") as scratch:
        references = References(Path(scratch), effort)
        for name in attacks:
            reference = references.of(name)
            if reference is not None:
                value, reason = _on_reference(reference.trial)
                figures |= {f"{name} reference": value, f"{name} asked": reference.threshold}
                figures |= {f"{name} reason": reason} if reason else {}
    return figures


def _on_reference(trial: Trial) -> tuple[float | None, str]:
    views = [one.view for one in trial.attempts]
    outcome = tried(trial.attack, views, [trial.told(one) for one in trial.attempts])
    return (None, outcome.reason) if outcome.reason else (trial.score(outcome.found).value, "")


def proven(references: Mapping[str, object], attack: str) -> bool | None:
    """Whether an attack passed its reference; None where that was not tried."""
    value, asked = references.get(f"{attack} reference"), references.get(f"{attack} asked")
    if f"{attack} reason" in references:
        return False
    if not isinstance(value, int | float) or not isinstance(asked, int | float):
        return None
    return value > asked


@dataclass(frozen=True, eq=False)
class Scale:
    """The least and the greatest value of each channel, which become 0 and 1."""

    low: Tensor
    high: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """(x − low)/(high − low)."""
        return (x - self.low.to(x)) / (self.high - self.low).to(x)

    @property
    def square(self) -> float:
        """The mean square of high − low: a squared error times this is in the data's own units."""
        return float((self.high - self.low).square().mean())


def scale_of(stage: Stage, data: str) -> Scale:
    """The scale under which a data set's training pictures lie between 0 and 1."""
    x = stage.split(data).train.x
    over = [0, *range(2, x.dim())]
    return Scale(x.amin(over, keepdim=True), x.amax(over, keepdim=True))


_JUDGES: WeakKeyDictionary[Stage, dict[tuple[str, bool, bool], tuple[Judge, float]]] = WeakKeyDictionary()


def judge_of(stage: Stage, data: str, *, quick: bool, scale: Scale | None = None) -> tuple[Judge, float]:
    """An independent classifier of a data set, and how far apart two different pictures are in its features."""
    kept, key = _JUDGES.setdefault(stage, {}), (data, quick, scale is None)
    if key not in kept:
        split = stage.split(data)
        x, y = torch.cat([split.train.x, split.test.x]), torch.cat([split.train.y, split.test.y])
        x = x if scale is None else scale(x)
        generator = torch.Generator().manual_seed(0)
        judge = train_judge(
            x.float(), y, outputs=split.train.outputs, generator=generator, quick=quick, device=stage.device
        )
        some = x[-_MANY:].float()
        apart = float(feature_mse(some, some.roll(1, 0), extractor=judge.features).mean())
        kept[key] = judge, apart
    return kept[key]


def interval(values: Sequence[float]) -> Score | None:
    """The mean of independent values with its bootstrap interval; without one below two values, None without any."""
    if not values:
        return None
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Score(mean)
    low, high = bootstrap_mean(torch.tensor(values), generator=torch.Generator().manual_seed(0))
    return Score(mean, low, high)


def as_text(pictures: Tensor, *, box: tuple[float, float]) -> str:
    """Pictures as they are kept among figures: a byte for each number, in hexadecimal."""
    low, high = box
    scaled = ((pictures.double().cpu().nan_to_num() - low) / (high - low)).clamp(0.0, 1.0)
    return (scaled * 255).round().to(torch.uint8).numpy().tobytes().hex()


def from_text(figures: Mapping[str, object], name: str) -> Tensor | None:
    """Pictures back, with values from 0 to 1; None where there are none."""
    text, shape = figures.get(name), figures.get("shape")
    if not isinstance(text, str) or not isinstance(shape, list) or not text:
        return None
    flat = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
    return flat.reshape(-1, *(int(one) for one in shape)).float() / 255


def short(value: float) -> float:
    """A figure with four digits, as files keep it."""
    return float(f"{float(value):.4g}")
