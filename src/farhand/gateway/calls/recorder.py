"""Records calls: their start before they are sent, their end before anyone is notified.

Calls that arrive while a group is being written form the next group, which one operation writes with a few statements.
The more calls there are, the larger the groups.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

import msgspec

from farhand.gateway.calls.charging import used_by
from farhand.gateway.calls.open_call import OpenCall
from farhand.gateway.nodes.registry import Connection
from farhand.protocol.messages import ToolAck, ToolResponse, encode
from farhand.store.ports import EngineError, Store, Tx
from farhand.store.tables import calls
from farhand.store.tables import idempotency as keys
from farhand.store.tables.accounts import budgets
from farhand.store.tables.accounts.receipts import SignedAnswer, add_receipts
from farhand.store.tables.calls import CallRecord
from farhand.store.tables.fleet import begin_fenced
from farhand.store.tables.waiting_calls import finish_waiting

log = logging.getLogger(__name__)

# Acknowledgements to one node are gathered for this time.
ACK_SECONDS: Final = 0.05
MAX_ACKS: Final = 256
RETRY_SECONDS: Final = 5.0
# Late answers that are remembered, so that a node that repeats one does not fill the journal.
MAX_LATE: Final = 65_536


Recorded = Callable[[OpenCall, CallRecord, Connection | None, BaseException | None], None]


class _Begin(msgspec.Struct, frozen=True, gc=False):
    record: CallRecord
    future: asyncio.Future[None]
    # The connection it goes to.
    socket: str | None
    # Reserves what it uses of budgets.
    take: Callable[[Tx], object] | None


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of a call, as it is stored."""

    record: CallRecord
    # How the tables have the call: not at all, as running, or as waiting.
    stored_as: Literal["nothing", "running", "waiting"]
    # The call did not run, so its idempotency key may be used again.
    release_key: bool = False
    # Something is reserved for it in budgets.
    charged: bool = False
    # What its node signed.
    receipt: SignedAnswer | None = None


class _Ending(msgspec.Struct, frozen=True, gc=False):
    opened: OpenCall
    end: CallEnd
    # The node that keeps the result until it is acknowledged.
    connection: Connection | None
    # It has to be on disk before it is reported.
    durable: bool


