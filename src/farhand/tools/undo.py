"""`Undo`: reverts the file changes of a call. It is not offered to models; people and programs call it."""

# Parameter names follow those of the other node tools.
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from farhand.machine.files.files import Files
from farhand.machine.files.undo_log import UndoLog
from farhand.protocol.errors import InvalidArgs, ToolError
from farhand.protocol.node_tools import NODE_TOOLS
from farhand.tools.node_family import node_spec

if TYPE_CHECKING:
    from farhand.tools.preview import Preview

NAME: Final = "Undo"

Call = Annotated[str, Meta(description="Id of the call to undo.")]
DryRun = Annotated[bool, Meta(description="Only report what would be done.")]


class UndoTool:
    """The tool over one machine's files. It blocks; run it in a thread."""

    def __init__(self, files: Files, undo_log: UndoLog) -> None:
        self._files = files
        self._undo_log = undo_log

    def Undo(self, *, call: Call, dryRun: DryRun = False) -> dict[str, Any]:  # noqa: N802
        """Give the files that a call changed their old content back, unless they were changed since."""
        if not call:
            raise InvalidArgs("parameter 'call': must name a call")
        from farhand.machine.files.undo import undo  # noqa: PLC0415 - memory of an idle node

        return undo(self._files, self._undo_log, call, dry_run=dryRun)

    def preview_Undo(self, *, call: str, dryRun: bool) -> Preview:  # noqa: ARG002, N802
        return undo_preview(self._files, self._undo_log, call)


def undo_preview(files: Files, undo_log: UndoLog, call: str) -> Preview:
    """Preview the undo of a call: every file that the call changed, even where it would fail."""
    from farhand.machine.files.undo import changed_paths, planned_steps  # noqa: PLC0415 - a node at rest does without it
    from farhand.tools.preview import FileEffect, Preview, file_effect  # noqa: PLC0415 - the same

    try:
        steps = planned_steps(files, undo_log, call)
        return Preview(files=tuple(file_effect(step.place.real, step.now, step.then) for step in steps))
    except ToolError as error:
        try:
            paths = changed_paths(undo_log, call)
        except OSError:
            paths = []
        return Preview(files=tuple(map(FileEffect, paths)), note=f"the call would fail: {error.message}")


SPEC: Final = node_spec(NODE_TOOLS[NAME], UndoTool.Undo, skip=1)
