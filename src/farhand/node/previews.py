"""Previews of calls, requested by a gateway whose owner must approve them."""

from __future__ import annotations

import msgspec

from farhand.node.limits import ToolLimits
from farhand.protocol.errors import InvalidArgs
from farhand.protocol.node_tools import NODE_TOOLS
from farhand.sdk.registry import ToolRegistry
from farhand.tools.preview import Preview, preview_or_error


class PreviewQuery(msgspec.Struct):
    tool: str
    args: msgspec.Raw = msgspec.Raw(b"{}")


class PreviewQueries:
    """Previews calls of one node, within the limits of its owner; each tool previews its own calls."""

    def __init__(self, tools: ToolRegistry, limits: ToolLimits) -> None:
        self._tools = tools
        self._limits = limits

    async def preview(self, params: msgspec.Raw) -> Preview:
        """Return the preview; its note says what cannot be shown. Raises InvalidArgs."""
        try:
            question = msgspec.json.decode(params, type=PreviewQuery)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidArgs(str(error)) from None
        tool = self._tools.find(question.tool)
        if tool is None or tool.preview is None:
            return Preview()
        name = tool.spec.name
        if (refusal := self._limits.refusal(name)) is not None:
            return Preview(note=f"the call will be refused: {refusal}")
        if NODE_TOOLS[name].shows_files and (refusal := self._limits.refusal("Read")) is not None:
            return Preview(note=f"the file cannot be read: {refusal}")
        return await preview_or_error(tool.preview(question.args))
