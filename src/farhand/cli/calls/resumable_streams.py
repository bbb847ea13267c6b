"""Streams that are resumed where they ended when the connection is lost."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Final, TextIO, TypeVar

from farhand.cli.client import Client, ClientError, ConnectionLost, NoGateway
from farhand.cli.output import remark

PIECE_BYTES: Final = 65536
FIRST_DELAY: Final = 0.2
MAX_DELAY: Final = 5.0

Item = TypeVar("Item")


def resume(
    read: Callable[[Callable[[], None]], Iterator[Item]],
    ended: Callable[[], bool] = lambda: False,
    *,
    connected: bool = False,
) -> Iterator[Item]:
    """Yield what `read` yields, calling it again after a lost connection, until `ended` returns True.

    `read` receives a function to call once it is connected, and continues after the last item it yielded. The first
    connection must succeed, unless `connected` says that there was one before. Raises ClientError.
    """
    lost = False
    delay = FIRST_DELAY

    def on_connect() -> None:
        nonlocal connected, lost, delay
        if lost:
            remark("farhand: connected again")
        connected, lost, delay = True, False, FIRST_DELAY

    while True:
        try:
            yield from read(on_connect)
            if ended():
                return
        except (NoGateway, ConnectionLost) as error:
            if not connected:
                raise
            if not lost:
                remark(f"farhand: {error}; trying again")
                lost = True
        time.sleep(random.uniform(delay / 2, delay))  # noqa: S311
        delay = min(delay * 2, MAX_DELAY)


def command_output(
    client: Client,
    path: str,
    offset: int = 0,
    *,
    stream: str = "output",
    begun: Callable[[], None] = lambda: None,
    connected: bool = False,
) -> Iterator[bytes]:
    """Yield the output at `path` from a byte offset until its command ends, nothing twice. Raises ClientError.

    `stream`: `errors` for the standard error of an attached command. `begun` is called when the command has started.
    `connected`: the gateway was reached before, so that it is waited for.
    """

    def read(on_connect: Callable[[], None]) -> Iterator[bytes]:
        nonlocal offset
        with client.open("GET", f"{path}?offset={offset}&stream={stream}", seconds=None) as (response, explained):
            on_connect()
            begun()
            start = int(response.headers.get("X-Offset", offset))
            if start > offset:
                remark(f"farhand: {start - offset} bytes of the oldest output are no longer available")
                offset = start
            while True:
                with explained:
                    piece = response.read1(PIECE_BYTES)
                if not piece:
                    return
                offset += len(piece)
                yield piece

    def ended() -> bool:
        """Return whether the command ended; the stream also ends when the gateway stops."""
        try:
            with (
                client.open("GET", f"{path}?offset={offset}&stream={stream}&wait=0") as (response, explained),
                explained,
            ):
                response.read()
                over = response.headers.get("X-Over") == "true"
                return over and int(response.headers.get("X-Next-Offset", offset)) <= offset
        except (NoGateway, ConnectionLost):
            raise
        except ClientError:  # the node is disconnected; the next request waits for it
            return False

    return resume(read, ended, connected=connected)


def read_input() -> bytes:
    """Return the next bytes of standard input, unbuffered; empty at its end, or if it is closed."""
    try:
        return os.read(0, PIECE_BYTES)
    except OSError:
        return b""


def write(piece: bytes, to: TextIO) -> None:
    to.buffer.write(piece)
    to.flush()
