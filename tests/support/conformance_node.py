"""A plug-in node with the fixture tools of the MCP conformance suite; the environment says where the gateway is."""

from __future__ import annotations

import asyncio
from typing import Any

from farhand.protocol.calls import ToolSpec
from farhand.sdk import Failed, NodeClient, NodeInfo, ToolContext, ToolRegistry

# One red pixel, and a second of nothing.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
WAV = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAAAAA=="

registry = ToolRegistry()


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def resource(uri: str, words: str, kind: str = "text/plain") -> dict[str, Any]:
    return {"type": "resource", "resource": {"uri": uri, "mimeType": kind, "text": words}}


@registry.tool("test_simple_text", read_only=True)
async def simple_text(ctx: ToolContext) -> dict[str, Any]:
    """Return a text."""
    return {"content": [text("This is a simple text response for testing.")]}


@registry.tool("test_image_content", read_only=True)
async def image_content(ctx: ToolContext) -> dict[str, Any]:
    """Return an image."""
    return {"content": [{"type": "image", "data": PNG, "mimeType": "image/png"}]}


@registry.tool("test_audio_content", read_only=True)
async def audio_content(ctx: ToolContext) -> dict[str, Any]:
    """Return a sound."""
    return {"content": [{"type": "audio", "data": WAV, "mimeType": "audio/wav"}]}


@registry.tool("test_embedded_resource", read_only=True)
async def embedded_resource(ctx: ToolContext) -> dict[str, Any]:
    """Return a resource."""
    return {"content": [resource("test://embedded-resource", "This is an embedded resource content.")]}


@registry.tool("test_multiple_content_types", read_only=True)
async def multiple_content_types(ctx: ToolContext) -> dict[str, Any]:
    """Return a text, an image and a resource."""
    mixed = resource("test://mixed-content-resource", '{"test":"data","value":123}', "application/json")
    image = {"type": "image", "data": PNG, "mimeType": "image/png"}
    return {"content": [text("Multiple content types test:"), image, mixed]}


@registry.tool("test_tool_with_logging")
async def with_logging(ctx: ToolContext) -> dict[str, Any]:
    """Log three lines."""
    for line in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        ctx.log(line)
        await asyncio.sleep(0.4)
    return {"content": [text("done")]}


@registry.tool("test_tool_with_progress")
async def with_progress(ctx: ToolContext) -> dict[str, Any]:
    """Report progress three times."""
    for done in (0, 50, 100):
        ctx.progress(done, 100, f"Completed step {done} of 100")
        await asyncio.sleep(0.8)
    return {"content": [text("done")]}


@registry.tool("test_error_handling")
async def error_handling(ctx: ToolContext) -> dict[str, Any]:
    """Fail."""
    raise Failed("This tool intentionally returns an error for testing")


@registry.tool("greet", read_only=True)
async def greet(ctx: ToolContext, name: str = "you") -> dict[str, Any]:
    """Greet somebody."""
    return {"content": [text(f"Hello, {name}!")]}


@registry.tool("slow_compute")
async def slow_compute(ctx: ToolContext, seconds: float = 1.0, label: str = "") -> dict[str, Any]:
    """Take some time."""
    await asyncio.sleep(seconds)
    return {"content": [text(f"computed {label}")]}


@registry.tool("failing_job")
async def failing_job(ctx: ToolContext) -> dict[str, Any]:
    """Fail after a second."""
    await asyncio.sleep(1.0)
    raise Failed("the job failed")


async def any_address(ctx: ToolContext, args: Any) -> dict[str, Any]:
    return {"content": [text("ok")]}


ADDRESS = {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}
registry.register(
    "json_schema_2020_12_tool",
    any_address,
    spec=ToolSpec(
        "json_schema_2020_12_tool",
        "Take an address.",
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "$defs": {"address": {"$anchor": "addressDef", **ADDRESS}},
            "properties": {
                "name": {"type": "string"},
                "address": {"$ref": "#/$defs/address"},
                "contactMethod": {"type": "string", "enum": ["phone", "email"]},
                "phone": {"type": "string"},
                "email": {"type": "string"},
            },
            "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
            "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
            "then": {"required": ["phone"]},
            "else": {"required": ["email"]},
            "additionalProperties": False,
        },
    ),
)


if __name__ == "__main__":
    asyncio.run(NodeClient(node_info=NodeInfo.from_env("conformance", "1.0.0")).run(registry))
