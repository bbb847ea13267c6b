"""Sessions, their transcripts and their runs.

Transcripts are append-only: a new conversation or a summary is one more row, and earlier rows stay readable.
A run is the work on one message to a session; a message that joined the run of another one shares its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.journal.seal import packed
from farhand.store.ports import Tx
from farhand.store.tables.rows import Table


class RunState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    # Its message joined another run of the session, and ends with it.
    JOINED = "joined"
    OK = "ok"
    STOPPED = "stopped"
    FAILED = "failed"
    TIMEOUT = "timeout"


LISTED: Final = ("chat", "child", "cron")
ONCE: Final = "once"
OPEN_STATES: Final = (RunState.QUEUED, RunState.RUNNING, RunState.JOINED)


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A session. Tokens and cost are totals over its lifetime, sub-agents included."""

    key: str
    # The id of the current conversation.
    id: str
    agent_id: str
    # `chat`, `child` (of a sub-agent), `cron` (of a scheduled task) or `once` (its client keeps the conversation).
    kind: str = "chat"
    parent_key: str | None = None
    title: str = ""
    # Overrides the agent's setting.
    model: str | None = None
    thinking: str | None = None
    # The place of the last message from a person, to which answers go.
    channel: msgspec.Raw | None = None
    previous_ids: tuple[str, ...] = ()
    created_at: int
    updated_at: int
    # Of the current conversation.
    messages: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float = 0.0
    # The size of the model's context after its last reply.
    context_tokens: int = 0
    compactions: int = 0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of a transcript."""

    seq: int = 0
    session_key: str
    session_id: str
    run_id: str | None
    at: int
    message: msgspec.Raw
    model: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float = 0.0
    # For a summary: it replaces all entries before this number.
    keeps_from: int | None = None


class _Role(msgspec.Struct, frozen=True):
    """The role of a message."""

    role: str


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    id: str
    session_key: str
    state: RunState = RunState.QUEUED
    origin: str
    credential: str
    scopes: tuple[str, ...]
    message: msgspec.Raw
    options: msgspec.Raw
    joined_to: str | None = None
    attempts: int = 0
    created_at: int
    started_at: int | None = None
    ended_at: int | None = None
    reply: str | None = None
    error_kind: str | None = None
    error_message: str | None = None
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float = 0.0
    # Why the model stopped, if the run has a reply.
    finish_reason: str | None = None
    # Calls that the client has to carry out.
    handed: msgspec.Raw | None = None
    # The credential on whose behalf the run acts.
    asker: msgspec.Raw


MOST_HISTORY_BYTES: Final = 8 * 1024 * 1024
_SESSIONS: Final = Table("sessions", SessionRecord)
_ENTRIES: Final = Table("entries", Entry, numbered=True)
_RUNS: Final = Table("runs", RunRecord)
ENTRY_COLUMNS: Final = _ENTRIES.columns
COUNTED: Final = """
    UPDATE sessions SET messages = messages + ?, prompt_tokens = prompt_tokens + ?,
        completion_tokens = completion_tokens + ?, cached_tokens = cached_tokens + ?, cost = cost + ?, updated_at = ?
    WHERE key = ?"""
LAST_SUMMARY: Final = """
    SELECT seq, keeps_from FROM entries
    WHERE session_key = ? AND session_id = ? AND seq <= ? AND keeps_from IS NOT NULL ORDER BY seq DESC LIMIT 1"""
NEWEST: Final = 2**62
OWN: Final = """EXISTS (SELECT 1 FROM runs WHERE credential = ? AND session_key = key)
    AND NOT EXISTS (SELECT 1 FROM runs WHERE session_key = key AND credential <> ?)"""


def add_session(tx: Tx, record: SessionRecord) -> SessionRecord:
    """Add a session unless its key exists; return the stored one."""
    _SESSIONS.add(tx, record, "ON CONFLICT (key) DO NOTHING")
    if tx.changes():
        data = {"agent": record.agent_id, "kind": record.kind}
        append_event(tx, record.created_at, "session.created", record.key, data)
        return record
    found = find_session(tx, record.key)
    assert found is not None
    return found


def find_session(tx: Tx, key: str) -> SessionRecord | None:
    return _SESSIONS.find(tx, "key = ?", key)


def list_sessions(
    tx: Tx,
    *,
    limit: int,
    offset: int = 0,
    oldest_first: bool = False,
    kinds: tuple[str, ...] = LISTED,
    parent_key: str | None = None,
    own_to: str | None = None,
    key: str | None = None,
) -> tuple[list[SessionRecord], int]:
    """Return a page of sessions, by last activity or by age, and the total number.

    `own_to`: only sessions whose runs all act on behalf of this credential. `key`: only this one.
    """
    where = f"kind IN ({', '.join('?' * len(kinds))})"
    values: list[Any] = [*kinds]
    if parent_key is not None:
        where += " AND parent_key = ?"
        values.append(parent_key)
    if own_to is not None:
        where += f" AND {OWN}"
        values += [own_to, own_to]
    if key is not None:
        where += " AND key = ?"
        values.append(key)
    order = "created_at, key" if oldest_first else "updated_at DESC, key"
    found = _SESSIONS.all(tx, f"WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?", *values, limit, offset)
    ((count,),) = tx.execute(f"SELECT count(*) FROM sessions WHERE {where}", values).fetchall()  # noqa: S608
    return found, int(count)


def change_session(tx: Tx, key: str, **values: Any) -> None:
    columns = ", ".join(f"{name} = ?" for name in values)
    tx.execute(
        f"UPDATE sessions SET {columns} WHERE key = ?",  # noqa: S608
        (*map(_SESSIONS.stored, values.values()), key),
    )


def begin_anew(tx: Tx, record: SessionRecord, new_id: str, now: int) -> SessionRecord:
    """Begin a new conversation under the same key; the old one stays readable by its id."""
    fresh = msgspec.structs.replace(
        record,
        id=new_id,
        previous_ids=(*record.previous_ids, record.id),
        title="" if record.kind == "chat" else record.title,
        messages=0,
        context_tokens=0,
        updated_at=now,
    )
    names = ("id", "previous_ids", "title", "messages", "context_tokens", "updated_at")
    _SESSIONS.update(tx, fresh, names, "key = ?", record.key)
    append_event(tx, now, "session.reset", record.key, {"previous": record.id})
    return fresh


# -- transcripts -----------------------------------------------------------------------------------------


def append_entry(tx: Tx, entry: Entry, *, context_tokens: int | None = None) -> int:
    """Append to a transcript, update the counts of its session, and return the entry's number."""
    seq = _add_entry(tx, entry)
    count_usage(
        tx,
        entry.session_key,
        entry.at,
        messages=int(entry.keeps_from is None),
        prompt_tokens=entry.prompt_tokens,
        completion_tokens=entry.completion_tokens,
        cached_tokens=entry.cached_tokens,
        cost=entry.cost,
    )
    if context_tokens is not None:
        change_session(tx, entry.session_key, context_tokens=context_tokens)
    return seq


