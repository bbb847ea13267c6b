"""The data types of a conversation with a model: messages, tool calls and usage.

A `Message` has the fields of the OpenAI chat API; `openai_wire.py` translates the two parts which that API nests deeper
(tool calls and images), so that the transcript, the loop and the API routes share one type.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class Image(msgspec.Struct, frozen=True, omit_defaults=True, tag="image"):
    """An image: `url` is `data:<type>;base64,…` or an address that the model's provider can fetch."""

    url: str
    detail: str | None = None


Block = Text | Image
Content = str | tuple[Block, ...]


class ToolUse(msgspec.Struct, frozen=True):
    """A tool call by the model. `arguments` is the model's own text, which may be invalid JSON."""

    id: str
    name: str
    arguments: str = "{}"


class SignedThinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """A block of reasoning that its provider wants back unchanged during a round of tool calls."""

    text: str = ""
    signature: str = ""
    # The block is encrypted: it has this instead of text and signature.
    data: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of a conversation. Its JSON is what a transcript stores."""

    role: Role
    content: Content = ""
    # Tool calls of an assistant message. Each is answered by exactly one message of role `tool`.
    tool_calls: tuple[ToolUse, ...] = ()
    # The call that a tool message answers.
    tool_call_id: str | None = None
    # The call of a tool message failed; the content says why.
    is_error: bool = False
    # The name of the tool, or of the user where there are several.
    name: str | None = None
    # Reasoning of an assistant message, if the provider shows it. Sent back only to providers that ask for it.
    thinking: str = ""
    signed_thinking: tuple[SignedThinking, ...] = ()

    @property
    def text(self) -> str:
        """Return the text of the content, without its images."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(block.text for block in self.content if isinstance(block, Text))

    @property
    def images(self) -> tuple[Image, ...]:
        if isinstance(self.content, str):
            return ()
        return tuple(block for block in self.content if isinstance(block, Image))


class Usage(msgspec.Struct, frozen=True):
    """Cost of replies. `prompt_tokens` includes `cached_tokens`; `cost` is in US dollars, 0 without a known price."""

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
    """The model is asked again after `delay` seconds; with `void`, discard the deltas so far."""

    reason: str
    delay: float
    # The model asked next: the same one, or the next of the fallback chain.
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
