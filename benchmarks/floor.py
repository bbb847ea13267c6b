"""The floor: HTTP to socket and back with nothing but sockets.

    python -m benchmarks.floor echo  --port 0
    python -m benchmarks.floor relay --port 0 --upstream PORT [--keep FILE]

Two processes as Farhand has them. The first takes a POST, sends its body as one message (four bytes of
length, then the bytes) over one TCP connection to the second, which sends it back. No JSON, no checks, no
record: no relay in Python with the same two hops does less, so it shows what the hops alone cost here.

With `--keep`, each message is on disk before it is sent on, all that one turn of the loop brought in one write: the
least that a relay does which may not lose a call with effects.
"""

import argparse
import asyncio
import functools
import mmap
import os
import struct
from collections import deque

import uvloop

LENGTH = struct.Struct(">I")
BLOCK, BLOCKS = 4096, 512


class Messages(asyncio.Protocol):
    """Length-prefixed messages out of a stream."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer
        buffer += data
        start = 0
        while len(buffer) - start >= LENGTH.size:
            end = start + LENGTH.size + LENGTH.unpack_from(buffer, start)[0]
            if len(buffer) < end:
                break
            self.message_received(bytes(buffer[start + LENGTH.size : end]))
            start = end
        del buffer[:start]

    def message_received(self, message: bytes) -> None:
        raise NotImplementedError


class Echo(Messages):
    """The far end: every message goes back as it came."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def message_received(self, message: bytes) -> None:
        self.transport.write(LENGTH.pack(len(message)) + message)


class Upstream(Messages):
    """The relay's one connection to the far end, which answers in order."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[asyncio.Transport] = deque()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def ask(self, message: bytes, caller: asyncio.Transport) -> None:
        self.waiting.append(caller)
        self.transport.write(LENGTH.pack(len(message)) + message)

    def message_received(self, message: bytes) -> None:
        caller = self.waiting.popleft()
        if not caller.is_closing():
            caller.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(message), message)
            )


class KeepingUpstream(Upstream):
    """Writes to `BLOCKS` blocks of a file, again and again, past the page cache."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.pwrite(self.file, bytes(BLOCK * BLOCKS), 0)
        os.fsync(self.file)
        os.close(self.file)
        self.file = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_DSYNC)
        self.memory = mmap.mmap(-1, BLOCK * BLOCKS)
        self.next = 0
        self.asked: list[tuple[bytes, asyncio.Transport]] = []

    def ask(self, message: bytes, caller: asyncio.Transport) -> None:
        self.asked.append((message, caller))
        if len(self.asked) == 1:
            asyncio.get_running_loop().call_soon(self.keep)

    def keep(self) -> None:
        asked, self.asked = self.asked, []
        data = b"".join(LENGTH.pack(len(message)) + message for message, _ in asked)
        size = -(-len(data) // BLOCK) * BLOCK
        if self.next + size > len(self.memory):
            self.next = 0
        self.memory[self.next : self.next + len(data)] = data
        os.pwrite(self.file, memoryview(self.memory)[self.next : self.next + size], self.next)
        self.next += size
        self.waiting.extend(caller for _, caller in asked)
        self.transport.write(data)


class Requests(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, as far as a POST with a Content-Length needs it."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.buffer = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer + data if self.buffer else data
        while (head_end := buffer.find(b"\r\n\r\n")) >= 0:
            _, found, rest = buffer[:head_end].lower().partition(b"\r\ncontent-length:")
            body_start = head_end + 4
            body_end = body_start + (int(rest.partition(b"\r\n")[0]) if found else 0)
            if len(buffer) < body_end:
                break
            self.upstream.ask(buffer[body_start:body_end], self.transport)
            buffer = buffer[body_end:]
        self.buffer = buffer


async def serve(part: str, port: int, upstream_port: int, keep: str | None) -> None:
    loop = asyncio.get_running_loop()
    if part == "echo":
        server = await loop.create_server(Echo, "127.0.0.1", port)
    else:
        make = Upstream if keep is None else functools.partial(KeepingUpstream, keep)
        _, upstream = await loop.create_connection(make, "127.0.0.1", upstream_port)
        server = await loop.create_server(functools.partial(Requests, upstream), "127.0.0.1", port)
    print(f"ready on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["echo", "relay"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--upstream", type=int, default=0)
    parser.add_argument("--keep", metavar="FILE")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.part, arguments.port, arguments.upstream, arguments.keep))


if __name__ == "__main__":
    main()
