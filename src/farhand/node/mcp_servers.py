"""MCP servers that a machine runs for its gateway: it relays lines of JSON-RPC and does not interpret them.

A gateway starts a server, sends it lines and fetches its output by queries, so nothing is lost when the connection is
replaced. A server whose output is not fetched for a while is ended.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from farhand.machine.jobs.line_process import LineProcess, Lines
from farhand.machine.sandbox.confinement import Confinement, unconfined
from farhand.node.limits import ToolLimits
from farhand.node.queries import decode_query
from farhand.protocol.errors import Failed, InvalidArgs, NotFound
from farhand.protocol.freeze import FreezeOrder
from farhand.protocol.sealing import SealingKey
from farhand.protocol.secret_handles import substituted

log = logging.getLogger(__name__)

MAX_SERVERS = 32
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_WAIT_SECONDS = 25.0
# In one answer; a longer line is returned alone.
MAX_ANSWER_BYTES = 4 * 1024 * 1024
ABANDONED_SECONDS = 120.0
LOOK_SECONDS = 5.0


class McpQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Start a server, send it lines, fetch its output or end it."""

    action: Literal["open", "send", "receive", "close"]
    # Chosen by the gateway, unique for each start.
    server: str
    argv: list[str] = []
    env: dict[str, str] = {}
    # Values of the handles in `env`, sealed to this node.
    secrets: dict[str, str] = {}
    # A path, absolute or relative to the workspace.
    cwd: str = ""
    # With `send`: lines, and the number of this message; a repeated number is ignored.
    lines: list[str] = []
    number: int = 0
    # With `receive`: the last line that was received.
    after: int = 0
    wait_ms: int = 0


class _Server:
    def __init__(self, process: LineProcess) -> None:
        self.process = process
        self.sent = 0
        self.asked_at = time.monotonic()


class ServerHost:
    """Runs MCP servers on one machine, within the limits of its owner. Its owner calls `close`."""

    def __init__(
        self,
        workspace: Path,
        environment: Mapping[str, str],
        limits: ToolLimits | None = None,
        frozen: Callable[[], FreezeOrder | None] = lambda: None,
        confinement: Callable[[], Confinement] = unconfined,
        sealing: SealingKey | None = None,
    ) -> None:
        """`frozen` returns the order under which nothing is started. `confinement` is called before each start; without
        a sandbox, servers have the rights of this program. `sealing` opens the secrets of their environment."""
        self._sealing = sealing
        self._workspace = workspace
        self._environment = environment
        self._limits = limits or ToolLimits()
        self._frozen = frozen
        self._confinement = confinement
        self._servers: dict[str, _Server] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def query(self, params: msgspec.Raw) -> Any:
        """Answer a query. Raises InvalidArgs, NotAllowed, NotFound or Failed."""
        asked = decode_query(params, McpQuery)
        match asked.action:
            case "open":
                return {"pid": await self._open(asked)}
            case "send":
                self._send(asked)
                return {}
            case "receive":
                return await self._receive(asked)
            case "close":
                server = self._servers.pop(asked.server, None)
                if server is not None:
                    await server.process.close()
                return {}

    async def end_all(self) -> int:
        """End every server; return how many there were."""
        servers, self._servers = list(self._servers.values()), {}
        await asyncio.gather(*(server.process.close() for server in servers))
        return len(servers)

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.end_all()

    async def _open(self, asked: McpQuery) -> int:
        self._check_allowed()
        if not asked.argv or not asked.argv[0]:
            raise InvalidArgs("an MCP server needs a command")
        if len(self._servers) >= MAX_SERVERS:
            raise Failed(f"busy: {MAX_SERVERS} MCP servers run here already")
        if asked.server in self._servers:
            raise InvalidArgs(f"the MCP server {asked.server!r} runs already")
        workdir = str(self._workspace / asked.cwd)
        sandbox, _ = self._confinement()
        variables = asked.env
        if asked.secrets:
            if self._sealing is None:
                raise InvalidArgs("this machine does not accept secrets")
            variables = substituted(asked.env, self._sealing.open(asked.secrets))
        argv, environment = asked.argv, {**self._environment, **variables}
        if sandbox is not None:
            await asyncio.to_thread(sandbox.check)
            # It works for several callers, so it gets the rights of the least of them.
            words = sandbox.words(workdir, may_steer=False, inherit=True)
            setting, environment = _set_inside(variables)
            argv = [*words, f"{setting}exec {shlex.join(asked.argv)}"]
        process = await LineProcess.start(argv, environment, workdir)
        if self._frozen() is not None:  # the freeze came while the program was being started
            await process.close()
            self._check_allowed()
        self._servers[asked.server] = _Server(process)
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.ensure_future(self._sweep())
        log.info("started the MCP server %s as process %d", asked.server, process.pid)
        return process.pid

    def _check_allowed(self) -> None:
        if (order := self._frozen()) is not None:
            raise order.node_refusal()
        self._limits.require("Bash", "an MCP server")

    def _find(self, name: str) -> _Server:
        server = self._servers.get(name)
        if server is None:
            raise NotFound(f"the MCP server {name!r} does not run here")
        return server

    def _send(self, asked: McpQuery) -> None:
        self._check_allowed()
        server = self._find(asked.server)
        if asked.number > server.sent:
            if any("\n" in line or "\r" in line for line in asked.lines):
                raise InvalidArgs("a line must not contain a line break")
            server.process.write(asked.lines)
            server.sent = asked.number

    async def _receive(self, asked: McpQuery) -> Lines:
        server = self._find(asked.server)
        seconds = min(max(asked.wait_ms / 1000, 0.0), MAX_WAIT_SECONDS)
        found = await server.process.read(asked.after, seconds, MAX_ANSWER_BYTES)
        server.asked_at = time.monotonic()
        if found.exited and self._servers.get(asked.server) is server:
            del self._servers[asked.server]
            await server.process.close()
        return found

    async def _sweep(self) -> None:
        """End the servers whose gateway does not ask for their output any more."""
        while self._servers:
            await asyncio.sleep(LOOK_SECONDS)
            for name, server in list(self._servers.items()):
                if time.monotonic() - server.asked_at > ABANDONED_SECONDS:
                    log.warning("ended the MCP server %s: its gateway has not asked for its output", name)
                    self._servers.pop(name, None)
                    await server.process.close()


def _set_inside(variables: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return shell text that sets variables, and the environment from which it takes their values.

    The program that creates the sandbox has this environment, too: `LD_PRELOAD` would have an effect outside, and what
    is in its arguments can be listed. Raises InvalidArgs for a name that a shell cannot set.
    """
    text, environment = "", {}
    for number, (name, value) in enumerate(variables.items()):
        if not _SHELL_NAME.fullmatch(name):
            raise InvalidArgs(f"a shell cannot set the variable {name[:100]!r} of an MCP server")
        carrier = f"FARHAND_VARIABLE_{number}"
        environment[carrier] = value
        text += f'export {name}="${carrier}"; unset {carrier}; '
    return text, environment
