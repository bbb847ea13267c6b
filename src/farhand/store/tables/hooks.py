"""Hooks that were created at run time, and the posts to every hook."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.store.journal.events import append_event
from farhand.store.ports import Tx
from farhand.store.tables.rows import Table


class HookPost(msgspec.Struct, frozen=True, kw_only=True):
    """A post to a hook."""

    seq: int = 0
    hook: str
    # The sender's id of the post; a second one with the same id is dropped.
    delivery: str | None = None
    body: bytes
    at: int
    run_id: str | None = None
    error: str | None = None
    ended_at: int | None = None


_POSTS: Final = Table("hook_posts", HookPost)


def save_hook(tx: Tx, hook_id: str, settings: bytes, made_by: str, now: int) -> None:
    tx.execute(
        "INSERT INTO hooks (id, settings, made_by, created_at) VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE "
        "SET settings = excluded.settings, made_by = excluded.made_by, created_at = excluded.created_at",
        (hook_id, settings, made_by, now),
    )
    append_event(tx, now, "hook.saved", hook_id, {"made_by": made_by})


def remove_hook(tx: Tx, hook_id: str, now: int) -> bool:
    tx.execute("DELETE FROM hooks WHERE id = ?", (hook_id,))
    if not tx.changes():
        return False
    append_event(tx, now, "hook.removed", hook_id, {})
    return True


def all_hooks(tx: Tx) -> dict[str, tuple[bytes, str]]:
    """Return the settings of each hook, and the credential that created it."""
    rows = tx.execute("SELECT id, settings, made_by FROM hooks")
    return {str(name): (bytes(settings), str(made_by)) for name, settings, made_by in rows}


def add_post(tx: Tx, post: HookPost) -> HookPost | None:
    """Store a post and return it; None if the sender has posted it before."""
    rows = tx.execute(
        "INSERT INTO hook_posts (hook, delivery, body, at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING seq",
        (post.hook, post.delivery, post.body, post.at),
    ).fetchall()
    if not rows:
        return None
    ((seq,),) = rows
    append_event(tx, post.at, "hook.posted", post.hook, {"bytes": len(post.body)})
    return msgspec.structs.replace(post, seq=int(seq))


def open_posts(tx: Tx) -> list[HookPost]:
    """Return the posts that no session has received, in the order of their arrival."""
    return _POSTS.all(tx, "WHERE ended_at IS NULL ORDER BY seq")


def end_post(tx: Tx, seq: int, now: int, *, run_id: str | None, error: str | None = None) -> None:
    """Store that a post was given to a session, or why it cannot be; its body is removed."""
    tx.execute(
        "UPDATE hook_posts SET run_id = ?, error = ?, ended_at = ?, body = ? WHERE seq = ? AND ended_at IS NULL",
        (run_id, error, now, b"", seq),
    )


def forget_posts(tx: Tx, before: int, most: int) -> int:
    """Delete posts that were given to their sessions before a time.

    The newest row stays: runs are named after the number of a post, which must not be used twice.
    """
    tx.execute(
        """DELETE FROM hook_posts WHERE seq IN (
               SELECT seq FROM hook_posts WHERE ended_at < ? AND seq < (SELECT max(seq) FROM hook_posts) LIMIT ?)""",
        (before, most),
    )
    return tx.changes()
