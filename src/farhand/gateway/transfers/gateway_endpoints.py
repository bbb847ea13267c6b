"""Transfer endpoints inside the gateway: they handle the same messages as a node, without a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from blake3 import blake3

from farhand.gateway.transfers.relay import Stream
from farhand.protocol.errors import Failed, ProtocolError, ToolError
from farhand.protocol.frames import (
    HEADER_BYTES,
    BinaryFrame,
    FrameKind,
    encode_frame,
    part_end,
    read_header,
    read_part_end,
)
from farhand.protocol.manifest import EntryKind, Manifest, ManifestEntry
from farhand.protocol.messages import (
    Message,
    TransferCredit,
    TransferDone,
    TransferOffer,
    TransferOpen,
    TransferReady,
    TransferStop,
)
from farhand.protocol.transfer import ReceivePosition, SendWindow
from farhand.protocol.version import TRANSFER_WINDOW_BYTES

log = logging.getLogger(__name__)


class _OwnEnd:
    # Whether everything has arrived and is in place.
    complete = False

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    def attach(self, stream: Stream) -> None:
        self._stream = stream

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    @property
    def stream(self) -> Stream:
        assert self._stream is not None, "the end is not attached"
        return self._stream

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        before = self._task

        async def run() -> None:
            stream = self.stream
            if before is not None:
                before.cancel()
                await asyncio.wait({before})
            try:
                await work
            except ToolError as error:
                stream.fail(error)
            except ProtocolError as error:
                stream.fail(Failed(str(error)))
            except Exception as error:
                log.exception("a transfer endpoint failed")
                stream.fail(Failed(f"{type(error).__name__}: {error}"))

        self._task = asyncio.get_running_loop().create_task(run())

    async def _woken(self) -> None:
        await self._wake.wait()
        self._wake.clear()


class OwnSender(_OwnEnd):
    """Sends what `describe` and `content` return."""

    # Whether the content is private to its owner and must be stored so.
    private = False

    def __init__(self) -> None:
        super().__init__()
        self._window = SendWindow()

    async def describe(self) -> tuple[str, list[ManifestEntry], str | None]:
        """Return the name, the entries and the MIME type. Raises ToolError."""
        raise NotImplementedError

    def content(self, entry: ManifestEntry, offset: int) -> AsyncIterator[bytes]:
        """Yield the bytes of a file from `offset` on. Raises ToolError."""
        raise NotImplementedError

    def tell(self, message: Message) -> None:
        match message:
            case TransferOpen():
                self._window = SendWindow()
                self._start(self._send(message.stream))
            case TransferCredit():
                self._window.credit(message.offset, message.until)
                self._wake.set()
            case TransferStop():
                if self._task is not None:
                    self._task.cancel()

    def pass_on(self, _frame: bytes | memoryview) -> None:
        raise AssertionError("a sender is sent no bytes")

    async def _send(self, number: int) -> None:
        name, entries, mime = await self.describe()
        manifest = Manifest(entries)
        offer = TransferOffer(
            name=name,
            folder=not manifest.single,
            files=manifest.files,
            size=manifest.size,
            manifest_bytes=len(manifest.encoded),
            manifest_digest=blake3(manifest.encoded).hexdigest(),
            mime=mime,
            private=self.private,
        )
        self.stream.heard("send", TransferReady(number, offer=offer))
        while (begin := self._window.begin) is None:
            await self._woken()
        start = 0
        for part, end in enumerate(manifest.ends):
            if end >= begin:
                await self._send_part(number, manifest, part, start, begin)
            start = end

    async def _send_part(self, number: int, manifest: Manifest, part: int, start: int, begin: int) -> None:
        digest = blake3()
        offset = start
        async for piece in self._pieces(manifest, part):
            digest.update(piece)
            view = memoryview(piece)
            while view:
                if offset < begin:  # the receiver has these bytes; they only count for the digest
                    size = min(len(view), begin - offset)
                else:
                    while not (size := self._window.frame_bytes(offset, start, len(view))):
                        await self._woken()
                    frame = encode_frame(BinaryFrame(FrameKind.DATA, number, offset, bytes(view[:size])))
                    self.stream.relay(FrameKind.DATA, offset, frame)
                view = view[size:]
                offset += size
                await asyncio.sleep(0)
        if offset != manifest.ends[part]:
            raise Failed(
                f"the source has {offset - start} bytes, and not {manifest.ends[part] - start} as it had before"
            )
        self.stream.relay(FrameKind.END, offset, part_end(number, offset, part, digest.digest()))

    async def _pieces(self, manifest: Manifest, part: int) -> AsyncIterator[bytes]:
        if part == 0:
            yield manifest.encoded
        elif (entry := manifest.entries[part - 1]).kind is EntryKind.FILE:
            async for piece in self.content(entry, 0):
                yield piece


class OwnReceiver(_OwnEnd):
    """Receives parts, verifies their digests, and resumes when the sender reconnects."""

    def __init__(self) -> None:
        super().__init__()
        self._frames: list[bytes] = []
        self._offer: TransferOffer | None = None
        self._arriving = bytearray()
        self._manifest: Manifest | None = None
        self._position = ReceivePosition(0)
        # Work that must not be interrupted.
        self._keeping: asyncio.Future[None] | None = None

    async def accept(self, offer: TransferOffer) -> None:
        """Check whether the offer can be accepted. Raises ToolError."""
        raise NotImplementedError

    async def begin_entry(self, entry: ManifestEntry) -> None:
        """Start an entry; the next bytes belong to it."""
        raise NotImplementedError

    async def take(self, data: bytes) -> None:
        """Add bytes to the entry; return once they need no more memory."""
        raise NotImplementedError

    async def finish(self) -> None:
        """Put everything in place, after all digests matched."""
        raise NotImplementedError

    async def discard(self) -> None:
        """Discard what has arrived."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Release `take` and `finish`, which must not wait for a reader that has left."""

    def tell(self, message: Message) -> None:
        match message:
            case TransferOpen(offer=TransferOffer() as offer):
                self._frames = []
                self._start(self._receive(message.stream, offer))
            case TransferStop():
                if self._task is not None:
                    self._task.cancel()

    def pass_on(self, frame: bytes | memoryview) -> None:
        self._frames.append(bytes(frame))
        self._wake.set()

    async def close(self) -> None:
        """Close the endpoint. Afterwards it is `complete`, or nothing of it is left."""
        if not self.complete:
            self.let_go()
        await super().close()
        await self._kept()
        if not self.complete:
            await self.discard()

    async def _whole(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that must not be interrupted: storing bytes with their offset, or putting them in place."""
        self._keeping = asyncio.ensure_future(work)
        await asyncio.shield(self._keeping)

    async def _kept(self) -> None:
        if self._keeping is not None:
            await asyncio.wait({self._keeping})
            if not self._keeping.cancelled():
                self._keeping.exception()

    async def _receive(self, number: int, offer: TransferOffer) -> None:
        await self._kept()
        if self._offer is None or self._offer.manifest_digest != offer.manifest_digest:
            if self._offer is not None:
                await self.discard()
            await self.accept(offer)
            self._offer, self._manifest = offer, None
            self._position = ReceivePosition(offer.manifest_bytes)
            self._arriving.clear()
        stream = self.stream
        stream.heard("receive", TransferReady(number, offset=self._position.offset, complete=self.complete))
        self._allow(stream, number)
        while not self.complete:
            await self._woken()
            frames, self._frames = self._frames, []
            for frame in frames:
                await self._feed(frame)
            self._allow(stream, number)
        stream.heard("receive", TransferDone(number))

    def _allow(self, stream: Stream, number: int) -> None:
        offset = self._position.offset
        stream.heard("receive", TransferCredit(number, offset, offset + TRANSFER_WINDOW_BYTES))

    async def _feed(self, frame: bytes) -> None:
        kind, _, offset = read_header(frame)
        if kind is FrameKind.DATA:
            data = frame[HEADER_BYTES:]
            self._position.check(offset, len(data))
            await self._whole(self._keep(data))
        elif self._position.end_part(*read_part_end(frame[HEADER_BYTES:])):
            await self._whole(self._next_part())

    async def _keep(self, data: bytes) -> None:
        if self._position.part == 0:
            self._arriving += data
        else:
            await self.take(data)
        self._position.digest.update(data)
        self._position.advance(self._position.offset, len(data))

    async def _next_part(self) -> None:
        part = self._position.part
        if part == 0:
            self._manifest = await asyncio.to_thread(Manifest.decode, bytes(self._arriving))
            self._arriving.clear()
            assert self._offer is not None
            if (self._manifest.single, self._manifest.files) != (not self._offer.folder, self._offer.files):
                raise Failed("the list of files that arrived is not the one that was offered")
        manifest = self._manifest
        assert manifest is not None
        if part == len(manifest.entries):
            await self.finish()
            self.complete = True
            return
        entry = manifest.entries[part]
        self._position.begin_part(part + 1, entry.size)
        await self.begin_entry(entry)
