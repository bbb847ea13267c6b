"""`gsv__Transfer`: move a file or folder between nodes and the workspace; the call stays open until it has arrived."""

from __future__ import annotations

import asyncio
from typing import Any

from farhand.gateway.nodes.endpoints import Endpoint
from farhand.gateway.transfers.transfers import AS_IT_WAS, Transfers
from farhand.protocol.calls import PROGRAM_STOPPING
from farhand.protocol.errors import Cancelled, Failed, ToolError
from farhand.protocol.names import MAIN_AGENT, source_name
from farhand.store.tables.transfers import TransferRecord, TransferState
from farhand.tools.preview import Preview
from farhand.tools.tool import CallContext, Tool, tool

# A transfer that progresses has no time limit; one that stalls ends by itself.
TIMEOUT_MS = 24 * 60 * 60 * 1000
STOPPED = "its call was stopped"


def transfer_tool(transfers: Transfers) -> Tool:
    async def transfer(source: str, destination: str, context: CallContext) -> dict[str, Any]:
        """Transfer a file or folder between connected nodes and the workspace; returns once it has arrived whole.

        Endpoints are `{nodeId}:/path/to/file` for a path on a node (relative paths start at the node's workspace) or
        `gsv:path` for the agent's workspace. Parent folders are made. A destination that is an existing folder, or ends
        with `/`, receives the file under its own name.
        """
        try:
            begun = await transfers.begin(
                context.call_id, source, destination, credential=context.credential, agent_id=context.agent_id
            )
            return transferred(await transfers.wait(begun))
        except asyncio.CancelledError as error:
            if PROGRAM_STOPPING in error.args:
                raise  # the transfer stays open in the record, like the call
            record = await transfers.cancel(context.call_id, STOPPED)
            if record is None:
                raise Cancelled(AS_IT_WAS) from None
            if record.state is TransferState.OK:
                return transferred(record)
            raise Cancelled((record.error_message or "").removeprefix(f"{STOPPED}; ")) from None

    def preview(source: str, destination: str, context: CallContext) -> Preview:
        copied, written = transfers.ends(source, destination)
        agent = context.agent_id or MAIN_AGENT
        if written.path.endswith("/"):
            written = Endpoint(written.node_id, written.path + source_name(copied.path))
        return Preview(summary=f"copies {_where(copied, agent)} to {_where(written, agent)}")

    return tool(
        transfer,
        name="gsv__Transfer",
        timeout_ms=TIMEOUT_MS,
        capability="filesystem.write",
        continues=True,
        preview=preview,
        takes_handles=True,  # the ends are stored
    )


def _where(end: Endpoint, agent: str) -> str:
    return f"{end.path!r} in the workspace of agent {agent}" if end.in_workspace else f"{end.path!r} on {end.node_id}"


def transferred(record: TransferRecord) -> dict[str, Any]:
    """Return the result of a finished transfer. Raises ToolError if it failed."""
    if record.state is TransferState.RUNNING:
        raise Failed("outcome unknown: the gateway stopped before the transfer ended, which continues after a restart")
    if record.state is not TransferState.OK:
        raise ToolError.of(record.error_kind or "failed", record.error_message or "the transfer failed")
    result: dict[str, Any] = {
        "source": record.source,
        "destination": record.destination,
        "bytesTransferred": record.bytes_done,
    }
    if record.mime is not None:
        result["mime"] = record.mime
    return result
