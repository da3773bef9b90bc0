"""What a SuperLink shows to the network: the interface of nodes, and nothing else.

Flower serves nodes (/v1/fleet), whoever submits runs (/v1/control) and app processes (/v1/runtime) on one port, and
asks only nodes who they are. A SuperLink that listens on loopback, behind this gate, is reached by nodes alone.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError
from fedveil.flower.certificates import Certificates
from fedveil.flower.commands import require_flower

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
_SILENT_SECONDS = 60.0
"""How long a request may pause in the middle of what it sends."""


class Gate:
    """An ASGI app that hands requests for /v1/fleet to the SuperLink behind `client`, and refuses all others."""

    def __init__(self, client: httpx.AsyncClient, *, silent: float = _SILENT_SECONDS) -> None:
        self._client = client
        self._silent = silent

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

        asked = self._client.build_request("POST", path, headers=headers, content=_body(receive, self._silent))
        try:
            reply = await self._client.send(asked, stream=True)
        except httpx.TransportError:
            await _answer(send, 502, b"the SuperLink does not answer")
            return
        except TimeoutError:
            await _answer(send, 408, b"the request does not end")
            return
        except ConnectionResetError:  # nobody is left to answer
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
    import uvicorn

    files = Certificates(Path(certificates))
    for file in (files.ca, files.server, files.server_key):
        if not file.is_file():
            raise ConfigError(f"There is no {file}: make it with `fedveil flower certificates`.")
    trusted = ssl.create_default_context(cafile=str(files.ca))
    uvicorn.run(
        Gate(behind(f"https://{superlink}", verify=trusted)),
        host=host,
        port=port,
        ssl_certfile=str(files.server),
        ssl_keyfile=str(files.server_key),
        lifespan="off",
        ws="none",
        log_level="warning",
    )


def behind(address: str, *, verify: ssl.SSLContext | bool = True) -> httpx.AsyncClient:
    """A client of the SuperLink there, with a connection for every request: a hundred that never end block nobody."""
    import httpx

    patience, limits = httpx.Timeout(None, connect=_CONNECT_SECONDS), httpx.Limits(max_keepalive_connections=20)
    return httpx.AsyncClient(base_url=address, verify=verify, timeout=patience, limits=limits, trust_env=False)


async def _body(receive: Receive, silent: float) -> AsyncIterator[bytes]:
    while True:
        part = await asyncio.wait_for(receive(), silent)
        if part["type"] != "http.request":
            raise ConnectionResetError("a node went away in the middle of a request")
        yield part.get("body", b"")
        if not part.get("more_body", False):
            return


async def _answer(send: Send, status: int, text: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
