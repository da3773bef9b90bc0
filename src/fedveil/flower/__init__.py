"""FedVeil on Flower: a ServerApp and a ClientApp that drive the protocol's roles unchanged.

An app's pyproject.toml (`app_folder`) names them as `fedveil.flower:server_app` and `fedveil.flower:client_app`. Which
process talks to which:

    whoever submits   `fedveil flower run`: starts `flwr run` and reads the run's events off its log (commands)
          │ the SuperLink's control interface
    SuperLink         Flower's; carries messages and runs no code of ours. On a real machine a gate stands before it
          │           (gate); on one machine a cluster has a network of its own (cluster, network)
          ├─ SuperExec ── ServerApp    server_app: one process a run. It holds the server's model and drives the roles;
          │                            what passes between it and the nodes is sent and fetched by engine
          └─ SuperNode ── ClientApp    client_app: one process a message, without torch or data. It hands the message
                   │                   on (worker_client), or says with a code why it cannot
                   │ unix socket in the client's home, in frames (fedveil.framing)
                worker                 worker: one long-lived process a client, which ends with nobody. It holds data
                                       and secrets, and answers one message after the other (message_handler)

Who remembers what, and what a kill leaves:

    ServerApp   nothing beyond its run folder: checkpoints, and where clients hold the model how far they came
                (engine.Standing). A run is resumed by a new ServerApp as the next attempt (messages.Setup).
    SuperLink   its database, the messages on their way included. Restarted, it goes on; the engine asks again.
    ClientApp   nothing. Where a worker dies over a message, it is handed to the next worker, once.
    worker      state/*.sealed in the client's home (client_memory): keys, what was promised, answered and spent. It
                is on disk before an answer leaves, so a message handed over twice gets the same answer.
    owner       client.toml in the home (home): data, keys, limits. Nothing that arrives can change it.

Somebody's own Flower app is protected in two lines, by a mod in its ClientApp and a strategy around its own: `protect`
(mod) and `Protected` (strategy), of which `app_setup` says what both sides agree on, and `app_held` what it takes for
clients to hold the model. `local_dp` (local_noise) takes the place of Flower's LocalDpMod, and `ExactAccountant` that
of its RdpAccountant.

Every process that a cluster starts ends with it (fedveil.processes); its clients' workers are ended last.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from fedveil.flower.local_noise import ExactAccountant, local_dp
    from fedveil.flower.mod import protect
    from fedveil.flower.strategy import Protected


def _server_app() -> ServerApp:
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedveil.flower.server_app import serve

        serve(grid, context)

    return app


def _client_app() -> ClientApp:
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def handle(message: Message, context: Context) -> Message:
        from fedveil.flower.client_app import answer

        return answer(message, context)

    return app


_MODULES = {"protect": "mod", "Protected": "strategy", "local_dp": "local_noise", "ExactAccountant": "local_noise"}


def _made(name: str) -> Any:
    from fedveil.errors import missing_extra

    try:
        if name in _MODULES:
            return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return {"server_app": _server_app, "client_app": _client_app}[name]()
    except ModuleNotFoundError as reason:
        if reason.name is None or reason.name.split(".")[0] != "flwr":
            raise
        raise missing_extra("flwr", "flower", "Running on Flower") from reason


def __getattr__(name: str) -> Any:
    # Made on first use: the worker and its client live in this package and need no Flower.
    if name in __all__:
        app = globals()[name] = _made(name)
        return app
    raise AttributeError(f"module 'fedveil.flower' has no attribute {name!r}")


# Flower looks for these names without running the module.
__all__ = ["ExactAccountant", "Protected", "client_app", "local_dp", "protect", "server_app"]