class Recorder:
    """Writes the calls of a gate to the store. Its owner calls `close`."""

    def __init__(self, store: Store, recorded: Recorded) -> None:
        """`recorded` is called when the end of a call is stored or could not be: with the call, its record, the
        connection passed to `end` and the error."""
        self._store = store
        self._recorded = recorded
        # What is written next.
        self._begins: list[_Begin] = []
        self._ends: list[_Ending] = []
        self._scheduled = False
        # The number of operations that are being written.
        self._writing = 0
        # Looking it up takes a system call.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._acks: dict[Connection, list[str]] = {}
        # By node and call.
        self._late: dict[tuple[str, str], None] = {}

    def begin(
        self, record: CallRecord, socket: str | None = None, take: Callable[[Tx], object] | None = None
    ) -> asyncio.Future[None]:
        """Store a call that is about to be sent; the future is done once that is on disk. It raises StoreError.

        `socket`: the connection it goes to, where several gateways share the store; LinkMoved if it is not the
        node's present one. `take` reserves what the call uses of budgets; what it raises, the future raises.
        """
        self._loop = self._loop or asyncio.get_running_loop()
        future: asyncio.Future[None] = self._loop.create_future()
        self._begins.append(_Begin(record, future, socket, take))
        self._schedule()
        return future

    def end(self, opened: OpenCall, record: CallRecord, connection: Connection | None, release_key: bool) -> None:
        """Store the end of a call; when the store fails, try again later. `connection` is that of the node that
        answered, `release_key` frees the idempotency key of a call that did not run."""
        stored_as: Literal["nothing", "running", "waiting"]
        stored_as = "waiting" if opened.held else "nothing" if opened.read_only else "running"
        # The node sends the result again until it is acknowledged, which happens after a durable commit; a call that
        # changes nothing can be repeated. Any other end has to be on disk before it is reported.
        kept_by_node = connection is not None and connection.resume is not None
        end = CallEnd(record, stored_as, release_key, opened.charge is not None, opened.receipt)
        self._ends.append(_Ending(opened, end, connection, not opened.read_only and not kept_by_node))
        self._schedule()

    def late(self, connection: Connection, response: ToolResponse, now: int) -> None:
        """Add an answer to a call that has ended to the journal, if the record lacks it, and acknowledge it."""
        if connection.link.congested:
            return  # the node repeats it when it connects again
        call_id = response.request_id
        answer = connection.node_id, call_id
        if answer in self._late:
            self.acknowledge(connection, call_id)
            return
        self._late[answer] = None
        if len(self._late) > MAX_LATE:
            del self._late[next(iter(self._late))]

        def stored(future: asyncio.Future[None]) -> None:
            if not future.cancelled() and future.exception() is None:
                self.acknowledge(connection, call_id)
            else:
                self._late.pop(answer, None)

        operation = partial(calls.append_late_answer, node_id=connection.node_id, response=response, now=now)
        self._store.write(operation, durable=False).add_done_callback(stored)

    def acknowledge(self, connection: Connection, call_id: str) -> None:
        """Let a node forget a call, once its end is on disk."""
        if connection.resume is None:
            return
        waiting = self._acks.get(connection)
        if waiting is None:
            self._acks[connection] = [call_id]
            asyncio.get_running_loop().call_later(ACK_SECONDS, self._send_acks, connection)
            return
        waiting.append(call_id)
        if len(waiting) == MAX_ACKS:
            self._send_acks(connection)

    def close(self) -> None:
        """Stop retrying."""
        self._closed = True

    # -- writing ----------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._scheduled and not self._writing:
            self._scheduled = True
            self._loop = self._loop or asyncio.get_running_loop()
            self._loop.call_soon(self._write_gathered)

    def _write_gathered(self) -> None:
        self._scheduled = False
        if self._begins or self._ends:
            begins, self._begins = self._begins, []
            ends, self._ends = self._ends, []
            self._write(begins, ends)

    def _write(self, begins: list[_Begin], ends: list[_Ending]) -> None:
        self._writing += 1
        operation = partial(store_calls, begins=begins, ends=[ending.end for ending in ends])
        written = self._store.write(operation, durable=bool(begins) or any(ending.durable for ending in ends))
        written.add_done_callback(partial(self._written, begins, ends))

    def _written(self, begins: list[_Begin], ends: list[_Ending], written: asyncio.Future[None]) -> None:
        self._writing -= 1
        error = written.exception()
        if error is not None and not isinstance(error, EngineError) and len(begins) + len(ends) > 1:
            # One of them caused the error: write each by itself.
            for begin in begins:
                self._write([begin], [])
            for ending in ends:
                self._write([], [ending])
            return
        for begin in begins:
            if not begin.future.done():
                begin.future.set_result(None) if error is None else begin.future.set_exception(error)
        for ending in ends:
            self._ended(ending, error)
        if not self._writing:
            self._write_gathered()

    def _ended(self, ending: _Ending, error: BaseException | None) -> None:
        try:
            self._recorded(ending.opened, ending.end.record, ending.connection, error)
        except Exception:  # a failing waiter must not stop the others
            log.exception("failed to notify the waiters of call %s", ending.end.record.id)
        if error is not None:
            call_id = ending.end.record.id
            log.error("failed to store the end of call %s, retrying in %g s: %s", call_id, RETRY_SECONDS, error)
            if not self._closed:
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._write, [], [ending])

    def _send_acks(self, connection: Connection) -> None:
        call_ids = self._acks.pop(connection, None)
        if call_ids is None or not connection.current:
            return

        def synced(future: asyncio.Future[None]) -> None:
            if connection.current and not future.cancelled() and future.exception() is None:
                connection.link.send(encode(ToolAck(call_ids)))

        self._store.write(_nothing).add_done_callback(synced)


def store_calls(tx: Tx, begins: list[_Begin], ends: list[CallEnd]) -> None:
    """Store new calls, and how others ended."""
    if begins:
        store_begins(tx, begins)
    if ends:
        store_ends(tx, ends)


def store_begins(tx: Tx, begins: list[_Begin]) -> None:
    """Store new calls, with what they reserve of budgets."""
    for begin in begins:
        if begin.take is not None:
            begin.take(tx)
    records = [begin.record for begin in begins]
    if any(begin.socket is not None for begin in begins):
        begin_fenced(tx, records, [begin.socket for begin in begins])
    else:
        calls.begin_all(tx, records)


def store_ends(tx: Tx, ends: list[CallEnd]) -> None:
    """Store how some calls ended; the first stored end of a call counts. Raises StoreError if several were given and
    one of them has ended before."""
    new: list[CallRecord] = []
    running: list[CallRecord] = []
    for end in ends:
        record = end.record
        if end.stored_as == "nothing":
            new.append(record)
        elif end.stored_as == "waiting":
            finish_waiting(tx, record)
        else:
            running.append(record)
        if end.charged:  # a second end finds nothing reserved
            budgets.settle(tx, record.id, used_by(record), record.ended_at or record.created_at)
        if end.release_key and record.idempotency_key is not None:
            keys.release(tx, record.credential, record.idempotency_key, record.id)
    if running:
        calls.finish_all(tx, running)
    if new:
        calls.begin_all(tx, new)
    if signed := [(end.record.id, end.receipt) for end in ends if end.receipt is not None]:
        add_receipts(tx, signed)


def _nothing(_: Tx) -> None:
    pass
