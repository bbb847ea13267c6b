"""Find ids by their first characters, in the tables whose ids people type."""

from __future__ import annotations

from typing import Final

from farhand.store.ports import Tx

# By the name of the parameter that holds such an id: the table, and the length of a whole id.
TABLES: Final = {
    "call_id": ("calls", 36),
    "terminal_id": ("calls", 36),
    "trial_id": ("calls", 36),
    "run_id": ("runs", 36),
    "transfer_id": ("transfers", 36),
    "approval_id": ("approvals", 36),
    "token_id": ("tokens", 8),
}


def ids_beginning_with(tx: Tx, table: str, prefix: str, limit: int) -> list[str]:
    """Return ids of a table in TABLES that begin with `prefix`, in order."""
    beyond = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    sql = f"SELECT id FROM {table} WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"  # noqa: S608 - a name of TABLES
    return [str(row[0]) for row in tx.execute(sql, (prefix, beyond, limit))]
