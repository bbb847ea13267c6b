"""The record of every call: one row from the moment it is allowed until its one honest end."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import Any, Final

import msgspec

from farhand.protocol.calls import NULL
from farhand.protocol.messages import ToolResponse
from farhand.store.journal.events import append_event
from farhand.store.journal.seal import packed
from farhand.store.ports import Tx


class CallState(StrEnum):
    # Written down and held back: nothing of it has left the gateway.
    WAITING = "waiting"
    RUNNING = "running"
    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    DENIED = "denied"
    UNKNOWN = "unknown"


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row of the record."""

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
    # The credential on whose behalf `credential` acts; None: on its own.
    on_behalf_of: str | None = None


_encode = msgspec.json.Encoder().encode


_FIELDS: Final = CallRecord.__struct_fields__
# What the journal covers of every call. `on_behalf_of` came later and is covered where there is one (`_tail`), so
# that rows written before stay verifiable.
_COLUMNS: Final = _FIELDS[:-1]
assert _FIELDS[-1] == "on_behalf_of"
_SELECT: Final = f"SELECT {', '.join(_FIELDS)} FROM calls"  # noqa: S608

ENDED: Final = ("state", "ended_at", "duration_ms", "result", "error_kind", "error_message")
# What does not change while a call waits, and when it starts.
ASKED: Final = (*_COLUMNS[:6], "background", "idempotency_key", "created_at")
_asked: Final = itemgetter(*map(_COLUMNS.index, ASKED))
_STATE: Final = _COLUMNS.index(ENDED[0])
_END: Final = _COLUMNS.index(ENDED[1])
assert _COLUMNS[_END:] == ENDED[1:]
NOT_ENDED: Final = (CallState.RUNNING.value, *[None] * (len(ENDED) - 1))

INSERT: Final = f"INSERT INTO calls ({', '.join(_FIELDS)}, seq) VALUES ({'?, ' * len(_FIELDS)}?)"  # noqa: S608
NEWEST: Final = "SELECT coalesce(max(seq), 0) FROM calls"
START: Final = """
    UPDATE calls SET state = 'running', route = ?, node_id = ?, capability = ?, node_boot = ?, deadline_at = ?
    WHERE id = ? AND state = 'waiting' AND ended_at IS NULL"""
HOLD: Final = """
    UPDATE calls SET node_id = ?, deadline_at = ? WHERE id = ? AND state = 'waiting' AND ended_at IS NULL"""
FINISH: Final = """
    UPDATE calls SET state = ?, ended_at = ?, duration_ms = ?, result = ?, error_kind = ?, error_message = ?
    WHERE id = ? AND ended_at IS NULL"""
ONE: Final = f"{_SELECT} WHERE id = ?"
_COVERED: Final = f"SELECT {', '.join(_FIELDS)}, seq FROM calls"  # noqa: S608
OPEN: Final = f"{_SELECT} WHERE ended_at IS NULL ORDER BY seq"
NOT_WAITED_FOR: Final = (CallState.UNKNOWN, CallState.TIMEOUT, CallState.CANCELLED)
# In place of the arguments of a call that is shown without bodies.
LEFT_OUT: Final = msgspec.Raw(b"")
_WITHOUT_BODIES: Final = _SELECT.replace(" args,", " x'' AS args,").replace(" result,", " NULL AS result,")
# Of arguments and results in one list.
MOST_LISTED_BYTES: Final = 32 * 1024 * 1024
# Of a tool, for what is said of its calls to be kept at hand: anybody may ask for a longer one that is not there.
LONGEST_KEPT_NAME: Final = 256
# Of a result that came late; of a longer one only its length is kept.
MOST_LATE_BYTES: Final = 256 * 1024


def begin(connection: Tx, record: CallRecord, *, started: bool = False) -> None:
    """Write a call down; one that is already over goes in whole, with its start in the journal where it had `started`
    before anybody wrote it down."""
    begin_all(connection, [(record, started)])


def begin_all(connection: Tx, records: Iterable[tuple[CallRecord, bool]]) -> None:
    """`begin` for each of them, with whether it had started. All in one statement, which takes half the time."""
    number: int = connection.execute(NEWEST).fetchall()[0][0]
    rows: list[tuple[Any, ...]] = []
    for record, started in records:
        number += 1
        values = _values(record)
        rows.append((*values, record.on_behalf_of, number))
        _tell_of(connection, record, values, _tail(number, record.on_behalf_of), started=started)
    if rows:
        connection.executemany(INSERT, rows)


