"""The ends of transfers: each sends or receives on the node socket, or on a connection of its own."""

from __future__ import annotations

import asyncio
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from farhand.machine.files.direct_writes import BLOCK
from farhand.machine.files.files import Files
from farhand.node.transfers.receiver import IncomingFiles
from farhand.node.transfers.resume_notes import Notes
from farhand.node.transfers.sender import OutgoingFiles
from farhand.node.transfers.socket import FilesSocket
from farhand.protocol.calls import ToolFailure
from farhand.protocol.errors import Failed, ProtocolError, ToolError
from farhand.protocol.frames import HEADER_BYTES
from farhand.protocol.messages import Message, TransferCredit, TransferDone, TransferOpen, TransferReady, encode
from farhand.protocol.transfer import CreditPacer, DigestMismatch, SendWindow
from farhand.protocol.version import LONG_TRANSFER_BYTES, MIB, TRANSFER_FRAME_BYTES, TRANSFER_WINDOW_BYTES
from farhand.sdk.connection import GatewayLink

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_WAITING_BYTES = TRANSFER_WINDOW_BYTES + MIB
MAX_WAITING_FRAMES = 100_000
FULL_FRAME = HEADER_BYTES + TRANSFER_FRAME_BYTES


class TransferEnd:
    """One end of one transfer on one link."""

    def __init__(
        self,
        opened: TransferOpen,
        link: GatewayLink,
        files: Files,
        notes: Notes,
        in_thread: Callable[..., Any],
        carriers: ThreadPoolExecutor,
    ) -> None:
        self.transfer_id = opened.transfer_id
        self._opened = opened
        self._link = link
        self._files = files
        self._notes = notes
        self._in_thread = in_thread
        self._carriers = carriers
        self._socket: FilesSocket | None = None
        self._using: asyncio.Future[Any] | None = None
        self._wake = asyncio.Event()
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._socket is not None:
            self._socket.shut_down()

    async def run(self) -> None:
        try:
            await self._work()
        except ToolError as error:
            again = isinstance(error, DigestMismatch)
            self._send_message(TransferDone(self._opened.stream, ToolFailure.of(error), again))
        except (OSError, ProtocolError) as error:
            self._send_message(TransferDone(self._opened.stream, ToolFailure.of(Failed(str(error)))))
        except Exception as error:
            log.exception("transfer %s failed", self.transfer_id)
            failure = Failed(f"{type(error).__name__}: {error}")
            self._send_message(TransferDone(self._opened.stream, ToolFailure.of(failure)))
        finally:
            if self._socket is not None:
                await self._close_socket(self._socket)

    async def _work(self) -> None:
        raise NotImplementedError

    async def _connect(self, size: int) -> None:
        """Open a connection for a long transfer; without one, its bytes use the node socket."""
        ticket = self._opened.ticket
        if ticket is None or size < LONG_TRANSFER_BYTES or self._stopped:
            return
        try:
            self._socket = await self._in_thread(FilesSocket.dial, self._link.url, ticket)
        except OSError as error:
            log.warning(
                "transfer %s uses the node socket, since it has no connection of its own: %s", self.transfer_id, error
            )
        if self._socket is not None and self._stopped:
            self._socket.shut_down()

    def _use(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Use the connection in a thread of its own."""
        self._using = asyncio.get_running_loop().run_in_executor(self._carriers, work, *arguments)
        return self._using

    async def _close_socket(self, files: FilesSocket) -> None:
        """Close the connection after the gateway has ended the transfer; earlier, it would count as an interruption."""
        while not self._stopped:
            await self._wait_for_event()
        files.shut_down()
        if self._using is not None:
            await asyncio.wait({self._using})
            if not self._using.cancelled():
                self._using.exception()
        files.close()

    def _send_message(self, message: Message) -> None:
        if not self._stopped:
            self._link.send(encode(message))

    async def _wait_for_event(self) -> None:
        await self._wake.wait()
        self._wake.clear()


class Sender(TransferEnd):
    """Sends a file or folder as fast as the receiver grants credit."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._window = SendWindow()
        self._allowed = threading.Event()

    def credit(self, credit: TransferCredit) -> None:
        """Handle a credit of the receiver."""
        self._window.credit(credit.offset, credit.until)
        self._wake.set()
        self._allowed.set()

    def stop(self) -> None:
        super().stop()
        self._allowed.set()

    async def _work(self) -> None:
        kept = self._notes.path(self.transfer_id, "sent")
        outgoing = await self._in_thread(OutgoingFiles, self._files, self._opened.path, self._opened.stream, kept)
        try:
            await self._connect(outgoing.offer.size)
            self._send_message(TransferReady(self._opened.stream, offer=outgoing.offer))
            while self._window.begin is None and not self._stopped:
                await self._wait_for_event()
            if self._stopped:
                return
            await self._in_thread(outgoing.begin, self._window.begin)
            if self._socket is None or not await self._use(self._send_on_own_connection, outgoing, self._socket):
                await self._send(outgoing)
        finally:
            await self._in_thread(outgoing.close)

    def _send_on_own_connection(self, outgoing: OutgoingFiles, files: FilesSocket) -> bool:
        """Send everything on the connection; return False, and send nothing, if the gateway does not use it."""
        if not files.wanted():
            return False
        while not self._stopped and not outgoing.over:
            self._allowed.clear()
            frames = outgoing.read(self._window)
            for frame in frames:
                try:
                    files.send(frame)
                except OSError as error:  # the gateway notices it too, and decides how to continue
                    log.debug("transfer %s: %s", self.transfer_id, error)
                    return True
                if isinstance(frame, bytearray):
                    outgoing.reuse(frame)
            if not frames and not self._stopped:  # set before the event, so it cannot be missed
                self._allowed.wait()
        return True

    async def _send(self, outgoing: OutgoingFiles) -> None:
        """Send everything on the node socket."""
        self._wake.clear()
        following = asyncio.ensure_future(self._in_thread(outgoing.read, self._window))
        try:
            while not self._stopped:
                frames = await following
                if not frames and outgoing.over:
                    return
                if not frames:
                    await self._wait_for_event()  # set by every credit that came since the last read began
                # Read ahead from disk while the socket sends.
                self._wake.clear()
                following = asyncio.ensure_future(self._in_thread(outgoing.read, self._window))
                for frame in frames:
                    await self._link.writable()
                    if self._stopped:
                        return
                    self._link.send_frame(frame)
                    await asyncio.sleep(0)  # let other tasks run
                    if isinstance(frame, bytearray):
                        outgoing.reuse(frame)
        finally:
            await asyncio.wait({following})
            if not following.cancelled():
                following.exception()


class Receiver(TransferEnd):
    _failure: ToolError | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._loop = asyncio.get_running_loop()
        self._frames: deque[memoryview] = deque()
        self._drained = threading.Event()
        # Bytes added and removed: each counter is changed by one thread only.
        self._came = self._taken = 0
        self._spare: list[memoryview] = []
        self._pacer = CreditPacer()
        # Whether the loop waits for frames. Set before it checks for them; frames are added before this is checked.
        self._waits = False

    def frame(self, frame: memoryview) -> None:
        """Copy a frame into reused memory: allocating memory would cost more than the copy."""
        copy = self._room(len(frame))
        copy[:] = frame
        if self._full:
            self._fail(Failed("the sender sent more than it was allowed to"))
        else:
            self._add(copy)
        self._wake.set()

    def _room(self, size: int) -> memoryview:
        if size != FULL_FRAME:
            return memoryview(bytearray(size))
        return self._spare.pop() if self._spare else _aligned_frame()

    @property
    def _full(self) -> bool:
        return self._came - self._taken > MAX_WAITING_BYTES or len(self._frames) > MAX_WAITING_FRAMES

    def _add(self, frame: memoryview) -> None:
        self._came += len(frame)
        self._frames.append(frame)

    def _take(self) -> list[memoryview]:
        frames = [self._frames.popleft() for _ in range(len(self._frames))]
        self._taken += sum(map(len, frames))
        self._drained.set()
        return frames

    def stop(self) -> None:
        super().stop()
        self._drained.set()

    def _fail(self, failure: ToolError) -> None:
        self._failure = failure
        self._wake.set()

    def _receive_on_own_connection(self, files: FilesSocket) -> None:
        """Receive frames on the connection. If it ends early, the gateway decides how to continue."""
        try:
            while (size := files.next_size()) is not None:
                frame = self._room(size)
                if not files.receive(frame):
                    break
                self._add(frame)
                if self._waits:  # otherwise it checks anyway
                    self._loop.call_soon_threadsafe(self._wake.set)
                self._drained.clear()
                if self._full and not self._stopped:
                    self._drained.wait()
        except OSError as error:
            log.debug("transfer %s: %s", self.transfer_id, error)
        except ProtocolError as error:
            self._loop.call_soon_threadsafe(self._fail, Failed(str(error)))
        finally:
            files.shut_down()  # so that the gateway notices the end

    async def _work(self) -> None:
        if self._opened.offer is None:
            raise Failed("the gateway opened a transfer to this node without saying what is sent")
        stream = self._opened.stream
        incoming = await self._in_thread(
            IncomingFiles, self._files, self._notes, self.transfer_id, self._opened.path, self._opened.offer
        )
        try:
            if not incoming.complete:
                await self._connect(self._opened.offer.size)
            self._send_message(TransferReady(stream, offset=incoming.offset, complete=incoming.complete))
            if self._socket is not None:
                self._use(self._receive_on_own_connection, self._socket)
            if not incoming.complete:
                self._allow(incoming.offset)
            while not incoming.complete:
                self._waits = True
                if not self._frames:
                    await self._wait_for_event()
                self._waits = False
                if self._failure is not None:
                    raise self._failure
                if self._stopped:
                    return
                if not (frames := self._take()):
                    continue
                await self._in_thread(incoming.feed, frames)
                self._spare += [each for each in frames if len(each) == FULL_FRAME]
                self._allow(incoming.offset)
            self._send_message(TransferDone(stream))
        finally:
            await self._in_thread(incoming.close)

    def _allow(self, offset: int) -> None:
        """Grant credit, if it is due."""
        if self._pacer.due(offset, time.monotonic()):
            self._send_message(TransferCredit(self._opened.stream, offset, offset + TRANSFER_WINDOW_BYTES))


def _aligned_frame() -> memoryview:
    """Return memory for a whole frame, aligned so that its payload can be written past the page cache."""
    return memoryview(mmap.mmap(-1, BLOCK + TRANSFER_FRAME_BYTES))[BLOCK - HEADER_BYTES :]
