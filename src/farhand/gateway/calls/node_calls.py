"""What nodes report about calls: answers, and what they know of open calls when they connect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import UNSET

from farhand.gateway.calls.lifecycle import Lifecycle
from farhand.gateway.calls.open_call import (
    NO_ERROR_GIVEN,
    UNKNOWN,
    CallLogLine,
    CallProgress,
    OpenCall,
    refused_by_node,
)
from farhand.gateway.calls.redaction import CUTTING, hide_cuts
from farhand.gateway.calls.state import CallEvent, OpenState
from farhand.gateway.nodes.registry import Connection
from farhand.gateway.repeating import BackgroundTasks
from farhand.protocol.calls import NULL, ToolFailure, ToolResult
from farhand.protocol.errors import ErrorKind, Failed
from farhand.protocol.messages import Resume, ToolAck, ToolCancel, ToolProgress, ToolResponse, encode
from farhand.protocol.receipts import MOST_STATEMENT_BYTES
from farhand.protocol.redaction import KnownSecrets
from farhand.protocol.untrusted import one_line
from farhand.protocol.version import CLOSE_UNREADABLE
from farhand.store.journal.events import append_event
from farhand.store.ports import Store, StoreError, log_failure
from farhand.store.tables import calls
from farhand.store.tables.accounts.receipts import SignedAnswer
from farhand.store.tables.calls import CallRecord
from farhand.store.tables.fleet import LinkMoved, open_among, open_on_link

log = logging.getLogger(__name__)

NOT_WAITED_FOR = "no caller waits for this call"
LONGEST_SAID = 500
LONGEST_SIGNATURE = 100
MOST_LOG_LINES = 100
MOST_PROGRESS = 1e15
# Between two events about the progress of a call, and the number of events about progress and logs of one call.
PROGRESS_EVENT_MS = 1000
MOST_PROGRESS_EVENTS = 200
SEND_AGAIN_SECONDS = 0.5
# After these, a call is sent to its node.
_SENDS: Final = (CallEvent.NODE_NEVER_SAW, CallEvent.NODE_ACCEPTED)


class NodeCalls:
    """Turns what nodes report into events of open calls. Its owner calls `close`."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        database: Store,
        *,
        clock: Callable[[], int],
        find: Callable[[str], Awaitable[CallRecord | None]],
        resume_waiting: Callable[[], None],
        secrets: KnownSecrets,
        shared: bool = False,
    ) -> None:
        """`find` returns the record of a call. `resume_waiting` is called when a node connects. `secrets` are hidden
        where an answer was cut in the middle of one. `shared`: calls may be open on other gateways."""
        self._shared = shared
        self._lifecycle = lifecycle
        self._database = database
        self._clock = clock
        self._find = find
        self._resume_waiting = resume_waiting
        self._secrets = secrets
        self._tasks = BackgroundTasks()
        # Plain nodes whose answer to a call that is not open is being looked up: one lookup each.
        self._lookups: dict[Connection, asyncio.Task[None]] = {}

    def close(self) -> None:
        for task in (*self._tasks, *self._lookups.values()):
            task.cancel()

    # -- answers ----------------------------------------------------------------------------------------

    def answered(self, connection: Connection, response: ToolResponse) -> None:
        """Handle the answer to a call. Only the current connection of the node that runs the call can end it."""
        opened = self._lifecycle.calls.get(response.request_id)
        if opened is None:
            self._lifecycle.recorder.late(connection, response, self._clock())
            if connection.resume is None:
                self._check_known(connection, response.request_id)
        elif opened.over:
            return  # its end is being recorded; the node keeps the result until it is acknowledged
        elif opened.record.node_id != connection.node_id or not connection.current:
            log.warning("node %s answered call %s of another node", connection.node_id, response.request_id)
        else:
            opened.receipt = _signed(connection, response)
            self._lifecycle.apply(opened, *self._read(opened, response), connection)

    def _read(self, opened: OpenCall, response: ToolResponse) -> tuple[CallEvent, ToolResult | str]:
        if response.ok:
            value = NULL if response.result is UNSET else response.result
            if opened.record.tool.endswith(CUTTING):
                try:
                    value = hide_cuts(value, self._secrets)
                except Failed as refused:
                    return CallEvent.FAILED, ToolResult.failed(refused.kind.value, refused.message)
            return CallEvent.SUCCEEDED, ToolResult(ok=True, result=value)
        error = response.error or ToolFailure("failed", NO_ERROR_GIVEN)
        result = ToolResult(ok=False, error=error)
        if error.kind == ErrorKind.CANCELLED:
            if not opened.stopping:
                return CallEvent.STOPPED, result
            reason = opened.stop_reason
            return CallEvent.STOPPED, reason if error.message in ("", reason) else f"{reason}; node: {error.message}"
        if error.message.startswith(UNKNOWN):
            return CallEvent.LOST, result
        return (CallEvent.BUSY if refused_by_node(error) else CallEvent.FAILED), result

    def answered_unreadably(self, connection: Connection, request_id: str | None, reason: str) -> None:
        """Handle a response that cannot be read, of a plain node or to a call that is open.

        The node has done its work and will not answer again, so the call ends. If the response does not show which
        call it belongs to, the connection is closed, which ends every call of a plain node.
        """
        opened = None if request_id is None else self._lifecycle.calls.get(request_id)
        if opened is not None and opened.record.node_id == connection.node_id and connection.current:
            lost = f"node {connection.node_id!r} answered with a response that cannot be read: {reason}"
            self._lifecycle.apply(opened, CallEvent.LOST, lost)
        elif request_id is None:
            self._close_unattributed(connection, "a response cannot be read")
        else:
            self._check_known(connection, request_id)

    def _check_known(self, connection: Connection, request_id: str) -> None:
        """Close the connection of a plain node that answers a call it never got: one of its own stays unanswered."""
        if connection in self._lookups or not self._has_open_calls(connection):
            return

        async def look_up() -> None:
            try:
                known = await self._find(request_id)
            except StoreError:
                return
            finally:
                del self._lookups[connection]
            if known is None or known.node_id != connection.node_id:
                self._close_unattributed(connection, f"there is no call {request_id[:40]!r} of this node")

        self._lookups[connection] = asyncio.get_running_loop().create_task(look_up())

    def _close_unattributed(self, connection: Connection, reason: str) -> None:
        if connection.current and self._has_open_calls(connection):
            log.warning("node %s: %s; closing its connection, which ends its calls", connection.node_id, reason)
            connection.link.close(CLOSE_UNREADABLE, reason)

    def _has_open_calls(self, connection: Connection) -> bool:
        return any(opened.sent for opened in self._lifecycle.of_node(connection.node_id))

    # -- progress ---------------------------------------------------------------------------------------

    def progressed(self, connection: Connection, said: ToolProgress) -> None:
        """Store the progress of a call, or a line that its tool logged, if the node that runs the call reports it."""
        opened = self._lifecycle.calls.get(said.request_id)
        if opened is None or opened.over or opened.record.node_id != connection.node_id or not connection.current:
            return
        now = self._clock()
        message = one_line(self._secrets.redact_text(said.message[:LONGEST_SAID]), LONGEST_SAID)
        if said.level:
            opened.log = (*opened.log, CallLogLine(now, said.level, message))[-MOST_LOG_LINES:]
            self._note(opened, "call.log", {"level": said.level, "message": message}, now)
            return
        total = 1.0 if said.total is None else said.total
        if said.progress is None or not (0 <= said.progress <= MOST_PROGRESS and 0 < total <= MOST_PROGRESS):
            return
        progress = CallProgress(said.progress, total, message, now)
        opened.set_progress(progress)
        if said.progress >= total or now - opened.told_at >= PROGRESS_EVENT_MS:
            opened.told_at = now
            self._note(opened, "call.progress", msgspec.to_builtins(progress), now)

    def _note(self, opened: OpenCall, kind: str, data: Mapping[str, Any], now: int) -> None:
        """Append an event, up to a limit for each call: a node must not fill the journal."""
        if opened.progress_events >= MOST_PROGRESS_EVENTS:
            return
        opened.progress_events += 1
        call_id = opened.record.id
        written = self._database.write(lambda store: append_event(store, now, kind, call_id, data))
        log_failure(written, log, f"record the progress of call {call_id}")

    # -- connections ------------------------------------------------------------------------------------

    def left(self, connection: Connection) -> None:
        """Handle a lost connection: calls of a node that can resume wait for it, the others end."""
        if connection.resume is None:
            for opened in self._lifecycle.of_node(connection.node_id):
                self._lifecycle.apply(opened, CallEvent.NODE_LEFT, f"node {connection.node_id!r} disconnected")

    def joined(self, connection: Connection) -> None:
        """Handle a new connection: send what never reached the node, and stop what no caller waits for."""
        resume = connection.resume or Resume("")
        known, earlier = {*resume.running, *resume.finished}, set(resume.earlier)
        unsent: dict[OpenCall, CallEvent] = {}
        for opened in self._lifecycle.of_node(connection.node_id):
            event, reason = CallEvent.NODE_NEVER_SAW, ""
            if opened.record.id in known:
                event = CallEvent.NODE_KNOWS
            elif opened.record.node_boot is None or opened.record.node_boot != connection.boot:
                event = CallEvent.NODE_RESTARTED
                reason = f"node {connection.node_id!r} was restarted while the call was open"
            elif opened.record.id in earlier:
                event = CallEvent.NODE_ACCEPTED
            elif not opened.wanted:
                event = CallEvent.NODE_NEVER_SAW_UNWANTED
                reason = opened.stop_reason or "the call never reached its node and no caller waits for it"
            if self._shared and event in _SENDS and opened.state is not OpenState.RECORDING:
                unsent[opened] = event
            else:
                self._lifecycle.apply(opened, event, reason)
        if unsent:
            self._tasks.start(self._send_again(connection, unsent))
        over = [call_id for call_id in resume.earlier if not self._is_open(call_id)]
        stray = [call_id for call_id in resume.running if not self._is_open(call_id)]
        if connection.own and self._shared:
            self._tasks.start(self._settle_shared(connection, over, stray))
        elif connection.own:
            self._settle_now(connection, over, stray)
        self._resume_waiting()

    async def _send_again(self, connection: Connection, unsent: Mapping[OpenCall, CallEvent]) -> None:
        """Send calls over a new connection, if they are still this gateway's to send and it is the node's present one.

        Another gateway may have taken them over, and reported their end.
        """
        call_ids = [opened.record.id for opened in unsent]
        operation = partial(open_on_link, call_ids=call_ids, node=connection.node_id, socket=connection.socket or "")
        while connection.current:
            try:
                still_open = await self._database.write(operation, durable=False)
            except LinkMoved:
                return
            except StoreError as error:
                log.debug("calls of node %s wait for the store: %s", connection.node_id, error)
                await asyncio.sleep(SEND_AGAIN_SECONDS)
                continue
            for opened, event in unsent.items():
                if opened.record.id in still_open and connection.current:
                    self._lifecycle.apply(opened, event)
            return

    def _settle_now(self, connection: Connection, over: Sequence[str], stray: Sequence[str]) -> None:
        """Settle calls that a node has from before and that are not open: of an earlier process, or running."""
        if over:
            self._tasks.start(self._settle(connection, over))
        for call_id in stray:
            connection.link.send(encode(ToolCancel(call_id, NOT_WAITED_FOR)))

    async def _settle_shared(self, connection: Connection, over: Sequence[str], stray: Sequence[str]) -> None:
        """Do the same for those that no other gateway has open either."""
        try:
            held = await self._database.read(lambda tx: open_among(tx, [*over, *stray]))
        except StoreError as error:  # the node lists them again when it connects next
            log.warning("failed to look up calls of node %s: %s", connection.node_id, error)
            return
        left = [[one for one in ids if one not in held and not self._is_open(one)] for ids in (over, stray)]
        self._settle_now(connection, *left)

    def _is_open(self, call_id: str) -> bool:
        return (opened := self._lifecycle.calls.get(call_id)) is not None and not opened.over

    async def _settle(self, connection: Connection, call_ids: Sequence[str]) -> None:
        """Tell a restarted node about calls of its earlier process that have ended.

        It forgets those that ended by themselves. A command of a call that was cancelled or timed out may still run
        there: the node ends it and reports that.
        """
        for opened in [opened for call_id in call_ids if (opened := self._lifecycle.calls.get(call_id)) is not None]:
            await opened.ended()  # its end is being recorded
        try:
            stopped = await self._database.read(lambda store: calls.not_waited_for(store, connection.node_id, call_ids))
        except StoreError as error:  # the node lists them again when it connects next
            log.warning("failed to look up %d calls of node %s: %s", len(call_ids), connection.node_id, error)
            return
        for call_id, reason in stopped.items():
            connection.link.send(encode(ToolCancel(call_id, reason)))
        if settled := [call_id for call_id in call_ids if call_id not in stopped]:
            connection.link.send(encode(ToolAck(settled)))


def _signed(connection: Connection, response: ToolResponse) -> SignedAnswer | None:
    """Return what a node signed about a call. It is checked when a receipt is verified."""
    signed = response.receipt
    if signed is UNSET or not connection.receipt_key or len(signed.signature) > LONGEST_SIGNATURE:
        return None
    if len(signed.statement) > MOST_STATEMENT_BYTES:
        return None
    return SignedAnswer(connection.receipt_key, signed.statement, signed.signature)
