"""Counts TLS connections from the moment they are accepted, before their handshake.

An event loop that does TLS itself reports a connection only after its handshake. Thousands of clients that never begin
one would hold all descriptors for a minute.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.utils import get_remote_addr

from farhand.api.server.connection_limits import HEAD_SECONDS, ConnectionLimits


class TlsConnection(asyncio.Protocol):
    """Limits a connection during its handshake; then `inside` takes it over."""

    def __init__(
        self, context: ssl.SSLContext, limits: ConnectionLimits, inside: Callable[[], asyncio.Protocol]
    ) -> None:
        self._context = context
        self._limits = limits
        self._inside = inside
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # As the loop does for a server with TLS. `start_tls` would miss data that arrives before it is called.
        loop = asyncio.get_running_loop()
        self._transport = transport
        handshake = loop.create_future()
        handshake.add_done_callback(self._over)
        tls = _tls_of(loop)(
            loop, self._inside(), self._context, handshake, server_side=True, ssl_handshake_timeout=HEAD_SECONDS
        )
        transport.set_protocol(tls)
        tls.connection_made(transport)
        address = get_remote_addr(transport)
        self._limits.add(self, address[0] if address else "")

    def drop(self) -> None:
        assert self._transport is not None, "the connection was made"
        self._transport.abort()

    def _over(self, handshake: asyncio.Future[None]) -> None:
        """Stop counting the connection, whether the handshake succeeded or not."""
        self._limits.remove(self)
        if not handshake.cancelled():
            handshake.exception()


def _tls_of(loop: asyncio.AbstractEventLoop) -> Any:
    """Return the loop's implementation of TLS; uvloop has its own, with the same constructor."""
    if type(loop).__module__.partition(".")[0] != "uvloop":
        return sslproto.SSLProtocol
    from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # noqa: PLC0415

    return SSLProtocol
