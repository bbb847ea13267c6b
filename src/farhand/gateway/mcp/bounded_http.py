"""Bounds what a remote MCP server sends, and where it leads the gateway.

Responses, and each event of a stream, are read into memory as a whole.

A message is passed on when it is complete and has been found to have few enough values: decoding millions of them would
hold up the gateway.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from farhand.gateway.access.oauth_clients import is_public_address
from farhand.protocol.json_limits import check_value_count

if TYPE_CHECKING:
    from httpx2 import Request, Response

# As for a line of a server that a machine runs.
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
# A small compressed message can become a very large one.
HEADERS: Final = {"accept-encoding": "identity"}
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_LONGEST_END: Final = 4


def bounded(url: str, longest: int = MAX_MESSAGE_BYTES) -> dict[str, list[Any]]:
    """Return the event hooks of an HTTP client for the server at `url`.

    It refuses longer messages, compressed ones, and addresses of private networks to which a public server leads it,
    such as that of an authorization server.
    """
    import httpx2  # noqa: PLC0415 - takes long; few gateways have remote servers

    own = httpx2.URL(url)

    async def stay_public(request: Request) -> None:
        host = request.url.host
        if host != own.host and await _is_public(own.host) and not await _is_public(host):
            raise httpx2.ConnectError(f"the server leads to {host!r}, which is not a public address")

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: httpx2.AsyncByteStream, *, events: bool) -> None:
            self._stream = stream
            self._events = events

        async def __aiter__(self) -> AsyncIterator[bytes]:
            held = bytearray()
            async for piece in self._stream:
                at = max(0, len(held) - _LONGEST_END + 1)
                held += piece
                end = max((held.rfind(one, at) + len(one) for one in _ENDS if one in held[at:]), default=0)
                if self._events and end:
                    yield await self._counted(bytes(held[:end]))
                    del held[:end]
                if len(held) > longest:
                    raise httpx2.ReadError(f"the server sent a message of more than {longest} bytes")
            if held:
                yield await self._counted(bytes(held))

        async def _counted(self, message: bytes) -> bytes:
            """Return a message, or events, that can be decoded in a short time."""
            try:
                await asyncio.to_thread(check_value_count, message)
            except msgspec.DecodeError as error:
                raise httpx2.ReadError(f"the server sent a message that is too long to read: {error}") from None
            return message

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: Response) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise httpx2.DecodingError("the server sent a compressed message, which was not asked for")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        response.stream = Bounded(response.stream, events=events)

    return {"request": [stay_public], "response": [bound]}


async def _is_public(host: str) -> bool:
    """Return whether all addresses of a host are public; True for one that is not known, which cannot be reached."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    return all(is_public_address(str(entry[4][0])) for entry in found)