def _tail(number: int, on_behalf_of: str | None) -> bytes:
    """The end of what the journal covers of a row."""
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


def _tell_of(connection: Tx, record: CallRecord, values: tuple[Any, ...], number: bytes, *, started: bool) -> None:
    """Have the journal tell of a new row."""
    if record.ended_at is not None and not started:
        _append_end(connection, record, packed(values) + number)
        return
    data = _shown(record)
    if record.state is CallState.WAITING:
        append_event(connection, record.created_at, "call.waiting", record.id, data, packed(_asked(values)) + number)
    elif record.ended_at is None:
        append_event(connection, record.created_at, "call.started", record.id, data, packed(values) + number)
    else:
        began = packed((*values[:_STATE], NOT_ENDED[0], *values[_STATE + 1 : _END], *NOT_ENDED[1:]))
        append_event(connection, record.created_at, "call.started", record.id, data, began + number)
        _append_end(connection, record, packed((values[_STATE], *values[_END:])))


def start(connection: Tx, record: CallRecord, now: int) -> bool:
    """A waiting call is on its way from now on; False, and nothing done, when it is not waiting any more."""
    connection.execute(
        START, (record.route, record.node_id, record.capability, record.node_boot, record.deadline_at, record.id)
    )
    if not connection.changes():
        return False
    row = covered_row(connection, record.id)
    assert row is not None
    append_event(connection, now, "call.started", record.id, _shown(record), row.begun)
    return True


def hold(connection: Tx, record: CallRecord) -> None:
    """A waiting call waits for something else now, until another moment."""
    connection.execute(HOLD, (record.node_id, record.deadline_at, record.id))


def since(connection: Tx, at: int, limit: int) -> list[str]:
    """The ids of the newest calls made since a moment, newest first."""
    rows = connection.execute("SELECT id FROM calls WHERE created_at >= ? ORDER BY seq DESC LIMIT ?", (at, limit))
    return [str(call_id) for (call_id,) in rows]


def finish(connection: Tx, record: CallRecord) -> bool:
    """Write down how a call ended; False when its end is already written."""
    values = (
        str(record.state),
        record.ended_at,
        record.duration_ms,
        None if record.result is None else bytes(record.result),
        record.error_kind,
        record.error_message,
    )
    connection.execute(FINISH, (*values, record.id))
    if not connection.changes():
        return False
    _append_end(connection, record, packed(values))
    return True


def finish_unbegun(connection: Tx, record: CallRecord) -> bool:
    """As `finish`, of a call that may still wait: one that never started has its whole record under its end."""
    found = find(connection, record.id)
    if found is None or found.state is not CallState.WAITING:
        return finish(connection, record)
    result = None if record.result is None else bytes(record.result)
    values = (str(record.state), record.ended_at, record.duration_ms, result, record.error_kind, record.error_message)
    connection.execute(FINISH, (*values, record.id))
    row = covered_row(connection, record.id)
    assert row is not None
    _append_end(connection, record, row.whole)
    return True


def tell(connection: Tx, call_id: str, *, begun: bool, now: int) -> None:
    """Have the journal tell of a call that was written down without it, or whose end was."""
    record = find(connection, call_id)
    row = covered_row(connection, call_id)
    assert record is not None and row is not None
    if record.ended_at is not None:
        _append_end(connection, record, row.ended if begun else row.whole)
    elif not begun:
        data = _shown(record)
        append_event(connection, now, "call.started", record.id, data, row.begun)


def tell_kept(connection: Tx, call_id: str, now: int) -> None:
    """Have the journal tell again of a call that has ended, since its earlier events are removed."""
    record = find(connection, call_id)
    row = covered_row(connection, call_id)
    assert record is not None and row is not None
    append_event(connection, now, "call.kept", record.id, _shown(record, record.state), row.whole)


class CoveredRow(msgspec.Struct, frozen=True):
    """What events of the journal cover of a call: what was asked for, its beginning, its end, or both at once."""

    asked: bytes
    begun: bytes
    ended: bytes
    whole: bytes


def covered_row(connection: Tx, call_id: str) -> CoveredRow | None:
    rows: list[Any] = connection.execute(f"{_COVERED} WHERE id = ?", (call_id,)).fetchall()
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


