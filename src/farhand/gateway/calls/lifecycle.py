"""Applies events to open calls by the table in `state`, and carries out the effects."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import msgspec

from farhand.gateway.access.daily_budget import DailyBudget
from farhand.gateway.access.secrets import Secrets
from farhand.gateway.calls import gateway_tools
from farhand.gateway.calls.admission import unread
from farhand.gateway.calls.deadlines import Deadlines
from farhand.gateway.calls.open_call import OpenCall, ended, failure
from farhand.gateway.calls.recorder import Recorder
from farhand.gateway.calls.refusals import short_arguments
from farhand.gateway.calls.state import CallEvent, Effect, RecordEnd, transition
from farhand.gateway.nodes.registry import Connection, Node, NodeRegistry
from farhand.protocol.calls import PROGRAM_STOPPING, ToolFailure, ToolResult
from farhand.protocol.errors import Failed, ToolError
from farhand.protocol.freeze import FreezeOrder
from farhand.protocol.messages import ToolCancel, ToolRequest, encode
from farhand.protocol.redaction import KnownSecrets
from farhand.protocol.secret_handles import MARK
from farhand.store.ports import Store
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.metrics import Durations
from farhand.tools.tool import Tool

log = logging.getLogger(__name__)

MAX_RUNNING_PER_NODE = 256
MAX_OPEN_CALLS = 10_000
# How long a node or tool that was asked to stop may take to confirm it.
CONFIRM_SECONDS = 3.0

# For a call that can be asked to stop, one whose node is offline, and one whose node does not support cancelling.
_CANCELS = (CallEvent.CANCEL, CallEvent.CANCEL_OFFLINE, CallEvent.CANCEL_UNSUPPORTED)
_DEADLINES = (CallEvent.DEADLINE, CallEvent.DEADLINE_OFFLINE, CallEvent.DEADLINE_UNSUPPORTED)


class Lifecycle:
    """The open calls. Its owner calls `close`."""

    def __init__(
        self,
        database: Store,
        node_registry: NodeRegistry,
        *,
        hold: Callable[[OpenCall], None],
        frozen: Callable[[], FreezeOrder | None],
        keyed_calls: DailyBudget,
        secrets: KnownSecrets,
        handles: Secrets,
    ) -> None:
        """`hold` makes a call wait. `frozen` returns the order under which no call is sent. `keyed_calls` counts what
        calls with idempotency keys store. `secrets` are hidden in shortened arguments; `handles` resolves those in
        arguments.
        """
        self._node_registry = node_registry
        self._frozen = frozen
        self._keyed_calls = keyed_calls
        self._secrets = secrets
        self._handles = handles
        # By id: the calls that run or are about to, and those that are held back.
        self.calls: dict[str, OpenCall] = {}
        self.waiting: dict[str, OpenCall] = {}
        self.recorder = Recorder(database, self.end_recorded)
        # How long ended calls took, in milliseconds, by route and final state.
        self.durations: defaultdict[tuple[str, CallState], Durations] = defaultdict(Durations)
        self.closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadlines = Deadlines(self.calls, self.expire)
        self._effects: dict[Effect, Callable[[OpenCall], None]] = {
            Effect.DISPATCH: self.dispatch,
            Effect.SEND: self._send,
            Effect.HOLD: hold,
            Effect.SEND_STOP: self._send_stop,
            Effect.WATCH_CONFIRMATION: self._watch_confirmation,
            Effect.FORGET: self._forget,
        }

    # -- events -----------------------------------------------------------------------------------------

    def apply(
        self,
        opened: OpenCall,
        event: CallEvent,
        detail: ToolResult | str = "",
        connection: Connection | None = None,
    ) -> None:
        """Take a call to its next state and carry out the effects.

        `detail` is the result with which the call ends, or the reason; a call that was asked to stop has one already.
        `connection` is that of the node that answered. Raises ImpossibleEvent.
        """
        opened.state, effects = transition(opened.state, event)
        for effect in effects:
            if isinstance(effect, RecordEnd):
                self._record_end(opened, effect, detail, connection)
            else:
                self._effects[effect](opened)

    def cancel(self, opened: OpenCall, reason: str) -> None:
        """Stop a call; it ends once its node or tool has confirmed, or soon after."""
        self._stop(opened, _CANCELS, reason)

    def expire(self, opened: OpenCall) -> None:
        """Stop a call whose time is up."""
        opened.deadline = None
        seconds = (opened.record.deadline_at - opened.record.created_at) / 1000
        budget = ", which is all that its budget left" if opened.charge is not None and opened.charge.shortens else ""
        self._stop(opened, _DEADLINES, f"the call did not end within {seconds:g} s{budget}")

    def _stop(self, opened: OpenCall, events: tuple[CallEvent, CallEvent, CallEvent], reason: str) -> None:
        opened.stop_reason = opened.stop_reason or reason
        connection = opened.connection
        if not opened.sent or opened.task is not None:
            event = events[0]
        elif connection is None:
            event = events[1]
        else:
            event = events[0 if connection.can_cancel else 2]
        lost = f"node {opened.record.node_id!r} did not come back before the deadline"
        self.apply(opened, event, lost if event is CallEvent.DEADLINE_OFFLINE else "")

    def end_recorded(
        self, opened: OpenCall, record: CallRecord, connection: Connection | None, error: BaseException | None
    ) -> None:
        """Handle what the recorder reports: the end of a call is stored, or could not be."""
        event = CallEvent.END_RECORDED if error is None else CallEvent.END_FAILED
        opened.state, effects = transition(opened.state, event)
        for effect in effects:
            if effect is Effect.NOTIFY:
                opened.record = record
                self._remove(opened)
                opened.notify(record)
            elif effect is Effect.ACKNOWLEDGE and connection is not None:
                self.recorder.acknowledge(connection, record.id)
            elif effect is Effect.NOTIFY_UNRECORDED:
                lost = failure(CallState.UNKNOWN, f"the call ended, but its end could not be recorded: {error}")
                opened.notify(ended(record, CallState.UNKNOWN, lost, record.ended_at or 0, record.duration_ms or 0.0))

    # -- admission --------------------------------------------------------------------------------------

    def admit(self, opened: OpenCall, seconds: float) -> None:
        """Register an open call, which may run for `seconds`."""
        self.calls[opened.record.id] = opened
        if opened.node is not None:
            opened.node.running += 1
        opened.loop = self._loop = self._loop or asyncio.get_running_loop()
        self._deadlines.set(opened, seconds, opened.loop)

    def check_capacity(self, node: Node | None) -> None:
        """Raise Failed when the gateway or the node has too many calls open."""
        busy = len(self.calls) >= MAX_OPEN_CALLS
        if node is not None and not busy:
            congested = node.connection is not None and node.connection.link.congested
            busy = congested or node.running >= MAX_RUNNING_PER_NODE
        if busy:
            where = "" if node is None else f"node {node.card.node_id!r} has {node.running} calls open, "
            raise Failed(f"busy: {where}the gateway {len(self.calls)}; the call did not run, try again later")

    def of_node(self, node_id: str) -> list[OpenCall]:
        return [opened for opened in self.calls.values() if opened.record.node_id == node_id]

    def close(self) -> None:
        """Release the callers. Open calls stay open in the record and are resumed at the next start."""
        self.closing = True
        self.recorder.close()
        self._deadlines.close()
        for opened in self.calls.values():
            if opened.deadline is not None:
                opened.deadline.cancel()
            if opened.task is not None and not opened.stopping:
                opened.task.cancel(PROGRAM_STOPPING)
            if not opened.over:
                left = failure(
                    CallState.UNKNOWN, "the gateway stopped before the call ended; ask for it again by its id"
                )
                now = self._node_registry.clock()
                opened.notify(ended(opened.record, CallState.UNKNOWN, left, now, opened.elapsed_ms))

    # -- effects ----------------------------------------------------------------------------------------

    def dispatch(self, opened: OpenCall) -> None:
        """Report whether a call can be sent now: its node may have left or restarted since the call was admitted."""
        order, connection, boot = self._frozen(), opened.connection, opened.record.node_boot
        if order is not None:
            self.apply(opened, CallEvent.FROZEN, order.summary)
        elif opened.own is not None:
            self.apply(opened, CallEvent.READY)
        elif connection is None and boot is not None:
            self.apply(opened, CallEvent.NODE_AWAY)
        elif connection is None or (connection.boot is None) != (boot is None):
            self.apply(opened, CallEvent.NODE_GONE, "the node left before the call was sent")
        elif (fault := unread(connection, opened.request, opened.record.args)) is not None:
            self.apply(opened, CallEvent.REJECTED, ToolResult.failed("invalid_args", fault))
        elif self._sealed(opened, connection):
            if connection.boot != boot:
                opened.record = msgspec.structs.replace(opened.record, node_boot=connection.boot)
            self.apply(opened, CallEvent.READY)

    def _sealed(self, opened: OpenCall, connection: Connection) -> bool:
        """Put the secrets that a call names into its request; return False if it is rejected."""
        record = opened.record
        if opened.keeps or MARK not in bytes(record.args):
            return True
        try:
            found = self._handles.sealed(
                record.id, record.args, record.tool, record.node_id or "", connection.sealing_key
            )
        except ToolError as error:
            self.apply(opened, CallEvent.REJECTED, ToolResult(ok=False, error=ToolFailure.of(error)))
            return False
        request = msgspec.json.decode(opened.request, type=ToolRequest)
        opened.request = encode(msgspec.structs.replace(request, secrets=found))
        return True

    def _send(self, opened: OpenCall) -> None:
        if opened.own is not None:
            opened.task = asyncio.get_running_loop().create_task(self._run(opened, opened.own))
        elif (connection := opened.connection) is not None:
            connection.link.send(opened.request)

    async def _run(self, opened: OpenCall, tool: Tool) -> None:
        happened = await gateway_tools.run(opened, tool, self._handles)
        if happened is not None:
            self.apply(opened, *happened)

    def _send_stop(self, opened: OpenCall) -> None:
        if opened.task is not None:
            opened.task.cancel()
        elif opened.connection is not None:
            opened.connection.link.send(encode(ToolCancel(opened.record.id, opened.stop_reason)))

    def _watch_confirmation(self, opened: OpenCall) -> None:
        if opened.deadline is not None:
            opened.deadline.cancel()
        unconfirmed = partial(self.apply, opened, CallEvent.UNCONFIRMED)
        opened.deadline = asyncio.get_running_loop().call_later(CONFIRM_SECONDS, unconfirmed)

    def _forget(self, opened: OpenCall) -> None:
        self._release_node(opened)
        self._remove(opened)
        lost = ToolResult.failed("failed", "the call could not be recorded; it did not run")
        opened.notify(ended(opened.record, CallState.ERROR, lost, self._node_registry.clock(), opened.elapsed_ms))

    def _record_end(
        self, opened: OpenCall, end: RecordEnd, detail: ToolResult | str, connection: Connection | None
    ) -> None:
        if isinstance(detail, str):
            message = "; ".join(filter(None, (detail or opened.stop_reason, end.note)))
            detail = failure(end.state, message)
        now, duration, node = self._node_registry.clock(), opened.elapsed_ms, opened.node
        self.durations[opened.record.route, end.state].add(duration)
        if node is not None and end.state is CallState.OK:
            self._node_registry.learn(node.card.node_id, opened.record.tool)
        self._release_node(opened)
        record = ended(opened.record, end.state, detail, now, duration)
        if record.idempotency_key is not None and opened.principal is not None:
            size = 0 if record.result is None else memoryview(record.result).nbytes
            self._keyed_calls.add(opened.principal.actor, size, now)
        if opened.read_only and end.state is CallState.ERROR:
            # Nothing of it is stored yet, and it did nothing: long arguments would only fill the disk.
            record = msgspec.structs.replace(record, args=short_arguments(record.args, self._secrets))
        self.recorder.end(opened, record, connection, end.release_key)

    def _release_node(self, opened: OpenCall) -> None:
        if opened.deadline is not None:
            opened.deadline.cancel()
        if opened.node is not None:
            opened.node.running -= 1
            opened.node = None

    def _remove(self, opened: OpenCall) -> None:
        self.calls.pop(opened.record.id, None)
        self.waiting.pop(opened.record.id, None)
