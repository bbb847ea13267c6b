"""Frames on a connection of their own: a length and a frame, again and again."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from farhand.node.transfers.socket import FilesSocket
from farhand.protocol.errors import ProtocolError
from farhand.protocol.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES
from farhand.sdk.connection import FRAME_RESERVE


@pytest.fixture
def pair() -> Iterator[tuple[FilesSocket, FilesSocket, socket.socket]]:
    near, far = socket.socketpair()
    yield FilesSocket(near), FilesSocket(far), near
    near.close()
    far.close()


def received(files: FilesSocket) -> bytes | None:
    size = files.next_size()
    if size is None:
        return None
    frame = memoryview(bytearray(size))
    return bytes(frame) if files.receive(frame) else None


def test_frames_come_out_as_they_went_in(pair: tuple[FilesSocket, FilesSocket, socket.socket]) -> None:
    sender, receiver, _ = pair
    frames = [os.urandom(HEADER_BYTES), os.urandom(1000), os.urandom(HEADER_BYTES + MAX_PAYLOAD_BYTES)]

    def send() -> None:
        for frame in frames:
            sender.send(frame)
            sender.send(bytearray(FRAME_RESERVE) + frame)
        sender.shut_down()

    thread = threading.Thread(target=send)
    thread.start()
    for frame in frames:
        assert received(receiver) == frame
        assert received(receiver) == frame
    assert received(receiver) is None
    thread.join()


@pytest.mark.parametrize("size", [0, HEADER_BYTES - 1, HEADER_BYTES + MAX_PAYLOAD_BYTES + 1, 2**32 - 1])
def test_a_length_that_cannot_be_meant_is_refused(
    pair: tuple[FilesSocket, FilesSocket, socket.socket], size: int
) -> None:
    _, receiver, wire = pair
    wire.sendall(struct.pack("!I", size))
    with pytest.raises(ProtocolError, match=str(size)):
        receiver.next_size()


def test_a_connection_that_ends_in_the_middle_ends_the_frames(
    pair: tuple[FilesSocket, FilesSocket, socket.socket],
) -> None:
    _, receiver, wire = pair
    wire.sendall(struct.pack("!I", 100) + bytes(99))
    wire.shutdown(socket.SHUT_RDWR)
    assert received(receiver) is None


def test_one_that_is_closed_at_once_is_not_wanted(pair: tuple[FilesSocket, FilesSocket, socket.socket]) -> None:
    _, receiver, wire = pair
    wire.shutdown(socket.SHUT_RDWR)
    assert receiver.wanted() is False


@pytest.mark.parametrize("address", ["wss://gateway/v1/nodes/ws", "ws://gateway/other", "http://gateway/v1/nodes/ws"])
def test_no_connection_is_dialled_if_there_can_be_none(address: str) -> None:
    assert FilesSocket.dial(address, "ticket") is None


@pytest.mark.parametrize("answer", [b"HTTP/1.1 404 Not Found\r\n\r\n", b"nonsense", b"", b"x" * 20_000])
def test_a_gateway_that_will_not_have_it_is_an_error(answer: bytes) -> None:
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                asked.append(connection.recv(4096))
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(OSError):
            FilesSocket.dial(f"ws://127.0.0.1:{port}/behind/v1/nodes/ws?node_id=x&token=secret", "the-ticket")
        thread.join()
    assert asked[0].startswith(b"GET /behind/v1/nodes/files HTTP/1.1\r\n")
    assert b"Bearer the-ticket\r\n" in asked[0] and b"secret" not in asked[0]
    assert f"Host: 127.0.0.1:{port}".encode() in asked[0]


def test_a_frame_that_comes_in_pieces_is_put_together(
    pair: tuple[FilesSocket, FilesSocket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal in the middle of a wait hands out what has come so far, and the rest with the next one."""
    _, receiver, wire = pair
    monkeypatch.setattr(socket, "MSG_WAITALL", 0)
    frame = os.urandom(5000)
    wire.sendall(struct.pack("!I", len(frame))[:3])

    def send() -> None:
        wire.sendall(struct.pack("!I", len(frame))[3:])
        for start in range(0, len(frame), 7):
            wire.sendall(frame[start : start + 7])

    thread = threading.Thread(target=send)
    thread.start()
    assert received(receiver) == frame
    thread.join()
