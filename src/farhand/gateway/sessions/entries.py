"""Entries of transcripts and the messages in them."""

from __future__ import annotations

import msgspec

from farhand.llm.messages import Message, Usage
from farhand.store.tables.sessions import Entry, SessionRecord


def entry_of(
    session: SessionRecord,
    run_id: str | None,
    at: int,
    message: Message,
    *,
    usage: Usage | None = None,
    model: str | None = None,
    keeps_from: int | None = None,
) -> Entry:
    return Entry(
        session_key=session.key,
        session_id=session.id,
        run_id=run_id,
        at=at,
        message=msgspec.Raw(msgspec.json.encode(message)),
        model=model,
        keeps_from=keeps_from,
        **msgspec.structs.asdict(usage or Usage()),
    )


def message_of(entry: Entry) -> Message:
    return msgspec.json.decode(entry.message, type=Message)
