"""A remote MCP server cannot fill the gateway's memory, nor lead it into private networks."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from farhand.gateway.mcp.bounded_http import HEADERS, bounded

LONGEST = 10_000
EVENT = b"data: " + b"x" * 6000 + b"\n\n"


async def fetched(head: bytes, body: list[bytes]) -> bytes:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + head + b"\r\n\r\n")
        for piece in body:
            writer.write(piece)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/"
        async with httpx2.AsyncClient(headers=HEADERS, event_hooks=bounded(url, LONGEST), trust_env=False) as client:
            return (await client.get(url)).content


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"content-type: application/json", [b"[" + b"1," * 6000]),
        (b"content-type: text/event-stream", [b"data: " + b"x" * 12_000]),
        (b"content-type: application/json\r\ncontent-encoding: gzip", [b"x"]),
    ],
)
def test_too_long_and_compressed_messages_are_refused(head: bytes, body: list[bytes]) -> None:
    with pytest.raises(httpx2.HTTPError):
        asyncio.run(fetched(head, body))


def test_a_long_stream_of_short_events_is_read() -> None:
    assert len(asyncio.run(fetched(b"content-type: text/event-stream", [EVENT] * 20))) == 20 * len(EVENT)


@pytest.mark.parametrize("form", [b"%b", b"event: message\ndata: %b\n\n"])
def test_a_message_of_very_many_values_is_refused(monkeypatch: pytest.MonkeyPatch, form: bytes) -> None:
    monkeypatch.setattr(f"{__name__}.LONGEST", 1_000_000)
    kind = b"content-type: text/event-stream" if form.startswith(b"event") else b"content-type: application/json"
    with pytest.raises(httpx2.HTTPError):
        asyncio.run(fetched(kind, [form % (b"[" + b"1," * 120_000 + b"1]")]))
    assert asyncio.run(fetched(kind, [form % (b'["' + b"1," * 120_000 + b'"]')]))


async def led(server: str, to: str) -> None:
    (check,) = bounded(server)["request"]
    await check(httpx2.Request("GET", to))


@pytest.mark.parametrize(
    "to",
    [
        "http://127.0.0.1:3210/",
        "http://localhost/",
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[fd00::1]/",
        "http://2130706433/",
        "http://0.0.0.0/",
        "http://[64:ff9b::7f00:1]/",
    ],
)
def test_a_public_server_leads_to_no_private_address(to: str) -> None:
    """Where to log in, a server says itself."""
    with pytest.raises(httpx2.ConnectError):
        asyncio.run(led("https://8.8.8.8/mcp", to))


@pytest.mark.parametrize(
    ("server", "to"),
    [
        ("https://8.8.8.8/mcp", "https://8.8.8.8/.well-known/oauth-protected-resource"),
        ("https://8.8.8.8/mcp", "https://1.1.1.1/token"),
        ("http://127.0.0.1:9000/mcp", "http://localhost:9001/token"),
        ("http://10.0.0.5/mcp", "http://10.0.0.6/token"),
    ],
)
def test_other_addresses_are_reached(server: str, to: str) -> None:
    asyncio.run(led(server, to))
