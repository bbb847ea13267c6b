"""Running calls of the gateway's own tools."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import read_arguments
from farhand.gateway.calls.open_call import UNKNOWN, OpenCall, bare, failed, stopped
from farhand.machine.files import steering_files as steering
from farhand.protocol.calls import ToolFailure, ToolResult
from farhand.protocol.errors import InvalidArgs, ToolError
from farhand.store.tables.calls import CallRecord, CallState
from farhand.tools.tool import CallContext, Tool

log = logging.getLogger(__name__)


def context_of(record: CallRecord, principal: Principal | None, origins: tuple[str, ...] = ()) -> CallContext:
    """What a tool is told about the call it serves."""
    return CallContext(
        record.id,
        record.session_key,
        record.agent_id,
        record.credential,
        record.deadline_at - record.created_at,
        principal,
        origins,
    )


async def run(opened: OpenCall, tool: Tool) -> tuple[CallState, ToolResult] | None:
    """How a call ended; None when the gateway itself is stopping: it stays open in the record.

    Once the call is stopping, what counts is that it has stopped.
    """
    record = opened.record
    context = context_of(record, opened.principal, opened.origins)
    said = ""
    steering.allowed.set(opened.principal is not None and opened.principal.may_steer)
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
