"""Models behind the OpenAI chat API: OpenAI, OpenRouter, LM Studio, vLLM, Ollama and compatible servers."""

from __future__ import annotations

from typing import Any, Final

from farhand.llm.http_model import HttpModel
from farhand.llm.model import ModelRequest
from farhand.llm.openai_stream import ReplyBuilder
from farhand.llm.openai_wire import messages_to_wire, tool_to_wire
from farhand.llm.tool_names import ToolNames

# Parameters that some servers reject. They are dropped or renamed once a server has done so.
_RENAMED: Final = {"max_tokens": "max_completion_tokens"}
_OPTIONAL: Final = ("stream_options", "temperature", "reasoning_effort", "max_tokens")


class OpenAIModel(HttpModel):
    PATH = "/chat/completions"

    def _api_headers(self, api_key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def _builder(self, names: ToolNames) -> ReplyBuilder:
        return ReplyBuilder(names)

    def _body(self, request: ModelRequest, names: ToolNames) -> dict[str, Any]:
        settings = self._settings
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages_to_wire(
                request.messages, names, images=settings.images, thinking=settings.send_thinking
            ),
        }
        if request.tools:
            body["tools"] = [tool_to_wire(tool, names) for tool in request.tools]
        if settings.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        if longest := request.max_tokens or settings.max_tokens:
            body["max_tokens"] = longest
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        if request.thinking not in (None, "off"):
            body["reasoning_effort"] = request.thinking
        body.update(request.parameters)
        for refused in self._refused & body.keys():
            value = body.pop(refused)
            if refused in _RENAMED:
                body[_RENAMED[refused]] = value
        return body

    def _newly_refused(self, status: int, text: str, body: dict[str, Any]) -> str | None:
        if status not in (400, 422):
            return None
        return next((name for name in _OPTIONAL if name in body and name in text), None)
