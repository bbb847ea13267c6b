"""What a run asked its model, kept so that the run can be repeated: requests by digest, and what they were made of.

A content (a prompt, a file in it, a tool's description) is kept once, however many runs used it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from blake3 import blake3

from farhand.store.ports import Tx

DIGEST_BYTES: Final = 16


class Attempt(msgspec.Struct, frozen=True):
    """A time a run was taken up: after each restart once more."""

    run_id: str
    attempt: int
    at: int
    # The newest entry of the transcript when it began to think.
    last_entry: int
    settings: msgspec.Raw


class Asked(msgspec.Struct, frozen=True):
    """A request to the model, and what came of it."""

    run_id: str
    number: int
    attempt: int
    # Digest of the system prompt.
    prompt: bytes
    # Messages beside it.
    count: int
    # Digest of these.
    messages: bytes
    # Digest of the tools offered: a list of the digests of their descriptions.
    tools: bytes
    # Of all that could be called then.
    specs: bytes
    # None: the run was stopped, or the gateway, before there was one.
    reply: msgspec.Raw | None


_ATTEMPT: Final = Attempt.__struct_fields__
_ASKED: Final = Asked.__struct_fields__


def digest(data: bytes) -> bytes:
    return blake3(data).digest(length=DIGEST_BYTES)


def keep_contents(connection: Tx, contents: Iterable[bytes]) -> None:
    connection.executemany(
        "INSERT OR IGNORE INTO contents (digest, data) VALUES (?, ?)", ((digest(data), data) for data in contents)
    )


def content(connection: Tx, digest: bytes) -> bytes:
    """Raises KeyError for one that was not kept."""
    rows: list[Any] = connection.execute("SELECT data FROM contents WHERE digest = ?", (digest,)).fetchall()
    if not rows:
        raise KeyError(digest.hex())
    data: bytes = rows[0][0]
    return data


def add_attempt(connection: Tx, run_id: str, at: int, last_entry: int, settings: bytes) -> None:
    connection.execute(
        """INSERT INTO run_attempts (run_id, attempt, at, last_entry, settings)
           SELECT ?1, count(*) + 1, ?2, ?3, ?4 FROM run_attempts WHERE run_id = ?1""",
        (run_id, at, last_entry, settings),
    )


def add_asked(connection: Tx, asked: Asked) -> None:
    """The next request of a run; its number and attempt are found here."""
    connection.execute(
        """INSERT INTO asked (run_id, number, attempt, prompt, count, messages, tools, specs, reply)
           SELECT ?1, (SELECT count(*) + 1 FROM asked WHERE run_id = ?1),
               (SELECT count(*) FROM run_attempts WHERE run_id = ?1), ?2, ?3, ?4, ?5, ?6, ?7""",
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


def attempts(connection: Tx, run_id: str) -> list[Attempt]:
    rows: list[Any] = connection.execute(
        f"SELECT {', '.join(_ATTEMPT)} FROM run_attempts WHERE run_id = ? ORDER BY attempt",  # noqa: S608
        (run_id,),
    ).fetchall()
    return [Attempt(row[0], row[1], row[2], row[3], msgspec.Raw(row[4])) for row in rows]


def asked(connection: Tx, run_id: str) -> list[Asked]:
    rows: list[Any] = connection.execute(
        f"SELECT {', '.join(_ASKED)} FROM asked WHERE run_id = ? ORDER BY number",  # noqa: S608
        (run_id,),
    ).fetchall()
    return [Asked(**dict(zip(_ASKED, (*row[:8], _raw(row[8])), strict=True))) for row in rows]


def _raw(data: bytes | None) -> msgspec.Raw | None:
    return None if data is None else msgspec.Raw(data)
