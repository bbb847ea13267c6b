"""Messages to people: one row from acceptance to the end, at most one per peer and message id."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx
from farhand.store.tables.rows import Table


class MessageState(StrEnum):
    # Accepted; retried until the service takes it.
    WAITING = "waiting"
    # Handed to the service, which has not answered yet.
    SENDING = "sending"
    SENT = "sent"
    # The service refused it, or did not take it for days.
    FAILED = "failed"
    # Possibly delivered; sending it again could deliver it twice.
    UNKNOWN = "unknown"


class Place(msgspec.Struct, frozen=True):
    """The destination of a message: a person or a group on a channel."""

    channel: str
    account: str
    peer: str
    peer_kind: str = "dm"

    @property
    def queue(self) -> tuple[str, str, str]:
        """Return the key of the peer's queue; messages with the same key are delivered in order."""
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
    # The text, split to fit the limits of the service.
    parts: tuple[str, ...]
    # Keys of objects that are sent with the last part.
    media: tuple[str, ...] = ()
    reply_to: str | None = None
    agent_id: str
    origin: str
    state: MessageState = MessageState.WAITING
    parts_sent: int = 0
    attempts: int = 0
    next_at: int = 0
    error: str | None = None
    # The service's id of the last part.
    remote_id: str | None = None
    created_at: int
    ended_at: int | None = None
    # The gateway that sends it.
    holder: str | None = None
    # Increases while the holder is alive.
    beat: int = 0

    @property
    def place(self) -> Place:
        return Place(self.channel, self.account, self.peer, self.peer_kind)


class AwaitedReply(msgspec.Struct, frozen=True, kw_only=True):
    """The place that gets the reply of a run."""

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


_OUTBOX: Final = Table("outbox", OutboxRecord, numbered=True, separator=None)
_AWAITED: Final = Table("awaited_replies", AwaitedReply)
ADD: Final = f"{_OUTBOX.insert} ON CONFLICT DO NOTHING RETURNING seq"
CLAIM: Final = """
    UPDATE outbox SET state = 'sending', holder = ?, beat = 0, attempts = attempts + 1
    WHERE seq = ? AND state = 'waiting'"""
SAVE: Final = """
    UPDATE outbox SET state = ?1, parts_sent = ?2, next_at = ?3, error = ?4, remote_id = ?5, ended_at = ?6,
        holder = CASE ?1 WHEN 'waiting' THEN NULL ELSE holder END
    WHERE seq = ?7 AND holder = ?8 AND (state = 'sending' OR (state = 'unknown' AND ?1 IN ('sent', 'failed')))"""
GIVE_UP: Final = """
    UPDATE outbox SET state = ?1, error = ?2, ended_at = ?3, next_at = 0,
        holder = CASE ?1 WHEN 'waiting' THEN NULL ELSE holder END
    WHERE seq = ?4 AND holder IS NOT DISTINCT FROM ?5 AND beat = ?6 AND state = 'sending'"""
REOPEN: Final = """
    UPDATE outbox SET state = 'waiting', attempts = 0, next_at = ?, error = NULL, ended_at = NULL, holder = NULL
    WHERE seq = ? AND state IN ('failed', 'unknown')"""
FORGET: Final = """
    DELETE FROM outbox WHERE seq IN (
        SELECT seq FROM outbox WHERE ended_at < ? AND seq < (SELECT max(seq) FROM outbox) LIMIT ?)"""
FORGET_ANSWERED: Final = """
    DELETE FROM awaited_replies WHERE run_id IN (SELECT run_id FROM awaited_replies WHERE ended_at < ? LIMIT ?)"""


def add_message(tx: Tx, record: OutboxRecord) -> tuple[OutboxRecord, bool]:
    """Store a message; return it and whether it is new: the same id to the same peer is the same message."""
    rows = tx.execute(ADD, _OUTBOX.values(record)).fetchall()
    if rows:
        ((seq,),) = rows
        kept = msgspec.structs.replace(record, seq=int(seq))
        _tell(tx, record.created_at, "message.queued", kept)
        return kept, True
    same = "channel = ? AND account = ? AND peer = ? AND id = ?"
    found = _OUTBOX.find(tx, same, record.channel, record.account, record.peer, record.id)
    assert found is not None
    return found, False


def claim_next(tx: Tx, queue: tuple[str, str, str], holder: str, now: int) -> tuple[OutboxRecord | None, bool]:
    """Return the first open message of a queue, and whether the caller claimed it; only one gateway can.

    While it is not due, or another gateway sends it, the messages behind it wait.
    """
    first = "channel = ? AND account = ? AND peer = ? AND ended_at IS NULL ORDER BY seq LIMIT 1"
    record = _OUTBOX.find(tx, first, *queue)
    if record is None:
        return None, False
    if record.state is not MessageState.WAITING or record.next_at > now:
        return record, False
    tx.execute(CLAIM, (holder, record.seq))
    if not tx.changes():
        return record, False
    claimed = msgspec.structs.replace(
        record, state=MessageState.SENDING, holder=holder, beat=0, attempts=record.attempts + 1
    )
    return claimed, True


