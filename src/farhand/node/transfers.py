"""This node's ends of transfers: what the gateway opens is sent or received, as fast as the other end allows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farhand.machine.files import Files
from farhand.machine.write_out import BLOCK
from farhand.node.receiving import Arrival, Mismatch, Notes, discard
from farhand.node.sending import Parcel
from farhand.protocol.calls import ToolFailure
from farhand.protocol.errors import Failed, ProtocolError, ToolError
from farhand.protocol.frames import HEADER_BYTES, read_header
from farhand.protocol.freezing import Brake
from farhand.protocol.messages import (
    FEATURE_TRANSFER,
    Message,
    TransferCredit,
    TransferDone,
    TransferOpen,
    TransferReady,
    TransferStop,
    encode,
)
from farhand.protocol.version import MIB, TRANSFER_FRAME_BYTES, TRANSFER_WINDOW_BYTES
from farhand.sdk.link import Link

log = logging.getLogger("farhand.node.transfers")

T = TypeVar("T")
MAX_ENDS = 32
MAX_WAITING_BYTES = TRANSFER_WINDOW_BYTES + MIB
MAX_WAITING_FRAMES = 100_000
FULL_FRAME = HEADER_BYTES + TRANSFER_FRAME_BYTES
CREDIT_BYTES = MIB
CREDIT_SECONDS = 1.0
THREADS = 8
BULK_NICENESS = 10


class Transfers:
    """Every end of a transfer that is on this node. Its owner calls `close`."""

    features: tuple[str, ...] = (FEATURE_TRANSFER,)

    def __init__(self, files: Files, folder: Path, brake: Brake | None = None) -> None:
        """`folder` keeps the notes that let a transfer go on after this program was killed."""
        self._files = files
        self._brake = brake or Brake()
        self._notes = Notes(folder)
        self._link: Link | None = None
        self._senders: dict[int, _Sender] = {}
        self._receivers: dict[int, _Receiver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "farhand-transfer", initializer=_step_back)

    async def close(self) -> None:
        self.detach()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=5)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- the link ---------------------------------------------------------------------------------------

    def attach(self, link: Link) -> None:
        self._link = link

    def detach(self) -> None:
        """The link is gone: every end stops where it is, and is opened again by the gateway."""
        self._link = None
        self.stop_all()

    def stop_all(self) -> None:
        """Send and write nothing more of any transfer."""
        for end in (*self._senders.values(), *self._receivers.values()):
            end.stop()
        self._senders.clear()
        self._receivers.clear()

    async def held(self, _params: msgspec.Raw) -> dict[str, Any]:
        """The transfers this node still keeps something of."""
        return {"held": await self._in_thread(self._notes.held)}

    def on_message(self, message: Message) -> None:
        match message:
            case TransferOpen():
                self._open(message)
            case TransferCredit(stream):
                if (sender := self._senders.get(stream)) is not None:
                    sender.credit(message)
            case TransferStop():
                self._stop(message)
            case _:
                log.debug("ignored an unexpected %s", type(message).__name__)

    def on_frame(self, frame: memoryview) -> None:
        try:
            _, stream, _ = read_header(frame)
        except ProtocolError as error:
            log.debug("ignored a binary frame of %d bytes: %s", len(frame), error)
            return
        if (receiver := self._receivers.get(stream)) is not None:
            receiver.frame(frame)

    # -- ends -------------------------------------------------------------------------------------------

    def _open(self, wanted: TransferOpen) -> None:
        link = self._link
        if link is None:
            return
        if self._brake.order is not None:
            refused = ToolFailure.of(self._brake.order.refusal_of_node())
            link.send(encode(TransferDone(wanted.stream, refused)))
            return
        if len(self._senders) + len(self._receivers) >= MAX_ENDS:
            busy = ToolFailure("failed", f"busy: {MAX_ENDS} transfers are open on this node; try again later")
            link.send(encode(TransferDone(wanted.stream, busy)))
            return
        settings = (wanted, link, self._files, self._notes, self._in_thread)
        if wanted.role == "send":
            self._senders[wanted.stream] = sender = _Sender(*settings)
            self._follow(wanted.transfer_id, "send", sender.run)
        else:
            self._receivers[wanted.stream] = receiver = _Receiver(*settings)
            self._follow(wanted.transfer_id, "receive", receiver.run)

    def _stop(self, stop: TransferStop) -> None:
        for ends in (self._senders, self._receivers):
            for stream, end in list(ends.items()):
                if end.transfer_id == stop.transfer_id:
                    end.stop()
                    del ends[stream]
        if not stop.keep:

            async def forget() -> None:
                try:
                    await self._in_thread(discard, self._files, self._notes, stop.transfer_id)
                except (ToolError, OSError) as error:
                    log.warning("transfer %s could not be tidied away: %s", stop.transfer_id, error)

            self._follow(stop.transfer_id, "send", lambda: self._after(stop.transfer_id, "receive", forget))

    async def _after(self, transfer_id: str, role: str, work: Callable[[], Awaitable[None]]) -> None:
        if (before := self._tasks.get(f"{transfer_id} {role}")) is not None:
            await asyncio.wait({before})
        await work()

    def _follow(self, transfer_id: str, role: str, work: Callable[[], Awaitable[None]]) -> None:
        """One thing after the other for each end: the next begins when the one before has let go of its files."""
        key = f"{transfer_id} {role}"
        before = self._tasks.get(key)

        async def run() -> None:
            if before is not None:
                await asyncio.wait({before})
            try:
                await work()
            finally:
                if self._tasks.get(key) is asyncio.current_task():
                    del self._tasks[key]

        self._tasks[key] = asyncio.get_running_loop().create_task(run())

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        # Not to be cancelled half-way: whoever stops waits until the thread has let go.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments))


class _End:
    """One end of one transfer on one link."""

    def __init__(
        self,
        opened: TransferOpen,
        link: Link,
        files: Files,
        notes: Notes,
        in_thread: Callable[..., Any],
    ) -> None:
        self.transfer_id = opened.transfer_id
        self._opened = opened
        self._link = link
        self._files = files
        self._notes = notes
        self._in_thread = in_thread
        self._wake = asyncio.Event()
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    async def run(self) -> None:
        try:
            await self._work()
        except ToolError as error:
            again = isinstance(error, Mismatch)
            self._tell(TransferDone(self._opened.stream, ToolFailure.of(error), again))
        except (OSError, ProtocolError) as error:
            self._tell(TransferDone(self._opened.stream, ToolFailure.of(Failed(str(error)))))
        except Exception as error:
            log.exception("transfer %s failed", self.transfer_id)
            failure = Failed(f"{type(error).__name__}: {error}")
            self._tell(TransferDone(self._opened.stream, ToolFailure.of(failure)))

    async def _work(self) -> None:
        raise NotImplementedError

    def _tell(self, message: Message) -> None:
        if not self._stopped:
            self._link.send(encode(message))

    async def _woken(self) -> None:
        await self._wake.wait()
        self._wake.clear()


class _Sender(_End):
    _offset: int | None = None
    _written = 0
    _until = 0

    def credit(self, credit: TransferCredit) -> None:
        if self._offset is None:
            self._offset = credit.offset
        self._written = max(self._written, credit.offset)
        self._until = max(self._until, credit.until)
        self._wake.set()

    async def _work(self) -> None:
        kept = self._notes.path(self.transfer_id, "sent")
        parcel = await self._in_thread(Parcel, self._files, self._opened.path, self._opened.stream, kept)
        following: asyncio.Future[list[bytes | bytearray]] | None = None
        try:
            self._tell(TransferReady(self._opened.stream, offer=parcel.offer))
            while self._offset is None and not self._stopped:
                await self._woken()
            if self._stopped:
                return
            await self._in_thread(parcel.begin, self._offset)
            allowed = self._until, self._written
            following = asyncio.ensure_future(self._in_thread(parcel.read, *allowed))
            while not self._stopped:
                frames = await following
                if not frames and parcel.over:
                    return
                if not frames and allowed == (self._until, self._written):
                    await self._woken()
                # The disk reads ahead while the socket sends.
                allowed = self._until, self._written
                following = asyncio.ensure_future(self._in_thread(parcel.read, *allowed))
                for frame in frames:
                    await self._link.writable()
                    if self._stopped:
                        return
                    self._link.send_frame(frame)
                    await asyncio.sleep(0)  # let others have their turn
                    if isinstance(frame, bytearray):
                        parcel.give_back(frame)
        finally:
            if following is not None:
                await asyncio.wait({following})
                if not following.cancelled():
                    following.exception()
            await self._in_thread(parcel.close)


class _Receiver(_End):
    _failure: ToolError | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._frames: list[memoryview] = []
        self._spare: list[memoryview] = []
        self._allowed = 0
        self._allowed_at = 0.0
        self._size = 0

    def frame(self, frame: memoryview) -> None:
        """Copied, into memory that serves again: fresh memory would cost more than the copy."""
        self._size += len(frame)
        if len(frame) == FULL_FRAME:
            copy = self._spare.pop() if self._spare else _aligned_frame()
            copy[:] = frame
        else:
            copy = memoryview(bytearray(frame))
        self._frames.append(copy)
        if self._size > MAX_WAITING_BYTES or len(self._frames) > MAX_WAITING_FRAMES:
            self._frames.clear()
            self._failure = Failed("the sender sent more than it was allowed to")
        self._wake.set()

    async def _work(self) -> None:
        if self._opened.offer is None:
            raise Failed("a receiver must be told what the sender has")
        stream = self._opened.stream
        arrival = await self._in_thread(
            Arrival, self._files, self._notes, self.transfer_id, self._opened.path, self._opened.offer
        )
        try:
            self._tell(TransferReady(stream, offset=arrival.offset, complete=arrival.complete))
            if not arrival.complete:
                self._allow(arrival.offset)
            while not arrival.complete:
                await self._woken()
                if self._failure is not None:
                    raise self._failure
                if self._stopped:
                    return
                frames, self._frames, self._size = self._frames, [], 0
                await self._in_thread(arrival.feed, frames)
                self._spare += [each for each in frames if len(each) == FULL_FRAME]
                self._allow(arrival.offset)
            self._tell(TransferDone(stream))
        finally:
            await self._in_thread(arrival.close)

    def _allow(self, offset: int) -> None:
        """Tell the sender how far it may go, now and then: it has a whole window to send meanwhile."""
        now = time.monotonic()
        if offset - self._allowed >= CREDIT_BYTES or now - self._allowed_at >= CREDIT_SECONDS:
            self._allowed, self._allowed_at = offset, now
            self._tell(TransferCredit(self._opened.stream, offset, offset + TRANSFER_WINDOW_BYTES))


def _aligned_frame() -> memoryview:
    """Memory for a whole frame whose payload can go to the disk past the page cache."""
    return memoryview(mmap.mmap(-1, BLOCK + TRANSFER_FRAME_BYTES))[BLOCK - HEADER_BYTES :]


def _step_back() -> None:
    """Let the threads that move bytes wait for those that answer calls, where the system can tell threads apart.

    Not to the utmost: one that is kept waiting with Python's lock in its hands keeps the answers waiting too.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BULK_NICENESS)
