"""The built-in tools of a node: one declaration of each, from which node and gateway derive what they need to know.

The defaults are the strict ones: a tool that declares only its name and capability changes things, so a read-only node
refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec


class BuiltinTool(msgspec.Struct, frozen=True, kw_only=True):
    """What a node and its gateway know of a tool besides its schema."""

    name: str
    capability: str
    # Whether it may change anything on the machine. A read-only node refuses such a tool.
    changes: bool = True
    # Values of the parameter `action` with which it changes nothing; a read-only node allows these.
    harmless_actions: frozenset[str] = frozenset()
    # The tool it depends on: whoever denies that one denies this one as well.
    needs: str | None = None
    # Parameters that are paths.
    paths: tuple[str, ...] = ()
    # Whether it reaches every file below its paths.
    recursive: bool = False
    # Whether the node can preview a call.
    previews: bool = False
    # Whether a preview shows the content of files, so that it needs Read as well.
    shows_files: bool = True
    # Whether callers are offered it.
    listed: bool = True
    # Parameters for Farhand's own clients, which models are not shown.
    unlisted: tuple[str, ...] = ()


NODE_TOOLS: Final[Mapping[str, BuiltinTool]] = MappingProxyType(
    {
        tool.name: tool
        for tool in (
            BuiltinTool(name="Glob", capability="filesystem.list", changes=False, paths=("path",), recursive=True),
            BuiltinTool(name="Read", capability="filesystem.read", changes=False, paths=("path",)),
            BuiltinTool(name="Write", capability="filesystem.write", paths=("path",), previews=True),
            BuiltinTool(name="Edit", capability="filesystem.edit", paths=("path",), previews=True),
            BuiltinTool(name="Grep", capability="text.search", changes=False, paths=("path",), recursive=True),
            BuiltinTool(
                name="Bash",
                capability="shell.exec",
                paths=("workdir",),
                previews=True,
                shows_files=False,
                unlisted=("argv", "attached", "terminal"),
            ),
            BuiltinTool(
                name="Process",
                capability="shell.exec",
                harmless_actions=frozenset({"list", "poll", "log"}),
                needs="Bash",
                previews=True,
                shows_files=False,
                unlisted=("signal",),
            ),
            BuiltinTool(name="Trial", capability="shell.exec", needs="Bash", previews=True, listed=False),
            BuiltinTool(name="Undo", capability="filesystem.write", needs="Write", previews=True, listed=False),
        )
    }
)
