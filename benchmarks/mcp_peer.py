"""The peer: the official MCP Python SDK serving the same echo over streamable HTTP, with no node behind it.

    python -m benchmarks.mcp_peer --port PORT [--as-it-comes]

By default it is given its best: plain JSON answers instead of event streams, no sessions, and a tool that returns text
without a second, structured copy. `--as-it-comes` leaves all of that as the SDK has it when nobody says otherwise. Both
without an access log, on uvicorn with uvloop and httptools. One server answers both eras of the protocol; the caller's
`MCP-Protocol-Version` header chooses. With this SDK (2.3) the revision 2026-07-28 is about twice as fast as 2025-11-25
without sessions.
"""

import argparse

import uvicorn
from mcp.server import MCPServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--as-it-comes", action="store_true")
    arguments = parser.parse_args()
    plain = arguments.as_it_comes
    server = MCPServer("bench", log_level="WARNING")

    @server.tool(structured_output=None if plain else False)
    async def echo(text: str) -> str:
        """Send the text back."""
        return text

    app = server.streamable_http_app(json_response=not plain, stateless_http=not plain)
    config = uvicorn.Config(app, host="127.0.0.1", port=arguments.port, log_level="info", access_log=False)
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main()
