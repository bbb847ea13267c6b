"""The gate: every call, from any door, is found, checked, written down, run, and written down again.

A read-only call goes into the record once, when it has ended; nobody was promised it before.

A call with effects is on disk before its frame leaves and its end is on disk before anyone is told. While it runs it
is an `OpenCall`; it leaves that state through `_end` alone, and in exactly one of the six final states.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from farhand.gateway.access.credentials import Credential, Credentials
from farhand.gateway.access.daily_budget import keyed_call_budget
from farhand.gateway.access.principal import Principal
from farhand.gateway.calls import gateway_tools as own_calls
from farhand.gateway.calls.admission import (
    Denied,
    allow,
    repeated_frame,
    request_frame,
    time_limit,
    unambiguous,
    unread,
)
from farhand.gateway.calls.catalog import Catalog, SwitchedOff, Target
from farhand.gateway.calls.deadlines import Deadlines
from farhand.gateway.calls.excerpt_redaction import CUTTING, hide_cuts
from farhand.gateway.calls.open_call import (
    NO_ERROR_GIVEN,
    UNKNOWN,
    OpenCall,
    Outcome,
    Parked,
    bare,
    ended,
    failed,
    refused_by_node,
    stopped,
    unknown,
)
from farhand.gateway.calls.policy import HTTP, Policy
from farhand.gateway.calls.recorder import Recorder
from farhand.gateway.calls.refusals import ROW_BYTES, RefusalBudget, short_arguments, shortened
from farhand.gateway.calls.waiting import Parking
from farhand.gateway.nodes.registry import Connection, Node, NodeRegistry
from farhand.protocol.calls import NULL, PROGRAM_STOPPING, ToolCall, ToolFailure, ToolResult
from farhand.protocol.canonical_json import canonical
from farhand.protocol.errors import ErrorKind, Failed, FarhandError, InvalidArgs, ToolError
from farhand.protocol.freeze import FreezeOrder, Frozen
from farhand.protocol.messages import ToolAck, ToolCancel, ToolResponse, encode
from farhand.protocol.redaction import KnownSecrets
from farhand.protocol.version import CLOSE_UNREADABLE
from farhand.store.ports import Store, StoreError, Tx
from farhand.store.tables import calls
from farhand.store.tables import idempotency as keys
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.metrics import Durations
from farhand.store.tables.waiting_calls import all_parked
from farhand.tools.tool import Tool

log = logging.getLogger(__name__)

MAX_RUNNING_PER_NODE = 256
MAX_OPEN_CALLS = 10_000
# How long a node that was told to stop may take to say what it ended.
CONFIRM_SECONDS = 3.0
# After a start, nodes get at least this long to come back with what they finished, deadline or not.
RETURN_SECONDS = 15.0
MAX_IDEMPOTENCY_KEY = 256
MAX_SESSION_KEY = 1024


class IdempotencyConflict(FarhandError):
    """An idempotency key came back with another request."""


class Gate:
    """Runs calls. `recover` comes before the first of them; `close` after the last."""

    def __init__(
        self, database: Store, node_registry: NodeRegistry, catalog: Catalog, credentials: Credentials | None = None
    ) -> None:
        """`credentials` tells which tokens are valid; without, every caller's is."""
        self._database = database
        self._credentials = credentials
        self._node_registry = node_registry
        self._catalog = catalog
        self._open: dict[str, OpenCall] = {}
        self._settling: set[asyncio.Task[None]] = set()
        # Plain nodes that answered a call that is not open, while the record is searched for it: one search each.
        self._checks: dict[Connection, asyncio.Task[None]] = {}
        # How many of the open calls are not over.
        self._running = 0
        self._recorder = Recorder(database, self.close_call)
        self._deadlines = Deadlines(self._open, self._expire)
        # How long the calls took that ended, in milliseconds, by who ran them and how they ended.
        self.ended: defaultdict[tuple[str, CallState], Durations] = defaultdict(Durations)
        self._closing = False
        # While there is an order, no call begins.
        self.frozen: FreezeOrder | None = None
        # What the owner's settings say to calls; None: nothing.
        self.policy: Policy | None = None
        # What may be stored of calls that are refused.
        self.refusals = RefusalBudget()
        # What tokens may have stored of calls with idempotency keys.
        self.keyed_calls = keyed_call_budget()
        # What is hidden where an answer of a node was cut in the midst of it.
        self.secrets = KnownSecrets()
        self.parking = Parking(self, database, node_registry, catalog)

    # -- calling ----------------------------------------------------------------------------------------

    async def begin(
        self,
        call: ToolCall,
        *,
        principal: Principal,
        own: Tool | None = None,
        background: bool = False,
        idempotency_key: str | None = None,
        origins: Sequence[str] = HTTP,
        before: int | None = None,
    ) -> Outcome | OpenCall:
        """Write a call down and send it on its way: an open call to `wait` for, or the outcome it already has.

        `own`: the tool, where the caller has one that is found under no name. In the background, what is returned is
        the call as it was written down. `origins`: where the call comes from, for the policy. `before`: while its node
        is offline the call may wait for it, in the background, until this moment.

        Raises IdempotencyConflict when the key stands for another request, StoreError when the call could not be
        written down (it did not run). Whatever goes wrong later is an outcome, not an exception.
        """
        record, opened, refusal = self._examine(call, principal, background, idempotency_key, own, origins, before)
        try:
            first = await self._write_down(record, opened, call, idempotency_key)
        except asyncio.CancelledError:
            if opened is not None:  # it is being stored all the same, so its end has to follow
                opened.unrun = True
                left = "the caller hung up before the call was sent; it did not run"
                self._end(opened, CallState.CANCELLED, stopped(CallState.CANCELLED, left))
            raise
        except BaseException:
            if opened is not None:
                self._forget(opened)
            raise
        if first != call.id:
            if opened is not None:
                self._forget(opened)
            return await self._repeat(first, record.background)
        if opened is None:
            return Outcome(record, raised=refusal)
        self._send(opened)
        return Outcome(opened.record) if record.background else opened

    def _examine(
        self,
        call: ToolCall,
        principal: Principal,
        background: bool = False,
        idempotency_key: str | None = None,
        own: Tool | None = None,
        origins: Sequence[str] = HTTP,
        before: int | None = None,
    ) -> tuple[CallRecord, OpenCall | None, ToolError | None]:
        """Find the tool, check and allow the call, and admit it; the record of one that was refused is its end."""
        now = self._node_registry.clock()
        target: Target | None = None
        refusal: ToolError | None = None
        parked: Parked | None = None
        try:
            if self._closing:
                raise Failed("the gateway is stopping; the call did not run")
            if self.frozen is not None:
                raise self.frozen.refusal()
            _check_names(call)
            target = self._catalog.find(call.tool, own) if before is None else self._catalog.find_known(call.tool)
            self.check_valid(principal)
            allow(target, principal)
            call = self._catalog.checked(target, call)
            timeout_ms = time_limit(call, target)
            if self.policy is not None or before is not None:
                call = unambiguous(call)
            if self.policy is not None or before is not None:
                parked = self.parking.judge(call, target, principal, origins, before, timeout_ms)
            if idempotency_key is not None:
                self.keyed_calls.take(principal.actor, ROW_BYTES + len(bytes(call.args)), now)
            request = b""
            if parked is None:
                self._refuse_when_busy(target.node)
                if target.node is not None:
                    request = request_frame(call, target, target.node, timeout_ms)
        except ToolError as error:
            refusal, timeout_ms, request = bare(error), 0, b""
        node = target.node if target else self._catalog.awaited(call.tool)

        record = CallRecord(
            id=call.id,
            tool=call.tool,
            args=call.args,
            session_key=call.session_key,
            agent_id=call.agent_id,
            credential=principal.id,
            on_behalf_of=None if principal.on_behalf_of is None else principal.on_behalf_of.id,
            route=target.kind if target else "node" if node else "unknown",
            node_id=node.card.node_id if node else None,
            capability=target.capability if target else None,
            node_boot=node.connection.boot if node and node.connection and parked is None else None,
            background=background or (parked is not None and parked.why == "node"),
            idempotency_key=idempotency_key,
            created_at=now,
            deadline_at=now + timeout_ms,
        )
        if parked is not None:
            record = self.parking.waiting_record(record, parked)
        if refusal is not None:
            refused = CallState.DENIED if isinstance(refusal, Denied | SwitchedOff | Frozen) else CallState.ERROR
            record = ended(record, refused, ToolResult(False, error=ToolFailure.of(refusal)), now, 0.0)
            record = shortened(record, self.secrets)
            self.ended[record.route, refused].add(0.0)
        opened: OpenCall | None = None
        if target is not None and refusal is None:
            promised = background or idempotency_key is not None
            read_only = target.spec is not None and target.spec.read_only and not promised and parked is None
            opened = OpenCall(
                record,
                target.node if parked is None else None,
                request,
                read_only,
                target.own,
                principal,
                tuple(origins),
            )
            opened.waiters += not record.background
            if parked is not None:
                self.parking.admit(opened, parked)
            else:
                self._admit(opened, timeout_ms / 1000)
        return record, opened, refusal

    def check_valid(self, principal: Principal) -> None:
        """Raises Denied where a token that acts, or on whose behalf it acts, was revoked or has expired."""
        reason = None if self._credentials is None else self._credentials.ended(principal.ids)
        if reason is not None:
            raise Denied(f"{reason}; the call did not run")

    def credential_ended(self, token_id: str) -> None:
        """Refuse the waiting calls of a token that was revoked or has expired, and cancel those that run."""
        self.parking.credential_ended(token_id)
        for opened in list(self._open.values()):
            self._stop_invalid(opened, token_id)

    def _stop_invalid(self, opened: OpenCall, token_id: str | None = None) -> bool:
        """Cancel a call if a credential involved in it has ended; with `token_id`, only if it is that one."""
        principal = opened.principal
        if principal is None or self._credentials is None or (token_id is not None and token_id not in principal.ids):
            return False
        reason = self._credentials.ended(principal.ids)
        if reason is not None:
            self._stop(opened, CallState.CANCELLED, reason)
        return reason is not None

    async def wait(self, opened: OpenCall) -> Outcome:
        """How an open call ended. The waiter counts until `abandon`."""
        record = await opened.ended()
        return Outcome(record, raised=opened.raised)

    def abandon(self, opened: OpenCall) -> None:
        """A waiter hung up. When nobody else wants the call, it is cancelled on its node."""
        opened.waiters -= 1
        if not opened.wanted:
            self._stop(opened, CallState.CANCELLED, "the caller hung up")

    def is_open(self, call_id: str) -> bool:
        """Whether a call runs or waits; False also for one that is being written down as ended."""
        opened = self._open.get(call_id) or self.parking.waiting.get(call_id)
        return opened is not None and not opened.over

    async def cancel(self, call_id: str, reason: str = "cancelled on request") -> CallRecord | None:
        """Cancel an open call and return its end; a call that is over already is returned as it ended."""
        opened = self._open.get(call_id) or self.parking.waiting.get(call_id)
        if opened is None:
            return await self.find(call_id)
        self._stop(opened, CallState.CANCELLED, reason)
        return await opened.ended()

    def stop_all(self, reason: str) -> int:
        """Cancel every open call; how many that are. Each ends by itself, as any cancelled call does."""
        stopping = [opened for opened in self._open.values() if not opened.over and opened.stopping is None]
        for opened in stopping:
            self._stop(opened, CallState.CANCELLED, reason)
        return len(stopping)

    async def find(self, call_id: str) -> CallRecord | None:
        opened = self._open.get(call_id) or self.parking.waiting.get(call_id)
        if opened is not None:
            return opened.record
        return await self._database.read(lambda connection: calls.find(connection, call_id))

    async def end_of(self, call_id: str) -> CallRecord | None:
        """The record of a call once it has ended; None when there is no such call."""
        opened = self._open.get(call_id) or self.parking.waiting.get(call_id)
        return await self.find(call_id) if opened is None else await opened.ended()

    def open_records(self) -> list[CallRecord]:
        return [opened.record for opened in (*self._open.values(), *self.parking.waiting.values())]

    @property
    def open_count(self) -> int:
        return len(self._open)

    # -- writing down -----------------------------------------------------------------------------------

    async def _write_down(self, record: CallRecord, opened: OpenCall | None, call: ToolCall, key: str | None) -> str:
        """The id of the call this request stands for: its own, unless its idempotency key was used before."""
        begin = calls.begin if opened is None or opened.parked is None else self.parking.begin(record, opened.parked)
        if key is None:
            if opened is None:
                if self.refusals.take(record, record.created_at):
                    await self._database.write(lambda connection: calls.begin(connection, record), durable=False)
            elif not opened.read_only:
                if opened.parked is not None:
                    await self._database.write(lambda store: begin(store, record))
                else:
                    await self._recorder.begin(record)
            return record.id
        body = hashlib.sha256(b"%b\0%b" % (call.tool.encode(), canonical(call.args))).digest()

        stored = opened is not None or self.refusals.take(record, record.created_at)

        # A call that is refused was never begun, so it does not use the key up: it may be tried again.
        use = keys.claimed if opened is None else keys.claim

        def claim(store: Tx) -> tuple[str, bytes]:
            first, first_body = use(store, record.credential, key, body, record.id, record.created_at)
            if first == record.id and stored:
                begin(store, record)
            return first, first_body

        first, first_body = await self._database.write(claim)
        if first_body != body:
            raise IdempotencyConflict(f"the idempotency key {key!r} was used for another request")
        return first

    async def _repeat(self, call_id: str, background: bool) -> Outcome:
        opened = self._open.get(call_id) or self.parking.waiting.get(call_id)
        if opened is not None and not background:
            return Outcome(await opened.ended(), repeated=True)
        record = await self.find(call_id)
        if record is None:
            raise StoreError(f"call {call_id} is not in the record")
        return Outcome(record, repeated=True)

    # -- on its way -------------------------------------------------------------------------------------

    def _admit(self, opened: OpenCall, seconds: float) -> None:
        self._open[opened.record.id] = opened
        self._running += 1
        if opened.node is not None:
            opened.node.running += 1
        self._deadlines.set(opened, seconds)

    def _refuse_when_busy(self, node: Node | None) -> None:
        busy = len(self._open) >= MAX_OPEN_CALLS
        if node is not None and not busy:
            congested = node.connection is not None and node.connection.link.congested
            busy = congested or node.running >= MAX_RUNNING_PER_NODE
        if busy:
            where = "" if node is None else f"node {node.card.node_id!r} has {node.running} calls open, "
            raise Failed(f"busy: {where}the gateway {len(self._open)}; the call did not run, try again later")

    def _forget(self, opened: OpenCall) -> None:
        self.parking.waiting.pop(opened.record.id, None)
        self._running -= opened.record.id in self._open and not opened.over
        opened.over = True
        if self._open.pop(opened.record.id, None) is not None:
            if opened.node is not None:
                opened.node.running -= 1
            if opened.deadline is not None:
                opened.deadline.cancel()

    # What the parking asks for: nothing of these calls has left the gateway yet.

    def busy(self, node: Node | None) -> bool:
        """Whether a call that waited has to wait a little more."""
        try:
            self._refuse_when_busy(node)
        except Failed:
            return True
        return False

    def start(self, opened: OpenCall, record: CallRecord, target: Target, timeout_ms: int) -> None:
        """Send a call that waited, and of which the record says now that it runs."""
        opened.record = record
        opened.parked = None
        opened.started = time.perf_counter()
        opened.node = target.node
        if target.node is not None:
            call = ToolCall(record.id, record.tool, record.args, record.session_key, record.agent_id)
            opened.request = request_frame(call, target, target.node, timeout_ms)
        self._admit(opened, timeout_ms / 1000)
        self._send(opened)

    def end(self, opened: OpenCall, state: CallState, result: ToolResult) -> None:
        """A call that waited ends, and has not run."""
        self._end(opened, state, result)

    def _send(self, opened: OpenCall) -> None:
        if opened.over:
            return
        if opened.parked is not None:
            self.parking.hold(opened, opened.parked)
            return
        if self.frozen is not None:  # it came while the call was being written down
            fate = "" if opened.sent else "; it did not run"
            self._end(opened, CallState.CANCELLED, stopped(CallState.CANCELLED, f"{self.frozen.summary}{fate}"))
            return
        if opened.own is not None:
            opened.sent = True
            opened.task = asyncio.get_running_loop().create_task(self._run(opened, opened.own))
            return
        connection = self._way_to(opened)
        if connection is None:
            return
        fault = unread(connection, opened.request, opened.record.args)
        if fault is not None:
            self._end(opened, CallState.ERROR, ToolResult.failed("invalid_args", fault))
            return
        opened.sent = True
        connection.link.send(opened.request)

    def _way_to(self, opened: OpenCall) -> Connection | None:
        """The connection for a call that has not left yet. Its node may have gone, or begun a new life, since the call
        was examined: one that can resume is waited for, any other is not."""
        connection = opened.node.connection if opened.node else None
        if connection is not None and connection.boot == opened.record.node_boot:
            return connection
        if opened.record.node_boot is None or (connection is not None and connection.boot is None):
            self._end(opened, CallState.ERROR, failed("the node left before the call was sent; it did not run"))
            return None
        opened.stranded = connection is None
        if connection is not None:
            opened.record = msgspec.structs.replace(opened.record, node_boot=connection.boot)
        return connection

    async def _run(self, opened: OpenCall, tool: Tool) -> None:
        end = await own_calls.run(opened, tool)
        if end is not None:
            self._end(opened, *end)

    def answered(self, connection: Connection, response: ToolResponse) -> None:
        """A node answered. Only the node that owns a call can end it; its newest word counts, once."""
        opened = self._open.get(response.request_id)
        if opened is None:
            self._recorder.late(connection, response, self._node_registry.clock())
            if connection.resume is None:
                self._check_known(connection, response.request_id)
            return
        if opened.over:
            return  # being written down; the node keeps it until that is done
        if opened.record.node_id != connection.node_id or not connection.current:
            log.warning("node %s answered call %s, which is not its own", connection.node_id, response.request_id)
            return
        if response.ok:
            result = NULL if response.result is UNSET else response.result
            if opened.record.tool.endswith(CUTTING):
                result = hide_cuts(result, self.secrets)
            self._end(opened, CallState.OK, ToolResult(ok=True, result=result), connection)
            return
        error = response.error or ToolFailure("failed", NO_ERROR_GIVEN)
        opened.unrun = refused_by_node(error)
        if opened.stopping is not None and error.kind == ErrorKind.CANCELLED:
            state, reason = opened.stopping
            said = "" if error.message in ("", reason) else f"; node: {error.message}"
            self._end(opened, state, stopped(state, f"{reason}{said}"), connection)
            return
        state = CallState.UNKNOWN if error.message.startswith(UNKNOWN) else CallState.ERROR
        self._end(opened, state, ToolResult(ok=False, error=error), connection)

    def answered_unreadably(self, connection: Connection, request_id: str | None, reason: str) -> None:
        """A plain node sent a response that cannot be read: end the call it names, or all calls of the node.

        The node has done its work and will not answer again, so that the call would wait for its deadline in vain.
        Where the call cannot be told, the connection is closed, which ends every call of a plain node.
        """
        opened = None if request_id is None else self._open.get(request_id)
        if opened is not None and opened.record.node_id == connection.node_id and connection.current:
            if opened.sent and not opened.over:
                said = f"node {connection.node_id!r} answered with a response that cannot be read: {reason}"
                self._end(opened, CallState.UNKNOWN, unknown(said))
        elif request_id is None:
            self._close_unattributed(connection, "a response cannot be read")
        else:
            self._check_known(connection, request_id)

    def _check_known(self, connection: Connection, request_id: str) -> None:
        """Close a plain node's connection if it answers a call that never was: one that it has open goes unanswered."""
        if connection in self._checks or not self._awaited(connection):
            return

        async def check() -> None:
            try:
                known = await self.find(request_id)
            except StoreError:
                return
            finally:
                del self._checks[connection]
            if known is None or known.node_id != connection.node_id:
                self._close_unattributed(connection, f"there is no call {request_id[:40]!r} of this node")

        self._checks[connection] = asyncio.get_running_loop().create_task(check())

    def _close_unattributed(self, connection: Connection, reason: str) -> None:
        if connection.current and self._awaited(connection):
            log.warning("node %s: %s; closing its connection, which ends its calls", connection.node_id, reason)
            connection.link.close(CLOSE_UNREADABLE, reason)

    def _awaited(self, connection: Connection) -> bool:
        """Return whether the node has calls to answer."""
        return any(opened.sent and not opened.over for opened in self._of(connection.node_id))

    # -- stopping ---------------------------------------------------------------------------------------

    def _expire(self, opened: OpenCall) -> None:
        opened.deadline = None
        node = opened.node
        if opened.own is None and opened.sent and (node is None or not node.online):
            where = f"node {opened.record.node_id!r}"
            self._end(opened, CallState.UNKNOWN, unknown(f"{where} did not come back before the deadline"))
            return
        seconds = (opened.record.deadline_at - opened.record.created_at) / 1000
        self._stop(opened, CallState.TIMEOUT, f"the call did not end within {seconds:g} s")

    def _stop(self, opened: OpenCall, state: CallState, reason: str) -> None:
        """Tell the node to stop, and give it a moment to say what it ended."""
        if opened.stopping is not None or opened.over:
            return
        opened.stopping = (state, reason)
        connection = opened.node.connection if opened.node else None
        if not opened.sent:
            self._end(opened, state, stopped(state, f"{reason}; it did not run"))
        elif opened.task is not None:
            opened.task.cancel()
            self._confirm(opened)
        elif connection is None:
            self._end(opened, state, stopped(state, f"{reason}; its node is offline and is told when it returns"))
        elif not connection.can_cancel:
            self._end(opened, state, stopped(state, f"{reason}; its node cannot be told and may still finish it"))
        else:
            connection.link.send(encode(ToolCancel(opened.record.id, reason)))
            self._confirm(opened)

    def _confirm(self, opened: OpenCall) -> None:
        if opened.deadline is not None:
            opened.deadline.cancel()
        opened.deadline = asyncio.get_running_loop().call_later(CONFIRM_SECONDS, self._unconfirmed, opened)

    def _unconfirmed(self, opened: OpenCall) -> None:
        if opened.stopping is not None:
            state, reason = opened.stopping
            who = "node" if opened.own is None else "tool"
            self._end(opened, state, stopped(state, f"{reason}; the {who} was told and has not confirmed"))

    # -- nodes come and go ------------------------------------------------------------------------------

    def node_left(self, connection: Connection) -> None:
        """A node's only socket is gone: calls of a node that can resume wait for it, the others end here."""
        if connection.resume is not None:
            return
        for opened in self._of(connection.node_id):
            if opened.sent:
                self._end(opened, CallState.UNKNOWN, unknown(f"node {connection.node_id!r} disconnected"))

    def node_joined(self, connection: Connection) -> None:
        """Settle with a node that is back: send what never reached it, stop what nobody waits for any more."""
        resume = connection.resume
        known = {*resume.running, *resume.finished} if resume else set()
        earlier = set(resume.earlier) if resume else set()
        for opened in self._of(connection.node_id):
            if opened.stranded and not opened.over:
                opened.stranded = False
                self._send(opened)
                continue
            if not opened.sent or opened.over:
                continue  # still being written down; it is sent after that
            if opened.record.id in known:
                if opened.stopping is not None:
                    connection.link.send(encode(ToolCancel(opened.record.id, opened.stopping[1])))
            elif opened.record.node_boot is None or opened.record.node_boot != connection.boot:
                self._end(
                    opened,
                    CallState.UNKNOWN,
                    unknown(f"node {connection.node_id!r} was restarted while the call was open"),
                )
            elif opened.stopping is not None:
                state, reason = opened.stopping
                if opened.record.id in earlier:
                    connection.link.send(encode(ToolCancel(opened.record.id, reason)))
                else:
                    self._end(opened, state, stopped(state, f"{reason}; it did not run"))
            elif opened.wanted or opened.record.id in earlier:
                self._send(opened)
            else:
                self._end(
                    opened,
                    CallState.ERROR,
                    failed("the call never reached its node and nobody waits; it did not run"),
                )
        if resume:
            over = [call_id for call_id in resume.earlier if not self._is_open(call_id)]
            if over:
                settling = asyncio.get_running_loop().create_task(self._settle(connection, over))
                self._settling.add(settling)
                settling.add_done_callback(self._settling.discard)
            for call_id in resume.running:
                if not self._is_open(call_id):
                    connection.link.send(encode(ToolCancel(call_id, "nobody waits for this call")))
        self.parking.look_again()

    def _is_open(self, call_id: str) -> bool:
        return (opened := self._open.get(call_id)) is not None and not opened.over

    async def _settle(self, connection: Connection, call_ids: Sequence[str]) -> None:
        """Tell a node that was killed about calls of its last life that are over.

        It forgets those that ended by themselves. A call that was cancelled or ran out of time meanwhile may still have
        a command running there: the node ends it, and says so.
        """
        for opened in [opened for call_id in call_ids if (opened := self._open.get(call_id)) is not None]:
            await opened.ended()  # its end is being written down
        try:
            ended_here = await self._database.read(
                lambda store: calls.not_waited_for(store, connection.node_id, call_ids)
            )
        except StoreError as error:  # the node lists them again when it connects next
            log.warning("failed to look up %d calls of node %s: %s", len(call_ids), connection.node_id, error)
            return
        for call_id, reason in ended_here.items():
            connection.link.send(encode(ToolCancel(call_id, reason)))
        if settled := [call_id for call_id in call_ids if call_id not in ended_here]:
            connection.link.send(encode(ToolAck(settled)))

    async def recover(self) -> int:
        """Take up the calls that were open when the gateway last stopped; returns how many still are."""
        now = self._node_registry.clock()
        rows = await self._database.read(all_parked)
        for record in await self._database.read(calls.open_calls):
            if record.state is CallState.WAITING:
                self.parking.recover(record, rows.get(record.id))
                continue
            own = None if record.route == "node" else self._catalog.own(record.tool)
            node = self._node_registry.nodes.get(record.node_id or "")
            opened = OpenCall(record, node, repeated_frame(record), read_only=False, own=own)
            opened.principal = self._recorded(record)
            opened.sent = True
            opened.started -= max(0, now - record.created_at) / 1000
            self._admit(opened, max(RETURN_SECONDS, (record.deadline_at - now) / 1000))
            if self._stop_invalid(opened):
                continue
            if own is not None and own.continues:
                self._send(opened)
            elif record.node_boot is None:
                where = f"node {record.node_id!r}" if record.route == "node" else repr(record.tool)
                self._end(opened, CallState.UNKNOWN, unknown(f"the gateway stopped while {where} ran the call"))
        return sum(not opened.over for opened in self._open.values())

    def _recorded(self, record: CallRecord) -> Principal:
        """The principal of a call that an earlier process made, as far as the record and the tokens tell."""
        known = (lambda name: Credential(name, frozenset())) if self._credentials is None else self._credentials.named
        if record.on_behalf_of is None:
            return Principal(known(record.credential))
        return Principal.agent(record.credential.removeprefix("agent:"), known(record.on_behalf_of))

    @property
    def closing(self) -> bool:
        return self._closing

    async def drain(self, seconds: float) -> None:
        """Take no new calls and give those somebody waits for some time to end."""
        self._closing = True
        waiting = [opened.ended() for opened in self._open.values() if opened.waiters]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)

    def close(self) -> None:
        """Let waiters go. What is still open stays so in the record, and is taken up after the next start."""
        self._closing = True
        self._recorder.close()
        self._deadlines.close()
        for settling in self._settling:
            settling.cancel()
        for opened in self._open.values():
            if opened.deadline is not None:
                opened.deadline.cancel()
            if opened.task is not None and opened.stopping is None:
                opened.task.cancel(PROGRAM_STOPPING)
            if not opened.over:
                left = unknown("the gateway stopped before the call ended; ask for it again by its id")
                opened.tell(ended(opened.record, CallState.UNKNOWN, left, self._node_registry.clock(), opened.lasted))
        self.parking.close()

    def _of(self, node_id: str) -> list[OpenCall]:
        return [opened for opened in self._open.values() if opened.record.node_id == node_id]

    # -- ending -----------------------------------------------------------------------------------------

    def _end(
        self, opened: OpenCall, state: CallState, result: ToolResult, connection: Connection | None = None
    ) -> None:
        """Write the end down; once it is on disk, tell the waiters and let the node forget the call."""
        if opened.over:
            return
        opened.over = True
        self._running -= opened.record.id in self._open
        duration = opened.lasted
        if not opened.sent and opened.parked is None and state in (CallState.ERROR, CallState.TIMEOUT):
            opened.unrun = True
        self.ended[opened.record.route, state].add(duration)
        if opened.deadline is not None:
            opened.deadline.cancel()
        if opened.node is not None:
            opened.node.running -= 1
            if state is CallState.OK:
                self._node_registry.learn(opened.node.card.node_id, opened.record.tool)
            opened.node = None
        record = ended(opened.record, state, result, self._node_registry.clock(), duration)
        if record.idempotency_key is not None and opened.principal is not None:
            self.keyed_calls.add(
                opened.principal.actor,
                0 if record.result is None else len(bytes(record.result)),
                self._node_registry.clock(),
            )
        if opened.read_only and state is CallState.ERROR:
            # Nothing is stored of it yet, and it did nothing: long arguments would only fill the disk.
            record = msgspec.structs.replace(record, args=short_arguments(record.args, self.secrets))
        self._recorder.end(opened, record, connection)

    def close_call(self, call_id: str) -> None:
        """The record has how it ended."""
        self._open.pop(call_id, None)
        self.parking.waiting.pop(call_id, None)


def _check_names(call: ToolCall) -> None:
    """Raises InvalidArgs for names that no session or agent has."""
    for name, value in (("session_key", call.session_key), ("agent_id", call.agent_id)):
        if value is not None and len(value) > MAX_SESSION_KEY:
            raise InvalidArgs(f"{name} has {len(value)} characters; at most {MAX_SESSION_KEY} are allowed")
