"""Tokens and cost of runs."""

from __future__ import annotations

import msgspec

from farhand.store.ports import Tx

_SINCE = """
    SELECT count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0),
           coalesce(sum(cached_tokens), 0), coalesce(sum(cost), 0.0)
    FROM runs WHERE created_at >= ? AND joined_to IS NULL
"""


class UsageSummary(msgspec.Struct, frozen=True):
    since: int
    runs: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: float


def usage_since(tx: Tx, since: int) -> UsageSummary:
    """Add up the runs that began from this moment on, in milliseconds since 1970."""
    [row] = tx.execute(_SINCE, (since,)).fetchall()
    return UsageSummary(since, *row)
