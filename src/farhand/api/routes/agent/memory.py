"""The agents' memory over HTTP: search, read, status, reindex."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import msgspec

from farhand.api.server.http import Request, invalid
from farhand.api.server.router import Query, route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.calls.admission import Denied
from farhand.gateway.calls.charging import Meter
from farhand.gateway.calls.gate import Gate
from farhand.memory.memory import MOST_RESULTS, Memory
from farhand.protocol.names import MAIN_AGENT

memory_route = partial(route, errors=(404, 500, 504))
AGENT = Query("agent", "The agent whose memory it is; `main` by default.")
SEARCH = (
    Query("q", "What to look for.", required=True),
    Query("max_results", f"How many at most: up to {MOST_RESULTS}.", int),
    Query("min_score", "Minimum score, 0 to 1.", float),
)
LINES = (
    Query("path", "MEMORY.md or memory/NAME.md.", required=True),
    Query("from", "The first line, counted from 1.", int),
    Query("lines", "How many.", int),
)


class MemoryRoutes:
    """`agent` in the query names another agent than `main`."""

    def __init__(self, memory: Memory, gate: Gate) -> None:
        self._memory = memory
        self._gate = gate

    @memory_route("GET /v1/memory", Scope.READ, "The status of an agent's memory.", query=(AGENT,))
    async def status(self, request: Request) -> Any:
        return await self._memory.status(_agent(request))

    @memory_route("GET /v1/memory/search", Scope.TOOLS_READ, "Search an agent's memory.", query=(AGENT, *SEARCH))
    async def search(self, request: Request) -> Any:
        limit = request.query_int("max_results", 0, 0, MOST_RESULTS)
        query = request.query("q") or ""
        self._gate.check_route(request.principal, "memory_search", {"query": query}, _agent(request))
        meter = await self._gate.charge_route(request.principal)
        found = await self._memory.search(
            query, agent=_agent(request), max_results=limit, min_score=_number(request, "min_score")
        )
        answer = {"query": query, "results": found.hits, "index": found.index, "note": found.note}
        await _count(meter, answer)
        return answer

    @memory_route("GET /v1/memory/get", Scope.TOOLS_READ, "Lines of a memory file.", query=(AGENT, *LINES))
    async def get(self, request: Request) -> Any:
        path = request.query("path")
        if not path:
            raise invalid("path must name a memory file: MEMORY.md or memory/NAME.md")
        self._gate.check_route(request.principal, "memory_get", {"path": path}, _agent(request))
        start, lines = (request.query_int(name, 0, 0, 1_000_000_000) for name in ("from", "lines"))
        meter = await self._gate.charge_route(request.principal)
        answer = await self._memory.get(path, agent=_agent(request), start=start, lines=lines)
        await _count(meter, answer)
        return answer

    @memory_route("POST /v1/memory/reindex", Scope.TOOLS_WRITE, "Read the memory files again.", query=(AGENT,))
    async def reindex(self, request: Request) -> Any:
        await self._gate.charge_route(request.principal)
        return await self._memory.reindex(_agent(request))


async def _count(meter: Meter, answer: Any) -> None:
    """Count the bytes of an answer, which is sent even if it uses up the budget."""
    with contextlib.suppress(Denied):
        await meter.add(len(msgspec.json.encode(answer)))
    await meter.close()


def _agent(request: Request) -> str:
    return request.query("agent") or MAIN_AGENT


def _number(request: Request, name: str) -> float | None:
    text = request.query(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise invalid(f"{name} must be a number from 0 to 1, not {text[:50]!r}")
    return value
