"""Calls that MCP clients made as tasks. The state of a task is that of its call."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.store.ports import Tx

ADD: Final = "INSERT INTO mcp_tasks (call_id, credential, created_at, expires_at) VALUES (?, ?, ?, ?)"
FIND: Final = "SELECT call_id, credential, created_at, expires_at FROM mcp_tasks WHERE call_id = ?"
LIST: Final = """
    SELECT call_id, credential, created_at, expires_at FROM mcp_tasks
    WHERE credential = ? AND call_id < ? AND expires_at > ? ORDER BY call_id DESC LIMIT ?"""
FORGET: Final = "DELETE FROM mcp_tasks WHERE expires_at <= ?"


class TaskRow(msgspec.Struct, frozen=True):
    """A task: its call, the credential that may ask for it, and when it is forgotten, in milliseconds."""

    call_id: str
    credential: str
    created_at: int
    expires_at: int


def add_task(tx: Tx, row: TaskRow) -> None:
    """Add a task, and forget those that have expired."""
    tx.execute(FORGET, (row.created_at,))
    tx.execute(ADD, (row.call_id, row.credential, row.created_at, row.expires_at))


def find_task(tx: Tx, call_id: str) -> TaskRow | None:
    row = next(iter(tx.execute(FIND, (call_id,))), None)
    return None if row is None else TaskRow(*row)


def tasks_of(tx: Tx, credential: str, before: str, now: int, limit: int) -> list[TaskRow]:
    """Return the tasks of a credential whose ids are smaller than `before`, newest first."""
    return [TaskRow(*row) for row in tx.execute(LIST, (credential, before, now, limit))]
