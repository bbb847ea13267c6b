"""Bounds what a remote MCP server sends: responses, and each event of a stream, are read into memory as a whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from httpx2 import Response

# As for a line of a server that a machine runs.
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
# A small compressed message can become a very large one.
HEADERS: Final = {"accept-encoding": "identity"}
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


def bounded(longest: int = MAX_MESSAGE_BYTES) -> dict[str, list[Any]]:
    """Return the event hooks of an HTTP client that refuses longer messages, and compressed ones."""
    import httpx2  # noqa: PLC0415 - takes long; few gateways have remote servers

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: httpx2.AsyncByteStream, *, events: bool) -> None:
            self._stream = stream
            self._events = events

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in self._stream:
                end = max(piece.rfind(one) for one in _ENDS) if self._events else -1
                size = size + len(piece) if end < 0 else len(piece) - end
                if size > longest:
                    raise httpx2.ReadError(f"the server sent a message of more than {longest} bytes")
                yield piece

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: Response) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise httpx2.DecodingError("the server sent a compressed message, which was not asked for")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        response.stream = Bounded(response.stream, events=events)

    return {"response": [bound]}
