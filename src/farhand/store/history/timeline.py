"""Read pages of the journal, filtered by session, node or time, with a summary of what each row refers to.

The filters have no index, so that appending stays cheap: a page reads a bounded number of rows and returns where the
next one begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from farhand.store.history.seal_coverage import MessageAdded
from farhand.store.ports import Tx

# The number of rows that one page reads.
SCANNED: Final = 20_000
# The number of bytes of arguments and results that are shown.
SHORT: Final = 400
# Times are in the order of the rows, except after a jump of the clock or for a late record.
SLACK_MS: Final = 60 * 60 * 1000

_ROWS: Final = "SELECT id, at, kind, subject, data FROM events AS e WHERE "
# Redacts the beginning of a longer text.
Hide = Callable[[bytes], bytes]

_CALL: Final = """
    SELECT tool, substr(args, 1, ?1), length(args), session_key, node_id, state, duration_ms, substr(result, 1, ?1),
        length(result), error_kind, error_message, credential, on_behalf_of
    FROM calls WHERE id = ?2"""
_RUN: Final = """
    SELECT session_key, state, origin, substr(reply, 1, ?1), error_message, steps, joined_to FROM runs WHERE id = ?2"""
_ENTRY: Final = "SELECT message, run_id, model, keeps_from FROM entries WHERE seq = ?"
_AT: Final = "SELECT id, at FROM events WHERE id >= ? ORDER BY id LIMIT 1"


class Wanted(msgspec.Struct, frozen=True):
    """A filter; None matches everything."""

    # The full session key.
    session: str | None = None
    node: str | None = None
    # `call.ended`, or `call` for all kinds with that prefix.
    kinds: tuple[str, ...] = ()
    since: int | None = None
    # In milliseconds, exclusive.
    until: int | None = None


class Short(msgspec.Struct, frozen=True):
    """The beginning of a longer text."""

    text: str
    # The size of the whole text, in bytes.
    length: int


class CallLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call in a timeline."""

    tool: str
    args: Short
    session_key: str | None
    node_id: str | None
    state: str
    duration_ms: float | None
    result: Short | None
    error_kind: str | None
    error_message: str | None
    credential: str
    on_behalf_of: str | None = None


class RunLine(msgspec.Struct, frozen=True, omit_defaults=True):
    session_key: str
    state: str
    origin: str
    reply: str | None
    error_message: str | None
    steps: int
    joined_to: str | None


