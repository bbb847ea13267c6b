"""Previews of calls, requested by a gateway whose owner must approve them."""

from __future__ import annotations

import msgspec

from farhand.node.limits import ToolLimits
from farhand.node.queries import decode_query
from farhand.protocol.node_tools import NODE_TOOLS
from farhand.sdk.registry import ToolRegistry
from farhand.tools.preview import Preview, preview_or_error


class PreviewQuery(msgspec.Struct):
    tool: str
    args: msgspec.Raw = msgspec.Raw(b"{}")


async def preview_call(tools: ToolRegistry, limits: ToolLimits, params: msgspec.Raw) -> Preview:
    """Return the preview that a tool makes of its call, within the limits of the owner.

    Its note says what cannot be shown. Raises InvalidArgs.
    """
    question = decode_query(params, PreviewQuery)
    tool = tools.find(question.tool)
    if tool is None or tool.preview is None:
        return Preview()
    name = tool.spec.name
    if (refusal := limits.refusal(name)) is not None:
        return Preview(note=f"the call will be refused: {refusal}")
    if NODE_TOOLS[name].shows_files and (refusal := limits.refusal("Read")) is not None:
        return Preview(note=f"the file cannot be read: {refusal}")
    return await preview_or_error(tool.preview(question.args))
