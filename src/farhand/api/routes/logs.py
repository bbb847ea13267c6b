"""`GET /v1/nodes/{node_id}/logs`: the newest lines of a node's log."""

from __future__ import annotations

from farhand.api.server.http import Reply, Request, json_reply, tool_problem
from farhand.api.server.route_docs import About, Query
from farhand.api.server.router import Route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.nodes.logs_tool import DEFAULT_LINES, MOST_LINES, NodeLogs
from farhand.protocol.errors import ToolError

ABOUT = About(
    "The newest lines of a node's log.",
    query=(Query("lines", f"How many: 1 to {MOST_LINES}, {DEFAULT_LINES} by default.", int),),
    errors=(500, 504),
)


def log_routes(logs: NodeLogs) -> list[Route]:
    async def node_logs(request: Request) -> Reply:
        lines = request.query_int("lines", DEFAULT_LINES, 1, MOST_LINES)
        try:
            return json_reply(await logs.fetch(request.params["node_id"], lines))
        except ToolError as error:
            raise tool_problem(error) from None

    return [Route("GET", "/v1/nodes/{node_id}/logs", Scope.READ, node_logs, about=ABOUT)]