def _add_entry(tx: Tx, entry: Entry) -> int:
    values = _ENTRIES.values(entry)
    ((seq,),) = tx.execute(f"{_ENTRIES.insert} RETURNING seq", values).fetchall()
    role = msgspec.json.decode(entry.message, type=_Role).role
    data = {"seq": seq, "role": role if entry.keeps_from is None else "summary"}
    if entry.run_id is not None:
        data["run"] = entry.run_id
    append_event(tx, entry.at, "message.added", entry.session_key, data, packed((seq, *values)))
    return int(seq)


def copy_entry(tx: Tx, entry: Entry, now: int) -> int:
    """Append a copy of an entry of another session, without its cost, and return its number."""
    seq = _add_entry(tx, entry)
    if entry.keeps_from is None:
        count_usage(tx, entry.session_key, now, messages=1)
    else:
        count_compaction(tx, entry.session_key)
    return seq


def count_usage(
    tx: Tx,
    key: str,
    now: int,
    *,
    messages: int = 0,
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    cached_tokens: int = 0,
    cost: float = 0.0,
) -> None:
    tx.execute(COUNTED, (messages, prompt_tokens, completion_tokens, cached_tokens, cost, now, key))


def count_compaction(tx: Tx, key: str) -> None:
    tx.execute("UPDATE sessions SET compactions = compactions + 1 WHERE key = ?", (key,))


