"""What passes the gate before a SuperLink, and what does not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx

from fedveil.errors import ConfigError
from fedveil.flower.deployment import Gate, behind, serve


def asked(method: str, path: str, *, headers: dict[str, str] | None = None) -> tuple[int, list[httpx.Request]]:
    """The gate's answer to a request, and what the SuperLink behind it was asked."""
    heard: list[httpx.Request] = []

    async def superlink(request: httpx.Request) -> httpx.Response:
        await request.aread()
        heard.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b"answer"), headers={"content-type": "application/protobuf"})

    async def ask() -> httpx.Response:
        behind = httpx.AsyncClient(transport=httpx.MockTransport(superlink), base_url="https://behind")
        front = httpx.AsyncClient(transport=httpx.ASGITransport(Gate(behind)), base_url="https://gate")
        return await front.request(method, path, content=b"question", headers=headers)

    answer = asyncio.run(ask())
    assert heard == [] or answer.content == b"answer"
    return answer.status_code, heard


def test_a_node_is_served() -> None:
    status, heard = asked(
        "POST", "/v1/fleet/pull-messages", headers={"flwr-signature": "s", "x-forwarded-for": "127.0.0.1"}
    )
    assert status == 200
    (request,) = heard
    assert (str(request.url), request.content) == ("https://behind/v1/fleet/pull-messages", b"question")
    assert request.headers["flwr-signature"] == "s"
    assert "x-forwarded-for" not in request.headers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/runtime/push-messages"),
        ("GET", "/v1/fleet/pull-messages"),
        ("POST", "/v1/fleet/%2e%2e/control/start-run"),
        ("POST", "/v1/fleet/%2E%2E%2Fcontrol%2Fstart-run"),
        ("POST", "/v1/fleet//control/start-run"),
        ("POST", "/v1/fleet/pull-messages/../../control/start-run"),
        ("POST", "/v1/fleet/pull%2Dmessages"),
        ("POST", "/v1/fleet/pull-messages?x=1"),
        ("POST", "/v1/fleet/pull-messages%0a"),
        ("POST", "/v1/fleetcontrol"),
        ("GET", "/health"),
        ("GET", "/docs"),
    ],
)
def test_nobody_else_is(method: str, path: str) -> None:
    assert asked(method, path) == (404, [])


def test_a_gate_without_certificates_does_not_open(tmp_path: Path) -> None:
    given: dict[str, Any] = {"superlink": "127.0.0.1:1", "host": "127.0.0.1", "port": 1}
    with pytest.raises(ConfigError, match="fedveil flower certificates"):
        serve(certificates=tmp_path, **given)


def _scope() -> dict[str, Any]:
    path = "/v1/fleet/pull-messages"
    asking = {"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
    return {"type": "http", **asking}


async def _superlink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers requests that end."""
    try:
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nanswer")
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def test_requests_that_never_end_keep_no_node_out_and_are_ended() -> None:
    async def silent() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def whole() -> dict[str, Any]:
        return {"type": "http.request", "body": b"question"}

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def heard(gate: Gate, receive: Any) -> list[Any]:
        said: list[Any] = []

        async def send(message: Any) -> None:
            said.append(message)

        await gate(_scope(), receive, send)
        return said

    async def attacked() -> None:
        server = await asyncio.start_server(_superlink, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with behind(f"http://{host}:{port}") as client:
            gate = Gate(client, silent=2.5)
            stalled = [asyncio.create_task(heard(gate, silent)) for _ in range(120)]
            await asyncio.sleep(0.5)
            start, *_ = await asyncio.wait_for(heard(gate, whole), 2.0)
            assert start["status"] == 200
            assert await heard(gate, gone) == []
            for said in await asyncio.wait_for(asyncio.gather(*stalled), 20.0):
                assert said[0]["status"] == 408
        server.close()

    asyncio.run(attacked())