class MessageLine(msgspec.Struct, frozen=True, omit_defaults=True):
    seq: int
    role: str
    text: Short
    # The names of the tools it calls.
    calls: list[str]
    run_id: str | None


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row of the journal, and what it refers to."""

    id: int
    at: int
    kind: str
    subject: str
    data: msgspec.Raw
    call: CallLine | None = None
    run: RunLine | None = None
    message: MessageLine | None = None


class Page(msgspec.Struct, frozen=True):
    """Rows in order. `before`: the next page of older rows ends before this event; None when there are no more."""

    events: list[Line]
    before: int | None
    # The newest event, matching or not; newer ones come `after` it.
    last: int


class _AddedMessage(msgspec.Struct, frozen=True):
    role: str = ""
    content: Any = ""
    tool_calls: list[dict[str, Any]] = []


def page(
    tx: Tx,
    wanted: Wanted,
    limit: int,
    *,
    before: int | None = None,
    after: int | None = None,
    hide: Hide = bytes,
) -> Page:
    """Return the newest `limit` matching rows before the event `before`, or the oldest ones after `after`.

    Shortened texts pass through `hide`: a part of a secret cannot be recognised later.
    """
    found: list[Any] = tx.execute("SELECT coalesce(max(id), 0) FROM events").fetchall()
    last: int = found[0][0]
    clauses, values = _conditions(wanted)
    if after is not None:
        rows = _select(tx, ["e.id > ?", "e.id <= ?", *clauses], [after, last, *values], "ASC", limit)
        newest = rows[-1][0] if len(rows) == limit else last
        return Page([_line(tx, row, hide) for row in rows], None, newest)
    end = last + 1 if before is None else before
    if wanted.until is not None:
        end = min(end, _first_at(tx, wanted.until + SLACK_MS, last))
    beginning = 0 if wanted.since is None else _first_at(tx, wanted.since - SLACK_MS, last)
    floors: list[Any] = tx.execute(
        "SELECT id FROM events WHERE id < ? ORDER BY id DESC LIMIT 1 OFFSET ?", (end, SCANNED)
    ).fetchall()
    floor = max(beginning, floors[0][0] + 1 if floors else 0)
    rows = _select(tx, ["e.id < ?", "e.id >= ?", *clauses], [end, floor, *values], "DESC", limit)
    if len(rows) == limit:
        more: int | None = rows[-1][0]
    else:
        more = floor if floor > max(beginning, 1) else None
    return Page([_line(tx, row, hide) for row in reversed(rows)], more, last)


def _select(tx: Tx, clauses: list[str], values: list[Any], order: str, limit: int) -> list[Any]:
    query = f"{_ROWS}{' AND '.join(clauses)} ORDER BY id {order} LIMIT ?"
    return tx.execute(query, (*values, limit)).fetchall()


def _conditions(wanted: Wanted) -> tuple[list[str], list[Any]]:
    clauses: list[str] = []
    values: list[Any] = []
    if wanted.since is not None:
        clauses.append("e.at >= ?")
        values.append(wanted.since)
    if wanted.until is not None:
        clauses.append("e.at < ?")
        values.append(wanted.until)
    if wanted.kinds:
        clauses.append(
            "(" + " OR ".join(["e.kind = ? OR substr(e.kind, 1, cast(? AS INTEGER)) = ?"] * len(wanted.kinds)) + ")"
        )
        for kind in wanted.kinds:
            values += [kind, len(kind) + 1, f"{kind}."]
    if wanted.session is not None:
        clauses.append(
            "(e.subject = ? OR instr(e.data, ?) > 0 OR instr(e.data, ?) > 0"
            " OR EXISTS (SELECT 1 FROM calls WHERE calls.id = e.subject AND calls.session_key = ?)"
            " OR EXISTS (SELECT 1 FROM runs WHERE runs.id = e.subject AND runs.session_key = ?))"
        )
        said = msgspec.json.encode(wanted.session)
        values += [wanted.session, b'"session":' + said, b'"session_key":' + said, wanted.session, wanted.session]
    if wanted.node is not None:
        clauses.append(
            "(substr(e.kind, 1, 5) = 'node.' AND e.subject = ? OR instr(e.data, ?) > 0 OR instr(e.data, ?) > 0"
            " OR instr(e.data, ?) > 0"
            " OR EXISTS (SELECT 1 FROM calls WHERE calls.id = e.subject AND calls.node_id = ?))"
        )
        said = msgspec.json.encode(wanted.node)
        place = said[:-1] + b":"  # the prefix of a transfer's endpoint
        values += [wanted.node, b'"node_id":' + said, b'"node":' + said, place, wanted.node]
    return clauses, values


def _first_at(tx: Tx, at: int, last: int) -> int:
    """Return the first row from a time on, by bisection; `last + 1` if there is none."""
    low, high = 1, last + 1
    while low < high:
        middle = (low + high) // 2
        rows: list[Any] = tx.execute(_AT, (middle,)).fetchall()
        if not rows or rows[0][1] >= at:
            high = middle
        else:
            low = rows[0][0] + 1
    return low


def _line(tx: Tx, row: tuple[Any, ...], hide: Hide) -> Line:
    number, at, kind, subject, data = row
    line = Line(number, at, kind, subject, msgspec.Raw(data))
    if kind == "message.added":
        return msgspec.structs.replace(line, message=_message(tx, data, hide))
    if kind.startswith("run."):
        return msgspec.structs.replace(line, run=_run(tx, subject, hide))
    return msgspec.structs.replace(line, call=_call(tx, subject, hide))


def _call(tx: Tx, call_id: str, hide: Hide) -> CallLine | None:
    rows: list[Any] = tx.execute(_CALL, (SHORT, call_id)).fetchall()
    if not rows:
        return None
    tool, args, size, session, node, state, took, result, length, kind, message, credential, behalf = rows[0]
    short_result = None if result is None else _short(result, length, hide)
    shown = _short(args, size, hide)
    return CallLine(tool, shown, session, node, state, took, short_result, kind, message, credential, behalf)


def _run(tx: Tx, run_id: str, hide: Hide) -> RunLine | None:
    rows: list[Any] = tx.execute(_RUN, (SHORT, run_id)).fetchall()
    if not rows:
        return None
    line = RunLine(*rows[0])
    if line.reply is None or len(line.reply) < SHORT:
        return line
    return msgspec.structs.replace(line, reply=hide(line.reply.encode()).decode(errors="ignore"))


def _message(tx: Tx, data: bytes, hide: Hide) -> MessageLine | None:
    try:
        seq = msgspec.json.decode(data, type=MessageAdded).seq
        rows: list[Any] = tx.execute(_ENTRY, (seq,)).fetchall()
        if not rows:
            return None
        short_result = msgspec.json.decode(rows[0][0], type=_AddedMessage)
    except msgspec.MsgspecError:
        return None
    content = short_result.content
    if not isinstance(content, str):
        content = " ".join(str(block.get("text", "[image]")) for block in content if isinstance(block, dict))
    role = short_result.role if rows[0][3] is None else "summary"
    names = [str(use.get("name", "")) for use in short_result.tool_calls]
    return MessageLine(seq, role, _short(content.encode(), len(content.encode()), hide), names, rows[0][1])


def _short(data: bytes, length: int, hide: Hide) -> Short:
    shown = data[:SHORT] if length <= SHORT else hide(data[:SHORT])
    return Short(shown.decode(errors="ignore"), length)
