"""A connection before its TLS: a stranger like any other, counted from the moment it is accepted.

A server that leaves TLS to the loop learns of a connection when its handshake is over; thousands that never begin one
would have all descriptors for a minute.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.utils import get_remote_addr

from farhand.api.server.connection_limits import HEAD_SECONDS, Lobby


class Threshold(asyncio.Protocol):
    """Waits in the lobby until hands are shaken; then what it was made for takes the connection over."""

    def __init__(self, context: ssl.SSLContext, lobby: Lobby, inside: Callable[[], asyncio.Protocol]) -> None:
        self._context = context
        self._lobby = lobby
        self._inside = inside
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # What the loop itself does for a server with TLS. `start_tls` would miss what comes before it has begun.
        loop = asyncio.get_running_loop()
        self._transport = transport
        shaken = loop.create_future()
        shaken.add_done_callback(self._over)
        tls = _tls_of(loop)(
            loop, self._inside(), self._context, shaken, server_side=True, ssl_handshake_timeout=HEAD_SECONDS
        )
        transport.set_protocol(tls)
        tls.connection_made(transport)
        address = get_remote_addr(transport)
        self._lobby.enter(self, address[0] if address else "")

    def turn_out(self) -> None:
        assert self._transport is not None, "who is in the lobby has come"
        self._transport.abort()

    def _over(self, shaken: asyncio.Future[None]) -> None:
        """Whether it is TLS that goes on, or a connection that is closed."""
        self._lobby.leave(self)
        if not shaken.cancelled():
            shaken.exception()


def _tls_of(loop: asyncio.AbstractEventLoop) -> Any:
    """uvloop has its own, which is faster, and made the same way."""
    if type(loop).__module__.partition(".")[0] != "uvloop":
        return sslproto.SSLProtocol
    from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # noqa: PLC0415

    return SSLProtocol
