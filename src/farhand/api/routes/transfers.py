"""The HTTP routes of transfers."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from farhand.api.server.http import Problem, Reply, Request, existing, invalid, json_reply
from farhand.api.server.router import Query, route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.gate import Gate, IdempotencyConflict
from farhand.gateway.calls.open_call import new_call_id
from farhand.gateway.calls.pinning import TRANSFER
from farhand.gateway.transfers.gateway_endpoints import OwnReceiver, OwnSender
from farhand.gateway.transfers.relay import Role
from farhand.gateway.transfers.tool import transferred
from farhand.gateway.transfers.transfers import DOWNLOAD, UPLOAD, OpenTransfer, OwnEnd, Transfers
from farhand.protocol.errors import Cancelled, ErrorKind, Failed
from farhand.protocol.manifest import EntryKind, ManifestEntry
from farhand.protocol.messages import TransferOffer
from farhand.store.ports import Tx
from farhand.store.tables import idempotency as keys
from farhand.store.tables.transfers import TransferRecord, TransferState

T = TypeVar("T")

# A node's file opened in the browser must not act for the owner.
HARMLESS = (b"content-security-policy", b"sandbox; default-src 'none'")
HUNG_UP = "the caller disconnected"
# How long a download may wait for its reader: it holds one of the node's transfer slots meanwhile.
UNREAD_SECONDS = 60.0
# A transfer fails because of a node, or because of the data at its ends.
transfer_route = partial(
    route, errors=(404, 409, 502, 503, 504), statuses={ErrorKind.CANCELLED: 409, ErrorKind.FAILED: 502}
)


class TransferRequest(msgspec.Struct, forbid_unknown_fields=True):
    source: str
    destination: str
    agent_id: str | None = None
    background: bool = False


class UploadSender(OwnSender):
    """Sends the body of a request. It cannot be repeated: if the other end disconnects, the upload fails."""

    def __init__(self, name: str, entry: ManifestEntry, body: AsyncIterator[bytes], *, private: bool) -> None:
        super().__init__()
        self.private = private
        self._name = name
        self._entry = entry
        self._body = body
        self._read = False

    async def describe(self) -> tuple[str, list[ManifestEntry], str | None]:
        if self._read:
            raise Failed("the destination went away during the upload; begin again")
        return self._name, [self._entry], mimetypes.guess_type(self._name)[0]

    async def content(self, _entry: ManifestEntry, _offset: int) -> AsyncIterator[bytes]:
        self._read = True
        try:
            async for piece in self._body:
                yield piece
        except Problem as error:
            raise Cancelled(str(error)) from None


class DownloadReceiver(OwnReceiver):
    """Receives the answer to a request; a slow reader slows the sender down."""

    def __init__(self) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        self.offered: asyncio.Future[TransferOffer] = loop.create_future()
        self.entries: asyncio.Future[list[ManifestEntry]] = loop.create_future()
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue(2)
        self._unread = False

    async def accept(self, offer: TransferOffer) -> None:
        if self.offered.done():
            raise Failed("the source changed while it was downloaded; begin again")
        self.offered.set_result(offer)

    async def begin_entry(self, _entry: ManifestEntry) -> None:
        if not self.entries.done() and self._manifest is not None:
            self.entries.set_result(self._manifest.entries)

    async def take(self, data: bytes) -> None:
        await self._give(data)

    async def finish(self) -> None:
        if not self.entries.done() and self._manifest is not None:
            self.entries.set_result(self._manifest.entries)
        await self._give(None)

    async def _give(self, piece: bytes | None) -> None:
        try:
            async with asyncio.timeout(UNREAD_SECONDS):
                await self.pieces.put(piece)
        except TimeoutError:
            raise Cancelled(f"the client read nothing for {UNREAD_SECONDS:g} s") from None
        if self._unread:
            raise Cancelled("the client disconnected")

    def let_go(self) -> None:
        self._unread = True
        while not self.pieces.empty():  # release a writer that waits for room
            self.pieces.get_nowait()

    async def discard(self) -> None:
        self.entries.cancel()


class KeyClaim(msgspec.Struct, frozen=True):
    """An idempotency key and its request. Raises IdempotencyConflict if the key belongs to another request."""

    credential: str
    key: str
    body: bytes
    transfer_id: str
    now: int

    def look(self, store: Tx) -> str:
        return self._same(keys.claimed(store, self.credential, self.key, self.body, self.transfer_id, self.now))

    def take(self, store: Tx) -> str:
        return self._same(keys.claim(store, self.credential, self.key, self.body, self.transfer_id, self.now))

    def _same(self, held: tuple[str, bytes]) -> str:
        if held[1] != self.body:
            raise IdempotencyConflict(f"the idempotency key {self.key!r} was used for another request")
        return held[0]


ENTRIES_AT_ONCE = 1000
SOURCE = Query("source", "`node:path`, or `gsv:path`.", required=True)
DESTINATION = Query("destination", "`node:path`, or `gsv:path`.", required=True)


class TransferRoutes:
    def __init__(self, transfers: Transfers, gate: Gate, ending: asyncio.Event, clock: Callable[[], int]) -> None:
        """`ending` is set when the gateway stops."""
        self._transfers = transfers
        self._gate = gate
        # Tasks that wait for the clients of downloads to leave.
        self._watches: set[asyncio.Future[None]] = set()
        self._ending = ending
        self._clock = clock

    @transfer_route(
        "POST /v1/transfers",
        Scope.TOOLS_WRITE,
        "Copy a file or folder from one machine to another.",
        also={202: "Begun, in the background."},
        idempotent=True,
        acts=True,
    )
    async def begin(self, request: Request, wanted: TransferRequest) -> Reply:
        key = request.idempotency_key
        request.id = new_call_id()
        self._check_policy(request, wanted.source, wanted.destination, wanted.agent_id)
        begun = await self._transfers.begin(
            request.id,
            wanted.source,
            wanted.destination,
            credential=request.credential.id,
            agent_id=wanted.agent_id,
            claim=None if key is None else self._claim(request, wanted, key),
        )
        record = begun.record if isinstance(begun, OpenTransfer) else begun
        request.id = record.id
        if wanted.background:
            return json_reply(view(record), 202)
        record = await self._watched(request, begun, wanted=key is not None)
        transferred(record)
        return json_reply(view(record))

    async def _watched(self, request: Request, begun: OpenTransfer | TransferRecord, *, wanted: bool) -> TransferRecord:
        """Wait for the end of a transfer. If the client leaves before, cancel it, unless it has an idempotency key."""
        waiting = asyncio.ensure_future(self._transfers.wait(begun))
        gone = asyncio.ensure_future(request.gone())
        stops = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait({waiting, gone, stops}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            if isinstance(begun, TransferRecord):
                return begun
            if gone.done() and not stops.done() and not wanted:
                return await self._transfers.cancel(begun.record.id, HUNG_UP) or begun.record
            return begun.record
        finally:
            for future in (waiting, gone, stops):
                future.cancel()

    # -- uploads and downloads ----------------------------------------------------------------------------

    @transfer_route(
        "PUT /v1/transfers/content",
        Scope.TOOLS_WRITE,
        "Upload the body as a file to a machine.",
        takes="*/*",
        query=(
            DESTINATION,
            Query("name", "Name of the file if the destination is a folder."),
            Query("executable", "`1`: a new file is executable."),
            Query("private", "`1`: a new file is readable by its owner only."),
        ),
        errors=(404, 409, 411, 502, 503, 504),
        streams=True,
        acts=True,
    )
    async def upload(self, request: Request) -> dict[str, Any]:
        """Store the body as the file `destination`; `name` is its name if that is a folder."""
        size = request.header(b"content-length")
        if size is None or not size.isdecimal():
            raise Problem(411, "length_required", "Content-Length is required")
        entry = ManifestEntry("", EntryKind.FILE, int(size), executable=request.query("executable") == "1")
        private = request.query("private") == "1"
        name = request.query("name") or "upload"
        sender = UploadSender(name, entry, request.stream(), private=private)
        begun = await self._begin_own(
            request, UPLOAD, _needed(request, "destination"), {"send": sender}, judged_source=f"{UPLOAD}/{name}"
        )
        record = await self._transfers.wait(begun)
        transferred(record)
        return view(record)

    @transfer_route(
        "GET /v1/transfers/content",
        Scope.TOOLS_READ,
        "Download a file from a machine.",
        media=("*/*",),
        query=(SOURCE,),
        acts=True,
    )
    async def download(self, request: Request) -> Reply:
        """Send the file `source`. A truncated answer is not the whole file."""
        receiver = DownloadReceiver()
        begun = await self._begin_own(request, _needed(request, "source"), DOWNLOAD, {"receive": receiver})
        offer = await self._answered(begun, receiver.offered)
        if offer.folder:
            await self._transfers.cancel(begun.record.id, "a folder is not a file")
            raise Problem(400, "invalid_args", "this is a folder; /v1/transfers/manifest lists its files")
        if request.method == "HEAD":
            await self._transfers.cancel(begun.record.id, "only its size was wanted")
        else:
            self._cancel_when_gone(request, begun)
        kind = offer.mime or "application/octet-stream"
        return Reply(
            content_type=kind.encode() if kind.isascii() and kind.isprintable() else b"application/octet-stream",
            headers=[(b"content-length", b"%d" % offer.size), HARMLESS],
            pieces=self._pieces(begun, receiver),
            bare=True,
        )

    @transfer_route(
        "GET /v1/transfers/manifest",
        Scope.TOOLS_READ,
        "Describe a path on a machine: its name, and the files of a folder.",
        query=(SOURCE,),
        acts=True,
    )
    async def manifest(self, request: Request) -> Reply:
        """Describe `source`: its name, and the files, folders and links of a folder."""
        receiver = DownloadReceiver()
        begun = await self._begin_own(request, _needed(request, "source"), DOWNLOAD, {"receive": receiver})
        try:
            offer = await self._answered(begun, receiver.offered)
            entries = await self._answered(begun, receiver.entries)
        finally:
            await self._transfers.cancel(begun.record.id, "only its list was wanted")
        listed = {
            "name": offer.name,
            "folder": offer.folder,
            "size": offer.size,
            "files": offer.files,
            "executable": not offer.folder and any(each.executable for each in entries),
            "private": offer.private,
        }
        return Reply(pieces=_listing(listed, entries if offer.folder else []))

    def _cancel_when_gone(self, request: Request, begun: OpenTransfer) -> None:
        """Cancel a download when its client leaves, also before it has read anything."""

        async def cancel() -> None:
            await request.gone()
            await self._transfers.cancel(begun.record.id, HUNG_UP)

        watch = asyncio.ensure_future(cancel())
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        begun.ended.add_done_callback(lambda _: watch.cancel())

    def _check_policy(self, request: Request, source: str, destination: str, agent_id: str | None) -> None:
        ends = {"source": source, "destination": destination}
        self._gate.check_route(request.principal, TRANSFER, ends, agent_id)

    async def _begin_own(
        self,
        request: Request,
        source: str,
        destination: str,
        own: dict[Role, OwnEnd],
        *,
        judged_source: str | None = None,
    ) -> OpenTransfer:
        request.id = new_call_id()
        self._check_policy(request, judged_source or source, destination, request.query("agent"))
        begun = await self._transfers.begin(
            request.id, source, destination, credential=request.credential.id, agent_id=request.query("agent"), own=own
        )
        assert isinstance(begun, OpenTransfer), "the id is new"
        return begun

    async def _answered(self, begun: OpenTransfer, answer: asyncio.Future[T]) -> T:
        """Wait for the sender's answer. Raises Problem if the transfer ends before."""
        ended = asyncio.ensure_future(self._transfers.wait(begun))
        waits: set[asyncio.Future[Any]] = {ended, answer}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and not answer.cancelled():
            ended.cancel()
            return answer.result()
        transferred(await ended)
        raise Problem(502, "failed", "the transfer failed before the first byte")

    async def _pieces(self, begun: OpenTransfer, receiver: DownloadReceiver) -> AsyncIterator[bytes]:
        """Yield the bytes, the last of them only after their digest matched. Raises Problem if they break off."""
        ended = asyncio.ensure_future(self._transfers.wait(begun))
        held: bytes | None = None
        try:
            while True:
                following = asyncio.ensure_future(receiver.pieces.get())
                waits: set[asyncio.Future[Any]] = {following, ended}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    piece = following.result()
                elif receiver.pieces.empty():
                    following.cancel()
                    break
                else:
                    piece = await following
                if piece is None:
                    break
                if held is not None:
                    yield held
                held = piece
            if begun.cancelled == HUNG_UP:
                return
            transferred(await ended)
            if held is not None:
                yield held
        finally:
            ended.cancel()
            await self._transfers.cancel(begun.record.id, HUNG_UP)

    def _claim(self, request: Request, wanted: TransferRequest, key: str) -> KeyClaim:
        body = hashlib.sha256(msgspec.json.encode(("transfer", wanted))).digest()
        return KeyClaim(request.credential.id, key, body, request.id, self._clock())

    @route(
        "GET /v1/transfers",
        Scope.READ,
        "Transfers, newest first.",
        query=(Query("limit", "How many at most: 1 to 1000, 50 by default.", int),),
    )
    async def listing(self, request: Request) -> dict[str, Any]:
        records = await self._transfers.newest(request.query_int("limit", 50, 1, 1000))
        return {"transfers": [view(record) for record in records], "count": len(records)}

    @route("GET /v1/transfers/{transfer_id}", Scope.READ, "One transfer.")
    async def show(self, request: Request) -> dict[str, Any]:
        transfer_id = request.params["transfer_id"]
        return view(existing(await self._transfers.find(transfer_id), "transfer", transfer_id))

    @route("DELETE /v1/transfers/{transfer_id}", Scope.TOOLS_WRITE, "Cancel a transfer.")
    async def cancel(self, request: Request) -> dict[str, Any]:
        transfer_id = request.params["transfer_id"]
        record = existing(await self._transfers.cancel(transfer_id), "transfer", transfer_id)
        own = record.credential == request.credential.id or request.credential.may(Scope.READ)
        return view(record) if own else {"id": record.id, "state": record.state.value}


