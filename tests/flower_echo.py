"""A Flower app that does next to nothing: clients say where their home is, the server tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROJECT = """
[project]
name = "echo"
version = "1.0.0"
description = "Says where it runs."
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedveil"
[tool.flwr.app.components]
serverapp = "echo_app:server_app"
clientapp = "echo_app:client_app"
[tool.flwr.app.config]
clients = 2
rounds = 2
settings = ""
"""

_CODE = """
import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server_app = ServerApp()
client_app = ClientApp()


@client_app.query()
def answer(message, context):
    home = str(context.node_config["fedveil-home"])
    return Message(RecordDict({"c": ConfigRecord({"home": home})}), reply_to=message)


def say(**event):
    print("FEDVEIL " + json.dumps(event), flush=True)


@server_app.main()
def main(grid, context):
    given = {**context.run_config, **json.loads(context.run_config["settings"] or "{}")}
    while len(nodes := list(grid.get_node_ids())) < given["clients"]:
        time.sleep(0.2)
    say(event="began", scheme="echo", rounds=given["rounds"], round=0, out=given.get("out", "nowhere"))
    if given.get("seed") == 13:
        return say(event="failed", text="13 brings bad luck", exit_code=6)
    if given.get("seed") == 17:
        raise RuntimeError("17 is not caught")
    for done in range(1, given["rounds"] + 1):
        question = RecordDict({"c": ConfigRecord({"n": done})})
        asked = set(grid.push_messages([Message(question, node, "query") for node in nodes]))
        homes = []
        while asked:
            for reply in grid.pull_messages(asked):
                asked.discard(reply.metadata.reply_to_message_id)
                homes.append(reply.content["c"]["home"] if reply.has_content() else "none")
            time.sleep(0.1)
        say(event="round", round=done, loss=0.5, homes=sorted(homes))
    summary = Path(__file__).with_name("summary.json")
    say(event="done", out=given.get("out", "nowhere"), summary=json.loads(summary.read_text()))
"""


def create_echo(folder: Path, *, summary: Mapping[str, Any] | None = None) -> Path:
    """The app's folder; its run ends with this summary."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(_PROJECT)
    (folder / "echo_app.py").write_text(_CODE)
    (folder / "summary.json").write_text(json.dumps(summary or {}))
    return folder
