"""What a call would do to this machine, asked by a gateway whose owner is to approve it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from farhand.machine.files import Files
from farhand.node.family import Limits
from farhand.protocol.errors import InvalidArgs
from farhand.tools.preview import MachinePreviews, Preview


class PreviewQuestion(msgspec.Struct):
    tool: str
    args: dict[str, Any] = {}


class Previews:
    """Answers for one node, within what its owner lends."""

    def __init__(self, files: Files, limits: Limits) -> None:
        self._previews = MachinePreviews(files)
        self._limits = limits

    async def preview(self, params: msgspec.Raw) -> Preview:
        """Raises InvalidArgs for a question that cannot be read."""
        try:
            question = msgspec.json.decode(params, type=PreviewQuestion)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidArgs(str(error)) from None
        if (refusal := self._limits.refusal(question.tool)) is not None:
            return Preview(note=f"the call will be refused: {refusal}")
        if not self._previews.knows(question.tool):
            return Preview()
        if question.tool != "Bash" and (refusal := self._limits.refusal("Read")) is not None:
            return Preview(note=f"the file cannot be read: {refusal}")
        return await asyncio.to_thread(self._previews.preview, question.tool, question.args)
