"""The journal: as server-sent events, as a timeline, and its head."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from farhand.api.server.http import Reply, Request, invalid, refusing
from farhand.api.server.router import EVENTS, Query, route
from farhand.api.server.streams import EVENT_STREAM, until_gone
from farhand.gateway.access.credentials import Scope
from farhand.gateway.journal import EventJournal
from farhand.gateway.sessions import keys as session_keys
from farhand.protocol.errors import ToolError
from farhand.protocol.redaction import KnownSecrets
from farhand.store.history import timeline
from farhand.store.history.timeline import Page, Wanted
from farhand.store.journal.events import Event
from farhand.store.journal.seal import journal_end
from farhand.store.ports import Store

LATEST_MS = 2**53
JOURNAL_QUERY = (
    Query("session", "Only events of this session."),
    Query("node", "Only events of this node."),
    Query(
        "kind",
        "Only events of this kind, such as `call.ended`, or of all kinds that begin with it, such as `call`. Separate "
        "several kinds by commas.",
    ),
    Query("since", "From this moment on, in milliseconds.", int),
    Query("until", "Before this moment, in milliseconds.", int),
    Query("limit", "How many at most: 1 to 1000, 100 by default.", int),
    Query("before", "Only events older than this one.", int),
    Query("after", "Newer than this event, the oldest first; 0 for all.", int),
)
EVENT_QUERY = (
    Query("last_event_id", "After this event; the header Last-Event-ID does the same.", int),
    Query("follow", "0: stop after the existing events."),
)
_encode = msgspec.json.Encoder().encode


class HeadAnswer(msgspec.Struct, frozen=True):
    """The newest event of the journal."""

    id: int
    hash: str
    # Both of the above, in the format of `farhand audit verify --head`.
    head: str


@dataclass(frozen=True)
class JournalRoutes:
    """`ending` is set when the gateway stops; `closing` returns whether it has begun to."""

    database: Store
    journal: EventJournal
    secrets: KnownSecrets
    ending: asyncio.Event
    closing: Callable[[], bool]

    @route("GET /v1/events", Scope.READ, "The journal as server-sent events.", media=(EVENTS,), query=EVENT_QUERY)
    async def events(self, request: Request) -> Reply:
        last = request.header(b"last-event-id") or request.query("last_event_id")
        if last is not None and (not last.isdecimal() or len(last) > 18):
            raise invalid(f"Last-Event-ID must be the id of an event, not {last[:50]!r}")
        # The position is settled before the answer begins: a client that has seen the headers misses nothing.
        end = await self.journal.last()
        position = end if last is None else min(int(last), end)
        pages = self.journal.events(position, follow=request.flag("follow"), closing=self.closing)
        stream = _stream(pages, behind=last is not None and position < int(last))
        return Reply(content_type=EVENT_STREAM, pieces=until_gone(request, stream, self.ending))

    @route(
        "GET /v1/journal",
        Scope.READ,
        "Timeline of a session, a node or a period, with summaries of calls, runs and messages.",
        query=JOURNAL_QUERY,
    )
    async def page(self, request: Request) -> Page:
        session = request.query("session")
        with refusing(ToolError):
            key = None if session is None else session_keys.canonical(session)
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
        return await self.database.read(
            lambda store: timeline.page(store, wanted, limit, before=before, after=after, hide=self._hide)
        )

    def _hide(self, data: bytes) -> bytes:
        """Return the data without secrets, and without an end that may be the beginning of one."""
        hidden = self.secrets.redact(data)
        return hidden[: len(hidden) - self.secrets.trailing_partial(hidden)]

    @route("GET /v1/audit/head", Scope.READ, "The newest event's id and hash, to be noted elsewhere.")
    async def head(self, _request: Request) -> HeadAnswer:
        end = await self.database.read(journal_end)
        return HeadAnswer(end.id, end.hash.hex(), str(end))


def _moment(request: Request, name: str) -> int | None:
    return None if request.query(name) is None else request.query_int(name, 0, 0, LATEST_MS)


async def _stream(pages: AsyncIterator[list[Event]], *, behind: bool) -> AsyncGenerator[bytes, None]:
    """`behind`: the client has seen events that this journal, restored from a backup, does not have."""
    yield b": farhand journal\n\n"
    if behind:
        yield b": the journal ends before that event; what is new follows\n\n"
    async for page in pages:
        if not page:
            yield b": still here\n\n"
            continue
        yield b"".join(
            b"id: %d\nevent: %b\ndata: %b\n\n" % (event.id, event.kind.encode(), _encode(event)) for event in page
        )
