"""Estimate the number of tokens of a text.

The estimate needs no tokenizer: it counts pieces much as byte-pair tokenizers split them. Measured against OpenAI's
`o200k_base` on whole files: Markdown 11 % below to 16 % above, code and JSON 4 % below to 23 % above, listings 13 %
below, base64 21 % below, other scripts up to 2.3 times as many. A provider's own count is preferred where available.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import ceil

import msgspec

from farhand.llm.messages import Message
from farhand.llm.openai_wire import names_of, tool_to_wire
from farhand.protocol.calls import ToolSpec

# The cost of an image depends on its size in pixels, which is unknown here; this is a typical value.
IMAGE_TOKENS = 1_000
# Overhead of each message: its role and delimiters.
MESSAGE_TOKENS = 4

_LONG = 30_000
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+|[ \t]+|[\r\n]+|[!-/:-@\[-`{-~]+|.", re.ASCII | re.DOTALL)


def text_tokens(text: str) -> int:
    """Return the estimated tokens of a text. Very long texts are sampled."""
    if len(text) > _LONG:
        third = _LONG // 3
        middle = len(text) // 2
        sample = text[:third] + text[middle : middle + third] + text[-third:]
        return round(_count(sample) * len(text) / len(sample))
    return _count(text)


def _count(text: str) -> int:
    tokens = 0.0
    for piece in _PIECE.findall(text):
        first = piece[0]
        if first.isascii():
            if first.isalpha():
                tokens += 1 if len(piece) <= 7 else (len(piece) + 4) // 5
            elif first.isdigit():
                tokens += (len(piece) + 2) // 3
            elif first in " \t":
                # A single space belongs to the next word; a run of spaces is a token of its own.
                tokens += 0 if len(piece) == 1 else 1
            elif first in "\r\n":
                tokens += 0.5
            else:
                # Consecutive punctuation shares tokens: `":`, `","`, `()`.
                tokens += 0.8 if len(piece) == 1 else 0.4 + 0.4 * len(piece)
        elif first < "\u0900":
            tokens += 0.45
        else:
            tokens += 0.9 if first < "\U0001f000" else 2
    return ceil(tokens)


def message_tokens(message: Message) -> int:
    count = MESSAGE_TOKENS + text_tokens(message.text) + IMAGE_TOKENS * len(message.images)
    for use in message.tool_calls:
        count += MESSAGE_TOKENS + text_tokens(use.name) + text_tokens(use.arguments)
    return count


def messages_tokens(messages: Iterable[Message]) -> int:
    return sum(message_tokens(message) for message in messages)


def tool_tokens(tool: ToolSpec) -> int:
    """Return the estimated tokens of a tool definition in a request."""
    return text_tokens(msgspec.json.encode(tool_to_wire(tool, names_of((), (tool,)))["function"]).decode())


def tools_tokens(tools: Sequence[ToolSpec]) -> int:
    return sum(tool_tokens(tool) for tool in tools)
