"""The tools of a node, within the limits of the machine's owner."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Collection, Iterable
from typing import Any

import msgspec

from farhand.machine.files.undo_log import call_id
from farhand.node.limits import ToolLimits
from farhand.node.log import calls
from farhand.protocol.calls import PROGRAM_STOPPING
from farhand.protocol.errors import NotAllowed, ToolError
from farhand.protocol.node_tools import NODE_TOOLS, BuiltinTool
from farhand.protocol.redaction import KnownSecrets
from farhand.sdk.context import ToolContext
from farhand.sdk.registry import RegisteredTool, ToolRegistry
from farhand.tools.node_family import node_spec
from farhand.tools.node_shell import call_secrets, trial_caller
from farhand.tools.schema import Parameters


def node_tools(
    families: Iterable[object], limits: ToolLimits, declarations: Collection[BuiltinTool] = NODE_TOOLS.values()
) -> ToolRegistry:
    """Return the declared tools that the families have methods for, within the limits."""
    registry = ToolRegistry()
    for family in families:
        for declared in declarations:
            if hasattr(family, declared.name):
                registry.add(_lent(declared, family, limits))
    return registry


def _lent(declared: BuiltinTool, family: object, limits: ToolLimits) -> RegisteredTool:
    """Create a tool from the method of its name, and from `preview_NAME`, which takes the same arguments."""
    name = declared.name
    method = getattr(family, name)
    preview = getattr(family, f"preview_{name}") if declared.previews else None
    parameters = Parameters(method)
    refusal = limits.refusal(declared)
    spec = node_spec(declared, method)
    if refusal is not None and not declared.announced_if_refused:
        spec = msgspec.structs.replace(spec, withheld=True)

    async def run(ctx: ToolContext, args: msgspec.Raw) -> Any:
        began = time.perf_counter()
        try:
            result = await lend(ctx, args)
        except ToolError as error:
            _note(name, ctx, began, error)
            raise
        _note(name, ctx, began)
        return result

    def parse(args: msgspec.Raw) -> dict[str, Any]:
        if refusal is not None:
            raise NotAllowed(refusal)
        arguments = parameters.read(args)
        limits.check_action(declared, arguments)
        if declared.shows_files and arguments.get("dryRun"):
            limits.require("Read", "a dry run, which shows the content of files,")
        return arguments

    async def show(args: msgspec.Raw) -> Any:
        assert preview is not None
        arguments = parse(args)
        if inspect.iscoroutinefunction(preview):
            return await preview(**arguments)
        return await asyncio.to_thread(preview, **arguments)

    async def lend(ctx: ToolContext, args: msgspec.Raw) -> Any:
        arguments = parse(args)
        call_id.set(ctx.request_id)
        call_secrets.set(ctx.secrets)
        trial_caller.set(ctx.caller)
        if inspect.iscoroutinefunction(method):
            return await _until_cancelled(ctx, method(**arguments))
        return await asyncio.to_thread(method, **arguments)

    return RegisteredTool(
        spec,
        run,
        method,
        continues=declared.continues,
        takes_handles=declared.takes_handles,
        unlisted=not declared.listed,
        preview=show if preview else None,
    )


def _note(name: str, ctx: ToolContext, began: float, error: ToolError | None = None) -> None:
    """Log a call, its duration and outcome. Arguments are not logged: the gateway stores them."""
    fields: dict[str, Any] = {"callId": ctx.request_id, "tool": name}
    fields["durationMs"] = round((time.perf_counter() - began) * 1000, 1)
    if error is None:
        calls.info("%s succeeded", name, extra={"event": "tool.execute.ok", "fields": fields})
    else:
        fields["kind"] = error.kind.value
        message = KnownSecrets(ctx.secrets.values()).redact_text(error.message)
        calls.warning("%s failed: %s", name, message, extra={"event": "tool.execute.error", "fields": fields})


async def _until_cancelled(ctx: ToolContext, work: Awaitable[Any]) -> Any:
    """Return the result; a cancelled call cancels the work at once, so that it can report what it ended."""
    task = asyncio.ensure_future(work)
    cancelled = asyncio.ensure_future(ctx.cancel.cancelled())
    try:
        await asyncio.wait({task, cancelled}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError as error:
        task.cancel(*error.args)  # the message says whether the command continues
        if PROGRAM_STOPPING in error.args:
            await asyncio.wait({task})
        raise
    finally:
        cancelled.cancel()
        if not task.done():
            task.cancel()
    return await task
