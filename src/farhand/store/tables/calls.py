"""Calls: one row each, from the moment a call is allowed to its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import Any, Final

import msgspec

from farhand.protocol.calls import NULL
from farhand.protocol.messages import ToolResponse
from farhand.store.journal.events import append_event
from farhand.store.journal.seal import packed
from farhand.store.ports import StoreError, Tx


class CallState(StrEnum):
    # Stored and held back; nothing has been sent.
    WAITING = "waiting"
    RUNNING = "running"
    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    DENIED = "denied"
    UNKNOWN = "unknown"


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call as it is stored."""

    id: str
    tool: str
    args: msgspec.Raw = NULL
    session_key: str | None = None
    agent_id: str | None = None
    credential: str
    route: str
    node_id: str | None = None
    capability: str | None = None
    node_boot: str | None = None
    background: bool = False
    idempotency_key: str | None = None
    state: CallState = CallState.RUNNING
    created_at: int
    deadline_at: int
    ended_at: int | None = None
    duration_ms: float | None = None
    result: msgspec.Raw | None = None
    error_kind: str | None = None
    error_message: str | None = None
    # The credential on whose behalf `credential` acts, if any.
    on_behalf_of: str | None = None

    @property
    def asker(self) -> str:
        """The credential that is behind the call."""
        return self.on_behalf_of or self.credential


_FIELDS: Final = CallRecord.__struct_fields__
# The columns that the journal covers. `on_behalf_of` was added later and is covered where it is set (`_tail`), so that
# older rows stay verifiable.
_COLUMNS: Final = _FIELDS[:-1]
assert _FIELDS[-1] == "on_behalf_of"
_SELECT: Final = f"SELECT {', '.join(_FIELDS)} FROM calls"  # noqa: S608

ENDED: Final = ("state", "ended_at", "duration_ms", "result", "error_kind", "error_message")
# The columns that do not change while a call waits or when it starts.
ASKED: Final = (*_COLUMNS[:6], "background", "idempotency_key", "created_at")
_asked: Final = itemgetter(*map(_COLUMNS.index, ASKED))
NOT_ENDED: Final = (CallState.RUNNING.value, *[None] * (len(ENDED) - 1))

INSERT: Final = f"INSERT INTO calls ({', '.join(_FIELDS)}, seq) VALUES ({'?, ' * len(_FIELDS)}?)"  # noqa: S608
START: Final = """
    UPDATE calls SET state = 'running', route = ?, node_id = ?, capability = ?, node_boot = ?, deadline_at = ?
    WHERE id = ? AND state = 'waiting' AND ended_at IS NULL"""
HOLD: Final = """
    UPDATE calls SET node_id = ?, deadline_at = ? WHERE id = ? AND state = 'waiting' AND ended_at IS NULL"""
FINISH: Final = """
    UPDATE calls SET state = ?, ended_at = ?, duration_ms = ?, result = ?, error_kind = ?, error_message = ?
    WHERE id = ? AND ended_at IS NULL"""
# The same for many; an empty result stands for none, so that each column has one type.
FINISH_ALL: Final = """
    UPDATE calls SET
        state = v.column2, ended_at = v.column3, duration_ms = v.column4,
        result = CASE WHEN length(v.column5) = 0 THEN NULL ELSE v.column5 END,
        error_kind = v.column6, error_message = v.column7
    FROM (VALUES (?, ?, ?, ?, ?, ?, ?)) AS v WHERE calls.id = v.column1 AND calls.ended_at IS NULL"""
ONE: Final = f"{_SELECT} WHERE id = ?"
_COVERED: Final = f"SELECT {', '.join(_FIELDS)}, seq FROM calls"  # noqa: S608
OPEN: Final = f"{_SELECT} WHERE ended_at IS NULL ORDER BY seq"
NOT_WAITED_FOR: Final = (CallState.UNKNOWN, CallState.TIMEOUT, CallState.CANCELLED)
# Replaces the arguments of a call that is listed without bodies.
LEFT_OUT: Final = msgspec.Raw(b"")
_WITHOUT_BODIES: Final = _SELECT.replace(" args,", " NULL AS args,").replace(" result,", " NULL AS result,")
# Limits the arguments and results in one list.
MOST_LISTED_BYTES: Final = 32 * 1024 * 1024
# Of a longer late result only the length is stored.
MOST_LATE_BYTES: Final = 256 * 1024


def begin(tx: Tx, record: CallRecord) -> None:
    """Store a new call; it may have ended already."""
    begin_all(tx, [record])


def begin_all(tx: Tx, records: Iterable[CallRecord]) -> None:
    """Store new calls, which may have ended already."""
    number: int = tx.execute("SELECT coalesce(max(seq), 0) FROM calls").fetchall()[0][0]
    rows: list[tuple[Any, ...]] = []
    for record in records:
        number += 1
        values = _values(record)
        rows.append((*values, record.on_behalf_of, number))
        covered = packed(_asked(values) if record.state is CallState.WAITING else values)
        covered += _tail(number, record.on_behalf_of)
        if record.ended_at is not None:
            _append_end(tx, record, covered)
        else:
            kind = "call.waiting" if record.state is CallState.WAITING else "call.started"
            append_event(tx, record.created_at, kind, record.id, _shown(record), covered)
    tx.executemany(INSERT, rows)


