"""Preview what a call would do, by asking its node or the gateway's own tool."""

from __future__ import annotations

from typing import Final

import msgspec

from farhand.gateway.access.principal import Principal
from farhand.gateway.calls.catalog import Target, read_arguments
from farhand.gateway.calls.gateway_tools import context_of
from farhand.gateway.nodes.queries import Queries
from farhand.machine.files import steering_files as steering
from farhand.protocol.calls import ToolCall
from farhand.protocol.errors import InvalidArgs, ToolError
from farhand.protocol.node_tools import NODE_TOOLS
from farhand.protocol.untrusted import one_line
from farhand.protocol.version import MIB
from farhand.store.tables.calls import CallRecord
from farhand.tools.preview import FileEffect, Preview, preview_or_error
from farhand.tools.tool import Tool

QUESTION: Final = "preview"
SECONDS: Final = 15.0
LARGEST_PREVIEW: Final = 4 * MIB
LONGEST_LINE: Final = 4096


class CallPreviews:
    """Previews calls. For a call that its tool cannot preview, only the arguments are known."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    async def of(self, target: Target, record: CallRecord, principal: Principal | None) -> Preview:
        """Return a preview of a recorded call; its note names what cannot be shown."""
        if target.own is not None:
            return await self._of_own(target.own, record, principal)
        declared = NODE_TOOLS.get(target.tool)
        if target.node is None or target.spec is None or declared is None or not declared.previews:
            return Preview()  # nodes are not asked about other tools
        return await self._of_node(target.node.card.node_id, target.tool, record.args)

    async def changed_files(self, target: Target, call: ToolCall, principal: Principal) -> tuple[str, ...] | None:
        """Return the files that a call would change, where its arguments do not name them; None if not known."""
        record = CallRecord(
            id=call.id,
            tool=call.tool,
            args=call.args,
            session_key=call.session_key,
            agent_id=call.agent_id,
            credential=principal.id,
            route=target.kind,
            created_at=0,
            deadline_at=0,
        )
        preview = await self.of(target, record, principal)
        known = bool(preview.files or preview.summary)  # a trial may have changed nothing
        return tuple(one.path for one in preview.files) if known else None

    @staticmethod
    async def _of_own(tool: Tool, record: CallRecord, principal: Principal | None) -> Preview:
        if tool.preview is None:
            return Preview()
        try:
            arguments = read_arguments(record.args)
        except InvalidArgs as error:
            return Preview(note=f"the call would fail: {error.message}")
        if not isinstance(arguments, dict | None):
            return Preview(note="the call would fail: its arguments are not an object")
        # Same rights as the call itself, so that the preview reports the changes that would be refused.
        before = steering.allowed.set(principal is not None and principal.may_steer)
        try:
            return await preview_or_error(tool.preview(arguments or {}, context_of(record, principal)))
        finally:
            steering.allowed.reset(before)

    async def _of_node(self, node_id: str, tool: str, args: msgspec.Raw) -> Preview:
        if QUESTION not in self._queries.answered_by(node_id):
            return Preview(note=f"node {node_id!r} cannot preview calls; only the arguments are known")
        try:
            answer = await self._queries.ask(node_id, QUESTION, {"tool": tool, "args": args}, SECONDS)
            if (size := memoryview(answer).nbytes) > LARGEST_PREVIEW:
                return Preview(note=f"node {node_id!r} sent a preview of {size} bytes, which is too long to show")
            return _plain(msgspec.json.decode(answer, type=Preview))
        except ToolError as error:
            return Preview(note=f"node {node_id!r} did not preview the call: {error.message}")
        except msgspec.MsgspecError as error:
            return Preview(note=f"node {node_id!r} sent a preview that cannot be read: {error}")


def _plain(preview: Preview) -> Preview:
    """Return a node's preview with single-line fields kept to one line, since more could pass for our own text."""

    def line(text: str) -> str:
        return one_line(text, LONGEST_LINE)

    return msgspec.structs.replace(
        preview,
        files=tuple(FileEffect(line(one.path), one.before, one.diff, line(one.note)) for one in preview.files),
        cwd=None if preview.cwd is None else line(preview.cwd),
        env={line(name): value for name, value in preview.env.items()},
        note=line(preview.note),
    )
