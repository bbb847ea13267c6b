"""Requests of the OpenAI Responses API, and their conversion to chat requests, which both APIs share."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from farhand.api.openai.request import (
    PRODUCT,
    CalledFunction,
    ChatCall,
    ChatRequest,
    ChatTool,
    CompletionMessage,
    Count,
    Function,
    ImageUrl,
    NamedFunction,
    NamedTool,
    Part,
)
from farhand.api.server.http import Problem, invalid

# Tools of the provider that a request offers and a model need not use.
_HOSTED_IGNORED: Final = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
# Items of earlier answers that carry nothing for the model here.
_ITEMS_IGNORED: Final = ("reasoning", "web_search_call", "compaction")
# The names of a chat request's parameters in this API.
_PARAMS: Final = {
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}
CUSTOM_PARAMETERS: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Content(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""
    image_url: str | None = None
    detail: str | None = None


class Item(msgspec.Struct):
    """A message, a call of a client's tool, or the result of one."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Content] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Content] | None = None


class ResponseTool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    strict: bool | None = None
    # The tools of a namespace.
    tools: list[ResponseTool] | None = None


class OfferedTool(NamedTuple):
    """A tool of the client, and the field of the request that declares it."""

    namespace: str | None
    tool: ResponseTool
    field: str


def offered_tools(tools: Iterable[ResponseTool]) -> list[tuple[str, OfferedTool]]:
    """Return the client's tools with the names by which the model is offered them, those in namespaces included."""
    found = []
    for place, tool in enumerate(tools):
        field = f"tools[{place}]"
        if tool.type == "namespace":
            for number, inner in enumerate(tool.tools or ()):
                offered = OfferedTool(tool.name, inner, f"{field}.tools[{number}]")
                found.append((model_name(tool.name, inner.name), offered))
        elif tool.type not in _HOSTED_IGNORED:
            found.append((tool.name, OfferedTool(None, tool, field)))
    return found


def model_name(namespace: str | None, name: str) -> str:
    """Return the name by which a model is offered a tool: unique, and within the limits of models."""
    if not namespace:
        return name
    whole = f"{namespace}__{name}"
    return whole if len(whole) <= 64 else f"{whole[:55]}_{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


class ToolChoice(msgspec.Struct):
    type: str
    name: str = ""


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class ResponsesRequest(msgspec.Struct):
    input: str | list[Item]
    model: str = PRODUCT
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = False
    background: bool | None = False
    store: bool | None = True
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_output_tokens: Count | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: int | None = None
    conversation: Any = None
    prompt: Any = None

    @property
    def stored(self) -> bool:
        return self.store is not False


@contextlib.contextmanager
def renamed_parameters() -> Iterator[None]:
    """Name a request's parameters in errors as this API does."""
    try:
        yield
    except Problem as problem:
        if problem.param is not None:
            problem.param = _PARAMS.get(problem.param, problem.param)
        raise


def as_chat(wanted: ResponsesRequest) -> ChatRequest:
    """Return the same request as a chat request. Raises Problem for what cannot be expressed."""
    _refuse(wanted)
    text = wanted.text or TextSettings()
    return ChatRequest(
        messages=_messages(wanted),
        model=wanted.model,
        stream=wanted.stream,
        max_completion_tokens=wanted.max_output_tokens,
        tools=[_tool(name, offered) for name, offered in offered_tools(wanted.tools or ())],
        tool_choice=_tool_choice(wanted.tool_choice),
        parallel_tool_calls=wanted.parallel_tool_calls,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        response_format=_response_format(text.format),
        reasoning_effort=wanted.reasoning.effort if wanted.reasoning else None,
        verbosity=text.verbosity,
    )


def _refuse(wanted: ResponsesRequest) -> None:
    if wanted.conversation is not None:
        reason = "conversations are not kept here; continue a response with previous_response_id"
        raise Problem(400, "unsupported", reason, param="conversation")
    if wanted.prompt is not None:
        raise Problem(400, "unsupported", "stored prompts are not known here; send the text itself", param="prompt")
    if wanted.top_logprobs:
        reason = "logprobs are not known: several replies of the model are one answer here"
        raise Problem(400, "unsupported", reason, param="top_logprobs")
    if wanted.background and not wanted.stored:
        reason = "a response in the background is fetched later, so it must be stored: leave out store=false"
        raise invalid(reason, param="background")


