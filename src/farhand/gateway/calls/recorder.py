"""How calls get into the record: promised before they leave, told of before they are answered, in the tables soon."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

import apsw
import msgspec

from farhand.gateway.calls.open_call import OpenCall, ended, unknown
from farhand.gateway.nodes.registry import Connection
from farhand.protocol.messages import ToolAck, ToolResponse, encode
from farhand.store.sqlite.database import Database
from farhand.store.tables import calls
from farhand.store.tables import idempotency as keys
from farhand.store.tables.calls import CallRecord, CallState, intent_of
from farhand.store.tables.waiting_calls import finish_parked

if TYPE_CHECKING:
    from farhand.gateway.calls.gate import Gate

log = logging.getLogger(__name__)

ACK_SECONDS = 0.05
MOST_ACKS = 256
WRITE_AGAIN_SECONDS = 5.0
MOST_LATE = 65_536


class End(msgspec.Struct, gc=False):
    """The end of a call, on its way into the record."""

    opened: OpenCall
    record: CallRecord
    # Of the node that keeps the result until it is acknowledged.
    connection: Connection | None


class RecordKeeper:
    """The gate's hand in the store (`store.ahead.Keeper`): its items are the calls it promised, and ends."""

    def __init__(self, gate: Gate, database: Database) -> None:
        self._gate = gate
        self._database = database
        self._acks: dict[Connection, list[str]] = {}
        # Which node told late of which call. Once is enough, however often it says it.
        self._late: dict[tuple[str, str], None] = {}

    def promise(self, opened: OpenCall) -> None:
        """Have a call on disk, and tell the gate. The tables follow later; a call that is over by then goes into them
        whole, with its end."""
        self._database.ahead.promise(intent_of(opened.record), opened, at_once=self._gate.quiet)

    def end(self, opened: OpenCall, record: CallRecord, connection: Connection | None) -> None:
        """Write the end down; then tell whoever waits, and let the node forget the call."""
        # A result that its node still holds cannot be lost here: it is acknowledged, and so forgotten there, only after
        # a sync, and until then it comes again. So whoever waits is told as soon as the system has the end, as for a
        # read-only call, which a killed gateway does not forget either. Any other end is on disk before anyone is told.
        end = End(opened, record, connection)
        if opened.read_only or (connection is not None and connection.resume is not None):
            opened.record = record
            if self._database.ahead.tell(intent_of(record), end):
                opened.tell(record)
        else:
            self._write(end)

    def _write(self, end: End) -> None:
        ends: list[OpenCall | End] = [end]
        self._database.write_then(lambda store: self.write(store, ends), lambda _, error: self.kept(ends, error))

    # -- what the store asks for ------------------------------------------------------------------------

    def promised(self, items: list[OpenCall], error: Exception | None) -> None:
        for opened in items:
            try:
                self._gate.promised(opened, error)
            except Exception:
                log.exception("call %s could not be sent on its way", opened.record.id)

    def write(self, store: apsw.Connection, items: list[OpenCall | End]) -> None:
        new: list[tuple[CallRecord, bool]] = []
        for item in items:
            if isinstance(item, End):
                opened = item.opened
                if opened.parked is not None:
                    finish_parked(store, item.record)
                elif opened.written:
                    calls.finish(store, item.record)
                else:
                    new.append((item.record, not opened.read_only))
                if opened.unrun and (key := item.record.idempotency_key) is not None:
                    keys.release(store, item.record.credential, key, item.record.id)
            elif not item.over:
                new.append((item.record, False))
                item.written = True
        if new:
            calls.begin_all(store, new)

    def kept(self, items: list[OpenCall | End], error: Exception | None) -> None:
        for item in items:
            if isinstance(item, End):
                try:
                    self._ended(item, error)
                except Exception:
                    log.exception("what follows the end of call %s failed", item.record.id)
            elif error is not None:
                item.written = False

    def _ended(self, end: End, error: Exception | None) -> None:
        record = told = end.record
        if error is None:
            end.opened.record = record
            self._gate.close_call(record.id)
            if end.connection is not None:
                self.acknowledge(end.connection, record.id)
        else:
            log.error("the end of call %s could not be written down, trying again: %s", record.id, error)
            lost = unknown(f"the call ended, but its end could not be written down: {error}")
            told = ended(record, CallState.UNKNOWN, lost, record.ended_at or 0, record.duration_ms or 0.0)
            if not self._gate.closing:
                self._database.loop.call_later(WRITE_AGAIN_SECONDS, partial(self._write, end))
        end.opened.tell(told)

    def late(self, connection: Connection, response: ToolResponse, now: int) -> None:
        """A node answers a call that is over; it may forget it then. Where the record does not know how the call went,
        the journal gets to know it."""

        if connection.link.congested:
            return  # it does not read what it is told already; when it comes back it says this again
        call_id = response.request_id
        word = connection.node_id, call_id
        if word in self._late:
            self.acknowledge(connection, call_id)
            return
        self._late[word] = None
        if len(self._late) > MOST_LATE:
            del self._late[next(iter(self._late))]

        def written(_: object, error: Exception | None) -> None:
            if error is None:
                self.acknowledge(connection, call_id)
            else:
                self._late.pop(word, None)

        self._database.write_then(
            lambda store: calls.tell_late(store, connection.node_id, response, now), written, durable=False
        )

    # -- acknowledging ----------------------------------------------------------------------------------

    def acknowledge(self, connection: Connection, call_id: str) -> None:
        """Let a node forget a call, once the tables have it on disk."""
        # Gathered for a moment: the node only keeps the result that much longer, and one frame serves many calls.
        if connection.resume is None:
            return
        waiting = self._acks.get(connection)
        if waiting is not None:
            waiting.append(call_id)
            if len(waiting) == MOST_ACKS:
                self._send_acks(connection)
            return
        self._acks[connection] = [call_id]
        self._database.loop.call_later(ACK_SECONDS, self._send_acks, connection)

    def _send_acks(self, connection: Connection) -> None:
        call_ids = self._acks.pop(connection, None)
        if call_ids is None:
            return  # sent already, there were many

        def synced(future: asyncio.Future[None]) -> None:
            if connection.current and not future.cancelled() and future.exception() is None:
                connection.link.send(encode(ToolAck(call_ids)))

        if connection.current:
            self._database.flush().add_done_callback(synced)
