"""Record tool calls beside the model's replies, and answer them from the recording when a run is repeated."""

from __future__ import annotations

import msgspec

from farhand.agent.tool_outcome import Outcome
from farhand.agent.tools import Call
from farhand.llm.messages import ToolUse
from farhand.llm.recording import RecordedCall, Recording, Write, write_line

_DECODER = msgspec.json.Decoder(Outcome)


def recording(call: Call, write: Write) -> Call:
    """Wrap `call` to record each outcome. Pass the same `write` to `llm.recording.RecordingModel`."""

    async def recorded(use: ToolUse) -> Outcome:
        outcome = await call(use)
        line = RecordedCall(use.id, use.name, use.arguments, msgspec.Raw(msgspec.json.encode(outcome)))
        write_line(write, line)
        return outcome

    return recorded


def replaying(source: Recording) -> Call:
    """Return a `Call` that runs nothing and returns the recorded outcomes."""

    async def replayed(use: ToolUse) -> Outcome:
        found = source.call(use.id, use.name, use.arguments)
        if found is None:
            return Outcome.failed("not_found", f"{source.name} has no call of {use.name} with these arguments")
        return _DECODER.decode(found)

    return replayed
