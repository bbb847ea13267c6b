"""Calls that are written down and held back: until their owner approves them, or their node is back.

Nothing of such a call has left the gateway. It is examined again when it starts (its tool, its caller's rights, the
policy), it starts at most once (its row leaves `waiting` before its frame leaves the gateway), and when its time is
over it ends without having run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import msgspec

from farhand.gateway.access.principal import Principal, decode_principal
from farhand.gateway.calls.admission import Denied, allow
from farhand.gateway.calls.catalog import Catalog, SwitchedOff, Target
from farhand.gateway.calls.open_call import OpenCall, Parked, bare, ended, failed, stopped
from farhand.gateway.calls.policy import GATEWAY, Forbidden, Policy, Verdict, subject_of
from farhand.gateway.nodes.registry import Node, NodeRegistry
from farhand.protocol.calls import ToolCall, ToolFailure, ToolResult
from farhand.protocol.errors import Failed, ToolError
from farhand.store.journal.events import append_event
from farhand.store.ports import Store, StoreError, Tx, log_failure
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.waiting_calls import (
    Approval,
    ApprovalState,
    ParkedRow,
    begin_parked,
    hold_parked,
    start_parked,
)

log = logging.getLogger(__name__)

MOST_WAITING = 1000
MOST_WAITING_PER_CREDENTIAL = 250
# Of the arguments of all waiting calls of one credential: they are kept until the calls end.
# Calls that may wait at once: a caller who is asked about must not be able to fill the gateway.
MOST_WAITING_BYTES = 64 * 1024 * 1024
AGAIN_SECONDS = 1.0
LONGEST_TIMER = 86_400.0
DID_NOT_RUN = "the call did not run"


class Busy(Exception):
    """The node has too much to do; the call can start later."""


class Asker(Protocol):
    """Asks the owner about calls that need an approval (`gateway.control.approvals`)."""

    async def find(self, name: str) -> Approval | None: ...

    async def ask(self, opened: OpenCall, parked: Parked, target: Target) -> Approval | None: ...

    async def change(self, opened: OpenCall, approval: Approval, target: Target) -> str | None: ...


class Sender(Protocol):
    """The gate, as far as waiting calls need it."""

    policy: Policy | None

    @property
    def closing(self) -> bool: ...

    def busy(self, node: Node | None) -> bool: ...

    def start(self, opened: OpenCall, record: CallRecord, target: Target, timeout_ms: int) -> None: ...

    def end(self, opened: OpenCall, state: CallState, result: ToolResult) -> None: ...

    def check_valid(self, principal: Principal) -> None: ...


class Parking:
    """Holds calls, and starts or ends them."""

    def __init__(self, gate: Sender, database: Store, node_registry: NodeRegistry, catalog: Catalog) -> None:
        self._gate = gate
        self._database = database
        self._node_registry = node_registry
        self._catalog = catalog
        self.waiting: dict[str, OpenCall] = {}
        self.approvals: Asker | None = None
        # Whether nothing may start at the moment; `look_again` when that is over.
        self.frozen: Callable[[], bool] = lambda: False
        self._tasks: set[asyncio.Task[None]] = set()

    # -- judging ----------------------------------------------------------------------------------------

    def judge(
        self,
        call: ToolCall,
        target: Target,
        principal: Principal,
        origins: Sequence[str],
        before: int | None,
        timeout_ms: int,
    ) -> Parked | None:
        """How a call is to be held back, if it is. Raises Forbidden, Failed when too many wait already."""
        verdict = self.verdict(call, target, principal, origins)
        if verdict is not None and verdict.decision == "deny":
            raise self._forbidden(verdict, call, principal, origins)
        away = target.node is not None and target.node.connection is None
        if away or (verdict is not None and verdict.decision == "ask"):
            if len(self.waiting) >= MOST_WAITING:
                raise Failed(f"busy: {len(self.waiting)} calls wait already; the call did not run, try again later")
            self._check_share(call, principal)
            asked = None if away else verdict
            return Parked(
                why="node" if away else "approval",
                principal=principal,
                origins=tuple(origins),
                timeout_ms=timeout_ms,
                until=self._until(asked, before),
                patience_ms=call.timeout_ms,
                before=before,
                rule="" if asked is None else asked.rule,
                reason="" if asked is None else asked.reason,
            )
        if verdict is not None and verdict.rule != "default":
            facts = {"tool": call.tool, **_who(principal), "origin": list(origins), "rule": verdict.rule}
            self._note("policy.allowed", call.id, facts)
        return None

    def _check_share(self, call: ToolCall, principal: Principal) -> None:
        """Raises Failed when the waiting calls on behalf of one credential leave no room for another."""
        asker = principal.asker.id
        records = [
            opened.record
            for opened in self.waiting.values()
            if opened.principal is not None and opened.principal.asker.id == asker
        ]
        size = sum(len(bytes(record.args)) for record in records) + len(bytes(call.args))
        if len(records) >= MOST_WAITING_PER_CREDENTIAL or size > MOST_WAITING_BYTES:
            raise Failed(
                f"busy: {len(records)} calls of {asker!r} wait already, {size} bytes with this one; at most "
                f"{MOST_WAITING_PER_CREDENTIAL} calls and {MOST_WAITING_BYTES} bytes may wait. The call did not run"
            )

    def verdict(self, call: ToolCall, target: Target, principal: Principal, origins: Sequence[str]) -> Verdict | None:
        policy = self._gate.policy
        if policy is None or origins is GATEWAY:
            return None
        subject = subject_of(
            target,
            call.args,
            credential=principal.id,
            askers=principal.askers,
            session_key=call.session_key,
            origins=origins,
            nodes=self._node_registry.nodes,
        )
        return policy.judge(subject)

    def _until(self, asked: Verdict | None, before: int | None) -> int:
        """When the waiting is over: for a question, when silence counts as a no."""
        policy = self._gate.policy
        if asked is None or policy is None:
            assert before is not None, "a call waits for a node until some moment"
            return before
        until = self._node_registry.clock() + round(policy.seconds(asked) * 1000)
        return until if before is None else min(until, before)

    def _forbidden(self, verdict: Verdict, call: ToolCall, principal: Principal, origins: Sequence[str]) -> Forbidden:
        facts = {"tool": call.tool, **_who(principal), "origin": list(origins), "rule": verdict.rule}
        self._note("policy.denied", call.id, facts)
        why = f": {verdict.reason}" if verdict.reason else ""
        return Forbidden(f"the policy denies {call.tool!r} ({verdict.rule}){why}; {DID_NOT_RUN}")

    # -- holding ----------------------------------------------------------------------------------------

    def admit(self, opened: OpenCall, parked: Parked) -> None:
        opened.parked = parked
        opened.promised = True
        self.waiting[opened.record.id] = opened

    @staticmethod
    def waiting_record(record: CallRecord, parked: Parked) -> CallRecord:
        """A call's record while it waits; its deadline is that of the waiting."""
        return msgspec.structs.replace(record, state=CallState.WAITING, node_boot=None, deadline_at=parked.until)

    @staticmethod
    def begin(record: CallRecord, parked: Parked) -> Callable[[Tx, CallRecord], None]:
        """Return the operation that stores such a call."""
        return partial(begin_parked, row=_row(record, parked))

    def hold(self, opened: OpenCall, parked: Parked) -> None:
        """A call is written down and waits from now on."""
        self._set_deadline(opened)
        if parked.patience_ms is not None and opened.waiters:
            asyncio.get_running_loop().call_later(parked.patience_ms / 1000, self._lose_patience, opened)
        self._go_on(opened)

    def recover(self, record: CallRecord, row: ParkedRow | None) -> None:
        """Take up a call that waited when the gateway stopped."""
        own = None if record.route == "node" else self._catalog.own(record.tool)
        opened = OpenCall(record, None, b"", read_only=False, own=own)
        if row is None:
            self._gate.end(opened, CallState.ERROR, failed(f"what the call waited for is not known; {DID_NOT_RUN}"))
            return
        parked = Parked(
            why=row.why,
            principal=decode_principal(row.credential),
            origins=tuple(row.origins.split("\n")),
            timeout_ms=row.timeout_ms,
            until=record.deadline_at,
            before=row.before,
            rule=row.rule,
        )
        opened.principal, opened.origins = parked.principal, parked.origins
        self.admit(opened, parked)
        if not self._refuse_invalid(opened):
            self.hold(opened, parked)

    def credential_ended(self, token_id: str) -> None:
        """Refuse the calls that wait and involve a token that was revoked or has expired."""
        for opened in list(self.waiting.values()):
            self._refuse_invalid(opened, token_id)

    def _refuse_invalid(self, opened: OpenCall, token_id: str | None = None) -> bool:
        parked = opened.parked
        if parked is None or opened.over or (token_id is not None and token_id not in parked.principal.ids):
            return False
        try:
            self._gate.check_valid(parked.principal)
        except Denied as error:
            self._refuse(opened, error)
            return True
        return False

    def look_again(self) -> None:
        """Something has changed for which calls may wait: a node is back, or the gateway is thawed."""
        for opened in list(self.waiting.values()):
            self._go_on(opened)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for opened in self.waiting.values():
            if opened.deadline is not None:
                opened.deadline.cancel()
            if not opened.over:
                # Not `failed`: whoever is told that may be sure that the call will never run.
                left = "the gateway stopped; the call has not run and still waits: ask for it by its id"
                opened.let_go(self._shown(opened, ToolResult.failed("timeout", left)))

    def _set_deadline(self, opened: OpenCall) -> None:
        if opened.deadline is not None:
            opened.deadline.cancel()
        seconds = max(0.0, (opened.record.deadline_at - self._node_registry.clock()) / 1000)
        loop = asyncio.get_running_loop()
        opened.deadline = loop.call_later(min(seconds, LONGEST_TIMER), self._expire, opened)

    def _expire(self, opened: OpenCall) -> None:
        record, parked = opened.record, opened.parked
        if parked is None or opened.over:
            return
        if self._node_registry.clock() < record.deadline_at:  # the clock was set, or it is a long way
            self._set_deadline(opened)
        elif parked.why == "approval":
            answered = "it was approved but could not start" if _approved(parked) else "nobody approved it"
            self._refuse(opened, Forbidden(f"{answered} before {moment(record.deadline_at)}; {DID_NOT_RUN}"))
        else:
            where = f"node {record.node_id!r}" if record.node_id else f"a node with {record.tool!r}"
            message = f"{where} was not back before {moment(record.deadline_at)}; {DID_NOT_RUN}"
            self._gate.end(opened, CallState.TIMEOUT, stopped(CallState.TIMEOUT, message))

    def _lose_patience(self, opened: OpenCall) -> None:
        """The caller's own time is over; the call waits on."""
        if opened.parked is None or opened.over:
            return
        record = opened.record
        named = f" {opened.parked.approval.id}" if opened.parked.approval else ""
        what = "its node" if opened.parked.why == "node" else f"approval{named}"
        message = (
            f"call {record.id} has not run: it waits for {what} until {moment(record.deadline_at)}; "
            f"what becomes of it is at /v1/calls/{record.id} (`farhand calls show {record.id}`)"
        )
        opened.let_go(self._shown(opened, ToolResult.failed("timeout", message)))

    def _shown(self, opened: OpenCall, result: ToolResult) -> CallRecord:
        """How a call stands, for a caller who leaves."""
        record = ended(opened.record, CallState.WAITING, result, self._node_registry.clock(), 0.0)
        return msgspec.structs.replace(record, ended_at=None)

    # -- one step after the other -----------------------------------------------------------------------

    def _go_on(self, opened: OpenCall) -> None:
        """Put the question, or start the call, as far as either can be done now."""
        parked = opened.parked
        if parked is None or parked.busy or opened.over or self._gate.closing:
            return
        if parked.why == "approval" and parked.approval is None:
            step = self._ask
        elif parked.why == "node" or _approved(parked):
            step = self._start
        else:
            return
        parked.busy = True
        task = asyncio.get_running_loop().create_task(self._take(opened, parked, step))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(
        self, opened: OpenCall, parked: Parked, step: Callable[[OpenCall, Parked], Coroutine[Any, Any, bool]]
    ) -> None:
        """Take one step with a call; never two at once. A step tells whether the next can follow."""
        go_on, after = False, 0.0
        try:
            go_on = await step(opened, parked)
        except Busy:
            go_on, after = True, AGAIN_SECONDS
        except ToolError as error:
            self._refuse(opened, error)
        except StoreError as error:
            log.error("call %s waits on: %s", opened.record.id, error)
            go_on, after = True, AGAIN_SECONDS
        finally:
            parked.busy = False
        if go_on:
            asyncio.get_running_loop().call_later(after, self._go_on, opened)

    async def _ask(self, opened: OpenCall, parked: Parked) -> bool:
        """Put the question, unless that was done before the gateway stopped."""
        assert self.approvals is not None, "approvals are set up before the first call"
        record = opened.record
        approval = await self.approvals.find(record.id)
        if approval is None:
            if self._away(record):
                return False
            target = self._catalog.find_again(record.tool, record.node_id, opened.own)
            approval = await self.approvals.ask(opened, parked, target)
        if approval is None or opened.over:
            return False
        if parked.approval is None:  # else it was answered while others were still being told
            parked.approval = approval
            for tell in opened.asked:
                tell(approval)
        if parked.approval.state is ApprovalState.DENIED:
            self.deny(opened, parked.approval)
        return _approved(parked)

    def approve(self, opened: OpenCall, approval: Approval) -> None:
        """The question was answered: the call starts as soon as it can."""
        if opened.parked is not None:
            opened.parked.approval = approval
            self._go_on(opened)

    def deny(self, opened: OpenCall, approval: Approval) -> None:
        why = f": {approval.remark}" if approval.remark else ""
        self._refuse(opened, Forbidden(f"denied by {approval.decided_by}{why}; {DID_NOT_RUN}"))

    async def _start(self, opened: OpenCall, parked: Parked) -> bool:
        """Examine a call again and send it, if that can be done now."""
        record = opened.record
        if self.frozen() or self._away(record) or self._node_registry.clock() >= record.deadline_at:
            return False
        pinned = record.node_id if parked.why == "approval" else None
        target = self._catalog.find_again(record.tool, pinned, opened.own)
        asked = self._examine(opened, parked, target)
        if parked.why == "approval":
            assert self.approvals is not None and parked.approval is not None
            change = await self.approvals.change(opened, parked.approval, target)
            if change is not None:
                raise Forbidden(f"{change} since this was asked, so it is not what was approved")
        elif asked is not None:
            await self._turn(opened, parked, target, asked)
            return True
        if not opened.over and not self._gate.closing and not self.frozen():
            if self._gate.busy(target.node):
                raise Busy
            await self._send(opened, parked, target)
        return False

    def _away(self, record: CallRecord) -> bool:
        """Whether a call's node is known and not connected."""
        if record.node_id is None:
            return record.route == "node" and self._catalog.away(record.tool)
        node = self._node_registry.nodes.get(record.node_id)
        return node is not None and not node.online

    def _examine(self, opened: OpenCall, parked: Parked, target: Target) -> Verdict | None:
        """The verdict of a policy that wants a call approved. Raises ToolError when it may not be made any more."""
        record = opened.record
        self._gate.check_valid(parked.principal)
        allow(target, parked.principal)
        call = ToolCall(record.id, record.tool, record.args, record.session_key, record.agent_id)
        call = self._catalog.checked(target, call)
        verdict = self.verdict(call, target, parked.principal, parked.origins)
        if verdict is not None and verdict.decision == "deny":
            raise self._forbidden(verdict, call, parked.principal, parked.origins)
        return verdict if verdict is not None and verdict.decision == "ask" else None

    async def _turn(self, opened: OpenCall, parked: Parked, target: Target, asked: Verdict) -> None:
        """The node is back, and now somebody has to approve the call."""
        until = self._until(asked, parked.before)
        turned = msgspec.structs.replace(parked, why="approval", until=until, rule=asked.rule)
        node_id = target.node.card.node_id if target.node else None
        record = self.waiting_record(msgspec.structs.replace(opened.record, node_id=node_id), turned)
        now = self._node_registry.clock()
        row = _row(record, turned)
        await self._database.write(lambda store: hold_parked(store, record, row, now))
        parked.why, parked.until, parked.rule, parked.reason = "approval", until, asked.rule, asked.reason
        opened.record = record
        self._set_deadline(opened)

    async def _send(self, opened: OpenCall, parked: Parked, target: Target) -> None:
        now = self._node_registry.clock()
        node = target.node
        record = msgspec.structs.replace(
            opened.record,
            state=CallState.RUNNING,
            route=target.kind,
            node_id=node.card.node_id if node else None,
            capability=target.capability,
            node_boot=node.connection.boot if node and node.connection else None,
            deadline_at=now + parked.timeout_ms,
        )
        # From here on it counts as started, whatever happens: it is never sent by a second way.
        started = await self._database.write(partial(start_parked, record=record, now=now))
        if not started or opened.over or self._gate.closing:
            return
        if opened.deadline is not None:
            opened.deadline.cancel()
        self.waiting.pop(record.id, None)
        self._gate.start(opened, record, target, parked.timeout_ms)

    def _refuse(self, opened: OpenCall, error: ToolError) -> None:
        state = CallState.DENIED if isinstance(error, Denied | SwitchedOff) else CallState.ERROR
        opened.raised = bare(error)
        said = error.message if error.message.endswith(DID_NOT_RUN) else f"{error.message}; {DID_NOT_RUN}"
        self._gate.end(opened, state, ToolResult(ok=False, error=ToolFailure(error.kind.value, said)))

    def _note(self, kind: str, subject: str, data: dict[str, Any]) -> None:
        now = self._node_registry.clock()
        written = self._database.write(lambda store: append_event(store, now, kind, subject, data), durable=False)
        log_failure(written, log, f"add {kind} of {subject} to the journal")


def moment(at: int) -> str:
    """As people and programs read it."""
    return datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _who(principal: Principal) -> dict[str, str]:
    behalf = principal.on_behalf_of
    return {"by": principal.id} if behalf is None else {"by": principal.id, "on_behalf_of": behalf.id}


def _approved(parked: Parked) -> bool:
    return parked.approval is not None and parked.approval.state is ApprovalState.APPROVED


def _row(record: CallRecord, parked: Parked) -> ParkedRow:
    return ParkedRow(
        call_id=record.id,
        why=parked.why,
        credential=msgspec.Raw(msgspec.json.encode(parked.principal)),
        origins="\n".join(parked.origins),
        timeout_ms=parked.timeout_ms,
        before=parked.before,
        rule=parked.rule,
    )
