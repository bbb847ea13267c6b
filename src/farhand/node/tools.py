"""The tools of a node, within the limits of the machine's owner."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from farhand.machine.files.undo_log import call_id
from farhand.node.limits import ToolLimits
from farhand.node.log import calls
from farhand.protocol.calls import PROGRAM_STOPPING, ToolSpec
from farhand.protocol.errors import NotAllowed, ToolError
from farhand.protocol.node_tools import NODE_TOOLS
from farhand.protocol.redaction import KnownSecrets
from farhand.sdk.context import ToolContext
from farhand.sdk.registry import RegisteredTool, ToolRegistry
from farhand.tools.node_family import node_spec
from farhand.tools.node_files import NodeFileTools
from farhand.tools.node_shell import NodeShellTools, call_secrets
from farhand.tools.schema import Parameters
from farhand.tools.trial import SPEC as TRIAL
from farhand.tools.trial import TrialTool
from farhand.tools.undo import SPEC as UNDO
from farhand.tools.undo import UndoTool


def node_tools(
    files: NodeFileTools,
    shell: NodeShellTools,
    limits: ToolLimits,
    undo: UndoTool | None = None,
    trial: TrialTool | None = None,
) -> ToolRegistry:
    registry = ToolRegistry()
    for declared in NODE_TOOLS.values():
        if not declared.listed:
            continue
        name = declared.name
        family = files if hasattr(files, name) else shell
        method = getattr(family, name)
        spec = node_spec(declared, method)
        if limits.refusal(name) is not None:
            spec = msgspec.structs.replace(spec, withheld=True)
        preview = getattr(family, f"preview_{name}") if declared.previews else None
        registry.add(_lent(spec, method, limits, preview=preview))
    if undo is not None:
        registry.add(_lent(UNDO, undo.Undo, limits, unlisted=True, preview=undo.preview_Undo))
    if trial is not None:
        spec = msgspec.structs.replace(TRIAL, withheld=limits.refusal(TRIAL.name) is not None)
        registry.add(_lent(spec, trial.Trial, limits, unlisted=True, preview=trial.preview_Trial))
    return registry


def _lent(
    spec: ToolSpec,
    method: Callable[..., Any],
    limits: ToolLimits,
    *,
    unlisted: bool = False,
    preview: Callable[..., Any] | None = None,
) -> RegisteredTool:
    """Create the tool of a method, within the limits. `preview` takes the same arguments as the method."""
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

    def parse(args: msgspec.Raw) -> dict[str, Any]:
        if refusal is not None:
            raise NotAllowed(refusal)
        arguments = parameters.read(args)
        limits.check_action(name, arguments)
        if name == UNDO.name and arguments.get("dryRun"):
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
        if inspect.iscoroutinefunction(method):
            return await _until_cancelled(ctx, method(**arguments))
        return await asyncio.to_thread(method, **arguments)

    return RegisteredTool(
        spec,
        run,
        method,
        continues=name in ("Bash", TRIAL.name),  # a trial that is kept already is not kept again
        takes_handles=name == "Bash",
        unlisted=unlisted,
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