def _tail(number: int, on_behalf_of: str | None) -> bytes:
    """Return the last part of what the journal covers of a row."""
    return packed(number) if on_behalf_of is None else packed(number) + packed(on_behalf_of)


def _values(record: CallRecord) -> tuple[Any, ...]:
    return (
        record.id,
        record.tool,
        bytes(record.args),
        record.session_key,
        record.agent_id,
        record.credential,
        record.route,
        record.node_id,
        record.capability,
        record.node_boot,
        int(record.background),
        record.idempotency_key,
        str(record.state),  # `.value` takes four times as long
        record.created_at,
        record.deadline_at,
        record.ended_at,
        record.duration_ms,
        None if record.result is None else bytes(record.result),
        record.error_kind,
        record.error_message,
    )


def start(tx: Tx, record: CallRecord, now: int) -> bool:
    """Mark a waiting call as running; return False, without a change, if it no longer waits."""
    tx.execute(
        START, (record.route, record.node_id, record.capability, record.node_boot, record.deadline_at, record.id)
    )
    if not tx.changes():
        return False
    row = covered_row(tx, record.id)
    assert row is not None
    append_event(tx, now, "call.started", record.id, _shown(record), row.begun)
    return True


def hold(tx: Tx, record: CallRecord) -> None:
    """Store the node and the deadline of a call that waits for something else now."""
    tx.execute(HOLD, (record.node_id, record.deadline_at, record.id))


def since(tx: Tx, at: int, limit: int) -> list[str]:
    """Return the ids of the newest calls since a time, newest first."""
    rows = tx.execute("SELECT id FROM calls WHERE created_at >= ? ORDER BY seq DESC LIMIT ?", (at, limit))
    return [str(call_id) for (call_id,) in rows]


def finish(tx: Tx, record: CallRecord) -> bool:
    """Store the end of a running call; return False, without a change, if it has ended."""
    values = _end_values(record)
    tx.execute(FINISH, (*values, record.id))
    if not tx.changes():
        return False
    _append_end(tx, record, packed(values))
    return True


def finish_all(tx: Tx, records: Sequence[CallRecord]) -> None:
    """Store the ends of running calls. Raises StoreError if one of several has ended before; `finish` ignores it."""
    if len(records) == 1:
        finish(tx, records[0])
        return
    ends = [_end_values(record) for record in records]
    rows = [(record.id, *end[:3], end[3] or b"", *end[4:]) for record, end in zip(records, ends, strict=True)]
    if tx.executemany(FINISH_ALL, rows) != len(rows):
        raise StoreError("one of several calls has ended before")
    for record, end in zip(records, ends, strict=True):
        _append_end(tx, record, packed(end))


def _end_values(record: CallRecord) -> tuple[Any, ...]:
    return (
        str(record.state),
        record.ended_at,
        record.duration_ms,
        None if record.result is None else bytes(record.result),
        record.error_kind,
        record.error_message,
    )


def finish_unbegun(tx: Tx, record: CallRecord) -> bool:
    """Store the end of a call that may still wait; the end of one that never started covers its whole row."""
    found = find(tx, record.id)
    if found is None or found.state is not CallState.WAITING:
        return finish(tx, record)
    tx.execute(FINISH, (*_end_values(record), record.id))
    row = covered_row(tx, record.id)
    assert row is not None
    _append_end(tx, record, row.whole)
    return True


def append_kept(tx: Tx, call_id: str, now: int) -> None:
    """Append an event that covers a call whose earlier events are removed."""
    record = find(tx, call_id)
    row = covered_row(tx, call_id)
    assert record is not None and row is not None
    append_event(tx, now, "call.kept", record.id, _shown(record, record.state), row.whole)


class CoveredRow(msgspec.Struct, frozen=True):
    """What events cover of a call: the request, the start, the end, or the whole row."""

    asked: bytes
    begun: bytes
    ended: bytes
    whole: bytes


def covered_row(tx: Tx, call_id: str) -> CoveredRow | None:
    rows: list[Any] = tx.execute(f"{_COVERED} WHERE id = ?", (call_id,)).fetchall()
    if not rows:
        return None
    *columns, on_behalf_of, seq = rows[0]
    values = dict(zip(_COLUMNS, columns, strict=True))
    began = values | dict(zip(ENDED, NOT_ENDED, strict=True))
    number = _tail(seq, on_behalf_of)
    return CoveredRow(
        packed(_asked(columns)) + number,
        packed(tuple(began.values())) + number,
        packed(tuple(values[name] for name in ENDED)),
        packed(tuple(columns)) + number,
    )


