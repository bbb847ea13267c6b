"""The chats of `/agent/process`: messages by session, user and channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from farhand.store.ports import Tx

NAME_CHARACTERS = 20
MOST_CHARACTERS: Final = 8 * 1024 * 1024


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


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    text: str
    at: int


FIND: Final = "SELECT seq FROM chats WHERE session_id = ? AND user_id = ? AND channel = ?"
MAKER: Final = "SELECT made_by FROM chats WHERE session_id = ? AND user_id = ? AND channel = ?"
MAKER_OF: Final = "SELECT made_by FROM chats WHERE id = ?"
ADD: Final = """
    INSERT INTO chats (id, session_id, user_id, channel, name, created_at, made_by) VALUES (?, ?, ?, ?, ?, ?, ?)
    RETURNING seq"""
SAY: Final = "INSERT INTO chat_messages (chat, role, text, at) VALUES (?, ?, ?, ?) RETURNING seq"
TAKE_BACK: Final = "DELETE FROM chat_messages WHERE seq = ?"
FORGET: Final = "DELETE FROM chats WHERE session_id = ? AND user_id = ? AND channel = ?"
REMOVE: Final = "DELETE FROM chats WHERE id = ?"
MESSAGES: Final = """
    SELECT role, text, at FROM chat_messages WHERE chat = (SELECT seq FROM chats WHERE id = ?) ORDER BY seq DESC"""
LIST: Final = """
    SELECT id, name, session_id, user_id, channel, created_at,
        coalesce((SELECT at FROM chat_messages WHERE chat = chats.seq ORDER BY seq DESC LIMIT 1), created_at) AS updated
    FROM chats"""


class Said(msgspec.Struct, frozen=True):
    """The rows of stored messages: that of their chat, and their own."""

    chat: int
    messages: tuple[int, ...]


def maker(tx: Tx, chat: ChatKey | str) -> str | None:
    """Return the credential that began a chat, by the chat's key or id; None if there is no such chat."""
    if isinstance(chat, str):
        found = tx.execute(MAKER_OF, (chat,)).fetchone()
    else:
        found = tx.execute(MAKER, (chat.session_id, chat.user_id, chat.channel)).fetchone()
    return None if found is None else found[0]


def hear(
    tx: Tx,
    key: ChatKey,
    messages: Sequence[tuple[str, str]],
    now: int,
    new_id: Callable[[], str],
    credential: str,
) -> Said:
    """Append messages (role and text); a new chat gets an id from `new_id`."""
    chat = _find(tx, key) or _add(tx, key, messages, now, new_id(), credential)
    return Said(chat, tuple(say(tx, chat, role, text, now) for role, text in messages))


def _find(tx: Tx, key: ChatKey) -> int | None:
    found = tx.execute(FIND, (key.session_id, key.user_id, key.channel)).fetchone()
    return None if found is None else found[0]


def _add(
    tx: Tx,
    key: ChatKey,
    messages: Sequence[tuple[str, str]],
    now: int,
    new_id: str,
    credential: str,
) -> int:
    first = next((text.strip() for _, text in messages if text.strip()), "")
    name = first[:NAME_CHARACTERS] or "New Chat"
    values = (new_id, key.session_id, key.user_id, key.channel, name, now, credential)
    return int(tx.execute(ADD, values).fetchall()[0][0])


def say(tx: Tx, chat: int, role: str, text: str, now: int) -> int:
    """Append one message to an existing chat. Raises IntegrityError if the chat was removed."""
    return int(tx.execute(SAY, (chat, role, text, now)).fetchall()[0][0])


def take_back(tx: Tx, said: Said) -> None:
    tx.executemany(TAKE_BACK, [(seq,) for seq in said.messages])


def forget(tx: Tx, key: ChatKey) -> bool:
    """Remove a chat with its messages; return whether there was one."""
    tx.execute(FORGET, (key.session_id, key.user_id, key.channel))
    return bool(tx.changes())


def remove(tx: Tx, chat_id: str) -> bool:
    tx.execute(REMOVE, (chat_id,))
    return bool(tx.changes())


def chats(tx: Tx, filters: dict[str, str], limit: int) -> list[Chat]:
    """Return chats, newest first. `filters`: values of session_id, user_id or channel."""
    clauses = [f"{column} = ?" for column in filters]
    where = f" WHERE {' AND '.join(clauses)}" if clauses else ""
    values: list[Any] = [*filters.values(), limit]
    return [Chat(*row) for row in tx.execute(f"{LIST}{where} ORDER BY updated DESC, seq DESC LIMIT ?", values)]


def history(tx: Tx, chat_id: str) -> list[ChatMessage] | None:
    """Return the messages in order, at most the newest `MOST_CHARACTERS`; None if there is no such chat."""
    if not tx.execute("SELECT 1 FROM chats WHERE id = ?", (chat_id,)).fetchone():
        return None
    found: list[ChatMessage] = []
    size = 0
    for row in tx.execute(MESSAGES, (chat_id,)):
        found.append(ChatMessage(*row))
        size += len(found[-1].text)
        if size > MOST_CHARACTERS:
            break
    return found[::-1]
