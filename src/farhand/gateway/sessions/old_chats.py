"""Move the chats of earlier versions, which had a table of their own for messages, into sessions."""

from __future__ import annotations

import msgspec

from farhand.gateway.calls.open_call import new_call_id
from farhand.gateway.sessions.entries import entry_of
from farhand.gateway.sessions.keys import MAIN, process_key
from farhand.llm.messages import Message
from farhand.store.ports import Store, Tx
from farhand.store.tables import chats, sessions
from farhand.store.tables.sessions import SessionRecord


async def move_old_chats(database: Store) -> None:
    """Move all chats whose messages are not in a session yet."""
    while await database.write(_move_one):
        pass


def _move_one(tx: Tx) -> bool:
    """Move one chat, as an old conversation of its session; return whether there was one."""
    chat = chats.old_chat(tx)
    if chat is None:
        return False
    at = chat.created_at
    key = process_key(chat.key.channel, chat.key.user_id, chat.key.session_id)
    new = SessionRecord(key=key, id=new_call_id(), agent_id=MAIN, title=chat.name, created_at=at, updated_at=at)
    record = sessions.add_session(tx, new)
    old = msgspec.structs.replace(record, id=chat.id)
    first = 0
    for role, text, said_at in chats.take_old_messages(tx, chat):
        message = Message("assistant" if role == "assistant" else "user", text)
        seq = sessions.append_entry(tx, entry_of(old, None, said_at, message))
        first, at = first or seq, said_at
    sessions.change_session(
        tx,
        key,
        messages=record.messages,
        updated_at=max(record.updated_at, at),
        previous_ids=(*record.previous_ids, chat.id),
    )
    chats.moved(tx, chat, key, first)
    return True