def conversation(tx: Tx, key: str, session_id: str, last: int | None = None) -> list[Entry]:
    """Return what the model sees: the newest summary, if any, and the entries it does not replace; oldest first.

    `last`: as of this entry.
    """
    values: tuple[Any, ...] = (key, session_id, NEWEST if last is None else last)
    summaries = tx.execute(LAST_SUMMARY, values).fetchall()
    where = "session_key = ? AND session_id = ? AND seq <= ? AND keeps_from IS NULL"
    found: list[Entry] = []
    if summaries:
        seq, keeps_from = summaries[0]
        found = _ENTRIES.all(tx, "WHERE seq = ?", seq)
        where += " AND seq >= ?"
        values += (keeps_from,)
    return found + _ENTRIES.all(tx, f"WHERE {where} ORDER BY seq", *values)


def history(
    tx: Tx,
    key: str,
    *,
    limit: int,
    offset: int = 0,
    before: int | None = None,
    session_id: str | None = None,
    most_bytes: int = MOST_HISTORY_BYTES,
) -> list[Entry]:
    """Return the newest `limit` entries after skipping `offset`, oldest first.

    Without `session_id`, of all conversations. Fewer are returned if their messages exceed `most_bytes`.
    """
    where, values = "session_key = ?", [key]
    if session_id is not None:
        where += " AND session_id = ?"
        values.append(session_id)
    if before is not None:
        where += " AND seq < ?"
        values.append(before)  # type: ignore[arg-type]
    found: list[Entry] = []
    size = 0
    query = f"{_ENTRIES.select} WHERE {where} ORDER BY seq DESC LIMIT ? OFFSET ?"
    for row in tx.execute(query, (*values, limit, offset)):
        found.append(_ENTRIES.read(row))
        size += len(bytes(found[-1].message))
        if size > most_bytes:
            break
    return found[::-1]


def newest_entries(tx: Tx, key: str, first: int) -> Iterator[Entry]:
    """Yield the entries of a session from a number on, newest first, of all conversations."""
    query = f"{_ENTRIES.select} WHERE session_key = ? AND seq >= ? ORDER BY seq DESC"
    return map(_ENTRIES.read, tx.execute(query, (key, first)))


def find_entry(tx: Tx, seq: int) -> Entry | None:
    return _ENTRIES.find(tx, "seq = ?", seq)


def entry_by(tx: Tx, key: str, event: int, at: int) -> Entry | None:
    """Return the newest entry of a session at an event, which was written at the time `at`."""
    rows: list[Any] = tx.execute(
        "SELECT data FROM events WHERE id <= ? AND kind = 'message.added' AND subject = ? ORDER BY id DESC LIMIT 1",
        (event, key),
    ).fetchall()
    if rows:
        return find_entry(tx, msgspec.json.decode(rows[0][0])["seq"])
    # Entries older than the events that record them.
    return _ENTRIES.find(tx, "session_key = ? AND at <= ? ORDER BY seq DESC LIMIT 1", key, at)


def entries_after(tx: Tx, key: str, seq: int) -> list[Entry]:
    """Return all entries of a session after one, of any conversation."""
    return _ENTRIES.all(tx, "WHERE session_key = ? AND seq > ? ORDER BY seq", key, seq)


def entries_of_run(tx: Tx, key: str, run_id: str) -> list[Entry]:
    """Return the entries that a run added to a session's transcript, oldest first."""
    return _ENTRIES.all(tx, "WHERE session_key = ? AND run_id = ? ORDER BY seq", key, run_id)


def transcript_bytes(tx: Tx, key: str, session_id: str, last: int) -> int:
    """Return the size of a conversation's messages up to an entry."""
    ((size,),) = tx.execute(
        "SELECT coalesce(sum(length(message)), 0) FROM entries WHERE session_key = ? AND session_id = ? AND seq <= ?",
        (key, session_id, last),
    ).fetchall()
    return int(size)


def transcript(tx: Tx, key: str, session_id: str, last: int) -> list[Entry]:
    """Return all entries of a conversation up to one, summaries included; oldest first."""
    wanted = "WHERE session_key = ? AND session_id = ? AND seq <= ? ORDER BY seq"
    return _ENTRIES.all(tx, wanted, key, session_id, last)


