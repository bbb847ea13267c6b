"""What a sender puts into its frames."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farhand.machine.files.files import Files
from farhand.node.transfers.sender import MOST_DEEP, OutgoingFiles
from farhand.protocol.errors import Failed
from farhand.protocol.frames import HEADER_BYTES, FrameKind, read_header
from farhand.protocol.transfer import SendWindow
from farhand.protocol.version import TRANSFER_FRAME_BYTES as FRAME
from farhand.sdk.connection import FRAME_RESERVE

CONTENT = os.urandom(5 * FRAME + 100)


@pytest.fixture
def outgoing(tmp_path: Path) -> OutgoingFiles:
    (tmp_path / "file").write_bytes(CONTENT)
    return OutgoingFiles(Files(tmp_path), "file", 7, tmp_path / "kept")


def data_frames(outgoing: OutgoingFiles, until: int) -> list[tuple[int, bytes]]:
    """Place and bytes of the data frames that come next, as far as credit goes."""
    found = []
    window = SendWindow()
    window.credit(0, until)
    while frames := outgoing.read(window):
        for frame in frames:
            whole = bytes(frame)[FRAME_RESERVE:] if isinstance(frame, bytearray) else bytes(frame)
            kind, _, offset = read_header(whole)
            if kind is FrameKind.DATA:
                found.append((offset, whole[HEADER_BYTES:]))
    return found


@pytest.mark.parametrize("begin", [0, 1, FRAME - 1, FRAME, 2 * FRAME + 4096, len(CONTENT) - 1])
@pytest.mark.parametrize("step", [1, 100_000, FRAME, 3 * FRAME + 17])
def test_frames_begin_at_multiples_of_their_size_whatever_the_credit(
    outgoing: OutgoingFiles, begin: int, step: int
) -> None:
    start = outgoing.offer.manifest_bytes
    outgoing.begin(start + begin)
    received = []
    until = start + begin
    while not outgoing.over:
        until += max(step, FRAME // 4)
        received += data_frames(outgoing, until)
        assert outgoing.offset <= until
    assert b"".join(data for _, data in received) == CONTENT[begin:]
    assert [offset for offset, _ in received[1:]] == [
        start + at for at in range(begin + FRAME - begin % FRAME, len(CONTENT), FRAME)
    ]
    assert all(len(data) == FRAME for _, data in received[1:-1])


def test_no_part_of_a_frame_is_sent_for_want_of_credit(outgoing: OutgoingFiles) -> None:
    start = outgoing.offer.manifest_bytes
    outgoing.begin(start)
    assert data_frames(outgoing, start + FRAME - 1) == []
    assert [len(data) for _, data in data_frames(outgoing, start + 2 * FRAME - 1)] == [FRAME]
    assert [len(data) for _, data in data_frames(outgoing, start + len(CONTENT))] == [FRAME] * 4 + [100]
    assert outgoing.over


@pytest.mark.parametrize("window", [1000, FRAME // 2, FRAME - 1])
def test_a_receiver_whose_window_is_less_than_a_frame_gets_everything(outgoing: OutgoingFiles, window: int) -> None:
    start = outgoing.offer.manifest_bytes
    outgoing.begin(start)
    received = b""
    while not outgoing.over:
        # All that came is written, and the window begins behind it.
        granted = SendWindow()
        granted.credit(outgoing.offset, outgoing.offset + window)
        for frame in outgoing.read(granted):
            if isinstance(frame, bytearray):
                received += bytes(frame)[FRAME_RESERVE + HEADER_BYTES :]
    assert received == CONTENT


def test_folders_in_folders_have_an_end(tmp_path: Path) -> None:
    deep = tmp_path / "deep" / "/".join("d" * MOST_DEEP)
    deep.mkdir(parents=True)
    assert OutgoingFiles(Files(tmp_path), "deep", 7, tmp_path / "kept").offer.files == 0
    (deep / "more").mkdir()
    with pytest.raises(Failed, match=f"more than {MOST_DEEP} deep"):
        OutgoingFiles(Files(tmp_path), "deep", 7, tmp_path / "another")