def _messages(wanted: ResponsesRequest) -> list[CompletionMessage]:
    messages = [CompletionMessage("system", wanted.instructions)] if wanted.instructions else []
    if isinstance(wanted.input, str):
        return [*messages, CompletionMessage("user", wanted.input)]
    for place, item in enumerate(wanted.input):
        if item.type in _ITEMS_IGNORED:
            continue
        where = f"input[{place}]"
        if item.type == "message":
            _add_message(messages, item, where)
        elif item.type in ("function_call", "custom_tool_call"):
            _add_call(messages, item, where)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            if not item.call_id:
                raise invalid(f"{where} needs the `call_id` it answers", param=where)
            messages.append(CompletionMessage("tool", _parts(item.output, where), tool_call_id=item.call_id))
        else:
            raise Problem(400, "unsupported", f"{where}: items of type {item.type[:50]!r} cannot be used", param=where)
    return messages


def _add_message(messages: list[CompletionMessage], item: Item, where: str) -> None:
    if item.role is None:
        raise invalid(f"{where} is a message and needs a role", param=f"{where}.role")
    content = _parts(item.content, where)
    if item.role == "assistant" and messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
        before = messages[-1].content
        messages[-1].content = [*_as_parts(before), *_as_parts(content)]
        return
    messages.append(CompletionMessage(item.role, content))


def _add_call(messages: list[CompletionMessage], item: Item, where: str) -> None:
    """Add a call to the assistant's message before it, if there is one."""
    if not item.call_id or not item.name:
        raise invalid(f"{where} is a call and needs `call_id` and `name`", param=where)
    arguments = item.arguments or "{}"
    if item.type == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item.input or ""}).decode()
    if not messages or messages[-1].role != "assistant":
        messages.append(CompletionMessage("assistant"))
    messages[-1].tool_calls = [
        *(messages[-1].tool_calls or ()),
        ChatCall(item.call_id, CalledFunction(model_name(item.namespace, item.name), arguments)),
    ]


def _as_parts(content: str | list[Part] | None) -> list[Part]:
    return [Part("text", content)] if isinstance(content, str) else content or []


def _parts(content: str | list[Content] | None, where: str) -> str | list[Part]:
    if not isinstance(content, list):
        return content or ""
    parts = []
    for place, one in enumerate(content):
        if one.type in ("input_text", "output_text", "text"):
            parts.append(Part("text", one.text))
        elif one.type == "refusal":
            parts.append(Part("text", one.refusal))
        elif one.type == "input_image" and one.image_url is not None:
            if not one.image_url.startswith(("data:image/", "https://", "http://")):
                reason = "an image_url must begin with data:image/, https:// or http://"
                raise invalid(reason, param=f"{where}.content[{place}].image_url")
            parts.append(Part("image_url", image_url=ImageUrl(one.image_url, one.detail)))
        else:
            field = f"{where}.content[{place}]"
            kind = f"{one.type[:50]!r} with a file_id" if one.type == "input_image" else repr(one.type[:50])
            raise Problem(400, "unsupported", f"{field}: content of type {kind} cannot be used", param=field)
    return parts


def _tool(name: str, offered: OfferedTool) -> ChatTool:
    tool = offered.tool
    if tool.type == "custom":
        grammar = (tool.format or {}).get("definition")
        about = (
            f"{tool.description or ''}\n\nThe input follows this grammar:\n{grammar}" if grammar else tool.description
        )
        return ChatTool(Function(name, about, CUSTOM_PARAMETERS))
    if tool.type != "function":
        field = f"{offered.field}.type"
        reason = f"{field} is {tool.type[:50]!r}; only `function`, `custom` and `namespace` can be offered here"
        raise Problem(400, "unsupported", reason, param=field)
    return ChatTool(Function(name, tool.description, tool.parameters))


def _tool_choice(choice: str | ToolChoice | None) -> Any:
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type not in ("function", "custom"):
        reason = f"tool_choice of type {choice.type[:50]!r} cannot be used; name a `function`"
        raise Problem(400, "unsupported", reason, param="tool_choice")
    return NamedTool(NamedFunction(choice.name))


def _response_format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema is None or not wanted.name:
        reason = "a format of type json_schema needs `name` and `schema`"
        raise invalid(reason, param="text.format")
    fields = {key: value for key, value in msgspec.to_builtins(wanted).items() if key != "type"}
    return {"type": "json_schema", "json_schema": fields}
