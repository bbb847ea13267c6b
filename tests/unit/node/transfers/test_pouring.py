"""A thread that sends a file: it ends when it is stopped, at any moment."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from farhand.machine.files.files import Files
from farhand.node.transfers.endpoint import Receiver, Sender
from farhand.node.transfers.resume_notes import Notes
from farhand.node.transfers.sender import OutgoingFiles
from farhand.node.transfers.socket import FilesSocket
from farhand.protocol.messages import TransferCredit, TransferOpen
from farhand.protocol.version import TRANSFER_FRAME_BYTES

pytestmark = pytest.mark.anyio


class Moment(threading.Event):
    """Stops the sender just where it has looked whether it is stopped, and has not begun to wait."""

    sender: Sender | None = None

    def clear(self) -> None:
        sender, self.sender = self.sender, None
        if sender is not None:
            sender.stop()
        super().clear()


def end(kind: Any, folder: Path, role: Any) -> Any:
    opened = TransferOpen(1, "0" * 16, role, "file")
    return kind(opened, None, Files(folder), Notes(folder / "notes"), asyncio.to_thread, ThreadPoolExecutor())


def ready(folder: Path, frames: int) -> tuple[Any, OutgoingFiles]:
    """Return a sender of a file with this many frames, and the file."""
    (folder / "file").write_bytes(bytes(frames * TRANSFER_FRAME_BYTES))
    outgoing = OutgoingFiles(Files(folder), "file", 1, folder / "kept")
    outgoing.begin(0)
    return end(Sender, folder, "send"), outgoing


async def test_a_stop_between_looking_and_waiting_is_not_missed(tmp_path: Path) -> None:
    sender, outgoing = ready(tmp_path, 1)
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"\x01")
        sender._allowed = moment = Moment()
        moment.sender = sender
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(sender._send_on_own_connection, outgoing, FilesSocket(near))
    outgoing.close()


async def test_without_credit_nothing_is_sent_and_with_it_all_is(tmp_path: Path) -> None:
    sender, outgoing = ready(tmp_path, 2)
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"\x01")
        pouring = asyncio.create_task(asyncio.to_thread(sender._send_on_own_connection, outgoing, FilesSocket(near)))
        receiver = FilesSocket(far)
        sender.credit(TransferCredit(1, 0, 2**40))
        came = 0
        async with asyncio.timeout(60):
            while came < 2 * TRANSFER_FRAME_BYTES:
                size = await asyncio.to_thread(receiver.next_size)
                assert size is not None
                assert await asyncio.to_thread(receiver.receive, memoryview(bytearray(size)))
                came += size
            sender.stop()
            assert await pouring
    outgoing.close()


async def test_a_receiver_whose_disk_is_slow_stops_reading_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farhand.node.transfers.endpoint.MAX_WAITING_FRAMES", 3)
    receiver = end(Receiver, tmp_path, "receive")
    near, far = socket.socketpair()
    with near, far:
        sender = FilesSocket(near)
        for _ in range(10):
            sender.send(bytes(100))
        taking = asyncio.create_task(asyncio.to_thread(receiver._receive_on_own_connection, FilesSocket(far)))
        taken = 0
        async with asyncio.timeout(60):
            while taken < 10:
                found = receiver._take()
                assert len(found) <= 5
                taken += len(found)
                await asyncio.sleep(0.01)
            receiver.stop()
            sender.shut_down()
            await taking
    assert receiver._failure is None
