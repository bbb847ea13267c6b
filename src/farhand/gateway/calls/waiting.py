"""Calls that are recorded and held back until their owner approves them, or their node is online.

Nothing of such a call has left the gateway. It is checked again when it starts (its tool, the caller's rights, the
policy), it starts at most once (its row leaves `waiting` before its frame leaves the gateway), and when its time is
over it ends without having run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

import msgspec

from farhand.gateway.access.budgets import Budgets
from farhand.gateway.access.principal import decode_principal
from farhand.gateway.calls.admission import Denied, allow, request_frame
from farhand.gateway.calls.catalog import Catalog, SwitchedOff, Target
from farhand.gateway.calls.charging import Charge, nodes_of, wants_of
from farhand.gateway.calls.lifecycle import Lifecycle
from farhand.gateway.calls.open_call import OpenCall, Waiting, bare, ended
from farhand.gateway.calls.policy import Forbidden, Verdict
from farhand.gateway.calls.policy_check import DID_NOT_RUN, PolicyCheck
from farhand.gateway.calls.state import CallEvent, OpenState
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.repeating import BackgroundTasks
from farhand.machine.time_zone import utc_text
from farhand.protocol.calls import ToolCall, ToolFailure, ToolResult
from farhand.protocol.errors import Failed, ToolError
from farhand.protocol.freeze import FreezeOrder
from farhand.store.ports import Store, StoreError
from farhand.store.tables.accounts.budgets import BudgetExceeded
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.waiting_calls import (
    Approval,
    ApprovalState,
    WaitingRow,
    hold_waiting,
    start_waiting,
    trial_of,
)
from farhand.tools.trial import OWN

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
LONGEST_TIMER = 86_400.0


class NodeBusy(Exception):
    """The node has too many calls open; the call can start later."""


class Approver(Protocol):
    """Asks the owner about calls that need an approval (`gateway.control.approvals`)."""

    async def find(self, name: str) -> Approval | None: ...

    async def attempt(self, opened: OpenCall, waiting: Waiting, target: Target) -> CallRecord | None:
        """Run a call as a trial before its owner is asked; return how that ended, None if the call ended first."""
        ...

    async def ask(
        self, opened: OpenCall, waiting: Waiting, target: Target, tried: CallRecord | None
    ) -> Approval | None: ...

    def follow(self, opened: OpenCall, approval: Approval) -> None:
        """Discard the trial of an approval if its call ends without keeping it."""
        ...

    async def change(self, opened: OpenCall, approval: Approval, target: Target) -> str | None: ...


class WaitingCalls:
    """Holds calls, and starts or ends them. Its owner calls `close`."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        policy: PolicyCheck,
        database: Store,
        node_registry: NodeRegistry,
        catalog: Catalog,
        frozen: Callable[[], FreezeOrder | None],
        approvals: Approver | None,
        budgets: Budgets,
    ) -> None:
        """`frozen` returns the order under which no call starts; `resume` follows once it is lifted."""
        self._lifecycle = lifecycle
        self._policy = policy
        self._database = database
        self._node_registry = node_registry
        self._catalog = catalog
        self._frozen = frozen
        self.calls = lifecycle.waiting
        self._approvals = approvals
        self._budgets = budgets
        self._tasks = BackgroundTasks()

    # -- holding ----------------------------------------------------------------------------------------

    def admit(self, opened: OpenCall, waiting: Waiting) -> None:
        """Take in a call; its deadline is that of the wait."""
        opened.waiting = waiting
        opened.record = _waiting_record(opened.record, waiting)
        self.calls[opened.record.id] = opened

    def hold(self, opened: OpenCall) -> None:
        """Make a call wait that is recorded as waiting."""
        waiting = opened.waiting
        assert waiting is not None
        self._set_deadline(opened)
        if waiting.patience_ms is not None and opened.waiters:
            asyncio.get_running_loop().call_later(waiting.patience_ms / 1000, self._release_caller, opened)
        self._advance(opened)

    def recover(self, record: CallRecord, row: WaitingRow | None) -> None:
        """Take up a call that waited when the gateway stopped."""
        own = None if record.route == "node" else self._catalog.own(record.tool)
        opened = OpenCall(record, own=own, state=OpenState.WAITING)
        if row is None:
            self._refuse(opened, Failed("what the call waited for is not recorded"))
            return
        waiting = Waiting(
            why=row.why,
            principal=decode_principal(row.credential),
            origins=tuple(row.origins.split("\n")),
            timeout_ms=row.timeout_ms,
            until=record.deadline_at,
            before=row.before,
            rule=row.rule,
        )
        opened.principal, opened.origins = waiting.principal, waiting.origins
        self.admit(opened, waiting)
        if not self._refuse_invalid(opened):
            self.hold(opened)

    def credential_ended(self, token_id: str) -> None:
        """Refuse the waiting calls that involve a token that was revoked or has expired."""
        for opened in list(self.calls.values()):
            if opened.principal is not None and token_id in opened.principal.ids:
                self._refuse_invalid(opened)

    def _refuse_invalid(self, opened: OpenCall) -> bool:
        try:
            if opened.principal is not None:
                self._policy.check_valid(opened.principal)
        except Denied as error:
            self._refuse(opened, error)
            return True
        return False

    def resume(self) -> None:
        """Try to start the waiting calls: a node is back, its tools changed, or the gateway is no longer frozen."""
        for opened in list(self.calls.values()):
            self._advance(opened)

    def close(self) -> None:
        """Release the callers; the calls stay recorded as waiting."""
        self._tasks.cancel()
        for opened in self.calls.values():
            if opened.deadline is not None:
                opened.deadline.cancel()
            if not opened.over:
                # Not `failed`, which would mean that the call will never run.
                message = "the gateway stopped; the call has not run and still waits: ask for it by its id"
                opened.release(self._unfinished(opened, message))

    def _set_deadline(self, opened: OpenCall) -> None:
        if opened.deadline is not None:
            opened.deadline.cancel()
        seconds = max(0.0, (opened.record.deadline_at - self._node_registry.clock()) / 1000)
        loop = asyncio.get_running_loop()
        opened.deadline = loop.call_later(min(seconds, LONGEST_TIMER), self._expire, opened)

    def _expire(self, opened: OpenCall) -> None:
        record, waiting = opened.record, opened.waiting
        if opened.state is not OpenState.WAITING or waiting is None:
            return
        if self._node_registry.clock() < record.deadline_at:  # the clock was set back, or the timer was the longest
            self._set_deadline(opened)
        elif waiting.why == "approval":
            answered = "it was approved but could not start" if _approved(waiting) else "it was not approved"
            self._refuse(opened, Forbidden(f"{answered} before {utc_text(record.deadline_at)}"))
        else:
            where = f"node {record.node_id!r}" if record.node_id else f"a node with {record.tool!r}"
            reason = f"{where} was not back before {utc_text(record.deadline_at)}"
            self._lifecycle.apply(opened, CallEvent.DEADLINE, reason)

    def _release_caller(self, opened: OpenCall) -> None:
        """Answer a caller that waits no longer; the call keeps waiting."""
        waiting, record = opened.waiting, opened.record
        if opened.state is not OpenState.WAITING or waiting is None:
            return
        named = f" {waiting.approval.id}" if waiting.approval else ""
        what = "its node" if waiting.why == "node" else f"approval{named}"
        message = (
            f"call {record.id} has not run: it waits for {what} until {utc_text(record.deadline_at)}; "
            f"its state is at /v1/calls/{record.id} (`farhand calls show {record.id}`)"
        )
        opened.release(self._unfinished(opened, message))

    def _unfinished(self, opened: OpenCall, message: str) -> CallRecord:
        """Return the record of a waiting call for a caller who leaves."""
        result = ToolResult.failed("timeout", message)
        record = ended(opened.record, CallState.WAITING, result, self._node_registry.clock(), 0.0)
        return msgspec.structs.replace(record, ended_at=None)

    # -- asking and starting ----------------------------------------------------------------------------

    def approve(self, opened: OpenCall, approval: Approval) -> None:
        """Start a call as soon as possible: its owner approved it."""
        if opened.waiting is not None:
            opened.waiting.approval = approval
            self._advance(opened)

    def deny(self, opened: OpenCall, approval: Approval) -> None:
        why = f": {approval.remark}" if approval.remark else ""
        self._refuse(opened, Forbidden(f"denied by {approval.decided_by}{why}"))

    def _advance(self, opened: OpenCall) -> None:
        """Ask for an approval or start the call, whichever is next and possible now."""
        waiting = opened.waiting
        if opened.state is not OpenState.WAITING or waiting is None or waiting.busy or self._lifecycle.closing:
            return
        if waiting.why == "approval" and waiting.approval is None:
            step = self._ask
        elif waiting.why == "node" or _approved(waiting):
            step = self._start
        else:
            return
        waiting.busy = True
        self._tasks.start(self._run_step(opened, waiting, step))

    async def _run_step(
        self, opened: OpenCall, waiting: Waiting, step: Callable[[OpenCall, Waiting], Coroutine[Any, Any, bool]]
    ) -> None:
        """Run one step of a call; a step returns whether the next one can follow."""
        follow, delay = False, 0.0
        try:
            follow = await step(opened, waiting)
        except NodeBusy:
            follow, delay = True, RETRY_SECONDS
        except ToolError as error:
            self._refuse(opened, error)
        except StoreError as error:
            log.error("call %s keeps waiting: %s", opened.record.id, error)
            follow, delay = True, RETRY_SECONDS
        finally:
            waiting.busy = False
        if follow:
            asyncio.get_running_loop().call_later(delay, self._advance, opened)

    async def _ask(self, opened: OpenCall, waiting: Waiting) -> bool:
        """Ask the owner, unless that was done before the gateway stopped."""
        assert self._approvals is not None, "approvals are set up before the first call"
        record = opened.record
        approval = await self._approvals.find(record.id)
        if approval is None:
            if self._offline(record):
                return False
            target = self._catalog.find_again(record.tool, record.node_id, opened.own)
            verdict = await self._policy.previewed(_call(record), target, waiting)
            tried = None
            if verdict is not None:
                if self._frozen() is not None:
                    return False
                try:
                    self._lifecycle.check_capacity(target.node)
                except Failed:
                    raise NodeBusy from None
                tried = await self._approvals.attempt(opened, waiting, target)
                if tried is None or opened.over or self._lifecycle.closing:
                    return False
                await self._wait_for_approval(opened, waiting, target, verdict)  # from now on
            approval = await self._approvals.ask(opened, waiting, target, tried)
        if approval is None or opened.over:
            return False
        self._approvals.follow(opened, approval)
        if waiting.approval is None:  # else it was answered while the approvers were still being notified
            waiting.approval = approval
            opened.approval_asked(approval)
        if waiting.approval.state is ApprovalState.DENIED:
            self.deny(opened, waiting.approval)
        return _approved(waiting)

    async def _start(self, opened: OpenCall, waiting: Waiting) -> bool:
        """Check a call again and send it, if that is possible now."""
        record = opened.record
        frozen = self._frozen() is not None
        if frozen or self._offline(record) or self._node_registry.clock() >= record.deadline_at:
            return False
        pinned = record.node_id if waiting.why == "approval" else None
        target = self._catalog.find_again(record.tool, pinned, opened.own)
        approval_needed = await self._check(record, waiting, target)
        opened.principal = waiting.principal
        if waiting.why == "approval":
            assert self._approvals is not None and waiting.approval is not None
            change = await self._approvals.change(opened, waiting.approval, target)
            if change is not None:
                raise Forbidden(f"{change} since the approval was asked for, so this is not what was approved")
        elif approval_needed is not None:
            await self._wait_for_approval(opened, waiting, target, approval_needed)
            return True
        if not opened.over and not self._lifecycle.closing and self._frozen() is None:
            try:
                self._lifecycle.check_capacity(target.node)
            except Failed:
                raise NodeBusy from None
            await self._send(opened, waiting, target)
        return False

    def _offline(self, record: CallRecord) -> bool:
        """Whether the node of a call is known and not connected."""
        if record.node_id is None:
            return record.route == "node" and self._catalog.away(record.tool)
        node = self._node_registry.nodes.get(record.node_id)
        return node is not None and not node.online

    async def _check(self, record: CallRecord, waiting: Waiting, target: Target) -> Verdict | None:
        """Return the verdict if the policy requires an approval. Raises ToolError when the call may not run."""
        waiting.principal = self._policy.current(waiting.principal)
        allow(target, waiting.principal)
        return await self._policy.check_again(self._catalog.checked(target, _call(record)), target, waiting)

    async def _wait_for_approval(self, opened: OpenCall, waiting: Waiting, target: Target, verdict: Verdict) -> None:
        """Make a call whose node is back wait for an approval."""
        until = self._policy.until(verdict, waiting.before)
        changed = msgspec.structs.replace(
            waiting, why="approval", until=until, rule=verdict.rule, reason=verdict.reason
        )
        node_id = target.node.card.node_id if target.node else None
        record = _waiting_record(msgspec.structs.replace(opened.record, node_id=node_id), changed)
        now = self._node_registry.clock()
        row = row_of(record, changed)
        await self._database.write(lambda store: hold_waiting(store, record, row, now))
        waiting.why, waiting.until, waiting.rule, waiting.reason = "approval", until, verdict.rule, verdict.reason
        opened.record = record
        self._set_deadline(opened)

    async def _send(self, opened: OpenCall, waiting: Waiting, target: Target) -> None:
        timeout_ms, limits = (
            waiting.timeout_ms,
            await self._budgets.limits(waiting.principal, opened.record.session_key),
        )
        if limits:
            left = await self._budgets.left(limits, wants_of(len(bytes(opened.record.args)), 1))
            if left.refusal is not None:
                raise Denied(left.refusal)
            timeout_ms = timeout_ms if left.wall_ms is None else min(timeout_ms, left.wall_ms)
        nodes = nodes_of(_call(opened.record), target, self._node_registry)
        charge = Charge(limits, nodes, timeout_ms < waiting.timeout_ms) if limits else None
        now = self._node_registry.clock()
        node = target.node
        record = msgspec.structs.replace(
            opened.record,
            state=CallState.RUNNING,
            route=target.kind,
            node_id=node.card.node_id if node else None,
            capability=target.capability,
            node_boot=node.connection.boot if node and node.connection else None,
            deadline_at=now + timeout_ms,
        )
        # From here on it counts as started: it is never sent a second time, whatever happens.
        socket = node.connection.socket if node and node.connection else None
        take = None if charge is None else charge.taking(record, now)
        try:
            started = await self._database.write(
                partial(start_waiting, record=record, now=now, socket=socket, take=take)
            )
        except BudgetExceeded as exceeded:
            raise Denied(self._budgets.explain(exceeded)) from None
        opened.charge = charge
        if not started or opened.over or self._lifecycle.closing:
            return
        if opened.deadline is not None:
            opened.deadline.cancel()
        self.calls.pop(record.id, None)
        opened.record, opened.node, opened.started = record, node, time.perf_counter()
        opened.keeps = trial_of(waiting.approval)
        if opened.keeps and opened.own is not None:
            opened.own = self._catalog.own(OWN)
        if node is not None:
            opened.request = request_frame(
                msgspec.structs.replace(_call(record), trace=opened.trace), target, node, timeout_ms, opened.keeps
            )
        self._lifecycle.admit(opened, timeout_ms / 1000)
        self._lifecycle.apply(opened, CallEvent.STARTED)

    def _refuse(self, opened: OpenCall, error: ToolError) -> None:
        opened.raised = bare(error)
        message = error.message if error.message.endswith(DID_NOT_RUN) else f"{error.message}; {DID_NOT_RUN}"
        event = CallEvent.DENIED if isinstance(error, Denied | SwitchedOff) else CallEvent.REFUSED
        self._lifecycle.apply(opened, event, ToolResult(ok=False, error=ToolFailure(error.kind.value, message)))


def _waiting_record(record: CallRecord, waiting: Waiting) -> CallRecord:
    return msgspec.structs.replace(record, state=CallState.WAITING, node_boot=None, deadline_at=waiting.until)


def _call(record: CallRecord) -> ToolCall:
    return ToolCall(record.id, record.tool, record.args, record.session_key, record.agent_id, asker=record.asker)


def _approved(waiting: Waiting) -> bool:
    return waiting.approval is not None and waiting.approval.state is ApprovalState.APPROVED


def row_of(record: CallRecord, waiting: Waiting) -> WaitingRow:
    """Return what is stored of a waiting call beside its record."""
    return WaitingRow(
        call_id=record.id,
        why=waiting.why,
        credential=msgspec.Raw(msgspec.json.encode(waiting.principal)),
        origins="\n".join(waiting.origins),
        timeout_ms=waiting.timeout_ms,
        before=waiting.before,
        rule=waiting.rule,
    )
