"""The chats of `/agent/process`: which session has the messages of a client's session, user and channel."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from farhand.store.ports import Tx

NAME_CHARACTERS = 20


class ChatKey(msgspec.Struct, frozen=True):
    """Identifies a chat."""

    session_id: str
    user_id: str
    channel: str


class Chat(msgspec.Struct, frozen=True):
    id: str
    name: str
    session_id: str
    user_id: str
    channel: str
    created_at: int
    updated_at: int


class ChatRecord(msgspec.Struct, frozen=True):
    """Where the messages of a chat are: the entries of a session from a certain one on."""

    id: str
    session_key: str
    first_entry: int
    # The credential that began the chat.
    made_by: str
    created_at: int


FIND: Final = "SELECT id, session_key, first_entry, made_by, created_at FROM chats WHERE "
BY_KEY: Final = "session_id = ? AND user_id = ? AND channel = ?"
ADD: Final = """
    INSERT INTO chats (id, session_id, user_id, channel, name, created_at, made_by, session_key, first_entry)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, (SELECT coalesce(max(seq), 0) + 1 FROM entries))"""
LIST: Final = """
    SELECT chats.id, name, chats.session_id, user_id, chats.channel, chats.created_at,
        coalesce(sessions.updated_at, chats.created_at) AS updated
    FROM chats LEFT JOIN sessions ON sessions.key = chats.session_key"""


def find(tx: Tx, chat: ChatKey | str) -> ChatRecord | None:
    """Return a chat by its key or id."""
    where, values = (BY_KEY, msgspec.structs.astuple(chat)) if isinstance(chat, ChatKey) else ("id = ?", (chat,))
    row = tx.execute(FIND + where, values).fetchone()
    return None if row is None else ChatRecord(*row)


def add(tx: Tx, chat_id: str, key: ChatKey, session_key: str, text: str, credential: str, now: int) -> None:
    """Add a chat, named after its first text; its messages are the entries of the session from now on."""
    name = text.strip()[:NAME_CHARACTERS] or "New Chat"
    tx.execute(ADD, (chat_id, *msgspec.structs.astuple(key), name, now, credential, session_key))


def remove(tx: Tx, chat_id: str) -> None:
    tx.execute("DELETE FROM chats WHERE id = ?", (chat_id,))


def chats(tx: Tx, filters: dict[str, str], limit: int) -> list[Chat]:
    """Return chats, newest first. `filters`: values of session_id, user_id or channel."""
    clauses = [f"chats.{column} = ?" for column in filters]
    where = f" WHERE {' AND '.join(clauses)}" if clauses else ""
    values: list[Any] = [*filters.values(), limit]
    return [Chat(*row) for row in tx.execute(f"{LIST}{where} ORDER BY updated DESC, seq DESC LIMIT ?", values)]


# -- chats of earlier versions, which kept their messages in a table of their own -------------------------------------


class OldChat(msgspec.Struct, frozen=True):
    seq: int
    id: str
    name: str
    created_at: int
    key: ChatKey


def old_chat(tx: Tx) -> OldChat | None:
    """Return a chat whose messages are not in a session yet."""
    query = "SELECT seq, id, name, created_at, session_id, user_id, channel FROM chats WHERE session_key = '' LIMIT 1"
    row = tx.execute(query).fetchone()
    if row is None:
        return None
    seq, chat_id, name, created_at, *key = row
    return OldChat(seq, chat_id, name, created_at, ChatKey(*key))


def take_old_messages(tx: Tx, chat: OldChat) -> list[tuple[str, str, int]]:
    """Remove the messages of an old chat; return their role, text and time."""
    rows = tx.execute("SELECT role, text, at FROM chat_messages WHERE chat = ? ORDER BY seq", (chat.seq,)).fetchall()
    tx.execute("DELETE FROM chat_messages WHERE chat = ?", (chat.seq,))
    return [(str(role), str(text), int(at)) for role, text, at in rows]


def moved(tx: Tx, chat: OldChat, session_key: str, first_entry: int) -> None:
    """Record where the messages of an old chat are now."""
    tx.execute("UPDATE chats SET session_key = ?, first_entry = ? WHERE seq = ?", (session_key, first_entry, chat.seq))
