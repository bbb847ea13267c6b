"""Summaries in transcripts, stored beside the entries they replace."""

from __future__ import annotations

from typing import Any

import msgspec

from farhand.agent.compaction import Compaction
from farhand.gateway.sessions.sessions import Sessions
from farhand.llm.messages import Usage
from farhand.store.ports import Tx
from farhand.store.tables import sessions as transcript
from farhand.store.tables.sessions import Entry, SessionRecord


async def keep_summary(
    sessions: Sessions,
    record: SessionRecord,
    run_id: str | None,
    positions: list[int],
    compaction: Compaction,
    model: str,
) -> list[int]:
    """Store a summary beside the entries it replaces; return the entries that the model sees from now on."""
    kept = positions[compaction.count :]
    keeps_from = kept[0] if kept else positions[-1] + 1
    entry = Entry(
        session_key=record.key,
        session_id=record.id,
        run_id=run_id,
        at=sessions.now(),
        message=msgspec.Raw(msgspec.json.encode(compaction.summary)),
        model=model,
        keeps_from=keeps_from,
        **counts(compaction.usage),
    )

    def write(store: Tx) -> int:
        transcript.count_compaction(store, record.key)
        if record.parent_key is not None:
            transcript.count_usage(store, record.parent_key, entry.at, **counts(compaction.usage))
        return transcript.append_entry(store, entry, context_tokens=0)

    return [await sessions.write(write), *kept]


def counts(usage: Usage) -> dict[str, Any]:
    return msgspec.structs.asdict(usage)
