"""What a call would do, told by whoever would do it: its node, this machine, or the agents' workspace."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from farhand.gateway.catalog import Target, read_arguments
from farhand.gateway.queries import Queries
from farhand.gateway.workspace import Workspace
from farhand.protocol.errors import InvalidArgs, ToolError
from farhand.tools.preview import MachinePreviews, Preview, file_effect
from farhand.tools.tool import by_their_names

QUESTION = "preview"
SECONDS = 15.0
NODE_TOOLS = frozenset({"Write", "Edit", "Bash"})
"""The tools of which a node can tell what they would do."""
WORKSPACE_TOOLS = frozenset({"gsv__WriteFile", "gsv__EditFile", "gsv__DeleteFile"})


class Effects:
    """Tells what calls would do; a call it knows nothing of is told by its arguments alone."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._own: MachinePreviews | None = None
        self._workspace: Workspace | None = None

    def serve(self, own: MachinePreviews, workspace: Workspace) -> None:
        """Where the gateway's own tools work."""
        self._own = own
        self._workspace = workspace

    async def of(self, target: Target, args: msgspec.Raw, agent_id: str | None) -> Preview:
        """Never raises ToolError: what cannot be told is said in a note."""
        try:
            arguments = read_arguments(args)
        except InvalidArgs as error:
            return Preview(note=f"the call will fail: {error.message}")
        if not isinstance(arguments, Mapping):
            return Preview()
        if target.own is not None:
            arguments = by_their_names(arguments, target.own.aliases)
            if target.tool in WORKSPACE_TOOLS and self._workspace is not None:
                return await self._of_workspace(self._workspace, target.tool, arguments, agent_id)
            if self._own is not None and self._own.knows(target.tool):
                return await asyncio.to_thread(self._own.preview, target.tool, arguments)
            return Preview()
        if target.node is None or target.spec is None or target.tool not in NODE_TOOLS:
            return Preview()
        return await self._of_node(target.node.card.node_id, target.tool, arguments)

    async def _of_node(self, node_id: str, tool: str, arguments: Mapping[str, Any]) -> Preview:
        if QUESTION not in self._queries.answered_by(node_id):
            return Preview(note=f"node {node_id!r} cannot tell what the call would do; only its arguments are known")
        try:
            answer = await self._queries.ask(node_id, QUESTION, {"tool": tool, "args": arguments}, SECONDS)
            return msgspec.json.decode(answer, type=Preview)
        except ToolError as error:
            return Preview(note=f"node {node_id!r} did not tell what the call would do: {error.message}")
        except msgspec.MsgspecError as error:
            return Preview(note=f"node {node_id!r} told what the call would do in no readable way: {error}")

    async def _of_workspace(
        self, workspace: Workspace, tool: str, arguments: Mapping[str, Any], agent_id: str | None
    ) -> Preview:
        path = str(arguments.get("path", ""))
        try:
            key = workspace.key(agent_id, path)
            found = await workspace.find(agent_id, path)
            old = None if found is None else (await workspace.objects.get(found.info.key))[1]
        except ToolError as error:
            return Preview(note=f"it cannot be shown what would change: {error.message}")
        new: bytes | None = None
        if tool == "gsv__WriteFile":
            new = str(arguments.get("content", "")).encode(errors="replace")
        elif tool == "gsv__EditFile":
            texts = [str(arguments.get(name, "")) for name in ("oldString", "newString")]
            before, after = (text.encode(errors="replace") for text in texts)
            count = old.count(before) if old is not None and before else 0
            if old is None or count == 0 or (count > 1 and not arguments.get("replaceAll")):
                return Preview(note=f"the text to replace stands in the file {count} times, so the call will fail")
            new = old.replace(before, after)
        return Preview(files=(file_effect(key, old, new),))
