"""Tools of an MCP server: what the server says about them, which is not trusted, and what they return."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from farhand.gateway.mcp.settings import McpServerSettings
from farhand.gateway.nodes.cards import cleaned_tool
from farhand.gateway.nodes.server_tools import MCP
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import Failed
from farhand.protocol.untrusted import one_line

MAX_TOOLS: Final = 1000
MAX_DESCRIBED_BYTES: Final = 256 * 1024
MAX_ERROR_CHARS: Final = 16_000
_NAME: Final = re.compile(r"[A-Za-z0-9_./-]{1,128}")


class Listed(msgspec.Struct, frozen=True):
    """A tool as its server describes it. `digest` covers every part of the description."""

    name: str
    spec: ToolSpec
    digest: str


def listed(server: str, settings: McpServerSettings, tools: list[dict[str, Any]]) -> tuple[dict[str, Listed], str]:
    """Return the usable tools of a server by name, and a remark about those that were left out."""
    found: dict[str, Listed] = {}
    refused = 0
    for said in tools[:MAX_TOOLS]:
        name = said.get("name")
        text = msgspec.json.encode(said, order="deterministic")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in found or len(text) > MAX_DESCRIBED_BYTES:
            refused += 1
            continue
        found[name] = Listed(name, _spec(name, settings, said), hashlib.sha256(text).hexdigest())
    refused += max(0, len(tools) - MAX_TOOLS)
    remark = f"{refused} tools of {server!r} are left out: their names or descriptions cannot be used"
    return found, remark if refused else ""


def _spec(name: str, settings: McpServerSettings, said: Mapping[str, Any]) -> ToolSpec:
    description, schema = said.get("description") or said.get("title"), said.get("inputSchema")
    return cleaned_tool(
        ToolSpec(
            name=name,
            description=description if isinstance(description, str) else "",
            parameters=schema if isinstance(schema, dict) else {},
            read_only=any(fnmatchcase(name, pattern) for pattern in settings.read_only),
            capability=MCP,
            timeout_ms=round(settings.timeout_seconds * 1000),
        )
    )


def result_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `tools/call` as the result of a call. Raises Failed for one that is an error."""
    blocks = answer.get("content")
    content = [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
    structured = answer.get("structuredContent")
    if answer.get("isError") is True:
        texts = [str(block.get("text", "")) for block in content if block.get("type") == "text"]
        raise Failed("\n".join(texts)[:MAX_ERROR_CHARS] or "the tool failed without a message")
    result: dict[str, Any] = {"content": content}
    if structured is not None:
        result["structuredContent"] = structured
    return result


def remark_of(error: BaseException, longest: int = 500) -> str:
    """Return an error of a server as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(str(error) or type(error).__name__, longest)
