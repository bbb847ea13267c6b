"""Tool calls that the client of a run carries out: their results come with a later message, or never."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from farhand.agent.tool_outcome import Outcome
from farhand.agent.transcript import unanswered
from farhand.gateway.sessions.entries import message_of
from farhand.llm.messages import Message, ToolUse
from farhand.store.ports import Tx
from farhand.store.tables import sessions as transcript
from farhand.store.tables.sessions import SessionRecord

NO_RESULT: Final = "the client that was to carry this call out gave no result; nothing is known of what it did"


def results(store: Tx, record: SessionRecord, answers: Collection[Message] | None) -> list[Message]:
    """Return the entries that answer the client's open calls of a conversation, in call order.

    `answers` are the results in a new message; None if it has none. Results without a call are dropped; a call without
    a result gets an error as its result, and the conversation continues without it.
    """
    if answers is None and not transcript.hands_over(store, record.key):
        return []
    given = {answer.tool_call_id: answer for answer in answers or ()}
    return [
        msgspec.structs.replace(given[use.id], name=use.name)
        if use.id in given
        else Outcome.failed("failed", NO_RESULT).message(use)
        for use in open_calls(store, record)
    ]


def open_calls(store: Tx, record: SessionRecord) -> list[ToolUse]:
    """Return the calls of a conversation that have no result."""
    return unanswered([message_of(entry) for entry in transcript.conversation(store, record.key, record.id)])
