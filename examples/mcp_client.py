"""Use the tools of all machines from a program of your own, through the official MCP package.

    pip install mcp
    FARHAND_TOKEN=$(farhand token create --scope tools.exec) python examples/mcp_client.py NODE [URL]

It lists the tools that the token may call, writes a file on a machine, and reads it again.
"""

from __future__ import annotations

import asyncio
import os
import sys

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client


async def main(node: str, url: str = "http://127.0.0.1:3210") -> None:
    headers = {"Authorization": f"Bearer {os.environ['FARHAND_TOKEN']}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
    ):
        listed = await client.list_tools()
        print(f"{len(listed.tools)} tools, such as {', '.join(sorted(tool.name for tool in listed.tools)[:3])}")
        written = await client.call_tool(f"{node}__Write", {"path": "from-mcp.txt", "content": "hello\n"})
        if written.is_error:
            sys.exit(str(written.content))
        read = await client.call_tool(f"{node}__Bash", {"command": "cat from-mcp.txt"})
        print(read.content[0].text if read.content and read.content[0].type == "text" else read.content)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
