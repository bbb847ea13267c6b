"""What commands print, taken up again where it broke off."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Final, TextIO

from farhand.cli.client import READ_SECONDS, Client, ClientError, ConnectionLost, NoGateway
from farhand.cli.output import remark

PIECE: Final = 65536
RETRY_SECONDS: Final = (0.2, 5.0)


def show_output(client: Client, path: str, *, to: TextIO) -> int:
    """Write the output at `path` as it comes, until its command has ended; tells how many bytes there were."""
    size = 0
    for piece in output(client, path):
        size += len(piece)
        write(piece, to)
    return size


def write(piece: bytes, to: TextIO) -> None:
    to.buffer.write(piece)
    to.flush()


def output(client: Client, path: str, offset: int = 0) -> Iterator[bytes]:
    """The output at `path` from a byte on, until its command has ended. Raises ClientError.

    The first connection must succeed; after that it is taken up again, with nothing missed or repeated.
    """
    begun, lost, pause = False, False, RETRY_SECONDS[0]
    while True:
        try:
            with client._asked("GET", f"{path}?offset={offset}", None, {}, None) as (response, worded):
                if lost:
                    remark("farhand: connected again")
                begun, lost, pause = True, False, RETRY_SECONDS[0]
                start = int(response.headers.get("X-Offset", offset))
                if start > offset:
                    remark(f"farhand: {start - offset} bytes of the oldest output are no longer kept")
                    offset = start
                while True:
                    with worded:
                        piece = response.read1(PIECE)
                    if not piece:
                        break
                    offset += len(piece)
                    yield piece
            if _over(client, path, offset):
                return
            time.sleep(RETRY_SECONDS[0])
        except (NoGateway, ConnectionLost) as error:
            if not begun:
                raise
            if not lost:
                remark(f"farhand: {error}; trying again")
                lost = True
            time.sleep(random.uniform(pause / 2, pause))  # noqa: S311
            pause = min(pause * 2, RETRY_SECONDS[1])


def _over(client: Client, path: str, offset: int) -> bool:
    """Whether a stream ended with its command; a gateway that stops ends it too."""
    try:
        with (
            client._asked("GET", f"{path}?offset={offset}&wait=0", None, {}, READ_SECONDS) as (response, worded),
            worded,
        ):
            response.read()
            over = response.headers.get("X-Over") == "true"
            return over and int(response.headers.get("X-Next-Offset", offset)) <= offset
    except (NoGateway, ConnectionLost):
        raise
    except ClientError:  # its node is away just now: whoever asks for the stream again waits for it
        return False
