"""The floor of a transfer: file -> socket -> relay -> socket -> file, with no framing and no digest.

python -m benchmarks.raw_relay receive FILE | relay PORT | send FILE PORT
"""

import os
import socket
import sys

BUFFER = 1024 * 1024


def listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"ready on {listener.getsockname()[1]}", flush=True)
    return listener.accept()[0]


def receive(path: str) -> None:
    source = listen()
    buffer = memoryview(bytearray(BUFFER))
    with open(f"{path}.part", "wb", buffering=0) as file:
        while size := source.recv_into(buffer):
            file.write(buffer[:size])
        os.fsync(file.fileno())
    os.rename(f"{path}.part", path)
    source.sendall(b"done")


def relay(port: int) -> None:
    source = listen()
    sink = socket.create_connection(("127.0.0.1", port))
    buffer = memoryview(bytearray(BUFFER))
    while size := source.recv_into(buffer):
        sink.sendall(buffer[:size])
    sink.shutdown(socket.SHUT_WR)
    source.sendall(sink.recv(4))


def send(path: str, port: int) -> None:
    sink = socket.create_connection(("127.0.0.1", port))
    buffer = memoryview(bytearray(BUFFER))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            sink.sendall(buffer[:size])
    sink.shutdown(socket.SHUT_WR)
    assert sink.recv(4) == b"done"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive", path]:
            receive(path)
        case ["relay", port]:
            relay(int(port))
        case ["send", path, port]:
            send(path, int(port))