# -- runs ---------------------------------------------------------------------------------------------------


def is_own(tx: Tx, key: str, credential: str) -> bool:
    """Return whether a session has runs, all of them on behalf of a credential."""
    rows = tx.execute(f"SELECT 1 FROM sessions WHERE key = ? AND {OWN}", (key, credential, credential))  # noqa: S608
    return bool(rows.fetchall())


def has_runs(tx: Tx, key: str, *, since: int = 0, besides: str = "") -> bool:
    """Return whether a session has had a run since a time; `besides`: one on behalf of another credential."""
    query = "SELECT 1 FROM runs WHERE session_key = ? AND created_at >= ? AND credential <> ? LIMIT 1"
    return tx.execute(query, (key, since, besides)).fetchone() is not None


def is_unused(tx: Tx, key: str) -> bool:
    """Return whether a session has never had a run."""
    used = "SELECT 1 FROM runs WHERE session_key = ? UNION ALL SELECT 1 FROM entries WHERE session_key = ? LIMIT 1"
    return not tx.execute(used, (key, key)).fetchall()


def first_credential(tx: Tx, key: str) -> str | None:
    """Return the credential of a session's first message."""
    row = tx.execute("SELECT credential FROM runs WHERE session_key = ? ORDER BY seq LIMIT 1", (key,)).fetchone()
    return None if row is None else str(row[0])


def add_run(tx: Tx, run: RunRecord) -> None:
    _RUNS.add(tx, run)
    append_event(tx, run.created_at, "run.queued", run.id, {"session": run.session_key, "origin": run.origin})


def find_run(tx: Tx, run_id: str) -> RunRecord | None:
    return _RUNS.find(tx, "id = ?", run_id)


def open_runs(tx: Tx) -> list[RunRecord]:
    """Return the open runs in the order of their messages."""
    return _RUNS.all(tx, "WHERE ended_at IS NULL ORDER BY seq")


def hands_over(tx: Tx, key: str) -> bool:
    """Return whether a run of the session has ever left calls to its client."""
    query = "SELECT 1 FROM runs WHERE session_key = ? AND handed IS NOT NULL LIMIT 1"
    return tx.execute(query, (key,)).fetchone() is not None


def start_run(tx: Tx, run_id: str, now: int) -> None:
    tx.execute(
        "UPDATE runs SET state = 'running', started_at = coalesce(started_at, ?), attempts = attempts + 1 WHERE id = ?",
        (now, run_id),
    )
    append_event(tx, now, "run.started", run_id, {})


def got_on(tx: Tx, run_id: str) -> None:
    """Reset the attempt count of a run that made progress."""
    tx.execute("UPDATE runs SET attempts = 1 WHERE id = ? AND attempts > 1", (run_id,))


def forgive_attempts(tx: Tx) -> None:
    """Reset the attempt counts of all open runs, because the gateway is stopped deliberately."""
    tx.execute("UPDATE runs SET attempts = 0 WHERE state = 'running'")


def joined_to(tx: Tx, run_id: str) -> list[str]:
    return [str(row[0]) for row in tx.execute("SELECT id FROM runs WHERE joined_to = ?", (run_id,))]


def join_run(tx: Tx, run_id: str, to: str, now: int) -> None:
    tx.execute("UPDATE runs SET state = 'joined', joined_to = ?, started_at = ? WHERE id = ?", (to, now, run_id))
    append_event(tx, now, "run.joined", run_id, {"to": to})


def end_run(tx: Tx, run: RunRecord) -> None:
    """Store the end of a run and of those that joined it. A stored end is final."""
    end = ("state", "ended_at", "reply", "error_kind", "error_message", "finish_reason")
    used = ("steps", "prompt_tokens", "completion_tokens", "cached_tokens", "cost", "handed")
    if not _RUNS.update(tx, run, (*end, *used), "id = ? AND ended_at IS NULL", run.id):
        return
    _RUNS.update(tx, run, end, "joined_to = ? AND ended_at IS NULL", run.id)
    data: dict[str, Any] = {"session": run.session_key, "state": str(run.state)}
    if run.error_kind is not None:
        data["error"] = {"kind": run.error_kind, "message": run.error_message}
    append_event(tx, run.ended_at or run.created_at, "run.ended", run.id, data)
