"""Calls that wait before anything of them leaves the gateway, and the approvals some of them wait for.

A waiting call's row says `waiting`. It stops waiting in two ways only: by
`start_waiting`, or by its end.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx
from farhand.store.tables import calls
from farhand.store.tables.calls import CallRecord, CallState

Why = Literal["approval", "node"]


class WaitingRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the call's own row does not tell, and its start needs."""

    call_id: str
    why: Why
    # The caller's, as it was then.
    credential: msgspec.Raw
    origins: str
    # How long it may run.
    timeout_ms: int
    # Of a call that waits for its node: the moment until which it may start.
    before: int | None = None
    # Of a call that waits to be approved: which rule wants that.
    rule: str = ""


class ApprovalState(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    DENIED = "denied"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """A question to the owner: exactly what would run, under one hash."""

    id: str
    call_id: str
    hash: str
    rule: str
    # Of the rule.
    reason: str = ""
    # What is asked, as it is shown, and what it was made from.
    request: msgspec.Raw
    asked_at: int
    deadline_at: int
    state: ApprovalState = ApprovalState.PENDING
    decided_by: str | None = None
    decided_at: int | None = None
    # What whoever decided said to it.
    remark: str | None = None


_WAITING: Final = WaitingRow.__struct_fields__
_APPROVAL: Final = Approval.__struct_fields__
_SELECT: Final = f"SELECT {', '.join(_APPROVAL)} FROM approvals"  # noqa: S608
INSERT: Final = f"INSERT OR REPLACE INTO parked ({', '.join(_WAITING)}) VALUES ({', '.join('?' * len(_WAITING))})"  # noqa: S608
REMOVE: Final = "DELETE FROM parked WHERE call_id = ?"
ALL_WAITING: Final = f"SELECT {', '.join(_WAITING)} FROM parked"  # noqa: S608
ASK: Final = f"INSERT INTO approvals ({', '.join(_APPROVAL)}) VALUES ({', '.join('?' * len(_APPROVAL))})"  # noqa: S608
DECIDE: Final = """
    UPDATE approvals SET state = ?, decided_by = ?, decided_at = ?, remark = ? WHERE id = ? AND state = 'pending'"""
ONE: Final = f"{_SELECT} WHERE id = ? OR call_id = ?"
LIST: Final = f"{_SELECT} ORDER BY asked_at DESC LIMIT ?"
LIST_IN: Final = f"{_SELECT} WHERE state = ? ORDER BY asked_at DESC LIMIT ?"
LIST_PENDING: Final = (
    f"{_SELECT} WHERE state = 'pending' AND call_id IN (SELECT id FROM calls WHERE ended_at IS NULL)"  # noqa: S608
    " ORDER BY asked_at DESC LIMIT ?"
)
ORIGIN_OF_RUN: Final = "SELECT origin FROM runs WHERE id = ?"


def begin_waiting(connection: Tx, record: CallRecord, row: WaitingRow) -> None:
    """Write a call down that waits."""
    calls.begin(connection, record)
    _insert(connection, row)


def start_waiting(connection: Tx, record: CallRecord, now: int) -> bool:
    """The call waits no longer, and may be sent; False when it waits no longer for another reason. Once only."""
    if not calls.start(connection, record, now):
        return False
    connection.execute(REMOVE, (record.id,))
    return True


def hold_waiting(connection: Tx, record: CallRecord, row: WaitingRow, now: int) -> None:
    """The call waits for something else now."""
    calls.hold(connection, record)
    _insert(connection, row)
    append_event(connection, now, "call.waiting", record.id, {"tool": record.tool, "why": row.why})


def finish_waiting(connection: Tx, record: CallRecord) -> bool:
    """As `calls.finish`, of a call that waited: whoever was asked need not answer any more."""
    if not calls.finish_unbegun(connection, record):
        return False
    connection.execute(REMOVE, (record.id,))
    approval = find_approval(connection, record.id)
    if approval is not None and approval.state is ApprovalState.PENDING:
        state = ApprovalState.EXPIRED if record.state is CallState.DENIED else ApprovalState.CANCELLED
        decide(connection, approval, state, by="gateway", now=record.ended_at or 0, remark=record.error_message)
    return True


def all_waiting(connection: Tx) -> dict[str, WaitingRow]:
    rows = [dict(zip(_WAITING, row, strict=True)) for row in connection.execute(ALL_WAITING)]
    return {row["call_id"]: WaitingRow(**{**row, "credential": msgspec.Raw(row["credential"])}) for row in rows}


def ask(connection: Tx, approval: Approval, who: dict[str, Any]) -> bool:
    """Keep a question; False when its call has ended, or was asked about before. `who` is for the journal."""
    record = calls.find(connection, approval.call_id)
    if record is None or record.state is not CallState.WAITING or find_approval(connection, approval.call_id):
        return False
    values = msgspec.structs.asdict(approval)
    values |= {"request": bytes(approval.request), "state": str(approval.state)}
    connection.execute(ASK, tuple(values[name] for name in _APPROVAL))
    data = {"call_id": approval.call_id, "hash": approval.hash, "rule": approval.rule, **who}
    append_event(connection, approval.asked_at, "approval.asked", approval.id, data)
    return True


def decide(connection: Tx, approval: Approval, state: ApprovalState, *, by: str, now: int, remark: str | None) -> bool:
    """Write an answer down; False, and nothing done, when there is one already: the first counts."""
    connection.execute(DECIDE, (str(state), by, now, remark, approval.id))
    if not connection.changes():
        return False
    data: dict[str, Any] = {"call_id": approval.call_id, "hash": approval.hash, "rule": approval.rule, "by": by}
    if remark:
        data["remark"] = remark
    append_event(connection, now, f"approval.{state}", approval.id, data)
    return True


def find_approval(connection: Tx, name: str) -> Approval | None:
    """By its own id, or that of its call."""
    rows = connection.execute(ONE, (name, name)).fetchall()
    return _approval(rows[0]) if rows else None


def list_approvals(connection: Tx, state: ApprovalState | None, limit: int) -> list[Approval]:
    """Newest first. A question whose call is over, as in a store that was restored, does not wait any more."""
    if state is None:
        return [_approval(row) for row in connection.execute(LIST, (limit,))]
    if state is ApprovalState.PENDING:
        return [_approval(row) for row in connection.execute(LIST_PENDING, (limit,))]
    return [_approval(row) for row in connection.execute(LIST_IN, (str(state), limit))]


def origin_of(connection: Tx, record: CallRecord) -> str | None:
    """Where the run came from that made a call; None for one that no run made."""
    key = record.idempotency_key or ""
    if not record.credential.startswith("agent:") or not key.startswith("run:"):
        return None
    rows: list[Any] = connection.execute(ORIGIN_OF_RUN, (key.split(":")[1],)).fetchall()
    return str(rows[0][0]) if rows else None


def _insert(connection: Tx, row: WaitingRow) -> None:
    values = {**msgspec.structs.asdict(row), "credential": bytes(row.credential)}
    connection.execute(INSERT, tuple(values[name] for name in _WAITING))


def _approval(row: tuple[Any, ...]) -> Approval:
    values = dict(zip(_APPROVAL, row, strict=True))
    return Approval(**{**values, "request": msgspec.Raw(values["request"]), "state": ApprovalState(values["state"])})
