"""The built-in tools of a node: one declaration of each, from which node and gateway derive what they need to know.

The defaults are the strict ones: a tool that declares only its name and capability changes things and runs commands, so
a read-only node refuses it, and so does one that lends only some folders without a sandbox.
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
    # Whether it starts, changes or reveals processes, which reach files outside of the lent folders without a sandbox.
    runs_commands: bool = True
    # The tool it depends on: denying that one denies this one as well.
    needs: str | None = None
    # Parameters that are paths.
    paths: tuple[str, ...] = ()
    # Whether it reaches every file below its paths.
    recursive: bool = False
    # Whether the node can preview a call.
    previews: bool = False
    # Whether a preview or a dry run shows the content of files, so that it needs Read as well.
    shows_files: bool = True
    # Whether callers are offered it.
    listed: bool = True
    # Whether an unlisted tool is announced even where it is refused, so that callers get the node's reason.
    announced_if_refused: bool = False
    # Whether a repeated call finds what the first one did, even after the program was killed.
    continues: bool = False
    # Whether it resolves the secret handles in its arguments itself.
    takes_handles: bool = False
    # The parameter with its own time limit in milliseconds.
    timeout_parameter: str | None = None
    # Parameters for Farhand's own clients, which models are not shown.
    unlisted: tuple[str, ...] = ()


NODE_TOOLS: Final[Mapping[str, BuiltinTool]] = MappingProxyType(
    {
        tool.name: tool
        for tool in (
            BuiltinTool(
                name="Glob",
                capability="filesystem.list",
                changes=False,
                runs_commands=False,
                paths=("path",),
                recursive=True,
            ),
            BuiltinTool(name="Read", capability="filesystem.read", changes=False, runs_commands=False, paths=("path",)),
            BuiltinTool(
                name="Write", capability="filesystem.write", runs_commands=False, paths=("path",), previews=True
            ),
            BuiltinTool(name="Edit", capability="filesystem.edit", runs_commands=False, paths=("path",), previews=True),
            BuiltinTool(
                name="Grep",
                capability="text.search",
                changes=False,
                runs_commands=False,
                paths=("path",),
                recursive=True,
            ),
            BuiltinTool(
                name="Bash",
                capability="shell.exec",
                paths=("workdir",),
                previews=True,
                shows_files=False,
                continues=True,
                takes_handles=True,
                timeout_parameter="timeout",
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
            # A trial that is kept already is not kept again, so a repeated call continues.
            BuiltinTool(
                name="Trial", capability="shell.exec", needs="Bash", previews=True, listed=False, continues=True
            ),
            BuiltinTool(
                name="Undo",
                capability="filesystem.write",
                runs_commands=False,
                needs="Write",
                previews=True,
                listed=False,
                announced_if_refused=True,
            ),
        )
    }
)
