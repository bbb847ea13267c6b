"""One MCP server: connects, lists its tools, calls them, and connects again with increasing delays when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from farhand import __version__
from farhand.gateway.calls.open_call import UNKNOWN
from farhand.gateway.mcp import server_requests
from farhand.gateway.mcp.bounded_http import HEADERS, bounded
from farhand.gateway.mcp.hosted import hosted
from farhand.gateway.mcp.login import Login
from farhand.gateway.mcp.settings import McpServerSettings
from farhand.gateway.mcp.tools import MAX_TOOLS, remark_of, result_of
from farhand.gateway.nodes.queries import Queries
from farhand.gateway.repeating import set_within
from farhand.llm.model import Model
from farhand.protocol.errors import Failed, InvalidArgs
from farhand.protocol.untrusted import one_line
from farhand.tools.tool import CallContext

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger(__name__)

# How long a server may take until its tools are listed; the program may have to be downloaded first.
START_SECONDS: Final = 120.0
# Idle servers are asked for their tools in this interval, which also shows whether they still answer.
CHECK_SECONDS: Final = 30.0
ANSWER_SECONDS: Final = 20.0
FIRST_DELAY: Final = 1.0
MAX_DELAY: Final = 60.0
# A connection that lasted this long was not a failed start.
STABLE_SECONDS: Final = 60.0
MAX_PAGES: Final = 50
# Of all pages of a list of tools; each is limited by itself.
MAX_LISTED_BYTES: Final = 16 * 1024 * 1024
# A server that keeps saying that its tools have changed is asked for them in this interval.
RELIST_SECONDS: Final = 1.0
MAX_ROUNDS: Final = 10
# Characters of the name and the version of a server.
LONGEST_NAME: Final = 100
LEGACY_INVALID_PARAMS: Final = -32602


class ServerState(StrEnum):
    DISABLED = "disabled"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    # A person has to log in: `farhand mcp login`.
    LOGIN = "login_required"
    FROZEN = "frozen"


# Puts the values of secrets into the settings of a server; returns those for a node sealed. Raises ToolError.
Resolved = Callable[[str, McpServerSettings], tuple[McpServerSettings, dict[str, str]]]


class McpConnection:
    """The connection to one server. Its owner runs `run` as a task."""

    def __init__(
        self,
        name: str,
        settings: McpServerSettings,
        *,
        queries: Queries,
        resolved: Resolved,
        login: Login | None,
        model: Callable[[], Model],
        frozen: Callable[[], object],
        tools: Callable[[list[dict[str, Any]]], Any],
        changed: Callable[[], None],
    ) -> None:
        """`resolved` puts the values of secrets into settings, when the server is connected.
        `frozen` returns something while nothing may start. `tools` is awaited with the tools that the server lists,
        `changed` is called when the state changes."""
        self.name = name
        self.settings = settings
        self.login = login
        self.state = ServerState.STARTING if settings.enabled else ServerState.DISABLED
        self.error = ""
        self.restarts = 0
        self.since = time.time_ns() // 1_000_000
        self.server_info: dict[str, Any] = {}
        self.wake = login.wake if login is not None else asyncio.Event()
        self._queries = queries
        self._resolved = resolved
        self._model = model
        self._frozen = frozen
        self._tools = tools
        self._changed = changed
        self._client: Client | None = None
        self._relist = asyncio.Event()
        self._active = 0
        # The current connection cannot be used any more.
        self._lost = asyncio.Event()
        self._reasons: list[str] = []

    # -- running ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the server connected until cancelled."""
        delay = FIRST_DELAY
        while self.settings.enabled:
            self.wake.clear()
            began = time.monotonic()
            if self._frozen() is not None:
                self._set(ServerState.FROZEN, "everything is frozen; `farhand thaw` lifts that")
                await self.wake.wait()
                continue
            self._set(ServerState.STARTING, self.error)
            try:
                await self._serve()
            except Exception as error:
                self._fail(error, needs_login=self.login is not None and self.login.needed)
            finally:
                self._client = None
            self.restarts += 1
            if time.monotonic() - began > STABLE_SECONDS:
                delay = FIRST_DELAY
            if self.state is ServerState.LOGIN:
                await self.wake.wait()
                delay = FIRST_DELAY
            else:
                await set_within(self.wake, delay)
                delay = min(delay * 2, MAX_DELAY)

    def _fail(self, error: Exception, *, needs_login: bool) -> None:
        reason = "; ".join(dict.fromkeys(self._reasons)) or remark_of(error)
        if needs_login:
            reason = f"the server requires a login: run `farhand mcp login {self.name}`"
        log.warning("MCP server %s: %s", self.name, reason)
        self._set(ServerState.LOGIN if needs_login else ServerState.FAILED, reason)

    def _set(self, state: ServerState, error: str = "") -> None:
        if (state, error) != (self.state, self.error):
            self.state, self.error = state, error
            self.since = time.time_ns() // 1_000_000
            self._changed()

    async def _serve(self) -> None:
        """Connect and stay connected. Raises the error that ended the connection."""
        import anyio  # noqa: PLC0415 - the extra is loaded when the first server starts

        with contextlib.suppress(ImportError):  # in a thread, since it takes seconds
            await asyncio.to_thread(importlib.import_module, "mcp")
        try:
            from mcp import Client  # noqa: PLC0415
            from mcp_types import Implementation, ToolListChangedNotification  # noqa: PLC0415
        except ImportError:
            raise Failed("MCP servers need the extra: pip install 'farhand[mcp]'") from None

        self._lost, self._reasons = asyncio.Event(), []
        self._relist = asyncio.Event()

        async def on_message(message: Any) -> None:
            if isinstance(message, ToolListChangedNotification):
                self._relist.set()

        with anyio.fail_after(START_SECONDS) as limit:
            if self.login is not None and self.login.under_way:
                limit.deadline = math.inf
            client = Client(
                self._transport(),
                elicitation_callback=server_requests.elicitation(self.settings),
                sampling_callback=server_requests.sampling(self.settings, self._model),
                message_handler=on_message,
                client_info=Implementation(name="farhand", version=__version__),
                cache=None,
            )
            async with client, self._ending_when_lost(), self._listening(client):
                await self._list(client)
                limit.deadline = math.inf
                if self.login is not None:
                    self.login.connected()
                info = client.server_info
                shown = {} if info is None else {"name": info.name, "version": info.version}
                self.server_info = {name: one_line(text, LONGEST_NAME) for name, text in shown.items()}
                self._client = client
                self._set(ServerState.READY)
                await self._watch(client)

    def _transport(self) -> Any:
        settings, sealed = self._resolved(self.name, self.settings)
        if settings.command:
            return hosted(self._queries, self.name, settings, sealed, self._lost, self._reasons)
        return self._http(settings)

    @contextlib.asynccontextmanager
    async def _http(self, settings: McpServerSettings) -> AsyncIterator[Any]:
        import httpx2  # noqa: PLC0415
        from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415

        has_credential = any(name.lower() == "authorization" for name in settings.headers)
        auth = None if self.login is None or has_credential else self.login.provider()
        timeout = httpx2.Timeout(30.0, read=300.0)
        async with (
            httpx2.AsyncClient(
                headers={**settings.headers, **HEADERS},
                auth=auth,
                timeout=timeout,
                event_hooks=bounded(settings.url),
            ) as http,
            streamable_http_client(settings.url, http_client=http) as streams,
        ):
            yield streams

    @contextlib.asynccontextmanager
    async def _ending_when_lost(self) -> AsyncIterator[None]:
        """Raise Failed inside the block when the transport is lost."""
        import anyio  # noqa: PLC0415

        async def watch() -> None:
            await self._lost.wait()
            raise Failed(self._why_lost)

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            yield
            group.cancel_scope.cancel()

    @contextlib.asynccontextmanager
    async def _listening(self, client: Client) -> AsyncIterator[None]:
        """Follow changes of the tools of a server whose protocol version has subscriptions."""
        from mcp_types.version import MODERN_PROTOCOL_VERSIONS  # noqa: PLC0415

        async def follow() -> None:
            with contextlib.suppress(Exception):  # without a subscription, the regular check finds the changes
                async with client.listen(tools_list_changed=True) as events:
                    async for _ in events:
                        self._relist.set()

        modern = client.protocol_version in MODERN_PROTOCOL_VERSIONS
        following = asyncio.ensure_future(follow()) if modern else None
        try:
            yield
        finally:
            if following is not None:
                following.cancel()
                await asyncio.wait({following})

    async def _watch(self, client: Client) -> None:
        """List the tools again when they change, and from time to time while no call runs."""
        while True:
            listed_at = time.monotonic()
            if not await set_within(self._relist, CHECK_SECONDS) and self._active:
                continue
            await asyncio.sleep(max(0.0, listed_at + RELIST_SECONDS - time.monotonic()))
            self._relist.clear()
            try:
                await self._list(client)
            except TimeoutError:
                raise Failed(f"the server did not answer within {ANSWER_SECONDS:g} s") from None

    async def _list(self, client: Client) -> None:
        from mcp_types import PaginatedRequestParams  # noqa: PLC0415

        found: list[dict[str, Any]] = []
        size = 0
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            async with asyncio.timeout(None if self.state is not ServerState.READY else ANSWER_SECONDS):
                params = PaginatedRequestParams(cursor=cursor) if cursor else None
                page = await client.session.list_tools(params=params)
            tools = [tool.model_dump(by_alias=True, mode="json", exclude_none=True) for tool in page.tools]
            size += sum(len(msgspec.json.encode(tool)) for tool in tools)
            if size > MAX_LISTED_BYTES:
                raise Failed(f"the server describes its tools with more than {MAX_LISTED_BYTES // 1024**2} MiB")
            found += tools
            cursor = page.next_cursor
            if not cursor or len(found) > MAX_TOOLS:
                break
        await self._tools(found)

    # -- calling ----------------------------------------------------------------------------------------

    async def call(self, tool: str, arguments: Mapping[str, Any], context: CallContext) -> dict[str, Any]:
        """Call a tool and return its result. Raises ToolError; cancelling tells the server to stop."""
        client = self._client
        if client is None or self.state is not ServerState.READY:
            raise Failed(f"{self.unavailable or 'the MCP server is not connected'}; the call did not run")
        lost = asyncio.ensure_future(self._lost.wait())
        calling = asyncio.ensure_future(self._ask(client, tool, arguments, context))
        self._active += 1
        try:
            await asyncio.wait({lost, calling}, return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            raise Failed(f"{UNKNOWN} the MCP server {self.name!r} did not answer: {self._why_lost}")
        finally:
            self._active -= 1
            lost.cancel()
            if not calling.done():
                calling.cancel()
                self._relist.set()  # see whether a server whose call was stopped still answers
            await asyncio.gather(lost, calling, return_exceptions=True)

    @property
    def _why_lost(self) -> str:
        return "; ".join(dict.fromkeys(self._reasons)) or "the connection was lost"

    @property
    def unavailable(self) -> str:
        """Why the server has no tools; empty while it is connected."""
        if self.state is ServerState.READY:
            return ""
        reason = f": {self.error}" if self.error else ""
        return f"the MCP server {self.name!r} is not connected ({self.state}){reason}"

    async def _ask(
        self, client: Client, tool: str, arguments: Mapping[str, Any], context: CallContext
    ) -> dict[str, Any]:
        import httpx2  # noqa: PLC0415
        import mcp_types as types  # noqa: PLC0415
        from mcp.shared.exceptions import MCPError  # noqa: PLC0415
        from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415

        adapter: TypeAdapter[Any] = TypeAdapter(types.CallToolResult | types.InputRequiredResult)
        responses: dict[str, Any] | None = None
        state: str | None = None
        try:
            for _ in range(MAX_ROUNDS):
                params = types.CallToolRequestParams(
                    name=tool, arguments=dict(arguments), input_responses=responses, request_state=state
                )
                # Not `call_tool`, which validates the result against the server's own schema and patterns.
                found = await client.session.send_request(
                    types.CallToolRequest(params=params),
                    adapter,
                    progress_callback=_progress(context),
                )
                if isinstance(found, types.CallToolResult):
                    return result_of(found.model_dump(by_alias=True, mode="json", exclude_none=True))
                responses, state = await self._responses(found), found.request_state
            raise Failed(f"the MCP server {self.name!r} asked for input {MAX_ROUNDS} times")
        except MCPError as error:
            if error.code == types.CONNECTION_CLOSED:
                raise Failed(f"{UNKNOWN} the MCP server {self.name!r} disconnected") from None
            kind = InvalidArgs if error.code == LEGACY_INVALID_PARAMS else Failed
            raise kind(f"the MCP server {self.name!r} answered: {remark_of(error, 2000)}") from None
        except (httpx2.HTTPError, OSError) as error:
            raise Failed(f"{UNKNOWN} the MCP server {self.name!r} did not answer: {remark_of(error)}") from None
        except ValidationError:
            raise Failed(f"the MCP server {self.name!r} sent a result that is not valid") from None

    async def _responses(self, found: Any) -> dict[str, Any]:
        """Return the answers to what a server asks for during a call. Raises Failed if the settings do not allow it."""
        import mcp_types as types  # noqa: PLC0415

        elicit = server_requests.elicitation(self.settings)
        sample = server_requests.sampling(self.settings, self._model)
        responses: dict[str, Any] = {}
        for key, request in (found.input_requests or {}).items():
            answer: Any = None
            if isinstance(request, types.ElicitRequest) and elicit is not None:
                answer = await elicit(None, request.params)  # type: ignore[arg-type]
            elif isinstance(request, types.CreateMessageRequest) and sample is not None:
                answer = await sample(None, request.params)  # type: ignore[arg-type]
            if answer is None or isinstance(answer, types.ErrorData):
                raise Failed(
                    f"the MCP server {self.name!r} asks for {request.method}, which the settings of [mcp.{self.name}] "
                    "do not allow"
                )
            responses[key] = answer
        return responses


def _progress(context: CallContext) -> Any:
    async def report(progress: float, total: float | None, message: str | None) -> None:
        context.progress(progress, total, message or "")

    return report
