"""What a SuperLink shows to the network: the interface of nodes, and nothing else.

Flower serves nodes (/v1/fleet), whoever submits runs (/v1/control) and app processes (/v1/runtime) on one port, and
asks only nodes who they are. A SuperLink that listens on loopback, behind this gate, is reached by nodes alone.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.deploy.certificates import Certificates
from fedveil.deploy.flower import require_flower
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    import httpx

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_FLEET = re.compile(r"/v1/fleet/[a-z]+(-[a-z]+)*")
# These belong to one connection, or would speak for somebody else's.
_NOT_PASSED = re.compile(
    rb"host|connection|keep-alive|te|trailer|transfer-encoding|upgrade|content-length|forwarded|x-.*"
)
_CONNECT_SECONDS = 10.0


class Gate:
    """An ASGI app that hands requests for /v1/fleet to the SuperLink behind `client`, and refuses all others."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        # Compared as it was sent: what the SuperLink would read otherwise than this gate does not pass.
        plain = scope.get("raw_path", path.encode()) == path.encode() and not scope["query_string"]
        if scope["method"] != "POST" or not plain or not _FLEET.fullmatch(path):
            await _answer(send, 404, b"only nodes are served here")
            return
        headers = [(name, value) for name, value in scope["headers"] if not _NOT_PASSED.fullmatch(name.lower())]
        import httpx

        asked = self._client.build_request("POST", path, headers=headers, content=_body(receive))
        try:
            reply = await self._client.send(asked, stream=True)
        except httpx.TransportError:
            await _answer(send, 502, b"the SuperLink does not answer")
            return
        try:
            passed = [(name, value) for name, value in reply.headers.raw if not _NOT_PASSED.fullmatch(name.lower())]
            await send({"type": "http.response.start", "status": reply.status_code, "headers": passed})
            async for chunk in reply.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await reply.aclose()


def serve(*, superlink: str, certificates: str | Path, host: str, port: int) -> None:
    """Stand before the SuperLink at this address until told to end; both show the same certificate."""
    require_flower()
    import httpx
    import uvicorn

    files = Certificates(Path(certificates))
    for one in (files.ca, files.server, files.server_key):
        if not one.is_file():
            raise ConfigError(f"There is no {one}: make it with `fedveil flower certificates`.")
    trusted = ssl.create_default_context(cafile=str(files.ca))
    patience = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    client = httpx.AsyncClient(base_url=f"https://{superlink}", verify=trusted, timeout=patience, trust_env=False)
    uvicorn.run(
        Gate(client),
        host=host,
        port=port,
        ssl_certfile=str(files.server),
        ssl_keyfile=str(files.server_key),
        lifespan="off",
        ws="none",
        log_level="warning",
    )


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        part = await receive()
        if part["type"] != "http.request":
            raise ConnectionResetError("a node went away in the middle of a request")
        yield part.get("body", b"")
        if not part.get("more_body", False):
            return


async def _answer(send: Send, status: int, text: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
