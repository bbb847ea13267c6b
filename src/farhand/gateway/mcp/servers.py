"""The MCP servers of the settings and those that were added: connects them and offers their tools.

A tool is offered as its server described it when it was accepted: at the first connection, or by the owner. One whose
description or schema changes is held back until the owner accepts the change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from farhand.gateway.access.secrets import Secrets
from farhand.gateway.calls.catalog import Catalog
from farhand.gateway.journal import EventJournal
from farhand.gateway.mcp.connection import McpConnection, ServerState
from farhand.gateway.mcp.login import FOLDER, Login, LoginError, TokenFile
from farhand.gateway.mcp.settings import McpServerSettings, check_name, check_settings
from farhand.gateway.mcp.tools import Listed, listed
from farhand.gateway.nodes.queries import Queries
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.gateway.nodes.server_tools import Offered
from farhand.gateway.repeating import Repeating
from farhand.llm.model import Model
from farhand.protocol.errors import FarhandError
from farhand.protocol.names import join_tool, look_alike
from farhand.protocol.redaction import KnownSecrets
from farhand.store.ports import Store
from farhand.store.tables.mcp import servers as rows
from farhand.store.tables.mcp.servers import AcceptedTool, StoredServer
from farhand.tools.tool import Tool

log = logging.getLogger(__name__)

SETTINGS: Final = "settings"
ADDED: Final = "added"
# How often the settings are looked at.
LOOK_SECONDS: Final = 0.5
# After this time, the task of a connection is cancelled once more.
STOP_SECONDS: Final = 1.0
# A server that keeps listing other tools must not fill the store: of one server, so many tools are accepted without the
# owner, and so many events of tools that are held back are recorded until the gateway is restarted.
MAX_ACCEPTED: Final = 5000
MAX_NOTED: Final = 1000


class ServerError(FarhandError):
    """A request that cannot be carried out: a short code, and what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ToolShown(msgspec.Struct):
    """A tool in the list of servers. A tool that is held back has the reason and the description that was accepted."""

    name: str
    description: str
    digest: str
    held: str | None = None
    accepted_description: str | None = None


class ServerShown(msgspec.Struct):
    """A server as its owner sees it; variables and headers by name only."""

    name: str
    kind: str
    source: str
    state: str
    error: str | None
    since: int
    restarts: int
    url: str | None
    command: list[str]
    node: str | None
    env: list[str]
    headers: list[str]
    enabled: bool
    server: dict[str, Any]
    tools: list[ToolShown]
    held: int

    @classmethod
    def of(
        cls, name: str, settings: McpServerSettings, source: str, state: ServerState, error: str | None, **rest: Any
    ) -> ServerShown:
        return cls(
            name=name,
            kind=settings.kind,
            source=source,
            state=state.value,
            error=error,
            url=settings.url or None,
            command=settings.command,
            node=settings.node or None,
            env=sorted(settings.env),
            headers=sorted(settings.headers),
            enabled=settings.enabled,
            **{"since": 0, "restarts": 0, "server": {}, "tools": [], "held": 0, **rest},
        )


class _Server:
    def __init__(self, name: str, source: str, connection: McpConnection) -> None:
        self.name = name
        self.source = source
        self.connection = connection
        self.tools: dict[str, Listed] = {}
        self.held: dict[str, str] = {}
        self.accepted: dict[str, AcceptedTool] = {}
        # How many events of tools that are held back were recorded.
        self.noted = 0
        self.remark = ""
        # Identifies the secrets that its settings name, with their values.
        self.secrets: tuple[tuple[str, bytes], ...] = ()
        self.task: asyncio.Task[None] | None = None


