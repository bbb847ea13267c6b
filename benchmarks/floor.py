"""The floor: HTTP to socket and back with nothing but sockets.

    python -m benchmarks.floor echo  --port 0
    python -m benchmarks.floor relay --port 0 --upstream PORT

Two processes as Farhand has them. The first takes a POST, sends its body as one message (four bytes of
length, then the bytes) over one TCP connection to the second, which sends it back. No JSON, no checks, no
record: no relay in Python with the same two hops does less, so it shows what the hops alone cost here.
"""

import argparse
import asyncio
import functools
import struct
from collections import deque

import uvloop

LENGTH = struct.Struct(">I")


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


async def serve(part: str, port: int, upstream_port: int) -> None:
    loop = asyncio.get_running_loop()
    if part == "echo":
        server = await loop.create_server(Echo, "127.0.0.1", port)
    else:
        _, upstream = await loop.create_connection(Upstream, "127.0.0.1", upstream_port)
        server = await loop.create_server(functools.partial(Requests, upstream), "127.0.0.1", port)
    print(f"ready on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["echo", "relay"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--upstream", type=int, default=0)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.part, arguments.port, arguments.upstream))


if __name__ == "__main__":
    main()
