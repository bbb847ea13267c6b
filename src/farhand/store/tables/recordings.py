"""The requests of runs to their models, for replay: stored by digest, beside the contents they refer to.

A content (a prompt, a file in it, the description of a tool) is stored once for all runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from blake3 import blake3

from farhand.store.ports import Tx
from farhand.store.tables.rows import Table

DIGEST_BYTES: Final = 16


class Attempt(msgspec.Struct, frozen=True):
    """One start of a run; each restart of the gateway adds one."""

    run_id: str
    attempt: int
    at: int
    # The newest entry of the transcript at the start.
    last_entry: int
    settings: msgspec.Raw


class ModelExchange(msgspec.Struct, frozen=True):
    """A request to the model, and the reply."""

    run_id: str
    number: int
    attempt: int
    # The digest of the system prompt.
    prompt: bytes
    # The number of other messages.
    count: int
    # The digest of the other messages.
    messages: bytes
    # The digest of the offered tools: of the list of digests of their descriptions.
    tools: bytes
    # The same of all tools that could be called.
    specs: bytes
    # None if the run or the gateway was stopped before the reply.
    reply: msgspec.Raw | None


_ATTEMPTS: Final = Table("run_attempts", Attempt)
_ASKED: Final = Table("asked", ModelExchange)


def digest(data: bytes) -> bytes:
    return blake3(data).digest(length=DIGEST_BYTES)


def keep_contents(tx: Tx, contents: Iterable[bytes]) -> None:
    tx.executemany(
        "INSERT INTO contents (digest, data) VALUES (?, ?) ON CONFLICT DO NOTHING",
        ((digest(data), data) for data in contents),
    )


def content(tx: Tx, digest: bytes) -> bytes:
    """Return a content. Raises KeyError if it is not stored."""
    rows: list[Any] = tx.execute("SELECT data FROM contents WHERE digest = ?", (digest,)).fetchall()
    if not rows:
        raise KeyError(digest.hex())
    data: bytes = rows[0][0]
    return data


def add_attempt(tx: Tx, run_id: str, at: int, last_entry: int, settings: bytes) -> None:
    tx.execute(
        """INSERT INTO run_attempts (run_id, attempt, at, last_entry, settings)
           VALUES (?1, (SELECT count(*) + 1 FROM run_attempts WHERE run_id = ?1), ?2, ?3, ?4)""",
        (run_id, at, last_entry, settings),
    )


def add_asked(tx: Tx, asked: ModelExchange) -> None:
    """Store the next request of a run; its number and attempt are assigned here."""
    tx.execute(
        """INSERT INTO asked (run_id, number, attempt, prompt, count, messages, tools, specs, reply)
           VALUES (?1, (SELECT count(*) + 1 FROM asked WHERE run_id = ?1),
               (SELECT count(*) FROM run_attempts WHERE run_id = ?1), ?2, ?3, ?4, ?5, ?6, ?7)""",
        (
            asked.run_id,
            asked.prompt,
            asked.count,
            asked.messages,
            asked.tools,
            asked.specs,
            None if asked.reply is None else bytes(asked.reply),
        ),
    )


def attempts(tx: Tx, run_id: str) -> list[Attempt]:
    return _ATTEMPTS.all(tx, "WHERE run_id = ? ORDER BY attempt", run_id)


def asked(tx: Tx, run_id: str) -> list[ModelExchange]:
    return _ASKED.all(tx, "WHERE run_id = ? ORDER BY number", run_id)