class McpServers:
    """Connects MCP servers and puts their tools into the catalog, for as long as it is used as a context manager."""

    def __init__(
        self,
        home: Path,
        database: Store,
        journal: EventJournal,
        catalog: Catalog,
        node_registry: NodeRegistry,
        queries: Queries,
        secrets: KnownSecrets,
        handles: Secrets,
        *,
        settings: Callable[[], Mapping[str, McpServerSettings]],
        named_nodes: Callable[[], Any],
        model: Callable[[], Model],
        frozen: Callable[[], object],
        address: str,
    ) -> None:
        """`settings` returns `[mcp]` as it is now. `named_nodes` returns the ids of nodes with tokens. `address` is
        where a browser on this machine reaches the gateway."""
        self._home = home
        self._database = database
        self._journal = journal
        self._catalog = catalog
        self._node_registry = node_registry
        self._queries = queries
        self._secrets = secrets
        self._handles = handles
        self._secrets_version = handles.version
        self._settings = settings
        self._named_nodes = named_nodes
        self._model = model
        self._frozen = frozen
        self._address = address
        self._servers: dict[str, _Server] = {}
        # Servers of the settings that cannot be used, and why.
        self._refused: dict[str, tuple[McpServerSettings, str]] = {}
        self._seen: Mapping[str, McpServerSettings] = {}
        self._watcher = Repeating(self._watch, "MCP servers", first_delay=LOOK_SECONDS, retry_seconds=LOOK_SECONDS)
        self._changing = asyncio.Lock()

    # -- start and stop ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        for stored in await self._database.read(rows.stored_servers):
            try:
                settings = msgspec.json.decode(stored.settings, type=McpServerSettings)
            except msgspec.MsgspecError as error:
                log.error("the MCP server %s cannot be used: %s", stored.name, error)
                continue
            await self._begin(stored.name, settings, ADDED)
        await self._follow(self._settings())
        self._watcher.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._watcher.stop()
        await asyncio.gather(*(self._stop(server) for server in list(self._servers.values())))

    async def refresh(self) -> None:
        """Follow what another gateway of the fleet has added, removed or accepted."""
        async with self._changing:
            stored = {one.name: one for one in await self._database.read(rows.stored_servers)}
            for server in [one for one in self._servers.values() if one.source == ADDED]:
                known = stored.get(server.name)
                settings = None if known is None else msgspec.json.decode(known.settings, type=McpServerSettings)
                if settings != server.connection.settings:
                    await self._end(server)
                    if known is None and server.connection.login is not None:
                        server.connection.login.tokens.forget()
            for name, one in stored.items():
                if name not in self._servers:
                    await self._begin(name, msgspec.json.decode(one.settings, type=McpServerSettings), ADDED)
            for server in self._servers.values():
                server.accepted = await self._database.read(partial(rows.accepted_tools, server=server.name))
                accepted = {name: one.digest for name, one in server.accepted.items()}
                held = {n: why for n, why in server.held.items() if accepted.get(n) != server.tools[n].digest}
                if held != server.held:
                    server.held = held
                    self._publish(server)

    def wake(self) -> None:
        """Try again now: the freeze was lifted."""
        for server in self._servers.values():
            server.connection.wake.set()

    async def _watch(self) -> float:
        """Follow changes of the settings."""
        if self._handles.version != self._secrets_version:
            await self._renew()
        now = self._settings()
        if now is not self._seen and now != self._seen:
            await self._follow(now)
        return LOOK_SECONDS

    async def _renew(self) -> None:
        """Connect the servers again that use a secret which has been changed."""
        self._secrets_version = self._handles.version
        for server in list(self._servers.values()):
            secrets = self._handles.stamp(msgspec.to_builtins(server.connection.settings))
            if secrets != server.secrets:
                server.secrets = secrets
                await self.restart(server.name)

    async def _follow(self, now: Mapping[str, McpServerSettings]) -> None:
        async with self._changing:
            for server in list(self._servers.values()):
                if server.source == SETTINGS and now.get(server.name) != server.connection.settings:
                    await self._end(server)
            self._refused = {}
            for name, settings in now.items():
                if name in self._servers:
                    continue
                try:
                    self._check(name, settings)
                except ServerError as error:
                    log.error("%s", error)
                    self._refused[name] = (settings, str(error))
                else:
                    await self._begin(name, settings, SETTINGS)
            self._seen = now

    async def _begin(self, name: str, settings: McpServerSettings, source: str) -> _Server:
        self._hide(settings)
        login = self._login(name, settings) if settings.url else None
        connection = McpConnection(
            name,
            settings,
            queries=self._queries,
            resolved=self._resolved,
            login=login,
            model=self._model,
            frozen=self._frozen,
            tools=lambda tools: self._listed(server, tools),
            changed=lambda: self._publish(server),
        )
        server = self._servers[name] = _Server(name, source, connection)
        server.secrets = self._handles.stamp(msgspec.to_builtins(settings))
        server.accepted = await self._database.read(partial(rows.accepted_tools, server=name))
        self._node_registry.taken.add(name)
        self._publish(server)
        server.task = asyncio.ensure_future(connection.run())
        return server

    async def _end(self, server: _Server) -> None:
        self._servers.pop(server.name, None)
        self._node_registry.taken.discard(server.name)
        await self._stop(server)
        self._catalog.set_server(server.name, None)

    async def _stop(self, server: _Server) -> None:
        # A connection that fails while it is cancelled can swallow the cancellation, and would be made again.
        while server.task is not None and not server.task.done():
            server.task.cancel()
            await asyncio.wait({server.task}, timeout=STOP_SECONDS)

    def _resolved(self, name: str, settings: McpServerSettings) -> tuple[McpServerSettings, dict[str, str]]:
        """Return settings with the values of secrets; for a node, these values sealed to it. Raises ToolError."""
        user = f"mcp:{name}"
        if not settings.node:
            return msgspec.convert(self._handles.resolved(msgspec.to_builtins(settings), user), McpServerSettings), {}
        connection = self._node_registry.connection(settings.node)
        if connection is None:
            return settings, {}  # it cannot be started
        return settings, self._handles.sealed_setting(settings.env, user, settings.node, connection.sealing_key)

    def _hide(self, settings: McpServerSettings) -> None:
        """Mask the secrets of a server's settings wherever the gateway shows text."""
        self._secrets.add_settings([settings.env, settings.url])
        self._secrets.add_settings(list(settings.headers.values()), secret=True)
        self._secrets.add(*(value.partition(" ")[2] for value in settings.headers.values() if " " in value))

    def _login(self, name: str, settings: McpServerSettings) -> Login:
        tokens = TokenFile(self._home / FOLDER / f"{name}.json", self._secrets)
        redirect = settings.redirect_url or f"{self._address}/v1/mcp/callback"
        return Login(tokens, settings.url, redirect)

    # -- tools ------------------------------------------------------------------------------------------

    async def _listed(self, server: _Server, tools: list[dict[str, Any]]) -> None:
        """Offer the tools that a server lists, as far as their descriptions are accepted."""
        found, server.remark = listed(server.name, server.connection.settings, tools)
        first = not server.accepted
        new = [one for name, one in found.items() if name not in server.accepted]
        room = len(server.accepted) + len(new) <= MAX_ACCEPTED
        if new and room and (first or not server.connection.settings.hold_new):
            await self._accept(server, new, "first connection" if first else "new tool")
        elif first and not new and server.connection.settings.hold_new:
            # No tool has this name: whatever the server lists from now on is new, also after a restart.
            await self._remember(server, [AcceptedTool("", "", "", self._node_registry.clock(), "first connection")])
        held = {}
        for name, one in found.items():
            known = server.accepted.get(name)
            if known is None or known.digest != one.digest:
                what = "is new" if known is None else "has changed its description or schema"
                held[name] = f"it {what} since it was accepted"
        for name in list(held.keys() - server.held.keys())[: MAX_NOTED - server.noted]:
            data = {"tool": name, "digest": found[name].digest, "reason": held[name]}
            self._journal.note("mcp.tool_held", server.name, data)
            server.noted += 1
        if (found, held) != (server.tools, server.held):
            server.tools, server.held = found, held
            self._publish(server)

    async def _accept(self, server: _Server, tools: list[Listed], by: str) -> None:
        now = self._node_registry.clock()
        await self._remember(
            server, [AcceptedTool(one.name, one.digest, one.spec.description, now, by) for one in tools]
        )

    async def _remember(self, server: _Server, accepted: list[AcceptedTool]) -> None:
        data = {"tools": [one.tool for one in accepted if one.tool], "by": accepted[0].accepted_by}
        await self._journal.record(
            partial(rows.accept_tools, server=server.name, tools=accepted), "mcp.tools_accepted", server.name, data
        )
        server.accepted |= {one.tool: one for one in accepted}

    def _publish(self, server: _Server) -> None:
        """Put a server's tools into the catalog, or the reason why it has none."""
        if self._servers.get(server.name) is not server:
            return
        connection = server.connection
        if connection.state is not ServerState.READY:
            self._catalog.set_server(server.name, Offered(unavailable=connection.unavailable))
            return
        tools, held = {}, {}
        for name, one in server.tools.items():
            full = join_tool(server.name, name)
            if name in server.held:
                held[full] = (
                    f"the tool {full!r} is held back: {server.held[name]}; the owner accepts it with "
                    f"`farhand mcp accept {server.name} {name}`"
                )
            else:
                tools[full] = self._tool(server, full, one)
        self._catalog.set_server(server.name, Offered(tools, held))

    @staticmethod
    def _tool(server: _Server, full: str, one: Listed) -> Tool:
        connection = server.connection
        return Tool(
            full,
            lambda: one.spec,
            lambda arguments, context: connection.call(one.name, arguments, context),
            server=server.name,
            node=connection.settings.node,
        )

    # -- for the owner ----------------------------------------------------------------------------------

    def shown(self) -> list[ServerShown]:
        """Return all servers, by name."""
        found = [self._shown(server) for server in self._servers.values()]
        found += [
            ServerShown.of(name, settings, SETTINGS, ServerState.FAILED, why)
            for name, (settings, why) in self._refused.items()
        ]
        return sorted(found, key=lambda one: one.name)

    async def add(self, name: str, settings: McpServerSettings, by: str) -> ServerShown:
        """Add a server and connect it. Raises ServerError."""
        async with self._changing:
            self._check(name, settings)
            stored = StoredServer(name, msgspec.json.encode(settings), self._node_registry.clock(), by)
            data = {"kind": settings.kind, "node": settings.node or None, "by": by}
            await self._journal.record(partial(rows.save_server, server=stored), "mcp.added", name, data)
            return self._shown(await self._begin(name, settings, ADDED))

    async def remove(self, name: str, by: str) -> None:
        """Disconnect a server and forget it, its accepted tools and its login. Raises ServerError."""
        async with self._changing:
            server = self._find(name)
            if server.source == SETTINGS:
                raise ServerError("conflict", f"the MCP server {name!r} is in farhand.toml; remove [mcp.{name}] there")
            await self._end(server)
            if server.connection.login is not None:
                server.connection.login.tokens.forget()
            await self._journal.record(partial(rows.delete_server, name=name), "mcp.removed", name, {"by": by})

    async def accept(self, name: str, tools: list[str], digests: Mapping[str, str], by: str) -> ServerShown:
        """Accept the tools of a server as they are described now; all that are held back if `tools` is empty.

        `digests` are those the owner saw: a tool that has changed again is not accepted. Raises ServerError.
        """
        server = self._find(name)
        unknown = [tool for tool in tools if tool not in server.tools]
        if unknown:
            raise ServerError("not_found", f"the MCP server {name!r} has no tool {unknown[0]!r}")
        chosen = [server.tools[tool] for tool in (tools or server.held)]
        for one in chosen:
            if digests.get(one.name, one.digest) != one.digest:
                raise ServerError("conflict", f"the tool {one.name!r} has changed again; look at it once more")
        if chosen:
            await self._accept(server, chosen, by)
        server.held = {tool: why for tool, why in server.held.items() if tool not in {one.name for one in chosen}}
        self._publish(server)
        return self._shown(server)

    async def restart(self, name: str) -> ServerShown:
        """Reconnect a server. Raises ServerError."""
        async with self._changing:
            server = self._find(name)
            await self._stop(server)
            server.connection.restarts += 1
            server.task = asyncio.ensure_future(server.connection.run())
            return self._shown(server)

    async def begin_login(self, name: str) -> str:
        """Return the address at which a person logs in to a server. Raises ServerError."""
        login = self._find(name).connection.login
        if login is None:
            raise ServerError("conflict", f"the MCP server {name!r} is a program: it has no login")
        try:
            return await login.begin()
        except LoginError as error:
            raise ServerError("conflict", str(error)) from None

    def complete_login(self, name: str | None, url: str) -> str:
        """Take the address to which the browser was redirected; return the name of the server. Raises ServerError."""
        names = [name] if name is not None else list(self._servers)
        failed = "no login with this state is under way; begin with `farhand mcp login NAME`"
        for one in names:
            login = self._find(one).connection.login
            if login is None:
                continue
            try:
                login.complete(url)
            except LoginError as error:
                failed = str(error)
            else:
                return one
        raise ServerError("conflict", failed)

    def _find(self, name: str) -> _Server:
        server = self._servers.get(name)
        if server is None:
            near = next((known for known in self._servers if look_alike(known, name)), None)
            hint = f"did you mean {near!r}?" if near else "`farhand mcp list` shows them"
            raise ServerError("not_found", f"there is no MCP server {name[:100]!r}; {hint}")
        return server

    def _check(self, name: str, settings: McpServerSettings) -> None:
        """Raise ServerError for a name that is taken, or settings that cannot be used."""
        try:
            check_name(name)
            check_settings(name, settings)
        except ValueError as error:
            raise ServerError("invalid_request", str(error)) from None
        if name in self._servers:
            raise ServerError("conflict", f"there is an MCP server {name!r} already; `farhand mcp remove {name}` first")
        for known in self._servers:
            if look_alike(known, name):
                raise ServerError("conflict", f"{name!r} looks like the MCP server {known!r}; use another name")
        for node in {*self._node_registry.nodes, *self._named_nodes()}:
            if look_alike(node, name):
                raise ServerError(
                    "conflict",
                    f"the MCP server cannot be named {name!r}: {node!r} is a node, and tools of both would have the "
                    "same names; use another name",
                )
        if settings.node and settings.node not in self._node_registry.nodes:
            raise ServerError("invalid_request", self._node_registry.unknown(settings.node))

    def _shown(self, server: _Server) -> ServerShown:
        connection = server.connection
        tools = [
            ToolShown(
                name,
                one.spec.description,
                one.digest,
                server.held.get(name),
                server.accepted[name].description if name in server.held and name in server.accepted else None,
            )
            for name, one in sorted(server.tools.items())
        ]
        return ServerShown.of(
            server.name,
            connection.settings,
            server.source,
            connection.state,
            connection.error or server.remark or None,
            since=connection.since,
            restarts=connection.restarts,
            server=connection.server_info,
            tools=tools if connection.state is ServerState.READY else [],
            held=len(server.held),
        )
