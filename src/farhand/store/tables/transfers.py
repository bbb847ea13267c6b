"""Transfers: one row each, from start to end."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx
from farhand.store.tables.rows import Table


class TransferState(StrEnum):
    RUNNING = "running"
    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer."""

    id: str
    source: str
    destination: str
    agent_id: str | None = None
    credential: str
    state: TransferState = TransferState.RUNNING
    files: int | None = None
    bytes_total: int | None = None
    bytes_done: int = 0
    mime: str | None = None
    error_kind: str | None = None
    error_message: str | None = None
    created_at: int
    ended_at: int | None = None


_TRANSFERS: Final = Table("transfers", TransferRecord)
_CHANGING: Final = (
    *("state", "files", "bytes_total", "bytes_done", "mime"),
    *("error_kind", "error_message", "ended_at"),
)


def begin_transfer(tx: Tx, record: TransferRecord) -> None:
    _TRANSFERS.add(tx, record)
    data = {"source": record.source, "destination": record.destination}
    append_event(tx, record.created_at, "transfer.started", record.id, data)


def save_transfer(tx: Tx, record: TransferRecord, now: int) -> bool:
    """Store the progress or the end of a transfer; return False if it has ended already."""
    if not _TRANSFERS.update(tx, record, _CHANGING, "id = ? AND ended_at IS NULL", record.id):
        return False
    data: dict[str, Any] = {
        "source": record.source,
        "destination": record.destination,
        "bytes": record.bytes_done,
        "total": record.bytes_total,
        "files": record.files,
    }
    if record.ended_at is None:
        append_event(tx, now, "transfer.progress", record.id, data)
        return True
    data["state"] = str(record.state)
    if record.error_kind is not None:
        data["error"] = {"kind": record.error_kind, "message": record.error_message}
    append_event(tx, now, "transfer.ended", record.id, data)
    return True


def find_transfer(tx: Tx, transfer_id: str) -> TransferRecord | None:
    return _TRANSFERS.find(tx, "id = ?", transfer_id)


def open_transfers(tx: Tx) -> list[TransferRecord]:
    return _TRANSFERS.all(tx, "WHERE ended_at IS NULL ORDER BY seq")


def newest_transfers(tx: Tx, limit: int) -> list[TransferRecord]:
    return _TRANSFERS.all(tx, "ORDER BY seq DESC LIMIT ?", limit)
