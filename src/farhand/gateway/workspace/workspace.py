"""Map paths in an agent's workspace to objects, with the global skills as a fallback.

`skills/…` is virtual: reads prefer the agent's own copy to the global one, and writes go to the agent's own copy.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import AsyncIterator
from typing import Final, Literal
from urllib.parse import unquote

import msgspec

from farhand.machine.files import steering_files as steering
from farhand.protocol.errors import InvalidArgs, NotAllowed
from farhand.protocol.names import MAIN_AGENT, validate_agent_id
from farhand.store.objects.base import AGENTS, MAX_KEY_BYTES, SKILLS, ObjectInfo, Objects, pages

Source = Literal["workspace", "agent", "global"]

MOST_CHARACTERS: Final = 4 * MAX_KEY_BYTES
_SEPARATORS: Final = re.compile(r"[/\\]")


class Found(msgspec.Struct, frozen=True):
    """Hold the object at a workspace path, and whether it is the agent's own."""

    info: ObjectInfo
    source: Source


class Folder(msgspec.Struct, frozen=True):
    """List the contents of a folder as paths from the workspace root; directories end with `/`."""

    files: list[str]
    directories: list[str]


class Workspace:
    """Access the workspaces of all agents. Every interface relies on the path checks here."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def key(self, agent_id: str | None, path: str) -> str:
        """Return the key of a file in the agent's own space, existing or not. Raises InvalidArgs, NotAllowed."""
        relative = clean(path)
        if not relative or relative == SKILLS or path.rstrip().endswith("/"):
            raise InvalidArgs(f"path must reference a file, not {path[:200]!r}")
        return f"{_root(agent_id)}{relative}"

    def writable_key(self, agent_id: str | None, path: str) -> str:
        """Return the key of a file to write or delete.

        Raises as `key`, and NotAllowed for a steering file that this caller may not change.
        """
        key = self.key(agent_id, path)
        steering.check(clean(path), path)
        return key

    async def find(self, agent_id: str | None, path: str) -> Found | None:
        """Return the object at a path; for a skill's file, the agent's own copy takes precedence."""
        relative = clean(path)
        if not relative or relative == SKILLS:
            return None
        skill = relative.startswith(f"{SKILLS}/")
        info = await self.objects.head(f"{_root(agent_id)}{relative}")
        if info is not None:
            return Found(info, "agent" if skill else "workspace")
        if skill and (info := await self.objects.head(relative)) is not None:
            return Found(info, "global")
        return None

    async def folder(self, agent_id: str | None, path: str) -> Folder | None:
        """Return the contents of a folder, or None if it has none; the root always exists."""
        relative = clean(path)
        inner = f"{relative}/" if relative else ""
        root = _root(agent_id)
        files: set[str] = set()
        directories: set[str] = set()
        async for name in self._names(f"{root}{inner}"):
            (directories if name.endswith("/") else files).add(name.removeprefix(root))
        if relative == SKILLS or relative.startswith(f"{SKILLS}/"):
            async for name in self._names(inner):
                (directories if name.endswith("/") else files).add(name)
        elif not relative and (await self.objects.list(f"{SKILLS}/", limit=1)).objects:
            directories.add(f"{SKILLS}/")
        if relative and not files and not directories:
            return None
        return Folder(sorted(files), sorted(directories))

    async def _names(self, prefix: str) -> AsyncIterator[str]:
        async for page in pages(self.objects, prefix, delimiter=True):
            for info in page.objects:
                yield info.key
            for inner in page.prefixes:
                yield inner


def clean(path: str) -> str:
    """Normalize a path. Raises NotAllowed for `..`, however it is encoded."""
    if len(path) > MOST_CHARACTERS:  # searching it for `..` would take too long
        raise InvalidArgs(f"a path has at most {MOST_CHARACTERS} characters, and not {len(path)}")
    for part in _SEPARATORS.split(unicodedata.normalize("NFKC", _unquoted(path))):
        if "".join(character for character in part if unicodedata.category(character) != "Cf").strip() == "..":
            raise NotAllowed(f"Path traversal not allowed: {path[:200]!r}; paths begin at the workspace's root")
    return "/".join(part for part in path.strip().split("/") if part not in ("", "."))


def _unquoted(path: str) -> str:
    """Decode `%2e%2e` and `%252e` as a later decoder would."""
    for _ in range(4):
        following = unquote(path)
        if following == path:
            break
        path = following
    return path


def _root(agent_id: str | None) -> str:
    try:
        return f"{AGENTS}/{validate_agent_id(agent_id or MAIN_AGENT)}/"
    except ValueError as error:
        raise InvalidArgs(str(error)) from None
