"""The OpenAI Responses API, answered by an agent with its tools.

The agent runs its own tools. Tools of the request belong to the client: their calls are items of the output, and the
next request brings the results. A response can be continued with `previous_response_id` and fetched later, by the
credential that made it alone.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from farhand.api.openai.agent_runs import AgentRuns, run_route
from farhand.api.openai.response_objects import Facts, ResponseStream, output_of, response_object
from farhand.api.openai.responses_request import ResponsesRequest, as_chat, renamed_parameters
from farhand.api.routes.agent.sessions import problems
from farhand.api.server.http import Problem, Reply, Request, invalid
from farhand.api.server.router import Query, route
from farhand.api.server.streams import EVENT_STREAM, until_gone, with_pulse
from farhand.gateway.access.credentials import Scope
from farhand.gateway.sessions.responses import Responses
from farhand.gateway.sessions.runs import Run, RunOutcome
from farhand.gateway.sessions.sessions import Sessions
from farhand.llm.messages import Message
from farhand.protocol.errors import InvalidArgs, NotFound
from farhand.store.tables.sessions import RunState

CANCELLED: Final = "cancelled on request"


class ResponseRoutes:
    def __init__(self, runs: AgentRuns, responses: Responses, sessions: Sessions, ending: asyncio.Event) -> None:
        self._runs = runs
        self._responses = responses
        self._sessions = sessions
        self._ending = ending

    @run_route("POST /v1/responses", Scope.CHAT, "A response in the shape of OpenAI; an agent answers.")
    async def create(self, request: Request, wanted: ResponsesRequest) -> Any:
        with renamed_parameters():
            run = await self._runs.send(
                request, as_chat(wanted), self._session(request, wanted), await self._earlier(request, wanted)
            )
        request.id = run.id
        facts = Facts.of(wanted)
        if wanted.stored:
            await self._responses.add(run, request.credential, msgspec.json.encode(facts))
        if wanted.stream:
            events = ResponseStream(run, facts).pieces()
            streamed = self._runs.streamed(run, events, stops=not wanted.background)
            pieces = until_gone(request, with_pulse(streamed), self._ending)
            return Reply(content_type=EVENT_STREAM, pieces=pieces)
        if wanted.background:
            return response_object(run, facts, [], None)
        return await self._shown(run, facts, await self._runs.outcome(request, run))

    @route(
        "GET /v1/responses/{id}",
        Scope.CHAT,
        "A response of this credential.",
        query=(Query("stream", "Not supported: an ended response is returned whole."),),
        errors=(404,),
        openai=True,
    )
    async def retrieve(self, request: Request) -> Any:
        if request.query("stream") in ("true", "1"):
            raise Problem(400, "unsupported", "a response cannot be streamed again; leave `stream` out", param="stream")
        return await self._found(request)

    @route("POST /v1/responses/{id}/cancel", Scope.CHAT, "Stop a response.", errors=(404,), openai=True)
    async def cancel(self, request: Request) -> Any:
        _, run = await self._responses.find(request.params["id"], request.credential)
        if not run.over:
            self._sessions.ask_to_stop(run, RunState.STOPPED, CANCELLED)
            with problems():
                await run.reply()
        return await self._found(request)

    @route("DELETE /v1/responses/{id}", Scope.CHAT, "Forget a response.", errors=(404,), openai=True)
    async def delete(self, request: Request) -> Any:
        name = request.params["id"]
        await self._responses.remove(name, request.credential)
        return {"id": name, "object": "response", "deleted": True}

    async def _found(self, request: Request) -> dict[str, Any]:
        record, run = await self._responses.find(request.params["id"], request.credential)
        return await self._shown(run, msgspec.json.decode(record.facts, type=Facts), run.outcome)

    async def _shown(self, run: Run, facts: Facts, outcome: RunOutcome | None) -> dict[str, Any]:
        said = await self._responses.said(run)
        return response_object(run, facts, output_of(run, facts, said, outcome), outcome)

    def _session(self, request: Request, wanted: ResponsesRequest) -> str | None:
        """Return the stored session of the request. Raises Problem if it also continues a response."""
        named = request.header(b"x-session-key")
        if named and wanted.previous_response_id:
            reason = "a request continues the session in X-Session-Key or the response before it, not both"
            raise invalid(reason, param="previous_response_id")
        return named

    async def _earlier(self, request: Request, wanted: ResponsesRequest) -> list[Message]:
        name = wanted.previous_response_id
        if not name:
            return []
        try:
            return await self._responses.conversation(name, request.credential)
        except (NotFound, InvalidArgs) as error:
            code = "previous_response_not_found" if isinstance(error, NotFound) else "invalid_request"
            raise Problem(400, code, error.message, param="previous_response_id") from None
