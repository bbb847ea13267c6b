"""The HTTP routes of transfers."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import apsw
import msgspec

from farhand.api.http import Problem, Reply, Request, json_reply
from farhand.api.router import Route
from farhand.gateway.credentials import Scope
from farhand.gateway.gate import MAX_IDEMPOTENCY_KEY, IdempotencyConflict, new_call_id
from farhand.gateway.hub import Hub
from farhand.gateway.native_transfer import transferred
from farhand.gateway.transfers import OpenTransfer
from farhand.protocol.errors import ErrorKind, ToolError
from farhand.store import calls
from farhand.store.database import StoreError
from farhand.store.transfers import TransferRecord, TransferState

STATUS = {
    ErrorKind.INVALID_ARGS: 400,
    ErrorKind.NOT_ALLOWED: 403,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.CANCELLED: 409,
    ErrorKind.TIMEOUT: 504,
    ErrorKind.FAILED: 502,
}


class TransferRequest(msgspec.Struct):
    source: str
    destination: str
    agent_id: str | None = None
    background: bool = False


_decoder = msgspec.json.Decoder(TransferRequest)


def transfer_routes(hub: Hub) -> list[Route]:
    doors = TransferDoors(hub)
    return [
        Route("POST", "/v1/transfers", Scope.TOOLS_WRITE, doors.begin),
        Route("GET", "/v1/transfers", Scope.READ, doors.listing),
        Route("GET", "/v1/transfers/{transfer_id}", Scope.READ, doors.show),
        Route("DELETE", "/v1/transfers/{transfer_id}", Scope.TOOLS_WRITE, doors.cancel),
    ]


class TransferDoors:
    """One method for each route."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def begin(self, request: Request) -> Reply:
        wanted: TransferRequest = await request.json(_decoder)
        key = request.header(b"idempotency-key")
        if key is not None and not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY:
            raise Problem(400, "invalid_request", f"Idempotency-Key has 1 to {MAX_IDEMPOTENCY_KEY} characters")
        transfers = self._hub.transfers
        transfer_id = request.id = new_call_id()
        try:
            begun = await transfers.begin(
                transfer_id,
                wanted.source,
                wanted.destination,
                credential=request.credential.id,
                agent_id=wanted.agent_id,
                claim=None if key is None else self._claim(request, wanted, transfer_id, key),
            )
        except ToolError as error:
            raise problem(error) from None
        except IdempotencyConflict as error:
            raise Problem(409, "idempotency_conflict", str(error)) from None
        except StoreError as error:
            raise Problem(503, "not_recorded", f"the transfer was not begun: {error}") from None
        record = begun.record if isinstance(begun, OpenTransfer) else begun
        request.id = record.id
        if wanted.background:
            return json_reply(view(record), 202)
        record = await self._watched(request, begun, wanted=key is not None)
        try:
            transferred(record)
        except ToolError as error:
            raise problem(error) from None
        return json_reply(view(record))

    async def _watched(self, request: Request, begun: OpenTransfer | TransferRecord, *, wanted: bool) -> TransferRecord:
        """The end of a transfer. Should its client leave before, it is cancelled, unless it was promised a repeat."""
        transfers = self._hub.transfers
        waiting = asyncio.ensure_future(transfers.wait(begun))
        gone = asyncio.ensure_future(request.gone())
        stops = asyncio.ensure_future(self._hub.ending.wait())
        try:
            await asyncio.wait({waiting, gone, stops}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            if isinstance(begun, TransferRecord):
                return begun
            if gone.done() and not stops.done() and not wanted:
                return await transfers.cancel(begun.record.id, "the caller hung up") or begun.record
            return begun.record
        finally:
            for future in (waiting, gone, stops):
                future.cancel()

    def _claim(self, request: Request, wanted: TransferRequest, transfer_id: str, key: str) -> Any:
        body = hashlib.sha256(msgspec.json.encode(("transfer", wanted))).digest()
        now = self._hub.roster.clock()

        def claim(store: apsw.Connection) -> str:
            first, first_body = calls.claim(store, request.credential.id, key, body, transfer_id, now)
            if first_body != body:
                raise IdempotencyConflict(f"the idempotency key {key!r} was used for another request")
            return first

        return claim

    async def listing(self, request: Request) -> Reply:
        records = await self._hub.transfers.newest(request.query_int("limit", 50, 1, 1000))
        return json_reply({"transfers": [view(record) for record in records], "count": len(records)})

    async def show(self, request: Request) -> Reply:
        record = await self._hub.transfers.find(request.params["transfer_id"])
        if record is None:
            raise _unknown(request)
        return json_reply(view(record))

    async def cancel(self, request: Request) -> Reply:
        record = await self._hub.transfers.cancel(request.params["transfer_id"])
        if record is None:
            raise _unknown(request)
        return json_reply(view(record))


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


def problem(error: ToolError) -> Problem:
    return Problem(STATUS[error.kind], error.kind.value, error.message)


def _unknown(request: Request) -> Problem:
    return Problem(404, "not_found", f"there is no transfer {request.params['transfer_id'][:100]!r}")
