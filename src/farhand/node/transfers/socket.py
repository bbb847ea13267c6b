"""A connection for the bytes of one transfer, beside the node socket: a length and a frame, again and again.

It is made and used by threads: neither the loop that answers calls nor what is on the node socket waits for it.
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
    """Whoever dialled calls `close`, once nobody sends or receives any more; `hang_up` brings that about."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def dial(cls, node_socket: str, ticket: str) -> FilesSocket | None:
        """A connection to the gateway at whose node socket we are; None where there can be none. Raises OSError."""
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
                byte = connection.recv(1)  # what follows the head is not ours to read yet
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
        """Wait for the gateway to say whether this connection is used."""
        with contextlib.suppress(OSError):
            return len(self._connection.recv(1)) == 1
        return False

    def send(self, frame: bytes | bytearray) -> None:
        """Of a bytearray the first `FRAME_RESERVE` bytes are room for what comes before the frame. Raises OSError."""
        if isinstance(frame, bytearray):
            start = FRAME_RESERVE - _LENGTH.size
            _LENGTH.pack_into(frame, start, len(frame) - FRAME_RESERVE)
            with memoryview(frame)[start:] as whole:
                self._connection.sendall(whole)
        else:
            self._connection.sendall(_LENGTH.pack(len(frame)) + frame)

    def next_size(self) -> int | None:
        """How long the next frame is; None once there is none. Raises OSError, ProtocolError."""
        length = bytearray(_LENGTH.size)
        if not self.receive(memoryview(length)):
            return None
        size: int = _LENGTH.unpack(length)[0]
        if not HEADER_BYTES <= size <= HEADER_BYTES + MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"a frame of {size} bytes came")
        return size

    def receive(self, frame: memoryview) -> bool:
        """Whether the whole frame came. Raises OSError."""
        at = 0
        while at < len(frame):  # a signal, such as the one that stops a process, cuts the wait for all of it short
            count = self._connection.recv_into(frame[at:], 0, socket.MSG_WAITALL)
            if not count:
                return False
            at += count
        return True

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """What is still on its way is wanted by nobody."""
        with contextlib.suppress(OSError):
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._connection.close()
