"""Rounds that one bad upload has spoilt: what is said of them, and when a run ends because of them."""

from __future__ import annotations

from fedveil.config import RunConfig
from fedveil.errors import spelled
from fedveil.roles.server import ServerState
from fedveil.runs.callbacks import Row

_CLIENTS_NAMED = 20
_MOST_BAD = 3


def refused_round(row: Row) -> str:
    """What to say of a round that was taken back; of many clients its row in metrics.jsonl has all."""
    suspects = row["suspects"]
    named = ", ".join(map(str, suspects[:_CLIENTS_NAMED])) + (", …" if len(suspects) > _CLIENTS_NAMED else "")
    return (
        f"round {row['round']} is refused ({row['code']}): {row['failed']}. The model stays as it was before. In the "
        f"sum were clients {named}."
    )


def too_many(config: RunConfig, state: ServerState) -> bool:
    """Whether a run ends here because of bad rounds."""
    return state.bad_rounds >= (1 if config.on_bad_round == "stop" else config.max_bad_rounds or _MOST_BAD)


def why_stopped(config: RunConfig, state: ServerState) -> str:
    """Why it does."""
    rule = spelled("on_bad_round", "stop") if config.on_bad_round == "stop" else spelled("max_bad_rounds")
    count = f"{state.bad_rounds} rounds in a row were" if state.bad_rounds > 1 else f"round {state.round} was"
    return f"{count} refused for what clients sent in them ({rule})"
