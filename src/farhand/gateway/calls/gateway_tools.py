"""Run calls of the gateway's own tools."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from functools import partial

import msgspec

from farhand.gateway.access.principal import Principal
from farhand.gateway.access.secrets import Secrets
from farhand.gateway.calls.catalog import read_arguments
from farhand.gateway.calls.open_call import UNKNOWN, CallProgress, OpenCall, bare
from farhand.gateway.calls.state import CallEvent
from farhand.machine.files import steering_files as steering
from farhand.protocol.calls import ToolResult
from farhand.protocol.errors import InvalidArgs, ToolError
from farhand.protocol.secret_handles import substituted
from farhand.protocol.untrusted import one_line
from farhand.store.tables.calls import CallRecord
from farhand.tools import trial
from farhand.tools.tool import CallContext, Tool

log = logging.getLogger(__name__)

LONGEST_MESSAGE = 500


def context_of(record: CallRecord, principal: Principal | None, origins: tuple[str, ...] = ()) -> CallContext:
    """Return what a tool may know about the call it serves."""
    return CallContext(
        record.id,
        record.session_key,
        record.agent_id,
        record.credential,
        record.deadline_at - record.created_at,
        principal,
        origins,
    )


def report_progress(opened: OpenCall, progress: float, total: float | None, message: str) -> None:
    """Store the progress of a call of a gateway tool. The numbers are not trusted: an MCP server may have sent them."""
    whole = total if total is not None and math.isfinite(total) and total > 0 else max(progress, 1.0)
    if math.isfinite(progress) and 0 <= progress <= whole:
        opened.set_progress(
            CallProgress(progress, whole, one_line(message, LONGEST_MESSAGE), time.time_ns() // 1_000_000)
        )


async def run(opened: OpenCall, tool: Tool, handles: Secrets) -> tuple[CallEvent, ToolResult | str] | None:
    """Run a tool and return what happened, with the result or the reason.

    Returns None when the task is cancelled because the gateway stops: the call stays open in the record.
    """
    record = opened.record
    context = msgspec.structs.replace(
        context_of(record, opened.principal, opened.origins), progress=partial(report_progress, opened)
    )
    steering.allowed.set(opened.principal is not None and opened.principal.may_steer)
    message = ""
    secrets: dict[str, str] = {}
    try:
        arguments = read_arguments(record.args)
        if not isinstance(arguments, dict | None):
            raise InvalidArgs(f"arguments: expected an object, got {type(arguments).__name__}")
        if opened.keeps:
            arguments = read_arguments(trial.keeping(opened.keeps))
        else:
            secrets = handles.values(record.id, record.args, record.tool)
        if secrets and not tool.takes_handles:
            arguments = substituted(arguments, secrets)
        caller = trial.caller_name(opened.asker or record.asker)
        value = await tool.run(arguments or {}, msgspec.structs.replace(context, secrets=secrets, trial_caller=caller))
        body = handles.known(secrets.values(), tool.server).redact(msgspec.json.encode(value))
        return CallEvent.SUCCEEDED, ToolResult(ok=True, result=msgspec.Raw(body))
    except asyncio.CancelledError:
        if not opened.stopping:
            return None
        return CallEvent.STOPPED, opened.stop_reason
    except ToolError as error:
        opened.raised = bare(error)
        message = handles.known(secrets.values(), tool.server).redact_text(error.message)
        result = ToolResult.failed(error.kind.value, message)
    except Exception as error:
        log.exception("tool %s failed on call %s", record.tool, record.id)
        said = handles.known(secrets.values(), tool.server).redact_text(str(error))
        result = ToolResult.failed("failed", f"{record.tool} failed: {type(error).__name__}: {said}")
    if opened.stopping:
        return CallEvent.STOPPED, f"{opened.stop_reason}; {message}" if message else opened.stop_reason
    unknown = result.error is not None and result.error.message.startswith(UNKNOWN)
    return (CallEvent.LOST if unknown else CallEvent.FAILED), result
