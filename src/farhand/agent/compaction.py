"""Making a long conversation shorter: older messages are told in a summary, the newest stay as they are.

The originals are not touched: a `Compaction` says how many messages its summary stands for, and whoever keeps the
transcript keeps them beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

import msgspec

from farhand.agent.tokens import message_tokens, messages_tokens
from farhand.llm.errors import ModelError
from farhand.llm.messages import Finished, Message, Usage
from farhand.llm.model import Model, ModelRequest

MARK: Final = "[Conversation summary from automatic context compaction]"
LONGEST_RESULT: Final = 2_000
LONGEST_REQUEST: Final = 4_000
SUMMARY_TOKENS: Final = 4_096

_INSTRUCTIONS: Final = """\
You shorten a conversation between a user and an agent that works with tools, so that the agent can go on without the \
original. Write only the summary, in the language of the conversation, with these sections:
1. Goals and intent of the user.
2. Rules and limits the user set, word for word; leave none out.
3. Timeline: what happened, in order.
4. Technical context: machines, paths, versions, commands, values and names that will be needed again, exactly.
5. Files and code: what was read, created, changed, deleted, and how.
6. Active work and last actions: what was being done when the conversation was cut. This is the most important section.
7. Unresolved issues and failed attempts.
8. The immediate next step."""


class Compaction(msgspec.Struct, frozen=True):
    """A summary, and what it replaces: `count` messages after the system prompt at the beginning."""

    summary: Message
    count: int
    usage: Usage = Usage()

    def applied(self, messages: Sequence[Message]) -> list[Message]:
        start = _start(messages)
        return [*messages[:start], self.summary, *messages[start + self.count :]]


class Compactor(msgspec.Struct, frozen=True):
    """When to compact and how much to keep, in parts of the context."""

    # Of the conversation; 0: what the model takes.
    context_tokens: int = 0
    threshold: float = 0.8
    keep: float = 0.25

    def due(self, messages: Sequence[Message], counted: int, context_tokens: int) -> bool:
        """Whether the next request would fill the context: by the provider's count of the last one, else estimated."""
        size = counted or messages_tokens(messages)
        return size > self._context(context_tokens) * self.threshold and self.cut(messages, context_tokens) > 0

    def cut(self, messages: Sequence[Message], context_tokens: int) -> int:
        """How many messages after the system prompt to summarise; 0 when there are none to spare.

        The newest that fit are kept. What is kept never begins with a tool's result, so no call is apart from its
        result; the last round is always kept whole.
        """
        start = _start(messages)
        # A provider that found it too long counts more than the estimate does, so that a part of that is kept.
        room = int(min(self._context(context_tokens), messages_tokens(messages[start:])) * self.keep)
        cut = len(messages)
        for index in range(len(messages) - 1, start - 1, -1):
            room -= message_tokens(messages[index])
            if room < 0 and cut < len(messages):
                break
            if messages[index].role != "tool":
                cut = index
        return cut - start if cut < len(messages) else 0

    async def compact(self, model: Model, messages: Sequence[Message]) -> Compaction | None:
        """The compaction of a conversation, None when nothing can be spared. Never raises ModelError: when no summary
        can be had, the summary says so, for going on with less is better than not going on."""
        count = self.cut(messages, model.context_tokens)
        if count <= 0:
            return None
        start = _start(messages)
        old = messages[start : start + count]
        try:
            text, usage = await self._summary(model, old)
        except ModelError as error:
            text = f"{count} earlier messages were left out, and no summary could be made: {error.message}"
            usage = Usage()
        return Compaction(Message("user", _worded(text, old, messages[start + count :])), count, usage)

    async def _summary(self, model: Model, old: Sequence[Message]) -> tuple[str, Usage]:
        """A rolling summary: as much at a time as half of the model's context takes."""
        room = self._context(model.context_tokens) // 2
        summary, usage = "", Usage()
        for part in _parts(old, room):
            before = f"The summary of what came before:\n{summary}\n\nWhat followed:\n\n" if summary else ""
            request = ModelRequest(
                (Message("system", _INSTRUCTIONS), Message("user", before + part)), max_tokens=SUMMARY_TOKENS
            )
            finished = await _answer(model, request)
            usage += finished.usage
            summary = finished.message.text.strip()
            if not summary:
                raise ModelError(f"{model.name} returned an empty summary")
        return summary, usage

    def _context(self, context_tokens: int) -> int:
        return min(self.context_tokens, context_tokens) if self.context_tokens else context_tokens


def told(message: Message) -> str:
    """A message as the one who summarises reads it."""
    lines = []
    if message.text:
        text = message.text
        if message.role == "tool" and len(text) > LONGEST_RESULT:
            text = f"{text[:LONGEST_RESULT]} …[{len(text) - LONGEST_RESULT} characters more]"
        lines.append(text)
    lines += [f"[image] {image.url[:40]}" for image in message.images]
    lines += [f"[calls {use.name} {use.arguments[:LONGEST_RESULT]}]" for use in message.tool_calls]
    who = f"result of {message.name}" if message.role == "tool" else message.role
    return f"{who}: " + "\n".join(lines)


def _start(messages: Sequence[Message]) -> int:
    """Where the conversation begins, after the system prompt."""
    return next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))


def _parts(messages: Sequence[Message], room: int) -> list[str]:
    parts: list[list[str]] = [[]]
    used = 0
    for message in messages:
        text = told(message)
        text = text[: room * 3]
        size = message_tokens(Message("user", text))
        if used and used + size > room:
            parts.append([])
            used = 0
        parts[-1].append(text)
        used += size
    return ["\n\n".join(part) for part in parts if part]


def _worded(text: str, old: Sequence[Message], kept: Sequence[Message]) -> str:
    worded = f"{MARK}\n\n{text}"
    if any(message.role == "user" for message in kept):
        return worded
    last = next((message.text for message in reversed(old) if message.role == "user" and message.text), "")
    # The request being worked on must survive a summary of a summary, too.
    last = last.rpartition("Last request from user was: ")[2] if last.startswith(MARK) else last
    return f"{worded}\n\nLast request from user was: {last[:LONGEST_REQUEST]}" if last else worded


async def _answer(model: Model, request: ModelRequest) -> Finished:
    async with contextlib.aclosing(model.stream(request)) as stream:
        async for event in stream:
            if isinstance(event, Finished):
                return event
    raise ModelError(f"{model.name} ended without a reply")
