"""One-time codes: to sign a browser in, and to add a machine. They are stored as hashes."""

from __future__ import annotations

from typing import Final

from farhand.store.ports import Tx

ADD: Final = "INSERT INTO one_time_codes (hash, kind, facts, expires_at) VALUES (?, ?, ?, ?)"
SURPLUS: Final = """
    DELETE FROM one_time_codes WHERE kind = ?1 AND hash NOT IN (
        SELECT hash FROM one_time_codes WHERE kind = ?1 ORDER BY seq DESC LIMIT ?2)"""
FIND: Final = "SELECT facts FROM one_time_codes WHERE kind = ? AND hash = ? AND expires_at > ?"
USE: Final = "DELETE FROM one_time_codes WHERE kind = ? AND hash = ? AND expires_at > ? RETURNING facts"


def add_code(tx: Tx, kind: str, code_hash: bytes, facts: bytes, expires_at: int, now: int, most: int) -> None:
    """Store a code; of each kind, the `most` newest are kept."""
    tx.execute("DELETE FROM one_time_codes WHERE expires_at <= ?", (now,))
    tx.execute(ADD, (code_hash, kind, facts, expires_at))
    tx.execute(SURPLUS, (kind, most))


def find_code(tx: Tx, kind: str, code_hash: bytes, now: int) -> bytes | None:
    """Return the facts of a code that can be used."""
    rows = tx.execute(FIND, (kind, code_hash, now)).fetchall()
    return bytes(rows[0][0]) if rows else None


def use_code(tx: Tx, kind: str, code_hash: bytes, now: int) -> bytes | None:
    """Use a code up and return its facts; None if it is unknown, used or expired."""
    rows = tx.execute(USE, (kind, code_hash, now)).fetchall()
    return bytes(rows[0][0]) if rows else None


def count_codes(tx: Tx, kind: str, now: int) -> int:
    rows = tx.execute("SELECT count(*) FROM one_time_codes WHERE kind = ? AND expires_at > ?", (kind, now)).fetchall()
    return int(rows[0][0])


def remove_codes(tx: Tx, kind: str | None = None) -> None:
    """Remove all codes, or those of a kind."""
    if kind is None:
        tx.execute("DELETE FROM one_time_codes")
    else:
        tx.execute("DELETE FROM one_time_codes WHERE kind = ?", (kind,))
