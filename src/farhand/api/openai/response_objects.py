"""Response objects of the OpenAI Responses API, and the events that stream one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import msgspec

from farhand.agent.events import Completed, StepRetrying, StepText, ToolCalled
from farhand.api.openai.agent_runs import NOT_CONFIGURED, STARTED_OVER
from farhand.api.openai.responses_request import (
    OfferedTool,
    Reasoning,
    ResponsesRequest,
    ResponseTool,
    TextSettings,
    ToolChoice,
    offered_tools,
)
from farhand.api.server.streams import event
from farhand.gateway.sessions.responses import response_id
from farhand.gateway.sessions.runs import Run, RunEvent, RunOutcome
from farhand.llm.messages import Message, ToolUse, Usage
from farhand.protocol.errors import FarhandError
from farhand.store.tables.sessions import RunState

# Separates texts of the agent before and after its own tool calls.
PARAGRAPH = "\n\n"


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a response repeats of its request. Stored with the response."""

    model: str
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool = False
    store: bool = True
    tools: list[ResponseTool] = []
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] = {}
    user: str | None = None
    truncation: str | None = None

    @classmethod
    def of(cls, wanted: ResponsesRequest) -> Facts:
        given = {name: getattr(wanted, name) for name in cls.__struct_fields__}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def offered(self) -> dict[str, OfferedTool]:
        """Return the client's tools by the names that the model knows."""
        return dict(offered_tools(self.tools))


def response_object(
    run: Run, facts: Facts, output: Sequence[dict[str, Any]], outcome: RunOutcome | None
) -> dict[str, Any]:
    """Return a response; `outcome` is None while its run has not ended."""
    text = facts.text or TextSettings()
    shown_format = msgspec.to_builtins(text.format) if text.format else {}
    status, error, incomplete = _status(outcome)
    return {
        "id": response_id(run),
        "object": "response",
        "created_at": run.record.created_at // 1000,
        "status": status,
        "background": facts.background,
        "completed_at": int(time.time()) if status == "completed" else None,
        "error": error,
        "incomplete_details": incomplete,
        "instructions": facts.instructions,
        "max_output_tokens": facts.max_output_tokens,
        "max_tool_calls": None,
        "metadata": facts.metadata,
        "model": facts.model,
        "output": list(output),
        "parallel_tool_calls": facts.parallel_tool_calls is not False,
        "previous_response_id": facts.previous_response_id,
        "reasoning": msgspec.to_builtins(facts.reasoning or Reasoning()),
        "service_tier": "default",
        "store": facts.store,
        "temperature": 1.0 if facts.temperature is None else facts.temperature,
        "text": {"format": {"type": "text", **shown_format}, "verbosity": text.verbosity or "medium"},
        "tool_choice": msgspec.to_builtins(facts.tool_choice or "auto"),
        "tools": [_tool(tool) for tool in facts.tools],
        "top_logprobs": 0,
        "top_p": 1.0 if facts.top_p is None else facts.top_p,
        "truncation": facts.truncation or "disabled",
        "usage": None if outcome is None else _usage(outcome.usage),
        "user": facts.user,
    }


def output_of(run: Run, facts: Facts, said: Sequence[Message], outcome: RunOutcome | None) -> list[dict[str, Any]]:
    """Return the output of a response: one message for each text of the agent, then the client's calls."""
    texts = [message.text for message in said if message.role == "assistant" and message.text]
    last = outcome is not None and not outcome.handed
    if outcome is not None and (not texts or outcome.error is not None) and outcome.text and not _failed(outcome):
        texts = [*texts[: len(texts) - 1], outcome.text]
    items = []
    for place, text in enumerate(texts):
        final = last and place == len(texts) - 1
        items.append(_message(run, place, text if final else text + PARAGRAPH, final=final))
    offered = facts.offered
    handed = () if outcome is None else outcome.handed
    return [*items, *(_call(run, place, use, offered.get(use.name)) for place, use in enumerate(handed))]


