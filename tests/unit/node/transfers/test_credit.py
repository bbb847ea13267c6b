"""How often a receiver tells that it lives and how far the sender may go."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from farhand.machine.files.files import Files
from farhand.node.transfers.endpoint import Receiver
from farhand.node.transfers.resume_notes import Notes
from farhand.protocol.messages import TransferCredit, TransferOpen, decode
from farhand.protocol.transfer import CREDIT_BYTES
from farhand.protocol.version import TRANSFER_WINDOW_BYTES


class Line:
    """Where the messages to the gateway go."""

    def __init__(self) -> None:
        self.offsets: list[int] = []

    def send(self, frame: bytes) -> None:
        credit = decode(frame)
        assert isinstance(credit, TransferCredit) and credit.until == credit.offset + TRANSFER_WINDOW_BYTES
        self.offsets.append(credit.offset)


def test_credit_comes_for_a_mebibyte_and_for_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow line and a folder of many small files move less than a mebibyte for a long time, and live."""

    async def run() -> None:
        line: Any = Line()
        opened = TransferOpen(1, "0" * 16, "receive", "file")
        receiver = Receiver(opened, line, Files(tmp_path), Notes(tmp_path), asyncio.to_thread, ThreadPoolExecutor())
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now)
        receiver._allow(0)
        receiver._allow(1000)
        receiver._allow(CREDIT_BYTES - 1)
        assert line.offsets == [0], "what came is little, and a moment ago"
        receiver._allow(CREDIT_BYTES)
        assert line.offsets == [0, CREDIT_BYTES]
        now += 2
        receiver._allow(CREDIT_BYTES)
        receiver._allow(CREDIT_BYTES + 1)
        assert line.offsets == [0, CREDIT_BYTES, CREDIT_BYTES]

    asyncio.run(run())
