"""Calls that wait before they are sent, and the approvals that some of them wait for.

A waiting call has the state `waiting` until `start_waiting` or its end.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx
from farhand.store.tables import calls
from farhand.store.tables.calls import CallRecord, CallState
from farhand.store.tables.fleet import check_link
from farhand.store.tables.rows import Table

Why = Literal["approval", "node"]


class WaitingRow(msgspec.Struct, frozen=True, kw_only=True):
    """What starting a waiting call needs beside its own row."""

    call_id: str
    why: Why
    # The caller's principal when the call was made.
    credential: msgspec.Raw
    origins: str
    # The time limit of the call itself.
    timeout_ms: int
    # For a call that waits for its node: the latest time to start.
    before: int | None = None
    # For a call that waits for approval: the rule that requires it.
    rule: str = ""


class ApprovalState(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    DENIED = "denied"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """A request for approval of exactly one call, identified by a hash."""

    id: str
    call_id: str
    hash: str
    rule: str
    # The reason given by the rule.
    reason: str = ""
    # What is shown to the approver, and what it was made from.
    request: msgspec.Raw
    asked_at: int
    deadline_at: int
    state: ApprovalState = ApprovalState.PENDING
    decided_by: str | None = None
    decided_at: int | None = None
    # The approver's remark.
    remark: str | None = None


class _Bound(msgspec.Struct, frozen=True):
    trial: str = ""


class _Request(msgspec.Struct, frozen=True):
    bound: _Bound = _Bound()


def trial_of(approval: Approval | None) -> str:
    """Return the id of the trial that is kept instead of running the approved call; empty if there is none."""
    if approval is None or approval.state is not ApprovalState.APPROVED:
        return ""
    return msgspec.json.decode(approval.request, type=_Request).bound.trial


_WAITING: Final = Table("parked", WaitingRow)
_APPROVALS: Final = Table("approvals", Approval)
REMOVE: Final = "DELETE FROM parked WHERE call_id = ?"
DECIDE: Final = """
    UPDATE approvals SET state = ?, decided_by = ?, decided_at = ?, remark = ? WHERE id = ? AND state = 'pending'"""


def begin_waiting(tx: Tx, record: CallRecord, row: WaitingRow) -> None:
    calls.begin(tx, record)
    _WAITING.add(tx, row, _WAITING.replace("call_id"))


def start_waiting(
    tx: Tx, record: CallRecord, now: int, socket: str | None = None, take: Callable[[Tx], object] | None = None
) -> bool:
    """Mark a waiting call as running, so that it may be sent; return False if it no longer waits.

    `socket`: the connection it goes to, where several gateways share the store. `take` reserves what it uses of
    budgets. Raises LinkMoved, BudgetExceeded.
    """
    if socket is not None and record.node_id is not None:
        check_link(tx, record.node_id, socket)
    if not calls.start(tx, record, now):
        return False
    if take is not None:
        take(tx)
    tx.execute(REMOVE, (record.id,))
    return True


def hold_waiting(tx: Tx, record: CallRecord, row: WaitingRow, now: int) -> None:
    """Store that a call waits for something else now."""
    calls.hold(tx, record)
    _WAITING.add(tx, row, _WAITING.replace("call_id"))
    append_event(tx, now, "call.waiting", record.id, {"tool": record.tool, "why": row.why})


def finish_waiting(tx: Tx, record: CallRecord) -> bool:
    """Store the end of a waiting call, as `calls.finish` does, and withdraw its request for approval."""
    if not calls.finish_unbegun(tx, record):
        return False
    tx.execute(REMOVE, (record.id,))
    approval = find_approval(tx, record.id)
    if approval is not None and approval.state is ApprovalState.PENDING:
        state = ApprovalState.EXPIRED if record.state is CallState.DENIED else ApprovalState.CANCELLED
        decide(tx, approval, state, by="gateway", now=record.ended_at or 0, remark=record.error_message)
    return True


def all_waiting(tx: Tx) -> dict[str, WaitingRow]:
    return {row.call_id: row for row in _WAITING.all(tx, "")}


def find_waiting(tx: Tx, call_id: str) -> tuple[CallRecord, WaitingRow] | None:
    """Return a call that waits, and what it waits for."""
    record = calls.find(tx, call_id)
    row = _WAITING.find(tx, "call_id = ?", call_id)
    if record is None or record.state is not CallState.WAITING or row is None:
        return None
    return record, row


def ask(tx: Tx, approval: Approval, who: dict[str, Any]) -> bool:
    """Store a request for approval; return False if its call has ended or has one. `who` goes into the journal."""
    record = calls.find(tx, approval.call_id)
    if record is None or record.state is not CallState.WAITING or find_approval(tx, approval.call_id):
        return False
    _APPROVALS.add(tx, approval)
    data = {"call_id": approval.call_id, "hash": approval.hash, "rule": approval.rule, **who}
    append_event(tx, approval.asked_at, "approval.asked", approval.id, data)
    return True


def decide(tx: Tx, approval: Approval, state: ApprovalState, *, by: str, now: int, remark: str | None) -> bool:
    """Store a decision; return False, without a change, if there is one already."""
    tx.execute(DECIDE, (str(state), by, now, remark, approval.id))
    if not tx.changes():
        return False
    data: dict[str, Any] = {"call_id": approval.call_id, "hash": approval.hash, "rule": approval.rule, "by": by}
    if remark:
        data["remark"] = remark
    append_event(tx, now, f"approval.{state}", approval.id, data)
    return True


def find_approval(tx: Tx, name: str) -> Approval | None:
    """Return an approval by its id or that of its call."""
    return _APPROVALS.find(tx, "id = ? OR call_id = ?", name, name)


def list_approvals(tx: Tx, state: ApprovalState | None, limit: int) -> list[Approval]:
    """Return approvals, newest first. One whose call has ended, as in a restored store, is not pending."""
    newest = "ORDER BY asked_at DESC LIMIT ?"
    if state is None:
        return _APPROVALS.all(tx, newest, limit)
    still = "AND call_id IN (SELECT id FROM calls WHERE ended_at IS NULL)" if state is ApprovalState.PENDING else ""
    return _APPROVALS.all(tx, f"WHERE state = ? {still} {newest}", str(state), limit)


def origin_of(tx: Tx, record: CallRecord) -> str | None:
    """Return the origin of the run that made a call; None if no run made it."""
    key = record.idempotency_key or ""
    if not record.credential.startswith("agent:") or not key.startswith("run:"):
        return None
    rows: list[Any] = tx.execute("SELECT origin FROM runs WHERE id = ?", (key.split(":")[1],)).fetchall()
    return str(rows[0][0]) if rows else None
