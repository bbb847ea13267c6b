"""The gate: every call, from any interface, is resolved, authorised, recorded, run and recorded again.

A call with effects is committed before its frame is sent, and its end before its caller is notified. A read-only call
is recorded once, with its end. `state` has the states of a call in between, `lifecycle` what happens in each.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from farhand.gateway.access.budgets import Budgets, BudgetsSection, Left
from farhand.gateway.access.credentials import OWNER, Credential, Credentials
from farhand.gateway.access.daily_budget import DailyBudget, keyed_call_budget
from farhand.gateway.access.principal import Principal
from farhand.gateway.access.secrets import Secrets
from farhand.gateway.access.standing_approvals import StandingApprovals
from farhand.gateway.calls.admission import (
    Denied,
    allow,
    check_known,
    repeated_frame,
    request_frame,
    time_limit,
    unambiguous,
)
from farhand.gateway.calls.catalog import Catalog, SwitchedOff, Target, read_arguments
from farhand.gateway.calls.charging import Charge, Meter, machines_of, nodes_of, wants_of
from farhand.gateway.calls.command_input import allow_input
from farhand.gateway.calls.lifecycle import Lifecycle
from farhand.gateway.calls.node_calls import NodeCalls
from farhand.gateway.calls.open_call import OpenCall, Waiting, bare, ended, is_preview, new_call_id
from farhand.gateway.calls.pinning import TRANSFER
from farhand.gateway.calls.policy import Policy
from farhand.gateway.calls.policy_check import ChangedFiles, PolicyCheck, names_no_files
from farhand.gateway.calls.policy_subject import GATEWAY, HTTP
from farhand.gateway.calls.refusals import ROW_BYTES, RefusalBudget, shortened
from farhand.gateway.calls.state import CallEvent, OpenState
from farhand.gateway.calls.waiting import Approver, WaitingCalls, row_of
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.machine import tracing
from farhand.protocol.calls import ToolCall, ToolFailure, ToolResult
from farhand.protocol.canonical_json import canonical
from farhand.protocol.errors import Failed, FarhandError, InvalidArgs, NotAllowed, ToolError
from farhand.protocol.freeze import FreezeOrder, Frozen
from farhand.protocol.names import NATIVE, split_tool
from farhand.protocol.node_tools import NODE_TOOLS
from farhand.protocol.redaction import KnownSecrets
from farhand.store.ports import Store, StoreError, Tx
from farhand.store.tables import calls
from farhand.store.tables import idempotency as keys
from farhand.store.tables.accounts.budgets import BudgetExceeded, Limit, Unit, Want
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.fleet import LinkMoved, check_link
from farhand.store.tables.waiting_calls import (
    Approval,
    ApprovalState,
    all_waiting,
    begin_waiting,
    find_approval,
    trial_of,
)
from farhand.tools.node_family import resolved
from farhand.tools.tool import Tool
from farhand.tools.trial import OWN, named_trial

# After a start, nodes have at least this long to report what they finished, whatever the deadline.
RETURN_SECONDS = 15.0
MAX_IDEMPOTENCY_KEY = 256
MAX_SESSION_KEY = 1024
# The tools that list the commands of a node and of the gateway's own machine.
PROCESS = "Process"
OWN_PROCESS = "process"

# How long a call waits for its node's new connection, each time that the node turns out to have moved.
MOVED_SECONDS = (0.05, 0.2, 0.5, 1.0, 2.0)
# How often a call tries to reserve what is left of the wall time, while others reserve some of it.
TIME_ATTEMPTS = 5


class OtherGateways(Protocol):
    """The gateways that share the store with this one."""

    async def moved(self, seconds: float) -> None:
        """Find out again where the nodes are connected, then wait for `seconds`."""
        ...

    async def cancel(self, call_id: str, reason: str) -> None:
        """Have the gateway that owns a call cancel it."""
        ...

    async def end_of(self, call_id: str) -> CallRecord | None:
        """Return the record of a call of another gateway once it has ended; None when there is no such call."""
        ...


class IdempotencyConflict(FarhandError):
    """An idempotency key was used before, for another request."""


class Gate:
    """Runs calls. Its owner calls `recover` before the first of them and `close` after the last."""

    def __init__(
        self,
        database: Store,
        node_registry: NodeRegistry,
        catalog: Catalog,
        credentials: Credentials | None = None,
        *,
        approvals: Approver | None = None,
        policy: Callable[[], Policy | None] = lambda: None,
        changed_files: ChangedFiles | None = None,
        standing: StandingApprovals | None = None,
        frozen: Callable[[], FreezeOrder | None] = lambda: None,
        refusals: RefusalBudget | None = None,
        keyed_calls: DailyBudget | None = None,
        secrets: KnownSecrets | None = None,
        handles: Secrets | None = None,
        fleet: OtherGateways | None = None,
        budgets: Budgets | None = None,
    ) -> None:
        """`credentials` says which tokens are valid; without it, every caller is.

        `policy` returns the policy in force, `frozen` the order under which no call begins. `changed_files` finds out
        which files a call changes without naming them. `standing` are the permanent approvals. `refusals`
        limits what is stored of refused calls, `keyed_calls` what tokens store of calls with idempotency keys.
        `secrets` are hidden where an answer of a node was cut in the middle of one. `fleet`: the other gateways that
        share the store, if any. `budgets` limits what calls may use.
        """
        self._fleet = fleet
        self.budgets = budgets or Budgets(database, credentials, BudgetsSection, node_registry.clock)
        self._database = database
        self._credentials = credentials
        self._node_registry = node_registry
        self._catalog = catalog
        self._frozen = frozen
        self._policy = policy
        self.refusals = refusals or RefusalBudget()
        self.keyed_calls = keyed_calls or keyed_call_budget()
        self.secrets = secrets or KnownSecrets()
        self._policy_check = PolicyCheck(database, node_registry, credentials, policy, changed_files, standing)
        self._handles = handles or Secrets(database, node_registry.clock, self.secrets, _no_key)
        self._lifecycle = Lifecycle(
            database,
            node_registry,
            hold=self._hold,
            frozen=frozen,
            keyed_calls=self.keyed_calls,
            secrets=self.secrets,
            handles=self._handles,
        )
        self.waiting_calls = WaitingCalls(
            self._lifecycle, self._policy_check, database, node_registry, catalog, frozen, approvals, self.budgets
        )
        self.node_calls = NodeCalls(
            self._lifecycle,
            database,
            clock=node_registry.clock,
            find=self.find,
            resume_waiting=self.waiting_calls.resume,
            secrets=self.secrets,
            shared=fleet is not None,
        )
        self.durations = self._lifecycle.durations
        # By node: when calls were last recovered.
        self._recovered: dict[str, float] = {}

    @property
    def frozen(self) -> FreezeOrder | None:
        """The order under which no call begins."""
        return self._frozen()

    def _hold(self, opened: OpenCall) -> None:
        self.waiting_calls.hold(opened)

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
    ) -> OpenCall:
        """Record a call and send it; `wait` returns its end.

        `own`: the tool itself, for a caller whose tool has no public name. `origins`: where the call comes from, for
        the policy. `before`: while its node is offline, the call may wait for it in the background until this moment.

        Raises IdempotencyConflict when the key stands for another request, and StoreError when the call could not be
        recorded; it did not run then. Any later failure is recorded as the end of the call.
        """
        if not tracing.is_on() and self._fleet is None:
            return await self._begin(call, principal, own, background, idempotency_key, origins, before)
        span = tracing.begin(f"call {call.tool}", tracing.incoming.get(), **{"farhand.call": call.id})
        call = msgspec.structs.replace(call, trace=span.traceparent)
        try:
            opened = await self._begun(call, principal, own, background, idempotency_key, origins, before)
        except BaseException as error:
            span.end(f"{type(error).__name__}: {error}")
            raise
        opened.trace = span.traceparent
        opened.ended().add_done_callback(partial(_end_span, span))
        return opened

    async def _begun(
        self,
        call: ToolCall,
        principal: Principal,
        own: Tool | None,
        background: bool,
        idempotency_key: str | None,
        origins: Sequence[str],
        before: int | None,
    ) -> OpenCall:
        """Begin a call; again on the node's new connection if the node has moved."""
        for pause in () if self._fleet is None else MOVED_SECONDS:
            try:
                return await self._begin(call, principal, own, background, idempotency_key, origins, before)
            except LinkMoved:  # nothing is stored of the call
                assert self._fleet is not None
                await self._fleet.moved(pause)
        return await self._begin(call, principal, own, background, idempotency_key, origins, before)

    async def _begin(
        self,
        call: ToolCall,
        principal: Principal,
        own: Tool | None,
        background: bool,
        idempotency_key: str | None,
        origins: Sequence[str],
        before: int | None,
    ) -> OpenCall:
        changed: tuple[str, ...] | None = ()
        tried = None
        if self._policy() is not None:
            changed = await self._changed_files(call, principal, own)
            tried = await self._tried(call)
        if self.budgets.unlimited:
            admitted = self._admit(call, principal, background, idempotency_key, own, origins, before, changed, tried)
            return await self._admitted(admitted, call)
        limits, left, attempts = await self.budgets.limits(principal, call.session_key), Left(), 0
        while True:
            if limits and left.refusal is None:
                left = await self.budgets.left(limits, wants_of(len(bytes(call.args)), 1))
            opened = self._admit(
                call, principal, background, idempotency_key, own, origins, before, changed, tried, limits, left
            )
            try:
                return await self._admitted(opened, call)
            except BudgetExceeded as exceeded:  # another call was faster; nothing is stored of this one
                attempts += 1
                if exceeded.use.limit.unit is not Unit.WALL_SECONDS or attempts == TIME_ATTEMPTS:
                    left = Left(self.budgets.explain(exceeded))

    async def _admitted(self, opened: OpenCall, call: ToolCall) -> OpenCall:
        """Record a call that was admitted or refused, and send it. Raises BudgetExceeded, LinkMoved."""
        try:
            once = opened.read_only and opened.charge is None  # recorded with its end
            first = call.id if once else await self._record(opened, call)
        except asyncio.CancelledError:
            # The write continues, so the end has to follow.
            self._lifecycle.apply(opened, CallEvent.HUNG_UP, "the caller disconnected before the call was sent")
            raise
        except BaseException:
            self._lifecycle.apply(opened, CallEvent.NOT_RECORDED)
            raise
        if first != call.id:
            self._lifecycle.apply(opened, CallEvent.NOT_RECORDED)
            return await self._repeat(first, opened.record.background)
        self._lifecycle.apply(opened, CallEvent.RECORDED if opened.waiting is None else CallEvent.HELD)
        return opened

    def check_route(self, principal: Principal, name: str, args: Mapping[str, str], agent_id: str | None) -> None:
        """Apply the policy to an HTTP route as to a call of the gateway's tool that does the same.

        Raises SwitchedOff if the settings disable that tool, Forbidden where the policy denies the call, or asks about
        it; InvalidArgs.
        """
        self._catalog.refuse_switched_off(name)
        tool = self._catalog.own(name)
        if self._policy() is not None and tool is not None:
            call = ToolCall(new_call_id(), name, msgspec.Raw(msgspec.json.encode(args)), agent_id=agent_id)
            target = Target(None, name, tool.spec.capability, tool.spec, tool)
            self._policy_check.refuse_held(self._catalog.checked(target, call), target, principal, HTTP)

    def check_node(self, principal: Principal, node_id: str) -> None:
        """Check that a principal may see what runs on a node (`gsv`: the gateway's machine), as if it listed the
        commands there with `Process`.

        Raises NotAllowed where the principal is limited to other tools or nodes, or the policy denies that call.
        """
        node = self._node_registry.nodes.get(node_id)
        own = self._catalog.own(OWN_PROCESS) if node_id == NATIVE else None
        if principal.narrowed and not principal.reaches(*((None, OWN_PROCESS) if own else (node_id, PROCESS))):
            raise Denied(f"this credential does not include {node_id!r}; it is limited to some tools or nodes")
        if self._policy() is None or (node is None and own is None):
            return
        if own is not None:
            target = Target(None, OWN_PROCESS, own.spec.capability, own.spec, own)
        else:
            target = Target(node, PROCESS, NODE_TOOLS[PROCESS].capability, None)
        call = ToolCall(new_call_id(), target.names[0], msgspec.Raw(b'{"action":"list"}'))
        self._policy_check.refuse_unseen(call, target, principal)

    def may_see_node(self, principal: Principal, node_id: str) -> bool:
        """Return whether `check_node` lets a principal pass."""
        try:
            self.check_node(principal, node_id)
        except NotAllowed:
            return False
        return True

    async def check_folder_transfer(
        self, transfer_id: str, args: Mapping[str, str], credential: str, agent_id: str | None
    ) -> None:
        """Apply the policy to a transfer whose source has turned out to be a folder: rules about files below it count.

        `transfer_id` is that of its call, if a call began it. Raises Forbidden.
        """
        tool = self._catalog.own(TRANSFER)
        if self._policy() is None or tool is None:
            return
        opened = self._open(transfer_id)
        record = None if opened is None else opened.record
        if opened is not None and opened.principal is not None:
            principal, origins = opened.principal, opened.origins or HTTP
        else:
            principal, origins = Principal(self._named(credential)), HTTP
        approval = await self._database.read(lambda store: find_approval(store, transfer_id))
        self._policy_check.check_folder(
            ToolCall(
                transfer_id,
                TRANSFER,
                msgspec.Raw(msgspec.json.encode(args)),
                session_key=None if record is None else record.session_key,
                agent_id=agent_id,
            ),
            Target(None, TRANSFER, tool.spec.capability, tool.spec, tool),
            principal,
            origins,
            approved=approval is not None and approval.state is ApprovalState.APPROVED,
        )

    async def charge_transfer(self, transfer_id: str, ends: Mapping[str, str], credential: str, size: int) -> None:
        """Reserve what a transfer uses of budgets, once its size is known. Raises Denied.

        `transfer_id` is that of its call, if a call began it. The transfer settles `transfer:ID` when it ends.
        """
        opened = self._open(transfer_id)
        wants = {Unit.BYTES: Want(size, size)}
        if opened is not None and opened.principal is not None:
            limits = await self.budgets.limits(opened.principal, opened.record.session_key)
        else:  # it is no call, so it counts as one
            limits = await self.budgets.limits(Principal(self._named(credential)), None)
            wants |= {Unit.CALLS: Want(1, 1), Unit.WALL_SECONDS: Want(0, 1)}
        if limits:
            nodes = machines_of(list(ends.values()), self._node_registry)
            try:
                await self.budgets.take(f"transfer:{transfer_id}", limits, wants, nodes)
            except BudgetExceeded as exceeded:
                raise Denied(self.budgets.explain(exceeded)) from None

    async def charge_route(self, principal: Principal, size: int = 0) -> Meter:
        """Count a request that does what a call of a tool would do, and `size` bytes of it.

        Returns a meter for bytes that are not known before. Raises Denied.
        """
        limits = await self.budgets.limits(principal, None)
        if limits:
            hold, wants = f"route:{new_call_id()}", wants_of(size, 1)
            wants = {**wants, Unit.BYTES: Want(size, max(size, 1)), Unit.WALL_SECONDS: Want(0, 1)}
            try:
                await self.budgets.take(hold, limits, wants)
            except BudgetExceeded as exceeded:
                raise Denied(self.budgets.explain(exceeded)) from None
            await self.budgets.settle(hold, {})
        return Meter(self.budgets, limits, timed=False)

    async def meter(self, principal: Principal, *, timed: bool = False) -> Meter:
        """Return a meter for a connection of a principal. Raises Denied if nothing is left for it."""
        meter = Meter(self.budgets, await self.budgets.limits(principal, None), timed=timed)
        await meter.flush()
        return meter

    def check_attach(self, record: CallRecord, principal: Principal) -> None:
        """Check that a principal may send input to the command of a call: it needs the rights to make that call.

        The credential that made the call needs no second approval. Raises NotAllowed, NotFound.
        """
        if (order := self._frozen()) is not None:
            raise order.refusal()
        call = ToolCall(record.id, record.tool, record.args, record.session_key, record.agent_id)
        target = self._catalog.find_known(record.tool)
        self._policy_check.check_valid(principal)
        allow(target, principal)
        self._policy_check.refuse_denied(call, target, principal, held=principal.id != record.credential)

    async def wait(self, opened: OpenCall) -> CallRecord:
        """Return the record of a call once it has ended; for one in the background, as it is now.

        The caller counts as waiting until `abandon`.
        """
        return opened.record if opened.record.background else await opened.ended()

    def abandon(self, opened: OpenCall) -> None:
        """Stop waiting for a call; it is cancelled when no other caller wants it."""
        opened.waiters -= 1
        if not opened.wanted:
            self._lifecycle.cancel(opened, "the caller disconnected")

    def stop(self, opened: OpenCall, reason: str) -> None:
        """Cancel a call that may be wanted later, unless it has ended."""
        if not opened.over:
            self._lifecycle.cancel(opened, reason)

    async def cancel(self, call_id: str, reason: str = "cancelled on request") -> CallRecord | None:
        """Cancel an open call and return its end; return any other call as it ended."""
        opened = self._open(call_id)
        if opened is None:
            record = await self.find(call_id)
            if record is not None and record.ended_at is None and self._fleet is not None:
                await self._fleet.cancel(call_id, reason)
                return await self._fleet.end_of(call_id)
            return record
        self._lifecycle.cancel(opened, reason)
        return await opened.ended()

    def stop_all(self, reason: str) -> int:
        """Cancel every call that runs, and return how many there are."""
        running = [opened for opened in self._lifecycle.calls.values() if not opened.over and not opened.stopping]
        for opened in running:
            self._lifecycle.cancel(opened, reason)
        return len(running)

    def credential_ended(self, token_id: str) -> None:
        """Refuse the waiting calls of a token that was revoked or has expired, and cancel those that run."""
        self.waiting_calls.credential_ended(token_id)
        for opened in list(self._lifecycle.calls.values()):
            if opened.principal is not None and token_id in opened.principal.ids:
                self._cancel_invalid(opened)

    def _cancel_invalid(self, opened: OpenCall) -> bool:
        reason = None if opened.principal is None else self._policy_check.invalid(opened.principal)
        if reason is not None:
            self._lifecycle.cancel(opened, reason)
        return reason is not None

    # -- the open calls ---------------------------------------------------------------------------------

    def _open(self, call_id: str) -> OpenCall | None:
        return self._lifecycle.calls.get(call_id) or self.waiting_calls.calls.get(call_id)

    def is_open(self, call_id: str) -> bool:
        """Whether a call runs or waits; False also while its end is being recorded."""
        opened = self._open(call_id)
        return opened is not None and not opened.over

    async def is_over(self, call_id: str) -> bool:
        """Whether a call has ended, here or at another gateway, or never was."""
        opened = self._open(call_id)
        if opened is not None:
            return opened.over
        record = await self.find(call_id)
        return record is None or record.ended_at is not None

    def is_known(self, call_id: str) -> bool:
        """Whether a call is open here, or its end is being recorded here."""
        return self._open(call_id) is not None

    def has_open_calls(self, node_id: str) -> bool:
        """Whether calls of a node are open here."""
        return bool(self._lifecycle.of_node(node_id))

    def recovered_at(self, node_id: str) -> float | None:
        """Return when calls of a node that another process had sent were last recovered, by the monotonic clock.

        None if no call of the node is open here. A hello from before that time does not say whether the node has them.
        """
        if node_id in self._recovered and not self.has_open_calls(node_id):
            del self._recovered[node_id]
        return self._recovered.get(node_id)

    async def find(self, call_id: str) -> CallRecord | None:
        opened = self._open(call_id)
        if opened is not None:
            return opened.record
        return await self._database.read(lambda connection: calls.find(connection, call_id))

    def running(self, call_id: str) -> OpenCall | None:
        """Return a call that has not ended."""
        return self._open(call_id)

    async def end_of(self, call_id: str) -> CallRecord | None:
        """Return the record of a call once it has ended; None when there is no such call."""
        opened = self._open(call_id)
        if opened is None and self._fleet is not None:
            return await self._fleet.end_of(call_id)
        return await self.find(call_id) if opened is None else await opened.ended()

    def open_records(self) -> list[CallRecord]:
        return [opened.record for opened in (*self._lifecycle.calls.values(), *self.waiting_calls.calls.values())]

    @property
    def open_count(self) -> int:
        return len(self._lifecycle.calls)

    # -- admission --------------------------------------------------------------------------------------

    def _admit(
        self,
        call: ToolCall,
        principal: Principal,
        background: bool,
        idempotency_key: str | None,
        own: Tool | None,
        origins: Sequence[str],
        before: int | None,
        changed: tuple[str, ...] | None = (),
        tried: CallRecord | None = None,
        limits: tuple[Limit, ...] = (),
        left: Left = Left(),  # noqa: B008
    ) -> OpenCall:
        """Resolve the tool, check the call and register it as open; a call that is refused has ended.

        `tried`: the call whose trial this one keeps. `limits` and `left`: the budgets that apply, and what is left.
        """
        now = self._node_registry.clock()
        target: Target | None = None
        refusal: ToolError | None = None
        waiting: Waiting | None = None
        timeout_ms, request, shortens = 0, b"", False
        try:
            if self.closing:
                raise Failed("the gateway is stopping; the call did not run")
            if (order := self._frozen()) is not None:
                raise order.refusal()
            _check_names(call)
            call = resolved(msgspec.structs.replace(call, asker=call.asker or principal.asker.id))
            principal = self._policy_check.current(principal)
            target = self._find(call.tool, own, principal, known=before is not None)
            allow(target, principal)
            call = self._catalog.checked(target, call)
            allow_input(target, call, principal)
            self._handles.check(call.args, call.tool, None if target.node is None else target.node.card.node_id)
            timeout_ms = time_limit(call, target)
            if self._policy() is not None or before is not None:
                call = self._policy_check.as_trial(unambiguous(call), target, principal, origins)
                held = self.waiting_calls.calls.values()
                waiting = self._policy_check.check_new(
                    call, target, principal, origins, before, timeout_ms, held, changed
                )
                if tried is not None and (waiting is None or waiting.why != "approval"):
                    self._refuse_keeping(tried, principal, origins)
            if left.refusal is not None:
                raise Denied(f"{left.refusal}; the call did not run")
            if waiting is None and left.wall_ms is not None and left.wall_ms < timeout_ms:
                timeout_ms, shortens = left.wall_ms, True
            if idempotency_key is not None:
                self.keyed_calls.take(principal.actor, ROW_BYTES + len(bytes(call.args)), now)
            if waiting is None:
                self._lifecycle.check_capacity(target.node)
                if target.node is not None:
                    request = request_frame(call, target, target.node, timeout_ms)
        except ToolError as error:
            refusal, timeout_ms = bare(error), 0
        away = None if isinstance(refusal, Denied) else self._catalog.awaited(call.tool)
        node = target.node if target else away
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
            node_boot=node.connection.boot if node and node.connection else None,
            background=background or (waiting is not None and waiting.why == "node"),
            idempotency_key=idempotency_key,
            created_at=now,
            deadline_at=now + timeout_ms,
        )
        if target is None or refusal is not None:
            assert refusal is not None, "a call without a target was refused"
            state = CallState.DENIED if isinstance(refusal, Denied | SwitchedOff | Frozen) else CallState.ERROR
            self.durations[record.route, state].add(0.0)
            record = ended(record, state, ToolResult(False, error=ToolFailure.of(refusal)), now, 0.0)
            return OpenCall.settled(shortened(record, self.secrets), raised=refusal)
        opened = OpenCall(record, own=target.own, principal=principal, origins=tuple(origins), asker=call.asker)
        opened.waiters += not record.background
        if waiting is not None:
            self.waiting_calls.admit(opened, waiting)
            return opened
        if limits:
            opened.charge = Charge(limits, nodes_of(call, target, self._node_registry), shortens)
        opened.node, opened.request = target.node, request
        promised = background or idempotency_key is not None
        opened.read_only = target.spec is not None and target.spec.read_only and not promised
        self._lifecycle.admit(opened, timeout_ms / 1000)
        return opened

    def _find(self, tool: str, own: Tool | None, principal: Principal, *, known: bool) -> Target:
        """Return the tool that a name calls; `known`: also on a node that is offline. Raises ToolError, which
        does not mention nodes and MCP servers beyond the limits of the principal, whether there are such or not."""
        try:
            target = self._catalog.find_known(tool) if known else self._catalog.find(tool, own)
        except ToolError:
            named = split_tool(tool)
            away = [named[0]] if named else [one.card.node_id for one in self._node_registry.away_serving(tool)]
            for node_id in away:
                check_known(principal, node_id, tool)
            raise
        server = target.own.server if target.own is not None else ""
        if host := target.node.card.node_id if target.node is not None else server:
            check_known(principal, host, tool)
        return target

    async def _tried(self, call: ToolCall) -> CallRecord | None:
        """Return the call whose trial a call keeps, or whose trial is part of an approval."""
        if self.closing or self.frozen is not None:
            return None
        try:
            named = named_trial(call.tool, read_arguments(call.args))
        except InvalidArgs:
            return None
        record = None if named is None else await self.find(named[0])
        return record if named is None or named[1] or is_preview(record) else None

    def _refuse_keeping(self, tried: CallRecord, principal: Principal, origins: Sequence[str]) -> None:
        if is_preview(tried):
            if origins is not GATEWAY and principal.id != OWNER.id:
                raise Denied(
                    "this trial belongs to a call that waits for approval; only the answer keeps or discards it"
                )
            return
        call = ToolCall(tried.id, tried.tool, tried.args, tried.session_key, tried.agent_id)
        self._policy_check.refuse_keeping(call, self._catalog.find_known(tried.tool), principal, origins)

    async def _changed_files(self, call: ToolCall, principal: Principal, own: Tool | None) -> tuple[str, ...] | None:
        """Return the files that a call changes without naming them; None if they cannot be known now, as while its node
        is offline, and for a call that will be refused."""
        if not names_no_files(call.tool):
            return ()
        if self.closing or self.frozen is not None:
            return None
        try:
            target = self._catalog.find(call.tool, own)
            self._policy_check.check_valid(principal)
            allow(target, principal)
            return await self._policy_check.changed_files(self._catalog.checked(target, call), target, principal)
        except ToolError:
            return None

    async def _record(self, opened: OpenCall, call: ToolCall) -> str:
        """Record a call that was admitted or refused; return the id of the call that the idempotency key stands for."""
        record, key, refused = opened.record, opened.record.idempotency_key, opened.over
        stored = not refused or self.refusals.take(record, record.created_at)

        begin = calls.begin if opened.waiting is None else partial(begin_waiting, row=row_of(record, opened.waiting))
        connection = opened.connection
        socket = None if connection is None else connection.socket
        take = None if opened.charge is None else opened.charge.taking(record, record.created_at)
        if key is None:
            if opened.read_only and take is not None:
                await self._database.write(take, durable=False)
            if opened.read_only or not stored:
                return record.id
            if refused or opened.waiting is not None:
                await self._database.write(partial(begin, record=record), durable=not refused)
            else:
                await self._lifecycle.recorder.begin(record, socket, take)
            return record.id
        body = hashlib.sha256(b"%b\0%b" % (call.tool.encode(), canonical(call.args))).digest()
        # A call that is refused does not use the key up: it may be tried again.
        claim = keys.claimed if refused else keys.claim

        def begin_once(store: Tx) -> tuple[str, bytes]:
            first = claim(store, record.credential, key, body, record.id, record.created_at)
            if first[0] == record.id and take is not None:
                take(store)
            if first[0] == record.id and stored:
                if socket is not None and record.node_id is not None:
                    check_link(store, record.node_id, socket)
                begin(store, record)
            return first

        first, first_body = await self._database.write(begin_once)
        if first_body != body:
            raise IdempotencyConflict(f"the idempotency key {key!r} was used for another request")
        return first

    async def _repeat(self, call_id: str, background: bool) -> OpenCall:
        """Return the call that an earlier request with the same key made; wait for its end unless in the background."""
        record = await (self.find(call_id) if background else self.end_of(call_id))
        if record is None:
            raise StoreError(f"call {call_id} is not in the record")
        return OpenCall.settled(record, repeated=True)

    # -- start and stop ---------------------------------------------------------------------------------

    async def recover(self, own: Callable[[Tx], Collection[str]] | None = None) -> int:
        """Take up the calls that were open when the gateway last stopped; return how many still are.

        `own` returns those that belong to this gateway, where several share the store. Calls that are open here
        already are left alone.
        """
        now = self._node_registry.clock()
        rows, wanted = await self._database.read(lambda tx: (all_waiting(tx), None if own is None else own(tx)))
        listed = await self._database.read(calls.open_calls)
        left = [one.id for one in listed if (wanted is None or one.id in wanted) and self._open(one.id) is None]
        # Read again: a call of this gateway may have ended since it was listed.
        for record, approval in await self._database.read(partial(_with_approvals, call_ids=left)):
            if record.ended_at is not None or self._open(record.id) is not None:
                continue
            if record.state is CallState.WAITING:
                self.waiting_calls.recover(record, rows.get(record.id))
            else:
                self._recover(record, now, trial_of(approval))
        return sum(not opened.over for opened in self._lifecycle.calls.values())

    def _recover(self, record: CallRecord, now: int, keeps: str) -> None:
        own = None if record.route == "node" else self._catalog.own(OWN if keeps else record.tool)
        node = self._node_registry.nodes.get(record.node_id or "")
        frame = repeated_frame(record, keeps)
        opened = OpenCall(record, node, frame, own=own, keeps=keeps, state=OpenState.RUNNING)
        opened.principal = self._recorded_principal(record)
        opened.charge = Charge(())  # what it reserved, if anything, is in the store
        opened.started -= max(0, now - record.created_at) / 1000
        self._lifecycle.admit(opened, max(RETURN_SECONDS, (record.deadline_at - now) / 1000))
        if record.node_id is not None and record.node_boot is not None:
            self._recovered[record.node_id] = time.monotonic()
        if self._cancel_invalid(opened):
            return
        if own is not None and own.continues:
            self._lifecycle.dispatch(opened)
        elif record.node_boot is None:
            where = f"node {record.node_id!r}" if record.route == "node" else repr(record.tool)
            self._lifecycle.apply(opened, CallEvent.LOST, f"the gateway stopped while {where} ran the call")

    def _recorded_principal(self, record: CallRecord) -> Principal:
        """Return the principal of a call of an earlier process, as far as the record and the tokens show it."""
        if record.on_behalf_of is None:
            return Principal(self._named(record.credential))
        return Principal.agent(record.credential.removeprefix("agent:"), self._named(record.on_behalf_of))

    def _named(self, credential: str) -> Credential:
        return Credential(credential, frozenset()) if self._credentials is None else self._credentials.named(credential)

    @property
    def closing(self) -> bool:
        return self._lifecycle.closing

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, and give those that callers wait for some time to end."""
        self._lifecycle.closing = True
        waiting = [opened.ended() for opened in self._lifecycle.calls.values() if opened.waiters]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)

    def close(self) -> None:
        """Release the callers. Open calls stay open in the record and are resumed at the next start."""
        self._lifecycle.close()
        self.node_calls.close()
        self.waiting_calls.close()


def _end_span(span: tracing.Span, ended: asyncio.Future[CallRecord]) -> None:
    if ended.cancelled() or ended.exception() is not None:
        span.end("the gateway stopped")
        return
    record = ended.result()
    span.end("" if record.state is CallState.OK else f"{record.state}: {record.error_message or ''}"[:500])


def _check_names(call: ToolCall) -> None:
    """Raise InvalidArgs for names that are too long for a session or an agent."""
    if call.session_key is None and call.agent_id is None:
        return
    for name, value in (("session_key", call.session_key), ("agent_id", call.agent_id)):
        if value is not None and len(value) > MAX_SESSION_KEY:
            raise InvalidArgs(f"{name} has {len(value)} characters; at most {MAX_SESSION_KEY} are allowed")


def _with_approvals(tx: Tx, call_ids: Sequence[str]) -> list[tuple[CallRecord, Approval | None]]:
    found = [(calls.find(tx, call_id), find_approval(tx, call_id)) for call_id in call_ids]
    return [(record, approval) for record, approval in found if record is not None]


def _no_key() -> bytes:
    raise FarhandError("this gateway stores no secrets")
