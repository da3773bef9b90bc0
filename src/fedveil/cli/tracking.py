"""The flags of trackers, which stand alone or before a place."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

_PANEL = "Tracking"

TensorBoard = Annotated[
    str | None,
    typer.Option(
        "--tensorboard",
        metavar="[DIR]",
        help="Also write TensorBoard's event files. (alone: OUT/tensorboard; extra tensorboard)",
        rich_help_panel=_PANEL,
    ),
]
Mlflow = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="[URI]",
        help="Also log to MLflow; rounds arrive with the checkpoint that holds them. (alone: MLFLOW_TRACKING_URI, or "
        "./mlflow.db; extra mlflow)",
        rich_help_panel=_PANEL,
    ),
]
_ALONE = ("--tensorboard", "--mlflow")


class Command(TyperCommand):
    """A command whose tracking flags may stand alone: they then have an empty value, which is the usual place."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Give a flag that stands alone its empty value."""
        following: list[str | None] = [*args[1:], None]
        given = [
            f"{word}=" if word in _ALONE and (after is None or after.startswith("-")) else word
            for word, after in zip(args, following, strict=False)
        ]
        parsed: list[Any] = super().parse_args(ctx, given)
        return parsed
