"""Chat completion requests of OpenAI clients, and their conversion to runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from farhand.api.server.http import Problem, invalid
from farhand.gateway.sessions.runs import RunOptions
from farhand.llm.messages import Block, Image, Message, Text, ToolUse
from farhand.llm.model import Thinking
from farhand.protocol.calls import ToolSpec

PRODUCT: Final = "farhand"
MOST_TOOLS: Final = 128

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Parameters passed to the model unchanged.
_PASSED_ON: Final = (
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "response_format",
    "parallel_tool_calls",
    "verbosity",
)

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1)]


class ImageUrl(msgspec.Struct):
    url: str
    detail: str | None = None


class Part(msgspec.Struct):
    type: str
    text: str = ""
    image_url: ImageUrl | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class ChatCall(msgspec.Struct):
    id: str
    function: CalledFunction


class CompletionMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ChatCall] | None = None
    tool_call_id: str | None = None


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(msgspec.Struct):
    function: Function | None = None
    type: str = "function"


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    messages: list[CompletionMessage]
    model: str = PRODUCT
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: int | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    logprobs: bool | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None


class Conversation(msgspec.Struct, frozen=True):
    """The messages of a request: the history, and what is new since the last answer."""

    before: tuple[Message, ...]
    # Results of the client's own tools.
    answers: tuple[Message, ...]
    # The user's message; empty if there are only results.
    new: Message
    instructions: str


def options(wanted: ChatRequest, said: Conversation, *, kept: bool) -> RunOptions:
    """Return the options of the run; `kept`: the conversation is a stored session. Raises Problem."""
    _refuse(wanted)
    tools = [] if wanted.tool_choice == "none" else [_tool(one) for one in wanted.tools or ()]
    names = {tool.name for tool in tools}
    if len(tools) > MOST_TOOLS:
        raise invalid(f"a request has at most {MOST_TOOLS} tools, this one has {len(tools)}", param="tools")
    if len(names) < len(tools):
        raise invalid("two of the tools have the same name", param="tools")
    parameters = {name: value for name in _PASSED_ON if (value := getattr(wanted, name)) is not None}
    forced = wanted.tool_choice not in (None, "none", "auto")
    if forced:
        if not tools:
            raise invalid("tool_choice demands a call, but the request has no tools", param="tool_choice")
        if isinstance(wanted.tool_choice, NamedTool) and wanted.tool_choice.function.name not in names:
            name = wanted.tool_choice.function.name[:100]
            raise invalid(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
        parameters["tool_choice"] = msgspec.to_builtins(wanted.tool_choice)
    about_calls = said.answers or (not kept and any(message.tool_calls for message in said.before))
    return RunOptions(
        thinking=_thinking(wanted.reasoning_effort),
        instructions=said.instructions,
        max_tokens=wanted.max_completion_tokens or wanted.max_tokens,
        parameters=parameters,
        client_tools=tuple(tools),
        own_tools=not forced,
        answers=said.answers if about_calls else None,
    )


def conversation(wanted: ChatRequest) -> Conversation:
    """Split the messages of a request. Raises Problem if they do not form a conversation."""
    instructions = "\n\n".join(
        text for one in wanted.messages if one.role in ("system", "developer") and (text := _text(one))
    )
    said = [_message(one) for one in wanted.messages if one.role not in ("system", "developer")]
    start = next((place for place in range(len(said), 0, -1) if said[place - 1].role == "assistant"), 0)
    new = said[start:]
    users = [message for message in new if message.role == "user"]
    answers = tuple(message for message in new if message.role == "tool")
    if not new or (not users and not answers):
        raise invalid("the last message must be of role `user`, or the result of a tool", param="messages")
    return Conversation(tuple(said[:start]), answers, _joined(users), instructions)


def refuse_strangers(answers: Sequence[Message], waiting: Sequence[ToolUse]) -> None:
    """Raise Problem for a result without an open call."""
    for answer in answers:
        if not any(use.id == answer.tool_call_id for use in waiting):
            identity = (answer.tool_call_id or "")[:100]
            raise invalid(
                f"no call {identity!r} waits for a result; the result of a tool follows the message with the call",
                param="messages",
            )


def _refuse(wanted: ChatRequest) -> None:
    if wanted.n not in (None, 1):
        raise Problem(400, "unsupported", f"one reply is given for a request; n must be 1, not {wanted.n}", param="n")
    if wanted.functions:
        raise Problem(
            400, "unsupported", "`functions` is the old form; give the functions as `tools`", param="functions"
        )
    if wanted.logprobs:
        raise Problem(
            400,
            "unsupported",
            "logprobs are not known: several replies of the model are one answer here",
            param="logprobs",
        )
    if any(kind != "text" for kind in wanted.modalities or ()):
        raise Problem(400, "unsupported", "the agent answers with text; leave `modalities` out", param="modalities")


def _tool(tool: ChatTool) -> ToolSpec:
    if tool.type != "function" or tool.function is None:
        raise Problem(400, "unsupported", f"tools must be of type `function`, not {tool.type[:50]!r}", param="tools")
    function = tool.function
    if not _NAME.fullmatch(function.name):
        raise invalid(
            f"a tool's name has 1 to 64 of a-z, A-Z, 0-9, _ and -, not {function.name[:100]!r}", param="tools"
        )
    return ToolSpec(function.name, function.description or "", function.parameters or {})


def _thinking(effort: str | None) -> Thinking | None:
    if effort is None:
        return None
    meant = "off" if effort == "none" else effort
    known: Thinking | None = next((level for level in get_args(Thinking) if level == meant), None)
    if known is None:
        levels = ", ".join(get_args(Thinking))
        raise invalid(f"reasoning_effort must be one of {levels}, not {effort[:50]!r}", param="reasoning_effort")
    return known


def _text(message: CompletionMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content or () if part.type == "text")


def _message(message: CompletionMessage) -> Message:
    """Convert a message. Raises Problem for unsupported parts."""
    if message.role == "tool":
        if not message.tool_call_id:
            raise invalid("a message of role `tool` needs the `tool_call_id` it answers", param="messages")
        return Message("tool", _content(message), tool_call_id=message.tool_call_id)
    if message.role == "assistant":
        uses = tuple(ToolUse(one.id, one.function.name, one.function.arguments) for one in message.tool_calls or ())
        return Message("assistant", _text(message), uses)
    return Message("user", _content(message), name=message.name or None)


def _content(message: CompletionMessage) -> str | tuple[Block, ...]:
    if not isinstance(message.content, list):
        return message.content or ""
    blocks: list[Block] = []
    for part in message.content:
        if part.type == "text":
            blocks.append(Text(part.text))
        elif part.type == "image_url" and part.image_url is not None:
            if not part.image_url.url.startswith(("data:image/", "https://", "http://")):
                raise invalid("an image's url must begin with data:image/, https:// or http://", param="messages")
            blocks.append(Image(part.image_url.url, part.image_url.detail))
        elif part.type != "refusal":
            raise Problem(
                400, "unsupported", f"a message's part of type {part.type[:50]!r} cannot be used", param="messages"
            )
    return _text(message) if all(isinstance(block, Text) for block in blocks) else tuple(blocks)


def _joined(messages: list[Message]) -> Message:
    """Join consecutive messages into one."""
    if len(messages) == 1:
        return messages[0]
    if not any(message.images for message in messages):
        return Message("user", "\n\n".join(message.text for message in messages))
    blocks: list[Block] = []
    for message in messages:
        blocks += [Text(message.content)] if isinstance(message.content, str) else message.content
    return Message("user", tuple(blocks))
