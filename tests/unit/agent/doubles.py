"""A model and tools that do what a test says, through the same contracts as the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from farhand.agent.events import Appended, Completed, Event, RunFailed, Stopped
from farhand.agent.tool_outcome import Outcome
from farhand.agent.tools import ToolList
from farhand.llm.errors import ModelError
from farhand.llm.messages import Finished, Message, StreamEvent, TextDelta, ToolUse, Usage
from farhand.llm.model import ModelRequest
from farhand.protocol.calls import ToolSpec

Step = Finished | ModelError | list[StreamEvent | asyncio.Event]


def says(text: str, **fields: Any) -> Finished:
    return Finished(Message("assistant", text), fields.pop("usage", Usage(10, 5, 0, 0.5)), **fields)


def uses(*calls: tuple[str, str, Any], text: str = "", **fields: Any) -> Finished:
    """A reply that calls tools: (id, name, arguments as an object or text)."""
    made = tuple(
        ToolUse(identity, name, arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode())
        for identity, name, arguments in calls
    )
    usage = fields.pop("usage", Usage(10, 5, 0, 0.5))
    return Finished(Message("assistant", text, tool_calls=made), usage, "tool_calls", **fields)


class ScriptedModel:
    """Gives its steps in order; a list is streamed event by event, waiting at each asyncio.Event in it."""

    def __init__(self, *steps: Step, context_tokens: int = 128_000) -> None:
        self._steps = list(steps)
        self.requests: list[ModelRequest] = []
        self.context_tokens = context_tokens
        self.closed = 0

    @property
    def name(self) -> str:
        return "test/scripted"

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamEvent, None]:
        self.requests.append(request)
        step = self._steps.pop(0)
        try:
            if isinstance(step, ModelError):
                raise step
            if isinstance(step, list):
                for event in step:
                    if isinstance(event, asyncio.Event):
                        await event.wait()
                    else:
                        yield event
                return
            if step.message.text:
                yield TextDelta(step.message.text)
            yield step
        finally:
            self.closed += 1


Handler = Callable[[ToolUse], Awaitable[Outcome]]


def tools(**handlers: Any) -> ToolList:
    """Tools by name: an outcome's text, or a function of the use."""

    async def call(use: ToolUse) -> Outcome:
        handler = handlers[use.name]
        return Outcome(handler) if isinstance(handler, str) else await handler(use)

    return ToolList([ToolSpec(name) for name in handlers], call)


def transcript(events: Sequence[Event]) -> list[Message]:
    return [event.message for event in events if isinstance(event, Appended)]


def end(events: Sequence[Event]) -> Event:
    """The last event; there is exactly one of its sort."""
    assert sum(isinstance(event, Completed | Stopped | RunFailed) for event in events) == 1
    assert isinstance(events[-1], Completed | Stopped | RunFailed)
    return events[-1]


def assert_valid(messages: Sequence[Message]) -> None:
    """Each call has exactly one result, before anything else is said."""
    open_calls: list[str] = []
    for message in messages:
        if message.role == "tool":
            assert message.tool_call_id in open_calls
            open_calls.remove(message.tool_call_id)
        else:
            assert not open_calls
            open_calls = [use.id for use in message.tool_calls]
    assert not open_calls
