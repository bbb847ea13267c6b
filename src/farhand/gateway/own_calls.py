"""Running calls of the gateway's own tools."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from farhand.gateway.catalog import read_arguments
from farhand.gateway.open_call import UNKNOWN, OpenCall, Saying, bare, failed, stopped
from farhand.protocol.calls import ToolFailure, ToolResult
from farhand.protocol.errors import InvalidArgs, ToolError
from farhand.store.calls import CallState
from farhand.tools.tool import CallContext, Tool

log = logging.getLogger("farhand.gate")


def run_at_once(opened: OpenCall, saying: Saying | None = None) -> ToolResult | None:
    """The result of a read-only call whose tool has it at hand; None: it takes its time, or fails."""
    if opened.own is None or opened.own.at_once is None or not opened.read_only:
        return None
    try:
        arguments = read_arguments(opened.record.args)
        value = opened.own.at_once(arguments) if isinstance(arguments, dict) else None
    except ToolError:
        return None
    if value is None:
        return None
    result = msgspec.Raw(msgspec.json.encode(value))
    opened.sent = True
    if saying is not None:
        opened.words = saying.words(value, result)
    return ToolResult(ok=True, result=result)


async def run(opened: OpenCall, tool: Tool) -> tuple[CallState, ToolResult] | None:
    """How a call ended; None when the gateway itself is stopping: it stays open in the record.

    Once the call is stopping, what counts is that it has stopped.
    """
    record = opened.record
    context = CallContext(
        record.id, record.session_key, record.agent_id, record.credential, record.deadline_at - record.created_at
    )
    said = ""
    try:
        arguments = read_arguments(record.args)
        if not isinstance(arguments, dict | None):
            raise InvalidArgs(f"arguments: expected an object, got {type(arguments).__name__}")
        value = await tool.run(arguments or {}, context)
        result = ToolResult(ok=True, result=msgspec.Raw(msgspec.json.encode(value)))
    except asyncio.CancelledError:
        if opened.stopping is None:
            return None
        result = failed("stopped")
    except ToolError as error:
        opened.raised = bare(error)
        said = error.message
        result = ToolResult(ok=False, error=ToolFailure.of(error))
    except Exception as error:
        log.exception("tool %s failed on call %s", record.tool, record.id)
        result = failed(f"{record.tool} failed: {type(error).__name__}: {error}")
    if result.ok:
        return CallState.OK, result
    if opened.stopping is not None:
        state, reason = opened.stopping
        return state, stopped(state, f"{reason}; {said}" if said else reason)
    unknown = result.error is not None and result.error.message.startswith(UNKNOWN)
    return (CallState.UNKNOWN if unknown else CallState.ERROR), result
