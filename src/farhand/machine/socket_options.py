"""What a connection needs to be told of the line it goes over."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from typing import Final

QUICK_MICROSECONDS: Final = 1000
LITTLE_BYTES: Final = 512 * 1024
# For SO_LINGER: what was not sent when a connection is closed is not sent any more.
RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
# struct tcp_info, as far as the smoothed round trip in microseconds.
_ROUND_TRIP: Final = struct.Struct("=68xI")


def limit_buffers_on_fast_links(connection: socket.socket) -> None:
    """Let little of a file wait between two ends that are near each other: whoever takes it in gets it in small
    portions then, and others their turns. Over a long line much must be under way, and the system knows how much."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, struct.error):
        known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
        if 0 < _ROUND_TRIP.unpack(known)[0] < QUICK_MICROSECONDS:
            for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                connection.setsockopt(socket.SOL_SOCKET, buffer, LITTLE_BYTES)
