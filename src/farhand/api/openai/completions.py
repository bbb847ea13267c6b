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
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from farhand.agent.events import Completed, StepRetrying, StepText, ToolCalled
from farhand.api.openai.agent_runs import NOT_CONFIGURED, STARTED_OVER, AgentRuns, model_view, no_model, run_route
from farhand.api.openai.request import PRODUCT, ChatRequest
from farhand.api.server.http import Reply, Request
from farhand.api.server.router import route
from farhand.api.server.streams import EVENT_STREAM, until_gone, with_pulse
from farhand.gateway.access.credentials import Scope
from farhand.gateway.sessions.runs import Run, RunEvent, RunOutcome
from farhand.llm.messages import Usage
from farhand.protocol.errors import FarhandError


class ChatRoutes:
    def __init__(self, runs: AgentRuns, ending: asyncio.Event) -> None:
        self._runs = runs
        self._ending = ending

    @route("GET /v1/models", Scope.CHAT, "The agents, as models.", openai=True)
    async def models(self, _request: Request) -> dict[str, Any]:
        return {"object": "list", "data": [model_view(name) for name in self._runs.models]}

    @route("GET /v1/models/{name}", Scope.CHAT, "One agent, as a model.", openai=True)
    @route("GET /v1/models/farhand/{agent}", Scope.CHAT, "One agent, as a model.", openai=True)
    async def model(self, request: Request) -> dict[str, Any]:
        name = request.params.get("name") or f"{PRODUCT}/{request.params['agent']}"
        if name not in self._runs.models:
            raise no_model(name)
        return model_view(name)

    @run_route("POST /v1/chat/completions", Scope.CHAT, "Chat completions in the shape of OpenAI; an agent answers.")
    async def complete(self, request: Request, wanted: ChatRequest) -> Any:
        run = await self._runs.send(request, wanted, request.header(b"x-session-key") or wanted.user)
        request.id = run.id
        if not wanted.stream:
            outcome = await self._runs.outcome(request, run)
            return _completion(run, outcome, wanted.model)
        include = wanted.stream_options is not None and wanted.stream_options.include_usage
        chunks = _Chunks(run, wanted.model, include_usage=include)
        pieces = until_gone(request, with_pulse(self._runs.streamed(run, chunks.pieces())), self._ending)
        return Reply(content_type=EVENT_STREAM, pieces=pieces)


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

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        yield self._chunk({"role": "assistant", "content": ""})
        sent = False
        async with contextlib.aclosing(self._run.follow()) as events:
            async for event in events:
                if content := self._content(event):
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

    def _content(self, event: RunEvent) -> str:
        """Return the text that an event adds."""
        match event:
            case StepText():
                self._said = True
                return event.text
            case StepRetrying(void=True) if self._said:
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


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _data(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
