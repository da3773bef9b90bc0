"""One kind of attack table.

Every attack table is made of the same pieces. A cell trains and records a run; attacks get views of the record in
processes of their own (`tried`), and each victim's score is kept. A table reads scores back with their intervals
(`score_of`, `interval`) and says of each attack what an audit's report says of one (`VerdictRow`): what it gets, what
one gets who saw nothing, what it gets without protection, and what that means. Nothing follows from an attack that did
not pass its reference (`proven`), or that gets nothing from an unprotected run.
"""

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

from fedveil.audit.findings import Found, Measure, Score, Trial, Verdict, judged
from fedveil.audit.measures import Judge, train_judge
from fedveil.audit.metrics import bootstrap_mean, feature_mse
from fedveil.audit.running import AttackProcess
from fedveil.audit.subject import Effort
from fedveil.audit.trials import References
from fedveil.audit.views import View, to_bytes
from fedveil.errors import AttackError, NotApplicableError
from fedveil.report.words import VerdictRow as VerdictRow
from papers.cells import Figures, Results, figures_of, mean_of
from papers.report import EMPTY
from papers.stage import Stage

REFERENCES = "references"
"""The cell in which every attack of an entry shows that it works where it is known to."""

INEFFECTIVE = "attack not effective here"
TIME_LIMIT = 1200.0
_MANY = 500
Result = TypeVar("Result")
Read = Callable[[Results, str, str], float | None]


def tried(
    name: str,
    views: Sequence[View],
    settings: Sequence[Mapping[str, Any]],
    *,
    every: bool = False,
    time_limit: float = TIME_LIMIT,
) -> list[Found | str]:
    """One attack on view after view, in one process: what it found on each, or why it could not be tried.

    One that it cannot be tried on ends the matter, unless `every` view is to be tried.
    """
    found: list[Found | str] = []
    with AttackProcess(name) as process:
        for view, own in zip(views, settings, strict=True):
            try:
                found.append(process.run(to_bytes(view), settings=own, time_limit=time_limit))
            except (AttackError, NotApplicableError) as reason:
                found.append(str(reason))
                if not every:
                    return found
    return found


def reason_of(found: Sequence[Found | str]) -> str:
    """Why an attack could not be tried; empty where it could."""
    return next((one for one in found if isinstance(one, str)), "")


def side_by_side(names: Sequence[str], run: Callable[[str], Result]) -> dict[str, Result]:
    """What each name's work gives, all at once: attacks wait for processes of their own."""
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


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
    found = tried(trial.attack, [one.view for one in trial.attempts], [trial.told(one) for one in trial.attempts])
    reason = reason_of(found)
    return (None, reason) if reason else (trial.score([one for one in found if not isinstance(one, str)]).value, "")


def proven(results: Results, attack: str) -> bool | None:
    """Whether an attack passed its reference; None where that was not tried."""
    figures: Figures = next(iter(figures_of(results, REFERENCES)), {})
    value, asked = figures.get(f"{attack} reference"), figures.get(f"{attack} asked")
    if f"{attack} reason" in figures:
        return False
    if not isinstance(value, int | float) or not isinstance(asked, int | float):
        return None
    return value > asked


def interval(values: Sequence[float]) -> Score | None:
    """The mean of independent values with its bootstrap interval; without one below two values, None without any."""
    if not values:
        return None
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Score(mean)
    low, high = bootstrap_mean(torch.tensor(values), generator=torch.Generator().manual_seed(0))
    return Score(mean, low, high)


def score_of(results: Results, cell: str, name: str, *, value: str = "", read: Read = mean_of) -> Score | None:
    """A figure that was kept with its interval. Averaged over seeds it keeps at least the confidence of one."""
    found, low, high = (read(results, cell, f"{name}{one}") for one in (value, " low", " high"))
    return None if found is None or low is None or high is None else Score(found, low, high)


def level(score: Score | None, form: str = "{:.1f}", *, unit: str = "", times: float = 1.0) -> str:
    """A figure and its interval, or a dash."""
    if score is None:
        return EMPTY
    value, low, high = (
        None if one is None else form.format(times * one) for one in (score.value, score.low, score.high)
    )
    return f"{value}{unit}" + ("" if low is None else f" [{low}, {high}]")


def meaning(measure: Measure, ours: Score | None, bare: Score | None, *, works: bool | None) -> Verdict | None:
    """What a figure means beside chance and the unprotected one; `works`: whether the attack passed its reference."""
    if ours is None or bare is None or works is None:
        return None
    return judged(measure, ours, bare)[0] if works else "not effective"


def told(verdict: Verdict | None) -> str:
    """A verdict as tables print it."""
    return EMPTY if verdict is None else INEFFECTIVE if verdict == "not effective" else verdict


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


def judge_of(stage: Stage, data: str, *, scale: Scale | None = None, held_out: bool = False) -> tuple[Judge, float]:
    """An independent classifier of a data set, and how far apart two different pictures are in its features.

    It learns from all of the data set, or from what was `held_out`, and then with little effort.
    """
    kept, key = _JUDGES.setdefault(stage, {}), (data, scale is None, held_out)
    if key not in kept:
        split = stage.split(data)
        parts = (split.test,) if held_out else (split.train, split.test)
        x, y = torch.cat([one.x for one in parts]), torch.cat([one.y for one in parts])
        x = (x if scale is None else scale(x)).float()
        generator = torch.Generator().manual_seed(0)
        judge = train_judge(
            x, y, outputs=split.train.outputs, generator=generator, quick=held_out or stage.quick, device=stage.device
        )
        some = x[:_MANY] if held_out else x[-_MANY:]
        kept[key] = judge, float(feature_mse(some, some.roll(1, 0), extractor=judge.features).mean())
    return kept[key]


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


def draw_sheet(
    rows: Callable[[Results, bool], Sequence[tuple[str, Tensor]]],
) -> Callable[[Results, bool, Path], None]:
    """A contact sheet beside the figures, once there is something to compare."""

    def draw(results: Results, quick: bool, path: Path) -> None:
        found = rows(results, quick)
        if len(found) > 1:
            from fedveil.audit.pictures import contact_sheet

            contact_sheet(found, path, box=(0.0, 1.0))

    return draw


def sheet_note(rows: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Which row of a contact sheet is which; nothing where there is no sheet."""
    return [f"Rows of the picture, from above: {'; '.join(name for name, _ in rows)}."] if len(rows) > 1 else []


def short(value: float) -> float:
    """A figure with four digits, as files keep it."""
    return float(f"{float(value):.4g}")
