"""Messages on their way to people: one row from acceptance until the one honest end, at most one per peer and id."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx


class MessageState(StrEnum):
    # Accepted; it is tried until the service takes it.
    WAITING = "waiting"
    # Handed to the service, whose answer is not here yet.
    SENDING = "sending"
    SENT = "sent"
    # The service refused it, or did not take it for days.
    FAILED = "failed"
    # It may have been delivered; sending it again could deliver it twice.
    UNKNOWN = "unknown"


class Place(msgspec.Struct, frozen=True):
    """Where a message goes: somebody, or somewhere, on a channel."""

    channel: str
    account: str
    peer: str
    peer_kind: str = "dm"

    @property
    def lane(self) -> tuple[str, str, str]:
        """Messages with the same are delivered in their order."""
        return self.channel, self.account, self.peer

    def __str__(self) -> str:
        return f"{self.channel}:{self.peer}"


class OutboxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the outbox."""

    seq: int = 0
    id: str
    channel: str
    account: str
    peer: str
    peer_kind: str
    # The text, cut as the service takes it.
    parts: tuple[str, ...]
    # Keys of objects that go with the last part.
    media: tuple[str, ...] = ()
    reply_to: str | None = None
    agent_id: str
    origin: str
    state: MessageState = MessageState.WAITING
    parts_sent: int = 0
    attempts: int = 0
    next_at: int = 0
    error: str | None = None
    # What the service calls it: its last part.
    remote_id: str | None = None
    created_at: int
    ended_at: int | None = None
    # The gateway that hands it to the service.
    holder: str | None = None
    # Grows while its holder lives.
    beat: int = 0

    @property
    def place(self) -> Place:
        return Place(self.channel, self.account, self.peer, self.peer_kind)


class AwaitedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Who is to hear what comes of a run."""

    run_id: str
    channel: str
    account: str
    peer: str
    peer_kind: str
    reply_to: str | None = None
    agent_id: str
    created_at: int
    ended_at: int | None = None

    @property
    def place(self) -> Place:
        return Place(self.channel, self.account, self.peer, self.peer_kind)


_OUTBOX: Final = OutboxRecord.__struct_fields__
_AWAITED: Final = AwaitedReply.__struct_fields__
_SELECT: Final = f"SELECT {', '.join(_OUTBOX)} FROM outbox"  # noqa: S608
ADD: Final = f"""
    INSERT INTO outbox ({", ".join(_OUTBOX[1:])}) VALUES ({", ".join("?" * (len(_OUTBOX) - 1))})
    ON CONFLICT DO NOTHING RETURNING seq"""  # noqa: S608
SAME: Final = f"{_SELECT} WHERE channel = ? AND account = ? AND peer = ? AND id = ?"
OPEN: Final = f"{_SELECT} WHERE ended_at IS NULL ORDER BY seq"
BY_ID: Final = f"{_SELECT} WHERE id = ? ORDER BY seq"
FIRST_OF_LANE: Final = f"""{_SELECT}
    WHERE channel = ? AND account = ? AND peer = ? AND ended_at IS NULL ORDER BY seq LIMIT 1"""
CLAIM: Final = """
    UPDATE outbox SET state = 'sending', holder = ?, beat = 0, attempts = attempts + 1
    WHERE seq = ? AND state = 'waiting'"""
BEAT: Final = "UPDATE outbox SET beat = beat + 1 WHERE ended_at IS NULL AND holder = ?"
SAVE: Final = """
    UPDATE outbox SET state = ?1, parts_sent = ?2, next_at = ?3, error = ?4, remote_id = ?5, ended_at = ?6,
        holder = CASE ?1 WHEN 'waiting' THEN NULL ELSE holder END
    WHERE seq = ?7 AND holder = ?8 AND (state = 'sending' OR (state = 'unknown' AND ?1 IN ('sent', 'failed')))"""
GIVE_UP: Final = """
    UPDATE outbox SET state = ?1, error = ?2, ended_at = ?3, next_at = 0,
        holder = CASE ?1 WHEN 'waiting' THEN NULL ELSE holder END
    WHERE seq = ?4 AND holder IS ?5 AND beat = ?6 AND state = 'sending'"""
REOPEN: Final = """
    UPDATE outbox SET state = 'waiting', attempts = 0, next_at = ?, error = NULL, ended_at = NULL, holder = NULL
    WHERE seq = ? AND state IN ('failed', 'unknown')"""
FORGET: Final = """
    DELETE FROM outbox WHERE seq IN (
        SELECT seq FROM outbox WHERE ended_at < ? AND seq < (SELECT max(seq) FROM outbox) LIMIT ?)"""
FORGET_ANSWERED: Final = """
    DELETE FROM awaited_replies WHERE run_id IN (SELECT run_id FROM awaited_replies WHERE ended_at < ? LIMIT ?)"""


def add_message(connection: Tx, record: OutboxRecord) -> tuple[OutboxRecord, bool]:
    """The message as it is kept, and whether it is new: the same id to the same peer is the same message."""
    rows = connection.execute(ADD, [_value(getattr(record, name)) for name in _OUTBOX[1:]]).fetchall()
    if rows:
        ((seq,),) = rows
        kept = msgspec.structs.replace(record, seq=_number(seq))
        _tell(connection, record.created_at, "message.queued", kept)
        return kept, True
    found = connection.execute(SAME, (record.channel, record.account, record.peer, record.id)).fetchall()
    return _record(found[0]), False


def claim_next(connection: Tx, lane: tuple[str, str, str], holder: str, now: int) -> tuple[OutboxRecord | None, bool]:
    """The first open message of a lane, and whether it is the caller's to send now: of any number of gateways, one's.

    It is nobody's while its time has not come or somebody has it, and those behind it wait.
    """
    rows = connection.execute(FIRST_OF_LANE, lane).fetchall()
    if not rows:
        return None, False
    record = _record(rows[0])
    if record.state is not MessageState.WAITING or record.next_at > now:
        return record, False
    connection.execute(CLAIM, (holder, record.seq))
    if not connection.changes():
        return record, False
    claimed = msgspec.structs.replace(
        record, state=MessageState.SENDING, holder=holder, beat=0, attempts=record.attempts + 1
    )
    return claimed, True


def save_message(connection: Tx, record: OutboxRecord, now: int) -> bool:
    """Write down how far a message has come; False when it is not its holder's any more.

    An end that is written stays, except for one that others only supposed while the holder was silent.
    """
    connection.execute(
        SAVE,
        (
            str(record.state),
            record.parts_sent,
            record.next_at,
            record.error,
            record.remote_id,
            record.ended_at,
            record.seq,
            record.holder,
        ),
    )
    if not connection.changes():
        return False
    if record.ended_at is not None:
        _tell(connection, now, f"message.{record.state.value}", record)
    return True


def beat(connection: Tx, holder: str) -> None:
    """Show that a gateway lives."""
    connection.execute(BEAT, (holder,))


def take_from(connection: Tx, record: OutboxRecord, repeat: bool, reason: str, now: int) -> bool:
    """End what a vanished holder was sending as unknown, or have it sent again; False when the holder lives."""
    state, ended_at = (MessageState.WAITING, None) if repeat else (MessageState.UNKNOWN, now)
    connection.execute(GIVE_UP, (str(state), reason, ended_at, record.seq, record.holder, record.beat))
    if not connection.changes():
        return False
    if not repeat:
        _tell(connection, now, "message.unknown", msgspec.structs.replace(record, error=reason))
    return True


def forget_ended(connection: Tx, before: int, most: int) -> int:
    """Drop messages that ended before a moment, never one on its way; the newest stays: no number is given twice."""
    connection.execute(FORGET, (before, most))
    return connection.changes()


def forget_answered(connection: Tx, before: int, most: int) -> int:
    """Drop what is left of answers that were owed and given before a moment."""
    connection.execute(FORGET_ANSWERED, (before, most))
    return connection.changes()


def reopen_message(connection: Tx, seq: int, now: int) -> bool:
    """Have a message that failed tried again; False when it did not fail."""
    connection.execute(REOPEN, (now, seq))
    return bool(connection.changes())


def open_messages(connection: Tx) -> list[OutboxRecord]:
    """In the order in which they were accepted."""
    return [_record(row) for row in connection.execute(OPEN)]


def find_messages(connection: Tx, message_id: str) -> list[OutboxRecord]:
    return [_record(row) for row in connection.execute(BY_ID, (message_id,))]


def find_message(connection: Tx, seq: int) -> OutboxRecord | None:
    return next((_record(row) for row in connection.execute(f"{_SELECT} WHERE seq = ?", (seq,))), None)


def list_messages(
    connection: Tx,
    *,
    limit: int,
    channel: str | None = None,
    peer: str | None = None,
    state: str | None = None,
) -> list[OutboxRecord]:
    """Newest first."""
    wanted = {"channel": channel, "peer": peer, "state": state}
    given = {name: value for name, value in wanted.items() if value is not None}
    where = " AND ".join(f"{name} = ?" for name in given) or "1"
    rows = connection.execute(f"{_SELECT} WHERE {where} ORDER BY seq DESC LIMIT ?", (*given.values(), limit))
    return [_record(row) for row in rows]


def count_open(connection: Tx) -> dict[tuple[str, str], int]:
    """How many messages wait, by channel and account."""
    rows = connection.execute("SELECT channel, account, count(*) FROM outbox WHERE ended_at IS NULL GROUP BY 1, 2")
    return {(str(channel), str(account)): _number(count) for channel, account, count in rows}


# -- who is answered ----------------------------------------------------------------------------------------


def await_reply(connection: Tx, awaited: AwaitedReply) -> None:
    connection.execute(
        f"INSERT OR REPLACE INTO awaited_replies ({', '.join(_AWAITED)}) VALUES ({', '.join('?' * len(_AWAITED))})",  # noqa: S608
        [getattr(awaited, name) for name in _AWAITED],
    )


def end_awaited(connection: Tx, run_id: str, now: int) -> None:
    connection.execute("UPDATE awaited_replies SET ended_at = ? WHERE run_id = ? AND ended_at IS NULL", (now, run_id))


def forget_awaited(connection: Tx, run_id: str) -> None:
    connection.execute("DELETE FROM awaited_replies WHERE run_id = ?", (run_id,))


def find_awaited(connection: Tx, run_id: str) -> AwaitedReply | None:
    rows = connection.execute(
        f"SELECT {', '.join(_AWAITED)} FROM awaited_replies WHERE run_id = ?",  # noqa: S608
        (run_id,),
    ).fetchall()
    return _awaited(rows[0]) if rows else None


def open_awaited(connection: Tx) -> list[AwaitedReply]:
    rows = connection.execute(
        f"SELECT {', '.join(_AWAITED)} FROM awaited_replies WHERE ended_at IS NULL ORDER BY created_at"  # noqa: S608
    )
    return [_awaited(row) for row in rows]


def note_active(connection: Tx, agent_id: str, place: Place, now: int) -> None:
    """Remember who talked to an agent last."""
    connection.execute(
        """INSERT OR REPLACE INTO last_active (agent_id, channel, account, peer, peer_kind, at)
           VALUES (?, ?, ?, ?, ?, ?)""",
        (agent_id, place.channel, place.account, place.peer, place.peer_kind, now),
    )


def last_active(connection: Tx, agent_id: str) -> Place | None:
    rows = connection.execute(
        "SELECT channel, account, peer, peer_kind FROM last_active WHERE agent_id = ?", (agent_id,)
    ).fetchall()
    return Place(*(str(value) for value in rows[0])) if rows else None


def _tell(connection: Tx, now: int, kind: str, record: OutboxRecord) -> None:
    data: dict[str, Any] = {"channel": record.channel, "account": record.account, "to": record.peer}
    if record.error is not None:
        data["error"] = record.error
    append_event(connection, now, kind, record.id, data)


def _number(value: Any) -> int:
    return int(value)


def _value(value: Any) -> Any:
    if isinstance(value, tuple):
        return msgspec.json.encode(value)
    return str(value) if isinstance(value, StrEnum) else value


def _record(row: tuple[Any, ...]) -> OutboxRecord:
    values = dict(zip(_OUTBOX, row, strict=True))
    values["state"] = MessageState(values["state"])
    for name in ("parts", "media"):
        values[name] = msgspec.json.decode(values[name], type=tuple[str, ...])
    return OutboxRecord(**values)


def _awaited(row: tuple[Any, ...]) -> AwaitedReply:
    return AwaitedReply(**dict(zip(_AWAITED, row, strict=True)))
