"""A connection for the bytes of one transfer, beside the node socket: frames, each after its length.

Threads open and use it, so neither the event loop nor the traffic of the node socket waits for it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import struct
from urllib.parse import urlsplit

from farhand.machine.socket_options import RESET_ON_CLOSE, limit_buffers_on_fast_links
from farhand.protocol.errors import ProtocolError
from farhand.protocol.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES
from farhand.sdk.connection import FRAME_RESERVE

DIAL_SECONDS = 5.0
LONGEST_HEAD = 8192
_LENGTH = struct.Struct("!I")


class FilesSocket:
    """One connection. The caller of `dial` calls `close` after all sends and receives; `shut_down` makes them end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def dial(cls, node_socket: str, ticket: str) -> FilesSocket | None:
        """Connect to the gateway of a node socket; return None if that is not possible (TLS). Raises OSError."""
        address = urlsplit(node_socket)
        if address.scheme != "ws" or not address.hostname or not address.path.endswith("/ws"):
            return None
        connection = socket.create_connection((address.hostname, address.port or 80), DIAL_SECONDS)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_buffers_on_fast_links(connection)
            key = base64.b64encode(os.urandom(16)).decode()
            connection.sendall(
                f"GET {address.path.removesuffix('ws')}files HTTP/1.1\r\n"
                f"Host: {address.netloc.rpartition('@')[2]}\r\n"
                "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                f"Sec-WebSocket-Key: {key}\r\nAuthorization: Bearer {ticket}\r\n\r\n".encode()
            )
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                byte = connection.recv(1)  # not more: the bytes after the head belong to the transfer
                if not byte or len(head) > LONGEST_HEAD:
                    raise OSError("the gateway did not answer")
                head += byte
            if not head.startswith(b"HTTP/1.1 101 "):
                raise OSError(f"the gateway answered {head.partition(bytes((13,)))[0].decode(errors='replace')}")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def wanted(self) -> bool:
        """Wait until the gateway says whether it uses this connection, and return that."""
        with contextlib.suppress(OSError):
            return len(self._connection.recv(1)) == 1
        return False

    def send(self, frame: bytes | bytearray) -> None:
        """Send a frame; the first `FRAME_RESERVE` bytes of a bytearray are room for its length. Raises OSError."""
        if isinstance(frame, bytearray):
            start = FRAME_RESERVE - _LENGTH.size
            _LENGTH.pack_into(frame, start, len(frame) - FRAME_RESERVE)
            with memoryview(frame)[start:] as whole:
                self._connection.sendall(whole)
        else:
            self._connection.sendall(_LENGTH.pack(len(frame)) + frame)

    def next_size(self) -> int | None:
        """Return the length of the next frame; None at the end. Raises OSError, ProtocolError."""
        length = bytearray(_LENGTH.size)
        if not self.receive(memoryview(length)):
            return None
        size: int = _LENGTH.unpack(length)[0]
        if not HEADER_BYTES <= size <= HEADER_BYTES + MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"received a frame of {size} bytes, which no frame has")
        return size

    def receive(self, frame: memoryview) -> bool:
        """Fill `frame`; return False if the connection ended before. Raises OSError."""
        at = 0
        while at < len(frame):  # a signal may interrupt the wait for all of it
            count = self._connection.recv_into(frame[at:], 0, socket.MSG_WAITALL)
            if not count:
                return False
            at += count
        return True

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and discard unsent data."""
        with contextlib.suppress(OSError):
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._connection.close()
