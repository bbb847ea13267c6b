"""Make transcripts valid for any model: each tool call has exactly one result, directly after it, in call order."""

from __future__ import annotations

from collections.abc import Sequence

from farhand.agent.tool_outcome import Outcome
from farhand.llm.messages import Message, ToolUse

INTERRUPTED = (
    "outcome unknown: the gateway was interrupted while this call ran; it may or may not have taken effect. "
    "Check before doing it again."
)


def unanswered(messages: Sequence[Message]) -> list[ToolUse]:
    """Return the calls without a result, in order."""
    open_uses: list[ToolUse] = []
    for message in messages:
        if message.role == "tool":
            found = next((use for use in open_uses if use.id == message.tool_call_id), None)
            if found is not None:
                open_uses.remove(found)
        open_uses += message.tool_calls
    return open_uses


def interrupted(use: ToolUse) -> Message:
    """Return the result of a call whose outcome is unknown."""
    return Outcome.failed("failed", INTERRUPTED).message(use)


def mend(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation in valid form. A valid conversation is returned unchanged.

    Results follow their call in call order, a call without one gets the result `outcome unknown: …`, and results
    without a call are dropped.
    """
    mended: list[Message] = []
    waiting: dict[str, Message | None] = {}
    uses: tuple[ToolUse, ...] = ()
    later: list[Message] = []

    def close() -> None:
        nonlocal uses
        mended.extend(waiting.get(use.id) or interrupted(use) for use in uses)
        mended.extend(later)
        waiting.clear()
        later.clear()
        uses = ()

    for message in messages:
        if message.role == "tool":
            identity = message.tool_call_id or ""
            if identity in waiting and waiting[identity] is None:
                waiting[identity] = message
        elif message.role == "assistant":
            close()
            mended.append(message)
            uses = message.tool_calls
            waiting.update(dict.fromkeys(use.id for use in uses))
        elif uses:
            # A message that was saved between a call and its result is moved after the result.
            later.append(message)
        else:
            mended.append(message)
    close()
    return mended
