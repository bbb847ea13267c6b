"""The node's tools as this machine's owner lends them: the seven of the family, within the owner's limits."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from farhand.machine.kept import call_id
from farhand.node.log import calls
from farhand.protocol.calls import ToolSpec
from farhand.protocol.errors import NotAllowed, ToolError
from farhand.sdk.context import ToolContext
from farhand.sdk.registry import Registered, ToolRegistry
from farhand.tools.node_files import FileTools
from farhand.tools.node_shell import DEFAULT_TIMEOUT_MS, ShellTools
from farhand.tools.schema import Parameters
from farhand.tools.undo import SPEC as UNDO
from farhand.tools.undo import UndoTool

CAPABILITIES: Final = {
    "Glob": "filesystem.list",
    "Read": "filesystem.read",
    "Write": "filesystem.write",
    "Edit": "filesystem.edit",
    "Grep": "text.search",
    "Bash": "shell.exec",
    "Process": "shell.exec",
}
READ_ONLY: Final = frozenset({"Read", "Glob", "Grep"})
ACTING: Final = frozenset({"write", "submit", "kill"})


class Limits(msgspec.Struct, frozen=True):
    """What the owner of this machine allows, whatever the gateway asks."""

    read_only: bool = False
    confined: bool = False
    """Only some folders are lent, so a shell, which knows no folders, is not."""
    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    def refusal(self, tool: str) -> str | None:
        """Why a tool is not lent at all."""
        # Process tends what Bash started, so whoever may not use the one has no business with the other.
        if tool in self.denied or (tool == "Process" and "Bash" in self.denied):
            return f"the owner of this node does not lend {tool} (--deny-tool)"
        if self.read_only and tool in ("Write", "Edit", "Bash", UNDO.name):
            return f"{tool} is not allowed: this node is lent read-only"
        if tool == UNDO.name and "Write" in self.denied:
            return "Undo is not allowed: the owner of this node does not lend Write (--deny-tool)"
        # Process only tends what Bash started, so it is lent with it.
        if self.confined and tool in ("Bash", "Process") and not {tool, "Bash"} & set(self.allowed):
            return f"{tool} is not allowed: this node lends only some folders (--root; --allow-tool Bash lifts it)"
        return None


def family(files: FileTools, shell: ShellTools, limits: Limits, undo: UndoTool | None = None) -> ToolRegistry:
    registry = ToolRegistry()
    for name in CAPABILITIES:
        method = getattr(files if hasattr(files, name) else shell, name)
        spec = ToolSpec(
            name=name,
            description=inspect.getdoc(method) or "",
            parameters=Parameters(method).schema,
            read_only=name in READ_ONLY,
            capability=CAPABILITIES[name],
            timeout_ms=DEFAULT_TIMEOUT_MS,
            timeout_parameter="timeout" if name == "Bash" else None,
        )
        registry.add(_lent(spec, method, limits, at_once=files.read_at_once if name == "Read" else None))
    if undo is not None:
        registry.add(_lent(UNDO, undo.Undo, limits, unlisted=True))
    return registry


def _lent(
    spec: ToolSpec,
    method: Callable[..., Any],
    limits: Limits,
    *,
    unlisted: bool = False,
    at_once: Callable[..., Any] | None = None,
) -> Registered:
    """`at_once` does what the method does where that needs no waiting, and so no thread; None where it does."""
    name = spec.name
    parameters = Parameters(method)
    refusal = limits.refusal(name)

    async def run(ctx: ToolContext, args: msgspec.Raw) -> Any:
        began = time.perf_counter()
        try:
            result = await lend(ctx, args)
        except ToolError as error:
            _note(name, ctx, began, error)
            raise
        _note(name, ctx, began)
        return result

    async def lend(ctx: ToolContext, args: msgspec.Raw) -> Any:
        if refusal is not None:
            raise NotAllowed(refusal)
        arguments = parameters.read(args)
        if limits.read_only and name == "Process" and str(arguments["action"]).strip().lower() in ACTING:
            raise NotAllowed(f"Process {arguments['action']} is not allowed: this node is lent read-only")
        call_id.set(ctx.request_id)
        if at_once is not None and (result := at_once(**arguments)) is not None:
            return result
        if inspect.iscoroutinefunction(method):
            return await _until_cancelled(ctx, method(**arguments))
        return await asyncio.to_thread(method, **arguments)

    return Registered(spec, run, method, continues=name == "Bash", unlisted=unlisted)


def _note(name: str, ctx: ToolContext, began: float, error: ToolError | None = None) -> None:
    """Into the log: which call, how long, how it ended. Not the arguments: they are the gateway's to keep."""
    fields: dict[str, Any] = {"callId": ctx.request_id, "tool": name}
    fields["durationMs"] = round((time.perf_counter() - began) * 1000, 1)
    if error is None:
        calls.info("%s ended well", name, extra={"event": "tool.execute.ok", "fields": fields})
    else:
        fields["kind"] = error.kind.value
        calls.warning("%s failed: %s", name, error.message, extra={"event": "tool.execute.error", "fields": fields})


async def _until_cancelled(ctx: ToolContext, work: Awaitable[Any]) -> Any:
    """The work's result; a cancelled call cancels it at once, so that it can say what it ended."""
    task = asyncio.ensure_future(work)
    cancelled = asyncio.ensure_future(ctx.cancel.cancelled())
    try:
        await asyncio.wait({task, cancelled}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        cancelled.cancel()
        if not task.done():
            task.cancel()
    return await task
