"""TensorBoard: a run's figures as event files in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, missing_extra
from fedveil.runs.folder import RunFolder
from fedveil.tracking.figures import closing_figures, figures_of, ledger_in_words, settings_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_ALWAYS_THERE = "seconds"


class EventFiles:
    """Writes scalars by round, settings and ledger as texts; a resumed run goes on in the same folder.

    Rounds that a resume repeats are written again. The new file says from which round on it replaces the old ones,
    which is how TensorBoard itself marks a restart.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, *, run: Path) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as reason:
            raise missing_extra("tensorboard", "tensorboard", "Logging for TensorBoard") from reason
        self.folder = folder
        self._writer: SummaryWriter | None = None
        if not RunFolder(run).config_file.exists() and any(folder.glob("events.out.tfevents.*")):
            raise CheckpointError(
                f"{folder} holds another run's events: give another folder after --tensorboard, or remove it."
            )

    def begin(self, folder: RunFolder, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        """Open a new event file that goes on after `rows`; those that older files lack are written first."""
        from torch.utils.tensorboard import SummaryWriter

        standing = rows[-1]["round"] if rows else 0
        seen = rounds_in(self.folder)
        behind = {row["round"] for row in rows} - seen
        replaced = min(behind, default=standing + 1)
        self._writer = SummaryWriter(str(self.folder), purge_step=replaced if seen else None)
        listed = [f"| {name} | {value} |" for name, value in settings_of(config).items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *listed]), replaced - 1)
        for row in rows:
            if row["round"] >= replaced:
                self.round(row)

    def round(self, row: dict[str, Any]) -> None:
        """Write a round's figures, at once: a killed run has then lost none."""
        assert self._writer is not None
        for name, value in figures_of(row).items():
            self._writer.add_scalar(name, value, row["round"])
        if "failed" in row:
            self._writer.add_text("failed", str(row["failed"]), row["round"])
        self._writer.flush()

    def kept(self) -> None:
        """Nothing: rounds that are repeated replace what was written."""

    def end(self, summary: dict[str, Any]) -> None:
        """Write ε, the final scores and the ledger."""
        assert self._writer is not None
        for name, value in closing_figures(summary).items():
            self._writer.add_scalar(name, value, summary["rounds"])
        self._writer.add_text("ledger", ledger_in_words(summary), summary["rounds"])
        self._writer.close()

    def stopped(self, reason: BaseException) -> None:
        """Close the file; a resumed run opens the next."""
        if self._writer is not None:
            self._writer.close()


def rounds_in(folder: Path) -> set[int]:
    """The rounds whose figures a folder's event files hold."""
    if not any(folder.glob("events.out.tfevents.*")):
        return set()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 keeps every event; by default long runs are thinned out.
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    if _ALWAYS_THERE not in read.Tags()["scalars"]:
        return set()
    return {event.step for event in read.Scalars(_ALWAYS_THERE)}
