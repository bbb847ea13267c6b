"""Socket options for the transfer connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from typing import Final

QUICK_MICROSECONDS: Final = 1000
LITTLE_BYTES: Final = 512 * 1024
# For SO_LINGER: discard unsent data when the connection is closed.
RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
# struct tcp_info up to the smoothed round-trip time in microseconds.
_ROUND_TRIP: Final = struct.Struct("=68xI")


def limit_buffers_on_fast_links(connection: socket.socket) -> None:
    """Use small buffers between two near ends, so that data arrives in small portions and other work gets its turn.

    Over a long line, large buffers are needed, which the system sizes itself.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, struct.error):
        known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
        if 0 < _ROUND_TRIP.unpack(known)[0] < QUICK_MICROSECONDS:
            for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                connection.setsockopt(socket.SOL_SOCKET, buffer, LITTLE_BYTES)