class ResponseStream:
    """Converts a run to the events of a streamed response."""

    def __init__(self, run: Run, facts: Facts) -> None:
        self._run = run
        self._facts = facts
        self._number = 0
        self._output: list[dict[str, Any]] = []
        # The text of the open message; None if there is none.
        self._text: str | None = None

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=response_object(self._run, self._facts, [], None))
        async with contextlib.aclosing(self._run.follow()) as events:
            async for event in events:
                for piece in self._of(event):
                    yield piece
        try:
            outcome = await self._run.reply()
        except FarhandError as error:
            yield self._event("error", code="server_error", message=str(error), param=None)
            return
        for piece in self._end(outcome):
            yield piece

    def _of(self, event: RunEvent) -> Iterator[bytes]:
        match event:
            case StepText():
                yield from self._add(event.text)
            case StepRetrying(void=True) if self._text is not None:
                yield from self._add(STARTED_OVER)
            case ToolCalled() if self._text is not None:
                yield from self._close(final=False)
            case Completed() if self._text is None and not event.handed and event.reply:
                yield from self._add(event.reply)

    def _end(self, outcome: RunOutcome) -> Iterator[bytes]:
        if not _failed(outcome):
            if outcome.text and self._text is None and not (self._output or outcome.handed):
                yield from self._add(outcome.text)  # the reply of a command, or why no model answers
            if self._text is not None:
                yield from self._close(final=not outcome.handed)
            offered = self._facts.offered
            for place, use in enumerate(outcome.handed):
                yield from self._hand_over(_call(self._run, place, use, offered.get(use.name)))
        response = response_object(self._run, self._facts, self._output, outcome)
        kind = {"completed": "completed", "incomplete": "incomplete"}.get(response["status"], "failed")
        yield self._event(f"response.{kind}", response=response)

    def _add(self, text: str) -> Iterator[bytes]:
        place = len(self._output)
        identity = _message_id(self._run, place)
        where = {"item_id": identity, "output_index": place, "content_index": 0}
        if self._text is None:
            self._text = ""
            item = {"id": identity, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
            yield self._event("response.output_item.added", output_index=place, item=item)
            yield self._event("response.content_part.added", **where, part=_text_part(""))
        self._text += text
        yield self._event("response.output_text.delta", **where, delta=text, logprobs=[])

    def _close(self, *, final: bool) -> Iterator[bytes]:
        if not final:
            yield from self._add(PARAGRAPH)
        place = len(self._output)
        item = _message(self._run, place, self._text or "", final=final)
        where = {"item_id": item["id"], "output_index": place, "content_index": 0}
        yield self._event("response.output_text.done", **where, text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **where, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=place, item=item)
        self._output.append(item)
        self._text = None

    def _hand_over(self, item: dict[str, Any]) -> Iterator[bytes]:
        place = len(self._output)
        is_custom = item["type"] == "custom_tool_call"
        field = "input" if is_custom else "arguments"
        stem = "custom_tool_call_input" if is_custom else "function_call_arguments"
        where = {"item_id": item["id"], "output_index": place}
        opened = {**item, field: "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place, item=opened)
        yield self._event(f"response.{stem}.delta", **where, delta=item[field])
        name = {} if is_custom else {"name": item["name"]}
        yield self._event(f"response.{stem}.done", **where, **{field: item[field]}, **name)
        yield self._event("response.output_item.done", output_index=place, item=item)
        self._output.append(item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return event(kind, body)


def _failed(outcome: RunOutcome) -> bool:
    return outcome.error is not None and outcome.error.kind != NOT_CONFIGURED


def _status(outcome: RunOutcome | None) -> tuple[str, dict[str, Any] | None, dict[str, Any] | None]:
    """Return the status of a response, its error, and why it is incomplete."""
    if outcome is None:
        return "in_progress", None, None
    if _failed(outcome):
        error = outcome.error
        message = "" if error is None else error.message
        status = "cancelled" if outcome.state is RunState.STOPPED else "failed"
        return status, {"code": "server_error", "message": message}, None
    reasons = {"length": "max_output_tokens", "rounds": "max_output_tokens", "content_filter": "content_filter"}
    reason = reasons.get(outcome.finish_reason or "")
    return ("completed", None, None) if reason is None else ("incomplete", None, {"reason": reason})


def _message_id(run: Run, place: int) -> str:
    return f"msg_{run.id.replace('-', '')}_{place}"


def _message(run: Run, place: int, text: str, *, final: bool) -> dict[str, Any]:
    return {
        "id": _message_id(run, place),
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "phase": "final_answer" if final else "commentary",
        "content": [_text_part(text)],
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(run: Run, place: int, use: ToolUse, offered: OfferedTool | None) -> dict[str, Any]:
    identity = f"{run.id.replace('-', '')}_{place}"
    name = use.name if offered is None else offered.tool.name
    item = {"call_id": use.id, "name": name, "status": "completed"}
    if offered is not None and offered.namespace:
        item["namespace"] = offered.namespace
    if offered is not None and offered.tool.type == "custom":
        return {"id": f"ctc_{identity}", "type": "custom_tool_call", **item, "input": _custom_input(use)}
    return {"id": f"fc_{identity}", "type": "function_call", **item, "arguments": use.arguments}


def _custom_input(use: ToolUse) -> str:
    """Return the text for a custom tool, which the model was offered as a function with the parameter `input`."""
    try:
        given = msgspec.json.decode(use.arguments)
    except msgspec.DecodeError:
        return use.arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else use.arguments


def _tool(tool: ResponseTool) -> dict[str, Any]:
    shown = {name: value for name, value in msgspec.to_builtins(tool).items() if value is not None}
    if tool.tools is not None:
        shown["tools"] = [_tool(inner) for inner in tool.tools]
    return {"strict": tool.strict is not False, "parameters": None, **shown} if tool.type == "function" else shown


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
