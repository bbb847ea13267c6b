"""What happens in a run, in order. Server-sent events, OpenAI chunks, the transcript and the terminal all read these.

A run is a sequence of steps, one for each reply of the model:

    StepStarted (Compacted | TextDelta | ThinkingDelta | Retrying)* Appended(assistant)
        (ToolCalled)* (ToolEnded Appended(tool))*          when it asked for tools, each call exactly once
        (Injected Appended(user))*                         messages that came meanwhile
    ...
    Completed | Stopped | Failed                           exactly one, always the last

Promises a reader can build on:

- `Appended` is everything that belongs into the transcript, and nothing else does. The loop goes on only when its
  reader asks for the next event, so a reader that saves `Appended` before asking has every tool call on disk before
  the tool starts.
- Results are appended as they come in. `transcript.mend` puts them into the order of their calls and answers those
  that a crash left open.
- A run that is stopped answers every call it had asked for before it yields `Stopped`. One that is completed has
  answered every call but those it hands over.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from farhand.agent.compaction import Compaction
from farhand.agent.tool_outcome import Outcome
from farhand.llm.messages import FinishReason, Message, ToolUse, Usage


class StepStarted(msgspec.Struct, frozen=True, tag="step_started"):
    """The model is asked; steps count from 1."""

    step: int
    model: str


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    """The next piece of the model's text."""

    step: int
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    """The next piece of the model's reasoning, where the provider shows it."""

    step: int
    text: str


class Retrying(msgspec.Struct, frozen=True, tag="retrying"):
    """The model is asked again after `delay` seconds; with `void`, this step's deltas so far are to be forgotten."""

    step: int
    reason: str
    delay: float
    model: str
    void: bool = False


class ToolCalled(msgspec.Struct, frozen=True, tag="tool_called"):
    """A tool is about to run."""

    step: int
    use: ToolUse


class ToolEnded(msgspec.Struct, frozen=True, tag="tool_ended"):
    """A tool call is over, well or badly. `seconds` is 0 for one that never ran."""

    step: int
    use: ToolUse
    outcome: Outcome
    seconds: float


class Appended(msgspec.Struct, frozen=True, tag="appended"):
    """The next entry of the transcript: save it."""

    step: int
    message: Message
    # Of an assistant's message: what it cost.
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    model: str | None = None
    # Of an injected message: the id it had in the inbox, to be taken out there in the same transaction.
    incoming: str | None = None


class Injected(msgspec.Struct, frozen=True, tag="injected"):
    """A message that arrived during the run joins it now."""

    step: int
    incoming: str
    message: Message


class Compacted(msgspec.Struct, frozen=True, tag="compacted"):
    """From here on a summary stands for the oldest messages of the conversation. Keep the originals."""

    step: int
    compaction: Compaction


class Completed(msgspec.Struct, frozen=True, tag="completed"):
    """The agent has answered. `steps` counts model replies, `usage` adds them up."""

    reply: str
    usage: Usage
    steps: int
    # `rounds`: the limit on tool rounds ended the run, and the reply says so. `tool_calls`: see `handed`.
    finish_reason: FinishReason | Literal["rounds"] = "stop"
    # Calls that whoever asked carries out; their results are the next thing to be said in the conversation.
    handed: tuple[ToolUse, ...] = ()


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """Somebody stopped the run; every tool call it made has a result."""

    reason: str
    usage: Usage
    steps: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The model gave no reply. `kind` is `not_configured`, `refused`, `context_overflow`, `unavailable`,
    `empty`, or `failed` for a fault of our own."""

    kind: str
    message: str
    usage: Usage
    steps: int


Event = (
    StepStarted
    | TextDelta
    | ThinkingDelta
    | Retrying
    | ToolCalled
    | ToolEnded
    | Appended
    | Injected
    | Compacted
    | Completed
    | Stopped
    | Failed
)
