"""Calls that MCP clients made as tasks. The state of a task is that of its call."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.store.ports import Tx
from farhand.store.tables.rows import Table


class TaskRow(msgspec.Struct, frozen=True):
    """A task: its call, the credential that may ask for it, and when it is forgotten, in milliseconds."""

    call_id: str
    credential: str
    created_at: int
    expires_at: int


_TASKS: Final = Table("mcp_tasks", TaskRow)


def add_task(tx: Tx, row: TaskRow) -> None:
    """Add a task, and forget those that have expired."""
    tx.execute("DELETE FROM mcp_tasks WHERE expires_at <= ?", (row.created_at,))
    _TASKS.add(tx, row)


def find_task(tx: Tx, call_id: str) -> TaskRow | None:
    return _TASKS.find(tx, "call_id = ?", call_id)


def tasks_of(tx: Tx, credential: str, before: str, now: int, limit: int) -> list[TaskRow]:
    """Return the tasks of a credential whose ids are smaller than `before`, newest first."""
    wanted = "WHERE credential = ? AND call_id < ? AND expires_at > ? ORDER BY call_id DESC LIMIT ?"
    return _TASKS.all(tx, wanted, credential, before, now, limit)
