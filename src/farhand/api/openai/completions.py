"""OpenAI-compatible chat completions, answered by an agent with its tools in a session.

With `X-Session-Key` or `user` the conversation is a stored session, and only the last messages of the request are new.
Otherwise the client keeps the conversation, as with any other server of this API.

The agent runs its own tools. Tools of the request belong to the client: a call of one of them ends the answer with
`tool_calls`, and the next request brings the results.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from farhand.agent.events import Completed, Retrying, TextDelta, ToolCalled
from farhand.api.openai.request import PRODUCT, ChatRequest, conversation, options, refuse_strangers
from farhand.api.routes.sessions import problems
from farhand.api.server.http import Problem, Reply, Request
from farhand.api.server.router import EVENTS, JSON, route
from farhand.api.server.streams import EVENT_STREAM, ClientWatch, until_gone, with_pulse
from farhand.gateway.access.credentials import Scope
from farhand.gateway.sessions import keys as session_keys
from farhand.gateway.sessions.agents import Agents
from farhand.gateway.sessions.runs import FROZEN, Run, RunEvent, RunOutcome
from farhand.gateway.sessions.sessions import Sessions
from farhand.llm.messages import Usage
from farhand.protocol.errors import FarhandError, InvalidArgs
from farhand.store.tables.sessions import RunState

NOT_CONFIGURED = "not_configured"
STARTED_OVER = "\n\n[the connection to the model was lost; it starts over]\n\n"
HUNG_UP = "the client hung up"


class ChatRoutes:
    def __init__(self, sessions: Sessions, agents: Agents, ending: asyncio.Event) -> None:
        self._sessions = sessions
        self._agents = agents
        self._ending = ending

    @route("GET /v1/models", Scope.CHAT, "The agents, as models.", openai=True)
    async def models(self, _request: Request) -> dict[str, Any]:
        return {"object": "list", "data": [_model(name) for name in self._names()]}

    @route("GET /v1/models/{name}", Scope.CHAT, "One agent, as a model.", openai=True)
    @route("GET /v1/models/farhand/{agent}", Scope.CHAT, "One agent, as a model.", openai=True)
    async def model(self, request: Request) -> dict[str, Any]:
        name = request.params.get("name") or f"{PRODUCT}/{request.params['agent']}"
        if name not in self._names():
            raise _no_model(name)
        return _model(name)

    def _names(self) -> list[str]:
        return [PRODUCT, *(f"{PRODUCT}/{name}" for name in self._agents.names)]

    @route(
        "POST /v1/chat/completions",
        Scope.CHAT,
        "Chat completions in the shape of OpenAI; an agent answers.",
        media=(JSON, EVENTS),
        errors=(404, 409, 423, 502, 503, 504),
        idempotent=True,
        openai=True,
        content=True,
    )
    async def complete(self, request: Request, wanted: ChatRequest) -> Any:
        run = await self._send(request, wanted)
        request.id = run.id
        if not wanted.stream:
            outcome = await self._watched(request, run)
            return _completion(run, outcome, wanted.model)
        include = wanted.stream_options is not None and wanted.stream_options.include_usage
        chunks = _Chunks(run, wanted.model, include_usage=include)
        pieces = until_gone(request, with_pulse(self._stream(run, chunks)), self._ending)
        return Reply(content_type=EVENT_STREAM, pieces=pieces)

    async def _send(self, request: Request, wanted: ChatRequest) -> Run:
        agent = self._agent(wanted.model)
        named = request.header(b"x-session-key") or wanted.user
        said = conversation(wanted)
        chosen = options(wanted, said, kept=bool(named))
        run_id = str(uuid.uuid4())
        with problems():
            key = self._key(named, agent, wanted.model) if named else session_keys.once_key(agent, run_id)
            if said.answers:
                before = said.before[-1].tool_calls if said.before else ()
                refuse_strangers(said.answers, await self._sessions.open_calls(key) if named else before)
            return await self._sessions.send(
                key,
                said.new,
                origin="openai",
                credential=request.credential,
                options=chosen,
                history=() if named else said.before,
                kind="chat" if named else "once",
                own_key=not named,
                run_id=run_id,
                idempotency_key=request.idempotency_key,
            )

    def _agent(self, model: str) -> str:
        if model == PRODUCT:
            return session_keys.MAIN
        if model not in self._names():
            raise _no_model(model)
        return model.removeprefix(f"{PRODUCT}/")

    def _key(self, name: str, agent: str, model: str) -> str:
        key = self._sessions.canonical(name)
        if model == PRODUCT or session_keys.agent_of(key) == agent:
            return key
        if name.startswith("agent:"):
            raise InvalidArgs(f"session {name!r} belongs to another agent than the model {model!r} names")
        return self._sessions.canonical(f"agent:{agent}:{name}")

    async def _watched(self, request: Request, run: Run) -> RunOutcome:
        """Wait for the end of a run; stop it if the client disconnects, as with any model."""
        watch = ClientWatch(request, lambda: self._sessions.ask_to_stop(run, RunState.STOPPED, HUNG_UP))
        try:
            with problems():
                outcome = await run.reply()
        finally:
            watch.stop()
        _refuse_failure(outcome)
        return outcome

    async def _stream(self, run: Run, chunks: _Chunks) -> AsyncGenerator[bytes, None]:
        try:
            yield chunks.first()
            async with contextlib.aclosing(chunks.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if not run.over:
                self._sessions.ask_to_stop(run, RunState.STOPPED, HUNG_UP)


class _Chunks:
    """Converts a run to the chunks of a streamed completion."""

    def __init__(self, run: Run, model: str, *, include_usage: bool) -> None:
        self._run = run
        self._include_usage = include_usage
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{run.id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        if include_usage:
            self._head["usage"] = None  # like OpenAI: the last chunk has it
        # Whether the current step has emitted text.
        self._said = False

    def first(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        sent = False
        async with contextlib.aclosing(self._run.follow()) as events:
            async for event in events:
                if content := self._told(event):
                    sent = True
                    yield self._chunk({"content": content})
        try:
            outcome = await self._run.reply()
        except FarhandError as error:
            yield _data({"error": {"message": str(error), "type": "server_error", "param": None, "code": "stopping"}})
            return
        if outcome.error is not None and outcome.error.kind == NOT_CONFIGURED:
            sent = True
            yield self._chunk({"content": outcome.error.message})
        elif outcome.error is not None:
            failure = outcome.error
            yield _data(
                {"error": {"message": failure.message, "type": "server_error", "param": None, "code": failure.kind}}
            )
            return
        if outcome.reply and not sent:  # the reply of a command, or a run that ended before it was followed
            yield self._chunk({"content": outcome.reply})
        if outcome.handed:
            yield self._chunk({"tool_calls": [{"index": i, **one} for i, one in enumerate(_calls(outcome))]})
        yield self._chunk({}, _finish_reason(outcome))
        if self._include_usage:
            yield _data({**self._head, "choices": [], "usage": _usage(outcome.usage)})
        yield b"data: [DONE]\n\n"

    def _told(self, event: RunEvent) -> str:
        """Return the text that an event adds."""
        match event:
            case TextDelta():
                self._said = True
                return event.text
            case Retrying(void=True) if self._said:
                self._said = False
                return STARTED_OVER
            case ToolCalled() if self._said:
                self._said = False
                return "\n\n"  # text before and after tool calls forms two paragraphs
            case Completed() if not self._said and not event.handed:
                return event.reply
        return ""

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return _data({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def _completion(run: Run, outcome: RunOutcome, model: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": outcome.text, "refusal": None}
    if outcome.handed:
        message = {**message, "content": outcome.text or None, "tool_calls": _calls(outcome)}
    return {
        "id": f"chatcmpl-{run.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": _finish_reason(outcome), "logprobs": None}],
        "usage": _usage(outcome.usage),
    }


def _calls(outcome: RunOutcome) -> list[dict[str, Any]]:
    """Return the calls for the client to run."""
    return [
        {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.arguments}}
        for use in outcome.handed
    ]


def _finish_reason(outcome: RunOutcome) -> str:
    """Return the finish reason; the limit on rounds counts as `length`."""
    reason = outcome.finish_reason or "stop"
    return {"rounds": "length"}.get(reason, reason)


def _refuse_failure(outcome: RunOutcome) -> None:
    """Raise Problem for a failed run, except if no model is configured: then its text is the answer."""
    if outcome.error is not None and outcome.error.kind != NOT_CONFIGURED:
        status = {RunState.STOPPED: 409, RunState.TIMEOUT: 504}.get(outcome.state, 502)
        status = 423 if outcome.error.kind == FROZEN else status
        raise Problem(status, outcome.error.kind, outcome.error.message)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": PRODUCT}


def _no_model(name: str) -> Problem:
    return Problem(
        404, "model_not_found", f"there is no model {name[:100]!r} here; `farhand` and `farhand/<agent>` are agents"
    )


def _data(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
