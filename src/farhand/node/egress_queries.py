"""The credentials that a gateway gives to the egress proxy of this node: kept in memory, replaced as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from farhand.machine.sandbox.egress_credentials import EgressCredentials, HeaderCredential
from farhand.protocol.egress import QUESTION, EgressQuery
from farhand.protocol.errors import InvalidArgs
from farhand.protocol.sealing import SealingKey


class EgressQueries:
    """Takes the credentials, whose values are sealed to this node."""

    def __init__(self, credentials: EgressCredentials, sealing: SealingKey) -> None:
        self._credentials = credentials
        self._sealing = sealing

    async def take(self, params: msgspec.Raw) -> dict[str, int]:
        """Replace all credentials. Raises InvalidArgs if they cannot be read."""
        try:
            asked = msgspec.json.decode(params, type=EgressQuery)
        except msgspec.MsgspecError as error:
            raise InvalidArgs(str(error)) from None
        values = self._sealing.open({one.name: one.sealed for one in asked.credentials})
        found = [
            HeaderCredential(one.name, host, one.header, values[one.name])
            for one in asked.credentials
            for host in one.hosts
        ]
        await asyncio.to_thread(self._credentials.set, found)
        return {"credentials": len(found)}


def egress_queries(
    credentials: EgressCredentials | None, sealing: SealingKey
) -> dict[str, Callable[[msgspec.Raw], Awaitable[Any]]]:
    """Return the handler of the query; none on a node without a proxy."""
    return {} if credentials is None else {QUESTION: EgressQueries(credentials, sealing).take}
