"""Shorten a long conversation: summarise older messages and keep the newest unchanged.

The originals are not modified: a `Compaction` has the number of messages its summary replaces, and the owner of the
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
    """A summary that replaces the first `count` messages after the system prompt."""

    summary: Message
    count: int
    usage: Usage = Usage()

    def applied(self, messages: Sequence[Message]) -> list[Message]:
        start = _start(messages)
        return [*messages[:start], self.summary, *messages[start + self.count :]]


class Compactor(msgspec.Struct, frozen=True):
    """When to compact and how much to keep, as fractions of the context."""

    # Size of the conversation's context; 0: that of the model.
    context_tokens: int = 0
    threshold: float = 0.8
    keep: float = 0.25

    def due(self, messages: Sequence[Message], counted: int, context_tokens: int) -> bool:
        """Return whether the next request would fill the context, by the provider's last count or else an estimate."""
        size = counted or messages_tokens(messages)
        return size > self._context(context_tokens) * self.threshold and self.cut(messages, context_tokens) > 0

    def cut(self, messages: Sequence[Message], context_tokens: int) -> int:
        """Return the number of messages after the system prompt to summarise; 0 if none can be dropped.

        Keeps the newest messages that fit. The kept part never starts with a tool result, so no call is separated from
        its result; the last round is always kept whole.
        """
        start = _start(messages)
        # A provider that rejects the conversation as too long counts more than the estimate, so keep only a part of it.
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
        """Return the compaction of a conversation, or None if no message can be dropped.

        Never raises ModelError: if no summary can be made, the summary says so, since continuing with less context is
        better than failing.
        """
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
        """Return a rolling summary, made of chunks of half the model's context each."""
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


def message_text(message: Message) -> str:
    """Format a message for the summarising model."""
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
    """Return the index of the first message after the system prompt."""
    return next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))


def _parts(messages: Sequence[Message], room: int) -> list[str]:
    parts: list[list[str]] = [[]]
    used = 0
    for message in messages:
        text = message_text(message)
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
    # The current request must also survive a summary of a summary.
    last = last.rpartition("Last request from user was: ")[2] if last.startswith(MARK) else last
    return f"{worded}\n\nLast request from user was: {last[:LONGEST_REQUEST]}" if last else worded


async def _answer(model: Model, request: ModelRequest) -> Finished:
    async with contextlib.aclosing(model.stream(request)) as stream:
        async for event in stream:
            if isinstance(event, Finished):
                return event
    raise ModelError(f"{model.name} ended without a reply")
