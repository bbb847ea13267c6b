"""An MCP server of these tests, on the official package: `python -m tests.support.mcp_server FOLDER [PORT]`.

Over standard input and output, or over streamable HTTP on PORT. What it says about its tool `greet` is in the file
FOLDER/description; it appends what it does to FOLDER/log.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

folder = Path(sys.argv[1])
server = MCPServer("test-server", instructions="A server of tests.")


def note(line: str) -> None:
    with (folder / "log").open("a") as file:
        file.write(f"{line}\n")


def said() -> str:
    path = folder / "description"
    return path.read_text() if path.exists() else "Greet somebody."


def greet(name: str) -> str:
    note(f"greet {name}")
    return f"Hello {name}"


server.add_tool(greet, description=said())


@server.tool()
async def describe(ctx: Context, text: str) -> str:
    """Change the description of greet."""
    server.remove_tool("greet")
    server.add_tool(greet, description=text)
    (folder / "description").write_text(text)
    await ctx.notify_tools_changed()
    await ctx.session.send_tool_list_changed()
    return "changed"


@server.tool()
async def add(ctx: Context, name: str) -> str:
    """Add a tool."""

    def added() -> str:
        return "added"

    server.add_tool(added, name=name, description="A tool that came later.")
    await ctx.notify_tools_changed()
    await ctx.session.send_tool_list_changed()
    return "added"


@server.tool()
async def remove(ctx: Context, name: str) -> str:
    """Remove a tool."""
    server.remove_tool(name)
    await ctx.notify_tools_changed()
    await ctx.session.send_tool_list_changed()
    return "removed"


@server.tool()
async def hold(until: str) -> str:
    """Wait for a file."""
    note(f"hold {os.getpid()}")
    try:
        while not (folder / until).exists():
            await asyncio.sleep(0.05)
    except BaseException:
        note("hold cancelled")
        raise
    return "held"


@server.tool()
async def steps(ctx: Context, count: int) -> str:
    """Report progress."""
    for step in range(count):
        await ctx.report_progress(step + 1, count, f"step {step + 1}")
        await asyncio.sleep(0.5)
    return "done"


@server.tool()
def crash() -> str:
    """End the process."""
    note("crash")
    print("it went wrong", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Block the whole server."""
    note(f"hang {os.getpid()}")
    time.sleep(3600)
    return "never"


@server.tool()
def fail(text: str) -> str:
    """Raise an error."""
    raise ToolError(text)


@server.tool()
def variable(name: str) -> str:
    """Return an environment variable."""
    return os.environ.get(name, "(unset)")


@server.tool()
def pid() -> str:
    """Return the process id."""
    return str(os.getpid())


@server.tool()
def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


@server.tool()
def blocks() -> list[Any]:
    """Return every kind of content block."""
    contents = types.TextResourceContents(uri="file:///a.txt", mime_type="text/plain", text="inside")
    return [
        types.TextContent(type="text", text="words"),
        types.ImageContent(type="image", data="aW1hZ2U=", mime_type="image/png"),
        types.AudioContent(type="audio", data="c291bmQ=", mime_type="audio/wav"),
        types.EmbeddedResource(type="resource", resource=contents),
        types.ResourceLink(type="resource_link", uri="file:///b.txt", name="b.txt"),
    ]


def asked(ctx: Context, method: str, params: dict[str, Any]) -> Any:
    """What the client answered, or the result by which it is asked."""
    if ctx.input_responses:
        return ctx.input_responses["key"]
    return types.InputRequiredResult.model_validate(
        {"inputRequests": {"key": {"method": method, "params": params}}, "resultType": "input_required"}
    )


@server.tool()
async def ask(ctx: Context) -> Any:
    """Ask the user for a colour."""
    schema = {"type": "object", "properties": {"colour": {"type": "string", "default": "blue"}}, "required": ["colour"]}
    answer = asked(ctx, "elicitation/create", {"mode": "form", "message": "Which?", "requestedSchema": schema})
    return answer if isinstance(answer, types.InputRequiredResult) else f"{answer.action} {answer.content}"


@server.tool()
async def think(ctx: Context, text: str) -> Any:
    """Ask the client's model."""
    message = {"role": "user", "content": {"type": "text", "text": text}}
    answer = asked(ctx, "sampling/createMessage", {"messages": [message], "maxTokens": 50})
    return answer if isinstance(answer, types.InputRequiredResult) else f"the model says {answer.content.text}"


if __name__ == "__main__":
    note(f"start {os.getpid()}")
    if len(sys.argv) > 2:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