async def _listing(head: dict[str, Any], entries: list[ManifestEntry]) -> AsyncIterator[bytes]:
    """Yield the JSON of a manifest in small pieces: it may have 200,000 entries."""
    yield msgspec.json.encode(head)[:-1] + b',"entries":['
    for at in range(0, len(entries), ENTRIES_AT_ONCE):
        rows = [
            {
                "path": each.path,
                "kind": each.kind,
                "size": each.size,
                "executable": each.executable,
                "private": each.private,
            }
            for each in entries[at : at + ENTRIES_AT_ONCE]
        ]
        yield (b"," if at else b"") + msgspec.json.encode(rows)[1:-1]
        await asyncio.sleep(0)
    yield b"]}"


def view(record: TransferRecord) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": record.id,
        "state": record.state.value,
        "source": record.source,
        "destination": record.destination,
        "files": record.files,
        "bytes_total": record.bytes_total,
        "bytesTransferred": record.bytes_done,
        "created_at": record.created_at,
        "ended_at": record.ended_at,
    }
    if record.mime is not None:
        shown["mime"] = record.mime
    if record.state not in (TransferState.OK, TransferState.RUNNING):
        shown["error"] = {"kind": record.error_kind, "message": record.error_message}
    return shown


def _needed(request: Request, name: str) -> str:
    value = request.query(name)
    if not value:
        raise invalid(f"the query must name a {name}")
    return value