def tell_late(connection: Tx, node_id: str, response: ToolResponse, now: int) -> None:
    """Have the journal tell what its node says of a call, where that was not waited for when the call ended."""
    record = find(connection, response.request_id)
    if record is None or record.node_id != node_id or record.state not in NOT_WAITED_FOR:
        return
    data: dict[str, Any] = {"tool": record.tool, "node_id": node_id, "ok": response.ok}
    if response.ok:
        result = response.result or NULL
        data |= {"result": result} if len(bytes(result)) <= MOST_LATE_BYTES else {"result_bytes": len(bytes(result))}
    else:
        data["error"] = response.error or None
    append_event(connection, now, "call.late", record.id, data)


def find(connection: Tx, call_id: str) -> CallRecord | None:
    rows = connection.execute(ONE, (call_id,)).fetchall()
    return _record(rows[0]) if rows else None


def not_waited_for(connection: Tx, node_id: str, call_ids: Sequence[str]) -> dict[str, str]:
    """Return those of a node's calls that ended without it: cancelled, out of time or unknown. By id, the reason."""
    rows = connection.execute(
        "SELECT id, coalesce(error_message, state) FROM calls WHERE id IN (SELECT value FROM json_each(?)) "
        "AND node_id = ? AND state IN (SELECT value FROM json_each(?))",
        (_json(call_ids), node_id, _json([state.value for state in NOT_WAITED_FOR])),
    )
    return {str(call_id): str(reason) for call_id, reason in rows}


def _json(values: Sequence[str]) -> str:
    return msgspec.json.encode(values).decode()


def made_by(connection: Tx, beginning: str) -> dict[str, CallRecord]:
    """The calls made under idempotency keys with this beginning, by key, the newest of each; however long ago."""
    rows = connection.execute(
        f"{_SELECT} WHERE idempotency_key >= ? AND idempotency_key < ? ORDER BY seq",
        (beginning, beginning + "\U0010ffff"),
    )
    return {record.idempotency_key or "": record for record in map(_record, rows)}


def open_calls(connection: Tx) -> list[CallRecord]:
    return [_record(row) for row in connection.execute(OPEN)]


def search(
    connection: Tx,
    filters: Mapping[str, str],
    *,
    limit: int,
    before: str | None = None,
    group: str | None = None,
    bodies: bool = True,
) -> list[CallRecord]:
    """Newest first. `filters` name columns of the caller's choice among tool, node_id, state and session_key.

    `group`: only the calls of this fan-out. Without `bodies`, and where those of one call and the newer ones together
    are too large for one answer, its arguments are `LEFT_OUT` and so is its result.
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
    # Ids sort by when the calls were made; in which order they were written down is another thing.
    select = _SELECT if bodies else _WITHOUT_BODIES
    found: list[CallRecord] = []
    room = MOST_LISTED_BYTES
    for row in connection.execute(f"{select}{where} ORDER BY id DESC LIMIT ?", (*values, limit)):
        record = _record(row)
        size = len(bytes(record.args)) + (0 if record.result is None else len(bytes(record.result)))
        if size > room:
            record = msgspec.structs.replace(record, args=LEFT_OUT, result=None)
        else:
            room -= size
        found.append(record)
    return found


def _append_end(connection: Tx, record: CallRecord, covered: bytes) -> None:
    shown = _shown(record, record.state)
    error = {"kind": record.error_kind, "message": record.error_message}
    data = shown if record.error_kind is None else {**msgspec.json.decode(shown), "error": error}
    append_event(connection, record.ended_at or record.created_at, "call.ended", record.id, data, covered)


def _shown(record: CallRecord, state: CallState | None = None) -> msgspec.Raw:
    """What the journal shows of a call: mostly the same as of the one before."""
    show = _show if len(record.tool) <= LONGEST_KEPT_NAME else _show.__wrapped__
    return show(record.tool, record.node_id, state)


@functools.lru_cache(maxsize=1024)
def _show(tool: str, node_id: str | None, state: CallState | None) -> msgspec.Raw:
    data = {"tool": tool, "node_id": node_id, "state": state}
    return msgspec.Raw(_encode({name: value for name, value in data.items() if value is not None}))


def _record(row: tuple[Any, ...]) -> CallRecord:
    values = dict(zip(_FIELDS, row, strict=True))
    values["args"] = msgspec.Raw(values["args"])
    values["result"] = None if values["result"] is None else msgspec.Raw(values["result"])
    values["background"] = bool(values["background"])
    values["state"] = CallState(values["state"])
    return CallRecord(**values)
