"""Answer the requests of MCP servers to their client: for input of the user, and for replies of the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Final

from farhand.gateway.mcp.settings import McpServerSettings
from farhand.llm.errors import ModelError
from farhand.llm.messages import Finished, Message, StreamEvent
from farhand.llm.model import Model, ModelRequest

if TYPE_CHECKING:
    from mcp.client.session import ElicitationFnT, SamplingFnT

MAX_TOKENS: Final = 4096
MAX_PROMPT_CHARS: Final = 200_000


def elicitation(settings: McpServerSettings) -> ElicitationFnT | None:
    """Return the handler of requests for input; None if the client does not announce that it supports them."""
    if settings.elicitation == "no":
        return None
    import mcp_types as types  # noqa: PLC0415

    async def answer(  # the names of the parameters belong to the contract
        context: Any,  # noqa: ARG001
        params: types.ElicitRequestParams,
    ) -> types.ElicitResult | types.ErrorData:
        schema = getattr(params, "requested_schema", None)
        content = defaults(schema) if settings.elicitation == "defaults" and isinstance(schema, dict) else None
        if content is None:
            return types.ElicitResult(action="decline")
        return types.ElicitResult(action="accept", content=content)

    return answer


def defaults(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the default values of a form; None if a required field has none."""
    properties = schema.get("properties")
    fields = properties if isinstance(properties, dict) else {}
    content = {
        name: field["default"] for name, field in fields.items() if isinstance(field, dict) and "default" in field
    }
    required = schema.get("required")
    missing = [name for name in (required if isinstance(required, list) else []) if name not in content]
    return None if missing else content


def sampling(settings: McpServerSettings, model: Callable[[], Model]) -> SamplingFnT | None:
    """Return the handler of requests for a reply of the model; None if the client does not announce support."""
    if settings.sampling == "no":
        return None
    import mcp_types as types  # noqa: PLC0415

    async def answer(
        context: Any,  # noqa: ARG001
        params: types.CreateMessageRequestParams,
    ) -> types.CreateMessageResult | types.ErrorData:
        messages = [Message("system", params.system_prompt)] if params.system_prompt else []
        for message in params.messages:
            texts = [block.text for block in message.content_as_list if isinstance(block, types.TextContent)]
            if len(texts) != len(message.content_as_list):
                return types.ErrorData(code=types.INVALID_PARAMS, message="only text is supported")
            messages.append(Message("assistant" if message.role == "assistant" else "user", "\n".join(texts)))
        if sum(len(message.text) for message in messages) > MAX_PROMPT_CHARS:
            return types.ErrorData(code=types.INVALID_PARAMS, message=f"at most {MAX_PROMPT_CHARS} characters")
        request = ModelRequest(tuple(messages), max_tokens=min(max(params.max_tokens, 1), MAX_TOKENS))
        try:
            found = await _last(model().stream(request))
        except ModelError as error:
            return types.ErrorData(code=types.INTERNAL_ERROR, message=f"the model did not answer: {error}")
        return types.CreateMessageResult(
            role="assistant",
            content=types.TextContent(type="text", text=found.message.text),
            model=found.model,
            stop_reason="maxTokens" if found.finish_reason == "length" else "endTurn",
        )

    return answer


async def _last(events: AsyncGenerator[StreamEvent, None]) -> Finished:
    async for event in events:
        if isinstance(event, Finished):
            return event
    raise ModelError("the reply has no end")
