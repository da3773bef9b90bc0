"""FedVeil on Flower: a ServerApp and a ClientApp that drive the protocol's roles unchanged.

An app's pyproject.toml names them as `fedveil.flower:server_app` and `fedveil.flower:client_app`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp


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


def _made(name: str) -> Any:
    from fedveil.errors import missing_extra

    try:
        return {"server_app": _server_app, "client_app": _client_app}[name]()
    except ModuleNotFoundError as reason:
        if reason.name is None or reason.name.split(".")[0] != "flwr":
            raise
        raise missing_extra("flwr", "flower", "Running on Flower") from reason


def __getattr__(name: str) -> Any:
    # Made on first use: the courier and the worker live in this package and need no Flower.
    if name in __all__:
        app = globals()[name] = _made(name)
        return app
    raise AttributeError(f"module 'fedveil.flower' has no attribute {name!r}")


# Flower looks for these names without running the module.
__all__ = ["client_app", "server_app"]
