"""The nouns of a conversation with a model: messages, the tools it used, and what a reply cost.

A `Message` has the fields of the OpenAI chat API; `wire.py` knows the two places where that API nests them deeper
(tool calls and images) and translates at the border, so that the transcript, the loop and the doors share one type.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class Image(msgspec.Struct, frozen=True, omit_defaults=True, tag="image"):
    """A picture: `url` is `data:<type>;base64,…` or an address the model's provider can fetch."""

    url: str
    detail: str | None = None


Block = Text | Image
Content = str | tuple[Block, ...]


class ToolUse(msgspec.Struct, frozen=True):
    """A tool call the model asked for. The arguments are its own text, which need not be valid JSON."""

    id: str
    name: str
    arguments: str = "{}"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of a conversation. Its JSON is what a transcript stores."""

    role: Role
    content: Content = ""
    # Of an assistant: what it wants called. Each is answered by exactly one message of role `tool`.
    tool_calls: tuple[ToolUse, ...] = ()
    # Of a tool: the call this answers.
    tool_call_id: str | None = None
    # Of a tool: the call failed, and the content says why.
    is_error: bool = False
    # Of a tool: its name. Of a user: who spoke, where several can.
    name: str | None = None
    # Of an assistant: reasoning the provider showed. Sent back only to providers that ask for it.
    thinking: str = ""

    @property
    def text(self) -> str:
        """The words of the content, without its images."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(block.text for block in self.content if isinstance(block, Text))

    @property
    def images(self) -> tuple[Image, ...]:
        if isinstance(self.content, str):
            return ()
        return tuple(block for block in self.content if isinstance(block, Image))


class Usage(msgspec.Struct, frozen=True):
    """What replies cost. `prompt_tokens` includes `cached_tokens`; `cost` is in US dollars, 0 without a known price."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float = 0.0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cost + other.cost,
        )


FinishReason = Literal["stop", "tool_calls", "length", "content_filter"]


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    """The next piece of the reply."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    """The next piece of the reasoning before the reply."""

    text: str


class Retrying(msgspec.Struct, frozen=True, tag="retrying"):
    """The model is asked again after `delay` seconds; `void` says that deltas so far are to be forgotten."""

    reason: str
    delay: float
    # Who is asked next: the same model, or the next of the fallback chain.
    model: str
    void: bool = False


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The whole reply; always the last event of a stream that did not raise."""

    message: Message
    usage: Usage = Usage()
    finish_reason: FinishReason = "stop"
    # The model that answered, as `provider/model`.
    model: str = ""


StreamEvent = TextDelta | ThinkingDelta | Retrying | Finished
