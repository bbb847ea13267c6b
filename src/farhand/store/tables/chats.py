"""The chats of the direct door: who said what, by session, user and channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from farhand.store.ports import Tx

NAME_CHARACTERS = 20
MOST_CHARACTERS: Final = 8 * 1024 * 1024


class ChatKey(msgspec.Struct, frozen=True):
    """What tells chats apart."""

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
    """Where messages were put: the row of their chat, and their own."""

    chat: int
    messages: tuple[int, ...]


def maker(store: Tx, chat: ChatKey | str) -> str | None:
    """The credential that began a chat, by its key or id; None when there is no such chat."""
    if isinstance(chat, str):
        found = store.execute(MAKER_OF, (chat,)).fetchone()
    else:
        found = store.execute(MAKER, (chat.session_id, chat.user_id, chat.channel)).fetchone()
    return None if found is None else found[0]


def hear(
    store: Tx,
    key: ChatKey,
    messages: Sequence[tuple[str, str]],
    now: int,
    new_id: Callable[[], str],
    credential: str,
) -> Said:
    """Append messages (role and text); a chat that is not there yet begins with them, as `new_id` says."""
    chat = _find(store, key) or _add(store, key, messages, now, new_id(), credential)
    return Said(chat, tuple(say(store, chat, role, text, now) for role, text in messages))


def _find(store: Tx, key: ChatKey) -> int | None:
    found = store.execute(FIND, (key.session_id, key.user_id, key.channel)).fetchone()
    return None if found is None else found[0]


def _add(
    store: Tx,
    key: ChatKey,
    messages: Sequence[tuple[str, str]],
    now: int,
    new_id: str,
    credential: str,
) -> int:
    first = next((text.strip() for _, text in messages if text.strip()), "")
    name = first[:NAME_CHARACTERS] or "New Chat"
    values = (new_id, key.session_id, key.user_id, key.channel, name, now, credential)
    return int(store.execute(ADD, values).fetchall()[0][0])


def say(store: Tx, chat: int, role: str, text: str, now: int) -> int:
    """Append one message to a chat that is there. Raises IntegrityError when it is gone."""
    return int(store.execute(SAY, (chat, role, text, now)).fetchall()[0][0])


def take_back(store: Tx, said: Said) -> None:
    store.executemany(TAKE_BACK, [(seq,) for seq in said.messages])


def forget(store: Tx, key: ChatKey) -> bool:
    """Remove a chat with its messages; False when there was none."""
    store.execute(FORGET, (key.session_id, key.user_id, key.channel))
    return bool(store.changes())


def remove(store: Tx, chat_id: str) -> bool:
    store.execute(REMOVE, (chat_id,))
    return bool(store.changes())


def chats(store: Tx, filters: dict[str, str], limit: int) -> list[Chat]:
    """Newest first. `filters` name columns of the caller's choice among session_id, user_id and channel."""
    clauses = [f"{column} = ?" for column in filters]
    where = f" WHERE {' AND '.join(clauses)}" if clauses else ""
    values: list[Any] = [*filters.values(), limit]
    return [Chat(*row) for row in store.execute(f"{LIST}{where} ORDER BY updated DESC, seq DESC LIMIT ?", values)]


def history(store: Tx, chat_id: str) -> list[ChatMessage] | None:
    """What was said, in order; None when there is no such chat. Of a long chat, the newest `MOST_CHARACTERS`."""
    if not store.execute("SELECT 1 FROM chats WHERE id = ?", (chat_id,)).fetchone():
        return None
    found: list[ChatMessage] = []
    size = 0
    for row in store.execute(MESSAGES, (chat_id,)):
        found.append(ChatMessage(*row))
        size += len(found[-1].text)
        if size > MOST_CHARACTERS:
            break
    return found[::-1]