def save_message(tx: Tx, record: OutboxRecord, now: int) -> bool:
    """Store the progress of a message; return False if its holder has lost it.

    A stored end is final, except for one that another gateway assumed while the holder was silent.
    """
    tx.execute(
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
    if not tx.changes():
        return False
    if record.ended_at is not None:
        _tell(tx, now, f"message.{record.state.value}", record)
    return True


def beat(tx: Tx, holder: str) -> None:
    tx.execute("UPDATE outbox SET beat = beat + 1 WHERE ended_at IS NULL AND holder = ?", (holder,))


def take_from(tx: Tx, record: OutboxRecord, repeat: bool, reason: str, now: int) -> bool:
    """End the message of a vanished holder as unknown, or requeue it; return False if the holder is alive."""
    state, ended_at = (MessageState.WAITING, None) if repeat else (MessageState.UNKNOWN, now)
    tx.execute(GIVE_UP, (str(state), reason, ended_at, record.seq, record.holder, record.beat))
    if not tx.changes():
        return False
    if not repeat:
        _tell(tx, now, "message.unknown", msgspec.structs.replace(record, error=reason))
    return True


def forget_ended(tx: Tx, before: int, most: int) -> int:
    """Delete messages that ended before a time; the newest row stays, so that no number is used twice."""
    tx.execute(FORGET, (before, most))
    return tx.changes()


def forget_answered(tx: Tx, before: int, most: int) -> int:
    """Delete awaited replies that were given before a time."""
    tx.execute(FORGET_ANSWERED, (before, most))
    return tx.changes()


def reopen_message(tx: Tx, seq: int, now: int) -> bool:
    """Requeue a failed message; return False if it has not failed."""
    tx.execute(REOPEN, (now, seq))
    return bool(tx.changes())


def open_messages(tx: Tx) -> list[OutboxRecord]:
    """Return the open messages in the order of acceptance."""
    return _OUTBOX.all(tx, "WHERE ended_at IS NULL ORDER BY seq")


def find_messages(tx: Tx, message_id: str) -> list[OutboxRecord]:
    return _OUTBOX.all(tx, "WHERE id = ? ORDER BY seq", message_id)


def find_message(tx: Tx, seq: int) -> OutboxRecord | None:
    return _OUTBOX.find(tx, "seq = ?", seq)


def list_messages(
    tx: Tx,
    *,
    limit: int,
    channel: str | None = None,
    peer: str | None = None,
    state: str | None = None,
) -> list[OutboxRecord]:
    """Return messages, newest first."""
    wanted = {"channel": channel, "peer": peer, "state": state}
    given = {name: value for name, value in wanted.items() if value is not None}
    where = " AND ".join(f"{name} = ?" for name in given) or "1 = 1"
    return _OUTBOX.all(tx, f"WHERE {where} ORDER BY seq DESC LIMIT ?", *given.values(), limit)


def count_open(tx: Tx) -> dict[tuple[str, str], int]:
    """Return the number of open messages by channel and account."""
    rows = tx.execute("SELECT channel, account, count(*) FROM outbox WHERE ended_at IS NULL GROUP BY 1, 2")
    return {(str(channel), str(account)): int(count) for channel, account, count in rows}


# -- awaited replies ----------------------------------------------------------------------------------------


def await_reply(tx: Tx, awaited: AwaitedReply) -> None:
    _AWAITED.add(tx, awaited, _AWAITED.replace("run_id"))


def end_awaited(tx: Tx, run_id: str, now: int) -> None:
    tx.execute("UPDATE awaited_replies SET ended_at = ? WHERE run_id = ? AND ended_at IS NULL", (now, run_id))


def forget_awaited(tx: Tx, run_id: str) -> None:
    tx.execute("DELETE FROM awaited_replies WHERE run_id = ?", (run_id,))


def find_awaited(tx: Tx, run_id: str) -> AwaitedReply | None:
    return _AWAITED.find(tx, "run_id = ?", run_id)


def open_awaited(tx: Tx) -> list[AwaitedReply]:
    return _AWAITED.all(tx, "WHERE ended_at IS NULL ORDER BY created_at")


def note_active(tx: Tx, agent_id: str, place: Place, now: int) -> None:
    """Store the place that an agent was last addressed from."""
    tx.execute(
        """INSERT INTO last_active (agent_id, channel, account, peer, peer_kind, at) VALUES (?, ?, ?, ?, ?, ?)
           ON CONFLICT (agent_id) DO UPDATE SET channel = excluded.channel, account = excluded.account,
               peer = excluded.peer, peer_kind = excluded.peer_kind, at = excluded.at""",
        (agent_id, place.channel, place.account, place.peer, place.peer_kind, now),
    )


def last_active(tx: Tx, agent_id: str) -> Place | None:
    rows = tx.execute(
        "SELECT channel, account, peer, peer_kind FROM last_active WHERE agent_id = ?", (agent_id,)
    ).fetchall()
    return Place(*(str(value) for value in rows[0])) if rows else None


def _tell(tx: Tx, now: int, kind: str, record: OutboxRecord) -> None:
    data: dict[str, Any] = {"channel": record.channel, "account": record.account, "to": record.peer}
    if record.error is not None:
        data["error"] = record.error
    append_event(tx, now, kind, record.id, data)
