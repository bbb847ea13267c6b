"""Doors to the journal: as a timeline, and its head."""

from __future__ import annotations

import msgspec

from farhand.api.server.http import Problem, Reply, Request, json_reply
from farhand.api.server.route_docs import About, Query
from farhand.api.server.router import Route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.hub import Hub
from farhand.gateway.sessions import keys as session_keys
from farhand.protocol.errors import ToolError
from farhand.store.history import timeline as journal
from farhand.store.history.timeline import Page, Wanted
from farhand.store.journal.seal import journal_end

LATEST_MS = 2**53
JOURNAL_QUERY = (
    Query("session", "Of this session."),
    Query("node", "Of this node."),
    Query("kind", "Of this kind, as `call.ended`, or of all that begin so, as `call`; several with commas."),
    Query("since", "From this moment on, in milliseconds.", int),
    Query("until", "Before this moment, in milliseconds.", int),
    Query("limit", "How many at most: 1 to 1000, 100 by default.", int),
    Query("before", "Older than this event.", int),
    Query("after", "Newer than this event, the oldest first; 0 for all.", int),
)


class HeadAnswer(msgspec.Struct, frozen=True):
    """The newest event of the journal."""

    id: int
    hash: str
    # Both, as `farhand audit verify --head` takes them.
    head: str


def journal_routes(hub: Hub) -> list[Route]:
    doors = JournalDoors(hub)
    return [
        Route(
            "GET",
            "/v1/journal",
            Scope.READ,
            doors.page,
            about=About(
                "The journal of a session, a node or a stretch of time, with calls, runs and messages in short.",
                answer=Page,
                query=JOURNAL_QUERY,
            ),
        ),
        Route(
            "GET",
            "/v1/audit/head",
            Scope.READ,
            doors.head,
            about=About("The newest event's id and hash, to be noted elsewhere.", answer=HeadAnswer),
        ),
    ]


class JournalDoors:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def page(self, request: Request) -> Reply:
        session = request.query("session")
        try:
            key = None if session is None else session_keys.canonical(session)
        except ToolError as error:
            raise Problem(400, "invalid_request", error.message) from None
        wanted = Wanted(
            session=key,
            node=request.query("node"),
            kinds=tuple(kind for kind in (request.query("kind") or "").split(",") if kind),
            since=_moment(request, "since"),
            until=_moment(request, "until"),
        )
        limit = request.query_int("limit", 100, 1, 1000)
        before = request.query_int("before", 0, 0, 2**62) or None
        after = None if request.query("after") is None else request.query_int("after", 0, 0, 2**62)
        found = await self._hub.database.read(
            lambda store: journal.page(store, wanted, limit, before=before, after=after, hide=self._hide)
        )
        return json_reply(found)

    def _hide(self, data: bytes) -> bytes:
        """Without secrets, and without what may be the beginning of one."""
        hidden = self._hub.secrets.redact(data)
        return hidden[: len(hidden) - self._hub.secrets.trailing_partial(hidden)]

    async def head(self, _request: Request) -> Reply:
        end = await self._hub.database.read(journal_end)
        return json_reply(HeadAnswer(end.id, end.hash.hex(), str(end)))


def _moment(request: Request, name: str) -> int | None:
    return None if request.query(name) is None else request.query_int(name, 0, 0, LATEST_MS)
