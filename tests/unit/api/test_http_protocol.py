"""Connections that are neither used nor closed by their client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from farhand.api.server import http_protocol
from farhand.api.server.connection_limits import MAX_OF_TOKEN, ConnectionLimits, LimitedConnection
from farhand.api.server.guard import ADMITTED
from farhand.api.server.http import Reply, Scope, respond
from farhand.api.server.http_exchange import HttpExchange
from tests.unit.sdk.wire import asynchronous

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


async def serve(scope: Scope, exchange: HttpExchange) -> None:
    if ADMITTED in scope:
        scope[ADMITTED]("token")
    await respond(Reply(b"answer"), exchange, "1")


def connection() -> http_protocol.HttpConnection:
    config = SimpleNamespace(loaded_app=serve, ws_protocol_class=None)
    state = SimpleNamespace(connections=set(), tasks=set(), default_headers=[])
    limits = ConnectionLimits(asyncio.get_running_loop().call_later)
    return http_protocol.HttpConnection(config=config, server_state=state, limits=limits)


@pytest.mark.parametrize(
    ("length", "rest"),
    [
        pytest.param(0, b"P", id="part-of-a-head"),
        pytest.param(0, b"\r\n", id="blank-line"),
        pytest.param(1000, b"part", id="part-of-a-body"),
    ],
)
@asynchronous
async def test_a_part_of_a_request_does_not_keep_a_connection_open(length: int, rest: bytes, monkeypatch: Any) -> None:
    """A token could otherwise hold any number of them, without a request that is open."""
    monkeypatch.setattr(http_protocol, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(http_protocol, "KEEP_ALIVE_SECONDS", 0.5)
    async with await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        async with asyncio.timeout(30):
            writer.write(REQUEST % length)
            assert (await reader.readuntil(b"answer")).endswith(b"answer")
            writer.write(rest)
            assert await reader.read() == b""
        writer.close()


def test_the_connections_of_a_token_are_limited() -> None:
    limits = ConnectionLimits(lambda *_: None)
    *first, last = [cast("LimitedConnection", object()) for _ in range(MAX_OF_TOKEN + 1)]
    assert all(limits.hold(one, "a") for one in first) and not limits.hold(last, "a")
    assert limits.hold(first[0], "a") and limits.hold(last, "b")
    limits.release(first[0])
    limits.release(first[0])
    limits.release(last)
    assert limits.hold(first[0], "a") and not limits.hold(last, "a")
