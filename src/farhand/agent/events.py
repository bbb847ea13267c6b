"""The events of a run, in order, for server-sent events, OpenAI chunks, the transcript and the terminal.

A run is a sequence of steps, one for each reply of the model:

    StepStarted (Compacted | TextDelta | ThinkingDelta | Retrying)* Appended(assistant)
        (ToolCalled)* (ToolEnded Appended(tool))*          if it called tools, each call exactly once
        (Injected Appended(user))*                         messages that arrived meanwhile
    ...
    Completed | Stopped | Failed                           exactly one, always the last

Guarantees:

- `Appended` events are exactly the entries of the transcript. The loop continues only when its reader asks for the
  next event, so a reader that saves `Appended` before asking has every tool call on disk before the tool starts.
- Results are appended as they arrive. `transcript.mend` puts them into the order of their calls and answers those
  that a crash left open.
- A stopped run answers all of its calls before it yields `Stopped`. A completed run has answered every call except
  those in `handed`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from farhand.agent.compaction import Compaction
from farhand.agent.tool_outcome import Outcome
from farhand.llm.messages import FinishReason, Message, ToolUse, Usage


class StepStarted(msgspec.Struct, frozen=True, tag="step_started"):
    """The model is being asked; steps count from 1."""

    step: int
    model: str


class StepText(msgspec.Struct, frozen=True, tag="text_delta"):
    """The next piece of the model's text."""

    step: int
    text: str


class StepThinking(msgspec.Struct, frozen=True, tag="thinking_delta"):
    """The next piece of the model's reasoning, where the provider shows it."""

    step: int
    text: str


class StepRetrying(msgspec.Struct, frozen=True, tag="retrying"):
    """The model is asked again after `delay` seconds; with `void`, discard the deltas of this step."""

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
    """A tool call has ended. `seconds` is 0 if it never ran."""

    step: int
    use: ToolUse
    outcome: Outcome
    seconds: float


class Appended(msgspec.Struct, frozen=True, tag="appended"):
    """A new entry of the transcript, to be saved."""

    step: int
    message: Message
    # Usage of an assistant message.
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    model: str | None = None
    # The inbox id of an injected message, to be removed there in the same transaction.
    incoming: str | None = None


class Injected(msgspec.Struct, frozen=True, tag="injected"):
    """A message that arrived during the run is added to it."""

    step: int
    incoming: str
    message: Message


class Compacted(msgspec.Struct, frozen=True, tag="compacted"):
    """A summary now replaces the oldest messages of the conversation. Keep the originals."""

    step: int
    compaction: Compaction


class Completed(msgspec.Struct, frozen=True, tag="completed"):
    """The agent has answered. `steps` is the number of model replies, `usage` their sum."""

    reply: str
    usage: Usage
    steps: int
    # `rounds`: the limit on tool rounds ended the run, and the reply says so. `tool_calls`: see `handed`.
    finish_reason: FinishReason | Literal["rounds"] = "stop"
    # Calls for the client to run; their results come with its next message.
    handed: tuple[ToolUse, ...] = ()


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The run was stopped; each of its tool calls has a result."""

    reason: str
    usage: Usage
    steps: int


class RunFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The model gave no reply. `kind` is `not_configured`, `refused`, `context_overflow`, `unavailable`,
    `empty`, or `failed` for an internal error.
    """

    kind: str
    message: str
    usage: Usage
    steps: int


Event = (
    StepStarted
    | StepText
    | StepThinking
    | StepRetrying
    | ToolCalled
    | ToolEnded
    | Appended
    | Injected
    | Compacted
    | Completed
    | Stopped
    | RunFailed
)
