"""The transfers of this node: sends and receives what the gateway opens, as fast as the other end allows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from farhand.machine.files.files import Files
from farhand.machine.priority import lower_thread_priority
from farhand.node.limits import ToolLimits
from farhand.node.transfers.resume_notes import Notes, Phase
from farhand.protocol.calls import ToolFailure
from farhand.protocol.errors import NotAllowed, ProtocolError, ToolError
from farhand.protocol.frames import read_header
from farhand.protocol.freeze import FreezeState
from farhand.protocol.messages import (
    FEATURE_FILES,
    FEATURE_TRANSFER,
    Message,
    TransferCredit,
    TransferDone,
    TransferOpen,
    TransferStop,
    encode,
)
from farhand.sdk.connection import GatewayLink

if TYPE_CHECKING:
    from farhand.node.transfers.endpoint import Receiver, Sender

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_ENDS = 32
THREADS = 8


class TransferQuestion(msgspec.Struct):
    transfer_id: str


class NodeTransfers:
    """Every end of a transfer that is on this node. Its owner calls `close`."""

    features: tuple[str, ...] = (FEATURE_TRANSFER,)
    also: tuple[str, ...] = (FEATURE_FILES,)

    def __init__(
        self, files: Files, folder: Path, freeze_state: FreezeState | None = None, limits: ToolLimits | None = None
    ) -> None:
        """`folder` holds the notes with which a transfer resumes after this program was killed."""
        self._files = files
        self._limits = limits or ToolLimits()
        self._freeze_state = freeze_state or FreezeState()
        self._notes = Notes(folder)
        self._link: GatewayLink | None = None
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "farhand-transfer", initializer=lower_thread_priority)
        self._carriers = ThreadPoolExecutor(MAX_ENDS, "farhand-files", initializer=lower_thread_priority)

    async def close(self) -> None:
        self.detach()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=5)
        for threads in (self._threads, self._carriers):
            threads.shutdown(wait=False, cancel_futures=True)

    # -- the link ---------------------------------------------------------------------------------------

    def attach(self, link: GatewayLink) -> None:
        self._link = link

    def detach(self) -> None:
        """Stop every end: the connection is lost, and the gateway opens them again."""
        self._link = None
        self.stop_all()

    def stop_all(self) -> None:
        """Send and write nothing more of any transfer."""
        for end in (*self._senders.values(), *self._receivers.values()):
            end.stop()
        self._senders.clear()
        self._receivers.clear()

    async def held(self, params: msgspec.Raw) -> dict[str, Any]:
        """Return the transfers for which this node holds data; for a given one, whether its files are in place."""
        asked = msgspec.json.decode(params, type=TransferQuestion | None)
        if asked is None:
            return {"held": await self._in_thread(self._notes.held)}
        if (stopping := self._tasks.get(f"{asked.transfer_id} receive")) is not None:
            await asyncio.wait({stopping})
        note = await self._in_thread(self._notes.read, asked.transfer_id)
        return {"placed": note is not None and note.phase is Phase.DONE}

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
        if self._freeze_state.order is not None:
            refused = ToolFailure.of(self._freeze_state.order.node_refusal())
            link.send(encode(TransferDone(wanted.stream, refused)))
            return
        # A transfer that resumes is opened again, so the limits are checked each time.
        tool, action = ("Read", "sending a file") if wanted.role == "send" else ("Write", "receiving a file")
        try:
            self._limits.require(tool, action)
        except NotAllowed as refusal:
            link.send(encode(TransferDone(wanted.stream, ToolFailure.of(refusal))))
            return
        if len(self._senders) + len(self._receivers) >= MAX_ENDS:
            busy = ToolFailure("failed", f"busy: {MAX_ENDS} transfers are open on this node; try again later")
            link.send(encode(TransferDone(wanted.stream, busy)))
            return
        from farhand.node.transfers.endpoint import Receiver, Sender  # noqa: PLC0415 - memory of an idle node

        settings = (wanted, link, self._files, self._notes, self._in_thread, self._carriers)
        if wanted.role == "send":
            self._senders[wanted.stream] = sender = Sender(*settings)
            self._follow(wanted.transfer_id, "send", sender.run)
        else:
            self._receivers[wanted.stream] = receiver = Receiver(*settings)
            self._follow(wanted.transfer_id, "receive", receiver.run)

    def _stop(self, stop: TransferStop) -> None:
        for ends in (self._senders, self._receivers):
            for stream, end in list(ends.items()):
                if end.transfer_id == stop.transfer_id:
                    end.stop()
                    del ends[stream]
        if not stop.keep:

            async def forget() -> None:
                from farhand.node.transfers.receiver import discard  # noqa: PLC0415 - memory of an idle node

                try:
                    await self._in_thread(discard, self._files, self._notes, stop.transfer_id)
                except (ToolError, OSError) as error:
                    log.warning("failed to remove the files of transfer %s: %s", stop.transfer_id, error)

            self._follow(stop.transfer_id, "send", lambda: self._after(stop.transfer_id, "receive", forget))

    async def _after(self, transfer_id: str, role: str, work: Callable[[], Awaitable[None]]) -> None:
        if (before := self._tasks.get(f"{transfer_id} {role}")) is not None:
            await asyncio.wait({before})
        await work()

    def _follow(self, transfer_id: str, role: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run the work of each end in order: the next begins when the previous one has closed its files."""
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
        # Not cancelled halfway: a caller that stops waits for the thread.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments))
