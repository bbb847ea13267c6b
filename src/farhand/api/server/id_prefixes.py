"""Ids in paths that are not given in full: any unique beginning of an id names the object."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from farhand.api.server.http import Problem
from farhand.gateway.access.credentials import Credential, Scope
from farhand.store.history.id_prefixes import TABLES, ids_beginning_with
from farhand.store.ports import Store

SHORTEST: Final = 4
MOST_NAMED: Final = 5
# The scopes that list objects, where `read` is not the only one.
LISTED_WITH: Final = {"approval_id": (Scope.READ, Scope.APPROVE)}
_PREFIX: Final = re.compile(r"[0-9a-z][0-9a-z-]*")


class IdPrefixes:
    """Completes the ids of requests."""

    def __init__(self, database: Store) -> None:
        self._database = database

    async def complete(self, params: dict[str, str], credential: Credential) -> dict[str, str]:
        """Return the parameters of a path with whole ids. One that nothing begins with is left as it is, and so are all
        for a credential that may not list such objects.

        Raises Problem (409) if several ids begin with what was given.
        """
        completed = dict(params)
        for name, given in params.items():
            if name not in TABLES or credential.narrowed or not credential.may(LISTED_WITH.get(name, Scope.READ)):
                continue
            table, length = TABLES[name]
            if not SHORTEST <= len(given) < length or not _PREFIX.fullmatch(given):
                continue
            query = partial(ids_beginning_with, table=table, prefix=given, limit=MOST_NAMED + 1)
            found = await self._database.read(query)
            if len(found) > 1 and given not in found:
                names = ", ".join(found[:MOST_NAMED]) + (", …" if len(found) > MOST_NAMED else "")
                raise Problem(409, "ambiguous", f"several ids begin with {given!r}: {names}; give more of the id")
            if found and given not in found:
                completed[name] = found[0]
        return completed
