"""The peer: the official MCP Python SDK serving the same echo over streamable HTTP, with no node behind it.

    python -m benchmarks.mcp_peer --port PORT

It is given its best: plain JSON answers instead of event streams, no sessions, no access log, uvicorn with
uvloop and httptools, and a tool that returns text without a second, structured copy. One server answers both
eras of the protocol; the caller's `MCP-Protocol-Version` header chooses. With this SDK (2.3) the revision
2026-07-28 is about twice as fast as 2025-11-25 without sessions, so Farhand is held against that one.
"""

import argparse

import uvicorn
from mcp.server import MCPServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    server = MCPServer("bench", log_level="WARNING")

    @server.tool(structured_output=False)
    async def echo(text: str) -> str:
        """Send the text back."""
        return text

    app = server.streamable_http_app(json_response=True, stateless_http=True)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="info", access_log=False)
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main()
