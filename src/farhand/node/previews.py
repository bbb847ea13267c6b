"""What a call would do to this machine, asked by a gateway whose owner is to approve it."""

from __future__ import annotations

import msgspec

from farhand.node.limits import ToolLimits
from farhand.protocol.errors import InvalidArgs
from farhand.sdk.registry import ToolRegistry
from farhand.tools.preview import Preview, preview_or_error

_SHOWS_CONTENT = ("Write", "Edit")


class PreviewQuery(msgspec.Struct):
    tool: str
    args: msgspec.Raw = msgspec.Raw(b"{}")


class PreviewQueries:
    """Answers for one node, within what its owner lends: each tool previews its own calls."""

    def __init__(self, tools: ToolRegistry, limits: ToolLimits) -> None:
        self._tools = tools
        self._limits = limits

    async def preview(self, params: msgspec.Raw) -> Preview:
        """Return the preview; what cannot be shown is said in its note. Raises InvalidArgs."""
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
        if name in _SHOWS_CONTENT and (refusal := self._limits.refusal("Read")) is not None:
            return Preview(note=f"the file cannot be read: {refusal}")
        return await preview_or_error(tool.preview(question.args))