def append_late_answer(tx: Tx, node_id: str, response: ToolResponse, now: int) -> None:
    """Append a node's late answer to the journal, if the call ended without it."""
    record = find(tx, response.request_id)
    if record is None or record.node_id != node_id or record.state not in NOT_WAITED_FOR:
        return
    data: dict[str, Any] = {"tool": record.tool, "node_id": node_id, "ok": response.ok}
    if response.ok:
        result = response.result or NULL
        data |= {"result": result} if len(bytes(result)) <= MOST_LATE_BYTES else {"result_bytes": len(bytes(result))}
    else:
        data["error"] = response.error or None
    append_event(tx, now, "call.late", record.id, data)


def find(tx: Tx, call_id: str) -> CallRecord | None:
    rows = tx.execute(ONE, (call_id,)).fetchall()
    return _record(rows[0]) if rows else None


def not_waited_for(tx: Tx, node_id: str, call_ids: Sequence[str]) -> dict[str, str]:
    """Return the reason for each of a node's calls that ended without it: cancelled, timed out or unknown."""
    rows = tx.execute(
        f"SELECT id, coalesce(error_message, state) FROM calls WHERE id IN ({', '.join('?' * len(call_ids))}) "  # noqa: S608
        f"AND node_id = ? AND state IN ({', '.join('?' * len(NOT_WAITED_FOR))})",
        (*call_ids, node_id, *map(str, NOT_WAITED_FOR)),
    )
    return {str(call_id): str(reason) for call_id, reason in rows}


def made_by(tx: Tx, beginning: str) -> dict[str, CallRecord]:
    """Return the newest call of an agent for each idempotency key with this prefix, of any age.

    Other callers choose their keys themselves, and could pass off their calls as those of a run.
    """
    rows = tx.execute(
        f"{_SELECT} WHERE idempotency_key >= ? AND idempotency_key < ? AND credential LIKE 'agent:%' ORDER BY seq",
        (beginning, beginning + "\U0010ffff"),
    )
    return {record.idempotency_key or "": record for record in map(_record, rows)}


def about_trials(tx: Tx, since: int) -> list[CallRecord]:
    """Return the calls made since a time that show, keep or discard trials."""
    rows = tx.execute(
        f"{_SELECT} WHERE created_at >= ? AND (tool = 'trial' OR tool LIKE '%__Trial') ORDER BY seq", (since,)
    )
    return [_record(row) for row in rows]


def open_calls(tx: Tx) -> list[CallRecord]:
    return [_record(row) for row in tx.execute(OPEN)]


def search(
    tx: Tx,
    filters: Mapping[str, str],
    *,
    limit: int,
    before: str | None = None,
    group: str | None = None,
    bodies: bool = True,
) -> list[CallRecord]:
    """Return calls, newest first. `filters`: values of tool, node_id, state or session_key.

    `group`: only the calls of this fan-out. Without `bodies`, and beyond `MOST_LISTED_BYTES`, arguments are `LEFT_OUT`
    and results are None.
    """
    clauses = [f"{column} = ?" for column in filters]
    values: list[Any] = list(filters.values())
    if group is not None:
        clauses.append("id IN (SELECT call_id FROM fanout_calls WHERE fanout = ?)")
        values.append(group)
    if before is not None:
        clauses.append("id < ?")
        values.append(before)
    where = f" WHERE {' AND '.join(clauses)}" if clauses else ""
    # Ids sort by the time of the call, which may differ from the order of storing.
    select = _SELECT if bodies else _WITHOUT_BODIES
    found: list[CallRecord] = []
    room = MOST_LISTED_BYTES
    for row in tx.execute(f"{select}{where} ORDER BY id DESC LIMIT ?", (*values, limit)):
        record = _record(row)
        size = len(bytes(record.args)) + (0 if record.result is None else len(bytes(record.result)))
        if size > room:
            record = msgspec.structs.replace(record, args=LEFT_OUT, result=None)
        else:
            room -= size
        found.append(record)
    return found


def _append_end(tx: Tx, record: CallRecord, covered: bytes) -> None:
    data = _shown(record, record.state)
    if record.error_kind is not None:
        data["error"] = {"kind": record.error_kind, "message": record.error_message}
    append_event(tx, record.ended_at or record.created_at, "call.ended", record.id, data, covered)


def _shown(record: CallRecord, state: CallState | None = None) -> dict[str, Any]:
    """Return what the journal shows of a call."""
    data = {"tool": record.tool, "node_id": record.node_id, "state": state}
    return {name: value for name, value in data.items() if value is not None}


def _record(row: tuple[Any, ...]) -> CallRecord:
    values = dict(zip(_FIELDS, row, strict=True))
    values["args"] = LEFT_OUT if values["args"] is None else msgspec.Raw(values["args"])
    values["result"] = None if values["result"] is None else msgspec.Raw(values["result"])
    values["background"] = bool(values["background"])
    values["state"] = CallState(values["state"])
    return CallRecord(**values)
