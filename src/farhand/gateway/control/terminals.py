"""Terminals on nodes: open, list, watch, type into and end them.

A terminal is a background command of `Bash` that its node runs in a pseudo-terminal. Opening one is a call of `Bash`
like any other, with the same rights, policy and record; its id is the terminal's. So the gateway keeps nothing about
terminals, and they survive its restart as commands do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.admission import check_known, may_know_call
from farhand.gateway.calls.charging import Meter
from farhand.gateway.calls.gate import Gate
from farhand.gateway.calls.open_call import OpenCall, new_call_id
from farhand.gateway.nodes.output import Output, RemoteCommands
from farhand.gateway.nodes.registry import NodeRegistry
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import Failed, InvalidArgs, NotFound, ToolError
from farhand.protocol.names import join_tool
from farhand.store.tables.calls import CallRecord, CallState

LOGIN_SHELL: Final = 'exec "$SHELL" -l'
COLS: Final = 80
ROWS: Final = 24
# Each viewer keeps one query to its node open, and a node answers at most 64 queries at once.
MAX_VIEWERS: Final = 16
MAX_VIEWERS_OF_NODE: Final = 32
# Output that a viewer gets which does not say where to start.
TAIL_BYTES: Final = 256 * 1024
WAIT_MS: Final = 20_000
# How long bytes are held back that may be the beginning of a secret.
HOLD_MS: Final = 50
AWAY_SECONDS: Final = 0.2
# Fields that a job and its terminal have in common.
_SAME: Final = (
    *("job_id", "command", "pid", "running", "started_at", "ended_at"),
    *("exit_code", "signal", "output_bytes"),
)


class TerminalView(msgspec.Struct, frozen=True):
    """A terminal as its node reports it; `viewers` are connected to this gateway now."""

    terminal_id: str
    node: str
    job_id: str
    command: str
    cwd: str
    pid: int
    running: bool
    cols: int
    rows: int
    started_at: int
    ended_at: int | None
    exit_code: int | None
    signal: str | None
    output_bytes: int
    viewers: int


class Terminals:
    def __init__(
        self,
        gate: Gate,
        node_registry: NodeRegistry,
        commands: RemoteCommands,
        note: Callable[[str, str, Mapping[str, Any]], None],
    ) -> None:
        """`note` writes to the journal who watched which terminal."""
        self._gate = gate
        self._node_registry = node_registry
        self._commands = commands
        self._note = note
        self._viewers: Counter[str] = Counter()
        self._viewers_of_node: Counter[str] = Counter()

    async def open(
        self,
        principal: Principal,
        node: str,
        *,
        command: str | None = None,
        cwd: str | None = None,
        cols: int = COLS,
        rows: int = ROWS,
        idempotency_key: str | None = None,
    ) -> OpenCall:
        """Begin the call that opens a terminal; its result is that of `Bash`. Raises NotFound, InvalidArgs, Denied."""
        check_known(principal, node)
        known = self._node_registry.nodes.get(node)
        if known is None:
            raise NotFound(self._node_registry.unknown(node))
        shell = known.specs.get("bash")
        if known.online and (shell is None or "terminal" not in shell.unlisted):
            raise InvalidArgs(f"node {node!r} has no terminals: it is an older version, or lends no shell")
        args: dict[str, Any] = {"command": command or LOGIN_SHELL, "terminal": f"{cols}x{rows}", "timeout": 0}
        if cwd is not None:
            args["workdir"] = cwd
        call = ToolCall(new_call_id(), join_tool(node, "Bash"), msgspec.Raw(msgspec.json.encode(args)))
        return await self._gate.begin(call, principal=principal, idempotency_key=idempotency_key)

    async def listing(self, principal: Principal) -> tuple[list[TerminalView], list[str]]:
        """Return the terminals of the connected nodes that a principal may see, newest first, and the nodes that did
        not answer."""
        jobs, silent = await self._commands.jobs(may_see=partial(self._gate.may_see_node, principal))
        return [self._view(job) for job in jobs if job["size"] is not None and job["call_id"]], silent

    def _view(self, job: Mapping[str, Any]) -> TerminalView:
        cols, rows = job["size"]
        return TerminalView(
            terminal_id=job["call_id"],
            node=job["node_id"],
            cwd=job["workdir"],
            cols=cols,
            rows=rows,
            viewers=self._viewers[job["call_id"]],
            **{name: job[name] for name in _SAME},
        )

    async def find(self, terminal_id: str, principal: Principal) -> CallRecord:
        """Return the call that opened a terminal. Raises NotFound, also for one that the principal may not know of."""
        record = await self._gate.find(terminal_id)
        known = record is not None and may_know_call(principal, record, record.node_id)
        if record is None or not known or record.node_id is None or not _opens_terminal(record):
            raise NotFound(f"there is no terminal {terminal_id[:100]!r}; `farhand terminals` lists them")
        if record.state is not CallState.OK:
            raise Failed(f"the terminal {record.id} was not opened: its call is {record.state.value}")
        return record

    async def end(self, terminal_id: str, principal: Principal, idempotency_key: str | None = None) -> OpenCall:
        """Begin the call that ends a terminal with all its processes. Raises NotFound."""
        record = await self.find(terminal_id, principal)
        args = {"action": "kill", "sessionId": record.id}
        tool = join_tool(record.node_id or "", "Process")
        call = ToolCall(new_call_id(), tool, msgspec.Raw(msgspec.json.encode(args)))
        return await self._gate.begin(call, principal=principal, idempotency_key=idempotency_key)

    @contextlib.asynccontextmanager
    async def viewing(self, record: CallRecord, principal: Principal, address: str) -> AsyncIterator[Viewer]:
        """Let a principal watch a terminal and type into it; time and bytes count against its budgets.

        Raises NotAllowed where it could not have opened the terminal, Failed if there are too many viewers.
        """
        check = partial(self._gate.check_attach, record, principal)
        check()
        meter = await self._gate.meter(principal, timed=True)
        node = record.node_id or ""
        if self._viewers[record.id] >= MAX_VIEWERS or self._viewers_of_node[node] >= MAX_VIEWERS_OF_NODE:
            raise Failed(
                f"busy: the terminal has {self._viewers[record.id]} viewers and its node {self._viewers_of_node[node]}"
            )
        self._viewers[record.id] += 1
        self._viewers_of_node[node] += 1
        who = {"node": node, "by": principal.id, "address": address}
        self._note("terminal.attached", record.id, who)
        try:
            yield Viewer(record, self._commands, self._node_registry, meter, check)
        finally:
            self._note("terminal.detached", record.id, who)
            for count, name in ((self._viewers, record.id), (self._viewers_of_node, node)):
                count[name] -= 1
                if not count[name]:
                    del count[name]
            await meter.close()


class Viewer:
    """One client of a terminal."""

    def __init__(
        self,
        record: CallRecord,
        commands: RemoteCommands,
        node_registry: NodeRegistry,
        meter: Meter,
        check: Callable[[], None],
    ) -> None:
        """`check` raises NotAllowed once the client may no longer type: rules change while a terminal is open."""
        self._check = check
        self._node_id = record.node_id or ""
        self._of = {"call_id": record.id}
        self._commands = commands
        self._node_registry = node_registry
        self._meter = meter

    @property
    def online(self) -> bool:
        node = self._node_registry.nodes.get(self._node_id)
        return node is not None and node.online

    async def type(self, data: bytes) -> None:
        """Send input; return when the terminal's program has read most of it. Raises ToolError."""
        self._check()
        await self._meter.add(len(data))
        await self._commands.send(self._node_id, self._of, data=data)

    async def resize(self, cols: int, rows: int) -> None:
        """Resize the terminal, for all viewers. Raises ToolError."""
        await self._commands.send(self._node_id, self._of, size=(cols, rows))

    async def pages(self, offset: int | None) -> AsyncGenerator[Output, None]:
        """Yield the output from `offset` on (None: the newest part) until the terminal's command has ended.

        Waits for a node that is offline, as long as it takes. The gateway's secrets are masked; what may be the
        beginning of one is held back for a moment. The first page comes at once. Raises ToolError.
        """
        redactor = self._commands.redactor(-TAIL_BYTES if offset is None else offset)
        begun = False
        while True:
            wait_ms = 0 if not begun else HOLD_MS if redactor.holding else WAIT_MS
            page = await self._page(redactor.next_offset, wait_ms)
            await self._meter.add(len(page.data))
            shown = page.masked(redactor, flush=page.over or not page.data)
            if shown.data or not begun or page.over:
                yield shown
            begun = True
            if page.over:
                return

    async def _page(self, offset: int, wait_ms: int) -> Output:
        while True:
            node = self._node_registry.nodes.get(self._node_id)
            connection = node.connection if node is not None else None
            try:
                return await self._commands.page(self._node_id, self._of, offset, wait_ms)
            except ToolError:
                if node is None or (connection is not None and node.connection is connection):
                    raise
            await asyncio.sleep(AWAY_SECONDS)  # the node is offline, or was until now


def _opens_terminal(record: CallRecord) -> bool:
    if not record.tool.casefold().endswith("__bash"):
        return False
    args = msgspec.json.decode(record.args)
    return isinstance(args, dict) and args.get("terminal") is not None
