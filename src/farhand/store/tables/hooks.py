"""Hooks that were made while the gateway ran, and the posts that came to any hook."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx


class HookPost(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody posted to a hook."""

    seq: int = 0
    hook: str
    # What the sender calls it: the same twice is one post.
    delivery: str | None = None
    body: bytes
    at: int
    run_id: str | None = None
    error: str | None = None
    ended_at: int | None = None


_COLUMNS: Final = HookPost.__struct_fields__


def save_hook(connection: Tx, hook_id: str, settings: bytes, made_by: str, now: int) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO hooks (id, settings, made_by, created_at) VALUES (?, ?, ?, ?)",
        (hook_id, settings, made_by, now),
    )
    append_event(connection, now, "hook.saved", hook_id, {"made_by": made_by})


def remove_hook(connection: Tx, hook_id: str, now: int) -> bool:
    connection.execute("DELETE FROM hooks WHERE id = ?", (hook_id,))
    if not connection.changes():
        return False
    append_event(connection, now, "hook.removed", hook_id, {})
    return True


def all_hooks(connection: Tx) -> dict[str, tuple[bytes, str]]:
    """The settings of each hook, and the credential that made it."""
    rows = connection.execute("SELECT id, settings, made_by FROM hooks")
    return {str(name): (_bytes(settings), str(made_by)) for name, settings, made_by in rows}


def add_post(connection: Tx, post: HookPost) -> HookPost | None:
    """The post as it is kept; None when the sender has posted it before."""
    rows = connection.execute(
        "INSERT INTO hook_posts (hook, delivery, body, at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING seq",
        (post.hook, post.delivery, post.body, post.at),
    ).fetchall()
    if not rows:
        return None
    ((seq,),) = rows
    append_event(connection, post.at, "hook.posted", post.hook, {"bytes": len(post.body)})
    return msgspec.structs.replace(post, seq=_number(seq))


def open_posts(connection: Tx) -> list[HookPost]:
    """In the order in which they came."""
    rows = connection.execute(
        f"SELECT {', '.join(_COLUMNS)} FROM hook_posts WHERE ended_at IS NULL ORDER BY seq"  # noqa: S608
    )
    return [HookPost(**dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def end_post(connection: Tx, seq: int, now: int, *, run_id: str | None, error: str | None = None) -> None:
    """The post was given to a session, or cannot be. What it said is in the transcript from now on."""
    connection.execute(
        "UPDATE hook_posts SET run_id = ?, error = ?, ended_at = ?, body = x'' WHERE seq = ? AND ended_at IS NULL",
        (run_id, error, now, seq),
    )


def forget_posts(connection: Tx, before: int, most: int) -> int:
    """Drop what is left of posts that were given to their sessions before a moment.

    The newest stays: runs are named after a post's number, which must never be another's.
    """
    connection.execute(
        """DELETE FROM hook_posts WHERE seq IN (
               SELECT seq FROM hook_posts WHERE ended_at < ? AND seq < (SELECT max(seq) FROM hook_posts) LIMIT ?)""",
        (before, most),
    )
    return connection.changes()


def _number(value: Any) -> int:
    return int(value)


def _bytes(value: Any) -> bytes:
    return bytes(value)
