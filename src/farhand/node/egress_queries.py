"""The credentials that a gateway gives to the egress proxy of this node: kept in memory, replaced as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from farhand.machine.sandbox.egress_credentials import EgressCredentials, HeaderCredential
from farhand.node.queries import decode_query
from farhand.protocol.egress import QUESTION, EgressQuery
from farhand.protocol.sealing import SealingKey


def egress_queries(
    credentials: EgressCredentials | None, sealing: SealingKey
) -> dict[str, Callable[[msgspec.Raw], Awaitable[Any]]]:
    """Return the handler of the query, whose values are sealed to this node; none on a node without a proxy."""
    if credentials is None:
        return {}

    async def replace(params: msgspec.Raw) -> dict[str, int]:
        """Replace all credentials. Raises InvalidArgs if they cannot be read."""
        asked = decode_query(params, EgressQuery)
        values = sealing.open({one.name: one.sealed for one in asked.credentials})
        found = [
            HeaderCredential(one.name, host, one.header, values[one.name])
            for one in asked.credentials
            for host in one.hosts
        ]
        await asyncio.to_thread(credentials.set, found)
        return {"credentials": len(found)}

    return {QUESTION: replace}
