"""What the caller of ``load`` asked for, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from fedveil.data.dataset import Task
from fedveil.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Options:
    """The keyword arguments of ``load``."""

    target: str | None = None
    task: Task | None = None
    test_fraction: float = 0.2
    seed: int = 0
    text: str | None = None
    group: str | None = None
    max_tokens: int = 200
    vocabulary: int = 10_000
    normalise: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.test_fraction < 1.0:
            raise ConfigError(f"test_fraction is {self.test_fraction}; it must lie between 0 and 1, for example 0.2.")
        if self.task is not None and self.task not in get_args(Task):
            raise unknown_name("task", self.task, get_args(Task))
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; at least one token per text is needed.")
        if self.vocabulary < 3:
            raise ConfigError(
                f"vocabulary is {self.vocabulary}; it must be at least 3: padding, unknown, and one word."
            )

    def refuse_columns(self, name: str) -> None:
        """Raise where a column was named although the source ``name`` has no columns."""
        for option in ("target", "text", "group"):
            if getattr(self, option) is not None:
                raise ConfigError(
                    f"{option}={getattr(self, option)!r} names a CSV column, but {name} is not a CSV table. "
                    f"Leave {option} out."
                )
