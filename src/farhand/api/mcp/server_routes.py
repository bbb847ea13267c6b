"""MCP servers behind the gate: list, add, accept, log in, restart, remove."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlencode

import msgspec

from farhand.api.server.http import Problem, Reply, Request, refusing
from farhand.api.server.router import Query, route
from farhand.gateway.access.credentials import Scope
from farhand.gateway.mcp.servers import McpServers, ServerError, ServerShown
from farhand.gateway.mcp.settings import McpServerSettings

STATUSES: Final = {"invalid_request": 400, "not_found": 404, "conflict": 409}
PAGE: Final = "<!doctype html><meta charset=utf-8><title>Farhand</title><p>{}</p>"


CALLBACK: Final = (
    Query("state", "The state of the login."),
    Query("code", "The authorization code."),
    Query("iss", "The authorization server."),
    Query("error", "Why there is no code."),
    Query("error_description", "The reason in words."),
)


@contextlib.contextmanager
def server_problems() -> Iterator[None]:
    """Turn errors of MCP servers into HTTP errors."""
    try:
        yield
    except ServerError as error:
        raise Problem(STATUSES.get(error.code, 400), error.code, str(error)) from None


class ServerRequest(McpServerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The name of a new server, and the settings of `[mcp.NAME]`."""

    name: str


class ServersAnswer(msgspec.Struct):
    servers: list[ServerShown]
    count: int


class AcceptRequest(msgspec.Struct, forbid_unknown_fields=True):
    # Empty: all that are held back.
    tools: list[str] = []
    # What the owner saw, by tool; a tool that has changed since is not accepted.
    digests: dict[str, str] = {}


class LoginRequest(msgspec.Struct, forbid_unknown_fields=True):
    # The address to which the browser was redirected, if it could not reach the gateway itself.
    url: str | None = None


class LoginAnswer(msgspec.Struct, omit_defaults=True):
    # Where a person logs in.
    authorize_url: str | None = None
    completed: bool = False


class McpServerRoutes:
    def __init__(self, servers: McpServers) -> None:
        self._servers = servers

    @route("GET /v1/mcp/servers", Scope.ADMIN, "MCP servers behind the gate, with their tools.")
    async def listed(self, _request: Request) -> ServersAnswer:
        shown = self._servers.shown()
        return ServersAnswer(shown, len(shown))

    @route("GET /v1/mcp/servers/{name}", Scope.ADMIN, "One MCP server.", errors=(404,))
    async def show(self, request: Request) -> ServerShown:
        name = request.params["name"]
        found = next((one for one in self._servers.shown() if one.name == name), None)
        if found is None:
            raise Problem(404, "not_found", f"there is no MCP server {name[:100]!r}; `farhand mcp list` shows them")
        return found

    @route(
        "POST /v1/mcp/servers", Scope.ADMIN, "Add an MCP server and connect it.", status=201, errors=(409,), acts=True
    )
    async def add(self, request: Request, wanted: ServerRequest) -> ServerShown:
        fields = {name: getattr(wanted, name) for name in McpServerSettings.__struct_fields__}
        with server_problems():
            return await self._servers.add(wanted.name, McpServerSettings(**fields), request.credential.id)

    @route("DELETE /v1/mcp/servers/{name}", Scope.ADMIN, "Disconnect an MCP server and forget it.", errors=(404, 409))
    async def remove(self, request: Request) -> dict[str, str]:
        with server_problems():
            await self._servers.remove(request.params["name"], request.credential.id)
        return {"removed": request.params["name"]}

    @route(
        "POST /v1/mcp/servers/{name}/accept",
        Scope.ADMIN,
        "Accept the descriptions of tools that are held back.",
        errors=(404, 409),
        body_optional=True,
    )
    async def accept(self, request: Request, wanted: AcceptRequest) -> ServerShown:
        name, by = request.params["name"], request.credential.id
        with server_problems():
            return await self._servers.accept(name, wanted.tools, wanted.digests, by)

    @route("POST /v1/mcp/servers/{name}/restart", Scope.ADMIN, "Reconnect an MCP server.", errors=(404,), acts=True)
    async def restart(self, request: Request) -> ServerShown:
        with server_problems():
            return await self._servers.restart(request.params["name"])

    @route(
        "POST /v1/mcp/servers/{name}/login",
        Scope.ADMIN,
        "Begin a login to a remote MCP server, or complete one.",
        errors=(404, 409),
        body_optional=True,
        acts=True,
    )
    async def login(self, request: Request, wanted: LoginRequest) -> LoginAnswer:
        name = request.params["name"]
        with server_problems():
            if wanted.url is not None:
                self._servers.complete_login(name, wanted.url)
                return LoginAnswer(completed=True)
            return LoginAnswer(await self._servers.begin_login(name))

    @route(
        "GET /v1/mcp/callback",
        None,
        "Where an authorization server sends the browser after a login to an MCP server.",
        media=("text/html",),
        query=CALLBACK,
        errors=(400, 401),
        guessable=True,
    )
    async def callback(self, request: Request) -> Reply:
        query = {one.name: value for one in CALLBACK if (value := request.query(one.name)) is not None}
        with refusing(ServerError, status=401, code="unauthorized"):
            self._servers.complete_login(None, f"?{urlencode(query)}")
        text = PAGE.format("The login is complete; you can close this page. <code>farhand mcp list</code> shows more.")
        return Reply(text.encode(), content_type=b"text/html; charset=utf-8")
